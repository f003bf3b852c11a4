"""Splits of CART, from which searches start: of scikit-learn, or over bins within a compiled program."""

import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import splitting, warmstart
from jtrees.tasks import Classification, Policy, Task
from jtrees.training import Batch
from jtrees.tree import ObliqueTree


def grown_in_bins(batch: Batch, edges: Array, task: Task, depth: int) -> tuple[Array, Array]:
    """Returns weights and biases of the splits of CART over bins of the features, in a compiled program."""
    weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
    if isinstance(task, Classification):
        statistics, impurity = splitting.class_statistics(batch.y, weight, task.classes), splitting.entropy
    else:
        statistics, impurity = splitting.target_statistics(batch.y, weight), splitting.squared_deviation
    return splitting.binned_cart(batch.x, jnp.asarray(edges), statistics, depth, impurity)


def grown_cart(rows: Batch, task: Task, depth: int, leaves: str = "constant") -> ObliqueTree:
    """Returns the splits of CART of a depth; with linear leaves, CART of the residuals of a linear regression."""
    x, y, weight = rows
    if isinstance(task, Classification):
        return warmstart.cart_classifier(x, y, depth, sample_weight=weight).replace(leaves=None)
    if isinstance(task, Policy):  # what an action is worth beside the others
        y = y - y.mean(1, keepdims=True)
        y = y[:, np.ptp(y, axis=0) > 0]
    if leaves == "linear":
        root = np.sqrt(np.ones(len(x)) if weight is None else weight)[:, None]
        with_one = np.column_stack([x - x.mean(0, dtype=np.float64), np.ones(len(x))])
        unit = np.maximum(np.abs(with_one).max(0), np.finfo(np.float32).tiny)
        with_one /= unit
        wide = y.reshape(len(x), -1)
        residual = (wide - with_one @ np.linalg.lstsq(root * with_one, root * wide, rcond=None)[0]).reshape(y.shape)
        y = residual if np.ptp(residual, axis=0).min() > 0 else y
    return warmstart.cart_regressor(x, y, depth, sample_weight=weight).replace(leaves=None)
