"""Sums of boosted trees, and two ways to add rounds: many rounds in a program, or a search for each round."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrees.ensembles.boosting_round import (
    BoostedState,
    Draws,
    Rounds,
    added_to,
    base_task,
    before_rounds,
    grown_rounds,
    initial_state,
    refitted_rounds,
    target,
)
from jtrees.search import DeviceValue, Evaluation, Problem
from jtrees.search.recipe import GrowArguments
from jtrees.search.sample import random_rows
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_CALLS = 10  # fewest calls for all rounds
_MOST_NUMBERS = 2**26  # largest number of drawn rows, or of split weights, of all rounds of a program


class Sum(NamedTuple):
    """A sum of trees, on the host.

    Attributes:
      initial: the initial outputs, ``(*k,)``.
      rounds: the rounds. In a mean of sums, a round has several trees, which follow each other in ``rounds.trees``.
    """

    initial: np.ndarray
    rounds: Rounds

    @classmethod
    def mean(cls, sums: list["Sum"]) -> "Sum":
        """Returns the mean of sums with equal losses on the rows for evaluation."""
        share = lambda tree: tree.replace(leaves=jax.tree.map(lambda a: a / np.float32(len(sums)), tree.leaves))
        joined = lambda *arrays: np.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:])
        trees = jax.tree.map(joined, *(share(part.rounds.trees) for part in sums))
        mean = lambda name: np.mean([getattr(part.rounds, name) for part in sums], 0)
        finite = np.any([part.rounds.finite for part in sums], 0)
        rounds = Rounds(trees, None, sums[0].rounds.losses, mean("before"), mean("after"), finite)
        return cls(np.mean([part.initial for part in sums], 0), rounds)

    def __len__(self) -> int:
        """Number of rounds."""
        return len(self.rounds.losses)

    def first(self, count: int) -> tuple[ObliqueTree, np.ndarray]:
        """Returns the trees of the first rounds, stacked, and the initial outputs."""
        width = len(self.rounds.trees.bias) // len(self)
        return jax.tree.map(lambda a: a[: count * width], self.rounds.trees), self.initial

    @property
    def best(self) -> int:
        """Number of rounds with the lowest loss, or all rounds if no loss is finite."""
        losses = self.rounds.losses
        return len(losses) - since_lowest(losses) if np.isfinite(losses).any() else len(losses)


def since_lowest(losses: Any) -> int:
    """Returns the number of losses after the lowest of ``(m,)``; a loss that is not a number counts as infinite."""
    return len(losses) - 1 - int(np.argmin(np.nan_to_num(losses, nan=np.inf, posinf=np.inf)))


def draws_of_round(problem: Problem, number: int) -> Draws:
    """Returns the random draws of a round; every round draws the same number of rows."""
    recipe, (n, p) = problem.recipe, problem.shape
    rng, real = problem.rng("rounds", number), np.flatnonzero(problem.weighed)
    rows, count = np.full(recipe.rows_of_round(n), -1, np.int32), recipe.rows_of_round(len(real))
    rows[:count] = random_rows(real, count, rng)
    features = np.zeros(p, np.float32)
    features[rng.permutation(p)[: max(1, round(recipe.columns * p))]] = 1
    outputs, targets = (math.prod(task.shape) for task in (problem.task, base_task(problem.task)))
    key = problem.keyed(number).key
    if targets == outputs:
        return Draws(rows, features, None, key)
    combinations = rng.normal(size=(outputs, targets)).astype(np.float32)
    # Nonnegative combinations keep the order of the outputs.
    return Draws(rows, features, combinations if problem.monotone is None else np.abs(combinations), key)


def rounds_of_call(recipe: Any) -> int:
    """Returns the largest number of rounds of a call: a tenth of all. Progress is shown after each call."""
    return max(1, recipe.rounds // _CALLS)


def draws_of_rounds(problem: Problem, first: int, count: int) -> Draws:
    """Returns the draws of ``count`` rounds from ``first`` on, stacked and padded to the length of the longest call."""
    draws = [draws_of_round(problem, first + number) for number in range(count)]
    draws += draws[:1] * (rounds_of_call(problem.recipe) - count)
    return jax.tree.map(lambda *arrays: np.stack(arrays), *draws)


class CompiledRounds:
    """Rounds of a base that has ``grow``: a program adds many rounds."""

    def __init__(self, problem: Problem, state: DeviceValue, grow_arguments: GrowArguments):
        """``grow_arguments`` has one kind of trees."""
        self._problem, self._state, self._grow_arguments = problem, state, grow_arguments
        self.length = 0

    async def add(self, count: int) -> None:
        """Adds ``count`` rounds, at most :func:`rounds_of_call`. After the deadline it adds none but the first."""
        progress: Any = {
            "name": type(self._problem.recipe).__name__,
            "begins": self.length,
            "least": int(not self.length),
        }
        arguments = draws_of_rounds(self._problem, self.length, count), np.int32(self.length), self._grow_arguments
        trained = await self._problem.train(grown_rounds, self._state, count, *arguments, **progress)
        self._state, self.length = trained.state, self.length + len(trained.losses)

    @property
    def losses(self) -> np.ndarray:
        """The loss after each round on the rows for evaluation, ``(rounds,)``."""
        return self.rounds.element(Rounds._fields.index("losses")).host[: self.length]

    @property
    def rounds(self) -> DeviceValue:
        """The rounds, and zeros for the rounds that were not made."""
        return self._state.element(1)

    def sum(self, losses: np.ndarray) -> Sum:
        """Returns the sum of the rounds with ``losses``, ``(rounds,)``, on the rows for evaluation."""
        return sum_of(self._state.element(0).element(0).host, self.rounds.host, len(losses), losses)


class SearchedRounds:
    """Rounds of any base: a search finds the splits of each round."""

    def __init__(self, problem: Problem, state: DeviceValue):
        self._problem, self._state, self._initial, self._added = problem, state, state.element(0), []

    @property
    def length(self) -> int:
        """Number of rounds."""
        return len(self._added)

    async def add(self, count: int) -> None:
        """Adds a round. The caller may ask for more rounds."""
        problem, number = self._problem, self.length
        draws = draws_of_round(problem, number)
        batch = await problem.map(target, self._state, draws, often=True)
        steps: Any = [batch.element(i) for i in range(3)]
        changes: Any = {"recipe": problem.recipe.base, "task": base_task(problem.task), "batch": Batch(*steps)}
        changes |= {"rows": None, "evaluation": None, "kind": Evaluation.TRAINING}
        try:
            tree, finite = (await problem.recipe.base.search(problem.keyed(number).replace(**changes))).scaled, True
        except FloatingPointError:
            weights: Any = np.zeros((1, problem.shape[1]), np.float32)
            tree, finite = ObliqueTree(weights, weights[:, 0], None), False
        splits = ObliqueTree(np.asarray(tree.weights), np.asarray(tree.bias), None)  # type: ignore[arg-type]
        added = await problem.map(added_to, self._state, splits, draws.features, np.bool_(finite), often=True)
        self._state = added.element(0)
        self._added.append(added.element(1).host)

    @property
    def losses(self) -> np.ndarray:
        """The loss after each round on the rows for evaluation, ``(rounds,)``."""
        return np.array([added.losses for added in self._added])

    @property
    def rounds(self) -> Rounds:
        """The rounds, and zeros for the rounds that were not made.

        All trees have one size. A smaller tree, whose outputs are 0, stands for a base that failed.
        """
        largest = max((added.trees for added in self._added), key=lambda tree: tree.bias.size)
        empty = jax.tree.map(np.zeros_like, largest)
        resized = lambda tree: tree if tree.bias.size == empty.bias.size else empty
        rounds = [added._replace(trees=resized(added.trees)) for added in self._added]
        rounds += [jax.tree.map(np.zeros_like, rounds[0])] * (self._problem.recipe.rounds - len(rounds))
        return jax.tree.map(lambda *arrays: np.stack(arrays), *rounds)

    def sum(self, losses: np.ndarray) -> Sum:
        """Returns the sum of the rounds with ``losses``, ``(rounds,)``, on the rows for evaluation."""
        return sum_of(self._initial.host, self.rounds, len(losses), losses)


async def begin(problem: Problem) -> list[CompiledRounds] | list[SearchedRounds]:
    """Returns no rounds yet, for each kind of trees, for a problem whose recipe is a :class:`jtrees.Boosted`.

    The last kind has the trees that the search of the base finds, and earlier kinds are simpler.
    """
    base = problem.recipe.base
    if hasattr(base, "shrink"):  # boosting uses only the splits, so the base does not choose a shrinkage
        problem = problem.replace(recipe=problem.recipe.replace(base=(base := base.replace(shrink=False))))
    recipe, (n, p) = problem.recipe, problem.shape
    grow_arguments = await base.grow_arguments(problem, recipe.rounds)
    if grow_arguments is None or recipe.rounds * max(recipe.rows_of_round(n), 2**base.depth * p) > _MOST_NUMBERS:
        return [SearchedRounds(problem, await problem.map(initial_state))]
    state = await problem.map(before_rounds)
    return [CompiledRounds(problem, state, grow_arguments._replace(drawn=(drawn,))) for drawn in grow_arguments.drawn]


async def refitted(problem: Problem, rounds: Any, count: int) -> Sum | None:
    """Returns the sum of the first ``count`` rounds with leaves fitted to the rows of a problem; None after a deadline.

    ``rounds`` are the rounds of a :class:`CompiledRounds` or a :class:`SearchedRounds`.
    """
    state: Any = BoostedState(await problem.map(initial_state), rounds)  # type: ignore[arg-type]
    monitor, where = problem.monitor, problem.monitor.where
    name = f"{type(problem.recipe).__name__}, leaves"
    trained = await problem.train(refitted_rounds, state, count, name=name)
    monitor.where = where  # the report tells the number of rounds
    if len(trained.losses) < count:
        return None
    return sum_of(trained.state.element(0).element(0).host, trained.state.element(1).host, count)


def sum_of(initial: np.ndarray, rounds: Rounds, count: int, losses: np.ndarray | None = None) -> Sum:
    """Returns the sum of the first ``count`` rounds, with ``losses`` on the rows for evaluation if given."""
    rounds = jax.tree.map(lambda a: a[:count], rounds)
    return Sum(initial, rounds if losses is None else rounds._replace(losses=losses))
