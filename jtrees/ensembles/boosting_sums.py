"""Sums of boosted trees, and how rounds are added to them."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from jtrees.ensembles import boosting_round
from jtrees.search import Problem
from jtrees.search.sample import random_rows
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_MOST_NUMBERS = 2**23  # largest number of drawn rows, or of split weights, of a call of a base with ``grow``


class Sum(NamedTuple):
    """A sum of trees, on the host."""

    initial: np.ndarray  # the initial outputs, (*k,)
    # The rounds. In a mean of sums, a round has several trees, which follow each other in `rounds.trees`.
    rounds: boosting_round.Rounds

    @classmethod
    def mean(cls, sums: list["Sum"], weights: list[Any]) -> "Sum":
        """Returns the mean of sums. Its losses on the rows for evaluation are the means, with these weights."""
        losses = np.average([member.rounds.losses for member in sums], axis=0, weights=weights)
        divided = lambda tree: tree.replace(leaves=jax.tree.map(lambda a: a / np.float32(len(sums)), tree.leaves))
        joined = lambda *arrays: np.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:])
        trees = jax.tree.map(joined, *(divided(member.rounds.trees) for member in sums))
        mean = lambda name: np.mean([getattr(member.rounds, name) for member in sums], 0)
        finite = np.any([member.rounds.finite for member in sums], 0)
        rounds = boosting_round.Rounds(trees, None, losses, mean("before"), mean("after"), finite)
        return cls(np.mean([member.initial for member in sums], 0), rounds)

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


def since_lowest(losses: np.ndarray) -> int:
    """Returns the number of losses after the lowest; a loss that is not a number counts as infinite."""
    return len(losses) - 1 - int(np.argmin(np.nan_to_num(losses, nan=np.inf, posinf=np.inf))) if len(losses) else 0


class GrowingSum:
    """A sum of boosted trees of the same kind, to which rounds are added."""

    def __init__(self, problem: Problem, state: Any, room: Any = None, grow_arguments: Any = None):
        """``room`` is for the rounds of a program, and ``grow_arguments`` has one kind of trees; both may be None."""
        self._problem, self._state, self._room, self._grow_arguments = problem, state, room, grow_arguments
        self._initial, self._rounds = state.element(0), []

    @property
    def losses(self) -> np.ndarray:
        """The loss after each round on the rows for evaluation, ``(rounds,)``."""
        return np.concatenate([np.zeros(0, np.float32), *(rounds.losses for rounds in self._rounds)])

    async def refit(self, rounds: boosting_round.Rounds, count: int) -> bool:
        """Takes the first rounds of another sum, with leaves fitted to these rows; returns whether there was time."""
        # The calls are as long as those that grow trees, so one program serves all numbers of rounds, in little memory.
        problem, size = self._problem, self._problem.recipe.rounds_of_call
        name, monitor = f"{type(problem.recipe).__name__}, leaves", problem.monitor
        has_time = True
        with monitor.progress_of(count, name) as show:
            while has_time and (done := len(self.losses)) < count:
                stop = min(done + size, count)
                part = jax.tree.map(lambda a, done=done, stop=stop: padded_to(a[done:stop], size), rounds)
                state = self._state, part
                trained = await problem.train(boosting_round.refitted_rounds, state, stop - done, name=name)
                self._state, length = trained.state.element(0), len(trained.losses)
                self._rounds.append(jax.tree.map(lambda a, length=length: a[:length], trained.state.element(1).host))
                show(len(self.losses), [self.losses[-1:]])
                has_time = len(self.losses) == stop
        return has_time

    async def add(self, count: int) -> None:
        """Adds ``count`` rounds, at most ``rounds_of_call`` of the recipe, or fewer."""
        # A search adds a single round. After the deadline, a program adds only the first round.
        rounds = await (self._round_of_search() if self._grow_arguments is None else self._rounds_of_program(count))
        self._rounds.append(rounds)

    async def _rounds_of_program(self, count: int) -> boosting_round.Rounds:
        problem, first, (shared, rows, (tree_draws,)) = self._problem, len(self.losses), self._grow_arguments
        numbers = range(first, first + count)
        draws = [draws_of_round(problem, number)._replace(tree=tree_draws(number)) for number in numbers]
        # All calls have the length of the longest call, so one program makes them.
        draws = jax.tree.map(lambda *a: padded_to(np.stack(a), problem.recipe.rounds_of_call), *draws)
        name, state = type(problem.recipe).__name__, (self._state, self._room)
        trained = await problem.train(
            boosting_round.grown_rounds, state, count, draws, shared, rows, name=name, least=int(not first)
        )
        self._state, self._room = (trained.state.element(number) for number in range(2))
        return jax.tree.map(lambda a: a[: len(trained.losses)], self._room.host)

    async def _round_of_search(self) -> boosting_round.Rounds:
        problem, number = self._problem, len(self.losses)
        base, draws = problem.recipe.base, draws_of_round(problem, number)
        batch = await problem.map(boosting_round.round_batch, self._state, draws, often=True)
        steps: Any = Batch(*(batch.element(i) for i in range(3)))  # type: ignore[arg-type]
        try:
            subproblem = problem.keyed(number).subproblem(base, boosting_round.base_task(problem.task), steps)
            tree, finite = (await base.search(subproblem)).scaled, True
        except FloatingPointError:
            weights: Any = np.zeros((1, problem.shape[1]), np.float32)
            tree, finite = ObliqueTree(weights, weights[:, 0], None), False
        splits = ObliqueTree(np.asarray(tree.weights), np.asarray(tree.bias), None)  # type: ignore[arg-type]
        added = await problem.map(
            boosting_round.added_to, self._state, splits, draws.features, np.bool_(finite), often=True
        )
        self._state = added.element(0)
        return jax.tree.map(lambda a: a[None], added.element(1).host)

    def sum(self, count: int) -> Sum:
        """Returns the sum of the first rounds."""
        # All trees have one size. A smaller tree, whose outputs are 0, stands for a base that failed.
        largest = max((rounds.trees for rounds in self._rounds), key=lambda trees: trees.bias.shape[1])
        empty = lambda count: jax.tree.map(lambda a: np.zeros((count, *a.shape[1:]), a.dtype), largest)
        has_size = lambda trees: trees.bias.shape[1] == largest.bias.shape[1]
        rounds = [r if has_size(r.trees) else r._replace(trees=empty(len(r.losses))) for r in self._rounds]
        rounds = jax.tree.map(lambda *arrays: np.concatenate(arrays)[:count], *rounds)
        return Sum(self._initial.host, rounds)


def draws_of_round(problem: Problem, number: int) -> boosting_round.Draws:
    """Returns the random draws of a round; every round draws the same number of rows."""
    recipe, (n, p) = problem.recipe, problem.shape
    rng, real = problem.rng("rounds", number), np.flatnonzero(problem.weighed)
    rows, count = np.full(recipe.rows_of_round(n), -1, np.int32), recipe.rows_of_round(len(real))
    rows[:count] = random_rows(real, count, rng)
    features = np.zeros(p, np.float32)
    features[rng.permutation(p)[: max(1, round(recipe.columns * p))]] = 1
    outputs, targets = (math.prod(task.shape) for task in (problem.task, boosting_round.base_task(problem.task)))
    combinations = None
    if targets < outputs:
        combinations = rng.normal(size=(outputs, targets)).astype(np.float32)
        # Nonnegative combinations keep the order of the outputs.
        combinations = combinations if problem.monotone is None else np.abs(combinations)
    return boosting_round.Draws(rows, features, combinations, problem.keyed(number).key)


async def begin(problem: Problem) -> list[GrowingSum]:
    """Returns a sum without rounds for each kind of trees, for a problem whose recipe is a :class:`jtrees.Boosted`."""
    base = problem.recipe.base
    if hasattr(base, "shrink"):  # boosting uses only the splits, so the base does not choose a shrinkage
        problem = problem.replace(recipe=problem.recipe.replace(base=(base := base.replace(shrink=False))))
    recipe, (n, p) = problem.recipe, problem.shape
    grow_arguments = await base.grow_arguments(problem)
    limit = _MOST_NUMBERS // recipe.rounds_of_call
    if grow_arguments is None or max(recipe.rows_of_round(n), 2**base.depth * p) > limit:
        return [GrowingSum(problem, await problem.map(boosting_round.initial_state))]
    before = await problem.map(boosting_round.before_rounds)
    arguments = (grow_arguments._replace(draws=(tree_draws,)) for tree_draws in grow_arguments.draws)
    return [GrowingSum(problem, before.element(0), before.element(1), kind) for kind in arguments]


async def refitted(problem: Problem, rounds: boosting_round.Rounds, count: int) -> Sum | None:
    """Returns the sum of the first rounds with leaves fitted to the rows of a problem; None after a deadline."""
    growing = GrowingSum(problem, await problem.map(boosting_round.initial_state))
    return growing.sum(count) if await growing.refit(rounds, count) else None


async def regrown(problem: Problem, rounds: boosting_round.Rounds, count: int, kind: int) -> Sum | None:
    """Returns what :func:`refitted` returns, with new trees in the second half, of a kind of :func:`begin`."""
    growing, monitor = (await begin(problem))[kind], problem.monitor
    with monitor.progress_of(count, f"{type(problem.recipe).__name__}, all rows") as show:
        has_time = await growing.refit(rounds, count // 2)
        while has_time and (missing := count - len(growing.losses)):
            await growing.add(min(missing, problem.recipe.rounds_of_call))
            show(len(growing.losses), [growing.losses[-1:]])
            has_time = monitor.has_time() or len(growing.losses) == count
    return growing.sum(count) if has_time else None


def padded_to(array: np.ndarray, length: int) -> np.ndarray:
    """Returns an array with zeros after its first axis, up to this length."""
    return np.pad(array, [(0, length - len(array))] + [(0, 0)] * (array.ndim - 1))
