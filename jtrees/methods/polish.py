"""Subtree polish (GET, Mao & Cao 2024, Algorithm 2): every subtree of a tree learnt again, on the samples it sees.

Subtrees whose roots are on one level share no sample, so a level is polished side by side in one compiled program: the
samples of each are padded to a common number, with weight 0.
"""

from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, topology, training
from jtrees.methods.annealing import DEVIATIONS, advanced, begun, best_so_far, grown_cart
from jtrees.methods.get import GET
from jtrees.recipes import Combined, Fit, Found, Recipe, Rounds, Watch, run_rounds, static
from jtrees.starts import map_starts
from jtrees.table import Scale, Table, losses_of, mean_loss
from jtrees.tree import ObliqueTree

_LEVELS = 5  # subtrees are polished whose roots are on the first five levels, as the authors' program does


@struct.dataclass
class Polished(Combined):
    """Subtree polish of the tree that another recipe finds, one with constant leaves or class frequencies.

    Level by level from the root, every subtree is learnt again by GET's Algorithm 1 from two starts, CART on the
    samples that reach it and the subtree itself, on those samples alone and scaled among themselves. A subtree is
    replaced where that lowers the loss of the hard tree on its samples; the training loss of the whole tree never
    rises. Leaves are set to the means (or smoothed class frequencies) of the training data first. CART and the sizes
    of the subtrees are affairs of the host, so the pure ``search`` is that of the base.

    The report is the base's, and ``polish``: hard training loss before, and after each level, ``(levels + 1,)``; and
    ``accepted``: number of subtrees replaced on each level, ``(levels,)``.

    Attributes:
      base: a recipe that ends in a tree.
      epochs: updates under each scale factor.
      alpha_ranges: ranges from which the scale factors are drawn, in the order of use.
      learning_rate: peak learning rate.
    """

    base: Any
    epochs: int = static(default=1000)
    alpha_ranges: Any = ((5.0, 25.0), (50.0, 150.0))
    learning_rate: float = 0.01

    def ends_in_constants(self) -> bool:
        return True

    def checked(self, table: Table) -> "Polished":
        if not self.checked_base().ends_in_constants():
            raise ValueError(f"base must end in a tree with constant leaves or class frequencies, got {self.base!r}")
        by = self._by(depth=1, starts=1).checked(table)
        numbers = {"alpha_ranges": by.alpha_ranges, "learning_rate": by.learning_rate}
        return self.replace(base=self.base.checked(table), epochs=by.epochs, **numbers)

    def _by(self, **options: Any) -> GET:
        """The recipe that subtrees are learnt by."""
        numbers: Any = {"alpha_ranges": self.alpha_ranges, "learning_rate": self.learning_rate}
        return GET(epochs=self.epochs, **numbers, **options)

    def prepare(self, table: Table, *, key: Array) -> Any:
        return self.base.prepare(table, key=key)

    def rounds(self, shape: tuple[int, int], many: int = 1) -> Rounds:
        return self.base.rounds(shape, many)

    def begin(self, start: Any, table: Table, *, key: Array) -> Any:
        return self.base.begin(start, table, key=key)

    def round(self, i: Array, state: Any, table: Table, judge: Table | None, rounds: Rounds) -> tuple[Any, Array]:
        return self.base.round(i, state, table, judge, rounds)

    def end(self, state: Any, table: Table, judge: Table | None) -> Found:
        return self.base.end(state, table, judge)

    def finish(
        self, found: Found, start: Any, table: Table, judge: Table | None, *, scale: Scale, key: Array, watch: Watch
    ) -> Fit:
        base_key, polish_key = jax.random.split(key)
        fit = self.base.finish(found, start, table, judge, scale=scale, key=base_key, watch=watch)
        tree, losses, accepted = self.polish(fit.tree, table, scale, key=polish_key, watch=watch)
        tree = tree.merged()
        loss = losses[-1] if judge is None else mean_loss(tree, judge, scale)
        report = fit.report | {"polish": losses, "accepted": accepted}
        return fit.replace(model=tree, tree=tree, loss=float(loss), report=report)

    def polish(
        self, tree: ObliqueTree, table: Table, scale: Scale, *, key: Array, watch: Watch
    ) -> tuple[ObliqueTree, np.ndarray, np.ndarray]:
        """The tree polished, its losses before and after each level, and how many subtrees were replaced."""
        empty = scale.unit(table)
        leaves = _empty_leaves(tree, empty)
        refit = lambda splits: scale.refitted(splits, leaves, table)[0]
        tree = refit(tree)
        losses, accepted = [mean_loss(tree, table, scale)], []
        for level in range(min(tree.depth, _LEVELS)):
            if watch.ended != "finished":
                break
            candidate, count = self._level(tree, level, table, scale, jax.random.fold_in(key, level), watch, refit)
            loss = mean_loss(candidate, table, scale)
            better = loss < losses[-1]
            tree = candidate if better else tree
            losses.append(loss if better else losses[-1])
            accepted.append(count if better else 0)
        return tree, np.array(losses), np.array(accepted)

    def _level(self, tree: ObliqueTree, level: int, table: Table, scale: Scale, key: Array, watch: Watch, refit: Any):
        """The tree with every subtree of a level replaced that could be bettered, and how many that were."""
        by = self._by(depth=tree.depth - level)
        reached = np.asarray(tree.decision_path(table.x))[level]
        jobs = []
        for root in range(topology.num_nodes(level), topology.num_nodes(level + 1)):
            inside = np.flatnonzero(reached == root)
            if len(inside) >= 2 and np.ptp(table.y[inside], axis=0).all():
                jobs.append(_Job.of(tree, root, by, table.rows(inside)))
        if not jobs:
            return tree, 0
        by = by.replace(starts=2 * len(jobs)).checked(table)
        alphas = by.scales(jnp.repeat(jax.random.uniform(key, (len(jobs), by.stages()), jnp.float32), 2, axis=0))
        starts = jax.tree.map(lambda *a: jnp.stack(a), *(one for job in jobs for one in (job.cart, job.now)))
        width = 1 << (max(len(job.table.x) for job in jobs) - 1).bit_length()
        tables = jax.tree.map(lambda *a: np.stack(a), *(job.padded(width) for job in jobs))
        found, _ = run_rounds(_Level(by=by), (starts, alphas), tables, None, key, watch)
        splits, finite = jax.tree.map(np.asarray, found.model), np.asarray(found.finite)

        # Judged as parts of the whole tree, so that what is accepted is exactly what will be answered. Replacing a
        # subtree moves no sample of another, so all are judged at once: one whole tree for each kind of candidate.
        of = lambda first: [jax.tree.map(lambda a, i=i: a[i], splits) for i in range(first, 2 * len(jobs), 2)]
        kinds = [[None] * len(jobs), [job.cart for job in jobs], of(0), of(1)]
        certain, lost = np.ones(len(jobs), bool), []
        weights = np.ones(len(table.x)) if table.weight is None else table.weight
        for candidates, sound in zip(kinds, [certain, certain, finite[::2], finite[1::2]], strict=True):
            each = weights * losses_of(refit(_grafted(tree, jobs, candidates)), table, scale)
            of_job = [each[reached == job.root].sum() if ok else np.inf for job, ok in zip(jobs, sound, strict=True)]
            lost.append(of_job)
        best = np.argmin(lost, axis=0)  # the first of equals: the subtree as it is
        chosen = [kinds[b][i] for i, b in enumerate(best)]
        return refit(_grafted(tree, jobs, chosen)), int((best > 0).sum())


@struct.dataclass(kw_only=True)
class _Level(Recipe):
    """The search for the subtrees of a level: two starts for each, on tables of their own, ``(subtrees, n, ...)``."""

    by: GET

    def rounds(self, shape: tuple[int, int, int], many: int = 1) -> Rounds:  # type: ignore[override]
        return self.by.rounds(shape[1:], many)

    def begin(self, start: Any, table: Table, *, key: Array) -> Any:
        subtree = jnp.arange(self.by.starts) // 2
        one = lambda subtree, first, scales: begun(self.by, first, scales, _of(table, subtree))
        return subtree, jax.vmap(one)(subtree, *start)

    def round(self, i: Array, state: Any, table: Table, judge: Table | None, rounds: Rounds) -> tuple[Any, Array]:
        one = lambda subtree, run: advanced(self.by, i, run, _of(table, subtree), None, rounds)
        run, losses = map_starts(one, *state)
        return (state[0], run), losses

    def end(self, state: Any, table: Table, judge: Table | None) -> Found:
        best: training.Best = jax.vmap(best_so_far)(state[1])
        return Found(best.params, best.score, state[1].training.finite & jnp.isfinite(best.score), best.step)


def _of(tables: Table, i: Array) -> Table:
    return jax.tree.map(lambda a: a[i], tables)


def _empty_leaves(tree: ObliqueTree, table: Table) -> Any:
    """Leaves of the kind to be set."""
    leaves, features = topology.num_leaves(tree.depth), table.x.shape[1]
    return kinds.kind_of("constant", table.task).empty(leaves, features, table.task.shape)


def subtree_nodes(root: int, depth: int) -> np.ndarray:
    """Numbers, in the whole tree, of the internal nodes of a subtree of the given depth, breadth first."""
    return np.concatenate([(root + 1) * 2**i - 1 + np.arange(2**i) for i in range(depth)])


class _Job(NamedTuple):
    """One subtree to be polished: where it is, its samples and their scale, and its two starts, on scaled features."""

    root: int
    nodes: np.ndarray
    table: Table
    scale: Scale
    cart: ObliqueTree
    now: ObliqueTree

    @classmethod
    def of(cls, tree: ObliqueTree, root: int, by: GET, table: Table) -> "_Job":
        scale, nodes = Scale.of(table, DEVIATIONS), subtree_nodes(root, by.depth)
        cart = grown_cart(by, scale.unit(table).real())
        now = scale.splits_to_unit(ObliqueTree(tree.weights[nodes], tree.bias[nodes], None, tree.origin))
        return cls(root, nodes, table, scale, cart, now)

    def padded(self, width: int) -> Table:
        """The scaled samples, padded to a number of them by the last one, with weight 0."""
        unit = self.scale.unit(self.table).real()
        pad = lambda a, **how: np.pad(a, [(0, width - len(unit.x))] + [(0, 0)] * (a.ndim - 1), **how)
        return Table(pad(unit.x, mode="edge"), pad(unit.y, mode="edge"), pad(unit.weight), unit.task)


def _grafted(tree: ObliqueTree, jobs: list[_Job], candidates: list[ObliqueTree | None]) -> ObliqueTree:
    """The tree with candidates, given on the scaled features of their jobs, in place of subtrees (None: as it is)."""
    weights, bias = np.array(tree.weights), np.array(tree.bias)
    for job, candidate in zip(jobs, candidates, strict=True):
        if candidate is not None:
            raw = job.scale.splits_from_unit(candidate, tree.origin)
            weights[job.nodes], bias[job.nodes] = raw.weights, raw.bias
    return tree.replace(weights=jnp.asarray(weights), bias=jnp.asarray(bias))
