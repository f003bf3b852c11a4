"""Any method that ends in a tree, one of your own above all, as a recipe."""

from collections.abc import Callable
from typing import Any

from flax import struct
from flax.core import FrozenDict
import jax
import jax.numpy as jnp
from jaxtyping import Array
import optax

from jtrees import training, validation as checks
from jtrees.methods.one_run import OneRun, fit_of_tree
from jtrees.recipes import Fit, Found, Watch, number, static
from jtrees.table import Scale, Table
from jtrees.tree import ObliqueTree


@struct.dataclass(kw_only=True)
class Trained(OneRun):
    """A :class:`jtrees.Method` trained on mini-batches: what makes it fit tables, and be tuned, swept and bagged.

    Features are scaled to mean 0 and deviation 1, targets to [0, 1]. The model is the tree that the parameters harden
    to: those of the last update or, with ``validation``, those of the lowest ``score`` there, looked at once an epoch.
    The report has ``reached``, the number of internal nodes that at least one training sample reaches. See
    :class:`OneRun` for the options that it shares with others.

    Attributes:
      make: ``(**options, task=task) -> Method``, such as ``partial(jtrees.get, 4)``.
        A program is compiled for each function: keep one ``partial``, and not a new one for each fit.
      options: numbers that it is given, by name; each may be traced. In a grid ``"options__alpha"``.
      rule: ``learning_rate -> optax transformation``; the rate falls to zero by a cosine.
    """

    make: Callable[..., training.Method] = static()
    options: Any = FrozenDict()
    rule: Callable[..., optax.GradientTransformation] = static(default=optax.adam)

    def checked(self, table: Table) -> Any:
        for name, value in (("make", self.make), ("rule", self.rule)):
            if not callable(value):
                raise ValueError(f"{name} must be a function, got {value!r}")
        finite = lambda name, value: checks.check_finite(name, jnp.atleast_1d(value))
        options = {name: number(f"options__{name}", value, finite) for name, value in self.options.items()}
        recipe = super().checked(table).replace(options=FrozenDict(options))
        method = recipe.method(table)
        if not isinstance(method, training.Method):
            raise ValueError(f"make must give a jtrees.Method, got {type(method).__name__}")
        ended = lambda batch, key: method.harden(method.init(batch, key=key), batch)
        tree = jax.eval_shape(ended, jax.tree.map(jnp.asarray, table.batch), jax.random.key(0))
        if not isinstance(tree, ObliqueTree):
            raise ValueError(f"make must give a method that hardens to an ObliqueTree, got {type(tree).__name__}")
        return recipe

    def work(self, p: int) -> int:
        return 16 * p

    def method(self, table: Table) -> training.Method:
        return self.make(**self.options, task=table.task)

    def optimizer(self, steps: int, an_epoch: int) -> optax.GradientTransformation:
        return self.rule(optax.cosine_decay_schedule(self.learning_rate, steps))

    def judged(self, params: Any, table: Table, judge: Table | None) -> Array:
        by = training.normalised((table if judge is None else judge).batch)
        step = jnp.asarray(self.updates(len(table.x)), jnp.int32)
        return self.method(table).loss(params, by, key=jax.random.key(0), step=step)[1]

    def end(self, state: training.TrainState, table: Table, judge: Table | None) -> Found:
        found = super().end(state, table, judge)
        return found._replace(model=self.method(table).harden(found.model, table.batch))

    def finish(
        self, found: Found, start: Any, table: Table, judge: Table | None, *, scale: Scale, key: Array, watch: Watch
    ) -> Fit:
        return fit_of_tree(found, table, judge, scale)
