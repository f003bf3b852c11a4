"""GET's fused objective: the expected loss of a soft tree, its gradients and the hard routing in one pass.

A step needs one pass over samples and targets, and on a GPU one pass for each subtree. The pass also returns the leaf
that each sample reaches. The hard tree can then be evaluated at little cost.
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
from pallas_kernels.timing import Program


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
    """Returns the loss ``sum_i share_i sum_l P_il loss_l(y_i)``, and the leaf that each sample reaches by hard routing.

    The loss is differentiable by reverse mode. ``vmap`` batches it (over starts or configurations), and adds an axis to
    the grid. The gradients of ``x``, ``y`` and ``share`` follow the plain definition. Unused gradients cost nothing.
    For a scaled sigmoid, scale weights and bias.

    Args:
      x: samples ``(n, p)``, float32 or bfloat16.
      y: targets ``(n, k)``, or classes ``(n,)``, 0 to k - 1.
      weights: split weights ``(nodes, p)``, ``2**depth - 1`` nodes breadth first, depth 1 to 10.
      bias: split biases ``(nodes,)``.
      leaves: values or logits ``(leaves, k)``.
      share: weights of the samples ``(n,)``, by default ``1 / n`` each.
      loss: ``"squared"``, averaged over the outputs, or ``"log"`` for classes y.
      route: as for :func:`pallas_kernels.soft_routing`, with scale 1.
      implementation: see :mod:`pallas_kernels.choice`.

    Returns:
      The loss, and leaf indices ``(n,)`` in int32.

    Raises:
      ValueError: for shapes or dtypes that do not fit, an unknown loss, route or implementation.
      Unsupported: if no requested implementation can run the call.
    """
    tree = checked(x, weights, bias, leaves)
    n, k = x.shape[0], leaves.shape[1]
    check_route(route)
    if loss not in ("squared", "log"):
        raise ValueError(f"loss must be 'squared' or 'log', got {loss!r:.80}")
    y = jnp.asarray(y)
    if y.shape != (shape := (n, k) if loss == "squared" else (n,)):
        raise ValueError(f"y must be {shape} for loss={loss!r:.80}, got shape {y.shape}")
    share = jnp.full(n, 1 / n, jnp.float32) if share is None else jnp.asarray(share, jnp.float32)
    if share.shape != (n,):
        raise ValueError(f"share must be ({n},), got shape {share.shape}")

    def call(how: Any, x: jax.Array, y: jax.Array, *tree: jax.Array) -> Any:
        targets = y if loss == "squared" else y.argmax(1)
        return expected_loss(x, targets, *tree, loss=loss, route=route, implementation=how)

    choice = choose(Program("expected_loss", f"{route}, {loss}", call), implementation, tree.sizes)
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
    """Computes the plain definition."""
    weight = leaf_weights(scores(x, weights, bias), route)
    log_chances = jax.nn.log_softmax(leaves, axis=1)
    losses = jnp.square(leaves[:, None] - y).mean(2) if loss == "squared" else -log_chances[:, y]
    return (share * weight * losses).sum(), walk(x, weights, bias)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _expected_loss(loss: Loss, route: str, choice: Choice, *operands: Any) -> tuple[jax.Array, jax.Array]:
    return _visited(loss, route, choice, *operands)[0]


# One pass computes value and gradient. The forward rule therefore computes both, and the backward rule only scales the
# gradient. Symbolic zeros tell the forward rule which operands are differentiated.
def _forward(loss: Loss, route: str, choice: Choice, *primals: Any) -> tuple[Any, Any]:
    operands = [primal.value for primal in primals]
    out, d_tree = _visited(loss, route, choice, *operands)
    d_x, d_y, d_share = None, None, None
    if any(primals[i].perturbed for i in (0, 4, 5)):
        d_x, d_y, d_share = jax.grad(partial(_plain, loss, route), argnums=(0, 4, 5))(*operands)
    return out, (d_x, *d_tree, d_y, d_share)


def _plain(loss: Loss, route: str, x: Any, weights: Any, bias: Any, leaves: Any, y: Any, share: Any) -> jax.Array:
    """Computes the plain definition of the kernel's result from the kernel's operands."""
    weight = leaf_weights(scores(x, weights, bias), route)
    if loss == "linear":
        return (weight * jnp.matmul(leaves, y.T, precision="highest")).sum()
    return (share * weight * jnp.square(leaves[:, None] - y).sum(2)).sum()


def _visited(loss: Loss, route: str, choice: Choice, *operands: Any) -> tuple[Any, Any]:
    """Returns the loss and the leaf that each sample reaches, and the gradient with respect to splits and leaves."""

    def fused(config: Config, *operands: Any) -> tuple[Any, Any]:
        *tree, y, share = operands
        columns = {"share": share[:, None]} if loss == "squared" else {}
        results = gradient(ROUTES[route], config, Tree(*tree), y, loss=loss, numbered=True, **columns)
        return (results["loss"], results["leaf"]), (results["weights"], results["bias"], results["leaves"])

    def plain(*operands: Any) -> tuple[Any, Any]:
        value, d_tree = jax.value_and_grad(partial(_plain, loss, route), argnums=(1, 2, 3))(*operands)
        return (value, walk(*operands[:3])), d_tree

    return run(choice, fused, plain, *operands)


def _backward(loss: Loss, route: str, choice: Choice, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    if isinstance(cotangents[0], jax.custom_derivatives.SymbolicZero):
        return (None,) * len(saved)
    return jax.tree.map(lambda g: (cotangents[0] * g.astype(cotangents[0].dtype)).astype(g.dtype), saved)


_expected_loss.defvjp(_forward, _backward, symbolic_zeros=True)
