"""The best of several runs of a recipe that differ only in their keys."""

from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees.data import Data
from jtrees.search import Finished, Recipe, Rounds, Search, SearchResult, options
from jtrees.tasks import Task
from jtrees.training import Batch, map_starts


@struct.dataclass(kw_only=True)
class BestOf(Recipe):
    """Several runs of a recipe side by side; the model is that of the run with the lowest loss.

    The loss is that on ``validation``, or else the training loss. For recipes whose results depend
    strongly on the key.

    The report is that of the chosen run, with ``run_scores``, the loss of each run on scaled data, ``(runs,)``,
    infinite if not finite, and ``run``, the index of the chosen run.

    Attributes:
      base: any recipe.
      runs: number of runs.
    """

    base: Recipe = struct.field(kw_only=False, metadata={"check": options.checked_base})
    runs: int = options.count(4)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        base = self.base.search(task, shape)

        def prepare(batch: Batch, *, key: Array) -> Any:
            starts = [base.prepare(batch, key=one) for one in jax.random.split(key, self.runs)]
            return jax.tree.map(lambda *arrays: np.stack([np.asarray(a) for a in arrays]), *starts)

        def init(start: Any, batch: Batch, *, key: Array) -> Any:
            one = lambda key, start: base.init(start, batch, key=key)
            return map_starts(one, jax.random.split(key, self.runs), start)

        def one_round(i: Array, state: Any, batch: Batch, validation: Batch | None, rounds: Rounds) -> Any:
            return map_starts(lambda state: base.round(i, state, batch, validation, rounds), state)

        def result(state: Any, batch: Batch, validation: Batch | None) -> SearchResult:
            results = map_starts(lambda state: base.result(state, batch, validation), state)
            scores = jnp.where(results.finite & jnp.isfinite(results.score), results.score, jnp.inf)
            run = jnp.argmin(scores)
            chosen = jax.tree.map(lambda a: a[run], results)
            return chosen._replace(extra=(chosen.extra, run, scores))

        def finish(result: SearchResult, start: Any, data: Data, **of_run: Any) -> Finished:
            extra, run, scores = jax.device_get(result.extra)
            prepared = jax.tree.map(lambda a: a[int(run)], start)
            finished = base.finish(result._replace(extra=extra), prepared, data, **of_run)
            return finished._replace(report=finished.report | {"run_scores": np.asarray(scores), "run": int(run)})

        functions: Any = {"init": init, "round": one_round, "result": result, "finish": finish, "prepare": prepare}
        return base._replace(rounds=base.rounds.shared_by(self.runs), **functions)
