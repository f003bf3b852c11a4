"""The best of several runs of a recipe that differ only in their keys."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jtrees import pytree
from jtrees.ensembles.bagged import joined
from jtrees.ensembles.wrapper import Wrapper
from jtrees.search import Fitted, Problem, Report, gather, option


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class BestOfReport(Report):
    """The report of :class:`jtrees.BestOf`.

    Attributes:
      run: the index of the chosen run.
      scores: the loss of each run on scaled data, ``(runs,)``. It is infinite if the run is not finite, or if a
        deadline left no time to finish the run.
      base: the report of the chosen run.
    """

    run: int
    scores: np.ndarray
    base: Any


@pytree.dataclass(kw_only=True)
class BestOf(Wrapper):
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

    runs: int = option(4)

    async def search(self, problem: Problem) -> Fitted:
        runs = problem.replace(recipe=problem.recipe.base).repeat(self.runs)
        runs[1:] = [run.replace(is_optional=True) for run in runs[1:]]
        results = await gather(*(self.base.search(run) for run in runs))
        finished = [run for run, result in enumerate(results) if isinstance(result, Fitted)]
        if not finished:
            raise results[0]
        scores = np.array([result.score if isinstance(result, Fitted) else np.inf for result in results])
        run = min(finished, key=lambda run: scores[run])
        best = results[run]
        none = np.full_like(best.history, np.nan)  # of a run that became non-finite
        history = joined([result.history if isinstance(result, Fitted) else none for result in results])
        return best._replace(history=history, report=BestOfReport(run=run, scores=scores, base=best.report))
