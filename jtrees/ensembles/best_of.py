"""The best of several runs of a recipe that differ only in their keys."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jtrees import pytree
from jtrees.data import Data, Scaling, Table
from jtrees.ensembles.bagged import joined
from jtrees.search import Finished, HeldOut, Recipe, Report, Runs, SearchResult, options
from jtrees.tasks import Task


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BestOfReport(Report):
    """The report of :class:`jtrees.BestOf`.

    Attributes:
      run: the index of the chosen run.
      scores: the loss of each run on scaled data, ``(runs,)``. It is infinite if the run is not finite, or if no start
        of GET or RADDT predicts held-out rows better than CART.
      base: the report of the chosen run.
    """

    run: int
    scores: np.ndarray
    base: Any


@pytree.dataclass(kw_only=True)
class BestOf(Recipe):
    """Several runs of a recipe side by side; the run with the lowest loss gives the model.

    This recipe is for recipes whose results depend strongly on the key. The loss is the loss on ``validation``, or else
    the training loss. Results that depend on the data alone, such as the tree of CART, are computed once for all runs.

    The report is a :class:`jtrees.ensembles.BestOfReport`.

    Attributes:
      base: any recipe.
      runs: number of runs.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.BestOf(jtrees.GET(depth=1, starts=1, epochs=20), runs=2)
      >>> fit = jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> fit.report.search.scores.shape
      (2,)
    """

    base: Recipe = pytree.field(kw_only=False, metadata={"check": options.checked_base})
    runs: int = options.count(4)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        self.base.check(task, shape)

    def scaling(self, table: Table) -> Scaling:
        return self.base.scaling(table)

    @property
    def thins_splits(self) -> bool:
        return self.base.thins_splits

    def keeps_monotone(self, task: Task) -> bool:
        return self.base.keeps_monotone(task)

    def tree_leaves(self, task: Task) -> str | None:
        return self.base.tree_leaves(task)

    def search(self, runs: Runs) -> list[SearchResult]:
        each = runs.using([recipe.base for recipe in runs.recipes]).repeat(self.runs)
        results, chosen = self.base.search(each), []
        for first in range(0, len(results), self.runs):
            some = results[first : first + self.runs]
            scores = np.array([one.score if one.finite and np.isfinite(one.score) else np.inf for one in some])
            run = int(np.argmin(scores))
            result = _of_run(some[run], run, scores)
            held_out = tuple(HeldOut(trial and _of_run(trial, run, scores), rows) for trial, rows in result.held_out)
            chosen.append(result._replace(history=joined([one.history for one in some]), held_out=held_out))
        return chosen

    def finish(self, result: SearchResult, data: Data, **of_run: Any) -> Finished:
        report: BestOfReport = result.report
        finished = self.base.finish(result._replace(report=report.base), data, **of_run)
        return finished._replace(report=report.replace(base=finished.report))


def _of_run(result: SearchResult, run: int, scores: np.ndarray) -> SearchResult:
    """Returns a result of the base with the report of the chosen run around its own."""
    return result._replace(report=BestOfReport(run=run, scores=scores, base=result.report))
