"""GET: a scaled sigmoid, annealed; hard leaves; many starts (Mao & Cao, "Can a Single Tree Outperform an Entire
Forest?", 2024, Algorithm 1).

``get`` is the method for :func:`jtrees.train`; ``fit_get`` is the paper's recipe from a table to a hard tree.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import training, validation as checks
from jtrees.methods import annealing
from jtrees.methods.annealing import FitResult


def get(
    depth: int,
    alpha: training.Number,
    *,
    leaves: Literal["constant", "linear"] = "constant",
    classes: int | None = None,
    l1: float | Array = 0.0,
) -> training.Method:
    """GET: minimise the loss that a tree of scaled sigmoids expects (eq. 7).

    Parameters are an :class:`ObliqueTree`; hardening sets its leaves from the hard routing, and ``score`` is what the
    hard tree is then judged by: mean squared error for constant leaves, that expected on new samples
    (:func:`jtrees.leaves.shrunk_fit_error`) for linear ones, log loss for classes. Meant for x and regression targets
    scaled to about [0, 1]. Weights of samples count as numbers of samples where leaves are linear or frequencies.

    Args:
      depth: depth of the tree, 1 to 16.
      alpha: scale of the sigmoid, above 0: a number, a traced number, or an optax schedule of the step.
      leaves: ``"constant"``, or ``"linear"`` for GET-Linear.
      classes: number of classes: y then holds classes 0..K-1, leaves softmax logits while training (hardened: class
        frequencies), and the loss is the log loss. None: regression.
      l1: strength of an L1 penalty on the split weights, ``l1 * sum_j |w_j|_1``.

    Raises:
      ValueError: for a depth or an alpha out of range, an unknown kind of leaves, or linear leaves with classes.
    """
    return annealing.soft_method(depth, alpha, name="alpha", route=None, leaves=leaves, classes=classes, l1=l1)


def fit_get(
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: Array,
    depth: int | Literal["auto"],
    leaves: Literal["constant", "linear"] = "constant",
    task: Literal["regression", "classification"] = "regression",
    starts: int = 10,
    epochs: int = 3000,
    alpha_ranges: tuple[tuple[float, float], ...] = ((5.0, 25.0), (50.0, 150.0)),
    learning_rate: float = 0.01,
    l1: float | Sequence[float] = 0.0,
    cart: bool = True,
    sample_weight: ArrayLike | None = None,
    validation: tuple[ArrayLike, ArrayLike] | None = None,
) -> FitResult:
    """GET's whole recipe (Algorithm 1): from a table of numbers to one hard oblique tree.

    Each start draws a scale factor from each range and trains under each in turn, full batch, with AdamW (linear
    warm-up, then cosine), going on from the hard tree before. Hard trees are looked at on the way and the best is kept
    (at every epoch for constant leaves and classes, 20 times or a few more under each scale factor where a look costs
    more), judged by

    - the mean squared error on the training data, for constant leaves;
    - the mean squared error expected on new data by generalised cross-validation, for linear leaves, which shrink by
      as much as that finds best (:func:`jtrees.leaves.fit_shrunk`; the paper has least squares in each leaf by itself,
      and the training error);
    - the mean log loss on the training data, for classes;
    - the mean squared error or log loss on ``validation``, where that is given.

    Start 0 is a CART tree of the same depth (for linear leaves, of what a linear regression leaves); if nothing beats
    CART, CART is returned. Data are scaled inside (features to mean 0 and deviation 1/3, where the paper has the range
    [0, 1]; targets to [0, 1]); the tree returned takes raw x and answers raw y, or class probabilities ``(n, K)``.

    Args:
      x: features, ``(n, p)``, finite.
      y: targets, ``(n,)``, finite and not constant; in classification whole numbers 0..K-1, every class present.
      key: for everything random.
      depth: depth of the tree, 1 to 16; or ``"auto"``: the depth from 1 up to 12 that does best on a third of the data
        after training on the others (or on ``validation``), then a fit to all. Two depths in a row that bring nothing
        end the search.
      leaves: ``"constant"`` or ``"linear"`` (regression only).
      task: ``"regression"`` or ``"classification"``.
      starts: number of starts, the CART start included.
      epochs: updates under each scale factor.
      alpha_ranges: ranges from which the scale factors are drawn, in the order of use.
      learning_rate: peak learning rate.
      l1: strength of the L1 penalty on split weights (of scaled data). With ``depth="auto"`` several may be given, from
        which the best is chosen too.
      cart: whether start 0 is CART (needs scikit-learn); without it nothing is promised about CART.
      sample_weight: nonnegative weights, ``(n,)``; only their ratios matter, rows of weight 0 are left out. Uneven
        weights count as fewer samples (Kish's effective number) where leaves are regularised or smoothed.
      validation: ``(x, y)`` that trees are judged by instead of the training data; not trained on.

    Raises:
      ValueError: naming the argument, what was expected and what came.
      ImportError: if ``cart`` and scikit-learn is missing.
      FloatingPointError: if every start became non-finite and there is no CART to return.
    """
    starts = checks.check_count("starts", starts)
    return annealing.fit(
        get,
        partial(draw_alphas, ranges=check_ranges(alpha_ranges), starts=starts),
        x,
        y,
        key=key,
        depth=depth,
        leaves=leaves,
        task=task,
        epochs=epochs,
        learning_rate=learning_rate,
        l1=l1,
        cart=cart,
        sample_weight=sample_weight,
        validation=validation,
    )


def draw_alphas(key: Array, depth: int, *, ranges: np.ndarray, starts: int) -> Array:
    """A scale factor from each range for each start: ``(starts, ranges)``."""
    draws = jax.random.uniform(key, (starts, len(ranges)), jnp.float32)
    low, high = jnp.asarray(ranges).T
    return low + (high - low) * draws


def check_ranges(alpha_ranges: Any) -> np.ndarray:
    """Ranges of scale factors as an array ``(ranges, 2)``; ``ValueError`` if they are none."""
    ranges = np.asarray(alpha_ranges, np.float32)
    if ranges.ndim != 2 or ranges.shape[1] != 2 or len(ranges) == 0 or np.any(ranges[:, 0] > ranges[:, 1]):
        raise ValueError(f"alpha_ranges must be pairs (low, high), at least one, got {alpha_ranges!r}")
    checks.check_positive("alpha_ranges", ranges)
    return ranges
