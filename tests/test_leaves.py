"""Leaves: fitted from a hard routing, and what each kind answers, loses and says, against loops over leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees import Forest, ObliqueTree, leaves, losses
from jtrees.data.scaling import with_map
from jtrees.leaves import Linear, Values
from jtrees.segments import effective
from jtrees.tasks import Classification, Regression
from tests import oracles, sweeps

N, P, LEAVES, CLASSES = 60, 3, 5, 4


def draw(seed=0, dtype=np.float64, outputs=()):
    """Leaves 0 to 3 have samples, leaf 4 has none."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(N, P)), rng.normal(size=(N, *outputs))
    return rng.integers(0, 4, N), x.astype(dtype), y.astype(dtype)


def draw_classes(weighted):
    """Leaves, classes (leaf 1 is pure, the last class does not occur) and weights, ones unless weighted."""
    leaf, _, _ = draw()
    rng = np.random.default_rng(3)
    y, weight = rng.integers(0, 3, N), rng.uniform(0, 3, N) if weighted else np.ones(N)
    y[leaf == 1] = 2
    return leaf, y, weight


REGRESSION = ["constant", "constants", "linear", "bounded", "linears", "bounded linears"]


def drawn_kinds():
    """One of each kind, in float64, with bounds that are reached on both sides."""
    rng = np.random.default_rng(7)
    normal = lambda *shape: rng.normal(size=shape)
    frequencies = rng.dirichlet(np.ones(CLASSES), LEAVES)
    frequencies[0] = [0, 1, 0, 0]  # as CART's leaves are
    bounds = lambda *k: (-0.7 + 0.1 * normal(LEAVES, *k), 0.9 + 0.1 * normal(LEAVES, *k))
    return {
        "constant": Values(normal(LEAVES)),
        "constants": Values(normal(LEAVES, 2)),
        "linear": Linear(normal(LEAVES, P), normal(LEAVES)),
        "bounded": Linear(normal(LEAVES, P), normal(LEAVES), *bounds()),
        "linears": Linear(normal(LEAVES, P, 2), normal(LEAVES, 2)),
        "bounded linears": Linear(normal(LEAVES, P, 2), normal(LEAVES, 2), *bounds(2)),
        "logit": Values(4 * normal(LEAVES, CLASSES), losses.LogLoss()),
        "frequency": Values(frequencies, losses.Frequencies()),
    }


def answers(kind, x):
    if isinstance(kind, Linear):
        lines = zip(kind.coefficients, kind.intercept, strict=True)
        rows = np.stack([[np.dot(sample, slopes) + intercept for sample in x] for slopes, intercept in lines])
        return rows if kind.lower is None else np.clip(rows, kind.lower[:, None], kind.upper[:, None])
    values = np.asarray(kind.values, np.float64)
    if kind.loss == losses.LogLoss():
        powers = np.exp(values)
        values = powers / powers.sum(1, keepdims=True)
    return np.repeat(values[:, None], len(x), axis=1)


def targets(name):
    if name in ("logit", "frequency"):
        return draw_classes(False)[1]
    return draw(outputs=(2,) if name.endswith("s") else ())[2]


def test_what_leaves_answer_and_lose(x64):
    kinds, (leaf, x, _) = drawn_kinds(), draw()
    y_by_kind = {name: targets(name) for name in kinds}
    everything = lambda kind, y: (kind.at(leaf, x), kind.outputs(x), kind.losses(x, y))
    evaluate = jax.jit(lambda kinds, y_by_kind: {name: everything(kinds[name], y_by_kind[name]) for name in kinds})
    for name, (at, outputs, found_losses) in evaluate(kinds, y_by_kind).items():
        expected, y = answers(kinds[name], x), y_by_kind[name]
        np.testing.assert_allclose(outputs, expected, rtol=1e-11, atol=1e-13, err_msg=name)
        for of_rows in (at, kinds[name].at(leaf, x)):  # compiled, and by NumPy
            np.testing.assert_allclose(of_rows, expected[leaf, np.arange(N)], rtol=1e-11, atol=1e-13, err_msg=name)
        if name in REGRESSION:
            row_loss = ((expected - y) ** 2).reshape(LEAVES, N, -1).mean(-1)
        else:  # a frequency of 0 is taken for the least normal number
            row_loss = -np.log(np.maximum(expected[:, np.arange(N), y], np.finfo(float).tiny))
        # Logits made of frequencies are normalised once more: a digit of 700.
        np.testing.assert_allclose(found_losses, row_loss, rtol=1e-9, atol=1e-11, err_msg=name)
        if "bounded" in name:
            free, kind = answers(Linear(kinds[name].coefficients, kinds[name].intercept), x), kinds[name]
            assert (expected == kind.lower[:, None]).any() and (expected == kind.upper[:, None]).any()
            assert (expected == free).any()


def test_logits_far_from_zero_lose_finite_numbers_and_have_finite_gradients():
    logits = jnp.asarray([[1e30, 0, -1e30], [-200, 300, 0]], jnp.float32)
    x, y = jnp.zeros((3, P)), jnp.arange(3)
    row_loss = lambda logits: Values(logits, losses.LogLoss()).losses(x, y)
    value, gradient = jax.jit(lambda logits: (row_loss(logits), jax.grad(lambda a: row_loss(a).sum())(logits)))(logits)
    np.testing.assert_allclose(value, [[0, 1e30, 2e30], [500, 0, 300]], rtol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("unit", [1, 1e-6, 1000])
def test_uneven_weights_count_as_fewer_samples_whatever_their_unit(unit):
    weight = unit * np.array([1, 1, 2, 0, 4], np.float32)
    result = np.asarray(jax.jit(effective)(weight))
    np.testing.assert_allclose(result, [8 / 22, 8 / 22, 16 / 22, 0, 32 / 22], rtol=1e-6)
    np.testing.assert_allclose(result.sum(), weight.sum() ** 2 / np.square(weight).sum(), rtol=1e-6)  # Kish


@jax.jit
def refits(kind, leaf, x, y, weight):
    samples = leaf, x, y, weight
    return kind.refit(*samples), kind.criterion(*samples), *kind.refit_with_criterion(*samples)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", [losses.SquaredError(), losses.LogLoss(), losses.Frequencies()])
def test_refitted_leaves_and_their_criterion(x64, weighted, loss):
    """Whatever the unit of weights, and both in one fit as in two."""
    if loss == losses.SquaredError():
        leaf, x, y = draw(outputs=(2,))
        y = y + 1000
        weight = np.random.default_rng(1).uniform(0, 3, N) if weighted else None
        start, expected = np.zeros((LEAVES, 2)), oracles.leaf_means(leaf, y, LEAVES, (y.min(0) + y.max(0)) / 2, weight)
        error = np.mean([oracles.constant_loss(leaf, y[:, j], LEAVES, weight) for j in range(2)])
    else:
        (leaf, y, weight), x = draw_classes(weighted), np.zeros((N, P))
        start = np.full((LEAVES, CLASSES), 0.25)
        expected = oracles.weighted_frequencies(leaf, y, LEAVES, CLASSES, weight)
        error = np.average(-np.log(expected[leaf, y]), weights=weight)
    for unit in (1, 1000):
        fitted, criterion, *pair = refits(Values(start, loss), leaf, x, y, unit * weight if weighted else None)
        for kind, value in ((fitted, criterion), pair):
            assert kind.loss == (loss if loss == losses.SquaredError() else losses.Frequencies())
            np.testing.assert_allclose(kind.values, expected, rtol=1e-11)
            assert float(value) == pytest.approx(error, rel=1e-11)


def test_means_of_whole_numbers_are_fractions():
    means = losses.fit_constant(jnp.array([0, 0, 1]), jnp.array([1, 2, 5]), 3, sample_weight=jnp.full(3, 0.5))
    np.testing.assert_allclose(means, [1.5, 5, 3])


def test_random_leaves_lie_within_the_targets_and_linear_ones_are_flat():
    _, x, y = draw(dtype=np.float32, outputs=(2,))
    key = jax.random.key(0)
    for outputs, bounded in (((), y[:, 0]), ((2,), y)):
        constant, linear = (kind.start(key, LEAVES, x, bounded, outputs) for kind in (Values, Linear))
        for values in (constant.values, linear.intercept):
            assert values.shape == (LEAVES, *outputs) and values.dtype == np.float32
            assert (values >= bounded.min(0)).all() and (values <= bounded.max(0)).all()
            assert len(np.unique(values)) == values.size
        assert linear.coefficients.shape == (LEAVES, P, *outputs) and not linear.coefficients.any()
    logits = Values.start(key, LEAVES, x, y, (CLASSES,), loss=losses.LogLoss()).values
    assert logits.shape == (LEAVES, CLASSES) and (np.abs(logits) <= 1).all() and len(np.unique(logits)) == logits.size


@pytest.mark.parametrize("name", REGRESSION)
def test_rescaled_leaves_answer_the_same_in_the_users_units(name):
    kind, (_, x, _) = drawn_kinds()[name], draw()
    x_zero, x_unit = np.array([5.0, -300, 0]), np.array([2.0, 100, 1e-3])
    y_zero, y_unit = (np.array([40.0, -3]), np.array([7.0, 0.01])) if name.endswith("s") else (40.0, 7.0)
    raw = kind.rescaled(x_zero, x_unit, y_zero, y_unit)
    in_double = [a for name, a in vars(raw).items() if name not in ("coefficients", "loss") and a is not None]
    assert raw.name == kind.name and {a.dtype for a in in_double} == {np.dtype(np.float64)}
    expected = y_zero + y_unit * answers(kind, x)
    result = answers(jax.tree.map(lambda a: np.asarray(a, np.float64), raw), x_zero + x_unit * x)
    # Slopes times features are up to a thousand here, and held to 24 bits.
    np.testing.assert_allclose(result, expected, atol=3e-4 * np.max(y_unit))


def test_numbers_that_leaves_hold():
    reached, kinds = np.array([True, False, True, True, False]), drawn_kinds()
    expected = {"constant": 3, "constants": 6, "linear": 12, "bounded": 18, "linears": 24, "bounded linears": 36}
    expected |= {"logit": 12, "frequency": 12}
    assert {name: kind.count(reached) for name, kind in kinds.items()} == expected
    linear = kinds["linear"]
    linear.coefficients[0, 1] = 0  # counts only where it is reached
    linear.coefficients[1] = 0
    assert linear.count(reached) == 11


def test_trainable_and_hardened_leaves():
    """Those that train lack what has no gradient, and a hard tree has class frequencies in place of logits."""
    kinds, (_, x, _) = drawn_kinds(), draw()
    same = lambda a, b: jax.tree.all(jax.tree.map(np.array_equal, a, b))
    for name in ("constant", "constants", "linear", "linears", "logit"):
        assert same(kinds[name].trainable(), kinds[name]), name
    for name in ("constant", "linear", "bounded", "frequency"):
        assert same(kinds[name].hardened(), kinds[name]), name
    free = kinds["bounded"].trainable()
    assert free.lower is None and free.upper is None
    assert np.array_equal(free.coefficients, kinds["bounded"].coefficients)
    frequency = Values(kinds["frequency"].values.astype(np.float32), losses.Frequencies())
    logits = frequency.trainable()
    assert logits.loss == losses.LogLoss() and np.isfinite(logits.values).all()
    np.testing.assert_allclose(answers(logits, x[:1]), answers(frequency, x[:1]), rtol=1e-5, atol=1e-30)
    hardened = kinds["logit"].hardened()
    assert hardened.loss == losses.Frequencies()
    np.testing.assert_allclose(hardened.values, kinds["logit"].predictions())


FREQUENCIES = Values(np.float32([[0.25, 0.125, 0.5, 0.125]]), losses.Frequencies())
WIDE = Linear(np.float32([[3, 0, -2, 0.5]]), np.float32([1]), np.float32([-9]), np.float32([9]))
BY_DEVIATION = {"deviations": np.array([0.1, 1e9, 1, 10])}


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (Values([0.12345, -2]), {}, "0.123"),
        (Values(np.log(np.float32([[0.25, 0.75]])), losses.LogLoss()), {}, "0.25, 0.75"),
        (Linear([[1.5, 0, -1, 0], [0, 0, 0, 0]], [2.0, 0]), {}, "1.5 a - c + 2"),
        (Linear([[0, -1, 0]], [-2.0], [-5.0], [5.0]), {}, "-b - 2, from -5 to 5"),
        # A constant needs no bounds said, but it keeps them.
        (Linear([[0, 0, 0]], [4.5], [5.0], [9.0]), {}, "5"),
        (Linear([[0, 0, 0]], [4.5], [2.0], [4.0]), {}, "4"),
        (Linear([[[1.0, 0], [0, 0], [0, 0]]], [[3.0, -4]], [[0.0, -3]], [[9.0, 3]]), {}, "a + 3, from 0 to 9; -3"),
        # Relative to an origin: the digits that were learnt are kept.
        (Values([1.23456]), {"y_zero": 1e8}, "100000001.23"),
        (Values([[1.25, -12.5]]), {"y_zero": np.array([0, 1e6])}, "1.25, 999987.5"),
        (Linear([[2.0, 0]], [0.5], [-1.0], [1.0]), {"y_zero": -1e6}, "2 a - 999999.5, from -1000001 to -999999"),
        (WIDE, {"max_terms": 2}, "3 a - 2 c + 1 smaller term + 1, from -9 to 9"),
        (WIDE, {"max_terms": 2, **BY_DEVIATION}, "-2 c + 0.5 d + 1 smaller term + 1, from -9 to 9"),
        (WIDE, {"max_terms": 2, "short": True, **BY_DEVIATION}, "0.5 d - 2 c + 1 smaller term + 1"),
        (Linear(np.float32([[1]]), np.float32([2])), {"names": ["0"]}, "0 + 2"),  # a feature called 0 is no constant
        (FREQUENCIES, {"class_names": "abcd"}, "a: 0.25, b: 0.125, c: 0.5, d: 0.125"),
        (FREQUENCIES, {"class_names": "abcd", "max_terms": 2}, "a: 0.25, c: 0.5, 2 more classes"),
    ],
)
def test_texts(kind, options, text):
    options = {"names": "abcd", "y_zero": 0} | options
    kind = jax.tree.map(np.asarray, kind, is_leaf=lambda a: isinstance(a, list))
    assert kind.describe(0, options.pop("names"), 3, options.pop("y_zero"), **options) == text


def test_kinds_by_name():
    empty = lambda name, task: leaves.kind_of(name, task).empty(4, 2, task.shape)
    assert empty("constant", Regression()).loss == losses.SquaredError()
    assert isinstance(empty("linear", Regression()), Linear)
    assert empty("constant", Classification(3)).loss == losses.LogLoss()
    for name, task, message in (
        ("linear", Regression(loss_function="poisson"), r'"constant" for Regression\(loss_function=Poisson\(\)\)'),
        ("linear", Classification(2), '"constant" in classification'),
        ("cubic", Regression(), "one of 'constant', 'linear', got 'cubic'"),
    ):
        with pytest.raises(ValueError, match=f"leaves must be {message}"):
            leaves.kind_of(name, task)


@pytest.mark.parametrize("kind", sweeps.quick(["constant", "linear", "linears"], ["linear"]))
def test_trees_of_mapped_features_are_trees_of_the_features(x64, kind):
    rng = np.random.default_rng(0)
    splits, x, matrix = (rng.normal(size=shape) for shape in ((3, P), (N, P + 1), (P + 1, P)))
    draw = lambda: ObliqueTree(splits, jnp.asarray(rng.normal(size=3)), jax.tree.map(jnp.asarray, drawn_kinds()[kind]))
    first, second = draw(), draw().replace(leaves=draw().leaves.with_outputs(lambda a: 2 * a))
    forest = Forest(jax.tree.map(lambda *a: jnp.stack(a), first, second), combine="sum")
    apply = jax.jit(lambda model, x: model.apply(x))
    for model in (first, forest):
        np.testing.assert_allclose(apply(with_map(model, matrix), x), apply(model, x @ matrix))
    with pytest.raises(TypeError, match="a model must have weights or with_kernels to take other features, got dict"):
        with_map({"kernel": splits}, matrix)
