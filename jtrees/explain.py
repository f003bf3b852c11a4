"""Explanations of predictions: the path of a sample, the nearest change of it, and what each column is worth.

Functions take a fitted model, such as ``result.model`` or an estimator's ``model_``, and rows as it does. Models of raw
tables are explained by column: the levels of a category, or a value and whether it is missing, belong together.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import heapq
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float
import numpy as np

from jtrees import compilation, exact, prediction, processes, validation
from jtrees.data.columns import Numeric
from jtrees.data.frame_model import FrameModel
from jtrees.forest import Forest
from jtrees.leaves.linear import Linear
from jtrees.tree import ObliqueTree

_EXACT = 12  # largest number of columns with all 2^p coalitions
_BLOCK = 8192  # samples evaluated at once


# --- The path of a sample --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Split:
    """A split on the path of a sample.

    Attributes:
      node: its number, breadth first.
      margin: the score, ``weights @ x + bias``; the sample goes right iff it is positive.
      reference: the score of the reference.
      parts: what each column adds to it: ``margin = reference + sum(parts.values())``, but for rounding.
    """

    node: int
    margin: float
    reference: float
    parts: dict[str, float]

    def __str__(self) -> str:
        side = "right" if self.margin > 0 else "left"
        return f"node {self.node}: {_sum_text(self.margin, self.reference, self.parts)}, {side}"


@dataclasses.dataclass(frozen=True)
class Path:
    """How a tree comes to its prediction for one sample.

    Attributes:
      splits: the splits from the root on; nodes that do not split are left out.
      leaf: number of the leaf.
      prediction: the prediction, ``()``, or ``(k,)`` for k outputs or classes.
      parts: of linear leaves, what each column adds to the leaf's answer at the reference (of k outputs, ``(k,)``);
        bounds of the leaf are not in them. None for other leaves.
    """

    splits: list[Split]
    leaf: int
    prediction: np.ndarray
    parts: dict[str, Any] | None

    def __str__(self) -> str:
        """A line for each split and one for the leaf, with the largest parts first."""
        answer = np.array2string(self.prediction, precision=4, separator=", ")
        last = f"leaf {self.leaf}: {answer}"
        if self.parts is not None and self.prediction.ndim == 0:
            last += f" with {_parts_text(self.parts)}"
        return "\n".join([*map(str, self.splits), last])


def path(
    model: Any, row: Any, *, reference: ArrayLike | None = None, feature_names: Sequence[str] | None = None
) -> Path:
    """Returns the path of one sample through a tree, and what each column adds to the score of every split on it.

    Args:
      model: a :class:`jtrees.ObliqueTree`, or a model of raw tables that is one.
      row: the sample, ``(p,)`` or a table of one row.
      reference: the sample to compare with, likewise, such as the means of the training rows; by default, zero in the
        model's own coordinates (``tree.origin``).
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...

    Raises:
      ValueError: for a model that is not one tree, and for rows that do not fit it or are several.

    Example:
      >>> leaves = jtrees.leaves.Constant(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> print(jtrees.explain.path(tree, np.array([2.0, 1.0])))
      node 0: 3 = -1 + 2 (x0) + 2 (x1), right
      leaf 1: 10.
    """
    tree, columns = _tree(model), _Columns.of(model, feature_names)
    x = columns.row("row", row)
    zero = np.zeros(tree.features, np.float32)
    z = _relative(tree, x)[0]
    base = zero if reference is None else _relative(tree, columns.row("reference", reference))[0]
    weights, bias = np.asarray(tree.weights), np.asarray(tree.bias)
    place, nodes, margins = 0, [], []
    while place < len(bias):
        margin = float(exact.row_scores(weights[place, None], bias[place, None], z)[0])
        if weights[place].any():
            nodes.append(place)
            margins.append(margin)
        place = 2 * place + 1 + (margin > 0)
    leaf, taken = place - len(bias), weights[nodes]
    references = exact.row_scores(taken, bias[nodes], base).tolist()
    by_column = columns.summed((taken * (z.astype(np.float64) - base)).T).T.tolist()
    splits = [
        Split(node, margin, reference, dict(zip(columns.names, terms, strict=True)))
        for node, margin, reference, terms in zip(nodes, margins, references, by_column, strict=True)
    ]
    parts = None
    if isinstance(tree.leaves, Linear):
        slopes = np.asarray(tree.leaves.coefficients, np.float64)[leaf]
        terms = columns.summed((slopes.T * (z.astype(np.float64) - base)).T)
        parts = dict(zip(columns.names, terms.tolist() if terms.ndim == 1 else list(terms), strict=True))
    return Path(splits, leaf, np.asarray(tree.predict(x))[0], parts)


def _sum_text(total: float, base: float, parts: dict[str, float]) -> str:
    return f"{total:.4g} = {base:.4g} {_parts_text(parts)}"


def _parts_text(parts: dict[str, float]) -> str:
    order = sorted((name for name in parts if parts[name]), key=lambda name: -abs(parts[name]))
    return " ".join(f"{'-' if parts[name] < 0 else '+'} {abs(parts[name]):.4g} ({name})" for name in order)


# --- The nearest change ----------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """The smallest change of a sample that leads to another answer.

    Attributes:
      x: the changed sample as features, ``(p,)``.
      distance: its length: the root of the sum of squared changes, each in standard deviations.
      leaf: the leaf that it reaches.
      prediction: the prediction there.
      changes: the new value of every column that changes, by name.
    """

    x: np.ndarray
    distance: float
    leaf: int
    prediction: np.ndarray
    changes: dict[str, float]


def nearest_change(
    model: Any,
    row: Any,
    x: Any,
    *,
    columns: Sequence[str] | None = None,
    target: int | None = None,
    extrapolate: bool = False,
    feature_names: Sequence[str] | None = None,
) -> Change | None:
    """Returns the smallest change of one sample that leads to another leaf, or to another class, or action of a policy.

    A leaf is the intersection of the half-spaces on its path, so the nearest point of each is a quadratic program with
    one constraint a level: least distance programming, solved by non-negative least squares (Lawson and Hanson, Solving
    Least Squares Problems, 1974, chapter 23). No leaf is nearer than the farthest of the half-spaces on its path, so
    leaves are solved in that order, up to the first that cannot be nearer than one that is solved. The nearest of all
    leaves is exact; it is moved over the splits that it touches by a millionth, and more where float32 asks for it.
    A column keeps to its range in ``x``, the sample's own value included: one constraint a bound.

    Args:
      model: a :class:`jtrees.ObliqueTree`, or a model of raw tables that is one.
      row: the sample, ``(p,)`` or a table of one row.
      x: samples whose standard deviations are the units of the change and whose ranges are its bounds, such as the
        training rows; columns that do not vary do not change.
      columns: names of the columns that may change; None: all, of raw tables all of numbers. A missing value does not
        change.
      target: the class to reach, in classification, or the action of a policy; None: any other than now.
      extrapolate: whether a column may leave its range in ``x``.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...

    Returns:
      The change; None if no change of these columns leads to another answer.

    Raises:
      ValueError: for a model that is not one tree, for rows that do not fit it, and for columns that cannot change.

    Example:
      >>> leaves = jtrees.leaves.Constant(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> x = np.array([[0.0, 0.0], [2.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
      >>> change = jtrees.explain.nearest_change(tree, x[0], x)
      >>> print(change.x.round(2), change.leaf)  # onto the line x0 + 2 x1 = 1
      [0.2 0.4] 1
    """
    tree, described = _tree(model), _Columns.of(model, feature_names)
    given = described.row("row", row)
    background = described.features(x)
    deviation = np.where(described.free(columns, row), background.std(0), 0.0)
    bounds = _bounds(given[0], background, deviation, extrapolate)
    weights, bias = np.asarray(tree.weights), np.asarray(tree.bias)
    leaf_at = lambda x: exact.row_leaf(exact.row_scores(weights, bias, _relative(tree, x[None])[0]))
    margins = exact.row_scores(weights, bias, _relative(tree, given)[0])
    answers, now = _answers(tree), exact.row_leaf(margins)
    if target is not None:
        if tree.classes is None:
            raise ValueError("target must be None: the leaves of this tree hold no classes")
        if not 0 <= target < tree.classes:
            kind = "an action" if tree.is_policy else "a class"
            raise ValueError(f"target must be {kind} from 0 to {tree.classes - 1}, got {target}")
    if answers is None:
        others = np.arange(len(tree.bias) + 1) != now
    else:
        others = answers != answers[now] if target is None else answers == target
    if others[now]:
        return _changed(tree, described, given[0], given[0], now, deviation)
    for step, (directions, needed) in _nearest_leaves(weights, margins, deviation, others, bounds):
        for more in 10.0 ** np.arange(-6, 0):
            beyond = _least_distance_within(directions, needed + more, bounds)
            changed = given[0] + deviation * (step if beyond is None else beyond)
            if not extrapolate:  # but for rounding it is inside
                low, high = (np.minimum, np.maximum)
                changed = changed.clip(low(given[0], background.min(0)), high(given[0], background.max(0)))
            if others[leaf := leaf_at(changed)]:
                return _changed(tree, described, given[0], changed, leaf, deviation)
    return None


def _changed(
    tree: ObliqueTree, columns: "_Columns", before: np.ndarray, after: np.ndarray, leaf: int, deviation: np.ndarray
) -> Change:
    moved = np.flatnonzero(before != after)
    length = float(np.linalg.norm((after - before)[moved] / deviation[moved]))
    values = {columns.names[columns.owner[i]]: float(after[i]) for i in moved}
    return Change(after, length, leaf, np.asarray(tree.predict(after[None]))[0], values)


def _nearest_leaves(
    weights: np.ndarray, margins: np.ndarray, deviation: np.ndarray, others: np.ndarray, bounds: np.ndarray
) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """Yields the shortest step to the closure of each leaf, in deviations, and its constraints ``g step >= h``, with
    unit vectors g; the shortest first.

    Args:
      weights: weights of all nodes, ``(nodes, p)``.
      margins: the scores of the sample, ``(nodes,)``.
      deviation: units of the steps, ``(p,)``.
      others: which leaves may be reached, ``(leaves,)`` bool.
      bounds: the lowest and the highest step of each feature, in deviations, ``(2, p)``.
    """
    directions = weights * deviation
    length = np.sqrt(np.square(directions).sum(1))
    moves = length > 0  # other nodes send the sample one way, wherever it goes
    scale = np.where(moves, length, 1)
    directions, away = directions / scale[:, None], margins / scale
    nodes, sides = _paths(len(others))
    fixed = np.where((margins[nodes] > 0) == (sides > 0), -np.inf, np.inf)
    needed = np.where(moves[nodes], -sides * away[nodes], fixed)
    least = np.where(others, needed.max(1).clip(0), np.inf)
    solved: list[tuple[float, int, np.ndarray, tuple[np.ndarray, np.ndarray]]] = []
    for leaf in [*np.argsort(least, kind="stable").tolist(), -1]:
        bound = np.inf if leaf < 0 else least[leaf]
        while solved and solved[0][0] <= bound:
            yield heapq.heappop(solved)[2:]
        if not np.isfinite(bound):
            break
        kept = moves[nodes[leaf]]
        path, side = nodes[leaf][kept], sides[leaf][kept]
        constraints = side[:, None] * directions[path], needed[leaf][kept]
        step = _least_distance_within(*constraints, bounds)
        if step is not None:
            heapq.heappush(solved, (float(np.linalg.norm(step)), leaf, step, constraints))


@functools.cache
def _paths(leaves: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nodes on the path to each leaf, ``(leaves, depth)``, and the sides that it takes, 1 for right."""
    depth = leaves.bit_length() - 1
    places = (np.arange(leaves)[:, None] + leaves) >> np.arange(depth, -1, -1)
    return places[:, :-1] - 1, np.where(places[:, 1:] % 2 == 1, 1.0, -1.0)


def _bounds(given: np.ndarray, background: np.ndarray, deviation: np.ndarray, extrapolate: bool) -> np.ndarray:
    """Returns the lowest and the highest step of each feature within the range of its samples and of the given value,
    in deviations, ``(2, p)``.
    """
    if extrapolate:
        return np.stack([np.full(len(given), -np.inf), np.full(len(given), np.inf)])
    low, high = np.minimum(background.min(0), given) - given, np.maximum(background.max(0), given) - given
    return np.stack([low, high]) / np.where(deviation > 0, deviation, 1)


def _least_distance_within(g: np.ndarray, h: np.ndarray, bounds: np.ndarray) -> np.ndarray | None:
    """Returns the shortest d with ``g d >= h`` within bounds, ``(2, p)``, around 0, or None if there is none.

    Bounds become constraints where a solution without them leaves them, as most never matter.
    """
    low, high = bounds
    below, above = np.zeros(len(low), bool), np.zeros(len(low), bool)
    while True:
        at_low, at_high = np.flatnonzero(below), np.flatnonzero(above)
        sides = np.zeros((len(at_low) + len(at_high), len(low)))
        sides[np.arange(len(at_low)), at_low] = 1
        sides[len(at_low) + np.arange(len(at_high)), at_high] = -1
        step = _least_distance(np.vstack([g, sides]), np.concatenate([h, low[at_low], -high[at_high]]))
        if step is None:
            return None
        lower, higher = (step < low) & ~below, (step > high) & ~above
        if not (lower | higher).any():
            return step.clip(low, high)
        below, above = below | lower, above | higher


def _least_distance(g: np.ndarray, h: np.ndarray) -> np.ndarray | None:
    """Returns the shortest d with ``g d >= h`` for unit vectors g, or None if there is none.

    If the nearest point of the farthest half-space is in all others, it is that. Else for r, the residual of the least
    squares problem ``min ||[g^T; h^T] u - e||, u >= 0`` with e the last unit vector, ``d = -r[:-1] / r[-1]``; there is
    none if r is 0.
    """
    unit = float(h.max(initial=0))
    if unit <= 0:
        return np.zeros(g.shape[1])
    step = unit * g[h.argmax()]
    if (g @ step - h).min() >= -1e-12 * unit:
        return step
    from scipy.optimize import nnls  # jax needs SciPy, but does not import this slow part of it

    unit = np.abs(h).max()  # the problem is homogeneous: distances of 1 are the best conditioned
    both, last = np.vstack([g.T, h / unit]), np.zeros(g.shape[1] + 1)
    last[-1] = 1
    residual = both @ nnls(both, last)[0] - last
    if np.linalg.norm(residual) < 1e-9:
        return None
    step = -unit * residual[:-1] / residual[-1]
    return step if (g @ step - h).min() >= -1e-6 * unit else None


def _answers(tree: ObliqueTree) -> np.ndarray | None:
    """Returns the class or action of each leaf, or None for other leaves."""
    return None if tree.classes is None else np.asarray(tree.leaves.values).argmax(-1)


# --- What columns are worth ------------------------------------------------------------------------------------------


class Shapley(NamedTuple):
    """Shapley values: ``shap.Explanation(*values)`` takes them in this order.

    Attributes:
      values: what each column adds to the prediction of each sample, ``(n, p)``, or ``(n, p, k)`` for k outputs.
      base_values: mean prediction of the background, ``(n,)`` or ``(n, k)``; with the values of a sample it adds up to
        its prediction.
      data: the samples as numbers, ``(n, p)``; of raw tables None, as a column may have several.
      feature_names: names of the columns.
    """

    values: np.ndarray
    base_values: np.ndarray
    data: np.ndarray | None
    feature_names: list[str]


def shapley_values(
    model: Any,
    x: Any,
    background: Any,
    *,
    permutations: int = 20,
    key: Array | None = None,
    feature_names: Sequence[str] | None = None,
) -> Shapley:
    """Returns interventional Shapley values (Lundberg and Lee, 2017): the worth of a set of columns is the mean
    prediction when these are the sample's and all others those of a background row.

    Up to 12 columns they are exact, from all sets of columns. Above, they are means over random orders of the columns,
    each with its reverse (antithetic); they add up exactly there, too.

    Args:
      model: any fitted model.
      x: samples to explain, ``(n, p)``, as for ``predict``.
      background: samples that stand for "not known", likewise; some 100 rows of the training table.
      permutations: number of orders, each with its reverse, of more than 12 columns.
      key: random key of the orders; None: ``jax.random.key(0)``.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...

    Raises:
      ValueError: for rows that do not fit the model, and for permutations that are not a positive number.

    Example:
      >>> leaves = jtrees.leaves.Constant(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> background = np.array([[0.0, 0.0], [2.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
      >>> shapley = jtrees.explain.shapley_values(tree, np.array([[2.0, 0.0]]), background)
      >>> print(shapley.base_values, shapley.values)  # which add up to the prediction, 10
      [5.] [[ 6.25 -1.25]]
    """
    processes.require_xla("jtrees.explain.shapley_values")
    columns, inner = _Columns.of(model, feature_names), model.model if isinstance(model, FrameModel) else model
    samples, behind = columns.features(x), columns.features(background)
    validation.check_count("permutations", permutations)
    players = len(columns.names)
    if players <= _EXACT:
        sets, weights = _all_sets(players)
    else:
        seed = jax.random.bits(jax.random.key(0) if key is None else key, (4,))
        sets, weights = _random_sets(players, permutations, np.random.default_rng(np.asarray(seed)))
    trees = 1
    if isinstance(inner, Forest) and inner.combine == "sum" and inner.link in ("identity", "sorted"):
        trees, inner = len(inner), inner.replace(combine="mean")  # the scaling is that of one tree
    scaling, unscaled = inner.scaling, inner.without_scaling()
    scaled = lambda rows: np.asarray(prediction.scaled(scaling, rows, inner.features), np.float32)
    with compilation.promoting_ranks():
        worth = np.asarray(_worth(unscaled, scaled(samples), scaled(behind), sets[:, columns.owner]))
    if scaling is not None:
        worth = scaling.inverse(worth.reshape(-1, *worth.shape[2:]).astype(np.float64)).reshape(worth.shape)
    worth = trees * np.asarray(worth, np.float64)
    values = np.einsum("ps,ns...->np...", weights, worth)
    none = int(np.flatnonzero(~sets.any(1))[0])
    data = None if isinstance(model, FrameModel) else samples
    return Shapley(values, worth[:, none], data, columns.names)


@jax.jit
def _worth(model: Any, x: Float[Array, "n p"], background: Float[Array, "b p"], sets: Array) -> Float[Array, "n s *k"]:
    """Returns the mean prediction over the background with each set of features from the sample."""

    def of_row(row: Array) -> Array:
        of_one = lambda behind: model.apply(jnp.where(sets, row, behind))
        return jax.lax.map(of_one, background, batch_size=max(1, _BLOCK // len(sets))).mean(0)

    return jax.lax.map(of_row, x)


def _all_sets(players: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns all sets of players, ``(2^p, p)`` bool, and the weight of each one's worth in each value, ``(p, 2^p)``.

    A set of s players without i counts ``s! (p - s - 1)! / p!``, against i, and with i that of the set without it.
    """
    sets = (np.arange(2**players)[:, None] >> np.arange(players)) % 2 == 1
    size = sets.sum(1)
    weight = np.array([1 / (players * math.comb(players - 1, s)) for s in range(players)])
    return sets, np.where(sets, weight[np.maximum(size - 1, 0)][:, None], -weight[size.clip(0, players - 1)][:, None]).T


def _random_sets(players: int, pairs: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sets that orders of the players and their reverses pass through, and weights likewise."""
    forward = np.stack([rng.permutation(players) for _ in range(pairs)])
    orders = np.concatenate([forward, forward[:, ::-1]])
    sets, weights = [np.zeros(players, bool), np.ones(players, bool)], np.zeros((players, 2 + len(orders) * players))
    for order in orders:
        last = 0
        for place, player in enumerate(order):
            with_it = 1 if place == players - 1 else len(sets)
            if with_it != 1:
                sets.append(sets[last].copy())
                sets[-1][player] = True
            weights[player, with_it] += 1 / len(orders)
            weights[player, last] -= 1 / len(orders)
            last = with_it
    return np.stack(sets), weights[:, : len(sets)]


def permutation_importance(
    model: Any,
    x: Any,
    y: ArrayLike,
    score: Callable[[Any, Any], float],
    *,
    repeats: int = 5,
    key: Array | None = None,
    feature_names: Sequence[str] | None = None,
) -> dict[str, np.ndarray]:
    """Returns by how much a score falls when the values of a column are shuffled (Breiman, 2001).

    Estimators have scikit-learn's, :func:`sklearn.inspection.permutation_importance`; this is the same of a model, in
    which the features of a column are shuffled together.

    Args:
      model: any fitted model.
      x: samples, ``(n, p)``, best ones that the model was not trained on.
      y: their targets.
      score: ``(y, predictions) -> score``, greater is better, such as :func:`sklearn.metrics.r2_score`.
      repeats: number of shuffles.
      key: random key of the shuffles; None: ``jax.random.key(0)``.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...

    Returns:
      The falls by column name, ``(repeats,)`` each.

    Raises:
      ValueError: for rows that do not fit the model, and for repeats that are not a positive number.

    Example:
      >>> leaves = jtrees.leaves.Constant(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> x = np.tile([[0.0, 7.0], [2.0, 7.0]], (5, 1))  # the second column is constant
      >>> score = lambda y, predictions: -np.square(y - predictions).mean()
      >>> falls = jtrees.explain.permutation_importance(tree, x, tree.predict(x), score)
      >>> {name: fall.shape for name, fall in falls.items()}, float(falls["x1"].max())
      ({'x0': (5,), 'x1': (5,)}, 0.0)
    """
    validation.check_count("repeats", repeats)
    rng = np.random.default_rng(np.asarray(jax.random.bits(jax.random.key(0) if key is None else key, (4,))))

    def shuffled(features: np.ndarray, own: np.ndarray) -> np.ndarray:
        out = features.copy()
        out[:, own] = features[rng.permutation(len(features))][:, own]
        return out

    return _falls(model, x, y, score, [shuffled] * repeats, feature_names)


def _falls(
    model: Any, x: Any, y: Any, score: Any, changes: list[Any], feature_names: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """Returns by how much a score falls under each change of each column."""
    columns, inner = _Columns.of(model, feature_names), model.model if isinstance(model, FrameModel) else model
    features, y = columns.features(x), np.asarray(y)
    validation.check_rows(y, len(features))
    whole = float(score(y, inner.predict(features)))
    return {
        name: np.array(
            [whole - float(score(y, inner.predict(change(features, columns.owner == i)))) for change in changes]
        )
        for i, name in enumerate(columns.names)
    }


# --- Columns and features --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Columns:
    """The columns that a model is explained by.

    Attributes:
      names: their names.
      owner: the column of each feature, ``(p,)``.
      model: the model.
    """

    names: list[str]
    owner: np.ndarray
    model: Any

    @classmethod
    def of(cls, model: Any, feature_names: Sequence[str] | None) -> "_Columns":
        if isinstance(model, FrameModel):
            if feature_names is not None:
                raise ValueError("feature_names must be None: the columns of this model have names")
            sizes = {name: len(column.features(name)) for name, column in model.columns.columns.items()}
            names = [name for name, size in sizes.items() if size]
            return cls(names, np.repeat(np.arange(len(names)), [sizes[name] for name in names]), model)
        names = [f"x{i}" for i in range(model.features)] if feature_names is None else list(map(str, feature_names))
        if len(names) != model.features:
            raise ValueError(f"feature_names must hold {model.features} names, one a column, got {len(names)}")
        return cls(names, np.arange(model.features), model)

    def features(self, x: Any) -> np.ndarray:
        """Returns rows as features, ``(n, p)`` in float64."""
        if isinstance(self.model, FrameModel):
            return self.model.columns.transform(x)
        return np.asarray(validation.check_x(x, features=self.model.features), np.float64)

    def row(self, name: str, row: Any) -> np.ndarray:
        """Returns one row as features, ``(1, p)``."""
        row = np.asarray(row)[None] if not hasattr(row, "columns") and np.ndim(row) == 1 else row
        x = self.features(row)
        if len(x) != 1:
            raise ValueError(f"{name} must be one row, got {len(x)}")
        return x

    def summed(self, terms: np.ndarray) -> np.ndarray:
        """Returns the sums over each column's features, ``(columns, ...)``."""
        out = np.zeros((len(self.names), *terms.shape[1:]))
        np.add.at(out, self.owner, terms)
        return out

    def free(self, columns: Sequence[str] | None, row: Any) -> np.ndarray:
        """Returns which features may change, ``(p,)`` bool: the first of each chosen column.

        Raises:
          ValueError: for a name that is none of a column with numbers.
        """
        possible = self.names
        if isinstance(self.model, FrameModel):
            kinds = self.model.columns.columns
            possible = [
                name for name in self.names if isinstance(kinds[name], Numeric) and kinds[name].kind == "numeric"
            ]
        for name in columns or ():
            if name not in possible:
                named = validation.quoted_list(possible)
                raise ValueError(f"columns must be among {named}, got {validation.quoted(name)}")
        chosen = [name in (possible if columns is None else columns) for name in self.names]
        first = np.append(True, self.owner[1:] != self.owner[:-1])
        missing = np.append((self.row("row", row)[0, 1:] != 0) & ~first[1:], False)  # the mask follows the value
        return first & np.array(chosen)[self.owner] & ~missing


def _tree(model: Any) -> ObliqueTree:
    tree = model.model if isinstance(model, FrameModel) else model
    if not isinstance(tree, ObliqueTree) or np.ndim(tree.weights) != 2:
        raise ValueError(f"model must be a single tree, got {model}")
    return tree


def _relative(tree: ObliqueTree, x: np.ndarray) -> np.ndarray:
    """Returns samples as the tree sees them: relative to its origin, in float32."""
    return np.asarray(prediction.scaled(tree.origin, x, tree.features), np.float32)
