"""Preconditioned searches: gradient descent on features whose correlations are removed.

A linear split of mapped features, ``w (x M) + b > 0``, is the split ``(M w) x + b > 0`` of the features themselves: an
invertible matrix M does not change the set of trees. It changes gradient descent, as a step on w moves the weights of x
by the gradient times ``M M^T``. If M is the identity, directions of small variance move by next to nothing, although
they may carry the target, as where features are nearly equal. If ``M = C^(-1/2)``, where C are the correlations of the
features, all directions move alike. C is shrunk towards the identity, ``(1 - s) I + s C``, as small eigenvalues are
noise, and so that C may be singular: at strength s = 0 features stay as they are, near 1 they become uncorrelated.
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
# A strength is preferred to none if its loss there is lower by this, relative, over the root of their number.
_MARGIN = 0.5
_FEWEST = 500  # rows of a table below which those held out are too few to compare strengths
_UNCORRELATED = 0.3  # smallest eigenvalue from which on features are as good as uncorrelated, and nothing is compared
_FEWEST_EARLY = 100  # likewise to stop early
WIDEST = 512  # features beyond which the default strength is 0, as the matrix costs p^2 numbers
_PATIENCE = 4  # a trial of early stopping ends after this part of its steps without a lower loss


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


class Prepared(NamedTuple):
    """What ``prepare`` returns.

    Attributes:
      spectrum: of the features.
      held_out: rows held out of trials, ``(n,)``.
      correlated: whether preconditioning may matter.
      starts: the base's ``prepare`` on features preconditioned by each strength, stacked.
    """

    spectrum: Spectrum
    held_out: Array
    correlated: Array
    starts: Any


class Trials(NamedTuple):
    """The state of a search that tries several strengths, one after the other, before a final run.

    Attributes:
      prepared: what ``prepare`` returned.
      key: key of all runs.
      run: state of the current run.
      chosen: index of its strength.
      losses: loss of each trial on the rows held out; infinite before, and if it was not run.
      steps: number of updates before each of these.
    """

    prepared: Prepared
    key: Array
    run: Any
    chosen: Array
    losses: Array
    steps: Array

    def best(self) -> Array:
        """Returns the index of the best strength, or of the first if none is clearly better."""
        best, rows = jnp.argmin(self.losses), self.prepared.held_out.sum()
        better = self.losses[best] < (1 - _MARGIN / jnp.sqrt(jnp.maximum(rows, 1))) * self.losses[0]
        return jnp.where(better, best, 0).astype(jnp.int32)


def preconditioned(
    base: Search, strength: float | str, shape: tuple[int, int], *, trial: float = 1.0, stop_early: bool = False
) -> Search:
    """Returns the search on preconditioned features.

    With several strengths, or to stop early, the search has a stage for each, a trial that is trained on four fifths of
    the rows (on all if there is a validation set) and evaluated on the others (on the validation set), and a last stage
    on all rows, with the best strength. To stop early, strengths above 0 are not tried where the smallest eigenvalue of
    the correlations is large.

    The report also has ``precondition``, the strength, and ``trials``, the loss of each trial (infinite if not run), on
    scaled data.

    Args:
      base: the search, of one stage; its models have ``composed``.
      strength: at least 0 and below 1; ``"auto"``: the best of 0, 0.9 and 0.99 in a trial.
      shape: shape of the features.
      trial: length of a trial, as a part of the base's steps.
      stop_early: whether the last run ends after as many updates as the best trial had before its lowest loss, which
        then is evaluated once an epoch. The state of the base is a :class:`jtrees.training.TrainState`.
    """
    n, p = shape
    strength = 0.0 if strength == "auto" and (n < _FEWEST or p > WIDEST) else strength
    stop_early = stop_early and n >= _FEWEST_EARLY
    if strength == 0 and not stop_early:
        return base
    strengths = np.array(TRIED if strength == "auto" else (strength,), np.float32)
    trials = len(strengths) if strength == "auto" or stop_early else 0

    def prepare(batch: Batch, *, key: Array) -> Prepared:
        of = spectrum(batch)
        rows = np.arange(len(batch.x)) if batch.weight is None else np.flatnonzero(np.asarray(batch.weight) > 0)
        drawn = np.random.default_rng(np.asarray(jax.random.key_data(key))).permutation(rows)
        held_out = np.isin(np.arange(len(batch.x)), drawn[: int(_HELD_OUT * len(rows))])
        mapped = [batch._replace(x=np.asarray(batch.x) @ matrix(of, s)) for s in strengths]
        starts = jax.tree.map(lambda *a: np.stack(a), *(base.prepare(one, key=key) for one in mapped))
        return Prepared(of, held_out, np.asarray(of.values[0] < _UNCORRELATED), starts)  # type: ignore[arg-type]

    def mapped(state: Trials, batch: Batch) -> tuple[Batch, Array]:
        """Returns a batch with preconditioned features, and the matrix."""
        m = matrix(state.prepared.spectrum, jnp.asarray(strengths)[state.chosen])
        return batch._replace(x=jnp.matmul(batch.x, m, precision="highest")), m

    def parts(state: Trials, batch: Batch, validation: Batch | None, in_trial: Any) -> tuple[Batch, Batch]:
        """Returns the preconditioned rows to train on and to evaluate on."""
        data = mapped(state, batch)[0]
        if validation is not None:
            return data, mapped(state, validation)[0]
        weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
        held_out = state.prepared.held_out
        inside = jnp.where(held_out & in_trial, 0, weight)
        return data._replace(weight=inside), data._replace(weight=jnp.where(held_out, weight, 0))

    def start(state: Trials, data: Batch) -> Any:
        prepared = jax.tree.map(lambda a: a[state.chosen], state.prepared.starts)
        return base.init(prepared, data, key=state.key)

    def init(prepared: Prepared, batch: Batch, *, key: Array) -> Trials:
        prepared, zero = jax.tree.map(jnp.asarray, prepared), jnp.zeros((), jnp.int32)
        losses, steps = jnp.full(len(strengths), jnp.inf, batch.x.dtype), jnp.zeros(len(strengths), jnp.int32)
        state = Trials(prepared, key, None, zero, losses, steps)
        return state._replace(run=start(state, parts(state, batch, None, trials > 0)[0]))

    def is_needed(state: Trials, stage: Array) -> Array:
        return state.prepared.correlated | (stage == 0) | (stage >= trials) if stop_early else jnp.ones((), bool)

    def limit(state: Trials, i: Array, rounds: Rounds) -> Array:
        """Returns the number of updates after which the stage of round i takes no more."""
        in_trial, before = i // rounds.rounds_per_stage < trials, rounds.steps_before(i)
        last: Any = rounds.steps
        most: Any = math.ceil(trial * rounds.steps)
        if stop_early:
            diverged = jnp.isinf(state.losses[state.chosen])  # and so will the last run, which raises
            last = jnp.where(diverged, last, state.steps[state.chosen])
            most = jnp.where(before - state.run.best.step > rounds.steps // _PATIENCE, before, most)
            most = jnp.where(is_needed(state, i // rounds.rounds_per_stage), most, 0)
        return jnp.where(in_trial, most, last)

    # Under vmap, neither branches nor numbers of steps may depend on the state: both branches would be taken, and steps
    # would cost several times as much. Those of early stopping do.
    def one_round(i: Array, state: Trials, batch: Batch, validation: Batch | None, rounds: Rounds) -> Any:
        stage, place = i // rounds.rounds_per_stage, i % rounds.rounds_per_stage
        in_trial = stage < trials
        state = state._replace(chosen=jnp.where(in_trial, stage, state.best()).astype(jnp.int32))
        data, by = parts(state, batch, validation, in_trial)
        by_base = by if stop_early or validation is not None else None
        if not trials:
            run, losses = base.round(i, state.run, data, by_base, rounds)
            return state._replace(run=run), losses
        run = jax.lax.cond((place == 0) & (stage > 0), lambda: start(state, data), lambda: state.run)
        limited = rounds._replace(limit=limit(state._replace(run=run), i, rounds))
        run, losses = base.round(i, run, data, by_base, limited)

        def evaluated() -> tuple[Array, Array]:
            result = base.result(run, data, by)
            return jnp.where(jnp.isfinite(result.score), result.score, jnp.inf), result.step

        ended = in_trial & (place == rounds.rounds_per_stage - 1)
        loss, step = jax.lax.cond(ended, evaluated, lambda: (state.losses[0], state.steps[0]))
        here = ended & is_needed(state, stage) & (jnp.arange(len(strengths)) == stage)
        results = {"losses": jnp.where(here, loss, state.losses), "steps": jnp.where(here, step, state.steps)}
        return state._replace(run=run, **results), losses

    def result(state: Trials, batch: Batch, validation: Batch | None) -> SearchResult:
        data, m = mapped(state, batch)
        by = None if validation is None else mapped(state, validation)[0]
        result = base.result(state.run, data, by)
        extra = composed(result.extra, m), state.losses, jnp.asarray(strengths)[state.chosen]
        return result._replace(model=composed(result.model, m), extra=extra)

    def finish(result: SearchResult, prepared: Prepared, data: Data, **of_run: Any) -> Finished:
        extra, losses, chosen = result.extra
        finished = base.finish(result._replace(extra=extra), None, data, **of_run)
        report = {"precondition": float(chosen), "trials": np.asarray(losses)}
        return finished._replace(report=finished.report | report)

    functions: Any = {"init": init, "round": one_round, "result": result, "finish": finish, "prepare": prepare}
    return base._replace(rounds=base.rounds._replace(stages=trials + 1, trials=trials), **functions)
