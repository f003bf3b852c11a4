"""The main job from its command line: what it prints, what it writes, and how it refuses."""

import json
import os
import re
import signal
import sys

import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss, r2_score, roc_auc_score
from sklearn.utils import Bunch

from experiments import compare, data, outcome
import jtrees
from jtrees.cli.tables import guess, read_labelled, usable
from jtrees.plotting import plot_tree
from jtrees.search import options as kinds
from jtrees.tables import checked_table

pytestmark = pytest.mark.usefixtures("standard_promotion")

QUICK = ["--depth", "2", "--starts", "2", "--epochs", "10"]


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """The number of devices cannot be set in the middle of the suite."""
    monkeypatch.setattr(compare, "MANY", 10**9)


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


@pytest.fixture
def houses(tmp_path):
    """A CSV file with text, gaps, and labels of text."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"area": rng.uniform(20, 200, 90).round(1), "heating": rng.choice(["gas", "wood", "none"], 90)}
    )
    frame["street"] = [f"street {i}" for i in range(90)]
    frame["garden"] = rng.choice([True, False], 90)
    frame["verdict"] = np.where(frame["area"] + 50 * (frame["heating"] == "gas") > 130, "sold", "not yet")
    frame["cellar"] = np.nan
    frame.loc[::9, "area"] = np.nan
    frame.loc[3:5, "heating"] = None
    frame.loc[7, "verdict"] = None
    frame.to_csv(tmp_path / "houses.csv", index=False)
    return tmp_path / "houses.csv"


def main(tmp_path, *arguments):
    """The exit status of the main job, whose results go under ``out``."""
    return compare.main(["--out", str(tmp_path / "out"), *QUICK, *map(str, arguments)])


def on(folder, name):
    """The arguments for a set of the folder."""
    return ["--data-dir", folder, "--dataset", name]


def run(tmp_path, *arguments):
    """The main job; the folder that it wrote, and its table."""
    assert main(tmp_path, *arguments) == 0
    (folder,) = (tmp_path / "out").iterdir()
    return folder, pd.read_csv(folder / "table.csv").set_index("method")


def refusal(tmp_path, capsys, *arguments):
    """The one line that a refused job prints."""
    assert main(tmp_path, *arguments) == 2
    assert not (tmp_path / "out").exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("compare: ")
    return error


def parts_of(folder, name, task, options=()):
    """The rows of a set of the folder as the main job splits them."""
    frame = data.load_frame(name, data_dir=folder)
    return compare.split(frame, task, compare.parse([*options]))[0]


def model_of(written, row):
    return joblib.load(written / f"{row}.joblib")["model"]


# --- What it prints and writes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_regression(folder, tmp_path, capsys):
    methods = ["cart", "get", "forest"]
    written, table = run(tmp_path, *on(folder, "plane"), "--methods", *methods)
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[0] == "plane: 120 rows, 3 features, 72 rows to train on"
    assert lines[1].startswith("task: regression, as y holds 120 different numbers")
    assert [line.split()[0] for line in lines[4:8]] == ["baseline", *methods]
    assert " ".join(lines[3].split()) == "method depth train R2 test R2 leaves numbers train s rows/s"
    assert max(map(len, lines[:8])) <= 80
    assert "drawn: get, depth 2" in printed
    of_every_run = {"table.csv", "table.md", "config.json", "figure.png"}
    models = {"baseline.joblib", "cart_depth2.joblib", "get_depth2.joblib", "forest.joblib"}
    trees = {"cart_depth2.npz", "cart_depth2.txt", "get_depth2.npz", "get_depth2.txt"}
    assert {file.name for file in written.iterdir()} == of_every_run | models | trees
    assert table.loc["get", "train"] >= table.loc["cart", "train"] and table.loc["get", "leaves"] <= 4
    config = json.loads((written / "config.json").read_text())
    assert config["options"]["seed"] == 0 and config["data"]["rows"] == 120 and "jax" in config["versions"]
    # The scores are those of the saved models, on rows that no other part has.
    parts = parts_of(folder, "plane", "regression")
    rows = [tuple(row) for x, _ in (parts.train, parts.validate, parts.test) for row in x]
    assert len(rows) == len(set(rows)) == 120 and [len(x) for x, _ in (parts.train, parts.validate)] == [72, 18]
    for method in ("get", "cart"):
        model = model_of(written, f"{method}_depth2")
        if method == "get":  # nothing is left that no row divides: what is drawn and saved as arrays is this tree
            assert model.num_leaves == model.prune(parts.train[0]).num_leaves == table.loc["get", "leaves"]
        for part in ("train", "validate", "test"):
            x, y = getattr(parts, part)
            assert table.loc[method, part] == pytest.approx(r2_score(y, model.predict(x)), rel=1e-6)  # float32


@pytest.mark.slow
def test_a_saved_tree_is_five_lines_of_numpy(folder, tmp_path):
    """Those of the README, for values far from zero."""
    written, _ = run(tmp_path, *on(folder, "far"), "--methods", "get")
    with np.load(folder / "far.npz") as far, np.load(written / "get_depth2.npz") as saved:
        x, tree = far["X"].astype(float), dict(saved)
    node, z = np.zeros(len(x), int), x - tree["x_zero"]
    for _ in range(int(np.log2(len(tree["bias"]) + 1))):
        node = 2 * node + 1 + ((z * tree["weights"][node]).sum(1) + tree["bias"][node] > 0)
    y = tree["y_zero"] + tree["leaf_values"][node - len(tree["bias"])]
    assert (tree["x_zero"] > 4000).all() and len(set(y)) > 1
    np.testing.assert_allclose(y, model_of(written, "get_depth2").predict(x), rtol=1e-6)


@pytest.mark.slow
def test_text_gaps_and_labels(houses, tmp_path, capsys):
    methods = ["cart", "get", "get-linear", "forest"]
    written, table = run(tmp_path, "--csv", houses, "--target", "verdict", "--methods", *methods)
    printed = capsys.readouterr().out
    assert "task: classification, as verdict holds 2 labels (--task says otherwise)" in printed
    assert "1 rows without 'verdict' left out" in printed
    assert re.search(r"^heating: text, levels 'gas', 'none', 'wood', \d+ missing$", printed, re.MULTILINE)
    assert re.search(r"^area: number, median \d+[.\d]*, deviation [.\d]+, \d+ missing$", printed, re.MULTILINE)
    assert re.search(r"^street: left out: \d+ different texts in \d+ rows$", printed, re.MULTILINE)
    assert "cellar: left out: without values\n" in printed
    assert "acc." in printed and "log loss" in printed and max(map(len, printed.splitlines()[:-1])) <= 80
    assert list(table.index) == ["baseline", "cart", "get", "forest"]  # the fourth is for regression
    rules = (written / "get_depth2.txt").read_text()
    assert "area" in rules or "[heating = gas]" in rules
    saved = joblib.load(written / "get_depth2.joblib")
    frame, _ = usable(read_labelled(houses, "verdict"), "classification")
    chances = np.asarray(saved["model"].predict(saved["encoder"].transform(frame.x)), float)
    assert saved["classes"] == ["not yet", "sold"]
    assert (np.array(saved["classes"])[chances.argmax(1)] == frame.y).mean() > 0.7


@pytest.mark.slow
def test_rules_and_figure_show_the_largest_terms_on_the_training_rows(tmp_path, monkeypatch):
    """The weight of a column of large spread is small; its term is not."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(200, 8)) * 1e-3, columns=[f"noise{i}" for i in range(8)])
    frame["signal"] = 1000 * rng.normal(size=200)
    frame["kind"] = np.where(frame["signal"] / 1000 + frame["noise0"] * 1000 > 0, "high", "low")
    frame.to_csv(tmp_path / "spread.csv", index=False)
    drawn = []
    draw = lambda tree, axes, **how: drawn.append((tree, how)) or plot_tree(tree, axes, **how)
    monkeypatch.setattr(outcome.plotting, "plot_tree", draw)
    arguments = ["--target", "kind", "--methods", "cart", "get", "--epochs", 200]
    written, _ = run(tmp_path, "--csv", tmp_path / "spread.csv", *arguments)
    rules = (written / "get_depth2.txt").read_text().splitlines()
    assert "signal + 4 smaller terms > " in rules[0] and "noise0 " in rules[0] and rules[0].count("noise") == 4
    reached = "\n".join(rule.split(" (")[1] for rule in rules if "->" in rule)
    rows = [sum(map(int, re.findall(what, reached))) for what in (r"(\d+) rows?;", r"high: (\d+)", r"low: (\d+)")]
    assert rows[0] == 120 and 50 < rows[1] < 70 and rows[1] + rows[2] == 120
    ((tree, how),) = drawn
    assert tree.to_text(**how) + "\n" == (written / "get_depth2.txt").read_text()


@pytest.mark.parametrize("rate", [999.6, 92_149.0, 999_700.0, 66.71e6, 999.4e6])
def test_a_line_keeps_within_80_columns(rate):
    """Whatever the machine: long names, bad scores, big forests, hours of training."""
    sizes = (123_456_789, 12_345_678, 7200.0, rate)
    regression = outcome.Row("get-polished", 10, -12.34567, -12.34567, -12.34567, None, *sizes)
    classes = outcome.Row("get-polished", 10, 0.98765, 0.98765, 0.98765, 36.04365, *sizes, 0.98765, 0.98765)
    for cells in (regression.cells(), classes.cells()):
        assert len(outcome.table_line(cells)) == len(outcome.table_line({head: head for head in cells})) <= 80
    number, letter = cells["rows/s"].split()
    assert float(number) * {"k": 1e3, "M": 1e6}[letter] == pytest.approx(rate, rel=5e-3)
    assert (cells["leaves"], cells["numbers"]) == ("123 M", "12.3 M")


@pytest.mark.parametrize(("name", "classes"), [("labels", 2), pytest.param("three", 3, marks=pytest.mark.slow)])
def test_scores_of_classes(folder, tmp_path, capsys, name, classes):
    written, table = run(tmp_path, *on(folder, name), "--methods", "cart", "forest")
    parts = parts_of(folder, name, "classification")
    (x, y), forest, row, baseline = parts.test, model_of(written, "forest"), table.loc["forest"], table.loc["baseline"]
    chances = forest.predict_proba(x)
    assert row["test"] == pytest.approx(accuracy_score(y, forest.predict(x)))
    assert row["log_loss"] == pytest.approx(log_loss(y, chances))
    assert row["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(y, forest.predict(x)))
    one_by_one = [roc_auc_score(y == i, chances[:, i]) for i in range(classes)]
    assert row["auc"] == pytest.approx(np.mean(one_by_one))
    shares = np.bincount(parts.train[1]) / len(parts.train[1])
    assert baseline["test"] == (y == shares.argmax()).mean()
    assert baseline["log_loss"] == pytest.approx(-np.log(shares[y]).mean())
    assert baseline["balanced_accuracy"] == pytest.approx(1 / classes)
    assert (baseline["auc"], baseline["numbers"]) == (0.5, classes)
    lines = capsys.readouterr().out.splitlines()
    assert "method depth train acc. bal. AUC loss leaves numbers train s rows/s" in [" ".join(x.split()) for x in lines]
    assert lines[2:4] == outcome.LEGEND
    assert (written / "table.md").read_text().endswith(f"\n\n{' '.join(outcome.LEGEND)}\n")


@pytest.mark.slow
@pytest.mark.parametrize("signal", [False, True])
@pytest.mark.parametrize(("task", "constant"), [("regression", "the mean"), ("classification", "the majority class")])
def test_a_line_says_that_no_model_is_better_than_the_baseline(tmp_path, capsys, task, constant, signal):
    rng = np.random.default_rng(0)
    x, noise = rng.random((400, 2), dtype=np.float32), rng.random(400)
    y = x[:, 0] if signal else noise
    y = y.astype(np.float32) if task == "regression" else (y > 0.9).astype(np.int32)
    np.savez(tmp_path / "some.npz", X=x, y=y)
    _, table = run(tmp_path, *on(tmp_path, "some"), "--methods", "cart", "forest", "--depth", 8)
    line = f"No model is better on the test rows than always answering {constant}."
    assert (line in capsys.readouterr().out.splitlines()) != signal
    assert (table["test"].max() > table.loc["baseline", "test"]) == signal


# --- Methods ---------------------------------------------------------------------------------------------------------

MINE = """
import jtrees
RECIPE = jtrees.GET(depth=2, starts=2, epochs=10)
def a_recipe_with_a_long_name(): return jtrees.Bagged(RECIPE, trees=2)
def with_arguments(depth): return jtrees.GET(depth=depth)
def get(): return RECIPE
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
def test_recipes_of_ones_own_are_rows(mine, folder, tmp_path, capsys):
    own = ["--method", "mine:RECIPE", "mine:a_recipe_with_a_long_name"]
    written, table = run(tmp_path, *on(folder, "plane"), "--methods", "cart", *own)
    assert list(table.index) == ["baseline", "RECIPE", "a_recipe_with_a_long_name", "cart"]
    assert table.loc["RECIPE", "depth"] == 2 == table.loc["a_recipe_with_a_long_name", "depth"]
    assert {"RECIPE_depth2.npz", "RECIPE_depth2.txt"} <= {file.name for file in written.iterdir()}
    config = json.loads((written / "config.json").read_text())
    assert config["recipes"]["RECIPE"] | {"name": "GET", "depth": 2, "epochs": 10} == config["recipes"]["RECIPE"]
    lines = capsys.readouterr().out.splitlines()[3:8]
    assert len({len(line) for line in lines}) == 1  # columns stand below each other


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cart", "--method must be MODULE:NAME, such as my_file:RECIPE, got 'cart'"),
        ("nowhere:RECIPE", "--method nowhere:RECIPE: cannot import nowhere: No module named 'nowhere'"),
        ("broken:RECIPE", "--method broken:RECIPE: cannot import broken: division by zero"),
        ("mine:OTHER", "--method mine:OTHER: module mine has no OTHER"),
        ("mine:jtrees", "must be a recipe, such as jtrees.GET(depth=4), or a function that makes one, got <module"),
        ("mine:with_arguments", "--method mine:with_arguments: with_arguments() failed: with_arguments() missing 1"),
        ("mine:cart", "or a function that makes one, got <mine.cart object"),
        ("mine:get", "--method mine:get: there is a method of this name already"),
    ],
)
def test_what_is_no_recipe_of_ones_own_is_one_line(mine, folder, tmp_path, capsys, given, said):
    assert said in refusal(tmp_path, capsys, *on(folder, "plane"), "--method", given)


@pytest.mark.parametrize(("name", "task"), [("plane", "regression"), ("labels", "classification")])
def test_every_method_is_a_recipe_that_fits_or_an_estimator(folder, name, task):
    parts, options = parts_of(folder, name, task), compare.parse(["--seed", "3"])
    table = checked_table(*parts.train, None, task)
    for method, depth in compare.jobs_of(options, task)[1:]:
        model = compare.MODELS[method].make(depth, options, task)
        if isinstance(model, jtrees.Recipe):
            kinds.checked(model).check(table.task, table.x.shape)
            assert getattr(model, "base", model).depth == depth
        else:
            assert model.random_state == 3


@pytest.mark.wide
@pytest.mark.parametrize("name", ["plane", "labels"])
def test_every_method_runs(folder, tmp_path, name):
    # Classes by all recipes: test_battery.
    methods = list(compare.MODELS) if name == "plane" else ["cart", "get", "dgt", "forest"]
    written, table = run(
        tmp_path, *on(folder, name), "--methods", *methods, *([] if name == "plane" else ["get-linear"])
    )
    assert list(table.index) == ["baseline", *methods]
    names = {file.name for file in written.iterdir()}
    assert {f"{row}_depth2.joblib" for row in methods if row != "forest"} <= names
    assert {f"{row}_depth2.npz" for row in methods if row in ("cart", "get", "get-polished", "raddt", "dgt")} <= names
    assert (table["leaves"] >= 1).all() and (table["numbers"] > table["leaves"] - 1).all()
    assert np.isfinite(table["test"]).all()
    if name == "labels":
        assert table.loc["get", "test"] > 0.8 and table.loc["get", "log_loss"] < 0.7


def test_the_tree_that_is_drawn_is_small_and_the_best_on_the_validation_set():
    row = lambda method, validate, test, leaves: outcome.Row(method, 2, 0, validate, test, None, leaves, 9, 1, 1)
    rows = [row("cart", 0.9, 0.9, 4), row("get", 0.5, 0.8, 4), row("dgt", 0.6, 0.1, 8), row("raddt", 0.8, 0.9, 64)]
    told = outcome.Outcome.__new__(outcome.Outcome)
    told.rows, told.trees = rows, {row.name: row.method for row in rows}
    assert told.shown_tree() == (rows[2], "dgt")
    told.rows = rows[:1]
    assert told.shown_tree() == (rows[0], "cart")


# --- When something goes wrong ---------------------------------------------------------------------------------------


def test_two_runs_within_a_second_keep_both(folder, tmp_path):
    arguments = [*on(folder, "plane"), "--methods", "cart"]
    assert [main(tmp_path, *arguments), main(tmp_path, *arguments)] == [0, 0]
    assert len(os.listdir(tmp_path / "out")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("where", ["between", "get", "baseline"])
def test_an_interruption_keeps_the_rows_that_are_done(folder, tmp_path, capsys, monkeypatch, where):
    """Between two fits, in the second fit, in the first."""
    known, handler = compare.measure, signal.getsignal(signal.SIGINT)

    def measure(method, *rest):
        if method == where:
            raise KeyboardInterrupt
        if method == "get":
            signal.raise_signal(signal.SIGINT)
        return known(method, *rest)

    monkeypatch.setattr(compare, "measure", measure)
    assert main(tmp_path, *on(folder, "plane"), "--methods", "cart", "get", "forest") == 130
    assert signal.getsignal(signal.SIGINT) is handler
    last, written = capsys.readouterr().out.splitlines()[-1], [*(tmp_path / "out").iterdir()]
    if where == "baseline":
        assert written == [] and last == "compare: interrupted; no row was finished"
        return
    done = ["baseline", "cart", "get"] if where == "between" else ["baseline", "cart"]
    assert list(pd.read_csv(written[0] / "table.csv")["method"]) == done
    assert last == f"compare: interrupted; {len(done)} of 4 rows are in {written[0]}"
    assert (written[0] / "figure.png").exists()


def test_a_fit_that_was_interrupted_makes_no_row(folder, monkeypatch):
    interrupted = Bunch(report=jtrees.search.FitReport(ended="interrupted"))
    monkeypatch.setattr(jtrees, "fit", lambda *_, **__: interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare.measure("get", 2, parts_of(folder, "plane", "regression"), compare.parse(QUICK), False)


def test_results_that_cannot_be_written_leave_nothing_behind(folder, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(outcome.joblib, "dump", full)
        assert main(tmp_path, *on(folder, "plane")) == 2
    said = capsys.readouterr()
    assert said.err == "compare: cannot write results: [Errno 28] No space left on device\n" and "baseline" in said.out
    monkeypatch.setattr(outcome.Outcome, "add", lambda *_: 1 / 0)  # an error of our own
    with pytest.raises(ZeroDivisionError):
        main(tmp_path, *on(folder, "plane"))
    assert os.listdir(tmp_path / "out") == []
    # The folder is tried before the first fit.
    monkeypatch.setattr(compare, "measure", lambda *_: 1 / 0)
    (tmp_path / "out").rmdir()
    (tmp_path / "out").touch()
    assert main(tmp_path, *on(folder, "plane")) == 2
    error = capsys.readouterr().err
    assert "compare: cannot write results" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--dataset", "plane", "--depth", "17"], "depth must be from 1 to 16"),
        (["--dataset", "plane", "--depth", "0"], "depth must be from 1 to 16"),
        (["--dataset", "labels", "--methods", "get-linear"], "get-linear are for regression"),
        (
            ["--dataset", "plane", "--columns", "x0=drop", "price=drop"],
            "--columns must name columns among x0, x1, x2; got 'price'",
        ),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(folder, tmp_path, capsys, arguments, said):
    assert said in refusal(tmp_path, capsys, "--data-dir", folder, *arguments)


B = ["--target", "b"]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("a,b\n1,2\n", [], "--target must be one of the columns a, b; none was named"),
        ("a,b\n1,2\n", ["--target", "c"], "--target must be one of the columns a, b; got 'c'"),
        ("a;b\n1;2, or 3\n", B, "has one column, 'a;b': try --separator ';'"),
        ("b\n2\n", B, "at least one column besides the target"),
        ("a,b\n", B, "has a header and no rows: at least 20"),
        ("a,b\n1,2\n2,3.5\n3,4.5\n", B, "has 3 rows: at least 20"),
        ("", B, "cannot read"),
        ("a,b\n" + "1,2,3\n" * 40, B, "rows have more fields than the header, which names 'a', 'b'"),
        ("a,b\n" + "1,2,\n" * 40 + "1,2,3\n", B, "rows have more fields than the header"),
        ("a,b\n" + "1,2\n" * 40 + "1,2,\n", B, "cannot read"),
        ("a,b\n" + "1,2\n" * 40, B, "must take at least two values, got '2'"),
        ("a,b\n" + "1,x\n2,y\n" * 20, [*B, "--task", "regression"], "for --task regression, got 'x'"),
        ("a,b\n" + "".join(f"1,x{i}\n" for i in range(40)), B, "40 labels of fewer than 5 rows"),
        ("a,b\n" + "1,2\n2,3\n" * 20, [*B, "--columns", "a=drop"], "x must have a column to learn from, got only"),
    ],
)
def test_files_that_cannot_be_used_get_one_line_that_helps(tmp_path, capsys, text, arguments, message):
    (tmp_path / "bad.csv").write_text(text)
    assert message in refusal(tmp_path, capsys, "--csv", tmp_path / "bad.csv", *arguments)


# --- Tables ----------------------------------------------------------------------------------------------------------


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


def test_columns_are_dropped(houses, tmp_path, capsys):
    arguments = ["--target", "verdict", "--methods", "cart", "--columns", "heating=drop", "street=drop"]
    written, _ = run(tmp_path, "--csv", houses, *arguments)
    assert "heating" not in capsys.readouterr().out
    kept = joblib.load(written / "cart_depth2.joblib")["encoder"].encodings
    assert list(kept) == ["area", "garden"]  # the cellar has no values


def test_twenty_rows_of_four_classes(tmp_path):
    rng = np.random.default_rng(0)
    pd.DataFrame({"a": rng.uniform(size=20), "kind": list("abcd") * 5}).to_csv(tmp_path / "few.csv", index=False)
    _, table = run(tmp_path, "--csv", tmp_path / "few.csv", "--target", "kind", "--methods", "cart")
    assert np.isfinite(table.loc["cart", ["validate", "test"]].astype(float)).all()


# --- Data by name ----------------------------------------------------------------------------------------------------


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


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(data.DataError, match="cannot read"):
        read_labelled(tmp_path / "none.csv", "y")
    with pytest.raises(data.DataError, match="does not exist"):
        data.load("plane", data_dir=tmp_path / "none")


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
    assert guess(data.load_frame("diabetes").y)[0] == "regression"
