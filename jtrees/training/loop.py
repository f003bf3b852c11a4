"""The compiled training loop: functions of a state, which can be vmapped over seeds and hyperparameters.

A method is a small tuple of pure functions, like an optimiser in optax. The state of a run is a :class:`TrainState`.
``start`` initialises the state, ``advance`` makes updates, and ``best`` returns the best parameters. ``train`` does all
three.
"""

from collections.abc import Callable
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import optax

from jtrees import validation
from jtrees.segments import at_least_float32
from jtrees.training.state import NOT_TAKEN, Batch, Best, History, Method, Params, TrainState, normalised
from jtrees.training.step import has_nan, keys_of, one_step, score_of

MOST = 1024  # updates of a run in one compiled call, and the length of the losses that it returns


def start(
    method: Method, data: Batch, *, key: Array, optimizer: optax.GradientTransformation, params: Params | None = None
) -> TrainState:
    """Returns the initial state of a run.

    Args:
      method: the method to train.
      data: samples, targets and weights.
      key: key for the initial parameters, the order of samples, and random draws of the method.
      optimizer: any optax transformation.
      params: initial parameters; None: the result of ``method.init``.

    Raises:
      ValueError: if shapes or dtypes do not match, or if ``method``, ``optimizer`` or ``key`` has the wrong type. Also
        if the structure of ``params`` differs from the structure of the method's parameters.
    """
    data = _checked(data)
    validation.check_key(key)
    _check_method(method, optimizer)
    initial = lambda: method.init(data, key=keys_of(key)[0])
    if params is not None:
        expected, actual = (jax.tree.map(jnp.shape, jax.eval_shape(make)) for make in (initial, lambda: params))
        if expected != actual:
            raise ValueError(
                f"params must be like those of the method, {validation.quoted(expected)}, "
                f"got {validation.quoted(actual)}"
            )
    return init_state(method.project(initial() if params is None else params), data, key=key, optimizer=optimizer)


def init_state(params: Params, data: Batch, *, key: Array, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the initial state of a run for given parameters."""
    zero, n = jnp.zeros((), jnp.int32), data.x.shape[0]
    best = Best(params, jnp.asarray(jnp.inf, data.x.dtype), zero)
    order = jnp.arange(n, dtype=jnp.int32)
    return TrainState(params, optimizer.init(params), order, zero, key, best, jnp.ones((), bool), zero)


def advance(
    method: Method,
    state: TrainState,
    data: Batch,
    *,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int | None = None,
    score_every: int = 0,
    score: Callable[[Params], Array] | None = None,
) -> tuple[TrainState, History]:
    """Makes ``steps`` updates. Two calls with k steps give the bits of a single call with 2 k steps.

    The function is pure, and can be used with ``jit`` and ``vmap``.

    Args:
      method: the method to train.
      state: state of the run, from :func:`start` or :func:`advance`.
      data: samples, targets and weights.
      optimizer: as for :func:`start`. It receives the loss as ``value`` (for ``reduce_on_plateau``).
      steps: number of updates.
      batch_size: samples in a mini-batch. Samples are shuffled in each epoch. The last samples of an epoch that do not
        fill a mini-batch are skipped until the next shuffle. A mini-batch has no samples of weight 0, unless it has
        all samples. Samples of positive weight take their places. None: each step uses all samples, in order.
      score_every: number of steps between evaluations of the score. The state keeps the parameters of the lowest
        score. 0: no evaluation.
      score: ``params -> scalar`` that replaces the method's score, such as a validation loss. Lower is better.

    Raises:
      ValueError: if shapes or dtypes do not match, if ``steps`` < 1, or if ``batch_size`` is not from 1 to n. Also if
        the number of rows differs from the number of rows at the start.
    """
    steps = validation.check_count("steps", steps)
    data = _checked(data)
    if batch_size is not None and state.order.shape != data.x.shape[:1]:
        raise ValueError(f"data must have the {len(state.order)} rows that the run began with, got {len(data.x)}")
    once = one_step(method, data, optimizer, batch_size=batch_size, score_every=score_every, score=score)
    return advance_up_to(once, state, steps, length=steps)


def advance_up_to(
    once: Callable[..., tuple[TrainState, History]],
    state: TrainState,
    count: Array | int,
    *,
    length: int = MOST,
    step: Array | None = None,
) -> tuple[TrainState, History]:
    """Makes ``count`` updates like :func:`advance`, where ``count`` may be traced, and is at most ``length``."""
    # `once` makes a step, as `one_step` returns it. The history has this length: after the first `count` entries, the
    # loss is `NOT_TAKEN`. `step` is the number of the first step, which all runs side by side share; None:
    # `state.step`.

    def body(i: Array, carry: tuple[TrainState, History]) -> tuple[TrainState, History]:
        state, history = carry
        state, entry = once(state, None if step is None else step + i)
        return state, jax.tree.map(lambda values, value: values.at[i].set(value), history, entry)

    empty = (jnp.full(length, value, state.best.score.dtype) for value in (NOT_TAKEN, jnp.inf))
    return jax.lax.fori_loop(0, count, body, (state, History(*empty)))


def best(method: Method, state: TrainState, data: Batch, *, score: Callable[[Params], Array] | None = None) -> Best:
    """Returns the best parameters of a run, including the last; without evaluations, the last parameters.

    :func:`advance` describes the arguments. If the run became non-finite, the result has the best parameters before
    that. Their score is infinite if no evaluation was finite.
    """
    last_score = score_of(method, state, normalised(_checked(data)), score)
    finite = state.finite & jnp.isfinite(last_score) & ~has_nan(state.params)
    last = Best(state.params, jnp.where(finite, last_score, jnp.inf).astype(state.best.score.dtype), state.step)
    keep = jnp.isfinite(state.best.score) & ~(last.score < state.best.score)
    return jax.tree.map(lambda old, new: jnp.where(keep, old, new), state.best, last)


def train(
    method: Method,
    data: Batch,
    *,
    key: Array,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int | None = None,
    score_every: int = 0,
    score: Callable[[Params], Array] | None = None,
) -> Best:
    """Runs :func:`start`, :func:`advance` and :func:`best`.

    The function is pure. It can be used with ``jit``, and with ``vmap`` over keys and numeric hyperparameters. Under
    ``jit`` equal shapes compile once.

    If the score is the loss of a hard tree with refitted leaves, as in GET, the gradient of ``score`` is 0 where it
    exists. To differentiate through training, differentiate a soft loss of ``params``, and leave ``score_every`` at 0.

    Args:
      method: the method to train.
      data: samples ``(n, p)``, targets ``(n,)`` or ``(n, k)``, and weights.
      key: key for the initial parameters, the order of samples, and random draws of the method.
      optimizer: any optax transformation.
      steps: number of updates.
      batch_size: as for :func:`advance`.
      score_every: number of steps between evaluations of the score. The parameters of the lowest score are returned.
        0: the last parameters are returned.
      score: as for :func:`advance`.

    Raises:
      ValueError: as :func:`start` and :func:`advance`.
    """
    state = start(method, data, key=key, optimizer=optimizer)
    options: Any = {"batch_size": batch_size, "score_every": score_every, "score": score}
    state, history = advance(method, state, data, optimizer=optimizer, steps=steps, **options)
    return best(method, state, data, score=score).replace(losses=history.losses, scores=history.scores)


def _checked(data: Any) -> Batch:
    if not isinstance(data, Batch):
        raise ValueError(f"data must be a jtrees.Batch(x, y, weight), got {type(data).__name__}")
    data = jax.tree.map(jnp.asarray, data)
    if data.x.ndim != 2 or not jnp.issubdtype(data.x.dtype, jnp.floating):
        raise ValueError(f"x must have shape (n, p) and a floating dtype, got {data.x.dtype} of shape {data.x.shape}")
    n = data.x.shape[0]
    if any(a.shape[:1] != (n,) for a in jax.tree.leaves(data.y)):
        raise ValueError(f"y must have shape (n, ...) with n = {n}, got {jax.tree.map(jnp.shape, data.y)}")
    if data.weight is not None and data.weight.shape != (n,):
        raise ValueError(f"weight must have shape ({n},), one a row of x, got {data.weight.shape}")
    # Under x64, targets in NumPy's double precision would otherwise meet parameters in the precision of x.
    dtype = at_least_float32(data.x)
    cast = lambda a: a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a
    return data._replace(y=jax.tree.map(cast, data.y), weight=jax.tree.map(cast, data.weight))


def _check_method(method: Any, optimizer: Any) -> None:
    if not isinstance(method, Method):
        raise ValueError(f"method must be a jtrees.Method, got {type(method).__name__}")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ValueError(
            f"optimizer must be an optax transformation, such as optax.adam(0.01), got {validation.quoted(optimizer)}"
        )
    try:
        inspect.signature(method.loss).bind(None, None, key=None, step=None)
    except TypeError as error:
        raise ValueError(f"method.loss must take (params, batch, *, key, step): {error}") from None
