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
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from experiments import benchmark, data, studies
import jtrees
from jtrees import splitting
from jtrees.losses import fit_frequencies

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


def random(split: Split, name: str, seed: int) -> dict[str, Any]:
    """Grows a tree of random directions; each depth continues the same tree."""
    x, x_test, y, y_test = split
    scaler, rng, out = StandardScaler().fit(x), np.random.default_rng(seed), {}
    x, x_test = (scaler.transform(a).astype(np.float32) for a in (x, x_test))
    classes, place = int(y.max()) + 1, [np.zeros(len(a), np.int32) for a in (x, x_test)]
    for level in range(max(DEPTHS)):
        directions = rng.normal(size=(x.shape[1], DIRECTIONS)).astype(np.float32)
        projected, projected_test = x @ directions, x_test @ directions
        local = place[0] - (2**level - 1)
        nodes = len(occupied := np.unique(local))
        label = np.searchsorted(occupied, local)
        room = 1 << max(3, (nodes - 1).bit_length())
        best = _random_splits(projected, splitting.edges_of(projected), y, label, room, classes)
        splits = jax.tree.map(lambda a, index=occupied, n=nodes: _scatter(np.asarray(a)[:n], index), best)
        place = [_children(splits, a, node, level) for a, node in zip((projected, projected_test), place, strict=True)]
        if level + 1 in DEPTHS:
            leaf, leaf_test = (node - (2 ** (level + 1) - 1) for node in place)
            frequencies = fit_frequencies(*map(jnp.asarray, (leaf, y)), 2 ** (level + 1), classes)
            answers = np.asarray(frequencies).argmax(1)
            accuracy = lambda leaf, y, answers=answers: 100 * float(np.mean(answers[leaf] == y))
            scores = {"train": accuracy(leaf, y), "test": accuracy(leaf_test, y_test)}
            out[str(level + 1)] = scores | {"leaves": len(np.unique(leaf))}
    return out


@partial(jax.jit, static_argnames=("nodes", "classes"))
def _random_splits(x: Any, edges: Any, y: Any, node: Any, nodes: int, classes: int) -> splitting.Thresholds:
    statistics = splitting.class_statistics(y, jnp.ones(len(x)), classes)
    return splitting.best_thresholds(x, edges, statistics, node, nodes, splitting.entropy)


def _scatter(values: np.ndarray, index: np.ndarray) -> np.ndarray:
    out = np.zeros(index.max() + 1, values.dtype)
    out[index] = values
    return out


def _children(splits: Any, x: np.ndarray, place: np.ndarray, level: int) -> np.ndarray:
    """Returns the children that samples go to; nodes without training samples send all samples left."""
    local = place - (2**level - 1)
    trained = local < len(splits.gain)
    local = np.where(trained, local, 0)
    above = x[np.arange(len(x)), splits.feature[local]] > splits.threshold[local]
    return 2 * place + 1 + (trained & (splits.gain[local] > 0) & above)


def oc1(split: Split, name: str, seed: int) -> dict[str, Any]:
    """Grows a tree by OC1, and evaluates it at each depth."""
    x, x_test, y, y_test = split
    scaler, rng, out = StandardScaler().fit(x), np.random.default_rng(seed), {}
    x, x_test = (np.hstack([scaler.transform(a), np.ones((len(a), 1))]) for a in (x, x_test))
    one_hot, place = np.eye(int(y.max()) + 1)[y], [np.zeros(len(a), np.int64) for a in (x, x_test)]
    weights: dict[int, np.ndarray] = {}
    for level in range(max(DEPTHS)):
        for node in np.unique(place[0]):
            here = place[0] == node
            if here.sum() > 1 and (one_hot[here].sum(0) > 0).sum() > 1:
                weights[int(node)] = oc1_split(x[here], one_hot[here], rng)
        for part, (a, nodes) in enumerate(zip((x, x_test), place, strict=True)):
            right = np.zeros(len(a), bool)
            for node in np.unique(nodes):
                if int(node) in weights:
                    right[nodes == node] = a[nodes == node] @ weights[int(node)] > 0
            place[part] = 2 * nodes + 1 + right
        if level + 1 in DEPTHS:
            leaf, leaf_test = place
            known, index = np.unique(leaf, return_inverse=True)
            counts = np.zeros((len(known), one_hot.shape[1]))
            np.add.at(counts, index, one_hot)
            usual = one_hot.sum(0).argmax()
            index_test = np.clip(np.searchsorted(known, leaf_test), 0, len(known) - 1)
            answers = np.where(known[index_test] == leaf_test, counts.argmax(1)[index_test], usual)
            scores = {"train": 100 * float(np.mean(counts.argmax(1)[index] == y))}
            scores |= {"test": 100 * float(np.mean(answers == y_test)), "leaves": len(known)}
            out[str(level + 1)] = scores
    return out


def oc1_split(x: np.ndarray, one_hot: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the best of several hyperplanes ``(p + 1,)`` after coordinate descent; the last column of x is 1."""
    best, least = None, np.inf
    for restart in range(OC1["restarts"]):
        w = _best_axis(x, one_hot) if restart == 0 else rng.normal(size=x.shape[1])
        cost = np.inf
        for _ in range(OC1["sweeps"]):
            before = cost
            for j in rng.permutation(x.shape[1]):
                w, cost = _along(w, j, x, one_hot)
            if cost >= before - 1e-9:
                break
        if cost < least:
            best, least = w, cost
    assert best is not None
    return best


def _cut(values: np.ndarray, one_hot: np.ndarray) -> tuple[float, float]:
    """Returns the threshold on a line with the lowest entropy of both sides (of counts, in nats), and the entropy."""
    order = np.argsort(values, kind="stable")
    left = one_hot[order].cumsum(0)
    right = left[-1] - left
    cost = _cost(left, right)[:-1]
    held = values[order]
    cost = np.where(held[1:] > held[:-1], cost, np.inf)
    at = int(cost.argmin())
    return float((held[at] + held[at + 1]) / 2), float(cost[at])


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
    at = int(cost.argmin())
    now = _entropy(x @ w > 0, one_hot)
    if cost[at] >= now - 1e-9:
        return w, now
    w = w.copy()
    w[j] = candidates[at]
    return w, float(cost[at])


def _entropy(right: np.ndarray, one_hot: np.ndarray) -> float:
    return float(_cost(one_hot[~right].sum(0)[None], one_hot[right].sum(0)[None])[0])


def _cost(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the entropy of both sides times their samples, for class counts ``(m, k)`` each."""
    xlogx = lambda a: np.where(a > 0.5, a * np.log(np.maximum(a, 1)), 0)
    of = lambda counts: xlogx(counts.sum(1)) - xlogx(counts).sum(1)
    return of(left) + of(right)


def _best_axis(x: np.ndarray, one_hot: np.ndarray) -> np.ndarray:
    cuts = [_cut(column, one_hot) for column in x.T[:-1]]
    feature = int(np.argmin([cost for _, cost in cuts]))
    w = np.zeros(x.shape[1])
    w[feature], w[-1] = 1, -cuts[feature][0]
    return w


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
        grown = DecisionTreeClassifier(criterion="entropy", max_depth=depth, random_state=seed).fit(x, y)
        out[str(depth)] = {"axis-aligned": int(grown.get_n_leaves())}
        for nu in NUS:
            recipe = recipe_of("nongreedy", depth, name).replace(nu=nu)
            fit = jtrees.fit(recipe, x, y, key=jax.random.key(seed), task="classification")
            out[str(depth)][f"{nu:g}"] = evaluated(fit.model, split)
    return out


# --- Pieces and report -----------------------------------------------------------------------------------------------

PARTS: dict[str, Any] = {
    "axis": axis,
    "random": random,
    "oc1": oc1,
    "co2": partial(learnt, "co2"),
    "nongreedy": partial(learnt, "nongreedy"),
    "pruned": pruned,
}
CURVES = {"axis": "axis-aligned", "random": "random", "oc1": "OC1", "co2": "CO2", "nongreedy": "non-greedy"}


def settings_of(part: str, name: str) -> dict[str, Any]:
    """Returns the settings that a piece depends on."""
    if part in ("co2", "nongreedy"):
        return {"depths": DEPTHS, "recipe": studies.recipe_text(recipe_of(part, 8, name)), "grid": budget(name)["grid"]}
    if part == "pruned":
        return {
            "depths": PRUNED_DEPTHS[name],
            "nus": NUS,
            "recipe": studies.recipe_text(recipe_of("nongreedy", 8, name)),
        }
    return {"depths": DEPTHS} | {"random": {"directions": DIRECTIONS}, "oc1": OC1}.get(part, {})


def pieces(part: str, name: str, options: argparse.Namespace) -> Iterator[studies.Piece]:
    """Yields a piece per seed; OC1 and Figure 3 run on some sets, and Figure 3 with one seed."""
    if (part == "oc1" and name not in OC1_SETS) or (part == "pruned" and name not in PRUNED):
        return

    def measure(seed: int) -> dict[str, Any]:
        return PARTS[part](parts_of(name, seed, options.data_dir), name, seed)

    seeds = 1 if part == "pruned" else options.all_seeds
    yield from studies.for_seeds(part, name, measure, settings_of(part, name), seeds)


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
                grown = np.mean([value["axis-aligned"] for value in values])
                cells = [f"{mean(nu, 'leaves'):.0f} ({mean(nu, 'test'):.1f})" for nu in NUS]
                rows.append([str(depth), f"{grown:.0f}", *cells])
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
    both = [depth for depth in DEPTHS if depth in joint and depth in greedy and depth in plain]
    if not both:
        return ""
    above = [sum(a[depth] >= b[depth] for depth in both) for a, b in ((joint, greedy), (greedy, plain))]
    best = max(joint, key=lambda depth: joint[depth])
    return (
        f"Non-greedy reaches at least CO2's accuracy at {above[0]} of {len(both)} depths, and CO2 at least the "
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
        for row, what in enumerate(("test", "train")):
            axes[row, column].set(title=name, xlabel="depth", ylabel=f"{what} accuracy, per cent")
        axes[2, column].set(xlabel="nu", ylabel="leaves in use", title=name)
        for by_depth in results.values("pruned", name)[:1]:
            for depth, by_nu in sorted(by_depth.items(), key=lambda item: int(item[0])):
                counts = [by_nu[f"{nu:g}"]["leaves"] for nu in NUS]
                [line] = axes[2, column].loglog(NUS, counts, marker=".", label=f"depth {depth}")
                axes[2, column].axhline(by_nu["axis-aligned"], color=line.get_color(), linestyle=":")
    for axis in axes.flat:
        if axis.lines:
            axis.legend(fontsize=7)
    drawing.savefig(file, dpi=100)


STUDY = studies.Study("paper_nongreedy", __doc__, PARTS, SETS, 3, pieces, report, figure)

if __name__ == "__main__":
    studies.program(STUDY)
