"""Scores, routing and leaves in one call.

Splits are ``weights (nodes, p)`` and ``bias (nodes,)``. The score of node j is ``weights[j] @ x + bias[j]``. Scores are
computed in full precision, even on matrix units that would round to fewer bits. The reason is that a score near 0
decides the path of a sample.

Only this module chooses between XLA and a fused kernel. The argument ``implementation`` controls the choice:

- None, the default: the kernel if it is faster on such a device, else XLA (:func:`jtrees.kernels.choices`).
- ``"xla"``: the plain definition.
- ``"mosaic_tpu"``, ``"triton"``, ``"interpret"`` or a ``pallas_kernels.Config``: the kernel, or the error
  ``pallas_kernels.Unsupported``.
- A tuple or list of these values: the first value that the platform and the sizes allow.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jtrees import routing, sharding, topology, validation
from jtrees._expected_loss import expected, leaf_probabilities
from jtrees.segments import at_least_float32
from jtrees.tasks.labels import is_soft
import pallas_kernels as kernels
from pallas_kernels import Choice, Implementation, Unsupported
from pallas_kernels.choice import XLA

# A soft routing: a name, for which kernels exist; or a function that maps scores (nodes, n) to probabilities of the
# leaves (leaves, n). XLA differentiates the function.
Route = Literal["sigmoid", "violation"] | Callable[[jax.Array], jax.Array]
_ROUTES = ("sigmoid", "violation")

# Number of top levels whose nodes are all scored (folded) before the path is followed. Measured on two CPU cores with
# 10^6 x 21 rows: from depth 7 on, it is fastest to fold 5 or 6 levels. At depth 8 this reaches 17 M rows/s, against 11
# M if all levels are folded. At depth 10 it reaches 11 M, against 3 M with 9 folded levels.
FOLDED_LEVELS = 6
# Largest number of features for which the weights on a path are gathered feature by feature, for all samples at once.
# Measured on two CPU cores with 21 features: speedups of 1.1, 1.2 and 1.3 over sample by sample at depths 8, 10 and 12.
# There is no difference for 5 or 50 features, and it is slower for 100 features. Each feature is an operation to
# compile.
_BY_FEATURE = 32

__all__ = ["ensemble", "expected_loss", "hard", "path_sum", "scores", "soft"]


def scores(
    weights: Float[Array, "nodes p"], bias: Float[Array, " nodes"], x: Float[Array, "n p"]
) -> Float[Array, "nodes n"]:
    """Returns the scores of all splits."""
    return jnp.matmul(weights, x.T, precision="highest") + bias[:, None]


def soft(
    weights: Float[Array, "nodes p"],
    bias: Float[Array, " nodes"],
    leaf_values: Float[Array, "leaves *k"],
    x: Float[Array, "n p"],
    route: Route = "sigmoid",
    *,
    implementation: Implementation = None,
) -> Float[Array, "n *k"]:
    """Returns the mean of the leaf values, weighted by the leaf probabilities of a soft routing.

    Args:
      weights: split weights.
      bias: split biases.
      leaf_values: values of the leaves.
      x: samples.
      route: ``"sigmoid"``; ``"violation"`` (:func:`jtrees.routing.violation`); or a function of the scores
        ``(nodes, n)`` that returns the probabilities of the leaves, ``(leaves, n)``.
      implementation: see :mod:`jtrees.ops`. A kernel has first derivatives in reverse mode only.
    """

    def plain(weights: Array, bias: Array, leaf_values: Array, x: Array) -> Array:
        z = scores(weights, bias, x)
        reach = leaf_probabilities(route, z)
        return jnp.tensordot(reach, leaf_values, ((0,), (0,)), precision="highest")

    def fused(how: Any, weights: Array, bias: Array, leaf_values: Array, x: Array) -> Array:
        values = leaf_values.reshape(len(leaf_values), -1)
        out = kernels.soft_routing(x, weights, bias, values, route=str(route), implementation=how)
        return out.reshape(-1, *leaf_values.shape[1:])

    _check_route(route)
    able = leaf_values.ndim <= 2 and isinstance(route, str)
    call = lambda how, x, y, w, b, v, route=route: soft(w, b, v, x, route, implementation=how)  # type: ignore[arg-type]
    program = kernels.Program("soft_routing", str(route), call)
    how = _choose(program, implementation, able, x, weights, bias, leaf_values)
    return _differentiable(how, fused, plain, weights, bias, leaf_values, x)


def path_sum(
    weights: Float[Array, "nodes p"],
    bias: Float[Array, " nodes"],
    leaf_values: Float[Array, "leaves *k"],
    x: Float[Array, "n p"],
    window: float | Array | Callable[[Array], Array] = 1.0,
    *,
    implementation: Implementation = None,
) -> Float[Array, "n *k"]:
    """Returns the value of the reached leaf, with DGT's dense gradient (:func:`jtrees.routing.path_sum`).

    Args:
      weights: split weights.
      bias: split biases.
      leaf_values: values of the leaves.
      x: samples.
      window: as for :func:`jtrees.routing.path_sum`, or a function of the scores, such as
        :func:`jtrees.routing.mean_size`. A function needs all scores in memory, so a kernel is then used only if
        ``implementation`` requests it.
      implementation: see :mod:`jtrees.ops`.
    """

    def plain(weights: Array, bias: Array, leaf_values: Array, x: Array, *fixed: Array) -> Array:
        z = scores(weights, bias, x)
        if fixed:
            return routing.path_sum(z, leaf_values, fixed[0].astype(z.dtype))
        return routing.path_sum(z, leaf_values, window(z) if callable(window) else window)

    def fused(how: Any, weights: Array, bias: Array, leaf_values: Array, x: Array, fixed: Array) -> Array:
        values = leaf_values.reshape(len(leaf_values), -1)
        out = kernels.path_sum(x, weights, bias, values, window=fixed, implementation=how)
        return out.reshape(-1, *leaf_values.shape[1:])

    able = leaf_values.ndim <= 2 and not (callable(window) and implementation is None)
    program = kernels.Program("path_sum", "", lambda how, x, y, w, b, v: path_sum(w, b, v, x, implementation=how))
    how = _choose(program, implementation, able, x, weights, bias, leaf_values)
    if not how.configs:
        return plain(weights, bias, leaf_values, x)
    fixed = jax.lax.stop_gradient(window(scores(weights, bias, x)) if callable(window) else window)
    operands = weights, bias, leaf_values, x, jnp.asarray(fixed, at_least_float32(x))
    return _differentiable(how, fused, plain, *operands)


def hard(
    weights: Float[Array, "nodes p"],
    bias: Float[Array, " nodes"],
    x: Float[Array, "n p"],
    *,
    implementation: Implementation = None,
) -> Int[Array, " n"]:
    """Returns the reached leaf. Computes only scores that can matter: all top levels, and the path below them.

    Folding the comparison bits of all scores avoids gathers, but its work grows with the nodes. Following the path
    needs one dot product per level, but gathers a row of weights for each. Folding is faster near the root, and
    following the path is faster below.

    Args:
      weights: split weights.
      bias: split biases.
      x: samples.
      implementation: see :mod:`jtrees.ops`. A kernel scores all nodes.

    Returns:
      Leaf numbers from 0, int32, ``(n,)``.
    """
    fused = lambda how, weights, bias, x: kernels.hard_routing(x, weights, bias, implementation=how)
    program = kernels.Program("hard_routing", "", lambda how, x, y, w, b, v: hard(w, b, x, implementation=how))
    how = _choose(program, implementation, True, x, weights, bias)
    return kernels.run(how, _by_rows(fused, 2), _follow, *jax.lax.stop_gradient((weights, bias, x)))


def hard_and_uncertain(
    weights: Float[Array, "nodes p"], bias: Float[Array, " nodes"], x: Float[Array, "n p"]
) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
    """Returns the reached leaf, and whether rounding may have decided a split on the path, or a sample is not finite.

    The computed score is a sum of p products and the bias. Let u be the unit roundoff. In any order of additions, the
    error of the score is at most ``(p + 1) u / (1 - (p + 1) u)`` times ``|bias| + sum |weights| |x|`` (Higham,
    *Accuracy and Stability of Numerical Algorithms*, section 3.1). For splits of :func:`jtrees.exact.unit_splits`, this
    bound is below ``4 (p + 1) u (1 + norm(x))`` at every node, which also bounds underflow. A sample is uncertain if
    the magnitude of a score on its path, or in the top levels, is smaller. Features should have about one size
    (:func:`jtrees.exact.balanced_splits`).
    """
    eps = jnp.finfo(x.dtype).eps  # two unit roundoffs
    size = jnp.sqrt(jnp.matmul(jnp.square(x), jnp.ones(x.shape[1], x.dtype), precision="highest"))
    return _follow(weights, bias, x, float(2 * (x.shape[1] + 1) * eps) * (1 + size))


def _follow(weights: Array, bias: Array, x: Array, error: Array | None = None) -> Any:
    """Returns the reached leaf. If ``error`` bounds score errors, also returns a mask of uncertain samples."""
    depth = topology.depth_of(weights.shape[0])
    top = min(depth, FOLDED_LEVELS)
    above = topology.num_nodes(top)
    z = scores(weights[:above], bias[:above], x)
    node = above + routing.leaf_index(z)
    is_uncertain = lambda score: jnp.abs(score) < jnp.asarray(error)
    append_bit = lambda node, bit: 2 * node + bit.astype(node.dtype)

    def descend(_, state):
        node = state if error is None else state >> 1
        gather = lambda a: a.at[node].get(mode="promise_in_bounds")
        if x.shape[1] <= _BY_FEATURE:
            score = gather(bias)
            for w, column in zip(weights.T, x.T, strict=True):
                score += gather(w) * column
        else:
            score = jnp.einsum("np,np->n", gather(weights), x, precision="highest") + gather(bias)
        below = 2 * node + 1 + (score > 0).astype(node.dtype)
        return below if error is None else append_bit(below, (state % 2 == 1) | is_uncertain(score))

    # A single array is passed from level to level, with a bit for uncertainty. For two arrays, the compiler would
    # compute scores twice.
    if error is not None:  # which is infinite where scores may overflow
        node = append_bit(node, is_uncertain(z).any(0) | ~jnp.isfinite(error))
    # The loop is compiled. In an unrolled Python loop, the compiler would fuse the gathers of a level into the next
    # level's gathers, and compute each path again for every level. A loop without levels is left out, because it would
    # still be traced and lowered.
    state = jax.lax.fori_loop(top, depth, descend, node) if top < depth else node
    return state - weights.shape[0] if error is None else ((state >> 1) - weights.shape[0], state % 2 == 1)


def ensemble(
    weights: Float[Array, "trees nodes p"],
    bias: Float[Array, "trees nodes"],
    leaf_values: Float[Array, "trees leaves k"],
    x: Float[Array, "n p"],
    gamma: Any,
    *,
    width: int | None = None,
    implementation: Implementation = None,
) -> Float[Array, "n k"]:
    """Returns the sum of trees under smooth-step routing: see :func:`jtrees.routing.conditional_ensemble`.

    Only reverse mode is supported.

    Args:
      weights: split weights.
      bias: split biases.
      leaf_values: values of the leaves.
      x: samples.
      gamma: width of the uncertain region of a score.
      width: capacity for paths per sample and tree, if XLA computes the sum.
      implementation: see :mod:`jtrees.ops`.
    """

    def plain(weights: Array, bias: Array, leaf_values: Array, x: Array, gamma: Array) -> Array:
        return routing.conditional_ensemble(x, weights, bias, leaf_values, gamma, width=width)

    def fused(how: Any, weights: Array, bias: Array, leaf_values: Array, x: Array, gamma: Array) -> Array:
        options = {"route": "smooth_step", "scale": 1 / gamma, "implementation": how}
        tree_outputs = lambda weights, bias, values: kernels.soft_routing(x, weights, bias, values, **options)
        return jax.vmap(tree_outputs)(weights, bias, leaf_values).sum(0)

    # Benchmarks of soft_routing do not apply here: they measure other routings, and XLA's program is different. There
    # is no estimate for a sum of trees either, so the default is XLA, and the program is never timed.
    first_tree = weights[0], bias[0], leaf_values[0]
    program = kernels.Program("ensemble", "", ensemble)
    how = _choose(program, implementation, True, x, *first_tree, not_by=("triton",))
    operands = weights, bias, leaf_values, x, jnp.asarray(gamma, at_least_float32(x))
    return _differentiable(how, fused, plain, *operands)


def _differentiable(how: Choice, fused: Callable[..., Any], plain: Callable[..., Array], *operands: Any) -> Array:
    """Returns the result of the kernel or of ``plain``, in one dtype: a kernel has at least float32."""

    def wide(*operands: Any) -> Array:
        out = plain(*operands)
        return out.astype(at_least_float32(out))

    return kernels.differentiable(how, _by_rows(fused, 3), wide if how.configs else plain, *operands)


def _check_route(route: Any) -> None:
    """Raises ``ValueError`` if the route is not a known name or a function."""
    if not callable(route):
        validation.check_choice("route", route, _ROUTES, "a function of the scores")


def expected_loss(
    weights: Float[Array, "nodes p"],
    bias: Float[Array, " nodes"],
    leaves: Any,
    x: Float[Array, "n p"],
    y: Array,
    *,
    weight: Float[Array, " n"] | None = None,
    route: Route = "sigmoid",
    implementation: Implementation = None,
) -> tuple[Float[Array, ""], Int[Array, " n"]]:
    """Returns the expected loss of a soft tree, and the leaf that each sample reaches under hard routing.

    The loss is ``L = 1/n sum_i w_i sum_l P_il loss_l(x_i, y_i)``. ``P_il`` is a product over the ancestors of leaf
    ``l``, with factors ``sigma(z_ij)`` or ``1 - sigma(z_ij)`` of the scores ``z_ij``. For the squared error, this is
    eq. 7 of GET (Mao & Cao 2024). To scale the sigmoid, scale ``weights`` and ``bias``, which does not change the hard
    routing.

    A custom derivative rule processes the samples in blocks, and computes value, gradient and hard routing in one
    visit. The visit needs two matrix products and one sigmoid per node; all else is additions. On a CPU, deep trees
    with sharp sigmoids are visited only on paths that a sample follows with a probability above 1e-6
    (:mod:`jtrees.routing.sharp`). Each split that is not visited changes the loss of a sample by at most 1e-6 of the
    range of its losses.

    Only reverse mode is supported. Layers below the tree need the gradients of ``x``, ``y`` and ``weight``, which take
    another visit by XLA. This visit is left out if these gradients are not needed.

    Args:
      weights: split weights.
      bias: split biases.
      leaves: a leaf type of :mod:`jtrees.leaves`, or any pytree with ``losses(x, y)``, ``(leaves, n)``, and a
        ``kernel`` of None.
      x: samples.
      y: targets, first axis n.
      weight: nonnegative weights of the samples, with mean 1 over all data; by default 1. A mini-batch keeps the
        weights of its samples unchanged, so that a sample has the same influence in every batch.
      route: ``"sigmoid"``; ``"violation"`` (:func:`jtrees.routing.violation`); or a function of the scores
        ``(nodes, n)`` that returns the probabilities of the leaves, ``(leaves, n)``. Automatic differentiation computes
        the gradient, except for sigmoids. It also runs block by block.
      implementation: see :mod:`jtrees.ops`. A kernel needs a route by name, and leaves that hold values, or logits with
        labels as targets.

    Returns:
      The loss, and leaf numbers ``(n,)`` in int32.

    Raises:
      ValueError: without samples, for an unknown route, or if a function of the scores returns another shape.
    """
    _check_route(route)
    able = isinstance(route, str) and leaves.kernel is not None
    able = able and not (leaves.kernel == "log" and is_soft(y))  # the kernel gathers by labels

    def call(how: Any, x: Array, y: Array, weights: Array, bias: Array, values: Array, route: Any = route) -> Any:
        like = jax.tree.map(lambda _: values, leaves)
        targets = y.argmax(1) if leaves.kernel == "log" else y
        return expected_loss(weights, bias, like, x, targets, route=route, implementation=how)

    program = kernels.Program("expected_loss", f"{route}, {leaves.kernel}", call)
    how = _choose(program, implementation, able, x, weights, bias, y, *jax.tree.leaves(leaves))
    if not (n := x.shape[0]):
        raise ValueError(f"x must hold at least one sample, got shape {x.shape}")
    share = jnp.full(n, 1 / n, at_least_float32(x)) if weight is None else weight / n
    return expected(route, how, weights, bias, leaves, x, y, share)


def _choose(
    program: kernels.Program,
    implementation: Any,
    able: bool,
    x: jax.Array,
    weights: jax.Array,
    *operands: Any,
    not_by: tuple[str, ...] = (),
) -> Choice:
    """Returns how to run a call: by XLA or by the kernels of some platforms."""
    # `able` says whether a kernel exists for this kind of call. `not_by` are the backends that cannot run it at any
    # size. The width of each matrix among the operands is a number of outputs. A timing of the program, with
    # XLA's program of this module, may decide.
    requested = kernels.named(implementation)
    depth, k = topology.depth_of(weights.shape[0]), max([a.shape[1] for a in operands if a.ndim == 2], default=1)
    arrays = [a for a in (x, weights, *operands) if jnp.issubdtype(a.dtype, jnp.floating)]
    able = able and depth <= kernels.DEEPEST and 0 not in x.shape and x.dtype in (jnp.float32, jnp.bfloat16)
    # The decisions are measured in float32, so all other numbers take XLA by default.
    if requested is None and not (able and all(a.dtype == jnp.float32 for a in arrays)):
        return XLA
    if not able:
        if "xla" in (requested or ()):
            return XLA
        raise Unsupported(
            f"implementation={implementation!r:.80}: the kernel {program.kernel} is for float32 or bfloat16, depths to "
            f"{kernels.DEEPEST}, sigmoids, violations, values and logits; got {x.shape} in {x.dtype}, depth {depth}; "
            "None takes XLA wherever there is no kernel"
        )
    return kernels.choose(program, requested, kernels.Sizes(x.shape[0], x.shape[1], depth, k), not_by=not_by)


def _by_rows(fused: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """Wraps a kernel so that its rows may be sharded over devices, which the compiler cannot do for a kernel."""
    run = lambda how, *arrays: sharding.each_part(lambda *mine: ((), fused(how, *mine)), *arrays, rows=(rows,))
    return lambda how, *arrays: run(how, *arrays)[1]
