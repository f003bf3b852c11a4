"""One step of a run: the mini-batch, the update, and the score that decides which parameters are the best."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.extend.random import threefry_2x32
import jax.numpy as jnp
from jaxtyping import Array
import optax

from jtrees import sharding, validation
from jtrees.training.state import NOT_TAKEN, Batch, Best, History, Method, Params, TrainState, for_optax, normalised

_LAST = 0xFFFFFFFF  # the largest word, which sorts samples of weight 0 behind all others
_ORDER = (0x9E3779B9, 0x7F4A7C15)  # makes the random words of the shuffles differ from other uses of a run's key


def one_step(
    method: Method | Callable[..., Any],
    data: Batch,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int | None = None,
    score_every: int = 0,
    score: Callable[[Params], Array] | None = None,
) -> Callable[..., tuple[TrainState, History]]:
    """Returns a step of :func:`advance` as a function ``(state, shared_step=None) -> (state, History(loss, score))``.

    ``shared_step`` is the number of the step if all runs side by side share it; None: ``state.step``. A branch on a
    shared number remains a branch under ``vmap``. If there are no scores, ``method`` may be the ``update`` of a method.
    """
    n, dtype = data.x.shape[0], data.x.dtype
    _check_sizes(n, batch_size, score_every)
    data = sharding.keep_rows(normalised(data))
    reweighted = data if batch_size in (None, n) else sharding.keep_rows(_reweighted(data))
    # On a full batch the score of the method is a by-product of its loss.
    free = score_every == 1 and batch_size is None and score is None
    update = _update_of(method, optimizer)
    project = method.project if isinstance(method, Method) and method.update is None else lambda params: params

    def once(state: TrainState, shared_step: Array | None = None) -> tuple[TrainState, History]:
        if shared_step is not None:
            state = state.replace(step=jnp.asarray(shared_step, jnp.int32))
        score_value, evaluated, step = jnp.full((), jnp.inf, dtype), state, state.step
        if score_every and not free:
            due = step % score_every == 0
            score_value = _score_if(due, lambda: score_of(method, state, data, score), state)  # type: ignore[arg-type]
            evaluated = _evaluated_if(due, state, score_value)
            # Equal to ``state.step``, but the update depends on the evaluation by it. Otherwise the compiler might
            # schedule the update before the evaluation. It would then copy all parameters in every step.
            step = evaluated.step
        batch, order = data, state.order
        if batch_size is not None:
            batch, order = mini_batch(reweighted, order, state.key, step, batch_size)
        key = jax.random.fold_in(keys_of(state.key)[1], step)
        params, opt_state, (loss, batch_score) = update(state.params, state.opt_state, batch, key=key, step=step)
        if free:
            score_value = jnp.where(jnp.isfinite(loss), batch_score, jnp.inf).astype(dtype)
            evaluated = state.evaluated(score_value)
        best, waited, finite = evaluated.best, evaluated.waited, state.finite & jnp.isfinite(loss)
        after = TrainState(project(params), opt_state, order, state.step + 1, state.key, best, finite, waited)
        return after, History(loss.astype(dtype), score_value)

    return once


def with_early_stopping(
    once: Callable[..., tuple[TrainState, History]],
    score: Callable[[Params], Array] | None,
    is_due: Callable[[Array], Array],
    has_ended: Callable[[TrainState], Array],
) -> Callable[..., tuple[TrainState, History]]:
    """Returns a step like ``once`` that also evaluates, and changes nothing of the result after the end of the run.

    After the end, a loss is :data:`NOT_TAKEN`, and ``step``, ``best``, ``waited`` and ``finite`` do not change. So the
    result does not depend on the number of further updates.
    """
    # `once` has no scores. The parameters have a score after an update if `is_due(number of updates)`; runs side by
    # side share the number. If `score` is None, there is no evaluation.

    def step(state: TrainState, shared_step: Array | None = None) -> tuple[TrainState, History]:
        ended = has_ended(state)
        after, entry = once(state, shared_step)
        value = entry.scores
        if score is not None:
            due = is_due(after.step)
            value = _score_if(due, partial(score, after.params), after)
            value = jnp.where(ended, jnp.inf, value)
            after = _evaluated_if(due, after, value)
        unless_ended = partial(jnp.where, ended)
        names = "step", "waited", "finite"
        after = after.replace(**{name: unless_ended(getattr(state, name), getattr(after, name)) for name in names})
        return after, History(unless_ended(NOT_TAKEN, entry.losses), value)

    return step


def _check_sizes(n: int, batch_size: int | None, score_every: int) -> None:
    validation.check_count("score_every", score_every, least=0)
    if batch_size is None:
        return
    if not 1 <= validation.check_count("batch_size", batch_size) <= n:
        raise ValueError(
            f"batch_size must be from 1 to the number of samples, {n}, got {validation.quoted(batch_size)}"
        )
    if batch_size % sharding.parts(n):
        raise ValueError(
            f"batch_size must be a multiple of the {sharding.parts(n)} parts of the rows, "
            f"got {validation.quoted(batch_size)}"
        )


def _update_of(method: Method | Callable[..., Any], optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Returns the method's own update, or a step of the optimiser along the gradient of the loss."""
    if not isinstance(method, Method):
        return method
    if method.update is not None:
        return method.update
    optimizer = optax.with_extra_args_support(optimizer)  # some optimisers use the loss

    def update(params: Params, opt_state: Any, batch: Batch, *, key: Array, step: Array) -> tuple[Params, Any, Any]:
        scored_loss = lambda params: _pair(method.loss(params, batch, key=key, step=step))
        (loss, score), gradient = jax.value_and_grad(scored_loss, has_aux=True)(params)
        with for_optax():
            updates, opt_state = optimizer.update(gradient, opt_state, params, value=loss)
        return optax.apply_updates(params, updates), opt_state, (loss, score)

    return update


def score_of(method: Method, state: TrainState, data: Batch, score: Callable[[Params], Array] | None) -> Array:
    """Returns the score of the parameters: the result of ``score`` if it is given, else the score of the method."""
    if score is not None:
        value = jnp.asarray(score(state.params))
        if value.shape != ():
            raise ValueError(f"score must return one number, got shape {value.shape}")
        return value
    return _pair(method.loss(state.params, data, key=keys_of(state.key)[1], step=state.step))[1]


def _score_if(due: Array, score: Callable[[], Array], state: TrainState) -> Array:
    """Returns the score of the state if it is due, else infinity.

    A hard tree whose parameters became non-finite can still have a finite score, which counts as infinite.

    The score is in a branch. The compiler would move it out of a loop of at most one iteration, and evaluate it in
    every step. The branch returns a scalar, so it copies no parameters.
    """
    infinity = jnp.full((), jnp.inf, state.best.score.dtype)

    valid_score = lambda: jnp.where(has_nan(state.params), infinity, score().astype(infinity.dtype))
    return jax.lax.cond(due, valid_score, lambda: infinity)


def has_nan(params: Params) -> Array:
    """Returns whether parameters have become NaN."""
    # A sum is NaN if a number is, or if infinite numbers have both signs. The bounds of linear leaves are infinite from
    # the beginning, with one sign in each array. Unlike a test of each number, a sum needs no memory.
    return jnp.stack([jnp.isnan(leaf.sum()) for leaf in jax.tree.leaves(params)]).any()


def _evaluated_if(due: Array, state: TrainState, score: Array) -> TrainState:
    """Returns the state after an evaluation if it is due; parameters are copied only then."""

    def evaluate(carry: tuple[Best, Array, Array]) -> tuple[Best, Array, Array]:
        best, waited, evaluations = carry
        evaluated = state.replace(best=best, waited=waited).evaluated(score)
        return evaluated.best, evaluated.waited, evaluations + 1

    best, waited, evaluations = apply_in_place_if(due, evaluate, (state.best, state.waited, jnp.zeros_like(state.step)))
    return state.replace(best=best, waited=waited, step=state.step + evaluations - due.astype(state.step.dtype))


def apply_in_place_if(flag: Array, change: Callable[[Any], Any], state: Any) -> Any:
    """Returns ``change(state)`` if the flag is set, else ``state``."""
    # The function uses a loop of at most one iteration, because a branch would copy the arrays.
    return jax.lax.fori_loop(0, flag.astype(jnp.int32), lambda _, state: change(state), state)


def mini_batch(data: Batch, order: Array, key: Array, step: Array, batch_size: int) -> tuple[Batch, Array]:
    """Returns a mini-batch and the order of the samples, which is shuffled at the start of an epoch."""
    # A mini-batch has only samples of positive weight, and its weights come from `_reweighted`. If samples have weight
    # 0, an epoch takes some of the other samples several times. A batch of all samples has each sample once.
    n, parts = order.shape[0], sharding.parts(order.shape[0])
    per_epoch, per_part = n // batch_size, batch_size // parts
    epoch, i = step // per_epoch, step % per_epoch

    # Each device shuffles its own shard of the rows. A batch takes the same number of rows from each shard, so rows do
    # not move between devices.
    def shuffle() -> Array:
        words = _random_words(key, epoch, parts, n // parts)
        if data.weight is None or batch_size == n:
            return words.argsort(axis=1).reshape(n).astype(order.dtype)
        inside = data.weight.reshape(words.shape) > 0
        shuffled = jnp.where(inside, words, jnp.asarray(_LAST, words.dtype)).argsort(axis=1)
        places = jnp.arange(n // parts) % jnp.maximum(inside.sum(1, keepdims=True), 1)
        return jnp.take_along_axis(shuffled, places, axis=1).reshape(n).astype(order.dtype)

    order = jax.lax.cond(i == 0, shuffle, lambda: order)
    if parts == 1:
        chosen = jax.lax.dynamic_slice_in_dim(order, i * batch_size, batch_size)
        return jax.tree.map(lambda a: a[chosen], data), order
    shards = sharding.keep_rows(order.reshape(parts, n // parts))
    chosen = jax.lax.dynamic_slice_in_dim(shards, i * per_part, per_part, axis=1)

    def select(a: Array) -> Array:
        selected = jax.vmap(lambda rows, chosen: rows[chosen])(a.reshape(parts, -1, *a.shape[1:]), chosen)
        return sharding.keep_rows(selected).reshape(batch_size, *a.shape[1:])

    return jax.tree.map(select, data), order


def _reweighted(data: Batch) -> Batch:
    """Returns the data with weights for mini-batches that draw only samples of positive weight."""
    # Let m be the number of samples of positive weight in a shard, and n / s the number of all samples in a shard. A
    # sample is drawn n / (s m) times as often as if all samples were drawn equally often, so its weight is multiplied
    # by s m / n. The expectation of the weighted mean of a mini-batch is then the weighted mean of the data.
    if data.weight is None:
        return data
    weights = data.weight.reshape(sharding.parts(data.weight.shape[0]), -1)
    share = (weights > 0).mean(1, keepdims=True, dtype=weights.dtype)
    return data._replace(weight=(share * weights).reshape(-1))


def _random_words(key: Array, epoch: Array, parts: int, rows: int) -> Array:
    """Returns random 32-bit words for an epoch, ``(parts, rows)``; each part is computed separately."""
    # The words are numbered through all epochs, so a single call of the generator is sufficient. A key for each epoch
    # would need three calls, and each call takes a tenth of a second to compile.
    words = jax.random.key_data(key).ravel()[-2:] ^ jnp.array(_ORDER, jnp.uint32)
    part_words = lambda first: threefry_2x32(words, first + jnp.arange(rows, dtype=jnp.uint32))
    return jax.vmap(part_words)((epoch.astype(jnp.uint32) * parts + jnp.arange(parts, dtype=jnp.uint32)) * rows)


def keys_of(key: Array) -> tuple[Array, Array]:
    """Returns keys for the initial parameters and for the loss."""
    # Every step needs the key of the run, and a split would use it up (`jax_debug_key_reuse`).
    return jax.random.fold_in(key, 0), jax.random.fold_in(key, 1)


def _pair(out: Any) -> tuple[Array, Array]:
    if not isinstance(out, tuple) or len(out) != 2 or any(jnp.shape(a) != () for a in out):
        shapes = jax.tree.map(jnp.shape, out)
        raise ValueError(f"method.loss must return a pair of scalars, (loss, score), got {validation.quoted(shapes)}")
    return jnp.asarray(out[0]), jnp.asarray(out[1])
