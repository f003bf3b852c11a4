"""Few features for linear leaves of wide tables: the output of a ridge regression, and the columns that matter most.

A leaf of a wide table has too few samples for a slope of each feature. A decomposition for each leaf would also cost
the cube of the number of features. So all leaves share a ridge regression of all samples, and correct it along at most
``WIDEST`` directions.
"""

from statistics import NormalDist
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jtrees import segments
from jtrees.ridge import STRENGTHS, principal_components, ridge
from jtrees.segments import effective

WIDEST = 64  # largest number of features with a slope of their own in each leaf


class Narrowing(NamedTuple):
    """A linear map of many features to few, and the ridge regression of all samples as a model of the few."""

    # The map, (p, WIDEST). Its first columns select features. The other columns are the directions of the ridge
    # regression, in the mean unit of the selected features.
    matrix: Float[Array, "p q"]
    slopes: Float[Array, "q k"]  # slopes of the ridge regression, (WIDEST, k)
    df: Float[Array, " k"]  # degrees of freedom of the ridge regression of each output, (k,)
    # How many degrees of freedom a degree of freedom of the features costs, because they were selected, (k,)
    cost: Float[Array, " k"]


def select_features(
    x: Float[Array, "n p"], y: Float[Array, "n k"], weight: Float[Array, " n"], scale: Float[Array, " p"]
) -> Narrowing:
    """Returns a map of p features to ``WIDEST`` features, fewer than p.

    Features are standardised, targets centred, and weights have mean 1. ``scale`` has the deviations of the features in
    the units that the map takes, infinite for constant features. Features are selected by the sum of three squared
    statistics, each about 1 for a feature without effect:

    - the slope of the ridge regression, by its standard error;
    - the covariance of the feature with the residual times the prediction, since a feature that divides the samples
      into parts with other slopes changes the slope of the prediction;
    - the covariance of the square of the feature with the residual.
    """
    samples = effective(weight)
    fitted = ridge(x, y, samples, (np.inf, *STRENGTHS))
    times = lambda a, b: jnp.matmul(a, b, precision="highest")
    predicted = times(x, fitted.slopes)
    residual = samples[:, None] * (y - predicted)

    def statistic(features: Array, residual: Array) -> Array:
        variance = times(jnp.square(features).T, jnp.square(residual))
        return jnp.square(times(features.T, residual)) / jnp.where(variance > 0, variance, jnp.inf)

    varies = jnp.isfinite(scale)
    noise = jnp.where(fitted.error > 0, fitted.error, 1)
    scores = segments.total(samples) * jnp.square(fitted.slopes) / noise
    scores = scores + statistic(x, residual * predicted) + statistic(jnp.where(varies, jnp.square(x) - 1, 0), residual)
    directions = min(y.shape[1], WIDEST // 2)
    columns = jnp.sort(jax.lax.top_k(jnp.where(varies, scores.sum(1), -1), WIDEST - directions)[1])
    # The directions are the principal components of the outputs, which are all outputs if there are few.
    components = jnp.eye(y.shape[1], dtype=x.dtype)
    if y.shape[1] > 1:
        components = principal_components(predicted, samples)[:, -directions:]
    outputs = segments.total(samples[:, None] * jnp.square(times(predicted, components)))
    length = jnp.sqrt(outputs / segments.total(samples))
    unit = jnp.where(varies, scale, 0)[columns].sum() / jnp.maximum(varies[columns].astype(x.dtype).sum(), 1)
    unit = jnp.where(unit > 0, unit, 1)  # all features are constant
    to_unit = unit / jnp.where(length > 0, length, jnp.inf)
    along = jnp.where(varies, 1 / scale, 0)[:, None] * times(fitted.slopes, components) * to_unit
    matrix = jnp.concatenate([jnp.zeros((len(scale), len(columns)), x.dtype), along], axis=1)
    matrix = matrix.at[columns, jnp.arange(len(columns))].set(1)
    slopes = jnp.zeros((len(columns), y.shape[1]), x.dtype)
    # Leaves correct the residuals of the ridge regression. The residuals lack the noise that the regression has fitted.
    cost = 1 + (cost_of_selection(len(scale)) - 1) * fitted.noise_left
    return Narrowing(matrix, jnp.concatenate([slopes, (components * length / unit).T]), fitted.df, cost)


def cost_of_selection(p: int) -> float:
    """Returns how many degrees of freedom a degree of freedom of features costs that are selected by their noise."""
    # There are p >= WIDEST features. Without signal, their squared statistics are chi-square variables of mean 1. The
    # largest of them belong to the WIDEST selected features. The cost is their mean, for normal variables z: the mean
    # of `z**2` where `|z|` is above its quantile q is `1 + 2 q density(q) / share`.
    share, normal = WIDEST / p, NormalDist()
    q = normal.inv_cdf(1 - share / 2)
    return 1 + 2 * q * normal.pdf(q) / share


def selected(matrix: np.ndarray) -> np.ndarray:
    """Returns the numbers of the features that the map of a :class:`Narrowing` selects."""
    return np.unique(np.abs(matrix).argmax(0)[(matrix != 0).sum(0) == 1])
