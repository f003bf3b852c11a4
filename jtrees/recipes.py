"""Recipes: a paper's whole procedure as data, and what is done with all of them.

A recipe is a frozen dataclass that is a pytree: structure (depth, widths, epochs) is static, numbers (learning rate,
penalty) may be traced. It says how a search begins, what a round of it does and what it ends in, all pure; :func:`fit`
checks and scales a table, runs the rounds, each a compiled program, and carries what was found back to the user's
units.
"""

from collections.abc import Callable, Mapping
import contextlib
import dataclasses
from functools import partial
import signal
import threading
import time
from typing import Any, Literal, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import blocking, sharding, validation as checks
from jtrees.baselines import baselines, warn_if_behind
from jtrees.table import Scale, Table, checked_judge, checked_table
from jtrees.tasks import Task

static = partial(struct.field, pytree_node=False)


@struct.dataclass
class Fit:
    """What a recipe found, in the user's own units.

    Attributes:
      model: what answers: ``model.predict(x)`` takes raw x and gives raw y, or class probabilities ``(n, K)``.
      tree: the :class:`jtrees.ObliqueTree` that it is, where it is one, else None.
      loss: what the model was chosen by: mean squared error (of several targets on targets scaled to [0, 1]) or mean
        log loss, on ``validation`` where that was given, else on the training data; each recipe says where it differs.
      step: number of updates that it had seen.
      history: training loss before each update, on scaled data, steps last.
      report: what else there is to say, by name: see the recipe. Always there: ``recipe``, its name and options as
        plain data; ``ended``: ``"finished"``, ``"max_seconds"`` or ``"interrupted"``. From :func:`fit`, where the loss
        is squared error or log loss: ``baselines``, the errors of the model, of a linear one and of a constant (see
        :func:`jtrees.baselines.baselines`).
    """

    model: Any
    tree: Any
    loss: float
    step: int
    history: np.ndarray
    report: dict[str, Any] = struct.field(pytree_node=False)

    def predict(self, x: ArrayLike) -> Any:
        """What the model answers: short for ``fit.model.predict(x)``."""
        return self.model.predict(x)

    def __repr__(self) -> str:
        return f"Fit(model={self.model!r}, loss={self.loss}, step={self.step}, report: {', '.join(self.report)})"


class Found(NamedTuple):
    """What a search ends in, on scaled data: a pytree.

    Attributes:
      model: parameters of the model, or its splits.
      score: what it was chosen by (lower is better); infinite if the search was not finite.
      finite: whether it was.
      step: number of updates that the model had seen.
      extra: what else the recipe's ``finish`` needs.
    """

    model: Any
    score: Array
    finite: Array
    step: Array
    extra: Any = None


class Rounds(NamedTuple):
    """A search cut into rounds: stages of so many steps each, in rounds of one size, a stage's last perhaps shorter."""

    steps: int
    size: int
    stages: int = 1

    @classmethod
    def of(cls, steps: int, elements: int, stages: int = 1) -> "Rounds":
        """Rounds of about equal size, of steps that each work on an array of so many elements."""
        a_stage = -(-steps // blocking.steps_in_a_round(elements))
        return cls(steps, -(-steps // a_stage), stages)

    @property
    def a_stage(self) -> int:
        """How many rounds in a stage."""
        return -(-self.steps // self.size)

    @property
    def count(self) -> int:
        """How many rounds in all."""
        return self.stages * self.a_stage

    def before(self, i: Any) -> Any:
        """Steps of the stage before round i."""
        return i % self.a_stage * self.size

    def within(self, i: Any) -> Any:
        """Steps of round i."""
        return jnp.minimum(self.size, self.steps - self.before(i))


class Recipe:
    """What every recipe is: a frozen dataclass that is a pytree, with these functions.

    The state of a search holds no clock: the number of the round is an argument, one for all searches that run side by
    side, so that what is done now and then is not computed always.
    """

    def targets(self, x: Any, y: Any) -> Any:
        """What is learnt from x: y, unless the recipe knows better."""
        return y

    def table(self, x: Any, y: Any, sample_weight: Any, task: str | Task) -> Table:
        """The table to learn from, checked.

        Raises:
          ValueError: naming the argument, what was expected and what came.
        """
        return checked_table(x, self.targets(x, y), sample_weight, task)

    def judge(self, validation: Any, table: Table) -> Table:
        """Samples to judge by, a pair ``(x, y)``, as a table like the one that is learnt from.

        Raises:
          ValueError: as :meth:`table`.
        """
        if not isinstance(validation, (tuple, list)) or len(validation) != 2:
            raise ValueError(f"validation must be a pair (x, y), got {type(validation).__name__}")
        x, y = validation
        try:
            y = self.targets(checks.check_x(x, features=table.x.shape[1]), y)
            if y is None:
                raise ValueError("y must hold the targets to judge by, got None")
        except ValueError as error:
            raise ValueError(f"validation: {error}") from None
        return checked_judge((x, y), table)

    def minimises_the_usual_loss(self) -> bool:
        """Whether the loss is squared error, or log loss of classes, and not one of the user's own."""
        return getattr(self, "loss", None) is None

    def ends_in_constants(self) -> bool:
        """Whether it ends in one tree, with constant leaves or class frequencies."""
        return False

    def checked(self, table: Table) -> Any:
        """The recipe with every option checked and numbers as float32 arrays.

        Raises:
          ValueError: naming the option, what was expected and what came.
        """
        raise NotImplementedError

    def scale(self, table: Table) -> Scale:
        """How the table is scaled; features to mean 0 and deviation 1 unless the recipe knows better."""
        return Scale.of(table, 1.0)

    def prepare(self, table: Table, *, key: Array) -> Any:
        """What is done on the host before, with a scaled table: a pytree, or None."""
        return None

    def rounds(self, shape: tuple[int, int], many: int = 1) -> Rounds:
        """The rounds of a search on features of this shape, of so many searches that run side by side."""
        raise NotImplementedError

    def begin(self, start: Any, table: Table, *, key: Array) -> Any:
        """The state of a search that has not begun. Pure."""
        raise NotImplementedError

    def round(self, i: Array, state: Any, table: Table, judge: Table | None, rounds: Rounds) -> tuple[Any, Array]:
        """The state after round i of these rounds, and the losses of its steps, steps last, NaN where it had fewer.
        Pure.
        """
        raise NotImplementedError

    def end(self, state: Any, table: Table, judge: Table | None) -> Found:
        """What a search has found so far. Pure."""
        raise NotImplementedError

    def finish(
        self, found: Found, start: Any, table: Table, judge: Table | None, *, scale: Scale, key: Array, watch: "Watch"
    ) -> Fit:
        """What was found, carried back to the user's units; table and judge are in these. On the host.

        Raises:
          FloatingPointError: if nothing finite was found.
        """
        raise NotImplementedError

    def search(self, start: Any, table: Table, judge: Table | None, *, key: Array) -> Found:
        """The whole search as one pure function: ``vmap`` it over the numbers of the recipe, over keys, over weights.

        Args:
          start: from ``prepare``.
          table: scaled, from ``scale(table).unit(table)``; or any :class:`jtrees.table.Table` of size one, NumPy or
            JAX.
          judge: samples to choose by instead of the training data, or None.
          key: for everything random.
        """
        table, judge = jax.tree.map(jnp.asarray, (table, judge))
        rounds = self.rounds(table.x.shape)
        body = lambda i, state: self.round(i, state, table, judge, rounds)[0]
        state = jax.lax.fori_loop(0, rounds.count, body, self.begin(start, table, key=key))
        return self.end(state, table, judge)


class Combined(Recipe):
    """A recipe made of another, its ``base``: what is asked of the table is the base's affair."""

    base: Any

    def checked_base(self) -> Recipe:
        """The base; ``ValueError`` if it is no recipe."""
        if not isinstance(self.base, Recipe):
            raise ValueError(f"base must be a recipe, such as jtrees.DGT(), got {self.base!r}")
        return self.base

    def targets(self, x: Any, y: Any) -> Any:
        return self.checked_base().targets(x, y)

    def table(self, x: Any, y: Any, sample_weight: Any, task: str | Task) -> Table:
        return self.checked_base().table(x, y, sample_weight, task)

    def judge(self, validation: Any, table: Table) -> Table:
        return self.checked_base().judge(validation, table)

    def scale(self, table: Table) -> Scale:
        return self.checked_base().scale(table)

    def minimises_the_usual_loss(self) -> bool:
        return self.checked_base().minimises_the_usual_loss()


def number(name: str, value: Any, check: Callable[[str, Any], None]) -> Array:
    """A number of a recipe, checked and as a float32 array: ``0`` and ``0.0`` would be two programs.

    Raises:
      ValueError: naming the option.
    """
    array: Any = value
    if value is not None and not isinstance(value, jax.Array):
        try:
            array = np.asarray(value)
        except ValueError:  # rows of different lengths
            raise ValueError(f"{name} must be a number, got {value!r}") from None
        if array.dtype.kind not in "biuf" and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} must be a number, got {value!r}")
        array = array.astype(np.float32)
    check(name, array)
    if array.ndim:
        raise ValueError(f"{name} must be one number, got shape {array.shape}: vmap search, or tune, over several")
    return jnp.asarray(array, jnp.float32)


# --- Fit -------------------------------------------------------------------------------------------------------------


def fit(
    recipe: Any,
    x: ArrayLike,
    y: ArrayLike | None = None,
    *,
    key: Array,
    task: Literal["regression", "classification"] | Task = "regression",
    sample_weight: ArrayLike | None = None,
    validation: tuple[ArrayLike, ArrayLike] | None = None,
    progress: bool = False,
    max_seconds: float | None = None,
) -> Fit:
    """From a table of numbers to a model.

    The search runs in rounds of about half a second. Ctrl-C ends it after the round that runs, with the best found so
    far (pressed again, at once and with nothing), and so does ``max_seconds``; a compilation is not broken off.

    Args:
      recipe: what to do, such as ``jtrees.GET(depth=4)``; its docstring says what the options mean.
      x: features, ``(n, p)``, finite.
      y: targets, ``(n,)`` or ``(n, k)``, finite and not constant; in classification whole numbers 0..K-1, every class
        present.
      key: for everything random.
      task: ``"regression"`` or ``"classification"``, or a task: ``jtrees.Classification(3)`` allows classes without a
        sample.
      sample_weight: nonnegative weights, ``(n,)``; only their ratios matter, rows of weight 0 are left out. Uneven
        weights count as fewer samples (Kish's effective number) where leaves are regularised or smoothed.
      validation: ``(x, y)`` that models are judged by instead of the training data; not trained on.
      progress: whether to show a bar with the loss and the time left.
      max_seconds: when to end, in seconds from now.

    Warns:
      jtrees.baselines.BehindBaselineWarning: if the model explains less of the targets than a linear model or a
        constant does.

    Raises:
      ValueError: naming the argument, what was expected and what came.
      ImportError: if the recipe needs a package that is missing, saying which extra has it.
      FloatingPointError: if nothing finite was found.
    """
    began = time.monotonic()
    checks.check_key(key)
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe must be a recipe, such as jtrees.GET(depth=4), got {recipe!r}")
    if max_seconds is not None:
        checks.check_seconds(max_seconds)
    table = recipe.table(x, y, sample_weight, task)
    judge = None if validation is None else recipe.judge(validation, table)
    given, recipe = recipe, recipe.checked(table)
    prepare_key, search_key, finish_key = jax.random.split(key, 3)
    scale = recipe.scale(table)
    unit, unit_judge = scale.unit(table), None if judge is None else scale.unit(judge)
    watch = Watch(progress, None if max_seconds is None else began + max_seconds)
    with watch.listening():
        start = recipe.prepare(unit, key=prepare_key)
        found, history = run_rounds(recipe, start, unit, unit_judge, search_key, watch)
        result = recipe.finish(found, start, table, judge, scale=scale, key=finish_key, watch=watch)
    report = result.report | {"recipe": described(given), "ended": watch.ended}
    if given.targets(x, y) is y and given.minimises_the_usual_loss():
        report["baselines"] = baselines(result.model, table, judge, scale)
        where = "in the training data" if judge is None else "in the validation set"
        warn_if_behind(report["baselines"], type(given).__name__, where)
    return result.replace(history=history, report=report)


def described(recipe: Recipe) -> dict[str, Any]:
    """Name and options of a recipe as plain data, to be read; a function by its name."""
    options: dict[str, Any] = {"name": type(recipe).__name__}
    for field in dataclasses.fields(recipe):  # pyright: ignore[reportArgumentType]
        options[field.name] = plain(getattr(recipe, field.name))
    return options


def plain(value: Any) -> Any:
    """A value as plain data, to be read: a recipe by its name and options, a function by its name."""
    if isinstance(value, Recipe):
        return described(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)


# The recipe's structure is part of its type: another depth is another program, another learning rate is not.
_begin = jax.jit(lambda recipe, start, table, key: recipe.begin(start, table, key=key))
_round = jax.jit(lambda recipe, *args: recipe.round(*args), static_argnums=5)
_end = jax.jit(lambda recipe, state, table, judge: recipe.end(state, table, judge))


def run_rounds(
    recipe: Any, start: Any, table: Table, judge: Table | None, key: Array | None, watch: "Watch"
) -> tuple[Found, np.ndarray]:
    """The search of a recipe on scaled data, round by round; what it found, and the losses of its steps."""
    if np.ndim(table.x) == 2:  # else several tables, each of a run of its own
        table, judge = sharding.put_rows(table), sharding.put_rows(judge)  # once, and not in each round
    state, losses = _begin(recipe, start, table, key), []
    rounds = recipe.rounds(table.x.shape)
    with watch.over(rounds.count, type(getattr(recipe, "first", recipe)).__name__):
        for i in range(rounds.count):
            state, of_round = jax.block_until_ready(_round(recipe, jnp.int32(i), state, table, judge, rounds))
            losses.append(np.asarray(of_round)[..., : int(rounds.within(i))])
            if watch.seen(i, losses[-1]):
                break
    history = np.concatenate(losses, axis=-1)
    return jax.block_until_ready(_end(recipe, state, table, judge)), history


def memory_of_round(recipe: Any, table: Table, judge: Table | None) -> int:
    """Bytes that a round of a search takes, by the account of the compiler; the program is compiled once for this and
    for the search.
    """
    state = jax.eval_shape(_begin, recipe, None, table, None)
    program = _round.lower(recipe, jnp.int32(0), state, table, judge, recipe.rounds(table.x.shape)).compile()
    sizes: Any = program.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes


class Watch:
    """Who looks at a search between its rounds: shows a bar, minds the time and Ctrl-C.

    ``ended`` says how it ended.
    """

    def __init__(self, progress: bool = False, deadline: float | None = None):
        """``deadline`` is a time of ``time.monotonic``."""
        self.progress, self.deadline, self.ended = progress, deadline, "finished"

    @contextlib.contextmanager
    def listening(self) -> Any:
        """Meanwhile Ctrl-C ends the search, and not the program. Python knows of it in its main thread alone; where it
        is ignored, it still is.
        """
        before = signal.getsignal(signal.SIGINT)
        if before in (None, signal.SIG_IGN) or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def over(self, rounds: int, name: str = "") -> Any:
        """While so many rounds of a recipe of this name run."""
        with _bar(rounds, name) if self.progress else contextlib.nullcontext(lambda done, loss: None) as self._bar:
            self._last, self._rounds = time.monotonic(), rounds
            yield

    def _interrupt(self, *_: Any) -> None:
        if self.ended == "interrupted":
            raise KeyboardInterrupt
        self.ended = "interrupted"

    def goes_on(self) -> bool:
        """Whether there is time for another search."""
        if self.ended == "finished" and self.deadline is not None and time.monotonic() > self.deadline:
            self.ended = "max_seconds"
        return self.ended == "finished"

    def seen(self, i: int, losses: np.ndarray) -> bool:
        """Whether to end after round i, which had these losses."""
        finite = losses[np.isfinite(losses)]
        self._bar(i + 1, float(finite.min()) if finite.size else float("nan"))
        now = time.monotonic()
        # The first round was compiled, too, and tells nothing of the next.
        took, self._last = now - self._last if i else 0.0, now
        late = self.deadline is not None and now + took / 2 > self.deadline and i + 1 < self._rounds
        if self.ended == "finished" and late:
            self.ended = "max_seconds"
        return self.ended != "finished"


@contextlib.contextmanager
def _bar(rounds: int, name: str) -> Any:
    """A bar, by rich where it is installed and can draw one; else ten lines."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        console = None
    else:
        console = Console()
    if console is None or not (console.is_terminal or console.is_jupyter):
        said = lambda done, loss: print(f"{name}: round {done} of {rounds}, loss {loss:.4g}", flush=True)
        yield lambda done, loss: said(done, loss) if 10 * done // rounds > 10 * (done - 1) // rounds else None
        return
    text = TextColumn("{task.description}"), TextColumn("loss {task.fields[loss]}")
    columns = (text[0], BarColumn(), text[1], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=rounds, loss="-")
        yield lambda done, loss: progress.update(task, completed=done, loss=f"{loss:.4g}")
