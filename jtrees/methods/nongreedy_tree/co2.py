"""CO2: oblique splits trained greedily, level by level (Norouzi, Collins, Fleet and Kohli, "CO2 Forest", 2015).

Each node is trained on the surrogate loss of a tree of depth one. CO2's tree is the initial tree of non-greedy trees
(Norouzi et al., NeurIPS 2015).
"""

import dataclasses
from typing import Any, Literal

from jaxtyping import Array
import numpy as np

from jtrees import pytree
from jtrees.methods.nongreedy_tree import greedy
from jtrees.methods.nongreedy_tree.surrogate import MAX_DEPTH
from jtrees.search import (
    Fitted,
    Preconditioning,
    Problem,
    Recipe,
    Run,
    Trained,
    TrainingReport,
    fitted_tree,
    option,
    preconditioned,
)
from jtrees.search.cart import bin_edges
from jtrees.search.first_step import fitted_to_loss, newton_steps
from jtrees.search.minibatch import Result, Schedule
from jtrees.search.recipe import GrowArguments
from jtrees.search.sample import most_rows, rows_used, sampled
from jtrees.tasks import Task, check_log_loss
from jtrees.tree import ObliqueTree


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GreedyReport(TrainingReport):
    """The report of :class:`jtrees.CO2` and :class:`jtrees.NonGreedy`.

    Attributes:
      preconditioning: see :class:`jtrees.search.TrainingReport`.
      shrinkage: the strength of the shrinkage with the lowest loss on held-out rows or the validation set, else NaN.
      rows: the number of rows that the splits were trained on.
    """

    shrinkage: float
    rows: int | None = None


@pytree.dataclass(kw_only=True)
class CO2(Recipe):
    """CO2's recipe: a greedy oblique tree, with all nodes of a level trained side by side.

    The tree grows from the root down. Each node is initialised with the split of the largest information gain (in
    regression the largest variance reduction) on the samples that reach it. This split uses one feature, or one output
    of a ridge regression. Stochastic gradient descent then minimises the surrogate loss of a tree of depth one, whose
    two leaves belong to the node. Rows of splits stay in the ball ``|w|^2 <= nu``, bias included. The learning rate
    decays to zero on each level.

    The trained split is kept if its gain exceeds the gain of the initial split. At the end, leaves are set to means or
    smoothed class frequencies, and shrunk towards the values of their ancestors. The paper has only axis-aligned
    initial splits (``ridge=False``), no preconditioner and no shrinkage.

    Features and targets are scaled to mean 0 and deviation 1, so nu is comparable between data sets. The report is a
    :class:`jtrees.methods.GreedyReport`.

    Attributes:
      depth: depth of the tree, 1 to 20.
      epochs: number of passes over the data for each level; None: as in :class:`jtrees.DGT`.
      batch_size: samples in a mini-batch, as in :class:`jtrees.DGT`.
      learning_rate: initial learning rate. None: 0.5, or 8 divided by the number of features if that is less.
      nu: squared radius of the ball, above 0.
      momentum: momentum of the steps, in [0, 1) (see :func:`jtrees.training.lazy_momentum`).
      bins: number of bins of a feature. Their edges are the thresholds of initial splits.
      ridge: whether initial splits may also use outputs of a ridge regression. For several targets these are the
        principal components of the outputs, for classes the linear discriminants. It has no effect in tables with more
        than 1024 features.
      shrink: whether constant leaves are shrunk towards their ancestors' means or class frequencies at the end
        (:func:`jtrees.leaves.fit_hierarchical`). It has an effect only for the squared error and the log loss. The
        strength has the lowest loss on the validation set. If there is no validation set, the held-out rows of the
        trials of ``precondition="auto"`` are used instead. If there are no trials, generalised cross-validation chooses
        the strength.
      precondition: strength of the preconditioner, as in :class:`jtrees.DGT`. A trial has all updates. If ``shrink`` is
        True, a table of 100 to 1024 rows and at most 512 features has at least one trial.
      rows: approximate number of rows that splits are trained on; a longer table is sampled. Leaves are fitted to all
        rows. ``"auto"``: 20,000, and at least 16 for each leaf. None: all rows.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> fit = jtrees.fit(jtrees.CO2(depth=1, epochs=5), x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> fit.report.search.rows
      40
    """

    depth: int = option(8, most=MAX_DEPTH)
    epochs: int | None = option(10)
    batch_size: int = option(128)
    learning_rate: float | None = option(None, above=0)
    nu: float = option(100.0, above=0)
    momentum: float = option(0.9, least=0, below=1)
    bins: int = option(32, least=2)
    ridge: bool = option(True)
    shrink: bool = option(True)
    precondition: float | Literal["auto"] = option("auto", least=0, below=1)
    rows: int | Literal["auto"] | None = option("auto")

    clips_near = False

    def keeps_monotone(self, task: Task) -> bool:
        return True

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        check_log_loss(task)
        most_rows(self)
        self.level(shape[0])  # raises for too many updates

    def level(self, n: int) -> Schedule:
        """Returns the schedule of the mini-batches of a level, for n samples."""
        return Schedule.for_rows(n, self.epochs, self.batch_size)

    async def grow_arguments(self, problem: Problem) -> GrowArguments | None:
        return GrowArguments(bin_edges(problem, self.bins), ()) if self.can_grow(problem) else None

    def products(self, n: int, p: int) -> int:
        schedule = self.level(n)
        return self.depth * schedule.steps * (schedule.batch_size + 2**self.depth) * p  # an update writes all splits

    def grow(self, run: Run, edges: Array, *_: Any) -> tuple[ObliqueTree, Array]:
        state = greedy.grown_in_program(run, edges).training
        return state.params.replace(leaves=None), state.finite

    async def search(self, problem: Problem) -> Fitted:
        """Returns the tree with the best strength of the preconditioner. Its splits are trained on a sample of rows."""
        sample = sampled(problem, most_rows(self))
        steps = await newton_steps(sample)
        recipe = steps.recipe
        result = await preconditioned(steps, recipe.precondition, recipe.trained, tries_few_rows=recipe.shrink)
        result = result._replace(fitted=await fitted_to_loss(sample, result.fitted))
        return result.finished(problem, sample, self.finish)

    async def trained(self, problem: Problem, trial: Fitted | None) -> Fitted:
        """Returns the tree of scaled data. The report is a ``Shrinkage``, whose strength the trial gives, if any."""
        state, losses = await grow_levels(problem)
        return (await problem.map(_result, state, strength_of(trial))).host.fitted(losses)

    def finish(self, problem: Problem, fitted: Fitted, preconditioning: Preconditioning | None) -> Fitted:
        """Returns the result in the user's units. Its leaves are fitted to all rows of the table of the problem."""
        best, used = map(float, fitted.report)
        rows = rows_used(self, problem.count if problem.data is None else len(problem.data.table.x))
        best = best if best >= 0 else np.nan
        report = GreedyReport(preconditioning=preconditioning, shrinkage=best, rows=rows)
        return fitted_tree(problem, fitted, refit=True, report=report, shrink=self.shrink, strength=used)


async def grow_levels(problem: Problem) -> Trained:
    """Grows a tree level by level; returns its state, a ``GreedyState``, and the losses of all updates."""
    recipe, losses = problem.recipe, []
    steps = recipe.level(problem.shape[0]).steps
    features = await problem.map(greedy.split_features, bin_edges(problem, recipe.bins))
    state = await problem.map(greedy.initial_state)
    for level in range(recipe.depth):
        if level and not problem.monitor.has_time():
            break
        name = f"{type(recipe).__name__}, level {level}"
        state = await problem.map(greedy.with_initial_splits, state, features)
        state, level_losses = await problem.train(greedy.updated, state, steps, name=name, begins=level * steps)
        state = await problem.map(greedy.with_better_splits, state)
        losses.append(level_losses)
    return Trained(state, np.concatenate(losses))


def strength_of(trial: Fitted | None) -> np.float32:
    """Returns the strength of the shrinkage that was best in the trial; negative if there was no trial."""
    return np.float32(-1 if trial is None else trial.report.best)


def _result(run: Run, state: greedy.GreedyState, strength: Array) -> Result:
    trained = state.training
    return greedy.result_of(run, trained.params, trained.step, trained.finite, strength)
