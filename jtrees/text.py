"""Text of trees, their splits and their leaves."""

from collections.abc import Sequence
import itertools
from typing import Any, NamedTuple

import numpy as np

from jtrees import prediction, processes, segments, validation
from jtrees.tasks import Policy
from jtrees.tasks.labels import check_labels

_READ = 8  # text with more digits is for computation, not for reading
_REWARD_DIGITS = 3
_LONGEST = 1e9  # a number from here on is written with an exponent
_PARALLEL = 1e-5  # largest difference of two directions that count as the same, relative to their largest weight


def number_text(value: Any, digits: int | None = None, zero: float = 0.0) -> str:
    """Returns ``zero + value`` as text. Only the value is rounded to significant digits."""
    # The text has all digits before the decimal point, instead of a positive exponent, except for very large numbers.
    # Without `digits`, the text is the shortest that parses as this number in float64.
    if digits is None:
        return np.format_float_positional(np.float64(zero + value), trim="-")
    rounded = f"{value:.{digits}g}"
    if "e+" in rounded and abs(value) < _LONGEST:
        rounded = f"{value:.0f}"
    return number_text(float(rounded), None, zero) if zero else rounded


def classes_text(sizes: np.ndarray, texts: list[str], limit: int | None) -> str:
    """Returns the texts of the ``limit`` largest classes in the order of the classes, and the number of other classes.

    A single other class is shown too.
    """
    if limit is None or len(sizes) <= limit + 1:
        return ", ".join(texts)
    largest = sorted(np.argsort(-sizes, kind="stable")[:limit].tolist())
    return ", ".join([*(texts[i] for i in largest), f"{len(sizes) - limit} more classes"])


def largest_terms(
    weights: np.ndarray, max_terms: int | None, deviations: np.ndarray | None, *, largest_first: bool = False
) -> tuple[np.ndarray, int]:
    """Returns the indices of the ``max_terms`` terms of largest variation, in order, and the number of omitted terms.

    A weight of zero is not a term. ``max_terms`` None: all terms. ``deviations`` are the deviations of the features,
    ``(p,)``; None: equal deviations. ``largest_first`` sorts the terms by size.
    """
    terms = np.flatnonzero(weights)
    size = np.abs(weights[terms]) * (1 if deviations is None else deviations[terms])
    largest = terms[np.argsort(-size, kind="stable")[:max_terms]]
    return largest if largest_first else np.sort(largest), len(terms) - len(largest)


def smaller_terms(number: int) -> str:
    """Returns the text for omitted terms."""
    return f"+ {validation.number_of(number, 'smaller term')}"


def linear_text(weights: np.ndarray, names: Sequence[str], digits: int, **chosen: Any) -> str:
    """Returns a weighted sum of features as text, ``"1.2 age - 0.5 bmi"``, with the terms of :func:`largest_terms`."""
    shown, left_out = largest_terms(weights, **chosen)
    if not len(shown):
        return "0"
    term = lambda i: names[i] if abs(weights[i]) == 1 else f"{number_text(abs(float(weights[i])), digits)} {names[i]}"
    text = " ".join(f"{'-' if weights[i] < 0 else '+'} {term(i)}" for i in shown)
    text = text.removeprefix("+ ") if weights[shown[0]] > 0 else f"-{text.removeprefix('- ')}"
    return f"{text} {smaller_terms(left_out)}" if left_out else text


def model_text(
    slopes: np.ndarray,
    intercept: float,
    bounds: np.ndarray | None,
    names: Sequence[str],
    digits: int,
    zero: float,
    *,
    short: bool,
    **chosen: Any,
) -> str:
    """Returns a linear model plus ``zero`` as text, with the terms of :func:`largest_terms`.

    ``bounds`` are the lower and the upper bound of the output, or None. ``zero`` is added to intercept and bounds,
    exactly. If ``short``, the largest terms come first, and bounds are omitted.
    """
    number = lambda value: number_text(value, digits, zero)
    if not slopes.any():  # a constant is within its bounds
        return number(intercept if bounds is None else np.clip(intercept, *bounds))
    constant = number(intercept)
    sign = "-" if constant.startswith("-") else "+"
    text = linear_text(slopes, names, digits, largest_first=short, **chosen)
    between = "" if bounds is None or short else ", from {} to {}".format(*map(number, bounds))
    return f"{text} {sign} {constant.removeprefix('-')}{between}"


def tree_text(
    tree: Any, feature_names: Any, digits: int, class_names: Any, x: Any, y: Any, max_terms: int | None
) -> str:
    """Returns the rules of a tree: see :meth:`jtrees.ObliqueTree.to_text`."""
    tree = processes.on_host(tree) if processes.lost_xla() else tree
    names = validation.checked_names(feature_names, tree.features)
    deviations, rows = measured(tree, x, y, class_names, max_terms)
    options: Any = {"max_terms": max_terms, "deviations": deviations}
    shown = with_short_origin(tree, deviations, digits)
    score = common_score(shown, names, digits)
    lines = []
    if score is not None:
        shown = score.tree
        lines.append(f"{score.name} = {linear_text(score.weights, relative_names(shown, names), digits, **options)}")
    thresholds = threshold_texts(shown, digits)

    def condition(node: int) -> str:
        if score is None:
            weights = np.asarray(shown.weights[node], np.float64)
            return f"{linear_text(weights, relative_names(shown, names), digits, **options)} > {thresholds[node]}"
        return f"{score.name} {'<' if score.opposite[node] else '>'} {thresholds[node]}"

    def render(node: int, indent: str) -> None:
        if (leaf := node - len(tree.bias)) >= 0:
            reached = f" ({'; '.join(rows[leaf])})" if rows[leaf] else ""
            prediction = leaf_text(shown, leaf, names, digits, class_names=class_names, **options)
            lines.append(f"{indent}-> leaf {leaf}: {prediction}{reached}")
        elif not np.any(np.asarray(tree.weights[node])):
            render(2 * node + 1 + int(tree.bias[node] > 0), indent)
        else:
            lines.append(f"{indent}if {condition(node)}:")
            render(2 * node + 2, indent + "|   ")
            lines.append(f"{indent}else:")
            render(2 * node + 1, indent + "|   ")

    render(0, "")
    return "\n".join(lines)


class Score(NamedTuple):
    """The score that all splits of a tree divide."""

    name: str  # name of the score
    weights: np.ndarray  # weights of the features, (p,)
    tree: Any  # the tree with biases in units of the score
    opposite: np.ndarray  # whether a sample goes right below the threshold, (nodes,) bool


def common_score(tree: Any, names: Sequence[str], digits: int) -> Score | None:
    """Returns the score that all splits of a tree divide."""
    # The result is None if the splits have several directions, a single feature or a single split. It is also None if
    # the text has more than 8 digits, because the directions may differ by rounding.
    splits = np.flatnonzero(tree.splits)
    weights = np.asarray(tree.weights, np.float64)
    reference = weights[splits[0]] if len(splits) > 1 else np.zeros(0)
    if np.count_nonzero(reference) < 2 or digits > _READ:
        return None
    scale = np.abs(weights[splits]).max(0)
    scaled = weights[splits] / np.where(scale > 0, scale, 1)
    ratios = scaled @ scaled[0] / (scaled[0] @ scaled[0])
    errors = np.abs(scaled - ratios[:, None] * scaled[0]).max(1)
    if (errors > min(_PARALLEL, 10.0**-digits) * np.abs(scaled).max(1)).any():
        return None
    ratio = np.ones(len(weights))
    ratio[splits] = ratios
    name = "score" if "score" not in names else "score of the tree"
    return Score(name, reference, tree.replace(bias=np.asarray(tree.bias, np.float64) / ratio), ratio < 0)


def measured(
    tree: Any, x: Any, y: Any, class_names: Sequence[str] | None, max_terms: int | None
) -> tuple[np.ndarray | None, list[list[str]]]:
    """Returns statistics of a table for the rules: see :meth:`jtrees.ObliqueTree.to_text`, which also lists the errors.

    These are the standard deviation of each feature, or None if there is no table, and a list of texts for each leaf:
    the number of rows (``["41 rows"]``), the rows by class (``["41 rows", "sold: 38, not yet: 3"]``), or mean rewards.
    """
    classes = tree.classes
    if max_terms is not None:
        validation.check_count("max_terms", max_terms)
    for name, argument in (("class_names", class_names), ("y", y)):
        if argument is not None and classes is None:
            raise ValueError(f"{name} must be None: the leaves of this tree hold no classes")
    if class_names is not None and len(class_names) != classes:
        unit = "an action" if tree.is_policy else "a class"
        raise ValueError(f"class_names must hold {classes} names, one {unit}, got {len(class_names)}")
    if x is None and y is not None:
        raise ValueError(f"x must be given with y, the {'rewards' if tree.is_policy else 'classes'} of its rows")
    if x is None:
        return None, [[] for _ in range(len(tree.bias) + 1)]
    leaf = np.asarray(tree.leaf_index(x))
    deviations = prediction.fill_gaps(np.asarray(x, np.float64), tree.medians).std(0)
    rows = [[validation.number_of(n, "row")] for n in np.bincount(leaf, minlength=len(tree.bias) + 1)]
    if y is None:
        return deviations, rows
    kind = "action" if tree.is_policy else "class"
    labels = [f"{kind} {i}" for i in range(classes)] if class_names is None else list(map(str, class_names))
    if tree.is_policy:
        rewards = Policy(classes).held_out_targets(y, len(leaf))
        means = segments.means(leaf, rewards, len(rows), np.ones(len(leaf)), default=np.nan)
        for mean, texts in zip(means, rows, strict=True):
            order = [] if np.isnan(mean).any() else np.argsort(-mean, kind="stable")[:max_terms]
            best = ", ".join(f"{labels[i]}: {number_text(mean[i], _REWARD_DIGITS)}" for i in order)
            texts += [f"mean reward of {best}"] if best else []
        return deviations, rows
    y = check_labels(y, classes)
    validation.check_rows(y, len(leaf), least=1)
    leaf_counts = np.bincount(leaf * classes + y, minlength=len(rows) * classes).reshape(-1, classes)
    for counts, texts in zip(leaf_counts, rows, strict=True):
        present = np.flatnonzero(counts)
        count_texts = [f"{labels[i]}: {counts[i]}" for i in present]
        texts += [classes_text(counts[present], count_texts, max_terms)] if count_texts else []
    return deviations, rows


def threshold_texts(tree: Any, digits: int) -> list[str]:
    """Returns the thresholds of all nodes as text, with additional digits where different splits would look equal."""
    values = [0 - float(bias) for bias in np.asarray(tree.bias)]
    texts, reached = [f"{value:.{digits}g}" for value in values], np.flatnonzero(tree.splits).tolist()
    for precision in range(digits + 1, _READ + 1):
        nodes = {text: [i for i in reached if texts[i] == text] for text in {texts[i] for i in reached}}
        ambiguous = [group for group in nodes.values() if len({values[i] for i in group}) > 1]
        for i in itertools.chain(*ambiguous):
            texts[i] = f"{values[i]:.{precision}g}"
    return texts


def leaf_text(tree: Any, leaf: int, names: Sequence[str], digits: int = 3, **shown: Any) -> str:
    """Returns the prediction of a leaf as text."""
    # `shown`: `max_terms` and `deviations` choose terms as in `largest_terms`. `class_names` are as in `to_text`.
    # `short` lists the largest terms of linear leaves first, and omits bounds.
    y_zero = 0.0 if tree.origin is None or tree.origin.y is None else np.asarray(tree.origin.y, np.float64)
    return tree.leaves.describe(leaf, relative_names(tree, names), digits, y_zero, **shown)


def with_short_origin(tree: Any, deviations: np.ndarray | None, digits: int) -> Any:
    """Returns the tree, in double precision, relative to an origin of few digits: 1970 instead of 1967.6204."""
    # The origin of a feature is rounded to the power of ten below the feature's deviation. Thresholds and intercepts
    # are converted to the rounded origin. The result is for text only. The tree is unchanged if there are no deviations
    # or more than 8 digits.
    if tree.origin is None or deviations is None or digits > _READ:
        return tree
    zero = np.asarray(tree.origin.x, np.float64)
    places = -np.floor(np.log10(np.where(deviations > 0, deviations, 1))).astype(int)
    short = np.array([round(value, place) for value, place in zip(zero.tolist(), places.tolist(), strict=True)])
    wide, moved = (lambda a: np.asarray(a, np.float64)), short - zero
    bias = wide(tree.bias) + wide(tree.weights) @ moved
    return tree.replace(bias=bias, leaves=tree.leaves.moved(moved), origin=tree.origin.replace(x=short))


def relative_names(tree: Any, names: Sequence[str]) -> list[str]:
    """Returns names of the features relative to the origin, such as ``"(year - 2000)"``."""
    if tree.origin is None:
        return list(names)
    relative = []
    for name, zero in zip(names, np.asarray(tree.origin.x), strict=True):
        relative.append(f"({name} {'+' if zero < 0 else '-'} {number_text(abs(zero))})" if zero else name)
    return relative
