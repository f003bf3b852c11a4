"""DGT-Bandit: a tree trained online from bandit feedback (Karthikeyan et al., TMLR 2022, Algorithm 1).

Bandit feedback is the loss of the chosen action alone. There are two learners, each a small tuple of pure functions.
The actions of ``bandit_classifier`` are K classes. The actions of ``bandit_regressor`` are numbers (or pairs of
numbers). ``run_bandit`` runs a whole stream in one compiled program. At depth 0, both learners are the paper's linear
baseline.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
import numpy as np
import optax

from jtrees import io, ops, pytree, routing, validation as checks
from jtrees.leaves import Values
from jtrees.methods.dgt import random_chain
from jtrees.training import rmsprop
from jtrees.tree import ObliqueTree


@io.state
@pytree.dataclass
class BanditState:
    """The whole state of a learner: a pytree that can be saved and loaded.

    A learner raises ``ValueError`` for a state of other shapes, such as the state of a different learner.

    Attributes:
      params: an :class:`ObliqueTree`, or ``(weights, bias)`` of the linear learner.
      opt_state: state of the optimiser.
      gradient: sum of the gradients since the last update of ``params``.
      rounds: number of rounds.
      skipped: number of rounds skipped because the loss or context was not finite.
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
      act: ``(state, x, *, key) -> (action, propensity)``: the action for a context ``(p,)``, and the probability with
        which the action was drawn, for off-policy evaluation. The action is a pair if the feedback is two-point.
      update: ``(state, x, action, propensity, loss) -> state``. The action must come from ``act`` for this state, or
        for a state with equal ``params``. A loss that is not finite changes only the counts. ``jax.jit(update)``
        compiles once; outside of a program, each call compiles its conditional step.
      predict: ``(params, x) -> (n,) or (n, K)``: numbers, or scores of the actions, without exploration.
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
    """Returns a learner for discrete actions, with epsilon-greedy exploration and the paper's gradient estimate.

    The probability of action k is ``p(k) = (1 - delta) 1[k = best] + delta / K`` (eq. 7). Let ``s`` be the sigmoid of
    the score of the chosen action. The gradient of the score is estimated as ``2 (loss - (1 - s)) s (1 - s) / p`` (eq.
    8), for a loss in [0, 1]. This is the gradient of the squared distance between s and ``1 - loss``, by inverse
    propensity weighting.

    Args:
      depth: depth of the tree, 1 to 16; 0 for one linear score per action.
      actions: number K of actions, at least 2.
      exploration: delta, above 0 and at most 1. It may be traced.
      optimizer: any optax transformation. The default is :func:`two_rates` with 0.001 for splits and 0.3 for leaves.
        The paper has 0.001 for both, which is too slow for leaves: few samples reach each leaf.
      accumulate: number of rounds whose gradients are averaged for an update. Skipped rounds are not counted.

    Raises:
      ValueError: for a number out of range.
    """
    actions = checks.check_count("actions", actions, least=2)
    checks.check_number("exploration", exploration, above=0, most=1)
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
        if not checks.is_traced(action) and (np.ndim(action) or _kind(action) not in "iu" or not 0 <= action < actions):
            raise ValueError(f"action must be a whole number from 0 to {actions - 1}, got {checks.quoted(action)}")
        checks.check_number("propensity", propensity, above=0, most=1)
        action, loss = jnp.asarray(action), point_losses(loss, (), x.dtype)

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
    """Returns a learner for real-valued actions, which are perturbed predictions.

    One-point feedback: the action is ``prediction + delta u`` for a random sign ``u``, and the slope of the loss is
    estimated as ``loss u / delta`` (eq. 9). Two-point feedback: the actions are ``prediction +- delta``, and the slope
    is estimated as ``(loss_+ - loss_-) / (2 delta)`` (eq. 10), which is exact for a quadratic loss. The learner assumes
    targets in about [0, 1].

    Args:
      depth: depth of the tree, 1 to 16; 0 for one linear prediction.
      feedback: ``"one-point"`` or ``"two-point"``. For two-point feedback, action and loss are arrays of two numbers,
        and the upper action is first.
      delta: distance between the action and the prediction, above 0 and at most 1. It may be traced.
      optimizer: any optax transformation. The default is RMSprop with learning rate 0.001.
      accumulate: number of rounds whose gradients are averaged for an update. Skipped rounds are not counted.

    Raises:
      ValueError: for a number out of range or an unknown feedback.
    """
    checks.check_choice("feedback", feedback, ("one-point", "two-point"))
    checks.check_number("delta", delta, above=0, most=1)
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
        checks.check_number("propensity", propensity, above=0, most=1)
        shape = () if one_point else (2,)
        if action is None or np.shape(action) != shape:
            raise ValueError(f"action must have shape {shape} with {feedback} feedback, got {checks.quoted(action)}")
        action, loss = jnp.asarray(action, x.dtype), point_losses(loss, shape, x.dtype)
        width = jnp.asarray(delta, x.dtype)
        rise = loss / width if one_point else (loss[0] - loss[1]) / (2 * width)
        slope = lambda prediction: rise * jnp.sign(action - prediction) if one_point else rise
        if not checks.is_traced((state, x, action, width)):
            _check_played(action, _answer(state.params, x), width)
        return learner.learn(state, x, slope)

    return Bandit(learner.init, act, update, learner.predict)


def two_rates(splits: Any, leaves: Any) -> optax.GradientTransformation:
    """Returns RMSprop with separate learning rates (or schedules) for splits and leaves.

    Every sample trains a split, but a leaf is trained only by the samples that reach it. The linear learner has splits
    only.
    """

    def kinds(params: Any) -> Any:
        kind = lambda path, _: "leaves" if getattr(path[0], "name", None) == "leaves" else "splits"
        return jax.tree_util.tree_map_with_path(kind, params)

    return optax.partition({"splits": rmsprop(splits), "leaves": rmsprop(leaves)}, kinds)


@dataclasses.dataclass(frozen=True)
class _Learner:
    """The common part of the learners: a tree or, at depth 0, linear scores, with outputs ``()`` or ``(K,)``."""

    depth: int
    outputs: tuple[int, ...]
    optimizer: optax.GradientTransformation
    accumulate: int

    def __post_init__(self):
        if checks.check_count("depth", self.depth, least=0):
            checks.check_depth(self.depth)
        checks.check_count("accumulate", self.accumulate)
        if not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise ValueError(f"optimizer must be an optax transformation, got {checks.quoted(self.optimizer)}")

    def init(self, p: int, *, key: Array) -> BanditState:
        checks.check_key(key)
        params: Any = jnp.zeros((*self.outputs, checks.check_count("p", p))), jnp.zeros(self.outputs)
        if self.depth:
            params = random_chain(key, int(self.depth), p, (), self.outputs, jnp.result_type(float)).tree()
            params = params.replace(leaves=Values(params.leaves.values - (0.5 if self.outputs else 0)))
        zero = jnp.zeros((), jnp.int32)
        return BanditState(params, self.optimizer.init(params), jax.tree.map(jnp.zeros_like, params), zero, zero)

    def predict(self, params: Any, x: Array) -> Array:
        return params.predict(x) if self.depth else jax.vmap(_answer, (None, 0))(params, x)

    def context(self, state: BanditState, x: Any) -> Array:
        """Returns the checked context, in the precision of the state."""
        check_state(state, self.init)
        weights = jax.tree.leaves(state.params)[0]
        if np.shape(x) != weights.shape[-1:]:
            raise ValueError(f"x must be one context of shape {weights.shape[-1:]}, got shape {np.shape(x)}")
        checks.check_finite("x", x := jnp.asarray(x, weights.dtype))
        return x

    def learn(self, state: BanditState, x: Array, slope: Callable[[Array], Array]) -> BanditState:
        """Returns the state after a round; ``slope`` estimates the derivative of the loss by the prediction."""
        prediction, pull_back = jax.vjp(lambda params: _answer(params, x), state.params)
        derivative = slope(prediction)
        finite = jnp.isfinite(derivative).all() & jnp.isfinite(x).all()  # the slope of a non-finite loss is not finite
        # A skipped round adds no gradient, and its count triggers no update.
        add = lambda total, new: total + jnp.where(finite, new, 0)
        gradient = jax.tree.map(add, state.gradient, pull_back(jnp.where(finite, derivative, 0))[0])
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
    """Returns the prediction for one context, ``()`` or ``(K,)``, with DGT's gradient.

    The window of the straight-through rule is the mean size of the scores of the context. The paper's window is 1.
    """
    if not isinstance(params, ObliqueTree):
        return jnp.matmul(params[0], x, precision="highest") + params[1]
    return ops.path_sum(params.weights, params.bias, params.leaves.values, x[None], routing.mean_size)[0]


def check_state(state: Any, init: Callable[..., BanditState]) -> None:
    """Raises ``ValueError`` if the state does not belong to the learner with this ``init``."""
    if not isinstance(state, BanditState):
        raise ValueError(f"state must be a BanditState, from the learner's init, got {type(state).__name__}")
    p = next((np.shape(a)[-1] for a in jax.tree.leaves(state.params) if np.ndim(a)), 1)
    expected = jax.eval_shape(lambda: init(p, key=jax.random.key(0)))
    for name in ("params", "opt_state", "gradient"):
        shapes, expected_shapes = (jax.tree.map(np.shape, getattr(a, name)) for a in (state, expected))
        if shapes != expected_shapes:
            raise ValueError(
                f"state must be a state of this learner, with {name} of shapes {expected_shapes}, got {shapes}"
            )


def _check_played(action: Array, prediction: Array, width: Array) -> None:
    """Raises ``ValueError`` if an action does not have the distance ``width`` from the prediction."""
    if action.ndim:
        distance = jnp.abs(action - prediction - jnp.stack([width, -width]))
    else:
        distance = jnp.abs(jnp.abs(action - prediction) - width)
    # The rounding here may differ from the rounding in `act` by some units in the last place.
    if not bool(jnp.all(distance <= 64 * jnp.finfo(action.dtype).eps * (2 * width + jnp.abs(prediction)))):
        raise ValueError(f"action must be the action that act returned for this state, got {checks.quoted(action)}")


def _kind(value: Any) -> str:
    return np.asarray(value).dtype.kind


def point_losses(loss: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    if loss is None or np.shape(loss) != shape:
        raise ValueError(f"loss must have shape {shape}, as the action has, got {checks.quoted(loss)}")
    return jnp.asarray(loss, dtype)
