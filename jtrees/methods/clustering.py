"""Hierarchical clustering by a LatentTree (Zantedeschi et al. 2021, section 4.2)."""

from typing import Any, Literal

import numpy as np

from jtrees import pytree, validation as checks
from jtrees.data import Scaling, Table
from jtrees.methods.latent_tree.architecture import MAX_DEPTH
from jtrees.methods.latent_tree.latent import LatentRecipe
from jtrees.search import Fitted, Problem, option
from jtrees.search.minibatch import trained
from jtrees.tasks import Task


@pytree.dataclass(kw_only=True)
class LatentClustering(LatentRecipe):
    """Clusters unlabelled samples by a tree that is trained to predict some features from the remaining features.

    ``jtrees.fit(LatentClustering(target_features=(0, 1)), x, key=key)`` uses linear splits, a linear predictor and
    squared error. It needs no y, and ``validation`` is ``(x, None)``. Target features are scaled to mean 0 and
    deviation 1. The remaining features are centred and divided by one common number. So their relative scales matter,
    as in distance-based clustering. Scale these features first if their units differ. Features are not preconditioned.

    The fit's tree takes all features; the weights of the target features are 0. Inactive nodes do not split. The leaves
    of the tree are the clusters, and hold the means of the target features, ``(leaves, targets)``.
    ``tree.leaf_index(x)`` returns the cluster of each sample, and ``tree.decision_path(x)`` also returns the larger
    clusters that contain it. The report is a :class:`jtrees.search.TrainingReport`.

    Attributes:
      target_features: columns to predict from the remaining columns: at least one column, but not all.
      depth: depth of the tree, 1 to 10.
      epochs: number of passes over the data; None: as in :class:`jtrees.DGT`.
      batch_size: samples in a mini-batch, as in :class:`jtrees.DGT`.
      learning_rate: initial learning rate.
      penalty: penalty of an active node per sample: the paper's lambda divided by its batch size.
      weight_decay: strength of AdamW's decay of all parameters.
      inputs: inputs of the predictor, ``"z"`` or ``"xz"``.
      patience: see :class:`jtrees.LatentTree`.
      early_stopping: see :class:`jtrees.LatentTree`.

    Example:
      >>> x = np.repeat([[0.0, 0.0, 0.0], [4.0, 4.0, 1.0]], 20, axis=0)  # two groups of twenty
      >>> recipe = jtrees.LatentClustering(depth=1, target_features=(2,), epochs=40)
      >>> leaf = jtrees.fit(recipe, x, key=jax.random.key(1)).tree.leaf_index(x)
      >>> print(leaf[0] != leaf[-1])
      True
    """

    target_features: tuple[int, ...] = option((0,), check=lambda _, value: _numbers_of(value))
    depth: int = option(5, most=MAX_DEPTH)
    penalty: float = option(0.1, above=0)
    weight_decay: float = option(0.0, least=0)
    inputs: Literal["z", "xz"] = option("z")
    epochs: int | None = option(100)
    batch_size: int = option(8)
    learning_rate: float = option(1e-3, above=0)

    def targets(self, x: Any, y: Any) -> np.ndarray:
        x = np.asarray(checks.check_x(x))
        return x[:, _checked_columns(self.target_features, x.shape[1])]

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        if not task.is_least_squares:
            raise ValueError(f"task must be a Regression with squared error in clustering, got {checks.quoted(task)}")
        super().check(task, shape)

    async def search(self, problem: Problem) -> Fitted:
        return self.finish(problem, await trained(problem))

    def scaling(self, table: Table) -> Scaling:
        before = (table.columns or ())[: max(self.target_features) + 1]
        if names := [column.name for column in before if column.features != 1]:
            expected = "columns of one feature each, up to the last target feature"
            raise ValueError(f"x must have {expected}, got {checks.quoted_list(names)}")
        x, weight = table.x.astype(np.float64), table.weight
        mean = np.average(x, axis=0, weights=weight)
        deviation = np.sqrt(np.average(np.square(x - mean), axis=0, weights=weight))
        targets = _checked_columns(self.target_features, x.shape[1])
        y_mean, y_deviation = mean[targets], deviation[targets]
        # A common scale for the remaining features; 0 for the target features, which hides them from the tree.
        inputs = np.setdiff1d(np.flatnonzero(np.ptp(x, axis=0) > 0), targets)
        common = np.sqrt(np.square(deviation[inputs]).mean()) if len(inputs) else 0.0
        deviation = np.where(np.isin(np.arange(x.shape[1]), inputs), common, 0)
        return Scaling.from_moments(mean, deviation, 1.0, y_mean, y_deviation, y_mean)


def _numbers_of(target_features: Any) -> tuple[int, ...]:
    """Returns the numbers of target features as a tuple, which may be static."""
    try:
        return tuple(map(int, np.atleast_1d(target_features)))
    except (TypeError, ValueError, OverflowError):
        got = checks.quoted(target_features)
        raise ValueError(f"target_features must be different numbers of columns, got {got}") from None


def _checked_columns(target_features: Any, p: int) -> np.ndarray:
    columns = np.asarray(target_features)
    if columns.ndim != 1 or columns.dtype.kind not in "iu" or len(np.unique(columns)) != len(columns):
        raise ValueError(f"target_features must be different numbers of columns, got {checks.quoted(target_features)}")
    if not 0 < len(columns) < p or (columns < 0).any() or (columns >= p).any():
        raise ValueError(
            f"target_features must be some of the columns 0..{p - 1}, not all, got {checks.quoted(target_features)}"
        )
    return columns
