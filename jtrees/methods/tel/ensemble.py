"""An ensemble of soft trees as parameters: what it answers, how it begins, and the hard trees that it stands for."""

import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import optax

from jtrees import io, leaves as kinds, ops, topology
from jtrees.forest import Forest
from jtrees.leaves.constant import effective, ones_or
from jtrees.nn.tree_ensemble import small_uniform
from jtrees.tasks import Classification, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_REFIT_STEPS = 100  # of conjugate gradients or L-BFGS, in which leaves are refitted
_RIDGE = 1.0  # what holds a leaf where it was, in samples


@io.model
@struct.dataclass
class Ensemble:
    """Trees whose answers add up: what is trained.

    Attributes:
      weights: of the splits, ``(trees, nodes, p)``; right iff ``weights x + bias > 0``.
      bias: of the splits, ``(trees, nodes)``.
      leaf_values: ``(trees, leaves)``, or k numbers a leaf, ``(trees, leaves, k)``; logits in classification.
    """

    weights: Float[Array, "trees nodes p"]
    bias: Float[Array, "trees nodes"]
    leaf_values: Float[Array, "trees leaves *k"]

    def outputs(
        self, x: Float[Array, "n p"], gamma: Any, *, step: str = "smooth", width: int | None = None
    ) -> Float[Array, "n *k"]:
        """The sum over the trees of the mean over leaves."""
        if step == "smooth":
            values = self.leaf_values.reshape(*self.leaf_values.shape[:2], -1)
            outputs = ops.ensemble(self.weights, self.bias, values, x, gamma, width=width)
            return outputs.reshape(-1, *self.leaf_values.shape[2:])
        # The logistic step of the same size: 6 z / gamma (paper, figure 1).
        alpha = 6 / jnp.asarray(gamma, x.dtype)
        tree = lambda weights, bias, values: ops.soft(alpha * weights, alpha * bias, values, x)
        return jax.vmap(tree)(self.weights, self.bias, self.leaf_values).sum(0)

    def hard_leaves(self, x: Float[Array, "n p"]) -> Array:
        """The leaf of each tree that each sample reaches as gamma goes to 0, ``(trees, n)``."""
        return jax.vmap(lambda weights, bias: ops.hard(weights, bias, x))(self.weights, self.bias)


def random_ensemble(key: Array, depth: int, trees: int, p: int, outputs: tuple[int, ...], dtype: Any) -> Ensemble:
    """Splits and leaves from U(-0.01, 0.01), biases 0; so many outputs, ``()`` or ``(k,)``."""
    nodes, leaves = topology.num_nodes(depth), topology.num_leaves(depth)
    splits, shape = trees * nodes * p, (trees, leaves, *outputs)
    # At once: each draw costs compilation.
    drawn = small_uniform(key, (splits + math.prod(shape),), dtype)
    weights = drawn[:splits].reshape(trees, nodes, p)
    return Ensemble(weights, jnp.zeros((trees, nodes), dtype), drawn[splits:].reshape(shape))


def hardened(params: Ensemble, batch: Batch, task: Task) -> Forest:
    """The ensemble as gamma goes to 0, its leaves refitted jointly on a batch: a forest whose answers are summed.

    The leaf values of all trees are one ridge regression on the indicators of the leaves reached, in classification one
    multinomial logistic regression, drawn to what was learnt as if by one sample a leaf (uneven weights count as fewer
    samples): a leaf that no sample of the batch reaches keeps its values. By conjugate gradients, or L-BFGS. Costs the
    accuracy that soft decisions bring.

    Args:
      params: what was trained.
      batch: samples to set the leaves from.
      task: what is predicted.

    Returns:
      Of trees with constant leaves: logits in classification, whose link is a softmax.
    """
    x, y, weight = jax.tree.map(jnp.asarray, batch)
    reached, values = params.hard_leaves(x), params.leaf_values
    share = ones_or(effective(weight), len(x), x.dtype)
    of_samples = lambda values: jax.vmap(lambda values, leaf: values[leaf])(values, reached).sum(0)
    if not isinstance(task, Classification):
        spread = jax.linear_transpose(of_samples, values)
        weighted = lambda of: share.reshape(-1, *[1] * (of.ndim - 1)) * of
        normal = lambda change: spread(weighted(of_samples(change)))[0] + _RIDGE * change
        error = weighted(y - of_samples(values))
        change, _ = jax.scipy.sparse.linalg.cg(normal, spread(error)[0], maxiter=_REFIT_STEPS)
    else:

        def lost(change: Array) -> Array:
            each = task.loss(of_samples(values + change), y)
            return ((share * each).sum() + _RIDGE / 2 * jnp.square(change).sum()) / len(x)

        change = _minimised(lost, jnp.zeros_like(values))
    trees = ObliqueTree(params.weights, params.bias, kinds.Constant(values + change))
    return Forest(trees, "sum", "softmax" if isinstance(task, Classification) else "identity")


def _minimised(fn: Any, start: Array) -> Array:
    """Where a convex function is least, by L-BFGS."""
    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(fn)

    def step(_: Any, now: Any) -> Any:
        at, state = now
        value, gradient = value_and_grad(at, state=state)
        updates, state = optimizer.update(gradient, state, at, value=value, grad=gradient, value_fn=fn)
        return optax.apply_updates(at, updates), state

    return jax.lax.fori_loop(0, _REFIT_STEPS, step, (start, optimizer.init(start)))[0]
