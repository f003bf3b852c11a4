"""The common part of the recipes that grow a greedy tree: :class:`jtrees.CO2` and :class:`jtrees.NonGreedy`."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import splitting, training
from jtrees.data import Data
from jtrees.data.table import without_padding
from jtrees.methods.nongreedy_tree.greedy import Greedy, Growing
from jtrees.search import Finished, Preconditioning, Recipe, Report, Run, Runs, SearchResult, finished_tree
from jtrees.search.first_step import by_first_step, is_direct
from jtrees.search.minibatch import Schedule
from jtrees.search.precondition import preconditioned
from jtrees.search.runs import MOST, Stacked
from jtrees.search.sample import most_rows, rows_used, sampled
from jtrees.tasks import Task, check_log_loss

# Default learning rate. A step moves the score of a sample by the rate times its squared norm, which is on average the
# number of features. These values were the best or nearly the best on eight data sets of 8 to 784 features.
_RATE, _RATE_OF_SCORES = 0.5, 8.0
_EDGES = 0.4  # part of the time before a deadline for the edges of bins


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GreedyReport(Report):
    """The report of :class:`jtrees.CO2` and :class:`jtrees.NonGreedy`.

    Attributes:
      reached: the number of internal nodes that at least one training row reaches.
      active_leaves: the number of leaves that at least one training row reaches.
      shrinkage: the strength of the shrinkage with the lowest loss on held-out rows or the validation set, else NaN.
      preconditioning: how the features were preconditioned. None: no strength was tried or given.
      rows: the number of rows that the splits were trained on.
    """

    reached: int
    active_leaves: int
    shrinkage: float
    preconditioning: Preconditioning | None = None
    rows: int | None = None


class GreedyRecipe(Recipe):
    """A recipe that grows a greedy tree: :class:`jtrees.CO2` and :class:`jtrees.NonGreedy`.

    A subclass has the options ``depth``, ``batch_size``, ``learning_rate``, ``nu``, ``momentum``, ``bins``, ``ridge``,
    ``shrink``, ``precondition`` and ``rows``.
    """

    rows: Any

    def greedy(self, run: Run) -> Greedy:
        """Returns the greedy growth of a run."""
        me: Any = self
        n, p = run.batch.x.shape
        rate = min(_RATE, _RATE_OF_SCORES / p) if me.learning_rate is None else me.learning_rate
        level = Schedule.of(n, self.level_epochs, me.batch_size)
        shrink = me.shrink and is_direct(run.task)
        return Greedy(me.depth, run.task, me.nu, me.momentum, rate, level, me.ridge, shrink, run.monotone)

    @property
    def level_epochs(self) -> int | None:
        """Number of passes over the data for each level, or None for the default of ``Schedule``."""
        raise NotImplementedError

    def keeps_monotone(self, task: Task) -> bool:
        return True

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        check_log_loss(task)
        most_rows(self)

    def search(self, runs: Runs) -> list[SearchResult]:
        runs, shrinks = sampled(runs, most_rows(self)), self.shrink and is_direct(runs.task)

        def direct(runs: Runs) -> list[SearchResult]:
            if not shrinks:
                runs = runs.using([one.replace(shrink=False) for one in runs.recipes])
            strength: Any = self.precondition
            return preconditioned(runs, strength, self.trained, tries_few_rows=shrinks)

        results = by_first_step(runs, direct)
        for i, result in enumerate(results):
            held_out = [one._replace(rows=runs.of_table(i, one.rows)) for one in result.held_out]
            results[i] = result._replace(held_out=tuple(held_out))
        return results

    def trained(self, runs: Runs, trials: list[SearchResult | None]) -> list[SearchResult]:
        """Returns the trees of all runs; ``trials`` are the results that give the strengths of the shrinkage."""
        raise NotImplementedError

    def finish(self, result: SearchResult, data: Data, **of_run: Any) -> Finished:
        found, used = map(float, result.report)
        task = data.table.task
        shrink = self.shrink and is_direct(task)
        finished = finished_tree(result, data, task, fitted=True, shrink=shrink, strength=used)
        active = len(np.unique(finished.model.leaf_index(data.table.x)))
        report = GreedyReport(
            reached=finished.report.reached,
            active_leaves=active,
            shrinkage=found if found >= 0 else np.nan,
            preconditioning=result.preconditioning,
            rows=rows_used(self, len(data.table.x)),
        )
        return finished._replace(report=report)


def grow(runs: Runs) -> tuple[Stacked, list[list[np.ndarray]]]:
    """Grows the tree of every run, level by level; returns the states, and the losses of each run on each level."""
    recipe: Any = runs.recipes[0]
    steps = Schedule.of(runs.shape[0], recipe.level_epochs, recipe.batch_size).steps
    of_rows = lambda rows: splitting.edges_of(np.asarray(rows.x), recipe.bins)
    edges = runs.each_once(lambda i: runs.monitor.part(_EDGES).on_rows(of_rows, without_padding(runs.rows(i))))
    states, losses = runs.map(_planted, edges), [[] for _ in range(len(runs))]
    for level in range(recipe.depth):
        if level:
            if not runs.monitor.has_time():
                break
            states = runs.map(_next_level, states)
        name = f"{type(recipe).__name__}, level {level}"
        found = runs.train(_grown, states, steps, name=name, begins=level * steps)
        states = found.states
        for own, lost in zip(losses, found.losses, strict=True):
            own.append(lost)
    return states, losses


def strengths_of(runs: Runs, trials: list[SearchResult | None]) -> list[np.float32]:
    """Returns the strength of the shrinkage that the trial of each run found, negative for a run without a trial."""
    is_known = lambda one: one is not None and np.isfinite(one.score)
    return [np.float32(one.report.found if is_known(one) else -1) for one in trials]  # type: ignore[union-attr]


# --- Compiled functions of a run -------------------------------------------------------------------------------------


def _planted(run: Run, edges: Array) -> Growing:
    """Returns the initial state of the first level."""
    return run.recipe.greedy(run).init(edges, run.batch, key=run.key)


def _next_level(run: Run, state: Growing) -> Growing:
    return run.recipe.greedy(run).next_level(state, run.batch)


def _grown(run: Run, state: Growing, before: Array, count: Array, evaluates: Array) -> tuple[Growing, Array, Array]:
    """Returns the state after ``count`` updates on the level, their losses, and False."""
    once = run.recipe.greedy(run).one_step(state, run.batch)
    of_run, history = training.loop.advance_up_to(once, state.run, count, MOST, step=before)
    return state.replace(run=of_run), history.losses, jnp.array(False)
