"""Linear leaves shrunk towards the models of their ancestors by generalised cross-validation.

One batched call decomposes a matrix for each node. There is no loop over leaves or samples.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num
import numpy as np

from jtrees import segments
from jtrees.leaves import moments
from jtrees.leaves.narrow import WIDEST, Narrowing, select_features
from jtrees.ridge import LEAST_FREE, decomposed
from jtrees.segments import floating, ones_or

# The model of a node is its parent's model plus a correction, which is fitted to the parent's residuals. Centre the
# data within the node, and let A = sum w x x', c = sum w x y, and e the mean residual. A correction with slopes d and
# level m e has the loss
#
#     RSS(d, m) = RSS_0 - 2 d.(c - A b) + d.A d + n (1 - m)**2 e**2,      b the parent's slopes.
#
# Ridge regression with strength s gives d = (A + s I)^-1 (c - A b). The unit of s is a sample, because features have
# unit variance. If A = Q diag(a) Q', every strength costs only sums over a. Let g = Q'(c - A b). Along eigenvector i,
# RSS falls by g_i**2 (a_i + 2 s) / (a_i + s)**2. The trace of the hat matrix is sum a_i / (a_i + s). The level is
# shrunk by the same rule, m = n / (n + t). Each node selects the pair (s, t) with the least generalised
# cross-validation,
#
#     GCV = n RSS / (n - df)**2     per sample.
# The candidates include infinite strengths (the parent's model unchanged) and the node's own mean (no slopes, df = 1).
#
# df is the sum of three parts:
#
# - d, the degrees of freedom of the correction.
# - The node's share of the degrees of freedom of its ancestors' fits. The correction leaves the part 1 - d / (p + 1)
#   of this share. The root's share is 1, for the mean of all targets.
# - The degrees of freedom of the split that created the node, because the split was fitted to the same samples. The
#   parent's model unchanged is exempt. The root has no split.
#
# A split has p + 1 parameters. It costs twice this number, because it was selected among many splits. (MARS charges 2
# to 3 per knot, Friedman 1991.) If splits cost nothing, the leaves of a deep tree fit the noise. If a split costs
# p + 1, they still fit the noise on data from a noisy plane. (tests/test_get.py compares with a linear regression.)
# The number n of samples of a node with uneven weights is Kish's effective number, (sum w)**2 / sum w**2, and the
# moments of the node are scaled to it. It is computed for each node: a heavy sample makes its own nodes small only.
#
# Everything is computed from moments of the leaves, merged upwards pair by pair, in one pass over the samples.

_SLOPES = np.array([np.inf, *10.0 ** np.arange(4, -2.5, -0.5)])  # s, in samples
_LEVELS = np.array([np.inf, 30.0, 10.0, 3.0, 0.0])  # t, in samples
_COST_OF_SPLIT = 2  # degrees of freedom for each of its p + 1 parameters
_MARGIN = 0.1  # extension of the range of outputs on both sides, as a fraction of its width


class _Models(NamedTuple):
    """Models of the nodes of a level, with their degrees of freedom, GCV losses, and ranges of targets."""

    # `low` and `high` belong to the node where the model was fitted. This node is the node itself, or the nearest
    # ancestor whose model it shares.

    slopes: Array
    intercept: Array
    df: Array
    error: Array
    count: Array
    low: Array
    high: Array


class _Node(NamedTuple):
    """Moments of the features and one target at m nodes. They determine the models of the nodes."""

    count: Array  # weight of the samples, (m,)
    x_mean: Array  # mean of the features, (m, p)
    y_mean: Array  # mean of the target, (m,)
    second: Array  # second moments of the features, (m, p, p)
    cross: Array  # moments of features and target, (m, p)
    alone: Array  # sum of squares of the target, (m,)
    values: Array  # eigenvalues of ``second``, (m, p)
    vectors: Array  # eigenvectors of ``second``, (m, p, p)
    low: Array  # smallest target, (m,)
    high: Array  # largest target, (m,)


class _Root(NamedTuple):
    """The model of the root: its slopes ``(p, k)``, degrees of freedom ``(k,)``, and number of features of its fit."""

    # A degree of freedom of the slopes of a correction costs `cost` degrees of freedom, (k,).

    slopes: Any
    df: Any
    width: Any
    cost: Any


_ROOT_AXES: Any = _Root(1, 0, None, 0)
_OUTPUT_AXES: Any = (None, None, 1, None, 2, 1, None, None, 1, 1)  # of the moments of all outputs


def _standardised(x: Array, y: Array, sample_weight: Array | None) -> tuple[Array, Array, Array, Array]:
    """Returns standardised features joined with targets, the weights, and the mean and scale of the columns."""
    # All columns are centred. Features have unit variance, except that constant features are 0. Gradients are stopped.
    x, y, sample_weight = jax.lax.stop_gradient((x, y, sample_weight))
    weight = segments.mean_one(ones_or(sample_weight, x))
    joined = jnp.concatenate([x, floating(y).astype(x.dtype).reshape(len(x), -1)], axis=1)
    mean_of = lambda columns: segments.total(weight[:, None] * columns) / segments.total(weight)
    mean = mean_of(joined)
    variance = mean_of(jnp.square(joined - mean))
    rounding = jnp.square(16 * jnp.finfo(x.dtype).eps * mean)  # rounding error in a constant column's variance
    scale = jnp.where(variance > rounding, jnp.sqrt(variance), jnp.inf).at[x.shape[1] :].set(1)
    return (joined - mean) / scale, weight, mean, scale


@partial(jax.jit, static_argnums=(1, 4))  # traced once, for all uses within a program
def _fit_shrunk(rows: Array, p: int, weight: Array, leaf_index: Array, num_leaves: int, root: _Root | None) -> _Models:
    """Returns the models of the leaves, outputs first. ``rows`` holds p standardised features and k targets."""
    # `root` is the model of the root; None: it is fitted.
    leaves = moments.of_leaves(rows, p, weight, leaf_index, num_leaves)
    nodes = moments.effective(moments.with_ancestors(leaves))
    means, features, zero = nodes.mean, nodes.second[:, :p, :p], jnp.zeros(num_leaves, rows.dtype)
    cross, alone = nodes.second[:, :p, p:], jnp.diagonal(nodes.second[:, p:, p:], axis1=1, axis2=2)
    inputs = nodes.count, means[:, :p], means[:, p:], features, cross, alone
    all_outputs = _Node(*inputs, *decomposed(features), nodes.low, nodes.high)

    # In the compiled loop over levels, every leaf evaluates its own ancestor. Nodes near the root are repeated, which
    # costs little. The size of the program does not depend on the depth, which saves seconds of compilation.
    def models_of_output(output: _Node, root: _Root | None) -> _Models:
        def down(models: _Models, level: tuple[Array, Array]) -> tuple[_Models, None]:
            node, split = level
            level_moments = jax.tree.map(lambda a: jnp.take(a, node, axis=0, mode="clip"), output)
            return _corrected(level_moments, models, split=split, width=width, cost=cost), None

        slopes, df, width, cost = root or (jnp.zeros(p, rows.dtype), jnp.ones((), rows.dtype), p, 1)
        repeated = (jnp.broadcast_to(a[num_leaves - 1], num_leaves) for a in (output.count, output.low, output.high))
        first = _Models(jnp.broadcast_to(slopes, (num_leaves, p)), zero, zero + df, zero, *repeated)
        ancestors = moments.ancestors(num_leaves)
        splits = np.where(np.arange(len(ancestors)) > 0, _COST_OF_SPLIT * (p + 1), 0).astype(rows.dtype)
        fitted = 0 if root is None else 1
        models = jax.lax.scan(down, first, (jnp.asarray(ancestors[fitted:]), jnp.asarray(splits[fitted:])))[0]
        # The errors of leaves add up by weight, and not by the effective number of samples.
        per_sample = leaves.count / jnp.where(models.count > 0, models.count, 1)
        return models._replace(error=per_sample * models.error)

    axes = _Node(*_OUTPUT_AXES), None if root is None else _ROOT_AXES
    return jax.vmap(models_of_output, in_axes=axes)(all_outputs, root)


def _corrected(node: _Node, parents: _Models, *, split: Array, width: Any, cost: Any) -> _Models:
    """Returns the models of a level from the level's moments and the parents' models."""
    # `split` is the number of degrees of freedom of a split, and `width` the number of features of the root's model.
    # `cost` is as in `_Root`.
    count, tiny = node.count, jnp.finfo(node.count.dtype)
    residual = node.cross - jnp.einsum("lpq,lq->lp", node.second, parents.slopes, precision="highest")
    left = jnp.maximum(node.alone - (parents.slopes * (node.cross + residual)).sum(1), 0)
    offset = node.y_mean - (parents.slopes * node.x_mean).sum(1) - parents.intercept
    values = jnp.maximum(node.values, 0)
    g = jnp.einsum("lpq,lp->lq", node.vectors, residual, precision="highest")
    bound = jnp.sqrt(values * left[:, None])  # Cauchy-Schwarz, which rounding may violate for nearly singular A
    g = jnp.clip(g, -bound, bound)

    # The candidates: pairs of strengths, ``(nodes, strengths s, strengths t)``, and the node's own mean, ``(nodes,)``.
    slopes_s, levels_t = jnp.asarray(_SLOPES, count.dtype), jnp.asarray(_LEVELS, count.dtype)
    share = parents.df * jnp.minimum(count / jnp.where(parents.count > 0, parents.count, 1), 1)
    solve = 1 / (values[:, None] + slopes_s[:, None])  # 0 where the strength is infinite
    fitted = values[:, None] * solve
    moved_by = lambda t: count / jnp.maximum(count + t, tiny.tiny)
    moved = jax.vmap(moved_by, out_axes=1)(levels_t)
    rss = jnp.maximum(left[:, None] - (jnp.square(g)[:, None] * solve * (2 - fitted)).sum(2), 0)[:, :, None]
    rss = rss + (count[:, None] * jnp.square((1 - moved) * offset[:, None]))[:, None, :]
    correction_df = fitted.sum(2)[:, :, None] + moved[:, None, :]
    unchanged = np.arange(len(_SLOPES) * len(_LEVELS)).reshape(len(_SLOPES), len(_LEVELS)) == 0
    ancestor_df = share[:, None, None] * (1 - correction_df / (width + 1))
    df = cost * fitted.sum(2)[:, :, None] + moved[:, None, :] + ancestor_df + jnp.where(unchanged, 0, split)

    def criterion(rss: Array, df: Array) -> Array:
        """Returns n times GCV, ``(..., nodes)``."""
        free = count - df
        enough = (free >= LEAST_FREE * count) & (count > 0)
        rss = jnp.maximum(rss, tiny.eps * node.alone)  # the rounding error
        # Divide before squaring: squares of small weights underflow in float32.
        return jnp.where(enough, jnp.square(count / jnp.where(enough, free, 1)) * rss, jnp.inf)

    loss = jax.vmap(jax.vmap(criterion, 1, 1), 2, 2)(rss, df)
    # The first candidate is the parent's model unchanged. It wins in an empty node, or if all candidates are infinite.
    loss = jnp.where(unchanged, jnp.minimum(loss, tiny.max), loss).reshape(len(loss), -1)
    chosen, best_loss, mean_loss = jnp.argmin(loss, axis=1), loss.min(1), criterion(node.alone, 1 + split)
    is_mean = mean_loss < best_loss
    is_parent = (chosen == 0) & ~is_mean
    s, t = jax.lax.div(chosen, len(_LEVELS)), jax.lax.rem(chosen, len(_LEVELS))
    chosen_df = jnp.take_along_axis(df.reshape(loss.shape), chosen[:, None], axis=1)[:, 0]
    slopes = g / (values + slopes_s[s][:, None])
    slopes = parents.slopes + jnp.einsum("lpq,lq->lp", node.vectors, slopes, precision="highest")
    slopes = jnp.where(is_mean[:, None], 0, slopes)
    # At the node's mean, the output moves from the parent's output towards the mean of the targets.
    output = node.y_mean - jnp.where(is_mean, 0, 1 - moved_by(levels_t[t])) * offset
    return _Models(
        slopes=slopes,
        intercept=jnp.where(is_parent, parents.intercept, output - (slopes * node.x_mean).sum(1)),
        df=jnp.where(is_mean, 1 + split, chosen_df),
        error=jnp.where(count > 0, jnp.minimum(best_loss, mean_loss), 0),
        count=count,
        low=jnp.where(is_parent, parents.low, node.low),
        high=jnp.where(is_parent, parents.high, node.high),
    )


def fit_shrunk(
    leaf_index: Int[Array, " n"],
    x: Float[Array, "n p"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    *,
    sample_weight: Float[Array, " n"] | None = None,
    narrowing: Narrowing | None = None,
) -> tuple[tuple[Array, Array, Array, Array], Float[Array, ""]]:
    """Returns linear leaves that are shrunk towards the models of their ancestors, and their error on new samples.

    The root has a ridge regression. Every other node has its parent's model plus a ridge correction. Generalised
    cross-validation (Golub, Heath & Wahba 1979) selects the strength of each correction, for each output separately.
    The candidates include no correction and the node's mean. A leaf with few samples therefore predicts almost the same
    as its ancestors. An empty leaf predicts exactly the same as its parent.

    The cost is one decomposition of a ``(p, p)`` matrix for each of the ``2 leaves - 1`` nodes. The memory is a few
    times ``leaves p**2`` numbers per output. No gradient flows through the fit.

    If there are more than 64 features, the nodes below the root correct the ridge regression of the root along 64
    features only. These are the output of the ridge regression, and the columns that matter most to the target.
    Cross-validation charges a slope of such a column more than one degree of freedom, because the columns were
    selected. The cost of the fit is one decomposition of a matrix of the shorter side of x, and one of a ``(64, 64)``
    matrix for each node.

    Outputs are clipped to the range of the training targets in the node where the leaf's model was fitted. This node is
    the leaf itself, or the nearest ancestor whose model the leaf shares. The range is extended on both sides by a tenth
    of its width.

    Args:
      leaf_index: leaf of each sample.
      x: samples, in any units.
      y: targets, ``(n,)`` or ``(n, k)``.
      num_leaves: number of leaves, a power of two.
      sample_weight: nonnegative weights, of which only the ratios matter. Uneven weights count as fewer samples: a node
        has ``(sum w)^2 / sum w^2`` samples (Kish).
      narrowing: the map to 64 features of these samples. None: it is computed if x has more features.

    Returns:
      Coefficients, intercepts, lower and upper bounds: the fields of :class:`jtrees.leaves.Linear`. And the expected
      mean squared error on new samples by generalised cross-validation, averaged over the outputs.

    Example:
      >>> x = jnp.linspace(-1, 1, 20)[:, None]
      >>> leaf = (x[:, 0] > 0).astype(int)
      >>> (coefficients, *_), error = jtrees.leaves.fit_shrunk(leaf, x, jnp.abs(x[:, 0]), 2)
      >>> print(np.asarray(coefficients).round(1).T, error < 1e-4)
      [[-1.  1.]] True
    """
    if narrowing is None and x.shape[1] > WIDEST:
        narrowing = fit_narrowing(x, y, sample_weight)
    if narrowing is not None:
        x = jnp.matmul(x, narrowing.matrix, precision="highest")
    p = x.shape[1]
    rows, weight, mean, scale = _standardised(x, y, sample_weight)
    root = None
    if narrowing is not None:
        # A direction without variance has no slope, although its scale is infinite.
        slopes = narrowing.slopes * jnp.where(jnp.isfinite(scale[:p]), scale[:p], 0)[:, None]
        root = _Root(slopes, narrowing.df, len(narrowing.matrix), narrowing.cost)
    models = _fit_shrunk(rows, p, weight, leaf_index, num_leaves, root)
    coefficients = models.slopes / scale[:p]
    intercept = mean[p:, None] + models.intercept - (coefficients * mean[:p]).sum(2)
    if narrowing is not None:
        coefficients = jnp.einsum("pq,klq->klp", narrowing.matrix, coefficients, precision="highest")
    widened = _MARGIN * (models.high - models.low)
    lower, upper = mean[p:, None] + models.low - widened, mean[p:, None] + models.high + widened
    last = lambda a: a[0] if y.ndim == 1 else jnp.moveaxis(a, 0, -1)  # outputs last
    error = models.error.sum() / (segments.total(weight) * len(models.error))
    return (last(coefficients), last(intercept), last(lower), last(upper)), error


def fit_narrowing(x: Array, y: Array, sample_weight: Array | None = None) -> Narrowing:
    """Returns the map to the few features that the leaves of :func:`fit_shrunk` use, of more than ``WIDEST``."""
    rows, weight, _, scale = _standardised(x, y, sample_weight)
    p = x.shape[1]
    return select_features(rows[:, :p], rows[:, p:], weight, scale[:p])
