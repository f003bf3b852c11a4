"""One run of a recipe, as the argument of compiled functions, and the programs that call such functions."""

from collections.abc import Callable
import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array
import numpy as np

from jtrees import compilation, pytree, segments, sharding
from jtrees.monotone import ordered_leaves
from jtrees.segments import ones_or
from jtrees.tasks import Task
from jtrees.training import Batch

FOLDS = 5  # a training holds out a fold of the rows, or none


@jax.tree_util.register_static
class Evaluation(enum.IntEnum):
    """The kind of the evaluation rows of a run. Training evaluates while it runs from ``EARLY_STOPPING`` on."""

    TRAINING = 0  # the training rows
    HELD_OUT = 1  # held-out rows
    EARLY_STOPPING = 2  # held-out rows, on which training evaluates while it runs
    VALIDATION = 3  # the validation set


_TRACED = tuple(np.int32(kind) for kind in Evaluation)  # the same objects in all calls, so stacked calls share them


@pytree.dataclass(eq=False)
class Run:
    """One run of a recipe: its rows, task and key. Compiled functions get it as their first argument.

    Attributes:
      recipe: the recipe; its numbers are traced.
      task: what is predicted, on scaled targets.
      batch: the training rows, scaled and padded. Padding and rows that the run does not train on have weight 0.
      evaluation: the evaluation rows, a batch. None in a problem: the training rows.
      key: random key; its data in a problem.
      kind: the kind of the evaluation rows, an :class:`Evaluation`. It is a traced number in a program that serves runs
        with and without held-out rows.
      monotone: the features in which predictions must not fall, ``(p,)`` bool, or None.
    """

    recipe: Any
    task: Task = pytree.field(pytree_node=False)
    batch: Batch
    evaluation: Any
    key: Any
    kind: Any = Evaluation.TRAINING
    monotone: Any = None

    @property
    def weight(self) -> Array:
        """Weights of the training rows, ``(n,)``; ones if the batch has no weights."""
        return ones_or(self.batch.weight, self.batch.x)

    @property
    def has_validation_set(self) -> bool:
        """Whether the evaluation rows are the validation set."""
        return self.kind is Evaluation.VALIDATION

    @property
    def has_separate_rows(self) -> Any:
        """Whether the evaluation rows are not the training rows; may be traced."""
        return self.kind >= Evaluation.HELD_OUT

    @property
    def evaluates(self) -> Any:
        """Whether training evaluates while it runs; may be traced."""
        return self.kind >= Evaluation.EARLY_STOPPING

    @property
    def rows_during_training(self) -> Batch:
        """The rows that training evaluates on: the validation set, or the first fifth of the evaluation rows.

        The fifth has all held-out rows: see :meth:`jtrees.search.Problem.holding_out`. Shards of rows are not cut.
        """
        if self.has_validation_set or sharding.parts() > 1:
            return self.evaluation
        count = -(-len(self.evaluation.x) // FOLDS)
        return jax.tree.map(lambda a: a[:count], self.evaluation)

    def ordered(self, tree: Any, leaf: Array) -> Any:
        """Returns the tree with leaves that satisfy the monotone constraints; ``leaf`` is the leaf of each row."""
        if self.monotone is None:
            return tree
        weight = segments.sums(self.weight, leaf, len(tree.bias) + 1)
        return ordered_leaves(tree, self.monotone, weight, self.task)


def argument_of_program(problem: Run) -> Run:
    """Returns the run of a problem as the argument of a program, whose kind is traced where programs are shared."""
    kind, is_shared = problem.kind, problem.evaluation is not None and not problem.has_validation_set
    kind = _TRACED[kind] if is_shared else kind
    return Run(problem.recipe, problem.task, problem.batch, problem.evaluation, problem.key, kind, problem.monotone)


class Form(NamedTuple):
    """The static arguments of a program; the last three are for stacked calls."""

    fn: Callable[..., Any]
    impl: str
    axes: tuple | None = None
    shares: int = 1
    devices: tuple | None = None


def results_of(form: Form, values: Any, counts: tuple) -> Any:
    """Returns ``form.fn`` of each run of a stack, or of a single run."""
    leaves, structure = jax.tree.flatten(values)

    def single(*leaves: Any) -> Any:
        state, run, args = jax.tree.unflatten(structure, leaves)
        evaluation = run.batch if run.evaluation is None else run.evaluation
        run = run.replace(key=jax.random.wrap_key_data(run.key, impl=form.impl), evaluation=evaluation)
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
    # Runs are sharded over the axis of starts, and also over the axis of data if no rows are.
    axis_names = set(jax.sharding.get_abstract_mesh().axis_names) if sharding.parts() == 1 else {sharding.STARTS}
    placement: Any = {"axis_names": axis_names}
    if form.devices is not None:
        placement = {"mesh": Mesh(np.array(form.devices), (sharding.STARTS,))}
    specs = tuple(PartitionSpec() if axis is None else over for axis in axes)
    return jax.shard_map(share, in_specs=specs, out_specs=over, check_vma=False, **placement)(*leaves)


often_compiled, rarely_compiled = (
    compilation.jit(often=often, has_order=lambda form: hasattr(form.fn, "sums_in_order"), static_argnums=0)(results_of)
    for often in (True, False)
)
