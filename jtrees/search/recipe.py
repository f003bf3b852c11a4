"""Recipe: a paper's whole procedure as data, with the search that runs it on scaled data."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jaxtyping import Array
import numpy as np

from jtrees import io, sharding, validation as checks
from jtrees.data import Data, Scaling, Table
from jtrees.search.monitor import Monitor
from jtrees.search.report import Preconditioning, Report, TreeReport
from jtrees.search.runs import Runs
from jtrees.tasks import Task
from jtrees.tree import ObliqueTree


class SearchResult(NamedTuple):
    """The result of a search on scaled data, on the host.

    Attributes:
      model: the model, or its splits.
      score: the score by which the model was chosen (lower is better); infinite if the search was not finite.
      finite: whether the search was finite.
      step: number of updates before the model was evaluated.
      report: data from which ``finish`` makes the report, in a class of the recipe; or None.
      history: loss before each update on scaled data, ``(..., updates)``; NaN for updates that were not made.
      held_out: results of the search that were not trained on some rows, with these rows.
      preconditioning: how the features were preconditioned. None: no strength was tried or given.
    """

    model: Any
    score: Any
    finite: Any
    step: Any
    report: Any = None
    history: Any = None
    held_out: "tuple[HeldOut, ...]" = ()
    preconditioning: Preconditioning | None = None


class HeldOut(NamedTuple):
    """A result that was not trained on some rows. These rows chose a part of the final result.

    Attributes:
      result: the result, which ``finish`` takes like the final result. None: the final result itself.
      rows: the rows of the batch that were held out, ``(n,)`` bool.
    """

    result: SearchResult | None
    rows: np.ndarray


class LeftOut(NamedTuple):
    """Losses of rows by models that were not trained on them.

    Attributes:
      losses: the loss of each row of the table in the user's units, as in :class:`jtrees.FitResult`; for votes, 1 for a
        wrong class. NaN for a row that all models were trained on, ``(n,)``.
      chose: whether the rows also chose a part of the model, such as its number of rounds.
      several: whether several models left out different rows.
    """

    losses: np.ndarray
    chose: bool
    several: bool

    @property
    def rows(self) -> np.ndarray:
        """Numbers of the rows with a loss."""
        return np.flatnonzero(~np.isnan(self.losses))


class Finished(NamedTuple):
    """The result of a search in the user's units.

    Attributes:
      model: the model, with ``predict(x)``.
      tree: the model if it is a :class:`jtrees.ObliqueTree`, else None.
      loss: the loss by which the model was chosen.
      report: the recipe's report.
      left_out: losses of rows by parts of the model that were not trained on them, such as the trees of a bag. None:
        the driver computes them from ``held_out`` of the result.
    """

    model: Any
    tree: ObliqueTree | None
    loss: float
    report: Any = Report()
    left_out: LeftOut | None = None


def check_finite(result: SearchResult) -> None:
    """Raises ``FloatingPointError`` if a search was not finite."""
    if not result.finite:
        raise FloatingPointError("training became non-finite: try a smaller learning_rate")


def on_device(model: Any) -> Any:
    """Returns the network of a :class:`jtrees.SoftModel` with its arrays on the device."""
    return jax.tree.map(sharding.from_host, model)


def loss_of(result: SearchResult, model: Any, data: Data, task: Task) -> float:
    """Returns the loss to report, in the user's units; for a user-defined loss, the score on scaled data."""
    return data.loss(model) if task.in_units else float(result.score)


@io.family
class Recipe:
    """A paper's whole procedure as data: a dataclass (:func:`jtrees.pytree.dataclass`) with its options as fields.

    Numeric options may be traced. All other options are static. See :mod:`jtrees.search.options`.
    """

    def search(self, runs: Runs) -> list[SearchResult]:
        """Returns the result of each run; a search that a deadline or Ctrl-C ends may return only the first results.

        The recipes of the runs have the same static options as this recipe. Their numeric options may differ.
        """
        raise NotImplementedError

    def finish(self, result: SearchResult, data: Data, *, key: Array, monitor: Monitor) -> Finished:
        """Returns the result of a run in the user's units.

        Raises:
          FloatingPointError: if the search was not finite.
        """
        return finished_tree(result, data, data.table.task)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        """Checks the options, each of which is valid on its own, against the task and the shape of the features.

        Raises:
          ValueError: if an option does not suit the task or the shape.
        """

    def scaling(self, table: Table) -> Scaling:
        """Returns the scaling of a table for the training of the recipe."""
        return Scaling.fit(table)

    def tree_leaves(self, task: Task) -> str | None:
        """Returns the kind of leaves if the model is a single tree, ``"constant"`` or ``"linear"``, else None.

        Class frequencies count as constant leaves.
        """
        return "constant"

    def settled(self, weak: bool = False) -> Any:
        """Returns the recipe with a value for each option that is None because its default depends on the context.

        Args:
          weak: whether the recipe fits the trees of a boosted sum. Such a tree needs less training than a single tree.
        """
        own = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return self.replace(**{name: value.settled(weak) for name, value in own if isinstance(value, Recipe)})

    @property
    def thins_splits(self) -> bool:
        """Whether ``finish`` removes columns from splits. A recipe around this recipe would skip that step."""
        return False

    def keeps_monotone(self, task: Task) -> bool:
        """Returns whether the recipe supports features in which predictions must not fall."""
        return False

    def targets(self, x: Any, y: Any) -> Any:
        """Returns the targets: y, or targets that the recipe derives from x."""
        return y

    def replace(self, **options: Any) -> Any:
        """Returns the recipe with changed options; :func:`jtrees.pytree.dataclass` provides this method."""
        raise NotImplementedError


def check_keeps_splits(base: Recipe) -> None:
    """Raises ``ValueError`` for a base whose ``finish`` thins splits, because only the search of a base is used."""
    if base.thins_splits:
        raise ValueError(f"base must not thin its splits at the end, as Sparse does, got {checks.quoted(base)}")


def finished_tree(
    result: SearchResult, data: Data, task: Task, *, fitted: bool | None = None, **shrinkage: Any
) -> Finished:
    """Returns a hard tree of scaled data in the user's units.

    Args:
      result: the result of the search.
      data: the data.
      task: what is predicted.
      fitted: whether the leaves are constants fitted to the data. Such leaves are fitted again in double precision.
        None: not known. Leaves that equal fitted leaves up to rounding are then replaced by the fitted leaves.
      **shrinkage: options of :meth:`jtrees.data.Data.refit` with which the leaves were fitted.

    The report is a :class:`TreeReport`.
    """
    check_finite(result)
    tree = data.scaling.restore_splits(result.model)
    tree = tree.replace(leaves=data.scaling.restore_leaves(result.model.leaves))
    if fitted is None:
        tree = data.with_fitted(tree)
    elif fitted:
        tree = data.refit(tree, "constant", **shrinkage)[0]
    tree = data.ordered(tree).merged()
    path = np.asarray(tree.decision_path(data.table.x))[:-1]
    report = TreeReport(reached=len(np.unique(path)), preconditioning=result.preconditioning)
    return Finished(tree, tree, loss_of(result, tree, data, task), report)
