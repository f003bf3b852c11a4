"""The comparison from its command line: what it prints, what it writes, and how it refuses."""

import json
import sys

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss, r2_score, roc_auc_score
from sklearn.utils import Bunch

from experiments import compare, data, sizes
import jtrees
from jtrees.cli.tables import guess, read_labelled, usable
from jtrees.data.held_out import divided
from jtrees.report.rivals import rivals
from tests.houses import houses

pytestmark = pytest.mark.usefixtures("standard_promotion")

SMALL = jtrees.GET(depth=2, starts=2, epochs=10)
SIMPLE = ["constant", "linear model", "CART, depth 2"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Two small recipes, one CART and no forests."""
    monkeypatch.setattr(compare, "CART_DEPTHS", (2,))
    monkeypatch.setattr(compare, "RECIPES", {"GET": SMALL, "GET-Linear": SMALL.replace(leaves="linear")})
    monkeypatch.setattr(
        compare, "rivals", lambda *arguments, **options: rivals(*arguments, **options | {"forests": False})
    )


@pytest.fixture
def folder(tmp_path):
    """A data folder: regression near and far from zero, two classes, three classes."""
    rng = np.random.default_rng(0)
    x = rng.random((120, 3), dtype=np.float32)
    y = x @ np.float32([1, -2, 3])
    wide = rng.random((200, 2), dtype=np.float32)
    np.savez(tmp_path / "plane.npz", X=x, y=y)
    np.savez(tmp_path / "far.npz", X=x + np.float32(4096), y=y)
    np.savez(tmp_path / "labels.npz", X=x, y=(x[:, 0] > 0.5).astype(np.int32))
    three = np.searchsorted([0.6, 0.9], wide[:, 0]) * (rng.uniform(size=200) > 0.2)
    np.savez(tmp_path / "three.npz", X=wide, y=three)
    return tmp_path


def main(tmp_path, *arguments):
    """The exit status of the comparison, whose results go under ``out``."""
    return compare.main(["--out", str(tmp_path / "out"), *map(str, arguments)])


def on(folder, name):
    """The arguments for a set of the folder."""
    return ["--data-dir", folder, "--dataset", name]


def run(tmp_path, *arguments):
    """The comparison; the folder that it wrote, and its table."""
    assert main(tmp_path, *arguments) == 0
    (folder,) = (tmp_path / "out").iterdir()
    return folder, pd.read_csv(folder / "table.csv").set_index("model")


def refusal(tmp_path, capsys, *arguments):
    """The one line that a refused job prints."""
    assert main(tmp_path, *arguments) == 2
    assert not (tmp_path / "out").exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("compare: ")
    return error


def saved(written, name):
    return joblib.load(written / f"{name}.joblib")


@pytest.mark.slow
def test_regression(folder, tmp_path, capsys):
    written, table = run(tmp_path, *on(folder, "plane"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plane: 120 rows, 3 columns; task: regression, as y holds 120 different numbers")
    assert " ".join(lines[2].split()) == "model training R² leaves numbers R² RMSE mean absolute error seconds"
    assert list(table.index) == [*SIMPLE, "GET", "GET-Linear"]
    assert lines[-2].startswith("GET-Linear is ") and "a constant" in lines[-2] and "on 30 held-out rows" in lines[-2]
    assert lines[-1] == f"written to {written}"
    names = ["constant", "linear_model", "CART_depth_2", "GET", "GET_Linear"]
    trees = {f"{name}{ending}" for name in names[2:] for ending in (".npz", ".txt")}
    results = {"table.csv", "table.md", "config.json", "figure.png"}
    assert {file.name for file in written.iterdir()} == results | trees | {f"{name}.joblib" for name in names}
    assert (written / "table.md").read_text().startswith("| model | training R² | leaves | ")
    config = json.loads((written / "config.json").read_text())
    assert config["options"]["seed"] == 0 and "jax" in config["versions"] and config["recipes"]["GET"]["epochs"] == 10
    # The scores are those of the saved models.
    frame = data.load_frame("plane", data_dir=folder)
    train, test = divided(len(frame.y), 0.25, 0)
    for name, file in zip(table.index[2:], names[2:], strict=True):
        encoder, model = saved(written, file)["encoder"], saved(written, file)["model"]
        for rows, score in ((train, "training R²"), (test, "R²")):
            predicted = model.predict(encoder.transform(frame.x.iloc[rows]))
            assert table.loc[name, score] == pytest.approx(r2_score(frame.y[rows], predicted), rel=1e-6)  # float32
    leaves = model.prune(encoder.transform(frame.x.iloc[train])).num_leaves
    assert model.num_leaves == leaves == table.loc["GET-Linear", "leaves"]


def test_a_saved_tree_is_five_lines_of_numpy(folder, tmp_path):
    """Also for values far from zero."""
    written, _ = run(tmp_path, *on(folder, "far"))
    with np.load(folder / "far.npz") as far, np.load(written / "GET.npz") as arrays:
        x, tree = far["X"].astype(float), dict(arrays)
    node, z = np.zeros(len(x), int), x - tree["x_zero"]
    for _ in range(int(np.log2(len(tree["bias"]) + 1))):
        node = 2 * node + 1 + ((z * tree["weights"][node]).sum(1) + tree["bias"][node] > 0)
    y = tree["y_zero"] + tree["leaf_values"][node - len(tree["bias"])]
    assert (tree["x_zero"] > 4000).all() and len(set(y)) > 1
    np.testing.assert_allclose(y, saved(written, "GET")["model"].predict(x), rtol=1e-6)


def test_text_gaps_and_labels(tmp_path, capsys):
    file, table = tmp_path / "houses.csv", houses(90)
    table.loc[7, "verdict"] = None
    table.to_csv(file, index=False)
    written, table = run(tmp_path, "--csv", file, "--target", "verdict", "--columns", "price=drop", "offered=drop")
    printed = capsys.readouterr().out
    assert "task: classification, as verdict holds 2 labels (--task says otherwise)" in printed
    assert "1 row without 'verdict' left out" in printed and "left out: 'id' (89 different texts" in printed
    assert list(table.index) == [*SIMPLE, "GET"]  # linear leaves are for regression
    rules = (written / "GET.txt").read_text()
    assert ("area" in rules or "[heating = gas]" in rules) and " rows)" in rules and "sold: " in rules
    model, encoder, classes = (saved(written, "GET")[key] for key in ("model", "encoder", "classes"))
    frame, _ = usable(read_labelled(file, "verdict"), "classification")
    chances = np.asarray(model.predict(encoder.transform(frame.x)), float)
    assert classes == ["not yet", "sold"] and not any("offered" in name for name in encoder.feature_names)
    assert (np.array(classes)[chances.argmax(1)] == frame.y).mean() > 0.7


@pytest.mark.parametrize(("name", "classes"), [pytest.param("labels", 2, marks=pytest.mark.slow), ("three", 3)])
def test_scores_of_classes(folder, tmp_path, name, classes):
    written, table = run(tmp_path, *on(folder, name))
    frame = data.load_frame(name, data_dir=folder)
    train, test = divided(len(frame.y), 0.25, 0, y := frame.y.to_numpy())
    cart, row, constant = saved(written, "CART_depth_2"), table.loc["CART, depth 2"], table.loc["constant"]
    chances = cart["model"].predict_proba(cart["encoder"].transform(frame.x.iloc[test]))
    y_train, y = y[train], y[test]
    assert row["accuracy"] == pytest.approx(accuracy_score(y, chances.argmax(1)))
    assert row["balanced accuracy"] == pytest.approx(balanced_accuracy_score(y, chances.argmax(1)))
    each_class = [roc_auc_score(y == i, chances[:, i]) for i in range(classes)]
    assert row["AUC"] == pytest.approx(np.mean(each_class))
    get = saved(written, "GET")
    chances = np.asarray(get["model"].predict(get["encoder"].transform(frame.x.iloc[test])), float)
    chances /= chances.sum(1, keepdims=True)  # sums of single precision
    assert table.loc["GET", "log loss"] == pytest.approx(log_loss(y, chances), rel=1e-4)
    assert constant["accuracy"] == (y == np.bincount(y_train).argmax()).mean()
    assert constant["balanced accuracy"] == pytest.approx(1 / classes) and constant["AUC"] == 0.5


@pytest.mark.slow
def test_sizes_of_simpler_models(folder):
    x, y = np.random.default_rng(0).normal(size=(200, 3)), np.arange(200.0)
    models = rivals(jtrees.Regression(), 200, depth=2, seed=0, forests=True)[0]
    shapes = {name: sizes.size(model.fit(x, y), x) for name, model in models.items()}
    assert shapes["constant"] == (1, 1) and shapes["linear model"] == (1, 4)
    assert shapes["CART, depth 2"] == (4, 3 * 3 + 1)  # as an oblique tree, which stores the weight of a split
    for name in ("random forest", "gradient boosting"):
        leaves, numbers = shapes[name]
        assert leaves > 100 and (numbers - leaves) / 2 == leaves - 100  # of 100 trees


MINE = """
import jtrees
RECIPE = jtrees.GET(depth=2, starts=2, epochs=10)
def bagged(): return jtrees.Bagged(RECIPE, trees=2)
def with_arguments(depth): return jtrees.GET(depth=depth)
class cart: pass
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Two modules on the path, of which one cannot be imported."""
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "broken.py").write_text("RECIPE = 1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("mine", None)


@pytest.mark.slow
def test_recipes_of_the_user_are_rows(mine, folder, tmp_path):
    written, table = run(tmp_path, *on(folder, "plane"), "--method", "mine:RECIPE", "mine:bagged")
    assert list(table.index) == [*SIMPLE, "GET", "GET-Linear", "mine:RECIPE", "mine:bagged"]
    assert {"mine_RECIPE.npz", "mine_RECIPE.txt", "mine_bagged.joblib"} <= {file.name for file in written.iterdir()}
    recipe = json.loads((written / "config.json").read_text())["recipes"]["mine:RECIPE"]
    assert recipe | {"name": "GET", "depth": 2, "epochs": 10} == recipe


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("nowhere:RECIPE", "--method nowhere:RECIPE: No module named 'nowhere'"),
        ("broken:RECIPE", "--method broken:RECIPE: division by zero"),
        ("mine:OTHER", "--method mine:OTHER: module 'mine' has no attribute 'OTHER'"),
        ("mine:jtrees", "must be a recipe, such as jtrees.GET(depth=4), or a function that makes one, got <module"),
        ("mine:with_arguments", "--method mine:with_arguments: with_arguments() missing 1"),
        ("mine:cart", "or a function that makes one, got <mine.cart object"),
    ],
)
def test_other_objects_than_recipes_are_refused_in_one_line(mine, folder, tmp_path, capsys, argument, message):
    assert message in refusal(tmp_path, capsys, *on(folder, "plane"), "--method", argument)


@pytest.mark.parametrize("where", ["GET-Linear", "constant"])
def test_an_interruption_keeps_the_finished_rows(folder, tmp_path, capsys, monkeypatch, where):
    original = compare.HeldOutRows.add

    def add(self, name, *rest):
        if name == where:
            raise KeyboardInterrupt
        return original(self, name, *rest)

    monkeypatch.setattr(compare.HeldOutRows, "add", add)
    assert main(tmp_path, *on(folder, "plane")) == 130
    printed, (written,) = capsys.readouterr(), (tmp_path / "out").iterdir()
    assert printed.err.splitlines()[-1] == "compare: interrupted"
    if where == "constant":
        assert "no model was fitted" in printed.out and list(written.iterdir()) == []
        return
    assert list(pd.read_csv(written / "table.csv")["model"]) == [*SIMPLE, "GET"]
    assert (written / "figure.png").exists() and "a constant" in printed.out.splitlines()[-2]


def test_a_fit_that_was_interrupted_makes_no_row(folder, tmp_path, monkeypatch):
    interrupted = Bunch(report=jtrees.search.FitReport(ended="interrupted"))
    monkeypatch.setattr(jtrees, "fit", lambda *_, **__: interrupted)
    assert main(tmp_path, *on(folder, "plane")) == 130
    (file,) = (tmp_path / "out").glob("*/table.csv")
    assert list(pd.read_csv(file)["model"]) == SIMPLE


def test_results_that_cannot_be_written_are_one_line(folder, tmp_path, capsys, monkeypatch):
    """The folder is made before the first fit."""
    monkeypatch.setattr(compare.HeldOutRows, "add", lambda *_: 1 / 0)
    (tmp_path / "out").touch()
    assert main(tmp_path, *on(folder, "plane")) == 2
    error = capsys.readouterr().err
    assert "compare: cannot write results" in error and error.count("\n") == 1


B = ["--target", "b"]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("a,b\n1,2\n", [], "--target must be one of the columns a, b; none was named"),
        ("a;b\n1;2, or 3\n", B, "has one column, 'a;b': try --separator ';'"),
        ("b\n2\n", B, "at least one column besides the target"),
        ("a,b\n", B, "has a header and no rows: at least 20"),
        ("a,b\n1,2\n2,3.5\n3,4.5\n", B, "has 3 rows: at least 20"),
        ("", B, "cannot read"),
        ("a,b\n" + "1,2,3\n" * 40, B, "rows have more fields than the header, which names 'a', 'b'"),
        ("a,b\n" + "1,2,\n" * 40 + "1,2,3\n", B, "rows have more fields than the header"),
        ("a,b\n" + "1,2\n" * 40 + "1,2,\n", B, "cannot read"),
        ("a,b\n" + "1,2\n" * 40, B, "must take at least two values, got '2'"),
        ("a,b\n" + "1,2\n2,3\n" * 20, [*B, "--columns", "a=drop"], "x must have a column to learn from, got only"),
    ],
)
def test_files_that_cannot_be_used_get_one_line_that_helps(tmp_path, capsys, text, arguments, message):
    (tmp_path / "bad.csv").write_text(text)
    assert message in refusal(tmp_path, capsys, "--csv", tmp_path / "bad.csv", *arguments)


@pytest.mark.parametrize(
    ("y", "task"),
    [
        (["a", "b"] * 30, "classification"),
        ([True, False] * 30, "classification"),
        ([0, 1, 2] * 20, "classification"),
        ([0.0, 1.0, np.nan] * 20, "classification"),
        ([0.5, 1.0, 2.0] * 20, "regression"),
        (range(60), "regression"),
    ],
)
def test_the_task_is_inferred(y, task):
    inferred, why = guess(pd.Series(y, name="t"))
    assert inferred == task and why.startswith("t holds ")


@pytest.mark.parametrize("header", ["area,price", "area,price,"], ids=["rows", "header and rows"])
@pytest.mark.parametrize("end", [",", ", ", ',""'])
def test_a_separator_at_the_end_of_each_row_shifts_no_column(tmp_path, header, end):
    areas = np.random.default_rng(0).uniform(20, 200, 60).round(1)
    file = tmp_path / "houses.csv"
    file.write_text("\n".join([header, *(f"{area},{3 * area}{end}" for area in areas)]) + "\n")
    frame = read_labelled(file, "price")
    np.testing.assert_array_equal(frame.y, 3 * areas)
    np.testing.assert_array_equal(frame.x["area"].astype(float), areas)


@pytest.mark.slow
def test_twenty_rows_of_four_classes(tmp_path):
    rng = np.random.default_rng(0)
    pd.DataFrame({"a": rng.uniform(size=20), "kind": list("abcd") * 5}).to_csv(tmp_path / "few.csv", index=False)
    _, table = run(tmp_path, "--csv", tmp_path / "few.csv", "--target", "kind")
    assert np.isfinite(table.to_numpy(float)).all()


@pytest.fixture
def openml(monkeypatch):
    """What OpenML answers by name; no other name can be reached."""
    numbers, names = pd.DataFrame({"a": [1.0, 2.0, 3.0]}), pd.CategoricalDtype(["0", "1", "7"])
    answers = {
        "set": Bunch(data=numbers.assign(b=[3, 4, 5]), target=pd.Series([0.5, 1.5, 2.5], name="t")),
        "mnist_784": Bunch(data=numbers, target=pd.Series(["7", "0", "7"], dtype=names)),
        "gaps": Bunch(data=numbers, target=pd.Series(["7", None, "0"], dtype=names)),
        "text": Bunch(data=pd.DataFrame({"a": ["red", "blue"]}), target=pd.Series([0.5, 1.5])),
    }

    def fetch(*, name, **_):
        if name not in answers:
            raise OSError("no network")
        return answers[name]

    monkeypatch.setattr("sklearn.datasets.fetch_openml", fetch)


def test_sets_of_openml_become_tables(openml, folder):
    table = data.load("set", data_dir=folder)
    assert table.feature_names == ["a", "b"] and table.x.dtype == np.float32
    np.testing.assert_array_equal(table.y, [0.5, 1.5, 2.5])
    table = data.load("mnist", data_dir=folder)  # classes are numbered
    assert table.name == "mnist" and table.is_classification and table.y.dtype == np.int32
    np.testing.assert_array_equal(table.y, [2, 0, 2])
    for name, message in (
        ("gaps", "the target must have no missing"),
        ("text", "column 'a' must be numeric, got values such as 'red'"),
        ("nowhere", r"'nowhere'.*diabetes.*kin8nm, labels, plane.*no network"),
    ):
        with pytest.raises(data.DataError, match=message):
            data.load(name, data_dir=folder)


@pytest.mark.parametrize("which", ["X", "y"])
def test_numbers_beyond_float32_are_refused(tmp_path, which):
    arrays = {"X": np.random.default_rng(0).uniform(size=(30, 2)), "y": np.arange(30.0)}
    arrays[which][3] = -1e300
    np.savez(tmp_path / "huge.npz", **arrays)
    with pytest.raises(data.DataError, match=rf"{which} of huge.npz must be within the range of float32, got -1e\+300"):
        data.load_frame("huge", data_dir=tmp_path)


def test_sets_of_the_repository_of_a_folder_and_of_scikit_learn(folder, monkeypatch):
    monkeypatch.setenv("JTREES_DATA", str(folder))
    assert data.load("plane").x.shape == (120, 3)
    monkeypatch.delenv("JTREES_DATA")
    table = data.load()
    assert table.name == "kin8nm" and table.x.shape == (8192, 8) and table.feature_names[0] == "theta1"
    assert data.EMBEDDED.joinpath("kin8nm.npz").stat().st_size < 300_000
    frame = data.load_frame("iris")
    assert set(frame.y) == {"setosa", "versicolor", "virginica"} and len(frame.x.columns) == 4
    assert guess(data.load_frame("digits").y)[0] == "classification"
    for name, classes in (("iris", 3), ("wine", 3), ("breast_cancer", 2), ("digits", 10)):
        assert data.load(name).is_classification and set(data.load(name).y) == set(range(classes))
    assert guess(data.load_frame("diabetes").y)[0] == "regression"
