"""The report as a page: its parts, its rules and figures, its rivals, and how a browser shows it."""

import base64
from functools import partial
import html
from html.parser import HTMLParser
import json
import re
import runpy
import shlex
import subprocess

import jax
import numpy as np
import pandas as pd
import pytest
from sklearn import ensemble

import jtrees
from jtrees.cli.parser import LOSSES
from jtrees.data.held_out import divided
from jtrees.estimators import BoostedClassifier, TreeClassifier, TreeRegressor
from jtrees.report.held_out import HeldOut, HeldOutRows
from jtrees.report.page import write_report
from jtrees.report.rivals import rivals
from jtrees.tables.inference import inferred
from jtrees.tasks.custom import named
from tests import needs, sweeps
from tests.houses import QUICK, TREE, dated, houses, run
from tests.recipes import WEAK

pytestmark = pytest.mark.usefixtures("standard_promotion")  # fits with Adam


@pytest.fixture(scope="module", autouse=True)
def few_trees():
    """The rivals of a report are small: forests, boosting of scikit-learn, and the sum of trees."""
    with pytest.MonkeyPatch.context() as patched:
        for task in ("Regressor", "Classifier"):
            for kind, number in (("RandomForest", "n_estimators"), ("HistGradientBoosting", "max_iter")):
                name = f"{kind}{task}"
                patched.setattr(ensemble, name, partial(getattr(ensemble, name), **{number: 20}))
        patched.setattr(BoostedClassifier, "default_recipe", jtrees.Boosted(WEAK, rounds=2, patience=None))
        yield


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


def contents(address):
    return base64.b64decode(address.split("base64,")[1])


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    houses().to_csv(folder / "houses.csv", index=False)
    options = [folder / "houses.csv", "--target", "verdict", "--columns", "price=drop", "--out", folder / "page.html"]
    with jax.numpy_dtype_promotion("standard"):
        assert run("report", *options, "--recipe", "GET", *QUICK) == 0
    return folder / "page.html"


@pytest.mark.slow
def test_a_report_is_one_page_with_all_its_parts(page, tmp_path):
    text = page.read_text()
    parts = Parts(text)
    assert not parts.open and "<script" not in text and not re.search('(src|href)="(?!data:)', text)
    heads = "Summary, Data, Comparison, The tree, Rules, Splits and leaves, Importances, Calibration"
    assert parts.heads == [*heads.split(", "), "One prediction explained", "Use", "How this was made"]
    rivals = ("Boosted", "constant", "linear model", "CART, depth 2", "random forest", "gradient boosting")
    for shown in ("jtrees, GET", *rivals, "--target verdict --columns price=drop --out", " ".join(QUICK)):
        assert shown in parts.text
    assert "left out: 300 different texts" in parts.text and "levels 'gas', 'oil & <b>', 'wood'" in parts.text
    share = houses()["verdict"].value_counts(normalize=True).max()
    constant = re.search(r"GET: accuracy 0.\d+ \((0.\d+) for a constant\)", parts.text)
    assert float(constant[1]) == pytest.approx(share, abs=0.02)  # the held-out rows are stratified
    images = [image["alt"] for image in parts.images if image["alt"] != "split"]
    assert images == ["verdict in the training rows", "the tree", "leaves", "importances", "calibration"]
    assert all(len(contents(image["src"])) > 1000 for image in parts.images)
    (tmp_path / "model.py").write_bytes(contents(parts.links["model.py"]))
    assert runpy.run_path(str(tmp_path / "model.py"))["predict"](houses()).shape == (300, 2)
    assert "jtrees_row" in contents(parts.links["model.h"]).decode()


@pytest.mark.slow
def test_a_report_of_a_sum_shows_a_tree_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(TreeRegressor, "default_recipe", jtrees.GET(depth=2, starts=1, epochs=300))
    houses().to_csv(tmp_path / "houses.csv", index=False)
    small = ["--set", "rounds=1", "learning_rate=1e-6", "patience=None", "base.epochs=2"]
    table, page = tmp_path / "houses.csv", tmp_path / "page.html"
    options = [table, "--target", "price", "--columns", "verdict=drop", "--out", page]
    assert run("report", *options, *small) == 0
    parts = Parts(page.read_text())
    assert {"The tree", "Rules", "Splits and leaves"} < set(parts.heads)
    text = " ".join(parts.text.split())
    assert "The tree of GET stands beside the model, which is not one tree." in text
    assert f"GET is better than Boosted: {shlex.join(['jtrees', 'report', *map(str, options), '--tree'])}" in text


@pytest.mark.slow
def test_leaves_and_rows_of_a_report_agree(tmp_path):
    """Also if a feature is a target mean, which a row must not influence."""
    rng = np.random.default_rng(0)
    x = pd.DataFrame({"shop": rng.choice([f"shop {i}" for i in range(60)], 400), "size": rng.normal(size=400)})
    y = np.where(rng.random(400) < 0.4, "yes", "no")
    model = TreeClassifier(jtrees.GET(depth=3, starts=2, epochs=30, shrink=False), random_state=0)
    out = tmp_path / "page.html"
    other = BoostedClassifier({"rounds": 2, "patience": None})
    data = {"x": x, "y": y, "frame": inferred(x)[1], "loss": jtrees.losses.SquaredError()}
    held_out = HeldOut(model, other, share=0.25, seed=0, forests=True, **data)
    write_report(out, held_out, name="shops", target="y", command="jtrees report")
    train, _ = divided(len(y), 0.25, 0, y)
    codes = (y[train] == "yes").astype(int)
    leaf = model.tree_.leaf_index(jtrees.tables.TableEncoder.fit(x.iloc[train], codes, task="classification")[1])
    rows, yes = np.bincount(leaf), np.bincount(leaf, codes)
    shares = (yes + codes.mean()) / (rows + 1)  # smoothed by one row of the mean
    text = " ".join(Parts(out.read_text()).text.split())
    lines = re.findall(r"-> leaf (\d+): .*?yes: ([\d.e-]+) \((\d+) row", text)
    shown = {int(k): (float(p), int(n)) for k, p, n in lines}
    expected = {k: (shares[k], n) for k, n in enumerate(rows) if n}
    assert len(expected) > 3 and set(expected) <= set(shown)
    for k, numbers in expected.items():
        assert shown[k] == pytest.approx(numbers, abs=1e-3)  # three digits
    assert "rows in the tree, the rules and the charts are of the 300 training rows" in text


@pytest.mark.slow
def test_rows_without_a_class_have_no_auc():
    x, y = pd.DataFrame({"size": np.arange(60.0)}), np.tile(["a", "b", "c"], 20)
    options = {"frame": inferred(x)[1], "share": 0.25, "seed": 0}
    rows = HeldOutRows(x, y, "classification", jtrees.losses.SquaredError(), **options)
    chances = np.full((3, 3), 1 / 3)
    assert rows.scores_of(chances, np.arange(3))["AUC"] == 0.5
    assert list(rows.scores_of(chances, np.array([0, 1, 1]))) == ["accuracy", "balanced accuracy", "log loss"]


def test_a_report_shows_dollar_signs(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"$a_{$": rng.normal(size=80), "$y_{$": rng.choice(["$u_{$", "$1"], 80)})
    frame.to_csv(tmp_path / "table.csv", index=False)
    out = tmp_path / "page.html"
    assert run("report", tmp_path / "table.csv", "--target", "$y_{$", "--out", out, "--recipe", "GET", *QUICK) == 0
    assert "$y_{$" in Parts(out.read_text()).text


@pytest.mark.slow
@needs.mark(needs.CHROMIUM, "Chromium")
def test_a_browser_shows_the_report_without_an_error_and_on_a_telephone(page, tmp_path):
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    flags = [*flags.split(), "--disable-component-update", f"--user-data-dir={tmp_path / 'user'}"]
    flags += ["--enable-logging=stderr", "--dump-dom"]

    def shown(text):
        (tmp_path / "shown.html").write_text(text)
        command = [needs.CHROMIUM, *flags, (tmp_path / "shown.html").as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    text = page.read_text()
    done, parts = shown(text), Parts(text)
    assert "CONSOLE" not in done.stderr and Parts(done.stdout).heads == parts.heads
    assert "CONSOLE" in shown(text.replace("</body>", "<script>console.error('broken')</script></body>")).stderr
    script = """onload = () => {
      const page = document.querySelector("iframe").contentDocument, all = (name) => [...page.querySelectorAll(name)];
      const widths = [page.documentElement, ...all(".code"), ...all("pre")].map((x) => x.scrollWidth - x.clientWidth);
      const scales = all(".chart").map((image) => image.width / image.naturalWidth);
      document.body.innerText = "result " + JSON.stringify([Math.max(...widths), Math.min(...scales)]);
    }"""
    frame = f'<iframe srcdoc="{html.escape(text)}" width="390" height="900" style="border: 0"></iframe>'
    overflow, scale = json.loads(re.search(r"result (\[.*?\])", shown(f"{frame}<script>{script}</script>").stdout)[1])
    assert overflow == 0 and scale > 0.65  # text of ten points has at least ten pixels


@pytest.mark.parametrize("loss", sweeps.slow(map(named, LOSSES), map(named, ("poisson", "absolute_error"))), ids=str)
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
            mean = loss.of_predictions(rival.fit(x, y).predict(x), y).mean()
            assert mean < (1.3 if name in other_loss else 1.01) * best, name  # those of squared errors come near


@pytest.mark.wide
def test_counts_are_fitted_explained_and_reported(tmp_path, capsys):
    table = houses().drop(columns=["price", "verdict"])
    table["claims"] = np.random.default_rng(0).poisson(1 + 3 * (table["heating"] == "gas"))
    table.to_csv(tmp_path / "claims.csv", index=False)
    options = [tmp_path / "claims.csv", "--target", "claims", "--loss", "poisson"]
    model_file, page = tmp_path / "model.jtrees", tmp_path / "page.html"
    assert run("fit", *options, "--out", model_file, *TREE) == 0
    output = capsys.readouterr().out
    assert "task: regression, as --loss poisson is for numbers\n" in output
    assert re.search(r"GET: Poisson deviance [\d.]+, [\d.]+ for .*, on 30 held-out rows", output)
    assert float(re.search(r"\nGET: Poisson deviance [\d.]+, R² ([\d.]+), ", output)[1]) > 0.2
    explained = ["explain", model_file, tmp_path / "claims.csv", "--row", 1]
    assert run(*explained) == run(*explained, "--extrapolate") == 0  # only a category leads to another leaf
    output = capsys.readouterr().out
    assert "within their ranges in the table leads to another leaf" in output and "nearest leaf: " in output
    assert run("report", *options, "--out", page, *TREE) == 0
    parts = Parts(page.read_text())
    assert "By how much the Poisson deviance rises" in parts.text and {"model.h", "model.py"} == set(parts.links)


@pytest.mark.wide
def test_a_report_of_quantiles_and_of_a_model_that_is_no_tree(page, tmp_path, capsys):
    table, model_file = page.with_name("houses.csv"), tmp_path / "model.jtrees"
    options = [table, "--target", "price", "--columns", "verdict=drop", "--loss", "quantile", "--quantile", "0.9"]
    recipe = ["--recipe", "TEL", "--set", "trees=2", "depth=2", "epochs=3"]
    assert run("report", *options, *recipe, "--out", tmp_path / "page.html") == 0
    parts = Parts((tmp_path / "page.html").read_text())
    assert "Residuals" in parts.heads and "The tree" not in parts.heads and not parts.links
    for shown in ("pinball loss", "rows below the prediction", "This kind of model is not exported"):
        assert shown in parts.text
    assert "Exceptions, which minimise another loss: CART, depth 4; random forest." in parts.text
    assert "R²" not in parts.text
    rows = dated(houses()).drop(columns=["id", "price", "verdict"])
    several = TreeRegressor(jtrees.GET(depth=2, starts=1, epochs=5), loss="quantile", quantile=(0.1, 0.5, 0.9))
    jtrees.save(several.fit(rows, houses()["price"]), model_file)
    capsys.readouterr()
    assert run("explain", model_file, table, "--row", 1) == run("predict", model_file, table) == 0
    output = capsys.readouterr().out
    assert "Shapley values of the quantile 0.5\n" in output and "\nprediction 0,prediction 1,prediction 2\n" in output
