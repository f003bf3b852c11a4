"""LatentTree's trained network: its parameters, and the activity of its nodes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jtrees import io, pytree, routing, topology
from jtrees.methods.latent_tree.architecture import Architecture, is_tree
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree, with_empty_leaves


def centered(raw: Float[Array, "nodes n"], weight: Float[Array, " n"] | None = None) -> Float[Array, " nodes"]:
    """Returns biases that centre the scores of each split on the samples that reach its node."""
    inside, biases = jnp.ones_like(raw[:1], dtype=bool), []
    weight = jnp.ones_like(raw[0]) if weight is None else weight
    for score in topology.levels(raw):
        count = jnp.where(inside, weight, 0).sum(1)
        biases.append(-jnp.where(inside, score * weight, 0).sum(1) / jnp.where(count > 0, count, 1))
        right = score + biases[-1][:, None] > 0
        inside = topology.interleave(inside & ~right, inside & right)
    return jnp.concatenate(biases)


@io.part
@pytree.dataclass
class LatentNetwork:
    """A trained tree and its predictor, on scaled data."""

    params: Any  # parameters of the network, a dict of arrays
    active: Array  # activity of all nodes on the training data, (2**(depth + 1) - 1,); 0 for pruned nodes
    architecture: Architecture = pytree.field(pytree_node=False)  # static options of the network
    features: int = pytree.field(pytree_node=False)  # number of features, p
    task: Task = pytree.field(pytree_node=False)  # what is predicted

    def _network(self, x: Array) -> Any:
        """Returns the flax module for samples like x."""
        from jtrees.methods.latent_tree import modules

        return modules.network_of(self.params, x, self.architecture, self.task)

    def with_kernels(self, change: Callable[[Any], Any]) -> "LatentNetwork":
        """Returns the network with a function applied to the kernels that multiply x, ``(p, width)``."""

        def changed(path: tuple[Any, ...], kernel: Any) -> Any:
            match [entry.key for entry in path]:
                case ["split", "kernel"] | ["split", "layers", 0, "kernel"]:
                    return change(kernel)
                case ["layers", 0, "kernel"] if self.architecture.inputs == "xz":
                    return np.concatenate([change(kernel[: self.features]), kernel[self.features :]])
            return kernel

        return self.replace(params=jax.tree_util.tree_map_with_path(changed, self.params))

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the outputs of the predictor."""
        network = self._network(x)
        return network.outputs(x, network.scores(x), self.active)

    def position(self, x: Float[Array, "n p"]) -> Float[Array, "n all_nodes"]:
        """Returns the traversal z of each sample."""
        scores = self._network(x).scores(x)
        return routing.position(routing.rewards(scores), self.active).T

    def hard_tree(self, batch: Batch) -> ObliqueTree | None:
        """Returns the hard tree, or None if the tree alone does not determine the prediction."""
        # The hard tree has no splits at inactive nodes. Its constant leaves are fitted to the batch.
        if not is_tree(self.architecture):
            return None
        network = self._network(batch.x)
        splits = self.active[: len(network.bias)] > 0
        weights = jnp.where(splits[:, None], network.split.kernel[...].T, 0)
        bias = jnp.where(splits, network.bias[...], -1)
        return with_empty_leaves(ObliqueTree(weights, bias, None), "constant", self.task).refit(*batch)

    def __str__(self) -> str:
        architecture = self.architecture
        parts = f"split={architecture.split!r}, predictor={architecture.predictor!r}, inputs={architecture.inputs!r}"
        return f"depth={architecture.depth}, features={self.features}, {parts}"


def active_on(batch: Batch, params: Any, architecture: Architecture, task: Task, penalty: Any) -> LatentNetwork:
    """Returns the network with the activity of its nodes on a batch, under a penalty."""
    from jtrees.methods.latent_tree import modules

    scores = modules.network_of(params, batch.x, architecture, task).scores(batch.x)
    return LatentNetwork(params, routing.activity(scores, penalty, batch.weight), architecture, batch.x.shape[1], task)
