"""LatentTree's static options and trained network, and the activity of its nodes. Flax is not imported here."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jtrees import io, pytree, routing, topology, validation as checks
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree, with_empty_leaves

MAX_DEPTH = 10
# A function maps (features, nodes, rngs of flax) to a module from (n, features) to scores (n, nodes). The module's only
# state is parameters.
Split = Literal["linear", "elu", "mlp"] | Callable[[int, int, Any], Callable[[Array], Array]]
WIDEST = 2**15  # largest width of hidden layers: the matrix between two hidden layers then has 2**30 numbers


@io.part
class Architecture(NamedTuple):
    """Static options of a network: fields of :class:`LatentTree`."""

    depth: int
    split: Any = "linear"
    predictor: str = "linear"
    inputs: str = "xz"
    hidden: int = 64
    dropout: float = 0.0


def check_split(split: Any) -> None:
    """Raises ``ValueError`` if a split is neither a known name nor a function."""
    if not callable(split):
        checks.check_choice("split", split, ("linear", "elu", "mlp"), "a function (features, nodes, rngs) -> module")


def is_tree(architecture: Architecture) -> bool:
    """Returns whether the tree alone determines the prediction."""
    return (architecture.split, architecture.predictor, architecture.inputs) == ("linear", "linear", "z")


def checked_architecture(architecture: Architecture) -> Architecture:
    """Returns the checked architecture, or raises ``ValueError`` if it is invalid."""
    check_split(architecture.split)
    checks.check_choice("predictor", architecture.predictor, ("linear", "mlp"))
    checks.check_choice("inputs", architecture.inputs, ("z", "xz"))
    checks.check_number("dropout", architecture.dropout, least=0, below=1)
    depth = checks.check_depth(architecture.depth, MAX_DEPTH)
    hidden = checks.check_count("hidden", architecture.hidden, most=WIDEST)
    return architecture._replace(depth=depth, hidden=hidden, dropout=float(architecture.dropout))


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
