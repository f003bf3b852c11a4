"""Least distance programming: finds the nearest point of a polyhedron, such as a leaf."""

from collections.abc import Iterator
import functools
import heapq

import numpy as np


def nearest_leaves(
    weights: np.ndarray, margins: np.ndarray, deviation: np.ndarray, targets: np.ndarray, bounds: np.ndarray
) -> Iterator[tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]]:
    """Yields the shortest step to the closure of each leaf, in deviations, and the constraints on the step.

    Shorter steps come first. The constraints are ``g step >= h`` with unit vectors g. ``margins`` are the scores of the
    sample, ``(nodes,)``; ``targets`` are the leaves that may be reached, ``(leaves,)`` bool; ``bounds`` are the lowest
    and the highest step of each feature, ``(2, p)``.
    """
    directions = weights * deviation
    length = np.sqrt(np.square(directions).sum(1))
    moves = length > 0  # all other nodes send every sample to the same side
    scale = np.where(moves, length, 1)
    directions, away = directions / scale[:, None], margins / scale
    nodes, sides = _paths(len(targets))
    fixed = np.where((margins[nodes] > 0) == (sides > 0), -np.inf, np.inf)
    distances = np.where(moves[nodes], -sides * away[nodes], fixed)
    lower_bounds = np.where(targets, distances.max(1).clip(0), np.inf)
    solved: list[tuple[float, int, np.ndarray, tuple[np.ndarray, np.ndarray]]] = []
    for leaf in [*np.argsort(lower_bounds, kind="stable").tolist(), -1]:
        bound = np.inf if leaf < 0 else lower_bounds[leaf]
        while solved and solved[0][0] <= bound:
            yield heapq.heappop(solved)[2:]
        if not np.isfinite(bound):
            break
        splits = moves[nodes[leaf]]
        path, side = nodes[leaf][splits], sides[leaf][splits]
        constraints = side[:, None] * directions[path], distances[leaf][splits]
        step = least_distance_within(*constraints, bounds)
        if step is not None:
            heapq.heappush(solved, (float(np.linalg.norm(step)), leaf, step, constraints))


@functools.cache
def _paths(leaves: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nodes on the path to each leaf, ``(leaves, depth)``, and the sides of the path, 1 for right."""
    depth = leaves.bit_length() - 1
    places = (np.arange(leaves)[:, None] + leaves) >> np.arange(depth, -1, -1)
    return places[:, :-1] - 1, np.where(places[:, 1:] % 2 == 1, 1.0, -1.0)


def least_distance_within(g: np.ndarray, h: np.ndarray, bounds: np.ndarray) -> np.ndarray | None:
    """Returns the shortest d with ``g d >= h`` within bounds, or None if there is none.

    The bounds, ``(2, p)``, include 0. A bound becomes a constraint only if a solution violates it, because most bounds
    never matter.
    """
    low, high = bounds
    below, above = np.zeros(len(low), bool), np.zeros(len(low), bool)
    while True:
        units = lambda features: np.float64(np.flatnonzero(features)[:, None] == np.arange(len(low)))
        sides = np.vstack([units(below), -units(above)])
        step = _least_distance(np.vstack([g, sides]), np.concatenate([h, low[below], -high[above]]))
        if step is None:
            return None
        lower, higher = (step < low) & ~below, (step > high) & ~above
        if not (lower | higher).any():
            return step.clip(low, high)
        below, above = below | lower, above | higher


def _least_distance(g: np.ndarray, h: np.ndarray) -> np.ndarray | None:
    """Returns the shortest d with ``g d >= h`` for unit vectors g, or None if there is none.

    The nearest point of the farthest half-space is the solution if it is in all half-spaces. Otherwise, let r be the
    residual of the least squares problem ``min ||[g^T; h^T] u - e||, u >= 0``, with e the last unit vector. Then
    ``d = -r[:-1] / r[-1]``. There is no solution if r is 0.
    """
    unit = float(h.max(initial=0))
    if unit <= 0:
        return np.zeros(g.shape[1])
    step = unit * g[h.argmax()]
    if (g @ step - h).min() >= -1e-12 * unit:
        return step
    from scipy.optimize import nnls  # a slow import; jax depends on SciPy, but does not import this module

    unit = np.abs(h).max()  # the problem is homogeneous; distances of 1 are best conditioned
    stacked, last = np.vstack([g.T, h / unit]), np.zeros(g.shape[1] + 1)
    last[-1] = 1
    residual = stacked @ nnls(stacked, last)[0] - last
    if residual[-1] > -1e-15:  # it is minus the squared length of the residual
        return None
    step = -unit * residual[:-1] / residual[-1]
    return step if (g @ step - h).min() >= -1e-6 * unit else None
