"""The data types of training: a batch, a method, and the state of a run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from jtrees import io, pytree, segments

Params = Any  # a pytree of arrays
Number = float | jax.Array | Callable[[Any], Any]  # a number, which may be traced, or an optax schedule of the step
# The loss of an update that was not made, in a history. NaN would stop a program under jax_debug_nans.
NOT_TAKEN = -np.inf


def at_step(value: Number, step: Array | int) -> Any:
    """Returns the value of a hyperparameter at a step: a schedule is evaluated, and a number is returned unchanged."""
    if not callable(value):
        return value
    with for_optax():
        return value(step)


def for_optax() -> Any:
    """Context in which optax may mix floats and integers, for any setting of ``jax_numpy_dtype_promotion``."""
    return jax.numpy_dtype_promotion("standard")


class Batch(NamedTuple):
    """The data of a step, with samples on the first axis.

    Attributes:
      x: samples, ``(n, p)``.
      y: targets, any pytree of arrays whose first axis is n.
      weight: nonnegative weights of the samples, ``(n,)``; None: equal weights.
    """

    x: Float[Array, "n p"]
    y: Any
    weight: Float[Array, " n"] | None = None


class Method(NamedTuple):
    """The functions that a paper adds to the training loop.

    Attributes:
      init: ``(batch, *, key) -> params``.
      loss: ``(params, batch, *, key, step) -> (loss, score)``. ``loss`` is the weighted mean over samples to minimise
        (weights have mean 1 over the data set). ``score`` is the loss of the *hardened* model on the same samples. The
        best parameters are chosen by the score. The score is often a by-product of the loss, and the compiler removes
        an unused score. A method that has no score returns its loss twice.
      harden: ``(params, batch) -> ObliqueTree | Forest | None``, the hard tree of the parameters, with leaves refitted
        on the batch. It can be compiled.
      project: ``params -> params``, applied to the initial parameters and after each step of the optimiser (norm balls,
        ...). It is not applied after ``update``, which must include the projection.
      update: ``(params, opt_state, batch, *, key, step) -> (params, opt_state, (loss, score))``. It replaces the
        gradient of ``loss`` and the step of the optimiser, for instance by a sparse update. The optimiser is then only
        used to initialise ``opt_state``.
    """

    init: Callable[..., Params]
    loss: Callable[..., tuple[jax.Array, jax.Array]]
    harden: Callable[..., Any]
    project: Callable[[Params], Params] = lambda params: params
    update: Callable[..., tuple[Params, Any, tuple[jax.Array, jax.Array]]] | None = None


@pytree.dataclass
class Best:
    """The best parameters of a run: the parameters with the lowest score, or the last parameters if there is no score.

    Attributes:
      params: the parameters.
      score: score of the parameters (lower is better). It is infinite before the first evaluation, and if no evaluation
        was finite.
      step: number of updates before the parameters were evaluated.
      losses: the loss before each update, ``(steps,)``; in results of :func:`train` only.
      scores: the score before each update, infinite if it was not evaluated; in results of :func:`train` only.
    """

    params: Params
    score: Float[Array, ""]
    step: Int[Array, ""]
    losses: Any = None
    scores: Any = None

    @property
    def finite(self) -> Array:
        """Whether the parameters have a finite score."""
        return jnp.isfinite(self.score)


@io.state
@pytree.dataclass
class TrainState:
    """The whole state of a run.

    Attributes:
      params: the current parameters.
      opt_state: state of the optimiser.
      order: order of the samples in this epoch, ``(n,)``.
      step: number of updates. Under ``vmap``, use ``in_axes=None`` for it. Otherwise scores are evaluated at every
        step.
      key: key of the run.
      best: the best parameters evaluated so far.
      finite: whether all losses so far were finite.
      waited: number of evaluations since the last one that lowered the score.
    """

    params: Params
    opt_state: Any
    order: Int[Array, " n"]
    step: Int[Array, ""]
    key: Array
    best: Best
    finite: Bool[Array, ""]
    waited: Int[Array, ""]

    def evaluated(self, score: Array, least_gain: float = 0.0) -> "TrainState":
        """Returns the state after an evaluation: the current parameters are the best if their score is the lowest.

        Early stopping counts evaluations: a run ends if ``waited`` reaches its patience.

        Args:
          score: score of the current parameters. A score that is not a number is as bad as any.
          least_gain: ``waited`` becomes 0 if the evaluation lowers the lowest score by more than this fraction of it.
        """
        best, score = self.best, score.astype(self.best.score.dtype)
        current = Best(self.params, score, self.step)
        lowest_so_far = jax.tree.map(lambda new, old: jnp.where(score < best.score, new, old), current, best)
        has_best = jnp.isfinite(best.score)  # before the first finite score, a run does not wait
        lowest = jnp.where(has_best, best.score, 0)
        gains = ~has_best | (score < lowest - least_gain * jnp.abs(lowest))
        return self.replace(best=lowest_so_far, waited=jnp.where(gains, 0, self.waited + 1))


class History(NamedTuple):
    """Loss and score before an update or before each of several; the score is infinite if it was not evaluated."""

    losses: Float[Array, "*steps"]
    scores: Float[Array, "*steps"]


def normalised(data: Batch) -> Batch:
    """Returns the data with weights of mean 1 over all rows; mini-batches are not normalised again."""
    # The loss of a step is a sum over rows, divided by their number. Rows of weight 0, such as padding, count in it, so
    # the weights of `mean_one` are divided by the fraction of the other rows.
    if data.weight is None:
        return data
    weight = segments.mean_one(jnp.asarray(data.weight, segments.at_least_float32(data.x)))  # float16 sums overflow
    return data._replace(weight=weight / (weight > 0).mean(dtype=weight.dtype))
