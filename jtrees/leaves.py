"""Leaves fitted from a hard routing: given which samples are in which leaf, the best constant, class frequencies or
linear model of each.

Everything is a segment sum over the samples and one batched solve; there is no loop over leaves.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num
import numpy as np

from jtrees import blocking, topology
from jtrees.tree import ConstantLeaves, LinearLeaves


def mid_range(y: Float[Array, "n *k"]) -> Float[Array, "*k"]:
    """Half way between the smallest and the largest target: GET's value for a leaf that no sample reaches."""
    return (y.min(0) + y.max(0)) / 2


def _floating(y: Array) -> Array:
    return y if jnp.issubdtype(y.dtype, jnp.floating) else y.astype(jnp.float32)


def _ones(n: int, sample_weight: Array | None, dtype) -> Array:
    return jnp.ones(n, dtype) if sample_weight is None else jnp.asarray(sample_weight, dtype)


def _expand(weight: Array, like: Array) -> Array:
    return weight.reshape(weight.shape + (1,) * (like.ndim - weight.ndim))


def fit_constant(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    default: float | Array | None = None,
    sample_weight: Float[Array, " n"] | None = None,
) -> ConstantLeaves:
    """The mean of the targets in each leaf (GET, Algorithm 1: deterministic leaves).

    Args:
      leaf_index: leaf of each sample.
      y: targets, ``(n,)`` or ``(n, k)``.
      num_leaves: number of leaves.
      default: value of a leaf without samples (or without weight); by default the mid-range of ``y``.
      sample_weight: nonnegative weights.

    Returns:
      Values of shape ``(leaves,)`` or ``(leaves, k)``.
    """
    y = _floating(y)
    weight = _ones(y.shape[0], sample_weight, y.dtype)
    default = jnp.asarray(mid_range(y) if default is None else default, y.dtype)
    # Sums of deviations from the default, not of y itself: what is summed is then no larger than the spread of y.
    total = jax.ops.segment_sum(_expand(weight, y) * (y - default), leaf_index, num_leaves)
    count = jax.ops.segment_sum(weight, leaf_index, num_leaves)
    return ConstantLeaves(default + total / _expand(jnp.where(count > 0, count, 1), total))


def constant_fit_error(
    leaf_index: Int[Array, " n"],
    y: Num[Array, " n"],
    num_leaves: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """Mean squared error that :func:`fit_constant` would leave on the same samples, without a second look at them.

    ``(sum_i w_i y_i**2 - sum_l S_l**2 / N_l) / sum_i w_i`` with ``S_l`` and ``N_l`` weighted sum and total weight of
    the (centred) targets in a leaf.
    """
    y = _floating(y)
    if sample_weight is None:
        weight, total = jnp.ones_like(y), jnp.asarray(y.shape[0], y.dtype)
        y = y - y.mean()
    else:
        weight, total = jnp.asarray(sample_weight, y.dtype), jnp.asarray(sample_weight, y.dtype).sum()
        y = y - (weight @ y) / total
    # One scatter of pairs costs half of two scatters.
    sums = jax.ops.segment_sum(jnp.stack([weight, weight * y], axis=1), leaf_index, num_leaves)
    explained = jnp.square(sums[:, 1]) / jnp.where(sums[:, 0] > 0, sums[:, 0], 1)
    return ((weight * jnp.square(y)).sum() - explained.sum()) / total


def class_counts(
    leaf_index: Int[Array, " n"],
    y: Int[Array, " n"],
    num_leaves: int,
    classes: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, "leaves k"]:
    """Weight of the samples of each class in each leaf."""
    dtype = jnp.float32 if sample_weight is None else sample_weight.dtype
    weight = _ones(y.shape[0], sample_weight, dtype)
    return jax.ops.segment_sum(weight, leaf_index * classes + y, num_leaves * classes).reshape(num_leaves, classes)


def fit_frequencies(
    leaf_index: Int[Array, " n"],
    y: Int[Array, " n"],
    num_leaves: int,
    classes: int,
    *,
    smoothing: float | Array = 1.0,
    sample_weight: Float[Array, " n"] | None = None,
) -> ConstantLeaves:
    """Class frequencies in each leaf, with Laplace smoothing: ``(N_lk + s q_k) / (N_l + s)``.

    ``q`` are the frequencies among all samples and one more of each class (so none is 0): ``smoothing`` is a number of
    samples drawn from them that is added to every leaf; a leaf without samples answers ``q``. (With ``q_k = 1 / k``
    and ``s = k`` this would be Laplace's rule of one more sample of each class, which drowns small leaves where there
    are many classes.)

    Args:
      leaf_index: leaf of each sample.
      y: classes from 0 to ``classes - 1``.
      num_leaves: number of leaves.
      classes: number of classes, k.
      smoothing: the number s of samples added to every leaf, above 0.
      sample_weight: nonnegative weights.

    Returns:
      Values of shape ``(leaves, k)``, each row summing to one.
    """
    counts = class_counts(leaf_index, y, num_leaves, classes, sample_weight=sample_weight)
    return ConstantLeaves(_smoothed(counts, smoothing))


def _smoothed(counts: Array, smoothing: float | Array) -> Array:
    prior = (counts.sum(0) + 1) / (counts.sum() + counts.shape[1])
    return (counts + smoothing * prior) / (counts.sum(1, keepdims=True) + smoothing)


def frequencies_fit_error(
    leaf_index: Int[Array, " n"],
    y: Int[Array, " n"],
    num_leaves: int,
    classes: int,
    *,
    smoothing: float | Array = 1.0,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """Mean log loss that :func:`fit_frequencies` would leave on the same samples, without a second look at them."""
    counts = class_counts(leaf_index, y, num_leaves, classes, sample_weight=sample_weight)
    return -jax.scipy.special.xlogy(counts, _smoothed(counts, smoothing)).sum() / counts.sum()


def fit_linear(
    leaf_index: Int[Array, " n"],
    x: Float[Array, "n p"],
    y: Num[Array, " n"],
    num_leaves: int,
    *,
    ridge: float | Array = 1e-4,
    default: float | Array | None = None,
    sample_weight: Float[Array, " n"] | None = None,
) -> LinearLeaves:
    """Ridge regression in each leaf by itself: normal equations by segment sums, solved in one batched Cholesky.

    The plain definition, of one strength given. For a tree to predict with, :func:`fit_shrunk` chooses strengths and
    lets leaves with few samples learn from their ancestors.

    Samples are centred within their leaf, so the intercept is not penalised, and the penalty of a leaf is ``ridge``
    times the mean diagonal of its normal equations, so it does not depend on units or on the number of samples. The
    ridge solution loses at most what the constant loses (coefficients of zero are among the candidates); a leaf whose
    solve is not finite, or which rounding has made worse than its constant, falls back to that constant.

    Args:
      leaf_index: leaf of each sample.
      x: samples.
      y: targets.
      num_leaves: number of leaves.
      ridge: relative penalty, above 0.
      default: value of a leaf without samples; by default the mid-range of ``y``.
      sample_weight: nonnegative weights.
    """
    n, p = x.shape
    y = _floating(y)
    weight = _ones(n, sample_weight, x.dtype)
    constant = fit_constant(leaf_index, y, num_leaves, default=default, sample_weight=sample_weight).values
    x_mean = fit_constant(leaf_index, x, num_leaves, sample_weight=sample_weight).values
    xc, yc = x - x_mean[leaf_index], y - constant[leaf_index]

    def moments(weight, xc, yc, leaf):
        row = jnp.concatenate([xc, yc[:, None]], axis=1)
        outer = weight[:, None, None] * row[:, :, None] * row[:, None, :]
        return jax.ops.segment_sum(outer, leaf, num_leaves), leaf

    block = blocking.block_size((p + 1) ** 2, n)
    gram, _ = blocking.sum_over_blocks(moments, weight, xc, yc, leaf_index, block=block)
    scale = jnp.trace(gram[:, :p, :p], axis1=1, axis2=2) / p
    penalty = ridge * scale + jnp.finfo(x.dtype).tiny ** 0.5
    # One batched factorisation a program: with jaxlib 0.10.2 two that do not depend on each other hang on two cores.
    factor = jax.scipy.linalg.cholesky(gram[:, :p, :p] + penalty[:, None, None] * jnp.eye(p, dtype=x.dtype), lower=True)
    coefficients = jax.scipy.linalg.cho_solve((factor, True), gram[:, :p, p:])[..., 0]

    def squared(residual):
        return jax.ops.segment_sum(weight * jnp.square(residual), leaf_index, num_leaves)

    # Judged by what will be answered, rounding and all; false where anything is NaN.
    fitted = LinearLeaves(coefficients, constant - (coefficients * x_mean).sum(1))
    better = squared(y - fitted.at(leaf_index, x)) <= squared(yc)
    return LinearLeaves(jnp.where(better[:, None], coefficients, 0), jnp.where(better, fitted.intercept, constant))


# --- Linear leaves that shrink towards their ancestors ---------------------------------------------------------------
#
# The model of a node is that of its parent plus a correction, fitted to what the parent leaves there. Centred within
# the node, with A = sum w x x', c = sum w x y, e the mean residual, the correction of slopes d and level m e loses
#
#     RSS(d, m) = RSS_0 - 2 d.(c - A b) + d.A d + n (1 - m)**2 e**2,      b the parent's slopes,
#
# and ridge with strength s (a number of samples: features have unit variance) gives d = (A + s I)^-1 (c - A b). With
# A = Q diag(a) Q' every strength costs only sums over a: RSS falls by g_i**2 (a_i + 2 s) / (a_i + s)**2 along
# eigenvector i, g = Q'(c - A b), and the trace of the hat matrix is sum a_i / (a_i + s). The level is shrunk likewise,
# m = n / (n + t). Each node takes the pair (s, t) with the least generalised cross-validation,
#
#     GCV = n RSS / (n - df)**2     a sample,
#
# infinite strengths (the parent's model as it is) and the node's own mean (slopes dropped, df = 1) among the
# candidates. df counts the correction; of the degrees of freedom that the node's share of its ancestors' fits holds,
# the part that the correction leaves alone, 1 - own / (p + 1) of it; and, for any correction or mean of its own,
# those of the split that cut the node out and was fitted to the same samples, at the root the 1 of the mean of all
# targets. A split holds p + 1 numbers and is charged twice as many, because it was chosen among many (MARS charges 2
# to 3 a knot, Friedman 1991). Uncharged, leaves of a deep tree follow its noise; charged once, they still do where
# the truth is a noisy plane (tests/test_get.py holds them to a linear regression there). Everything comes from
# moments of the leaves, merged upwards pair by pair; the samples are visited once.

_SLOPES = np.array([np.inf, *10.0 ** np.arange(4, -2.5, -0.5)])  # s, in samples
_LEVELS = np.array([np.inf, 30.0, 10.0, 3.0, 0.0])  # t, in samples
_COST_OF_SPLIT = 2  # degrees of freedom for each of its p + 1 numbers
_LEAST_FREE = 0.1  # of a node's samples: with fewer degrees of freedom left the quotient 0 / 0 of GCV means nothing


class _Moments(NamedTuple):
    """Of each node of one or more levels: weight, mean of (x, y), centred second moments, range of y."""

    count: Array
    mean: Array
    second: Array
    low: Array
    high: Array


class _Models(NamedTuple):
    """Of nodes of a level: the model, its degrees of freedom, what it loses by GCV, and the range that bounds it.

    ``low`` and ``high`` are those of the node that the model was fitted in: its own, or the nearest ancestor whose
    model it answers with.
    """

    slopes: Array
    intercept: Array
    df: Array
    error: Array
    count: Array
    low: Array
    high: Array


def _merge(children: _Moments) -> _Moments:
    """Moments of parents from those of their two children, ``(m, 2, ...)`` -> ``(m, ...)``, without cancellation."""
    count = children.count.sum(1)
    share = children.count / jnp.where(count > 0, count, 1)[:, None]
    apart = children.mean[:, 1] - children.mean[:, 0]
    between = (count * share[:, 0] * share[:, 1])[:, None, None] * apart[:, :, None] * apart[:, None, :]
    mean, second = (share[..., None] * children.mean).sum(1), children.second.sum(1) + between
    return _Moments(count, mean, second, children.low.min(1), children.high.max(1))


def _standardise(x: Array, y: Array, weight: Array) -> tuple[Array, Array, Array]:
    """``(x, y)`` side by side, centred, features of unit variance (constant ones 0); mean and scale."""
    joined = jnp.concatenate([x, y[:, None]], axis=1)
    mean = jnp.matmul(weight, joined, precision="highest") / weight.sum()
    variance = jnp.matmul(weight, jnp.square(joined - mean), precision="highest") / weight.sum()
    rounding = jnp.square(16 * jnp.finfo(x.dtype).eps * mean)  # what a constant column may vary by
    scale = jnp.where(variance > rounding, jnp.sqrt(variance), jnp.inf).at[-1].set(1)
    return (joined - mean) / scale, mean, scale


def _fit_shrunk(rows: Array, weight: Array, leaf_index: Array, num_leaves: int) -> _Models:
    """Models of the leaves; ``rows`` are (x, y), standardised."""
    n, p = rows.shape[0], rows.shape[1] - 1
    centre = fit_constant(leaf_index, rows, num_leaves, default=0.0, sample_weight=weight).values

    def moments(weight, row, leaf):
        row = row - centre[leaf]
        outer = weight[:, None, None] * row[:, :, None] * row[:, None, :]
        return (jax.ops.segment_sum(outer, leaf, num_leaves), jax.ops.segment_sum(weight, leaf, num_leaves)), leaf

    block = blocking.block_size((p + 1) ** 2, n)
    (second, count), _ = blocking.sum_over_blocks(moments, weight, rows, leaf_index, block=block)
    there, y = weight > 0, rows[:, p]
    low = jax.ops.segment_min(jnp.where(there, y, jnp.inf), leaf_index, num_leaves)
    high = jax.ops.segment_max(jnp.where(there, y, -jnp.inf), leaf_index, num_leaves)
    levels: list[_Moments] = [_Moments(count, centre, second, low, high)]
    while levels[0].count.shape[0] > 1:
        levels.insert(0, _merge(jax.tree.map(topology.pairs, levels[0])))
    whole: _Moments = jax.tree.map(lambda *parts: jnp.concatenate(parts), *levels)
    # One call for all nodes of all levels: two that do not depend on each other might hang, see fit_linear.
    values, vectors = jnp.linalg.eigh(whole.second[:, :p, :p])

    # A compiled loop over levels, in which every leaf looks at its own ancestor: nodes near the root are worked on many
    # times, which costs little, and the program does not grow with the depth, which costs seconds of compilation.
    depth = len(levels) - 1
    ancestor = np.arange(num_leaves) >> np.arange(depth, -1, -1)[:, None]
    ancestor = jnp.asarray(ancestor + 2 ** np.arange(depth + 1)[:, None] - 1)
    at = lambda node, table: jax.tree.map(lambda a: a[node], table)

    def down(models: _Models, node: Array) -> tuple[_Models, None]:
        split = jnp.where(node[0] > 0, _COST_OF_SPLIT * (p + 1), 0)
        return _corrected(at(node, whole), values[node], vectors[node], models, split=split), None

    root = at(ancestor[0], whole)
    zero = jnp.zeros(num_leaves, rows.dtype)
    mean = _Models(jnp.zeros((num_leaves, p), rows.dtype), zero, zero + 1, zero, root.count, root.low, root.high)
    return jax.lax.scan(down, mean, ancestor)[0]


def _corrected(nodes: _Moments, values: Array, vectors: Array, parents: _Models, *, split: Array) -> _Models:
    """Models of one level, from its moments, their eigenvectors, and the parent's model of each node."""
    p = values.shape[1]
    count, c, alone = nodes.count, nodes.second[:, :p, p], nodes.second[:, p, p]
    x_mean, y_mean = nodes.mean[:, :p], nodes.mean[:, p]
    residual = c - jnp.einsum("lpq,lq->lp", nodes.second[:, :p, :p], parents.slopes, precision="highest")
    left = jnp.maximum(alone - (parents.slopes * (c + residual)).sum(1), 0)  # what the parent's slopes lose
    offset = y_mean - (parents.slopes * x_mean).sum(1) - parents.intercept
    values = jnp.maximum(values, 0)
    g = jnp.einsum("lpq,lp->lq", vectors, residual, precision="highest")
    bound = jnp.sqrt(values * left[:, None])  # Cauchy-Schwarz, which rounding may break where A is nearly singular
    g = jnp.clip(g, -bound, bound)

    # Every candidate of every node: (nodes, strengths of slopes, strengths of the level), then the node's own mean.
    solve = 1 / (values[:, None] + jnp.asarray(_SLOPES, c.dtype)[:, None])  # (nodes, strengths, p); 0 where infinite
    fitted = values[:, None] * solve
    moved = count[:, None] / jnp.maximum(count[:, None] + jnp.asarray(_LEVELS, c.dtype), jnp.finfo(c.dtype).tiny)
    rss = jnp.maximum(left[:, None] - (jnp.square(g)[:, None] * solve * (2 - fitted)).sum(2), 0)[:, :, None]
    rss = rss + (count[:, None] * jnp.square((1 - moved) * offset[:, None]))[:, None, :]
    own = fitted.sum(2)[:, :, None] + moved[:, None, :]
    df = own + _share(parents, count)[:, None, None] * (1 - own / (p + 1))
    flat = lambda table, last: jnp.concatenate([table.reshape(len(table), -1), last[:, None]], axis=1)
    rss, df = flat(rss, alone), flat(df, jnp.ones_like(alone)).at[:, 1:].add(split.astype(c.dtype))
    rss = jnp.maximum(rss, jnp.finfo(c.dtype).eps * alone[:, None])  # below lies rounding
    free = count[:, None] - df
    enough = free >= _LEAST_FREE * count[:, None]
    loss = jnp.where(enough, jnp.square(count)[:, None] * rss / jnp.square(jnp.where(enough, free, 1)), jnp.inf)
    # Where nothing else is left, and in an empty node, the first candidate stands: the parent's model as it is.
    loss = loss.at[:, 0].min(jnp.finfo(c.dtype).max)
    loss = jnp.where(count[:, None] > 0, loss, loss.at[:, 1:].set(jnp.inf))
    chosen = jnp.argmin(loss, axis=1)
    kept, own_mean = chosen == 0, chosen == loss.shape[1] - 1

    pick = lambda table, index: jnp.take_along_axis(table, index[:, None], axis=1)[:, 0]
    s, t = jnp.divmod(jnp.minimum(chosen, loss.shape[1] - 2), len(_LEVELS))
    solve = jnp.take_along_axis(solve, s[:, None, None], axis=1)[:, 0]
    slopes = parents.slopes + jnp.einsum("lpq,lq->lp", vectors, solve * g, precision="highest")
    slopes = jnp.where(own_mean[:, None], 0, slopes)
    # At the node's mean the answer moves from the parent's towards the mean of the targets.
    at_mean = y_mean - jnp.where(own_mean, 0, 1 - pick(moved, t)) * offset
    return _Models(
        slopes=slopes,
        intercept=jnp.where(kept, parents.intercept, at_mean - (slopes * x_mean).sum(1)),
        df=pick(df, chosen),
        error=jnp.where(count > 0, pick(loss, chosen), 0),
        count=count,
        low=jnp.where(kept, parents.low, nodes.low),
        high=jnp.where(kept, parents.high, nodes.high),
    )


def _share(parents: _Models, count: Array) -> Array:
    """The part of the parents' degrees of freedom that falls on each node, by the weight of its samples."""
    return parents.df * count / jnp.where(parents.count > 0, parents.count, 1)


def shrunk_fit_error(
    leaf_index: Int[Array, " n"],
    x: Float[Array, "n p"],
    y: Num[Array, " n"],
    num_leaves: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """Mean squared error to be expected on *new* samples of :func:`fit_shrunk`, by generalised cross-validation.

    A choice among models: no gradient flows through it.
    """
    x, y, sample_weight = jax.lax.stop_gradient((x, y, sample_weight))
    y = _floating(y).astype(x.dtype)
    weight = _ones(x.shape[0], sample_weight, x.dtype)
    rows, _, _ = _standardise(x, y, weight)
    return _fit_shrunk(rows, weight, leaf_index, num_leaves).error.sum() / weight.sum()


def fit_shrunk(
    leaf_index: Int[Array, " n"],
    x: Float[Array, "n p"],
    y: Num[Array, " n"],
    num_leaves: int,
    *,
    margin: float = 0.1,
    sample_weight: Float[Array, " n"] | None = None,
) -> LinearLeaves:
    """Linear leaves that shrink towards their ancestors' models, each by as much as cross-validation finds best.

    The root gets a ridge regression, every other node its parent's model and a ridge correction to it, down to the
    leaves; the strength of each correction is chosen by generalised cross-validation (Golub, Heath & Wahba 1979), no
    correction and a plain mean among the choices. A leaf with few samples so answers as its ancestors do, one without
    any exactly as its parent.

    Costs one decomposition of a ``(p, p)`` matrix for each of the ``2 leaves - 1`` nodes, and memory of a few times
    ``leaves p**2`` numbers. No gradient flows through it.

    Answers are clamped to the range of the training targets in the node that the leaf's model was fitted in (the leaf
    itself, or the nearest ancestor whose model it shares), widened on both sides by ``margin`` of that range.

    Args:
      leaf_index: leaf of each sample.
      x: samples, in any units.
      y: targets.
      num_leaves: number of leaves, a power of two.
      margin: see above, at least 0.
      sample_weight: nonnegative weights; a weight counts as that many samples.
    """
    x, y, sample_weight = jax.lax.stop_gradient((x, y, sample_weight))
    p = x.shape[1]
    y = _floating(y).astype(x.dtype)
    weight = _ones(x.shape[0], sample_weight, x.dtype)
    rows, mean, scale = _standardise(x, y, weight)
    models = _fit_shrunk(rows, weight, leaf_index, num_leaves)
    coefficients = models.slopes / scale[:p]
    intercept = mean[p] + models.intercept - (coefficients * mean[:p]).sum(1)
    widened = margin * (models.high - models.low)
    return LinearLeaves(coefficients, intercept, mean[p] + models.low - widened, mean[p] + models.high + widened)
