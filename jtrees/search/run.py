"""One run as the argument of compiled functions, and the programs that map a function over the runs of a group."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jtrees import compilation, segments, sharding
from jtrees.monotone import ordered_leaves
from jtrees.segments import ones_or
from jtrees.tasks import Task
from jtrees.training import Batch, map_starts


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
        is_model = lambda one: hasattr(one, "composed")
        return jax.tree.map(lambda one: one.composed(self.matrix) if is_model(one) else one, model, is_leaf=is_model)


class Stacked(NamedTuple):
    """Values of all runs on the device: a pytree for each group, with a leading axis over the runs of the group."""

    groups: tuple[Any, ...]

    def map(self, fn: Callable[[Any], Any]) -> "Stacked":
        """Returns ``fn`` of the pytree of each group."""
        return Stacked(tuple(fn(group) for group in self.groups))


class Own(NamedTuple):
    """Data of runs that replace the shared batch: lists over the runs, :class:`Stacked` values, or None.

    Attributes:
      rows: indices of the run's rows in the shared batch, ``(m,)``, -1 for padding.
      x: features of the run's rows, ``(m, p)``.
      y: targets of the run's rows.
      weight: weights of the run's rows.
      held_out: which of the run's rows are held out to evaluate on, ``(m,)`` bool.
      matrix: matrix that maps the features, ``(p, p)``.
      features: factors that multiply the features, ``(p,)``.
      validation_y: targets of the validation set.
      monotone: the features in which predictions must not fall, ``(p,)`` bool.
    """

    rows: Any = None
    x: Any = None
    y: Any = None
    weight: Any = None
    held_out: Any = None
    matrix: Any = None
    features: Any = None
    validation_y: Any = None
    monotone: Any = None


# --- Programs --------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """Static arguments of a program."""

    fn: Callable[..., Any]
    task: Task
    side_by_side: int | None
    impl: str
    watches: bool


def mapped(form: Form, recipes: Any, keys: Any, data: Any, args: tuple, shared: tuple) -> Any:
    """Returns ``form.fn`` of each run of a group; the devices share the runs."""
    batch, validation, own = data

    def one(recipe: Any, key: Any, own: Own, args: tuple) -> Any:
        run = _run_of(recipe, form, jax.random.wrap_key_data(key, impl=form.impl), batch, validation, own)
        return form.fn(run, *args, *shared)

    return map_starts(one, recipes, keys, own, args, batch_size=form.side_by_side)


often = compilation.often(static_argnums=0)(mapped)
rarely = compilation.once(static_argnums=0)(mapped)


def _run_of(recipe: Any, form: Form, key: Array, batch: Batch, validation: Batch | None, own: Own) -> Run:
    if own.rows is not None:
        inside, whole = own.rows >= 0, sharding.keep_rows(batch)
        picked = jax.tree.map(lambda a: a[own.rows], whole)
        weight = inside.astype(batch.x.dtype) if batch.weight is None else jnp.where(inside, picked.weight, 0)
        batch = picked._replace(weight=weight)
    batch = batch if own.x is None else batch._replace(x=own.x)
    batch = batch if own.y is None else batch._replace(y=own.y)
    batch = batch if own.weight is None else batch._replace(weight=own.weight)
    batch, by = _mapped_features(batch, own), batch if validation is None else _mapped_features(validation, own)
    if own.held_out is not None:
        weight = ones_or(batch.weight, batch.x)
        outside = jnp.where(own.held_out.any(), jnp.where(own.held_out, weight, 0), weight)
        by = batch._replace(weight=outside) if validation is None else by
        batch = batch._replace(weight=jnp.where(own.held_out, 0, weight))
    elif validation is None:
        by = batch
    if own.validation_y is not None:
        by = by._replace(y=own.validation_y)
    validates = validation is not None
    if batch.weight is not None and any(a is not None for a in (own.rows, own.weight, own.held_out)):
        batch = batch._replace(weight=segments.mean_one(batch.weight))  # of the rows that are left to train on
    separate = validates or (own.held_out is not None and own.held_out.any())
    evaluates = validates or form.watches
    return Run(recipe, form.task, batch, by, key, evaluates, validates, separate, own.matrix, own.monotone)


def _mapped_features(batch: Batch, own: Own) -> Batch:
    x = batch.x if own.features is None else batch.x * own.features
    return batch._replace(x=x if own.matrix is None else jnp.matmul(x, own.matrix, precision="highest"))
