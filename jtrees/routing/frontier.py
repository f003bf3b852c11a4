"""The frontier of an ensemble: the paths of all samples of a batch through all trees.

A split is certain if it can send a sample to only one side: for the smooth step, if its score is beyond half of gamma.
A *path* is a sample that descends a tree. Each sample starts with one path, and each uncertain split adds a path. The
frontier is the list of all paths of a batch. The paths descend together, level by level, and their splits are scored
row by row. The backward pass visits only uncertain splits and reachable leaves. The cost is O(p depth) per path in the
forward pass, and O(p) per uncertain split in the backward pass.

The list has a capacity of ``width`` paths per sample and tree *on average*. A limit for each pair of sample and tree
would be too small for a few pairs: among 2560 pairs, the largest number of paths is nearly always several times the
mean. Overflow is detected exactly, and :mod:`jtrees.routing.conditional` handles it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrees import blocking, topology
from jtrees.routing import by_level
from jtrees.routing.by_level import Operands
from pallas_kernels.routes import cubic

_BEYOND = 2**31 - 1  # an index out of range
_NEAR = 5  # levels from the root in which all splits are scored (7 levels are no faster from depth 14 on)


class Step(NamedTuple):
    """A step: the probability of going right as a function of a split's score."""

    # `(score, reach) -> position` of the score on the step. Consider a sample that reaches the split with
    # probability `reach`. The position is 0 if the sample is certain to go left, and 1 if it is certain to go
    # right.
    position: Callable[[Array, Array], Array]
    right: Callable[[Array], Array]  # `position -> probability` of going right, 0 at position 0 and 1 at position 1
    slope: Callable[[Array], Array]  # `position -> derivative` of this probability with respect to the score


def smooth_step(gamma: Array) -> Step:
    """Returns the smooth step with an uncertain region of width gamma."""
    return Step(lambda z, reach: by_level.position(z, gamma), cubic, lambda a: by_level.slope(a, gamma))


class Frontier(NamedTuple):
    """The paths of a batch. The first ``trees n`` paths start at the roots, tree by tree, and later paths at splits."""

    # Arrays have capacity for `width trees n` paths and padding. Entries from index `counts[-1]` on are undefined. For
    # paths that start at roots, `parent`, `row`, `position`, `before` and `right` are undefined.

    tree: Int[Array, " paths"]  # index of the tree
    sample: Int[Array, " paths"]  # index of the sample
    node: Int[Array, " paths"]  # current node of the whole tree; a leaf after the last level
    reach: Float[Array, " paths"]  # probability of reaching the node
    parent: Int[Array, " paths"]  # index of the path from which this path branched off
    row: Int[Array, " paths"]  # row of the uncertain split among all splits of all trees
    position: Float[Array, " paths"]  # position of the sample's score on the step
    before: Float[Array, " paths"]  # probability of reaching the split
    right: Bool[Array, " paths"]  # whether the path starts at the right child
    counts: Int[Array, " levels"]  # number of paths on each level, (depth + 1,), leaves last


class _Scores(NamedTuple):
    """The scores of all splits for all samples. Only the scores near the root are computed in advance."""

    x: Array  # samples, (n, p)
    weights: Array  # weights of the splits of all trees, (trees nodes, p)
    bias: Array  # biases of these splits
    near: Array  # scores of the splits near the root, (trees, near nodes, n)

    @classmethod
    def from_operands(cls, operands: Operands) -> "_Scores":
        x, weights, bias = operands.x, operands.weights, operands.bias
        # There are few splits near the root, so one product scores all of them.
        upper = topology.num_nodes(max(1, min(topology.depth_of(bias.shape[1]) // 2, _NEAR)))
        product = jnp.einsum("tjp,np->tjn", weights[:, :upper], x, precision="highest")
        return cls(x, weights.reshape(-1, x.shape[1]), bias.reshape(-1), product + bias[:, :upper, None])

    def rows(self, paths: Frontier) -> Array:
        """Returns the row of each path's split among all splits of all trees."""
        return paths.tree * (len(self.bias) // len(self.near)) + paths.node

    def at_paths(self, level: Array, paths: Frontier) -> Array:
        """Returns the score of each path's split; all splits are on one level."""
        _, upper, n = self.near.shape
        row = self.rows(paths)
        return jax.lax.cond(
            level < topology.depth_of(upper),
            lambda: _rows(self.near.reshape(-1), (paths.tree * upper + paths.node) * n + paths.sample),
            lambda: (_rows(self.weights, row) * _rows(self.x, paths.sample)).sum(1) + _rows(self.bias, row),
        )

    def near_reach(self, step: Step) -> Array:
        """Returns the probability that a sample reaches each node below the splits near the root."""
        reach = jnp.ones((1, len(self.near), len(self.x)), self.x.dtype)
        for z in topology.levels(jnp.moveaxis(self.near, 1, 0)):
            right = reach * step.right(step.position(z, reach))
            reach = topology.interleave(reach - right, right)
        return reach


def explore(operands: Operands, width: float, step: Step) -> tuple[Frontier, Array]:
    """Returns the paths of a batch, and whether they fit. An overflow stops the paths at its level."""
    n, (trees, nodes) = len(operands.x), operands.bias.shape
    depth, capacity, scores = topology.depth_of(nodes), int(width * trees * n), _Scores.from_operands(operands)
    sizes = blocking.paths_at_once(trees * n)
    frontier = _at_roots(trees, n, depth, capacity + sum(sizes), operands.x.dtype)

    def descend(state: tuple[Array, Frontier]) -> tuple[Array, Frontier]:
        level, frontier = state
        paths = frontier.counts[level]
        move = lambda i, state: _move(i, state, level, paths, scores, step, capacity)
        count, frontier = jax.lax.fori_loop(0, -(-paths // sizes[0]), move, (paths, frontier))
        return level + 1, frontier._replace(counts=frontier.counts.at[level + 1].set(count))

    # The levels near the root detect most overflows before any path descends.
    may_fit = jnp.count_nonzero(scores.near_reach(step)) <= capacity
    continues = lambda state: may_fit & (state[0] < depth) & (state[1].counts[state[0]] <= capacity)
    level, frontier = jax.lax.while_loop(continues, descend, (jnp.int32(0), frontier))
    return frontier, may_fit & (frontier.counts[level] <= capacity)


def _at_roots(trees: int, n: int, depth: int, length: int, dtype: Any) -> Frontier:
    """Returns a list of ``length`` paths, of which the first ``trees n`` are at the roots."""
    roots, slot = trees * n, jnp.arange(length, dtype=jnp.int32)
    nothing, zero = jnp.zeros_like(slot), jnp.zeros(slot.shape, dtype)
    tree, sample = (jnp.where(slot < roots, sources, 0) for sources in (slot // n, slot % n))
    counts = jnp.zeros(depth + 1, jnp.int32).at[0].set(roots)
    undefined = (nothing, nothing, zero, zero, jnp.zeros(slot.shape, bool))
    return Frontier(tree, sample, nothing, zero + 1, *undefined, counts)


def _move(
    i: Array, state: tuple[Array, Frontier], level: Array, paths: Array, scores: _Scores, step: Step, capacity: int
) -> tuple[Array, Frontier]:
    """Moves the paths of chunk i down a level, and appends the new paths to the list."""
    # `paths` is the number of paths on the level. `state` has the number of paths on the next level so far, and the
    # list.
    count, frontier = state
    size, append_size = blocking.paths_at_once(len(scores.near) * len(scores.x))
    chunk, slot = _cut(frontier, i * size, size), jnp.arange(size, dtype=jnp.int32)
    z = scores.at_paths(level, chunk)
    position, right = step.position(z, chunk.reach), z > 0
    valid = i * size + slot < paths
    uncertain = valid & ~((position <= 0) | (position >= 1))  # NaN counts as uncertain, and propagates
    rank = jnp.cumsum(uncertain, dtype=jnp.int32)
    slots = jnp.where(uncertain, rank - 1, size + append_size)
    branching = jnp.zeros(size + append_size, jnp.int32).at[slots].set(slot, mode="drop")

    def append(j: Array, frontier: Frontier) -> Frontier:
        sources = jax.lax.dynamic_slice_in_dim(branching, j * append_size, append_size)
        before, source_right, source_position = (_rows(a, sources) for a in (chunk.reach, right, position))
        right_reach = before * step.right(source_position)
        branches = Frontier(
            tree=_rows(chunk.tree, sources),
            sample=_rows(chunk.sample, sources),
            node=2 * _rows(chunk.node, sources) + 2 - source_right.astype(jnp.int32),
            reach=jnp.where(source_right, before - right_reach, right_reach),
            parent=i * size + sources,
            row=_rows(scores.rows(chunk), sources),
            position=source_position,
            before=before,
            right=~source_right,
            counts=frontier.counts,
        )
        # Paths beyond the capacity are overwritten, because the batch does not fit.
        start = jnp.minimum(count + j * append_size, capacity)
        paste = lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, 0)
        return Frontier._make([*map(paste, frontier[:-1], branches[:-1]), frontier.counts])

    frontier = jax.lax.fori_loop(0, -(-rank[-1] // append_size), append, frontier)
    # The chunk is read again, because the compiler would copy the old arrays if they were used.
    chunk = _cut(frontier, i * size, size)
    right_reach = chunk.reach * step.right(position)
    node = jnp.where(valid, 2 * chunk.node + 1 + right.astype(jnp.int32), chunk.node)
    reach = jnp.where(valid, jnp.where(right, right_reach, chunk.reach - right_reach), chunk.reach)
    put = lambda a, values: jax.lax.dynamic_update_slice_in_dim(a, values, i * size, 0)
    return count + rank[-1], frontier._replace(node=put(frontier.node, node), reach=put(frontier.reach, reach))


def outputs(frontier: Frontier, operands: Operands) -> Float[Array, "n k"]:
    """Returns the outputs: the sum of leaf values over each sample's paths, weighted by reach."""
    n, (trees, leaves, k) = len(operands.x), operands.leaf_values.shape
    leaf_values = operands.leaf_values.reshape(-1, k)

    def add(_: Array, valid: Array, paths: Frontier, total: Array) -> Array:
        contributions = paths.reach[:, None] * _rows(leaf_values, _leaf_rows(paths, leaves))
        return total.at[jnp.where(valid, paths.sample, n)].add(contributions, mode="drop")

    return _over_chunks(frontier, trees * n, add, jnp.zeros((n, k), leaf_values.dtype))


def counted(frontier: Frontier, trees: int, n: int) -> Int[Array, "trees n"]:
    """Returns the number of leaves that each sample reaches in each tree."""
    valid = jnp.arange(len(frontier.tree), dtype=jnp.int32) < frontier.counts[-1]
    pair = jnp.where(valid, frontier.tree * n + frontier.sample, trees * n)
    return jnp.zeros(trees * n, jnp.int32).at[pair].add(1, mode="drop").reshape(trees, n)


# The rule of by_level.gradient, applied to uncertain splits only. At all other splits the slope or the reach is 0. The
# value of a path is the value of its current node. At each level on the way up, every path that started at a split of
# the level passes its value to its parent. The parent's value becomes the value of the split. Paths that start on a
# level are contiguous, and have distinct parents.
def add_gradient(
    frontier: Frontier, operands: Operands, cotangent: Float[Array, "n k"], gradient: Operands
) -> Operands:
    """Adds the gradient of ``<cotangent, outputs>`` to ``gradient``, in the rows of splits and leaves on the paths."""
    # The gradient of x or gamma is not computed if `gradient.x` or `gradient.gamma` is None.
    k = operands.leaf_values.shape[2]

    def evaluate(paths: Frontier, leaf_values: Array) -> tuple[Array, Array]:
        c = _rows(cotangent, paths.sample)
        return (leaf_values * c).sum(1), paths.reach[:, None] * c

    leaves, d_leaves = operands.leaf_values.reshape(-1, k), gradient.leaf_values.reshape(-1, k)
    value, d_leaves = _visit_leaves(frontier, operands, evaluate, leaves, d_leaves)
    gradient = gradient._replace(leaf_values=d_leaves.reshape(operands.leaf_values.shape))
    return _climb(frontier, value, smooth_step(operands.gamma), operands, gradient)[1]


def expected(
    frontier: Frontier, operands: Operands, step: Step, loss_of: Any, leaves: Any, y: Array, share: Float[Array, " n"]
) -> tuple[tuple[Array, Any], Int[Array, " n"]]:
    """Returns the expected loss of one tree, its gradient, and the leaf of each sample under hard routing."""
    # The gradient is taken with respect to weights, bias and leaves. `loss_of` maps (leaves (m, ...), x (m, p), y (m,
    # ...)) to losses (m,) and their gradients for the leaves. `share` is the weight of each sample in the loss.
    n, nodes = len(operands.x), operands.bias.shape[1]

    def evaluate(paths: Frontier, leaves: Any) -> tuple[Array, Any]:
        loss, d_leaves = loss_of(leaves, _rows(operands.x, paths.sample), _rows(y, paths.sample))
        shares = _rows(share, paths.sample)
        factor = shares * paths.reach
        return shares * loss, jax.tree.map(lambda d: factor.reshape(-1, *[1] * (d.ndim - 1)) * d, d_leaves)

    value, d_leaves = _visit_leaves(frontier, operands, evaluate, leaves, jax.tree.map(jnp.zeros_like, leaves))
    gradient = Operands(None, jnp.zeros_like(operands.weights), jnp.zeros_like(operands.bias), None, None)
    value, gradient = _climb(frontier, value, step, operands, gradient)
    return (value[:n].sum(), (gradient.weights[0], gradient.bias[0], d_leaves)), frontier.node[:n] - nodes


def _visit_leaves(
    frontier: Frontier, operands: Operands, evaluate: Any, leaves: Any, d_leaves: Any
) -> tuple[Array, Any]:
    """Returns the values of the paths at their leaves, and adds the gradients of the leaves to ``d_leaves``."""
    # `evaluate` maps a chunk of paths and the leaves that they reach to values and gradients.
    trees, nodes = operands.bias.shape

    def visit(first: Array, valid: Array, paths: Frontier, state: tuple[Array, Any]) -> tuple[Array, Any]:
        value, d_leaves = state
        leaf = _leaf_rows(paths, nodes + 1)
        reached = jnp.where(valid, leaf, 0)
        chunk_values, slopes = evaluate(paths, jax.tree.map(lambda a: _rows(a, reached), leaves))
        value = jax.lax.dynamic_update_slice_in_dim(value, chunk_values, first, 0)
        row = jnp.where(valid, leaf, trees * (nodes + 1))
        return value, jax.tree.map(lambda total, d: total.at[row].add(d, mode="drop"), d_leaves, slopes)

    return _over_chunks(frontier, trees * len(operands.x), visit, (jnp.zeros_like(frontier.reach), d_leaves))


def _climb(
    frontier: Frontier, value: Array, step: Step, operands: Operands, gradient: Operands
) -> tuple[Array, Operands]:
    """Passes values of paths up to the roots, the first ``trees n``, and adds to the gradient of their sum."""
    (n, p), (trees, nodes) = operands.x.shape, operands.bias.shape
    depth, (_, size) = topology.depth_of(nodes), blocking.paths_at_once(trees * n)
    x, flat_weights = operands.x, operands.weights.reshape(-1, p)

    def at_level(i: Array, state: tuple[Array, Operands]) -> tuple[Array, Operands]:
        start, stop = frontier.counts[depth - 1 - i], frontier.counts[depth - i]

        def at_splits(j: Array, state: tuple[Array, Operands]) -> tuple[Array, Operands]:
            value, total = state
            first = start + j * size
            valid, splits = first + jnp.arange(size, dtype=jnp.int32) < stop, _cut(frontier, first, size)
            branch = jax.lax.dynamic_slice_in_dim(value, first, size)
            sibling = value.at[splits.parent].get(mode="clip")
            right, left = jnp.where(splits.right, branch, sibling), jnp.where(splits.right, sibling, branch)
            d_z = jnp.where(valid, splits.before * step.slope(splits.position) * (right - left), 0)
            parent = jnp.where(valid, splits.parent, len(value))
            value = value.at[parent].set(left + step.right(splits.position) * (right - left), mode="drop")
            row, sample = jnp.where(valid, splits.row, len(total.weights)), jnp.where(valid, splits.sample, n)
            weights = _rows(flat_weights, jnp.where(valid, splits.row, 0))
            return value, Operands(
                x=None if total.x is None else total.x.at[sample].add(d_z[:, None] * weights, mode="drop"),
                weights=total.weights.at[row].add(d_z[:, None] * x.at[sample].get(mode="clip"), mode="drop"),
                bias=total.bias.at[row].add(d_z, mode="drop"),
                leaf_values=total.leaf_values,
                gamma=None if total.gamma is None else total.gamma - ((splits.position - 0.5) * d_z).sum(),
            )

        return jax.lax.fori_loop(0, -(-(stop - start) // size), at_splits, state)

    flat = gradient._replace(weights=gradient.weights.reshape(-1, p), bias=gradient.bias.reshape(-1))
    value, flat = jax.lax.fori_loop(0, jnp.int32(depth), at_level, (value, flat))
    return value, jax.tree.map(lambda a, like: a.reshape(like.shape), flat, gradient)


def over_splits(frontier: Frontier, roots: int, body: Any, carry: Any) -> Any:
    """Loops ``body(rows, carry)`` over chunks of uncertain splits. ``rows`` are indices among all splits of all trees.

    A row is repeated if several samples touch a split. The last chunk is padded with an index out of range.
    """
    _, size = blocking.paths_at_once(roots)

    def visit(i: Array, carry: Any) -> Any:
        first = roots + i * size
        valid = first + jnp.arange(size, dtype=jnp.int32) < frontier.counts[-1]
        return body(jnp.where(valid, jax.lax.dynamic_slice_in_dim(frontier.row, first, size), _BEYOND), carry)

    return jax.lax.fori_loop(0, -(-(frontier.counts[-1] - roots) // size), visit, carry)


def over_leaves(frontier: Frontier, roots: int, leaves: int, body: Any, carry: Any) -> Any:
    """Loops ``body(rows, carry)`` over chunks of reachable leaves, for trees with ``leaves`` leaves."""
    visit = lambda _, valid, paths, carry: body(jnp.where(valid, _leaf_rows(paths, leaves), _BEYOND), carry)
    return _over_chunks(frontier, roots, visit, carry)


def _over_chunks(frontier: Frontier, roots: int, body: Any, carry: Any) -> Any:
    """Loops ``body(index of the first path, mask of valid paths, paths, carry)`` over chunks of the paths at leaves."""
    size, _ = blocking.paths_at_once(roots)

    def visit(i: Array, carry: Any) -> Any:
        valid = i * size + jnp.arange(size, dtype=jnp.int32) < frontier.counts[-1]
        return body(i * size, valid, _cut(frontier, i * size, size), carry)

    return jax.lax.fori_loop(0, -(-frontier.counts[-1] // size), visit, carry)


def _leaf_rows(paths: Frontier, leaves: int) -> Array:
    """Returns the row of each path's leaf among all leaves of all trees, for trees with ``leaves`` leaves."""
    return paths.tree * leaves + paths.node - (leaves - 1)


def _cut(frontier: Frontier, start: Array, size: int) -> Frontier:
    cut = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size)
    return Frontier._make([*map(cut, frontier[:-1]), frontier.counts])


def _rows(a: Array, rows: Array) -> Array:
    return a.at[rows].get(mode="promise_in_bounds")
