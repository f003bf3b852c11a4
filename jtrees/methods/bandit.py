"""DGT-Bandit: a tree learnt from a stream in which only the loss of what was played is seen (Karthikeyan et al., TMLR
2022, Algorithm 1).

Two learners, each a small tuple of pure functions: ``bandit_classifier`` plays one of K actions, ``bandit_regressor``
a number (or two of them). ``run_bandit`` plays a whole stream in one compiled program. At depth 0 both are the linear
learner that the paper compares with.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int
import numpy as np
import optax

from jtrees import ops, routing, validation as checks
from jtrees.leaves import Constant
from jtrees.methods.dgt import random_chain, rmsprop
from jtrees.tree import ObliqueTree


@struct.dataclass
class BanditState:
    """All that a learner knows: a pytree, to be saved and loaded as a whole.

    Attributes:
      params: what is learnt: an :class:`ObliqueTree`, or ``(weights, bias)`` of the linear learner.
      opt_state: of the optimiser.
      gradient: sum of the gradients of the rounds since the last update of ``params``.
      rounds: rounds seen.
      skipped: those of them whose loss or context was not finite, and which taught nothing.
    """

    params: Any
    opt_state: Any
    gradient: Any
    rounds: Int[Array, ""]
    skipped: Int[Array, ""]


class Bandit(NamedTuple):
    """A learner for streams.

    Attributes:
      init: ``(p, *, key) -> state`` for contexts of p features, of mean 0 and deviation 1.
      act: ``(state, x, *, key) -> (action, propensity)``: what is played for a context ``(p,)``, and the probability
        with which it was drawn, for off-policy evaluation. Where two points are played, both are in the action.
      update: ``(state, x, action, propensity, loss) -> state``. The action must be one that ``act`` gave for this state
        or for one with the same params. A loss that is not finite changes nothing but the counts.
      predict: ``(params, x) -> (n,) or (n, K)``, without exploration: numbers, or scores of the actions.
    """

    init: Callable[..., BanditState]
    act: Callable[..., tuple[Array, Array]]
    update: Callable[..., BanditState]
    predict: Callable[[Any, Array], Array]


def bandit_classifier(
    depth: int,
    actions: int,
    *,
    exploration: float | Array = 0.3,
    optimizer: optax.GradientTransformation | None = None,
    accumulate: int = 4,
) -> Bandit:
    """Discrete actions: epsilon-greedy play, and the paper's estimate of the gradient.

    ``p(k) = (1 - delta) 1[k = best] + delta / K`` (eq. 7). With ``s`` the sigmoid of the score of the action played,
    that score, and through it the tree, receives ``2 (loss - (1 - s)) s (1 - s) / p`` (eq. 8): the gradient of the
    squared distance of s to what the loss, from 0 to 1, says it should be, by inverse propensity.

    Args:
      depth: depth of the tree, 1 to 16; 0 for one linear score an action.
      actions: number K of actions, at least 2.
      exploration: delta, above 0 and at most 1: a number or a traced one.
      optimizer: any optax transformation; by default :func:`two_rates`, 0.001 for splits and 0.3 for leaves (the paper
        has 0.001 for both, with which leaves, each met by a few of the samples only, do not keep up).
      accumulate: rounds, without those skipped, whose gradients are averaged for an update.

    Raises:
      ValueError: for a number out of range.
    """
    if checks.check_count("actions", actions) < 2:
        raise ValueError(f"actions must be at least 2, got {actions}")
    _check_delta("exploration", exploration)
    model, optimizer = _model(depth, actions), two_rates(0.001, 0.3) if optimizer is None else optimizer

    def act(state: BanditState, x: ArrayLike, *, key: Array) -> tuple[Array, Array]:
        scores = model.answer(state.params, _context(state, x))
        best = jnp.argmax(scores).astype(jnp.int32)
        choice_key, explore_key = jax.random.split(key)
        explores = jax.random.uniform(explore_key) < exploration
        action = jnp.where(explores, jax.random.randint(choice_key, (), 0, actions, jnp.int32), best)
        return action, _propensity(action, best, scores.dtype)

    def _propensity(action: Array, best: Array, dtype: Any) -> Array:
        delta = jnp.asarray(exploration, dtype)
        return jnp.where(action == best, 1 - delta, 0) + delta / actions

    def update(
        state: BanditState, x: ArrayLike, action: ArrayLike, propensity: ArrayLike, loss: ArrayLike
    ) -> BanditState:
        x = _context(state, x)
        _check_action(action, actions)
        _check_propensity(propensity)
        action, loss = jnp.asarray(action), _losses(loss, (), x.dtype)

        def slope(scores: Array) -> Array:
            s = jax.nn.sigmoid(scores[action])
            value = 2 / jnp.asarray(propensity, x.dtype) * (loss - (1 - s)) * s * (1 - s)
            return jnp.zeros_like(scores).at[action].set(value)

        return _learn(state, model, x, slope, optimizer, accumulate)

    return Bandit(_init(model, optimizer, accumulate), act, update, _predict(model))


def bandit_regressor(
    depth: int,
    *,
    feedback: Literal["one-point", "two-point"] = "two-point",
    delta: float | Array = 0.5,
    optimizer: optax.GradientTransformation | None = None,
    accumulate: int = 4,
) -> Bandit:
    """Numbers as actions: play beside the prediction, and learn from what that loses.

    One point: ``prediction + delta u`` with ``u = +-1`` drawn is played, and the slope of the loss estimated as
    ``loss u / delta`` (eq. 9). Two points: ``prediction + delta`` and ``prediction - delta``, and the slope is
    ``(loss_+ - loss_-) / (2 delta)`` (eq. 10), exact for a quadratic. Meant for targets in about [0, 1].

    Args:
      depth: depth of the tree, 1 to 16; 0 for one linear prediction.
      feedback: ``"one-point"``, or ``"two-point"``: the action is then an array of two, upper first, and the loss too.
      delta: distance of what is played from the prediction, above 0 and at most 1: a number or a traced one.
      optimizer: any optax transformation; by default RMSprop with learning rate 0.001.
      accumulate: rounds, without those skipped, whose gradients are averaged for an update.

    Raises:
      ValueError: for a number out of range or an unknown feedback.
    """
    if feedback not in ("one-point", "two-point"):
        raise ValueError(f'feedback must be "one-point" or "two-point", got {feedback!r}')
    _check_delta("delta", delta)
    model, one_point = _model(depth, None), feedback == "one-point"
    optimizer = rmsprop(0.001) if optimizer is None else optimizer

    def act(state: BanditState, x: ArrayLike, *, key: Array) -> tuple[Array, Array]:
        prediction = model.answer(state.params, _context(state, x))
        width = jnp.asarray(delta, prediction.dtype)
        if one_point:
            side = jax.random.rademacher(key, (), prediction.dtype)
            return prediction + width * side, jnp.full((), 0.5, prediction.dtype)
        return prediction + jnp.stack([width, -width]), jnp.ones((), prediction.dtype)

    def update(
        state: BanditState, x: ArrayLike, action: ArrayLike, propensity: ArrayLike, loss: ArrayLike
    ) -> BanditState:
        x = _context(state, x)
        _check_propensity(propensity)
        shape = () if one_point else (2,)
        action, loss = jnp.asarray(action, x.dtype), _losses(loss, shape, x.dtype)
        if action.shape != shape:
            raise ValueError(f"action must have shape {shape} with {feedback} feedback, got {action.shape}")
        width = jnp.asarray(delta, x.dtype)

        def slope(prediction: Array) -> Array:
            if not one_point:
                return (loss[0] - loss[1]) / (2 * width)
            return loss * jnp.sign(action - prediction) / width

        if not checks.is_traced((state, x, action, width)):
            played = model.answer(state.params, x) + (width if one_point else jnp.stack([width, -width]))
            away = jnp.abs(action - played) if not one_point else jnp.abs(jnp.abs(action - played + width) - width)
            # Prediction and sum may be rounded otherwise than when they were played, by some units in the last place.
            if not bool(jnp.all(away <= 64 * jnp.finfo(x.dtype).eps * (width + jnp.abs(played)))):
                raise ValueError(f"action must be what act gave for this state, beside its prediction, got {action}")
        return _learn(state, model, x, slope, optimizer, accumulate)

    return Bandit(_init(model, optimizer, accumulate), act, update, _predict(model))


def two_rates(splits: Any, leaves: Any) -> optax.GradientTransformation:
    """RMSprop with a learning rate (or a schedule) for splits, and one for leaves.

    A split learns from every sample, a leaf from those that reach it alone. The linear learner has splits only.
    """

    def kinds(params: Any) -> Any:
        kind = lambda path, _: "leaves" if getattr(path[0], "name", None) == "leaves" else "splits"
        return jax.tree_util.tree_map_with_path(kind, params)

    return optax.partition({"splits": rmsprop(splits), "leaves": rmsprop(leaves)}, kinds)


# --- What is learnt: a tree, or one linear score an action ------------------------------------------------------------


class _Model(NamedTuple):
    """``init: (p, key) -> params``; ``answer: (params, x of shape (p,)) -> () or (K,)``, with DGT's gradient."""

    init: Callable[[int, Array], Any]
    answer: Callable[[Any, Array], Array]


def _model(depth: int, outputs: int | None) -> _Model:
    shape = () if outputs is None else (outputs,)
    if depth == 0:
        zeros = lambda p, key: (jnp.zeros((*shape, p)), jnp.zeros(shape))
        return _Model(zeros, lambda params, x: jnp.matmul(params[0], x, precision="highest") + params[1])
    checks.check_depth(depth)

    def init(p: int, key: Array) -> ObliqueTree:
        tree = random_chain(key, depth, p, (), shape, jnp.result_type(float)).tree()
        return tree if outputs is None else tree.replace(leaves=Constant(tree.leaves.values - 0.5))

    def answer(params: ObliqueTree, x: Array) -> Array:
        return ops.path_sum(params.weights, params.bias, params.leaves.values, x[None], routing.mean_size)[0]

    return _Model(init, answer)


def _predict(model: _Model) -> Callable[[Any, Array], Array]:
    def predict(params: Any, x: Array) -> Array:
        return (
            params.predict(x) if isinstance(params, ObliqueTree) else jax.vmap(lambda one: model.answer(params, one))(x)
        )

    return predict


def _init(model: _Model, optimizer: optax.GradientTransformation, accumulate: int) -> Callable[..., BanditState]:
    checks.check_count("accumulate", accumulate)

    def init(p: int, *, key: Array) -> BanditState:
        params = model.init(checks.check_count("p", p), key)
        zero = jnp.zeros((), jnp.int32)
        return BanditState(params, optimizer.init(params), jax.tree.map(jnp.zeros_like, params), zero, zero)

    return init


def _learn(
    state: BanditState,
    model: _Model,
    x: Array,
    slope: Callable[[Array], Array],
    optimizer: optax.GradientTransformation,
    accumulate: int,
) -> BanditState:
    """The state after a round; ``slope`` is the estimated derivative of the loss in the answer."""
    answer, pull_back = jax.vjp(lambda params: model.answer(params, x), state.params)
    at = slope(answer)
    finite = jnp.isfinite(at).all() & jnp.isfinite(x).all()  # a loss that is not leaves no finite slope
    # Nothing of a skipped round may get in: not its gradient, and no update that its place in the count would bring.
    add = lambda total, new: total + jnp.where(finite, new, 0)
    gradient = jax.tree.map(add, state.gradient, pull_back(jnp.where(finite, at, 0))[0])
    rounds, skipped = state.rounds + 1, state.skipped + (~finite).astype(jnp.int32)

    def step() -> tuple[Any, Any, Any]:
        mean = jax.tree.map(lambda g: g / accumulate, gradient)
        updates, opt_state = optimizer.update(mean, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state, jax.tree.map(jnp.zeros_like, gradient)

    wait = lambda: (state.params, state.opt_state, gradient)
    params, opt_state, gradient = jax.lax.cond(finite & ((rounds - skipped) % accumulate == 0), step, wait)
    return BanditState(params, opt_state, gradient, rounds, skipped)


# --- A whole stream ---------------------------------------------------------------------------------------------------


@struct.dataclass
class BanditRun:
    """What a stream left.

    Attributes:
      state: the learner after the last round; ``state.skipped`` counts the rounds whose loss was not finite.
      actions: what was played, ``(n,)`` or ``(n, 2)``.
      propensities: with which probability, ``(n,)``.
      losses: what it lost, ``(n,)``, the mean of the two where two points were played; NaN in skipped rounds.
      cumulative_loss: their sum up to each round, skipped rounds left out.
      regret: that less the sum of ``best_losses`` over the same rounds.
      skipped: which rounds were, ``(n,)``.
      queries: rounds of this run after which ``score`` was looked at, ``(looks,)``.
      scores: the score there.
    """

    state: BanditState
    actions: Array
    propensities: Float[Array, " n"]
    losses: Float[Array, " n"]
    cumulative_loss: Float[Array, " n"]
    regret: Float[Array, " n"]
    skipped: Bool[Array, " n"]
    queries: Int[Array, " looks"]
    scores: Float[Array, " looks"]


def run_bandit(
    learner: Bandit,
    contexts: Float[Array, "n p"],
    loss_fn: Callable[[Array, Array], Array],
    *,
    key: Array,
    state: BanditState | None = None,
    best_losses: Float[Array, " n"] | None = None,
    score: Callable[[Any], Array] | None = None,
    score_every: int = 1000,
) -> BanditRun:
    """Plays a stream, round by round, as one scan.

    Pure: compile it, ``vmap`` it over keys and over the learner's numbers. The randomness of a round depends on the key
    and on the number of rounds that the state has seen; so a stream that is cut in two, the second part with the state
    of the first and the same key, goes on exactly as it would have.

    Args:
      learner: who plays.
      contexts: one context a round.
      loss_fn: ``(round, action) -> loss``: what the environment takes for an action in a round, numbered from 0 in
        ``contexts``; called once for each of two points. Other losses than the one asked about stay unseen.
      key: for exploration, and for the first state.
      state: where to go on from; by default a new one.
      best_losses: the least that could be lost in each round, for the regret; by default 0.
      score: ``params -> scalar`` to watch (a held-out score, say).
      score_every: rounds between looks at the score.

    Raises:
      ValueError: for contexts of another shape or not finite (where they can be looked at), or counts out of range.
    """
    contexts = jnp.asarray(contexts)
    if contexts.ndim != 2 or not jnp.issubdtype(contexts.dtype, jnp.floating):
        raise ValueError(f"contexts must be floating numbers (n, p), got {contexts.dtype} of shape {contexts.shape}")
    if contexts.shape[0] == 0:
        raise ValueError("contexts must hold at least one round, got none")
    checks.check_finite("contexts", contexts)
    checks.check_count("score_every", score_every)
    n = contexts.shape[0]
    if best_losses is not None and jnp.shape(best_losses) != (n,):
        raise ValueError(f"best_losses must have shape ({n},), got {jnp.shape(best_losses)}")
    init_key, play_key = jax.random.split(key)
    state = learner.init(contexts.shape[1], key=init_key) if state is None else state

    def play(state: BanditState, now: tuple[Array, Array]) -> tuple[BanditState, Any]:
        i, x = now
        action, propensity = learner.act(state, x, key=jax.random.fold_in(play_key, state.rounds))
        loss = loss_fn(i, action) if action.ndim == 0 else jnp.stack([loss_fn(i, action[0]), loss_fn(i, action[1])])
        loss = jnp.asarray(loss, contexts.dtype)
        chex.assert_shape(loss, action.shape)
        after = learner.update(state, x, action, propensity, loss)
        return after, (action, propensity, loss.mean(), after.skipped > state.skipped)

    rounds, parts, scores = jnp.arange(n), [], jnp.zeros(0, contexts.dtype)
    every = score_every if score is not None else n
    looks, rest = divmod(n, every)

    def stretch(state: BanditState, now: tuple[Array, Array]) -> tuple[BanditState, Any]:
        state, played = jax.lax.scan(play, state, now)
        return state, (played, jnp.zeros(()) if score is None else score(state.params))

    if looks:
        split = jax.tree.map(lambda a: a[: looks * every].reshape(looks, every, *a.shape[1:]), (rounds, contexts))
        state, (played, scores) = jax.lax.scan(stretch, state, split)
        parts.append(jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), played))
    if rest:
        state, played = jax.lax.scan(play, state, (rounds[looks * every :], contexts[looks * every :]))
        parts.append(played)
    actions, propensities, losses, skipped = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    lost = jnp.where(skipped, 0, losses)
    best = jnp.zeros_like(lost) if best_losses is None else jnp.where(skipped, 0, jnp.asarray(best_losses, lost.dtype))
    return BanditRun(
        state=state,
        actions=actions,
        propensities=propensities,
        losses=jnp.where(skipped, jnp.nan, losses),
        cumulative_loss=jnp.cumsum(lost),
        regret=jnp.cumsum(lost - best),
        skipped=skipped,
        queries=every * jnp.arange(1, 1 if score is None else looks + 1),
        scores=scores[: 0 if score is None else looks],
    )


# --- The door ---------------------------------------------------------------------------------------------------------


def _check_delta(name: str, value: Any) -> None:
    if not checks.is_traced(value) and not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value!r}")


def _check_propensity(propensity: Any) -> None:
    if not checks.is_traced(propensity) and not 0 < propensity <= 1:
        raise ValueError(f"propensity must be above 0 and at most 1, got {propensity!r}")


def _check_action(action: Any, actions: int) -> None:
    if checks.is_traced(action):
        return
    value = np.asarray(action)
    if value.shape != () or value.dtype.kind not in "iu" or not 0 <= value < actions:
        raise ValueError(f"action must be a whole number from 0 to {actions - 1}, got {action!r}")


def _context(state: BanditState, x: Any) -> Array:
    weights = state.params.weights if isinstance(state.params, ObliqueTree) else state.params[0]
    if np.shape(x) != weights.shape[-1:]:
        raise ValueError(f"x must be one context of shape {weights.shape[-1:]}, got shape {np.shape(x)}")
    x = jnp.asarray(x, weights.dtype)
    checks.check_finite("x", x)
    return x


def _losses(loss: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    loss = jnp.asarray(loss, dtype)
    if loss.shape != shape:
        raise ValueError(f"loss must have shape {shape}, as the action has, got {loss.shape}")
    return loss
