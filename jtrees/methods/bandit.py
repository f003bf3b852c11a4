"""DGT-Bandit: a tree learnt from a stream in which only the loss of what was played is seen (Karthikeyan et al., TMLR
2022, Algorithm 1).

Two learners, each a small tuple of pure functions: ``bandit_classifier`` plays one of K actions, ``bandit_regressor``
a number (or two of them). ``run_bandit`` plays a whole stream in one compiled program. At depth 0 both are the linear
learner that the paper compares with.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np
import optax

from jtrees import io, ops, routing, validation as checks
from jtrees.leaves import Constant
from jtrees.methods.dgt import random_chain
from jtrees.training import rmsprop
from jtrees.tree import ObliqueTree


@io.state
@struct.dataclass
class BanditState:
    """All that a learner knows: a pytree, to be saved and loaded as a whole. Another learner refuses it.

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
    actions = checks.check_count("actions", actions, minimum=2)
    _check_probability("exploration", exploration)
    learner = _Learner(depth, (actions,), two_rates(0.001, 0.3) if optimizer is None else optimizer, accumulate)

    def act(state: BanditState, x: Any, *, key: Array) -> tuple[Array, Array]:
        scores = _answer(state.params, learner.context(state, x))
        best = jnp.argmax(scores).astype(jnp.int32)
        choice_key, explore_key = jax.random.split(key)
        explores = jax.random.uniform(explore_key) < exploration
        action = jnp.where(explores, jax.random.randint(choice_key, (), 0, actions, jnp.int32), best)
        delta = jnp.asarray(exploration, scores.dtype)
        return action, jnp.where(action == best, 1 - delta, 0) + delta / actions

    def update(state: BanditState, x: Any, action: Any, propensity: Any, loss: Any) -> BanditState:
        x = learner.context(state, x)
        _check_action(action, actions)
        _check_probability("propensity", propensity)
        action, loss = jnp.asarray(action), _losses(loss, (), x.dtype)

        def slope(scores: Array) -> Array:
            s = jax.nn.sigmoid(scores[action])
            value = 2 / jnp.asarray(propensity, x.dtype) * (loss - (1 - s)) * s * (1 - s)
            return jnp.zeros_like(scores).at[action].set(value)

        return learner.learn(state, x, slope)

    return Bandit(learner.init, act, update, learner.predict)


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
    checks.check_choice("feedback", feedback, ("one-point", "two-point"))
    _check_probability("delta", delta)
    one_point = feedback == "one-point"
    learner = _Learner(depth, (), rmsprop(0.001) if optimizer is None else optimizer, accumulate)

    def act(state: BanditState, x: Any, *, key: Array) -> tuple[Array, Array]:
        prediction = _answer(state.params, learner.context(state, x))
        width = jnp.asarray(delta, prediction.dtype)
        if one_point:
            side = jax.random.rademacher(key, (), prediction.dtype)
            return prediction + width * side, jnp.full((), 0.5, prediction.dtype)
        return prediction + jnp.stack([width, -width]), jnp.ones((), prediction.dtype)

    def update(state: BanditState, x: Any, action: Any, propensity: Any, loss: Any) -> BanditState:
        x = learner.context(state, x)
        _check_probability("propensity", propensity)
        shape = () if one_point else (2,)
        if action is None or np.shape(action) != shape:
            raise ValueError(f"action must have shape {shape} with {feedback} feedback, got {action!r}")
        action, loss, width = jnp.asarray(action, x.dtype), _losses(loss, shape, x.dtype), jnp.asarray(delta, x.dtype)
        lost = loss / width if one_point else (loss[0] - loss[1]) / (2 * width)
        slope = lambda prediction: lost * jnp.sign(action - prediction) if one_point else lost
        if not checks.is_traced((state, x, action, width)):
            played = _answer(state.params, x) + (width if one_point else jnp.stack([width, -width]))
            away = jnp.abs(action - played) if not one_point else jnp.abs(jnp.abs(action - played + width) - width)
            # Prediction and sum may be rounded otherwise than when they were played, by some units in the last place.
            if not bool(jnp.all(away <= 64 * jnp.finfo(x.dtype).eps * (width + jnp.abs(played)))):
                raise ValueError(f"action must be what act gave for this state, beside its prediction, got {action}")
        return learner.learn(state, x, slope)

    return Bandit(learner.init, act, update, learner.predict)


def two_rates(splits: Any, leaves: Any) -> optax.GradientTransformation:
    """RMSprop with a learning rate (or a schedule) for splits, and one for leaves.

    A split learns from every sample, a leaf from those that reach it alone. The linear learner has splits only.
    """

    def kinds(params: Any) -> Any:
        kind = lambda path, _: "leaves" if getattr(path[0], "name", None) == "leaves" else "splits"
        return jax.tree_util.tree_map_with_path(kind, params)

    return optax.partition({"splits": rmsprop(splits), "leaves": rmsprop(leaves)}, kinds)


# --- What is learnt: a tree, or one linear score an action ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Learner:
    """What the two learners share: a tree or, at depth 0, linear scores, of so many outputs, ``()`` or ``(K,)``."""

    depth: int
    outputs: tuple[int, ...]
    optimizer: optax.GradientTransformation
    accumulate: int

    def __post_init__(self):
        if checks.check_count("depth", self.depth, minimum=0):
            checks.check_depth(self.depth)
        checks.check_count("accumulate", self.accumulate)
        if not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise ValueError(f"optimizer must be an optax transformation, got {self.optimizer!r}")

    def init(self, p: int, *, key: Array) -> BanditState:
        checks.check_key(key)
        params: Any = jnp.zeros((*self.outputs, checks.check_count("p", p))), jnp.zeros(self.outputs)
        if self.depth:
            params = random_chain(key, int(self.depth), p, (), self.outputs, jnp.result_type(float)).tree()
            params = params.replace(leaves=Constant(params.leaves.values - (0.5 if self.outputs else 0)))
        zero = jnp.zeros((), jnp.int32)
        return BanditState(params, self.optimizer.init(params), jax.tree.map(jnp.zeros_like, params), zero, zero)

    def predict(self, params: Any, x: Array) -> Array:
        return params.predict(x) if self.depth else jax.vmap(_answer, (None, 0))(params, x)

    def context(self, state: BanditState, x: Any) -> Array:
        """A context that fits a state of this learner, in its precision."""
        _check_state(state, self.init)
        weights = jax.tree.leaves(state.params)[0]
        if np.shape(x) != weights.shape[-1:]:
            raise ValueError(f"x must be one context of shape {weights.shape[-1:]}, got shape {np.shape(x)}")
        checks.check_finite("x", x := jnp.asarray(x, weights.dtype))
        return x

    def learn(self, state: BanditState, x: Array, slope: Callable[[Array], Array]) -> BanditState:
        """The state after a round; ``slope`` is the estimated derivative of the loss in the answer."""
        answer, pull_back = jax.vjp(lambda params: _answer(params, x), state.params)
        at = slope(answer)
        finite = jnp.isfinite(at).all() & jnp.isfinite(x).all()  # a loss that is not leaves no finite slope
        # Nothing of a skipped round may get in: not its gradient, no update that its place in the count would bring.
        add = lambda total, new: total + jnp.where(finite, new, 0)
        gradient = jax.tree.map(add, state.gradient, pull_back(jnp.where(finite, at, 0))[0])
        rounds, skipped = state.rounds + 1, state.skipped + (~finite).astype(jnp.int32)

        def step() -> tuple[Any, Any, Any]:
            mean = jax.tree.map(lambda g: g / self.accumulate, gradient)
            updates, opt_state = self.optimizer.update(mean, state.opt_state, state.params)
            return optax.apply_updates(state.params, updates), opt_state, jax.tree.map(jnp.zeros_like, gradient)

        wait = lambda: (state.params, state.opt_state, gradient)
        after = jax.lax.cond(finite & ((rounds - skipped) % self.accumulate == 0), step, wait)
        return BanditState(*after, rounds=rounds, skipped=skipped)


@jax.jit
def _answer(params: Any, x: Array) -> Array:
    """What is said of one context, ``()`` or ``(K,)``, with DGT's gradient."""
    if not isinstance(params, ObliqueTree):
        return jnp.matmul(params[0], x, precision="highest") + params[1]
    return ops.path_sum(params.weights, params.bias, params.leaves.values, x[None], routing.mean_size)[0]


def _check_state(state: Any, init: Callable[..., BanditState]) -> None:
    """Raises ``ValueError`` for a state that is none of the learner with this ``init``."""
    if not isinstance(state, BanditState):
        raise ValueError(f"state must be a BanditState, from the learner's init, got {type(state).__name__}")
    p = next((np.shape(a)[-1] for a in jax.tree.leaves(state.params) if np.ndim(a)), 1)
    expected = jax.eval_shape(lambda: init(p, key=jax.random.key(0)))
    for name in ("params", "opt_state", "gradient"):
        came, wanted = (jax.tree.map(np.shape, getattr(a, name)) for a in (state, expected))
        if came != wanted:
            raise ValueError(f"state must be one of this learner, with {name} of shapes {wanted}, got {came}")


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
      ValueError: for contexts that are not finite numbers (n, p), a state of another learner, or counts out of range.
    """
    contexts = _checked_stream(learner, contexts, loss_fn, best_losses)
    checks.check_count("score_every", score_every)
    checks.check_key(key)
    (n, p), dtype, (init_key, play_key) = contexts.shape, contexts.dtype, jax.random.split(key)
    state = learner.init(p, key=init_key) if state is None else state
    _check_state(state, learner.init)

    def play(state: BanditState, now: tuple[Array, Array]) -> tuple[BanditState, Any]:
        i, x = now
        action, propensity = learner.act(state, x, key=jax.random.fold_in(play_key, state.rounds))
        loss = jnp.stack([_losses(loss_fn(i, one), (), dtype) for one in action.reshape(-1)]).reshape(action.shape)
        after, seen = learner.update(state, x, action, propensity, loss), jnp.zeros((), dtype)
        if score is not None:
            look = lambda params, of=score: jnp.asarray(of(params)).astype(dtype)
            seen = jax.lax.cond((i + 1) % score_every == 0, look, lambda _: seen, after.params)
        return after, (action, propensity, loss.mean(), after.skipped > state.skipped, seen)

    state, (actions, propensities, losses, skipped, scores) = jax.lax.scan(play, state, (jnp.arange(n), contexts))
    queries = score_every * jnp.arange(1, 1 if score is None else n // score_every + 1)
    best = jnp.zeros(n, dtype) if best_losses is None else jnp.asarray(best_losses, dtype)
    summed = jnp.float32 if dtype.itemsize < 4 else dtype
    return BanditRun(
        state=state,
        actions=actions,
        propensities=propensities,
        losses=jnp.where(skipped, jnp.nan, losses),
        cumulative_loss=jnp.cumsum(jnp.where(skipped, 0, losses), dtype=summed),
        regret=jnp.cumsum(jnp.where(skipped, 0, losses - best), dtype=summed),
        skipped=skipped,
        queries=queries,
        scores=scores[queries - 1],
    )


# --- The door ---------------------------------------------------------------------------------------------------------


def _checked_stream(learner: Any, contexts: Any, loss_fn: Any, best_losses: Any) -> Array:
    """The contexts of a stream that can be played."""
    if not isinstance(learner, Bandit):
        raise ValueError(f"learner must be a jtrees.Bandit, such as jtrees.bandit_regressor(4), got {learner!r}")
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function (round, action) -> loss, got {loss_fn!r}")
    contexts = jnp.asarray(checks.as_numeric("contexts", contexts))
    shape, dtype = contexts.shape, contexts.dtype
    if len(shape) != 2 or 0 in shape or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"contexts must be floating numbers (n, p), at least one round, got {dtype} of shape {shape}")
    checks.check_finite("contexts", contexts)
    if best_losses is not None and jnp.shape(best_losses) != shape[:1]:
        raise ValueError(f"best_losses must have shape {shape[:1]}, got {jnp.shape(best_losses)}")
    return contexts


def _check_probability(name: str, value: Any) -> None:
    if not checks.is_traced(value) and (np.ndim(value) or _kind(value) not in "biuf" or not 0 < value <= 1):
        raise ValueError(f"{name} must be above 0 and at most 1, got {value!r}")


def _check_action(action: Any, actions: int) -> None:
    if not checks.is_traced(action) and (np.ndim(action) or _kind(action) not in "iu" or not 0 <= action < actions):
        raise ValueError(f"action must be a whole number from 0 to {actions - 1}, got {action!r}")


def _kind(value: Any) -> str:
    return np.asarray(value).dtype.kind


def _losses(loss: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    if loss is None or np.shape(loss) != shape:
        raise ValueError(f"loss must have shape {shape}, as the action has, got {loss!r}")
    return jnp.asarray(loss, dtype)
