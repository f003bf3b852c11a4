"""Isotonic projections ordered by a tree: no node above its parent.

``prune`` is LatentTree's pruning layer (Zantedeschi et al., "Learning Binary Decision Trees by Argmin Differentiation",
ICML 2021, eq. 4), solved exactly and in parallel; ``prune_pav`` is the same by the paper's Algorithm 1, one merge after
the other, to be compared with; ``tree_isotonic`` is weighted least squares under the order of any tree.

The solution of each is constant on groups of nodes. Its derivative averages over the group, so the tangent is linear in
the tangents of the inputs, and forward mode, reverse mode and second derivatives all follow from one rule.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from jtrees import blocking, topology, validation


class Pruning(NamedTuple):
    """What :func:`prune_with_groups` finds.

    Attributes:
      values: a, ``(nodes,)``, between 0 and 1.
      group: of each node, the topmost node of its group, ``(nodes,)`` int32.
      support: which entries of q pull their group's value up, ``q > a - 1/2`` where ``0 < a < 1``; the values have no
        derivative with respect to the others.
    """

    values: Float[Array, " nodes"]
    group: Int[Array, " nodes"]
    support: Bool[Array, "nodes n"]


def prune(q: Float[Array, "nodes n"], penalty: float | Array) -> Float[Array, " nodes"]:
    """How active each node of a tree is: LatentTree's pruning layer.

    The minimiser over ``0 <= a <= 1`` with ``a_t <= a_parent(t)`` of

        sum_t  penalty / 2  a_t^2  +  1/2 sum_i max(q_ti + 1/2 - a_t, 0)^2        (eq. 4)

    exact up to rounding. Differentiable with respect to q and to the penalty, in both modes and repeatedly; at ties and
    at the ends of [0, 1] the derivative is the paper's (one element of Clarke's).

    Args:
      q: rewards of sending each sample to each node of the *whole* tree, leaves included, breadth first: ``nodes`` is
        ``2**(depth + 1) - 1``. Of any floating dtype; those of less than 32 bits are worked on in 32.
      penalty: price of an active node, above 0; a number or a traced one.

    Raises:
      ValueError: for a shape that is no tree's, values that are not finite, or a penalty that is not above 0.
    """
    dtype, q, penalty = _checked(q, penalty)
    return _prune(q, penalty)[0].astype(dtype)


def prune_with_groups(q: Float[Array, "nodes n"], penalty: float | Array) -> Pruning:
    """:func:`prune`, with the groups of equal value and the support that its derivative averages over.

    Args:
      q: as for :func:`prune`.
      penalty: as for :func:`prune`.

    Raises:
      ValueError: as :func:`prune`.
    """
    dtype, q, penalty = _checked(q, penalty)
    values, group = _prune(q, penalty)
    return Pruning(values.astype(dtype), group, _support(q, values))


def _checked(q: Any, penalty: Any) -> tuple[Any, Array, Array]:
    """The dtype of q, and both in that which is worked in."""
    q = jnp.asarray(q)
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must be of a floating dtype, got {q.dtype}")
    nodes = q.shape[0] if q.ndim else 0
    if q.ndim != 2 or nodes & (nodes + 1) or 0 in q.shape:
        raise ValueError(
            f"q must have shape (2**(depth + 1) - 1, n), a row for every node of the whole tree, got {q.shape}"
        )
    validation.check_finite("q", q)
    validation.check_number("penalty", penalty)
    if jnp.ndim(penalty):
        raise ValueError(f"penalty must be one number, got shape {jnp.shape(penalty)}: vmap over several")
    work = _working(q.dtype)
    limit = float(jnp.finfo(work).max) / (4 * q.size)
    if not validation.is_traced(q) and np.abs(np.asarray(q, np.float64)).max() > limit:
        raise ValueError(f"q must be within +-{limit:.2g} in {jnp.dtype(work).name}, or its sums overflow")
    if not validation.is_traced(penalty) and not float(jnp.finfo(work).tiny) <= float(penalty) <= limit:
        raise ValueError(f"penalty must be a normal number of {jnp.dtype(work).name} up to {limit:.2g}, got {penalty}")
    return q.dtype, q.astype(work), jnp.asarray(penalty).astype(work)


def _working(dtype: Any) -> Any:
    """The dtype that is worked in."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def prune_pav(q: ArrayLike, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """:func:`prune` by the paper's Algorithm 1: pool adjacent violators, the largest first, one after the other.

    In NumPy and float64: what the parallel solver is held against, and not meant to be fast.

    Args:
      q: as for :func:`prune`.
      penalty: as for :func:`prune`.

    Returns:
      The values, ``(nodes,)``, and of each node the topmost node of its group.

    Raises:
      ValueError: as :func:`prune`.
    """
    _checked(q, penalty)
    raised = np.asarray(q, np.float64) + 0.5
    members = {node: [node] for node in range(len(raised))}
    value = {node: _pooled(raised[[node]], penalty) for node in members}
    group = np.arange(len(raised))
    while True:
        above = lambda node: int(group[(node - 1) // 2])
        violating = [node for node in members if node > 0 and value[node] > value[above(node)]]
        if not violating:
            return np.clip([value[leader] for leader in group.tolist()], 0, 1), group
        top = max(violating, key=lambda node: value[node])
        into = above(top)
        members[into] += members.pop(top)
        group[members[into]] = into
        value[into] = _pooled(raised[members[into]], penalty)


def _pooled(raised: np.ndarray, penalty: float) -> float:
    """The value of one group (Proposition 2): the k largest entries pull, for the first k that leaves none above."""
    entries = np.sort(raised.ravel())[::-1]
    taken = np.arange(len(entries) + 1)
    value = np.concatenate([[0], np.cumsum(entries)]) / (penalty * len(raised) + taken)
    return float(value[np.argmax(value >= np.append(entries, -np.inf))])


# --- The parallel solver ---------------------------------------------------------------------------------------------
#
# Let g_t'(a) = penalty a - sum_i max(q_ti + 1/2 - a, 0) be the derivative of node t's own function, and
#     H_t'(a) = g_t'(a) + sum over children c of min(H_c'(a), 0)
# that of the best value of the whole subtree below t when a_t = a: a child follows its parent down, never up. H_t' is
# continuous, increasing and concave, and r_t, its root, is what t would be without anything above it. So the solution
# is a running minimum of r from the root. By concavity the tangent at any point lies above H_t', hence
#   (1) a Newton step from anywhere ends at or below the root, and from there on the steps climb to it, in finitely many
#       because H_t' is made of finitely many lines;
#   (2) the root of any sum of tangents is a lower bound on the root of the sum.
# Every node's own minimiser is found first, for all nodes at once. A node whose children have roots no greater is done
# (for q from a traversal that is every node: q_child <= q_parent implies r_child <= r_parent). For the others, level by
# level from the bottom up: H_c'(a) < 0 iff a < r_c, so the group that t would lead at height a are the nodes below it
# whose whole path from t has roots above a. Newton's method for t sums over these alone, and starts at the lower bound
# that (2) gives from the tangents known already. Rows of q that no group needs are not read; chunks of those that are
# keep shapes fixed.


@jax.custom_jvp
def _prune(q: Array, penalty: Array) -> tuple[Array, Array]:
    values, group, _ = _solve(q, penalty)
    return jnp.minimum(values, 1), group


def _support(q: Array, values: Array) -> Array:
    return (q > (values - 0.5)[:, None]) & ((values > 0) & (values < 1))[:, None]


# Inside a group G with support S the value is a = sum_S (q + 1/2) / (penalty |G| + |S|). Hence
#     da = (sum_S dq - |G| a dpenalty) / (penalty |G| + |S|).
@_prune.defjvp
def _prune_jvp(primals, tangents):
    (q, penalty), (dq, dpenalty) = primals, tangents
    values, group = _prune(q, penalty)
    support, size = _support(q, values), _over_groups(jnp.ones_like(values), group)
    slope = penalty * size + _over_groups(support.sum(1, dtype=values.dtype), group)
    change = _over_groups(jnp.where(support, dq, 0).sum(1), group) - size * values * dpenalty
    dvalues = jnp.where((values > 0) & (values < 1), change / slope, 0)
    return (values, group), (dvalues, _no_tangent(group))


def _no_tangent(whole: Array) -> Any:
    """What jax takes for the tangent of whole numbers."""
    return np.zeros(whole.shape, jax.dtypes.float0)


def _over_groups(per_node: Array, group: Array) -> Array:
    """For every node the sum over its group."""
    return jax.ops.segment_sum(per_node, group, len(group))[group]


def _excess(q: Array, level: Array) -> tuple[Array, Array]:
    """For each row, how much of ``q + 1/2`` lies above its level, and how many entries do."""
    above = q - (level - 0.5)[:, None]
    over = above > 0
    return jnp.where(over, above, 0).sum(1), over.sum(1, dtype=q.dtype)


def _above(a: Array, b: Array) -> Array:
    """Whether a is above b by more than rounding: nodes with equal rows of q, which a traversal has, are not to merge
    because their sums were rounded differently.
    """
    return a - b > 4 * jnp.finfo(a.dtype).eps * jnp.maximum(b, 1)


class _Own(NamedTuple):
    """Newton's method for every node by itself."""

    level: Array
    slope: Array
    climbs: Array
    passes: Array


def _own_minimisers(q: Array, penalty: Array) -> _Own:
    nodes = q.shape[0]

    def step(state: _Own) -> _Own:
        excess, count = _excess(q, state.level)
        slope = penalty + count
        new = state.level + (excess - penalty * state.level) / slope
        # At a slope of the line that the step has left; a greater one than that at the end.
        return _Own(jnp.maximum(new, state.level), slope, _above(new, state.level).any(), state.passes + 1)

    zero = jnp.zeros(nodes, q.dtype)
    first = _Own(zero, zero, jnp.ones((), bool), jnp.zeros((), jnp.int32))
    return jax.lax.while_loop(lambda state: state.climbs, step, first)


def _ancestors(depth: int) -> np.ndarray:
    """Of every node of the whole tree, its ancestor on each level above it, and -1 elsewhere: ``(depth, nodes)``."""
    node = np.arange(1, 2 ** (depth + 1))  # the root is 1 here: halving is going up
    own = np.array([int(i).bit_length() - 1 for i in node])
    up = own - np.arange(depth)[:, None]
    return np.where(up > 0, (node >> np.maximum(up, 0)) - 1, -1).astype(np.int32)


class _Merged(NamedTuple):
    """What is known when all levels below some level are done.

    ``lowest`` is, for each node, the least root on its path from that level; ``leads`` the topmost node to have it;
    ``slope`` that of H' at the root of its group's leader.
    """

    lowest: Array
    leads: Array
    slope: Array
    rows: Array  # of q that were read


@jax.jit
def _solve(q: Array, penalty: Array) -> tuple[Array, Array, Array]:
    """Values (not clipped to 1), groups, and how often all of q was read."""
    nodes = q.shape[0]
    own = _own_minimisers(q, penalty)
    passes = own.passes.astype(q.dtype)
    if nodes == 1:
        return own.level, jnp.zeros(1, jnp.int32), passes
    start = _Merged(own.level, jnp.arange(nodes, dtype=jnp.int32), own.slope, jnp.zeros((), q.dtype))

    def merge(state: _Merged) -> _Merged:
        above = jnp.asarray(_ancestors((nodes + 1).bit_length() - 2)[::-1])
        return jax.lax.scan(lambda at, ancestor: (_merge_level(q, penalty, at, ancestor), None), state, above)[0]

    violated = _above(own.level[1:], own.level[(np.arange(1, nodes) - 1) // 2]).any()
    merged = jax.lax.cond(violated, merge, lambda state: state, start)
    return merged.lowest, merged.leads, passes + merged.rows / nodes


class _Climb(NamedTuple):
    """Newton's method for the nodes of one level, each with the group that it would lead."""

    level: Array
    slope: Array
    busy: Array
    rows: Array


def _merge_level(q: Array, penalty: Array, state: _Merged, ancestor: Array) -> _Merged:
    """The roots of one level, those below being known. ``ancestor``: of each node on that level, or -1."""
    nodes = q.shape[0]
    node = jnp.arange(nodes, dtype=jnp.int32)
    left, right = jnp.minimum(2 * node + 1, nodes - 1), jnp.minimum(2 * node + 2, nodes - 1)
    here, below = (ancestor[left] == node) & (left > node), ancestor >= 0
    top = jnp.where(below, ancestor, node)

    # Where to start: the root of the sum of the tangents of the node and of those children that pull it up.
    level, slope = state.lowest, state.slope
    larger = jnp.where(level[left] >= level[right], left, right)
    for child in (larger, left + right - larger):
        pull = jnp.where(here & _above(state.lowest[child], level), state.slope[child], 0)
        slope += pull
        level += pull * (state.lowest[child] - level) / slope
    busy = here & (level > state.lowest)

    def climb(at: _Climb) -> _Climb:
        height = at.level[top]
        member = at.busy[top] & (here | (below & (state.lowest > height)))
        # No node but those of the level is read off, so that what others are summed with does not matter.
        excess, count, size = _over_subtrees(_excess_of(q, height, member)).T
        slope = jnp.where(at.busy, penalty * size + count, at.slope)
        new = jnp.where(at.busy, at.level + (excess - penalty * size * at.level) / slope, at.level)
        busy = at.busy & _above(new, at.level)
        return _Climb(jnp.maximum(new, at.level), slope, busy, at.rows + member.sum(dtype=q.dtype))

    done = jax.lax.while_loop(lambda at: at.busy.any(), climb, _Climb(level, slope, busy, state.rows))
    root = done.level[top]
    joins = below & _above(state.lowest, root)
    return _Merged(
        jnp.where(here, root, jnp.minimum(state.lowest, jnp.where(below, root, jnp.inf))),
        jnp.where(joins, top, state.leads),
        jnp.where(here, done.slope, state.slope),
        done.rows,
    )


def _excess_of(q: Array, level: Array, member: Array) -> Array:
    """:func:`_excess` of the rows that are members, and 1; 0 for others, which are not read: ``(nodes, 3)``."""
    nodes, n = q.shape
    chunk = blocking.chunk_of_rows(nodes, n)
    rows = jnp.nonzero(member, size=-(-nodes // chunk) * chunk, fill_value=nodes)[0]

    def read(i: Array, out: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(rows, i * chunk, chunk)
        excess, count = _excess(q.at[row].get(mode="clip"), level.at[row].get(mode="clip"))
        return out.at[row].set(jnp.stack([excess, count, jnp.ones_like(count)], axis=1), mode="drop")

    trips = -(-member.sum(dtype=jnp.int32) // chunk)
    return jax.lax.fori_loop(0, trips, read, jnp.zeros((nodes, 3), q.dtype))


def _over_subtrees(per_node: Array) -> Array:
    """For every node the sum over its subtree, by pairs: rounding grows with the depth, not with the nodes."""
    *upper, total = topology.levels(per_node)
    out = [total]
    for here in reversed(upper):
        total = here + topology.pairs(total).sum(1)
        out.append(total)
    return jnp.concatenate(out[::-1])


# --- Weighted least squares under the order of any tree --------------------------------------------------------------


def tree_isotonic(
    weights: Float[Array, " nodes"], targets: Float[Array, " nodes"], *, parent: ArrayLike | None = None
) -> Float[Array, " nodes"]:
    """The minimiser of ``sum_t weights_t (a_t - targets_t)^2`` with no node above its parent.

    Isotonic regression on a tree (Pardalos & Xue, 1999), or a forest; on a chain it is the usual one, falling. Exact:
    violators are pooled, the largest first, in one compiled loop of at most ``nodes`` rounds of O(nodes) work.
    Differentiable with respect to weights and targets, in both modes and repeatedly.

    Args:
      weights: above 0.
      targets: what the values should be near.
      parent: number of each node's parent, -1 for a root; known when compiling. ``np.arange(nodes) - 1`` is a chain. By
        default the perfect binary tree, breadth first.

    Raises:
      ValueError: for shapes that differ, weights not above 0, targets that are not finite, or parents that are no tree.
    """
    targets = jnp.asarray(targets)
    if targets.ndim != 1 or not len(targets) or not jnp.issubdtype(targets.dtype, jnp.floating):
        raise ValueError(f"targets must be floating, of shape (nodes,), got {targets.dtype} of shape {targets.shape}")
    work = _working(targets.dtype)
    weights = jnp.asarray(weights).astype(work)
    if weights.shape != targets.shape:
        raise ValueError(f"weights must have the shape of targets, {targets.shape}, got {weights.shape}")
    validation.check_finite("targets", targets)
    validation.check_number("weights", weights)
    # Only their ratios matter: those of size one do not overflow when they are summed.
    weights /= jax.lax.stop_gradient(weights.max())
    return _pool(weights, targets.astype(work), _checked_parent(parent, len(targets)))[0].astype(targets.dtype)


def _checked_parent(parent: Any, nodes: int) -> tuple[int, ...]:
    if parent is None:
        if nodes & (nodes + 1):
            raise ValueError(f"targets must have 2**(depth + 1) - 1 entries unless parent is given, got {nodes}")
        return tuple(((np.arange(nodes) - 1) // 2).tolist())
    above = np.asarray(parent)
    if above.shape != (nodes,) or above.dtype.kind not in "iu" or (above < -1).any() or (above >= nodes).any():
        raise ValueError(f"parent must hold a number from -1 to {nodes - 1} for each of {nodes} nodes, got {parent!r}")
    climbing = above
    for _ in range(nodes.bit_length()):  # doubling the steps: after them every path has ended, or there is a circle
        climbing = np.where(climbing >= 0, climbing[climbing], -1)
    if (climbing >= 0).any():
        raise ValueError(f"parent must be a tree, got a circle through node {int(np.argmax(climbing >= 0))}")
    return tuple(above.tolist())


@partial(jax.custom_jvp, nondiff_argnums=(2,))
@partial(jax.jit, static_argnums=2)
def _pool(weights: Array, targets: Array, parent: tuple[int, ...]) -> tuple[Array, Array]:
    nodes, above = len(parent), jnp.asarray(parent, jnp.int32)
    node = jnp.arange(nodes, dtype=jnp.int32)

    def violation(state):
        group, weight, total = state
        value = total / weight
        over = (group == node) & (above >= 0) & (value > value[group[above]])
        return over.any(), jnp.argmax(jnp.where(over, value, -jnp.inf)).astype(jnp.int32)

    def merge(state):
        group, weight, total = state
        _, top = violation(state)
        into = group[above[top]]
        return jnp.where(group == top, into, group), weight.at[into].add(weight[top]), total.at[into].add(total[top])

    state = jax.lax.while_loop(lambda state: violation(state)[0], merge, (node, weights, weights * targets))
    return (state[2] / state[1])[state[0]], state[0]


# The value of a group is the mean of its targets by weight: da = sum_G (w dy + (y - a) dw) / sum_G w.
@_pool.defjvp
def _pool_jvp(parent, primals, tangents):
    (weights, targets), (dweights, dtargets) = primals, tangents
    values, group = _pool(weights, targets, parent)
    change = _over_groups(weights * dtargets + (targets - values) * dweights, group)
    dvalues = change / _over_groups(weights, group)
    return (values, group), (dvalues, _no_tangent(group))
