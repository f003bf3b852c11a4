"""The frontier of an ensemble: where the samples of a batch are on their ways through all trees.

A split that is certain, its score beyond half of gamma, sends a sample one way alone. A *path* is one sample on its way
through one tree: each begins with one, and each uncertain split on the way begins another, so that a sample that
reaches R leaves of a tree has R paths there and meets R - 1 uncertain splits. All paths of a batch lie in one list, the
frontier, and go down together a level at a time; what they pass is scored row by row, and backwards only uncertain
splits and reachable leaves are visited. Work O(p depth) a path, forwards, and O(p) an uncertain split, backwards.

The list has room for ``width`` paths a sample and tree *on average*. (Room for so many of each sample would be small
for the few that need more: in one of 2560 pairs of sample and tree there is nearly always one that reaches several
times the mean.) A batch that does not fit is noticed exactly; what is to be done about it is for
:mod:`jtrees.routing.conditional` to say.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrees import blocking, topology
from jtrees.routing import by_level
from jtrees.routing.by_level import Asked

_BEYOND = 2**31 - 1  # a row that there is not
_NEAR = 5  # levels from the root that are scored whole (7, from depth 14 on, are no faster)


class Frontier(NamedTuple):
    """The paths of a batch: the first ``trees n`` begin at a root, tree by tree; the others at uncertain splits.

    Arrays have room for ``width trees n`` paths and some more; those from ``counts[-1]`` on mean nothing. Entries of
    ``parent``, ``row``, ``position``, ``before`` and ``right`` mean something for paths that begin at splits.

    Attributes:
      tree: which tree.
      sample: which sample.
      node: where the path is, in the numbering of the whole tree: in the end a leaf.
      reach: the probability of getting there.
      parent: the path that met the split.
      row: the split, its row in all splits of all trees.
      position: of the sample's score on the step (:func:`jtrees.routing.by_level.position`).
      before: the probability of reaching the split.
      right: whether the path begins on its right.
      counts: paths that there are on each level, ``(depth + 1,)``, leaves last.
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


def explore(asked: Asked, width: int) -> tuple[Frontier, Array]:
    """The paths of a batch, and whether they fit. If not, they end at the level that was too much and mean nothing."""
    x, weights, bias, _, gamma = asked
    (n, p), (trees, nodes) = x.shape, bias.shape
    roots, depth = trees * n, topology.depth_of(nodes)
    room = width * roots
    many, few = blocking.paths_at_once(roots)
    flat_weights, flat_bias = weights.reshape(-1, p), bias.reshape(-1)
    slot = jnp.arange(room + many + few, dtype=jnp.int32)
    nothing, zero = jnp.zeros_like(slot), jnp.zeros(slot.shape, x.dtype)
    tree, sample = (jnp.where(slot < roots, of, 0) for of in (slot // n, slot % n))
    counts = jnp.zeros(depth + 1, jnp.int32).at[0].set(roots)
    begun = (nothing, nothing, zero, zero, jnp.zeros(slot.shape, bool))
    frontier = Frontier(tree, sample, nothing, zero + 1, *begun, counts)

    # Near the root splits are few: all are scored, in one product, and looked up.
    near = max(1, min(depth // 2, _NEAR))
    upper = topology.num_nodes(near)
    product = jnp.einsum("tjp,np->tjn", weights[:, :upper], x, precision="highest")
    scores = (product + bias[:, :upper, None]).reshape(-1)

    def go_down(state: tuple[Array, Frontier]) -> tuple[Array, Frontier]:
        level, frontier = state
        here = frontier.counts[level]

        def move(i: Array, state: tuple[Array, Frontier]) -> tuple[Array, Frontier]:
            """The paths of a chunk, a level down; those that begin go to the end of the list."""
            count, all_paths = state
            now = _cut(all_paths, i * many, many)
            row = now.tree * nodes + now.node
            z = jax.lax.cond(
                level < near,
                lambda: _rows(scores, (now.tree * upper + now.node) * n + now.sample),
                lambda: (_rows(flat_weights, row) * _rows(x, now.sample)).sum(1) + _rows(flat_bias, row),
            )
            a, right = by_level.position(z, gamma), z > 0
            there = i * many + slot[:many] < here
            uncertain = there & (a > 0) & (a < 1)
            rank = jnp.cumsum(uncertain, dtype=jnp.int32)
            at = jnp.where(uncertain, rank - 1, many + few)
            chosen = jnp.zeros(many + few, jnp.int32).at[at].set(slot[:many], mode="drop")

            def begin(j: Array, all_paths: Frontier) -> Frontier:
                of = jax.lax.dynamic_slice_in_dim(chosen, j * few, few)
                at, before, right_of = _rows(a, of), _rows(now.reach, of), _rows(right, of)
                to_right = before * by_level.chance(at)
                new = Frontier(
                    tree=_rows(now.tree, of),
                    sample=_rows(now.sample, of),
                    node=2 * _rows(now.node, of) + 2 - right_of.astype(jnp.int32),
                    reach=jnp.where(right_of, before - to_right, to_right),
                    parent=i * many + of,
                    row=_rows(row, of),
                    position=at,
                    before=before,
                    right=~right_of,
                    counts=all_paths.counts,
                )
                # Beyond the room there is nothing to keep: the batch does not fit.
                return _paste(all_paths, new, jnp.minimum(count + j * few, room))

            all_paths = jax.lax.fori_loop(0, -(-rank[-1] // few), begin, all_paths)
            # Read anew, so that nothing needs the arrays as they were: the compiler would keep copies of them.
            now = _cut(all_paths, i * many, many)
            to_right = now.reach * by_level.chance(a)
            node = jnp.where(there, 2 * now.node + 1 + right.astype(jnp.int32), now.node)
            reach = jnp.where(there, jnp.where(right, to_right, now.reach - to_right), now.reach)
            put = lambda a, values: jax.lax.dynamic_update_slice_in_dim(a, values, i * many, 0)
            moved = all_paths._replace(node=put(all_paths.node, node), reach=put(all_paths.reach, reach))
            return count + rank[-1], moved

        count, frontier = jax.lax.fori_loop(0, -(-here // many), move, (here, frontier))
        return level + 1, frontier._replace(counts=frontier.counts.at[level + 1].set(count))

    # A batch that does not fit mostly shows it there already.
    begun_there = by_level.reachable_by(by_level.position(scores.reshape(trees, upper, n), gamma))
    hopeful = begun_there.sum() <= room
    goes_on = lambda state: hopeful & (state[0] < depth) & (state[1].counts[state[0]] <= room)
    level, frontier = jax.lax.while_loop(goes_on, go_down, (jnp.int32(0), frontier))
    return frontier, hopeful & (frontier.counts[level] <= room)


def outputs(frontier: Frontier, asked: Asked) -> Float[Array, "n k"]:
    """The sum over the paths of each sample of what their leaves hold, by their reach."""
    n, (trees, leaves, k) = len(asked.x), asked.leaf_values.shape
    flat, (many, _) = asked.leaf_values.reshape(-1, k), blocking.paths_at_once(trees * n)

    def add(i: Array, total: Array) -> Array:
        there, paths = _chunk(frontier, i, many)
        answers = paths.reach[:, None] * _rows(flat, paths.tree * leaves + paths.node - (leaves - 1))
        return total.at[jnp.where(there, paths.sample, n)].add(answers, mode="drop")

    return jax.lax.fori_loop(0, -(-frontier.counts[-1] // many), add, jnp.zeros((n, k), flat.dtype))


def counted(frontier: Frontier, trees: int, n: int) -> Int[Array, "trees n"]:
    """How many leaves each sample reaches in each tree."""
    there = jnp.arange(len(frontier.tree), dtype=jnp.int32) < frontier.counts[-1]
    pair = jnp.where(there, frontier.tree * n + frontier.sample, trees * n)
    return jnp.zeros(trees * n, jnp.int32).at[pair].add(1, mode="drop").reshape(trees, n)


# The rule of by_level.gradient, at uncertain splits alone: elsewhere the slope or the reach is 0. The value of a path
# is that of the node where it is; going up a level, a path that began at a split of it hands its value on to its
# parent, whose value becomes that of the split. Paths that begin on a level lie side by side, and have parents of their
# own.
def add_gradient(frontier: Frontier, asked: Asked, cotangent: Float[Array, "n k"], to: Asked) -> Asked:
    """The gradient of ``<cotangent, outputs>`` added to what is there, in rows of splits and leaves that paths meet.

    What is None of ``to.x`` and ``to.gamma`` is not asked for.
    """
    x, weights, bias, leaf_values, gamma = asked
    (trees, leaves, k), (n, p) = leaf_values.shape, x.shape
    depth, (many, few) = topology.depth_of(bias.shape[1]), blocking.paths_at_once(trees * n)
    flat_leaves, flat_weights = leaf_values.reshape(-1, k), weights.reshape(-1, p)

    def at_leaves(i: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        value, d_leaves = state
        there, paths = _chunk(frontier, i, many)
        leaf, c = paths.tree * leaves + paths.node - (leaves - 1), _rows(cotangent, paths.sample)
        of_chunk = (_rows(flat_leaves, jnp.where(there, leaf, 0)) * c).sum(1)
        value = jax.lax.dynamic_update_slice_in_dim(value, of_chunk, i * many, 0)
        return value, d_leaves.at[jnp.where(there, leaf, len(d_leaves))].add(paths.reach[:, None] * c, mode="drop")

    begin = jnp.zeros_like(frontier.reach), to.leaf_values.reshape(-1, k)
    value, d_leaves = jax.lax.fori_loop(0, -(-frontier.counts[-1] // many), at_leaves, begin)

    def at_level(i: Array, state: tuple[Array, Asked]) -> tuple[Array, Asked]:
        start, stop = frontier.counts[depth - 1 - i], frontier.counts[depth - i]

        def at_splits(j: Array, state: tuple[Array, Asked]) -> tuple[Array, Asked]:
            value, to = state
            first = start + j * few
            there, of = first + jnp.arange(few, dtype=jnp.int32) < stop, _cut(frontier, first, few)
            mine, other = jax.lax.dynamic_slice_in_dim(value, first, few), value.at[of.parent].get(mode="clip")
            right, left = jnp.where(of.right, mine, other), jnp.where(of.right, other, mine)
            d_z = jnp.where(there, of.before * by_level.slope(of.position, gamma) * (right - left), 0)
            parent = jnp.where(there, of.parent, len(value))
            value = value.at[parent].set(left + by_level.chance(of.position) * (right - left), mode="drop")
            row, sample = jnp.where(there, of.row, len(to.weights)), jnp.where(there, of.sample, n)
            met = jnp.where(there, of.row, 0)
            through = lambda d_x: d_x.at[sample].add(d_z[:, None] * _rows(flat_weights, met), mode="drop")
            return value, Asked(
                x=None if to.x is None else through(to.x),
                weights=to.weights.at[row].add(d_z[:, None] * x.at[sample].get(mode="clip"), mode="drop"),
                bias=to.bias.at[row].add(d_z, mode="drop"),
                leaf_values=to.leaf_values,
                gamma=None if to.gamma is None else to.gamma - ((of.position - 0.5) * d_z).sum(),
            )

        return jax.lax.fori_loop(0, -(-(stop - start) // few), at_splits, state)

    flat = Asked(to.x, to.weights.reshape(-1, p), to.bias.reshape(-1), d_leaves, to.gamma)
    _, flat = jax.lax.fori_loop(0, jnp.int32(depth), at_level, (value, flat))
    return jax.tree.map(lambda a, like: a.reshape(like.shape), flat, to)


def over_splits(frontier: Frontier, roots: int, body: Any, carry: Any) -> Any:
    """``body(rows, carry)`` a chunk of uncertain splits after the other, by their rows in all splits of all trees.

    A split that several samples meet comes several times. Rows beyond the last fill up the last chunk.
    """
    _, few = blocking.paths_at_once(roots)

    def at(i: Array, carry: Any) -> Any:
        first = roots + i * few
        there = first + jnp.arange(few, dtype=jnp.int32) < frontier.counts[-1]
        return body(jnp.where(there, jax.lax.dynamic_slice_in_dim(frontier.row, first, few), _BEYOND), carry)

    return jax.lax.fori_loop(0, -(-(frontier.counts[-1] - roots) // few), at, carry)


def over_leaves(frontier: Frontier, roots: int, leaves: int, body: Any, carry: Any) -> Any:
    """The same of reachable leaves, trees having so many."""
    many, _ = blocking.paths_at_once(roots)

    def at(i: Array, carry: Any) -> Any:
        there, paths = _chunk(frontier, i, many)
        return body(jnp.where(there, paths.tree * leaves + paths.node - (leaves - 1), _BEYOND), carry)

    return jax.lax.fori_loop(0, -(-frontier.counts[-1] // many), at, carry)


def _chunk(frontier: Frontier, i: Array, many: int) -> tuple[Array, Frontier]:
    """Chunk i of so many paths, and which of them there are."""
    return i * many + jnp.arange(many, dtype=jnp.int32) < frontier.counts[-1], _cut(frontier, i * many, many)


def _cut(frontier: Frontier, start: Array, size: int) -> Frontier:
    cut = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size)
    return Frontier._make([*map(cut, frontier[:-1]), frontier.counts])


def _paste(frontier: Frontier, new: Frontier, start: Array) -> Frontier:
    paste = lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, 0)
    return Frontier._make([*map(paste, frontier[:-1], new[:-1]), frontier.counts])


def _rows(a: Array, at: Array) -> Array:
    return a.at[at].get(mode="promise_in_bounds")
