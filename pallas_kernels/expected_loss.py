"""GET's fused objective: the expected loss of a soft tree, its gradients and the hard routing in one pass.

A step needs one pass over samples and targets; on a GPU one for each subtree. It also returns the leaf that each sample
reaches, by which the hard tree can be evaluated at little cost.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.choice import Choice, Implementation, choose, run
from pallas_kernels.config import Config
from pallas_kernels.hard_routing import walk
from pallas_kernels.losses import Loss
from pallas_kernels.operands import check_route, checked, leaf_weights, scores
from pallas_kernels.routes import ROUTES
from pallas_kernels.routing import Tree, gradient

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
    implementation: Implementation = "xla",
) -> tuple[jax.Array, jax.Array]:
    """The loss ``sum_i share_i sum_l P_il loss_l(y_i)``, and the leaf that each sample reaches by hard routing.

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
      implementation: see :mod:`pallas_kernels.choice`.

    Returns:
      The loss, and leaf indices ``(n,)`` in int32.

    Raises:
      ValueError: for shapes or dtypes that do not fit, an unknown loss, route or implementation.
      Unsupported: where no implementation that was asked for can run this.
    """
    tree = checked(x, weights, bias, leaves)
    n, k = x.shape[0], leaves.shape[1]
    check_route(route)
    if loss not in ("squared", "log"):
        raise ValueError(f"loss must be 'squared' or 'log', got {loss!r:.80}")
    y = jnp.asarray(y)
    if y.shape != ((n, k) if loss == "squared" else (n,)):
        raise ValueError(
            f"y must be {(n, k) if loss == 'squared' else (n,)} for loss={loss!r:.80}, got shape {y.shape}"
        )
    share = jnp.full(n, 1 / n, jnp.float32) if share is None else jnp.asarray(share, jnp.float32)
    if share.shape != (n,):
        raise ValueError(f"share must be ({n},), got shape {share.shape}")
    choice = choose(NAME, implementation, tree.sizes)
    if not choice.configs:
        return reference(*tree, y, share, loss, route)
    if loss == "log":  # linear in the log probabilities of the classes
        y = share[:, None] * jax.nn.one_hot(y, k, dtype=jnp.float32)
        tree = tree._replace(leaves=-jax.nn.log_softmax(tree.leaves, axis=1))
        return _expected_loss("linear", route, choice, *tree, y, share)
    # Squares are expanded for several outputs: centring avoids cancellation.
    y = y.astype(jnp.float32)
    # The loss does not depend on the centre.
    centre = (share[:, None] * y).sum(0) / jnp.maximum(share.sum(), jnp.finfo(jnp.float32).tiny)
    centre = jax.lax.stop_gradient(centre)
    tree = tree._replace(leaves=tree.leaves - centre)
    return _expected_loss("squared", route, choice, *tree, y - centre, share / k)


def reference(
    x: Any, weights: Any, bias: Any, leaves: Any, y: Any, share: Any, loss: str, route: str
) -> tuple[jax.Array, jax.Array]:
    """The plain definition."""
    weight = leaf_weights(scores(x, weights, bias), route)
    log_chances = jax.nn.log_softmax(leaves, axis=1)
    lost = jnp.square(leaves[:, None] - y).mean(2) if loss == "squared" else -log_chances[:, y]
    return (share * weight * lost).sum(), walk(x, weights, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _expected_loss(loss: Loss, route: str, choice: Choice, *operands: Any) -> tuple[jax.Array, jax.Array]:
    return _visited(loss, route, choice, *operands)[0]


# Value and gradient come from one pass, so the forward rule computes both, and the backward rule only scales. The rule
# is told which operands are differentiated.
def _forward(loss: Loss, route: str, choice: Choice, *given: Any) -> tuple[Any, Any]:
    operands = [one.value for one in given]
    out, of_tree = _visited(loss, route, choice, *operands)
    of_x, of_y, of_share = None, None, None
    if any(given[i].perturbed for i in (0, 4, 5)):
        of_x, of_y, of_share = jax.grad(partial(_plain, loss, route), argnums=(0, 4, 5))(*operands)
    return out, (of_x, *of_tree, of_y, of_share)


def _plain(loss: Loss, route: str, x: Any, weights: Any, bias: Any, leaves: Any, y: Any, share: Any) -> jax.Array:
    """The plain definition of what the kernel computes, from its operands."""
    weight = leaf_weights(scores(x, weights, bias), route)
    if loss == "linear":
        return (weight * jnp.matmul(leaves, y.T, precision="highest")).sum()
    return (share * weight * jnp.square(leaves[:, None] - y).sum(2)).sum()


def _visited(loss: Loss, route: str, choice: Choice, *operands: Any) -> tuple[Any, Any]:
    """The loss and the leaf that each sample reaches; and the gradient for splits and leaves."""

    def fused(config: Config, *operands: Any) -> tuple[Any, Any]:
        *tree, y, share = operands
        known = {"share": share[:, None]} if loss == "squared" else {}
        found = gradient(ROUTES[route], config, Tree(*tree), y, loss=loss, numbered=True, **known)
        return (found["loss"], found["leaf"]), (found["weights"], found["bias"], found["leaves"])

    def plain(*operands: Any) -> tuple[Any, Any]:
        lost, of_tree = jax.value_and_grad(partial(_plain, loss, route), argnums=(1, 2, 3))(*operands)
        return (lost, walk(*operands[:3])), of_tree

    return run(choice, fused, plain, *operands)


def _backward(loss: Loss, route: str, choice: Choice, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    if isinstance(cotangents[0], jax.custom_derivatives.SymbolicZero):
        return (None,) * len(saved)
    return jax.tree.map(lambda g: (cotangents[0] * g.astype(cotangents[0].dtype)).astype(g.dtype), saved)


_expected_loss.defvjp(_forward, _backward, symbolic_zeros=True)
