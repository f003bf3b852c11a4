"""Preconditioned searches: gradient descent on features whose correlations are removed.

A linear split of mapped features, ``w (x M) + b > 0``, is the split ``(M w) x + b > 0`` of the features themselves, so an
invertible matrix M changes nothing about the trees that can be learnt. It changes gradient descent: a step on w moves the
weights of x by the gradient times ``M M^T``. Directions of small variance, which carry the target where features are
nearly equal, move by next to nothing when M is the identity, and as far as all others when
``M = C^(-1/2)``, where C are the correlations of the features. C is shrunk towards the identity,
``(1 - s) I + s C``, as small eigenvalues are noise, and so that C may be singular. The strength s is 0 for no change and
near 1 for uncorrelated features.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jtrees.data import Data, without_padding
from jtrees.search.recipe import Finished, Rounds, Search, SearchResult
from jtrees.training import Batch

TRIED = (0.0, 0.9, 0.99)  # strengths to choose from
_HELD_OUT = 0.2  # part of the rows that strengths are compared on
_MARGIN = 0.5  # relative, times 1 / sqrt(rows left out): a strength that is better by less is not preferred to a smaller
_FEWEST = 500  # rows of a table below which the rows left out are too few to compare strengths
WIDEST = 512  # features beyond which the default is not to precondition: the matrix costs p^2 numbers


class Spectrum(NamedTuple):
    """Eigenvalues ``(p,)`` and eigenvectors ``(p, p)`` of the correlations of the features."""

    values: Float[Array, " p"]
    vectors: Float[Array, "p p"]


def spectrum(batch: Batch) -> Spectrum:
    """Returns the spectrum of a NumPy batch; constant features are uncorrelated with all others."""
    x, _, weight = without_padding(batch)
    x = np.asarray(x, np.float64)
    share = np.ones(len(x)) if weight is None else np.asarray(weight, np.float64)
    x = x - np.average(x, axis=0, weights=share)
    covariance = (x.T * share) @ x / share.sum()
    deviation = np.sqrt(np.diag(covariance))
    unit = np.where(deviation > 0, deviation, 1)
    correlations = covariance / np.outer(unit, unit)
    np.fill_diagonal(correlations, 1)
    values, vectors = np.linalg.eigh(correlations)
    return Spectrum(np.maximum(values, 0).astype(np.float32), vectors.astype(np.float32))  # type: ignore[arg-type]


def matrix(of: Spectrum, strength: Any, power: float = -0.5) -> Any:
    """Returns ``((1 - strength) I + strength C) ** power``, ``(p, p)``."""
    xp: Any = np if isinstance(of.vectors, np.ndarray) else jnp
    if isinstance(strength, np.floating) and strength == 0:
        return xp.eye(len(of.values), dtype=of.vectors.dtype)
    return xp.matmul(of.vectors * (1 - strength + strength * of.values) ** power, of.vectors.T)


def composed(model: Any, with_matrix: Array) -> Any:
    """Returns the models within a pytree as functions of x instead of ``x @ with_matrix``."""
    is_model = lambda one: hasattr(one, "composed")
    return jax.tree.map(lambda one: one.composed(with_matrix) if is_model(one) else one, model, is_leaf=is_model)


class Trials(NamedTuple):
    """The state of a search that tries several strengths, one after the other, and ends with the best.

    Attributes:
      spectrum: of the features.
      starts: the base's ``prepare`` for each strength, stacked.
      held_out: rows that are left out in trials, ``(n,)``.
      key: key of each of the base's runs.
      inner: state of the current run.
      losses: loss of each trial on the rows left out; infinite before.
      steps: number of updates before the lowest loss of each trial.
      chosen: index of the current strength.
    """

    spectrum: Spectrum
    starts: Any
    held_out: Array
    key: Array
    inner: Any
    losses: Array
    steps: Array
    chosen: Array


def preconditioned(
    base: Search, strength: float | None, shape: tuple[int, int], *, trial: float = 1.0, stop_early: bool = False
) -> Search:
    """Returns the search on preconditioned features.

    Args:
      base: the search; its models have ``composed``.
      strength: 0: none, below 1; None: the best of three, by runs on four fifths of the rows.
      shape: shape of the features.
      trial: length of a run that is compared, as a part of the base's steps.
      stop_early: whether the final run ends after as many steps as gave the lowest loss on the rows left out.
    """
    n, p = shape
    strength = 0.0 if strength is None and (n < _FEWEST or p > WIDEST) else strength
    if strength == 0 and not stop_early:
        return base
    assert base.rounds.stages == 1
    strengths = np.array(TRIED if strength is None else (strength,), np.float32)
    trials = len(strengths) if len(strengths) > 1 or stop_early else 0

    def prepare(batch: Batch, *, key: Array) -> Any:
        found, weight = spectrum(batch), batch.weight
        real = np.ones(len(batch.x), bool) if weight is None else np.asarray(weight) > 0
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        rows = rng.permutation(np.flatnonzero(real))
        held_out = np.zeros(len(batch.x), bool)
        held_out[rows[: int(_HELD_OUT * len(rows))]] = True
        mixed = lambda s: batch._replace(x=np.asarray(batch.x) @ matrix(found, s))
        starts = [base.prepare(mixed(s), key=key) for s in strengths]
        return found, held_out, jax.tree.map(lambda *a: np.stack([np.asarray(one) for one in a]), *starts)

    def data_of(state: Trials, batch: Batch, trial: Any) -> tuple[Batch, Batch, Array]:
        m = matrix(state.spectrum, jnp.asarray(strengths)[state.chosen])
        weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
        x = jnp.matmul(batch.x, m, precision="highest")
        inside = jnp.where(state.held_out & trial, 0, weight)
        return Batch(x, batch.y, inside), Batch(x, batch.y, jnp.where(state.held_out, weight, 0)), m

    def start_of(state: Trials) -> Any:
        return jax.tree.map(lambda a: a[state.chosen], state.starts)

    def init(start: Any, batch: Batch, *, key: Array) -> Trials:
        found, held_out, starts = jax.tree.map(jnp.asarray, start)
        losses = jnp.full(len(strengths), jnp.inf, batch.x.dtype)
        steps = jnp.zeros(len(strengths), jnp.int32)
        state = Trials(found, starts, held_out, key, None, losses, steps, jnp.zeros((), jnp.int32))
        data, _, _ = data_of(state, batch, jnp.asarray(trials > 0))
        return state._replace(inner=base.init(start_of(state), data, key=key))

    def one_round(i: Array, state: Trials, batch: Batch, validation: Batch | None, rounds: Rounds) -> Any:
        stage, place = i // rounds.rounds_per_stage, i % rounds.rounds_per_stage
        in_trial = stage < trials
        best = _chosen(state)
        state = state._replace(chosen=jnp.where(in_trial, stage, best).astype(jnp.int32))
        data, held_out, m = data_of(state, batch, in_trial & (validation is None))
        by = None if validation is None else validation._replace(x=validation.x @ m)
        inner = state.inner
        if trials:
            again = (place == 0) & (stage > 0)
            inner = jax.lax.cond(again, lambda: base.init(start_of(state), data, key=state.key), lambda: inner)
            by = held_out if by is None else by
        if trials:
            last = state.steps[best] if stop_early else rounds.steps
            rounds = rounds._replace(limit=jnp.where(in_trial, math.ceil(trial * rounds.steps), last))
        inner, losses = base.round(i, inner, data, by if stop_early or validation is not None else None, rounds)
        if not trials:
            return state._replace(inner=inner), losses

        def compared() -> tuple[Array, Array]:
            found = base.result(inner, data, by)
            return jnp.where(jnp.isfinite(found.score), found.score, jnp.inf), found.step

        ended = in_trial & (place == rounds.rounds_per_stage - 1)
        loss, step = jax.lax.cond(ended, compared, lambda: (state.losses[0], state.steps[0]))
        here = ended & (jnp.arange(trials) == stage)
        found = {"losses": jnp.where(here, loss, state.losses), "steps": jnp.where(here, step, state.steps)}
        return state._replace(inner=inner, **found), losses

    def result(state: Trials, batch: Batch, validation: Batch | None) -> SearchResult:
        data, _, m = data_of(state, batch, jnp.zeros((), bool))
        by = None if validation is None else validation._replace(x=validation.x @ m)
        found = base.result(state.inner, data, by)
        extra = composed(found.extra, m), state.losses, jnp.asarray(strengths)[state.chosen]
        step = found.step + trials * math.ceil(trial * base.rounds.steps)
        return found._replace(model=composed(found.model, m), extra=extra, step=step)

    def finish(found: SearchResult, start: Any, data: Data, **of_run: Any) -> Finished:
        extra, losses, chosen = found.extra
        finished = base.finish(found._replace(extra=extra), start, data, **of_run)
        report = {"precondition": float(chosen), "precondition_losses": np.asarray(losses)}
        return finished._replace(report=finished.report | report)

    functions: Any = {"init": init, "round": one_round, "result": result, "finish": finish, "prepare": prepare}
    return base._replace(rounds=base.rounds._replace(stages=trials + 1), **functions)


def _chosen(state: Trials) -> Array:
    """Returns the index of the best strength, or of the first if none is clearly better."""
    best = jnp.argmin(state.losses)
    margin = 1 - _MARGIN / jnp.sqrt(jnp.maximum(state.held_out.sum(), 1))
    return jnp.where(state.losses[best] < margin * state.losses[0], best, 0)
