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

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float
import numpy as np

from jtrees import blocking
from jtrees.data.table import without_padding
from jtrees.search.recipe import HeldOut, SearchResult
from jtrees.search.report import Preconditioning
from jtrees.search.runs import Runs
from jtrees.training import Batch

TRIED = (0.0, 0.9, 0.99)  # candidate strengths
_HELD_OUT = 0.2  # fraction of the rows that are held out to compare strengths
# A strength replaces the first candidate if it lowers the held-out loss by the fraction _MARGIN / sqrt(held-out rows).
_MARGIN = 0.5
_FEWEST = 500  # smaller tables have too few held-out rows to compare strengths
_UNCORRELATED = 0.3  # strengths are compared if the smallest eigenvalue is below this
_FEWEST_TRIED = 100  # smaller tables have no trial that informs the last training
_FEW = 1024  # up to this number of rows a fit is short, so a trial that informs the last training is cheap
WIDEST = 512  # tables with more features have the default strength 0, because the matrix has p^2 entries


class Spectrum(NamedTuple):
    """Eigenvalues ``(p,)`` and eigenvectors ``(p, p)`` of the correlations of the features."""

    values: Float[Array, " p"]
    vectors: Float[Array, "p p"]


def spectrum(batch: Batch, apart: np.ndarray | None = None) -> Spectrum:
    """Returns the spectrum of a NumPy batch; constant features have correlation 0 with every other feature.

    A preconditioner does not change the features ``apart``, ``(p,)`` bool, so their weights keep their signs.
    """
    x, _, weight = without_padding(batch)
    if apart is not None:
        of_rest = spectrum(Batch(np.asarray(x)[:, ~apart], None, weight)) if not apart.all() else None  # type: ignore[arg-type]
        values, vectors = np.ones(len(apart), np.float32), np.eye(len(apart), dtype=np.float32)
        if of_rest is not None:
            values[~apart] = of_rest.values
            vectors[np.ix_(~apart, ~apart)] = of_rest.vectors
        order = np.argsort(values, kind="stable")
        return Spectrum(values[order], vectors[:, order])  # type: ignore[arg-type]
    share = np.ones(len(x)) if weight is None else np.asarray(weight, np.float64)
    blocks = list(blocking.on_host(*x.shape))
    mean = sum((share[rows, None] * x[rows]).sum(0) for rows in blocks) / share.sum()
    covariance = sum(_products(x[rows] - mean, share[rows]) for rows in blocks) / share.sum()
    deviation = np.sqrt(np.diag(covariance))
    unit = np.where(deviation > 0, deviation, 1)
    correlations = covariance / np.outer(unit, unit)
    np.fill_diagonal(correlations, 1)
    values, vectors = np.linalg.eigh(correlations)
    return Spectrum(np.maximum(values, 0).astype(np.float32), vectors.astype(np.float32))  # type: ignore[arg-type]


def _products(x: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Returns the weighted sums of the products of features, ``(p, p)``."""
    return (x.T * share) @ x


def matrix(of: Spectrum, strength: float, power: float = -0.5) -> np.ndarray:
    """Returns ``((1 - strength) I + strength C) ** power``, ``(p, p)``."""
    if strength == 0:
        return np.eye(len(of.values), dtype=np.float32)
    root = np.asarray((1 - strength + strength * np.asarray(of.values)) ** power, np.float32)
    return (np.asarray(of.vectors) * root) @ np.asarray(of.vectors).T


def drawn_folds(batch: Batch, rng: np.random.Generator, folds: int) -> np.ndarray:
    """Returns the fold of each row of a NumPy batch, ``(n,)``, or -1 for rows in no fold.

    Each fold has a fifth of the rows of positive weight. Rows repeat in a bootstrap sample, so training may include
    copies of held-out rows. Trees of a bag are therefore regularised less than single trees, which suits the average of
    the trees. When equal rows were put in one fold, bagged CO2 trees had a lower R^2 on all of four data sets.
    """
    rows = np.arange(len(batch.x)) if batch.weight is None else np.flatnonzero(np.asarray(batch.weight) > 0)
    drawn = rng.permutation(rows)
    size = int(_HELD_OUT * len(rows))
    fold = np.full(len(batch.x), -1, np.int32)
    fold[drawn[: folds * size]] = np.repeat(np.arange(folds), size)
    return fold


def held_out_rows(runs: Runs) -> list[np.ndarray]:
    """Returns which rows of each run to hold out, ``(n,)`` bool: a fifth of the rows of positive weight."""
    return [fold_rows(runs, i, 1)[0] for i in range(len(runs))]


def fold_rows(runs: Runs, i: int, folds: int) -> list[np.ndarray]:
    """Returns the rows of at most five folds of run i, each ``(n,)`` bool: fifths of the rows of positive weight."""
    fold = drawn_folds(runs.rows(i), runs.rng(i, _DRAWN), folds)
    return [fold == number for number in range(folds)]


_DRAWN = 1  # purpose number of the random generator: see ``Runs.rng``

# ``(runs, result of the best trial of each run, or None) -> results``
Train = Callable[[Runs, list[SearchResult | None]], list[SearchResult]]


def preconditioned(
    runs: Runs,
    strength: float | str,
    train: Train,
    *,
    trial: Train | None = None,
    always_tries: bool = False,
    tries_few_rows: bool = False,
) -> list[SearchResult]:
    """Returns the results of training on preconditioned features.

    If there are several candidate strengths, each run first has a trial of each strength. A trial trains on four fifths
    of the rows and is evaluated on the held-out fifth, or on the validation set if there is one. The last training
    uses all rows and the best strength. If the deadline passes before the last training, the trials are the results.
    Strengths are not compared if the smallest eigenvalue of the correlations is large.

    The results have ``preconditioning``.

    Args:
      runs: the runs.
      strength: strength of the preconditioner, at least 0 and below 1; ``"auto"``: the best of 0, 0.9 and 0.99 in a
        trial. ``"auto"`` is 0 if the features are nearly uncorrelated, or if there are fewer than 500 rows or more than
        512 features.
      train: function that trains runs. Its second argument is the result of the best trial of each run. The entry is
        None in a trial, and for a run that had no trial.
      trial: shorter training for trials, with the arguments of ``train``; None: ``train``.
      always_tries: whether each run has a trial if the table has at least 100 rows. The last training can use the
        result of the trial. The trial then evaluates on its held-out rows during training.
      tries_few_rows: whether ``"auto"`` has a trial in tables of 100 to 1024 rows and at most 512 features.
    """
    n, p = runs.count, runs.shape[1]
    compares = strength == "auto" and p <= WIDEST
    needed = n >= _FEWEST_TRIED and (always_tries or (tries_few_rows and compares and n <= _FEW))
    strengths = TRIED if compares and n >= _FEWEST else (0.0 if strength == "auto" else float(strength),)
    if not needed and strengths == (0.0,):
        return train(runs, [None] * len(runs))
    with_matrix = p <= WIDEST or any(strengths)
    spectra = runs.each_once(lambda i: spectrum(runs.rows(i), runs.monotone)) if with_matrix else [None] * len(runs)
    compared = lambda i: len(strengths) > 1 and spectra[i] is not None and spectra[i].values[0] < _UNCORRELATED

    def on(indices: list[int], strengths: list[float], held_out: list[np.ndarray]) -> Runs:
        found = {}  # runs on the same data share a matrix
        of = lambda i, s: found.setdefault((id(spectra[i]), s), matrix(spectra[i], s))
        matrices = [of(i, s) for i, s in zip(indices, strengths, strict=True)] if with_matrix else None
        some = runs.select(indices).on(held_out=held_out, matrix=matrices)
        return some.watching(bool(np.any(held_out)) or runs.validation is not None) if always_tries else some

    every, out = list(range(len(runs))), held_out_rows(runs)
    losses, found = np.full((len(runs), len(strengths)), np.inf), {}
    for k, tried in enumerate(strengths):
        tries = [i for i in every if compared(i) or (needed and k == 0)]
        if not tries or (k and not runs.monitor.has_time()):
            continue
        none: list[SearchResult | None] = [None] * len(tries)
        results = (trial or train)(on(tries, [tried] * len(tries), [out[i] for i in tries]), none)
        for i, result in zip(tries, results, strict=False):
            losses[i, k] = result.score if np.isfinite(result.score) and result.finite else np.inf
            found[i, k] = result
    best = [_best(losses[i], out[i].sum()) for i in every]
    last = on(every, [strengths[k] for k in best], [np.zeros_like(rows) for rows in out])
    of_trials = [found.get((i, best[i])) for i in every]
    results = [one for one in of_trials if one is not None and one.finite]
    # After the deadline the trials are the best results so far, because a last training would start from scratch.
    if len(results) < len(runs) or runs.monitor.has_time():
        results = train(last, of_trials)
    same_procedure = trial is None and runs.validation is None  # as the last training
    finished = []
    for i, result in enumerate(results):
        tried = of_trials[i] if same_procedure and np.isfinite(losses[i, best[i]]) else None
        how = Preconditioning(strength=float(strengths[best[i]]), losses=losses[i].astype(np.float32))
        held_out = () if tried is None else (HeldOut(tried, out[i]),)
        finished.append(result._replace(preconditioning=how, held_out=held_out))
    return finished


def _best(losses: np.ndarray, rows: Any) -> int:
    """Returns the index of the best strength, or 0 if no strength is clearly better than the first."""
    best = int(np.argmin(losses))
    return best if losses[best] < (1 - _MARGIN / np.sqrt(max(rows, 1))) * losses[0] else 0
