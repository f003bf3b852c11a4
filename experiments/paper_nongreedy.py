"""Non-greedy trees beside greedy trees: accuracy by depth (Figure 2) and leaves in use by nu (Figure 3). Figure 4, time
against depth, is in experiments/bench_nongreedy.py.

python -m experiments.paper_nongreedy --data-dir DATA --seeds 3 [--datasets letter ...] [--parts axis co2 ...]

The result of a (part, set, seed) is a row of --out.

The test part is the set's own, if there is one, or a fifth of the rows, drawn by the seed. CO2 and non-greedy trees are
tuned at each depth: the log loss on a fifth of the training rows chooses nu and the learning rate. The final fit takes
all training rows. Axis-aligned trees are scikit-learn's, with entropy.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure
import numpy as np
from sklearn.tree import DecisionTreeClassifier

from experiments import benchmark, data, studies
import jtrees

SETS = ("letter", "pendigits", "satimage", "connect-4", "mnist")
DEPTHS = (6, 8, 10, 12, 14, 16, 18)
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
    return studies.scores(model, split) | {"leaves": len(np.unique(model.leaf_index(split[0])))}


def axis(split: Split, name: str, seed: int) -> dict[str, Any]:
    """Fits scikit-learn's tree at each depth."""
    out = {}
    for depth in DEPTHS:
        model = DecisionTreeClassifier(criterion="entropy", max_depth=depth, random_state=seed).fit(split[0], split[2])
        out[str(depth)] = studies.scores(model, split) | {"leaves": int(model.get_n_leaves())}
    return out


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
    "co2": partial(learnt, "co2"),
    "nongreedy": partial(learnt, "nongreedy"),
    "pruned": pruned,
}
CURVES = {"axis": "axis-aligned", "co2": "CO2", "nongreedy": "non-greedy"}


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the settings of a part; None for Figure 3 on other sets."""
    if part == "pruned" and name not in PRUNED:
        return None
    recipe = lambda kind: studies.recipe_text(recipe_of(kind, 8, name))
    if part == "pruned":
        return {"depths": PRUNED_DEPTHS[name], "nus": NUS, "recipe": recipe("nongreedy")}
    if part in ("co2", "nongreedy"):
        return {"depths": DEPTHS, "recipe": recipe(part), "grid": budget(name)["grid"]}
    return {"depths": DEPTHS}


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
    *("paper_nongreedy", __doc__, PARTS, SETS, 3, measure, report, settings),
    once=("pruned",),
    closed=True,
    figure=figure,
)

if __name__ == "__main__":
    studies.program(STUDY)
