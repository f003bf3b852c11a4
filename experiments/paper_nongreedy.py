"""Non-greedy trees beside greedy trees: accuracy by depth (Figure 2) and leaves in use by nu (Figure 3). Figure 4, time
against depth, is in experiments/bench_nongreedy.py.

python -m experiments.paper_nongreedy --data-dir DATA --seeds 3 [--datasets letter ...] [--parts axis co2 ...]

The result of a (part, set, seed) is a row of --out.

The test part is the set's own, if there is one, or a fifth of the rows, drawn by the seed. CO2 and non-greedy trees are
tuned at each depth: the log loss on a fifth of the training rows chooses nu and the learning rate. The final fit takes
all training rows. Axis-aligned trees are scikit-learn's, with entropy. Random trees draw a number of directions per
level, and each node takes the best direction and threshold. OC1 is the algorithm of Murthy, Kasif and Salzberg:
coordinate descent on each node from the axis-aligned split, with restarts; it runs on small sets only.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
import numpy as np
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from experiments import benchmark, data, studies
import jtrees

SETS = ("letter", "pendigits", "satimage", "connect-4", "mnist")
DEPTHS = (6, 8, 10, 12, 14, 16, 18)
DIRECTIONS = 500  # random directions per level
# Stable SGD, tuned at each depth. Connect-4 and MNIST have many rows. Their trees deeper than 8 take the best options
# of depth 8. MNIST, whose trees are large, has no tree deeper than 14.
USUAL: dict[str, Any] = {
    "epochs": 100,
    "greedy_epochs": 10,
    "grid": {"nu": (30.0, 100.0), "learning_rate": (0.3, 1.0)},
    "deepest": 18,
    "tuned": 18,
    "stable": True,
}
MANY = {"tuned": 8, "stable": False}
BUDGETS: dict[str, dict[str, Any]] = {
    "connect-4": MANY | {"epochs": 60, "greedy_epochs": 3, "grid": {"nu": (30.0, 100.0), "learning_rate": (0.1, 0.3)}},
    "mnist": MANY | {"epochs": 15, "greedy_epochs": 2, "grid": {"learning_rate": (0.03, 0.1)}, "deepest": 14},
}
OC1_SETS = ("pendigits", "satimage")
OC1 = {"restarts": 5, "sweeps": 3}
PRUNED = ("letter", "mnist")  # sets of Figure 3
NUS = (0.1, 1.0, 4.0, 10.0, 43.0, 100.0)
PRUNED_DEPTHS = {"letter": (10, 13, 16), "mnist": (10,)}

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def parts_of(name: str, seed: int, folder: str | None) -> Split:
    """Returns training and test features, training and test classes."""
    table, test = data.load_as_published(name, folder)
    if test is not None:
        return table.x[~test], table.x[test], table.y[~test], table.y[test]
    return data.split(table.x, table.y, seed, share=0.8)


def budget(name: str) -> dict[str, Any]:
    """Returns passes, grid and deepest tree of a set."""
    return USUAL | BUDGETS.get(name, {})


def evaluated(model: Any, split: Split) -> dict[str, float]:
    """Returns accuracy on both parts, in per cent, and the number of leaves that training samples reach."""
    x, x_test, y, y_test = split
    percent = lambda x, y: studies.percent(model.predict(x), y)
    return {"train": percent(x, y), "test": percent(x_test, y_test), "leaves": len(np.unique(model.leaf_index(x)))}


# --- Axis-aligned, random, OC1 ---------------------------------------------------------------------------------------


def axis(split: Split, name: str, seed: int) -> dict[str, Any]:
    """Fits scikit-learn's tree at each depth."""
    x, x_test, y, y_test = split
    out = {}
    for depth in DEPTHS:
        model = DecisionTreeClassifier(criterion="entropy", max_depth=depth, random_state=seed).fit(x, y)
        scores = {"train": 100 * float(model.score(x, y)), "test": 100 * float(model.score(x_test, y_test))}
        out[str(depth)] = scores | {"leaves": int(model.get_n_leaves())}
    return out


def stump(x: np.ndarray, y: np.ndarray) -> tuple[int, float]:
    """Returns the feature and the threshold of the axis-aligned split with the lowest entropy; (-2, -2) without any."""
    tree = DecisionTreeClassifier(criterion="entropy", max_depth=1, random_state=0).fit(x, y).tree_
    return int(tree.feature[0]), float(tree.threshold[0])


def grow(split: Split, name: str, seed: int, *, chooser: Callable[..., Any]) -> dict[str, Any]:
    """Grows a tree level by level, and evaluates it at each depth.

    ``chooser(rng, columns)`` returns, for a level, a function of rows and classes of a node that returns the hyperplane
    ``(columns,)`` of the node; the last column of the rows is 1.
    """
    x, x_test, y, y_test = split
    scaler, rng, out = StandardScaler().fit(x), np.random.default_rng(seed), {}
    x, x_test = (np.hstack([scaler.transform(a), np.ones((len(a), 1))]) for a in (x, x_test))
    leaf, leaf_test = np.zeros(len(x), np.int64), np.zeros(len(x_test), np.int64)
    for level in range(max(DEPTHS)):
        choose = chooser(rng, x.shape[1])
        right, right_test = np.zeros(len(x), bool), np.zeros(len(x_test), bool)
        for node in np.unique(leaf):
            inside, inside_test = leaf == node, leaf_test == node
            if len(np.unique(y[inside])) > 1:
                w = choose(x[inside], y[inside])
                right[inside], right_test[inside_test] = x[inside] @ w > 0, x_test[inside_test] @ w > 0
        leaf, leaf_test = 2 * leaf + 1 + right, 2 * leaf_test + 1 + right_test
        if level + 1 in DEPTHS:
            leaves, index = np.unique(leaf, return_inverse=True)
            counts = np.zeros((len(leaves), int(y.max()) + 1))
            np.add.at(counts, (index, y), 1)
            answers = dict(zip(leaves, counts.argmax(1), strict=True))
            usual = counts.sum(0).argmax()
            test = np.array([answers.get(node, usual) for node in leaf_test])
            scores = {"train": 100 * float(np.mean(counts.argmax(1)[index] == y))}
            out[str(level + 1)] = scores | {"test": 100 * float(np.mean(test == y_test)), "leaves": len(leaves)}
    return out


def random_directions(rng: np.random.Generator, columns: int) -> Callable[..., np.ndarray]:
    """Draws the directions of a level; a node takes the best direction and threshold."""
    directions = np.vstack([rng.normal(size=(columns - 1, DIRECTIONS)), np.zeros(DIRECTIONS)])

    def choose(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        feature, threshold = stump(x @ directions, y)
        w = directions[:, feature].copy() if feature >= 0 else np.zeros(columns)
        w[-1] = -threshold if feature >= 0 else 0
        return w

    return choose


def oc1_split(x: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the best of several hyperplanes ``(p + 1,)`` after coordinate descent; the last column of x is 1."""
    one_hot, best, lowest = np.eye(int(y.max()) + 1)[y], np.zeros(x.shape[1]), np.inf
    for restart in range(OC1["restarts"]):
        w = rng.normal(size=x.shape[1])
        if restart == 0 and (axis_split := stump(x[:, :-1], y))[0] >= 0:
            w = np.zeros(x.shape[1])
            w[axis_split[0]], w[-1] = 1, -axis_split[1]
        cost = np.inf
        for _ in range(OC1["sweeps"]):
            before = cost
            for j in rng.permutation(x.shape[1]):
                w, cost = _along(w, j, x, one_hot)
            if cost >= before - 1e-9:
                break
        if cost < lowest:
            best, lowest = w, cost
    return best


def _along(w: np.ndarray, j: int, x: np.ndarray, one_hot: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns the hyperplane with its best coordinate j.

    A sample is on the right if coordinate j is above ``-(w . x without j) / x_j`` (below, if x_j < 0).
    """
    rest = x @ w - w[j] * x[:, j]
    sign, size = np.sign(x[:, j]), np.abs(x[:, j])
    able = size > 1e-9
    turns = np.where(able, -rest / np.where(able, x[:, j], 1), np.nan)
    candidates = np.unique(turns[able])
    if len(candidates) == 0:
        return w, _entropy(x @ w > 0, one_hot)
    candidates = np.concatenate([candidates[:1] - 1, (candidates[1:] + candidates[:-1]) / 2, candidates[-1:] + 1])
    # As the coordinate grows past a sample's turn, samples with x_j > 0 go right and samples with x_j < 0 go left.
    order = np.argsort(turns[able], kind="stable")
    change = (sign[able][order])[:, None] * one_hot[able][order]
    start = one_hot[~able & (rest > 0)].sum(0) + one_hot[able & (sign < 0)].sum(0)
    passed = np.searchsorted(turns[able][order], candidates)
    right = start + np.concatenate([np.zeros((1, one_hot.shape[1])), change.cumsum(0)])[passed]
    left = one_hot.sum(0) - right
    cost = _cost(left, right)
    best = int(cost.argmin())
    current = _entropy(x @ w > 0, one_hot)
    if cost[best] >= current - 1e-9:
        return w, current
    w = w.copy()
    w[j] = candidates[best]
    return w, float(cost[best])


def _entropy(right: np.ndarray, one_hot: np.ndarray) -> float:
    return float(_cost(one_hot[~right].sum(0)[None], one_hot[right].sum(0)[None])[0])


def _cost(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the entropy of both sides times their samples, for class counts ``(m, k)`` each."""
    xlogx = lambda a: np.where(a > 0.5, a * np.log(np.maximum(a, 1)), 0)
    entropy = lambda counts: xlogx(counts.sum(1)) - xlogx(counts).sum(1)
    return entropy(left) + entropy(right)


# --- CO2, non-greedy -------------------------------------------------------------------------------------------------


def recipe_of(kind: str, depth: int, name: str) -> Any:
    """Returns CO2 or NonGreedy with a set's passes."""
    settings = budget(name)
    published: Any = {"rows": None, "learning_rate": 1.0, "ridge": False, "precondition": 0.0, "shrink": False}
    if kind == "co2":
        return jtrees.CO2(depth=depth, epochs=settings["greedy_epochs"], **published)
    options = {name: settings[name] for name in ("greedy_epochs", "epochs", "stable")}
    return jtrees.NonGreedy(depth=depth, **options, **published)


def learnt(kind: str, split: Split, name: str, seed: int) -> dict[str, Any]:
    """Fits a recipe at each depth, and tunes it up to the set's largest tuned depth."""
    x, _, y, _ = split
    out, settings, options = {}, budget(name), {}
    how: Any = {"key": jax.random.key(seed), "task": "classification"}
    for depth in (depth for depth in DEPTHS if depth <= settings["deepest"]):
        recipe = recipe_of(kind, depth, name)
        if depth <= settings["tuned"]:
            trials = jtrees.tune(recipe, x, y, grid=settings["grid"], validation=0.2, **how).report.tuning.trials
            # This takes the lowest loss. ``tune`` would take the smallest tree within the error of the lowest loss.
            options = min(trials, key=lambda trial: trial.loss).options
        fit = jtrees.fit(recipe.replace(**options), x, y, **how)
        out[str(depth)] = evaluated(fit.model, split) | {"options": options}
    return out


def pruned(split: Split, name: str, seed: int) -> dict[str, Any]:
    """Returns the leaves in use by nu, and of the axis-aligned tree, at several depths."""
    x, _, y, _ = split
    out: dict[str, Any] = {}
    for depth in PRUNED_DEPTHS[name]:
        axis_tree = DecisionTreeClassifier(criterion="entropy", max_depth=depth, random_state=seed).fit(x, y)
        out[str(depth)] = {"axis-aligned": int(axis_tree.get_n_leaves())}
        for nu in NUS:
            recipe = recipe_of("nongreedy", depth, name).replace(nu=nu)
            fit = jtrees.fit(recipe, x, y, key=jax.random.key(seed), task="classification")
            out[str(depth)][f"{nu:g}"] = evaluated(fit.model, split)
    return out


# --- Pieces and report -----------------------------------------------------------------------------------------------

PARTS: dict[str, Any] = {
    "axis": axis,
    "random": partial(grow, chooser=random_directions),
    "oc1": partial(grow, chooser=lambda rng, columns: partial(oc1_split, rng=rng)),
    "co2": partial(learnt, "co2"),
    "nongreedy": partial(learnt, "nongreedy"),
    "pruned": pruned,
}
CURVES = {"axis": "axis-aligned", "random": "random", "oc1": "OC1", "co2": "CO2", "nongreedy": "non-greedy"}


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the settings of a part; None for OC1 and Figure 3 on other sets."""
    if name not in {"oc1": OC1_SETS, "pruned": PRUNED}.get(part, (name,)):
        return None
    recipe = lambda kind: studies.recipe_text(recipe_of(kind, 8, name))
    if part == "pruned":
        return {"depths": PRUNED_DEPTHS[name], "nus": NUS, "recipe": recipe("nongreedy")}
    if part in ("co2", "nongreedy"):
        return {"depths": DEPTHS, "recipe": recipe(part), "grid": budget(name)["grid"]}
    return {"depths": DEPTHS} | {"random": {"directions": DIRECTIONS}, "oc1": OC1}.get(part, {})


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures a part on a split."""
    return PARTS[part](parts_of(name, seed, options.data_dir), name, seed)


def curve(results: studies.Results, part: str, name: str, quantity: str) -> dict[int, float]:
    """Returns the mean over seeds, by depth."""
    values = results.values(part, name)
    depths = sorted(map(int, values[0])) if values else []
    return {depth: float(np.mean([value[str(depth)][quantity] for value in values])) for depth in depths}


def report(results: studies.Results, command: str) -> str:
    """Returns Figures 2 and 3 as tables."""
    text = [f"# Non-greedy trees\n\nMade by `{command}` on {results.machines}."]
    for name in SETS:
        if rows := _rows(results, name):
            seeds = max(len(results.values(part, name)) for part in CURVES)
            header = ["method", *(f"depth {depth}" for depth in DEPTHS)]
            title = f"## {name}: test accuracy (training accuracy) by depth (Figure 2), {seeds} seed(s)"
            text.append(f"{title}\n\n{benchmark.markdown(header, rows)}\n{_verdict(results, name)}")
    for name in PRUNED:
        if seeds := results.values("pruned", name):
            rows = []
            for depth in PRUNED_DEPTHS[name]:
                values = [value[str(depth)] for value in seeds]
                mean = lambda nu, quantity, v=values: np.mean([value[f"{nu:g}"][quantity] for value in v])
                axis_leaves = np.mean([value["axis-aligned"] for value in values])
                cells = [f"{mean(nu, 'leaves'):.0f} ({mean(nu, 'test'):.1f})" for nu in NUS]
                rows.append([str(depth), f"{axis_leaves:.0f}", *cells])
            header = ["depth", "axis-aligned", *(f"nu {nu:g}" for nu in NUS)]
            table = benchmark.markdown(header, rows)
            text.append(f"## {name}: leaves in use (test accuracy) by nu (Figure 3), {len(seeds)} seed(s)\n\n{table}")
    return "\n\n".join(text) + "\n"


def _rows(results: studies.Results, name: str) -> list[list[str]]:
    rows = []
    for part, label in CURVES.items():
        if test := curve(results, part, name, "test"):
            train = curve(results, part, name, "train")
            cells = [f"{test[depth]:.2f} ({train[depth]:.2f})" if depth in test else "-" for depth in DEPTHS]
            rows.append([label, *cells])
    return rows


def _verdict(results: studies.Results, name: str) -> str:
    joint, greedy, plain = (curve(results, part, name, "test") for part in ("nongreedy", "co2", "axis"))
    shared = [depth for depth in DEPTHS if depth in joint and depth in greedy and depth in plain]
    if not shared:
        return ""
    above = [sum(a[depth] >= b[depth] for depth in shared) for a, b in ((joint, greedy), (greedy, plain))]
    best = max(joint, key=lambda depth: joint[depth])
    return (
        f"Non-greedy reaches at least CO2's accuracy at {above[0]} of {len(shared)} depths, and CO2 at least the "
        f"axis-aligned accuracy at {above[1]} of them. Best: {joint[best]:.2f} at depth {best}."
    )


def figure(results: studies.Results, file: Path) -> None:
    """Draws Figures 2 and 3."""
    names = [name for name in SETS if _rows(results, name)]
    drawing = Figure(figsize=(3.2 * max(1, len(names)), 8), layout="constrained")
    axes = drawing.subplots(3, max(1, len(names)), squeeze=False)
    for column, name in enumerate(names):
        for part, label in CURVES.items():
            for row, quantity in enumerate(("test", "train")):
                if points := curve(results, part, name, quantity):
                    axes[row, column].plot(*zip(*points.items(), strict=True), marker=".", label=label)
        for row, quantity in enumerate(("test", "train")):
            axes[row, column].set(title=name, xlabel="depth", ylabel=f"{quantity} accuracy, per cent")
        axes[2, column].set(xlabel="nu", ylabel="leaves in use", title=name)
        for depths in results.values("pruned", name)[:1]:
            for depth, counts_of_nu in sorted(depths.items(), key=lambda item: int(item[0])):
                counts = [counts_of_nu[f"{nu:g}"]["leaves"] for nu in NUS]
                [line] = axes[2, column].loglog(NUS, counts, marker=".", label=f"depth {depth}")
                axes[2, column].axhline(counts_of_nu["axis-aligned"], color=line.get_color(), linestyle=":")
    for axis in axes.flat:
        if axis.lines:
            axis.legend(fontsize=7)
    drawing.savefig(file, dpi=100)


STUDY = studies.Study(
    *("paper_nongreedy", __doc__, PARTS, SETS, 3, measure, report, settings), once=("pruned",), figure=figure
)

if __name__ == "__main__":
    studies.program(STUDY)
