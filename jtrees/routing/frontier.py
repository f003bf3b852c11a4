"""The frontier of an ensemble: the paths of all samples of a batch through all trees.

A split is certain if it can send a sample to only one side. For the smooth step, a split is certain if its score is
beyond half of gamma. Another :class:`Step` defines its own certain splits.

A *path* is a sample that descends a tree. Each sample starts with one path, and each uncertain split adds a path. A
sample that reaches R leaves of a tree has R paths and passes R - 1 uncertain splits.

The frontier is the list of all paths of a batch. The paths descend together, level by level, and their splits are
scored row by row. The backward pass visits only uncertain splits and reachable leaves. The cost is O(p depth) per path
in the forward pass, and O(p) per uncertain split in the backward pass.

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
from jtrees.routing.by_level import Asked
from pallas_kernels.routes import cubic

_BEYOND = 2**31 - 1  # an index out of range
_NEAR = 5  # levels from the root in which all splits are scored (7 levels are no faster from depth 14 on)


class Step(NamedTuple):
    """A step: the probability of going right as a function of a split's score.

    Attributes:
      position: ``(score, reach) -> position`` of the score on the step. Consider a sample that reaches the split with
        probability ``reach``. The position is 0 if the sample is certain to go left, and 1 if it is certain to go
        right.
      right: ``position -> probability`` of going right, 0 at position 0 and 1 at position 1.
      slope: ``position -> derivative`` of this probability with respect to the score.
    """

    position: Callable[[Array, Array], Array]
    right: Callable[[Array], Array]
    slope: Callable[[Array], Array]


def smooth_step(gamma: Array) -> Step:
    """Returns the smooth step with an uncertain region of width gamma."""
    return Step(lambda z, reach: by_level.position(z, gamma), cubic, lambda a: by_level.slope(a, gamma))


class Frontier(NamedTuple):
    """The paths of a batch. The first ``trees n`` paths start at the roots, tree by tree.

    All later paths start at uncertain splits. Arrays have capacity for ``width trees n`` paths and padding. Entries
    from index ``counts[-1]`` on are undefined. For paths that start at roots, ``parent``, ``row``, ``position``,
    ``before`` and ``right`` are undefined.

    Attributes:
      tree: index of the tree.
      sample: index of the sample.
      node: current node of the whole tree; a leaf after the last level.
      reach: probability of reaching the node.
      parent: index of the path from which this path branched off.
      row: row of the uncertain split among all splits of all trees.
      position: position of the sample's score on the step.
      before: probability of reaching the split.
      right: whether the path starts at the right child.
      counts: number of paths on each level, ``(depth + 1,)``, leaves last.
    """

    tree: Int[Array, " paths"]
    sample: Int[Array, " paths"]
    node: Int[Array, " paths"]
    reach: Float[Array, " paths"]
    parent: Int[Array, " paths"]
    row: Int[Array, " paths"]
    position: Float[Array, " paths"]
    before: Float[Array, " paths"]
    right: Bool[Array, " paths"]
    counts: Int[Array, " levels"]


def explore(asked: Asked, width: float, step: Step) -> tuple[Frontier, Array]:
    """Returns the paths of a batch, and whether they fit. An overflow stops the paths at its level."""
    x, weights, bias = asked.x, asked.weights, asked.bias
    (n, p), (trees, nodes) = x.shape, bias.shape
    roots, depth = trees * n, topology.depth_of(nodes)
    capacity = int(width * roots)
    many, few = blocking.paths_at_once(roots)
    flat_weights, flat_bias = weights.reshape(-1, p), bias.reshape(-1)
    slot = jnp.arange(capacity + many + few, dtype=jnp.int32)
    nothing, zero = jnp.zeros_like(slot), jnp.zeros(slot.shape, x.dtype)
    tree, sample = (jnp.where(slot < roots, sources, 0) for sources in (slot // n, slot % n))
    counts = jnp.zeros(depth + 1, jnp.int32).at[0].set(roots)
    undefined = (nothing, nothing, zero, zero, jnp.zeros(slot.shape, bool))
    frontier = Frontier(tree, sample, nothing, zero + 1, *undefined, counts)

    # There are few splits near the root, so one product scores all of them.
    near = max(1, min(depth // 2, _NEAR))
    upper = topology.num_nodes(near)
    product = jnp.einsum("tjp,np->tjn", weights[:, :upper], x, precision="highest")
    scores = (product + bias[:, :upper, None]).reshape(-1)

    def go_down(state: tuple[Array, Frontier]) -> tuple[Array, Frontier]:
        level, frontier = state
        count_on_level = frontier.counts[level]

        def move(i: Array, state: tuple[Array, Frontier]) -> tuple[Array, Frontier]:
            """Moves the paths of a chunk down a level, and appends new paths to the list."""
            count, all_paths = state
            chunk = _cut(all_paths, i * many, many)
            row = chunk.tree * nodes + chunk.node
            z = jax.lax.cond(
                level < near,
                lambda: _rows(scores, (chunk.tree * upper + chunk.node) * n + chunk.sample),
                lambda: (_rows(flat_weights, row) * _rows(x, chunk.sample)).sum(1) + _rows(flat_bias, row),
            )
            a, right = step.position(z, chunk.reach), z > 0
            valid = i * many + slot[:many] < count_on_level
            uncertain = valid & ~((a <= 0) | (a >= 1))  # NaN counts as uncertain, and propagates
            rank = jnp.cumsum(uncertain, dtype=jnp.int32)
            slots = jnp.where(uncertain, rank - 1, many + few)
            chosen = jnp.zeros(many + few, jnp.int32).at[slots].set(slot[:many], mode="drop")

            def append(j: Array, all_paths: Frontier) -> Frontier:
                sources = jax.lax.dynamic_slice_in_dim(chosen, j * few, few)
                slots, before, source_right = _rows(a, sources), _rows(chunk.reach, sources), _rows(right, sources)
                to_right = before * step.right(slots)
                new = Frontier(
                    tree=_rows(chunk.tree, sources),
                    sample=_rows(chunk.sample, sources),
                    node=2 * _rows(chunk.node, sources) + 2 - source_right.astype(jnp.int32),
                    reach=jnp.where(source_right, before - to_right, to_right),
                    parent=i * many + sources,
                    row=_rows(row, sources),
                    position=slots,
                    before=before,
                    right=~source_right,
                    counts=all_paths.counts,
                )
                # Paths beyond the capacity are overwritten, because the batch does not fit.
                return _paste(all_paths, new, jnp.minimum(count + j * few, capacity))

            all_paths = jax.lax.fori_loop(0, -(-rank[-1] // few), append, all_paths)
            # The chunk is read again, because the compiler would copy the old arrays if they were used.
            chunk = _cut(all_paths, i * many, many)
            to_right = chunk.reach * step.right(a)
            node = jnp.where(valid, 2 * chunk.node + 1 + right.astype(jnp.int32), chunk.node)
            reach = jnp.where(valid, jnp.where(right, to_right, chunk.reach - to_right), chunk.reach)
            put = lambda a, values: jax.lax.dynamic_update_slice_in_dim(a, values, i * many, 0)
            moved = all_paths._replace(node=put(all_paths.node, node), reach=put(all_paths.reach, reach))
            return count + rank[-1], moved

        count, frontier = jax.lax.fori_loop(0, -(-count_on_level // many), move, (count_on_level, frontier))
        return level + 1, frontier._replace(counts=frontier.counts.at[level + 1].set(count))

    # The levels near the root detect most overflows before any path descends.
    reach = jnp.ones((1, trees, n), x.dtype)
    for z in topology.levels(jnp.moveaxis(scores.reshape(trees, upper, n), 1, 0)):
        to_right = reach * step.right(step.position(z, reach))
        reach = topology.interleave(reach - to_right, to_right)
    may_fit = jnp.count_nonzero(reach) <= capacity
    continues = lambda state: may_fit & (state[0] < depth) & (state[1].counts[state[0]] <= capacity)
    level, frontier = jax.lax.while_loop(continues, go_down, (jnp.int32(0), frontier))
    return frontier, may_fit & (frontier.counts[level] <= capacity)


def outputs(frontier: Frontier, asked: Asked) -> Float[Array, "n k"]:
    """Returns the outputs: the sum of leaf values over each sample's paths, weighted by reach."""
    n, (trees, leaves, k) = len(asked.x), asked.leaf_values.shape
    flat, (many, _) = asked.leaf_values.reshape(-1, k), blocking.paths_at_once(trees * n)

    def add(i: Array, total: Array) -> Array:
        valid, paths = _chunk(frontier, i, many)
        contributions = paths.reach[:, None] * _rows(flat, paths.tree * leaves + paths.node - (leaves - 1))
        return total.at[jnp.where(valid, paths.sample, n)].add(contributions, mode="drop")

    return jax.lax.fori_loop(0, -(-frontier.counts[-1] // many), add, jnp.zeros((n, k), flat.dtype))


def counted(frontier: Frontier, trees: int, n: int) -> Int[Array, "trees n"]:
    """Returns the number of leaves that each sample reaches in each tree."""
    valid = jnp.arange(len(frontier.tree), dtype=jnp.int32) < frontier.counts[-1]
    pair = jnp.where(valid, frontier.tree * n + frontier.sample, trees * n)
    return jnp.zeros(trees * n, jnp.int32).at[pair].add(1, mode="drop").reshape(trees, n)


# The rule of by_level.gradient, applied to uncertain splits only. At all other splits the slope or the reach is 0. The
# value of a path is the value of its current node. At each level on the way up, every path that started at a split of
# the level passes its value to its parent. The parent's value becomes the value of the split. Paths that start on a
# level are contiguous, and have distinct parents.
def add_gradient(frontier: Frontier, asked: Asked, cotangent: Float[Array, "n k"], to: Asked) -> Asked:
    """Adds the gradient of ``<cotangent, outputs>`` to ``to``, in the rows of splits and leaves that paths touch.

    The gradient of x or gamma is not computed if ``to.x`` or ``to.gamma`` is None.
    """
    trees, leaves, k = asked.leaf_values.shape
    many, _ = blocking.paths_at_once(trees * len(asked.x))
    flat_leaves = asked.leaf_values.reshape(-1, k)

    def at_leaves(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        value, d_leaves = state
        valid, paths = _chunk(frontier, i, many)
        leaf, c = paths.tree * leaves + paths.node - (leaves - 1), _rows(cotangent, paths.sample)
        chunk_values = (_rows(flat_leaves, jnp.where(valid, leaf, 0)) * c).sum(1)
        value = jax.lax.dynamic_update_slice_in_dim(value, chunk_values, i * many, 0)
        return value, d_leaves.at[jnp.where(valid, leaf, len(d_leaves))].add(paths.reach[:, None] * c, mode="drop")

    initial = jnp.zeros_like(frontier.reach), to.leaf_values.reshape(-1, k)
    value, d_leaves = jax.lax.fori_loop(0, -(-frontier.counts[-1] // many), at_leaves, initial)
    to = to._replace(leaf_values=d_leaves.reshape(trees, leaves, k))
    return _climb(frontier, value, smooth_step(asked.gamma), asked, to)[1]


def expected(
    frontier: Frontier, asked: Asked, step: Step, loss_of: Any, leaves: Any, y: Array, share: Float[Array, " n"]
) -> tuple[tuple[Array, Any], Int[Array, " n"]]:
    """Returns the expected loss of one tree, its gradient, and the leaf of each sample under hard routing.

    The gradient is taken with respect to weights, bias and leaves.

    Args:
      frontier: the paths of the samples.
      asked: samples, weights and bias of one tree. Leaf values are None.
      step: the step of the frontier.
      loss_of: ``(leaves (m, ...), x (m, p), y (m, ...)) -> losses (m,)`` and their gradients for the leaves.
      leaves: a pytree of arrays whose first axis is over the leaves.
      y: targets.
      share: weight of each sample in the loss.
    """
    n, nodes = len(asked.x), asked.bias.shape[1]
    many, _ = blocking.paths_at_once(n)

    def at_leaves(i: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
        value, d_leaves = state
        valid, paths = _chunk(frontier, i, many)
        leaf, sample = jnp.where(valid, paths.node - nodes, 0), paths.sample
        loss, d_leaf = loss_of(jax.tree.map(lambda a: _rows(a, leaf), leaves), _rows(asked.x, sample), _rows(y, sample))
        shares = _rows(share, sample)
        value = jax.lax.dynamic_update_slice_in_dim(value, shares * loss, i * many, 0)
        factor, leaf = shares * paths.reach, jnp.where(valid, leaf, nodes + 1)
        add = lambda total, d: total.at[leaf].add(factor.reshape(-1, *[1] * (d.ndim - 1)) * d, mode="drop")
        return value, jax.tree.map(add, d_leaves, d_leaf)

    initial = jnp.zeros_like(frontier.reach), jax.tree.map(jnp.zeros_like, leaves)
    value, d_leaves = jax.lax.fori_loop(0, -(-frontier.counts[-1] // many), at_leaves, initial)
    to = Asked(None, jnp.zeros_like(asked.weights), jnp.zeros_like(asked.bias), None, None)
    value, to = _climb(frontier, value, step, asked, to)
    return (value[:n].sum(), (to.weights[0], to.bias[0], d_leaves)), frontier.node[:n] - nodes


def _climb(frontier: Frontier, value: Array, step: Step, asked: Asked, to: Asked) -> tuple[Array, Asked]:
    """Passes the values of paths from the leaves up to the roots, and adds the gradient to ``to``.

    The gradient is the gradient of the sum of the root values.

    Returns:
      The values and ``to``. The first ``trees n`` values belong to the roots.
    """
    (n, p), (trees, nodes) = asked.x.shape, asked.bias.shape
    depth, (_, few) = topology.depth_of(nodes), blocking.paths_at_once(trees * n)
    x, flat_weights = asked.x, asked.weights.reshape(-1, p)

    def at_level(i: Array, state: tuple[Array, Asked]) -> tuple[Array, Asked]:
        start, stop = frontier.counts[depth - 1 - i], frontier.counts[depth - i]

        def at_splits(j: Array, state: tuple[Array, Asked]) -> tuple[Array, Asked]:
            value, to = state
            first = start + j * few
            valid, splits = first + jnp.arange(few, dtype=jnp.int32) < stop, _cut(frontier, first, few)
            own, other = jax.lax.dynamic_slice_in_dim(value, first, few), value.at[splits.parent].get(mode="clip")
            right, left = jnp.where(splits.right, own, other), jnp.where(splits.right, other, own)
            d_z = jnp.where(valid, splits.before * step.slope(splits.position) * (right - left), 0)
            parent = jnp.where(valid, splits.parent, len(value))
            value = value.at[parent].set(left + step.right(splits.position) * (right - left), mode="drop")
            row, sample = jnp.where(valid, splits.row, len(to.weights)), jnp.where(valid, splits.sample, n)
            touched = jnp.where(valid, splits.row, 0)
            through = lambda d_x: d_x.at[sample].add(d_z[:, None] * _rows(flat_weights, touched), mode="drop")
            return value, Asked(
                x=None if to.x is None else through(to.x),
                weights=to.weights.at[row].add(d_z[:, None] * x.at[sample].get(mode="clip"), mode="drop"),
                bias=to.bias.at[row].add(d_z, mode="drop"),
                leaf_values=to.leaf_values,
                gamma=None if to.gamma is None else to.gamma - ((splits.position - 0.5) * d_z).sum(),
            )

        return jax.lax.fori_loop(0, -(-(stop - start) // few), at_splits, state)

    flat = to._replace(weights=to.weights.reshape(-1, p), bias=to.bias.reshape(-1))
    value, flat = jax.lax.fori_loop(0, jnp.int32(depth), at_level, (value, flat))
    return value, jax.tree.map(lambda a, like: a.reshape(like.shape), flat, to)


def over_splits(frontier: Frontier, roots: int, body: Any, carry: Any) -> Any:
    """Loops ``body(rows, carry)`` over chunks of uncertain splits.

    ``rows`` are indices among all splits of all trees. If several samples touch a split, its row is repeated. The last
    chunk is padded with an index out of range.
    """
    _, few = blocking.paths_at_once(roots)

    def visit(i: Array, carry: Any) -> Any:
        first = roots + i * few
        valid = first + jnp.arange(few, dtype=jnp.int32) < frontier.counts[-1]
        return body(jnp.where(valid, jax.lax.dynamic_slice_in_dim(frontier.row, first, few), _BEYOND), carry)

    return jax.lax.fori_loop(0, -(-(frontier.counts[-1] - roots) // few), visit, carry)


def over_leaves(frontier: Frontier, roots: int, leaves: int, body: Any, carry: Any) -> Any:
    """Loops ``body(rows, carry)`` over chunks of reachable leaves, for trees with ``leaves`` leaves."""
    many, _ = blocking.paths_at_once(roots)

    def visit(i: Array, carry: Any) -> Any:
        valid, paths = _chunk(frontier, i, many)
        return body(jnp.where(valid, paths.tree * leaves + paths.node - (leaves - 1), _BEYOND), carry)

    return jax.lax.fori_loop(0, -(-frontier.counts[-1] // many), visit, carry)


def _chunk(frontier: Frontier, i: Array, many: int) -> tuple[Array, Frontier]:
    """Returns the mask of valid paths of chunk i, and the chunk."""
    return i * many + jnp.arange(many, dtype=jnp.int32) < frontier.counts[-1], _cut(frontier, i * many, many)


def _cut(frontier: Frontier, start: Array, size: int) -> Frontier:
    cut = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size)
    return Frontier._make([*map(cut, frontier[:-1]), frontier.counts])


def _paste(frontier: Frontier, new: Frontier, start: Array) -> Frontier:
    paste = lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, 0)
    return Frontier._make([*map(paste, frontier[:-1], new[:-1]), frontier.counts])


def _rows(a: Array, at: Array) -> Array:
    return a.at[at].get(mode="promise_in_bounds")
