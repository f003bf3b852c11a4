"""Recipe: a paper's whole procedure as data, with the search that runs it on scaled data."""

from collections.abc import Callable
import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax

from jtrees import io, sharding, validation as checks
from jtrees.data import Data, Scaling, Table
from jtrees.data.scaling import check_slopes
from jtrees.forest import Forest
from jtrees.search.problem import Fitted, Problem
from jtrees.search.report import Report
from jtrees.tasks import Classification, Task


def on_device(model: Any) -> Any:
    """Returns the network of a :class:`jtrees.SoftModel` with its arrays on the device."""
    return jax.tree.map(sharding.from_host, model)


def _loss_of(result: Fitted, model: Any, data: Data) -> float:
    """Returns the loss to report, in the user's units; of the logits for a user-defined loss of classes: the score."""
    task = data.table.task
    return float(result.score) if isinstance(task, Classification) and not task.in_units else data.loss(model)


# Largest number of products of a tree that grows in one program, which takes about a second. Neither a deadline nor
# Ctrl-C ends a program.
LARGEST_PROGRAM = 2**34


class GrowArguments(NamedTuple):
    """The arguments of ``grow`` for the trees of a boosted sum.

    Attributes:
      shared: arguments of all trees.
      rows: arguments with a leading axis of the rows of the problem. A tree gets the arguments of its rows.
      draws: functions of the number of a tree that return further arguments, for each kind of trees. The last kind has
        the trees that the search of the base finds, and earlier kinds are simpler.
    """

    shared: Any
    rows: Any
    draws: tuple[Callable[[int], Any], ...] = (lambda _: (),)


@io.family
class Recipe:
    """A paper's whole procedure as data: a dataclass (:func:`jtrees.pytree.dataclass`) with its options as fields.

    Numeric options may be traced. All other options are static. See :mod:`jtrees.search.options`.

    Attributes:
      deviations: unit of the scaled features, in standard deviations.
      clips_near: whether codes of missing values are clipped near the other values: see ``jtrees.data.Scaling.fit``.
    """

    deviations: ClassVar[float] = 1.0
    clips_near: ClassVar[bool] = True

    async def search(self, problem: Problem) -> Fitted:
        """Returns the result for a problem; this is the recipe's procedure.

        Raises:
          FloatingPointError: if the search became non-finite.
        """
        raise NotImplementedError

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        """Checks the options, each of which is valid on its own, against the task and the shape of the features.

        Raises:
          ValueError: if an option does not suit the task or the shape.
        """

    def scaling(self, table: Table) -> Scaling:
        """Returns the scaling of a table for the training of the recipe."""
        fitted = Scaling.fit(table, self.deviations, near=self.clips_near)
        if self.tree_leaves(table.task) == "linear":
            check_slopes(fitted, self.deviations)
        return fitted

    def tree_leaves(self, task: Task) -> str | None:
        """Returns the kind of leaves if the model is a single tree, ``"constant"`` or ``"linear"``, else None.

        Class frequencies count as constant leaves.
        """
        return "constant"

    def with_defaults(self) -> Any:
        """Returns the recipe with values for a single tree in the options that are None and mean a default."""
        return self._with_recipes(lambda recipe: recipe.with_defaults())

    def with_boosting_defaults(self) -> Any:
        """Returns the recipe with values for a tree of a boosted sum, which needs less training, in such options.

        A tree of a sum has no trials of preconditioners, so ``precondition="auto"`` of a recipe with trials is 0.
        """
        recipe = self._with_recipes(lambda recipe: recipe.with_boosting_defaults())
        return recipe.replace(precondition=0.0) if getattr(recipe, "precondition", 0) == "auto" else recipe

    def _with_recipes(self, change: Callable[["Recipe"], Any]) -> Any:
        """Returns the recipe with ``change`` applied to the recipes in its options."""
        options = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return self.replace(**{name: change(value) for name, value in options if isinstance(value, Recipe)})

    async def grow_arguments(self, problem: Problem) -> "GrowArguments | None":
        """Returns the arguments of ``grow`` for the trees of a boosted sum, or None if only :meth:`search` finds trees.

        A recipe may have ``grow(run, shared, rows, draws) -> (splits, finite)``. It returns the splits that
        :meth:`search` finds, and whether they are finite. It can be compiled, so a program may grow many trees. Such a
        recipe has an option ``depth``, and its splits have the nodes of a perfect tree of this depth. The run has the
        key of the tree.

        Args:
          problem: the problem of the sum. Tree k has the key of ``problem.keyed(k)`` and
            ``problem.recipe.rows_of_round(n)`` of the n rows.
        """
        return GrowArguments((), ()) if self.can_grow(problem) else None

    def products(self, n: int, p: int) -> int:
        """Returns the number of products of ``grow`` for n rows of p features, from which its time follows."""
        raise NotImplementedError

    def can_grow(self, problem: Problem) -> bool:
        """Returns whether a program may grow a tree of a boosted sum.

        A recipe that inherits ``products`` has no such program, because its search may find other trees than ``grow``.
        """
        n, p = problem.shape
        has_program = "products" in vars(type(self)) and getattr(self, "precondition", 0) == 0
        return has_program and self.products(problem.recipe.rows_of_round(n), p) <= LARGEST_PROGRAM

    @property
    def changes_splits_last(self) -> bool:
        """Whether the end of the search changes the splits. A part of a larger model would skip that step."""
        return False

    def keeps_monotone(self, task: Task) -> bool:
        """Returns whether the recipe supports features in which predictions must not fall."""
        return False

    def targets(self, x: Any, y: Any) -> Any:
        """Returns the targets: y, or targets that the recipe derives from x."""
        return y

    def replace(self, **options: Any) -> Any:
        """Returns the recipe with changed options; :func:`jtrees.pytree.dataclass` provides this method."""
        raise NotImplementedError


def check_keeps_splits(base: Recipe) -> None:
    """Raises ``ValueError`` for a base that changes its splits at the end, because parts of a model have no end."""
    if base.changes_splits_last:
        expected = "base must not change its splits at the end, as Polished and Sparse do"
        raise ValueError(f"{expected}, got {checks.quoted(base)}")


def fitted_network(problem: Problem, fitted: Fitted, model_type: Any, report: Report, bounded: bool = False) -> Fitted:
    """Returns the result with its model in the user's units; a part of a larger model is returned unchanged."""
    # The result has a network, which a `model_type` holds, or a `Forest` of scaled data. `bounded` says whether
    # predictions are clipped to values near the training targets.
    if (data := problem.data) is None:
        return fitted
    with problem.restoring():
        if isinstance(fitted.scaled, Forest):
            model = data.scaling.restore(fitted.scaled)
            return fitted._replace(model=model, loss=data.loss(model), report=report)
        model = data.scaling.restore(model_type(on_device(fitted.scaled), None, data.table.task.of_models, bounded))
        return fitted._replace(model=model, loss=_loss_of(fitted, model, data), report=report)


def fitted_tree(
    problem: Problem,
    fitted: Fitted,
    *,
    refit: bool | None,
    report: Report,
    **shrinkage: Any,
) -> Fitted:
    """Returns the result with its hard tree in the user's units; a part of a larger model is returned unchanged.

    Args:
      problem: the problem.
      fitted: the result, with a tree of scaled data.
      refit: whether the leaves are fitted to the data. Such leaves are fitted again in double precision. False: the
        leaves are learnt. None: not known; leaves that equal fitted leaves up to rounding are replaced by the fitted
        leaves. Leaves are fitted in any case if rows with clipped features reach other leaves than in training.
      report: the recipe's report.
      **shrinkage: options of :meth:`jtrees.data.Data.refit` with which the leaves were fitted.
    """
    if (data := problem.data) is None:
        return fitted
    with problem.restoring():
        tree = data.scaling.restore_splits(fitted.scaled)
        tree = tree.replace(leaves=data.scaling.restore_leaves(fitted.scaled.leaves))
        if refit is None:
            tree = data.with_fitted(tree)
        if refit or data.moves_clipped(fitted.scaled, tree):
            tree = data.refit(tree, "constant" if tree.leaves.is_constant else "linear", **shrinkage)[0]
        tree = data.ordered(tree).merged()
        return fitted._replace(model=tree, tree=tree, loss=_loss_of(fitted, tree, data), report=report)
