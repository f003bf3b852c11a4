"""An ensemble under smooth-step routing, level by level: every split of every sample, without a gather.

Work O(nodes) a sample, whatever the routing. What pays where trees are shallow or hardly anything is decided;
:mod:`jtrees.routing.conditional` chooses.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from jtrees import blocking, topology
from pallas_kernels.routes import cubic

# Levels from the root that share their products with the samples: a small product costs its start. Tried by hand on two
# cores: 5 or 6 are about a quarter faster than 1 at depth 6 to 10.
_TOP = 5


class Asked(NamedTuple):
    """An ensemble and what it is asked about; or the gradient for each of these.

    Attributes:
      x: samples, ``(n, p)``.
      weights: of the splits, ``(trees, nodes, p)``; right iff ``weights x + bias > 0``.
      bias: of the splits, ``(trees, nodes)``.
      leaf_values: ``(trees, leaves, k)``.
      gamma: width of the uncertain region of a split's score, ``()``.
    """

    x: Any
    weights: Any
    bias: Any
    leaf_values: Any
    gamma: Any


# --- The cubic step (Hazimeh et al. 2020, eq. 4) in a variable of its own --------------------------------------------
#
# With a = clip(1/2 + z / gamma, 0, 1): s = cubic(a), ds/dz = 6 a (1 - a) / gamma, ds/dgamma = -(a - 1/2) ds/dz.
# Half the work of routing.smooth_step, which keeps the digits of 1 - s as well; here 1 - s is only a part of a sum.


def position(z: Array, gamma: Array) -> Array:
    """Where a score lies on the step: 0 and below it is certain to go left, 1 and above to go right."""
    return jnp.clip(0.5 + z / gamma, 0, 1)


def slope(a: Array, gamma: Array) -> Array:
    """The derivative of the probability of going right for the score."""
    return 6 * a * (1 - a) / gamma


# --- Trees in a layout without interleaving --------------------------------------------------------------------------
#
# Nodes of a level are put in the order of their reversed bits, so that the children of the m nodes of one level are the
# m left ones, then the m right ones: a fold is arithmetic on two contiguous halves. The trees of a group share the
# lanes with the samples, (nodes, trees, n), so that a level of all of them is one product with the samples, and the
# sum over trees one product with the leaves. Tried by hand on two cores, this was two to three times as fast at depth
# 10 as interleaved children.


class _Grouped(NamedTuple):
    """Splits ``(groups, nodes, trees, p + 1)`` that act on ``[x; 1]``, leaves ``(groups, leaves, trees, k)``."""

    joined: Array
    leaf_values: Array

    @classmethod
    def of(cls, weights: Array, bias: Array, leaf_values: Array, group: int) -> "_Grouped":
        order, leaf_order = _orders(topology.depth_of(weights.shape[1]))
        joined = jnp.concatenate([weights, bias[..., None]], axis=-1)
        return cls(_grouped(joined[:, order], group), _grouped(leaf_values[:, leaf_order], group))

    def back(self, trees: int) -> tuple[Array, Array, Array]:
        order, leaf_order = _orders(topology.depth_of(self.joined.shape[1]))
        apart = lambda a: jnp.swapaxes(a, 1, 2).reshape(-1, a.shape[1], a.shape[3])[:trees]
        joined, leaf_values = apart(self.joined)[:, np.argsort(order)], apart(self.leaf_values)
        return joined[..., :-1], joined[..., -1], leaf_values[:, np.argsort(leaf_order)]


def _orders(depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes level by level by reversed bits, and leaves."""
    levels = [np.zeros(1, int)]
    for _ in range(depth):
        levels.append(np.concatenate([2 * levels[-1], 2 * levels[-1] + 1]))
    return np.concatenate([2**d - 1 + level for d, level in enumerate(levels[:-1])]), levels[-1]


def _grouped(per_tree: Array, group: int) -> Array:
    """``(trees, m, c)`` -> ``(groups, m, group, c)``, the last group filled up with trees of zeros."""
    groups = -(-len(per_tree) // group)
    padded = jnp.pad(per_tree, [(0, groups * group - len(per_tree)), (0, 0), (0, 0)])
    return jnp.swapaxes(padded.reshape(groups, group, *padded.shape[1:]), 1, 2)


def _flat(a: Array) -> Array:
    return a.reshape(-1, a.shape[-1])


_product = partial(jnp.matmul, precision="highest")


def _positions(joined: Array, ones_x: Array, gamma: Array) -> list[Array]:
    """Positions of the scores level by level, ``(nodes, trees, n)`` each."""
    scores = [_product(_flat(part), ones_x.T).reshape(-1, joined.shape[1], len(ones_x)) for part in _parts(joined)]
    return [position(z, gamma) for z in [*topology.levels(scores[0]), *scores[1:]]]


def _reach(positions: list[Array]) -> list[Array]:
    """Reach of the nodes level by level, leaves last."""
    reach = [jnp.ones_like(positions[0])]
    for a in positions:
        right = reach[-1] * cubic(a)
        # The barrier keeps the compiler from computing all levels above anew for each level.
        reach.append(jax.lax.optimization_barrier(jnp.concatenate([reach[-1] - right, right])))
    return reach


def _parts(joined: Array) -> list[Array]:
    """The splits of the top, and of each level below."""
    levels = topology.levels(joined)
    top = min(_TOP, len(levels))
    return [joined[: 2**top - 1], *levels[top:]]


def with_one(x: Float[Array, "n p"]) -> Array:
    """Appends a column of ones, by which a bias is a weight."""
    return jnp.concatenate([x, jnp.ones_like(x[:, :1])], axis=1)


def _sizes(bias: Array, n: int) -> tuple[int, int]:
    """Samples in a block, and trees in a group."""
    trees, nodes = bias.shape
    block = blocking.block_size(nodes, n)
    return block, blocking.trees_at_once(trees, nodes * block)


def outputs(asked: Asked) -> Float[Array, "n k"]:
    """The sum over trees of the mean over leaves of what they hold."""
    x, weights, bias, leaf_values, gamma = asked
    block, group = _sizes(bias, len(x))
    grouped = _Grouped.of(weights, bias, leaf_values, group)

    def of_block(share: Array, x: Array) -> tuple[tuple[()], Array]:
        ones_x = with_one(x)

        def of_group(total: Array, of: _Grouped) -> tuple[Array, None]:
            reach = _reach(_positions(of.joined, ones_x, gamma))
            return total + _product(_flat(of.leaf_values).T, _flat(reach[-1])), None

        total, _ = jax.lax.scan(of_group, jnp.zeros((leaf_values.shape[2], len(x)), x.dtype), grouped)
        return (), total.T

    return blocking.sum_over_blocks(of_block, jnp.ones(len(x), x.dtype), x, block=block)[1]


# With P_j the reach of node j and V the value of a node to the cotangent c, V_leaf = <c, o_leaf>, folded from the
# leaves up, V = V_left + s (V_right - V_left):
#     dL/dz_j = P_j s'(z_j) (V_right - V_left),     dL/do_leaf = sum_i P_leaf c_i,
# where the paper (Theorem 1) divides by s and 1 - s.
def gradient(asked: Asked, cotangent: Float[Array, "n k"]) -> Asked:
    """The gradient of ``<cotangent, outputs>``; everything is computed again, block by block."""
    x, weights, bias, leaf_values, gamma = asked
    block, group = _sizes(bias, len(x))
    grouped = _Grouped.of(weights, bias, leaf_values, group)

    def of_block(share: Array, x: Array, cotangent: Array) -> tuple[Any, Array]:
        ones_x, c = with_one(x), share[:, None] * cotangent

        def of_group(d_x: Array, of: _Grouped) -> tuple[Array, Any]:
            joined, held = of
            positions = _positions(joined, ones_x, gamma)
            reach = _reach(positions)
            value = _product(_flat(held), c.T).reshape(reach[-1].shape)
            d_held = _product(_flat(reach[-1]), c).reshape(held.shape)
            d_zs, d_gamma = [], jnp.zeros((), x.dtype)
            for above, a in zip(reach[-2::-1], positions[::-1], strict=True):
                left, change = value[: len(a)], value[len(a) :] - value[: len(a)]
                d_z = above * slope(a, gamma) * change
                d_z, value = jax.lax.optimization_barrier((d_z, left + cubic(a) * change))
                d_gamma -= ((a - 0.5) * d_z).sum()
                d_zs.insert(0, d_z)
            parts, d_joined = _parts(joined), []
            top = len(d_zs) - len(parts) + 1
            for part, d_z in zip(parts, [jnp.concatenate(d_zs[:top]), *d_zs[top:]], strict=True):
                d_joined.append(_product(_flat(d_z), ones_x).reshape(part.shape))
                d_x += _product(_flat(d_z).T, _flat(part)[:, :-1])
            return d_x, (_Grouped(jnp.concatenate(d_joined), d_held), d_gamma)

        d_x, (d_grouped, d_gamma) = jax.lax.scan(of_group, jnp.zeros_like(x), grouped)
        return (d_grouped, d_gamma.sum()), d_x

    ones = jnp.ones(len(x), x.dtype)
    (d_grouped, d_gamma), d_x = blocking.sum_over_blocks(of_block, ones, x, cotangent, block=block)
    d_weights, d_bias, d_leaf_values = d_grouped.back(len(weights))
    return Asked(d_x, d_weights, d_bias, d_leaf_values, d_gamma)


def reachable(asked: Asked) -> Int[Array, "trees n"]:
    """How many leaves of each tree each sample reaches: those on whose path no decision is certain to go elsewhere."""
    x, weights, bias, _, gamma = asked

    def of_block(x: Array) -> Array:
        def of_tree(tree: tuple[Array, Array]) -> Array:
            weights, bias = tree
            return reachable_by(position(_product(weights, x.T) + bias[:, None], gamma)[None])[0]

        return jax.lax.map(of_tree, (weights, bias)).T

    return blocking.map_over_blocks(of_block, x, blocking.block_size(bias.shape[1], len(x))).T


def reachable_by(positions: Float[Array, "trees nodes n"]) -> Int[Array, "trees n"]:
    """The same, by the positions of all scores."""
    count = jnp.ones((len(positions), positions.shape[1] + 1, positions.shape[2]), jnp.int32)
    for level in topology.levels(jnp.moveaxis(positions, 1, 0))[::-1]:
        a, (left, right) = jnp.moveaxis(level, 0, 1), (count[:, 0::2], count[:, 1::2])
        count = jnp.where(a < 1, left, 0) + jnp.where(a > 0, right, 0)
    return count[:, 0]
