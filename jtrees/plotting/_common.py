"""The common parts of all plots: axes, and the features and names of a model."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jtrees import validation
from jtrees.data.frame_model import FrameModel
from jtrees.tree import ObliqueTree


def new_axes(ax: Any, **size: Any) -> Any:
    """Returns the given axes, or new axes if ``ax`` is None.

    Raises:
      ImportError: without matplotlib.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('plots need matplotlib: pip install "jtrees[plots]"') from error
    return plt.subplots(**size)[1] if ax is None else ax


def literal(text: str) -> str:
    """Returns a text for matplotlib that shows each dollar sign, instead of starting mathematics."""
    return text.replace("$", r"\$")


def features_of(
    model: Any, x: Any, feature_names: Sequence[str] | None, class_names: Sequence[str] | None = None
) -> tuple[Any, Any, list[str]]:
    """Returns the model of features, the samples as features, ``(n, p)`` or None, and the names of the features.

    Names of features that refer to classes use ``class_names``.

    Raises:
      ValueError: for rows that do not fit the model, for a wrong number of names, or for names for a raw table.
    """
    if isinstance(model, FrameModel):
        if feature_names is not None:
            raise ValueError("feature_names must be None: the columns of this model have names")
        features = None if x is None else model.columns.transform(x)
        columns = model.columns if class_names is None else model.columns.with_class_names(class_names)
        return model.model, features, columns.feature_names
    features = None if x is None else np.asarray(validation.check_x(x, features=model.features), np.float64)
    names = [f"x{i}" for i in range(model.features)] if feature_names is None else list(map(str, feature_names))
    if len(names) != model.features:
        raise ValueError(f"feature_names must hold {model.features} names, one a column, got {len(names)}")
    return model, features, names


def tree_of(model: Any) -> ObliqueTree:
    """Returns the model if it is a single tree.

    Raises:
      ValueError: for any other model.
    """
    if not isinstance(model, ObliqueTree):
        raise ValueError(
            f"model must be a single tree, got {validation.quoted(model)}{validation.hint_of_estimator(model)}"
        )
    if np.ndim(model.weights) != 2:
        raise ValueError(f"model must be a single tree, got a batch of shape {np.shape(model.weights)[:-2]}")
    return model
