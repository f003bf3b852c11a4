"""LatentTree's static options; this module does not import flax."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jaxtyping import Array

from jtrees import io, validation as checks

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
