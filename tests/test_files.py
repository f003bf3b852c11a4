"""Tables in files: what their cells are, and that no row's answer depends on the other rows of its file."""

import datetime
from decimal import Decimal
import gzip

from hypothesis import given, settings, strategies as st
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees.cli.files import DataError, Rules, read_rows
from jtrees.cli.tables import as_options, guess, read_labelled, targets_of, usable
from jtrees.estimators import TreeRegressor
from jtrees.tables import ColumnsWarning, TableEncoder, schema
from jtrees.tables.cells import MISSING
from jtrees.tables.inference import inferred
from tests import recipes, tables
from tests.houses import run

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
    y = 10 * (cells["code"] == "2A") + 5 * (cells["flag"] == "maybe") + np.arange(n) % 3
    cells["y"] = y.astype(str)
    return pd.DataFrame(cells)


def written(folder, frame, name="table.csv", **how):
    frame.to_csv(folder / name, index=False, **how)
    return folder / name


def encoded(frame, y=None):
    """The encoder of the rows of a file, as the command line fits it, and their features."""
    return TableEncoder.fit(frame.x, y, columns=inferred(frame.x, **frame.reading)[0])


@pytest.fixture(scope="module")
def fitted_file(tmp_path_factory):
    file = written(tmp_path_factory.mktemp("files"), table())
    frame = read_labelled(file, "y", Rules(missing=("", "?")))
    return encoded(frame, frame.y.to_numpy(float))


def test_kinds_of_a_file(fitted_file):
    columns = fitted_file[0].schema.columns
    kinds = dict.fromkeys(columns, "text") | dict.fromkeys(("price", "share", "size", "count"), "number")
    kinds |= dict.fromkeys(("day", "when", "moment"), "date") | {"sure": "boolean"}
    assert {name: column.kind for name, column in columns.items()} == kinds
    assert columns["code"].levels == ("01", "02", "13", "2A")
    assert "NA" in columns["region"].levels  # which is no missing value here


@given(st.data())
@settings(max_examples=4, deadline=None)
def test_pieces_of_a_file_have_the_features_of_the_whole(fitted_file, tmp_path_factory, data):
    encoder, _ = fitted_file
    folder = tmp_path_factory.mktemp("pieces")
    full = table(seed=data.draw(st.integers(0, 5)))
    gaps = data.draw(st.lists(st.tuples(st.integers(0, N - 1), st.sampled_from(list(full))), max_size=30))
    for row, name in gaps:
        full.loc[row, name] = None
    read = lambda frame: read_rows(written(folder, frame), Rules())[0]
    expected = encoder.transform(read(full))
    cuts = sorted(data.draw(st.sets(st.integers(1, N - 1), max_size=4)))
    rows = data.draw(st.lists(st.integers(0, N - 1), min_size=1, max_size=4))
    pieces = [*(range(*piece) for piece in zip([0, *cuts], [*cuts, N], strict=True)), rows]
    for piece in map(list, pieces):
        np.testing.assert_array_equal(encoder.transform(read(full.iloc[piece])), expected[piece])


def test_features_of_a_frame_are_those_of_its_file(fitted_file, tmp_path):
    encoder, features = fitted_file
    cells = table(seed=1)
    expected = encoder.transform(read_rows(written(tmp_path, cells), Rules())[0])
    typed = cells.assign(
        sure=cells["sure"].str.lower() == "true",
        price=cells["price"].str.strip("$").str.replace(",", "").astype(int),
        size=cells["size"].astype(float),
        day=pd.to_datetime(cells["day"]),
        when=pd.to_datetime(cells["when"], format="%d/%m/%Y"),
        city=cells["city"].astype("category"),
    )
    for frame in (cells, typed):
        np.testing.assert_array_equal(encoder.transform(frame), expected)
    cells = table().drop(columns="y")
    actual = {name: column for name, column in schema(cells).columns.items() if column.note != "numbers in text"}
    assert actual == {name: encoder.schema.columns[name] for name in cells if name not in ("size", "count")}
    np.testing.assert_array_equal(TableEncoder.fit(cells, table()["y"].astype(float))[1], features)


def predict_file(folder, rows, *options):
    """Predicts rows by m.jtrees."""
    (folder / "rows.csv").write_text(rows)
    assert run("predict", folder / "m.jtrees", folder / "rows.csv", *options) == 0


@pytest.mark.slow
def test_a_prediction_may_read_numbers_and_gaps_by_other_rules_than_the_fit(tmp_path, capsys):
    cells = pd.DataFrame({"a": [f"{i % 9},5" for i in range(60)], "b": [*"xyz"] * 20, "y": range(60)})
    options = ["--target", "y", "--out", tmp_path / "m.jtrees", "--separator", ";", "--decimal", ","]
    small = ["--recipe", "GET", "--task", "regression", "--set", "depth=2", "starts=1", "epochs=4", "leaves=constant"]
    assert run("fit", written(tmp_path, cells, sep=";"), *options, *small) == 0

    def predicted(text, *options):
        capsys.readouterr()
        predict_file(tmp_path, text, "--separator", ";", *options)
        return capsys.readouterr()

    expected, _ = predicted("a;b\n0,5;x\n;y\nNA;\n")
    assert len(expected.splitlines()) == 4
    assert predicted("a;b\n0.5;x\n;y\n?;NA\n", "--decimal", ".")[0] == expected
    assert predicted("a;b\n0,5;x\n-;y\n none;none\n", "--missing", "-", "none")[0] == expected
    other, message = predicted("a;b\n0,5;x\n0.5;y\n")
    assert other.splitlines() == expected.splitlines()[:3]
    assert "x has cells that the model cannot read, and takes as missing: 'a' ('0.5')" in message


def test_numbers_that_mean_a_missing_value_do_so_in_files_and_frames(tmp_path, capsys):
    """Also in a target, where a row without one is left out, and in rows of a prediction alone."""
    ints = pd.DataFrame({"a": np.arange(60) % 9, "b": [*"xyz"] * 20, "y": np.arange(60)})
    ints.loc[::5, "a"], ints.loc[3, "y"] = -999, -999
    ints.to_parquet(tmp_path / "ints.parquet")
    expected = None
    for cells in (ints, ints.astype({"a": float, "y": float}), None):
        file = tmp_path / "ints.parquet" if cells is None else written(tmp_path, cells)
        options = ["--target", "y", "--out", tmp_path / "m.jtrees", "--missing", "-999", "--task", "regression"]
        assert run("fit", file, *options, "--recipe", "GET", "--set", "depth=2", "starts=1", "epochs=4") == 0
        assert "1 row without 'y' left out" in capsys.readouterr().out
        model, rows = jtrees.load(tmp_path / "m.jtrees"), ints.drop(columns="y")
        gaps = rows.assign(a=rows["a"].where(rows["a"] != -999))
        expected = model.predict(gaps) if expected is None else expected
        for table in (rows, rows.astype(str), rows.astype({"a": float}), gaps):
            np.testing.assert_array_equal(model.predict(table), expected)
        others = rows.assign(a=rows["a"].replace(-999, -5))
        others.to_parquet(tmp_path / "others.parquet")
        others.to_csv(tmp_path / "others.csv", index=False)
        for name in ("others.csv", "others.parquet"):
            out = tmp_path / "out.csv"
            assert run("predict", tmp_path / "m.jtrees", tmp_path / name, "--missing", "-5", "--out", out) == 0
            np.testing.assert_allclose(pd.read_csv(out).iloc[:, -1], expected, rtol=1e-6)


def test_a_model_of_numbers_reads_a_file_by_place_and_cell_by_cell(tmp_path, capsys):
    model = TreeRegressor(recipes.DGT, random_state=0).fit(tables.X, tables.Y)
    jtrees.save(model, tmp_path / "m.jtrees")
    predict_file(tmp_path, "a,b,c,d\n0.5,1,0,0\n2,3,0,0\n")
    capsys.readouterr()
    predict_file(tmp_path, "a,b,c,d\n0.5,1,0,0\ntrue,3,0,0\n1e40,3,0,0\n,3,0,0\n")
    messages = capsys.readouterr()
    assert len(set(messages.out.splitlines()[2:])) == 1
    assert "cells that the model cannot read, and takes as missing: 'a' ('true', '1e40')" in messages.err


def rows_of(folder, text, **rules):
    (folder / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_rows(folder / "t.csv", Rules(**rules))


def test_an_empty_cell_of_one_column_is_a_row(tmp_path):
    assert rows_of(tmp_path, "a\n1\n\n3\n\n")[0]["a"].tolist() == ["1", None, "3", None]
    for text in ("a,b\n1,2\n\n,\n3,4\n\n", "\na,b\n1,2\n,\n\n\n3,4"):  # between several columns it is none, anywhere
        assert rows_of(tmp_path, text)[0]["a"].tolist() == ["1", None, "3"]


def test_spaces_and_missing_values(tmp_path):
    frame, messages = rows_of(tmp_path, "a,b\nYes ,NA\nYes, n/a\n No,-\n")
    assert frame["a"].tolist() == ["Yes", "Yes", "No"] and frame["b"].tolist() == ["NA", "n/a", "-"]
    assert messages == ["spaces at the ends of cells are left out, 1 time, in 'a'"]
    file = written(tmp_path, pd.concat([frame] * 10))
    for missing, levels in ((MISSING, {"-"}), (("-",), {"NA", "n/a"})):
        column = encoded(read_labelled(file, "a", Rules(missing=missing)))[0].schema.columns["b"]
        assert set(column.training_levels) == levels and column.missing == 30 - 10 * len(levels)


def test_a_label_may_look_like_a_number_or_a_missing_value(tmp_path):
    for labels, expected in (
        (["0", "1", "?", "NA"], {0, 1}),
        (["true", "FALSE", "N/A", "true"], {True, False}),
        (["01", "02"] * 2, {"01", "02"}),
        (["2024-01-01", "2024-01-02"] * 2, {"2024-01-01", "2024-01-02"}),
        (["None", "mild", "severe", None], {"None", "mild", "severe"}),
    ):
        frame = pd.DataFrame({"a": range(40), "y": labels * 10})
        assert set(read_labelled(written(tmp_path, frame), "y").y.dropna()) == expected
    frame.assign(y=frame["y"].str.center(9)).to_parquet(tmp_path / "table.parquet")
    for file in (written(tmp_path, frame), tmp_path / "table.parquet"):
        read = read_labelled(file, "y", Rules(missing=(*MISSING, "None")))
        assert {label.strip() for label in read.y.dropna()} == {"mild", "severe"}


def test_whole_numbers_of_a_target_are_exact(tmp_path):
    """Also beside a missing value. A cell with another script's digits is a missing value, and no huge number."""
    target = lambda cells: read_labelled(written(tmp_path, pd.DataFrame({"a": range(40), "y": cells})), "y").y
    for labels in (["0", "1"], ["9007199254740993", "9007199254740995"]):
        y = target([*labels * 19, labels[0], None]).dropna()
        assert y.tolist() == [*map(int, labels)] * 19 + [int(labels[0])] and targets_of(y).dtype == np.int64
    for cell in ("\N{SUPERSCRIPT TWO}", "\N{FULLWIDTH DIGIT SEVEN}"):
        y = target([*map(str, range(39)), cell])
        assert y.dropna().tolist() == list(range(39)) and pd.isna(y[39])


def test_a_kind_of_the_target_holds_for_csv_and_parquet(tmp_path):
    for cells, kind, task in (([f"{i / 2}" for i in range(40)], "number", "regression"), (range(40), "text", "class")):
        frame = pd.DataFrame({"a": range(40), "y": cells})
        frame.to_parquet(tmp_path / "table.parquet")
        for file in (written(tmp_path, frame), tmp_path / "table.parquet"):
            y = read_labelled(file, "y", Rules(columns={"y": kind})).y
            assert guess(y)[0].startswith(task) and len(y.dropna()) == 40


@pytest.mark.parametrize("labels", [["x"] * 25 + ["y"] * 14 + [None], [3] * 25 + [7] * 14 + [None]])
def test_a_target_of_categories(tmp_path, labels):
    pd.DataFrame({"a": range(40), "y": pd.Categorical(labels)}).to_parquet(tmp_path / "table.parquet")
    rows = read_labelled(tmp_path / "table.parquet", "y")
    assert guess(rows.y)[0] == "classification"
    assert usable(rows, "classification")[0].y.tolist() == labels[:-1]


@pytest.mark.parametrize("line", ["sep=;\n", "sep=;\r\n", '"sep=;"\n'])
def test_the_first_line_of_excel_names_the_separator(tmp_path, line):
    frame, _ = rows_of(tmp_path, line + "a;b\n1,5;x\n2;y\n")
    assert frame.to_dict("list") == {"a": ["1,5", "2"], "b": ["x", "y"]}


def test_texts_among_numbers_are_missing_values_in_csv_and_parquet(tmp_path):
    cells = pd.DataFrame({"age": [*map(str, range(20, 55)), *["-"] * 4, "n.a."], "y": np.arange(40) / 8})
    cells.to_parquet(tmp_path / "table.parquet")
    for file in (written(tmp_path, cells), tmp_path / "table.parquet"):
        frame, _ = usable(read_labelled(file, "y"), "regression")
        (message,) = frame.schema.messages(as_options)
        assert message.endswith("'age' ('-', 'n.a.' count as missing values): --columns age=text reads them otherwise")
        assert TableEncoder.fit(frame.x, columns=frame.schema)[0].feature_names == ["age", "[age missing]"]
    frame, changes = usable(read_labelled(written(tmp_path, cells), "age"), "regression")
    assert frame.y.tolist() == list(range(20, 55)) and changes == [
        "target 'age': '-', 'n.a.' count as missing values: --columns age=text reads it otherwise",
        "5 rows without 'age' left out",
    ]
    assert read_labelled(file, "age", Rules(columns={"age": "text"})).y[38] == "-"
    labels = cells.assign(age=["0", "1", "2", "3+"] * 10)
    assert set(read_labelled(written(tmp_path, labels), "age").y) == {"0", "1", "2", "3+"}
    words = cells.assign(age=[*range(17), *["forty"] * 10, *"abcdefghijklm"])
    with pytest.raises(DataError, match="finite numbers for --task regression, got 'forty' in row 17"):
        usable(read_labelled(written(tmp_path, words), "age"), "regression")


def test_european_thousands_are_read_alike_in_features_and_targets(tmp_path):
    prices = [f"{1000 + 37 * i:,} €".replace(",", ".") if i % 2 else f"{900 + i} €" for i in range(40)]
    numbers = [1000 + 37 * i if i % 2 else 900 + i for i in range(40)]
    file = written(tmp_path, pd.DataFrame({"a": prices, "b": np.arange(40) % 7, "y": prices}))
    frame = read_labelled(file, "y")
    encoder, features = encoded(frame)
    assert frame.y.tolist() == features[:, 0].tolist() == numbers
    assert "'1.037 €' is read as 1037, and may mean 1.037: --columns 'y=decimal point'" in frame.changes[0]
    rows = pd.DataFrame({"a": ["1.983 €", "955 €", "1.983,50 €"], "b": "1"})
    assert encoder.transform(rows)[:, 0].tolist() == [1983, 955, 1983.5]
    assert read_labelled(file, "y", Rules(decimal=".")).y[1] == 1.037


def test_files_are_read_in_their_encoding_or_refused(tmp_path):
    text = "a,b\nZürich,1\n"
    latin, unicode = text.encode("latin-1"), text.encode("utf-16")
    for content, encoding in ((latin, "latin-1"), (unicode, "utf-16")):
        assert rows_of(tmp_path, content, encoding=encoding)[0]["a"].tolist() == ["Zürich"]
    assert list(rows_of(tmp_path, b"\xef\xbb\xbfa,b\n1,2\n")[0]) == ["a", "b"]
    for content, encoding, message in (
        (latin, "utf-8", r"as utf-8 \(byte 0xfc at 5\): try --encoding latin-1"),
        (latin, "klingon", "--encoding must be the name of an encoding, got 'klingon'"),
        (unicode, "latin-1", "as latin-1, because it is UTF-16: use --encoding utf-16"),
        (gzip.compress(latin), "latin-1", "t.csv must be CSV or Parquet, got a gzip file: decompress it"),
        (b"PK\3\4", "latin-1", "t.csv must be CSV or Parquet, got an Excel or zip file: save the table as CSV"),
        (tables.frame().to_parquet(), "latin-1", "got Parquet under another name: give it the ending .parquet"),
        *((header, "utf-8", "columns of different names, got '[ay]' twice") for header in ("y,y", "a,a ", "a, a")),
    ):
        with pytest.raises(DataError, match=message):
            rows_of(tmp_path, content, encoding=encoding)


def test_a_decimal_comma_and_the_order_of_dates_are_remembered(tmp_path):
    text = "a;b;c;s;y\n" + "".join(
        f"{i % 9},5;0{1 + i % 5}/03/2024;0{1 + i % 5}/03/2024 12:00+01:00;{i % 9}.5%;{i}\n" for i in range(40)
    )
    rows, _ = rows_of(tmp_path, text, separator=";")
    rules = Rules(";", ",", columns={"b": "%d/%m/%Y", "c": "%d/%m/%Y"})
    encoder, _ = encoded(read_labelled(tmp_path / "t.csv", "y", rules))
    assert encoder.transform(rows[:2])[:, :3].tolist() == [[0.5, 0, 0.5], [1.5, 1, 1.5]]
    assert encoder.schema.columns["s"].kind == "text"  # numbers by another rule
    with pytest.warns(ColumnsWarning, match=r"takes as missing: 'a' \('0\.5'\)"):
        encoder.transform(rows[:1].assign(a="0.5"))


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
    rows = read_labelled(tmp_path / "table.parquet", "y")
    assert guess(rows.y)[0] == "regression" and rows.y.tolist() == (hours / 4).tolist()
    rows, _ = usable(rows, "regression")
    encoder, features = TableEncoder.fit(rows.x, rows.y.to_numpy())
    assert encoder.feature_names == ["customer", "at", "cost", "[cost missing]"]
    assert features[:, 0].tolist() == list(range(7, 67)) and "durations in days" in str(encoder.schema.columns["at"])
    np.testing.assert_allclose(features[:, 1], (hours + 0.5) / 24, rtol=1e-15)
    np.testing.assert_array_equal(encoder.transform(read_rows(tmp_path / "table.parquet", Rules())[0]), features)
