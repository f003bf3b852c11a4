"""A model of a raw table: the fitted columns, and a model of the features that the columns become."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Int
import numpy as np

from jtrees import io, prediction, pytree, validation as checks
from jtrees.tables.encoder import TableEncoder
from jtrees.tree import ObliqueTree


@io.model
@pytree.dataclass
class FrameModel:
    """A model of DataFrames, or of arrays whose training rows had missing values.

    The methods take a DataFrame of any library with at least the fitted columns, in any order. If all columns are
    numbers, they also take an array, whose columns are identified by position. They warn with
    :class:`jtrees.tables.ColumnsWarning` if a column has missing values and had none in the training rows. The same
    goes for cells that do not have the kind of their column, which are missing values, too. If a column is missing,
    they raise a ``ValueError``.

    Attributes:
      model: the model of the features, such as a :class:`jtrees.ObliqueTree`.
      encoder: the map from rows to features.
    """

    model: Any
    encoder: TableEncoder = pytree.field(pytree_node=False)

    def predict(self, x: Any) -> Any:
        """Returns predictions, ``(n,)`` or ``(n, k)``, or class probabilities, ``(n, K)``."""
        return self.model.predict(self.encoder.transform(x))

    def leaf_index(self, x: Any) -> Int[np.ndarray, "..."]:
        """Returns the leaf of each row, as ``leaf_index`` of the model."""
        return self.model.leaf_index(self.encoder.transform(x))

    def decision_path(self, x: Any) -> Int[np.ndarray, "..."]:
        """Returns the nodes on the path of each row, as :meth:`jtrees.ObliqueTree.decision_path`."""
        return self.model.decision_path(self.encoder.transform(x))

    def to_text(self, *, x: Any = None, class_names: Sequence[str] | None = None, **options: Any) -> str:
        """Returns the rules in terms of the columns, such as ``0.31 area - 0.4 [area missing] > 0.7``.

        Arguments are passed to :meth:`jtrees.ObliqueTree.to_text`, which gets the names of the features from the
        columns. x is a raw table, whose rows count as new rows. Training rows had target means over other rows in
        training, so they may be in other leaves here. ``class_names`` also appear in features that are means of
        classes: ``[mean sold by city]``.

        Raises:
          AttributeError: if the model is not a single tree.
        """
        if not isinstance(self.model, ObliqueTree):
            raise AttributeError(f"this needs a single tree; this model is a {self.model}")
        features = None if x is None else self.encoder.transform(x)
        encoder = self.encoder if class_names is None else self.encoder.with_class_names(class_names)
        return self.model.to_text(encoder.feature_names, x=features, class_names=class_names, **options)

    @property
    def features(self) -> int:
        """Number of columns of the table."""
        return len(self.encoder.schema.columns)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model."""
        return self.model.num_parameters

    def __repr__(self) -> str:
        return f"FrameModel({self.model!r}, columns={list(self.encoder.schema.columns)})"


def tree_of(model: Any) -> ObliqueTree:
    """Returns the tree of a model, which may be a model of raw tables.

    Raises ``ValueError`` if it is not a single tree.
    """
    tree = model.model if isinstance(model, FrameModel) else model
    if not isinstance(tree, ObliqueTree):
        raise ValueError(f"model must be a single tree, got {checks.quoted(model)}{checks.hint_of_estimator(model)}")
    if np.ndim(tree.weights) != 2:
        raise ValueError(f"model must be a single tree, got a batch of shape {np.shape(tree.weights)[:-2]}")
    return tree


def features_of_rows(model: Any, x: Any, name: str = "x") -> np.ndarray:
    """Returns the rows that a model takes as features, ``(n, p)`` in float64; errors have the ``name`` of the rows."""
    if isinstance(model, FrameModel):
        return model.encoder.transform(x)
    x = np.asarray(checks.check_x(x, features=model.features, finite=False, name=name))
    rows = prediction.filled(x, model.medians)
    checks.check_finite(name, rows)
    return np.asarray(rows, np.float64)


def column_names(model: Any, feature_names: Sequence[str] | None) -> list[str]:
    """Returns the names of the columns that a model takes; ``feature_names`` names the columns of arrays.

    Raises ``ValueError`` for a wrong number of names, equal names, names for a raw table, or an estimator.
    """
    if not hasattr(model, "features"):
        raise ValueError(f"model must be a fitted model, got {checks.quoted(model)}{checks.hint_of_estimator(model)}")
    if isinstance(model, FrameModel):
        if feature_names is not None:
            remedy = "" if model.encoder.schema.named else ", x0, x1, ...: fit it to a DataFrame for other names"
            raise ValueError(f"feature_names must be None: the columns of this model have names{remedy}")
        return list(model.encoder.schema.columns)
    return checks.checked_names(feature_names, model.features)
