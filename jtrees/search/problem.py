"""A problem, which is one run of a recipe, and its result. An engine runs procedures, ``async`` functions of a problem.

A procedure waits for three things: ``problem.map(fn, ...)``, ``problem.train(fn, ...)`` and ``gather(...)``. ``fn`` is
a module-level pure function of a :class:`Run`, which is the part of the problem that a compiled function sees.
Everything else is plain Python on numbers of the host.
"""

from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jtrees import distributed, segments
from jtrees.data import Data
from jtrees.data.scaling import losses_of
from jtrees.search.report import Report
from jtrees.search.run import FOLDS, Evaluation, Run
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

if TYPE_CHECKING:
    from jtrees.search.engine import Engine


# What the library's searches draw on the host, and the first of the numbers that seed the generators. The letters of
# any other purpose are the numbers.
_PURPOSES = {
    "folds": 1,
    "starts": 2,
    "folds of starts": 3,
    "bags": 4,
    "sample": 7,
    "monotone splits": 1000,
    "rounds": 1000,
    "subtrees": 0,
}


class LeftOut(NamedTuple):
    """Losses of rows by models that were not trained on them.

    Attributes:
      losses: the loss of each row of the table in the user's units, as in :class:`jtrees.FitResult`; for votes, 1 for a
        wrong class. NaN for a row that all models were trained on, ``(n,)``.
      chose: whether the rows also chose a part of the model, such as its number of rounds.
      several: whether several models left out different rows.
    """

    losses: np.ndarray
    chose: bool
    several: bool

    @property
    def rows(self) -> np.ndarray:
        """Numbers of the rows with a loss."""
        return np.flatnonzero(~np.isnan(self.losses))


class Fitted(NamedTuple):
    """The result of a search, on the host.

    A part of a larger model, such as a tree of a boosted sum, has no result in the user's units: ``model`` is None.

    Attributes:
      scaled: the model of scaled data, or its splits.
      score: the score by which the model was chosen, on scaled data; lower is better.
      step: number of updates before the model was evaluated.
      history: loss before each update on scaled data, ``(..., updates)``; NaN for updates that were not made.
      model: the model in the user's units, with ``predict(x)``.
      tree: the model if it is a :class:`jtrees.ObliqueTree`, else None.
      loss: the loss by which the model was chosen, in the user's units.
      report: the recipe's report.
      left_out: losses of rows by parts of the search that were not trained on them, or None.
      expected_loss: the loss that the search expects on new rows, in the user's units, or None.
    """

    scaled: Any
    score: float
    step: int
    history: Any
    model: Any = None
    tree: ObliqueTree | None = None
    loss: float = np.nan
    report: Any = Report()
    left_out: LeftOut | None = None
    expected_loss: float | None = None

    def replaced_by(self, tree: ObliqueTree, data: Data, report: Any) -> "Fitted":
        """Returns the result with a tree that all rows have changed, without what held-out rows say of the old tree."""
        loss = data.loss(tree)
        changed: Any = {"model": tree, "tree": tree, "loss": loss, "score": loss / data.loss_unit, "report": report}
        return self._replace(scaled=None, left_out=None, expected_loss=None, **changed)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Problem(Run):
    """A run, and the objects that stay on the host. Arrays are in NumPy and must not change, or values on the device.

    Attributes:
      engine: the engine that runs the procedure.
      data: the table and its scaling. None: the problem is a part of a larger model, and needs no result in the user's
        units.
      rows: the row of the table for each row of ``batch``, -1 for padding and held-out rows, ``(n,)``.
      is_member: whether the result is a member of a bag, which needs no losses of held-out rows.
      is_optional: whether the problem is dropped if its result cannot be finished in time, as a tree of a bag is.
      source: all rows of the fit, of which ``batch`` has a part, or None. Values that suit every part are computed from
        them, such as the edges of bins.
    """

    engine: "Engine" = dataclasses.field(repr=False)
    data: Data | None = dataclasses.field(default=None, repr=False)
    rows: np.ndarray | None = None
    is_member: bool = False
    is_optional: bool = False
    source: Batch | None = dataclasses.field(default=None, repr=False)

    def replace(self, **changes: Any) -> "Problem":
        """Returns the problem with changed attributes."""
        return dataclasses.replace(self, **changes)

    def repeat(self, count: int) -> list["Problem"]:
        """Returns the problem ``count`` times, with different keys."""
        return [self.keyed(number) for number in range(count)]

    def keyed(self, number: int) -> "Problem":
        """Returns the problem with a new key, which is derived from the old key and a number."""
        return self.replace(key=derived(self.key, number))

    def subproblem(self, recipe: Any, task: Any, batch: Any) -> "Problem":
        """Returns the problem of a part of a larger model, which has rows of its own and is evaluated on them."""
        changes: Any = {"recipe": recipe, "task": task, "batch": batch, "data": None, "rows": None}
        return self.replace(**changes, evaluation=None, kind=Evaluation.TRAINING)

    def holding_out(self, held_out: np.ndarray, kind: Evaluation = Evaluation.HELD_OUT) -> "Problem":
        """Returns the problem without held-out rows, ``(n,)`` bool.

        The rows are for evaluation, unless there is a validation set. If no row is held out, the evaluation is on the
        training rows. Such a problem has the compiled programs of the problems that hold rows out.

        Rows of the kind ``EARLY_STOPPING`` are at most a fifth of all rows. The evaluation rows begin with them, so an
        evaluation during training takes a fifth (:attr:`Run.rows_during_training`).
        """
        weight = np.asarray(self.batch.weight)
        inside = self.batch._replace(weight=segments.mean_one(np.where(held_out, 0, weight).astype(weight.dtype)))
        changes: dict[str, Any] = {"batch": inside} | self._rest(held_out)
        if not self.has_validation_set:
            outside = np.where(held_out, weight, 0)
            kind, weight = (kind, outside) if held_out.any() else (Evaluation.TRAINING, inside.weight)
            evaluation = self.batch._replace(weight=weight)
            if kind is Evaluation.EARLY_STOPPING:
                assert FOLDS * held_out.sum() <= len(held_out), "an evaluation during training would miss rows"
                evaluation = jax.tree.map(lambda a: np.asarray(a)[np.argsort(~held_out, kind="stable")], evaluation)
            changes |= {"evaluation": evaluation, "kind": kind}
        return self.replace(**changes)

    def _rest(self, held_out: np.ndarray) -> dict[str, Any]:
        """Returns the data and the row numbers of the problem without the held-out rows."""
        if not (self.data and held_out.any()):
            return {}
        assert self.rows is not None
        out = self.rows[held_out & (self.rows >= 0)]
        remaining = np.setdiff1d(np.arange(len(self.data.table.x)), out)
        rows = np.where(held_out | (self.rows < 0), -1, np.searchsorted(remaining, self.rows))
        data = self.data.holding_out(out)
        is_validated = self.has_validation_set
        return {"data": data._replace(validation=self.data.validation) if is_validated else data, "rows": rows}

    def bootstrap(self, rows: np.ndarray) -> "Problem":
        """Returns the problem on rows of ``batch``, ``(m,)``, which may repeat.

        The rows have positive weight, except for padding at the end, which is -1.
        """
        changes: dict[str, Any] = {"batch": _picked(*self.batch, rows), "rows": None}
        if self.data and self.rows is not None:
            numbers = self.rows[rows[rows >= 0]]
            data = self.data._replace(table=self.data.table.rows(numbers).normalised(), batch=None)
            changes |= {"data": data, "rows": np.append(np.arange(len(numbers)), np.full((rows < 0).sum(), -1))}
        return self.replace(**changes, source=self.source or self.batch)

    def sample(self, rows: np.ndarray, weight: np.ndarray) -> "Problem":
        """Returns the problem that trains on rows of ``batch`` with new weights. Its table keeps all rows.

        Problems with the same rows share the arrays of the sample.
        """
        numbers = None if self.rows is None else np.where(rows < 0, -1, self.rows[rows])
        x, y, _ = self.batch
        batch = self.computed_once(_picked, x, y, weight, rows, weight)
        return self.replace(batch=batch, rows=numbers, source=self.source or self.batch)

    def preconditioned_by(self, matrix: np.ndarray | None) -> "Problem":
        """Returns the problem on features times a matrix, ``(p, q)``; problems with equal arrays share the product.

        ``jtrees.data.scaling.with_map`` returns its models as models of the features. None is the identity.
        """
        if matrix is None:
            return self
        product = lambda rows: rows._replace(x=self.computed_once(np.matmul, rows.x, matrix))
        evaluation = None if self.evaluation is None else product(self.evaluation)
        return self.replace(batch=product(self.batch), evaluation=evaluation, source=None)

    @property
    def monitor(self) -> Any:
        """The monitor, which shows progress and enforces the deadline."""
        return self.engine.monitor

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the features, with padding."""
        return self.batch.x.shape  # type: ignore[return-value]

    @property
    def weighed(self) -> np.ndarray:
        """Which rows have a positive weight, ``(n,)`` bool."""
        return np.asarray(self.batch.weight) > 0

    @property
    def count(self) -> int:
        """Number of rows of positive weight."""
        return int(np.count_nonzero(self.weighed))

    def rng(self, purpose: str, number: int = 0) -> np.random.Generator:
        """Returns the random generator of a purpose of the search, such as ``"folds"``, and a number of it."""
        return generator(self.key, purpose, number)

    def computed_once(self, fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Returns ``fn(*args, **options)``, which is computed once for the same ``args`` of all problems of the engine.

        Arrays are the same if they are the same object. ``fn`` is a module-level function.
        """
        return self.engine.computed_once(fn, args, options)

    def left_out(self, model: Any, held_out: np.ndarray) -> LeftOut | None:
        """Returns the losses of held-out rows of ``batch`` by a model in the user's units.

        They are None if there is no time for them, or if nobody reads them.
        """
        assert self.data is not None and self.rows is not None
        if self.is_member or not self.monitor.may_be_late():
            return None
        rows, table = self.rows[held_out & (self.rows >= 0)], self.data.table
        losses = np.full(len(table.x), np.nan)
        with distributed.apart():
            losses[rows] = losses_of(model, table.rows(rows), self.data.scaling)
        return LeftOut(losses, chose=True, several=False)

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Context in which a search makes its result in the user's units; each process makes the same result.

        Raises:
          OutOfTimeError: if the problem is optional and there is no time.
        """
        engine = self.engine
        # The remaining work, such as the predictions of a forest, takes about the time of the results so far.
        if self.is_optional and not self.monitor.may_be_late(engine.seconds_of_results):
            raise OutOfTimeError("the deadline passed before the result was finished")
        began = time.monotonic()
        with distributed.apart():
            yield
        engine.seconds_of_results += time.monotonic() - began

    async def map(self, fn: Callable[..., Any], *args: Any, often: bool = False) -> "DeviceValue":
        """Returns ``fn(run, *args)``, on the device.

        Args:
          fn: a module-level pure function of a :class:`Run`. It is compiled once for all problems.
          *args: pytrees of arrays, or values on the device.
          often: whether ``fn`` is called many times in a fit. If so, it is compiled with more optimisation.
        """
        return await Call(fn, self, args, often=often)

    async def train(
        self,
        fn: Callable[..., Any],
        state: Any,
        steps: int,
        *args: Any,
        name: str,
        begins: int = 0,
        total: int | None = None,
        least: int = 0,
    ) -> "Trained":
        """Returns the state after ``steps`` updates; after fewer updates if the deadline passes or the run ends.

        The updates are made in compiled calls of about half a second; this is the only loop of updates. The result does
        not depend on the division of the updates into calls. The first training of procedures that run together always
        makes at least one call.

        Args:
          fn: a module-level pure function ``fn(run, state, *args, before, count)``. It returns the state after
            ``count`` more updates, the losses of the updates, and whether the run has ended. ``before`` is the number
            of updates so far and ``count`` is at most ``jtrees.search.MOST``. The losses are ``(MOST,)``, with
            ``jtrees.training.state.NOT_TAKEN`` after the last update.
          state: the initial state.
          steps: number of updates.
          *args: further arguments.
          name: name of the training, for the progress bar.
          begins: number of updates before this training, which is added to ``before``.
          total: number of updates with later trainings, for the progress bar. None: ``begins + steps``.
          least: number of updates that are made even after the deadline.
        """
        return await Call(fn, self, (state, *args), steps, name, begins, total, least, often=True)


class Call(NamedTuple):
    """A call of a compiled function; ``steps`` is None for :meth:`Problem.map`."""

    fn: Callable[..., Any]
    problem: Problem
    args: tuple
    steps: int | None = None
    name: str = ""
    begins: int = 0
    total: int | None = None
    least: int = 0
    often: bool = False

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)


class Children(NamedTuple):
    """Procedures that run side by side, at most ``concurrent`` at a time."""

    procedures: Sequence[Any]
    concurrent: int

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)


async def gather(*procedures: Any, concurrent: int | None = None) -> list[Any]:
    """Returns the results of procedures that run side by side.

    The result of a procedure that became non-finite is its ``FloatingPointError``. The result of an optional procedure
    without time is its :class:`OutOfTimeError`. The other procedures continue.

    Args:
      *procedures: the procedures.
      concurrent: largest number of procedures that run at a time; the next begins when one has ended. None: all.
    """
    return await Children(procedures, concurrent or len(procedures)) if procedures else []


class OutOfTimeError(Exception):
    """The deadline passed before the result of an optional problem was finished."""


class DeviceValue:
    """A result on the device, alone or as an element of stacked results.

    Attributes:
      arrays: the pytree of arrays, with a leading axis if ``index`` is given. Results of one stack share the object.
      index: index in the stack, or None for a single result.
    """

    def __init__(self, arrays: Any, index: int | None = None):
        self.arrays, self.index = arrays, index

    @property
    def host(self) -> Any:
        """The pytree in NumPy. A stack is copied once for all of its results."""
        tree = self.arrays.host
        return tree if self.index is None else jax.tree.map(lambda a: a[self.index], tree)

    def element(self, number: int) -> "DeviceValue":
        """Returns an element of a tuple, on the device."""
        return DeviceValue(self.arrays.element(number), self.index)

    # The value of a single array can stand for the array in a problem. It is copied to the host when NumPy needs it.

    @property
    def shape(self) -> tuple[int, ...]:
        return np.shape(self.arrays.tree)[self.index is not None :]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.host, dtype)


class Arrays:
    """A pytree on the device, and its copy on the host."""

    def __init__(self, tree: Any):
        self.tree = tree
        self._elements: dict[int, Arrays] = {}

    def element(self, number: int) -> "Arrays":
        """Returns an element of a tuple; always the same object."""
        return self._elements.setdefault(number, Arrays(self.tree[number]))

    @functools.cached_property
    def host(self) -> Any:
        """The copy in NumPy, which is made once."""
        return distributed.to_host(self.tree)


class Trained(NamedTuple):
    """The state after a training, on the device, and the losses of its updates, ``(updates,)``."""

    state: DeviceValue
    losses: np.ndarray


def _picked(x: Any, y: Any, weight: Any, rows: np.ndarray, new_weight: np.ndarray | None = None) -> Batch:
    """Returns rows of a batch, with weights of mean 1; -1 is padding of weight 0."""
    weight = np.asarray(weight)[rows] if new_weight is None else new_weight
    weight = segments.mean_one(np.where(rows < 0, 0, weight).astype(np.float32))
    return Batch(np.asarray(x)[rows], np.asarray(y)[rows], weight)  # type: ignore[arg-type]


def generator(key: np.ndarray, purpose: str, number: int = 0) -> np.random.Generator:
    """Returns the random generator of a purpose, from the data of a key."""
    numbers = [_PURPOSES[purpose] + number] if purpose in _PURPOSES else [*purpose.encode(), number]
    return np.random.default_rng([*key.ravel().tolist(), *numbers])


def derived(key: np.ndarray, number: int) -> np.ndarray:
    """Returns the data of a new key, derived from a key and a number; on the host, without compilation."""
    return np.random.SeedSequence([*key.ravel().tolist(), number]).generate_state(key.size).reshape(key.shape)


def identity_of(value: Any) -> Hashable:
    """Returns a value that is equal for the same arguments: the identity of an array, and the value of other leaves."""
    leaves, structure = jax.tree.flatten(value)
    return structure, tuple(id(leaf) if has_identity(leaf) else leaf for leaf in leaves)


def has_identity(leaf: Any) -> bool:
    """Returns whether an argument is an array, which is the same argument only if it is the same object."""
    return isinstance(leaf, (np.ndarray, jax.Array, DeviceValue))
