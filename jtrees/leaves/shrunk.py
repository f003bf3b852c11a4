"""Linear leaves shrunk towards the models of their ancestors by generalised cross-validation.

One batched call decomposes a matrix for each node; there is no loop over leaves or samples.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num
import numpy as np

from jtrees.leaves import moments
from jtrees.leaves.constant import floating, ones_or
from jtrees.leaves.moments import Moments

# The model of a node is that of its parent plus a correction, fitted to the parent's residuals. Centred within
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
# targets. A split has p + 1 parameters and is charged twice as many, because it was chosen among many (MARS charges 2
# to 3 per knot, Friedman 1991). Uncharged, leaves of a deep tree fit the noise; charged once, they still do for data
# from a noisy plane (tests/test_get.py compares with a linear regression there). Everything is computed from moments of
# the leaves, merged upwards pair by pair, in one pass over the samples.

_SLOPES = np.array([np.inf, *10.0 ** np.arange(4, -2.5, -0.5)])  # s, in samples
_LEVELS = np.array([np.inf, 30.0, 10.0, 3.0, 0.0])  # t, in samples
_COST_OF_SPLIT = 2  # degrees of freedom for each of its p + 1 parameters
_LEAST_FREE = 0.1  # fraction of a node's samples: with fewer residual degrees of freedom GCV approaches 0 / 0


class _Models(NamedTuple):
    """Models of the nodes of a level, with their degrees of freedom, GCV losses, and ranges of targets.

    ``low`` and ``high`` are those of the node that the model was fitted in: the node itself, or the nearest ancestor
    whose model it shares.
    """

    slopes: Array
    intercept: Array
    df: Array
    error: Array
    count: Array
    low: Array
    high: Array


def _standardised(x: Array, y: Array, sample_weight: Array | None) -> tuple[Array, Array, Array, Array]:
    """Returns features and targets joined and centred, features with unit variance (constant ones 0), with weights, and
    mean and scale of the columns; stops gradients.
    """
    x, y, sample_weight = jax.lax.stop_gradient((x, y, sample_weight))
    weight = ones_or(sample_weight, len(x), x.dtype)
    joined = jnp.concatenate([x, floating(y).astype(x.dtype).reshape(len(x), -1)], axis=1)
    mean = jnp.matmul(weight, joined, precision="highest") / weight.sum()
    variance = jnp.matmul(weight, jnp.square(joined - mean), precision="highest") / weight.sum()
    rounding = jnp.square(16 * jnp.finfo(x.dtype).eps * mean)  # variance of a constant column by rounding
    scale = jnp.where(variance > rounding, jnp.sqrt(variance), jnp.inf).at[x.shape[1] :].set(1)
    return (joined - mean) / scale, weight, mean, scale


def _of_output(nodes: Moments, p: int, j: Array) -> Moments:
    """Returns the moments of the features and one target."""
    kept = jnp.append(jnp.arange(p), p + j)
    second = nodes.second[:, kept[:, None], kept]
    return Moments(nodes.count, nodes.mean[:, kept], second, nodes.low[:, j], nodes.high[:, j])


def _decomposed(matrices: Array) -> tuple[Array, Array]:
    """Returns eigenvalues and eigenvectors of symmetric matrices ``(nodes, p, p)``.

    On a CPU one by one, even under ``vmap``: a worker of XLA's thread pool distributes a batch and waits for the other
    workers, which deadlocks if all of them wait, as can happen with two devices (jaxlib 0.10.2: ``ParallelBatchMap``).
    """
    decomposed = lambda a: tuple(jnp.linalg.eigh(a))
    each = lambda all_: jax.lax.map(jax.custom_batching.sequential_vmap(decomposed), all_)
    return jax.lax.platform_dependent(matrices, cpu=each, default=decomposed)


def _fit_shrunk(rows: Array, p: int, weight: Array, leaf_index: Array, num_leaves: int) -> _Models:
    """Returns models of the leaves, outputs first; ``rows`` are p standardised features and k targets."""
    levels = moments.of_levels(moments.of_leaves(rows, p, weight, leaf_index, num_leaves))
    joint: Moments = jax.tree.map(lambda *parts: jnp.concatenate(parts), *levels)
    values, vectors = _decomposed(joint.second[:, :p, :p])

    # A compiled loop over levels, in which every leaf evaluates its own ancestor: repeating nodes near the root costs
    # little, and the program does not grow with the depth, which would cost seconds of compilation.
    depth = len(levels) - 1
    ancestor = np.arange(num_leaves) >> np.arange(depth, -1, -1)[:, None]
    ancestor = jnp.asarray(ancestor + 2 ** np.arange(depth + 1)[:, None] - 1)
    at = lambda node, table: jax.tree.map(lambda a: a[node], table)

    def one_output(j: Array) -> _Models:
        whole = _of_output(joint, p, j)

        def down(models: _Models, node: Array) -> tuple[_Models, None]:
            split = jnp.where(node[0] > 0, _COST_OF_SPLIT * (p + 1), 0)
            return _corrected(at(node, whole), values[node], vectors[node], models, split=split), None

        root, zero = at(ancestor[0], whole), jnp.zeros(num_leaves, rows.dtype)
        mean = _Models(jnp.zeros((num_leaves, p), rows.dtype), zero, zero + 1, zero, root.count, root.low, root.high)
        return jax.lax.scan(down, mean, ancestor)[0]

    return jax.vmap(one_output)(jnp.arange(rows.shape[1] - p))


def _candidates(
    nodes: Moments, values: Array, g: Array, left: Array, offset: Array, share: Array, split: Array
) -> tuple[Array, Array, Array, Array]:
    """Returns the candidate corrections of a level: each pair of strengths, and last the node's own mean.

    Args:
      nodes: moments of features and target.
      values: eigenvalues of the features' second moments.
      g: residual moments along the eigenvectors, ``(nodes, p)``.
      left: residual sum of squares of the parent's slopes, ``(nodes,)``.
      offset: mean residual.
      share: the node's share of the parent's degrees of freedom.
      split: degrees of freedom of the split.

    Returns:
      n times GCV and degrees of freedom, ``(nodes, candidates)``; ``1 / (a + s)``, ``(nodes, strengths s, p)``; and
      ``n / (n + t)``, ``(nodes, strengths t)``.
    """
    count, alone, p = nodes.count, nodes.second[:, -1, -1], values.shape[1]
    solve = 1 / (values[:, None] + jnp.asarray(_SLOPES, count.dtype)[:, None])  # 0 where the strength is infinite
    fitted = values[:, None] * solve
    moved = count[:, None] / jnp.maximum(
        count[:, None] + jnp.asarray(_LEVELS, count.dtype), jnp.finfo(count.dtype).tiny
    )
    rss = jnp.maximum(left[:, None] - (jnp.square(g)[:, None] * solve * (2 - fitted)).sum(2), 0)[:, :, None]
    rss = rss + (count[:, None] * jnp.square((1 - moved) * offset[:, None]))[:, None, :]
    own = fitted.sum(2)[:, :, None] + moved[:, None, :]
    df = own + share[:, None, None] * (1 - own / (p + 1))
    flat = lambda table, last: jnp.concatenate([table.reshape(len(table), -1), last[:, None]], axis=1)
    rss, df = flat(rss, alone), flat(df, jnp.ones_like(alone)).at[:, 1:].add(split.astype(count.dtype))
    rss = jnp.maximum(rss, jnp.finfo(count.dtype).eps * alone[:, None])  # the rounding error
    free = count[:, None] - df
    enough = free >= _LEAST_FREE * count[:, None]
    # Divide before squaring: squares of small weights underflow in float32.
    loss = jnp.where(enough, jnp.square(count[:, None] / jnp.where(enough, free, 1)) * rss, jnp.inf)
    # Without an alternative, and in an empty node, choose the first candidate, the parent's model unchanged.
    loss = loss.at[:, 0].min(jnp.finfo(count.dtype).max)
    return jnp.where(count[:, None] > 0, loss, loss.at[:, 1:].set(jnp.inf)), df, solve, moved


def _corrected(nodes: Moments, values: Array, vectors: Array, parents: _Models, *, split: Array) -> _Models:
    """Returns the models of one level from its moments, their eigenvectors, and the parents' models."""
    p = values.shape[1]
    c, x_mean, y_mean = nodes.second[:, :p, p], nodes.mean[:, :p], nodes.mean[:, p]
    residual = c - jnp.einsum("lpq,lq->lp", nodes.second[:, :p, :p], parents.slopes, precision="highest")
    left = jnp.maximum(nodes.second[:, p, p] - (parents.slopes * (c + residual)).sum(1), 0)
    offset = y_mean - (parents.slopes * x_mean).sum(1) - parents.intercept
    values = jnp.maximum(values, 0)
    g = jnp.einsum("lpq,lp->lq", vectors, residual, precision="highest")
    bound = jnp.sqrt(values * left[:, None])  # Cauchy-Schwarz, which rounding may violate for nearly singular A
    g = jnp.clip(g, -bound, bound)

    share = parents.df * nodes.count / jnp.where(parents.count > 0, parents.count, 1)
    loss, df, solve, moved = _candidates(nodes, values, g, left, offset, share, split)
    chosen = jnp.argmin(loss, axis=1)
    kept, own_mean = chosen == 0, chosen == loss.shape[1] - 1
    pick = lambda table, index: jnp.take_along_axis(table, index[:, None], axis=1)[:, 0]
    s, t = jnp.divmod(jnp.minimum(chosen, loss.shape[1] - 2), len(_LEVELS))
    solve = jnp.take_along_axis(solve, s[:, None, None], axis=1)[:, 0]
    slopes = parents.slopes + jnp.einsum("lpq,lq->lp", vectors, solve * g, precision="highest")
    slopes = jnp.where(own_mean[:, None], 0, slopes)
    # The output at the node's mean moves from the parent's towards the mean of the targets.
    at_mean = y_mean - jnp.where(own_mean, 0, 1 - pick(moved, t)) * offset
    return _Models(
        slopes=slopes,
        intercept=jnp.where(kept, parents.intercept, at_mean - (slopes * x_mean).sum(1)),
        df=pick(df, chosen),
        error=jnp.where(nodes.count > 0, pick(loss, chosen), 0),
        count=nodes.count,
        low=jnp.where(kept, parents.low, nodes.low),
        high=jnp.where(kept, parents.high, nodes.high),
    )


def shrunk_fit_error(
    leaf_index: Int[Array, " n"],
    x: Float[Array, "n p"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
) -> Float[Array, ""]:
    """Returns the mean squared error of :func:`fit_shrunk` expected on *new* samples, by generalised cross-validation;
    of several outputs the mean. No gradient flows through it.

    Example:
      >>> x = jnp.linspace(-1, 1, 20)[:, None]
      >>> leaf = (x[:, 0] > 0).astype(int)
      >>> print(jtrees.leaves.shrunk_fit_error(leaf, x, jnp.abs(x[:, 0]), 2) < 1e-4)
      True
    """
    rows, weight, _, _ = _standardised(x, y, sample_weight)
    error = _fit_shrunk(rows, x.shape[1], weight, leaf_index, num_leaves).error
    return error.sum() / (weight.sum() * len(error))


def fit_shrunk(
    leaf_index: Int[Array, " n"],
    x: Float[Array, "n p"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    margin: float = 0.1,
    sample_weight: Float[Array, " n"] | None = None,
) -> tuple[
    Float[Array, "leaves p *k"], Float[Array, "leaves *k"], Float[Array, "leaves *k"], Float[Array, "leaves *k"]
]:
    """Returns linear leaves shrunk towards the models of their ancestors by generalised cross-validation.

    The root has a ridge regression, every other node its parent's model plus a ridge correction, down to the leaves.
    The strength of each correction is chosen by generalised cross-validation (Golub, Heath & Wahba 1979), for each
    output separately, with no correction and the node's mean among the candidates. So a leaf with few samples predicts
    nearly as its ancestors, an empty one exactly as its parent.

    Costs one decomposition of a ``(p, p)`` matrix for each of the ``2 leaves - 1`` nodes, and memory of a few times
    ``leaves p**2`` numbers per output. No gradient flows through it.

    Outputs are clipped to the range of the training targets in the node that the leaf's model was fitted in (the leaf
    itself, or the nearest ancestor whose model it shares), extended on both sides by ``margin`` of that range.

    Args:
      leaf_index: leaf of each sample.
      x: samples, in any units.
      y: targets, ``(n,)`` or ``(n, k)``.
      num_leaves: number of leaves, a power of two.
      margin: see above, at least 0.
      sample_weight: nonnegative weights; a weight counts as that many samples.

    Returns:
      Coefficients, intercepts, lower and upper bounds: the fields of :class:`jtrees.leaves.Linear`.

    Example:
      >>> x = jnp.linspace(-1, 1, 20)[:, None]
      >>> leaf = (x[:, 0] > 0).astype(int)
      >>> coefficients, *_ = jtrees.leaves.fit_shrunk(leaf, x, jnp.abs(x[:, 0]), 2)
      >>> print(np.asarray(coefficients).round(1).T)
      [[-1.  1.]]
    """
    p = x.shape[1]
    rows, weight, mean, scale = _standardised(x, y, sample_weight)
    models = _fit_shrunk(rows, p, weight, leaf_index, num_leaves)
    coefficients = models.slopes / scale[:p]
    intercept = mean[p:, None] + models.intercept - (coefficients * mean[:p]).sum(2)
    widened = margin * (models.high - models.low)
    lower, upper = mean[p:, None] + models.low - widened, mean[p:, None] + models.high + widened
    last = lambda a: a[0] if y.ndim == 1 else jnp.moveaxis(a, 0, -1)  # outputs last
    return last(coefficients), last(intercept), last(lower), last(upper)
