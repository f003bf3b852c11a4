"""Losses of samples that :mod:`optax.losses` lacks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from jtrees._classes import is_soft

SampleLoss = Callable[[jax.Array, jax.Array], jax.Array]  # outputs (n,) or (n, k), targets -> (n,)


def log_loss(probabilities: Float[Array, "n k"], y: Int[Array, " n"] | Float[Array, "n k"]) -> Float[Array, " n"]:
    """Returns ``-log p_y`` of each sample, or for soft labels ``(n, k)`` the cross-entropy ``-sum_k y_k log p_k``.

    Probabilities below the smallest normal number are raised to it.
    """
    tiny = jnp.finfo(probabilities.dtype).tiny
    if is_soft(y):
        return -(y.astype(probabilities.dtype) * jnp.log(jnp.maximum(probabilities, tiny))).sum(1)
    chosen = jnp.take_along_axis(probabilities, y[:, None], axis=1)[:, 0]
    return -jnp.log(jnp.maximum(chosen, tiny))


def check_without_link(loss: SampleLoss, columns: tuple[int, ...] = ()) -> None:
    """Checks at some targets in [0, 1] that a loss is smallest where outputs equal targets.

    Recipes scale targets linearly, and reverse this scaling for outputs. Outputs must therefore estimate targets.
    Outputs of a loss with a link do not (for example, the Poisson loss of log means).

    Args:
      loss: function of outputs and targets ``(n, *columns)`` that returns the loss of each sample.
      columns: shape of the target of a sample.

    Raises:
      ValueError: if another output has a lower loss. The message names the target.
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


def weighted_mean(lost: Float[Array, " n"], weight: Float[Array, " n"] | None) -> Float[Array, ""]:
    """Returns the weighted mean of losses. Weights must have mean 1 over the data set.

    The sum is divided by the number of samples, not by the sum of weights. A sample's contribution therefore does not
    depend on its mini-batch. A sample of weight 0 does not count, even if its loss is infinite. (Its gradient must be
    finite: 0 times infinity is not a number.)
    """
    return lost.mean() if weight is None else jnp.where(weight > 0, weight * lost, 0).mean()


def mean_loss(lost: Float[Array, " n"], weight: Float[Array, " n"] | None) -> Float[Array, ""]:
    """Returns the mean of losses for weights of any mean; weights None: equal weights."""
    return weighted_mean(lost, weight if weight is None else weight / weight.mean())
