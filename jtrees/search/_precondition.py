"""Preconditioned searches: gradient descent on features whose correlations are removed.

A linear split of mapped features, ``w (x M) + b > 0``, is the split ``(M w) x + b > 0`` of the features themselves: an
invertible matrix M does not change the set of trees. It changes gradient descent, as a step on w moves the weights of x
by the gradient times ``M M^T``. If M is the identity, directions of small variance move by next to nothing, although
they may carry the target, as where features are nearly equal. If ``M = C^(-1/2)``, where C are the correlations of the
features, all directions move alike. C is shrunk towards the identity, ``(1 - s) I + s C``, as small eigenvalues are
noise, and so that C may be singular: at strength s = 0 features stay as they are, near 1 they become uncorrelated.
"""

from collections.abc import Callable
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jtrees.data import Data, without_padding
from jtrees.search.recipe import Finished, Round, Rounds, Search, SearchResult
from jtrees.training import Batch

TRIED = (0.0, 0.9, 0.99)  # strengths to choose from
_HELD_OUT = 0.2  # part of the rows that strengths are compared on
# A strength is preferred to none if its loss there is lower by this, relative, over the root of their number.
_MARGIN = 0.5
_FEWEST = 500  # rows of a table below which those held out are too few to compare strengths
_UNCORRELATED = 0.3  # smallest eigenvalue from which on features are as good as uncorrelated, and nothing is compared
_FEWEST_EARLY = 100  # likewise to stop early, or to hand over what a trial found
_FEW = 1024  # rows up to which there is a trial to hand over what it finds, as a fit is short
WIDEST = 512  # features beyond which the default strength is 0, as the matrix costs p^2 numbers
_PATIENCE = 4  # a trial of early stopping ends after this part of its steps without a lower loss
_TENTH = 10  # from one number of epochs after which a run may end to the next, at least one


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


def drawn_rows(batch: Batch, key: Array) -> np.ndarray:
    """Returns which rows of a NumPy batch to hold out, ``(n,)``: a fifth of those that have weight."""
    return drawn_folds(batch, key, 1) == 0


def drawn_folds(batch: Batch, key: Array, folds: int) -> np.ndarray:
    """Returns the fold of each row of a NumPy batch, ``(n,)``; each has a fifth of the rows with weight, others are in
    none, -1.

    In a bootstrap sample rows repeat, so some of those held out are trained on, too, and trees of bags are regularised
    less than trees by themselves. That suits their average: with equal rows in one fold, bagged CO2 trees had a
    lower R^2 on all of four sets.
    """
    rows = np.arange(len(batch.x)) if batch.weight is None else np.flatnonzero(np.asarray(batch.weight) > 0)
    drawn = np.random.default_rng(np.asarray(jax.random.key_data(key))).permutation(rows)
    size = int(_HELD_OUT * len(rows))
    fold = np.full(len(batch.x), -1, np.int32)
    fold[drawn[: folds * size]] = np.repeat(np.arange(folds), size)
    return fold


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
      steps: number of updates before these.
      extras: the number that each trial would hand over to the last run; NaN before, and if it was not run.
    """

    prepared: Prepared
    key: Array
    run: Any
    chosen: Array
    losses: Array
    steps: Array
    extras: Array

    def best(self) -> Array:
        """Returns the index of the best strength, or of the first if none is clearly better."""
        best, rows = jnp.argmin(self.losses), self.prepared.held_out.sum()
        better = self.losses[best] < (1 - _MARGIN / jnp.sqrt(jnp.maximum(rows, 1))) * self.losses[0]
        return jnp.where(better, best, 0).astype(jnp.int32)


def preconditioned(
    base: Search,
    strength: float | str,
    shape: tuple[int, int],
    *,
    trial: float = 1.0,
    stop_early: int = 0,
    hand_over: Callable[[Any, Array], Any] | None = None,
) -> Search:
    """Returns the search on preconditioned features.

    With several strengths, or to stop early, the search begins with a run for each, a trial that is trained on four
    fifths of the rows and evaluated on the others (on the validation set, if there is one); the last run has all rows
    and the best strength. Strengths above 0 are not tried where the smallest eigenvalue of the correlations is large.

    The report also has ``precondition``, the strength, and ``trials``, the loss of each trial (infinite if not run), on
    scaled data.

    Args:
      base: the search, of one stage; its models have ``composed``.
      strength: at least 0 and below 1; ``"auto"``: the best of 0, 0.9 and 0.99 in a trial.
      shape: shape of the features.
      trial: length of a trial, as a part of the base's steps.
      stop_early: updates of an epoch, if the last run is to end after as many epochs, or up to a tenth more, as the
        best trial had before its lowest loss; 0: it has all. The loss is then evaluated once an epoch, and the state of
        the base is a :class:`jtrees.training.TrainState`.
      hand_over: ``(state, number) -> state``, which gives the last run the first number of the extra of the
        best trial, NaN without trials. With it ``"auto"`` has a trial in all tables of 100 to 1024 rows and at most
        512 features.
    """
    n, p = shape
    compares = strength == "auto" and p <= WIDEST
    stop_early = stop_early if n >= _FEWEST_EARLY else 0
    one_at_least = stop_early > 0 or (compares and hand_over is not None and _FEWEST_EARLY <= n <= _FEW)
    strengths = np.array((0.0,) if strength == "auto" else (strength,), np.float32)
    if compares and n >= _FEWEST:
        strengths = np.array(TRIED, np.float32)
    trials = len(strengths) if one_at_least or len(strengths) > 1 else 0
    if not trials and not strengths[0]:
        return base
    # Each run is divided into parts, after any of which it may end.
    steps = base.rounds.steps
    ends = _ends(steps, stop_early) if stop_early else (0, steps)
    parts, of_run = len(ends) - 1, tuple(b - a for a, b in itertools.pairwise(ends))
    of_trials = tuple(math.ceil(trial * part) for part in of_run) * trials

    def prepare(batch: Batch, *, key: Array) -> Prepared:
        of = spectrum(batch)
        held_out = drawn_rows(batch, key)
        mapped = [batch._replace(x=np.asarray(batch.x) @ matrix(of, s)) for s in strengths]
        starts = jax.tree.map(lambda *a: np.stack(a), *(base.prepare(one, key=key) for one in mapped))
        return Prepared(of, held_out, np.asarray(of.values[0] < _UNCORRELATED), starts)  # type: ignore[arg-type]

    def mapped(state: Trials, batch: Batch) -> tuple[Batch, Array]:
        """Returns a batch with preconditioned features, and the matrix."""
        m = matrix(state.prepared.spectrum, jnp.asarray(strengths)[state.chosen])
        return batch._replace(x=jnp.matmul(batch.x, m, precision="highest")), m

    def divided(state: Trials, batch: Batch, in_trial: Any) -> tuple[Batch, Batch]:
        """Returns the preconditioned rows to train on and those held out: the others have weight 0."""
        data, held_out = mapped(state, batch)[0], state.prepared.held_out
        weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
        inside = jnp.where(held_out & in_trial, 0, weight)
        return data._replace(weight=inside), data._replace(weight=jnp.where(held_out, weight, 0))

    def started(state: Trials, data: Batch) -> Trials:
        prepared = jax.tree.map(lambda a: a[state.chosen], state.prepared.starts)
        return state._replace(run=base.init(prepared, data, key=state.key))

    def init(prepared: Prepared, batch: Batch, *, key: Array) -> Trials:
        prepared, zero = jax.tree.map(jnp.asarray, prepared), jnp.zeros((), jnp.int32)
        losses = jnp.full(len(strengths), jnp.inf, batch.x.dtype)
        none = jnp.full_like(losses, jnp.nan)
        state = Trials(prepared, key, None, zero, losses, jnp.zeros(len(strengths), jnp.int32), none)
        return started(state, divided(state, batch, trials > 0)[0])

    def is_needed(state: Trials, run: Any) -> Array:
        """Whether a run is needed for the result."""
        return state.prepared.correlated | (run >= trials) | ((run == 0) & one_at_least)

    def is_over(state: Trials, run: Any, before: Any) -> Array:
        """Whether a run ends early, ``before`` being the number of its updates."""
        patience = before - state.run.best.step > steps // _PATIENCE
        diverged = jnp.isinf(state.losses[state.chosen])  # and so will the last run, which raises
        return jnp.where(run < trials, patience, ~diverged & (before >= state.steps[state.chosen]))

    def judged(state: Trials, batch: Batch, validation: Batch | None) -> Trials:
        """Returns the state with the loss of the current trial on the rows held out."""
        data, held_out = divided(state, batch, True)
        result = base.result(state.run, data, held_out if validation is None else mapped(state, validation)[0])
        lost = jnp.where(jnp.isfinite(result.score) & is_needed(state, state.chosen), result.score, jnp.inf)
        here, extras = state.chosen, state.extras
        if hand_over is not None:
            extras = extras.at[here].set(jnp.where(jnp.isfinite(lost), result.extra[0], jnp.nan))
        steps = state.steps.at[here].set(result.step)
        return state._replace(losses=state.losses.at[here].set(lost), steps=steps, extras=extras)

    def next_run(state: Trials, batch: Batch, validation: Batch | None, run: Any) -> Trials:
        state = judged(state, batch, validation)
        state = state._replace(chosen=jnp.where(run < trials, run, state.best()).astype(jnp.int32))
        state = started(state, divided(state, batch, run < trials)[0])
        if hand_over is None:
            return state
        return state._replace(run=hand_over(state.run, jnp.where(run < trials, jnp.nan, state.extras[state.chosen])))

    def place_of(at: Round) -> tuple[Any, Any]:
        """Returns the number of the run of a round, and the number of its updates before the round."""
        return at.stage // parts, jnp.asarray(ends)[at.stage % parts] + at.before

    def one_round(at: Round, state: Trials, batch: Batch, validation: Batch | None) -> tuple[Trials, Array]:
        run, before = place_of(at)
        if trials:
            begins = (before == 0) & (run > 0)
            state = jax.lax.cond(begins, lambda: next_run(state, batch, validation, run), lambda: state)
        data, held_out = divided(state, batch, run < trials)
        by = mapped(state, validation)[0] if validation is not None else held_out if stop_early else None
        after, lost = base.round(at._replace(stage=0, before=before), state.run, data, by)
        if stop_early:
            # Runs side by side do not end together, and a branch under vmap would take both ways.
            over = is_over(state, run, before)
            after = jax.tree.map(lambda old, new: jnp.where(over, old, new), state.run, after)
            lost = jnp.where(over, jnp.nan, lost)
        return state._replace(run=after), lost

    def following(i: Array, state: Trials, rounds: Rounds) -> Array:
        first = jnp.asarray(rounds.first[::parts])  # rounds of the runs
        run = jnp.searchsorted(first, i, side="right") - 1
        over = base.next(i, state.run, rounds) > i
        if stop_early:
            _, before = place_of(rounds.at(jnp.minimum(i, rounds.count - 1)))
            over |= is_over(state, run, before)
        over &= (run <= trials) & (i > first[run])  # in the first round of a run its state is that of the run before
        i, run = jnp.where(over, first[jnp.minimum(run, trials) + 1], i), run + over.astype(run.dtype)
        return jnp.where(is_needed(state, run), i, first[trials]) if trials else i

    def result(state: Trials, batch: Batch, validation: Batch | None) -> SearchResult:
        data, m = mapped(state, batch)
        by, run = None if validation is None else mapped(state, validation)[0], state.run
        if stop_early and validation is None:  # the last parameters: the best are by rows that now are trained on
            run = run.replace(best=run.best.replace(score=jnp.full_like(run.best.score, jnp.inf)))
        result = base.result(run, data, by)
        extra = composed(result.extra, m), state.losses, jnp.asarray(strengths)[state.chosen]
        return result._replace(model=composed(result.model, m), extra=extra)

    def finish(result: SearchResult, prepared: Prepared, data: Data, **of_run: Any) -> Finished:
        extra, tried, chosen = result.extra
        finished = base.finish(result._replace(extra=extra), None, data, **of_run)
        report = {"precondition": float(chosen), "trials": np.asarray(tried)}
        return finished._replace(report=finished.report | report)

    functions: Any = {"init": init, "round": one_round, "result": result, "finish": finish, "prepare": prepare}
    functions["next"] = following
    return base._replace(rounds=Rounds(of_trials + of_run, base.rounds.elements, len(of_trials)), **functions)


def _ends(steps: int, steps_per_epoch: int) -> tuple[int, ...]:
    """Returns the numbers of updates after which a run may end, from 0 to all; from one to the next about a tenth."""
    ends = [0]
    while ends[-1] < steps:
        epochs = ends[-1] // steps_per_epoch
        ends.append(min(steps, (epochs + max(1, -(-epochs // _TENTH))) * steps_per_epoch))
    return tuple(ends)
