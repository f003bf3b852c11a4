"""The expected loss of a soft tree, with its derivative written out."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrees import blocking, routing, sharding, topology
from jtrees.routing import sharp
from jtrees.routing.by_level import with_one
from jtrees.routing.soft import leaf_weights
import pallas_kernels as kernels


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def expected(leaf_losses, route, how, *operands):
    """Returns the loss that a soft tree expects, and the leaf of each sample: :func:`jtrees.ops.expected_loss`.

    Args:
      leaf_losses: function of the losses of the leaves, or None.
      route: the routing.
      how: XLA or a kernel, from :func:`jtrees._implementations.choose`.
      *operands: weights, bias, leaves, x, y, and the share of each sample.
    """
    # What is not asked for (the gradient) the compiler leaves out, but for a kernel, which computes all at once.
    (loss, _), leaf = _visited(leaf_losses, route, how, *operands)
    return loss, leaf


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
def _forward(leaf_losses, route, how, *given):
    operands = jax.tree.map(lambda one: one.value, given)
    (loss, gradient), leaf = _visited(leaf_losses, route, how, *operands)
    of_data = tuple(one.perturbed for one in given[3:])
    return (loss, leaf), (*gradient, *_data_gradient(leaf_losses, route, of_data, *operands))


def _visited(leaf_losses, route, how, *operands):
    """Returns the loss, its gradient for splits and leaves, and the leaf that each sample reaches."""
    visit = partial(_visit, leaf_losses, route)
    fused = lambda how, *operands: sharding.each_part(partial(_visit_fused, route, how), *operands, rows=(3, 4, 5))
    return kernels.run(how, fused, visit, *operands)


# Of a sample the loss is w sum_l P_l loss_l, whose derivative for z is as above, so that the one for x is a product
# with the splits, and that of the losses of leaves which depend on x. For w it is the expected loss itself.
def _data_gradient(leaf_losses, route, wanted, weights, bias, leaves, x, y, share):
    """Returns the gradient for those of x, y and share that are wanted, else None."""
    if not any(wanted):
        return None, None, None
    losses_of = leaf_losses or (lambda leaves, x, y: leaves.losses(x, y))

    some = [place for place in (0, 1) if wanted[place]]

    def of_block(share, *data):
        def by_sample(*chosen):
            at_x, at_y = (chosen[some.index(place)] if place in some else data[place] for place in (0, 1))
            z = jnp.matmul(weights, at_x.T, precision="highest") + bias[:, None]
            lost = losses_of(leaves, at_x, at_y)
            if route == "sigmoid":
                return routing.expected_value(jax.nn.sigmoid(z), lost)
            return (leaf_probabilities(route, z) * lost).sum(0)

        expected, pull_back = jax.vjp(by_sample, *(data[place] for place in some))
        found = dict(zip(some, pull_back(share.astype(expected.dtype)), strict=True))
        return (), (found.get(0), found.get(1), expected.astype(share.dtype) if wanted[2] else None)

    size = blocking.block_size(weights.shape[0], x.shape[0])
    return blocking.sum_over_blocks(of_block, share, x, y, block=size)[1]


def _visit_fused(route, how, weights, bias, leaves, x, y, share):
    def loss(weights, bias, leaves):
        values, targets = leaves.values, y if leaves.kernel == "log" else y.reshape(len(y), -1)
        flat, options = values.reshape(len(values), -1), {"loss": leaves.kernel, "route": route, "implementation": how}
        return kernels.expected_loss(x, targets, weights, bias, flat, share=share, **options)

    (total, leaf), gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(weights, bias, leaves)
    return (total, gradient), leaf


def _visit(leaf_losses, route, *operands):
    """Visits the leaves that samples reach, on a CPU where these are few, else all."""
    dense = partial(_visit_in_blocks, leaf_losses, route)
    width = sharp.width_of(topology.depth_of(len(operands[0])))
    if width is None or route != "sigmoid" or leaf_losses is not None or blocking.platform() != "cpu":
        return dense(*operands)
    block, losses = blocking.samples_on_paths(1), lambda leaves, x, y: leaves.losses(x, y)

    def by_device(weights, bias, leaves, x, y, share):
        of_block = lambda share, x, y: sharp.visit(losses, width, dense, weights, bias, leaves, x, y, share)
        return blocking.sum_over_blocks(of_block, share, x, y, block=block)

    # Under vmap one after the other, as both branches of a batched condition are computed; and on each device by
    # itself, as one list of the paths of all devices would be on a single device.
    return sharding.each_part(jax.custom_batching.sequential_vmap(by_device), *operands, rows=(3, 4, 5))


def _visit_in_blocks(leaf_losses, route, weights, bias, leaves, x, y, share):
    joined = jnp.concatenate([weights, bias[:, None]], axis=1)
    losses_of = leaf_losses or (lambda leaves, x, y: leaves.losses(x, y))

    def by_sigmoid(share, x, y):
        ones_x = with_one(x)
        z = jnp.matmul(joined, ones_x.T, precision="highest")
        right = jax.nn.sigmoid(z)
        reach = leaf_weights(right, share)
        loss, pull_back = jax.vjp(lambda leaves: losses_of(leaves, x, y), leaves)
        lost, d_joined = reach * loss, []
        for s in reversed(topology.levels(right)):
            below = topology.pairs(lost)
            d_z = (1 - s) * below[:, 1] - s * below[:, 0]
            # Three passes of bfloat16 parts on a TPU, with an error of 2^-16 of each product.
            d_joined.append(jnp.matmul(d_z, ones_x, precision="high"))
            lost = below.sum(1)
        gradient = jnp.concatenate(d_joined[::-1]), *pull_back(reach)
        return (lost.sum(), gradient), routing.leaf_index(z)

    def by_route(share, x, y):
        def loss(joined, leaves):
            z = jnp.matmul(joined, with_one(x).T, precision="highest")
            reach = leaf_probabilities(route, z)
            return (share * reach * losses_of(leaves, x, y)).sum(), routing.leaf_index(z)

        (value, leaf), gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(joined, leaves)
        return (value, gradient), leaf

    block = by_sigmoid if route == "sigmoid" else by_route
    block_size = blocking.block_size(weights.shape[0], x.shape[0])
    (loss, (d_joined, d_leaves)), leaf = blocking.sum_over_blocks(block, share, x, y, block=block_size)
    return (loss, (d_joined[:, :-1], d_joined[:, -1], d_leaves)), leaf


def _backward(leaf_losses, route, how, gradient, cotangents):
    if isinstance(cotangents[0], jax.custom_derivatives.SymbolicZero):
        return (None,) * len(gradient)
    return jax.tree.map(lambda g: (cotangents[0] * g.astype(cotangents[0].dtype)).astype(g.dtype), gradient)


# The rule is told which operands are differentiated, so that training does no more than it needs.
expected.defvjp(_forward, _backward, symbolic_zeros=True)


def leaf_probabilities(route: Any, z: Array) -> Array:
    """Probabilities of the leaves, ``(leaves, n)``, from scores ``(nodes, n)``."""
    if route == "sigmoid":
        return routing.leaf_probabilities(jax.nn.sigmoid(z))
    return routing.violation(z) if isinstance(route, str) else route(z)
