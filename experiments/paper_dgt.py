"""DGT's tables: trees (1 and 2), forests (4) and ablations (7), beside DTSemNet, CART, a linear model and XGBoost.

python -m experiments.paper_dgt --data-dir DATA [--seeds 10] [--datasets pendigits ...] [--parts trees ...]

The result of a (part, set) is a row of --out.

Widths, momentum and L2, or the options of DTSemNet, are chosen on a sixth of the training part, by the mean over
several keys: ten in regression, three in classification. Large sets have one key and half of the epochs. The tree is
then trained on the whole training part, once for each seed; sets of more than 50 000 rows take a third of the seeds.
The test part takes no part in any choice of a set with one split. If a set has five shuffles, the options of the first
shuffle serve all five, and most test rows of the others are among the rows that chose them.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from experiments import benchmark, data, studies
from experiments.studies import spread
import jtrees
from jtrees import ops, routing, training
from jtrees.data import Scaling, Table
from jtrees.tasks import Regression

SHUFFLES = "abalone_dgt"
CPU_ACT_TRAIN = 0.6  # share of the rows, at random: the paper's 3932 training rows, and the fifth for its validation
FIRST = {"ailerons": 7154, "mnist": 60_000}  # number of leading training rows of sets whose file has no parts


class Setting(NamedTuple):
    """A set as in the paper: height, passes over the data, unit of the error; and the papers' figures."""

    depth: int
    epochs: int
    unit: float = 1.0
    tree: float | None = None  # Tables 1 and 2
    forest: float | None = None  # Table 4
    cart: float | None = None
    dtsemnet: float | None = None  # the paper of DTSemNet


SETS = {
    "abalone_dgt": Setting(6, 100, 1.0, 2.15, 2.08, 2.29, 2.14),
    "ailerons": Setting(6, 60, 1e4, 1.72, 1.65, 2.01, 1.66),
    "cpu-act": Setting(6, 100, 1.0, 2.91, 2.63, 3.35, 2.65),  # the paper's Comp-Activ
    "pendigits": Setting(8, 60, 100, 96.36, None, 89.94, 97.02),
    "satimage": Setting(6, 60, 100, 86.64, None, 84.18, 87.55),
    "segmentation": Setting(8, 100, 100, 95.86, None, 94.23, 96.10),
    "letter": Setting(10, 100, 100, 86.13, None, 70.13, 89.19),
    "connect-4": Setting(8, 20, 100, 79.52, None, 74.03, 82.03),
    "mnist": Setting(8, 20, 100, 94.00, None, 85.59, 96.16),
}
REGRESSION = ("abalone_dgt", "ailerons", "cpu-act")
GRID = {"widths": ((), (240, 240)), "momentum": (0.0, 0.3, 0.8), "l2": (0.0, 1e-5)}
RATES = {"learning_rate": (0.003, 0.01, 0.03, 0.1)}  # of DTSemNet
LARGE, LARGEST = 10_000, 50_000  # rows
BATCH = 128
TREES = 30
RUNS = 5  # keys of which a held-out part chooses one
ABLATIONS = ("sum, sign, L = 3", "sum, sign, L = 1", "product, sign, L = 3", "sum, annealed, L = 3")
ABLATED = {  # Table 7 of the paper, in this order
    "ailerons": (SETS["ailerons"].tree, 1.90, 2.02, 1.73),
    SHUFFLES: (SETS[SHUFFLES].tree, 2.21, 2.40, 2.31),
}

Split = tuple[Any, ...]  # training x and y, test x and y


def splits(name: str, data_dir: str | None) -> list[Split]:
    """Returns the training and test parts: the paper's parts if they are published."""
    if name == SHUFFLES:
        with np.load(data.folder_of(data_dir) / f"{name}.npz") as arrays:
            parts = ("X_train", "y_train", "X_test", "y_test")
            return [tuple(arrays[f"{part}_{i}"].astype(np.float32) for part in parts) for i in range(5)]  # type: ignore
    table, test = data.load_as_published(name, data_dir)
    x, y = table.x, table.y
    if test is not None:
        return [(x[~test], y[~test], x[test], y[test])]
    if name == "cpu-act":
        shuffled = lambda seed: train_test_split(x, y, train_size=CPU_ACT_TRAIN, random_state=seed)
        return [(a, ya, b, yb) for a, b, ya, yb in map(shuffled, range(5))]
    if (first := FIRST.get(name)) is not None:
        return [(x[:first], y[:first], x[first:], y[first:])]
    a, b, ya, yb = train_test_split(x, y, test_size=0.2, random_state=0, stratify=y)
    return [(a, ya, b, yb)]


def score(name: str, answers: np.ndarray, y: np.ndarray) -> float:
    """Returns RMSE in the paper's unit, or accuracy in per cent."""
    if name in REGRESSION:
        return SETS[name].unit * float(np.sqrt(np.mean((answers.astype(np.float64) - y) ** 2)))
    return studies.percent(answers, y)


def best(name: str, candidates: Iterable[Any], score: Callable[[Any], float]) -> Any:
    """Returns the candidate with the best score."""
    return (min if name in REGRESSION else max)(candidates, key=score)


def task(name: str) -> Any:
    """Returns the task as jtrees.fit names it."""
    return "regression" if name in REGRESSION else "classification"


def recipe(name: str, **options: Any) -> Any:
    """Returns DGT as the paper trains it on a set."""
    fixed: Any = {"depth": SETS[name].depth, "epochs": SETS[name].epochs, "precondition": 0.0, "early_stopping": False}
    return jtrees.DGT(**fixed | options)


def network(name: str, **options: Any) -> Any:
    """Returns DTSemNet with the height and the passes of DGT, and linear leaves in regression."""
    leaves = "linear" if name in REGRESSION else "constant"
    fixed: Any = {"depth": SETS[name].depth, "epochs": SETS[name].epochs, "precondition": 0.0, "leaves": leaves}
    return jtrees.DTSemNet(**fixed | options)


def result(recipe: Any, name: str, split: Split, seed: int) -> tuple[Any, list[float]]:
    """Fits a recipe; returns the fit, and its scores on the test and the training part."""
    x, y, x_test, y_test = split
    fit = studies.fit(recipe, (x, x_test, y, y_test), seed, task=task(name))
    return fit, [score(name, fit.predict(x_test), y_test), score(name, fit.predict(x), y)]


def chosen(name: str, split: Split, make: Callable[..., Any] = recipe, grid: Any = GRID) -> dict[str, Any]:
    """Returns the options with the lowest mean loss over keys; each key holds out its own sixth."""
    keys, epochs = 10 if name in REGRESSION else 3, SETS[name].epochs
    if len(split[0]) > LARGE:
        keys, epochs = 1, epochs // 2
    how: Any = {"grid": grid, "validation": 1 / 6, "task": task(name)}
    tune = lambda i: jtrees.tune(make(name, epochs=epochs), *split[:2], key=jax.random.key(1000 + i), **how)
    trials = [tune(i).report.tuning.trials for i in range(keys)]
    mean = np.mean([[trial.loss for trial in key_trials] for key_trials in trials], axis=0)
    return trials[0][int(np.argmin(mean))].options


def peers(name: str, split: Split, boost: bool) -> dict[str, float]:
    """Returns scores of CART (best depth) and a linear model, or of XGBoost (best learning rate) for forests."""
    x, y, x_test, y_test = split
    cut: Any = partial(train_test_split, test_size=1 / 6, random_state=0)
    a, b, ya, yb = cut(x, y, stratify=None if name in REGRESSION else y)
    out = {}

    def tuned(label: str, make: Callable[[Any], Any], options: list[Any]) -> None:
        option = best(name, options, lambda option: score(name, make(option).fit(a, ya).predict(b), yb))
        out[label] = score(name, make(option).fit(x, y).predict(x_test), y_test)

    if boost:
        if benchmark.installed("xgboost"):
            import xgboost  # type: ignore[import-not-found]

            model = xgboost.XGBRegressor if name in REGRESSION else xgboost.XGBClassifier
            tuned("XGBoost", lambda rate: model(n_estimators=1000, learning_rate=rate, n_jobs=2), [0.01, 0.03, 0.1])
        return out
    cart = DecisionTreeRegressor if name in REGRESSION else DecisionTreeClassifier
    tuned("CART", lambda depth: cart(max_depth=depth, random_state=0), list(range(2, 17)))
    if name in REGRESSION:
        tuned("linear", lambda alphas: make_pipeline(StandardScaler(), RidgeCV(alphas)), [np.logspace(-3, 3, 13)])
    else:
        tuned("linear", lambda c: make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=300)), [1.0])
    return out


def trees_part(name: str, parts: list[Split], seeds: int) -> dict[str, Any]:
    """Measures Tables 1 and 2."""
    options = chosen(name, parts[0])
    out: dict[str, list[float]] = {"test": [], "train": [], "reached": [], "cart": [], "linear": []}
    for split in parts:
        beside = peers(name, split, boost=False)
        out["cart"].append(beside["CART"])
        out["linear"].append(beside["linear"])
        for seed in range(seeds if len(split[0]) <= LARGEST else seeds // 3):
            fit, (test, train) = result(recipe(name, **options), name, split, seed)
            reached = len(np.unique(fit.tree.decision_path(split[0])[:-1]))
            for key, value in {"test": test, "train": train, "reached": reached}.items():
                out[key].append(value)
    return {"options": options, **out}


def networks_part(name: str, parts: list[Split], seeds: int) -> dict[str, Any]:
    """Measures DTSemNet on the sets of Tables 1 and 2."""
    epochs = SETS[name].epochs
    grid = {"depth": (4, 6), "epochs": (epochs, 3 * epochs)} if name in REGRESSION else {"pooling": ("max", "sum")}
    options = chosen(name, parts[0], network, RATES | grid)
    out: dict[str, list[float]] = {"test": [], "train": []}
    for split in parts:
        for seed in range(seeds if len(split[0]) <= LARGEST else seeds // 3):
            test, train = result(network(name, **options), name, split, seed)[1]
            out["test"].append(test)
            out["train"].append(train)
    return {"options": options, **out}


def best_part(name: str, parts: list[Split], seeds: int) -> dict[str, Any]:
    """Measures the best of five keys by a held-out sixth of the training part, with a fifth of the keys for speed."""
    options, test = chosen(name, parts[0]), []
    best = jtrees.BestOf(recipe(name, **options), runs=RUNS)
    for x, y, x_test, y_test in parts:
        for seed in range(max(1, seeds // 5)):
            parted: Any = train_test_split(x, y, test_size=1 / 6, random_state=seed)
            a, b, ya, yb = parted
            fit = jtrees.fit(best, a, ya, key=jax.random.key(seed), task=task(name), validation=(b, yb))
            test.append(score(name, fit.predict(x_test), y_test))
    return {"options": options, "test": test}


def forests_part(name: str, parts: list[Split], seeds: int) -> dict[str, Any]:
    """Measures Table 4: thirty trees with the options chosen for one tree, and a fifth of the keys to save time."""
    options, test, boosted = chosen(name, parts[0]), [], []
    for split in parts:
        boosted += peers(name, split, boost=True).values()
        for seed in range(max(1, seeds // 5)):
            forest = jtrees.Bagged(recipe(name, **options), trees=TREES)
            test.append(result(forest, name, split, seed)[1][0])
    return {"options": options, "test": test, "boosted": boosted}


def variant(kind: str, depth: int, steps: int) -> jtrees.Method:
    """Returns DGT for regression, or DGT with one of its parts replaced (Table 7)."""
    form, quantiser, layers = (part.strip() for part in kind.split(","))
    plain = jtrees.methods.dgt(depth, widths=(240, 240) if layers == "L = 3" else ())
    if form == "sum" and quantiser == "sign":
        return plain
    slope: Any = optax.exponential_decay(1.0, steps, 100.0)

    def outputs(tree: jtrees.ObliqueTree, x: jax.Array, step: jax.Array) -> jax.Array:
        scores, values = ops.scores(tree.weights, tree.bias, x), tree.leaves.values
        scores = scores / routing.mean_size(scores)
        if form == "product":  # a product of hard steps, with the straight-through gradient
            clipped = jnp.clip(scores, -1, 1)
            sign = clipped + jax.lax.stop_gradient(jnp.where(scores > 0, 1.0, -1.0) - clipped)
            return values @ routing.leaf_probabilities((1 + sign) / 2)
        # Forward: the hard tree. Backward: the softmax of sums whose signs are sigmoids with a growing slope.
        agreement = 2 * jax.nn.sigmoid(slope(step) * scores) - 1
        soft = jax.lax.stop_gradient(values) @ routing.leaf_probabilities(jax.nn.sigmoid(2 * agreement))
        return routing.path_sum(jax.lax.stop_gradient(scores), values) + soft - jax.lax.stop_gradient(soft)

    def loss(params: Any, batch: jtrees.Batch, *, key: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        value = jnp.square(outputs(params.tree(), batch.x, step) - batch.y).mean()
        return value, value

    return plain._replace(loss=loss)


def ablations_part(name: str, parts: list[Split], seeds: int) -> dict[str, Any]:
    """Measures Table 7: all variants have the same options, scaling and training."""
    out: dict[str, Any] = {kind: [] for kind in ABLATIONS}
    for x, y, x_test, y_test in parts:
        scaling = Scaling.fit(Table(x, y.astype(np.float64), None, Regression()))
        batch = jtrees.Batch(jnp.asarray(scaling.transform(x)), jnp.asarray(scaling.transform_y(y)))
        new = jnp.asarray(scaling.transform(x_test))
        steps = SETS[name].epochs * (len(x) // BATCH)
        for kind in ABLATIONS:
            method = variant(kind, SETS[name].depth, steps)
            wave, third = optax.cosine_decay_schedule(0.01, -(-steps // 3)), -(-steps // 3)
            optimizer = training.rmsprop(lambda step, wave=wave, third=third: wave(step % third), clip=0.01)

            def run(key: jax.Array, batch=batch, new=new, method=method, optimizer=optimizer, n=steps):
                result = jtrees.train(method, batch, key=key, optimizer=optimizer, steps=n, batch_size=BATCH)
                return method.harden(result.params, batch).apply(new)

            answers = jax.jit(partial(benchmark.map_over_devices, run))(jax.vmap(jax.random.key)(jnp.arange(seeds)))
            out[kind] += [score(name, scaling.inverse(np.asarray(answer)), y_test) for answer in answers]
    return out


PARTS = {
    "trees": trees_part,
    "best": best_part,
    "networks": networks_part,
    "forests": forests_part,
    "ablations": ablations_part,
}


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Returns no settings; None for classes in parts of regression, and for ablations of sets without figures."""
    has = part in ("trees", "networks") or name in (ABLATED if part == "ablations" else REGRESSION)
    return {} if has else None


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures a part with all seeds."""
    return PARTS[part](name, splits(name, options.data_dir), options.seeds)


# --- The report ------------------------------------------------------------------------------------------------------


def report(results: studies.Results, command: str) -> str:
    """Returns the tables, from the existing rows."""
    seeds = {row.settings["seeds"] for row in results.rows}
    text = [
        "# DGT: the paper's tables\n",
        f"Made by `{command}` on {results.machines}; keys: {', '.join(map(str, sorted(seeds)))}, and a third of "
        f"them on sets with more than {LARGEST:,} rows.",
        "RMSE for abalone (mean over the paper's five shuffles), ailerons (times 1e4; the first 7154 rows are "
        "training rows) and cpu-act (five random shuffles, 60 % training rows). Test accuracy in per cent for the "
        "other sets, on their own test parts. The parts of segmentation and connect-4 are not published: their splits "
        "are random, 80/20. Mean ± standard deviation over keys and shuffles; the paper's figures are in brackets. A "
        "sixth of the training part chooses widths, momentum and L2, or DTSemNet's options, from a grid. If there are "
        "five shuffles, the first shuffle chooses for all five.\n",
    ]
    figure = lambda value: "" if value is None else f" ({value:.2f})"
    if trees := results.select("trees").rows:
        rows = []
        for row in trees:
            value, setting = row.value, SETS[row.dataset]
            options = ", ".join(f"{name} {value['options'][name]}" for name in GRID)
            cells = [row.dataset, str(setting.depth), spread(value["test"]) + figure(setting.tree)]
            cells += [spread(value["train"]), spread(value["cart"]) + figure(setting.cart), spread(value["linear"])]
            cells += [f"{np.mean(value['reached']):.0f} of {2**setting.depth - 1}", options, str(setting.epochs)]
            rows.append([*cells, f"{row.seconds:.0f}"])
        header = ["set", "height", "DGT, test", "DGT, training", "CART", "linear", "nodes reached", "chosen", "epochs"]
        text.append("## Trees (Tables 1 and 2)\n\n" + benchmark.markdown([*header, "seconds, all"], rows))
    if networks := results.select("networks").rows:
        rows = []
        for row in networks:
            value, setting = row.value, SETS[row.dataset]
            cells = [row.dataset, spread(value["test"]) + figure(setting.dtsemnet), spread(value["train"])]
            options = ", ".join(f"{name} {option}" for name, option in value["options"].items())
            rows.append([*cells, options, f"{row.seconds:.0f}"])
        header = ["set", "DTSemNet, test", "DTSemNet, training", "chosen", "seconds, all"]
        text.append(
            "## DTSemNet\n\nSplits are those of DGT, and in classification heights and passes too. In regression, "
            "leaves are linear. The figures in brackets are those of its own paper.\n\n"
            + benchmark.markdown(header, rows)
        )
    if best := results.select("best").rows:
        rows = [[row.dataset, spread(row.value["test"]) + figure(SETS[row.dataset].tree)] for row in best]
        text.append(
            f"## The best of {RUNS} keys\n\n`BestOf` chooses the key by a sixth of the training part, which trains no "
            "tree.\n\n" + benchmark.markdown(["set", "DGT, test"], rows)
        )
    if forests := results.select("forests").rows:
        rows = [
            [row.dataset, spread(row.value["test"]) + figure(SETS[row.dataset].forest), spread(row.value["boosted"])]
            for row in forests
        ]
        header = ["set", f"DGT-Forest of {TREES}", "XGBoost, 1000 trees"]
        text.append("## Forests (Table 4)\n\n" + benchmark.markdown(header, rows))
    if ablations := results.select("ablations").rows:
        rows = [[row.dataset, *(spread(row.value[kind]) for kind in ABLATIONS)] for row in ablations]
        papers = [", ".join(f"{value:.2f}" for value in pair) for pair in zip(*ABLATED.values(), strict=True)]
        text.append(
            "## Ablations (Table 7), test RMSE\n\nNothing is tuned: no momentum, no L2, widths (240, 240) for L = 3. "
            f"The paper's figures for ailerons and abalone: {papers[0]}; L = 1: {papers[1]}; product: {papers[2]}; "
            f"annealed: {papers[3]}.\n\n" + benchmark.markdown(["set", *ABLATIONS], rows)
        )
    return "\n".join(text)


STUDY = studies.Study("paper_dgt", __doc__, PARTS, SETS, 10, measure, report, settings, together=True, closed=True)

if __name__ == "__main__":
    studies.program(STUDY)
