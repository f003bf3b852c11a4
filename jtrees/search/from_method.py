"""A recipe for any method that hardens to a tree, mainly for user-defined methods."""

from collections.abc import Callable, Mapping
import inspect
from typing import Any

from flax.core import FrozenDict
import jax
import jax.numpy as jnp
import optax

from jtrees import pytree, training, validation
from jtrees.leaves import kind_of
from jtrees.search.minibatch import MiniBatchRecipe
from jtrees.search.options import as_scalar, option
from jtrees.search.run import Run
from jtrees.tasks import Classification, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree


def _checked_numbers(name: str, value: Any) -> FrozenDict:
    """Returns finite numbers by name as float32 arrays."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be numbers by name, got {validation.quoted(value)}")
    return FrozenDict({key: as_scalar(f"{name}__{key}", number) for key, number in value.items()})


def _checked_static(name: str, value: Any) -> FrozenDict:
    """Returns hashable values by name."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be values by name, got {validation.quoted(value)}")
    for key, item in value.items():
        try:
            hash(item)
        except TypeError:
            raise ValueError(f"{name}__{key} must be hashable, got {validation.quoted(item)}") from None
    return FrozenDict(value)


def _binds(function: Any, **arguments: Any) -> bool:
    """Returns whether a function takes arguments of these names."""
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError:
        return False
    return True


@pytree.dataclass(kw_only=True)
class FromMethod(MiniBatchRecipe):
    """Recipe that trains a :class:`jtrees.Method` on mini-batches; it can be fitted to tables, tuned, swept and bagged.

    Features are scaled to mean 0 and standard deviation 1, and targets to [0, 1]. The model is the hardened tree after
    the last update. If ``validation`` is given, the model is the hardened tree of the evaluation with the lowest loss
    on the validation set. The report is a :class:`jtrees.search.TrainingReport`.

    Attributes:
      make: ``(**static, **options, task=task) -> Method``, such as ``jtrees.methods.get``. Each function compiles its
        own program, so use the same function for all fits.
      options: numeric arguments of ``make`` by name. They may be traced. The name in a grid is ``"options__alpha"``.
      static: arguments of ``make`` that are constants of the program, such as ``{"depth": 4}``. Each value compiles its
        own program. The name in a grid is ``"static__depth"``.
      rule: ``learning_rate -> optax transformation``. The learning rate follows a cosine decay to zero.
      epochs: number of passes over the data; None: as in :class:`jtrees.DGT`.
      batch_size: samples in a mini-batch, as in :class:`jtrees.DGT`.
      learning_rate: initial learning rate.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> options = {"options": {"alpha": 4.0}, "static": {"depth": 1}}
      >>> recipe = jtrees.FromMethod(make=jtrees.methods.get, **options, epochs=300)
      >>> jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0)).tree
      ObliqueTree(depth=1, features=1, splits=1, leaves=2, parameters=4, Values(SquaredError))
    """

    make: Callable[..., training.Method] = option()
    options: Any = option(FrozenDict(), check=_checked_numbers, traced=True)
    static: Any = option(FrozenDict(), check=_checked_static)
    rule: Callable[..., optax.GradientTransformation] = option(optax.adam)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        tree, p = self._tree(task, shape), shape[1]
        super().check(task, shape)
        if not isinstance(tree, ObliqueTree):
            raise ValueError(f"make must give a method that hardens to an ObliqueTree, got {type(tree).__name__}")
        kind = kind_of("constant" if tree.leaves.is_constant else "linear", task)
        shape_of = lambda leaves: (leaves.values if leaves.is_constant else leaves.intercept).shape
        expected, got = map(shape_of, (kind.empty(len(tree.bias) + 1, p, task.shape), tree.leaves))
        if got != expected:
            raise ValueError(f"make must give leaves of shape {expected} for {task}, got {got}: does it use task?")

    def tree_leaves(self, task: Task) -> str:
        return "constant" if self._tree(task, (2, 1)).leaves.is_constant else "linear"

    def _tree(self, task: Task, shape: tuple[int, int]) -> Any:
        """Returns the shapes of the hardened tree of a table with a number of rows and features."""
        method, (n, p) = self._method(task), shape
        labels = isinstance(task, Classification)
        y = jax.ShapeDtypeStruct((n,), jnp.int32) if labels else jax.ShapeDtypeStruct((n, *task.shape), jnp.float32)
        batch = Batch(jax.ShapeDtypeStruct((n, p), jnp.float32), y)  # type: ignore[arg-type]
        harden = lambda batch, key: method.harden(method.init(batch, key=key), batch)
        return jax.eval_shape(harden, batch, jax.random.key(0))

    def _method(self, task: Task) -> training.Method:
        try:
            method = self.make(**self.static, **self.options, task=task)
        except TypeError as error:
            if _binds(self.make, **self.static, **self.options, task=task):  # the error comes from within the function
                raise
            known = validation.quoted_list(name for name in inspect.signature(self.make).parameters if name != "task")
            raise ValueError(f"static and options must be arguments of make, which are {known}: {error}") from error
        if not isinstance(method, training.Method):
            raise ValueError(f"make must give a jtrees.Method, got {type(method).__name__}")
        return method

    def method(self, run: Run) -> training.Method:
        return self._method(run.task)

    def optimizer(self, run: Run) -> optax.GradientTransformation:
        return self.rule(optax.cosine_decay_schedule(self.learning_rate, self.schedule(len(run.batch.x)).steps))
