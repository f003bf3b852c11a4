"""The method of GET and RADDT: a tree under a soft routing of sharpened scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, ops, topology, training, validation as checks
from jtrees.tasks import Task, check_log_loss
from jtrees.training import Batch
from jtrees.tree import ObliqueTree
from pallas_kernels import Implementation


def soft_method(
    depth: int,
    sharpness: training.Number,
    *,
    name: str,
    route: ops.Route,
    leaves: str,
    task: Task,
    l1: float | Array,
    implementation: Implementation,
    scored: bool,
) -> training.Method:
    """Returns a method that trains a tree on the expected loss of a soft routing of sharpened scores.

    ``name`` is the name of the sharpness in messages, and ``route`` is the routing of :func:`jtrees.ops.expected_loss`.
    The other arguments are those of :func:`jtrees.methods.get`.
    """
    depth, kind = checks.check_depth(depth), kinds.kind_of(leaves, task)
    check_log_loss(task)
    if not callable(sharpness):
        checks.check_number(name, sharpness, above=0)
    checks.check_number("l1", l1, least=0)
    for which, value in ((name, sharpness), ("l1", l1)):
        if not callable(value) and np.ndim(value):
            raise ValueError(f"{which} must be one number, got shape {np.shape(value)}")

    def init(batch: Batch, *, key: Array) -> ObliqueTree:
        """Returns weights and biases from U(-1, 1), and the initial leaves of their kind."""
        task.check(batch.y)
        nodes, (_, p), dtype = topology.num_nodes(depth), batch.x.shape, batch.x.dtype
        weights_key, bias_key, leaves_key = jax.random.split(key, 3)
        weights = jax.random.uniform(weights_key, (nodes, p), dtype, -1, 1)
        bias = jax.random.uniform(bias_key, (nodes,), dtype, -1, 1)
        return ObliqueTree(weights, bias, kind.start(leaves_key, nodes + 1, batch.x, batch.y, task.shape))

    def loss(params: ObliqueTree, batch: Batch, *, key: Array, step: Array) -> tuple[Array, Array]:
        x, y, weight = batch
        factor = training.at_step(sharpness, step)
        w, b = factor * params.weights, factor * params.bias
        options = {"route": route, "implementation": implementation}
        loss, leaf = ops.expected_loss(w, b, params.leaves, x, y, weight=weight, **options)
        score = params.leaves.criterion(leaf, x, y, weight) if scored else loss
        return loss + l1 * jnp.abs(params.weights).sum(), score

    return training.Method(init, loss, lambda params, batch: params.refit(*batch))
