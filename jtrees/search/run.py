"""One run of a recipe, as the argument of compiled functions, and the programs that call such functions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array
import numpy as np

from jtrees import compilation, segments, sharding
from jtrees.monotone import ordered_leaves
from jtrees.segments import ones_or
from jtrees.tasks import Task
from jtrees.training import Batch

FOLDS = 5  # a training holds out a fold of the rows, or none


class Run(NamedTuple):
    """One run as the argument of a compiled function.

    Attributes:
      recipe: the recipe; its numbers are traced.
      task: what is predicted.
      batch: the training rows. Rows that the run does not train on have weight 0.
      by: the evaluation rows: the validation set, else the held-out rows, else the training rows.
      key: random key.
      evaluates: whether training evaluates on ``by`` while it runs.
      validates: whether ``by`` is the validation set.
      separate: whether ``by`` and the training rows are different rows; it may be traced.
      matrix: matrix that mapped the features of ``batch`` and ``by``, or None.
      monotone: the features in which predictions must not fall, ``(p,)`` bool, or None.
    """

    recipe: Any
    task: Task
    batch: Batch
    by: Batch
    key: Array
    evaluates: bool
    validates: bool
    separate: Any
    matrix: Array | None = None
    monotone: Array | None = None

    @property
    def weight(self) -> Array:
        """Weights of the training rows, ``(n,)``; ones if the batch has no weights."""
        return ones_or(self.batch.weight, self.batch.x)

    @property
    def rows_during_training(self) -> Batch:
        """The rows that training evaluates on: the validation set, or the first fifth of ``by``.

        The fifth has all held-out rows: see :meth:`jtrees.search.Problem.without`. Shards of rows are not cut.
        """
        if self.validates or sharding.parts() > 1:
            return self.by
        count = -(-len(self.by.x) // FOLDS)
        return jax.tree.map(lambda a: a[:count], self.by)

    def ordered(self, tree: Any, leaf: Array) -> Any:
        """Returns the tree with leaves that satisfy the monotone constraints; ``leaf`` is the leaf of each row."""
        if self.monotone is None:
            return tree
        weight = segments.sums(self.weight, leaf, len(tree.bias) + 1)
        return ordered_leaves(tree, self.monotone, weight, self.task)

    def on_x(self, model: Any) -> Any:
        """Returns a pytree in which every model takes the features before they were mapped by ``matrix``."""
        if self.matrix is None:
            return model
        is_model = lambda value: hasattr(value, "composed")
        return jax.tree.map(
            lambda value: value.composed(self.matrix) if is_model(value) else value, model, is_leaf=is_model
        )


# --- Programs --------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """The static arguments of a program; the last three are for stacked calls."""

    fn: Callable[..., Any]
    task: Any
    validates: bool
    impl: str
    axes: tuple | None = None
    shares: int = 1
    devices: tuple | None = None


def results_of(form: Form, values: Any, counts: tuple) -> Any:
    """Returns ``form.fn`` of each run of a stack, or of a single run."""
    leaves, structure = jax.tree.flatten(values)

    def single(*leaves: Any) -> Any:
        state, (recipe, key, batch, evaluation, monotone, matrix, evaluates, separate), args = jax.tree.unflatten(
            structure, leaves
        )
        key = jax.random.wrap_key_data(key, impl=form.impl)
        by, has_rows = (batch, False) if evaluation is None else (evaluation, True)
        separate = form.validates or (has_rows and separate)
        evaluates = form.validates or (has_rows and evaluates)
        run = Run(recipe, form.task, batch, by, key, evaluates, form.validates, separate, matrix, monotone)
        return form.fn(run, *state, *args, *counts)

    if form.axes is None:
        return single(*leaves)

    axes: tuple = form.axes

    def share(*leaves: Any) -> Any:
        sizes = [len(leaf) for leaf, axis in zip(leaves, axes, strict=True) if axis == 0]
        if sizes[0] > 1:
            return jax.vmap(single, in_axes=axes)(*leaves)
        arrays = (leaf if axis is None else leaf[0] for leaf, axis in zip(leaves, axes, strict=True))
        return jax.tree.map(lambda a: jnp.asarray(a)[None], single(*arrays))

    if form.shares == 1:
        return share(*leaves)
    over = PartitionSpec(sharding.STARTS)
    placement: Any = {"axis_names": sharding.axes_of_starts()}
    if form.devices is not None:
        placement = {"mesh": Mesh(np.array(form.devices), (sharding.STARTS,))}
    specs = tuple(PartitionSpec() if axis is None else over for axis in axes)
    return jax.shard_map(share, in_specs=specs, out_specs=over, check_vma=False, **placement)(*leaves)


def _has_order(form: Form) -> bool:
    """Returns whether the function of a form is one of :func:`jtrees.compilation.sums_in_order`."""
    return hasattr(form.fn, "sums_in_order")


often_compiled = compilation.often(_has_order, static_argnums=0)(results_of)
rarely_compiled = compilation.once(_has_order, static_argnums=0)(results_of)
