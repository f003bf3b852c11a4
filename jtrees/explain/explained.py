"""The columns that explain a model, and the model's tree."""

from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from jtrees import prediction
from jtrees.tables.model import FrameModel, column_names, features_of_rows
from jtrees.tree import ObliqueTree


@dataclasses.dataclass(frozen=True)
class ExplainedColumns:
    """The columns that explain a model.

    Attributes:
      names: names of the columns.
      owner: index of the column of each feature, ``(p,)``.
      model: the model.
    """

    names: list[str]
    owner: np.ndarray
    model: Any

    @classmethod
    def from_model(cls, model: Any, feature_names: Sequence[str] | None) -> "ExplainedColumns":
        names = column_names(model, feature_names)
        if not isinstance(model, FrameModel):
            return cls(names, np.arange(model.features), model)
        sizes = {column.name: column.features for column in model.encoder.named_columns if column.features}
        return cls(list(sizes), np.repeat(np.arange(len(sizes)), list(sizes.values())), model)

    def gaps(self, x: Any) -> np.ndarray:
        """Returns which features of rows come from missing values, ``(n, p)`` bool."""
        if not isinstance(self.model, FrameModel):
            return np.isnan(np.asarray(x, np.float64))
        gaps = self.model.encoder.gaps(x)
        return np.column_stack([gaps[name] for name in self.names])[:, self.owner]

    def row(self, row: Any) -> np.ndarray:
        """Returns one row as features, ``(1, p)``."""
        x = features_of_rows(self.model, as_rows(row), "row")
        if len(x) != 1:
            raise ValueError(f"row must be one row, got {len(x)}")
        return x

    def summed(self, terms: np.ndarray) -> np.ndarray:
        """Returns the sums over each column's features, ``(columns, ...)``."""
        out = np.zeros((len(self.names), *terms.shape[1:]))
        np.add.at(out, self.owner, terms)
        return out

    def free(self) -> np.ndarray:
        """Returns which features may change, ``(p,)`` bool: the first feature of each column of numbers."""
        first = np.append(True, self.owner[1:] != self.owner[:-1])
        if not isinstance(self.model, FrameModel):
            return first
        columns = self.model.encoder.schema.columns
        return first & np.array([columns[name].kind == "number" for name in self.names])[self.owner]


def as_rows(row: Any) -> Any:
    """Returns one row, ``(p,)``, a Series of pandas or a table, as a table of one row."""
    if hasattr(row, "to_frame") and hasattr(row, "index") and np.ndim(row) == 1:
        return row.to_frame().T
    return np.asarray(row)[None] if not hasattr(row, "columns") and np.ndim(row) == 1 else row


def relative(tree: ObliqueTree, x: np.ndarray) -> np.ndarray:
    """Returns samples in the coordinates of the tree: relative to its origin, in float32."""
    return np.asarray(prediction.scaled(tree.origin, x, tree.features), np.float32)
