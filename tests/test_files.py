"""Tables in files: what their cells are, and that no row's answer depends on the other rows of its file."""

import datetime
from decimal import Decimal
import runpy
import shlex

from hypothesis import given, settings, strategies as st
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees import cli
from jtrees.cli.files import DataError, Rules, read_rows, rules_of
from jtrees.cli.parser import parse
from jtrees.cli.tables import guess, read_labelled, usable
from jtrees.estimators import TreeRegressor
from jtrees.tables import ColumnsWarning, FrameModel, TableEncoder, schema
from jtrees.tables.cells import MISSING
from jtrees.tables.inference import inferred

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),  # fits with Adam
    pytest.mark.filterwarnings("ignore::jtrees.tables.ColumnsWarning"),
]

N = 120


def table(seed=0, n=N):
    """Cells of all kinds as text, and a target."""
    rng = np.random.default_rng(seed)
    cells = {
        "code": rng.choice(["01", "02", "13", "2A"], n),
        "flag": rng.choice(["TRUE", "FALSE", "maybe"], n),
        "sure": rng.choice(["True", "FALSE"], n),
        "price": [f"${v:,}" for v in rng.integers(100, 9000, n)],
        "share": [f"{v}%" for v in rng.integers(0, 100, n)],
        "size": [f"{v:.2f}" for v in rng.normal(size=n)],
        "count": rng.integers(0, 9, n).astype(str),
        "day": (np.datetime64("2024-01-01") + rng.integers(0, 300, n)).astype(str),
        "when": [f"{d:02}/{m:02}/2024" for d, m in zip(rng.integers(1, 29, n), rng.integers(1, 13, n), strict=True)],
        "moment": [f"2024-05-{d:02}T{h:02}:30:00Z" for d, h in rng.integers(1, 24, (n, 2))],
        "city": [f"city {i}" for i in rng.integers(0, 14, n)],
        "region": rng.choice(["NA", "EU", "other", "missing"], n),
        "id": [str(10**18 + i) for i in rng.integers(0, 30, n)],
    }
    cells["when"][0] = "28/02/2024"  # so that the order of day and month is plain
    cells["y"] = [
        str(int(c == "2A") * 10 + int(f == "maybe") * 5 + i % 3)
        for i, (c, f) in enumerate(zip(cells["code"], cells["flag"], strict=True))
    ]
    return pd.DataFrame(cells)


def written(folder, frame, name="table.csv", **how):
    frame.to_csv(folder / name, index=False, **how)
    return folder / name


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """The encoder of a file, as the command line fits it, and the file's features."""
    file = written(tmp_path_factory.mktemp("files"), table())
    frame = read_labelled(file, "y", Rules(missing=("", "?")))
    return encoded(frame, frame.y.to_numpy(float))


def encoded(frame, y=None):
    """The encoder of the rows of a file, as the command line fits it, and their features."""
    return TableEncoder.fit(frame.x, y, columns=inferred(frame.x, **frame.reading)[0])


def test_kinds_of_a_file(fitted):
    columns, _ = fitted
    kinds = {name: column.kind for name, column in columns.schema.columns.items()}
    assert kinds == {
        "code": "text",
        "flag": "text",
        "sure": "boolean",
        "price": "number",
        "share": "number",
        "size": "number",
        "count": "number",
        "day": "date",
        "when": "date",
        "moment": "date",
        "city": "text",
        "region": "text",
        "id": "text",
    }
    assert columns.schema.columns["code"].levels == ("01", "02", "13", "2A")
    assert "NA" in columns.schema.columns["region"].levels  # which is no missing value here


@pytest.mark.slow
@given(st.data())
@settings(max_examples=25, deadline=None)
def test_pieces_of_a_file_have_the_features_of_the_whole(fitted, tmp_path_factory, data):
    columns, _ = fitted
    folder = tmp_path_factory.mktemp("pieces")
    whole = table(seed=data.draw(st.integers(0, 5)))
    gaps = data.draw(st.lists(st.tuples(st.integers(0, N - 1), st.sampled_from(list(whole))), max_size=30))
    for row, name in gaps:
        whole.loc[row, name] = None
    read = lambda frame: read_rows(written(folder, frame), Rules())[0]
    expected = columns.transform(read(whole))
    cuts = sorted(data.draw(st.sets(st.integers(1, N - 1), max_size=20)))
    for low, high in zip([0, *cuts], [*cuts, N], strict=True):
        np.testing.assert_array_equal(columns.transform(read(whole.iloc[low:high])), expected[low:high])
    rows = data.draw(st.lists(st.integers(0, N - 1), min_size=1, max_size=4))
    np.testing.assert_array_equal(columns.transform(read(whole.iloc[rows])), expected[rows])


def test_features_of_a_frame_are_those_of_its_file(fitted, tmp_path):
    columns, _ = fitted
    cells = table(seed=1)
    expected = columns.transform(read_rows(written(tmp_path, cells), Rules())[0])
    np.testing.assert_array_equal(columns.transform(cells), expected)
    typed = cells.assign(
        sure=cells["sure"].str.lower() == "true",
        price=cells["price"].str.strip("$").str.replace(",", "").astype(int),
        size=cells["size"].astype(float),
        day=pd.to_datetime(cells["day"]),
        when=pd.to_datetime(cells["when"], format="%d/%m/%Y"),
        city=cells["city"].astype("category"),
    )
    np.testing.assert_array_equal(columns.transform(typed), expected)


def test_a_frame_of_text_has_the_schema_of_its_file(fitted, tmp_path):
    encoder, features = fitted
    cells = table().drop(columns="y")
    found = schema(cells)
    assert {name: column for name, column in found.columns.items() if column.note != "numbers in text"} == {
        name: encoder.schema.columns[name] for name in cells if name not in ("size", "count")
    }
    np.testing.assert_array_equal(TableEncoder.fit(cells, table()["y"].astype(float))[1], features)


def test_the_numpy_file_reads_cells_as_the_model_does(fitted, tmp_path):
    columns, features = fitted
    weights = np.random.default_rng(0).normal(size=(3, features.shape[1])) / features.std(0).clip(1e-3)
    tree = jtrees.ObliqueTree(
        np.float32(weights), np.float32(-weights @ features.mean(0)), jtrees.leaves.Values(np.float32([1, 2, 3, 4]))
    )
    model = FrameModel(tree, columns)
    jtrees.export.to_numpy(model, tmp_path / "model.py")
    exported = runpy.run_path(str(tmp_path / "model.py"))
    rows = table(seed=2)
    rows.loc[::7, ["price", "day", "city", "size"]] = None
    rows.loc[3, "price"] = "?"
    np.testing.assert_array_equal(exported["leaf"](rows), model.leaf_index(rows))
    assert len(set(model.leaf_index(rows))) > 1
    with pytest.raises(ValueError, match="got 'forty'"):
        exported["predict"](rows.assign(size="forty"))
    with pytest.raises(ValueError, match="x must hold values of kind date, got '2024-01-01T00:00Z'"):
        exported["predict"](rows.assign(day="2024-01-01T00:00Z"))


@pytest.mark.slow
def test_a_row_predicted_alone_and_in_a_file(tmp_path, capsys):
    file, model = written(tmp_path, table()), tmp_path / "m.jtrees"
    given = ["fit", file, "--target", "y", "--task", "regression", "--out", model]
    given += ["--missing", "--set", "depth=2", "starts=1", "epochs=20", "leaves=constant"]
    assert cli.main([str(one) for one in given]) == 0
    said = capsys.readouterr().out
    assert "price: number" in said and "numbers in text such as '$" in said and "dates %d/%m/%Y in text such as" in said

    def predicted(frame):
        assert cli.main(["predict", str(model), str(written(tmp_path, frame, "rows.csv"))]) == 0
        return capsys.readouterr().out.splitlines()[1:]

    rows = table(seed=3).head(8).drop(columns="y")
    whole = predicted(rows)
    assert len(whole) == 8
    for i in range(8):
        assert predicted(rows.iloc[[i]]) == [whole[i]]
    assert predicted(rows[rows["code"] != "2A"]) == [
        one for one, c in zip(whole, rows["code"], strict=True) if c != "2A"
    ]


# --- Reading of files ------------------------------------------------------------------------------------------------


def rows_of(tmp_path, text, **rules):
    file = tmp_path / "t.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_rows(file, Rules(**rules))


def test_an_empty_cell_of_one_column_is_a_row(tmp_path):
    frame, _ = rows_of(tmp_path, "a\n1\n\n3\n\n")
    assert frame["a"].tolist() == ["1", None, "3", None]
    for text in ("a,b\n1,2\n\n,\n3,4\n\n", "\na,b\n1,2\n,\n\n\n3,4"):  # between several columns it is none, anywhere
        assert rows_of(tmp_path, text)[0]["a"].tolist() == ["1", None, "3"]


def test_spaces_and_missing_values(tmp_path):
    text = "a,b\nYes ,NA\nYes, n/a\n No,-\n"
    frame, said = rows_of(tmp_path, text)
    assert frame["a"].tolist() == ["Yes", "Yes", "No"] and frame["b"].tolist() == ["NA", "n/a", "-"]
    assert said == ["spaces at the ends of cells are left out, 1 times, in 'a'"]
    for missing, levels in ((MISSING, {"-"}), (("-",), {"NA", "n/a"})):
        file = written(tmp_path, pd.concat([frame] * 10))
        assert set(read_labelled(file, "b", Rules(missing=missing)).y.dropna()) == levels
        column = encoded(read_labelled(file, "a", Rules(missing=missing)))[0].schema.columns["b"]
        assert set(column.training_levels) == levels and column.missing == 30 - 10 * len(levels)


def test_missing_values_of_the_command_line_are_added_to_the_list():
    fit = ["fit", "t.csv", "--target", "y", "--out", "m"]
    rules = lambda *given: rules_of(parse([*fit, *given]))
    assert rules().missing == MISSING and rules("--missing").missing == ("",)
    assert rules("--missing", "-", "none").missing == (*MISSING, "-", "none")


def test_numbers_among_texts_are_refused_with_all_texts_in_csv_and_parquet(tmp_path):
    cells = pd.DataFrame({"age": [*map(str, range(20, 58)), "-", "n.a."], "y": np.arange(40) / 8})
    said = r"the texts '-', 'n.a.': use --columns COLUMN=text, or --missing for missing values"
    cells.to_parquet(tmp_path / "table.parquet")
    for file in (written(tmp_path, cells), tmp_path / "table.parquet"):
        with pytest.raises(DataError, match=said):
            usable(read_labelled(file, "y"), "regression")
        frame, _ = usable(read_labelled(file, "y", Rules(missing=(*MISSING, "-", "n.a."))), "regression")
        assert TableEncoder.fit(frame.x, columns=frame.schema)[0].feature_names == ["age", "[age missing]"]
    with pytest.raises(DataError, match=r"got '-' in row 38; it holds numbers or dates, and the texts '-', 'n\.a\.'"):
        usable(read_labelled(written(tmp_path, cells[["y", "age"]]), "age"), "regression")


def test_european_thousands_are_read_alike_in_features_and_targets(tmp_path):
    prices = [f"{1000 + 37 * i:,} €".replace(",", ".") if i % 2 else f"{900 + i} €" for i in range(40)]
    numbers = [1000 + 37 * i if i % 2 else 900 + i for i in range(40)]
    file = written(tmp_path, pd.DataFrame({"a": prices, "b": np.arange(40) % 7, "y": prices}))
    frame = read_labelled(file, "y")
    assert frame.y.tolist() == encoded(frame)[1][:, 0].tolist() == numbers
    said = "'1.037 €' is read as 1037, and may mean 1.037: --columns 'y=decimal point' reads it otherwise"
    assert said in frame.changes[0]
    columns = encoded(frame)[0]
    assert "'1.037 €' is read as 1037, and may mean 1.037" in columns.described()["a"]
    rows = pd.DataFrame({"a": ["1.983 €", "955 €", "1.983,50 €"], "b": "1"})
    assert columns.transform(rows)[:, 0].tolist() == [1983, 955, 1983.5]
    assert read_labelled(file, "y", Rules(decimal=".")).y[1] == 1.037
    frame = pd.DataFrame({"a": prices})
    assert TableEncoder.fit(frame)[1][:, 0].tolist() == numbers


def test_encodings(tmp_path):
    latin = "a,b\nZürich,1\n".encode("latin-1")
    assert rows_of(tmp_path, latin, encoding="latin-1")[0]["a"].tolist() == ["Zürich"]
    with pytest.raises(DataError, match=r"as utf-8 \(byte 0xfc at 5\): try --encoding latin-1"):
        rows_of(tmp_path, latin)
    with pytest.raises(DataError, match="--encoding must be the name of an encoding, got 'klingon'"):
        rows_of(tmp_path, latin, encoding="klingon")
    assert list(rows_of(tmp_path, b"\xef\xbb\xbfa,b\n1,2\n")[0]) == ["a", "b"]
    unicode = "a,b\nZürich,1\n".encode("utf-16")
    assert rows_of(tmp_path, unicode, encoding="utf-16")[0]["a"].tolist() == ["Zürich"]
    for encoding in ("utf-8", "latin-1"):
        with pytest.raises(DataError, match=f"as {encoding}, because it is UTF-16: use --encoding utf-16"):
            rows_of(tmp_path, unicode, encoding=encoding)


OTHER_FORMATS = {
    "gzip": (lambda file, frame: frame.to_csv(file, compression="gzip"), "a gzip file: decompress it"),
    "zip": (lambda file, frame: frame.to_csv(file, compression="zip"), "an Excel or zip file: save the table as CSV"),
    "parquet": (lambda file, frame: frame.to_parquet(file), "Parquet under another name: give it the ending .parquet"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_files_of_other_formats_are_refused_with_a_remedy(tmp_path, name, encoding):
    write, message = OTHER_FORMATS[name]
    write(file := tmp_path / "t.csv", pd.DataFrame({"a": range(9), "b": "x"}))
    with pytest.raises(DataError, match=f"t.csv must be CSV or Parquet, got {message}"):
        read_rows(file, Rules(encoding=encoding))


def test_columns_that_are_said_to_be_text(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("a,b\n" + "1,2\n2,3\n" * 20)
    frame = read_labelled(file, "b", Rules(columns={"a": "text"}))
    assert frame.x["a"].tolist()[:2] == ["1", "2"] and encoded(frame)[0].schema.columns["a"].levels == ("1", "2")
    with pytest.raises(DataError, match="--columns must name columns among a, b; got 'c'"):
        read_labelled(file, "b", Rules(columns={"c": "text"}))


def test_labels_keep_their_text(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("a,y\n" + "1,01\n2,02\n" * 20)
    assert read_labelled(file, "y").y.tolist()[:2] == ["01", "02"]
    file.write_text("a,y\n" + "1,2024-01-01\n2,2024-01-02\n" * 20)
    assert read_labelled(file, "y").y.tolist()[:2] == ["2024-01-01", "2024-01-02"]
    file.write_text("a,y\n" + '1,"$1,200"\n2,$7\n' * 20)
    frame = read_labelled(file, "y")
    assert frame.y.tolist()[:2] == [1200, 7] and frame.changes == (
        "target 'y': numbers in text such as '$1,200'; '$1,200' is read as 1200, and may mean 1.2: --columns "
        "'y=decimal comma' reads it otherwise",
    )


def test_a_decimal_comma_and_the_order_of_dates_are_remembered(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("a;b;y\n" + "".join(f"{i % 9},5;0{1 + i % 5}/03/2024;{i}\n" for i in range(40)))
    frame = read_labelled(file, "y", Rules(";", ",", columns={"b": "%d/%m/%Y"}))
    columns = encoded(frame)[0]
    rows, _ = read_rows(file, Rules(";"))
    np.testing.assert_array_equal(columns.transform(rows[:2])[:, 0], [0.5, 1.5])
    np.testing.assert_array_equal(columns.transform(rows[:2])[:, 1], [0, 1])
    points = pd.DataFrame({"a": ["0.5"], "b": ["01/03/2024"]})
    with pytest.raises(ValueError, match=r"got '0\.5' in row 0"):
        columns.transform(points)


@pytest.mark.slow
def test_a_prediction_may_read_numbers_and_gaps_by_other_rules_than_the_fit(tmp_path, capsys):
    given = [tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "m.jtrees", "--set", "depth=1", "epochs=5"]
    (tmp_path / "t.csv").write_text("a;b;y\n" + "".join(f"{i % 9},5;{'xyz'[i % 3]};{i}\n" for i in range(60)))
    assert cli.main(["fit", *map(str, given), "--separator", ";", "--decimal", ","]) == 0

    def predicted(text, *options):
        (tmp_path / "rows.csv").write_text(text)
        capsys.readouterr()
        arguments = ["predict", str(tmp_path / "m.jtrees"), str(tmp_path / "rows.csv"), "--separator", ";", *options]
        code = cli.main(arguments)
        said = capsys.readouterr()
        return said.out if code == 0 else said.err

    expected = predicted("a;b\n0,5;x\n;y\nNA;\n")
    assert len(expected.splitlines()) == 4
    assert predicted("a;b\n0.5;x\n;y\n?;NA\n", "--decimal", ".") == expected
    assert predicted("a;b\n0,5;x\n-;y\n none;none\n", "--missing", "-", "none") == expected
    assert "x must hold numbers such as '0,5' in column 'a', got '0.5' in row 0" in predicted("a;b\n0.5;x\n")


@pytest.mark.slow
def test_columns_that_may_mean_something_else_are_named_with_their_options(tmp_path, capsys):
    cells = table().drop(columns="when").assign(when="03/04/2024", price=["$1,200", "$2,300"] * (N // 2))
    cells.loc[::2, "when"] = "05/06/2024"
    given = ["fit", written(tmp_path, cells), "--target", "y", "--out", tmp_path / "m.jtrees"]
    given += ["--recipe", "GET", "--set", "depth=1", "starts=1", "epochs=5"]
    assert cli.main(list(map(str, given))) == 0
    line = capsys.readouterr().err.splitlines()[-1]
    said, _, options = line.removesuffix(" reads them otherwise").partition(": --columns ")
    assert "'price' ('$1,200' is read as 1200, and may mean 1.2)" in said and "numbers in text" not in said
    assert shlex.split(options) == ["price=decimal comma", "id=number", "when=%d/%m/%Y"]
    assert cli.main([*map(str, given), "--columns", *shlex.split(options)]) == 0
    assert "may mean something else" not in capsys.readouterr().err


@pytest.mark.slow
def test_new_gaps_and_levels_are_one_line_each(tmp_path, capsys):
    file, model = written(tmp_path, table()), tmp_path / "m.jtrees"
    given = ["fit", file, "--target", "y", "--out", model]
    given += ["--recipe", "GET", "--set", "depth=1", "starts=1", "epochs=5"]
    assert cli.main([str(one) for one in given]) == 0
    capsys.readouterr()
    rows = table(seed=4).head(4).assign(city="nowhere", size=None)
    assert cli.main(["predict", str(model), str(written(tmp_path, rows, "rows.csv"))]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "left out" not in line]
    assert [line.split(": ", 2)[1] for line in lines] == [
        "x has missing values where the training rows had none, replaced by typical values",
        "x has levels that the training rows did not have",
    ]
    assert ColumnsWarning.__doc__


# --- Parquet ---------------------------------------------------------------------------------------------------------


def test_parquet_has_decimals_times_and_a_named_index(tmp_path):
    rng = np.random.default_rng(0)
    hours = rng.integers(0, 24, 60)
    frame = pd.DataFrame(
        {
            "at": [datetime.time(int(hour), 30) for hour in hours],
            "cost": [Decimal(int(cents)) / 100 if cents else None for cents in rng.integers(0, 9, 60)],
            "y": [Decimal(int(hour)) / 4 for hour in hours],
        },
        index=pd.Index(np.arange(60) + 7, name="customer"),
    )
    frame.to_parquet(tmp_path / "table.parquet")
    whole = read_labelled(tmp_path / "table.parquet", "y")
    assert guess(whole.y)[0] == "regression" and whole.y.tolist() == (hours / 4).tolist()
    usable_rows, _ = usable(whole, "regression")
    columns, features = TableEncoder.fit(usable_rows.x, usable_rows.y.to_numpy())
    assert columns.feature_names == ["customer", "at", "cost", "[cost missing]"]
    assert features[:, 0].tolist() == list(range(7, 67)) and "durations in days" in str(columns.schema.columns["at"])
    np.testing.assert_allclose(features[:, 1], (hours + 0.5) / 24, rtol=1e-15)
    np.testing.assert_array_equal(columns.transform(read_rows(tmp_path / "table.parquet", Rules())[0]), features)


# --- Exported files --------------------------------------------------------------------------------------------------


DAYS = pd.to_datetime(["2024-01-01", "2024-01-02"])
BERLIN = pd.date_range("2024-03-01", periods=40, tz="Europe/Berlin")
TIMES = [datetime.time(hour, 59, 59, 999) for hour in range(24)]


def stump(frame):
    """A model whose leaf says whether the first feature of a frame with one column is above a half."""
    columns, features = TableEncoder.fit(frame)
    weights = np.zeros((1, features.shape[1]), np.float32)
    weights[0, 0] = 1
    leaves = jtrees.leaves.Values(np.float32([1, 2]))
    return FrameModel(jtrees.ObliqueTree(weights, np.float32([-0.5]), leaves), columns)


@pytest.mark.parametrize(
    ("training", "rows"),
    [
        (pd.Categorical([0.1, 0.2] * 20), np.float32([0.1, 0.2, 0.3])),
        (pd.Categorical([0.1, 0.2] * 20), pd.Categorical(np.float32([0.2, 0.1]))),
        (pd.Categorical(pd.to_datetime(["2024-01-01", "2024-01-02"] * 20)), pd.Categorical(DAYS[::-1].as_unit("s"))),
        (["\0", "a", "b"] * 10 + ["c"], ["\0", "a", "new"]),
        (pd.to_timedelta(np.arange(40) % 7, "us"), pd.to_timedelta([3, 5], "us")),
        (BERLIN, BERLIN[:3].tz_convert("UTC")),
        (TIMES, TIMES[::-1]),
        (TIMES, pd.to_timedelta([11, 13], "h")),
    ],
    ids=[
        "float32",
        "categories of float32",
        "categories of dates",
        "null character",
        "durations",
        "zones",
        "times",
        "times as durations",
    ],
)
def test_the_numpy_file_gives_the_leaves_of_the_model(training, rows, tmp_path):
    model = stump(pd.DataFrame({"a": training}))
    jtrees.export.to_numpy(model, tmp_path / "model.py")
    exported = runpy.run_path(str(tmp_path / "model.py"))
    for values in (training, rows):
        frame = pd.DataFrame({"a": values})
        np.testing.assert_array_equal(exported["leaf"](frame), model.leaf_index(frame))


@pytest.mark.parametrize(
    ("training", "refused"),
    [
        (pd.date_range("2024-01-01", periods=40), [5, 6]),
        ([True, False] * 20, [2, 0]),
        (np.arange(40.0) ** 2, [np.inf, 0]),
        (np.arange(40.0) ** 2, pd.to_timedelta([3, 5], "h")),
        (pd.to_timedelta(np.arange(40) % 7, "h"), [3.0, 5.0]),
        (pd.to_timedelta(np.arange(40) % 7, "h"), ["3", "5"]),
    ],
    ids=["dates", "booleans", "numbers", "no durations", "durations", "text of durations"],
)
def test_the_numpy_file_refuses_what_the_model_refuses(training, refused, tmp_path):
    model, rows = stump(pd.DataFrame({"a": training})), pd.DataFrame({"a": refused})
    jtrees.export.to_numpy(model, tmp_path / "model.py")
    for predict in (model.predict, runpy.run_path(str(tmp_path / "model.py"))["predict"]):
        with pytest.raises(ValueError, match="x must hold"):
            predict(rows)


def test_c_refuses_a_level_with_a_null_character(tmp_path):
    with pytest.raises(ValueError, match=r"levels must have no null character in C, got .* of the column 'a'"):
        jtrees.export.to_c(stump(pd.DataFrame({"a": ["a\0b", "a"] * 20})), tmp_path / "model.h")


# --- What an attack found --------------------------------------------------------------------------------------------


def test_a_file_has_columns_of_different_names(tmp_path):
    for header in ("y,y", "a,a ", "a, a"):
        with pytest.raises(DataError, match=r"must have columns of different names, got '[ay]' twice"):
            rows_of(tmp_path, f"{header}\n1,2\n")


def test_dates_with_an_offset_take_the_order_that_is_said(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("when,y\n" + "".join(f"0{1 + i % 5}/03/2024 12:00+01:00,{i}\n" for i in range(40)))
    frame = read_labelled(file, "y", Rules(columns={"when": "%d/%m/%Y"}))
    columns = encoded(frame)[0]
    rows = read_rows(file, Rules())[0]
    expected = [[i % 5 + 0.5] for i in range(5)]
    assert columns.transform(rows[:5])[:, :1].tolist() == expected == columns.transform(frame.x[:5])[:, :1].tolist()


def test_text_of_a_file_is_read_once(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("share;size;y\n" + "".join(f"{i % 9}.5%;{i % 7};{i}\n" for i in range(40)))
    frame, _ = usable(read_labelled(file, "y", Rules(";", ",")), "regression")
    columns = encoded(frame)[0]
    assert columns.schema.columns["share"].kind == "text"  # not numbers by another rule


def test_a_model_of_numbers_reads_a_file_by_place_and_cell_by_cell(tmp_path, capsys):
    x = np.random.default_rng(0).normal(size=(60, 2))
    jtrees.save(TreeRegressor(jtrees.DGT(depth=1, epochs=3), random_state=0).fit(x, x[:, 0]), tmp_path / "m.jtrees")
    (tmp_path / "rows.csv").write_text("a,b\n0.5,1\n2,3\n")
    assert cli.main(["predict", str(tmp_path / "m.jtrees"), str(tmp_path / "rows.csv")]) == 0
    capsys.readouterr()
    (tmp_path / "rows.csv").write_text("a,b\n0.5,1\ntrue,3\n")
    assert cli.main(["predict", str(tmp_path / "m.jtrees"), str(tmp_path / "rows.csv")]) == 2
    assert "x must hold numbers in column 'a', got 'true' in row 1" in capsys.readouterr().err


def test_a_target_that_is_no_number_is_blamed_by_its_row(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("a,y\n" + "".join(f"{i % 7},{'forty' if i == 17 else i / 8}\n" for i in range(40)))
    with pytest.raises(DataError, match="finite numbers for --task regression, got 'forty' in row 17"):
        usable(read_labelled(file, "y"), "regression")


def test_a_fixed_offset_is_no_zone_whatever_it_is_called():
    east = datetime.timezone(datetime.timedelta(hours=-4), "EST")
    frame = pd.DataFrame({"a": [datetime.datetime(2024, 3, 1 + i % 9, 12, tzinfo=east) for i in range(40)]})
    columns, features = TableEncoder.fit(frame)
    assert columns.schema.columns["a"].zone == "offsets"
    np.testing.assert_array_equal(columns.transform(frame), features)
