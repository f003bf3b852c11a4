"""User-defined losses, and losses by name."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import io, segments, validation as checks
from jtrees.segments import Array
from jtrees.tasks.base import Loss, SampleLoss
from jtrees.tasks.deviances import Gamma, Poisson, Tweedie
from jtrees.tasks.errors import AbsoluteError, Huber, Quantile, SquaredError
from jtrees.tasks.fits import newton_constants

NAMED: dict[str, type[Loss]] = {
    "squared_error": SquaredError,
    "absolute_error": AbsoluteError,
    "huber": Huber,
    "quantile": Quantile,
    "poisson": Poisson,
    "gamma": Gamma,
    "tweedie": Tweedie,
}

# The curvature of a user-defined loss is looked up at some targets, and at outputs that include these targets.
_TARGETS, _PER_TARGET = 5, 21
_LEAST = 0.01  # least ratio of two curvatures of a smooth loss


@io.part
@dataclasses.dataclass(frozen=True)
class CustomLoss(Loss):
    """A user-defined loss of scaled targets. Automatic differentiation computes its derivatives.

    The loss is smooth if its curvature at targets and outputs in [0, 1] is at least a hundredth of the largest.

    Args:
      function: ``(outputs, y) -> (n,)``. A module-level function is compiled once.
      name: name and version of the function, such as ``"pinball 0.1"``, by which a folder of a sweep knows the loss.
        None: the folder compares the code of the function and what it reads.

    Raises:
      ValueError: on evaluation, if the function does not return shape ``(n,)``.
    """

    function: SampleLoss
    name: str | None = None

    in_units: ClassVar[bool] = False

    def samples(self, outputs: Array, y: Array) -> Array:
        values = jnp.asarray(self.function(outputs, y))
        if values.shape != y.shape[:1]:
            raise ValueError(f"loss must give one number a sample, of shape {y.shape[:1]}, got shape {values.shape}")
        return values

    def derivatives(self, outputs: Array, y: Array) -> tuple[Array, Array]:
        total = jax.grad(lambda outputs: self.samples(outputs, y).sum())
        along = lambda direction: jax.jvp(total, (outputs,), (jnp.broadcast_to(direction, outputs.shape),))
        if outputs.ndim == 1:
            return along(jnp.ones((), outputs.dtype))
        # The curvature is the diagonal of each sample's matrix of second derivatives.
        rows = [along(row) for row in jnp.eye(outputs.shape[1], dtype=outputs.dtype)]
        return rows[0][0], jnp.stack([curved[:, j] for j, (_, curved) in enumerate(rows)], axis=1)

    def is_smooth(self, shape: tuple[int, ...]) -> bool:
        return _has_curvature(self, shape)

    def shifts(self, leaf_index: Array, outputs: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        return self.factors(leaf_index, outputs, jnp.ones_like(outputs), y, num_leaves, weight)

    def constants(self, leaf_index: Array, y: Array, num_leaves: int, weight: Array) -> Array:
        if segments.module_of(leaf_index, y, weight) is not np:
            return _constants(self, leaf_index, y, weight, num_leaves)
        pad = (1 << (len(y) - 1).bit_length()) - len(y)  # rows of weight 0; a power of two limits recompilation
        padded = [np.pad(a, [(0, pad)] + [(0, 0)] * (a.ndim - 1)) for a in (leaf_index, np.float64(y), weight)]
        with jax.enable_x64(True):  # the function uses JAX
            return np.asarray(_compiled_constants(self, *padded, num_leaves))

    def __repr__(self) -> str:
        return f"CustomLoss({self.name or getattr(self.function, '__name__', self.function)})"


@functools.lru_cache(maxsize=128)
def _has_curvature(loss: CustomLoss, shape: tuple[int, ...]) -> bool:
    """Returns whether the curvature of a loss has a lower bound at outputs of this shape. Runs on the host."""
    pairs = np.meshgrid(np.linspace(0, 1, _PER_TARGET), np.linspace(0, 1, _TARGETS))
    outputs, y = (np.float32(a).reshape(-1, *[1] * len(shape)) * np.ones(shape, np.float32) for a in pairs)
    with jax.ensure_compile_time_eval():
        curvature = np.asarray(loss.derivatives(jnp.asarray(outputs), jnp.asarray(y))[1])
    return bool(np.isfinite(curvature).all() and curvature.min() > _LEAST * curvature.max())


def _constants(loss: CustomLoss, leaf_index: Array, y: Array, weight: Array, num_leaves: int) -> Array:
    start = segments.means(leaf_index, y, num_leaves, weight)
    return newton_constants(loss.samples, loss.derivatives, start, leaf_index, y, weight)


_compiled_constants = jax.jit(_constants, static_argnums=(0, 4))


def named(loss: "str | Loss | SampleLoss") -> Loss:
    """Returns the loss with a name such as ``"poisson"``; a function is a :class:`CustomLoss`, and a loss unchanged."""
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        checks.check_choice("loss", loss, tuple(NAMED), "a loss, or a function (outputs, y) -> (n,)")
        return NAMED[loss]()
    if not callable(loss):
        raise ValueError(f"loss must be a function (outputs, y) -> (n,), got {checks.quoted(loss)}")
    return CustomLoss(loss)


def check_without_link(loss: SampleLoss, columns: tuple[int, ...] = ()) -> None:
    """Checks at some targets in [0, 1] that a loss is smallest where outputs equal targets, else raises ``ValueError``.

    Recipes scale targets linearly, and reverse this scaling for outputs. Outputs must therefore estimate targets.
    Outputs of a loss with a link do not (for example, the Poisson loss of log means). ``columns`` is the shape of a
    target.
    """
    targets, steps = np.linspace(0, 1, 5, dtype=np.float32), np.array([-0.5, -0.1, 0.1, 0.5], np.float32)
    with jax.ensure_compile_time_eval():
        y = jnp.broadcast_to(targets.reshape(-1, *[1] * len(columns)), (len(targets), *columns))
        exact, shifted = (np.asarray(a) for a in (loss(y, y), [loss(y + step, y) for step in steps]))
    lower = shifted < exact - 1e-3 * np.maximum(1e-3, np.abs(exact))  # tolerance of float32; NaN is not lower
    if lower.any():
        step, i = np.argwhere(lower)[0]
        raise ValueError(
            f"loss must be smallest where outputs equal targets, which are scaled to [0, 1]; for the target "
            f"{targets[i]:.2g} it is {exact[i]:.4g} there and {shifted[step, i]:.4g} at the output "
            f"{targets[i] + steps[step]:.2g}: a loss with a link needs targets that range from exactly 0 to 1"
        )
