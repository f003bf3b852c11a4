"""Method, and the one training loop: pure, compiled as a whole, to be vmapped over seeds and hyper-parameters.

A method is a small tuple of pure functions, as an optimiser is in optax. ``train`` is the loop that all of them share;
``multi_start`` runs it (or anything that answers like it) from many starts and picks the best.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import optax

from jtrees import validation
from jtrees.tree import ObliqueTree

Params = Any  # a pytree of arrays
Number = float | jax.Array | Callable[[Any], Any]  # a number, a traced one, or an optax schedule of the step


def at_step(value: Number, step: Array | int) -> Any:
    """The value of a hyper-parameter at a step: a schedule is asked, a number stays as it is."""
    return value(step) if callable(value) else value


def _identity(params: Params) -> Params:
    return params


class Method(NamedTuple):
    """What a paper adds to the training loop.

    Attributes:
      init: ``(x, y, *, key) -> params``.
      loss: ``(params, x, y, *, key, step) -> (loss, score)``. ``loss`` is the mean over samples that training
        minimises. ``score`` is the loss of the *hardened* model on the same samples, which keep-best watches; most
        methods have it at hand once they have the loss, and where nobody asks for it the compiler leaves it out. A
        method without such a thing returns its loss twice. Where :func:`train` is given weights of samples, it hands
        them on as the keyword ``sample_weight``; a method that takes none of them has no such keyword.
      predict: ``(params, x) -> outputs``: what the trained model answers.
      harden: ``(params, x, y) -> ObliqueTree | None``: the hard tree that the parameters stand for, leaves refitted
        on x and y; can be compiled. Takes the keyword ``sample_weight`` where ``loss`` does.
      project: ``params -> params``, at the start and after each step (norm balls, ...).
    """

    init: Callable[..., Params]
    loss: Callable[..., tuple[jax.Array, jax.Array]]
    predict: Callable[[Params, jax.Array], jax.Array]
    harden: Callable[..., ObliqueTree | None]
    project: Callable[[Params], Params] = _identity


@struct.dataclass
class TrainResult:
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


def train(
    method: Method,
    x: Float[Array, "n p"],
    y: Array,
    *,
    key: Array,
    optimizer: optax.GradientTransformation,
    steps: int,
    batch_size: int | None = None,
    score_every: int = 0,
    score: Callable[[Params], Array] | None = None,
    params: Params | None = None,
    sample_weight: Float[Array, " n"] | None = None,
) -> TrainResult:
    """Runs a method's training as one scan.

    Pure: ``jit`` it, ``vmap`` it over keys, over starting parameters and over every hyper-parameter that is a number.
    Under ``jit`` equal shapes compile once.

    Args:
      method: what to train.
      x: samples.
      y: targets, first axis n.
      key: for the initial parameters, the order of samples, and whatever the method draws.
      optimizer: any optax transformation; one that looks at the loss (``reduce_on_plateau``) is given it.
      steps: number of updates.
      batch_size: samples in a mini-batch; shuffled anew in each epoch, those left over rest until the next. None
        takes all samples at once, in order.
      score_every: look at the score every so many steps, and return the best parameters seen. 0: return the last.
      score: ``params -> scalar`` to watch instead of the method's own (a validation loss, say); lower is better.
      params: where to start, by default ``method.init``.
      sample_weight: nonnegative weights of the samples, not all zero, for a method whose loss takes them; a mini-batch
        keeps those of its samples. Values are not looked at.

    Raises:
      ValueError: for shapes or dtypes that do not fit, steps < 1, or a batch size that is not between 1 and n.
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x must be of a floating dtype, got {x.dtype}")
    if x.ndim != 2 or y.shape[:1] != x.shape[:1]:
        raise ValueError(f"x must have shape (n, p) and y (n, ...), got {x.shape} and {y.shape}")
    n = x.shape[0]
    # The data as the method's loss is called with them: a pytree of arrays over the samples.
    data: dict[str, Array] = {"x": x, "y": y}
    if sample_weight is not None:
        data["sample_weight"] = jnp.asarray(sample_weight, x.dtype)
        if data["sample_weight"].shape != (n,):
            raise ValueError(f"sample_weight must have shape ({n},), got {data['sample_weight'].shape}")
    validation.check_count("steps", steps)
    validation.check_count("score_every", score_every, minimum=0)
    if batch_size is not None and not 1 <= validation.check_count("batch_size", batch_size) <= n:
        raise ValueError(f"batch_size must be from 1 to the number of samples, {n}, got {batch_size}")

    init_key, order_key, loss_key = jax.random.split(key, 3)
    first: Any = method.project(method.init(x, y, key=init_key) if params is None else params)

    def loss_of(params: Params, data: dict[str, Array], **random: Array) -> tuple[Array, Array]:
        weight = {name: value for name, value in data.items() if name == "sample_weight"}
        return method.loss(params, data["x"], data["y"], **random, **weight)

    gradient = jax.value_and_grad(loss_of, has_aux=True)
    with_value = optax.with_extra_args_support(optimizer)  # some look at the loss, too

    def full_score(params: Params, step: Array) -> Array:
        return loss_of(params, data, key=loss_key, step=step)[1] if score is None else score(params)

    def update(carry: _Carry, step: Array) -> tuple[_Carry, tuple[Array, Array]]:
        batch, order = data, carry.order
        if batch_size is not None:
            batch, order = _batch(data, order, order_key, step, batch_size)
        key = jax.random.fold_in(loss_key, step)
        (loss, batch_score), grads = gradient(carry.params, batch, key=key, step=step)
        now, best = jnp.full((), jnp.nan, x.dtype), carry.best
        if score_every == 1 and batch_size is None and score is None:
            now = batch_score.astype(x.dtype)  # the batch is all there is: the score comes with the loss
        elif score_every:
            look = lambda: full_score(carry.params, step).astype(x.dtype)
            now = jax.lax.cond(step % score_every == 0, look, lambda: now)
        if score_every:
            best = _better(best, _Best(carry.params, now, step))
        updates, opt_state = with_value.update(grads, carry.opt_state, carry.params, value=loss)
        params = method.project(optax.apply_updates(carry.params, updates))
        return _Carry(params, opt_state, best, order), (loss, now)

    start = _Best(first, jnp.asarray(jnp.inf, x.dtype), jnp.zeros((), jnp.int32))
    carry = _Carry(first, optimizer.init(first), start, jnp.zeros(0 if batch_size is None else n, jnp.int32))
    carry, (losses, scores) = jax.lax.scan(update, carry, jnp.arange(steps, dtype=jnp.int32))

    last = _Best(
        carry.params, full_score(carry.params, jnp.int32(steps)).astype(x.dtype), jnp.full((), steps, jnp.int32)
    )
    best = _better(carry.best, last) if score_every else last
    finite = jnp.isfinite(losses).all() & jnp.isfinite(last.score)
    return TrainResult(best.params, jnp.where(finite, best.score, jnp.inf), best.step, finite, losses, scores)


class _Best(NamedTuple):
    params: Params
    score: jax.Array
    step: jax.Array


class _Carry(NamedTuple):
    params: Params
    opt_state: Any
    best: _Best
    order: jax.Array


def _better(a: _Best, b: _Best) -> _Best:
    return jax.tree.map(lambda old, new: jnp.where(b.score < a.score, new, old), a, b)


def _batch(data, order, key, step, batch_size):
    """One mini-batch, and the order of samples, drawn anew where an epoch begins."""
    n = order.shape[0]
    per_epoch = n // batch_size
    epoch, i = step // per_epoch, step % per_epoch
    shuffle = lambda: jax.random.permutation(jax.random.fold_in(key, epoch), n).astype(order.dtype)
    order = jax.lax.cond(i == 0, shuffle, lambda: order)
    chosen = jax.lax.dynamic_slice_in_dim(order, i * batch_size, batch_size)
    return jax.tree.map(lambda a: a[chosen], data), order


@struct.dataclass
class MultiStart:
    """What many starts leave.

    Attributes:
      candidates: the result of every start, stacked along a leading axis.
      best: the result of the best start.
      index: which start that was.
      dropped: number of starts that became non-finite. They never are the best (unless all are).
    """

    candidates: Any
    best: Any
    index: Int[Array, ""]
    dropped: Int[Array, ""]


def multi_start(run: Callable[..., Any], *starts: Any, batch_size: int | None = None) -> MultiStart:
    """Runs ``run(*start)`` for every start and picks the result with the lowest ``score``.

    Args:
      run: one start -> a pytree with attributes ``score`` and ``finite``, such as :class:`TrainResult`.
      *starts: pytrees of arrays with one leading axis over the starts (keys, parameters, hyper-parameters).
      batch_size: starts worked on side by side. By default two on a CPU, where caches are small (measured on two cores:
        two are up to 1.4x faster a start than one at depth 4, as fast at depth 10; five are slower from depth 4 on),
        and all elsewhere.

    Raises:
      ValueError: if the leading axes differ or are empty.
    """
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(starts)}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"starts must share one leading axis of at least 1, got lengths {sorted(sizes)}")
    count = sizes.pop()
    if batch_size is None:
        batch_size = 2 if jax.default_backend() == "cpu" else count
    # Filled up with repeats of the last start to whole batches. A smaller last batch would be a second program that
    # runs at the same time as the first: slower to compile, and with jaxlib 0.10.2 on two cores two large batched
    # decompositions (see leaves.fit_linear) wait for each other for ever.
    side_by_side = min(batch_size, count)
    rest = -count % side_by_side
    full = jax.tree.map(lambda a: jnp.concatenate([a, jnp.repeat(a[-1:], rest, axis=0)]), starts)
    candidates = jax.lax.map(lambda start: run(*start), full, batch_size=side_by_side)
    candidates = jax.tree.map(lambda a: a[:count], candidates)
    chex.assert_shape([candidates.score, candidates.finite], (count,))
    scores = jnp.where(candidates.finite & jnp.isfinite(candidates.score), candidates.score, jnp.inf)
    index = jnp.argmin(scores).astype(jnp.int32)
    best = jax.tree.map(lambda a: a[index], candidates)
    return MultiStart(candidates, best, index, count - candidates.finite.sum())
