"""The surrogate loss of CO2 and non-greedy trees, an upper bound of the loss of the hard tree, and an update of the
rows that a batch touches.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jtrees import leaves as kinds, topology
from jtrees.methods.nongreedy.lazy_rows import move_rows, touched
from jtrees.tasks import Task
from jtrees.training import Batch, LazyMomentumState, momentum_step
from jtrees.tree import ObliqueTree

MAX_DEPTH = 20
# Steps are dense in trees with at most this many splits per split that a batch may touch: measured on two cores with
# 16, 126 and 784 features, by steps of 128 samples on trees of depth 8 to 12.
_MOVED_WHOLE = 2


class Surrogate(NamedTuple):
    """The surrogate loss of each sample, ``loss at leaf + sum of slopes * scores``.

    Attributes:
      leaf: the leaf of its loss term, ``(n,)``.
      nodes: splits whose scores enter it, ``(r, n)``.
      scores: their scores, ``(r, n)``.
      slopes: derivatives of the bound by the scores: 0, 2 or -2, ``(r, n)``.
      reached: loss at the leaf that the sample reaches, ``(n,)``.
    """

    leaf: Int[Array, " n"]
    nodes: Int[Array, "r n"]
    scores: Float[Array, "r n"]
    slopes: Float[Array, "r n"]
    reached: Float[Array, " n"]


def flip_slope(scores: Array) -> Array:
    """Returns the slope of ``-2 |score|``, the term of a flipped decision."""
    return jnp.where(scores > 0, -2, 2).astype(scores.dtype)


def with_leaves(tree: ObliqueTree, leaf: Int[Array, " n"], batch: Batch, task: Task) -> ObliqueTree:
    """Returns the tree with initial trainable leaves: means of targets, or smoothed class frequencies as logits."""
    empty = kinds.kind_of("constant", task).empty(topology.num_leaves(tree.depth), 0, task.shape, batch.x.dtype)
    return tree.replace(leaves=empty.refit(leaf, *batch).trainable())


def into_ball(rows: tuple[Array, Array], nu: Any) -> tuple[Array, Array]:
    """Returns split weights ``(m, p)`` and biases ``(m,)`` projected to ``|w|^2 + b^2 <= nu`` row by row."""
    weights, bias = rows
    square = jnp.square(weights).sum(1) + jnp.square(bias)
    shrunk = jnp.sqrt(nu / jnp.where(square > nu, square, nu)).astype(bias.dtype)
    return weights * shrunk[:, None], bias * shrunk


def surrogate_step(
    params: ObliqueTree,
    state: LazyMomentumState,
    batch: Batch,
    surrogate: Surrogate,
    *,
    rate: Any,
    decay: Any,
    nu: Any,
    task: Task,
) -> tuple[ObliqueTree, LazyMomentumState, tuple[Array, Array]]:
    """Takes a step of lazy momentum; returns parameters, state, and the previous surrogate loss and loss.

    Args:
      params: the tree.
      state: state of the optimiser.
      batch: samples, whose ``y`` are targets.
      surrogate: surrogate loss of the samples.
      rate: learning rate.
      decay: decay of the velocity.
      nu: squared radius of the ball of a split.
      task: what is predicted.
    """
    n = len(batch.x)
    share = jnp.full(n, 1 / n, batch.x.dtype) if batch.weight is None else batch.weight / n
    leaf_loss = lambda values: (share * task.loss(values, batch.y)).sum()
    at_leaf, d_values = jax.value_and_grad(leaf_loss)(params.leaves.values[surrogate.leaf])
    step = _step_in_all if len(params.bias) <= _MOVED_WHOLE * surrogate.nodes.size else _step_in_rows
    updated, velocity = step(
        params, state.velocity, batch.x, surrogate, share * surrogate.slopes, d_values, rate, decay, nu
    )
    value = at_leaf + (share * (surrogate.slopes * surrogate.scores).sum(0)).sum()
    return updated, LazyMomentumState(state.count + 1, velocity), (value, (share * surrogate.reached).sum())


def _step_in_all(params, velocity, x, surrogate, slopes, d_values, rate, decay, nu):
    shares = jnp.zeros((len(params.bias), len(x)), x.dtype).at[surrogate.nodes, jnp.arange(len(x))].add(slopes)
    weights = jnp.matmul(shares, x, precision="highest")
    leaves = params.leaves.replace(values=jnp.zeros_like(params.leaves.values).at[surrogate.leaf].add(d_values))
    gradient = ObliqueTree(weights, shares.sum(1), leaves)
    moved, velocity = momentum_step(gradient, velocity, rate, decay)
    moved: Any = jax.tree.map(jnp.add, params, moved)
    weights, bias = into_ball((moved.weights, moved.bias), nu)
    return moved.replace(weights=weights, bias=bias), velocity


def _step_in_rows(params, velocity, x, surrogate, slopes, d_values, rate, decay, nu):
    product = lambda shares, rows_of_samples: jnp.tensordot(shares, rows_of_samples, ((1,), (0,)), precision="highest")
    rates: Any = {"rate": rate, "decay": decay}
    rows, shares = touched(surrogate.nodes, slopes, len(params.bias))
    gradient = product(shares, x), shares.sum(1)
    splits, speed = (params.weights, params.bias), (velocity.weights, velocity.bias)
    splits, speed = move_rows(splits, speed, rows, gradient, project=lambda rows: into_ball(rows, nu), **rates)
    values, leaf_velocity = params.leaves.values, velocity.leaves.values
    rows, shares = touched(surrogate.leaf[None], jnp.ones_like(slopes[:1]), len(values))
    values, leaf_velocity = move_rows(values, leaf_velocity, rows, product(shares, d_values), **rates)
    tree = lambda splits, values: ObliqueTree(splits[0], splits[1], params.leaves.replace(values=values))
    return tree(splits, values), tree(speed, leaf_velocity)
