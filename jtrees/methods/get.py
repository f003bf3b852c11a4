"""GET: a scaled sigmoid, annealed; hard leaves; many starts (Mao & Cao, "Can a Single Tree Outperform an Entire
Forest?", 2024, Algorithm 1).

``get`` is the method for :func:`jtrees.train`; ``fit_get`` is the paper's recipe from a table to a hard tree.
"""

from functools import partial
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np
import optax

from jtrees import leaves, losses, topology, training, validation, warmstart
from jtrees.tree import ConstantLeaves, ObliqueTree

_WARM_UP = 10  # linear warm-up steps
_LAST_LEARNING_RATE = 1e-4  # of the peak: 1e-6 for the paper's 0.01
_WEIGHT_DECAY = 1e-2  # AdamW's usual decay, which the paper leaves as it is


def get(depth: int, alpha: training.Number) -> training.Method:
    """GET with constant leaves: minimise the squared error that a tree of scaled sigmoids expects (eq. 7).

    Parameters are an :class:`ObliqueTree`; ``score`` is the mean squared error of the hard tree with its leaves
    refitted, and hardening refits them. Meant for x and y scaled to [0, 1].

    Args:
      depth: depth of the tree, 1 to 16.
      alpha: scale of the sigmoid, above 0: a number, a traced number, or an optax schedule of the step.

    Raises:
      ValueError: for a depth or an alpha out of range.
    """
    depth = validation.check_depth(depth)
    validation.check_positive("alpha", alpha)

    def init(x: Array, y: Array, *, key: Array) -> ObliqueTree:
        return _random_tree(key, depth, x.shape[1], y)

    def loss(params: ObliqueTree, x: Array, y: Array, *, key: Array, step: Array) -> tuple[Array, Array]:
        chex.assert_rank([x, y], [2, 1])
        scale = training.at_step(alpha, step)
        weights, bias = scale * params.weights, scale * params.bias
        loss, leaf = losses.expected_leaf_loss(weights, bias, params.leaves, x, y)
        return loss, leaves.constant_fit_error(leaf, y, topology.num_leaves(depth))

    return training.Method(init, loss, ObliqueTree.predict, harden)


def harden(params: ObliqueTree, x: Array, y: Array) -> ObliqueTree:
    """The hard tree with each leaf at the mean of its samples (Algorithm 1, deterministic leaves)."""
    fitted = leaves.fit_constant(params.leaf_index(x), jnp.asarray(y), topology.num_leaves(params.depth))
    return params.replace(leaves=fitted)


_harden = jax.jit(harden)


def _random_tree(key: Array, depth: int, p: int, y: Array) -> ObliqueTree:
    """Weights and biases from U(-1, 1), leaves from U(min y, max y)."""
    nodes, dtype = topology.num_nodes(depth), y.dtype
    k_weights, k_bias, k_leaves = jax.random.split(key, 3)
    weights = jax.random.uniform(k_weights, (nodes, p), dtype, -1, 1)
    bias = jax.random.uniform(k_bias, (nodes,), dtype, -1, 1)
    values = y.min() + (y.max() - y.min()) * jax.random.uniform(k_leaves, (nodes + 1,), dtype)
    return ObliqueTree(weights, bias, ConstantLeaves(values))


@struct.dataclass
class GetReport:
    """What each start of :func:`fit_get` came to.

    Attributes:
      alphas: the scale factors drawn, in the order of use, ``(starts, ranges)``.
      losses: mean squared error of the best hard tree under each of them, in squared units of y, ``(starts, ranges)``;
        infinite where the start was dropped.
      steps: the epoch at which it was seen, ``(starts, ranges)``.
      cart_loss: that of the CART tree of the same depth (NaN without the CART start).
      loss: that of the tree returned.
      chosen: the start that it came from; -1 if CART itself was not beaten.
      dropped: number of starts that became non-finite.
    """

    alphas: np.ndarray
    losses: np.ndarray
    steps: np.ndarray
    cart_loss: float
    loss: float
    chosen: int
    dropped: int


@struct.dataclass
class FitResult:
    """A fitted tree, in the user's own units, and how it was found."""

    tree: ObliqueTree
    report: GetReport


def fit_get(
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: Array,
    depth: int,
    starts: int = 10,
    epochs: int = 3000,
    alpha_ranges: tuple[tuple[float, float], ...] = ((5.0, 25.0), (50.0, 150.0)),
    learning_rate: float = 0.01,
    cart: bool = True,
) -> FitResult:
    """GET's whole recipe (Algorithm 1): from a table of numbers to one hard oblique regression tree.

    Each start draws a scale factor from each range and trains under each in turn, full batch, with AdamW (linear
    warm-up, then cosine), going on from the tree before. The hard tree with refitted leaves is scored at every epoch
    and the best is kept. Start 0 is a CART tree of the same depth; if nothing beats CART on the training data, CART is
    returned. Data are scaled to [0, 1] inside; the tree returned takes raw x and answers raw y.

    Args:
      x: features, ``(n, p)``, finite.
      y: targets, ``(n,)``, finite and not constant.
      key: for everything random.
      depth: depth of the tree, 1 to 16.
      starts: number of starts, the CART start included.
      epochs: updates under each scale factor.
      alpha_ranges: ranges from which the scale factors are drawn, in the order of use.
      learning_rate: peak learning rate.
      cart: whether start 0 is CART (needs scikit-learn); without it nothing is promised about CART.

    Raises:
      ValueError: naming the argument, what was expected and what came.
      ImportError: if ``cart`` and scikit-learn is missing.
      FloatingPointError: if every start became non-finite and there is no CART to return.
    """
    depth = validation.check_depth(depth)
    starts, epochs = validation.check_count("starts", starts), validation.check_count("epochs", epochs)
    if callable(learning_rate):
        raise ValueError("learning_rate must be a number: the schedule (warm-up, cosine) is the recipe's own")
    validation.check_positive("learning_rate", learning_rate)
    ranges = _check_ranges(alpha_ranges)
    x, y = (np.asarray(a, np.float32) for a in validation.check_xy(x, y))
    validation.check_xy(x, y)  # still finite and not constant in the precision of the tree
    scale = _Scale.of(x, y)
    x01, y01 = scale.x(x), scale.y(y)
    # The CART to start from is grown on scaled data, where its weights are of size one. CART's own tolerances are
    # absolute, and its thresholds exact on raw features only; so the CART not to fall behind is the better of both.
    warm = warmstart.cart_regressor(x01, y01, depth) if cart else None
    found, alphas = _search(x01, y01, key, ranges, learning_rate, warm, depth=depth, starts=starts, epochs=epochs)
    if not cart and int(found.dropped) == starts:
        raise FloatingPointError(f"all {starts} starts became non-finite: try a smaller learning_rate")
    candidates = jax.tree.map(np.asarray, found.candidates)
    tree, loss = _refitted(scale.tree_from_unit(found.best.params), x, y)
    chosen, cart_loss = int(found.index), float("nan")
    if warm is not None:
        carts = (warmstart.cart_regressor(x, y01, depth), scale.tree_from_unit(warm))
        cart_tree, cart_loss = min((_refitted(tree, x, y) for tree in carts), key=lambda found: found[1])
        if not loss < cart_loss:
            tree, loss, chosen = cart_tree, cart_loss, -1
    report = GetReport(
        alphas=np.asarray(alphas),
        losses=candidates.scores.astype(np.float64) * float(scale.y_range) ** 2,
        steps=candidates.steps,
        cart_loss=cart_loss,
        loss=loss,
        chosen=chosen,
        dropped=int(found.dropped),
    )
    return FitResult(tree, report)


def _check_ranges(alpha_ranges: Any) -> np.ndarray:
    ranges = np.asarray(alpha_ranges, np.float32)
    if ranges.ndim != 2 or ranges.shape[1] != 2 or len(ranges) == 0 or np.any(ranges[:, 0] > ranges[:, 1]):
        raise ValueError(f"alpha_ranges must be pairs (low, high), at least one, got {alpha_ranges!r}")
    validation.check_positive("alpha_ranges", ranges)
    return ranges


@struct.dataclass
class _Candidate:
    """The best tree of a start over its scale factors, and the best score under each of them."""

    params: ObliqueTree
    score: jax.Array
    finite: jax.Array
    scores: jax.Array
    steps: jax.Array


@partial(jax.jit, static_argnames=("depth", "starts", "epochs"))
def _search(x, y, key, alpha_ranges, learning_rate, warm, *, depth, starts, epochs):
    """All starts of Algorithm 1 in one compiled program; also the scale factors drawn."""
    tree_key, alpha_key = jax.random.split(key)
    first = jax.vmap(lambda k: _random_tree(k, depth, x.shape[1], y))(jax.random.split(tree_key, starts))
    if warm is not None:
        first = jax.tree.map(lambda a, b: a.at[0].set(b), first, warm)
    draws = jax.random.uniform(alpha_key, (starts, len(alpha_ranges)), x.dtype)
    alphas = alpha_ranges[:, 0] + (alpha_ranges[:, 1] - alpha_ranges[:, 0]) * draws

    warm_up = min(_WARM_UP, epochs // 2)
    shape = optax.warmup_cosine_decay_schedule(1 / (warm_up + 1), 1.0, warm_up, epochs, _LAST_LEARNING_RATE)
    optimizer = optax.adamw(lambda step: learning_rate * shape(step), weight_decay=_WEIGHT_DECAY)

    unused_key = jax.random.key(0)  # full batch, and nothing random in the loss

    def one_alpha(params, alpha):
        run = training.train(
            get(depth, alpha),
            x,
            y,
            key=unused_key,
            optimizer=optimizer,
            steps=epochs,
            score_every=1,
            params=params,
        )
        hard = harden(run.params, x, y)
        return hard, (hard, run.score, run.finite, run.step)

    def one_start(params, alphas):
        _, (trees, scores, finite, steps) = jax.lax.scan(one_alpha, harden(params, x, y), alphas)
        best, finite = jnp.argmin(scores), finite.all()
        scores = jnp.where(finite, scores, jnp.inf)
        return _Candidate(jax.tree.map(lambda a: a[best], trees), scores[best], finite, scores, steps)

    return training.multi_start(one_start, first, alphas), alphas


def _refitted(tree: ObliqueTree, x: np.ndarray, y: np.ndarray) -> tuple[ObliqueTree, float]:
    """A tree in the user's units with its leaves refitted there, and its mean squared error in float64."""
    tree = _harden(tree, x, y)
    return tree, float(np.mean((tree.predict(x).astype(np.float64) - y) ** 2))


@struct.dataclass
class _Scale:
    """The map of a table to [0, 1], and of trees back."""

    x_min: np.ndarray
    x_range: np.ndarray
    constant: np.ndarray
    y_min: np.float32
    y_range: np.float32

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray) -> "_Scale":
        x_range = np.ptp(x.astype(np.float64), axis=0)
        constant = x_range == 0
        return cls(x.min(0).astype(np.float64), np.where(constant, 1.0, x_range), constant, y.min(), np.ptp(y))

    def x(self, x: np.ndarray) -> np.ndarray:
        return ((x - self.x_min) / self.x_range).astype(np.float32)

    def y(self, y: np.ndarray) -> np.ndarray:
        return (y - self.y_min) / self.y_range

    def tree_from_unit(self, tree: ObliqueTree) -> ObliqueTree:
        weights = np.asarray(tree.weights, np.float64) / self.x_range
        weights[:, self.constant] = 0  # scaled, such a column is 0; raw, it might drown the others
        bias = np.asarray(tree.bias) - weights @ self.x_min
        values = np.asarray(tree.leaves.values) * self.y_range + self.y_min
        as32 = lambda a: jnp.asarray(a, jnp.float32)
        return ObliqueTree(as32(weights), as32(bias), ConstantLeaves(as32(values)))
