"""What the experiments add to the library: studies that resume, reports, benchmarks, variants of DGT, relaxations."""

import dataclasses
from functools import cache, partial
import importlib
import json
import os
from pathlib import Path
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import Ridge

from experiments import (
    bench_kernels,
    benchmark,
    distillation,
    estimators,
    losses as other_losses,
    networks,
    packages,
    paper_bandit,
    paper_dgt,
    paper_forest,
    paper_get,
    paper_latent,
    paper_nongreedy,
    paper_tel,
    raw_tables,
    records,
    relaxations,
    sizes,
    studies,
    systems,
)
import jtrees
from jtrees.ensembles.wrapper import Wrapper
from jtrees.methods.dgt import random_chain
from jtrees.search.monitor import Monitor
from pallas_kernels.config import HEURISTIC
from tests import needs, sweeps

# optax's schedules divide an integer step by an integer, and its Adam raises a float to one.
pytestmark = pytest.mark.usefixtures("standard_promotion")

SCRIPTS = [path.stem for path in Path(benchmark.__file__).parent.glob("*.py") if "__main__" in path.read_text()]
STUDIES = [
    *records.MODULES,
    paper_forest,
    estimators,
    distillation,
    raw_tables,
    relaxations,
    systems,
]


# --- Studies ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def long_run(tmp_path):
    """A study of two parts, two sets and two seeds; ``run(*arguments)``, and what was measured."""
    measured = []

    def measure(part, name, seed, options):
        key = f"{part}-{name}-{seed}"
        if options.fails == key:
            raise ZeroDivisionError
        if options.interrupted == key:  # a fit listens for it, and returns
            with Monitor().interruptible():
                os.kill(os.getpid(), signal.SIGINT)
        measured.append(key)
        return {"answer": seed + len(name)}

    def report(results, command):
        rows = [f"{row.part} {row.dataset} {row.seed}: {row.value['answer']}" for row in results.rows]
        return "\n".join([command, *rows]) + "\n"

    def arguments(parser):
        parser.add_argument("--budget", type=int, default=1)
        parser.add_argument("--fails")
        parser.add_argument("--interrupted")

    settings = lambda part, name, options: {"budget": options.budget, "scales": ((1.0, 2.0), (3.0, 4.0))}
    study = studies.Study(
        *("paper_x", None, ("a", "b", "c"), ("one", "three"), 2, measure, report, settings),
        available=lambda part: part != "c",
        arguments=arguments,
    )
    return lambda *words: studies.main(study, ["--out", str(tmp_path / "x.jsonl"), *words]), measured


COMMAND = "python -m experiments.paper_x --data-dir DATA --seeds 1"


def test_pieces_are_measured_once_seed_by_seed_and_missing_pieces_are_added(long_run, tmp_path):
    run, measured = long_run
    run("--parts", "b", "--datasets", "three", "--seeds", "1")
    assert measured == ["b-three-0"]
    assert (tmp_path / "x.md").read_text() == f"{COMMAND} --datasets three --parts b --out x.jsonl\nb three 0: 5\n"
    run()
    rest = ["a-one-0", "a-three-0", "b-one-0", "a-one-1", "a-three-1", "b-one-1", "b-three-1"]
    assert measured == ["b-three-0", *rest]  # part c is not available
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [f"{row['part']}-{row['dataset']}-{row['seed']}" for row in rows] == measured
    row = rows[measured.index("a-three-1")]
    assert row["value"] == {"answer": 6} and row["settings"]["budget"] == 1 and list(row) == sorted(row)
    assert row["seconds"] >= 0 and "jax" in row["machine"]


def test_rows_of_other_settings_are_named_and_measured_again(long_run, tmp_path):
    run, measured = long_run
    run("--parts", "a", "--datasets", "one")
    run("--parts", "b", "--datasets", "three", "--seeds", "1")
    run("--report-only", "--seeds", "1", "--budget", "2")
    rows = f"{COMMAND} --parts a b --out x.jsonl --budget 2\na one 0: 3\na one 1: 4\nb three 0: 5\n"
    note = "\nRows of older settings, which the next run measures again: a one (seeds 0, 1); b three (seeds 0).\n"
    assert (tmp_path / "x.md").read_text() == rows + note and len(measured) == 3
    run("--parts", "a", "--datasets", "one", "--seeds", "1", "--budget", "2")
    assert measured[3:] == ["a-one-0"]
    assert (tmp_path / "x.md").read_text() == rows + note.replace("seeds 0, 1", "seeds 1")
    budgets = [json.loads(line)["settings"]["budget"] for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert sorted(budgets) == [1, 1, 2]  # the new row replaces the old row


@pytest.mark.parametrize(("event", "error"), [("fails", ZeroDivisionError), ("interrupted", KeyboardInterrupt)])
def test_a_study_that_ends_early_keeps_its_finished_pieces(long_run, tmp_path, event, error):
    run, _ = long_run
    with pytest.raises(error):
        run(f"--{event}", "b-one-0")
    finished = [("a", "one", 0), ("a", "three", 0)]
    assert list(studies.read(tmp_path / "x.jsonl")) == finished
    run("--seeds", "1")
    assert list(studies.read(tmp_path / "x.jsonl")) == [*finished, ("b", "one", 0), ("b", "three", 0)]


def test_an_unfinished_last_line_is_removed_and_another_broken_line_is_named(long_run, tmp_path):
    file, row = tmp_path / "x.jsonl", studies.Measurement("z", "one", 0, {"answer": 1})
    file.write_text(row.line() + row.line()[:20])
    assert list(studies.read(file).values()) == [row]
    long_run[0]("--parts", "a", "--datasets", "one", "--seeds", "1")
    assert file.read_text().startswith(row.line()) and file.read_text().count("\n") == 2
    file.write_text(f"{row.line()}[1, 2]\n{row.line()}")
    with pytest.raises(SystemExit, match=r"x\.jsonl, line 2: expected a row of a study, got '\[1, 2\]'"):
        studies.read(file)


@pytest.mark.parametrize("script", STUDIES)
def test_committed_rows_make_the_committed_report(script, tmp_path, monkeypatch):
    """Figures are made, and not drawn, which takes long."""
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **_: Path(file).touch())
    name = script.STUDY.name
    (tmp_path / f"{name}.jsonl").symlink_to(benchmark.RESULTS / f"{name}.jsonl")
    studies.main(script.STUDY, ["--report-only", "--out", str(tmp_path / f"{name}.jsonl")])
    made, committed = ((folder / f"{name}.md").read_text() for folder in (tmp_path, benchmark.RESULTS))
    assert made.splitlines()[3:] == committed.splitlines()[3:]  # the third has the command
    assert made.count("\n|") > 10
    plotted = (paper_bandit, paper_tel, paper_nongreedy)
    assert (tmp_path / f"{name}.png").exists() == (script in plotted)


# --- The page of the papers' figures ---------------------------------------------------------------------------------


def test_the_committed_page_is_what_the_committed_rows_make(tmp_path, monkeypatch, capsys):
    committed = benchmark.RESULTS
    for file in (*(f"{module.STUDY.name}.jsonl" for module in records.MODULES), "cnn_tel.md"):
        (tmp_path / file).symlink_to(committed / file)
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    monkeypatch.chdir(tmp_path)
    for arguments, file in (([], "results/records.md"), (["--write"], "records.md")):
        records.main(arguments)
        text = (tmp_path / file).read_text()
        assert text == (committed / "records.md").read_text(), "python -m experiments.records --write"
        assert text.strip() == capsys.readouterr().out.strip()


def test_commands_of_missing_figures_are_those_of_the_scripts(tmp_path):
    results = records.Results.read(tmp_path)
    rows = [row for rows_of, *_ in records.PAPERS.values() for row in rows_of(results)]
    assert rows
    for row in rows:
        assert row.ours is None and row.reached is None
        script, *arguments = row.command.strip("`").removeprefix("python -m experiments.").split()
        if script != "cnn_tel":
            study = next(module.STUDY for module in records.MODULES if script == module.STUDY.name)
            options = studies.parse(study, arguments)
            assert (options.parts[0], row.name, 0) in study.pieces(options)


def test_differences_are_seed_by_seed_and_errors_are_those_of_means(tmp_path):
    scores = {"get": [3.0, 5.0, 9.0], "forest": [1.0, 4.0]}
    rows = [
        studies.Measurement(part, "airfoil", seed, {"test": score})
        for part, part_scores in scores.items()
        for seed, score in enumerate(part_scores)
    ]
    results = records.Results({"paper_get": studies.Results(rows)}, tmp_path)
    assert results.differences("paper_get", "get", "forest", "airfoil", "test") == [2.0, 1.0]
    figure, _ = results.figure("paper_get", "get", "airfoil", scores["get"], error=True)
    assert figure.deviation == pytest.approx(stats.sem(scores["get"]))


@pytest.mark.parametrize(
    ("metric", "paper", "values", "reached"),
    [
        ("R², %", 80.0, [79.0, 80.0], True),
        ("R², %", 80.0, [78.5, 79.5], False),
        ("R², %", 80.0, [79.5], True),
        ("AUC, %", 80.0, [79.4], False),
        ("RMSE", 2.0, [2.0, 2.1], True),
        ("RMSE", 2.0, [2.1, 2.2], False),
        ("RMSE", 2.0, [2.1], False),
        ("RMSE", 2.0, [1.9], True),
        ("share, %", "45 to 55", [50.0], None),
    ],
)
def test_reached_is_within_a_deviation_or_of_a_single_run_half_a_point(metric, paper, values, reached):
    ours = records.Ours(float(np.mean(values)), float(np.std(values)), len(values))
    assert records.PaperFigure("1", "a set", "a method", metric, paper, ours, "", "no").reached is reached


# --- Scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_arguments_of_every_script_parse(name, capsys):
    script = importlib.import_module(f"experiments.{name}")
    if name == "scaling":  # has no arguments
        return
    run = partial(studies.main, script.STUDY) if hasattr(script, "STUDY") else script.main
    for arguments, status in ((["--help"], 0), (["--no-such-option"], 2)):
        with pytest.raises(SystemExit, match=str(status)):
            run(arguments)
    assert not hasattr(script, "STUDY") or f"--{script.STUDY.flags[0]} " in capsys.readouterr().out


@pytest.fixture
def folder(tmp_path):
    """Data of the names that the scripts ask for: numbers to predict, classes, features to cluster by."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5)).astype(np.float32)
    y = (x[:, 0] * x[:, 1] + x[:, 2]).astype(np.float32)
    for name in ("kin8nm", "ailerons"):
        np.savez(tmp_path / f"{name}.npz", X=x, y=y)
    for name in ("segmentation", "churn", "letter"):
        np.savez(tmp_path / f"{name}.npz", X=x, y=(y > 0).astype(np.int32))
    np.savez(tmp_path / "glass.npz", X=x, y=(x[:, 3] > 0).astype(np.int32))
    labels = np.arange(500) % 10
    images = rng.uniform(size=(500, 28, 28)).astype(np.float32)
    images[np.arange(500), 2 * labels + 4] = 1  # a line, whose height is the class
    np.savez(tmp_path / "mnist.npz", X=images.reshape(500, -1), y=labels, split=np.repeat(np.int8([0, 2]), 250))
    return tmp_path


DGT = jtrees.DGT(depth=2, epochs=3, widths=())
GET = paper_forest.GET_FOREST.base.replace(depth=2, epochs=3, leaves="constant")  # linear ones: in paper_get
WEAK = jtrees.Boosted(GET.replace(cart="binned"), rounds=3)
REFINED = jtrees.Refined(WEAK, epochs=1)
USUAL = paper_nongreedy.USUAL | {"epochs": 3, "greedy_epochs": 2, "deepest": 2, "tuned": 1}
USUAL["grid"] = {"nu": (10.0, 100.0), "learning_rate": (1.0,)}
quick = lambda estimator: type(estimator.__name__, (estimator,), {"default_recipe": DGT})
few_trees = lambda **options: HistGradientBoostingRegressor(**options | {"max_iter": 5})
few_forest = {
    part: (paper_forest.TITLES[part], paper_forest.random_forest, {}) for part in (*paper_forest.RIVALS, "tree")
}

# By study: arguments, what is made smaller, and what the report says.
WHOLE = {
    paper_get: (
        # One budget for tuning and for the table: what fits all rows is one program in all parts.
        ["--datasets", "kin8nm", "--tuning", "1", "3", "--final", "1", "3", "--polish", "3"],
        {"SWEEP_DEPTHS": (2,), "ABLATION_DEPTHS": (2,), "DEFAULT_TUNING": (1, 3), "DEFAULT_FINAL": (1, 3)},
        ["| kin8nm | 1 |", "(79.82)", "Table 4", "at every depth", "with the options of the library"],
    ),
    paper_dgt: (
        ["--datasets", "ailerons", "segmentation", "--seeds", "2"],
        {
            "SETS": {name: paper_dgt.SETS[name]._replace(depth=2, epochs=3) for name in ("ailerons", "segmentation")},
            "FIRST": {"ailerons": 200},
            "GRID": {"widths": ((8, 8),), "momentum": (0.0, 0.3), "l2": (0.0,)},
            "TREES": 3,
        },
        ["| segmentation | 2 |", "DGT-Forest of 3", "Table 7"],
    ),
    paper_bandit: (
        ["--datasets", "mnist", "--parts", "linear", "tree", "--seeds", "3"],
        {"ROUNDS": {"mnist": 40}, "LINEAR_RATES": (0.01,)},
        ["| mnist | linear, epsilon-greedy | 8: ", "| mnist | DGT-Bandit, height 6 | 8: "],
    ),
    paper_latent: (
        ["--datasets", "kin8nm", "glass"],
        {
            "SETS": {"kin8nm": 4},
            "GRID": {"depth": (2,), "width": (8,), "learning_rate": (0.001, 0.01)},
            "CLUSTERING": ((2,), (0.1, 1.25), (0.01,)),
            "PRUNING_DEPTH": 2,
            "PRUNING_EPOCHS": 3,
            "HistGradientBoostingRegressor": few_trees,
        },
        ["| kin8nm | R² | 1 |", "Table 3", "epoch 59"],
    ),
    paper_forest: (
        ["--datasets", "kin8nm"],
        {
            "GET_FOREST": jtrees.Bagged(GET, trees=5),
            "GET_DEPTHS": (2,),
            "BOOSTED": (WEAK,),
            "REFINED": ((REFINED,),),
            "UPDATES": 20,
            "PARTS": paper_forest.PARTS | few_forest,
        },
        ["| kin8nm | ", "30 trees of GET-Linear - XGBoost: ", "ahead on"],
    ),
    paper_tel: (
        ["--datasets", "churn"],
        {"ROUNDS": 2, "ROUTING": jtrees.TEL(trees=2, depth=2, epochs=2), "DEPTHS": (2, 3), "TREES": (1, 2)},
        ["(Table 2)", "(Table 3)", "(Figure 2)", "(Figure 3)", "(Figure 4)", "| churn | smooth |"],
    ),
    paper_nongreedy: (
        ["--datasets", "letter"],
        {
            "DEPTHS": (1, 2),
            "USUAL": USUAL,
            "PRUNED": ("letter",),
            "PRUNED_DEPTHS": {"letter": (2,)},
        },
        [*paper_nongreedy.CURVES.values(), "Figure 3", "of 2 depths"],
    ),
    estimators: (
        ["--datasets", "kin8nm", "segmentation", "--seeds", "2"],
        {
            "ESTIMATORS": {part: tuple(quick(kind) for kind in kinds) for part, kinds in estimators.ESTIMATORS.items()},
            "jtrees": SimpleNamespace(Refined=lambda: DGT),
        },
        [
            *("| kin8nm | 225 x 5 |", "BoostedRegressor() minus CART: ", "TreeRegressor() minus CART: "),
            *("BoostedClassifier() minus random forest: ", "TreeClassifier() minus random forest: "),
        ],
    ),
    distillation: (
        ["--datasets", "kin8nm", "segmentation"],
        {"RECIPE": DGT, "TEACHER": "HistGradientBoosting"},
        ["| kin8nm | 225 + 2250 x 5 |", "| segmentation | 225 + 2250 x 5 |", "at least as good on ", " of 2 sets"],
    ),
    systems: (
        ["--datasets", "kin8nm", "segmentation", "--parts", "CART", "DGT", "DGT, tuned"],
        {"RECIPES": {"DGT": DGT}, "TUNED": {"DGT, tuned": DGT}, "DRAWS": 2},
        ["| 1 sets of regression | score, % | score minus", "| 1 sets of classification |", "| DGT, tuned | 1 | "],
    ),
    relaxations: (
        ["--datasets", "kin8nm", "segmentation", "--seeds", "2"],
        {
            "STEPS": 3,
            "DEPTHS": (1, 2),
            "CHOSEN_AT": 1,
            "RATES": (0.1,),
            "SHARPNESSES": (1.0, 2.0),
            "RELAXATIONS": ("sigmoid", "path sum", "surrogate"),
            "STUDY": dataclasses.replace(relaxations.STUDY, parts=("sigmoid", "path sum", "surrogate")),
        },
        ["2 sets, 2 random splits", "| kin8nm | 186 x 5 | ", "| segmentation | 186 x 5 | "],
    ),
}


@pytest.fixture
def raw_folder(tmp_path):
    """Two raw tables of the names that the study asks for, with text and gaps; a target has a gap and an outlier."""
    rng = np.random.default_rng(0)
    sex = rng.choice(["male", "female"], 80)
    fare, age = rng.uniform(5, 80, 80).round(2), np.where(rng.random(80) < 0.1, np.nan, rng.uniform(1, 70, 80).round())
    frame = pd.DataFrame({"Survived": (sex == "female") * 1, "Sex": sex, "Fare: [1912]": fare, "Age": age})
    frame.to_csv(tmp_path / "titanic.csv.gz", index=False)
    make = rng.choice(["audi", "bmw", "seat"], 80)
    price = np.char.mod("%.0f", 100 * fare + 1000 * (make == "bmw"))
    price[:2] = "?", "99999999"
    pd.DataFrame({"make": make, "size": fare, "price": price}).to_csv(tmp_path / "auto.csv", index=False)
    return tmp_path


@pytest.mark.slow
def test_the_study_of_raw_tables_measures_each_model_and_names_what_is_missing(raw_folder, monkeypatch, capsys):
    kinds = {"Boosted()": (estimators.BoostedRegressor, estimators.BoostedClassifier)}
    monkeypatch.setattr(raw_tables, "KINDS", {name: tuple(map(quick, pair)) for name, pair in kinds.items()})
    monkeypatch.setattr(benchmark, "installed", lambda package: False)
    out = raw_folder / "study.jsonl"
    run = lambda *words: studies.main(raw_tables.STUDY, ["--seeds", "1", "--out", str(out), *words])
    with pytest.raises(SystemExit, match=r"--tables-dir must have loan\.csv or loan\.csv\.gz: loan prediction"):
        run("--tables-dir", str(raw_folder), "--tables", "loan", "--models", "Boosted()")
    select = ["--tables", "titanic", "auto", "--models", "Boosted()", raw_tables.BINS, "CatBoost"]
    run("--tables-dir", str(raw_folder), *select)
    rows = studies.read(out)
    assert list(rows) == [(model, name, 0) for model in ("Boosted()", raw_tables.BINS) for name in ("titanic", "auto")]
    ours = {name: rows["Boosted()", name, 0] for name in ("titanic", "auto")}
    assert (ours["titanic"].value["rows"], ours["titanic"].value["columns"]) == (60, 3)
    assert (ours["auto"].value["rows"], ours["auto"].value["columns"]) == (58, 2)  # no missing and no highest target
    assert all(row.value["features"] >= row.value["columns"] for row in ours.values())
    assert "log_loss" in ours["titanic"].value and "log_loss" not in ours["auto"].value
    assert ours["auto"].settings["recipe"].startswith("DGT(")
    text = (raw_folder / "study.md").read_text()
    losses = [rows[model, "titanic", 0].value["log_loss"] for model in ("Boosted()", raw_tables.BINS)]
    scores = [rows[model, "auto", 0].value["score"] for model in ("Boosted()", raw_tables.BINS)]
    gaps = scores[0] - scores[1], 100 * (losses[1] - losses[0])
    assert f"| Boosted() | {np.mean(gaps):+.2f} | {np.mean(gaps):+.2f} | {gaps[0]:+.2f} | {gaps[1]:+.2f} | " in text
    assert "Without results: " in text and "CatBoost (9 of 9)" in text and "Boosted() (7 of 9)" in text
    command = "python -m experiments.raw_tables --tables-dir TABLES --seeds 1 --tables titanic auto"
    assert f"`{command} --models 'Boosted()' {raw_tables.BINS} --out study.jsonl`" in text
    run("--report-only")
    assert (raw_folder / "study.md").read_text() == text


def test_means_are_of_the_systems_that_have_all_sets():
    value = {"score": 80.0, "seconds": 1.0, "numbers": 9}
    measured = [
        ("GET", "kin8nm"),
        ("GET", "abalone"),
        ("DGT", "kin8nm"),
        ("CatBoost", "kin8nm"),
        ("CatBoost", "abalone"),
    ]
    rows = [studies.Measurement(part, name, 0, value, {}, "a machine", 1.0) for part, name in measured]
    text = systems.report(studies.Results(rows), "command")
    means, sets = text.split("## By set")
    assert "| 2 sets of regression |" in means and "| GET | 80.00 |" in means and "| DGT |" not in means
    assert "| DGT | " in sets


def test_networks_without_their_environment_are_left_out_in_a_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(networks, "PYTHON", tmp_path / "python")
    assert not networks.installed.__wrapped__()
    assert capsys.readouterr().err == "RealMLP and TabM are left out: `make networks` installs them\n"


@pytest.mark.slow
def test_networks_of_another_environment_are_fitted_and_kept():  # TabM takes minutes
    needs.check(networks.installed(), "make networks")
    x = np.random.default_rng(0).uniform(-1, 1, (200, 2)).astype(np.float32)
    y = x[:, 0] - 2 * x[:, 1]
    labels = np.where(y > 0, 7, 3)
    numbers, classes = (networks.Network("RealMLP", classifies, 0) for classifies in (False, True))
    numbers.fit(x, y)
    classes.fit(x, labels)
    assert numbers.score(x, y) > 0.9 and np.shape(numbers.predict(x)) == (200,)
    assert classes.score(x, labels) > 0.9 and set(classes.predict(x)) == {3, 7}
    np.testing.assert_array_equal(classes.classes_[classes.predict_proba(x).argmax(1)], classes.predict(x))
    assert numbers.num_parameters > 100_000 and classes.processor_seconds > 0


@pytest.mark.parametrize("name", packages.PACKAGES)
def test_rivals_take_text_as_categories(raw_folder, name):
    needs.check(benchmark.installed(packages.PACKAGES[name].package), "make peers")
    for table in ("titanic", "auto"):
        value = raw_tables.measure(name, table, 0, SimpleNamespace(data_dir=str(raw_folder)))
        assert value["score"] > (90 if table == "titanic" else 50)  # a column of text decides both targets


@pytest.mark.wide
@pytest.mark.parametrize("script", WHOLE)
def test_every_part_of_a_study_runs(folder, monkeypatch, script):
    needs.check(script is not paper_tel or packages.installed("XGBoost"), "make peers")
    arguments, smaller, expected = WHOLE[script]
    for name, value in smaller.items():
        monkeypatch.setattr(script, name, value)
    arguments = [*(["--seeds", "1"] if "--seeds" not in arguments else []), *arguments]
    run = lambda: studies.main(
        script.STUDY, ["--data-dir", str(folder), *arguments, "--out", str(folder / "study.jsonl")]
    )
    run()
    text, rows = (folder / "study.md").read_text(), (folder / "study.jsonl").read_text()
    assert [part for part in expected if part not in text] == []
    if script is paper_bandit:
        result = studies.read(folder / "study.jsonl")["linear", "mnist", 0].value
        assert result["queries"] == list(range(2, 41, 2)) and np.shape(result["scores"]) == (3, 20)
        assert np.all(np.diff(result["regret"], axis=1) >= 0)
        assert len({tuple(curve) for curve in result["regret"]}) == 3  # each seed has a stream of its own
    run()  # measures nothing again
    assert (folder / "study.jsonl").read_text() == rows


SMALL = jtrees.GET(depth=1, starts=1, epochs=5)
# By script: arguments, what is made smaller, the name of the table, and what it says.
SMALLEST = {
    "bench_dgt": (["--repeats", "1"], {"CASES": ((4, 3, 8),), "ROUNDS": 100}, "", "| 4 | 3 | 8, 8 |"),
    "bench_export": (["--rows", "500"], {"ROUNDS": 1}, "", "| C, row by row, -O2, depth 4 |"),
    "bench_first_call": (["--jobs", "dgt", "--repeats", "1"], {}, "", "| `DGT()`, diabetes |"),
    "bench_isotonic": (["--repeats", "2"], {"SIZES": ((128, 4),)}, "", "| 128, 4 | traversed |"),
    "bench_nongreedy": (["--repeats", "1"], {"FEATURES": (5,), "DEPTHS": (2, 3)}, "", "| 5 | 3 |"),
    "bench_prediction": (["--rows", "9000"], {}, "", "| jtrees, one tree, depth 4 |"),
    "bench_rows": (
        ["--rows", "200", "--features", "5"],
        {"TEST": 500, "OURS": {"Boosted()": WEAK}},
        *("", "| rows | Boosted() | linear regression |"),
    ),
    "bench_training": (["--depth", "2"], {}, "", "| 2 | "),
    "bench_training, sharp": (["--sharp", "--depth", "9", "--sharpness", "100"], {}, "bench_sharp", "| 9 | 100 | "),
    "boosting": (
        ["--tables", "Friedman 2"],
        {"TRAIN": 300, "TEST": 100, "RECIPES": {"one": WEAK, "two": WEAK}},
        *("boosting_held_out", "|  | Friedman 2 | mean beside "),
    ),
    "cnn_tel": (["--seeds", "1"], {"EPOCHS": 1, "RATES": (0.01,)}, "", "| CNN-TEL | "),
    "losses": (
        ["--seeds", "1", "--rows", "200", "--datasets", "rentals, quantiles", "claims, Tweedie"],
        {"HistGradientBoostingRegressor": few_trees, "OURS": {"boosted": WEAK, "tree": SMALL}},
        *("", "| rentals, quantiles | "),
    ),
    "monotone": (
        ["--datasets", "kin8nm", "--seeds", "1"],
        {"RECIPES": {"GET": SMALL}, "MADE": 2, "PAIRS": 50},
        *("", "| kin8nm | 225 x 5 | GET | 0 | 0 | 0 | "),
    ),
    "options": (
        ["--datasets", "kin8nm", "--seeds", "1", "--depths", "1"],
        {
            "GETS": {"GET": SMALL, "GET-Linear": SMALL},
            "BASES": {"constant": SMALL, "linear": SMALL.replace(leaves="linear")},
            "EPOCHS": (1, 2),
            "KEYS": 2,
            "RECIPES": {"DGT": DGT},
            "BOOSTED": WEAK,
        },
        *("preconditioning", "| kin8nm | "),
    ),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", SMALLEST)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_smallest_piece_of_a_benchmark_runs(folder, monkeypatch, name):
    script = importlib.import_module(f"experiments.{name.split(',')[0]}")
    arguments, smaller, to, expected = SMALLEST[name]
    for attribute, value in smaller.items():
        monkeypatch.setattr(script, attribute, value)
    monkeypatch.setattr(benchmark, "RESULTS", folder / "committed")
    monkeypatch.setenv("JTREES_DATA", str(folder))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    monkeypatch.setenv("PYTHONPATH", str(Path(benchmark.__file__).parents[1]))
    script.main([*arguments, "--write"])
    text = (folder / "committed" / f"{to or name}.md").read_text()
    assert expected in text and f"Made by `python -m experiments.{script.__name__.split('.')[1]} " in text


# --- Benchmarks ------------------------------------------------------------------------------------------------------


def test_benchmarks_write_to_the_committed_tables_only_if_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path / "committed")
    for arguments, folder in (([], "results"), (["--write"], "committed")):
        options = benchmark.parse("bench_x", "doc", ["--n", "3", *arguments], n=2)
        table = benchmark.Table("a", "b, ms")
        table.add(1, [0.002, 0.002])
        benchmark.write(options, table, "Notes.")
        text = (tmp_path / folder / "bench_x.md").read_text()
        assert "Made by `python -m experiments.bench_x --n 3` on " in text and "| 1 | 2 ± 0 |" in text
        assert text in capsys.readouterr().out
        assert (tmp_path / "committed").exists() == (folder == "committed")


def test_the_command_of_a_benchmark_has_the_options_that_differ_from_their_defaults():
    options = {"n": 2, "depth": (4, 6), "rate": 0.5, "tune": False, "data_dir": None}
    options["jobs"] = benchmark.several(["a", "b"])
    parse = lambda *arguments: benchmark.parse("bench_x", None, list(arguments), **options)
    assert parse().command == "python -m experiments.bench_x --data-dir DATA"
    parsed = parse("--depth", "8", "--tune", "--jobs", "b", "--data-dir", "/tmp", "--rate", "1", "--n", "2")
    assert (parsed.depth, parsed.tune, parsed.jobs, parsed.rate) == ([8], True, ["b"], 1.0)
    assert parsed.command == "python -m experiments.bench_x --depth 8 --rate 1.0 --tune --data-dir DATA --jobs b"
    with pytest.raises(SystemExit):
        parse("--jobs", "c")


@pytest.mark.slow
def test_a_function_runs_in_a_process_of_its_own():
    run = benchmark.isolated(benchmark.ratio, [2.0, 4.0], [1.0], environment={"PYTHONHASHSEED": "0"})
    assert run == "3.00"
    with pytest.raises(RuntimeError, match=r"ratio of experiments\.benchmark failed:(.|\n)*TypeError"):
        benchmark.isolated(benchmark.ratio, [1.0])


@pytest.mark.parametrize("implementation", sweeps.slow(["interpret", None], [None]))
def test_kernels_are_tuned_and_compared(tmp_path, monkeypatch, capsys, implementation):
    """The whole benchmark, the interpreter standing in for a device; and on one that has no kernel."""
    small = HEURISTIC["interpret"]
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    for name, value in {
        "IMPLEMENTATION": {"cpu": implementation},
        "cases": lambda platform: [bench_kernels.Case(50, 3, 2, trees=2)],
        "TUNED": bench_kernels.Case(50, 3, 2),
        "candidates": lambda _: [small, dataclasses.replace(small, tile=64)],
        "rates": lambda platform: (1e9, 1e9),
        "timed": lambda call, arrays, *_: (call(*arrays), [1.0, 2.0])[1],
    }.items():
        monkeypatch.setattr(bench_kernels, name, value)
    bench_kernels.main(["--tune", "--minutes", "1", "--write"])
    [table], [record] = tmp_path.glob("kernels/*.md"), tmp_path.glob("kernels/*.json")
    lines, cases = table.read_text(), json.loads(record.read_text())["cases"]
    assert len(cases) == len(bench_kernels.KERNELS) and cases[0]["operations"] == 2 * 2 * 3 * 3 * 50
    if implementation is None:
        assert "only XLA was timed" in lines and "fused" not in cases[0]
        return
    assert all(case["agree"] for case in cases) and lines.count("| yes |") == len(cases)
    assert all(f"- {kernel.name}: `Config(backend='mosaic_tpu'" in lines for kernel in bench_kernels.KERNELS.values())
    assert "WRONG" not in capsys.readouterr().out


# --- Methods and rivals of the papers --------------------------------------------------------------------------------


@cache
def value_and_gradient(kind):
    """Of a variant's loss, compiled once a kind."""
    loss = paper_dgt.variant(kind, 3, steps=100).loss
    batch_loss = lambda params, x, y, step: loss(params, jtrees.Batch(x, y), key=jax.random.key(0), step=step)[0]
    return jax.jit(jax.value_and_grad(batch_loss))


def chain(kind):
    return random_chain(jax.random.key(0), 3, 3, (240, 240) if "L = 3" in kind else (), (), jnp.float32)


@pytest.mark.parametrize("kind", sweeps.quick(paper_dgt.ABLATIONS, paper_dgt.ABLATIONS[2:]))
def test_variants_differ_in_the_gradient_alone(data, kind):
    x, y = map(jnp.asarray, data)
    params = chain(kind)
    value, gradient = value_and_gradient(kind)(params, x, y, jnp.int32(10))
    assert value == pytest.approx(float(jnp.square(params.tree().predict(x) - y).mean()), rel=1e-5)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    assert np.count_nonzero(gradient.factors[0]) > 0


def test_product_form_teaches_the_nodes_on_the_path_alone(data):
    x, y = (jnp.tile(jnp.asarray(a)[:1], (200, *[1] * (a.ndim - 1))) for a in data)  # one sample, in the shape of all
    params = chain("L = 1")
    path = set(np.asarray(params.tree().decision_path(x))[:-1, 0].tolist())
    learns = {}
    for kind in ("product, sign, L = 1", "sum, sign, L = 1"):
        slope = value_and_gradient(kind)(params, x, y, jnp.int32(0))[1]
        learns[kind] = set(np.flatnonzero(np.any(np.asarray(slope.factors[0]) != 0, axis=1)).tolist())
    assert learns["product, sign, L = 1"] <= path
    assert len(learns["sum, sign, L = 1"] - path) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", packages.PACKAGES)
def test_rivals_are_tuned_and_their_numbers_counted(monkeypatch, name):
    needs.check(packages.installed(name), "make peers")
    monkeypatch.setattr(packages, "TRIALS", 2)
    monkeypatch.setattr(packages, "ROUNDS", 20)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)).astype(np.float32)
    y = np.where(x[:, 0] > 0, 1, -1).astype(np.float32)
    for target in (y, (y > 0).astype(np.int32)):
        model, result = packages.tuned(name, (x[:200], x[200:], target[:200], target[200:]), seed=0)
        leaves, numbers = sizes.size(model, x)
        assert np.mean((model.predict(x[200:]) > 0) == (target[200:] > 0)) > 0.95
        assert 1 <= result["trees"] <= 20 and len(result["options"]) == 7
        assert result["trees"] <= leaves < numbers


def test_linear_leaves_of_lightgbm_are_counted():
    leaf = lambda *coefficients: {"leaf_value": 1.0, "leaf_coeff": list(coefficients)}
    tree = {"left_child": leaf(0.5), "right_child": {"left_child": leaf(), "right_child": leaf(1.0, 2.0)}}
    assert sizes.lightgbm_size(tree) == (3, 2 * 2 + 3 + 2 * 3)


# --- Made data, and recipes that are measured -------------------------------------------------------------------------


def test_every_recipe_without_a_base_is_measured_with_its_defaults():
    exported = {
        kind
        for kind in map(vars(jtrees).get, jtrees.__all__)
        if isinstance(kind, type) and issubclass(kind, jtrees.Recipe)
    }
    # LatentClustering predicts features from other features, without y. FromMethod has no default method.
    others = {jtrees.Recipe, jtrees.LatentClustering, jtrees.FromMethod}
    measured = [recipe for name, recipe in systems.RECIPES.items() if name == type(recipe).__name__]
    assert all(recipe == type(recipe)() for recipe in measured)
    wrappers = {kind for kind in exported if issubclass(kind, Wrapper)}
    assert exported - others - wrappers == {type(recipe) for recipe in measured} - wrappers


def test_made_tables_are_as_stated():
    x, y = relaxations.made_collinear()
    assert x.shape == (6000, 20) and np.allclose(x.std(0), 1, atol=0.05)
    assert np.linalg.matrix_rank(np.corrcoef(x.T), tol=0.01) == 4  # all but a thousandth of the variance
    wide = x.astype(np.float64)
    assert 0.6 < Ridge(1e-6).fit(wide[:3000], y[:3000]).score(wide[3000:], y[3000:]) < 0.8
    known = np.stack([x[:, 0] - x[:, 1], np.sign(x[:, 2] - x[:, 3])], axis=1).astype(np.float64)
    assert Ridge(1e-6).fit(known, y).score(known, y) == pytest.approx(0.95, abs=0.01)
    assert np.array_equal(y, relaxations.made_collinear()[1])
    x, y = other_losses.rentals(0)
    assert x.shape == (4000, 5) and (y == np.round(y)).all() and y.min() == 0 and y.var() > 2 * y.mean()
    x, y = other_losses.claims(0)
    assert x.shape == (4000, 3) and 0.5 < (y == 0).mean() < 0.9 and (y >= 0).all()


# --- Relaxations ----------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_relaxations_have_equal_slopes_and_become_hard():
    rng = np.random.default_rng(0)
    numbers = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    scores, batch, task = numbers(7, 9), jtrees.Batch(numbers(9, 2), numbers(9)), jtrees.Regression()
    leaf, constant = jtrees.routing.leaf_index(scores), jtrees.leaves.Values(numbers(8))
    for relaxation, probabilities in relaxations.SOFT.items():
        slope = jax.grad(lambda z, p=probabilities: p(z)[1].sum())(jnp.full((1, 1), 1e-4))[0, 0]  # a kink at 0
        assert slope == pytest.approx(0.25, abs=1e-4), relaxation
        assert np.allclose(probabilities(scores).sum(0), 1, atol=1e-5)
        assert np.array_equal(probabilities(1e4 * scores).argmax(0), leaf)
        assert np.allclose(probabilities(1e4 * scores).max(0), 1, atol=1e-3)
    for leaves in (constant, jtrees.leaves.Linear(numbers(8, 2), numbers(8))):
        reached = leaves.losses(batch.x, batch.y)[leaf, jnp.arange(9)]
        assert np.allclose(relaxations.path_sum(scores, leaves, batch, task), reached, atol=1e-5)
        assert (relaxations.surrogate(scores, leaves, batch, task) >= reached - 1e-5).all()
        assert np.allclose(relaxations.surrogate(1e4 * scores, leaves, batch, task), reached, atol=1e-5)
    # Linear leaves without slopes are constant ones, and have their gradient.
    flat = jtrees.leaves.Linear(jnp.zeros((8, 2)), constant.values)
    slopes = [
        jax.grad(lambda z, leaves=leaves: relaxations.path_sum(z, leaves, batch, task).sum())(scores)
        for leaves in (constant, flat)
    ]
    assert np.abs(slopes[0]).max() > 0 and np.allclose(*slopes, atol=1e-5)


def test_rows_are_parted_scaled_and_filled_up(folder):
    data, task, features = relaxations.rows("segmentation", 2, str(folder))
    assert features == 5 and task == jtrees.Classification(relaxations.CLASSES)
    train, valid, test = data
    assert train.x.shape == (2, 186, 8) and valid.x.shape == (2, 39, 8) and test.x.shape == (2, 1500, 8)
    assert np.allclose(train.x[0, :, :5].mean(0), 0, atol=1e-5) and np.allclose(train.x[0, :, :5].std(0), 1, atol=1e-5)
    assert not train.x[..., 5:].any() and test.weight[0].sum() == 75 and not test.x[0, 75:].any()
    data, task, _ = relaxations.rows("kin8nm", 1, str(folder))
    assert task == jtrees.Regression() and np.isclose(data.train.y.std(), 1, atol=1e-5)
    outputs = data.test.y[0] + jnp.where(data.test.weight[0] > 0, 0.0, 99.0)  # wrong where nothing counts
    assert relaxations.percent(outputs, data.test.y[0], data.test.weight[0]) == 100
    runs = relaxations.runs({"constant": (0.1, 2.0), "rising": (0.2, 8.0)}, 2)
    assert runs.seed.tolist() == [0, 1, 0, 1] and np.allclose(runs.rate, [0.1, 0.1, 0.2, 0.2])
    assert runs.first.tolist() == [2, 2, 2, 2] and runs.last.tolist() == [2, 2, 32, 32]


def test_a_factor_matters_by_its_interval_and_its_size():
    effect = lambda *differences: relaxations.Effect("x", pd.Series(differences))
    assert effect(2.0, 3.0, 2.5, 2.0, 4.0, 1.0, 90.0).verdict() == "matters"  # whatever one set says
    assert effect(0.1, 0.2, 0.1, 0.3, 0.2, 0.1).verdict() == "does not matter"  # however certain
    assert effect(-4.0, 5.0, 1.0, 2.0, -1.0, 0.0).verdict() == "undecided"
    assert effect(9.0, 9.0).verdict() == "undecided" and effect(9.0, 9.0).interval() == (9, -np.inf, np.inf)
    change = np.random.default_rng(0).normal(0.5, 1, 20)
    estimate, low, high = effect(*change).interval()
    assert estimate == np.median([(a + b) / 2 for i, a in enumerate(change) for b in change[i:]])
    for end, holds in ((low, lambda p: p > 0.03), (low - 0.1, lambda p: p < 0.05), (high + 0.1, lambda p: p < 0.05)):
        assert holds(stats.wilcoxon(change - end).pvalue)  # the ends are where the test begins to reject
