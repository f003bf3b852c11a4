"""What the experiments add to the library: studies that resume, reports, variants of DGT, streams for bandits."""

import dataclasses
from functools import cache, partial
import json
import os
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
import oracles
import pandas as pd
import pytest
from scipy import stats
from sklearn.datasets import load_diabetes
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import Ridge
import sweeps

from experiments import (
    bench_kernels,
    bench_rows,
    benchmark,
    boosting,
    cnn_tel,
    defaults,
    distillation,
    epochs,
    estimators,
    keys,
    log_loss,
    losses as other_losses,
    outcome,
    paper_bandit,
    paper_dgt,
    paper_forest,
    paper_get,
    paper_latent,
    paper_nongreedy,
    paper_tel,
    preconditioning,
    records,
    relaxations,
    rivals,
    studies,
)
import jtrees
from jtrees.methods.dgt import random_chain
from jtrees.search.monitor import Monitor
from pallas_kernels.config import HEURISTIC

# optax's schedules divide an integer step by an integer, and its Adam raises a float to one.
pytestmark = pytest.mark.usefixtures("standard_promotion")


# --- Studies ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def long_run(tmp_path):
    """A study of two parts, two sets and two seeds; ``run(*arguments)``, and what was measured."""
    measured = []

    def pieces(part, name, options):
        def measure(seed):
            if options.fails == f"{part}-{name}-{seed}":
                raise ZeroDivisionError
            measured.append(f"{part}-{name}-{seed}")
            return {"answer": seed + len(name)}

        for seed in range(2):
            settings = {"budget": options.budget, "scales": ((1.0, 2.0), (3.0, 4.0))}
            yield studies.Piece(part, name, partial(measure, seed), settings, seed)

    def report(results, command):
        rows = [f"{row.part} {row.dataset} {row.seed}: {row.value['answer']}" for row in results.rows]
        return "\n".join([command, *rows]) + "\n"

    def arguments(parser):
        parser.add_argument("--budget", type=int, default=1)
        parser.add_argument("--fails")

    study = studies.Study("paper_x", None, ("a", "b"), ("one", "three"), 2, pieces, report, arguments=arguments)
    return lambda *more: studies.main(study, ["--out", str(tmp_path / "x.jsonl"), *more]), measured


COMMAND = "python -m experiments.paper_x --data-dir DATA --seeds 1\n"


@pytest.mark.slow
def test_pieces_are_measured_once_seed_by_seed_and_missing_pieces_are_added(long_run, tmp_path):
    run, measured = long_run
    run("--parts", "b", "--datasets", "three", "--seeds", "1")
    assert measured == ["b-three-0"]
    run("--parts", "a", "b")
    rest = ["a-one-0", "a-three-0", "b-one-0", "a-one-1", "a-three-1", "b-one-1", "b-three-1"]
    assert measured == ["b-three-0", *rest]
    rows = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [f"{row['part']}-{row['dataset']}-{row['seed']}" for row in rows] == measured
    row = rows[measured.index("a-three-1")]
    assert row["value"] == {"answer": 6} and row["settings"]["budget"] == 1 and list(row) == sorted(row)
    assert row["seconds"] >= 0 and "jax" in row["machine"]


@pytest.mark.slow
def test_the_report_is_of_all_rows_that_exist(long_run, tmp_path):
    run, measured = long_run
    run("--parts", "a", "--datasets", "one")
    run("--parts", "b", "--datasets", "three", "--seeds", "1")
    expected = f"{COMMAND}a one 0: 3\na one 1: 4\nb three 0: 5\n"
    assert (tmp_path / "x.md").read_text() == expected
    run("--report-only", "--seeds", "1")
    assert len(measured) == 3 and (tmp_path / "x.md").read_text() == expected


@pytest.mark.slow
def test_rows_of_other_settings_are_named_and_measured_again(long_run, tmp_path):
    run, measured = long_run
    run("--parts", "a", "--datasets", "one")
    run("--parts", "b", "--datasets", "three", "--seeds", "1")
    run("--report-only", "--seeds", "1", "--budget", "2")
    rows = f"{COMMAND}a one 0: 3\na one 1: 4\nb three 0: 5\n"
    note = "\nRows of older settings, which the next run measures again: a one (seeds 0, 1); b three (seeds 0).\n"
    assert (tmp_path / "x.md").read_text() == rows + note and len(measured) == 3
    run("--parts", "a", "--datasets", "one", "--seeds", "1", "--budget", "2")
    assert measured[3:] == ["a-one-0"]
    assert (tmp_path / "x.md").read_text() == rows + note.replace("seeds 0, 1", "seeds 1")
    budgets = [json.loads(line)["settings"]["budget"] for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert sorted(budgets) == [1, 1, 2]  # the new row replaces the old row


def test_a_fit_that_ctrl_c_ended_early_has_no_row(tmp_path):
    """The fit listens for it and returns; the row is not kept, and the study ends."""

    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        return {}

    def listening():
        with Monitor().listening():
            return interrupted()

    file = tmp_path / "x.jsonl"
    for measure in (listening, interrupted):
        with pytest.raises(KeyboardInterrupt):
            studies.measure([studies.Piece("a", "one", measure, {})], file)
    assert not studies.read(file)
    studies.measure([studies.Piece("a", "one", dict, {})], file)
    assert [row.key for row in studies.read(file)] == [("a", "one", 0)]


def test_a_piece_without_its_package_is_skipped(tmp_path):
    studies.measure([studies.Piece("a", "one", dict, {}, package="no_such_package")], tmp_path / "x.jsonl")
    assert not studies.read(tmp_path / "x.jsonl")


def test_an_unfinished_last_line_is_removed_and_another_broken_line_is_named(tmp_path):
    file = tmp_path / "x.jsonl"
    row = studies.Row("a", "one", 0, {"answer": 1})
    file.write_text(row.line() + row.line()[:20])
    assert studies.read(file) == [row]
    studies.measure([studies.Piece("a", "one", dict, {}), studies.Piece("b", "one", dict, {})], file)
    assert [row.key for row in studies.read(file)] == [("a", "one", 0), ("b", "one", 0)]
    assert file.read_text().startswith(row.line()) and file.read_text().count("\n") == 2
    file.write_text(f"{row.line()}[1, 2]\n{row.line()}")
    with pytest.raises(SystemExit, match=r"x\.jsonl, line 2: expected a row of a study, got '\[1, 2\]'"):
        studies.read(file)


def test_options_in_which_recipes_differ_are_tuples_in_one_text():
    recipes = tuple(jtrees.Sparse(jtrees.DGT(depth=2), terms=terms) for terms in (3, 4))
    text = studies.recipe_text(recipes)
    assert text == studies.recipe_text(recipes[0]).replace("terms=3", "terms=(3, 4)")
    assert studies.recipe_text((recipes[0], recipes[0])) == studies.recipe_text(recipes[0])


def test_the_way_to_train_trees_together_is_chosen_on_rows_held_out(monkeypatch):
    """Each way has one loss of boosting, and one that training together reaches."""
    losses = iter([(0.5, 0.4), (0.5, 0.2), (0.5, 0.7)])

    def fit(recipe, x, y, key):
        boosted, refined = next(losses)
        search = SimpleNamespace(boosted_loss=boosted, losses=np.array([0.9, refined]))
        return SimpleNamespace(report=SimpleNamespace(search=search))

    monkeypatch.setattr(jtrees, "fit", fit)
    fit, way, loss = paper_forest.best_way(paper_forest.REFINED[0][:3], None, None, key=None)
    assert (fit.report.search.losses.min(), way, loss) == (0.2, 1, 0.2)


def test_a_study_that_fails_keeps_its_finished_pieces(long_run, tmp_path):
    run, measured = long_run
    with pytest.raises(ZeroDivisionError):
        run("--fails", "b-one-0")
    assert [row.key for row in studies.read(tmp_path / "x.jsonl")] == [("a", "one", 0), ("a", "three", 0)]
    run("--seeds", "1")
    assert measured == ["a-one-0", "a-three-0", "b-one-0", "b-three-0"]


@pytest.mark.parametrize("script", [*records.MODULES, estimators, distillation, defaults, log_loss, relaxations])
def test_committed_rows_make_the_committed_report(script, tmp_path):
    name = script.STUDY.name
    (tmp_path / f"{name}.jsonl").symlink_to(benchmark.RESULTS / f"{name}.jsonl")
    studies.main(script.STUDY, ["--report-only", "--out", str(tmp_path / f"{name}.jsonl")])
    made, committed = ((folder / f"{name}.md").read_text() for folder in (tmp_path, benchmark.RESULTS))
    assert made.splitlines()[3:] == committed.splitlines()[3:]  # the third says with which command
    assert made.count("\n|") > 10
    drawn = (paper_bandit, paper_latent, paper_tel, paper_nongreedy, relaxations)
    assert (tmp_path / f"{name}.png").exists() == (script in drawn)


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
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    winners = tmp_path / "winners.json"
    others = [{"device": "another", "kernel": "path_sum"}]
    winners.write_text(json.dumps([*others, {"device": jax.devices()[0].device_kind, "kernel": "old"}]))
    monkeypatch.setattr(bench_kernels, "WINNERS", winners)
    monkeypatch.setattr(bench_kernels, "_WINS", 0)
    monkeypatch.setattr(bench_kernels, "IMPLEMENTATION", {"cpu": implementation})
    case = bench_kernels.Case(50, 3, 2, trees=2)
    monkeypatch.setattr(bench_kernels, "cases", lambda platform: [case])
    monkeypatch.setattr(bench_kernels, "TUNED", bench_kernels.Case(50, 3, 2))
    small = HEURISTIC["interpret"]
    monkeypatch.setattr(bench_kernels, "candidates", lambda _: [small, dataclasses.replace(small, tile=64)])
    monkeypatch.setattr(bench_kernels, "rates", lambda platform: (1e9, 1e9))
    monkeypatch.setattr(bench_kernels, "timed", lambda call, arrays, *_: (call(*arrays), [1.0, 2.0])[1])
    bench_kernels.main(["--tune", "--minutes", "1", "--write"])
    [table], [record] = tmp_path.glob("kernels/*.md"), tmp_path.glob("kernels/*.json")
    lines, cases = table.read_text(), json.loads(record.read_text())["cases"]
    assert len(cases) == len(bench_kernels.KERNELS) and cases[0]["operations"] == 2 * 2 * 3 * 3 * 50
    if implementation is None:
        assert "only XLA was timed" in lines and "fused" not in cases[0]
        return
    assert all(one["agree"] for one in cases) and lines.count("| yes |") == len(cases)
    assert "Config(backend='mosaic_tpu'" in lines and "WRONG" not in capsys.readouterr().out
    written = json.loads(winners.read_text())
    assert written[0] == others[0] and len(written) == 5  # and nothing else of this device
    assert {one["kernel"] for one in written[1:]} == {one.name for one in bench_kernels.KERNELS.values()}


def test_all_cores_are_asked_for_unless_the_user_says_how_many(monkeypatch):
    asked = []
    monkeypatch.setattr(type(jax.config), "update", lambda self, *option: asked.append(option))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    benchmark.use_all_cores()
    assert asked == []
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    benchmark.use_all_cores()
    assert asked == [("jax_num_cpu_devices", os.cpu_count())]


# --- DGT -------------------------------------------------------------------------------------------------------------


@cache
def value_and_gradient(kind):
    """Of a variant's loss, compiled once a kind."""
    loss = paper_dgt.variant(kind, 3, steps=100).loss
    batch_loss = lambda params, x, y, step: loss(params, jtrees.Batch(x, y), key=jax.random.key(0), step=step)[0]
    return jax.jit(jax.value_and_grad(batch_loss))


def chain(kind):
    return random_chain(jax.random.key(0), 3, 3, (240, 240) if "L = 3" in kind else (), (), jnp.float32)


@pytest.mark.parametrize("kind", paper_dgt.ABLATIONS)
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


def test_pat_is_the_product_form(x64):
    rng, params = np.random.default_rng(6), random_chain(jax.random.key(0), 3, 3, (), (), jnp.float64)
    x, y = rng.normal(size=(20, 3)), rng.normal(size=20)
    batch, of = jtrees.Batch(jnp.asarray(x), jnp.asarray(y)), {"key": jax.random.key(0), "step": jnp.int32(0)}
    loss, score = jax.jit(paper_dgt.pat(3, 2.0).loss)(params, batch, **of)
    tree, values = params.tree(), np.asarray(params.leaves.values)
    z = np.asarray(tree.weights) @ x.T + np.asarray(tree.bias)[:, None]
    reach = oracles.leaf_probabilities(oracles.sigmoid(2 * z))
    assert loss == pytest.approx(np.mean((values @ reach - y) ** 2), rel=1e-10)
    hard = values[oracles.walk(tree.weights, tree.bias, x)]
    assert score == pytest.approx(np.mean((hard - y) ** 2), rel=1e-10)
    for depth, slope, message in ((3, 0.0, "slope"), (17, 1.0, "depth")):
        with pytest.raises(ValueError, match=message):
            paper_dgt.pat(depth, slope)


def test_pat_anneals_to_the_hard_tree(data):
    method = paper_dgt.pat(2, optax.exponential_decay(1.0, 100, 1e4))  # a hundredfold every 50 steps
    params = random_chain(jax.random.key(0), 2, 3, (), (), jnp.float32)
    batch = jtrees.Batch(*map(jnp.asarray, data))
    at = jax.jit(lambda step: method.loss(params, batch, key=jax.random.key(0), step=step))
    gap = [abs(float(at(step)[0] - at(step)[1])) for step in (0, 50, 100)]
    assert gap[0] > gap[1] > gap[2]
    assert gap[2] < 1e-2 * float(at(0)[1])


@pytest.mark.slow
def test_pat_as_a_recipe(data, monkeypatch):
    """Its slope is 100 after the last update."""
    x, y = data[0], (data[1] > 0).astype(np.int32)
    monkeypatch.setitem(paper_dgt.SETS, "segmentation", paper_dgt.Setting(2, 400))
    recipe = paper_dgt.annealed("segmentation", len(x))
    fit = jtrees.fit(recipe, x, y, key=jax.random.key(0), task="classification")
    assert fit.tree.depth == 2 and fit.history[-4:].mean() < 0.7 * fit.history[:4].mean()
    chances = fit.predict(x)
    assert np.mean(chances.argmax(1) == y) > 0.85
    assert fit.loss == pytest.approx(-np.mean(np.log(chances[np.arange(200), y])), rel=1e-4)
    slope = recipe.make.args[1]
    assert slope(len(fit.history)) == pytest.approx(100, rel=1e-5)


# --- Bandits ---------------------------------------------------------------------------------------------------------


def test_every_learner_has_one_piece_and_none_where_it_does_not_apply():
    options = studies.parse(paper_bandit.STUDY, [])
    parts = lambda name: [p.part for part in paper_bandit.PARTS for p in paper_bandit.pieces(part, name, options)]
    assert parts("mnist") == ["tree", "linear"]
    assert parts("letter") == ["tree", "linear", "vowpal"]
    assert parts("ailerons") == ["tree", "linear", "tree-one-point", "linear-one-point"]


def test_all_seeds_of_a_learner_are_played_and_the_best_of_several_is_shown(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 784)).astype(np.float32)
    np.savez(tmp_path / "mnist.npz", X=x, y=np.arange(60) % 10, split=np.repeat(np.int8([0, 2]), 30))
    monkeypatch.setitem(paper_bandit.ROUNDS, "mnist", 40)
    monkeypatch.setattr(paper_bandit, "LINEAR_RATES", (0.01,))
    options = studies.parse(paper_bandit.STUDY, ["--data-dir", str(tmp_path), "--seeds", "3"])
    found = paper_bandit.measured("linear", "mnist", options)
    assert found["queries"] == list(range(2, 41, 2)) and np.shape(found["scores"]) == (3, 20)
    assert found["skipped"] == 0 and np.all(np.diff(found["regret"], axis=1) >= 0)
    assert len({tuple(curve) for curve in found["regret"]}) == 3  # each seed has a stream of its own


# --- Whole scripts, in small -----------------------------------------------------------------------------------------


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
    return tmp_path


def report_of(script, folder, *names, seeds=1, more=()):
    """The report of a whole study on these sets, its rows in ``folder/study.jsonl``."""
    command = ["--data-dir", folder, "--datasets", *names, "--seeds", seeds, *more, "--out", folder / "study.jsonl"]
    studies.main(script.STUDY, [*map(str, command)])
    return (folder / "study.md").read_text()


def value_of(folder, *key):
    """The value of a row of :func:`report_of`."""
    return next(row.value for row in studies.read(folder / "study.jsonl") if row.key == key)


BOOSTING = benchmark.installed("optuna") and benchmark.installed("xgboost")
SMALL_DGT = jtrees.DGT(depth=2, epochs=3, widths=())
SMALL_GET = paper_forest.GET_FOREST.base.replace(epochs=3, leaves="constant")  # linear ones: in paper_get
USUAL = paper_nongreedy.USUAL | {"epochs": 3, "greedy_epochs": 2, "deepest": 2, "tuned": 1}
USUAL["grid"] = {"nu": (10.0, 100.0), "learning_rate": (1.0,)}


def few_trees(**options):
    """Scikit-learn's boosting, which else takes longer than all else, for as few rows as here."""
    return HistGradientBoostingRegressor(**options | {"max_iter": 5})


# By script: sets, seeds, what is made smaller, and what the report says.
WHOLE = {
    paper_get: (
        # One budget for tuning and for the table: what fits all rows is one program in all parts.
        ["kin8nm", "--tuning", "1", "3", "--final", "1", "3", "--polish", "3"],
        1,
        {"SWEEP_DEPTHS": (2,), "ABLATION_DEPTHS": (2,), "DEFAULT_TUNING": (1, 3), "DEFAULT_FINAL": (1, 3)},
        [
            "| kin8nm | 1 |",
            "(79.82)",
            "Table 4",
            "at every depth",
            "with the options of the library",
            ", the library's ",
        ],
    ),
    paper_dgt: (
        ["ailerons", "segmentation"],
        2,
        {
            "SETS": {name: paper_dgt.SETS[name]._replace(depth=2, epochs=3) for name in ("ailerons", "segmentation")},
            "FIRST": {"ailerons": 200},
            "GRID": {"widths": ((8, 8),), "momentum": (0.0, 0.3), "l2": (0.0,)},
            "TREES": 3,
        },
        ["| segmentation | 2 |", "PAT", "DGT-Forest of 3", "Table 7"],
    ),
    paper_latent: (
        ["kin8nm", "glass"],
        1,
        {
            "SETS": {"kin8nm": 4},
            "GRID": {"depth": (2,), "width": (8,), "learning_rate": (0.001, 0.01)},
            "CLUSTERING": ((2,), (0.1, 1.25), (0.01,)),
            "PRUNING_DEPTH": 2,
            "PRUNING_EPOCHS": 3,
            "HistGradientBoostingRegressor": few_trees,
        },
        ["| kin8nm | R² | 1 |", "Table 3", "epoch 59", "QHAdam"],
    ),
    paper_forest: (
        ["kin8nm"],
        1,
        {
            "GET_FOREST": jtrees.Bagged(SMALL_GET, trees=5),
            "GET_DEPTHS": (2,),
            "BOOSTED": (jtrees.Boosted(SMALL_GET.replace(depth=2, cart="binned"), rounds=3),),
            "REFINED": (
                (jtrees.Refined(jtrees.Boosted(SMALL_GET.replace(depth=2, cart="binned"), rounds=3), epochs=1),),
            ),
            "ONE_TREE": SMALL_GET.replace(depth=2),
            "UPDATES": 20,
            "PARTS": paper_forest.PARTS | dict.fromkeys(paper_forest.RIVALS, paper_forest.random_forest),
        },
        ["| kin8nm | ", "30 trees of GET-Linear - XGBoost: ", "ahead on"],
    ),
    paper_tel: (
        ["churn"],
        1,
        {"ROUNDS": 2, "ROUTING": jtrees.TEL(trees=2, depth=2, epochs=2), "DEPTHS": (2, 3), "TREES": (1, 2)},
        ["(Table 2)", "(Table 3)", "(Figure 2)", "(Figure 3)", "(Figure 4)", "| churn | smooth |"],
    ),
    paper_nongreedy: (
        ["letter"],
        1,
        {
            "DEPTHS": (1, 2),
            "USUAL": USUAL,
            "OC1_SETS": ("letter",),
            "PRUNED": ("letter",),
            "PRUNED_DEPTHS": {"letter": (2,)},
        },
        [*paper_nongreedy.CURVES.values(), "Figure 3", "of 2 depths"],
    ),
}


@pytest.mark.wide
@pytest.mark.parametrize("script", WHOLE)
def test_every_part_of_a_script_runs(folder, monkeypatch, script):
    if script is paper_tel and not BOOSTING:
        pytest.skip("needs xgboost and optuna")
    names, seeds, smaller, expected = WHOLE[script]
    for name, value in smaller.items():
        monkeypatch.setattr(script, name, value)
    text = report_of(script, folder, *names, seeds=seeds)
    assert [part for part in expected if part not in text] == []
    assert (folder / "study.png").exists() == (script in (paper_latent, paper_tel, paper_nongreedy))


@pytest.mark.wide
def test_every_part_of_the_estimators_runs(folder, monkeypatch):
    for kind in (estimators.TreeRegressor, estimators.TreeClassifier):
        monkeypatch.setattr(kind, "default_recipe", SMALL_DGT)
    monkeypatch.setattr(estimators.jtrees, "Boosted", lambda: SMALL_DGT)
    monkeypatch.setattr(estimators.jtrees, "Refined", lambda: SMALL_DGT)
    text = report_of(estimators, folder, "kin8nm", "segmentation", seeds=2)
    assert "| kin8nm | 225 x 5 |" in text and "| segmentation | 225 x 5 |" in text
    assert "TreeRegressor() minus CART: " in text and "TreeClassifier() minus random forest: " in text
    assert text.count("HistGradientBoosting: ") == 4


@pytest.mark.wide
def test_every_part_of_the_distillation_runs(folder, monkeypatch):
    monkeypatch.setattr(distillation, "RECIPE", SMALL_DGT)
    monkeypatch.setattr(distillation, "TEACHER", "HistGradientBoosting")
    text = report_of(distillation, folder, "kin8nm", "segmentation")
    assert "| kin8nm | 225 + 2250 x 5 |" in text and "| segmentation | 225 + 2250 x 5 |" in text
    assert "at least as good on " in text and " of 2 sets" in text


@pytest.mark.slow
def test_oc1_finds_an_oblique_line_and_random_directions_near_ones(monkeypatch):
    monkeypatch.setattr(paper_nongreedy, "DEPTHS", (2, 6))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 2))
    y = (x[:, 0] + 2 * x[:, 1] > 0.3).astype(int)
    split = x[:200], x[200:], y[:200], y[200:]
    w = paper_nongreedy.oc1_split(np.hstack([x, np.ones((300, 1))]), np.eye(2)[y], rng)
    right = np.mean((np.hstack([x, np.ones((300, 1))]) @ w > 0) == y)
    assert max(right, 1 - right) > 0.99
    for find in (paper_nongreedy.oc1, paper_nongreedy.random):
        by_depth = find(split, "any", 0)
        assert by_depth["6"]["test"] > 93
        assert all(1 < found["leaves"] <= 2 ** int(depth) for depth, found in by_depth.items())


@pytest.mark.wide
def test_networks_are_compared(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    y = np.arange(500) % 10
    images = rng.uniform(size=(500, 28, 28)).astype(np.float32)
    images[np.arange(500), 2 * y + 4] = 1  # a line, whose height is the class
    np.savez(tmp_path / "mnist.npz", X=images.reshape(500, -1), y=y)
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    monkeypatch.setattr(cnn_tel, "EPOCHS", 2)
    monkeypatch.setattr(cnn_tel, "RATES", (0.01,))
    cnn_tel.main(["--data-dir", str(tmp_path), "--seeds", "1", "--write"])
    rows = [line.split("|") for line in (tmp_path / "cnn_tel.md").read_text().splitlines() if line.startswith("| CNN")]
    assert [row[1].strip() for row in rows] == ["CNN-Dense", "CNN-TEL"]
    losses = [float(row[4].split("±")[0]) for row in rows]
    assert np.isfinite(losses).all() and all(0 <= float(row[3].split("±")[0]) <= 1 for row in rows)


def results_of(values, settings=None):
    """The results of a study with these values, by part, set and seed."""
    return studies.Results(
        [
            studies.Row(part, name, seed, value, (settings or {}).get(part, {}), "a machine", 3.0)
            for part, by_name in values.items()
            for name, by_seed in by_name.items()
            for seed, value in by_seed.items()
        ]
    )


def test_the_smallest_ensemble_that_does_is_found():
    trees = {"tel": [[2, 1, 80.0, 30], [2, 5, 89.6, 150], [4, 1, 90.0, 200]]}
    trees["boosting"] = [[2, 1, 70.0, 10], [2, 30, 89.5, 600], [4, 100, 91.0, 9000]]
    tuned = {"boosting": {"test": 90.0, "numbers": 3000}}
    text = paper_tel.compact(results_of({"trees": {"churn": {0: trees}}, "tuned": {"churn": {0: tuned}}}))
    assert "| churn | 90.00 | 3,000 | 5 of depth 2 | 150 | 20.0 | 4.0 |" in text


def test_forests_are_compared_set_by_set():
    one = lambda test: {0: {"test": test, "numbers": 10}}
    scores = {
        "get": (90, 60),
        "dgt": (70, 70),
        "boosted": (85, 66),
        "refined": (82, 64),
        "boosting": (80, 65),
        "lightgbm": (79, 67),
        "forest": (1, 2),
        "tree": (3, 4),
    }
    found = {part: {"kin8nm": one(a), "abalone": one(b)} for part, (a, b) in scores.items()}
    found["get"]["ailerons"] = one(1000)  # which the others have not been measured on
    text = paper_forest.report(results_of(found), "a command")
    assert "30 trees of GET-Linear - XGBoost: +2.50 on average, ahead on 1 of 2" in text
    assert "30 trees of DGT - XGBoost: -2.50 on average, ahead on 1 of 2" in text
    assert "boosted GET - XGBoost: +3.00 on average, ahead on 2 of 2" in text
    assert "refined GET - XGBoost: +0.50 on average, ahead on 1 of 2" in text
    assert "boosted GET - the best rival of each set: +2.00 on average, ahead on 1 of 2" in text
    assert "| kin8nm | 90.00 | 70.00 | 85.00 | 82.00 | 80.00 | 79.00 | - | 1.00 | 3.00 |" in text
    assert "ailerons" not in text


@pytest.mark.slow
@pytest.mark.parametrize("name", rivals.RIVALS)
def test_rivals_are_tuned_and_their_numbers_counted(monkeypatch, name):
    if not rivals.installed(name):
        pytest.skip(f"needs {rivals.RIVALS[name].package} and optuna")
    monkeypatch.setattr(rivals, "TRIALS", 2)
    monkeypatch.setattr(rivals, "ROUNDS", 20)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)).astype(np.float32)
    y = np.where(x[:, 0] > 0, 1, -1).astype(np.float32)
    for target in (y, (y > 0).astype(np.int32)):
        model, found = rivals.tuned(name, (x[:200], x[200:], target[:200], target[200:]), seed=0)
        leaves, numbers = outcome.size(model, x)
        assert np.mean((model.predict(x[200:]) > 0) == (target[200:] > 0)) > 0.95
        assert 1 <= found["trees"] <= 20 and len(found["options"]) == 7
        assert found["trees"] <= leaves < numbers


def test_linear_leaves_of_lightgbm_are_counted():
    leaf = lambda *coefficients: {"leaf_value": 1.0, "leaf_coeff": list(coefficients)}
    tree = {"left_child": leaf(0.5), "right_child": {"left_child": leaf(), "right_child": leaf(1.0, 2.0)}}
    assert outcome._lightgbm_size(tree) == (3, 2 * 2 + 3 + 2 * 3)


@pytest.mark.wide
def test_every_part_of_log_losses_that_is_ours_runs(folder, monkeypatch):
    small = jtrees.Refined(jtrees.Boosted(SMALL_GET.replace(depth=2, cart="binned"), rounds=3), epochs=1)
    monkeypatch.setattr(log_loss, "REFINED", ((small, small.replace(learning_rate=0.01)), (small,)))
    monkeypatch.setattr(log_loss, "BOOSTED", (small.base, small.base.replace(patience=3)))
    text = report_of(log_loss, folder, "segmentation", more=["--parts", "refined", "boosted"])
    cells = []
    for part in ("refined", "boosted"):
        found = value_of(folder, part, "segmentation", 0)
        assert 0 < found["log_loss"] < np.log(2) and found["accuracy"] > 50  # of two classes, about equally many
        cells.append(f"{found['log_loss']:.3f} ({found['accuracy']:.1f})")
    assert f"| segmentation | {' | '.join(cells)} |" in text


def test_log_losses_are_compared_set_by_set():
    one = lambda log_loss: {0: {"log_loss": log_loss, "accuracy": 90.0, "numbers": 10}}
    parts = {"refined": {"churn": one(0.2), "dna": one(0.1)}, "boosting": {"churn": one(0.1), "dna": one(0.2)}}
    second = {1: {"log_loss": 9.0, "accuracy": 80.0, "numbers": 10}}  # of a split that ours has not
    text = log_loss.report(results_of(parts | {"lightgbm": {"churn": one(0.4) | second}}), "a command")
    assert "refined GET, XGBoost: lower on 1 of 2; geometric mean of ratios 1.000" in text
    assert "refined GET, LightGBM: lower on 1 of 1; geometric mean of ratios 0.500" in text
    assert "| churn | 0.200 (90.0) | 0.100 (90.0) | 4.700 ± 4.300 (85.0 ± 5.0) |" in text
    assert "| dna | 0.100 (90.0) | 0.200 (90.0) | - |" in text


def test_estimators_are_compared_with_what_people_would_use():
    def of(forest, ours, lost=0.5):
        costs = {"seconds": 7.0, "again": 2.0, "row": 0.5, "numbers": 1000, "log_loss": 0.4}
        scores = {"TreeClassifier()": {"score": ours} | costs, "random forest": costs | {"score": forest}}
        scores["random forest"]["log_loss"] = lost
        return {"rows": 9, "features": 2} | scores

    by_name = {"glass": {0: of(70, 80), 1: of(80, 70)}, "dna": {0: of(50, 55, lost=0.3)}}
    settings = {"classification": {"recipes": ["Boosted()"]}}
    text = estimators.report(results_of({"classification": by_name}, settings), "a command")
    assert "TreeClassifier() minus random forest: +2.50 points, ahead on 1 of 2; lower log loss on 1." in text
    assert "| glass | 9 x 2 | 75.00 ± 5.00 | 75.00 ± 5.00 |" in text
    assert "| TreeClassifier() | 65.00 | 0.400 | 7 | 2 | 1,000 | 0.5 |" in text


def test_distilled_trees_are_compared_with_those_of_the_labels():
    def of(labels, distilled):
        each = {"teacher": 90.0, "labels": labels, "distilled": distilled}
        scores = {by: {"score": score, "seconds": 2.0, "log_loss": 0.25} for by, score in each.items()}
        return {"rows": 9, "made": 90, "features": 2, "fidelity": 95.0, "taught_by": "a teacher"} | scores

    found = {"regression": {"kin8nm": {0: of(70.0, 80.0)}}, "classification": {"churn": {0: of(80.0, 70.0)}}}
    text = distillation.report(results_of(found), "a command")
    assert "at least as good on 1 of 2 sets, by +0.00 points on average." in text
    assert "| kin8nm | 9 + 90 x 2 | 90.00 | 70.00 | 80.00 | +10.00 | 95.0 | 2.0 | 2.0 | 2.0 |" in text
    assert "| churn | 0.250 | 0.250 | 0.250 |" in text and text.count("Log loss:") == 1


# --- Defaults --------------------------------------------------------------------------------------------------------


def test_every_recipe_is_measured_with_its_defaults_or_left_out():
    exported = {
        kind
        for kind in map(vars(jtrees).get, jtrees.__all__)
        if isinstance(kind, type) and issubclass(kind, jtrees.Recipe)
    }
    measured = {type(recipe) for recipe in defaults.RECIPES.values()}
    assert measured | {*defaults.LEFT_OUT, jtrees.Recipe} == exported
    assert not measured & set(defaults.LEFT_OUT)
    plain = [recipe for name, recipe in defaults.RECIPES.items() if name == type(recipe).__name__]
    assert len(plain) == 11 and all(recipe == type(recipe)() for recipe in plain)


def test_made_tables_are_what_they_are_said_to_be():
    def linear(name):
        x, x_test, y, y_test = defaults.rows(name, 0, None)
        assert len(x) == len(x_test) == 3000
        least_squares = Ridge(1e-6)  # by normal equations, which take a tenth of the time
        return 100 * least_squares.fit(x.astype(np.float64), y).score(x_test, y_test)

    x, y = defaults.made("made-wide")
    assert x.shape == (6000, 784) and x.dtype == y.dtype == np.float32
    assert 40 < linear("made-wide") < 60
    x, y = defaults.made("made-collinear")
    assert x.shape == (6000, 20) and np.allclose(x.std(0), 1, atol=0.05)
    assert np.linalg.matrix_rank(np.corrcoef(x.T), tol=0.01) == 4  # all but a thousandth of the variance
    assert 60 < linear("made-collinear") < 80
    known = np.stack([x[:, 0] - x[:, 1], np.sign(x[:, 2] - x[:, 3])], axis=1).astype(np.float64)
    assert Ridge(1e-6).fit(known, y).score(known, y) == pytest.approx(0.95, abs=0.01)
    assert np.array_equal(y, defaults.made("made-collinear")[1])


def test_what_is_behind_cart_of_its_depth_or_a_linear_model_is_listed_with_the_reason():
    sizes = {"rows": 9, "test_rows": 3, "features": 2}
    base = lambda four, eight, linear: {0: sizes | {"CART 4": four, "CART 8": eight, "linear": linear}}
    settings = {part: {"max_seconds": 20.0} for part in defaults.RECIPES}
    report = lambda found: defaults.report(results_of(found, settings), "a command")

    def of(train, test, ended="finished", warnings=()):
        return sizes | {"train": train, "test": test, "ended": ended, "warnings": warnings, "seconds": train / 2}

    test = lambda score: {"test": score}
    found = {
        "baselines": {"abalone": base(test(40), test(50), test(45)), "glass": base(test(60), test(62), test(61))},
        # Above CART of depth 4 and two points below the linear model: not behind; at depth 8 it would be.
        "DGT": {"abalone": {0: of(44, 43), 1: of(10, 10)}},  # no baselines of the second split
        "TEL": {"abalone": {0: of(70, 42.9, "max_seconds")}, "glass": {0: of(61, 58)}},
        "CO2": {"abalone": {0: of(49, 43, warnings=["behind"])}, "ailerons": {0: of(1, 1)}},
    }
    text = report(found)
    assert "| abalone | 9 + 3 x 2 | 43.0 | **42.9** | **43.0** | 40.0 / 50.0 | 45.0 |" in text
    assert "| ailerons | 9 + 3 x 2 | - | - | 1.0 | - / - | - |" in text
    assert "| glass | 9 + 3 x 2 | **58.0** | 60.0 / 62.0 | 61.0 |" in text
    assert "| longest fit, seconds |  | 22 | 35 | 24 |  |  |" in text
    listed = [line for line in text.splitlines() if line.startswith("- ")]
    assert listed == [
        "- abalone, TEL: 42.9, linear 45.0; training score 70.0: overfits; of its fits 1 of 1 ended by max_seconds.",
        "- abalone, CO2: 43.0, CART 8 50.0; training score 49.0: overfits and underfits; of its fits 1 of 1 warned.",
        "- glass, TEL: 58.0, linear 61.0; training score 61.0: neither overfits nor underfits.",
    ]
    assert "More than two points behind: 2 of the 3 cells that have baselines" in text
    assert "2 overfit: " in text and "1 underfit: " in text and "`max_seconds` ended a fit in 1 of them" in text
    assert "By recipe: TEL 1, CO2 1." in text and "`max_seconds=20`" in text
    assert "ridge regression" not in text
    found |= {"GET": {"abalone": {0: of(50, 46), 1: of(9, 9)}}}
    found |= {"GET-no-ridge": {"abalone": {0: of(50, 44.5)}, "glass": {0: of(50, 44.5)}}}
    found |= {"CO2-no-ridge": {"abalone": {0: of(50, 43.5)}}}
    text = report(found)
    assert "| abalone | 1 | 46.0 | 44.5 | +1.5 | 40.0 | 45.0 |\n| **mean** |  |  |  | +1.5 |" in text
    assert "| abalone | 1 | 43.0 | 43.5 | -0.5 | 50.0 | 45.0 |\n| **mean** |  |  |  | -0.5 |" in text
    del found["baselines"], found["GET"]
    text = report(found)
    assert "behind: 0 of the 0 cells that have baselines" in text and "| abalone | 9 + 3 x 2 | 26.5 | 42.9 |" in text


@pytest.mark.wide
def test_every_recipe_runs_with_its_defaults(folder, monkeypatch):
    monkeypatch.setattr(defaults, "ROWS", 100)
    # DGT by itself is there with its defaults.
    small = {name: defaults.RECIPES[name].replace(base=SMALL_DGT) for name in ("Bagged-DGT", "BestOf-DGT")}
    monkeypatch.setattr(defaults, "RECIPES", defaults.RECIPES | small)
    name = "made-collinear"
    text = report_of(defaults, folder, name, more=["--max-seconds", 0.5])
    [line] = [line for line in text.splitlines() if line.startswith(f"| {name} | 100 + 100 x 20 |")]
    assert " - " not in line and "nan" not in line
    before = (folder / "study.jsonl").read_text()
    assert before.count("\n") == len(defaults.PARTS)  # all that a set of regression has
    found = value_of(folder, "Polished-GET", name, 0)
    assert found["ended"] == "max_seconds" and found["parameters"] > 0 and found["seconds"] > 0
    report_of(defaults, folder, name, more=["--max-seconds", 0.5, "--recipes", "TEL"])
    assert (folder / "study.jsonl").read_text() == before


def test_recipes_and_sets_can_be_chosen(tmp_path):
    options = studies.parse(defaults.STUDY, ["--recipes", "baselines", "TEL"])
    assert options.parts == ["baselines", "TEL"] and options.max_seconds == 20
    assert studies.parse(defaults.STUDY, []).parts == ["baselines", *defaults.RECIPES, *defaults.WITHOUT]
    assert not list(defaults.pieces("GET-linear", "glass", options))
    assert [piece.key for piece in defaults.pieces("TEL", "glass", options)] == [("TEL", "glass", i) for i in range(3)]
    with pytest.raises(SystemExit, match=r"--datasets must be among .*, made-wide, .*got 'galss'"):
        studies.main(defaults.STUDY, ["--datasets", "galss", "--out", str(tmp_path / "x.jsonl")])


@pytest.mark.wide
def test_optuna_asks_and_a_sweep_answers(folder, capsys):
    pytest.importorskip("optuna", reason="make peers installs it")
    from experiments import ask_and_tell

    arguments = ["--data-dir", str(folder), "--dataset", "segmentation", "--rounds", "2", "--batch", "3"]
    study = ask_and_tell.main([*arguments, "--epochs", "5"])
    assert len(study.trials) == 6 and np.isfinite(study.best_value)
    assert capsys.readouterr().out.count("round ") == 2


# --- Relaxations ----------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_relaxations_have_equal_slopes_and_become_hard():
    for relaxation, probabilities in relaxations.SOFT.items():
        slope = jax.grad(lambda z, p=probabilities: p(z)[1].sum())(jnp.full((1, 1), 1e-4))[0, 0]  # a kink at 0
        assert slope == pytest.approx(0.25, abs=1e-4), relaxation
    rng = np.random.default_rng(0)
    scores = jnp.asarray(rng.normal(size=(7, 9)), jnp.float32)
    leaf = jtrees.routing.leaf_index(scores)
    for probabilities in relaxations.SOFT.values():
        assert np.allclose(probabilities(scores).sum(0), 1, atol=1e-5)
        assert np.array_equal(probabilities(1e4 * scores).argmax(0), leaf)
        assert np.allclose(probabilities(1e4 * scores).max(0), 1, atol=1e-3)


@pytest.mark.wide
def test_hard_relaxations_have_the_loss_of_the_hard_tree_and_an_upper_bound_of_it():
    rng = np.random.default_rng(0)
    numbers = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    scores, batch, task = numbers(7, 9), jtrees.Batch(numbers(9, 2), numbers(9)), jtrees.Regression()
    leaf, constant = jtrees.routing.leaf_index(scores), jtrees.leaves.Values(numbers(8))
    linear = jtrees.leaves.Linear(numbers(8, 2), numbers(8))
    for leaves in (constant, linear):
        reached = leaves.losses(batch.x, batch.y)[leaf, jnp.arange(9)]
        assert np.allclose(relaxations.path_sum(scores, leaves, batch, task), reached, atol=1e-5)
        assert (relaxations.surrogate(scores, leaves, batch, task) >= reached - 1e-5).all()
        assert np.allclose(relaxations.surrogate(1e4 * scores, leaves, batch, task), reached, atol=1e-5)
    # Linear leaves without slopes are constant ones, and have their gradient.
    flat = jtrees.leaves.Linear(jnp.zeros((8, 2)), constant.values)
    slopes = [
        jax.grad(lambda z, of=of: relaxations.path_sum(z, of, batch, task).sum())(scores) for of in (constant, flat)
    ]
    assert np.abs(slopes[0]).max() > 0 and np.allclose(*slopes, atol=1e-5)
    labels = batch._replace(y=jnp.arange(9) % 3)
    logits, classes = jtrees.leaves.Values(numbers(8, 3), jtrees.losses.LogLoss()), jtrees.Classification(3)
    reached = logits.losses(labels.x, labels.y)[leaf, jnp.arange(9)]
    assert np.allclose(relaxations.path_sum(scores, logits, labels, classes), reached, atol=1e-5)


@pytest.mark.wide
def test_all_relaxations_begin_with_the_same_tree():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 3)), jnp.float32).at[:, 2].set(0)
    batch = jtrees.Batch(x, x[:, 0] * x[:, 1])
    for leaves in ("constant", "linear"):
        make = lambda relaxation, leaves=leaves: relaxations.method(relaxation, 2, leaves, jtrees.Regression(), 1.0)
        trees = [make(relaxation).init(batch, key=jax.random.key(0)) for relaxation in relaxations.RELAXATIONS]
        for tree in trees:
            assert all(map(np.array_equal, jax.tree.leaves(tree), jax.tree.leaves(trees[0])))
        assert not trees[0].weights[:, 2].any()  # a column of zeros has no weight
        hard = trees[0].replace(leaves=jtrees.leaves.Values(jnp.zeros(4))).refit(*batch)
        assert np.allclose(trees[0].apply(x), hard.apply(x), atol=1e-6)


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


def test_runs_are_all_seeds_of_all_schedules():
    runs = relaxations.runs({"constant": (0.1, 2.0), "rising": (0.2, 8.0)}, 2)
    assert runs.seed.tolist() == [0, 1, 0, 1] and np.allclose(runs.rate, [0.1, 0.1, 0.2, 0.2])
    assert runs.first.tolist() == [2, 2, 2, 2] and runs.last.tolist() == [2, 2, 32, 32]


def test_ranks_are_compared_by_the_critical_difference():
    rng = np.random.default_rng(0)
    means = pd.DataFrame(rng.normal(size=(14, 4)) * 0.1 + [0, 3, 1, 1], columns=["a", "b", "c", "d"])
    ranks = relaxations.Ranks.of(means)
    assert ranks.critical == pytest.approx(2.569 * np.sqrt(4 * 5 / (6 * 14)), abs=1e-3)  # Demsar (2006), table 5
    assert ranks.ranks.index[0] == "b" and ranks.ranks["b"] == 1 and ranks.ranks["a"] == 4 and ranks.p < 1e-4
    assert ranks.worse()[-1] == "a" and all({"c", "d"} <= set(group) for group in ranks.groups()[1:2])
    figure = Figure()
    relaxations.draw_ranks(figure.subplots(), ranks, "title")


def test_a_factor_matters_by_its_interval_and_its_size():
    effect = lambda *differences: relaxations.Effect("x", pd.Series(differences))
    assert effect(2.0, 3.0, 2.5, 2.0, 4.0, 1.0, 90.0).verdict() == "matters"  # whatever one set says
    assert effect(0.1, 0.2, 0.1, 0.3, 0.2, 0.1).verdict() == "does not matter"  # however certain
    assert effect(-4.0, 5.0, 1.0, 2.0, -1.0, 0.0).verdict() == "undecided"
    assert effect(9.0, 9.0).verdict() == "undecided" and effect(9.0, 9.0).interval() == (9, -np.inf, np.inf)
    change = np.random.default_rng(0).normal(0.5, 1, 20)
    estimate, low, high = effect(*change).interval()
    assert estimate == np.median([(a + b) / 2 for i, a in enumerate(change) for b in change[i:]])
    for end, p_of in ((low, lambda p: p > 0.03), (low - 0.1, lambda p: p < 0.05), (high + 0.1, lambda p: p < 0.05)):
        assert p_of(stats.wilcoxon(change - end).pvalue)  # the ends are where the test begins to reject
    lines = [(f"set {i}", level, i + (2.0 if level == "b" else 0.0)) for i in range(6) for level in "ab"]
    between = relaxations.effect(pd.DataFrame(lines, columns=["set", "of", "test"]), "of", "b", "a", "b instead of a")
    assert between.clause() == "b instead of a +2.0 (+2.0 to +2.0, better on 6 of 6)"
    assert between.cells() == ["b instead of a", "+2.00 (+2.00 to +2.00)", "+2.00 ± 0.00", "6 of 6", "matters"]


@pytest.mark.wide
def test_every_part_of_the_study_runs(folder, monkeypatch):
    smaller = {"STEPS": 3, "DEPTHS": (1, 2), "CHOSEN_AT": 1, "RATES": (0.1,), "SHARPNESSES": (1.0, 2.0)}
    smaller["RELAXATIONS"] = some = ("sigmoid", "path sum", "surrogate")  # each of them: above
    smaller["STUDY"] = dataclasses.replace(relaxations.STUDY, parts=some)
    for name, value in smaller.items():
        monkeypatch.setattr(relaxations, name, value)
    text = report_of(relaxations, folder, "kin8nm", "segmentation", seeds=2)
    assert "2 sets, 2 random splits" in text and "nan" not in text.split("## Linear leaves")[0]
    assert "| kin8nm | 186 x 5 | " in text and "| segmentation | 186 x 5 | " in text
    assert (folder / "study.png").exists()
    found = value_of(folder, "path sum", "kin8nm", 0)
    assert set(found["linear"]["scores"]) == {"1", "2"} and "soft" not in found["linear"]["scores"]["1"]["rising"]
    with pytest.raises(SystemExit, match="--datasets must be among"):
        studies.main(relaxations.STUDY, ["--datasets", "mnist", "--out", str(folder / "x.jsonl")])


# --- Keys -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def diabetes(tmp_path, monkeypatch):
    """In an empty folder, and under every name the same split of the same set."""
    monkeypatch.chdir(tmp_path)
    x, y = load_diabetes(return_X_y=True)
    monkeypatch.setattr(defaults, "rows", lambda name, seed, data_dir: (x[:300], x[300:], y[:300], y[300:]))


@pytest.mark.slow
@pytest.mark.usefixtures("diabetes")
def test_keys_are_compared_on_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "RECIPES", {"GET": jtrees.GET(depth=1, starts=1, epochs=5)})
    keys.main(["--datasets", "abalone", "--keys", "3"])
    text = (tmp_path / "results" / "keys.md").read_text()
    name, *cells, seconds = [cell.strip() for cell in text.splitlines()[6].split("|")[1:-1]]
    median, worst, best = map(float, cells)
    assert name == "abalone" and 10 < median < 60 and worst <= 0 <= best and "(" in seconds


@pytest.mark.slow
@pytest.mark.usefixtures("diabetes")
def test_epochs_are_compared_on_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(epochs, "EPOCHS", (1, 20))
    epochs.main(["--datasets", "abalone", "kin8nm", "--depths", "1", "--seeds", "1"])
    rows = [line.split("|")[1:-1] for line in (tmp_path / "results" / "epochs.md").read_text().splitlines()[4:9]]
    assert [cell.strip() for cell in rows[0]] == ["set", "depth 1, 1", "depth 1, 20"]
    (_, *first), (_, *second), (_, *mean) = rows[2:]
    assert first == second == mean  # the same rows under both names
    assert all(20 < float(cell) < 60 for cell in mean)


# --- Preconditioning -------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_strengths_are_compared_on_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(defaults, "ROWS", 100)
    monkeypatch.setattr(preconditioning, "RECIPES", {"DGT": SMALL_DGT})
    preconditioning.main(["--datasets", "made-collinear"])
    text = (tmp_path / "results" / "preconditioning.md").read_text()
    name, eigenvalue, scores = [cell.strip() for cell in text.splitlines()[6].split("|")[1:-1]]
    assert name == "made-collinear" and 0 < float(eigenvalue) < 1e-3
    none, *_, auto = scores.split(" / ")
    assert len(scores.split(" / ")) == 4 and none == auto  # too few rows to try strengths


@pytest.mark.wide
def test_losses_are_compared_with_those_of_scikit_learn(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(other_losses, "HistGradientBoostingRegressor", few_trees)
    weak = jtrees.GET(depth=2, starts=1, epochs=2, cart="binned", halving=False, precondition=0.0, shrink=False)
    monkeypatch.setattr(other_losses, "BOOSTED", jtrees.Boosted(weak, rounds=3))
    monkeypatch.setattr(other_losses, "TREE", weak.replace(depth=1, epochs=5, cart=True))
    names = ["rentals, quantiles", "claims, Tweedie"]
    other_losses.main(["--seeds", "1", "--rows", "200", "--datasets", *names])
    lines = (tmp_path / "results" / "losses.md").read_text().splitlines()
    rows = {row[1].strip(): row[2:6] for row in (line.split("|") for line in lines if line.startswith("| "))}
    assert set(names) <= set(rows)
    for name in names:
        boosted, theirs, tree, constant = (float(cell.split("±")[0]) for cell in rows[name])
        assert min(boosted, theirs, tree) > 0 and max(boosted, tree) < 1.05 * constant


def test_made_counts_and_costs_are_as_stated():
    x, y = other_losses.rentals(0)
    assert x.shape == (4000, 5) and (y == np.round(y)).all() and y.min() == 0
    assert y.var() > 2 * y.mean()  # overdispersed
    x, y = other_losses.claims(0)
    assert x.shape == (4000, 3) and 0.5 < (y == 0).mean() < 0.9 and (y >= 0).all()


@pytest.mark.wide
def test_rows_are_timed_beside_others(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    monkeypatch.setattr(bench_rows, "TEST", 500)
    real, short = bench_rows.programs, jtrees.Boosted(rounds=30, patience=None)  # that no deadline ends
    peers = lambda: {name: real(60)[name] for name in ("linear regression", "HistGradientBoosting")}
    monkeypatch.setattr(bench_rows, "programs", lambda _: {"Boosted()": bench_rows.ours(short, 600)} | peers())
    bench_rows.main(["--rows", "200", "2000", "--write"])
    lines = (tmp_path / "bench_rows.md").read_text()
    assert (tmp_path / "bench_rows.png").stat().st_size > 10_000
    scores = {line.split("|")[1].strip(): line for line in lines.splitlines() if line.startswith("| 2")}
    assert list(scores) == ["200", "2,000"]
    assert min(float(cell.split(" in ")[0]) for cell in scores["2,000"].split("|")[2:5]) > 0.7


@pytest.mark.slow
def test_boosting_is_compared_table_by_table(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "RESULTS", tmp_path)
    monkeypatch.setattr(boosting, "TRAIN", 300)
    monkeypatch.setattr(boosting, "TEST", 100)
    recipes = {"one": jtrees.Boosted(rounds=1, patience=None), "many": jtrees.Boosted(rounds=20, patience=None)}
    monkeypatch.setattr(boosting, "recipes", lambda: recipes)
    monkeypatch.setattr(benchmark, "installed", lambda _: False)
    boosting.main(["--tables", "Friedman 2", "--write"])
    lines = [line for line in (tmp_path / "boosting_held_out.md").read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["", "Friedman 2", "mean beside many"] and [row[0] for row in cells[2:]] == ["one", "many"]
    assert cells[3][2] == "+0.00" and float(cells[2][2]) < -10 and cells[3][1].endswith(" s, 20)")
