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


def constant_loss(leaf, y, leaves, weight):
    """What the means of the leaves lose on the samples that they are the means of: weighted mean squared error."""
    means = leaf_means(leaf, y, leaves, 0.0, weight)
    return np.average((np.asarray(y, np.float64) - means[leaf]) ** 2, weights=weight)


def class_frequencies(leaf, y, leaves, classes, weight):
    """Weight of each class in each leaf, and ``(N_lk + q_k) / (N_l + 1)``, sample by sample."""
    counts = np.zeros((leaves, classes))
    for k, label, w in zip(leaf, y, weight, strict=True):
        counts[k, label] += w
    everywhere = np.array(
        [1 + sum(w for label, w in zip(y, weight, strict=True) if label == k) for k in range(classes)]
    )
    q = everywhere / everywhere.sum()
    rows = [(counts[k] + q) / (counts[k].sum() + 1) for k in range(leaves)]
    return counts, np.array(rows)


SLOPE_STRENGTHS = [np.inf, 1e4, 10**3.5, 1e3, 10**2.5, 1e2, 10**1.5, 1e1, 10**0.5, 1.0, 10**-0.5, 0.1, 10**-1.5, 0.01]
LEVEL_STRENGTHS = [np.inf, 30.0, 10.0, 3.0, 0.0]


def gcv(n, rss, df):
    """Generalised cross-validation; a tenth of the samples must be left as degrees of freedom."""
    return n * rss / (n - df) ** 2 if n - df >= 0.1 * n else np.inf


def shrunk_candidates(x, y, weight, slopes, intercept, held, split, width, cost):
    """Corrections of a parent's model on the samples of one node: (GCV, degrees of freedom, slopes, intercept) each.

    Hat matrices and residuals are written out. ``held``: degrees of freedom of its ancestors' fits that the node
    holds; ``split``: charged to every candidate but the first, the parent's model as it is; ``width``: number of
    features of the root's model; ``cost``: of a degree of freedom of the slopes.
    """
    n, p = weight.sum(), x.shape[1]
    centre, mean = weight @ x / n, weight @ y / n
    xc, left = x - centre, y - x @ slopes - intercept
    level = weight @ left / n
    gram = xc.T @ (weight[:, None] * xc)
    result = []
    for s in SLOPE_STRENGTHS:
        slope_map = np.zeros((p, len(y))) if np.isinf(s) else np.linalg.solve(gram + s * np.eye(p), xc.T * weight)
        for t in LEVEL_STRENGTHS:
            moved = n / (n + t)
            hat = xc @ slope_map + moved * np.outer(np.ones(len(y)), weight / n)
            d = slope_map @ (left - level)
            rss = weight @ (left - hat @ left) ** 2
            trace = np.trace(hat)
            df = (
                trace
                + (cost - 1) * np.trace(xc @ slope_map)
                + held * (1 - trace / (width + 1))
                + (0 if np.isinf(s) and np.isinf(t) else split)
            )
            centre_value = slopes @ centre + intercept + moved * level
            result.append((gcv(n, rss, df), df, slopes + d, centre_value - (slopes + d) @ centre))
    rss, df = weight @ (y - mean) ** 2, 1 + split
    return [*result, (gcv(n, rss, df), df, np.zeros(p), mean)]


def best_ridge(x, y, weight):
    """Ridge regression of one target whose strength has the least GCV: slopes, degrees of freedom, noise left.

    Features have weighted mean 0 and variance 1, the target has mean 0, and weights count samples. The first candidate
    is the mean.
    """
    n, result = weight.sum(), [(gcv(weight.sum(), weight @ y**2, 1.0), np.zeros(x.shape[1]), 1.0, 1.0)]
    for s in 10.0 ** np.arange(5, -3.5, -0.5):
        slope_map = np.linalg.solve(x.T @ (weight[:, None] * x) + s * np.eye(x.shape[1]), x.T * weight)
        df = 1 + np.trace(x @ slope_map)
        residual_of = x.T @ (weight[:, None] * (np.eye(len(y)) - x @ slope_map))  # of noise, along the features
        left = np.sum(residual_of**2 / weight) / np.sum(x**2 * weight[:, None])
        result.append((gcv(n, weight @ (y - x @ slope_map @ y) ** 2, df), slope_map @ y, df, left))
    return min(result, key=lambda candidate: candidate[0])[1:]


def shrunk_leaves(leaf, x, y, leaves, weight=None, root=None):
    """Linear leaves that shrink towards their ancestors, node by node from the root.

    ``root``: slopes of the model of the root, its degrees of freedom, its number of features, and the cost of a degree
    of freedom of the slopes below it. None: it is fitted.

    Returns coefficients, intercepts, lower and upper bounds, the mean GCV over the samples, and which candidate each
    node of the whole tree chose (-1: no samples).
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    weight = np.ones(len(y)) if weight is None else np.asarray(weight, np.float64)
    leaf, x, y, weight = (a[weight > 0] for a in (np.asarray(leaf), x, y, weight))
    p, depth = x.shape[1], leaves.bit_length() - 1
    centre, mean = np.average(x, axis=0, weights=weight), np.average(y, weights=weight)
    spread = np.sqrt(np.average((x - centre) ** 2, axis=0, weights=weight))
    spread[np.ptp(x, axis=0) == 0] = np.inf  # a constant column says nothing
    x, y, (width, cost) = (x - centre) / spread, y - mean, (p, 1) if root is None else root[2:]

    # Above the root is the mean, with its 1 degree of freedom.
    # Of each node: slopes, intercept, degrees of freedom, weight, range of the targets where its model was fitted.
    models, chosen, total_loss = [], [], 0.0
    for node in range(2 * leaves - 1):
        level = (node + 1).bit_length() - 1
        inside = leaf >> (depth - level) == node + 1 - 2**level
        samples = weight.sum() ** 2 / (weight**2).sum()  # effective number, also of every node below
        outer = models[(node - 1) // 2] if node else (np.zeros(p), 0.0, 1.0, samples, (y.min(), y.max()))
        slopes, intercept, df, total, bounds = outer
        if not inside.any():
            models.append((slopes, intercept, 0.0, 0.0, bounds))
            chosen.append(-1)
            continue
        n = weight[inside].sum() ** 2 / (weight[inside] ** 2).sum()
        if node == 0 and root is not None:
            models.append((root[0] * spread, 0.0, root[1], n, bounds))
            chosen.append(-1)
            continue
        counts, share = weight[inside] * n / weight[inside].sum(), df * min(n / total, 1)
        candidates = shrunk_candidates(
            x[inside],
            y[inside],
            counts,
            slopes,
            intercept,
            share,
            split=2 * (p + 1) if node else 0,
            width=width,
            cost=cost,
        )
        best = int(np.argmin([candidate[0] for candidate in candidates]))
        error, df, slopes, intercept = candidates[best]
        models.append((slopes, intercept, df, n, bounds if best == 0 else (y[inside].min(), y[inside].max())))
        chosen.append(best)
        total_loss += weight[inside].sum() * error if node >= leaves - 1 else 0.0
    coefficients, intercepts, lower, upper = [], [], [], []
    for slopes, intercept, _, _, (low, high) in models[leaves - 1 :]:
        coefficients.append(slopes / spread)
        intercepts.append(mean + intercept - (slopes / spread) @ centre)
        lower.append(mean + low - 0.1 * (high - low))
        upper.append(mean + high + 0.1 * (high - low))
    return tuple(map(np.array, (coefficients, intercepts, lower, upper))), total_loss / weight.sum(), chosen


def prune_pav(q, penalty, weight=None):
    """Returns LatentTree's activities by the paper's Algorithm 1, and the topmost node of each node's group.

    The algorithm pools adjacent violators, starting with the largest.
    """
    raised = np.asarray(q, np.float64) + 0.5
    weight = np.ones(raised.shape[1]) if weight is None else np.asarray(weight, np.float64)
    node = np.arange(len(raised))
    group, above = node.copy(), np.maximum(node - 1, 0) // 2  # the root is its own parent, so it never violates
    entries, value = map(list, zip(*(pooled(np.stack([row, weight]), penalty) for row in raised), strict=True))
    value = np.array(value)
    while True:
        violating = np.where((group == node) & (value > value[group[above]]), value, -np.inf)
        top = int(np.argmax(violating))
        if violating[top] == -np.inf:
            return np.clip(value[group], 0, 1), group
        target = int(group[above[top]])
        group[group == top] = target
        merged = np.hstack([entries[target], entries[top]])
        entries[target], value[target] = pooled(merged, penalty * (group == target).sum())


def pooled(entries, penalty):
    """Returns the entries and weights of a group, ``(2, entries)``, in descending order, and its value (Proposition 2).

    The k largest entries contribute to the value. k is the smallest number for which no other entry is above the value.
    """
    entries = entries[:, np.argsort(-entries[0], kind="stable")]  # fast for two sorted runs
    value, weight = entries
    means = np.cumsum(np.append(0, weight * value)) / (penalty + np.cumsum(np.append(0, weight)))
    return entries, float(means[np.argmax(means >= np.append(value, -np.inf))])


def weighted_frequencies(leaf, y, leaves, classes, weight):
    """Class frequencies of leaves after adding one sample of the prior; a leaf has Kish's effective number of samples.

    The prior has the weighted frequencies of all samples, and one sample of each class more.
    """
    counts = np.zeros((leaves, classes))
    np.add.at(counts, (leaf, y), weight)
    squares = np.bincount(leaf, weight**2, leaves)
    samples = counts * np.divide(counts.sum(1), squares, out=np.zeros(leaves), where=squares > 0)[:, None]
    prior = (samples.sum() * counts.sum(0) / counts.sum() + 1) / (samples.sum() + classes)
    return (samples + prior) / (samples.sum(1, keepdims=True) + 1)


def path_violations(scores):
    """How far each path is from being followed: the sum over its nodes of the score of the wrong sign; over leaves."""
    leaves = scores.shape[0] + 1
    return [
        sum(
            (abs(scores[node]) + (-scores[node] if turned_right else scores[node])) / 2
            for node, turned_right in path_to(leaf, leaves.bit_length() - 1)
        )
        for leaf in range(leaves)
    ]


def violation(scores, scale):
    """Softmin of the scaled violations; a list over leaves."""
    powers = [np.e ** (-scale * v) for v in path_violations(scores)]
    return [power / sum(powers) for power in powers]


def expected_leaf_loss(weights, bias, outputs, x, y, sample_weight, sigmoid=sigmoid, route=None):
    """Weighted mean over samples of the squared error that the soft tree expects. ``outputs``: (leaves, n).

    ``route``: scores -> a list over leaves of probabilities, by default the products of sigmoids.
    """
    scores = weights @ x.T + bias[:, None]
    probabilities = leaf_probabilities(sigmoid(scores)) if route is None else route(scores)
    expected = sum(p * (y - outputs[leaf]) ** 2 for leaf, p in enumerate(probabilities))
    return (sample_weight * expected).sum() / sample_weight.sum()


def numeric_gradient(f, point, step=1e-6):
    """Central differences of a scalar function of one array, in float64."""
    point = np.array(point, np.float64)
    gradient = np.zeros_like(point)
    for i in np.ndindex(point.shape):
        shift = np.zeros_like(point)
        shift[i] = step
        gradient[i] = (float(f(point + shift)) - float(f(point - shift))) / (2 * step)
    return gradient


def exact_gradient(f, point):
    """Gradient of a scalar function of one array by a complex step: exact to rounding, for arithmetic operators."""
    point = np.array(point, np.complex128)
    gradient = np.zeros(point.shape)
    for i in np.ndindex(point.shape):
        shift = np.zeros_like(point)
        shift[i] = 1e-100j
        gradient[i] = f(point + shift).imag / 1e-100
    return gradient


def hessian_of_square(f, point):
    """Hessian of ``f(at)**2``, f linear in every single entry, flat: differences of gradients are then exact."""
    point = np.array(point, np.float64)
    rows = []
    for i in np.ndindex(point.shape):
        shift = np.zeros_like(point)
        shift[i] = 0.25
        forward, behind = (exact_gradient(lambda a: f(a) ** 2, point + sign * shift) for sign in (1, -1))
        rows.append((forward - behind).ravel() / 0.5)
    return np.array(rows)


def sizes_in(jaxpr):
    """Sizes of all arrays that a jaxpr makes, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for parameter in equation.params.values():
            for one in parameter if isinstance(parameter, (list, tuple)) else [parameter]:
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from sizes_in(inner)
