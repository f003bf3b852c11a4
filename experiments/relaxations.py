"""Factors of a tree learnt by gradients: relaxation x leaves x depth x annealing, all else equal, on twenty sets.

python -m experiments.relaxations --data-dir DATA [--seeds 5] [--datasets abalone ...] [--parts sigmoid ...]

The result of a (relaxation, set) is a row of --out, with all leaves, depths, schedules and seeds. The score is the test
score of the hard tree, one oblique tree whose leaves are refitted by hard routing: R^2 or accuracy in per cent.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np
import optax
import pandas as pd
from scipy import stats
from sklearn.model_selection import train_test_split

from experiments import benchmark, data, studies
from experiments.estimators import TASKS
import jtrees
from jtrees import leaves as kinds, ops, routing, topology, training
from jtrees.tree import ObliqueTree

# The five sets with the fewest rows are left out, because their test scores are mostly noise.
LEFT_OUT = ("heart-c", "breast-cancer-wisconsin", "diabetes", "glass", "ecoli")
COLLINEAR = "made-collinear"
REGRESSION = (*(name for name in TASKS if TASKS[name] == "regression"), COLLINEAR)
SETS = (*REGRESSION, *(name for name in TASKS if name not in (*REGRESSION, *LEFT_OUT)))
DEPTHS = (4, 6, 8)
CHOSEN_AT = 6  # the depth at which learning rate and sharpness are chosen
ROWS, TEST_ROWS = 1700, 1500  # upper limits of training and test rows
VALIDATED = 3 / 17  # share of the training rows that chooses learning rate, sharpness and schedule
STEPS, BATCH = 800, 128
RATES = (0.02, 0.06, 0.18)
SHARPNESSES = (0.5, 2.0, 8.0)  # of a constant schedule; the geometric mean of a rising schedule
RISE = 4.0  # a rising schedule goes from the mean divided by this to the mean times this
SCHEDULES = ("constant", "rising")
# Features are padded with zero columns to these numbers, and classes to this number: sets then share programs.
WIDTHS, CLASSES = (8, 24, 64, 192), 10
LEAST = 0.5  # points: a smaller difference does not matter, however certain it is
Lines = Any  # a data frame; the types of pandas tell a type checker too little


# --- The relaxations -------------------------------------------------------------------------------------------------
#
# Each maps the scores of a sample at the splits, and the leaves, to a loss. Scores are first multiplied by the
# sharpness. All soft steps have the slope of the sigmoid, 1/4, at 0. The window of the straight-through sign is where
# the line with this slope is between 0 and 1.

_SMOOTH_STEP = 6.0  # width
_TRAVERSAL = 0.25  # factor of the scores
_WINDOW = 2.0  # half-width


def traversal(scores: Float[Array, "nodes n"]) -> Float[Array, "leaves n"]:
    """Returns LatentTree's traversals of the leaves with all nodes active, divided by their sum."""
    q = routing.rewards(_TRAVERSAL * scores)
    z = routing.position(q, jnp.ones(len(q), q.dtype))[len(scores) :]
    return z / z.sum(0)  # the leaf of hard routing has at least a half


# Probabilities of the leaves.
SOFT: dict[str, Callable[[Array], Array]] = {
    "sigmoid": lambda scores: routing.leaf_probabilities(jax.nn.sigmoid(scores)),
    "smooth step": lambda scores: routing.leaf_probabilities(routing.smooth_step(scores, _SMOOTH_STEP)),
    "violation": routing.violation,
    "traversal": traversal,
}


def path_sum(scores: Float[Array, "nodes n"], leaves: Any, batch: jtrees.Batch, task: Any) -> Float[Array, " n"]:
    """Returns the loss of each sample at the leaf of hard routing, with DGT's dense gradient through the output."""
    if isinstance(leaves, kinds.Linear):
        # The leaves' outputs differ between samples. Treating samples as n outputs is faster than vmap over samples.
        return task.loss(jnp.diagonal(routing.path_sum(scores, leaves.outputs(batch.x), _WINDOW)), batch.y)
    return task.loss(routing.path_sum(scores, leaves.values, _WINDOW), batch.y)


def surrogate(scores: Float[Array, "nodes n"], leaves: Any, batch: jtrees.Batch, task: Any) -> Float[Array, " n"]:
    """Returns the upper bound of the loss of each sample, as in non-greedy trees, by exact inference."""
    return (leaves.losses(batch.x, batch.y) - 2 * routing.path_violations(scores)).max(0)


HARD: dict[str, Callable[..., Array]] = {"path sum": path_sum, "surrogate": surrogate}
RELAXATIONS = ("sigmoid", "smooth step", "path sum", "violation", "traversal", "surrogate")


def method(relaxation: str, depth: int, leaves: str, task: Any, sharpness: training.Number) -> jtrees.Method:
    """Returns a tree that is trained with a relaxation; all relaxations have the same initial tree.

    Splits are random, with scores of variance about 1. Leaves are fitted to the samples that reach them: means of the
    targets (linear leaves with slopes 0) or class frequencies.

    Args:
      relaxation: one of :data:`RELAXATIONS`.
      depth: depth of the tree.
      leaves: ``"constant"`` or ``"linear"``.
      task: the task of the tree.
      sharpness: factor of the scores, a number or a schedule.
    """
    nodes = topology.num_nodes(depth)

    def init(batch: jtrees.Batch, *, key: Array) -> ObliqueTree:
        used = jnp.any(batch.x != 0, axis=0).astype(batch.x.dtype)
        normal = jax.random.normal(key, (nodes, batch.x.shape[1] + 1), batch.x.dtype) / jnp.sqrt(used.sum())
        empty = kinds.kind_of("constant", task).empty(nodes + 1, batch.x.shape[1], task.shape, batch.x.dtype)
        tree = ObliqueTree(normal[:, 1:] * used, normal[:, 0], empty).refit(*batch)
        fitted = tree.leaves.trainable()
        if leaves == "linear":
            fitted = kinds.Linear(jnp.zeros((nodes + 1, batch.x.shape[1]), batch.x.dtype), fitted.values)
        return tree.replace(leaves=fitted)

    def loss(params: ObliqueTree, batch: jtrees.Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        factor = training.at_step(sharpness, step)
        weights, bias = factor * params.weights, factor * params.bias
        if relaxation in SOFT:
            # The name of the sigmoid selects a faster rule.
            route: Any = "sigmoid" if relaxation == "sigmoid" else SOFT[relaxation]
            value, _ = ops.expected_loss(weights, bias, params.leaves, batch.x, batch.y, route=route)
        else:
            value = HARD[relaxation](ops.scores(weights, bias, batch.x), params.leaves, batch, task).mean()
        return value, value  # runs take the last parameters, not the parameters of the best score

    return jtrees.Method(init, loss, lambda params, batch: params.refit(*batch))


# --- The data --------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Training, validation and test rows of all seeds, ``(seeds, n, ...)`` each; test rows are padded by weight 0."""

    train: jtrees.Batch
    valid: jtrees.Batch
    test: jtrees.Batch


def arrays_of(name: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns features and targets of a set, made or by name."""
    if name == COLLINEAR:
        return made_collinear()
    table = data.load(name, data_dir=data_dir)
    return table.x, table.y


def made_collinear() -> tuple[np.ndarray, np.ndarray]:
    """Returns features and target of a made regression table with 6000 rows, always the same.

    The table has 20 features of variance 1. The product of four hidden factors and a random matrix gives ten columns.
    Each column appears twice, with noise of standard deviation 0.01: features 2 i and 2 i + 1 are nearly equal. The
    target depends on the differences of two such pairs: linearly on one, by a step on the other. Noise is a twentieth
    of the variance. A linear model explains about 72 % of the variance. The relevant directions have very small
    variance.
    """
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(4, 10))
    exact = rng.normal(size=(6000, 4)) @ (matrix / np.linalg.norm(matrix, axis=0))
    x = np.repeat(exact, 2, axis=1) + 0.01 * rng.normal(size=(6000, 20))
    differences = (x[:, [0, 2]] - x[:, [1, 3]]) / (0.01 * np.sqrt(2))
    signal, noise = 0.7 * differences[:, 0] + np.sign(differences[:, 1]), 0.05
    y = np.sqrt(1 - noise) * signal / signal.std() + np.sqrt(noise) * rng.normal(size=len(x))
    return x.astype(np.float32), y.astype(np.float32)


def rows(name: str, seeds: int, data_dir: str | None) -> tuple[Rows, Any, int]:
    """Returns the rows of all seeds, the task, and the number of features.

    Features, and targets of regression, have mean 0 and standard deviation 1 on the training rows of each seed.
    """
    x, y = arrays_of(name, data_dir)
    has_classes = name not in REGRESSION
    splits = [_split(x, y, seed, has_classes) for seed in range(seeds)]
    task = jtrees.Classification(max(int(y.max()) + 1, CLASSES)) if has_classes else jtrees.Regression()
    return jax.tree.map(lambda *a: jnp.stack(a), *splits), task, x.shape[1]


def _split(x: np.ndarray, y: np.ndarray, seed: int, has_classes: bool) -> Rows:
    count = min(ROWS, 3 * len(x) // 4)
    sizes: Any = {"train_size": count, "test_size": min(TEST_ROWS, len(x) - count)}
    parted: Any = train_test_split(x, y, **sizes, random_state=seed, stratify=y if has_classes else None)
    (x, x_test, y, y_test), validated = parted, int(VALIDATED * count)
    width = next(width for width in WIDTHS if width >= x.shape[1])
    mean, deviation = _moments(x[validated:])
    y_mean, y_deviation = (0, 1) if has_classes else _moments(y[validated:])

    def batch(x: np.ndarray, y: np.ndarray, count: int) -> jtrees.Batch:
        """Returns scaled rows, padded with zero columns and with rows of weight 0."""
        padding = count - len(x)
        x = np.pad(((x - mean) / deviation).astype(np.float32), [(0, padding), (0, width - x.shape[1])])
        y = y.astype(np.int32) if has_classes else ((y - y_mean) / y_deviation).astype(np.float32)
        weight = np.pad(np.ones(count - padding, np.float32), (0, padding))
        return jtrees.Batch(x, np.pad(y, (0, padding)), weight)  # type: ignore[arg-type]

    train, valid = (
        batch(x[validated:], y[validated:], count - validated),
        batch(x[:validated], y[:validated], validated),
    )
    return Rows(train, valid, batch(x_test, y_test, TEST_ROWS))


def _moments(a: np.ndarray) -> tuple[Any, Any]:
    """Returns mean and standard deviation of the columns in float64; 1 replaces the deviation of a constant column."""
    mean, deviation = a.mean(0, dtype=np.float64), a.std(0, dtype=np.float64)
    return mean, np.where(deviation > 1e-6 * np.abs(mean), deviation, 1)


# --- What is measured ------------------------------------------------------------------------------------------------


class Runs(NamedTuple):
    """Runs of one program, ``(runs,)`` each: the seed, the learning rate, and the first and the last sharpness."""

    seed: Any
    rate: Any
    first: Any
    last: Any


def runs(schedules: dict[str, tuple[float, float]], seeds: int) -> Runs:
    """Returns all seeds of each schedule, by its learning rate and mean sharpness."""
    columns = []
    for schedule, (rate, sharpness) in schedules.items():
        rise = RISE if schedule == "rising" else 1.0
        columns += [(seed, rate, sharpness / rise, sharpness * rise) for seed in range(seeds)]
    return Runs(*(np.array(a, np.int32 if i == 0 else np.float32) for i, a in enumerate(zip(*columns, strict=True))))


def program(relaxation: str, depth: int, leaves: str, task: Any, features: int) -> Callable[[Runs, Rows], Any]:
    """Returns a compiled function that trains the runs of a set, and returns their scores by name, ``(runs,)``."""

    def scores(data: Rows, *numbers: Array) -> dict[str, Array]:
        run = Runs(*numbers)
        train, valid, test = jax.tree.map(lambda a: a[run.seed], data)
        batch = train._replace(weight=None)  # the weights are all 1
        sharpness = lambda step: run.first * jnp.power(run.last / run.first, step / STEPS)
        trained = method(relaxation, depth, leaves, task, sharpness)
        optimizer = optax.adam(optax.cosine_decay_schedule(run.rate, STEPS))
        size = min(BATCH, len(batch.x))
        state = training.start(trained, batch, key=jax.random.key(run.seed), optimizer=optimizer)
        state, _ = training.advance(trained, state, batch, optimizer=optimizer, steps=STEPS, batch_size=size)
        # The shrinkage of linear leaves depends on the number of features: the zero columns are removed.
        params, narrow = state.params, lambda a: a[:, :features] if leaves == "linear" else a
        tree = params.replace(weights=narrow(params.weights)).refit(narrow(train.x), train.y)
        hard = lambda batch: percent(tree.apply(narrow(batch.x)), batch.y, batch.weight)
        leaf = ops.hard(tree.weights, tree.bias, narrow(train.x))
        reached = (jnp.zeros(topology.num_leaves(depth), jnp.int32).at[leaf].add(1) > 0).sum()
        out = {"valid": hard(valid), "test": hard(test), "train": hard(train), "reached": reached}
        if relaxation in SOFT:
            sharp = params.replace(weights=run.last * params.weights, bias=run.last * params.bias)
            out["soft"] = percent(soft_outputs(relaxation, sharp, test.x), test.y, test.weight)
        return out

    # Runs of a device are sequential. Parallel runs would shuffle the rows anew in each step.
    compiled = jax.jit(lambda all_runs, data: benchmark.map_over_devices(partial(scores, data), *all_runs))
    return lambda all_runs, data: jax.tree.map(np.asarray, compiled(all_runs, data))


def soft_outputs(relaxation: str, params: ObliqueTree, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
    """Returns predictions of the soft model: the mean of the leaves' outputs, or of their class probabilities."""
    reach = SOFT[relaxation](ops.scores(params.weights, params.bias, x))
    if params.leaves.choice == "class":
        return reach.T @ jax.nn.softmax(params.leaves.values, axis=1)
    return (reach * params.leaves.outputs(x)).sum(0)


def percent(outputs: Float[Array, "n *k"], y: Array, weight: Float[Array, " n"]) -> Array:
    """Returns R^2, or accuracy of the most probable classes, in per cent."""
    mean = lambda a: (weight * a).sum() / weight.sum()
    if outputs.ndim == 2:
        return 100 * mean((outputs.argmax(1) == y).astype(weight.dtype))
    return 100 * (1 - mean(jnp.square(outputs - y)) / mean(jnp.square(y - mean(y))))


def measure(relaxation: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the scores of all leaves, depths and schedules of a relaxation on a set.

    At the depth :data:`CHOSEN_AT`, every schedule is tried with every learning rate and sharpness. The other depths
    take the pair with the best mean validation score of the hard tree.
    """
    data, task, features = rows(name, options.seeds, options.data_dir)
    value: dict[str, Any] = {"rows": data.train.x.shape[1], "features": features}
    for leaves in kinds.KINDS if task.is_least_squares else ("constant",):
        compiled = lambda depth, leaves=leaves: program(relaxation, depth, leaves, task, features)
        value[leaves] = leaf_scores(compiled, data, options.seeds)
    return value


def leaf_scores(compiled: Callable[[int], Callable[[Runs, Rows], Any]], data: Rows, seeds: int) -> dict[str, Any]:
    """Measures one kind of leaves, with a program for each depth.

    Returns:
      The chosen and the tried options by schedule (learning rate, sharpness, mean validation and test score), and the
      scores of all seeds by depth.
    """
    trials: dict[str, list[Trial]] = {schedule: [] for schedule in SCHEDULES}
    chooser = compiled(CHOSEN_AT)
    for options in itertools.product(RATES, SHARPNESSES):
        candidates = runs(dict.fromkeys(SCHEDULES, options), seeds)
        for schedule, scores in by_schedule(chooser(candidates, data)).items():
            trials[schedule].append(Trial(*options, scores))
    best = {schedule: max(candidates, key=Trial.worth) for schedule, candidates in trials.items()}
    chosen = {schedule: (trial.rate, trial.sharpness) for schedule, trial in best.items()}
    scores_by_depth = {str(CHOSEN_AT): {schedule: trial.scores for schedule, trial in best.items()}}
    for depth in (depth for depth in DEPTHS if depth != CHOSEN_AT):
        scores_by_depth[str(depth)] = by_schedule(compiled(depth)(runs(chosen, seeds), data))
    summaries = {schedule: [trial.summary() for trial in candidates] for schedule, candidates in trials.items()}
    return {"chosen": chosen, "tried": summaries, "scores": scores_by_depth}


class Trial(NamedTuple):
    """A learning rate and a mean sharpness, and the scores of all seeds with them."""

    rate: float
    sharpness: float
    scores: dict[str, list[float]]

    def worth(self) -> float:
        """Returns the mean validation score, or minus infinity if a run became non-finite."""
        return float(np.nan_to_num(np.mean(self.scores["valid"]), nan=-np.inf))

    def summary(self) -> list[float]:
        """Returns the options and the mean scores."""
        return [self.rate, self.sharpness, *(round(float(np.mean(self.scores[key])), 2) for key in ("valid", "test"))]


def by_schedule(scores: dict[str, np.ndarray]) -> dict[str, dict[str, list[float]]]:
    """Returns scores by schedule, one per seed, rounded to two digits."""
    parts = {
        key: values.astype(np.float64).round(2).reshape(len(SCHEDULES), -1).tolist() for key, values in scores.items()
    }
    return {schedule: {key: part[i] for key, part in parts.items()} for i, schedule in enumerate(SCHEDULES)}


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the budget of a piece."""
    budget = {"depths": DEPTHS, "rows": [ROWS, TEST_ROWS], "steps": [STEPS, BATCH]}
    return budget | {"rates": RATES, "sharpnesses": SHARPNESSES, "rise": RISE}


# --- The report ------------------------------------------------------------------------------------------------------


def leaf_kinds(names: Iterable[str]) -> list[str]:
    """Returns the kinds of leaves among some names, in the order of the report."""
    return [kind for kind in kinds.KINDS if kind in set(names)]


def table(results: studies.Results) -> Lines:
    """Returns a line for each chosen run, of the sets that all relaxations have been measured on."""
    names = [name for name in SETS if all(results.values(part, name) for part in RELAXATIONS)]
    lines = []
    for relaxation, name in itertools.product(RELAXATIONS, names):
        (value,) = results.values(relaxation, name)
        run = {"set": name, "relaxation": relaxation, "rows": value["rows"], "features": value["features"]}
        for leaves in leaf_kinds(value):
            for depth, schedule in itertools.product(DEPTHS, SCHEDULES):
                run |= {"leaves": leaves, "depth": depth, "schedule": schedule}
                scores = value[leaves]["scores"][str(depth)][schedule]
                for seed, values in enumerate(zip(*scores.values(), strict=True)):
                    lines.append(run | {"seed": seed, "soft": np.nan} | dict(zip(scores, values, strict=True)))
    return pd.DataFrame(lines)


def preferred(runs: Lines) -> Lines:
    """Returns the lines of the schedule with the better mean validation score, by set, relaxation and leaves."""
    keys = ["set", "relaxation", "leaves"]
    means = runs.groupby([*keys, "schedule"])["valid"].mean().unstack()
    best = means.idxmax(axis=1).rename("best").reset_index()
    return runs.merge(best, on=keys).query("schedule == best").drop(columns="best")


# --- The page --------------------------------------------------------------------------------------------------------


def trials_table(results: studies.Results, runs: Lines) -> Lines:
    """Returns a line for each learning rate and sharpness of a schedule at depth CHOSEN_AT: means over seeds."""
    lines = []
    for relaxation, name in itertools.product(RELAXATIONS, dict.fromkeys(runs["set"])):
        (value,) = results.values(relaxation, name)
        for leaves, schedule in itertools.product(leaf_kinds(value), SCHEDULES):
            lines += [[name, relaxation, leaves, schedule, *trial] for trial in value[leaves]["tried"][schedule]]
    columns = ["set", "relaxation", "leaves", "schedule", "rate", "sharpness", "valid", "test"]
    return pd.DataFrame(lines, columns=columns)


def best_trials(trials: Lines, *options: str) -> Lines:
    """Returns the lines of :func:`trials_table` with the best validation score, for each level of some options."""
    keys = ["set", "relaxation", "leaves", "schedule", *options]
    return trials.loc[trials.groupby(keys)["valid"].idxmax()]


def by_set(runs: Lines, factor: str, score: str = "test") -> Lines:
    """Returns means of a score, a row for each set and a column for each level of a factor."""
    means = runs.groupby(["set", factor], sort=False)[score].mean().unstack()
    return means.round(6)  # means of other versions of pandas end in other digits, which would decide ties


class Effect(NamedTuple):
    """Differences between two levels of a factor, one per set: means over seeds and all other factors."""

    name: str
    differences: Any

    def interval(self) -> tuple[float, float, float]:
        """Returns the estimate of Hodges & Lehmann (1963) and the ends of its 95 per cent interval.

        The estimate is the median of the means of all pairs of sets. A single set with a large difference hardly
        changes it. The interval comes from Wilcoxon's signed-rank test, by the normal approximation; it is infinite for
        fewer than six sets.
        """
        values = np.asarray(self.differences, np.float64)
        count = len(values)
        first, second = np.triu_indices(count)
        pairs = np.sort((values[first] + values[second]) / 2)
        spread = np.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        outside = int(count * (count + 1) / 4 - stats.norm.ppf(0.975) * spread)
        ends = (pairs[outside - 1], pairs[-outside]) if outside > 0 else (-np.inf, np.inf)
        return float(np.median(pairs)), float(ends[0]), float(ends[1])

    def verdict(self) -> str:
        """Returns whether the effect matters: the interval is on one side of 0, and the estimate at least LEAST."""
        estimate, low, high = self.interval()
        if abs(estimate) >= LEAST and (low > 0 or high < 0):
            return "matters"
        return "does not matter" if max(-low, high) <= 2 * LEAST else "undecided"

    def cells(self) -> list[str]:
        """Returns a row of the table of effects."""
        change, (estimate, low, high) = self.differences, self.interval()
        wins = f"{(change > 0).sum()} of {len(change)}"
        interval = f"{estimate:+.2f} ({low:+.2f} to {high:+.2f})"
        return [self.name, interval, f"{change.mean():+.2f} ± {change.std(ddof=0):.2f}", wins, self.verdict()]


def effect(runs: Lines, factor: str, high: Any, low: Any, name: str) -> Effect:
    """Returns the effect of the level ``high`` against ``low``, on the sets that have both."""
    means = by_set(runs, factor)
    return Effect(name, (means[high] - means[low]).dropna())


def effects(runs: Lines, trials: Lines) -> dict[str, list[Effect]]:
    """Returns each factor's effects on the test score of the hard tree, by leaves; means over the other factors."""
    best, out = preferred(runs), {}
    rising, constant = SCHEDULES[1], SCHEDULES[0]
    for leaves in leaf_kinds(runs["leaves"]):
        leaf_runs, leaf_best, leaf_trials = (lines[lines["leaves"] == leaves] for lines in (runs, best, trials))
        out[leaves] = [
            effect(leaf_best, "relaxation", relaxation, RELAXATIONS[0], f"{relaxation} instead of {RELAXATIONS[0]}")
            for relaxation in RELAXATIONS[1:]
        ]
        for low, high in itertools.pairwise(DEPTHS):
            out[leaves].append(effect(leaf_best, "depth", high, low, f"depth {high} instead of {low}"))
        name = f"{rising} instead of {constant} sharpness"
        out[leaves].append(effect(leaf_runs, "schedule", rising, constant, name))
        for option, title, levels in (("sharpness", "mean sharpness", SHARPNESSES), ("rate", "learning rate", RATES)):
            lines = best_trials(leaf_trials, option)
            for low, high in itertools.pairwise(levels):
                name = f"{title} {high:g} instead of {low:g}, depth {CHOSEN_AT}"
                out[leaves].append(effect(lines, option, high, low, name))
    if "linear" in out:
        numbers = best[best["set"].isin(best[best["leaves"] == "linear"]["set"])]
        out["leaves"] = [effect(numbers, "leaves", "linear", "constant", "linear instead of constant leaves")]
    return out


def effects_table(effects: list[Effect]) -> str:
    """Returns a table of effects."""
    header = ["what", "points (95 % interval)", "mean ± deviation over sets", "better on", "verdict"]
    return benchmark.markdown(header, [effect.cells() for effect in effects])


def scores_table(best: Lines) -> str:
    """Returns means over sets by relaxation and depth, and the soft model beside the hard tree."""
    rows = []
    for relaxation in by_set(best, "relaxation").mean().sort_values(ascending=False).index:
        lines = best[best["relaxation"] == relaxation]
        means, reached = by_set(lines, "depth").mean(), by_set(lines, "depth", "reached").median()
        gap = by_set(lines.assign(gap=lines["test"] - lines["soft"]), "depth", "gap").median()
        soft = "-" if relaxation in HARD else " / ".join(f"{gap[depth]:+.1f}" for depth in DEPTHS)
        overfit = (lines["train"] - lines["test"]).groupby(lines["set"]).mean().median()
        cells = [str(relaxation), *(f"{means[depth]:.2f}" for depth in DEPTHS), f"{means.mean():.2f}"]
        cells += [soft, f"{overfit:.1f}"]
        rows.append([*cells, " / ".join(f"{reached[depth]:.0f}" for depth in DEPTHS)])
    depths = " / ".join(map(str, DEPTHS))
    header = ["relaxation", *(f"depth {depth}" for depth in DEPTHS), "mean", f"hard - soft, {depths}"]
    return benchmark.markdown([*header, "training - test", f"leaves reached, {depths}"], rows)


def sets_table(best: Lines) -> str:
    """Returns the scores by set, with the best of each row in bold."""
    means = by_set(best, "relaxation")[list(RELAXATIONS)]
    rows = []
    for name, row in means.iterrows():
        first = best[best["set"] == name].iloc[0]
        cells = [f"**{score:.1f}**" if score == row.max() else f"{score:.1f}" for score in row]
        rows.append([str(name), f"{first['rows']} x {first['features']}", *cells])
    return benchmark.markdown(["set", "rows x features", *RELAXATIONS], rows)


UNEQUAL = f"""\
- Splits, leaves, initial parameters, order of the samples, optimiser (Adam, cosine decay to zero), updates and batches
  are equal. Nothing bounds the weights, so a tree can sharpen itself under a constant sharpness, too.
- All relaxations except the path sum apply to the loss of each leaf on each sample, and differ only in the routing. TEL
  and LatentTree take the loss of a mean output instead. The path sum takes the loss of the output, as DGT does, which
  was better on two sets.
- Soft steps have equal slopes at a score of 0, and the window of the path sum matches them. The surrogate has no such
  measure, so validation at depth {CHOSEN_AT} chooses learning rate and mean sharpness for each (set, relaxation,
  leaves, schedule). The other depths take the same options.
- The traversal has no pruning, which would change the size of the tree; its weights of the leaves are divided by their
  sum. The surrogate has no ball around its weights (the sharpness replaces the radius) and no frozen assignment.
- Path sum and surrogate have no soft model. Linear leaves are for regression only; generalised cross-validation shrinks
  them when they are refitted. Constant leaves have no shrinkage.
- The budget is small: {STEPS} updates, the last parameters, one start, no CART, no preconditioner. The library's
  recipes (`systems.md`) reach higher scores.
"""


def verdicts(all_effects: dict[str, list[Effect]]) -> list[str]:
    """Returns lists of factors that matter, that do not matter, and that are undecided, the largest first."""
    factors = [
        (effect.name + ("" if key == "leaves" else f" ({key} leaves)"), effect)
        for key, effects in all_effects.items()
        for effect in effects
    ]
    factors.sort(key=lambda factor: -abs(factor[1].interval()[0]))
    out = []
    for verdict, title in (
        ("matters", "What matters"),
        ("does not matter", "What does not matter"),
        ("undecided", "Undecided"),
    ):
        listed = [f"{name} {effect.interval()[0]:+.1f}" for name, effect in factors if effect.verdict() == verdict]
        out.append(f"**{title}**: {', '.join(listed) or 'nothing'}.")
    return out


def report(results: studies.Results, command: str) -> str:
    """Returns the report."""
    runs = table(results)
    if runs.empty:
        return f"# What matters in a tree learnt by gradients\n\nMade by `{command}`: there are no rows yet.\n"
    trials, best = trials_table(results, runs), preferred(runs)
    all_effects, seeds = effects(runs, trials), runs["seed"].nunique()
    head = (
        f"# What matters in a tree learnt by gradients\n\nMade by `{command}` on {results.machines}, in "
        f"{results.seconds / 3600:.1f} hours of one core that was shared with other work. The data are "
        f"{runs['set'].nunique()} sets, {seeds} random splits of each set, each with its own seed. The factors are "
        f"relaxation ({', '.join(RELAXATIONS)}), leaves, depth {DEPTHS} and sharpness (constant, or rising "
        f"geometrically from a quarter to four times its mean). At most {ROWS} rows are training rows. {VALIDATED:.0%} "
        f"of them are validation rows, which choose learning rate {RATES} and mean sharpness {SHARPNESSES}. At most "
        f"{TEST_ROWS} rows are test rows. A run has {STEPS} updates of {BATCH} rows. Scores are test R² or accuracy in "
        "per cent of the **hard** tree, one oblique tree whose leaves are refitted by hard routing. By default, "
        "each relaxation has the schedule with the better validation score on each set, and scores are means over "
        f"depths. Number of these runs that became non-finite: {runs['test'].isna().sum()}.\n\n"
        "A difference is estimated from its values on the sets. The estimate is that of Hodges & Lehmann: the median "
        "of the means of pairs of sets, which a single odd set hardly changes. Brackets have its 95 % interval. A "
        f"difference *matters* if the interval is on one side of 0 and the estimate is at least {LEAST} points. It "
        f"*does not matter* if the interval is within {2 * LEAST:g} point of 0. Otherwise it is *undecided*. Some of "
        "so many intervals are wrong by chance.\n"
    )
    parts = [head, "## In short\n", *(f"- {line}" for line in verdicts(all_effects)), ""]
    for leaves in leaf_kinds(all_effects):
        lines = best[best["leaves"] == leaves]
        about = (
            f"{lines['set'].nunique()} sets. Hard - soft, training - test and the number of leaves that training rows "
            "reach are medians over sets.\n"
        )
        parts += [f"## {leaves.capitalize()} leaves\n", scores_table(lines), about]
        parts += [effects_table(all_effects[leaves]), sets_table(lines)]
    if "leaves" in all_effects:
        parts += ["## Linear and constant leaves, regression\n", effects_table(all_effects["leaves"])]
    return "\n".join([*parts, "## What could not be made equal\n", UNEQUAL])


STUDY = studies.Study(
    *("relaxations", __doc__, RELAXATIONS, SETS, 5, measure, report, settings), together=True, closed=True
)

if __name__ == "__main__":
    studies.main(STUDY)  # on one device
