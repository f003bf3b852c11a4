"""Subtree polish (GET, Mao & Cao 2024, Algorithm 2): subtrees are refitted to the samples that reach them.

The subtrees rooted at one level share no sample, so they are polished side by side. Samples of weight 0 pad the samples
of each subtree to a common number.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jtrees import pytree, topology
from jtrees.data import Data, Scaling, Table
from jtrees.data.scaling import losses_of
from jtrees.data.table import without_padding
from jtrees.ensembles.wrapper import Wrapper
from jtrees.methods.annealed.get import GET
from jtrees.methods.annealed.stages import StartResult, train_stages
from jtrees.methods.annealed.starts import DEVIATIONS
from jtrees.search import Fitted, Problem, Ranges, Report, gather, option, options
from jtrees.search.cart import grown_cart
from jtrees.search.recipe import check_keeps_splits
from jtrees.tasks import Task
from jtrees.tasks.task import TaskOfChoices
from jtrees.training import Batch
from jtrees.tree import ObliqueTree
from jtrees.validation import quoted

_LEVELS = 5  # polished subtrees have their roots on the first five levels, as in the authors' code
_DRAWN = 3000  # this plus the level derives the keys of a level


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PolishedReport(Report):
    """The report of :class:`jtrees.Polished`.

    Attributes:
      losses: the loss of the hard tree before the polish and after each level, ``(levels + 1,)``. It is the loss on
        ``validation`` if given, else on the training data.
      accepted: the number of subtrees replaced on each level, ``(levels,)``.
      base: the report of the base recipe.
    """

    losses: np.ndarray
    accepted: np.ndarray
    base: Any


@pytree.dataclass(kw_only=True)
class Polished(Wrapper):
    """Subtree polish of the tree of another recipe, with constant leaves or class frequencies.

    The polish goes level by level from the root, over the first five levels. GET's Algorithm 1 refits every subtree
    that begins on such a level to the samples that reach it. Features and targets are scaled anew on these samples. The
    two starts are CART on these samples and the subtree itself. A subtree is replaced if this lowers the loss of the
    hard tree on the samples of ``validation`` that reach it, or else on its training samples. So this loss of the whole
    tree never rises.

    Before the polish, leaves are set to the means (or smoothed class frequencies) of the training data. After the
    polish, leaves are shrunk towards their ancestors' values, which raises the training loss.

    The report is a :class:`jtrees.ensembles.PolishedReport`.

    Attributes:
      base: a recipe whose model is a tree.
      epochs: updates under each sharpness.
      alpha_ranges: ranges from which the sharpnesses are drawn, in the order of use.
      learning_rate: peak learning rate.
      shrink: whether constant leaves are shrunk towards their ancestors' means or class frequencies at the end, as in
        :class:`jtrees.GET`.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.Polished(jtrees.GET(depth=1, starts=1, epochs=20), epochs=5)
      >>> fit = jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> print(fit.report.search.losses, fit.report.search.accepted)  # nothing was left to polish
      [0. 0.] [0]
    """

    epochs: int = option(1000)
    alpha_ranges: Ranges = option(((5.0, 25.0), (50.0, 150.0)))
    learning_rate: float = option(0.01, above=0)
    shrink: bool = option(True)

    keeps_order = False

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        super().check(task, shape)
        check_keeps_splits(self.base)
        if self.base.tree_leaves(task) != "constant":
            raise ValueError(
                f"base must end in a tree with constant leaves or class frequencies, got {quoted(self.base)}"
            )

    @property
    def changes_splits_last(self) -> bool:
        return True

    async def search(self, problem: Problem) -> Fitted:
        base, data = await self.base.search(problem.replace(recipe=self.base)), problem.data
        assert base.tree is not None and data is not None
        with problem.restoring():
            tree = data.refit(base.tree, "constant")[0]
            losses, accepted = [data.loss(tree)], []
        for level in range(min(tree.depth, _LEVELS)):
            if not problem.monitor.has_time():
                break
            candidate, count = await self._polish_level(problem.keyed(_DRAWN + level), tree, level)
            with problem.restoring():
                loss = data.loss(candidate)
            better = loss < losses[-1]
            tree = candidate if better else tree
            losses.append(loss if better else losses[-1])
            accepted.append(count if better else 0)
        with problem.restoring():
            if self.shrink:
                tree = data.refit(tree, "constant", shrink=True)[0]
            report = PolishedReport(losses=np.array(losses), accepted=np.array(accepted), base=base.report)
            return base.replaced_by(tree.merged(), data, report)

    async def _polish_level(self, problem: Problem, tree: ObliqueTree, level: int) -> tuple[ObliqueTree, int]:
        """Returns the tree with every improved subtree of a level replaced, and the number of replaced subtrees."""
        data: Any = problem.data
        with problem.restoring():
            reached = np.asarray(tree.decision_path(data.table.x))[level]
            subtrees = _subtrees(tree, level, reached, data)
        if not subtrees:
            return tree, 0
        width = 1 << (max(len(subtree.batch.x) for subtree in subtrees) - 1).bit_length()
        recipe = options.checked(
            GET(
                depth=tree.depth - level,
                epochs=self.epochs,
                alpha_ranges=self.alpha_ranges,
                learning_rate=self.learning_rate,
            )
        )
        task, stages = data.table.task.scaled(data.scaling.y_unit), []
        for subtree, keyed in zip(subtrees, problem.replace(monotone=None).repeat(len(subtrees)), strict=True):
            subproblem = keyed.subproblem(recipe, task, subtree.padded(width))
            for start, splits in enumerate((subtree.cart, subtree.current)):
                low, high = np.asarray(self.alpha_ranges, np.float32).T
                sharpness = subproblem.rng("subtrees", start).uniform(low, high).astype(np.float32)
                stages.append(train_stages(subproblem, splits, sharpness, self.epochs))
        results = await gather(*stages)
        best = [min(starts, key=lambda start: start.score) for starts in zip(results[::2], results[1::2], strict=True)]
        with problem.restoring():
            return self._replaced(tree, level, subtrees, best, data)

    def _replaced(
        self, tree: ObliqueTree, level: int, subtrees: list["_Subtree"], trained: list[StartResult], data: Data
    ) -> tuple[ObliqueTree, int]:
        """Returns the tree with the best candidate of each subtree, and the number of replaced subtrees."""
        # Candidates are evaluated within the whole tree, because its predictions are the result. A replaced subtree
        # moves no sample of a different subtree. So a single tree evaluates a candidate of every subtree.
        refit = lambda splits: data.refit(splits, "constant")[0]
        table = data.table if data.validation is None else data.validation
        reached = np.asarray(tree.decision_path(table.x))[level]
        splits = [subtree.splits for subtree in trained]
        candidates = [[None] * len(subtrees), [subtree.cart for subtree in subtrees], splits]
        weights = np.ones(len(table.x)) if table.weight is None else table.weight
        losses = []
        for candidate in candidates:
            row_losses = weights * losses_of(refit(_grafted(tree, subtrees, candidate)), table, data.scaling)
            losses.append([row_losses[reached == subtree.root].sum() for subtree in subtrees])
        losses[-1] = np.where(np.isfinite([subtree.score for subtree in trained]), losses[-1], np.inf)
        best = np.argmin(losses, axis=0)  # a tie keeps the subtree
        chosen = [candidates[k][i] for i, k in enumerate(best)]
        return refit(_grafted(tree, subtrees, chosen)), int((best > 0).sum())


def _subtrees(tree: ObliqueTree, level: int, reached: np.ndarray, data: Data) -> list["_Subtree"]:
    """Returns the subtrees of a level whose samples have targets that vary; ``reached`` is the node of each sample."""
    table, subtrees = data.table, []
    for root in range(topology.num_nodes(level), topology.num_nodes(level + 1)):
        inside = np.flatnonzero(reached == root)
        varied = np.ptp(table.y[inside], axis=0) > 0 if len(inside) >= 2 else np.zeros(1, bool)
        # An absent class, or an action of constant reward, does not vary, so one that varies is enough.
        if varied.any() if isinstance(table.task, TaskOfChoices) else varied.all():
            rows = table.rows(inside).normalised()
            subtrees.append(_Subtree.cut(tree, root, tree.depth - level, rows, data.scaling))
    return subtrees


class _Subtree(NamedTuple):
    """A subtree to polish: its nodes, its samples and their scaling, and its two starts, CART and the subtree itself.

    Samples and starts are scaled.
    """

    root: int
    nodes: np.ndarray
    scaling: Scaling
    batch: Batch
    cart: ObliqueTree
    current: ObliqueTree

    @classmethod
    def cut(cls, tree: ObliqueTree, root: int, depth: int, table: Table, table_scaling: Scaling) -> "_Subtree":
        """``table`` has the rows of the subtree, and ``table_scaling`` is the scaling of all rows."""
        scaling = Scaling.fit(table, DEVIATIONS)
        nodes = np.concatenate([(root + 1) * 2**i - 1 + np.arange(2**i) for i in range(depth)])  # breadth first
        # A loss with a unit, or of the user, is a loss of the targets of all rows.
        if table.task.scaled(table_scaling.y_unit) != table.task or not table.task.in_units:
            scaling = scaling.replace(y_low=table_scaling.y_low, y_unit=table_scaling.y_unit)
        batch = without_padding(scaling.batch(table))
        cart = grown_cart(batch, table.task, depth)
        current = scaling.transform_splits(ObliqueTree(tree.weights[nodes], tree.bias[nodes], None, tree.origin))
        return cls(root, nodes, scaling, batch, cart, current)

    def padded(self, width: int) -> Batch:
        """Returns the samples, padded to ``width`` with copies of the last sample, of weight 0."""
        pad: Any = lambda a, **options: np.pad(a, [(0, width - len(a))] + [(0, 0)] * (a.ndim - 1), **options)
        x, y, weight = self.batch
        return Batch(pad(x, mode="edge"), pad(y, mode="edge"), pad(weight))


def _grafted(tree: ObliqueTree, subtrees: list[_Subtree], candidates: list[ObliqueTree | None]) -> ObliqueTree:
    """Returns the tree with each subtree replaced by its candidate, splits of its scaled features; None keeps it."""
    weights, bias = np.array(tree.weights), np.array(tree.bias)
    for subtree, splits in zip(subtrees, candidates, strict=True):
        if splits is not None:
            restored = subtree.scaling.replace(origin=tree.origin).restore_splits(splits)
            weights[subtree.nodes], bias[subtree.nodes] = restored.weights, restored.bias
    return tree.replace(weights=jnp.asarray(weights), bias=jnp.asarray(bias))
