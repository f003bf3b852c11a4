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
      score: the score it was chosen by (lower is better); infinite if the search was not finite.
      finite: whether the search was finite.
      step: number of updates before the model was evaluated.
      report: what ``finish`` needs for the report, of a class of the recipe's own; or None.
      history: loss before each update on scaled data, ``(..., updates)``, NaN for updates not made.
      held_out: the loss on scaled rows that the search left out, or None.
      preconditioning: how features were preconditioned, or None.
    """

    model: Any
    score: Any
    finite: Any
    step: Any
    report: Any = None
    history: Any = None
    held_out: Any = None
    preconditioning: Preconditioning | None = None


class HeldOut(NamedTuple):
    """A loss on rows that a run of the search left out: of that run's model, or by the trees that left them out.

    In a :class:`SearchResult` the loss is that of scaled data.

    Attributes:
      loss: the mean loss, as that of :class:`jtrees.FitResult`; of votes the share of wrong rows.
      rows: which rows of the batch these are, ``(n,)`` bool; None: all, each predicted by the trees that left it out.
    """

    loss: float
    rows: Any = None


class Finished(NamedTuple):
    """The result of a search in the user's units.

    Attributes:
      model: the model, with ``predict(x)``.
      tree: the model if it is a :class:`jtrees.ObliqueTree`, else None.
      loss: the loss it was chosen by.
      report: the recipe's report.
      held_out: the loss on rows that the search left out, or None; None, too, if the model was changed since.
    """

    model: Any
    tree: ObliqueTree | None
    loss: float
    report: Any = Report()
    held_out: HeldOut | None = None

    @classmethod
    def of(
        cls, result: SearchResult, data: Data, model: Any, tree: ObliqueTree | None, loss: float, report: Report
    ) -> "Finished":
        """Returns the model of a result, with a report and the held-out loss of the search."""
        held_out = result.held_out
        if held_out is not None:
            held_out = held_out._replace(loss=held_out.loss * data.loss_unit)
        return cls(model, tree, loss, report, held_out)


def check_finite(result: SearchResult) -> None:
    """Raises ``FloatingPointError`` if a search was not finite."""
    if not result.finite:
        raise FloatingPointError("training became non-finite: try a smaller learning_rate")


def on_device(model: Any) -> Any:
    """Returns a network of a :class:`jtrees.SoftModel` with its arrays on the device."""
    return jax.tree.map(sharding.from_host, model)


def loss_of(result: SearchResult, model: Any, data: Data, task: Task) -> float:
    """The loss to report for a model in the user's units; for a user-defined loss the score, on scaled data."""
    return data.loss(model) if task.in_units else float(result.score)


@io.family
class Recipe:
    """A paper's whole procedure as data: a dataclass (:func:`jtrees.pytree.dataclass`) with its options as fields.

    Numeric options may be traced, the others are static: see :mod:`jtrees.search.options`.
    """

    def search(self, runs: Runs) -> list[SearchResult]:
        """Returns the result of each run; fewer, the first ones, if a deadline or Ctrl-C ends the search.

        The recipes of the runs have the same static options as this one; their numbers may differ.
        """
        raise NotImplementedError

    def finish(self, result: SearchResult, data: Data, *, key: Array, monitor: Monitor) -> Finished:
        """Returns the result of a run in the user's units.

        Raises:
          FloatingPointError: if the search was not finite.
        """
        return finished_tree(result, data, data.table.task)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        """Checks options, each of which is valid by itself, against the task and the shape of the features.

        Raises:
          ValueError: for options that do not fit.
        """

    def scaling(self, table: Table) -> Scaling:
        """Returns the scaling of a table on which the recipe is trained."""
        return Scaling.fit(table)

    def tree_leaves(self, task: Task) -> str | None:
        """Returns the kind of leaves of a model that is one tree, ``"constant"`` or ``"linear"``, else None.

        Class frequencies are constant leaves.
        """
        return "constant"

    def settled(self, weak: bool = False) -> Any:
        """Returns the recipe with a value for each option that is None until its context is known.

        Args:
          weak: whether the recipe fits the trees of a boosted sum, each of which needs less than a tree on its own.
        """
        own = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return self.replace(**{name: value.settled(weak) for name, value in own if isinstance(value, Recipe)})

    @property
    def thins_splits(self) -> bool:
        """Whether ``finish`` removes columns from splits, which a recipe around it would lose."""
        return False

    def keeps_monotone(self, task: Task) -> bool:
        """Whether the recipe can keep its predictions from falling in given features."""
        return False

    def targets(self, x: Any, y: Any) -> Any:
        """Returns the targets: y, unless the recipe derives them from x."""
        return y

    def replace(self, **options: Any) -> Any:
        """Returns the recipe with other options (provided by :func:`jtrees.pytree.dataclass`)."""
        raise NotImplementedError


def check_keeps_splits(base: Recipe) -> None:
    """Raises ``ValueError`` for a base whose splits are thinned at its end, where only its search is used."""
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
      fitted: whether leaves are constants fitted to the data, which are then fitted once more in double precision.
        None: not known; those that equal the fitted ones up to rounding are.
      **shrinkage: how they were fitted: options of :meth:`jtrees.data.Data.refit`.

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
    return Finished.of(result, data, tree, tree, loss_of(result, tree, data, task), report)
