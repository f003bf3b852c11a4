"""Subtree polish (GET, Mao & Cao 2024, Algorithm 2): subtrees are refitted to the samples that reach them.

The subtrees rooted at one level share no sample, so they are polished side by side. Samples of weight 0 pad the samples
of each subtree to a common number.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import pytree, topology
from jtrees.data import Data, Scaling, Table
from jtrees.data.scaling import losses_of, mean_loss
from jtrees.data.table import without_padding
from jtrees.methods.annealed.get import GET
from jtrees.methods.annealed.stages import Start, train_stages
from jtrees.methods.annealed.starts import DEVIATIONS
from jtrees.search import Finished, Recipe, Report, Runs, SearchResult, options
from jtrees.search.cart import grown_cart
from jtrees.search.monitor import Monitor
from jtrees.search.recipe import check_keeps_splits
from jtrees.tasks import Classification, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree
from jtrees.validation import quoted

_LEVELS = 5  # polished subtrees have their roots on the first five levels, as in the authors' code


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class PolishedReport(Report):
    """The report of :class:`jtrees.Polished`.

    Attributes:
      losses: the hard training loss before the polish and after each level, ``(levels + 1,)``.
      accepted: the number of subtrees replaced on each level, ``(levels,)``.
      base: the report of the base recipe.
    """

    losses: np.ndarray
    accepted: np.ndarray
    base: Any


@pytree.dataclass(kw_only=True)
class Polished(Recipe):
    """Subtree polish of the tree of another recipe, with constant leaves or class frequencies.

    The polish goes level by level from the root, over the first five levels. GET's Algorithm 1 refits every subtree
    that begins on such a level to the samples that reach it. Features and targets are scaled anew on these samples. The
    two starts are CART on these samples and the subtree itself. A subtree is replaced if this lowers the loss of the
    hard tree on its samples. So the training loss of the whole tree never rises.

    Before the polish, leaves are set to the means (or smoothed class frequencies) of the training data. After the
    polish, leaves are shrunk towards their ancestors' values, which raises the training loss. The polish is part of
    ``finish``, as sizes of subtrees depend on the data.

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

    base: Recipe = pytree.field(kw_only=False, metadata={"check": options.checked_base})
    epochs: int = options.count(1000)
    alpha_ranges: Any = options.ranges((5.0, 25.0), (50.0, 150.0))
    learning_rate: float = options.positive(0.01)
    shrink: bool = options.flag(True)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def check(self, task: Task, shape: tuple[int, int]) -> None:
        self.base.check(task, shape)
        check_keeps_splits(self.base)
        if self.base.tree_leaves(task) != "constant":
            raise ValueError(
                f"base must end in a tree with constant leaves or class frequencies, got {quoted(self.base)}"
            )

    def scaling(self, table: Table) -> Scaling:
        return self.base.scaling(table)

    def search(self, runs: Runs) -> list[SearchResult]:
        results = self.base.search(runs.using([recipe.base for recipe in runs.recipes]))
        return [result._replace(held_out=()) for result in results]  # the polish of all rows changes the model

    def finish(self, result: SearchResult, data: Data, *, key: Array, monitor: Monitor) -> Finished:
        base_key, polish_key = jax.random.split(key)
        finished = self.base.finish(result, data, key=base_key, monitor=monitor)
        assert finished.tree is not None
        tree, losses, accepted = self._polish(finished.tree, data, polish_key, monitor)
        if self.shrink:
            tree = data.refit(tree, "constant", shrink=True)[0]
        tree = tree.merged()
        loss = losses[-1] if data.validation is None and not self.shrink else data.loss(tree)
        report = PolishedReport(losses=losses, accepted=accepted, base=finished.report)
        return Finished(tree, tree, float(loss), report)

    def _polish(
        self, tree: ObliqueTree, data: Data, key: Array, monitor: Monitor
    ) -> tuple[ObliqueTree, np.ndarray, np.ndarray]:
        """Returns the polished tree, its losses before and after each level, and the numbers of subtrees replaced."""
        table = data.table
        training_loss = lambda tree: mean_loss(tree, table, data.scaling)
        tree = data.refit(tree, "constant")[0]
        losses, accepted = [training_loss(tree)], []
        for level in range(min(tree.depth, _LEVELS)):
            if not monitor.has_time():
                break
            candidate, count = self._polish_level(tree, level, data, jax.random.fold_in(key, level), monitor)
            loss = training_loss(candidate)
            better = loss < losses[-1]
            tree = candidate if better else tree
            losses.append(loss if better else losses[-1])
            accepted.append(count if better else 0)
        return tree, np.array(losses), np.array(accepted)

    def _polish_level(self, tree: ObliqueTree, level: int, data: Data, key: Array, monitor: Monitor):
        """Returns the tree with every improved subtree of a level replaced, and the number of replaced subtrees."""
        table, task, depth = data.table, data.table.task, tree.depth - level
        of_get: Any = {"epochs": self.epochs, "alpha_ranges": self.alpha_ranges, "learning_rate": self.learning_rate}
        recipe = options.checked(GET(depth=depth, starts=2, ridge=False, precondition=0.0, halving=False, **of_get))
        reached = np.asarray(tree.decision_path(table.x))[level]
        subtrees = []
        for root in range(topology.num_nodes(level), topology.num_nodes(level + 1)):
            inside = np.flatnonzero(reached == root)
            varied = np.ptp(table.y[inside], axis=0) > 0 if len(inside) >= 2 else np.zeros(1, bool)
            # A class that is absent from the subtree does not vary, so one class that varies is enough.
            if varied.any() if isinstance(task, Classification) else varied.all():
                subtrees.append(_Subtree.of(tree, root, depth, table.rows(inside).normalised(), data.scaling))
        if not subtrees:
            return tree, 0
        result, finite = self._trained(recipe, task.scaled(data.scaling.y_unit), subtrees, key, monitor)

        # Candidates are evaluated within the whole tree, because its predictions are the result. A replaced subtree
        # moves no sample of a different subtree. So a single tree evaluates a candidate of every subtree.
        refit = lambda splits: data.refit(splits, "constant")[0]
        candidates = [[None] * len(subtrees), [one.cart for one in subtrees], result]
        weights = np.ones(len(table.x)) if table.weight is None else table.weight
        losses = []
        for splits in candidates:
            whole = refit(_grafted(tree, subtrees, splits))
            each = weights * losses_of(whole, table, data.scaling)
            losses.append([each[reached == one.root].sum() for one in subtrees])
        losses[-1] = np.where(finite, losses[-1], np.inf)
        best = np.argmin(losses, axis=0)  # a tie keeps the subtree
        chosen = [candidates[k][i] for i, k in enumerate(best)]
        return refit(_grafted(tree, subtrees, chosen)), int((best > 0).sum())

    def _trained(
        self, recipe: GET, task: Task, subtrees: list["_Subtree"], key: Array, monitor: Monitor
    ) -> tuple[list[ObliqueTree], list[bool]]:
        """Returns the best splits of each subtree in GET's stages, and whether they are finite."""
        width = 1 << (max(len(one.batch.x) for one in subtrees) - 1).bit_length()
        batches = [one.padded(width) for one in subtrees]
        impl, keys = str(jax.random.key_impl(key)), jax.random.split(key, len(subtrees))
        options: Any = {"impl": impl, "at_once": len(subtrees)}
        numbers = list(np.asarray(jax.random.key_data(keys)))
        runs = Runs([recipe] * len(subtrees), numbers, task, batches[0], None, monitor, **options)
        runs = runs.on(
            x=[one.x for one in batches], y=[one.y for one in batches], weight=[one.weight for one in batches]
        )
        low, high = np.asarray(self.alpha_ranges, np.float32).T
        starts = []
        for i, one in enumerate(subtrees):
            for splits in (one.cart, one.now):
                sharpness = runs.rng(i, len(starts) % 2).uniform(low, high).astype(np.float32)
                starts.append(Start(splits, sharpness, None))
        ended = train_stages(runs.repeat(2, together=2), starts, self.epochs)
        best = [min(ended[k : k + 2], key=lambda end: end.score) for k in range(0, len(ended), 2)]
        return [one.splits for one in best], [bool(np.isfinite(one.score)) for one in best]


def subtree_nodes(root: int, depth: int) -> np.ndarray:
    """Returns the indices in the whole tree of the internal nodes of a subtree of a given depth, breadth first."""
    return np.concatenate([(root + 1) * 2**i - 1 + np.arange(2**i) for i in range(depth)])


class _Subtree(NamedTuple):
    """A subtree to polish: its nodes, its samples and their scaling, and its two starts, CART and the subtree itself.

    Samples and starts are scaled.
    """

    root: int
    nodes: np.ndarray
    scaling: Scaling
    batch: Batch
    cart: ObliqueTree
    now: ObliqueTree

    @classmethod
    def of(cls, tree: ObliqueTree, root: int, depth: int, table: Table, whole: Scaling) -> "_Subtree":
        """``table`` has the rows of the subtree, and ``whole`` is the scaling of all rows."""
        scaling, nodes = Scaling.fit(table, DEVIATIONS), subtree_nodes(root, depth)
        if table.task.scaled(whole.y_unit) != table.task:  # the loss has a unit, which all subtrees share
            scaling = scaling.replace(y_low=whole.y_low, y_unit=whole.y_unit)
        batch = without_padding(scaling.batch(table))
        cart = grown_cart(batch, table.task, depth)
        now = scaling.transform_splits(ObliqueTree(tree.weights[nodes], tree.bias[nodes], None, tree.origin))
        return cls(root, nodes, scaling, batch, cart, now)

    def padded(self, width: int) -> Batch:
        """Returns the samples, padded to ``width`` with copies of the last sample, of weight 0."""
        pad: Any = lambda a, **options: np.pad(a, [(0, width - len(a))] + [(0, 0)] * (a.ndim - 1), **options)
        x, y, weight = self.batch
        return Batch(pad(x, mode="edge"), pad(y, mode="edge"), pad(weight))


def _grafted(tree: ObliqueTree, subtrees: list[_Subtree], candidates: list[ObliqueTree | None]) -> ObliqueTree:
    """Returns the tree with each subtree replaced by its candidate, splits of its scaled features; None keeps it."""
    weights, bias = np.array(tree.weights), np.array(tree.bias)
    for one, splits in zip(subtrees, candidates, strict=True):
        if splits is not None:
            restored = one.scaling.replace(origin=tree.origin).restore_splits(splits)
            weights[one.nodes], bias[one.nodes] = restored.weights, restored.bias
    return tree.replace(weights=jnp.asarray(weights), bias=jnp.asarray(bias))
