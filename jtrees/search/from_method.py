"""A recipe for any method that hardens to a tree, user-defined methods above all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import optax

from jtrees import pytree, training
from jtrees.search import options as kinds
from jtrees.search._minibatch import Schedule, minibatch
from jtrees.search.recipe import Recipe, Search
from jtrees.tasks import Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree


@pytree.dataclass(kw_only=True)
class FromMethod(Recipe):
    """Trains a :class:`jtrees.Method` on mini-batches, so that it can be fitted to tables, tuned, swept and bagged.

    Features are scaled to mean 0 and deviation 1, targets to [0, 1]. The model is the hardened tree of the last
    update or, with ``validation``, of the epoch with the lowest ``score`` there. The report has ``reached``, the number
    of internal nodes that at least one training sample reaches.

    Attributes:
      make: ``(**options, task=task) -> Method``, such as ``partial(jtrees.methods.get, 4)``. Every function
        compiles its own program: reuse one ``partial`` for all fits.
      options: numeric arguments of ``make`` by name; each may be traced. In a grid ``"options__alpha"``.
      rule: ``learning_rate -> optax transformation``; the learning rate follows a cosine decay to zero.
      epochs: passes over the data; None: enough for 2000 updates, and at least 12.
      batch_size: samples in a mini-batch, at most n. The remainder of a pass is left out until the next shuffle.
      learning_rate: initial learning rate.

    Example:
      >>> from functools import partial
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.FromMethod(make=partial(jtrees.methods.get, 1), options={"alpha": 4.0}, epochs=300)
      >>> jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0)).tree
      ObliqueTree(depth=1, features=1, splits=1, leaves=2, parameters=4, Constant)
    """

    make: Callable[..., training.Method] = pytree.field(pytree_node=False, metadata={"check": kinds.check_function})
    options: Any = kinds.numbers()
    rule: Callable[..., optax.GradientTransformation] = kinds.static(optax.adam, kinds.check_function)
    epochs: int | None = kinds.optional_count(100)
    batch_size: int = kinds.count(128)
    learning_rate: float = kinds.positive(0.01)

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        n, p = shape
        method = self.make(**self.options, task=task)
        if not isinstance(method, training.Method):
            raise ValueError(f"make must give a jtrees.Method, got {type(method).__name__}")
        schedule = Schedule.of(n, self.epochs, self.batch_size)
        last = jnp.asarray(schedule.steps, jnp.int32)

        def score(params: Any, validation: Batch) -> Array:
            return method.loss(params, validation, key=jax.random.key(0), step=last)[1]

        search = minibatch(
            task,
            method,
            self.rule(optax.cosine_decay_schedule(self.learning_rate, schedule.steps)),
            schedule,
            elements_per_sample=16 * p,
            score=score,
        )

        def init(start: None, batch: Batch, *, key: Array) -> training.TrainState:
            state = search.init(start, batch, key=key)
            tree = jax.eval_shape(method.harden, state.params, batch)
            if not isinstance(tree, ObliqueTree):
                raise ValueError(f"make must give a method that hardens to an ObliqueTree, got {type(tree).__name__}")
            return state

        return search._replace(init=init)
