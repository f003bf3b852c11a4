"""Losses of tasks: each has a link, checks of targets, derivatives, best constants and units.

A model computes ``outputs``; ``link(outputs)`` are its predictions. Losses are those of outputs and of targets that are
scaled (see :meth:`Loss.units`). Losses with a log link are deviances (McCullagh & Nelder, *Generalized Linear Models*,
1989, section 2.3), which are zero where predictions equal targets, as :func:`sklearn.metrics.mean_tweedie_deviance`.
"""

import dataclasses
import itertools
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np
import optax

from jtrees import io, validation as checks
from jtrees.losses.newton import newton_constants
from jtrees.losses.quantiles import weighted_quantiles
from jtrees.losses.samples import SampleLoss, own_loss

Link = Literal["identity", "softmax", "exp", "sorted"]
_WIDEST = 30.0  # largest absolute output under an exponential
_CERTAIN = 1e4  # an output whose softmax is exactly 1 beside outputs of 0
_LONGEST = 4.0  # Newton step of an output under a link, as in LogitBoost (Friedman, Hastie & Tibshirani 2000)


def linked(link: Link, outputs: Any) -> Any:
    """Returns predictions of outputs: unchanged, their softmax or sorted values over the last axis, or exponentials."""
    if link == "identity":
        return outputs
    xp = _module_of(outputs)
    if link == "exp":
        return xp.exp(outputs)
    if link == "sorted":
        return xp.sort(outputs, axis=-1)
    return jax.nn.softmax(outputs, axis=-1)


def _module_of(array: Any) -> Any:
    """Returns :mod:`jax.numpy` for arrays of JAX, possibly traced, else NumPy."""
    return jnp if isinstance(array, jax.Array) else np


class Loss:
    """A loss of outputs and targets, elementwise unless ``samples`` is overridden; of several outputs the mean.

    Subclasses are frozen dataclasses, as losses are part of compiled programs.

    Attributes:
      link: name of the link from outputs to predictions.
      smooth: whether the loss has a curvature; else leaf values of boosting are best constants of residuals.
      in_units: whether the loss is also one of predictions and targets in the user's units (:meth:`of_predictions`).
    """

    link: ClassVar[Link] = "identity"
    smooth: ClassVar[bool] = True
    in_units: ClassVar[bool] = True

    @property
    def outputs(self) -> int | None:
        """Number of outputs for one target; None: one, without an axis of its own."""
        return None

    def check(self, y: np.ndarray) -> None:
        """Raises ``ValueError`` for targets that the loss cannot take, naming the first."""

    def check_training(self, y: np.ndarray) -> None:
        """Raises ``ValueError`` for training targets that the loss cannot be fitted to."""
        self.check(y)

    def units(self, y: np.ndarray) -> tuple[Any, Any]:
        """Returns offset and unit of the targets: scaled targets are ``(y - offset) / unit``, in [0, 1]."""
        return y.min(0), np.ptp(y, axis=0)

    def scaled(self, unit: Any) -> "Loss":
        """Returns the loss of targets divided by ``unit``."""
        return self

    def power(self) -> float:
        """Returns the power of the unit of targets in which the loss is measured."""
        return 1.0

    def samples(self, outputs: Float[Array, "n *k"], y: Float[Array, "n *k"]) -> Float[Array, " n"]:
        """Returns the loss of each sample."""
        each = self.each(outputs, self.aligned(y))
        return each if each.ndim == 1 else each.mean(axis=1)

    def aligned(self, y: Any) -> Any:
        """Returns targets that broadcast against outputs."""
        return y if self.outputs is None else y[..., None]

    def each(self, outputs: Array, y: Array) -> Array:
        """Returns the loss of each output."""
        return self.of_predictions(outputs, y)

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        """Returns the loss of each prediction, NumPy arrays in their own precision."""
        raise NotImplementedError

    def derivatives(self, outputs: Float[Array, "n *k"], y: Float[Array, "n *k"]) -> tuple[Array, Array]:
        """Returns the gradient and the curvature of the loss of each output, of the shape of the outputs."""
        raise NotImplementedError

    def constants(
        self, leaf_index: Int[Array, " n"], y: Array, num_leaves: int, weight: Float[Array, " n"]
    ) -> Float[Array, "leaves *k"]:
        """Returns the output of each leaf that minimises the loss of its samples; a leaf without weight has that of
        all samples.
        """
        raise NotImplementedError

    def initial(self, y: Array, weight: Float[Array, " n"], outputs: int) -> Float[Array, "*k"]:
        """Returns the ``outputs`` numbers that boosting starts from: the best constant."""
        return self.constants(jnp.zeros(len(y), jnp.int32), y, 1, weight)[0]

    def best(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        """Returns the best constant prediction of targets in the user's units, ``(*k,)``."""
        offset, unit = self.units(y)
        scaled = jnp.asarray((y - offset) / unit, jnp.float32)
        ones = jnp.ones(len(y)) if weight is None else jnp.asarray(weight, jnp.float32)
        output = np.asarray(self.constants(jnp.zeros(len(y), jnp.int32), scaled, 1, ones)[0], np.float64)
        return np.asarray(offset + unit * linked(self.link, output))

    def newton(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        """Returns the Newton step of each output, ``-gradient / curvature``, and the curvature, which is its weight in
        least squares; steps under a link are at most 4.
        """
        gradient, curvature = self.derivatives(outputs, y)
        if not self.smooth:
            return -gradient, jnp.ones_like(gradient)
        curvature = jnp.maximum(curvature, jnp.finfo(curvature.dtype).eps)
        step = -gradient / curvature
        return step if self.link == "identity" else jnp.clip(step, -_LONGEST, _LONGEST), curvature

    def steps(
        self, leaf_index: Array, outputs: Array, y: Array, num_leaves: int, weight: Array, l2: Any
    ) -> Float[Array, "leaves *k"]:
        """Returns what each leaf adds to the outputs of its samples to lower their loss, in boosting.

        A Newton step, ``-sum w g / (sum w h + l2 h_mean)``, or for losses without a curvature the best constant of the
        residuals, shrunk alike. A leaf without weight adds nothing.

        Args:
          leaf_index: leaf of each sample.
          outputs: current outputs.
          y: targets.
          num_leaves: number of leaves.
          weight: nonnegative weights.
          l2: number of samples of mean curvature that are added to each leaf without a gradient, at least 0.
        """
        count = jax.ops.segment_sum(weight, leaf_index, num_leaves)
        wide = lambda a: a.reshape(a.shape + (1,) * (outputs.ndim - 1))
        if not self.smooth:
            best = self.constants(leaf_index, self.aligned(y) - outputs, num_leaves, weight)
            shrunk = count / jnp.where(count > 0, count + l2, 1)
            return wide(shrunk) * best
        gradient, curvature = self.derivatives(outputs, y)
        mean = (wide(weight) * curvature).sum(0) / weight.sum()
        summed = lambda a: jax.ops.segment_sum(wide(weight) * a, leaf_index, num_leaves)
        total = summed(curvature) + l2 * mean
        step = jnp.where(total > 0, -summed(gradient) / jnp.where(total > 0, total, 1), 0)
        return step if self.link == "identity" else jnp.clip(step, -_LONGEST, _LONGEST)


def _means(leaf_index: Array, y: Array, num_leaves: int, weight: Array, extra: float = 0.0) -> Array:
    """Returns the mean in each leaf, ``extra`` samples of the mean of all included; that of all where it is empty."""
    wide = lambda a: a.reshape(a.shape + (1,) * (y.ndim - 1))
    overall = (wide(weight) * y).sum(0) / weight.sum()
    count = wide(jax.ops.segment_sum(weight, leaf_index, num_leaves)) + extra
    total = jax.ops.segment_sum(wide(weight) * (y - overall), leaf_index, num_leaves)
    return overall + total / jnp.where(count > 0, count, 1)


# --- Identity link ---------------------------------------------------------------------------------------------------


@io.part
@dataclasses.dataclass(frozen=True)
class SquaredError(Loss):
    """``(outputs - y)^2``, whose best constant is the mean."""

    def power(self) -> float:
        return 2.0

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        error = predictions - y
        return error * error

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        return 2 * (outputs - y), jnp.full_like(outputs, 2)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        return _means(leaf_index, y, num_leaves, weight)

    def best(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
        return np.asarray(np.average(y, axis=0, weights=weight))


@io.part
@dataclasses.dataclass(frozen=True)
class AbsoluteError(Loss):
    """``|outputs - y|``, whose best constant is the median."""

    smooth: ClassVar[bool] = False

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        return abs(predictions - y)

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        return jnp.sign(outputs - y), jnp.ones_like(outputs)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        return _quantile_columns(leaf_index, y, num_leaves, 0.5, weight)


def _quantile_columns(leaf_index: Array, y: Array, num_leaves: int, level: float, weight: Array) -> Array:
    """Returns a quantile of each leaf, of ``(n, k)`` targets for each column."""
    one = lambda column: weighted_quantiles(leaf_index, column, num_leaves, (level,), sample_weight=weight)[:, 0]
    return one(y) if y.ndim == 1 else jnp.stack([one(column) for column in y.T], axis=1)


@io.part
@dataclasses.dataclass(frozen=True)
class Huber(Loss):
    """``e^2 / 2`` for errors e up to ``delta``, beyond it ``delta (|e| - delta / 2)`` (Huber 1964).

    Args:
      delta: a number above 0, in the units of the targets.

    Raises:
      ValueError: for another delta.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        _check_number("delta", self.delta, 0, np.inf)

    def power(self) -> float:
        return 2.0

    def scaled(self, unit: Any) -> "Huber":
        if np.size(unit) > 1:
            raise ValueError(f"loss must be of one target, as delta is in its units, got {np.size(unit)} targets")
        return Huber(float(self.delta / np.reshape(unit, ())))

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        xp = _module_of(predictions)
        error = abs(predictions - y)
        inside = xp.minimum(error, self.delta)
        return inside * inside / 2 + self.delta * (error - inside)

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        error = outputs - y
        return jnp.clip(error, -self.delta, self.delta), (jnp.abs(error) <= self.delta).astype(outputs.dtype)

    def newton(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        return -self.derivatives(outputs, y)[0], jnp.ones_like(outputs)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        start = _quantile_columns(leaf_index, y, num_leaves, 0.5, weight)
        return newton_constants(self.samples, self.derivatives, start, leaf_index, y, weight)


@io.part
@dataclasses.dataclass(frozen=True)
class Quantile(Loss):
    """The pinball losses ``max(level e, (level - 1) e)`` of errors ``e = y - outputs``, whose best constants are
    quantiles (Koenker & Bassett 1978).

    Predictions for several levels are ``(n, levels)`` and never cross: models that could cross are sorted, which does
    not raise the loss (Chernozhukov, Fernandez-Val & Galichon 2010).

    Args:
      levels: a number above 0 and below 1, or several, increasing.

    Raises:
      ValueError: for other levels.

    Example:
      >>> loss, leaf, y = jtrees.losses.Quantile((0.1, 0.9)), jnp.zeros(5, int), jnp.array([1.0, 2.0, 3.0, 4.0, 9.0])
      >>> print(loss.constants(leaf, y, 1, jnp.ones(5)))
      [[1. 9.]]
    """

    levels: float | tuple[float, ...] = 0.5

    smooth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        given: Any = self.levels
        several = np.ndim(given) == 1
        if np.ndim(given) > 1 or (several and len(given) == 0):
            raise ValueError(f"levels must be a number, or several, got {given!r}")
        for level in given if several else (given,):
            _check_number("levels", level, 0, 1)
        if several:
            object.__setattr__(self, "levels", tuple(float(level) for level in given))
            if any(b <= a for a, b in itertools.pairwise(given)):
                raise ValueError(f"levels must increase, got {tuple(given)}")

    @property
    def link(self) -> Link:  # type: ignore[override]
        """Sorted values of several levels."""
        return "identity" if self.outputs is None else "sorted"

    @property
    def outputs(self) -> int | None:
        """Number of levels, if several."""
        return len(self.levels) if isinstance(self.levels, tuple) else None

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        xp = _module_of(predictions)
        error, level = y - predictions, self._levels(predictions)
        return xp.maximum(level * error, (level - 1) * error)

    def _levels(self, like: Any) -> Any:
        return _module_of(like).asarray(self.levels, like.dtype)

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        gradient = (outputs >= self.aligned(y)).astype(outputs.dtype) - self._levels(outputs)
        return gradient, jnp.ones_like(outputs)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        if self.outputs is None:
            return _quantile_columns(leaf_index, y, num_leaves, self.levels, weight)  # type: ignore[arg-type]
        levels: Any = self.levels
        if y.ndim == 1:
            return weighted_quantiles(leaf_index, y, num_leaves, levels, sample_weight=weight)
        one = lambda column, level: weighted_quantiles(leaf_index, column, num_leaves, (level,), sample_weight=weight)
        return jnp.concatenate([one(column, level) for column, level in zip(y.T, levels, strict=True)], axis=1)


# --- Log link --------------------------------------------------------------------------------------------------------


class _LogLink(Loss):
    """Deviances of distributions with variance ``mean^p``, of outputs that are logarithms of means.

    Targets are divided by their mean. The best constant of a leaf is the logarithm of its mean, one sample of the mean
    of all included, so that a leaf of zeros does not predict that nothing ever happens.
    """

    link: ClassVar[Link] = "exp"
    _p: float

    def check(self, y: np.ndarray) -> None:
        low = y <= 0 if self._p == 2 else y < 0
        if low.any():
            row = int(np.argwhere(low)[0, 0])
            wanted = "above 0" if self._p == 2 else "at least 0"
            raise ValueError(f"y must be {wanted} for {self}, got {y[low][0].item()!r} in row {row}")

    def check_training(self, y: np.ndarray) -> None:
        self.check(y)
        if not y.sum(0).all():
            raise ValueError(f"y must not be 0 in every row for {self}")

    def units(self, y: np.ndarray) -> tuple[Any, Any]:
        return np.zeros_like(y[0]), y.mean(0)

    def power(self) -> float:
        return 2.0 - self._p

    def each(self, outputs: Array, y: Array) -> Array:
        return self.of_predictions(_mean(outputs), y)

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        xp = _module_of(predictions)
        p, ratio = self._p, y / predictions
        if p == 1:
            return 2 * (y * xp.log(xp.where(y > 0, ratio, 1)) - y + predictions)
        if p == 2:
            return 2 * (ratio - 1 - xp.log(ratio))
        of_targets = xp.where(y > 0, xp.where(y > 0, y, 1) ** (2 - p), 0) / ((1 - p) * (2 - p))
        return 2 * (of_targets - y * predictions ** (1 - p) / (1 - p) + predictions ** (2 - p) / (2 - p))

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        # With d the deviance of the mean m = exp(o): dd/dm = 2 (m - y) m^-p, hence
        #     dd/do = 2 (m^(2-p) - y m^(1-p)),   d2d/do2 = 2 ((2 - p) m^(2-p) + (p - 1) y m^(1-p)) >= 0 for 1 <= p <= 2.
        p, mean = self._p, _mean(outputs)
        ours, theirs = mean ** (2 - p), y * mean ** (1 - p)
        return 2 * (ours - theirs), 2 * ((2 - p) * ours + (p - 1) * theirs)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        return jnp.log(_means(leaf_index, y, num_leaves, weight, extra=1.0))


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

    _p: ClassVar[float] = 1.0


@io.part
@dataclasses.dataclass(frozen=True)
class Gamma(_LogLink):
    """Gamma deviance, ``2 (log(m / y) + y / m - 1)`` with ``m = exp(outputs)``, for positive targets."""

    _p: ClassVar[float] = 2.0


@io.part
@dataclasses.dataclass(frozen=True)
class Tweedie(_LogLink):
    """Tweedie deviance of a compound Poisson-gamma distribution with ``m = exp(outputs)``, for targets of which some
    are exactly 0, such as the claims of a year.

    Args:
      variance_power: power of the mean that the variance is proportional to, above 1 and below 2.

    Raises:
      ValueError: for another power.
    """

    variance_power: float = 1.5

    def __post_init__(self) -> None:
        _check_number("variance_power", self.variance_power, 1, 2)

    @property
    def _p(self) -> float:  # type: ignore[override]
        return self.variance_power


# --- Others ----------------------------------------------------------------------------------------------------------


@io.part
@dataclasses.dataclass(frozen=True)
class OwnLoss(Loss):
    """A user-defined loss, on scaled targets; its derivatives are found by automatic differentiation.

    Args:
      function: ``(outputs, y) -> (n,)``; a module-level function, to compile once.
    """

    function: SampleLoss

    in_units: ClassVar[bool] = False

    def samples(self, outputs: Array, y: Array) -> Array:
        return own_loss(self.function, outputs, y)

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        total = jax.grad(lambda outputs: self.samples(outputs, y).sum())
        along = lambda direction: jax.jvp(total, (outputs,), (jnp.broadcast_to(direction, outputs.shape),))
        if outputs.ndim == 1:
            return along(jnp.ones((), outputs.dtype))
        # The diagonal of the matrix of second derivatives of each sample.
        rows = [along(row) for row in jnp.eye(outputs.shape[1], dtype=outputs.dtype)]
        return rows[0][0], jnp.stack([curved[:, j] for j, (_, curved) in enumerate(rows)], axis=1)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        start = _means(leaf_index, y, num_leaves, weight)
        return newton_constants(self.samples, self.derivatives, start, leaf_index, y, weight)

    def __repr__(self) -> str:
        return f"OwnLoss({getattr(self.function, '__name__', self.function)})"


@io.part
@dataclasses.dataclass(frozen=True)
class LogLoss(Loss):
    """``-log p_y`` of the softmax p of the outputs; its best constants are logarithms of class frequencies.

    Args:
      smoothing: part of the label that is shared equally by all classes, at least 0 and below 1 (Szegedy et al. 2016).

    Raises:
      ValueError: for another smoothing.
    """

    smoothing: float = 0.0

    link: ClassVar[Link] = "softmax"

    def __post_init__(self) -> None:
        if self.smoothing != 0:
            _check_number("smoothing", self.smoothing, 0, 1)

    def labels(self, y: Int[Array, " n"], like: Array) -> Float[Array, "n k"]:
        """Returns smoothed one-hot encoded classes."""
        one_hot = jax.nn.one_hot(y, like.shape[-1], dtype=like.dtype)
        return one_hot if self.smoothing == 0 else optax.smooth_labels(one_hot, self.smoothing)

    def samples(self, outputs: Array, y: Array) -> Array:
        if self.smoothing == 0:
            return optax.losses.softmax_cross_entropy_with_integer_labels(outputs, y)
        return optax.losses.softmax_cross_entropy(outputs, self.labels(y, outputs))

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        chance = jax.nn.softmax(outputs, axis=-1)
        return chance - self.labels(y, outputs), chance * (1 - chance)

    def initial(self, y: Array, weight: Array, classes: int) -> Array:
        """Returns the logarithms of the class frequencies, one sample more of each."""
        counts = 1 + jax.ops.segment_sum(weight, y, classes)
        frequencies = counts / counts.sum()
        return jnp.log((1 - self.smoothing) * frequencies + self.smoothing / classes)


@io.part
@dataclasses.dataclass(frozen=True)
class Rewards(Loss):
    """Minus the expected reward of an action drawn from the softmax of the outputs; the targets are the rewards of all
    actions, ``(n, actions)``, its best constant an action.
    """

    link: ClassVar[Link] = "softmax"

    def samples(self, outputs: Array, y: Array) -> Array:
        return -(jax.nn.softmax(outputs, axis=-1) * y).sum(-1)

    def of_predictions(self, predictions: Any, y: Any) -> Any:
        return -predictions * y

    def initial(self, y: Array, weight: Array, outputs: int) -> Array:
        return jnp.zeros(y.shape[1:], y.dtype)  # no preference, as a certain action has no gradient

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        played = jax.nn.softmax(outputs, axis=-1)
        gain = y - (played * y).sum(-1, keepdims=True)
        return -played * gain, played * (1 - played)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        best = _means(leaf_index, y, num_leaves, weight).argmax(1)
        return _CERTAIN * jax.nn.one_hot(best, y.shape[1], dtype=y.dtype)


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raises ``ValueError`` unless the value is a number above ``low`` and below ``high``."""
    number = isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)
    if not number or not low < value < high:
        below = "" if high == np.inf else f" and below {high:g}"
        raise ValueError(f"{name} must be above {low:g}{below}, got {value!r}")


_NAMES: dict[str, type[Loss]] = {
    "squared_error": SquaredError,
    "absolute_error": AbsoluteError,
    "huber": Huber,
    "quantile": Quantile,
    "poisson": Poisson,
    "gamma": Gamma,
    "tweedie": Tweedie,
}


def named(loss: "str | Loss | SampleLoss") -> Loss:
    """Returns the loss of a name, such as ``"poisson"``; a loss as it is; and a function as :class:`OwnLoss`.

    Raises:
      ValueError: for anything else.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        checks.check_choice("loss", loss, tuple(_NAMES), "a loss, or a function (outputs, y) -> (n,)")
        return _NAMES[loss]()
    if not callable(loss):
        raise ValueError(f"loss must be a function (outputs, y) -> (n,), got {loss!r}")
    return OwnLoss(loss)
