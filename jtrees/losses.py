"""Losses over leaves that optax.losses lacks, and the fused pass that trains a soft tree.

A *leaf loss* is a function ``(leaves, x, y) -> (leaves, n)``: what each leaf would lose on each sample. Any such
function makes an objective with :func:`expected_leaf_loss`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import optax

from jtrees import blocking, topology
from jtrees.routing.hard import leaf_index
from jtrees.routing.soft import leaf_weights

LeafLosses = Callable[[Any, jax.Array, jax.Array], jax.Array]
SampleLoss = Callable[[jax.Array, jax.Array], jax.Array]  # outputs (n,) or (n, k), targets -> (n,)
Route = Callable[[jax.Array], jax.Array]  # scores (nodes, n) -> probabilities of the leaves (leaves, n)


def squared_error(leaves: Any, x: Float[Array, "n p"], y: Float[Array, " n"]) -> Float[Array, "leaves n"]:
    """Squared error of every leaf's prediction on every sample.

    Args:
      leaves: ``ConstantLeaves`` with one value a leaf, or ``LinearLeaves``.
      x: samples.
      y: targets.
    """
    return jnp.square(y - leaves.outputs(x))


def log_loss(leaves: Any, x: Float[Array, "n p"], y: Int[Array, " n"]) -> Float[Array, "leaves n"]:
    """Log loss of every leaf's softmax on every sample.

    Args:
      leaves: ``ConstantLeaves`` with the logits of k classes, ``(leaves, k)``.
      x: samples (not looked at).
      y: classes from 0 to k - 1.
    """
    # A product with one-hot rows, not a gather: its transpose is then a product too, not a scatter.
    one_hot = jax.nn.one_hot(y, leaves.values.shape[1], axis=0, dtype=leaves.values.dtype)
    return -jnp.matmul(jax.nn.log_softmax(leaves.values, axis=1), one_hot, precision="highest")


def sample_loss(loss: Any, classes: int | None) -> SampleLoss:
    """The loss of outputs on each sample: that given, or squared error (of several outputs the mean), or in
    classification the log loss of logits.

    Raises:
      ValueError: for a loss that is no function.
    """
    if loss is None:
        return _squared if classes is None else optax.losses.softmax_cross_entropy_with_integer_labels
    if not callable(loss):
        raise ValueError(f"loss must be a function (outputs, y) -> (n,), got {loss!r}")
    return loss  # type: ignore[return-value]


def _squared(outputs: Float[Array, "n *k"], y: Float[Array, "n *k"]) -> Float[Array, " n"]:
    error = jnp.square(outputs - y)
    return error if error.ndim == 1 else error.mean(axis=1)


def expected_leaf_loss(
    weights: Float[Array, "nodes p"],
    bias: Float[Array, " nodes"],
    leaves: Any,
    x: Float[Array, "n p"],
    y: Array,
    *,
    leaf_losses: LeafLosses = squared_error,
    sample_weight: Float[Array, " n"] | None = None,
    route: Route | None = None,
) -> tuple[Float[Array, ""], Int[Array, " n"]]:
    """Loss that a soft tree expects, and the leaf that each sample reaches when the routing is hard.

    ``L = sum_i w_i sum_l P_il loss_l(x_i, y_i) / sum_i w_i``, with ``P_il`` the product over the ancestors of leaf
    ``l`` of ``sigma(z_ij)`` or ``1 - sigma(z_ij)`` and ``z_ij = weights_j . x_i + bias_j`` (GET, Mao & Cao 2024,
    eq. 7, for the squared error). A scaled sigmoid is had by scaling ``weights`` and ``bias``, which leaves the hard
    routing as it is.

    The rule of its own works through the samples in blocks and computes value, gradient and hard routing in one visit:
    two matrix products and one sigmoid a node, the rest additions. Reverse mode only; gradients flow to ``weights``,
    ``bias`` and ``leaves``, not to the data.

    Args:
      weights: split weights.
      bias: split biases.
      leaves: any pytree that ``leaf_losses`` understands.
      x: samples.
      y: targets, first axis n.
      leaf_losses: ``(leaves, x, y) -> (leaves, n)``.
      sample_weight: nonnegative weights of the samples, by default all equal.
      route: another soft routing than the sigmoid's: scores ``(nodes, n)`` -> probabilities of the leaves
        ``(leaves, n)``. Its gradient is found by automatic differentiation, block by block too.

    Returns:
      The loss, and leaf numbers ``(n,)`` in int32.
    """
    n = x.shape[0]
    weight = jnp.full(n, 1 / n, x.dtype)
    if sample_weight is not None:  # a mini-batch may have no weight at all, and then loses nothing
        weight = sample_weight / jnp.maximum(sample_weight.sum(), jnp.finfo(sample_weight.dtype).tiny)
    data = jax.lax.stop_gradient((x, y, weight))
    return _expected_leaf_loss(leaf_losses, route, weights, bias, leaves, *data)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _expected_leaf_loss(leaf_losses, route, weights, bias, leaves, x, y, weight):
    # What is not asked for (the gradient) the compiler leaves out.
    return _expected_leaf_loss_fwd(leaf_losses, route, weights, bias, leaves, x, y, weight)[0]


# The gradient. Let R_l = w P_l loss_l at a leaf and R_j = R_left + R_right above: the loss that passes through node j,
# already weighted by the probability of getting there. With s = sigma(z_j), every R below on the right holds one
# factor s and every R below on the left one factor 1 - s, whose derivatives are s (1 - s) and -s (1 - s). Hence
#     dL/dz_j = (1 - s) R_right(j) - s R_left(j),
# with no division and nothing but sums to fold; and dL/dloss_l = w P_l.
#
# Three things make this fast on a CPU, all measured: the sum over a pair is a reduction, which the compiler does not
# compute again for every consumer as it does a chain of slices and additions; each level meets x in a product of its
# own, because joining the levels first costs more than the products; and value, gradient and hard routing share one
# visit, so the forward rule computes the gradient and the backward rule only scales it.
def _expected_leaf_loss_fwd(leaf_losses, route, weights, bias, leaves, x, y, weight):
    joined = jnp.concatenate([weights, bias[:, None]], axis=1)

    def by_sigmoid(weight, x, y):
        with_one = _with_one(x)
        scores = jnp.matmul(joined, with_one.T, precision="highest")  # as in routing.hard: signs matter
        right = jax.nn.sigmoid(scores)
        reach = leaf_weights(right, weight)
        loss, pull_back = jax.vjp(lambda leaves: leaf_losses(leaves, x, y), leaves)
        lost, d_joined = reach * loss, []
        for s in reversed(topology.levels(right)):
            below = topology.pairs(lost)
            d_joined.append(((1 - s) * below[:, 1] - s * below[:, 0]) @ with_one)
            lost = below.sum(1)
        gradient = jnp.concatenate(d_joined[::-1]), *pull_back(reach)
        return (lost.sum(), gradient), leaf_index(scores)

    def by_route(weight, x, y):
        def loss(joined, leaves):
            scores = jnp.matmul(joined, _with_one(x).T, precision="highest")
            return (weight * route(scores) * leaf_losses(leaves, x, y)).sum(), leaf_index(scores)

        (value, leaf), gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(joined, leaves)
        return (value, gradient), leaf

    block = by_sigmoid if route is None else by_route
    block_size = blocking.block_size(weights.shape[0], x.shape[0])
    (loss, (d_joined, d_leaves)), leaf = blocking.sum_over_blocks(block, weight, x, y, block=block_size)
    return (loss, leaf), (d_joined[:, :-1], d_joined[:, -1], d_leaves)


def _with_one(x):
    return jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)


def _expected_leaf_loss_bwd(leaf_losses, route, gradient, cotangents):
    scaled = jax.tree.map(lambda g: cotangents[0] * g, gradient)
    return *scaled, None, None, None


_expected_leaf_loss.defvjp(_expected_leaf_loss_fwd, _expected_leaf_loss_bwd)
