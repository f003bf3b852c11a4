"""The parameters of an ensemble of soft trees: outputs, initialisation and hardening."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import optax

from jtrees import io, leaves as kinds, ops, pytree, topology
from jtrees.forest import Forest
from jtrees.segments import mean_one, ones_or
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_REFIT_STEPS = 100  # iterations of conjugate gradients or L-BFGS that refit the leaves
_START = 0.01  # bound of the uniform initialisation of splits and leaves (paper, appendix)
_RIDGE = 1.0  # strength of the ridge penalty on changes of a leaf, in samples


@io.model
@pytree.dataclass
class Ensemble:
    """Parameters of trees whose outputs are summed.

    Attributes:
      weights: weights of the splits, ``(trees, nodes, p)``. A sample goes right if ``weights x + bias > 0``, else left.
      bias: biases of the splits, ``(trees, nodes)``.
      leaf_values: ``(trees, leaves)``, or ``(trees, leaves, k)`` for k numbers per leaf; logits in classification.
    """

    weights: Float[Array, "trees nodes p"]
    bias: Float[Array, "trees nodes"]
    leaf_values: Float[Array, "trees leaves *k"]

    def outputs(
        self, x: Float[Array, "n p"], gamma: Any, *, step: str = "smooth", width: int | None = None
    ) -> Float[Array, "n *k"]:
        """Returns the sum over trees of the expected leaf values."""
        if step == "smooth":
            values = self.leaf_values.reshape(*self.leaf_values.shape[:2], -1)
            outputs = ops.ensemble(self.weights, self.bias, values, x, gamma, width=width)
            return outputs.reshape(-1, *self.leaf_values.shape[2:])
        # The logistic step of the same width: 6 z / gamma (paper, figure 1).
        alpha = 6 / jnp.asarray(gamma, x.dtype)
        tree = lambda weights, bias, values: ops.soft(alpha * weights, alpha * bias, values, x)
        return jax.vmap(tree)(self.weights, self.bias, self.leaf_values).sum(0)

    def hard_leaves(self, x: Float[Array, "n p"]) -> Array:
        """Returns the leaf of each sample in each tree in the limit of gamma to 0, ``(trees, n)``."""
        return jax.vmap(lambda weights, bias: ops.hard(weights, bias, x))(self.weights, self.bias)


def small_uniform(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    """Draws from U(-0.01, 0.01), the paper's initialisation."""
    return jax.random.uniform(key, shape, dtype, -_START, _START)


def random_ensemble(key: Array, depth: int, trees: int, p: int, outputs: tuple[int, ...], dtype: Any) -> Ensemble:
    """Returns splits and leaves from U(-0.01, 0.01) and zero biases; ``outputs`` is ``()`` or ``(k,)``."""
    nodes, leaves = topology.num_nodes(depth), topology.num_leaves(depth)
    splits, shape = trees * nodes * p, (trees, leaves, *outputs)
    # One draw: each draw costs compile time.
    uniform = small_uniform(key, (splits + math.prod(shape),), dtype)
    weights = uniform[:splits].reshape(trees, nodes, p)
    return Ensemble(weights, jnp.zeros((trees, nodes), dtype), uniform[splits:].reshape(shape))


def hardened(params: Ensemble, batch: Batch, task: Task) -> Forest:
    """Returns the ensemble in the limit of gamma to 0, with leaves refitted jointly: a forest of summed trees."""
    # In regression, the leaf values of all trees solve one ridge regression on the indicators of the leaves reached, by
    # conjugate gradients. For other losses, they minimise the mean loss by L-BFGS: in classification, they solve one
    # multinomial logistic regression, and are logits with a softmax link. The values are shrunk towards the trained
    # values with the weight of a sample for each leaf. So an empty leaf keeps its values. Weights have mean 1. The hard
    # trees do not keep the accuracy that soft decisions gain.
    x, y, weight = jax.tree.map(jnp.asarray, batch)
    reached, values = params.hard_leaves(x), params.leaf_values
    y = y.astype(values.dtype) if jnp.issubdtype(y.dtype, jnp.floating) else y
    share = mean_one(ones_or(weight, x))
    outputs = lambda values: jax.vmap(lambda values, leaf: values[leaf])(values, reached).sum(0)
    if task.is_least_squares:
        spread = jax.linear_transpose(outputs, values)
        weighted = lambda rows: share.reshape(-1, *[1] * (rows.ndim - 1)) * rows
        normal = lambda change: spread(weighted(outputs(change)))[0] + _RIDGE * change
        error = weighted(y - outputs(values))
        change, _ = jax.scipy.sparse.linalg.cg(normal, spread(error)[0], maxiter=_REFIT_STEPS)
    else:

        def penalised_loss(change: Array) -> Array:
            row_losses = task.loss(outputs(values + change), y)
            return ((share * row_losses).sum() + _RIDGE / 2 * jnp.square(change).sum()) / len(x)

        change = _minimised(penalised_loss, jnp.zeros_like(values))
    trees = ObliqueTree(params.weights, params.bias, kinds.Values(values + change))
    return Forest(trees, "sum", task.link_name)


def _minimised(fn: Any, start: Array) -> Array:
    """Returns the minimiser of a smooth function, found with L-BFGS; of another function, a point of a low value."""
    optimizer = optax.lbfgs()
    value_and_grad = optax.value_and_grad_from_state(fn)

    def step(_: Any, carry: Any) -> Any:
        point, state = carry
        value, gradient = value_and_grad(point, state=state)
        updates, state = optimizer.update(gradient, state, point, value=value, grad=gradient, value_fn=fn)
        return optax.apply_updates(point, updates), state

    return jax.lax.fori_loop(0, _REFIT_STEPS, step, (start, optimizer.init(start)))[0]
