"""Deviances with a log link: Poisson, gamma and Tweedie.

A deviance is zero where predictions equal targets (McCullagh & Nelder, *Generalized Linear Models*, 1989, section 2.3).
The definition agrees with :func:`sklearn.metrics.mean_tweedie_deviance`.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from jtrees import io, segments
from jtrees.segments import Array, module_of
from jtrees.tasks.base import Link, Loss
from jtrees.validation import check_scalar, quoted

_WIDEST = 30.0  # largest absolute output under an exponential


class _LogLink(Loss):
    """Deviances of distributions with variance ``mean^p``. Outputs are logarithms of means."""

    # Targets are divided by their mean. The best constant of a leaf is the logarithm of its mean. A leaf with only zero
    # targets gets one additional sample, the mean of all rows. Otherwise the prediction would be zero, and any event
    # would be infinitely costly.

    link: ClassVar[Link] = "exp"
    _p: float

    def check(self, y: np.ndarray) -> None:
        low = y <= 0 if self._p == 2 else y < 0
        if low.any():
            row = int(np.argwhere(low)[0, 0])
            expected = "above 0" if self._p == 2 else "at least 0"
            raise ValueError(f"y must be {expected} for {self}, got {quoted(y[low][0].item())} in row {row}")

    def check_training(self, y: np.ndarray) -> None:
        self.check(y)
        if not y.sum(0).all():
            raise ValueError(f"y must not be 0 in every row for {self}")

    def units(self, y: np.ndarray) -> tuple[Any, Any]:
        return np.zeros_like(y[0]), y.mean(0)

    def unit_exponent(self) -> float:
        return 2.0 - self._p

    def elementwise(self, outputs: Array, y: Array) -> Array:
        return self.of_predictions(_mean(outputs), y)

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        xp = module_of(predictions)
        p, positive = self._p, xp.where((y > 0) | (predictions > 0), predictions, 1)  # a prediction of 0 suits 0
        ratio = y / positive
        if p == 1:
            return 2 * (y * xp.log(xp.where(y > 0, ratio, 1)) - y + predictions)
        if p == 2:
            return 2 * (ratio - 1 - xp.log(ratio))
        target_term = xp.where(y > 0, xp.where(y > 0, y, 1) ** (2 - p), 0) / ((1 - p) * (2 - p))
        product = y * positive ** (1 - p)
        return 2 * (target_term - product / (1 - p) + predictions ** (2 - p) / (2 - p))

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        # Let d be the deviance of the mean m = exp(o). Then dd/dm = 2 (m - y) m^-p, hence
        #     dd/do = 2 (m^(2-p) - y m^(1-p)),   d2d/do2 = 2 ((2 - p) m^(2-p) + (p - 1) y m^(1-p)) >= 0 for 1 <= p <= 2.
        p, mean = self._p, _mean(outputs)
        ours, theirs = mean ** (2 - p), y * mean ** (1 - p)
        return 2 * (ours - theirs), 2 * ((2 - p) * ours + (p - 1) * theirs)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        values = segments.means(leaf_index, y, num_leaves, weight)
        xp, count = module_of(values), segments.wide(segments.sums(weight, leaf_index, num_leaves), y)
        overall = segments.means(xp.zeros_like(leaf_index), y, 1, weight)
        return xp.log(xp.where(values > 0, values, overall / (count + 1)))


def _mean(outputs: Array) -> Array:
    return jnp.exp(jnp.clip(outputs, -_WIDEST, _WIDEST))


@io.part
@dataclasses.dataclass(frozen=True)
class Poisson(_LogLink):
    """Poisson deviance, ``2 (y log(y / m) - y + m)`` with ``m = exp(outputs)``, for counts.

    Example:
      >>> loss = jtrees.losses.Poisson()
      >>> gradient, curvature = loss.derivatives(jnp.zeros(2), jnp.array([0.0, 3.0]))  # of means exp(0) = 1
      >>> print(gradient, curvature)
      [ 2. -4.] [2. 2.]
    """

    measure: ClassVar[str] = "Poisson deviance"
    _p: ClassVar[float] = 1.0


@io.part
@dataclasses.dataclass(frozen=True)
class Gamma(_LogLink):
    """Gamma deviance, ``2 (log(m / y) + y / m - 1)`` with ``m = exp(outputs)``, for positive targets."""

    measure: ClassVar[str] = "gamma deviance"
    _p: ClassVar[float] = 2.0


@io.part
@dataclasses.dataclass(frozen=True)
class Tweedie(_LogLink):
    """Tweedie deviance of a compound Poisson-gamma distribution with ``m = exp(outputs)``.

    The deviance suits nonnegative targets that include exact zeros, such as the claims of a year.

    Args:
      variance_power: exponent p of the variance, which is proportional to ``mean^p``. It is above 1 and below 2.

    Raises:
      ValueError: for a power outside (1, 2).
    """

    variance_power: float = 1.5

    measure: ClassVar[str] = "Tweedie deviance"

    def __post_init__(self) -> None:
        power = check_scalar("variance_power", self.variance_power, above=1, below=2)
        object.__setattr__(self, "variance_power", power)

    @property
    def _p(self) -> float:  # type: ignore[override]
        return self.variance_power
