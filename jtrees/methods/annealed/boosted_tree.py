"""Trees of a boosted sum: the single start of a tree begins with CART over bins, and one program grows many trees."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import splitting
from jtrees.methods.annealed import stages
from jtrees.methods.annealed.starts import BINS, binned_cart
from jtrees.search import Problem, Run
from jtrees.search.cart import bin_edges
from jtrees.search.recipe import LARGEST_PROGRAM, GrowArguments
from jtrees.training import Best, TrainState
from jtrees.tree import ObliqueTree

_WIDEST = 64  # largest number of features that a tree splits


def grow_arguments(recipe: Any, problem: Problem) -> GrowArguments | None:
    """Returns the arguments of :func:`grow` for the trees of a sum; None if only the search finds such trees."""
    # There are two kinds of trees: CART, and trees that start from CART.
    n, p = problem.shape
    products = recipe.stages * recipe.updates * problem.recipe.rows_of_round(n) * 2**recipe.depth * min(p, _WIDEST)
    has_single_start = recipe.cart == "binned" and recipe.starts == 1 and recipe.precondition in (0, "auto")
    if products > LARGEST_PROGRAM or not has_single_start:
        return None
    edges = bin_edges(problem, BINS)
    codes = problem.computed_once(_bin_codes, problem.batch.x, edges)
    base, untrained, trained = problem.replace(recipe=recipe), np.bool_(False), np.bool_(True)
    draws = (lambda tree: (_sharpness(base, tree), untrained)), (lambda tree: (_sharpness(base, tree), trained))
    return GrowArguments(edges, codes, draws)


def grow(run: Run, edges: Array, codes: Array, draws: tuple[Array, Array]) -> tuple[ObliqueTree, Array]:
    """Returns the splits of the single start from CART over bins, and whether they are finite."""
    # `draws` are the sharpness of each stage, and whether the stages train. If not, CART makes the splits.
    sharpness, trains = draws
    p, is_wide = run.batch.x.shape[1], run.batch.x.shape[1] > _WIDEST
    if is_wide:
        columns = splitting.columns_by_covariance(run.batch, _WIDEST, run.key)
        rows_of = lambda batch: batch._replace(x=batch.x[:, columns])
        monotone = None if run.monotone is None else jnp.asarray(run.monotone)[columns]
        run = run.replace(batch=rows_of(run.batch), evaluation=rows_of(run.evaluation), monotone=monotone)
        edges, codes = edges[columns], codes[:, columns]
    is_drawn = jnp.any(run.batch.x != 0, axis=0)  # features that a tree leaves out are zero, and have one bin
    cart = binned_cart(run, edges, jnp.where(is_drawn, codes, 0))
    untrained = lambda: (cart, jnp.bool_(True))
    splits, finite = jax.lax.cond(trains, lambda: _trained_in_program(run, cart, sharpness), untrained)
    if is_wide:
        weights = jnp.zeros((len(splits.bias), p), splits.weights.dtype).at[:, columns].set(splits.weights)
        splits = splits.replace(weights=weights)
    return splits, finite


def _trained_in_program(run: Run, splits: ObliqueTree, sharpness: Array) -> tuple[ObliqueTree, Array]:
    """Returns what ``train_stages`` returns, within one program: the best splits, and whether they are finite."""
    updates = run.recipe.updates
    ends = jnp.asarray([*stages.evaluation_steps(updates, stages.updates_are_scored(run)), updates], jnp.int32)

    def stage(splits: ObliqueTree, sharpness: Array) -> tuple[ObliqueTree, Best]:
        def evaluated_and_advanced(part: Array, state: TrainState) -> TrainState:
            state, count = stages.evaluated(run, state, patience=1)[0], ends[part + 1] - ends[part]
            return stages.advanced(run, state, sharpness, jnp.float32(updates), ends[part], count)[0]

        state = stages.initial_state(run, splits)
        best = stages.best_of_stage(run, jax.lax.fori_loop(0, len(ends) - 1, evaluated_and_advanced, state))
        return best.params, best

    trees = jax.lax.scan(stage, splits, sharpness)[1]
    best = trees.score.argmin()
    return jax.tree.map(lambda a: a[best], trees.params), jnp.isfinite(trees.score).all()


def _bin_codes(x: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Returns the bin of each value of the features, ``(n, p)``: :func:`jtrees.splitting.codes_of` on the host."""
    codes = np.empty(x.shape, np.uint8)  # there are at most 256 bins
    for feature, column in enumerate(np.asarray(x).T):
        codes[:, feature] = np.searchsorted(edges[feature], column)
    return codes


def _sharpness(problem: Problem, tree: int) -> np.ndarray:
    """Returns the sharpness of the single start of a tree, ``(stages,)``: as in ``initial_starts``."""
    stages, (low, high) = problem.recipe.stages, problem.recipe.sharpness_ranges.T
    return low + (high - low) * problem.keyed(tree).rng("starts").random(2 * stages, np.float32)[stages:]
