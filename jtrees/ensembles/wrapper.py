"""The common part of the recipes around a recipe."""

from typing import Any

from jtrees import pytree
from jtrees.data import Scaling, Table
from jtrees.search import Recipe, options
from jtrees.tasks import Task


@pytree.dataclass(kw_only=True)
class Wrapper(Recipe):
    """A recipe around a recipe, ``base``, which has the targets, the scaling and the leaves of its base.

    Attributes:
      base: the recipe.
      is_tree: whether the model is a single tree if the model of the base is.
      keeps_order: whether the model supports monotone features if the model of the base does.
    """

    base: Recipe = pytree.field(kw_only=False, metadata=options.BASE)
    is_tree = True
    keeps_order = True

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        self.base.check(task, shape)

    def scaling(self, table: Table) -> Scaling:
        return self.base.scaling(table)

    @property
    def changes_splits_last(self) -> bool:
        return self.base.changes_splits_last

    def keeps_monotone(self, task: Task) -> bool:
        return self.keeps_order and self.base.keeps_monotone(task)

    def tree_leaves(self, task: Task) -> str | None:
        return self.base.tree_leaves(task) if self.is_tree else None
