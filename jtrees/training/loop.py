"""Method, and the one training loop: a state that advances, compiled, to be vmapped over seeds and hyper-parameters.

A method is a small tuple of pure functions, as an optimiser is in optax. A run is a :class:`TrainState`: ``start``
makes it, ``advance`` takes it so many steps further, ``best`` is what it has found; ``train`` is the three in one.
``multi_start`` makes a run (or anything that answers like one) from many starts and picks the best.
"""

from collections.abc import Callable
import inspect
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import optax

from jtrees import io, sharding, validation

Params = Any  # a pytree of arrays
Number = float | jax.Array | Callable[[Any], Any]  # a number, a traced one, or an optax schedule of the step


def at_step(value: Number, step: Array | int) -> Any:
    """The value of a hyper-parameter at a step: a schedule is asked, a number stays as it is."""
    return value(step) if callable(value) else value


class Batch(NamedTuple):
    """What a step sees: samples first in all of it.

    Attributes:
      x: samples, ``(n, p)``.
      y: targets, any pytree of arrays whose first axis is n.
      weight: nonnegative weights of the samples, ``(n,)``, or None: all alike.
    """

    x: Float[Array, "n p"]
    y: Any
    weight: Float[Array, " n"] | None = None


class Method(NamedTuple):
    """What a paper adds to the training loop.

    Attributes:
      init: ``(batch, *, key) -> params``.
      loss: ``(params, batch, *, key, step) -> (loss, score)``. ``loss`` is the weighted mean over samples that training
        minimises (weights have mean 1 over all of the data). ``score`` is the loss of the *hardened* model on the same
        samples, which keep-best watches; most methods have it at hand once they have the loss, and where nobody asks
        for it the compiler leaves it out. A method without such a thing returns its loss twice.
      harden: ``(params, batch) -> ObliqueTree | Forest | None``: the hard tree that the parameters stand for, leaves
        refitted on the batch; can be compiled.
      project: ``params -> params``, at the start and after each step of the optimiser (norm balls, ...); a method with
        an ``update`` of its own projects there.
      update: ``(params, opt_state, batch, *, key, step) -> (params, opt_state, (loss, score))``: a step of its own, in
        place of the gradient of ``loss`` and the optimiser, where those would touch more than the method means to; the
        optimiser given only makes the first ``opt_state``.
    """

    init: Callable[..., Params]
    loss: Callable[..., tuple[jax.Array, jax.Array]]
    harden: Callable[..., Any]
    project: Callable[[Params], Params] = lambda params: params
    update: Callable[..., tuple[Params, Any, tuple[jax.Array, jax.Array]]] | None = None


@struct.dataclass
class Best:
    """The parameters with the lowest score that were seen.

    Attributes:
      params: the parameters.
      score: their score (lower is better); infinite if nothing was looked at yet.
      step: the number of updates that they had seen.
    """

    params: Params
    score: Float[Array, ""]
    step: Int[Array, ""]


@io.state
@struct.dataclass
class TrainState:
    """All that a run is.

    Attributes:
      params: the parameters now.
      opt_state: of the optimiser.
      order: of the samples in this epoch, ``(n,)``.
      step: updates so far. Where states are vmapped, keep it one number for all (``in_axes=None``), or what is looked
        at now and then is computed at every step.
      key: of the run.
      best: the best that was looked at.
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
    """Of each step: the loss before the update, and the score before it (NaN where it was not looked at)."""

    losses: Float[Array, " steps"]
    scores: Float[Array, " steps"]


class TrainResult(NamedTuple):
    """What one run of training leaves.

    Attributes:
      params: the best parameters by score if they were watched (``score_every``), else the last.
      score: their score on the whole training data (lower is better); infinite if the run is not finite.
      step: the number of updates that they had seen.
      finite: whether every loss of the run, and the score of its last parameters, was finite.
      losses: the loss before each update, ``(steps,)``.
      scores: the score before each update, ``(steps,)``; NaN where it was not looked at.
    """

    params: Params
    score: Float[Array, ""]
    step: Int[Array, ""]
    finite: Bool[Array, ""]
    losses: Float[Array, " steps"]
    scores: Float[Array, " steps"]


# --- A run -----------------------------------------------------------------------------------------------------------


def start(
    method: Method, data: Batch, *, key: Array, optimizer: optax.GradientTransformation, params: Params | None = None
) -> TrainState:
    """A run that has not begun.

    Args:
      method: what to train.
      data: samples, targets and weights.
      key: for the initial parameters, the order of samples, and whatever the method draws.
      optimizer: any optax transformation.
      params: where to start, by default ``method.init``.

    Raises:
      ValueError: for shapes or dtypes that do not fit, a method or an optimiser that is none, a key that is none, or
        parameters of another structure than the method's.
    """
    data = _checked(data)
    validation.check_key(key)
    _check_method(method, optimizer)
    fresh = lambda: method.init(data, key=_keys(key)[0])
    if params is not None:
        expected, came = (jax.tree.map(jnp.shape, jax.eval_shape(make)) for make in (fresh, lambda: params))
        if expected != came:
            raise ValueError(f"params must be like those of the method, {expected}, got {came}")
    return init_state(method.project(fresh() if params is None else params), data, key=key, optimizer=optimizer)


def init_state(params: Params, data: Batch, *, key: Array, optimizer: optax.GradientTransformation) -> TrainState:
    """The state of a run before its first step, from parameters as they are."""
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
    """A run, so many steps further: ``advance`` twice by k steps is bit for bit ``advance`` by 2 k.

    Pure: ``jit`` it, ``vmap`` it.

    Args:
      method: what is trained.
      state: of the run, from :func:`start` or from here.
      data: samples, targets and weights.
      optimizer: as given to :func:`start`; one that looks at the loss (``reduce_on_plateau``) is given it.
      steps: number of updates.
      batch_size: samples in a mini-batch; shuffled anew in each epoch, those left over rest until the next. None
        takes all samples at once, in order.
      score_every: look at the score every so many steps, and keep the best parameters seen. 0: do not.
      score: ``params -> scalar`` to watch instead of the method's own (a validation loss, say); lower is better.

    Raises:
      ValueError: for shapes or dtypes that do not fit, steps < 1, a batch size that is not between 1 and n, or other
        rows than the run began with.
    """
    validation.check_count("steps", steps)
    data = _checked(data)
    if batch_size is not None and state.order.shape != data.x.shape[:1]:
        raise ValueError(f"data must have the {len(state.order)} rows that the run began with, got {len(data.x)}")
    once = one_step(method, data, optimizer, batch_size=batch_size, score_every=score_every, score=score)
    state, history = jax.lax.scan(lambda state, _: once(state), state, length=steps)
    return state, History(*history)


def advance_up_to(
    once: Callable[[TrainState], tuple[TrainState, tuple[Array, Array]]],
    state: TrainState,
    count: Array,
    most: int,
    *,
    step: Array | None = None,
) -> tuple[TrainState, History]:
    """``count`` steps, a traced number up to ``most``: as :func:`advance`, with a history of ``most`` entries of which
    those that were not reached are NaN.

    Args:
      once: a step, from :func:`one_step`.
      state: of the run.
      count: number of steps.
      most: length of the history.
      step: the number of the first step, where that is known: one for all runs side by side, so that what happens at
        some steps is computed at these steps alone.
    """
    state = state if step is None else state.replace(step=jnp.asarray(step, jnp.int32))

    def body(i: Array, carry: tuple[TrainState, History]) -> tuple[TrainState, History]:
        state, history = carry
        state, now = once(state)
        return state, jax.tree.map(lambda all_, one: all_.at[i].set(one), history, History(*now))

    empty = jnp.full(most, jnp.nan, state.best.score.dtype)
    return jax.lax.fori_loop(0, count, body, (state, History(empty, empty)))


def one_step(
    method: Method | Callable[..., Any],
    data: Batch,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int | None = None,
    score_every: int = 0,
    score: Callable[[Params], Array] | None = None,
    last: int | None = None,
) -> Callable[[TrainState], tuple[TrainState, tuple[Array, Array]]]:
    """One step of :func:`advance` as a function of the state: the state after it, the loss and the score before it.

    The score is evaluated before step ``last``, too, whatever ``score_every``. In place of a method its ``update`` will
    do, where no score is evaluated.
    """
    n, dtype = data.x.shape[0], data.x.dtype
    validation.check_count("score_every", score_every, minimum=0)
    if batch_size is not None and not 1 <= validation.check_count("batch_size", batch_size) <= n:
        raise ValueError(f"batch_size must be from 1 to the number of samples, {n}, got {batch_size}")
    if batch_size is not None and batch_size % sharding.parts(n):
        raise ValueError(
            f"batch_size must be a multiple of the {sharding.parts(n)} parts of the rows, got {batch_size}"
        )
    data = sharding.keep_rows(normalised(data))
    with_value = optax.with_extra_args_support(optimizer)  # some look at the loss, too
    free = score_every == 1 and batch_size is None and score is None

    update = method.update if isinstance(method, Method) else method

    def updated(state: TrainState, batch: Batch, key: Array) -> tuple[Params, Any, tuple[Array, Array]]:
        if update is not None:
            return update(state.params, state.opt_state, batch, key=key, step=state.step)
        assert isinstance(method, Method)
        both = lambda params: _pair(method.loss(params, batch, key=key, step=state.step))
        (loss, batch_score), gradient = jax.value_and_grad(both, has_aux=True)(state.params)
        updates, opt_state = with_value.update(gradient, state.opt_state, state.params, value=loss)
        return optax.apply_updates(state.params, updates), opt_state, (loss, batch_score)

    def once(state: TrainState) -> tuple[TrainState, tuple[Array, Array]]:
        _, order_key, loss_key = _keys(state.key)
        now, seen, step = jnp.full((), jnp.nan, dtype), state.best, state.step
        if score_every and not free:
            due = step % score_every == 0
            due = due if last is None else due | (step == last)

            # A branch: out of a loop of one step or none, the compiler would take what the loop does not change, and
            # evaluate the score in every step. The branch gives one number, so that it copies no parameters.
            score_now = lambda: _score(method, state, data, score).astype(dtype)  # type: ignore[arg-type]
            now = jax.lax.cond(due, score_now, lambda: now)

            def look(held: tuple[Best, Array]) -> tuple[Best, Array]:
                return _better(held[0], Best(state.params, now, state.step)), held[1] + 1

            seen, looks = apply_in_place_if(due, look, (seen, jnp.zeros_like(step)))
            # The same number; but the update, which is for this step, now waits for the look. Else it could come first,
            # and the compiler would copy all parameters in every step, for the look to read.
            step = step + looks - due.astype(step.dtype)
        batch, order = data, state.order
        if batch_size is not None:
            batch, order = _batch(data, order, order_key, step, batch_size)
        key = jax.random.fold_in(loss_key, step)
        params, opt_state, (loss, batch_score) = updated(state.replace(step=step), batch, key)
        if free:
            now = batch_score.astype(dtype)  # the batch is all there is: the score comes with the loss
            seen = _better(seen, Best(state.params, now, step))
        finite = state.finite & jnp.isfinite(loss)
        params = method.project(params) if isinstance(method, Method) and update is None else params
        return TrainState(params, opt_state, order, state.step + 1, state.key, seen, finite), (loss.astype(dtype), now)

    return once


def _better(old: Best, new: Best) -> Best:
    """The one with the lower score, of equal ones the old."""
    lower = new.score < old.score
    return jax.tree.map(lambda a, b: jnp.where(lower, b, a), old, new)


def apply_in_place_if(flag: Array, change: Callable[[Any], Any], state: Any) -> Any:
    """What is changed if the flag is set. A loop of one step or none changes arrays in place; a branch copies them."""
    return jax.lax.fori_loop(0, flag.astype(jnp.int32), lambda _, state: change(state), state)


def best(method: Method, state: TrainState, data: Batch, *, score: Callable[[Params], Array] | None = None) -> Best:
    """The best that a run has seen, its last parameters included; the last where none were looked at.

    Args:
      method: what was trained.
      state: of the run.
      data: as given to :func:`advance`.
      score: as given to :func:`advance`.

    Returns:
      Its score is infinite if the run is not finite.
    """
    now = _score(method, state, normalised(_checked(data)), score).astype(state.best.score.dtype)
    last = Best(state.params, now, state.step)
    keep = jnp.isfinite(state.best.score) & ~(now < state.best.score)
    found = jax.tree.map(lambda old, new: jnp.where(keep, old, new), state.best, last)
    return found.replace(score=jnp.where(state.finite & jnp.isfinite(now), found.score, jnp.inf))


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
) -> TrainResult:
    """A whole run: :func:`start`, one :func:`advance`, and the :func:`best` of it.

    Pure: ``jit`` it, ``vmap`` it over keys and over every hyper-parameter that is a number. Under ``jit`` equal shapes
    compile once.

    Args:
      method: what to train.
      data: samples, targets and weights.
      key: for the initial parameters, the order of samples, and whatever the method draws.
      optimizer: any optax transformation.
      steps: number of updates.
      batch_size: as for :func:`advance`.
      score_every: look at the score every so many steps, and return the best parameters seen. 0: return the last.
      score: as for :func:`advance`.

    Raises:
      ValueError: as :func:`start` and :func:`advance`.
    """
    state = start(method, data, key=key, optimizer=optimizer)
    watch: Any = {"batch_size": batch_size, "score_every": score_every, "score": score}
    state, history = advance(method, state, data, optimizer=optimizer, steps=steps, **watch)
    found = best(method, state, data, score=score)
    finite = jnp.isfinite(found.score)
    return TrainResult(found.params, found.score, found.step, finite, *history)


def normalised(data: Batch) -> Batch:
    """The same data with weights of mean 1: the one place where weights are normalised. A mini-batch is not again."""
    if data.weight is None:
        return data
    weight = jnp.asarray(data.weight, data.x.dtype)
    weight = weight / weight.max()
    return data._replace(weight=weight / weight.mean())


def _keys(key: Array) -> Array:
    """For the start, for the order of samples, and for the loss."""
    return jax.random.split(key, 3)


def _score(method: Method, state: TrainState, data: Batch, score: Callable[[Params], Array] | None) -> Array:
    if score is not None:
        own = jnp.asarray(score(state.params))
        if own.shape != ():
            raise ValueError(f"score must give one number, got shape {own.shape}")
        return own
    return _pair(method.loss(state.params, data, key=_keys(state.key)[2], step=state.step))[1]


def _batch(data: Batch, order: Array, key: Array, step: Array, batch_size: int) -> tuple[Batch, Array]:
    """One mini-batch, and the order of samples, drawn anew where an epoch begins."""
    n, parts = order.shape[0], sharding.parts(order.shape[0])
    per_epoch, of_part = n // batch_size, batch_size // parts
    epoch, i = step // per_epoch, step % per_epoch

    # Where rows are shared out among devices, each shuffles its own, and a batch takes as many of each: none moves.
    def shuffle() -> Array:
        drawn = jax.random.fold_in(key, epoch)
        if parts == 1:
            return jax.random.permutation(drawn, n).astype(order.dtype)
        each = lambda key: jax.random.permutation(key, n // parts).astype(order.dtype)
        return jax.vmap(each)(jax.random.split(drawn, parts)).reshape(n)

    order = jax.lax.cond(i == 0, shuffle, lambda: order)
    if parts == 1:
        chosen = jax.lax.dynamic_slice_in_dim(order, i * batch_size, batch_size)
        return jax.tree.map(lambda a: a[chosen], data), order
    within = sharding.keep_rows(order.reshape(parts, n // parts))
    chosen = jax.lax.dynamic_slice_in_dim(within, i * of_part, of_part, axis=1)

    def pick(a: Array) -> Array:
        picked = jax.vmap(lambda rows, chosen: rows[chosen])(a.reshape(parts, -1, *a.shape[1:]), chosen)
        return sharding.keep_rows(picked).reshape(batch_size, *a.shape[1:])

    return jax.tree.map(pick, data), order


# --- The door --------------------------------------------------------------------------------------------------------


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
        raise ValueError(f"optimizer must be an optax transformation, such as optax.adam(0.01), got {optimizer!r}")
    try:
        inspect.signature(method.loss).bind(None, None, key=None, step=None)
    except TypeError as error:
        raise ValueError(f"method.loss must take (params, batch, *, key, step): {error}") from None


def _pair(out: Any) -> tuple[Array, Array]:
    if not isinstance(out, tuple) or len(out) != 2 or any(jnp.shape(a) != () for a in out):
        shapes = jax.tree.map(jnp.shape, out)
        raise ValueError(f"method.loss must return a pair of scalars, (loss, score), got {shapes}")
    return jnp.asarray(out[0]), jnp.asarray(out[1])
