"""Textbook definitions in NumPy float64, written without the library: one leaf, one sample, one path at a time.

The soft ones use nothing but arithmetic operators, so JAX can differentiate them too.
"""

import numpy as np


def path_to(leaf, depth):
    """The way to a leaf, root first: pairs (node, turned right)."""
    node, path = 2**depth - 1 + leaf, []
    while node > 0:
        parent = (node - 1) // 2
        path.append((parent, node == 2 * parent + 2))
        node = parent
    return path[::-1]


def leaf_probabilities(right):
    """Product over the ancestors of each leaf; a list over leaves. ``right``: (nodes, ...)."""
    leaves = right.shape[0] + 1
    probabilities = []
    for leaf in range(leaves):
        product = 1.0
        for node, turned_right in path_to(leaf, leaves.bit_length() - 1):
            product = product * (right[node] if turned_right else 1 - right[node])
        probabilities.append(product)
    return probabilities


def expected_value(right, leaf_values):
    """Sum over the leaves of probability times value."""
    return sum(p * leaf_values[leaf] for leaf, p in enumerate(leaf_probabilities(right)))


def sigmoid(t):
    return 0.5 * (1 + np.tanh(np.asarray(t, np.float64) / 2))


def smooth_step(t, gamma):
    """TEL, eq. 4, as printed there."""
    t = np.asarray(t, np.float64)
    cubic = -2 / gamma**3 * t**3 + 3 / (2 * gamma) * t + 0.5
    return np.where(t <= -gamma / 2, 0, np.where(t >= gamma / 2, 1, cubic))


def walk_scores(scores):
    """The leaf of one sample whose scores ``(nodes,)`` are known: right iff the score is above 0."""
    node = 0
    while node < len(scores):
        node = 2 * node + (2 if scores[node] > 0 else 1)
    return node - len(scores)


def walk(weights, bias, x):
    """The leaf of each sample."""
    weights, bias, x = (np.asarray(a, np.float64) for a in (weights, bias, x))
    return np.array([walk_scores(weights @ sample + bias) for sample in x])


def leaf_means(leaf, y, leaves, default, weight=None):
    """Weighted mean of the targets in each leaf."""
    y = np.asarray(y, np.float64)
    weight = np.ones(len(y)) if weight is None else np.asarray(weight, np.float64)
    means = np.full((leaves, *y.shape[1:]), default, np.float64)
    for k in range(leaves):
        if weight[leaf == k].sum() > 0:
            means[k] = np.average(y[leaf == k], axis=0, weights=weight[leaf == k])
    return means


def leaf_ridge(leaf, x, y, leaves, ridge, default):
    """Ridge regression with a free intercept in each leaf; penalty ``ridge`` x mean diagonal of the normal equations.

    Solved as least squares with the penalty as extra rows. Returns coefficients ``(leaves, p)`` and intercepts.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    p = x.shape[1]
    coefficients, intercepts = np.zeros((leaves, p)), np.full(leaves, default, np.float64)
    for k in range(leaves):
        here = leaf == k
        if here.any():
            centre, mean = x[here].mean(0), y[here].mean()
            xc = x[here] - centre
            penalty = ridge * np.square(xc).sum() / p
            rows = np.vstack([xc, np.sqrt(penalty) * np.eye(p)])
            targets = np.concatenate([y[here] - mean, np.zeros(p)])
            coefficients[k] = np.linalg.lstsq(rows, targets, rcond=None)[0]
            intercepts[k] = mean - coefficients[k] @ centre
    return coefficients, intercepts


def expected_leaf_loss(weights, bias, outputs, x, y, sample_weight, sigmoid=sigmoid):
    """Weighted mean over samples of the squared error that the soft tree expects. ``outputs``: (leaves, n)."""
    right = sigmoid(weights @ x.T + bias[:, None])
    expected = sum(p * (y - outputs[leaf]) ** 2 for leaf, p in enumerate(leaf_probabilities(right)))
    return (sample_weight * expected).sum() / sample_weight.sum()


def numeric_gradient(f, at, step=1e-6):
    """Central differences of a scalar function of one array, in float64."""
    at = np.array(at, np.float64)
    gradient = np.zeros_like(at)
    for i in np.ndindex(at.shape):
        shift = np.zeros_like(at)
        shift[i] = step
        gradient[i] = (float(f(at + shift)) - float(f(at - shift))) / (2 * step)
    return gradient
