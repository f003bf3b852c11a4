"""Method, and the compiled training loop: a state that advances, to be vmapped over seeds and hyperparameters.

A method is a small tuple of pure functions, like an optimiser in optax. A run is a :class:`TrainState`: ``start``
initialises it, ``advance`` takes steps, ``best`` returns the best parameters; ``train`` does all three. ``multi_start``
runs many starts and chooses the best.
"""

from collections.abc import Callable
import inspect
from typing import Any, NamedTuple

import jax
from jax.extend.random import threefry_2x32
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np
import optax

from jtrees import io, pytree, sharding, validation

Params = Any  # a pytree of arrays
Number = float | jax.Array | Callable[[Any], Any]  # a number, a traced one, or an optax schedule of the step
# In a history, the loss of a step that was not taken. No loss is so low; NaN would stop a program under jax_debug_nans.
NOT_TAKEN = -np.inf
_ORDER = (0x9E3779B9, 0x7F4A7C15)  # sets the words that shuffle the rows apart from all others of a run's key


def at_step(value: Number, step: Array | int) -> Any:
    """Returns the value of a hyperparameter at a step: a schedule is evaluated, a number is unchanged."""
    if not callable(value):
        return value
    with for_optax():
        return value(step)


def for_optax() -> Any:
    """Context of functions of optax, where floats meet integers: ``jax_numpy_dtype_promotion`` is not for them."""
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
        (weights have mean 1 over the data set). ``score`` is the loss of the *hardened* model on the same samples, by
        which the best parameters are chosen; it is often a by-product of the loss, and the compiler removes it where it
        is not used. A method without a score returns its loss twice.
      harden: ``(params, batch) -> ObliqueTree | Forest | None``: the hard tree of the parameters, with leaves refitted
        on the batch; can be compiled.
      project: ``params -> params``, applied initially and after each step of the optimiser (norm balls, ...); an
        ``update`` has to project by itself.
      update: ``(params, opt_state, batch, *, key, step) -> (params, opt_state, (loss, score))``: replaces the gradient
        of ``loss`` and the optimiser's step, for instance by a sparse update; the optimiser then only initialises
        ``opt_state``.
    """

    init: Callable[..., Params]
    loss: Callable[..., tuple[jax.Array, jax.Array]]
    harden: Callable[..., Any]
    project: Callable[[Params], Params] = lambda params: params
    update: Callable[..., tuple[Params, Any, tuple[jax.Array, jax.Array]]] | None = None


@pytree.dataclass
class Best:
    """The best parameters of a run, so far or finally: those with the lowest score, or the last if it has no scores.

    Attributes:
      params: the parameters.
      score: their score (lower is better); infinite before the first evaluation, and if the run is not finite.
      step: number of updates before it was evaluated.
      losses: the loss before each update, ``(steps,)``; in results of :func:`train` only.
      scores: the score before each update, infinite where it was not evaluated; in results of :func:`train` only.
    """

    params: Params
    score: Float[Array, ""]
    step: Int[Array, ""]
    losses: Any = None
    scores: Any = None

    @property
    def finite(self) -> Array:
        """Whether every loss of the run, and the score of its last parameters, was finite."""
        return jnp.isfinite(self.score)


@io.state
@pytree.dataclass
class TrainState:
    """The whole state of a run.

    Attributes:
      params: the current parameters.
      opt_state: state of the optimiser.
      order: order of the samples in this epoch, ``(n,)``.
      step: number of updates. Under ``vmap`` keep it unbatched (``in_axes=None``), or scores are evaluated at every
        step.
      key: key of the run.
      best: the best parameters evaluated so far.
      finite: whether every loss so far was finite.
    """

    params: Params
    opt_state: Any
    order: Int[Array, " n"]
    step: Int[Array, ""]
    key: Array
    best: Best
    finite: Bool[Array, ""]


class History(NamedTuple):
    """Loss and score before each update, or before one; the score is infinite where it was not evaluated."""

    losses: Float[Array, "*steps"]
    scores: Float[Array, "*steps"]


# --- A run -----------------------------------------------------------------------------------------------------------


def start(
    method: Method, data: Batch, *, key: Array, optimizer: optax.GradientTransformation, params: Params | None = None
) -> TrainState:
    """Returns the initial state of a run.

    Args:
      method: what to train.
      data: samples, targets and weights.
      key: key for the initial parameters, the order of samples, and random draws of the method.
      optimizer: any optax transformation.
      params: initial parameters, by default those of ``method.init``.

    Raises:
      ValueError: for shapes or dtypes that do not fit, a ``method``, ``optimizer`` or ``key`` of the wrong type, or
        parameters of another structure than the method's.
    """
    data = _checked(data)
    validation.check_key(key)
    _check_method(method, optimizer)
    initial = lambda: method.init(data, key=_keys(key)[0])
    if params is not None:
        expected, given = (jax.tree.map(jnp.shape, jax.eval_shape(make)) for make in (initial, lambda: params))
        if expected != given:
            raise ValueError(
                f"params must be like those of the method, {validation.quoted(expected)}, "
                f"got {validation.quoted(given)}"
            )
    return init_state(method.project(initial() if params is None else params), data, key=key, optimizer=optimizer)


def init_state(params: Params, data: Batch, *, key: Array, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the initial state of a run for given parameters."""
    zero, n = jnp.zeros((), jnp.int32), data.x.shape[0]
    best = Best(params, jnp.asarray(jnp.inf, data.x.dtype), zero)
    order = jnp.arange(n, dtype=jnp.int32)
    return TrainState(params, optimizer.init(params), order, zero, key, best, jnp.ones((), bool))


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
    """Takes training steps: two calls with k steps give bit for bit the state of one call with 2 k.

    Pure: ``jit`` it, ``vmap`` it.

    Args:
      method: the method to train.
      state: state of the run, from :func:`start` or :func:`advance`.
      data: samples, targets and weights.
      optimizer: as for :func:`start`; it gets the loss as ``value`` (for ``reduce_on_plateau``).
      steps: number of updates.
      batch_size: samples in a mini-batch, shuffled in each epoch, without the remainder. None: full batch, in order.
      score_every: number of steps between evaluations of the score, by which the best parameters are kept. 0: none.
      score: ``params -> scalar`` in place of the method's score, such as a validation loss; lower is better.

    Raises:
      ValueError: for shapes or dtypes that do not fit, steps < 1, a batch size that is not between 1 and n, or another
        number of rows than initially.
    """
    steps = validation.check_count("steps", steps)
    data = _checked(data)
    if batch_size is not None and state.order.shape != data.x.shape[:1]:
        raise ValueError(f"data must have the {len(state.order)} rows that the run began with, got {len(data.x)}")
    once = one_step(method, data, optimizer, batch_size=batch_size, score_every=score_every, score=score)
    return advance_up_to(once, state, steps, steps)


def advance_up_to(
    once: Callable[..., tuple[TrainState, History]],
    state: TrainState,
    count: Array | int,
    most: int,
    *,
    step: Array | None = None,
) -> tuple[TrainState, History]:
    """Takes ``count`` steps, a number up to ``most`` that may be traced: as :func:`advance`, with a history of ``most``
    entries, in which steps not taken have the loss :data:`NOT_TAKEN`.

    Args:
      once: a step, from :func:`one_step`.
      state: state of the run.
      count: number of steps.
      most: length of the history.
      step: number of the first step, shared by all runs side by side; None: ``state.step``.
    """

    def body(i: Array, carry: tuple[TrainState, History]) -> tuple[TrainState, History]:
        state, history = carry
        state, entry = once(state, None if step is None else step + i)
        return state, jax.tree.map(lambda all_, one: all_.at[i].set(one), history, entry)

    empty = (jnp.full(most, value, state.best.score.dtype) for value in (NOT_TAKEN, jnp.inf))
    return jax.lax.fori_loop(0, count, body, (state, History(*empty)))


def one_step(
    method: Method | Callable[..., Any],
    data: Batch,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int | None = None,
    score_every: int | Array = 0,
    score: Callable[[Params], Array] | None = None,
    last: int | Array | None = None,
    patience: int | None = None,
) -> Callable[..., tuple[TrainState, History]]:
    """Returns a step of :func:`advance` as a function ``(state, shared_step=None) -> (state, History(loss, score))``.

    ``shared_step`` is the number of the step where a search counts for all runs side by side, so that branches on it
    stay branches under ``vmap``; None: ``state.step``. The score is also evaluated before step ``last``. The best
    parameters do not change any more once :func:`is_over` with this ``patience``. Without scores, ``method`` may be the
    ``update`` of a method.
    """
    n, dtype = data.x.shape[0], data.x.dtype
    traced = isinstance(score_every, jax.Array)
    if not traced:
        validation.check_count("score_every", score_every, minimum=0)
    if batch_size is not None and not 1 <= validation.check_count("batch_size", batch_size) <= n:
        raise ValueError(
            f"batch_size must be from 1 to the number of samples, {n}, got {validation.quoted(batch_size)}"
        )
    if batch_size is not None and batch_size % sharding.parts(n):
        raise ValueError(
            f"batch_size must be a multiple of the {sharding.parts(n)} parts of the rows, "
            f"got {validation.quoted(batch_size)}"
        )
    data = sharding.keep_rows(normalised(data))
    with_value = optax.with_extra_args_support(optimizer)  # some use the loss
    free = not traced and score_every == 1 and batch_size is None and score is None

    update = method.update if isinstance(method, Method) else method

    def updated(state: TrainState, batch: Batch, key: Array) -> tuple[Params, Any, tuple[Array, Array]]:
        if update is not None:
            return update(state.params, state.opt_state, batch, key=key, step=state.step)
        assert isinstance(method, Method)
        both = lambda params: _pair(method.loss(params, batch, key=key, step=state.step))
        (loss, batch_score), gradient = jax.value_and_grad(both, has_aux=True)(state.params)
        with for_optax():
            updates, opt_state = with_value.update(gradient, state.opt_state, state.params, value=loss)
        return optax.apply_updates(state.params, updates), opt_state, (loss, batch_score)

    def once(state: TrainState, shared_step: Array | None = None) -> tuple[TrainState, History]:
        if shared_step is not None:
            state = state.replace(step=jnp.asarray(shared_step, jnp.int32))
        score_value, best_so_far, step = jnp.full((), jnp.inf, dtype), state.best, state.step
        if (traced or score_every) and not free:
            due = (score_every > 0) & (step % jnp.maximum(score_every, 1) == 0)
            due = due if last is None else due | (step == last)

            # A branch, as the compiler would move the score out of a loop of at most one step and evaluate it in every
            # step. It returns a scalar, so that no parameters are copied.
            score_now = lambda: _score(method, state, data, score).astype(dtype)  # type: ignore[arg-type]
            score_value = jax.lax.cond(due, score_now, lambda: score_value)

            counts = score_value if patience is None else jnp.where(is_over(state, patience), jnp.inf, score_value)

            def keep_better(carry: tuple[Best, Array]) -> tuple[Best, Array]:
                return _better(carry[0], Best(state.params, counts, state.step)), carry[1] + 1

            best_so_far, evaluations = apply_in_place_if(due, keep_better, (best_so_far, jnp.zeros_like(step)))
            # The same number, but it makes the update depend on this evaluation. Otherwise the update might come first,
            # and the compiler would copy all parameters in every step for the evaluation to read.
            step = step + evaluations - due.astype(step.dtype)
        batch, order = data, state.order
        if batch_size is not None:
            batch, order = _batch(data, order, state.key, step, batch_size)
        key = jax.random.fold_in(_keys(state.key)[1], step)
        params, opt_state, (loss, batch_score) = updated(state.replace(step=step), batch, key)
        if free:
            score_value = batch_score.astype(dtype)  # full batch: the score is a by-product of the loss
            best_so_far = _better(best_so_far, Best(state.params, score_value, step))
        finite = state.finite & jnp.isfinite(loss)
        params = method.project(params) if isinstance(method, Method) and update is None else params
        after = TrainState(params, opt_state, order, state.step + 1, state.key, best_so_far, finite)
        return after, History(loss.astype(dtype), score_value)

    return once


def is_over(state: TrainState, patience: int) -> Array:
    """Whether more than ``patience`` steps were taken since the best score, if there is one."""
    return jnp.isfinite(state.best.score) & (state.step - state.best.step > patience)


def _better(old: Best, new: Best) -> Best:
    """Returns the one with the lower score; ties keep the old."""
    lower = new.score < old.score
    return jax.tree.map(lambda a, b: jnp.where(lower, b, a), old, new)


def apply_in_place_if(flag: Array, change: Callable[[Any], Any], state: Any) -> Any:
    """Returns ``change(state)`` if the flag is set, by a loop of at most one step: a branch would copy the arrays."""
    return jax.lax.fori_loop(0, flag.astype(jnp.int32), lambda _, state: change(state), state)


def best(method: Method, state: TrainState, data: Batch, *, score: Callable[[Params], Array] | None = None) -> Best:
    """Returns the best parameters of a run, including its last; the last if none were evaluated.

    Args:
      method: the trained method.
      state: state of the run.
      data: as for :func:`advance`.
      score: as for :func:`advance`.

    Returns:
      The best parameters; their score is infinite if the run is not finite.
    """
    last_score = _score(method, state, normalised(_checked(data)), score).astype(state.best.score.dtype)
    last = Best(state.params, last_score, state.step)
    keep = jnp.isfinite(state.best.score) & ~(last_score < state.best.score)
    chosen = jax.tree.map(lambda old, new: jnp.where(keep, old, new), state.best, last)
    return chosen.replace(score=jnp.where(state.finite & jnp.isfinite(last_score), chosen.score, jnp.inf))


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

    Pure: ``jit`` it, ``vmap`` it over keys and numeric hyperparameters. Under ``jit`` equal shapes compile once.

    Args:
      method: what to train.
      data: samples, targets and weights.
      key: key for the initial parameters, the order of samples, and random draws of the method.
      optimizer: any optax transformation.
      steps: number of updates.
      batch_size: as for :func:`advance`.
      score_every: steps between evaluations of the score, by which the best parameters are returned. 0: the last are.
      score: as for :func:`advance`.

    Raises:
      ValueError: as :func:`start` and :func:`advance`.
    """
    state = start(method, data, key=key, optimizer=optimizer)
    options: Any = {"batch_size": batch_size, "score_every": score_every, "score": score}
    state, history = advance(method, state, data, optimizer=optimizer, steps=steps, **options)
    return best(method, state, data, score=score).replace(losses=history.losses, scores=history.scores)


def normalised(data: Batch) -> Batch:
    """Returns the data with weights of mean 1; mini-batches are not normalised again."""
    if data.weight is None:
        return data
    weight = jnp.asarray(data.weight, data.x.dtype)
    weight = weight / weight.max()
    return data._replace(weight=weight / weight.mean())


def _keys(key: Array) -> Array:
    """Returns keys for the initial parameters and for the loss."""
    return jax.random.split(key)


def _score(method: Method, state: TrainState, data: Batch, score: Callable[[Params], Array] | None) -> Array:
    if score is not None:
        value = jnp.asarray(score(state.params))
        if value.shape != ():
            raise ValueError(f"score must give one number, got shape {value.shape}")
        return value
    return _pair(method.loss(state.params, data, key=_keys(state.key)[1], step=state.step))[1]


def _batch(data: Batch, order: Array, key: Array, step: Array, batch_size: int) -> tuple[Batch, Array]:
    """Returns a mini-batch, and the order of samples, which is shuffled at the start of an epoch."""
    n, parts = order.shape[0], sharding.parts(order.shape[0])
    per_epoch, per_part = n // batch_size, batch_size // parts
    epoch, i = step // per_epoch, step % per_epoch

    # Each device shuffles its shard of the rows, and batches take equally many of each, so that no row moves.
    def shuffle() -> Array:
        return _random_words(key, epoch, n).reshape(parts, n // parts).argsort(axis=1).reshape(n).astype(order.dtype)

    order = jax.lax.cond(i == 0, shuffle, lambda: order)
    if parts == 1:
        chosen = jax.lax.dynamic_slice_in_dim(order, i * batch_size, batch_size)
        return jax.tree.map(lambda a: a[chosen], data), order
    within = sharding.keep_rows(order.reshape(parts, n // parts))
    chosen = jax.lax.dynamic_slice_in_dim(within, i * per_part, per_part, axis=1)

    def pick(a: Array) -> Array:
        picked = jax.vmap(lambda rows, chosen: rows[chosen])(a.reshape(parts, -1, *a.shape[1:]), chosen)
        return sharding.keep_rows(picked).reshape(batch_size, *a.shape[1:])

    return jax.tree.map(pick, data), order


def _random_words(key: Array, epoch: Array, n: int) -> Array:
    """Returns ``n`` random 32-bit words for an epoch.

    One call of the generator makes them: the words are numbered through all epochs. A key for each epoch would take
    three calls, and each call costs a tenth of a second of compilation.
    """
    words = jax.random.key_data(key).ravel()[-2:] ^ jnp.array(_ORDER, jnp.uint32)
    return threefry_2x32(words, epoch.astype(jnp.uint32) * n + jnp.arange(n, dtype=jnp.uint32))


# --- Checks ----------------------------------------------------------------------------------------------------------


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
    return data


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


def _pair(out: Any) -> tuple[Array, Array]:
    if not isinstance(out, tuple) or len(out) != 2 or any(jnp.shape(a) != () for a in out):
        shapes = jax.tree.map(jnp.shape, out)
        raise ValueError(f"method.loss must return a pair of scalars, (loss, score), got {validation.quoted(shapes)}")
    return jnp.asarray(out[0]), jnp.asarray(out[1])
