"""The common parts of all plots: axes, and the features and names of a model."""

from collections.abc import Sequence
import textwrap
from typing import Any

from jtrees.tables.model import FrameModel, column_names, features_of_rows

_LABEL = 24  # largest number of characters in a line of a label


def new_axes(ax: Any, **size: Any) -> Any:
    """Returns the given axes, or new axes if ``ax`` is None; raises ``ImportError`` without matplotlib."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "jtrees[plots]"') from error
    return plt.subplots(**size)[1] if ax is None else ax


def literal(text: str) -> str:
    """Returns a text for matplotlib that shows each dollar sign, instead of starting mathematics."""
    return text.replace("$", r"\$")


def wrapped(name: str) -> str:
    """Returns a name as the label of a bar, in lines of limited length."""
    return literal(textwrap.fill(name, _LABEL))


def features_of(
    model: Any, x: Any, feature_names: Sequence[str] | None, class_names: Sequence[str] | None = None
) -> tuple[Any, Any, list[str]]:
    """Returns the model of features, the samples as features, ``(n, p)`` or None, and the names of the features.

    Names of features that refer to classes use ``class_names``.

    Raises:
      ValueError: for rows that do not fit the model, for a wrong number of names, or for names for a raw table.
    """
    names = column_names(model, feature_names)
    features = None if x is None else features_of_rows(model, x)
    if not isinstance(model, FrameModel):
        return model, features, names
    encoder = model.encoder if class_names is None else model.encoder.with_class_names(class_names)
    return model.model, features, encoder.feature_names
