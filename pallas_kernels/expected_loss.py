"""GET's objective fused: the loss that a soft tree expects, its gradients and the hard routing in one visit.

One visit of the samples and targets a step (for each subtree), and the leaf that each sample reaches besides, by which
the hard tree of the step can be judged at hardly any further cost.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Config, config_of
from pallas_kernels.hard_routing import reference as hard_reference
from pallas_kernels.operands import checked, scores
from pallas_kernels.routes import ROUTES
from pallas_kernels.soft_routing import gradient, leaf_weights, value
from pallas_kernels.tiles import Loss

NAME = "expected_loss"


def expected_loss(
    x: jax.Array,
    y: jax.Array,
    weights: jax.Array,
    bias: jax.Array,
    leaves: jax.Array,
    *,
    share: jax.Array | None = None,
    loss: str = "squared",
    route: str = "sigmoid",
    implementation: str | Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``sum_i share_i sum_l P_il loss_l(y_i)``, and the leaf that each sample reaches when the routing is hard.

    Differentiable by reverse mode in ``weights``, ``bias`` and ``leaves``; batched by ``vmap`` (starts,
    configurations), which adds an axis to the grid. A scaled sigmoid is had by scaling weights and bias.

    Args:
      x: samples ``(n, p)``, float32 or bfloat16.
      y: targets ``(n, k)``, or classes ``(n,)``, 0 to k - 1.
      weights: split weights ``(nodes, p)``, nodes breadth first; ``2**depth - 1`` of them, depth 1 to 10.
      bias: ``(nodes,)``.
      leaves: ``(leaves, k)``: values, or logits.
      share: weights of the samples ``(n,)``, by default ``1 / n`` each.
      loss: ``"squared"``, of several outputs the mean; or ``"log"``, of the classes y.
      route: as of :func:`pallas_kernels.soft_routing`, of scale 1.
      implementation: likewise.

    Returns:
      The loss, and leaf numbers ``(n,)`` in int32.

    Raises:
      ValueError: for shapes or dtypes that do not fit, an unknown loss, route or implementation.
      NotImplementedError: for an implementation that is not written, or that the platform cannot run.
    """
    x, weights, bias, leaves = checked(x, weights, bias, leaves)
    n, k = x.shape[0], leaves.shape[1]
    if loss not in ("squared", "log") or route not in ROUTES:
        raise ValueError(f"loss must be squared or log, route one of {', '.join(ROUTES)}, got {loss!r} and {route!r}")
    y = jnp.asarray(y)
    if y.shape != ((n, k) if loss == "squared" else (n,)):
        raise ValueError(f"y must be {(n, k) if loss == 'squared' else (n,)} for loss={loss!r}, got shape {y.shape}")
    share = jnp.full(n, 1 / n, jnp.float32) if share is None else jnp.asarray(share, jnp.float32)
    if share.shape != (n,):
        raise ValueError(f"share must be ({n},), got shape {share.shape}")
    if (config := config_of(NAME, implementation)) is None:
        return reference(x, y, weights, bias, leaves, share, loss, route)
    x, y, share = jax.lax.stop_gradient((x, y, share))
    if loss == "log":  # linear in the log probabilities of the classes
        chances = share[:, None] * jax.nn.one_hot(y, k, dtype=jnp.float32)
        return _expected_loss(
            "linear", route, config, x, chances, share, weights, bias, -jax.nn.log_softmax(leaves, axis=1)
        )
    # Squares are taken apart where there are several outputs: from the mean on, no digits are lost.
    y = y.astype(jnp.float32)
    centre = y.mean(0)
    return _expected_loss("squared", route, config, x, y - centre, share / k, weights, bias, leaves - centre)


def reference(
    x: Any, y: Any, weights: Any, bias: Any, leaves: Any, share: Any, loss: str, route: str
) -> tuple[jax.Array, jax.Array]:
    """The plain definition."""
    x, y, share = jax.lax.stop_gradient((x, y, share))
    leaf, _ = hard_reference(x, weights, bias, leaves)
    weight = leaf_weights(scores(x, weights, bias), route)
    log_chances = jax.nn.log_softmax(leaves, axis=1)
    lost = jnp.square(leaves[:, None] - y).mean(2) if loss == "squared" else -log_chances[:, y]
    return (share * weight * lost).sum(), leaf


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _expected_loss(
    loss: Loss, route: str, config: Config, x: Any, y: Any, share: Any, weights: Any, bias: Any, leaves: Any
) -> tuple[jax.Array, jax.Array]:
    return _forward(loss, route, config, x, y, share, weights, bias, leaves)[0]


# Value and gradient come from one visit, so the forward rule computes both, and the backward rule only scales.
def _forward(
    loss: Loss, route: str, config: Config, x: Any, y: Any, share: Any, weights: Any, bias: Any, leaves: Any
) -> tuple[Any, Any]:
    of, known = ROUTES[route], {"share": share[:, None]} if loss == "squared" else {}
    if of.centred:  # what a leaf's loss is above the mean wants the mean first: a visit more
        mean, log_total = value(of, config, x, weights, bias, leaves, loss=loss, y=y, **known)
        known |= {"mean": mean, "log_total": log_total}
    found = gradient(of, config, x, weights, bias, leaves, y, loss=loss, numbered=True, **known)
    return (found["loss"], found["leaf"]), (found["weights"], found["bias"], found["leaves"])


def _backward(loss: Loss, route: str, config: Config, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    return None, None, None, *jax.tree.map(lambda g: cotangents[0] * g, saved)


_expected_loss.defvjp(_forward, _backward)
