"""Monotone trees: the projection of leaves against a solver, and fits against a search for counterexamples."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy.optimize import minimize

import jtrees
from jtrees.data.constraints import NamedColumn, checked_signs
from jtrees.estimators import TreeClassifier, TreeRegressor
from jtrees.monotone import ordered_values
from jtrees.tables import checked_dataset
from tests import sweeps
from tests.oracles import path_to

KEY = jax.random.key(0)
SIGNS = {0: 1, 1: -1}
X3 = np.random.default_rng(0).normal(size=(40, 3))


def pairs_in_order(splits):
    leaves = len(splits) + 1
    depth = leaves.bit_length() - 1
    paths = [dict(path_to(leaf, depth)) for leaf in range(leaves)]
    parted = lambda a, b: [node for node in paths[a] if node in paths[b] and paths[a][node] < paths[b][node]]
    return [(a, b) for a, b in itertools.permutations(range(leaves), 2) if any(splits[node] for node in parted(a, b))]


def solved(values, weight, pairs):
    matrix = np.zeros((len(pairs), len(values)))
    for row, (a, b) in zip(matrix, pairs, strict=True):
        row[a], row[b] = -1, 1
    order = {"type": "ineq", "fun": lambda result: matrix @ result, "jac": lambda result: matrix}
    error = lambda result: (weight * (result - values) ** 2).sum()
    slope = lambda result: 2 * weight * (result - values)
    start = np.full(len(values), np.average(values, weights=weight))
    return minimize(error, start, jac=slope, constraints=order, method="SLSQP", options={"ftol": 1e-14, "maxiter": 500})


@pytest.mark.parametrize("seed", range(6))
def test_leaves_are_the_solution_of_a_quadratic_program(seed):
    rng = np.random.default_rng(seed)
    leaves = 2 ** (1 + seed % 3)
    values, weight = rng.normal(size=leaves), rng.exponential(size=leaves) + 0.01
    splits = rng.random(leaves - 1) < 0.7
    splits[0] = True
    result, pairs = ordered_values(values, weight, splits), pairs_in_order(splits)
    assert all(result[a] <= result[b] for a, b in pairs)
    assert (weight * (result - values) ** 2).sum() <= solved(values, weight, pairs).fun + 1e-9
    np.testing.assert_array_equal(ordered_values(result, weight, splits), result)


def test_projection_within_a_program_in_single_precision():
    rng = np.random.default_rng(0)
    values, weight, splits = rng.normal(size=(5, 32)), rng.integers(0, 50, (5, 32)), rng.random((5, 31)) < 0.6
    result = jax.jit(jax.vmap(ordered_values))(*map(jnp.asarray, (values.astype(np.float32), weight, splits)))
    for outputs, *given in zip(np.asarray(result), values, weight, splits, strict=True):
        np.testing.assert_allclose(outputs, ordered_values(*given), atol=2e-6)
        assert all(outputs[a] <= outputs[b] for a, b in pairs_in_order(given[-1]))


def test_empty_leaves_give_way():
    result = ordered_values(np.array([5.0, 1.0]), np.array([0.0, 10.0]), np.array([True]))
    np.testing.assert_allclose(result, 1, atol=1e-4)


CO2 = jtrees.CO2(depth=3, epochs=4, precondition=0.9)
GET = jtrees.GET(depth=3, starts=4, epochs=30)
SHORT = jtrees.CO2(depth=3, epochs=2, precondition=0)
NETWORK = jtrees.DGT(depth=3, epochs=20, widths=(8,), precondition=0.9), "classification"
JOINT = jtrees.NonGreedy(depth=3, epochs=4, greedy_epochs=2, precondition=0), "regression"
CASES = [
    (SHORT, "regression"),
    (jtrees.GET(depth=3, starts=2, epochs=30, cart=False, learning_rate=0.1, precondition=0.0), "classification"),
    (GET, "regression"),
    (jtrees.RADDT(depth=3, starts=2, epochs=20), "classification"),
    NETWORK,
    (jtrees.DGT(depth=3, epochs=20, widths=(), refit=True, precondition=0), "regression"),
    (CO2, "classification"),
    JOINT,
    (jtrees.BestOf(SHORT, runs=2), "regression"),
]
SUMS = [jtrees.Boosted(jtrees.GET(depth=3), rounds=8, patience=None), jtrees.Bagged(SHORT, trees=3)]


def table(seed=0, n=240):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 4))
    y = np.sin(2 * x[:, 0]) + x[:, 0] / 2 - x[:, 1] ** 2 - x[:, 1] + x[:, 2] * x[:, 3] + rng.normal(size=n) / 3
    return x, y, (y > np.median(y)).astype(int)


def fitted(recipe, task, monotone=SIGNS):
    x, y, labels = table()
    return jtrees.fit(recipe, x, y if task == "regression" else labels, key=KEY, task=task, monotone=monotone)


def value_of(model, x):
    result = np.asarray(model.predict(x))
    return result if result.ndim == 1 else result[:, 1]


def largest_fall(model, signs=SIGNS, pairs=2000):
    """By how much the value moves against a sign, at most, over pairs of rows that differ in one feature."""
    rng, worst = np.random.default_rng(1), 0.0
    for feature, sign in signs.items():
        low = 1.5 * rng.normal(size=(pairs, 4))
        high = low.copy()
        high[:, feature] += rng.exponential(size=pairs)
        worst = max(worst, (sign * (value_of(model, low) - value_of(model, high))).max())
    return worst


@pytest.mark.parametrize(
    "case", sweeps.quick(CASES, CASES[:2], [NETWORK, JOINT]), ids=lambda case: type(case[0]).__name__
)
def test_trees_have_no_counterexample(case):
    fit = fitted(*case)
    weights = np.asarray(fit.tree.weights)
    assert (weights[:, 0] >= 0).all() and (weights[:, 1] <= 0).all() and (weights[:, :2] != 0).any()
    assert largest_fall(fit.model) <= 0 and len(np.unique(value_of(fit.model, table()[0]))) > 2
    if case[1] == "classification":
        np.testing.assert_allclose(fit.predict(table()[0]).sum(1), 1, rtol=1e-5)
    values = np.asarray(fit.tree.leaves.predictions(), np.float64)
    values = values if values.ndim == 1 else values[:, 1]
    assert all(values[a] <= values[b] for a, b in pairs_in_order((weights[:, :2] != 0).any(1)))


def test_the_search_finds_what_an_ordinary_tree_does_and_signs_hold_against_the_data():
    assert largest_fall(fitted(SHORT, "regression", None).model) > 0.1
    against = np.asarray(fitted(*CASES[1], {0: -1, 1: 1}).tree.weights)
    assert (against[:, 0] <= 0).all() and (against[:, 1] >= 0).all()


@pytest.mark.parametrize("task", sweeps.slow(["regression", "classification"], ["classification"]))
@pytest.mark.parametrize("recipe", SUMS, ids=type)
def test_sums_of_trees_are_monotone(recipe, task):
    assert largest_fall(fitted(recipe, task).model) <= 1e-12


@pytest.mark.slow
def test_several_targets_are_monotone_each():
    x, y, _ = table()
    fit = jtrees.fit(CO2, x, np.column_stack([y, y + x[:, 2]]), key=KEY, monotone=SIGNS)
    for k in range(2):
        assert largest_fall(types.SimpleNamespace(predict=lambda x, k=k: fit.predict(x)[:, k])) <= 0


@pytest.mark.slow
@pytest.mark.parametrize("signs", [[1, -1, 0, 0], {0: 1, 1: -1}, np.array([1, -1, 0, 0])])
def test_estimators(signs):
    x, y, labels = table()
    assert largest_fall(TreeRegressor(CO2, monotonic_cst=signs, random_state=0).fit(x, y)) <= 0
    model = TreeClassifier(CO2, monotonic_cst=signs, random_state=0).fit(x, np.where(labels, "yes", "no"))
    assert largest_fall(types.SimpleNamespace(predict=model.predict_proba)) <= 0


# A number with gaps, a text of three levels, and a number.
COLUMNS = [
    NamedColumn("age", 2, "number"),
    NamedColumn("kind", 3, "text"),
    NamedColumn("7", 1, "number"),
]


@pytest.mark.parametrize(
    ("monotone", "columns", "signs"),
    [
        ([1, 0, -1], None, (1, 0, -1)),
        ({2: -1}, None, (0, 0, -1)),
        ([0, 0, 0], None, None),
        (None, None, None),
        ([-1, 0, 1], COLUMNS, (-1, 0, 0, 0, 0, 1)),
        ({"age": 1, 7: -1}, COLUMNS, (1, 0, 0, 0, 0, -1)),
    ],
)
def test_signs_of_columns_are_those_of_their_first_features(monotone, columns, signs):
    assert checked_signs(monotone, columns, 3 if columns is None else 6) == signs


@pytest.mark.parametrize(
    ("monotone", "message"),
    [
        ({"weight": 1}, r"monotone must name columns of x, .*'age'.*, got 'weight'"),
        ({"age": 2}, "monotone must have the signs -1, 0 or 1, got 2 for 'age'"),
        ({"age": np.True_}, "monotone must have the signs -1, 0 or 1, got True for 'age'"),
        ({"kind": 1}, "monotone must name columns of numbers, got 'kind'"),
        ([1, 0], r"monotone must be signs by column, or 5 signs, got \[1, 0\]"),
        ("age", "monotone must be signs by column, or 5 signs, got 'age'"),
        ({"age": 1, 0: -1}, "monotone must have one sign for each column, got two for 'age'"),
    ],
)
def test_bad_signs(monotone, message):
    x, y, _ = table()
    columns = pd.DataFrame(x, columns=["age", "price", "size", "speed"]).assign(kind=np.where(x[:, 3] > 0, "u", "v"))
    with pytest.raises(ValueError, match=message):
        jtrees.fit(jtrees.GET(), columns, y, key=KEY, monotone=monotone)
    with pytest.raises(ValueError, match="monotone must be for numbers or two classes"):
        jtrees.fit(jtrees.GET(), X3, np.arange(40) % 3, key=KEY, task="classification", monotone=SIGNS)
    for names in ([1, 2, 3], ["age", "2019", "2020"]):  # a position is no name where numbers are
        with pytest.raises(ValueError, match=r"monotone must name columns of x, .*, got 0"):
            jtrees.fit(CO2, pd.DataFrame(X3, columns=names), X3[:, 0], key=KEY, monotone={0: 1})


LINEAR = jtrees.GET(leaves="linear")
OTHERS = [jtrees.TEL(), jtrees.LatentTree(), LINEAR, jtrees.Boosted(LINEAR), jtrees.Polished(jtrees.GET())]


def test_the_sign_of_a_constant_column_has_no_effect():
    frame = pd.DataFrame({"same": np.ones(60), "b": np.arange(60.0)})
    dataset = checked_dataset(frame, np.arange(60.0), None, "regression", monotone={"same": 1, "b": -1})
    assert dataset.table().monotone == (-1,)


@pytest.mark.parametrize("recipe", [*OTHERS, jtrees.Refined(), jtrees.Sparse(jtrees.GET())], ids=type)
def test_recipes_that_cannot_keep_it_say_so(recipe):
    x, y, _ = table()
    with pytest.raises(ValueError, match=r"monotone needs a recipe that keeps it, GET, .*, got"):
        jtrees.fit(recipe, x, y, key=KEY, monotone=SIGNS)


def test_a_sign_that_is_an_array_of_no_axes_is_refused():
    with pytest.raises(ValueError, match="monotone must be signs by column, or 1 signs"):
        jtrees.fit(SHORT, np.arange(20.0)[:, None], np.arange(20.0), key=jax.random.key(0), monotone=np.array(1))
