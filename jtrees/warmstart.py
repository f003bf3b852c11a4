"""CART trees (scikit-learn) as ObliqueTrees, for warm starts and as a baseline."""

import contextlib
import importlib
from typing import Any, SupportsIndex
import warnings

import numpy as np

from jtrees import sharding, topology, validation
from jtrees.leaves import Values
from jtrees.losses import Frequencies, SquaredError
from jtrees.tasks.labels import checked_classes, is_soft
from jtrees.tree import ObliqueTree

__all__ = ["from_sklearn"]

_ROUNDING = 1e-6  # relative rounding error of sums of weights


def cart(
    x: Any,
    y: Any,
    depth: SupportsIndex,
    *,
    classifies: bool = False,
    sample_weight: Any = None,
    min_weight: float = 0.0,
    monotone: Any = None,
) -> ObliqueTree:
    """Grows scikit-learn's tree, with leaves of means or class frequencies (GET, section 3.4: warm start)."""
    # `min_weight` is the minimum sum of the sample weights in a leaf. Predictions of one target, or of the probability
    # of the second of two classes, do not fall in the features `monotone`, (p,) bool. With `classifies`, y holds
    # classes, (n,), and a leaf the frequencies of the classes that are present. Or y holds probabilities of k classes,
    # (n, k). The splits then minimise the expected Gini impurity: the variance of the probabilities, summed over
    # classes, decreases like it.
    x, options = validation.check_x(x), (sample_weight, min_weight)
    if classifies and not is_soft(y := np.asarray(y)):
        return _sklearn_tree("DecisionTreeClassifier", x, y, depth, *options, monotone)
    y = checked_classes(y) if classifies else np.asarray(validation.check_targets(y, len(x)))
    tree = _sklearn_tree("DecisionTreeRegressor", x, y, depth, *options, None if classifies else monotone)
    # scikit-learn drops the axis of a single column. The shape changes on the host, where it compiles nothing.
    values = sharding.from_host(np.asarray(tree.leaves.values).reshape(-1, *y.shape[1:]))
    return tree.replace(leaves=Values(values, Frequencies()) if classifies else Values(values))


def import_packages() -> None:
    """Imports what CART and the simpler models need, if it is installed, so that no deadline counts the imports."""
    for name in ("sklearn.tree", "scipy.optimize"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _sklearn_tree(
    kind: str, x: Any, y: Any, depth: SupportsIndex, sample_weight: Any, min_weight: float, monotone: Any
) -> ObliqueTree:
    try:
        from sklearn import tree
    except ImportError as error:
        raise ImportError('the CART warm start needs scikit-learn: pip install "jtrees[sklearn]"') from error
    depth = validation.check_depth(depth)
    validation.check_number("min_weight", min_weight, least=0)
    total = len(x) if sample_weight is None else np.asarray(sample_weight).sum(dtype=np.float64)
    min_weight *= 1 - _ROUNDING
    options: Any = {"monotonic_cst": None if monotone is None else np.asarray(monotone).astype(np.int8)}
    if 2 * min_weight > total:  # no split: scikit-learn refuses a larger fraction and a depth of 0
        options["min_samples_split"] = len(x) + 1
    elif min_weight > 0:
        options["min_weight_fraction_leaf"] = min_weight / total
    model = getattr(tree, kind)(max_depth=depth, random_state=0, **options)
    with warnings.catch_warnings():  # a warning about many classes in few rows
        warnings.filterwarnings("ignore", message="The number of unique classes is greater than 50%")
        model.fit(np.asarray(x, np.float32), np.asarray(y), sample_weight=sample_weight)
    return from_sklearn(model, depth)


def from_sklearn(model: Any, depth: SupportsIndex | None = None) -> ObliqueTree:
    """Returns a fitted scikit-learn decision tree as an ObliqueTree with equal predictions on float32 features.

    A split ``x_f <= t`` becomes ``w = e_f``, ``b = -t`` with ``t`` rounded *down* to float32, so that no float32
    feature changes sides. Nodes that CART did not grow send every sample left. All leaves below a CART leaf have the
    value of this leaf, which initialises splits that are trained there later.

    Args:
      model: a fitted ``DecisionTreeRegressor`` or ``DecisionTreeClassifier``. Leaves of a classifier are class
        frequencies.
      depth: depth of the result, by default the depth of the model (at least 1).

    Returns:
      A tree with leaf values ``(leaves,)``, or ``(leaves, k)`` for a regressor of k outputs or a classifier of k
      classes.

    Raises:
      ValueError: if the model is deeper than ``depth`` or 16, or if it is a classifier with several outputs.
    """
    cart = model.tree_
    classifies = hasattr(model, "classes_")
    if classifies and model.n_outputs_ > 1:
        raise ValueError(f"a classifier must have one output to become a tree, got one of {model.n_outputs_}")
    depth = validation.check_depth(max(1, cart.max_depth) if depth is None else depth)
    if cart.max_depth > depth:
        raise ValueError(f"depth must be at least that of the model, {cart.max_depth}, got {depth}")
    nodes = topology.num_nodes(depth)
    weights = np.zeros((nodes, model.n_features_in_), np.float32)
    bias = np.full(nodes, -1, np.float32)
    # scikit-learn's values are (nodes, outputs, classes), with one class in a regression.
    means = cart.value[:, 0] if classifies else cart.value[:, :, 0]
    means = means[:, 0] if not classifies and model.n_outputs_ == 1 else means
    values = np.zeros((nodes + 1, *means.shape[1:]), np.float32)
    pending = [(0, 0)]  # (node of CART, node of the perfect tree)
    while pending:
        source, target = pending.pop()
        left, right = cart.children_left[source], cart.children_right[source]
        if target >= nodes:
            values[target - nodes] = means[source]
        elif left < 0:
            pending += [(source, 2 * target + 1), (source, 2 * target + 2)]
        else:
            weights[target, cart.feature[source]] = 1
            threshold = np.float32(cart.threshold[source])
            is_above = threshold > cart.threshold[source]
            bias[target] = -(np.nextafter(threshold, np.float32(-np.inf)) if is_above else threshold)
            pending += [(left, 2 * target + 1), (right, 2 * target + 2)]
    weights, bias, values = map(sharding.from_host, (weights, bias, values))
    return ObliqueTree(weights, bias, Values(values, Frequencies() if classifies else SquaredError()))
