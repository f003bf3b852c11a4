"""Shapley values: the contribution of each column to the prediction of a sample."""

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jtrees import compilation, prediction, processes, validation
from jtrees.explain.explained import ExplainedColumns
from jtrees.explain.importance import rng_of
from jtrees.forest import Forest
from jtrees.tables.model import FrameModel, features_of_rows

_EXACT = 12  # largest number of columns with all 2^p coalitions
_BLOCK = 8192  # samples evaluated at once


class Shapley(NamedTuple):
    """Shapley values, with the names of the arguments of ``shap.Explanation``.

    ``shap.Explanation(**shapley._asdict())`` is the form that the plots of shap take.

    Attributes:
      values: contribution of each column to the prediction of each sample, ``(n, p)``, or ``(n, p, k)`` for k outputs.
      base_values: mean prediction of the background, ``(n,)`` or ``(n, k)``. The base value plus the values of a sample
        is the sample's prediction, up to rounding in float32.
      data: the samples as numbers, ``(n, p)``. None for raw tables, because a column may have several features.
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
    """Returns interventional Shapley values (Lundberg and Lee, 2017).

    The worth of a set of columns is the mean prediction over the background rows, where the columns of the set have the
    sample's values.

    For up to 12 columns, the values are exact: all sets of columns are evaluated. For more columns, the values are
    means over random orders of the columns. Each order is paired with its reverse (antithetic sampling). In both cases
    the base value and the values of a sample add up to its prediction, up to rounding in float32. A row whose score is
    within rounding of a split may go to the other side of it here.

    Args:
      model: any fitted model.
      x: samples to explain, ``(n, p)``, as for ``predict``.
      background: samples that represent unknown values, in the form of ``x``, such as 100 rows of the training table.
      permutations: number of orders for more than 12 columns. Each order is paired with its reverse.
      key: random key of the orders, by default ``jax.random.key(0)``.
      feature_names: names of the columns of arrays, by default ``x0``, ``x1``, ...

    Raises:
      ValueError: for rows that do not fit the model, for an empty background, or for ``permutations`` below 1.

    Example:
      >>> leaves = jtrees.leaves.Values(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> background = np.array([[0.0, 0.0], [2.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
      >>> shapley = jtrees.explain.shapley_values(tree, np.array([[2.0, 0.0]]), background)
      >>> print(shapley.base_values, shapley.values)  # which add up to the prediction, 10
      [5.] [[ 6.25 -1.25]]
    """
    processes.require_xla("jtrees.explain.shapley_values")
    columns = ExplainedColumns.from_model(model, feature_names)
    inner = model.model if isinstance(model, FrameModel) else model
    samples, behind = features_of_rows(model, x), features_of_rows(model, background, "background")
    if not len(behind):
        raise ValueError("background must have at least one row, got 0")
    validation.check_count("permutations", permutations)
    players = len(columns.names)
    exact = players <= _EXACT
    sets, weights = _all_sets(players) if exact else _random_sets(players, permutations, rng_of(key))
    trees = 1
    if isinstance(inner, Forest) and inner.combine == "sum" and inner.link in ("identity", "sorted"):
        trees, inner = len(inner), inner.replace(combine="mean")  # the scaling belongs to one tree
    scaling, unscaled = inner.scaling, inner.without_scaling()
    scaled = lambda rows: np.asarray(prediction.scaled(scaling, rows, inner.features), np.float32)
    with compilation.default_settings():
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
    """Returns the mean prediction over the background for each set of features that have the sample's values."""

    def of_row(row: Array) -> Array:
        outputs = lambda behind: model.apply(jnp.where(sets, row, behind))
        return jax.lax.map(outputs, background, batch_size=max(1, _BLOCK // len(sets))).mean(0)

    return jax.lax.map(of_row, x)


def _all_sets(players: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns all sets of players, ``(2^p, p)`` bool, and the weight of each set's worth in each value, ``(p, 2^p)``.

    In the value of player i, a set of s players without i has the weight ``-s! (p - s - 1)! / p!``. The same set plus i
    has the opposite weight.
    """
    sets = (np.arange(2**players)[:, None] >> np.arange(players)) % 2 == 1
    size = sets.sum(1)
    weight = np.array([1 / (players * math.comb(players - 1, s)) for s in range(players)])
    return sets, np.where(sets, weight[np.maximum(size - 1, 0)][:, None], -weight[size.clip(0, players - 1)][:, None]).T


def _random_sets(players: int, pairs: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sets that random orders of the players and their reverses pass through, and the sets' weights."""
    forward = np.stack([rng.permutation(players) for _ in range(pairs)])
    orders = np.concatenate([forward, forward[:, ::-1]])
    sets, weights = [np.zeros(players, bool), np.ones(players, bool)], np.zeros((players, 2 + len(orders) * players))
    for order in orders:
        last = 0
        for place, player in enumerate(order):
            extended = 1 if place == players - 1 else len(sets)
            if extended != 1:
                sets.append(sets[last].copy())
                sets[-1][player] = True
            weights[player, extended] += 1 / len(orders)
            weights[player, last] -= 1 / len(orders)
            last = extended
    return np.stack(sets), weights[:, : len(sets)]
