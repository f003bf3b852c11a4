"""The best of several runs of a recipe that differ only in their keys."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrees import pytree
from jtrees.data import Data
from jtrees.search import Finished, Recipe, Round, Search, SearchResult, options
from jtrees.search.recipe import next_of_all
from jtrees.tasks import Task
from jtrees.training import Batch, map_starts


@pytree.dataclass(kw_only=True)
class BestOf(Recipe):
    """Several runs of a recipe side by side; the model is that of the run with the lowest loss.

    The loss is that on ``validation``, or else the training loss. For recipes whose results depend strongly on the key.
    The runs share what is prepared on the host: the tree of CART, or the bootstrap samples of a bagged base.

    The report is that of the chosen run, with ``run_scores``, the loss of each run on scaled data, ``(runs,)``,
    infinite if not finite (and where CART beats all starts of GET or RADDT on rows left out), and ``run``, the index of
    the chosen run.

    Attributes:
      base: any recipe.
      runs: number of runs.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.BestOf(jtrees.GET(depth=1, starts=1, epochs=20), runs=2)
      >>> fit = jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> fit.report["run_scores"].shape
      (2,)
    """

    base: Recipe = pytree.field(kw_only=False, metadata={"check": options.checked_base})
    runs: int = options.count(4)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        base = self.base.search(task, shape)

        def init(start: Any, batch: Batch, *, key: Array) -> Any:
            return map_starts(lambda key: base.init(start, batch, key=key), jax.random.split(key, self.runs))

        def one_round(at: Round, state: Any, batch: Batch, validation: Batch | None) -> Any:
            return map_starts(lambda state: base.round(at, state, batch, validation), state)

        def result(state: Any, batch: Batch, validation: Batch | None) -> SearchResult:
            results = map_starts(lambda state: base.result(state, batch, validation), state)
            scores = jnp.where(results.finite & jnp.isfinite(results.score), results.score, jnp.inf)
            run = jnp.argmin(scores)
            chosen = jax.tree.map(lambda a: a[run], results)
            return chosen._replace(extra=(chosen.extra, run, scores))

        def finish(result: SearchResult, start: Any, data: Data, **of_run: Any) -> Finished:
            extra, run, scores = jax.device_get(result.extra)
            finished = base.finish(result._replace(extra=extra), start, data, **of_run)
            return finished._replace(report=finished.report | {"run_scores": scores, "run": int(run)})

        functions: Any = {"init": init, "round": one_round, "result": result, "finish": finish}
        return base._replace(**functions, rounds=base.rounds.shared_by(self.runs), next=next_of_all(base))
