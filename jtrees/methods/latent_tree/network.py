"""LatentTree's network: split functions, their biases, and the predictor on what the tree makes of a sample."""

from functools import lru_cache, partial
import itertools
import math
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import io, leaves as kinds, pytree, routing, topology, validation as checks
from jtrees.nn.latent_tree import MAX_DEPTH, check_split, make_split, split_scores
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

WIDEST = 2**15  # hidden layers: the matrix between two of them has 2**30 numbers
PREDICTORS, INPUTS = ("linear", "mlp"), ("z", "xz")


@io.part
class Architecture(NamedTuple):
    """Static options of a network: fields of :class:`LatentTree`."""

    depth: int
    split: Any = "linear"
    predictor: str = "linear"
    inputs: str = "xz"
    hidden: int = 64
    dropout: float = 0.0


class Network(nnx.Module):
    """Split functions, their biases, and the predictor on the traversal of a sample."""

    def __init__(self, features: int, of: Architecture, task: Task, *, dtype: Any, rngs: nnx.Rngs):
        nodes = topology.num_nodes(of.depth)
        self.split = make_split(of.split, features, nodes, hidden=of.hidden, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(nodes, dtype))
        width = 2 * nodes + 1 + (features if of.inputs == "xz" else 0)
        linear = partial(nnx.Linear, dtype=dtype, param_dtype=dtype, rngs=rngs)
        sizes = [width, *([of.hidden, of.hidden] if of.predictor == "mlp" else []), math.prod(task.shape)]
        self.layers = nnx.List([linear(*pair) for pair in itertools.pairwise(sizes)])
        self.of, self.task = of, task

    def scores(self, x: Float[Array, "n p"]) -> Float[Array, "nodes n"]:
        """Returns the scores of all splits: right iff above 0."""
        return split_scores(self.split, self.bias[...], x)

    def outputs(
        self, x: Float[Array, "n p"], scores: Float[Array, "nodes n"], active: Array, key: Array | None = None
    ) -> Float[Array, "n *k"]:
        """Returns the outputs of the predictor for scores, and nodes of this activity; a key enables dropout."""
        z = routing.position(routing.rewards(scores), active)
        out = z.T if self.of.inputs == "z" else jnp.concatenate([x, z.T], axis=1)
        *hidden, last = self.layers
        for i, layer in enumerate(hidden):
            out = nnx.elu(layer(out))
            if key is not None and self.of.dropout > 0:
                kept = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - self.of.dropout, out.shape)
                out = jnp.where(kept, out / (1 - self.of.dropout), 0)
        return last(out).reshape(-1, *self.task.shape)


@lru_cache(maxsize=128)
def graph_of(features: int, of: Architecture, task: Task, dtype: Any) -> tuple[nnx.GraphDef, Any]:
    """Returns the graph of the network, and the tree structure of its parameters."""
    abstract = nnx.eval_shape(lambda: Network(features, of, task, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state, others = nnx.split(abstract, nnx.Param, ...)
    if jax.tree.leaves(others):
        raise ValueError("split must have parameters as its only state, got a module with other variables")
    return graph, jax.tree.structure(state)


def network_of(params: Any, x: Array, of: Architecture, task: Task) -> Network:
    """Returns the network of these parameters, for samples such as x."""
    graph, structure = graph_of(x.shape[1], of, task, x.dtype)
    return nnx.merge(graph, jax.tree.unflatten(structure, jax.tree.leaves(params)))


def is_tree(of: Architecture) -> bool:
    """Whether the tree alone determines the prediction."""
    return (of.split, of.predictor, of.inputs) == ("linear", "linear", "z")


def checked_architecture(of: Architecture) -> Architecture:
    """Returns the checked architecture; raises ``ValueError`` if it is invalid."""
    check_split(of.split)
    checks.check_choice("predictor", of.predictor, PREDICTORS)
    checks.check_choice("inputs", of.inputs, INPUTS)
    checks.check_part("dropout", of.dropout)
    depth, hidden = checks.check_depth(of.depth, MAX_DEPTH), checks.check_count("hidden", of.hidden, most=WIDEST)
    return of._replace(depth=depth, hidden=hidden, dropout=float(of.dropout))


def centered(raw: Float[Array, "nodes n"], weight: Float[Array, " n"] | None = None) -> Float[Array, " nodes"]:
    """Returns biases that centre the scores of each split on the samples that reach its node."""
    inside, biases = jnp.ones_like(raw[:1], dtype=bool), []
    each = jnp.ones_like(raw[0]) if weight is None else weight
    for score in topology.levels(raw):
        count = jnp.where(inside, each, 0).sum(1)
        biases.append(-jnp.where(inside, score * each, 0).sum(1) / jnp.where(count > 0, count, 1))
        right = score + biases[-1][:, None] > 0
        inside = topology.interleave(inside & ~right, inside & right)
    return jnp.concatenate(biases)


@io.part
@pytree.dataclass
class LatentNetwork:
    """A trained tree and its predictor, on scaled data.

    Attributes:
      params: parameters of the network, a dict of arrays.
      active: activity of all nodes on the training data, ``(2**(depth + 1) - 1,)``; 0: pruned.
      architecture: static options of the network.
      features: number of features, p.
      task: what is predicted.
    """

    params: Any
    active: Array
    architecture: Architecture = pytree.field(pytree_node=False)
    features: int = pytree.field(pytree_node=False)
    task: Task = pytree.field(pytree_node=False)

    def composed(self, matrix: Array) -> "LatentNetwork":
        """Returns the network as a function of x instead of ``x @ matrix``."""
        graph, structure = graph_of(self.features, self.architecture, self.task, matrix.dtype)
        network = nnx.merge(graph, jax.tree.unflatten(structure, jax.tree.leaves(self.params)))
        first = network.split if self.architecture.split == "linear" else network.split.layers[0]
        first.kernel[...] = jnp.matmul(matrix, first.kernel[...], precision="highest")
        if self.architecture.inputs == "xz":
            kernel, p = network.layers[0].kernel, self.features
            kernel[...] = kernel[...].at[:p].set(jnp.matmul(matrix, kernel[:p], precision="highest"))
        return self.replace(params=nnx.to_pure_dict(nnx.state(network, nnx.Param)))

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the outputs of the predictor."""
        network = network_of(self.params, x, self.architecture, self.task)
        return network.outputs(x, network.scores(x), self.active)

    def position(self, x: Float[Array, "n p"]) -> Float[Array, "n all_nodes"]:
        """Returns the traversal z of each sample."""
        scores = network_of(self.params, x, self.architecture, self.task).scores(x)
        return routing.position(routing.rewards(scores), self.active).T

    def hard_tree(self, batch: Batch) -> ObliqueTree | None:
        """Returns the hard tree, without splits at inactive nodes and with constant leaves fitted to the batch; None if
        the tree alone does not determine the prediction.
        """
        if not is_tree(self.architecture):
            return None
        network = network_of(self.params, batch.x, self.architecture, self.task)
        splits = self.active[: len(network.bias)] > 0
        weights = jnp.where(splits[:, None], network.split.kernel[...].T, 0)
        bias = jnp.where(splits, network.bias[...], -1)
        empty = kinds.kind_of("constant", self.task).empty(len(bias) + 1, 0, self.task.shape, batch.x.dtype)
        return ObliqueTree(weights, bias, empty).refit(*batch)

    def __str__(self) -> str:
        architecture = self.architecture
        parts = f"split={architecture.split!r}, predictor={architecture.predictor!r}, inputs={architecture.inputs!r}"
        return f"depth={architecture.depth}, features={self.features}, {parts}"


def active_on(batch: Batch, params: Any, of: Architecture, task: Task, penalty: Any) -> LatentNetwork:
    """Returns the network with the activity of its nodes on a batch, under a penalty."""
    scores = network_of(params, batch.x, of, task).scores(batch.x)
    return LatentNetwork(params, routing.activity(scores, penalty, batch.weight), of, batch.x.shape[1], task)
