"""Monotone trees: predictions that do not fall as a feature rises.

A tree of constant leaves is nondecreasing in a feature if

1. no split has a negative weight of the feature, so that a larger value never leads from the right to the left;
2. at each split with a positive weight of the feature, no leaf on the left has a larger value than a leaf on the right.

Searches satisfy condition 1 by a projection of the weights after each update (:func:`keeping_signs`).
:func:`ordered_values` then projects the leaves on condition 2. A feature in which predictions must not rise is trained
with the opposite sign (:meth:`jtrees.data.Scaling.oriented`).
"""

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Bool, Float
import optax

from jtrees.segments import Array, module_of
from jtrees.tasks import Classification, Task

_TINY = 1e-6  # weight of an empty leaf, relative to the mean weight of the leaves


def without_negative(weights: Float[Array, "nodes p"], monotone: Bool[Array, " p"] | None) -> Float[Array, "nodes p"]:
    """Returns split weights, with negative weights of the monotone features set to 0. None: unchanged."""
    if monotone is None:
        return weights
    xp = module_of(weights, monotone)
    return xp.where(monotone & (weights < 0), xp.zeros_like(weights), weights)


def keeping_signs(
    optimizer: optax.GradientTransformation, monotone: Bool[Array, " p"] | None
) -> optax.GradientTransformation:
    """Returns an optimiser whose updates leave no negative weight of a monotone feature."""
    # If a split has no monotone feature, its weights of monotone features remain 0. Such a split does not order the
    # leaves. Its two sides can differ freely, for example if the targets depend on a product of other features. The
    # parameters must have `weights`, (nodes, p), like an `ObliqueTree`.
    if monotone is None:
        return optimizer

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        orders = ((params.weights != 0) & monotone).any(1, keepdims=True)
        moved = jnp.where(orders, params.weights + updates.weights, 0)
        # An update of exactly -weights is needed: the sum of parameter and update must be exactly 0.
        changed = jnp.where(moved <= 0, -params.weights, updates.weights)
        return updates.replace(weights=jnp.where(monotone, changed, updates.weights)), state

    return optax.chain(optimizer, optax.GradientTransformation(lambda params: optax.EmptyState(), update))


def ordered_leaves(tree: Any, monotone: Bool[Array, " p"], weight: Float[Array, " leaves"], task: Task) -> Any:
    """Returns a tree whose leaves are projected on the order that its splits imply."""
    # The tree has leaf values, and no negative weights of the monotone features. `weight` is the weight of the rows of
    # each leaf. In classification with two classes, the probability of the second class must not fall.
    splits, signs = ((tree.weights != 0) & monotone).any(1), signs_of(task)

    def projected(values: Array) -> Array:
        xp = module_of(values, weight)
        columns = values.reshape(len(values), -1).T
        ordered = [sign * ordered_values(sign * a, weight, splits) for sign, a in zip(signs, columns, strict=True)]
        return xp.stack(ordered, axis=1).reshape(values.shape).astype(values.dtype)

    return tree.replace(leaves=tree.leaves.with_outputs(projected))


def ascending(values: Float[Array, "leaves *k"], task: Task) -> Float[Array, "leaves *k"]:
    """Returns leaf values that rise from left to right, which satisfies the order of any tree."""
    signs = jnp.asarray(signs_of(task), values.dtype).reshape(values.shape[1:])
    return signs * jnp.sort(signs * values, axis=0)


def signs_of(task: Task) -> tuple[int, ...]:
    """Returns 1 for each output that must not fall as a monotone feature rises, and -1 for each that must not rise."""
    return (-1, 1) if isinstance(task, Classification) else (1,) * math.prod(task.shape)


def ordered_values(
    values: Float[Array, " leaves"], weight: Float[Array, " leaves"], splits: Bool[Array, " nodes"]
) -> Float[Array, " leaves"]:
    """Returns the values nearest to the given values such that no leaf on the left of a split exceeds one on its right.

    The distance is the weighted sum of squares. If the values are means of leaves, the solution also minimises every
    loss whose best constant is the mean, such as the log loss. The problem is an isotonic regression on a
    series-parallel order, solved from the leaves to the root. ``splits`` says whether each node orders its two sides.

    Let a and b be the solutions for the two sides of a split. Their order needs a common bound t. An isotonic
    regression with a bound is the solution without the bound, clipped. The solution is therefore ``min(a, t)`` and
    ``max(b, t)``, where t is the weighted mean of the values that it changes. The cost is ``O(leaves log(leaves)^2)``.
    """
    xp = module_of(values, weight, splits)
    values, weight = (xp.asarray(a, xp.result_type(values, xp.float32)) for a in (values, weight))
    mean = weight.mean()
    weight = xp.maximum(weight, xp.where(mean > 0, _TINY * mean, 1))
    half = 1
    while 2 * half <= len(values):
        nodes = len(values) // (2 * half)
        sides, weights = (a.reshape(nodes, 2, half) for a in (values, weight))
        ordered = splits[nodes - 1 : 2 * nodes - 1][:, None]
        left, right = sides[:, 0], sides[:, 1]
        highest, lowest = left.max(1)[:, None], right.min(1)[:, None]
        bound = xp.clip(_common_bound(sides, weights), xp.minimum(highest, lowest), highest)
        bounded = xp.stack([xp.minimum(left, bound), xp.maximum(right, bound)], axis=1)
        changes = (ordered & (highest > lowest))[:, None]
        values, half = xp.where(changes, bounded, sides).reshape(-1), 2 * half
    return values


def _common_bound(sides: Float[Array, "nodes 2 m"], weights: Float[Array, "nodes 2 m"]) -> Float[Array, "nodes 1"]:
    """Returns the bound t of least cost, ``(nodes, 1)``: t bounds the left values from above, the right from below."""
    # Up to a factor, the derivative of the cost by t is `sum w (t - v)`. The sum is over the values above t on the left
    # and the values below t on the right. The derivative rises with t, and is linear between two values.
    xp = module_of(sides, weights)
    flat, all_weights = sides.reshape(len(sides), -1), weights.reshape(len(sides), -1)
    is_left = xp.broadcast_to(xp.arange(2)[:, None] == 0, sides.shape[1:]).reshape(1, -1)
    order = xp.argsort(flat, axis=1)
    value = xp.take_along_axis(flat, order, axis=1)
    on = lambda side: xp.take_along_axis(xp.where(side, all_weights, 0), order, axis=1)
    left, right = on(is_left), on(~is_left)
    above = lambda amount: amount.sum(1, keepdims=True) - amount.cumsum(1)
    share = above(left) + right.cumsum(1)
    total = above(left * value) + (right * value).cumsum(1)
    last = xp.maximum((value * share <= total).sum(1, keepdims=True) - 1, 0)
    share, total = (xp.take_along_axis(a, last, axis=1) for a in (share, total))
    return total / xp.where(share > 0, share, 1)
