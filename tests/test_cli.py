"""The command line: what it prints and writes, and how it refuses."""

import base64
from functools import partial
from html.parser import HTMLParser
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import jax
import numpy as np
import pandas as pd
import pytest
from sklearn import ensemble
import sweeps

import jtrees
from jtrees import cli
from jtrees.cli import arguments
from jtrees.cli.parser import DEFAULTS, LOSSES, parse
from jtrees.estimators import TreeClassifier, TreeRegressor
from jtrees.report.held_out import HeldOut, divided
from jtrees.report.page import write_report
from jtrees.report.rivals import rivals
from jtrees.tasks.custom import named

pytestmark = pytest.mark.usefixtures("standard_promotion")  # fits with Adam

QUICK = ["--set", "depth=2", "starts=2", "epochs=30"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def houses(n=300):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "id": [f"house {i}" for i in range(n)],
            "area": rng.uniform(20, 200, n).round(1),
            "heating": rng.choice(["gas", "wood", "oil & <b>"], n),
            "offered": (np.datetime64("2020-01-01") + rng.integers(0, 900, n)).astype(str),
        }
    )
    frame["price"] = (frame["area"] * 2 + 50 * (frame["heating"] == "gas") + rng.normal(size=n)).round(2)
    frame["verdict"] = np.where(frame["price"] > 250, "sold", "not yet")
    frame.loc[::9, "area"] = np.nan
    return frame


@pytest.fixture(scope="module", autouse=True)
def few_trees():
    """Forests and boosting of scikit-learn that a report compares with take long."""
    with pytest.MonkeyPatch.context() as patched:
        for task in ("Regressor", "Classifier"):
            for kind, number in (("RandomForest", "n_estimators"), ("HistGradientBoosting", "max_iter")):
                name = f"{kind}{task}"
                patched.setattr(ensemble, name, partial(getattr(ensemble, name), **{number: 20}))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a table, and models of a target of each kind."""
    folder = tmp_path_factory.mktemp("cli")
    houses().to_csv(folder / "houses.csv", index=False)
    with jax.numpy_dtype_promotion("standard"):
        for target, other in (("price", "verdict"), ("verdict", "price")):
            recipe = ["--recipe", "GET"] if target == "verdict" else []
            out = ["--out", folder / f"{target}.jtrees", *recipe, *QUICK]
            assert run("fit", folder / "houses.csv", "--target", target, "--columns", f"{other}=drop", *out) == 0
    return folder


def dated(frame):
    """The table with its dates, which a CSV has as text."""
    return frame.assign(offered=pd.to_datetime(frame["offered"]))


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])


def test_fit_says_what_it_read_and_learnt(folder, tmp_path, capsys):
    out = tmp_path / "model.jtrees"
    assert (
        run("fit", folder / "houses.csv", "--target", "price", "--columns", "verdict=drop", "--out", out, *QUICK) == 0
    )
    said, warned = capsys.readouterr()
    assert "houses: 300 rows, 4 columns; task: regression, as price holds" in said
    assert re.search(r"area: number, median [\d.]+, deviation [\d.]+, 34 missing", said)
    assert "heating: text, levels 'gas', 'oil & <b>', 'wood'" in said and "offered: date, median 20" in said
    verdict, scores, rival, kind, columns = said.splitlines()[1:6]
    assert re.fullmatch(r".*GET.*: mean squared error [\d.]+, [\d.]+ for .*, on 30 held-out rows", verdict)
    assert re.match(r"GET: R² 0\.\d+, RMSE [\d.]+, mean absolute error [\d.]+$", scores)
    assert re.match(r"best rival, (linear model|CART, depth 2): R² 0\.", rival)
    assert kind.startswith("kind of model: ") and "; found by " in kind
    assert re.match(r"top columns, by how much R² falls without them: area \([\d.]+\), heating \(", columns)
    assert re.search(r"\n# .*; found by .*\n(if|->) ", said) and "GET fitted to all 300 rows" in said
    assert f"written to {out}" in said
    assert warned.splitlines() == [
        "jtrees: columns of x are left out: 'id' (300 different texts in 300 rows): --columns id=text reads them "
        "otherwise"
    ]
    model = jtrees.load(out)
    assert isinstance(model, TreeRegressor) and model.recipe.depth == 2 and model.recipe.leaves == "linear"


def test_predictions_of_any_order_of_columns(folder, tmp_path, capsys):
    table = houses().drop(columns=["price", "verdict", "id"])
    table[["offered", "heating", "area"]].to_csv(tmp_path / "rows.csv", index=False)
    expected = jtrees.load(folder / "price.jtrees").model_.predict(
        table.assign(offered=pd.to_datetime(table["offered"]))
    )
    assert run("predict", folder / "price.jtrees", tmp_path / "rows.csv", "--out", tmp_path / "out.csv") == 0
    np.testing.assert_array_equal(
        pd.read_csv(tmp_path / "out.csv")["prediction"].astype(np.float32), np.float32(expected)
    )
    assert "300 rows written to" in capsys.readouterr().out
    assert run("predict", folder / "verdict.jtrees", folder / "houses.csv", "--probabilities") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "prediction,probability of not yet,probability of sold" and len(lines) == 301
    label, *chances = lines[1].split(",")
    assert label == ["not yet", "sold"][int(float(chances[1]) > 0.5)]
    np.testing.assert_allclose(sum(map(float, chances)), 1, rtol=1e-6)


@pytest.mark.slow
def test_a_table_of_parquet(tmp_path, capsys):
    houses().drop(columns="verdict").to_parquet(tmp_path / "houses.parquet")
    out = tmp_path / "model.jtrees"
    assert run("fit", tmp_path / "houses.parquet", "--target", "price", "--out", out, *QUICK) == 0
    assert run("predict", out, tmp_path / "houses.parquet") == 0
    assert len(capsys.readouterr().out.split("prediction\n")[1].splitlines()) == 300


def test_a_row_is_explained(folder, capsys):
    assert run("explain", folder / "verdict.jtrees", folder / "houses.csv", "--row", 7) == 0
    said = capsys.readouterr().out
    assert re.match(r"prediction: (sold|not yet)\n\npath\nnode 0: ", said)
    assert re.search(r"\nnearest class: [\d.e-]+ deviations away, with area: [\d.]+ -> \d", said)
    shapley = said.split("Shapley values of the probability of ")[1].splitlines()
    assert shapley[1].endswith(" mean") and {line.split(" ", 1)[1] for line in shapley[2:]} == {
        "area",
        "heating",
        "offered",
    }
    model, row = jtrees.load(folder / "verdict.jtrees"), houses().iloc[[7]]
    chance = model.model_.predict(dated(row)).max()
    np.testing.assert_allclose(sum(float(line.split()[0]) for line in shapley[1:]), chance, atol=2e-3)  # four digits
    assert run("explain", folder / "price.jtrees", folder / "houses.csv", "--row", 1) == 0
    assert "nearest leaf: " in capsys.readouterr().out
    assert run("explain", folder / "price.jtrees", folder / "houses.csv") == 0  # its one number is missing
    said = capsys.readouterr().out
    assert "no change of the columns of numbers within their ranges in the table leads to another leaf" in said


def test_files_for_other_machines(folder, tmp_path, capsys):
    for name in ("model.h", "model.py", "model.onnx", "model.stablehlo", "model.js"):
        assert run("export", folder / "verdict.jtrees", tmp_path / name) == 0
        assert "its outputs are probabilities of not yet, sold" in capsys.readouterr().out
    assert run("export", folder / "verdict.jtrees", tmp_path / "model.sql") == 2
    assert "columns must not be dates, which differ between databases, got 'offered'" in capsys.readouterr().err
    table = houses()
    chances = runpy.run_path(str(tmp_path / "model.py"))["predict"](table)
    model = jtrees.load(folder / "verdict.jtrees").model_
    np.testing.assert_allclose(chances, model.predict(dated(table)), rtol=1e-6)
    assert run("export", folder / "verdict.jtrees", tmp_path / "own.h", "--prefix", "own") == 0
    assert "own_predict(" in (tmp_path / "own.h").read_text()


class Parts(HTMLParser):
    """The headings, images and links of a page, and whether all tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.heads, self.images, self.links, self.text = [], [], [], {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "img":
            self.images.append(attributes)
        if tag == "a":
            self.links[attributes["download"]] = attributes["href"]
        if tag not in ("img", "meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "h2":
            self.heads.append(data)


@pytest.fixture(scope="module")
def page(folder):
    with jax.numpy_dtype_promotion("standard"):
        arguments = [
            folder / "houses.csv",
            "--target",
            "verdict",
            "--columns",
            "price=drop",
            "--out",
            folder / "page.html",
        ]
        assert run("report", *arguments, "--recipe", "GET", *QUICK) == 0
    return folder / "page.html"


@pytest.mark.slow
def test_a_report_is_one_page_with_all_its_parts(page, tmp_path):
    text = page.read_text()
    parts = Parts(text)
    assert not parts.open and "<script" not in text and not re.search('(src|href)="(?!data:)', text)
    assert parts.heads == [
        "Summary",
        "Data",
        "Comparison",
        "The tree",
        "Rules",
        "Splits and leaves",
        "Importances",
        "Calibration",
        "One prediction explained",
        "Use",
        "How this was made",
    ]
    for name in (
        "jtrees, GET",
        "Boosted",
        "constant",
        "linear model",
        "CART, depth 2",
        "random forest",
        "gradient boosting",
    ):
        assert name in parts.text
    assert (
        "--target verdict --columns price=drop --out" in parts.text and " ".join(QUICK) in parts.text
    )  # the whole command
    assert "left out: 300 different texts" in parts.text and "levels 'gas', 'oil & <b>', 'wood'" in parts.text
    names = [image["alt"] for image in parts.images]
    assert names == ["verdict in the training rows", "the tree", "splits", "leaves", "importances", "calibration"]
    for image in parts.images:
        assert len(base64.b64decode(image["src"].split("base64,")[1])) > 1000
    (tmp_path / "model.py").write_bytes(base64.b64decode(parts.links["model.py"].split("base64,")[1]))
    assert runpy.run_path(str(tmp_path / "model.py"))["predict"](houses()).shape == (300, 2)
    assert "jtrees_row" in base64.b64decode(parts.links["model.h"].split("base64,")[1]).decode()


@pytest.mark.slow
def test_leaves_and_rows_of_a_report_agree(tmp_path):
    """Also if a feature is a target mean, which a row must not influence."""
    rng = np.random.default_rng(0)
    x = pd.DataFrame({"shop": rng.choice([f"shop {i}" for i in range(60)], 400), "size": rng.normal(size=400)})
    y = np.where(rng.random(400) < 0.4, "yes", "no")
    recipe = jtrees.GET(depth=3, starts=2, epochs=30, shrink=False)
    model = TreeClassifier(recipe, random_state=0)
    out = tmp_path / "page.html"
    held_out = HeldOut(model, jtrees.losses.SquaredError(), x, y, share=0.25, seed=0, forests=True)
    write_report(out, held_out, name="shops", target="y", command="jtrees report")
    train, _ = divided(y, "classification", 0.25, 0)
    codes = (y[train] == "yes").astype(int)
    leaf = model.tree_.leaf_index(jtrees.tables.TableEncoder.fit(x.iloc[train], codes, task="classification")[1])
    rows, yes = np.bincount(leaf), np.bincount(leaf, codes)
    shares = (yes + codes.mean()) / (rows + 1)  # smoothed by one row of the mean
    expected = sorted((share, n) for share, n in zip(shares, rows, strict=True) if n)
    text = Parts(out.read_text()).text
    shown = re.findall(r"-> (yes|no): ([\d.e-]+)[^(\n]*\((\d+) rows?\)", text)
    found = sorted((float(p) if label == "yes" else 1 - float(p), int(n)) for label, p, n in shown)
    np.testing.assert_allclose(found, expected, atol=1e-3)  # three digits
    said = " ".join(text.split())
    assert len(found) > 3 and "rows in the tree, the rules and the charts are of the 300 training rows" in said


@pytest.mark.slow
@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_report_shows_dollar_signs(task, tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"$a_{$": rng.normal(size=80), "$b$": rng.choice(["$u_{$", "$v$"], 80)})
    frame["$y_{$"] = frame["$a_{$"] / 2 if task == "regression" else frame["$b$"].replace("$v$", "$1")
    frame.to_csv(tmp_path / "table.csv", index=False)
    out = tmp_path / "page.html"
    assert run("report", tmp_path / "table.csv", "--target", "$y_{$", "--out", out, "--recipe", "GET", *QUICK) == 0
    assert "$y_{$" in Parts(out.read_text()).text


@pytest.mark.slow
def test_the_default_is_that_of_the_estimators_and_the_better_model_is_named(tmp_path, capsys):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(600, 3)), columns=list("abc"))
    frame["y"] = np.where(np.sin(3 * frame["a"]) + frame["b"] * frame["c"] > 0, "yes", "no")
    frame.to_csv(tmp_path / "t.csv", index=False)
    given = ["fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "m.jtrees"]
    assert run(*given) == 0
    output = capsys.readouterr().out
    model = jtrees.load(tmp_path / "m.jtrees")
    assert "Boosted fitted to all 600 rows" in output
    trees = len(model.model_.model)
    assert f"kind of model: a sum of {trees} trees of depth" in output and "may be better than" not in output
    small = [*given, "--recipe", "GET", "--set", "depth=1", "starts=1", "epochs=5"]
    frame["y"] = np.where(frame["a"] + frame["b"] + frame["c"] > 0, "yes", "no")  # a linear model is better
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert run(*small) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    command = ["jtrees", "fit", str(tmp_path / "t.csv"), "--target", "y", "--out", str(tmp_path / "m.jtrees")]
    assert last.removeprefix("Boosted may be better than GET: ") == shlex.join([*command, "--recipe", "Boosted"])


@pytest.mark.wide
def test_a_report_of_a_regression_and_of_a_model_that_is_no_tree(folder, tmp_path):
    arguments = [
        folder / "houses.csv",
        "--target",
        "price",
        "--columns",
        "verdict=drop",
        "--out",
        tmp_path / "page.html",
    ]
    assert run("report", *arguments, "--recipe", "TEL", "--set", "trees=2", "depth=2", "epochs=3") == 0
    parts = Parts((tmp_path / "page.html").read_text())
    assert "Residuals" in parts.heads and "The tree" not in parts.heads and not parts.links
    assert "This kind of model is not exported" in parts.text and "CART, depth 4" in parts.text


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_browser_shows_the_report_without_an_error(page, tmp_path):
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    flags = [*flags.split(), "--disable-component-update", f"--user-data-dir={tmp_path / 'user'}"]
    flags += ["--enable-logging=stderr", "--dump-dom"]
    how = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    done = subprocess.run([CHROMIUM, *flags, page.as_uri()], **how)
    assert "CONSOLE" not in done.stderr
    parts = Parts(done.stdout)
    assert "The tree" in parts.heads and len(parts.images) == 6
    broken = page.read_text().replace("</body>", "<script>console.error('broken')</script></body>")
    (tmp_path / "broken.html").write_text(broken)  # an error would be seen
    done = subprocess.run([CHROMIUM, *flags, (tmp_path / "broken.html").as_uri()], **how)
    assert "CONSOLE" in done.stderr


FIT = ["fit", "houses.csv", "--target", "price", "--out", "model.jtrees"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fit", "houses.csv", "--target", "prize", "--out", "m"], "--target must be one of the columns id, area"),
        (["fit", "none.csv", "--target", "price", "--out", "m"], "cannot read none.csv: No such file"),
        (
            [*FIT, "--columns", "roof=drop"],
            "--columns must name columns among id, area, .*; got 'roof'",
        ),
        ([*FIT, "--recipe", "Bagged(Oak)"], "--recipe must be one of Bagged, .*, got 'Oak'"),
        ([*FIT, "--recipe", "Bagged"], r"--recipe: Bagged needs a base, such as Bagged\(LatentTree\)"),
        ([*FIT, "--recipe", "GET(DGT)"], "--recipe: GET takes no base"),
        ([*FIT, "--set", "depth"], "--set must be OPTION=VALUE, such as depth=3, got 'depth'"),
        ([*FIT, "--set", "deph=3"], "options of GET are 'depth', .*, got 'deph': write 'depth'"),
        ([*FIT, "--set", "depth=deep"], "depth must be"),
        ([*FIT, "--task", "classification"], "target 'price' has .* labels of fewer than 5 rows"),
        ([*FIT, "--loss", "oak"], "--loss must be one of squared_error, absolute_error, .*, tweedie, got 'oak'"),
        ([*FIT, "--loss", "huber", "--task", "classification"], "--loss is for regression, and --task is class"),
        ([*FIT, "--quantile", "0.9"], "--quantile goes with --loss quantile"),
        ([*FIT, "--loss", "quantile", "--quantile", "1"], "--quantile must be above 0 and below 1, got 1"),
        (
            ["fit", "claims.csv", "--target", "claims", "--out", "m", "--loss", "poisson"],
            r"target 'claims' must be at least 0 for Poisson\(\), got -2.0 in row 7",
        ),
        (
            ["report", "claims.csv", "--target", "claims", "--out", "m", "--loss", "gamma"],
            r"target 'claims' must be above 0 for Gamma\(\), got 0.0 in row 0",
        ),
        (
            ["fit", "houses.csv", "--target", "verdict", "--out", "m", "--loss", "poisson"],
            "target 'verdict' must hold finite numbers for --task regression",
        ),
        ([*FIT, "--loss", "poisson", "--recipe", "GET", "--set", "leaves=linear"], 'leaves must be "constant" for'),
        (["predict", "none.jtrees", "houses.csv"], "none.jtrees: No such file"),
        (["predict", "houses.csv", "houses.csv"], "houses.csv"),
        (
            ["predict", "price.jtrees", "short.csv"],
            "short.csv must have the columns of the model, got none .* 'area'",
        ),
        (["explain", "price.jtrees", "empty.csv"], "empty.csv has no rows"),
        (["predict", "price.jtrees", "houses.csv", "--probabilities"], "--probabilities are for a classifier"),
        (["explain", "price.jtrees", "houses.csv", "--row", "300"], "--row must be from 0 to 299, got 300"),
        (
            ["export", "price.jtrees", "model.exe"],
            "FILE must end in .h, .py, .onnx, .stablehlo, .sql, .js, .mjs, got 'model.exe'",
        ),
        (["export", "price.jtrees", "none/model.h"], "cannot read or write .*: No such file or directory"),
        (
            ["export", "tree.jtrees", "model.h"],
            "tree.jtrees must hold a model of jtrees fit, .*, got ObliqueTree",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(folder, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(folder)
    houses().drop(columns="area").to_csv("short.csv", index=False)
    houses()[:0].to_csv("empty.csv", index=False)
    counts = np.arange(300.0) % 4
    counts[[3, 7]] = np.nan, -2
    houses().assign(claims=counts).to_csv("claims.csv", index=False)
    jtrees.save(jtrees.load("price.jtrees").tree_, "tree.jtrees")
    before = set(os.listdir())
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert re.match(f"jtrees: .*{said}", lines[-1]) and all(line.startswith("jtrees: ") for line in lines)
    assert set(os.listdir()) == before


@pytest.mark.slow
def test_ctrl_c(folder, tmp_path, monkeypatch, capsys):
    """While it trains, the best until then is written; elsewhere nothing is."""
    fit = TreeRegressor.fit

    def interrupted(self, *given):
        fit(self, *given)
        self.report_ = self.report_.replace(ended="interrupted")
        return self

    monkeypatch.setattr(TreeRegressor, "fit", interrupted)
    fitting = ["fit", folder / "houses.csv", "--target", "price", *QUICK, "--out"]
    assert run(*fitting, tmp_path / "best.jtrees") == 130
    assert "interrupted: the model is the best one so far" in capsys.readouterr().err
    assert jtrees.load(tmp_path / "best.jtrees").tree_.depth == 2

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(TreeRegressor, "fit", stopped)
    assert run(*fitting, tmp_path / "none.jtrees") == 130
    columns, *rest = capsys.readouterr().err.splitlines()
    assert "columns of x are left out" in columns and rest == ["jtrees: interrupted"]
    assert not (tmp_path / "none.jtrees").exists()


def test_the_help_names_the_recipes_of_the_estimators():
    recipes = {"regression": TreeRegressor.default_recipe, "classification": TreeClassifier.default_recipe}
    assert {task: type(recipe).__name__ for task, recipe in recipes.items()} == DEFAULTS


def test_recipes_by_name():
    made = arguments.recipe_named("Bagged(BestOf(LatentTree))")
    assert made == jtrees.Bagged(jtrees.BestOf(jtrees.LatentTree()))
    recipe = ["--recipe", "Bagged(GET)", "--set", "trees=3", "base.leaves=linear"]
    options = parse(["fit", "t.csv", "--target", "y", "--out", "m", *recipe])
    assert arguments.recipe_of(options, "regression") == jtrees.Bagged(jtrees.GET(leaves="linear"), trees=3)
    assert (
        arguments.recipe_named("Boosted") == jtrees.Boosted()
        and arguments.recipe_named("Boosted(GET)").base == jtrees.GET()
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_by_name(loss):
    given = ["fit", "t.csv", "--target", "y", "--out", "m", "--loss", loss]
    options = parse(given)
    recipe = arguments.recipe_of(options, "regression")
    assert recipe.leaves == ("linear" if loss == "squared_error" else "constant")
    estimator = arguments.estimator_of(options, recipe, "regression")
    assert arguments.loss_of(options) == named(loss) == estimator._task(np.zeros(3)).loss_function
    assert arguments.loss_of(options).measure.split()[-1] in ("error", "loss", "deviance")
    if loss == "quantile":
        options = parse([*given, "--quantile", "0.9"])
        task = arguments.estimator_of(options, recipe, "regression")._task(np.zeros(3))
        assert arguments.loss_of(options) == jtrees.losses.Quantile(0.9) == task.loss_function


@pytest.mark.parametrize(
    "loss",
    sweeps.slow([named(name) for name in LOSSES], [named("poisson"), named("absolute_error")]),
    ids=str,
)
def test_rivals_of_a_report_minimise_its_loss_or_are_named(loss):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 2)), rng.gamma(2.0, size=80)
    task = jtrees.Regression(loss_function=loss)
    best = loss.of_predictions(loss.best(y, None), y).mean()
    for rows in (80, 6000):
        models, other_loss = rivals(task, rows, depth=2, seed=0, forests=True)
        program = isinstance(loss, (jtrees.losses.Quantile, jtrees.losses.AbsoluteError))
        approximate = isinstance(loss, jtrees.losses.Huber) or (program and rows > 5000)
        assert ("linear model" in other_loss) == approximate
        assert ("random forest" in other_loss) == (loss.measure not in ("mean squared error", "Poisson deviance"))
        for name, rival in models.items():
            lost = loss.of_predictions(rival.fit(x, y).predict(x), y).mean()
            assert lost < (1.3 if name in other_loss else 1.01) * best, name  # those of squared errors come near


@pytest.mark.wide
def test_counts_are_fitted_explained_and_exported(tmp_path, capsys):
    table = houses().drop(columns=["price", "verdict"])
    rate = 1 + 3 * (table["heating"] == "gas")
    table["claims"] = np.random.default_rng(0).poisson(rate)
    table.to_csv(tmp_path / "claims.csv", index=False)
    given = [tmp_path / "claims.csv", "--target", "claims", "--loss", "poisson"]
    out = tmp_path / "model.jtrees"
    assert run("fit", *given, "--out", out, *QUICK) == 0
    said = capsys.readouterr().out
    assert "task: regression, as --loss poisson is for numbers\n" in said
    found = re.search(r"Poisson deviance ([\d.]+), .*?([\d.]+) for a constant.*, on 30 held-out rows", said)
    assert float(found[1]) < 0.8 * float(found[2])
    model = jtrees.load(out)
    assert (model.loss, model.quantile) == ("poisson", None)
    assert model.tree_.leaves.name == "Values(Poisson)"
    assert run("explain", out, tmp_path / "claims.csv", "--row", 1) == 0
    assert "within their ranges in the table leads to another leaf" in capsys.readouterr().out  # it takes a category
    assert run("explain", out, tmp_path / "claims.csv", "--row", 1, "--extrapolate") == 0
    said = capsys.readouterr().out
    assert "nearest leaf: " in said
    x = dated(table).drop(columns="claims")
    predicted = model.predict(x.iloc[[1]])[0]
    parts = [float(line.split()[0]) for line in said.split("Shapley values\n")[1].splitlines()]
    np.testing.assert_allclose(sum(parts), predicted, atol=2e-3)  # four digits
    assert run("export", out, tmp_path / "model.py") == 0
    written = runpy.run_path(str(tmp_path / "model.py"))["predict"](table)
    np.testing.assert_allclose(written, model.predict(x), rtol=1e-6)
    page = tmp_path / "page.html"
    assert run("report", *given, "--out", page, *QUICK) == 0
    parts = Parts(page.read_text())
    assert "Poisson deviance" in parts.text and "By how much the Poisson deviance rises" in parts.text
    assert "They minimise the Poisson deviance.\nSeconds" in parts.text and "--loss poisson" in parts.text
    assert {"model.h", "model.py"} == set(parts.links)


@pytest.mark.wide
def test_a_report_of_boosted_quantiles(folder, tmp_path, capsys):
    given = [
        folder / "houses.csv",
        "--target",
        "price",
        "--columns",
        "verdict=drop",
        "--loss",
        "quantile",
        "--quantile",
        "0.9",
    ]
    recipe = ["--recipe", "Boosted(GET)", "--set", "rounds=5", "base.depth=2", "base.starts=1", "base.epochs=5"]
    assert run("report", *given, *recipe, "--out", tmp_path / "page.html") == 0
    parts = Parts((tmp_path / "page.html").read_text())
    assert "pinball loss" in parts.text and "rows below the prediction" in parts.text and "R²" not in parts.text
    assert "Exceptions, which minimise another loss: CART, depth 4; random forest." in parts.text
    assert "--loss quantile --quantile 0.9" in parts.text and {"model.h", "model.py"} == set(parts.links)
    assert run("fit", *given, *recipe, "--out", tmp_path / "model.jtrees") == 0
    assert "Boosted: pinball loss " in capsys.readouterr().out
    model = jtrees.load(tmp_path / "model.jtrees")
    rows = dated(houses()).drop(columns="price")
    share = np.mean(houses()["price"] < model.predict(rows))
    assert 0.75 < share < 1 and model.tree_ is None
    assert run("explain", tmp_path / "model.jtrees", folder / "houses.csv") == 0
    several = TreeRegressor(jtrees.GET(depth=2, starts=1, epochs=5), loss="quantile", quantile=(0.1, 0.5, 0.9))
    jtrees.save(several.fit(rows.drop(columns=["id", "verdict"]), houses()["price"]), tmp_path / "several")
    assert run("explain", tmp_path / "several", folder / "houses.csv", "--row", 1) == 0
    assert "Shapley values of the quantile 0.5\n" in capsys.readouterr().out
    assert run("predict", tmp_path / "several", folder / "houses.csv") == 0
    assert capsys.readouterr().out.startswith("prediction 0,prediction 1,prediction 2\n")


@pytest.mark.slow  # a process of its own
def test_the_module_is_a_program():
    done = subprocess.run([sys.executable, "-m", "jtrees", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"jtrees {jtrees.__version__}\n"


def test_without_its_packages(folder, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("jtrees.cli.") and name != "jtrees.cli.parser"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(cli, "commands", raising=False)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run("export", folder / "price.jtrees", folder / "none.h") == 2
    assert 'the command line needs pip install "jtrees[cli]"' in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["text", "drop", "date"])
def test_a_target_has_the_kind_of_numbers_or_none(folder, capsys, kind):
    given = ["--target", "price", "--columns", f"price={kind}", "--out", folder / "none.jtrees"]
    assert run("fit", folder / "houses.csv", *given) == 2
    assert "--columns must give the target a kind among number, " in capsys.readouterr().err
