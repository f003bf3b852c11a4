"""Preconditioned searches: gradient descent on features whose correlations are removed.

A linear split of mapped features, ``w (x M) + b > 0``, is the split ``(M w) x + b > 0`` of the original features. An
invertible matrix M therefore does not change the set of trees, but it changes gradient descent. A step on w moves the
weights of x by the gradient times ``M M^T``.

If M is the identity, the weights hardly move along directions of small variance. Such directions may still determine
the target, for example if features are nearly equal. Let C be the correlation matrix of the features. If
``M = C^(-1/2)``, the weights move equally fast along all directions.

C is shrunk towards the identity, ``(1 - s) I + s C``, because small eigenvalues are noise and C may be singular.
Strength s = 0 does not change the features. Near s = 1 the features become uncorrelated.
"""

from collections.abc import Awaitable, Callable
import contextlib
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

from jtrees import blocking, distributed
from jtrees.data.scaling import with_map
from jtrees.data.table import without_padding
from jtrees.search.monitor import Monitor
from jtrees.search.problem import Fitted, Problem
from jtrees.search.report import Preconditioning
from jtrees.search.run import Evaluation
from jtrees.search.sample import fold_rows
from jtrees.training import Batch

_STRENGTHS = (0.0, 0.9, 0.99)  # candidates
# A strength replaces the first candidate if it lowers the held-out loss by the fraction _MARGIN / sqrt(held-out rows)
# of its absolute value.
_MARGIN = 0.5
_FEWEST = 500  # smaller tables have too few held-out rows to compare strengths
_UNCORRELATED = 0.3  # strengths are compared if the smallest eigenvalue is below this
_FEWEST_FOR_TRIAL = 100  # smaller tables have no trial that informs the last training
_FEW = 1024  # up to this number of rows a fit is short, so a trial that informs the last training is cheap
_PART = 0.2  # part of the time before a deadline for the correlations of the features
WIDEST = 512  # tables with more features have the default strength 0, because the matrix has p^2 entries


class Spectrum(NamedTuple):
    """Eigenvalues ``(p,)`` and eigenvectors ``(p, p)`` of the correlations of the features."""

    values: Float[Array, " p"]
    vectors: Float[Array, "p p"]


def spectrum(batch: Batch, apart: np.ndarray | None = None, *, monitor: Monitor | None = None) -> Spectrum:
    """Returns the spectrum of a NumPy batch; constant features have correlation 0 with every other feature."""
    # A preconditioner does not change the features `apart`, (p,) bool, so their weights keep their signs. If there is
    # no time for all rows, the correlations are computed from a sample of the rows.
    x, _, weight = without_padding(batch)
    if apart is not None:
        values, vectors = np.ones(len(apart), np.float32), np.eye(len(apart), dtype=np.float32)
        if not apart.all():
            remaining = Batch(np.asarray(x)[:, ~apart], None, weight)  # type: ignore[arg-type]
            values[~apart], vectors[np.ix_(~apart, ~apart)] = spectrum(remaining, monitor=monitor)
        order = np.argsort(values, kind="stable")
        return Spectrum(values[order], vectors[:, order])  # type: ignore[arg-type]
    rows: Any = Batch(x, None, weight)  # type: ignore[arg-type]
    correlations = _correlations(rows) if monitor is None else monitor.on_rows(_correlations, rows)
    values, vectors = np.linalg.eigh(correlations)
    return Spectrum(np.maximum(values, 0).astype(np.float32), vectors.astype(np.float32))  # type: ignore[arg-type]


def _correlations(rows: Batch) -> np.ndarray:
    x, _, weight = rows
    share = np.ones(len(x)) if weight is None else np.asarray(weight, np.float64)
    blocks = list(blocking.on_host(*x.shape))
    mean = sum((share[rows, None] * x[rows]).sum(0) for rows in blocks) / share.sum()
    products = lambda centred, rows: (centred.T * share[rows]) @ centred
    covariance = sum(products(x[rows] - mean, rows) for rows in blocks) / share.sum()
    deviation = np.sqrt(np.diag(covariance))
    unit = np.where(deviation > 0, deviation, 1)
    correlations = covariance / np.outer(unit, unit)
    np.fill_diagonal(correlations, 1)
    return correlations


def matrix(features: Spectrum, strength: float, power: float = -0.5) -> np.ndarray:
    """Returns ``((1 - strength) I + strength C) ** power``, ``(p, p)``."""
    if strength == 0:
        return np.eye(len(features.values), dtype=np.float32)
    root = np.asarray((1 - strength + strength * np.asarray(features.values)) ** power, np.float32)
    return (np.asarray(features.vectors) * root) @ np.asarray(features.vectors).T


Train = Callable[[Problem, Fitted | None], Awaitable[Fitted]]  # (problem, result of the best trial) -> result
# (problem, result on scaled data, how the features were preconditioned) -> result in the user's units
Finish = Callable[[Problem, Fitted, Preconditioning | None], Fitted]


class Preconditioned(NamedTuple):
    """The result of a search on preconditioned features.

    Attributes:
      fitted: the result.
      preconditioning: how the features were preconditioned. None: no strength was tried, and none above 0 was given.
      trial: the result of the best trial if a trial is the same procedure as the last training, else None.
      held_out: the rows that the trial was not trained on, ``(n,)`` bool.
    """

    fitted: Fitted
    preconditioning: Preconditioning | None = None
    trial: Fitted | None = None
    held_out: np.ndarray | None = None

    def finished(self, problem: Problem, sample: Problem, finish: Finish) -> Fitted:
        """Returns the result in the user's units, with the losses of the rows that the trial was not trained on.

        Args:
          problem: the problem.
          sample: the problem with the rows that the search used: a sample of the rows, or ``problem``.
          finish: returns a result in the user's units.
        """
        fitted = finish(problem, self.fitted, self.preconditioning)
        if self.trial is None or self.held_out is None or fitted.model is None or problem.is_member:
            return fitted
        if not problem.monitor.may_be_late(problem.engine.seconds_of_results):
            return fitted
        trial = finish(sample.holding_out(self.held_out).replace(is_optional=False), self.trial, self.preconditioning)
        return fitted._replace(left_out=sample.left_out(trial.model, self.held_out))


def spectrum_of_rows(problem: Problem) -> Spectrum:
    """Returns the spectrum of the features of a problem; of a sample of its rows if a deadline is near."""
    return problem.computed_once(spectrum, problem.batch, problem.monotone, monitor=problem.monitor.within(_PART))


async def preconditioned(
    problem: Problem,
    strength: float | str,
    train: Train,
    *,
    trial: Train | None = None,
    always_tries: bool = False,
    tries_few_rows: bool = False,
) -> Preconditioned:
    """Returns the result of training on preconditioned features.

    If there are several candidate strengths, each strength first has a trial. A trial trains on four fifths of the rows
    and is evaluated on the held-out fifth. The last training uses all rows and the best strength. If the deadline
    passes before the last training, or if it becomes non-finite, the best trial is the result. Strengths are not
    compared if the smallest eigenvalue of the correlations is large.

    If there is a validation set, a trial trains on all rows and is evaluated on the validation set. The best trial is
    then the result, unless trials are shorter than the last training.

    Args:
      problem: the problem.
      strength: strength of the preconditioner, at least 0 and below 1; ``"auto"``: the best of 0, 0.9 and 0.99 in a
        trial. ``"auto"`` is 0 if the features are nearly uncorrelated, or if there are fewer than 500 rows or more than
        512 features.
      train: training, whose second argument is the result of the best trial. It is None in a trial, and without trials.
      trial: shorter training for trials, with the arguments of ``train``; None: ``train``.
      always_tries: whether there is a trial if the table has at least 100 rows and there is no validation set. The last
        training can use the result of the trial. The trial then evaluates on its held-out rows during training.
      tries_few_rows: whether ``"auto"`` has a trial in tables of 100 to 1024 rows and at most 512 features, if there is
        no validation set.

    Raises:
      FloatingPointError: if the last training became non-finite.
    """
    n, p = problem.count, problem.shape[1]
    compares = strength == "auto" and p <= WIDEST
    tries, validates = always_tries or (tries_few_rows and compares and n <= _FEW), problem.has_validation_set
    needs_trial = tries and n >= _FEWEST_FOR_TRIAL and not validates
    strengths = _STRENGTHS if compares and n >= _FEWEST else (0.0 if strength == "auto" else float(strength),)
    if not needs_trial and strengths == (0.0,):
        return Preconditioned(await train(problem, None))
    features = spectrum_of_rows(problem) if any(strengths) else None
    # A training needs no table. For all compared strengths, the rows of the training determine the bins.
    scaled = problem.replace(data=None, rows=None, source=problem.source if features is None else None)

    async def trained_by(train: Train, strength: float, held_out: np.ndarray, trial: Fitted | None) -> Fitted:
        rows = scaled.holding_out(held_out, Evaluation.EARLY_STOPPING if always_tries else Evaluation.HELD_OUT)
        preconditioner = problem.computed_once(matrix, features, strength) if strength else None
        fitted = await train(rows.preconditioned_by(preconditioner), trial)
        return fitted._replace(scaled=with_map(fitted.scaled, preconditioner))

    no_rows, losses, trials = np.zeros(problem.shape[0], bool), np.full(len(strengths), np.inf), {}
    [held_out] = [no_rows] if validates else fold_rows(problem)
    is_correlated = features is not None and features.values[0] < _UNCORRELATED
    candidates = strengths if len(strengths) > 1 and is_correlated else strengths[: int(needs_trial)]
    for k, candidate in enumerate(candidates):
        if k and not problem.monitor.has_time():
            break
        with contextlib.suppress(FloatingPointError):
            trials[k] = await trained_by(trial or train, candidate, held_out, None)
            losses[k] = trials[k].score
    evaluated_rows: Any = problem.evaluation.weight if validates else held_out
    best = _best(losses, np.count_nonzero(evaluated_rows))
    best_trial = trials.get(best)
    is_complete = trial is None and validates
    if best_trial is not None and (is_complete or not problem.monitor.has_time()):
        # The trial is the best result so far, because a last training would start from scratch.
        fitted = best_trial
    else:
        try:
            fitted = await trained_by(train, strengths[best], no_rows, best_trial)
        except FloatingPointError:
            if best_trial is None:
                raise
            distributed.warn("the last training became non-finite, so the trial is kept: try a smaller learning_rate")
            fitted = best_trial
    preconditioning = None
    if candidates or strength != "auto":
        preconditioning = Preconditioning(strength=float(strengths[best]), losses=losses.astype(np.float32))
    if best_trial is None or trial is not None or validates:
        return Preconditioned(fitted, preconditioning)
    return Preconditioned(fitted, preconditioning, best_trial, held_out)


def _best(losses: np.ndarray, rows: Any) -> int:
    """Returns the index of the best strength, or 0 if no strength is clearly better than the first."""
    # A loss below 0, such as minus the mean reward, must fall by the fraction of its absolute value.
    best, margin = int(np.argmin(losses)), np.sign(losses[0]) * _MARGIN / np.sqrt(max(rows, 1))
    return best if losses[best] < (1 - margin) * losses[0] else 0
