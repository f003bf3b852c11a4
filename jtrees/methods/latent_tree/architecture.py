"""LatentTree's static options; this module does not import flax."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jaxtyping import Array

from jtrees import io

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


def is_tree(architecture: Architecture) -> bool:
    """Returns whether the tree alone determines the prediction."""
    return (architecture.split, architecture.predictor, architecture.inputs) == ("linear", "linear", "z")
