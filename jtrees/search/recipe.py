"""Recipe and Search: a paper's procedure as data, and the functions that run it on scaled data."""

from collections.abc import Callable
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import blocking, io
from jtrees.data import Data, Scaling, Table
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree


class SearchResult(NamedTuple):
    """The result of a search on scaled data: a pytree.

    Attributes:
      model: the model, or its splits.
      score: the score it was chosen by (lower is better); infinite if the search was not finite.
      finite: whether the search was finite.
      step: number of updates before the model was evaluated.
      extra: further values for ``finish``.
    """

    model: Any
    score: Array
    finite: Array
    step: Array
    extra: Any = None


class HeldOut(NamedTuple):
    """A loss on rows that a run of the search left out: of that run's model, or by the trees that left them out.

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
      report: further results by name.
      held_out: the loss on rows that the search left out, or None; None, too, if the model was changed since.
    """

    model: Any
    tree: ObliqueTree | None
    loss: float
    report: dict[str, Any]
    held_out: HeldOut | None = None


class Round(NamedTuple):
    """A round of a search, or a part of it: some steps of a stage. Its numbers may be traced.

    Results do not depend on how rounds are divided into parts, which is decided by the clock.

    Attributes:
      stage: number of the stage.
      before: steps of the stage before these steps.
      count: number of steps.
      last: whether the stage ends with these steps.
      most: steps of the longest round; not traced.
      done: steps of the round before these steps.
    """

    stage: Any
    before: Any
    count: Any
    last: Any
    most: int
    done: Any = 0


class Rounds(NamedTuple):
    """The division of a search into stages, and of stages into rounds of equal length but the last of each.

    Attributes:
      lengths: number of steps of each stage.
      elements: size of the array that a step works on, which determines the steps of a round.
      trials: number of stages, the first ones, whose losses do not belong to the history.
    """

    lengths: tuple[int, ...]
    elements: int
    trials: int = 0

    def shared_by(self, runs: int) -> "Rounds":
        """The rounds of ``runs`` runs side by side."""
        return self._replace(elements=self.elements * runs)

    @property
    def steps(self) -> int:
        """Number of steps of the last stage."""
        return self.lengths[-1]

    @property
    def size(self) -> int:
        """Steps of the longest round."""
        longest = max(self.lengths)
        fewest = -(-longest // blocking.steps_in_a_round(self.elements))
        return -(-longest // fewest)

    @property
    def first(self) -> tuple[int, ...]:
        """The first round of each stage, and the number of all rounds."""
        size = self.size
        return (0, *itertools.accumulate(-(-steps // size) for steps in self.lengths))

    @property
    def count(self) -> int:
        """Total number of rounds."""
        return self.first[-1]

    def at(self, i: Any, done: Any = 0, steps: Any = None) -> Round:
        """Returns round i, or the next ``steps`` of its steps after the first ``done``; numbers that may be traced."""
        xp: Any = jnp if isinstance(i, jax.Array) else np
        first, lengths, size = xp.asarray(self.first), xp.asarray(self.lengths), self.size
        stage = xp.searchsorted(first, i, side="right") - 1
        before, last = (i - first[stage]) * size, i + 1 == first[stage + 1]
        left = xp.minimum(size, lengths[stage] - before) - done
        count = left if steps is None else xp.minimum(steps, left)
        return Round(stage, before + done, count, last & (count == left), size, done)


def check_finite(result: SearchResult) -> None:
    """Raises ``FloatingPointError`` if a search was not finite."""
    if not result.finite:
        raise FloatingPointError("training became non-finite: try a smaller learning_rate")


def loss_of(result: SearchResult, model: Any, data: Data, task: Task) -> float:
    """The loss to report for a model in the user's units; for a user-defined loss the score, on scaled data."""
    return data.loss(model) if task.in_units else float(result.score)


class Search(NamedTuple):
    """An optimisation over a scaled batch, in rounds, for one task and one shape of the features.

    The state does not count rounds: the round is an argument, shared by all searches side by side, so that a branch
    taken in some rounds only stays a branch under ``vmap``. Branches and numbers of steps should depend on it alone.

    Attributes:
      task: what is predicted, and by which loss.
      rounds: the rounds of a single search.
      init: ``(start, batch, *, key) -> state``, pure.
      round: ``(round, state, batch, validation) -> (state, losses)``: the state after a :class:`Round`, and the losses
        of its steps, ``(..., round.most)``, ``training.NOT_TAKEN`` where it had fewer. Pure. ``validation``
        is a batch or None.
      result: ``(state, batch, validation) -> SearchResult``: the best so far. Pure.
      finish: ``(result, start, data, *, key, monitor) -> Finished``: on the host; ``FloatingPointError`` if the search
        was not finite.
      prepare: ``(batch, *, key, monitor) -> start``: preparation on the host, from a NumPy batch; a pytree or None.
        Without a monitor it takes the time that it takes.
      scaling: ``table -> Scaling``.
      tree_leaves: of a model that is one tree the kind of its leaves, ``"constant"`` (also of class frequencies) or
        ``"linear"``; else None.
      next: ``(i, state, rounds) -> i``: the first of the rounds from i on that may change the result. Pure.
      closing: number of the stage whose first round must have run for the result to be the best so far. A search that a
        deadline or Ctrl-C ends earlier has this round as its last. None: there is no such stage.
    """

    task: Task
    rounds: Rounds
    init: Callable[..., Any]
    round: Callable[..., tuple[Any, Array]]
    result: Callable[..., SearchResult]
    finish: Callable[..., Finished]
    prepare: Callable[..., Any] = lambda batch, *, key, monitor=None: None
    scaling: Callable[[Table], Scaling] = Scaling.fit
    tree_leaves: str | None = None
    next: Callable[[Array, Any, Rounds], Array] = lambda i, state, rounds: i
    closing: int | None = None

    def run(self, start: Any, batch: Batch, validation: Batch | None = None, *, key: Array) -> SearchResult:
        """Runs the whole search as one pure function, to ``vmap`` over numeric options, keys or weights.

        Args:
          start: result of ``prepare``.
          batch: scaled data, such as ``Scaling.fit(table).batch(table)``.
          validation: scaled validation set, or None.
          key: random key.
        """
        batch, validation = jax.tree.map(jnp.asarray, (batch, validation))
        body = lambda i, state: self.round(self.rounds.at(i), state, batch, validation)[0]
        state = jax.lax.fori_loop(0, self.rounds.count, body, self.init(start, batch, key=key))
        return self.result(state, batch, validation)


@io.family
class Recipe:
    """A paper's whole procedure as data: a dataclass (:func:`jtrees.pytree.dataclass`) with its options as fields.

    Numeric options may be traced, the others are static: see :mod:`jtrees.search.options`.
    """

    def search(self, task: Task, shape: Any) -> Search:
        """Returns the search for a task and the shape of the features of a (padded) batch; options must be checked.

        Raises:
          ValueError: for options that do not fit the task or the shape.
        """
        raise NotImplementedError

    def targets(self, x: Any, y: Any) -> Any:
        """Returns the targets: y, unless the recipe derives them from x."""
        return y

    def replace(self, **options: Any) -> Any:
        """Returns the recipe with other options (provided by :func:`jtrees.pytree.dataclass`)."""
        raise NotImplementedError


def next_of_all(base: Search, states: Callable[[Any], Any] = lambda state: state) -> Callable[..., Array]:
    """Returns the ``next`` of runs of a search side by side, whose states are ``states(state)``."""

    def following(i: Array, state: Any, rounds: Rounds) -> Array:
        return jax.vmap(lambda one: base.next(i, one, rounds))(states(state)).min()

    return following


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

    The report has ``reached``, the number of internal nodes that at least one training row reaches.
    """
    check_finite(result)
    tree = data.scaling.restore_splits(result.model)
    tree = tree.replace(leaves=data.scaling.restore_leaves(result.model.leaves))
    if fitted is None:
        tree = data.with_fitted(tree)
    elif fitted:
        tree = data.refit(tree, "constant", **shrinkage)[0]
    tree = tree.merged()
    path = np.asarray(tree.decision_path(data.table.x))[:-1]
    return Finished(tree, tree, loss_of(result, tree, data, task), {"reached": len(np.unique(path))})
