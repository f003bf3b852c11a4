"""Recipe and Search: a paper's procedure as data, and the functions that carry it out on scaled data."""

from collections.abc import Callable
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
    """What a search ends in, on scaled data: a pytree.

    Attributes:
      model: the model, or its splits.
      score: what it was chosen by (lower is better); infinite if the search was not finite.
      finite: whether it was.
      step: number of updates that the model had seen.
      extra: what else ``finish`` needs.
    """

    model: Any
    score: Array
    finite: Array
    step: Array
    extra: Any = None


class Finished(NamedTuple):
    """The result of a search in the user's units.

    Attributes:
      model: with ``predict(x)``.
      tree: the :class:`jtrees.ObliqueTree` that it is, or None.
      loss: what it was chosen by.
      report: what else there is to say, by name.
    """

    model: Any
    tree: ObliqueTree | None
    loss: float
    report: dict[str, Any]


class Rounds(NamedTuple):
    """A search cut into rounds: stages of so many steps each, in rounds of one size, a stage's last perhaps shorter.

    Attributes:
      steps: in a stage.
      elements: of the array that a step works on, which decides how many steps are a round.
      stages: number of stages.
    """

    steps: int
    elements: int
    stages: int = 1

    def shared_by(self, runs: int) -> "Rounds":
        """The rounds of so many runs side by side."""
        return self._replace(elements=self.elements * runs)

    @property
    def rounds_per_stage(self) -> int:
        """How many rounds are in a stage."""
        return -(-self.steps // self.size)

    @property
    def size(self) -> int:
        """Steps of a round, but for the last of a stage."""
        fewest = -(-self.steps // blocking.steps_in_a_round(self.elements))
        return -(-self.steps // fewest)

    @property
    def count(self) -> int:
        """How many rounds there are in all."""
        return self.stages * self.rounds_per_stage

    def steps_before(self, i: Any) -> Any:
        """Steps of the stage before round i."""
        return i % self.rounds_per_stage * self.size

    def steps_in(self, i: Any) -> Any:
        """Steps of round i."""
        return jnp.minimum(self.size, self.steps - self.steps_before(i))


def check_finite(result: SearchResult) -> None:
    """Raises ``FloatingPointError`` if a search was not finite."""
    if not result.finite:
        raise FloatingPointError("training became non-finite: try a smaller learning_rate")


def loss_of(result: SearchResult, model: Any, data: Data, task: Task) -> float:
    """The loss to report for a model in the user's units: by a loss of the user's own it is the score, on scaled data."""
    return float(result.score) if task.own_loss is not None else data.loss(model)


class Search(NamedTuple):
    """An optimisation over a scaled batch, cut into rounds, for one task and one shape of the features.

    The state of a search holds no clock: the number of the round is an argument, one for all searches side by side, so
    that what happens now and then is computed only then.

    Attributes:
      task: what is predicted; by a loss of the user's own, if the recipe has one.
      rounds: of a search by itself.
      init: ``(start, batch, *, key) -> state``, pure.
      round: ``(i, state, batch, validation, rounds) -> (state, losses)``: the state after round i of these rounds, and
        the losses of its steps, steps last, NaN where it had fewer. Pure. ``validation`` is a batch or None.
      result: ``(state, batch, validation) -> SearchResult``: the best so far. Pure.
      finish: ``(result, start, data, *, key, monitor) -> Finished``: on the host; ``FloatingPointError`` if nothing
        finite was found.
      prepare: ``(batch, *, key) -> start``: what is done before on the host, with the batch in NumPy; a pytree or None.
      scaling: ``table -> Scaling``.
      yields_constant_tree: whether it ends in one tree with constant leaves or class frequencies.
    """

    task: Task
    rounds: Rounds
    init: Callable[..., Any]
    round: Callable[..., tuple[Any, Array]]
    result: Callable[..., SearchResult]
    finish: Callable[..., Finished]
    prepare: Callable[..., Any] = lambda batch, *, key: None
    scaling: Callable[[Table], Scaling] = Scaling.fit
    yields_constant_tree: bool = False

    def run(self, start: Any, batch: Batch, validation: Batch | None = None, *, key: Array) -> SearchResult:
        """The whole search as one pure function: ``vmap`` it over the numbers of the recipe, over keys, over weights.

        Args:
          start: from ``prepare``.
          batch: scaled data, such as ``Scaling.fit(table).batch(table)``.
          validation: scaled data to choose by instead, or None.
          key: for everything random.
        """
        batch, validation = jax.tree.map(jnp.asarray, (batch, validation))
        body = lambda i, state: self.round(i, state, batch, validation, self.rounds)[0]
        state = jax.lax.fori_loop(0, self.rounds.count, body, self.init(start, batch, key=key))
        return self.result(state, batch, validation)


class Recipe:
    """A paper's whole procedure as data: a frozen dataclass that is a pytree, with its options as fields.

    Options that are numbers may be traced, the others are static: see :mod:`jtrees.search.options`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        io.part(cls)

    def search(self, task: Task, shape: Any) -> Search:
        """The search for a task, on features of this shape; options must be checked.

        Raises:
          ValueError: for options that do not fit the task or the shape.
        """
        raise NotImplementedError

    def targets(self, x: Any, y: Any) -> Any:
        """What is predicted: y, unless the recipe makes it from x."""
        return y

    def replace(self, **options: Any) -> Any:
        """The recipe with other options; from flax."""
        raise NotImplementedError


def finished_tree(result: SearchResult, data: Data, task: Task) -> Finished:
    """A hard tree of scaled data in the user's units.

    The report has ``reached``, the number of internal nodes that at least one training row reaches.
    """
    check_finite(result)
    tree = data.scaling.restore(result.model)
    path = np.asarray(tree.decision_path(data.table.x))[:-1]
    return Finished(tree, tree, loss_of(result, tree, data, task), {"reached": len(np.unique(path))})
