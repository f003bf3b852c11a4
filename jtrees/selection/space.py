"""Search spaces: ranges and choices by the name of the option, and quasi-random draws from a space."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import Array
import numpy as np

from jtrees.validation import quoted

_DRAWS = 2**31 - 2  # derives the key of the draws from the key of a sweep


@dataclass(frozen=True)
class Uniform:
    """A range of numbers for an option, with uniform probability.

    For integers, use choices instead: ``range(2, 7)``.

    Attributes:
      low: the lower bound, finite.
      high: the upper bound, finite and above ``low``.

    Example:
      >>> jtrees.Uniform(0.0, 0.5).quantile(np.array([0.0, 0.5, 1.0]))
      array([0.  , 0.25, 0.5 ])
    """

    low: float
    high: float

    def quantile(self, part: np.ndarray) -> np.ndarray:
        """Returns the quantiles for an array of probabilities from 0 to 1, in the same shape."""
        return np.clip((1 - part) * self.low + part * self.high, self.low, self.high)


@dataclass(frozen=True)
class LogUniform:
    """A range of positive numbers for an option, whose logarithm has uniform probability.

    Attributes:
      low: the lower bound, finite and above 0.
      high: the upper bound, finite and above ``low``.

    Example:
      >>> jtrees.LogUniform(1e-3, 1e-1).quantile(np.array([0.0, 0.5, 1.0])).round(6)
      array([0.001, 0.01 , 0.1  ])
    """

    low: float
    high: float

    def quantile(self, part: np.ndarray) -> np.ndarray:
        """Returns the quantiles for an array of probabilities from 0 to 1, in the same shape."""
        return np.clip(np.exp((1 - part) * np.log(self.low) + part * np.log(self.high)), self.low, self.high)


def draw(space: Any, count: int, key: Array) -> list[dict[str, Any]]:
    """Returns quasi-random draws from a space: the first ``count`` points of a scrambled Sobol sequence.

    Equal arguments give equal draws. A larger ``count`` with the same key adds draws at the end. The space has ranges,
    or sequences of choices, by the name of the option. Raises ``ValueError`` if it is empty or not a mapping, if an
    option has no choices, or if bounds are not finite and ascending, and above 0 for ``LogUniform``.
    """
    from scipy.stats import qmc  # imported late: jax installs SciPy, but this module is slow to import

    if not isinstance(space, Mapping) or not space:
        example = '{"learning_rate": jtrees.LogUniform(1e-3, 0.1), "depth": (3, 4, 5)}'
        raise ValueError(f"space must hold ranges or choices by name, such as {example}, got {quoted(space)}")
    space = {str(name): _checked_values(f"space[{quoted(str(name))}]", values) for name, values in space.items()}
    seed = np.asarray(jax.random.key_data(jax.random.fold_in(key, _DRAWS))).ravel()
    engine = qmc.Sobol(len(space), rng=np.random.default_rng(seed))
    # A Sobol sequence is balanced if its length is a power of two. SciPy warns of any other length.
    points = engine.random_base2((count - 1).bit_length())[:count]
    values = [_values(dimension, part) for dimension, part in zip(space.values(), points.T, strict=True)]
    return [dict(zip(space, row, strict=True)) for row in zip(*values, strict=True)]


def _values(dimension: Any, part: np.ndarray) -> list[Any]:
    """Returns the values of a range or of choices for points from 0 to below 1."""
    if isinstance(dimension, (Uniform, LogUniform)):
        return dimension.quantile(part).tolist()
    return [dimension[i] for i in (part * len(dimension)).astype(int)]


def _checked_values(name: str, values: Any) -> Any:
    """Returns a checked range, or choices as a list."""
    if isinstance(values, (Uniform, LogUniform)):
        positive = isinstance(values, LogUniform)
        bounds = values.low, values.high
        if not all(map(_is_finite, bounds)) or not values.low < values.high or (positive and not values.low > 0):
            low = "above 0 and below high" if positive else "below high"
            raise ValueError(f"{name} must be a range of two finite numbers with low {low}, got {quoted(values)}")
        return values
    try:
        choices = list(values)
    except TypeError:
        choices = []
    if isinstance(values, str) or not choices:
        raise ValueError(f"{name} must be Uniform, LogUniform or at least one choice, got {quoted(values)}")
    return choices


def _is_finite(value: Any) -> bool:
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iuf" and bool(np.isfinite(value))
