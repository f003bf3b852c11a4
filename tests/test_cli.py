"""The command line: what it prints and writes, and how it refuses. Reports as pages are in test_page."""

import io
import os
import re
import runpy
import shlex
import signal
import sqlite3
import subprocess
import sys

import jax
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees import cli
from jtrees.cli import arguments
from jtrees.cli.files import DataError, Rules, read_rows
from jtrees.cli.parser import LOSSES, parse
from jtrees.estimators import BoostedClassifier, BoostedRegressor, TreeClassifier, TreeRegressor
from jtrees.tasks.custom import named
from tests import sweeps
from tests.houses import TREE, dated, houses, run

pytestmark = pytest.mark.usefixtures("standard_promotion")  # fits with Adam

RECIPE = jtrees.GET(depth=2, starts=1, epochs=4)
FIT = ["fit", "houses.csv", "--target", "price", "--out", "model.jtrees"]
LOSS = [*FIT, "--loss"]
CLAIMS = ["claims.csv", "--target", "claims", "--out", "m"]
PREDICT, EXPLAIN, EXPORT = ["predict", "price.jtrees"], ["explain", "price.jtrees"], ["export", "price.jtrees"]
MISTAKES = [
    (["fit", "houses.csv", "--target", "prize", "--out", "m"], "--target must be one of the columns id, area"),
    (["fit", "none.csv", "--target", "price", "--out", "m"], "cannot read none.csv: No such file"),
    ([*FIT, "--columns", "roof=drop"], "--columns must name columns among id, area, .*; got 'roof'"),
    ([*FIT, "--columns", "price=date"], "--columns must give the target a kind among number, .*; got date"),
    ([*FIT, "--recipe", "Bagged(Oak)"], "--recipe must be one of Bagged, .*, got 'Oak'"),
    ([*FIT, "--recipe", "Bagged"], r"--recipe: Bagged needs a base, such as Bagged\(LatentTree\)"),
    ([*FIT, "--recipe", "GET(DGT)"], "--recipe: GET takes no base"),
    ([*FIT, "--set", "deph=3"], "options of Boosted are 'base', .*, got 'deph'"),
    ([*FIT, "--set", "depth"], "--set must be OPTION=VALUE, such as depth=3, got 'depth'"),
    ([*FIT, "--tree", "--set", "deph=3"], "options of GET are 'depth', .*, got 'deph': write 'depth'"),
    ([*FIT, "--monotone", "area=1", "--monotone", "area=-1"], "--monotone must have one sign .*, got two for 'area'"),
    ([*FIT, "--columns", "id=drop", "--columns", "id=text"], "--columns must have one kind .*, got two for 'id'"),
    ([*FIT, "--max-seconds", "-5"], "--max-seconds must be"),
    ([*FIT, "--tree", "--monotone", "zz=1"], "--monotone must name columns of x, .*, got 'zz'"),
    ([*FIT, "--task", "classification"], "target 'price' has .* labels of fewer than 5 rows"),
    ([*LOSS, "huber", "--task", "classification"], "--loss is for regression, and --task is class"),
    ([*FIT, "--quantile", "0.9"], "--quantile goes with --loss quantile"),
    ([*LOSS, "quantile", "--quantile", "1"], "--quantile must be above 0 and below 1, got 1"),
    (["fit", *CLAIMS, "--loss", "poisson"], r"target 'claims' must be at least 0 for Poisson\(\), got -2.0 in row 7"),
    ([*LOSS, "poisson", "--target", "verdict"], "target 'verdict' must hold finite numbers for --task regression"),
    (["predict", "houses.csv", "houses.csv"], "houses.csv is not a complete file"),
    ([*PREDICT, "short.csv"], "short.csv must have the columns of the model, got none .* 'area'"),
    ([*PREDICT, "houses.csv", "--probabilities"], "--probabilities are for a classifier"),
    ([*PREDICT, "houses.csv", "--out", "o.parquet"], "--out must be a CSV file, got 'o.parquet'"),
    ([*PREDICT, "houses.csv", "--out", "-"], "--out must be the name of a file, got '-'"),
    ([*EXPLAIN, "empty.csv"], "empty.csv has no rows"),
    ([*EXPLAIN, "houses.csv", "--row", "300"], "--row must be from 0 to 299, got 300"),
    ([*EXPORT, "model.exe"], "FILE must end in .h, .py, .onnx, .stablehlo, .sql, .js, .mjs, got 'model.exe'"),
    ([*EXPORT, "model.sql"], "columns must not be dates, which differ between databases, got 'offered'"),
    (["export", "tree.jtrees", "model.h"], "tree.jtrees must hold a model of jtrees fit, .*, got ObliqueTree"),
]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    """Sums of two trees by default, which stand beside a tree in every verdict."""
    recipe = jtrees.Boosted(jtrees.GET(depth=1, epochs=2), rounds=2, patience=None)
    for estimator in (BoostedRegressor, BoostedClassifier):
        monkeypatch.setattr(estimator, "default_recipe", recipe)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with tables, and models of a target of each kind."""
    folder, table = tmp_path_factory.mktemp("cli"), houses()
    counts = np.arange(300.0) % 4
    counts[[3, 7]] = np.nan, -2
    tables = {"houses": table, "short": table.drop(columns="area"), "empty": table[:0]}
    for name, rows in (tables | {"claims": table.assign(claims=counts)}).items():
        rows.to_csv(folder / f"{name}.csv", index=False)
    x = dated(table[["area", "heating", "offered"]])
    with jax.numpy_dtype_promotion("standard"):
        models = {"price": TreeRegressor(RECIPE, random_state=0), "verdict": TreeClassifier(RECIPE, random_state=0)}
        for name, model in models.items():
            jtrees.save(model.fit(x, table[name]), folder / f"{name}.jtrees")
    jtrees.save(models["price"].tree_, folder / "tree.jtrees")
    return folder


def test_fit_says_what_it_read_and_learnt(folder, tmp_path, capsys):
    out = tmp_path / "model.jtrees"
    options = ["--target", "price", "--columns", "verdict=drop", "--out", out]
    assert run("fit", folder / "houses.csv", *options, *TREE) == 0
    output, warned = capsys.readouterr()
    for pattern in (
        "houses: 300 rows, 4 columns; task: regression, as price holds",
        r"area: number, median [\d.]+, deviation [\d.]+, 34 missing",
        "heating: text, levels 'gas', 'oil & <b>', 'wood'",
        r"\n.*GET.*: mean squared error [\d.]+, [\d.]+ for .*, on 30 held-out rows\n",
        r"\nGET: R² 0\.\d+, RMSE [\d.]+, mean absolute error [\d.]+\n",
        r"\nbest rival, (linear model|CART, depth 2): R² 0\.",
        r"\nkind of model: .*; found by .*\ntop columns, by how much R² falls without them: area \([\d.]+\), heat",
        r"\n# .*; found by .*\n(score = |if |-> )",
    ):
        assert re.search(pattern, output), pattern
    assert "columns of x are left out: 'id' (300 different texts in 300 rows): --columns id=t" in warned
    model = jtrees.load(out)
    assert isinstance(model, TreeRegressor) and model.recipe.depth == 2 and model.recipe.leaves == "linear"


def test_predictions_of_any_order_of_columns(folder, tmp_path, capsys):
    table = houses()[["offered", "heating", "area"]]
    table.to_parquet(tmp_path / "rows.parquet")
    expected = jtrees.load(folder / "price.jtrees").predict(dated(table)[["area", "heating", "offered"]])
    assert run("predict", folder / "price.jtrees", tmp_path / "rows.parquet", "--out", tmp_path / "out.csv") == 0
    np.testing.assert_allclose(pd.read_csv(tmp_path / "out.csv")["prediction"], expected, rtol=1e-6)
    assert "300 rows written to" in capsys.readouterr().out
    assert run("predict", folder / "verdict.jtrees", folder / "houses.csv", "--probabilities") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "prediction,probability of not yet,probability of sold" and len(lines) == 301
    label, *chances = lines[1].split(",")
    assert label == ["not yet", "sold"][int(float(chances[1]) > 0.5)]


def test_one_row_is_no_plural(folder, tmp_path, capsys):
    houses().head(1).to_csv(file := tmp_path / "house.csv", index=False)
    assert run("predict", folder / "price.jtrees", file, "--out", tmp_path / "out.csv") == 0
    assert capsys.readouterr().out.startswith("1 row written to ")


def test_a_row_is_explained(folder, capsys):
    assert run("explain", folder / "verdict.jtrees", folder / "houses.csv", "--row", 7) == 0
    output, area = capsys.readouterr().out, houses()["area"][7]
    assert re.match(r"prediction: (sold|not yet)\n\npath\nnode 0: ", output)
    assert re.search(rf"\nnearest class: [\d.e-]+ deviations away, with area: {area:g} -> \d", output)
    shapley = output.split("Shapley values of the probability of ")[1].splitlines()
    names = {line.split(" ", 1)[1] for line in shapley[2:]}
    assert shapley[1].endswith(" mean") and names == {"area", "heating", "offered"}
    row = dated(houses().iloc[[7]])[["area", "heating", "offered"]]
    chance = jtrees.load(folder / "verdict.jtrees").predict_proba(row).max()
    np.testing.assert_allclose(sum(float(line.split()[0]) for line in shapley[1:]), chance, atol=2e-3)  # four digits
    assert run("explain", folder / "price.jtrees", folder / "houses.csv") == 0  # its one number is missing
    assert "no change of the columns of numbers within their ranges in the table" in capsys.readouterr().out


@pytest.mark.parametrize("dates", [True, False])
def test_files_for_other_machines(dates, folder, tmp_path, capsys):
    table, file = houses()[["area", "heating", "offered"][: 3 if dates else 1]], folder / "verdict.jtrees"
    if not dates:
        jtrees.save(
            TreeClassifier(RECIPE, random_state=0).fit(table, houses()["verdict"]), file := tmp_path / "m.jtrees"
        )
    for name in ("model.h", "model.py", "model.onnx", "model.stablehlo") if dates else ("model.sql", "model.js"):
        assert run("export", file, tmp_path / name) == 0
        assert "its outputs are probabilities of not yet, sold" in capsys.readouterr().out
    if dates:
        assert "jtrees_predict(" in (tmp_path / "model.h").read_text()
        chances = runpy.run_path(str(tmp_path / "model.py"))["predict"](table)
    else:
        with sqlite3.connect(":memory:") as database:
            table.to_sql("rows", database)
            answers = pd.read_sql_query((tmp_path / "model.sql").read_text().rstrip().rstrip(";"), database)
        chances = answers[["prediction_not yet", "prediction_sold"]]
    expected = jtrees.load(file).predict_proba(dated(table) if dates else table)
    np.testing.assert_allclose(chances, expected, rtol=1e-6)


def test_a_sum_is_saved_and_a_tree_is_shown_beside_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TreeRegressor, "default_recipe", RECIPE)
    houses().to_csv(tmp_path / "t.csv", index=False)
    options = ["fit", tmp_path / "t.csv", "--target", "price", "--columns", "verdict=drop", "--out", tmp_path / "m"]
    assert run(*options, "--set", "rounds=3") == 0
    model, output = jtrees.load(tmp_path / "m"), capsys.readouterr().out
    assert isinstance(model, BoostedRegressor) and len(model.model_.model) == 3
    command = shlex.join(["jtrees", *map(str, options), "--tree"])
    assert re.search(r"\nkind of model: a sum of 3 trees", output) and f" {command} " in output
    assert re.search(r"; rows are of the 270 training rows\n(score = |if |-> )", output)
    assert output.splitlines()[0].startswith("t: 300 rows")


@pytest.mark.parametrize("kind", sweeps.slow(["--tree", "--recipe"], ["--tree"]))
def test_the_better_of_a_tree_and_a_sum_is_named(kind, tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(600, 3)), columns=list("abc"))
    frame["y"] = np.where(frame["a"] * frame["b"] > 0, "yes", "no")
    frame.to_csv(tmp_path / "t.csv", index=False)
    options = ["fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "m.jtrees"]
    boosted = jtrees.Boosted(jtrees.GET(depth=3, epochs=20), rounds=10, learning_rate=0.5, patience=None)
    tree = jtrees.GET(depth=1, starts=1, epochs=5, ridge=False)
    monkeypatch.setattr(BoostedClassifier, "default_recipe", boosted)
    monkeypatch.setattr(TreeClassifier, "default_recipe", tree)
    weak = ["--tree"] if kind == "--tree" else ["--recipe", "GET", "--set", "depth=1", "starts=1", "epochs=5"]
    assert run(*options, *weak) == 0
    command = shlex.join(["jtrees", *map(str, options)])
    assert capsys.readouterr().out.splitlines()[-1] == f"Boosted is better than GET: {command}"
    if kind == "--tree":
        monkeypatch.setattr(BoostedClassifier, "default_recipe", boosted.replace(rounds=1, learning_rate=1e-6))
        monkeypatch.setattr(TreeClassifier, "default_recipe", jtrees.GET(depth=3, starts=2, epochs=200))
        assert run(*options) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"GET is better than Boosted: {command} --tree"


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_line_and_exit_code_2(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    before = set(os.listdir())
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert re.match(f"jtrees: .*{message}", lines[-1]) and all(line.startswith("jtrees: ") for line in lines)
    assert set(os.listdir()) == before


OUTPUTS = {
    "fit": ["fit", "houses.csv", "--target", "price", *TREE, "--out"],
    "report": ["report", "houses.csv", "--target", "price", *TREE, "--out"],
    "predict": [*PREDICT, "houses.csv", "--out"],
    "export": EXPORT,
}


@pytest.mark.parametrize("command", OUTPUTS)
@pytest.mark.parametrize(("out", "reason"), [("missing/m.py", "No such file or directory"), ("m.py", "Is a directory")])
def test_a_target_that_cannot_be_written_is_an_error_before_the_work(
    folder, tmp_path, monkeypatch, capsys, command, out, reason
):
    monkeypatch.chdir(folder)
    (tmp_path / "m.py").mkdir()
    if command != "export":  # whose work is the file
        monkeypatch.setattr(TreeRegressor, "fit", None)
        monkeypatch.setattr(TreeRegressor, "predict", None)
    assert run(*OUTPUTS[command], tmp_path / out) == 2
    assert capsys.readouterr().err.splitlines() == [f"jtrees: cannot read or write {tmp_path / out}: {reason}"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "t.csv", "--target", "price", "--out", "t.csv"], "--out must be another file than TABLE, got 't.csv'"),
        (
            ["report", "t.csv", "--target", "price", "--out", "link"],
            "--out must be another file than TABLE, got 'link'",
        ),
        (["predict", "m.py", "t.csv", "--out", "./link"], "--out must be another file than TABLE, got 'link'"),
        (["predict", "m.py", "t.csv", "--out", "m.py"], "--out must be another file than MODEL, got 'm.py'"),
        (["export", "m.py", "m.py"], "FILE must be another file than MODEL, got 'm.py'"),
    ],
)
def test_the_output_replaces_no_input(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    for name in ("t.csv", "m.py"):
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to("t.csv")
    assert run(*words) == 2
    assert capsys.readouterr().err.splitlines() == [f"jtrees: {message}"]
    assert [(tmp_path / name).read_text() for name in ("t.csv", "m.py", "link")] == ["t.csv", "m.py", "t.csv"]


def test_a_seed_is_checked(capsys):
    for seed in ("-1", str(2**32), "x"):
        with pytest.raises(SystemExit):
            parse([*FIT, "--seed", seed])
        expected = f"argument --seed: must be a whole number from 0 to 4294967295, got {seed}"
        assert capsys.readouterr().err.splitlines()[-1].endswith(expected)
    assert parse([*FIT, "--seed", str(2**32 - 1)]).seed == 2**32 - 1


@pytest.mark.parametrize(
    ("text", "rules", "message"),
    [
        ("a,t,y\n0.5,a,1\n0.5\n", {}, "1 row has fewer fields than the header, the first in line 3"),
        ('sep=;\na;b;c\n1;"x\ny";3\n\n  \n1;2\n1;2;\n3\n', {}, "2 rows have .* in line 7"),
        (f"a,b\n1,{'x' * 200_000}\n1\n", {}, "1 row has .* in line 3"),
        ("a b c\n1 2 3\n1 2\n", {"separator": " "}, "1 row has .* in line 3"),
        ("a,b\n1,\n\n,\n", {}, None),
    ],
)
def test_short_rows_are_counted(tmp_path, text, rules, message):
    (tmp_path / "t.csv").write_text(text)
    frame, changes = read_rows(tmp_path / "t.csv", Rules(**rules))
    assert frame.iloc[-1, -1] is None and len(changes) == (message is not None)
    assert message is None or re.fullmatch(message, changes[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"t": "b", "y": 1}]', "got a JSON file: save the table as CSV"),
        (b'{"t": "b"}\n{"t": "c"}', "got a JSON file: save the table as CSV"),
        (b"ARROW1\0\0", "got an Arrow or Feather file: save the table as Parquet or CSV"),
        ("a,b\n1,2\n".encode("utf-16-le"), "has zero bytes, as UTF-16: try --encoding utf-16-le"),
        ("a,b\n1,2\n".encode("utf-16-be"), "has zero bytes, as UTF-16: try --encoding utf-16-be"),
    ],
)
def test_files_of_other_formats_are_named(tmp_path, content, message):
    (tmp_path / "t.csv").write_bytes(content)
    for encoding in ("utf-8", "latin-1"):
        with pytest.raises(DataError, match=message):
            read_rows(tmp_path / "t.csv", Rules(encoding=encoding))
    if "utf-16" in message:
        assert list(read_rows(tmp_path / "t.csv", Rules(encoding=message.split()[-1]))[0]) == ["a", "b"]
    (tmp_path / "t.csv").write_text("[a],[b]\n1,2\n")
    assert list(read_rows(tmp_path / "t.csv", Rules())[0]) == ["[a]", "[b]"]


def test_predictions_for_a_program_are_utf_8(tmp_path, monkeypatch):
    x, y = np.arange(40.0)[:, None], np.array(["日", "月"]).repeat(20)
    jtrees.save(TreeClassifier(RECIPE, random_state=0).fit(x, y), tmp_path / "m.jtrees")
    pd.DataFrame(x, columns=["a"]).to_csv(tmp_path / "t.csv", index=False)
    for is_terminal, labels in ((False, {"日", "月"}), (True, {"\\u65e5", "\\u6708"})):
        shown = io.BytesIO()
        stream = io.TextIOWrapper(shown, encoding="latin-1")
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)  # noqa: B023
        monkeypatch.setattr(sys, "stdout", stream)
        assert run("predict", tmp_path / "m.jtrees", tmp_path / "t.csv") == 0
        monkeypatch.undo()
        assert set(shown.getvalue().decode().split()) == {"prediction", *labels}


class Gone(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("output", sweeps.quick(["ascii", "gone"], ["gone"]))
def test_an_output_that_cannot_be_shown_costs_nothing(folder, tmp_path, monkeypatch, output):
    monkeypatch.chdir(folder)
    shown = io.BytesIO()
    stream = Gone() if output == "gone" else io.TextIOWrapper(shown, encoding=output)
    monkeypatch.setattr(sys, "stdout", stream)
    status = run(*OUTPUTS["fit"], tmp_path / "m.jtrees")
    monkeypatch.undo()
    assert isinstance(jtrees.load(tmp_path / "m.jtrees"), TreeRegressor)
    assert status == (141 if output == "gone" else 0)
    if output != "gone":
        text = shown.getvalue().decode(output)
        assert "GET: R\\xb2 " in text and "written to" in text


@pytest.mark.slow
def test_an_environment_variable_that_is_refused_is_an_error_of_one_line():
    """The variable ``JTREES_CACHE`` is read when the commands are imported."""
    command = [sys.executable, "-m", "jtrees", *FIT]
    refused = os.environ | {"JTREES_CACHE": os.path.join(__file__, "below")}
    done = subprocess.run(command, env=refused, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"jtrees: JTREES_CACHE: folder must be one that can be made .*, got '.*\n", done.stderr)


@pytest.mark.slow
def test_ctrl_c(folder, tmp_path, monkeypatch, capsys):
    """While it trains, the best until then is written; elsewhere nothing is."""
    fit = TreeRegressor.fit

    def interrupted(self, *options):
        model = fit(self, *options)
        model.report_ = model.report_.replace(ended="interrupted")
        return model

    monkeypatch.setattr(TreeRegressor, "fit", interrupted)
    fitting = ["fit", folder / "houses.csv", "--target", "price", *TREE, "--out"]
    assert run(*fitting, tmp_path / "best.jtrees") == 130
    assert "interrupted: the model is the best one so far" in capsys.readouterr().err
    assert jtrees.load(tmp_path / "best.jtrees").tree_.depth == 2
    assert run("report", *fitting[1:], tmp_path / "best.html") == 130
    assert "interrupted" in capsys.readouterr().err and (tmp_path / "best.html").exists()

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(TreeRegressor, "fit", stopped)
    assert run(*fitting, tmp_path / "none.jtrees") == 130
    assert capsys.readouterr().err.splitlines()[1:] == ["jtrees: interrupted"]
    assert not (tmp_path / "none.jtrees").exists()


def test_sigterm_removes_the_unfinished_file(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(TreeRegressor, "fit", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit, match="143"):
        run("fit", folder / "houses.csv", "--target", "price", *TREE, "--out", tmp_path / "m.jtrees")
    assert os.listdir(tmp_path) == [] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
def test_sigterm_ends_the_program(tmp_path):
    os.mkfifo(table := tmp_path / "t.csv")
    command = [sys.executable, "-m", "jtrees", "fit", table, "--target", "y", "--out", tmp_path / "m.jtrees"]
    with subprocess.Popen(command) as process, open(table, "w"):  # opened once the program reads the table
        assert len(os.listdir(tmp_path)) == 2  # with the unfinished file
        process.terminate()
        assert process.wait(60) == 143
    assert os.listdir(tmp_path) == ["t.csv"]


def test_recipes_by_name():
    for name, recipe in (
        ("Bagged(BestOf(LatentTree))", jtrees.Bagged(jtrees.BestOf(jtrees.LatentTree()))),
        ("Boosted", jtrees.Boosted()),
        ("Boosted(GET)", jtrees.Boosted(jtrees.GET())),
    ):
        assert arguments.recipe_named(name) == recipe
    options = parse([*FIT, "--recipe", "Bagged(GET)", "--set", "trees=3", "base.leaves=linear"])
    assert arguments.recipe_of(options, "regression") == jtrees.Bagged(jtrees.GET(leaves="linear"), trees=3)
    for task, tree, boosted in (
        ("regression", TreeRegressor, BoostedRegressor),
        ("classification", TreeClassifier, BoostedClassifier),
    ):
        for words, kind in (([], boosted), (["--tree"], tree)):
            recipe = arguments.recipe_of(options := parse([*FIT, *words]), task)
            assert recipe == kind.default_recipe and type(arguments.estimator_of(options, recipe, task)) is kind
        options = parse([*FIT, "--recipe", "DGT"])
        assert type(arguments.estimator_of(options, arguments.recipe_of(options, task), task)) is tree
    with pytest.raises(SystemExit):
        parse([*FIT, "--tree", "--recipe", "GET"])


def test_losses_by_name():
    losses = [(loss, [], named(loss)) for loss in LOSSES]
    for loss, level, expected in [*losses, ("quantile", ["--quantile", "0.9"], jtrees.losses.Quantile(0.9))]:
        options = parse([*LOSS, loss, *level, "--tree"])
        recipe = arguments.recipe_of(options, "regression")
        assert recipe.leaves == ("linear" if loss == "squared_error" else "constant")
        estimator = arguments.estimator_of(options, recipe, "regression")
        assert arguments.loss_of(options) == expected and estimator.loss == loss


def test_without_its_packages(folder, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("jtrees.cli.") and name != "jtrees.cli.parser"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(cli, "commands", raising=False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run("export", folder / "price.jtrees", folder / "none.h") == 2
    assert 'the command line needs pip install "jtrees[cli]"' in capsys.readouterr().err


def test_an_option_may_be_repeated():
    given = [*FIT, "--set", "rounds=50", "--set", "learning_rate=0.3", "--monotone", "age=1", "--monotone", "price=-1"]
    options = parse([*given, "--missing", "-", "--missing", "x", "--columns", "a=text", "--columns", "b=drop"])
    assert options.set == ["rounds=50", "learning_rate=0.3"] and options.missing == ["-", "x"]
    assert arguments.signs_of(options) == {"age": 1, "price": -1} and options.columns == ["a=text", "b=drop"]
    assert parse([*FIT, "--missing"]).missing == [] and parse(FIT).missing is None
