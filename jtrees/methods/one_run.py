"""What recipes of one training run on mini-batches share: DGT, the annealed tree, LatentTree, TEL, CO2."""

from typing import Any

from flax import struct
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np
import optax

from jtrees import losses, training, validation as checks
from jtrees.recipes import Fit, Found, Recipe, Rounds, number, static
from jtrees.table import Scale, Table, mean_loss
from jtrees.tasks import Regression, Task

_UPDATES, _PASSES = 2000, 12  # at least, unless epochs are given


@struct.dataclass(kw_only=True)
class OneRun(Recipe):
    """One run on mini-batches; with ``validation`` the parameters that did best there, looked at once an epoch.

    Attributes:
      epochs: passes over the data; None: as many as make 2000 updates, and at least 12.
      batch_size: samples in a mini-batch; n if that is less. Those left over in a pass rest until the next.
      learning_rate: at the start.
    """

    epochs: int | None = static(default=100)
    batch_size: int = static(default=128)
    learning_rate: float = 0.01

    def method(self, table: Table) -> training.Method:
        """The paper's method for a table."""
        raise NotImplementedError

    def optimizer(self, steps: int, an_epoch: int) -> optax.GradientTransformation:
        """The paper's optimiser for so many steps, so many in an epoch."""
        raise NotImplementedError

    def answers(self, params: Any, table: Table, x: Array) -> Array:
        """What the model that these parameters end in says about samples: what the loss takes."""
        raise NotImplementedError

    def sample_loss(self, task: Task) -> losses.SampleLoss:
        """The loss on each sample."""
        return losses.sample_loss(getattr(self, "loss", None), task)

    def checked(self, table: Table) -> Any:
        as_given = np.all(table.y.min(0) == 0) and np.all(table.y.max(0) == 1)
        if getattr(self, "loss", None) is not None and isinstance(table.task, Regression) and not as_given:
            losses.check_without_link(self.sample_loss(table.task), table.y.shape[1:])
        batch_size = checks.check_count("batch_size", self.batch_size)
        most = int(checks.MAX_NUMBERS // self.an_epoch(len(table.x)))
        return self.replace(
            epochs=None if self.epochs is None else checks.check_count("epochs", self.epochs, most=most),
            batch_size=batch_size,
            learning_rate=number("learning_rate", self.learning_rate, checks.check_number),
        )

    def an_epoch(self, n: int) -> int:
        """Steps in an epoch of n samples."""
        return n // min(self.batch_size, n)

    def updates(self, n: int) -> int:
        """How many updates a run on n samples makes, in whole epochs."""
        an_epoch = self.an_epoch(n)
        epochs = max(_PASSES, -(-_UPDATES // an_epoch)) if self.epochs is None else self.epochs
        return an_epoch * epochs

    def rounds(self, shape: tuple[int, int], many: int = 1) -> Rounds:
        elements = many * min(self.batch_size, shape[0]) * self.work(shape[1])
        return Rounds.of(self.updates(shape[0]), elements)

    def work(self, p: int) -> int:
        """About how many numbers a step works on, a sample."""
        raise NotImplementedError

    def _parts(self, table: Table) -> tuple[training.Method, optax.GradientTransformation]:
        n = table.x.shape[0]
        return self.method(table), self.optimizer(self.updates(n), self.an_epoch(n))

    def begin(self, start: Any, table: Table, *, key: Array) -> training.TrainState:
        method, optimizer = self._parts(table)
        return training.start(method, table.batch, key=key, optimizer=optimizer)

    def round(
        self, i: Array, state: training.TrainState, table: Table, judge: Table | None, rounds: Rounds
    ) -> tuple[training.TrainState, Array]:
        method, optimizer = self._parts(table)
        n = table.x.shape[0]
        watch: Any = {"score_every": 0 if judge is None else self.an_epoch(n)}
        watch |= {"batch_size": min(self.batch_size, n), "score": lambda params: self.judged(params, table, judge)}
        once = training.one_step(method, table.batch, optimizer, **watch)
        state = state.replace(step=jnp.asarray(rounds.before(i), jnp.int32))
        state, history = training.advance_up_to(once, state, rounds.within(i), rounds.size)
        return state, history.losses

    def end(self, state: training.TrainState, table: Table, judge: Table | None) -> Found:
        method, _ = self._parts(table)
        best = training.best(method, state, table.batch, score=lambda params: self.judged(params, table, judge))
        return Found(best.params, best.score, jnp.isfinite(best.score), best.step)

    def judged(self, params: Any, table: Table, judge: Table | None) -> Array:
        """What the model loses on the samples to judge by, or else on the table: on scaled data."""
        by = table if judge is None else judge
        lost = self.sample_loss(table.task)(self.answers(params, table, by.x), by.y)
        return losses.weighted_mean(lost, training.normalised(by.batch).weight)


def check_found(found: Found) -> None:
    """Raises ``FloatingPointError`` if a search was not finite."""
    if not found.finite:
        raise FloatingPointError("training became non-finite: try a smaller learning_rate")


def fit_of_tree(found: Found, table: Table, judge: Table | None, scale: Scale, *, loss: float | None = None) -> Fit:
    """A hard tree on scaled data as a fit in the user's units; table and judge are in these.

    Args:
      found: its model is the tree.
      table: what was learnt from.
      judge: what it was chosen by, if that is something else.
      scale: of the data.
      loss: what to report in place of the tree's mean loss.
    """
    check_found(found)
    tree = scale.from_unit(found.model)
    path = np.asarray(tree.decision_path(table.x))[:-1]
    loss = mean_loss(tree, judge or table, scale) if loss is None else loss
    return Fit(tree, tree, loss, int(found.step), np.zeros(0), {"reached": len(np.unique(path))})
