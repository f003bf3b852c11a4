"""The expected loss of a soft tree, with an explicit derivative."""

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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def expected(route, how, *operands):
    """Returns the expected loss of a soft tree, and the leaf of each sample: see :func:`jtrees.ops.expected_loss`."""
    # `how` is the choice of `choose`. The operands are weights, bias, leaves, x, y, and the share of each sample.
    # The compiler removes the unused gradient. A kernel computes it nevertheless.
    (loss, _), leaf = _visited(route, how, *operands)
    return loss, leaf


# The gradient. Let R_l = w P_l loss_l at a leaf and R_j = R_left + R_right above. R_j is the loss that passes through
# node j, already weighted by the probability of reaching node j. Let s = sigma(z_j). Every R below on the right holds
# one factor s, and every R below on the left one factor 1 - s. Their derivatives are s (1 - s) and -s (1 - s). Hence
#     dL/dz_j = (1 - s) R_right(j) - s R_left(j),
# which needs sums but no division; and dL/dloss_l = w P_l.
#
# Measurements on a CPU led to three choices. (1) The sum over a pair is a reduction: the compiler would repeat a chain
# of slices and additions for every consumer. (2) Each level is multiplied with x separately, because joining the levels
# first costs more than the products. (3) Value, gradient and hard routing share one visit: the forward rule computes
# the gradient, and the backward rule only scales it.
def _forward(route, how, *arguments):
    operands = jax.tree.map(lambda argument: argument.value, arguments)
    (loss, gradient), leaf = _visited(route, how, *operands)
    perturbed = tuple(argument.perturbed for argument in arguments[3:])
    return (loss, leaf), (*gradient, *_data_gradient(route, perturbed, operands))


def _visited(route, how, *operands):
    """Returns the loss, its gradient for splits and leaves, and the leaf of each sample."""
    fused = lambda how, *operands: sharding.each_part(partial(_visit_fused, route, how), *operands, rows=(3, 4, 5))
    return kernels.run(how, fused, partial(_visit, route), *operands)


# The loss of a sample is w sum_l P_l loss_l. Its derivative for z is given above. The derivative for x is a product of
# this derivative with the splits, plus the derivative of the leaf losses that depend on x. The derivative for w is the
# expected loss.
def _data_gradient(route, perturbed, operands):
    """Returns the gradients for x, y and share, with None for each operand that is not perturbed."""
    if not any(perturbed):
        return None, None, None
    weights, bias, leaves, x, y, share = operands

    def block_gradient(share, *data):
        def sample_losses(*variables):
            x, y = (constant if value is None else value for value, constant in zip(variables, data, strict=True))
            z = jnp.matmul(weights, x.T, precision="highest") + bias[:, None]
            losses = leaves.losses(x, y)
            if route == "sigmoid":
                return routing.expected_value(jax.nn.sigmoid(z), losses)
            return (leaf_probabilities(route, z) * losses).sum(0)

        variables = (array if varies else None for array, varies in zip(data, perturbed[:2], strict=True))
        expected, pull_back = jax.vjp(sample_losses, *variables)
        return (), (*pull_back(share.astype(expected.dtype)), expected.astype(share.dtype) if perturbed[2] else None)

    size = blocking.block_size(weights.shape[0], x.shape[0])
    return blocking.sum_over_blocks(block_gradient, share, x, y, block=size)[1]


def _visit_fused(route, how, weights, bias, leaves, x, y, share):
    def loss(weights, bias, leaves):
        values, targets = leaves.values, y if leaves.kernel == "log" else y.reshape(len(y), -1)
        flat, options = values.reshape(len(values), -1), {"loss": leaves.kernel, "route": route, "implementation": how}
        return kernels.expected_loss(x, targets, weights, bias, flat, share=share, **options)

    (total, leaf), gradient = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(weights, bias, leaves)
    return (total, gradient), leaf


def _visit(route, *operands):
    """Visits only the reached leaves on a CPU where they are few, else all leaves."""
    dense = partial(_visit_in_blocks, route)
    width = sharp.width_of(topology.depth_of(len(operands[0])))
    weights, bias, leaves, x, _, share = operands
    # The list of paths has one dtype, and takes the reached leaves from each array of the leaves. Leaves of a user have
    # no `is_constant`, and their arrays need no axis over the leaves.
    has_paths = hasattr(leaves, "is_constant") and len({a.dtype for a in (weights, bias, x, share)}) == 1
    if width is None or not has_paths or route != "sigmoid" or blocking.platform() != "cpu":
        return dense(*operands)

    def visit_on_device(weights, bias, leaves, x, y, share):
        visit_block = lambda share, x, y: sharp.visit(width, dense, weights, bias, leaves, x, y, share)
        return blocking.sum_over_blocks(visit_block, share, x, y, block=blocking.samples_on_paths(1))

    # A batched condition would compute both branches, so the trees of a vmap are visited sequentially. Each device of a
    # mesh visits its own samples, because a single list of all paths would be on a single device.
    return sharding.each_part(jax.custom_batching.sequential_vmap(visit_on_device), *operands, rows=(3, 4, 5))


def _visit_in_blocks(route, weights, bias, leaves, x, y, share):
    joined = jnp.concatenate([weights, bias[:, None]], axis=1)

    def visit_sigmoid(share, x, y):
        ones_x = with_one(x)
        z = jnp.matmul(joined, ones_x.T, precision="highest")
        right = jax.nn.sigmoid(z)
        reach = leaf_weights(right, share)
        loss, pull_back = jax.vjp(lambda leaves: leaves.losses(x, y), leaves)
        passing, d_joined = reach * loss, []  # R of the derivation, above
        for s in reversed(topology.levels(right)):
            below = topology.pairs(passing)
            d_z = (1 - s) * below[:, 1] - s * below[:, 0]
            # "high" is three passes of bfloat16 parts on a TPU, with an error of 2^-16 per product.
            d_joined.append(jnp.matmul(d_z, ones_x, precision="high"))
            passing = below.sum(1)
        gradient = jnp.concatenate(d_joined[::-1]), *pull_back(reach.astype(loss.dtype))
        return (passing.sum(), gradient), routing.leaf_index(z)

    def visit_route(share, x, y):
        def loss(joined, leaves):
            z = jnp.matmul(joined, with_one(x).T, precision="highest")
            reach = leaf_probabilities(route, z)
            return (share * reach * leaves.losses(x, y)).sum(), routing.leaf_index(z)

        (value, leaf), gradient = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(joined, leaves)
        return (value, gradient), leaf

    visit = visit_sigmoid if route == "sigmoid" else visit_route
    block_size = blocking.block_size(weights.shape[0], x.shape[0])
    (loss, (d_joined, d_leaves)), leaf = blocking.sum_over_blocks(visit, share, x, y, block=block_size)
    d_weights, d_bias = d_joined[:, :-1].astype(weights.dtype), d_joined[:, -1].astype(bias.dtype)
    return (loss, (d_weights, d_bias, d_leaves)), leaf


def _backward(route, how, gradient, cotangents):
    if isinstance(cotangents[0], jax.custom_derivatives.SymbolicZero):
        return (None,) * len(gradient)
    return jax.tree.map(lambda g: (cotangents[0] * g.astype(cotangents[0].dtype)).astype(g.dtype), gradient)


# Symbolic zeros show the rule which operands are differentiated, so that training computes only their gradients.
expected.defvjp(_forward, _backward, symbolic_zeros=True)


def leaf_probabilities(route: Any, z: Array) -> Array:
    """Returns the probabilities of the leaves, ``(leaves, n)``, from scores ``(nodes, n)``."""
    if route == "sigmoid":
        return routing.leaf_probabilities(jax.nn.sigmoid(z))
    if isinstance(route, str):
        return routing.violation(z)
    probabilities, expected = route(z), (z.shape[0] + 1, *z.shape[1:])
    if (got := jnp.shape(probabilities)) != expected:
        raise ValueError(f"route must return the probabilities of the leaves, {expected}, got shape {got}")
    return probabilities
