"""Subtree polish (GET, Mao & Cao 2024, Algorithm 2): every subtree of a tree learnt again, on the samples it sees.

Subtrees whose roots are on one level share no sample, so a level is polished side by side in one compiled program: the
samples of each are padded to a common number, with weight 0.
"""

from functools import partial

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import topology, training, validation as checks, warmstart
from jtrees.methods.annealing import DEVIATIONS, one_start
from jtrees.methods.answers import answer
from jtrees.methods.get import check_ranges, draw_alphas, get
from jtrees.methods.table import Scale, Table, checked_table, losses_of, mean_loss
from jtrees.tree import LinearLeaves, ObliqueTree

_LEVELS = 5  # subtrees are polished whose roots are on the first five levels, as the authors' program does


@struct.dataclass
class PolishResult:
    """A polished tree, and what the polish brought.

    Attributes:
      tree: the tree, in the user's units.
      losses: hard training loss before, and after each level, ``(levels + 1,)``; never rises.
      accepted: number of subtrees replaced on each level, ``(levels,)``.
    """

    tree: ObliqueTree
    losses: np.ndarray
    accepted: np.ndarray


def polish(
    tree: ObliqueTree,
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: Array,
    epochs: int = 1000,
    alpha_ranges: tuple[tuple[float, float], ...] = ((5.0, 25.0), (50.0, 150.0)),
    learning_rate: float = 0.01,
    sample_weight: ArrayLike | None = None,
) -> PolishResult:
    """Subtree polish of a hard tree with constant leaves or class frequencies, whatever method it is from.

    Level by level from the root, every subtree is learnt again by GET's Algorithm 1 from two starts, CART on the
    samples that reach it and the subtree itself, on those samples alone and scaled among themselves. A
    subtree is replaced where that lowers the loss of the hard tree on its samples; the loss of the whole tree never
    rises. Leaves are set to the means (or smoothed class frequencies) of ``x`` and ``y`` first.

    Args:
      tree: the tree to polish.
      x: features, ``(n, p)``.
      y: targets, ``(n,)``; whole numbers 0..K-1 for a tree whose leaves hold the frequencies of K classes.
      key: for the scale factors.
      epochs: updates under each scale factor.
      alpha_ranges: ranges from which the scale factors are drawn, in the order of use.
      learning_rate: peak learning rate.
      sample_weight: nonnegative weights.

    Raises:
      ValueError: for linear leaves (their gain is not in the splits, GET section 3.5), and as :func:`jtrees.fit_get`.
      ImportError: without scikit-learn.
    """
    if isinstance(tree.leaves, LinearLeaves):
        raise ValueError("tree must have constant leaves to be polished, got LinearLeaves")
    epochs = checks.check_count("epochs", epochs)
    checks.check_positive("learning_rate", learning_rate)
    ranges = check_ranges(alpha_ranges)
    classes = None if tree.leaves.values.ndim == 1 else tree.leaves.values.shape[1]
    if classes is not None and not np.allclose(np.asarray(tree.leaves.values).sum(1), 1, atol=1e-3):
        raise ValueError("tree must have one value a leaf or class frequencies to be polished, got several outputs")
    table, _ = checked_table(x, y, sample_weight, "regression" if classes is None else "classification", classes)
    checks.check_x(table.x, features=tree.weights.shape[1])

    scale = Scale.of(table, DEVIATIONS)
    kind = answer("constant", classes)
    tree = scale.refitted(kind, tree, table)
    losses, accepted = [mean_loss(tree, table)], []
    for level in range(min(tree.depth, _LEVELS)):
        level_key = jax.random.fold_in(key, level)
        candidate, count = _polish_level(tree, table, level, level_key, ranges, learning_rate, epochs, classes)
        candidate = scale.refitted(kind, candidate, table)
        loss = mean_loss(candidate, table)
        better = loss < losses[-1]
        tree = candidate if better else tree
        losses.append(loss if better else losses[-1])
        accepted.append(count if better else 0)
    return PolishResult(tree, np.array(losses), np.array(accepted))


def subtree_nodes(root: int, depth: int) -> np.ndarray:
    """Numbers, in the whole tree, of the internal nodes of a subtree of the given depth, breadth first."""
    return np.concatenate([(root + 1) * 2**i - 1 + np.arange(2**i) for i in range(depth)])


def _polish_level(
    tree: ObliqueTree,
    table: Table,
    level: int,
    key: Array,
    ranges: np.ndarray,
    learning_rate: float,
    epochs: int,
    classes: int | None,
) -> tuple[ObliqueTree, int]:
    """The tree with every subtree of a level replaced that could be bettered, and how many that were."""
    depth = tree.depth - level
    reached = np.asarray(tree.decision_path(table.x))[level]
    jobs = []
    for root in range(topology.num_nodes(level), topology.num_nodes(level + 1)):
        inside = np.flatnonzero(reached == root)
        if len(inside) >= 2 and np.ptp(table.y[inside]) > 0:
            jobs.append(_Job.of(tree, root, depth, table.rows(inside), classes))
    if not jobs:
        return tree, 0

    # Found side by side: one pair (subtree, start) after the other, as many at once as multi-start takes.
    width = 1 << (max(len(job.table.x) for job in jobs) - 1).bit_length()
    x, y, weight = (np.stack(a) for a in zip(*(job.padded(width) for job in jobs), strict=True))
    subtree = jnp.repeat(jnp.arange(len(jobs)), 2)
    starts = jax.tree.map(lambda *a: jnp.stack(a), *(start for job in jobs for start in (job.cart, job.now)))
    alphas = jnp.repeat(draw_alphas(key, depth, ranges=ranges, starts=len(jobs)), 2, axis=0)
    found, finite = _search_subtrees(
        x, y, weight, subtree, starts, alphas, learning_rate, classes=classes, epochs=epochs
    )

    # Judged as parts of the whole tree, so that what is accepted is exactly what will be answered. Replacing a subtree
    # moves no sample of another, so all subtrees are judged at once: one whole tree for each kind of candidate.
    kind, scale = answer("constant", classes), Scale.of(table, DEVIATIONS)
    kinds = [
        [None] * len(jobs),
        [job.cart for job in jobs],
        [jax.tree.map(lambda a, i=i: a[i], found) for i in range(0, 2 * len(jobs), 2)],
        [jax.tree.map(lambda a, i=i: a[i], found) for i in range(1, 2 * len(jobs), 2)],
    ]
    weights = np.ones(len(table.x)) if table.weight is None else table.weight
    lost = []
    certain = np.ones(len(jobs), bool)
    for candidates, sound in zip(kinds, [certain, certain, finite[::2], finite[1::2]], strict=True):
        whole = scale.refitted(kind, _grafted(tree, jobs, candidates), table)
        each = weights * losses_of(whole, table)
        lost.append([each[reached == job.root].sum() if ok else np.inf for job, ok in zip(jobs, sound, strict=True)])
    best = np.argmin(lost, axis=0)  # the first of equals: the subtree as it is
    chosen = [kinds[b][i] for i, b in enumerate(best)]
    return _grafted(tree, jobs, chosen), int((best > 0).sum())


@struct.dataclass
class _Job:
    """One subtree to be polished: where it is, its samples and their scale, and its two starts, on scaled features."""

    root: int
    nodes: np.ndarray
    table: Table
    scale: Scale
    cart: ObliqueTree
    now: ObliqueTree

    @classmethod
    def of(cls, tree: ObliqueTree, root: int, depth: int, table: Table, classes: int | None) -> "_Job":
        scale, nodes = Scale.of(table, DEVIATIONS), subtree_nodes(root, depth)
        grow = warmstart.cart_regressor if classes is None else warmstart.cart_classifier
        cart = grow(scale.x(table.x), scale.y(table.y), depth, sample_weight=table.weight).replace(leaves=None)
        now = scale.splits_to_unit(ObliqueTree(tree.weights[nodes], tree.bias[nodes], None))
        return cls(root, nodes, table, scale, cart, now)

    def padded(self, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scaled x and y, and weights, padded to a number of samples by the last one, with weight 0."""
        n = len(self.table.x)
        pad = lambda a: np.pad(a, [(0, width - n)] + [(0, 0)] * (a.ndim - 1), mode="edge")
        weight = np.ones(n, np.float32) if self.table.weight is None else self.table.weight
        return pad(self.scale.x(self.table.x)), pad(self.scale.y(self.table.y)), np.pad(weight, (0, width - n))


def _grafted(tree: ObliqueTree, jobs: list[_Job], candidates: list[ObliqueTree | None]) -> ObliqueTree:
    """The tree with candidates, given on the scaled features of their jobs, in place of subtrees (None: as it is)."""
    weights, bias = np.array(tree.weights), np.array(tree.bias)
    for job, candidate in zip(jobs, candidates, strict=True):
        if candidate is not None:
            raw = job.scale.splits_from_unit(candidate)
            weights[job.nodes], bias[job.nodes] = raw.weights, raw.bias
    return tree.replace(weights=jnp.asarray(weights), bias=jnp.asarray(bias))


@partial(jax.jit, static_argnames=("classes", "epochs"))
def _search_subtrees(x, y, weight, subtree, starts, alphas, learning_rate, *, classes, epochs):
    """The best splits of every start, and whether it stayed finite."""

    def run(subtree, first, alphas):
        data = x[subtree], y[subtree], weight[subtree]
        options = {"make": get, "leaves": "constant", "classes": classes, "epochs": epochs}
        return one_start(first, alphas, *data, None, learning_rate, 0.0, **options)

    candidates = training.multi_start(run, subtree, starts, alphas).candidates
    return candidates.params, candidates.finite
