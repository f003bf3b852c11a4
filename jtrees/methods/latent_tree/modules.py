"""LatentTree's network as flax modules. They are imported when the first network is made."""

from collections.abc import Callable
from functools import lru_cache, partial
import itertools
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import routing, topology, validation as checks
from jtrees.methods.latent_tree.architecture import Architecture, Split
from jtrees.tasks import Task

_NEAR = 0.1  # factor of the weights of the predictor's last layer, so that it starts near the best constants


def split_scores(
    split: Callable[[Array], Array], bias: Float[Array, " nodes"], x: Float[Array, "n p"]
) -> Float[Array, "nodes n"]:
    """Returns the scores of all splits. A sample goes right if and only if the score is above 0."""
    raw, nodes = split(x), len(bias)
    if raw.shape != (x.shape[0], nodes):
        raise ValueError(f"split must map x of shape {x.shape} to ({x.shape[0]}, {nodes}), got {raw.shape}")
    return raw.T + bias[:, None]


def make_split(kind: Split, features: int, nodes: int, *, hidden: int, dtype: Any, rngs: nnx.Rngs) -> Any:
    """Returns a module of all split functions: ``"linear"``, ``"elu"``, ``"mlp"``, or user-defined."""
    if callable(kind):
        return kind(features, nodes, rngs)
    linear = _linear(dtype, rngs)
    checks.check_choice("split", kind, ("linear", "elu", "mlp"), "a function (features, nodes, rngs) -> module")
    if kind == "mlp":
        return nnx.Sequential(linear(features, hidden), nnx.elu, linear(hidden, nodes))
    split = linear(features, nodes, use_bias=False)
    return split if kind == "linear" else nnx.Sequential(split, nnx.elu)


def _linear(dtype: Any, rngs: nnx.Rngs) -> Callable[..., Any]:
    """Returns the function that makes linear layers."""
    # The precision is the highest. At the default precision a TPU would round the factors to bfloat16, and some samples
    # would reach a different leaf.
    return partial(nnx.Linear, dtype=dtype, param_dtype=dtype, precision="highest", rngs=rngs)


class Network(nnx.Module):
    """Split functions, their biases, and the predictor on the traversal of a sample."""

    def __init__(self, features: int, architecture: Architecture, task: Task, *, dtype: Any, rngs: nnx.Rngs):
        nodes = topology.num_nodes(architecture.depth)
        self.split = make_split(architecture.split, features, nodes, hidden=architecture.hidden, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(nodes, dtype))
        width = 2 * nodes + 1 + (features if architecture.inputs == "xz" else 0)
        linear = _linear(dtype, rngs)
        hidden = [architecture.hidden] * 2 if architecture.predictor == "mlp" else []
        sizes = [width, *hidden, math.prod(task.shape)]
        self.layers = nnx.List([linear(*pair) for pair in itertools.pairwise(sizes)])
        self.architecture, self.task = architecture, task

    def scores(self, x: Float[Array, "n p"]) -> Float[Array, "nodes n"]:
        """Returns the scores of all splits. A sample goes right if and only if the score is above 0."""
        return split_scores(self.split, self.bias[...], x)

    def outputs(
        self, x: Float[Array, "n p"], scores: Float[Array, "nodes n"], active: Array, key: Array | None = None
    ) -> Float[Array, "n *k"]:
        """Returns the outputs of the predictor, from scores and the activity of the nodes; a key enables dropout."""
        z = routing.position(routing.rewards(scores), active)
        out = z.T if self.architecture.inputs == "z" else jnp.concatenate([x, z.T], axis=1)
        *hidden, last = self.layers
        for i, layer in enumerate(hidden):
            out = nnx.elu(layer(out))
            if key is not None and self.architecture.dropout > 0:
                mask = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - self.architecture.dropout, out.shape)
                out = jnp.where(mask, out / (1 - self.architecture.dropout), 0)
        return last(out).reshape(-1, *self.task.shape)


@lru_cache(maxsize=128)
def graph_of(features: int, architecture: Architecture, task: Task, dtype: Any) -> tuple[nnx.GraphDef, Any]:
    """Returns the graph of the network, and the tree structure of its parameters."""
    abstract = nnx.eval_shape(lambda: Network(features, architecture, task, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state, other_state = nnx.split(abstract, nnx.Param, ...)
    if jax.tree.leaves(other_state):
        raise ValueError("split must have parameters as its only state, got a module with other variables")
    return graph, jax.tree.structure(state)


def network_of(params: Any, x: Array, architecture: Architecture, task: Task) -> Network:
    """Returns the network with these parameters, for samples with the number of features and the dtype of x."""
    graph, structure = graph_of(x.shape[1], architecture, task, x.dtype)
    return nnx.merge(graph, jax.tree.unflatten(structure, jax.tree.leaves(params)))


def initial(key: Array, x: Array, architecture: Architecture, task: Task, centered: Callable, outputs: Array) -> Any:
    """Returns random parameters of a network for samples x, ``(n, p)``."""
    # `centered` returns the biases of the splits for the scores of x without biases, (nodes, n). The predictor starts
    # near `outputs`, the best constant outputs, (*k,).
    network = Network(x.shape[1], architecture, task, dtype=x.dtype, rngs=nnx.Rngs(key))
    network.bias[...] = centered(network.scores(x))
    last = network.layers[-1]
    last.bias[...] = outputs.reshape(-1).astype(x.dtype)
    last.kernel[...] = _NEAR * last.kernel[...]
    return nnx.to_pure_dict(nnx.state(network, nnx.Param))
