"""A stream of rounds for a bandit learner, in one compiled program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrees import pytree, validation as checks
from jtrees.methods.bandit import Bandit, BanditState, check_state, point_losses


@pytree.dataclass
class BanditRun:
    """The result of a run over a stream.

    Attributes:
      state: state after the last round. ``state.skipped`` counts the rounds whose loss was not finite.
      actions: the actions, ``(n,)`` or ``(n, 2)``.
      propensities: the probabilities of the actions, ``(n,)``.
      losses: the losses of the actions, ``(n,)``: the mean of the two losses for two-point feedback, and NaN in skipped
        rounds.
      cumulative_loss: sum of the losses up to each round, without skipped rounds.
      regret: cumulative loss minus the sum of ``best_losses`` over the same rounds.
      skipped: whether each round was skipped, ``(n,)``.
      queries: number of rounds of this run before each evaluation of ``score``, ``(looks,)``.
      scores: score of each evaluation, ``(looks,)``.
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
    """Runs a learner over a stream, as one scan over the rounds.

    The function is pure: it can be compiled, and ``vmap`` maps it over keys and over numeric options of the learner.
    The randomness of a round depends on the key and on ``state.rounds``. So a stream can be split in two. If the second
    part continues from the state of the first part with the same key, the result equals the result of the whole stream.

    Args:
      learner: the learner.
      contexts: one context per round.
      loss_fn: ``(round, action) -> loss``: the loss of an action in a round. Rounds are numbered from 0 in
        ``contexts``. For two-point feedback it is called once for each point. No other loss is observed.
      key: key for exploration, and for the initial state.
      state: state to continue from. The default is a new state.
      best_losses: smallest possible loss of each round, for the regret. The default is 0.
      score: ``params -> scalar``, evaluated during the run, such as a held-out score.
      score_every: number of rounds between evaluations of the score.

    Raises:
      ValueError: for contexts that are not finite numbers (n, p), a state of another learner, or counts out of range.
    """
    contexts = _checked_stream(learner, contexts, loss_fn, best_losses)
    checks.check_count("score_every", score_every)
    checks.check_key(key)
    (n, p), (init_key, play_key) = contexts.shape, jax.random.split(key)
    state = learner.init(p, key=init_key) if state is None else state
    check_state(state, learner.init)
    dtype = jax.tree.leaves(state.params)[0].dtype  # the learner computes in its own precision

    def play(state: BanditState, inputs: tuple[Array, Array]) -> tuple[BanditState, Any]:
        i, x = inputs
        action, propensity = learner.act(state, x, key=jax.random.fold_in(play_key, state.rounds))
        point_loss = lambda point: point_losses(loss_fn(i, point), (), dtype)
        loss = jnp.stack([point_loss(point) for point in action.reshape(-1)]).reshape(action.shape)
        after, score_value = learner.update(state, x, action, propensity, loss), jnp.zeros((), dtype)
        if score is not None:
            evaluate = lambda params, score_fn=score: jnp.asarray(score_fn(params)).astype(dtype)
            score_value = jax.lax.cond((i + 1) % score_every == 0, evaluate, lambda _: score_value, after.params)
        return after, (action, propensity, loss.mean(), after.skipped > state.skipped, score_value)

    state, (actions, propensities, losses, skipped, scores) = jax.lax.scan(play, state, (jnp.arange(n), contexts))
    queries = score_every * jnp.arange(1, 1 if score is None else n // score_every + 1)
    best = jnp.zeros(n, dtype) if best_losses is None else jnp.asarray(best_losses, dtype)
    return BanditRun(
        state=state,
        actions=actions,
        propensities=propensities,
        losses=jnp.where(skipped, jnp.nan, losses),
        cumulative_loss=jnp.cumsum(jnp.where(skipped, 0, losses)),
        regret=jnp.cumsum(jnp.where(skipped, 0, losses - best)),
        skipped=skipped,
        queries=queries,
        scores=scores[queries - 1],
    )


def _checked_stream(learner: Any, contexts: Any, loss_fn: Any, best_losses: Any) -> Array:
    """Returns the contexts of a checked stream."""
    if not isinstance(learner, Bandit):
        raise ValueError(
            f"learner must be a jtrees.methods.Bandit, such as jtrees.methods.bandit_regressor(4), "
            f"got {checks.quoted(learner)}"
        )
    if not callable(loss_fn):
        raise ValueError(f"loss_fn must be a function (round, action) -> loss, got {checks.quoted(loss_fn)}")
    contexts = jnp.asarray(checks.as_numeric("contexts", contexts))
    shape, dtype = contexts.shape, contexts.dtype
    if len(shape) != 2 or 0 in shape or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"contexts must be floating numbers (n, p), at least one round, got {dtype} of shape {shape}")
    checks.check_finite("contexts", contexts)
    if best_losses is not None and jnp.shape(best_losses) != shape[:1]:
        raise ValueError(f"best_losses must have shape {shape[:1]}, got {jnp.shape(best_losses)}")
    return contexts
