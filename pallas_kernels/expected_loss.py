"""GET's fused objective: the expected loss of a soft tree, its gradients and the hard routing in one pass.

A step needs one pass over samples and targets (for each subtree). It also returns the leaf that each sample reaches, by
which the hard tree can be evaluated at little cost.
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
    """Returns ``sum_i share_i sum_l P_il loss_l(y_i)``, and the leaf that each sample reaches by hard routing.

    Differentiable by reverse mode; batched by ``vmap`` (starts, configurations), which adds an axis to the grid. The
    gradient of ``x``, ``y`` and ``share`` is that of the plain definition, and costs nothing where nobody asks for it.
    For a scaled sigmoid, scale weights and bias.

    Args:
      x: samples ``(n, p)``, float32 or bfloat16.
      y: targets ``(n, k)``, or classes ``(n,)``, 0 to k - 1.
      weights: split weights ``(nodes, p)``, nodes breadth first; ``2**depth - 1`` of them, depth 1 to 10.
      bias: ``(nodes,)``.
      leaves: ``(leaves, k)``: values, or logits.
      share: weights of the samples ``(n,)``, by default ``1 / n`` each.
      loss: ``"squared"``, of several outputs the mean; or ``"log"``, of the classes y.
      route: as for :func:`pallas_kernels.soft_routing`, with scale 1.
      implementation: likewise.

    Returns:
      The loss, and leaf indices ``(n,)`` in int32.

    Raises:
      ValueError: for shapes or dtypes that do not fit, an unknown loss, route or implementation.
      NotImplementedError: for an implementation that does not exist, or that the platform cannot run.
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
    if loss == "log":  # linear in the log probabilities of the classes
        chances = share[:, None] * jax.nn.one_hot(y, k, dtype=jnp.float32)
        return _expected_loss(
            "linear", route, config, x, chances, share, weights, bias, -jax.nn.log_softmax(leaves, axis=1)
        )
    # Squares are expanded for several outputs: centring avoids cancellation.
    y = y.astype(jnp.float32)
    centre = jax.lax.stop_gradient(y.mean(0))  # on which the loss does not depend
    return _expected_loss("squared", route, config, x, y - centre, share / k, weights, bias, leaves - centre)


def reference(
    x: Any, y: Any, weights: Any, bias: Any, leaves: Any, share: Any, loss: str, route: str
) -> tuple[jax.Array, jax.Array]:
    """The plain definition."""
    leaf, _ = hard_reference(x, weights, bias, leaves)
    weight = leaf_weights(scores(x, weights, bias), route)
    log_chances = jax.nn.log_softmax(leaves, axis=1)
    lost = jnp.square(leaves[:, None] - y).mean(2) if loss == "squared" else -log_chances[:, y]
    return (share * weight * lost).sum(), leaf


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _expected_loss(loss: Loss, route: str, config: Config, *operands: Any) -> tuple[jax.Array, jax.Array]:
    return _visited(loss, route, config, *operands)[0]


# Value and gradient come from one pass, so the forward rule computes both, and the backward rule only scales. The rule
# is told which operands are differentiated.
def _forward(loss: Loss, route: str, config: Config, *given: Any) -> tuple[Any, Any]:
    operands = [one.value for one in given]
    out, gradient = _visited(loss, route, config, *operands)
    of_data: Any = (None, None, None)
    if any(one.perturbed for one in given[:3]):
        of_data = jax.grad(partial(_plain, loss, route), argnums=(0, 1, 2))(*operands)
    return out, (*of_data, *gradient)


def _plain(loss: Loss, route: str, x: Any, y: Any, share: Any, weights: Any, bias: Any, leaves: Any) -> jax.Array:
    """The plain definition of what the kernel computes, from its operands."""
    weight = leaf_weights(scores(x, weights, bias), route)
    if loss == "linear":
        return (weight * jnp.matmul(leaves, y.T, precision="highest")).sum()
    return (share * weight * jnp.square(leaves[:, None] - y).sum(2)).sum()


def _visited(
    loss: Loss, route: str, config: Config, x: Any, y: Any, share: Any, weights: Any, bias: Any, leaves: Any
) -> tuple[Any, Any]:
    """Returns the loss and the leaf that each sample reaches; and the gradient for splits and leaves."""
    soft_route, known = ROUTES[route], {"share": share[:, None]} if loss == "squared" else {}
    if soft_route.centred:  # differences from the mean loss need another pass for the mean
        mean, log_total = value(soft_route, config, x, weights, bias, leaves, loss=loss, y=y, **known)
        known |= {"mean": mean, "log_total": log_total}
    results = gradient(soft_route, config, x, weights, bias, leaves, y, loss=loss, numbered=True, **known)
    return (results["loss"], results["leaf"]), (results["weights"], results["bias"], results["leaves"])


def _backward(loss: Loss, route: str, config: Config, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    if isinstance(cotangents[0], jax.custom_derivatives.SymbolicZero):
        return (None,) * len(saved)
    return jax.tree.map(lambda g: (cotangents[0] * g.astype(cotangents[0].dtype)).astype(g.dtype), saved)


_expected_loss.defvjp(_forward, _backward, symbolic_zeros=True)
