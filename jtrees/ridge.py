"""Least squares with a ridge penalty: of a given strength, or of the strength that cross-validation chooses."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from jtrees import segments

RIDGE = 1.0  # penalty of the squared slopes, beside the sum of the losses; scikit-learn has the same default
STRENGTHS = tuple(10.0 ** np.arange(5, -3.5, -0.5))  # candidates of cross-validation, in samples
LEAST_FREE = 0.1  # minimum of the residual degrees of freedom per sample; GCV approaches 0 / 0 below it


_times: Any = partial(jnp.matmul, precision="highest")


class Ridge(NamedTuple):
    """A ridge regression: slopes ``(p, k)``; degrees of freedom, GCV error and noise left of each output, ``(k,)``."""

    # The noise left is the part of the variance of noise along the features that the residuals keep: 0 for least
    # squares.

    slopes: Float[Array, "p k"]
    df: Float[Array, " k"]
    error: Float[Array, " k"]
    noise_left: Float[Array, " k"]


def decomposed(matrices: Float[Array, "m p p"]) -> tuple[Float[Array, "m p"], Float[Array, "m p p"]]:
    """Returns eigenvalues and eigenvectors of symmetric matrices."""
    # A CPU decomposes one matrix at a time, even under `vmap`. A batch could deadlock: a worker of XLA's thread pool
    # distributes the batch and waits for other workers. If all workers wait, none continues. This can happen with two
    # devices (jaxlib 0.10.2: `ParallelBatchMap`).
    eigh = lambda a: tuple(jnp.linalg.eigh(a))
    one_by_one = jax.custom_batching.custom_vmap(lambda all_: jax.lax.map(eigh, all_))

    @one_by_one.def_vmap
    def _(size: int, _: object, batch: Array) -> tuple:  # one loop compiles faster than two
        parts = one_by_one(batch.reshape(-1, *batch.shape[2:]))
        return tuple(part.reshape(*batch.shape[:2], *part.shape[1:]) for part in parts), (True, True)

    return jax.lax.platform_dependent(matrices, cpu=one_by_one, default=eigh)


def principal_components(outputs: Float[Array, "n k"], weight: Float[Array, " n"]) -> Float[Array, "k k"]:
    """Returns the principal components of centred outputs as columns, in ascending order of their variance."""
    return decomposed(_times(outputs.T, weight[:, None] * outputs)[None])[1][0]


def ridge(
    x: Float[Array, "n p"],
    y: Float[Array, "n k"],
    weight: Float[Array, " n"],
    strengths: tuple[float, ...] = STRENGTHS,
    *,
    shared: bool = False,
) -> Ridge:
    """Returns the ridge regression of centred targets whose strength has the least GCV error.

    The error is generalised cross-validation (Golub, Heath & Wahba 1979). The shorter side of x is decomposed. Let ``B
    = x sqrt(w)`` and ``B B' = U diag(a) U'``, or ``B' B = Q diag(a) Q'``. With ``h = U' sqrt(w) y``, strength s has the
    slopes ``B' U h / (a + s)``. With ``g = Q' B' sqrt(w) y``, they are ``Q g / (a + s)``, and ``g**2`` is ``a h**2``.
    The sum of squares falls by ``sum g**2 (a + 2 s) / (a + s)**2``, for ``sum a / (a + s)`` degrees of freedom.

    Args:
      x: centred features of variance about 1.
      y: centred targets.
      weight: weights that count samples.
      strengths: candidates, in samples. An infinite strength is the mean alone. The first of equals is chosen.
      shared: whether all outputs have the strength of the least sum of their errors.
    """
    xp = segments.module_of(x, y, weight)
    times = np.matmul if xp is np else _times
    root, total = xp.sqrt(weight)[:, None], segments.total(weight)
    rows, targets, is_wide = root * x, root * y, x.shape[1] > len(x)
    products = times(rows, rows.T) if is_wide else times(rows.T, rows)
    values, vectors = np.linalg.eigh(products) if xp is np else (a[0] for a in decomposed(products[None]))
    values = xp.maximum(values, 0)
    # Directions of rounding errors have no slope.
    eps = xp.finfo(x.dtype).eps
    is_signal = values > values.max() * min(x.shape) * eps
    along = xp.where(is_signal[:, None], times(vectors.T, targets if is_wide else times(rows.T, targets)), 0)
    squares, alone = xp.square(along) * (values[:, None] if is_wide else 1), xp.square(targets).sum(0)
    solve = 1 / (values + xp.asarray(strengths, x.dtype)[:, None])
    fitted = values * solve
    df = 1 + fitted.sum(1)
    free = total - df
    is_enough = free >= LEAST_FREE * total
    rss = xp.maximum(alone - times(solve * (2 - fitted), squares), eps * alone)
    errors = total * rss / xp.square(xp.where(is_enough, free, 1))[:, None]
    errors = xp.where(is_enough[:, None], errors, np.inf)
    best = xp.broadcast_to(errors.sum(1, keepdims=True), errors.shape).argmin(0) if shared else errors.argmin(0)
    slopes = times(vectors, along * solve[best].T)
    spread = values.sum()
    noise_left = times(xp.square(1 - fitted), values) / xp.where(spread > 0, spread, 1)
    lowest = xp.take_along_axis(errors, best[None], axis=0)[0]
    return Ridge(times(rows.T, slopes) if is_wide else slopes, df[best], lowest, noise_left[best])


def least_squares(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the slopes of least squares with a ridge penalty, ``(p, k)``, from the products of the shorter side."""
    wide = x.shape[1] > len(x)
    products = (x @ x.T if wide else x.T @ x) + RIDGE * np.eye(min(x.shape))
    return x.T @ np.linalg.solve(products, y) if wide else np.linalg.solve(products, x.T @ y)
