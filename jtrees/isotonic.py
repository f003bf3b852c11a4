"""The isotonic projection ordered by a tree: no node is above its parent.

``prune`` is LatentTree's pruning layer (Zantedeschi et al., "Learning Binary Decision Trees by Argmin Differentiation",
ICML 2021, eq. 4), solved exactly and in parallel.

The solution is constant on groups of nodes, and its derivative averages over a group. The tangent of the solution is
therefore linear in the tangents of the inputs. One rule gives forward mode, reverse mode and second derivatives.
"""

from collections.abc import Callable
from functools import partial
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jtrees import blocking, topology, validation

__all__ = ["prune"]


def prune(
    q: Float[Array, "nodes n"],
    penalty: float | Array,
    weight: Float[Array, " n"] | None = None,
    *,
    nested: bool = False,
) -> Float[Array, " nodes"]:
    """Returns the activity of each node of a tree: LatentTree's pruning layer.

    The activity is the minimiser over ``0 <= a <= 1`` with ``a_t <= a_parent(t)`` of

        sum_t  penalty / 2  a_t^2  +  1/2 sum_i weight_i max(q_ti + 1/2 - a_t, 0)^2        (eq. 4, where weights are 1)

    The relative error is small even for tiny values, and no value exceeds the value of its parent. The activity is
    differentiable with respect to q, penalty and weight, in forward and reverse mode and repeatedly. At ties and at the
    ends of [0, 1], the derivative is the paper's (an element of Clarke's generalised gradient). For a weight of 0 it is
    the right derivative.

    Args:
      q: rewards of sending each sample to each node of the *whole* tree, including leaves, breadth first: ``nodes`` is
        ``2**(depth + 1) - 1``. Any floating dtype is allowed. The computation uses at least 32 bits.
      penalty: penalty of an active node, above 0. It may be traced.
      weight: weight of each sample, at least 0; by default 1.
      nested: whether no reward is above the reward of the node's parent, as in a traversal
        (:func:`jtrees.routing.rewards`). This is not checked. If True, no nodes are merged, and the program is half as
        large.

    Raises:
      ValueError: if q does not have the shape of a tree, or if a value is infinite or NaN. If the penalty is not above
        0. If weights are negative or do not match the samples.

    Example:
      >>> q = jnp.array([[1.0, 1.0], [-0.8, -1.0], [0.3, 0.6]])  # the root, its left and its right child
      >>> print(np.asarray(jtrees.isotonic.prune(q, 0.5)).round(2))
      [1.   0.   0.76]
    """
    dtype, *arguments = _checked(q, penalty, weight)
    return prune_with_groups(*arguments, nested)[0].astype(dtype)


def _checked(q: Any, penalty: Any, weight: Any) -> tuple[Any, Array, Array, Array | None]:
    """Returns the dtype of q, and the three arguments in the dtype of the computation."""
    q = jnp.asarray(q)
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"q must be of a floating dtype, got {q.dtype}")
    nodes = q.shape[0] if q.ndim else 0
    if q.ndim != 2 or nodes & (nodes + 1) or 0 in q.shape:
        raise ValueError(
            f"q must have shape (2**(depth + 1) - 1, n), a row for every node of the whole tree, got {q.shape}"
        )
    validation.check_finite("q", q)
    validation.check_number("penalty", penalty, above=0)
    if weight is not None:
        validation.check_numbers("weight", weight, least=0)
        if np.shape(weight) != q.shape[1:]:
            raise ValueError(f"weight must have shape {q.shape[1:]}, one a column of q, got {np.shape(weight)}")
    work = np.promote_types(q.dtype, np.float32)
    limit = float(jnp.finfo(work).max) / (4 * q.size)
    size = lambda array: 1.0 if validation.is_traced(array) else max(1.0, float(np.abs(np.asarray(array, float)).max()))
    if size(q) * size(1.0 if weight is None else weight) > limit:
        raise ValueError(f"q, also times its weight, must be within +-{limit:.2g} in {work.name}, or its sums overflow")
    if not validation.is_traced(penalty) and not float(jnp.finfo(work).tiny) <= float(penalty) <= limit:
        raise ValueError(
            f"penalty must be a normal number of {work.name} up to {limit:.2g}, got {validation.quoted(penalty)}"
        )
    cast = lambda array: jnp.asarray(array).astype(work)
    return q.dtype, cast(q), cast(penalty), None if weight is None else cast(weight)


# --- The parallel solver ---------------------------------------------------------------------------------------------
#
# Let g_t'(a) = penalty a - sum_i w_i max(q_ti + 1/2 - a, 0) be the derivative of the objective of node t. Let
#     H_t'(a) = g_t'(a) + sum over children c of min(H_c'(a), 0)
# be the derivative of the best objective of the subtree of t, given a_t = a. A child follows its parent down, never
# up. H_t' is continuous, increasing and concave, and its root r_t is the value of t without its ancestors. The solution
# is therefore a running minimum of r from the root of the tree. By concavity the tangent at any point lies above H_t'.
# Hence
#   (1) a Newton step from anywhere ends at or below the root, and all further steps climb towards the root. There are
#       finitely many steps because H_t' consists of finitely many lines;
#   (2) the root of any sum of tangents is a lower bound on the root of the sum.
# The solver first finds the own minimiser of every node, for all nodes at once. A node is finished if no child has a
# larger root. (For q from a traversal all nodes are finished: q_child <= q_parent implies r_child <= r_parent.) The
# solver then visits the other nodes level by level from the bottom up. H_c'(a) < 0 iff a < r_c. The group that t would
# lead at height a therefore has the nodes below t with all roots on the path from t above a. Newton's method for t sums
# over this group alone. It starts at the lower bound (2) from the tangents that are already known. Only rows of q that
# a group needs are read, in chunks, which keeps shapes fixed. Small values of q + 1/2 are exact because this sum is
# formed first, so roots are accurate relative to them.


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def prune_with_groups(q: Array, penalty: Array, weight: Array | None, nested: bool) -> tuple[Array, Array]:
    """Returns the activity, and the topmost node of each node's group."""
    values, group, _ = _solve(q, penalty, weight, nested=nested)
    return jnp.minimum(values, 1), group


# Let G be a group with support S. Its value is a = sum_S w (q + 1/2) / (penalty |G| + sum_S w). Hence
#     da = (sum_S (w dq + (q + 1/2 - a) dw) - |G| a dpenalty) / (penalty |G| + sum_S w).
@prune_with_groups.defjvp
def _prune_jvp(nested, primals, tangents) -> Any:
    (q, penalty, weight), (dq, dpenalty, dweight) = primals, tangents
    values, group = prune_with_groups(q, penalty, weight, nested)
    above = (q + 0.5) - values[:, None]
    change = dq if weight is None else weight * dq + above * dweight
    size = _over_groups(jnp.ones_like(values), group)
    change = _over_groups(jnp.where(above > 0, change, 0).sum(1), group) - size * values * dpenalty
    slope = penalty * size + _over_groups(_excess(q, values, weight)[1], group)
    dvalues = jnp.where((values > 0) & (values < 1), change / slope, 0)
    return (values, group), (dvalues, np.zeros(group.shape, jax.dtypes.float0))


def _over_groups(per_node: Array, group: Array) -> Array:
    return jax.ops.segment_sum(per_node, group, len(group))[group]


def _excess(q: Array, level: Array, weight: Array | None = None) -> tuple[Array, Array]:
    """Returns the weighted sum of the excess of ``q + 1/2`` over the level of each row, and the weight of its terms."""
    above = (q + 0.5) - level[:, None]
    weight = jnp.ones((), q.dtype) if weight is None else weight
    return (jnp.where(above > 0, above, 0) * weight).sum(1), jnp.where(above > 0, weight, 0).sum(1)


def _just_above(a: Array) -> Array:
    """Returns the largest value treated as equal to a, so that rounding alone does not merge nodes."""
    return a * (1 + 4 * jnp.finfo(a.dtype).eps)


def _climb(state: tuple[Array, ...], penalty: Array, sums: Callable[[Array, Array], tuple[Array, ...]]) -> Any:
    """Runs Newton's method for many nodes at once, each with the group that it would lead.

    A step starts just above the current level, which (1) allows. The iteration of a node ends when a step does not
    exceed its start, so that the root lies in between. The size of a step is no stopping criterion: many entries tied
    just above the level make a step small even far from the root.

    ``state`` holds initial levels, slopes of the tangents with these roots, active nodes, and the number of rows of q
    read. ``sums(height, busy)`` returns excess, count and size of each group at a height, and the number of rows read.
    """

    def step(state):
        level, slope, busy, rows = state
        height = _just_above(level)
        excess, count, size, read = sums(height, busy)
        steep = penalty * size + count
        new = height + (excess - penalty * size * height) / jnp.where(busy, steep, 1)
        rises = busy & ~(new <= level)  # a NaN goes through
        return jnp.where(rises, new, level), jnp.where(rises, steep, slope), busy & (new > height), rows + read

    return jax.lax.while_loop(lambda state: state[2].any(), step, state)


class _Merged(NamedTuple):
    """The state of all nodes after the levels below a level are finished."""

    lowest: Array  # the smallest root on the path of a node from the level
    leads: Array  # the topmost node with this root: the leader of the group of the node
    slope: Array  # for leaders, the slope of a tangent of H' with this root
    rows: Array  # number of rows of q read so far


@partial(jax.jit, static_argnames="nested")
def _solve(
    q: Array, penalty: Array, weight: Array | None = None, *, nested: bool = False
) -> tuple[Array, Array, Array]:
    """Returns values (not clipped to 1), groups, and the number of passes over q."""
    nodes, unit, zero = q.shape[0], jnp.ones((), q.dtype), jnp.zeros(q.shape[0], q.dtype)
    node_sums = lambda height, busy: (*_excess(q, height, weight), unit, nodes * unit)
    level, slope, _, rows = _climb((zero, zero + penalty, jnp.ones(nodes, bool), 0 * unit), penalty, node_sums)
    parent, depth = np.maximum(np.arange(nodes) - 1, 0) // 2, (nodes + 1).bit_length() - 2

    def merge(state: _Merged) -> _Merged:
        upwards = jnp.arange(depth, dtype=jnp.int32)[::-1]
        merge_level = lambda state, level: (_merge_level(q, penalty, weight, state, level), None)
        return jax.lax.scan(merge_level, state, upwards)[0]

    fall = lambda _, lowest: jnp.minimum(lowest, lowest[parent])
    keep = lambda state: state._replace(lowest=jax.lax.fori_loop(0, depth, fall, state.lowest))
    alone = _Merged(level, jnp.arange(nodes, dtype=jnp.int32), slope, rows)
    # The roots of nested rows are nested up to rounding.
    solution = keep(alone) if nested else jax.lax.cond((level > _just_above(level[parent])).any(), merge, keep, alone)
    return solution.lowest, solution.leads, solution.rows / nodes


def _merge_level(q: Array, penalty: Array, weight: Array | None, state: _Merged, depth: Array) -> _Merged:
    """Returns the state with the roots of a level, from the roots of the levels below."""
    nodes = q.shape[0]
    node = jnp.arange(nodes, dtype=jnp.int32)
    left, right = jnp.minimum(2 * node + 1, nodes - 1), jnp.minimum(2 * node + 2, nodes - 1)
    further = np.log2(np.arange(1, nodes + 1)).astype(np.int32) - depth
    on_level, below = further == 0, further > 0
    top = jnp.where(below, ((node + 1) >> jnp.maximum(further, 0)) - 1, node)  # in numbers from 1, n // 2 is the parent

    # The initial level is the root of the summed tangents of the node and of the children that pull it up.
    level, slope = state.lowest, state.slope
    larger = jnp.where(level[left] >= level[right], left, right)
    pulled = on_level & (level[larger] > _just_above(level))
    for child in (larger, left + right - larger):
        pull = jnp.where(on_level & (state.lowest[child] > _just_above(level)), state.slope[child], 0)
        slope += pull
        level += pull * (state.lowest[child] - level) / slope

    def sums(height: Array, busy: Array) -> tuple[Array, ...]:
        member = busy[top] & (on_level | (below & (state.lowest > height[top])))
        return *_over_subtrees(_excess_of(q, height[top], weight, member)).T, member.sum(dtype=q.dtype)

    level, slope, _, rows = _climb((level, slope, pulled, state.rows), penalty, sums)
    root = level[top]
    lowest = jnp.where(on_level, root, jnp.minimum(state.lowest, root))
    leads = jnp.where(below & (state.lowest > _just_above(root)), top, state.leads)
    return _Merged(lowest, leads, jnp.where(on_level, slope, state.slope), rows)


def _excess_of(q: Array, level: Array, weight: Array | None, member: Array) -> Array:
    """Returns :func:`_excess` of the member rows, and 1: ``(nodes, 3)``. Other rows are 0 and are not read."""
    nodes, n = q.shape
    chunk = blocking.chunk_of_rows(nodes, n)
    rows = jnp.sort(jnp.where(member, jnp.arange(nodes), nodes))

    def read(i: Array, out: Array) -> Array:
        row = jax.lax.dynamic_slice_in_dim(rows, i * chunk, chunk)  # the last chunk may overlap the previous one
        excess, count = _excess(q.at[row].get(mode="clip"), level.at[row].get(mode="clip"), weight)
        return out.at[row].set(jnp.stack([excess, count, jnp.ones_like(count)], axis=1), mode="drop")

    trips = -(-member.sum(dtype=jnp.int32) // chunk)
    return jax.lax.fori_loop(0, trips, read, jnp.zeros((nodes, 3), q.dtype))


def _over_subtrees(per_node: Array) -> Array:
    """Returns the sum over the subtree of every node. Sums of pairs keep rounding errors proportional to the depth."""
    upwards = reversed(topology.levels(per_node))
    totals = itertools.accumulate(upwards, lambda below, level: level + topology.pairs(below).sum(1))
    return jnp.concatenate([*totals][::-1])
