"""Explanations, held against enumeration: of all orders of columns, all sets of constraints, and a grid of samples."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, r2_score

import jtrees
from jtrees import explain
from jtrees.estimators import TreeRegressor
from tests import exported_models, recipes, sweeps, tables


def random_tree(kind, *args, **options):
    """A random tree, whose origin is near the rows."""
    tree, _ = exported_models.random_tree(kind, *args, **options)
    return tree if tree.origin is None else tree.replace(origin=tree.origin.replace(x=tree.origin.x / 5000))


def rows(n, p=5, seed=1):
    return np.random.default_rng(seed).normal(size=(n, p))


@pytest.fixture(scope="module")
def raw():
    """A table with a category, gaps and an unused column, its targets, and a model of it."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({
        "area": np.where(rng.random(200) < 0.1, np.nan, rng.normal(70, 20, 200)),
        "heating": rng.choice(["gas", "oil", "wood"], 200),
        "rooms": rng.integers(1, 6, 200),
        "same": 1.0,
    })  # fmt: skip
    y = frame["area"].fillna(70) / 20 + 2 * (frame["heating"] == "gas") + frame["rooms"]
    encoder, features = jtrees.tables.TableEncoder.fit(frame)
    assert encoder.feature_names[:3] == ["area", "[area missing]", "[heating = gas]"]
    weights = np.float32([1 / 20, 0, 2, 0, 0, 1])
    bias = np.float32(-np.quantile(features @ weights, [0.5, 0.25, 0.75]))
    tree = jtrees.ObliqueTree(np.tile(weights, (3, 1)), bias, jtrees.leaves.Values(np.float32([4, 6, 8, 10])))
    return frame, y, jtrees.tables.FrameModel(tree, encoder)


@pytest.mark.parametrize("kind", sweeps.quick(["linear", "frequency", "actions"], ["linear"]))
def test_parts_add_up(kind):
    tree = random_tree(kind, origin=True)
    origin = 0 if tree.origin.y is None else float(tree.origin.y)
    for x in rows(20):
        path = explain.path(tree, x)
        assert path.leaf == tree.leaf_index(x[None])[0]
        nodes = tree.decision_path(x[None])[:, 0]
        assert [split.node for split in path.splits] == nodes[:-1].tolist()
        for split, child in zip(path.splits, nodes[1:], strict=True):
            assert (split.margin > 0) == (child == 2 * split.node + 2)
            assert split.reference + sum(split.parts.values()) == pytest.approx(split.margin, abs=1e-12)
        np.testing.assert_array_equal(path.prediction, tree.predict(x[None])[0])
        if kind == "linear":
            base = tree.leaves.at(jnp.array([path.leaf]), jnp.zeros((1, 5)))[0] + origin
            assert base + sum(path.parts.values()) == pytest.approx(float(path.prediction), abs=1e-5)  # float32
        else:
            assert path.parts is None


def test_a_path_in_words():
    tree = jtrees.ObliqueTree(jnp.array([[2.0, -1.0]]), jnp.array([0.5]), jtrees.leaves.Values(jnp.array([1.0, 7.0])))
    text = str(explain.path(tree, [1.0, 0.5], feature_names=["age", "bmi"]))
    assert text == "node 0: 2 = 0.5 + 2 (age) - 0.5 (bmi), right\nleaf 1: 7."
    assert explain.path(tree, [0.0, 0.5]).leaf == 0  # a score of 0 is left
    assert explain.path(tree.replace(weights=jnp.zeros((1, 2))), [1.0, 0.5]).splits == []


def nearest_by_active_sets(tree, x, deviation, is_target, bounds=None):
    """The distance to the nearest wanted leaf: of the points nearest to x on all sets of splits and bounds."""
    best, bias = np.inf, np.asarray(tree.bias, np.float64)
    weights = np.asarray(tree.weights, np.float64)
    for leaf in np.flatnonzero(is_target):
        place, g, h = leaf + len(bias) + 1, [], []
        while place > 1:
            side, place = (1 if place % 2 else -1), place // 2
            g.append(side * weights[place - 1] * deviation)
            h.append(-side * (weights[place - 1] @ x + bias[place - 1]))
        if bounds is not None:
            g += [*np.diag(deviation), *-np.diag(deviation)]
            h += [*(bounds[0] - x), *(x - bounds[1])]
        g, h = np.array(g), np.array(h)
        for size in range(len(h) + 1):
            for active in map(list, itertools.combinations(range(len(h)), size)):
                step = np.linalg.pinv(g[active]) @ h[active] if active else np.zeros(len(x))
                if np.all(g @ step >= h - 1e-9):
                    best = min(best, np.linalg.norm(step))
    return best


@pytest.mark.parametrize(
    ("depth", "p", "kind"),
    [
        *((size, size, kind) for size in (1, 2) for kind in ("constant", "frequency")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, 5, "quantiles"), (4, 3, "actions")]),
        pytest.param(6, 4, "constant", marks=pytest.mark.slow),
    ],
)
def test_the_nearest_change_is_that_of_all_active_sets(depth, p, kind):
    tree, table = random_tree(kind, depth, p, seed=1), rows(100, p) * np.arange(1, p + 1)
    answer = np.asarray(tree.leaves.values).argmax(-1) if kind in ("frequency", "actions") else np.arange(2**depth)
    for x in table[: 8 if depth < 6 else 2]:
        assert_nearest(tree, x, table, answer, extrapolate=True)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("depth", "p"), [(1, 1), (3, 3)])
def test_the_nearest_change_within_the_ranges_is_that_of_all_active_sets(depth, p, inside):
    tree, table, extended = random_tree("constant", depth, p), rows(30, p) * np.arange(1, p + 1) / 4, 0
    for x in table[:8] + (0 if inside else 10 * table.std(0)):
        if change := assert_nearest(tree, x, table, np.arange(2**depth)):
            extended += change.distance > explain.nearest_change(tree, x, table, extrapolate=True).distance + 1e-3
    assert extended or p < 3 or not inside  # the ranges matter


def assert_nearest(tree, x, table, answer, extrapolate=False):
    """The change is the nearest to a leaf of another answer, and within the ranges; returns it."""
    deviation, is_target = table.std(0), answer != answer[tree.leaf_index(x[None])[0]]
    bounds = None if extrapolate else (np.minimum(table.min(0), x), np.maximum(table.max(0), x))  # x itself may stay
    expected = nearest_by_active_sets(tree, x.astype(np.float32).astype(float), deviation, is_target, bounds)
    change = explain.nearest_change(tree, x, table, extrapolate=extrapolate)
    if change is None:
        assert not np.isfinite(expected)
        return None
    assert change.distance == pytest.approx(expected, rel=1e-4, abs=1e-4)  # beyond the splits by 1e-6, and float32
    assert change.leaf == tree.leaf_index(change.x[None])[0] and is_target[change.leaf]
    assert change.distance == pytest.approx(np.linalg.norm((change.x - x) / deviation))
    assert change.changes == {f"x{i}": change.x[i] for i in np.flatnonzero(change.x != x)}
    assert bounds is None or np.all((change.x >= bounds[0]) & (change.x <= bounds[1]))
    return change


def test_nearest_change_of_an_age_stays_within_the_ages_of_the_table():
    table = np.stack([np.linspace(20, 80, 50), np.tile([1.0, 2.0], 25)], 1)
    leaves = jtrees.leaves.Values(jnp.array([0.0, 1.0]))
    tree = jtrees.ObliqueTree(jnp.array([[1.0, 40.0]]), jnp.array([-140.0]), leaves)
    change = explain.nearest_change(tree, [50.0, 1.0], table)
    assert change.x[0] <= 80 and change.x[1] <= 2 and change.leaf == 1
    table[:, 1] = 1.0  # a constant column does not change
    names = {"feature_names": ["age", "income"]}
    assert explain.nearest_change(tree, [50.0, 1.0], table, **names) is None
    beyond = explain.nearest_change(tree, [50.0, 1.0], table, extrapolate=True, **names)
    assert beyond.changes["age"] == pytest.approx(100, abs=1e-3) and str(beyond) == "age: 50 -> 100"


def test_leaves_that_no_point_reaches_need_no_division_by_a_residual_of_zero():
    tree, table = random_tree("actions", 4, 3), rows(100, 3) * np.arange(1, 4)
    answer = np.asarray(tree.leaves.values).argmax(-1)
    assert_nearest(tree, table[0], table, answer, extrapolate=True)


def test_nothing_to_change():
    tree = jtrees.ObliqueTree(jnp.zeros((1, 2)), jnp.array([-1.0]), jtrees.leaves.Values(jnp.array([1.0, 2.0])))
    assert explain.nearest_change(tree, [0.0, 0.0], rows(10, 2)) is None
    tree = tree.replace(weights=jnp.array([[1.0, 0.0]]))
    assert explain.nearest_change(tree, [0.0, 0.0], rows(10, 2) * [0, 1]) is None  # it does not vary


def by_orders(predict, x, background, groups=None):
    """The definition: the mean over all orders of the columns."""
    values, groups = [], groups or [[j] for j in range(x.shape[1])]
    for row in x:
        total = [0.0] * len(groups)
        for order in itertools.permutations(range(len(groups))):
            mixed = background.copy()
            last = predict(mixed).mean(0)
            for player in order:
                mixed[:, groups[player]] = row[groups[player]]
                total[player] = total[player] + (current := predict(mixed).mean(0)) - last
                last = current
        values.append(np.array(total) / len(list(itertools.permutations(groups))))
    return np.array(values)


KINDS = ("constant", "outputs", "linear", "frequency", "counts", "quantiles")


@pytest.mark.parametrize(("kind", "origin"), [("linear", False), *((kind, True) for kind in KINDS)])
def test_shapley_values_are_means_over_all_orders(kind, origin):
    tree, x, background = random_tree(kind, p=4, origin=origin), rows(3, 4), rows(9, 4, seed=2)
    actual = explain.shapley_values(tree, x, background)
    expected = by_orders(tree.predict, x, background)
    np.testing.assert_allclose(actual.values, expected, atol=1e-5)  # float32
    np.testing.assert_allclose(actual.base_values + actual.values.sum(1), tree.predict(x), atol=1e-5)
    np.testing.assert_allclose(actual.base_values[0], tree.predict(background).mean(0), atol=1e-5)
    assert actual.feature_names == ["x0", "x1", "x2", "x3"] and actual.data.shape == x.shape


def test_drawn_orders_come_near_all_orders():
    """Orders are drawn above 12 columns; those beyond the first six are not used."""
    tree, x, background = random_tree("constant", p=6), rows(3, 13), rows(8, 13, seed=2)
    all_orders = explain.shapley_values(tree, x[:, :6], background[:, :6]).values
    wide = tree.replace(weights=jnp.pad(tree.weights, ((0, 0), (0, 7))))
    actual = explain.shapley_values(wide, x, background, permutations=1000, key=jax.random.key(0))
    assert np.abs(actual.values[:, :6] - all_orders).mean() < 0.02  # some 1/sqrt(2000) of differences of about 1
    np.testing.assert_allclose(actual.base_values + actual.values.sum(1), wide.predict(x), atol=1e-4)
    np.testing.assert_allclose(actual.values[:, 6:], 0, atol=1e-6)


LINKS = [("constant", "exp"), ("outputs", "sorted"), ("outputs", "softmax"), ("constant", "identity")]


@pytest.mark.parametrize(
    ("kind", "link", "combine"), [*((*pair, "sum") for pair in LINKS), ("constant", "identity", "mean")]
)
def test_shapley_values_of_forests(kind, link, combine):
    """They explain predictions, also if targets are far from zero and each tree has a part of the origin."""
    trees = [random_tree(kind, p=3, seed=seed, depth=2, origin=True) for seed in range(3)]
    far = np.float32(100) if link in ("identity", "sorted") else None
    trees = [tree.replace(origin=trees[0].origin.replace(y=far)) for tree in trees]
    forest = exported_models.stacked(trees, combine, link)
    x, background = rows(2, 3), rows(6, 3, seed=2)
    actual = explain.shapley_values(forest, x, background)
    expected = by_orders(forest.predict, x, background)
    np.testing.assert_allclose(actual.values, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(actual.base_values[0], forest.predict(background).mean(0), rtol=1e-6)


@pytest.mark.slow
def test_shapley_values_of_other_models(raw, fitted):
    x, background = rows(2, 4), rows(6, 4, seed=2)
    soft = fitted(recipes.TEL).model
    actual = explain.shapley_values(soft, x, background)
    np.testing.assert_allclose(actual.values, by_orders(soft.predict, x, background), atol=1e-4)
    np.testing.assert_allclose(actual.base_values + actual.values.sum(1), soft.predict(x), rtol=1e-5)
    frame, _, model = raw
    actual = explain.shapley_values(model, frame[:3], frame[50:60])
    assert actual.feature_names == ["area", "heating", "rooms"] and actual.data is None
    encode = model.encoder.transform
    groups = [[0, 1], [2, 3, 4], [5]]
    expected = by_orders(model.model.predict, encode(frame[:3]), encode(frame[50:60]), groups)
    np.testing.assert_allclose(actual.values, expected, atol=1e-5)


def test_importances():
    tree, x = random_tree("frequency", p=4), rows(300, 4)
    tree = tree.replace(weights=tree.weights.at[:, 3].set(0))
    score = lambda y, actual: accuracy_score(y, actual.argmax(-1))
    shuffled = explain.permutation_importance(tree, x, tree.predict(x).argmax(-1), score, repeats=3)
    assert list(shuffled) == ["x0", "x1", "x2", "x3"] and np.all(shuffled["x3"] == 0)
    assert all(shuffled[f"x{i}"].shape == (3,) and np.all(shuffled[f"x{i}"] > 0) for i in range(3))


def test_models_of_raw_tables(raw):
    frame, y, model = raw
    falls = explain.permutation_importance(model, frame, y, r2_score)
    assert list(falls) == ["area", "heating", "rooms"] and all(fall.mean() > 0 for fall in falls.values())
    complete = frame[frame["area"].notna()]
    path = explain.path(model, complete[:1])
    assert list(path.splits[0].parts) == ["area", "heating", "rooms"]
    assert str(explain.path(model, complete.iloc[0])) == str(path)  # a row as a Series
    change = explain.nearest_change(model, complete[:1], frame)
    moved = complete[:1].assign(**change.changes)
    assert set(change.changes) <= {"area", "rooms"}
    assert model.leaf_index(moved)[0] == change.leaf != model.leaf_index(complete[:1])[0]
    gap = frame[frame["area"].isna()][:1]
    assert set(explain.nearest_change(model, gap, frame).changes) == {"rooms"}
    with pytest.raises(ValueError, match="feature_names must be None"):
        explain.path(model, gap, feature_names=["a"])


@pytest.mark.parametrize("extrapolate", [False, True])
def test_changes_of_a_table_with_gaps(extrapolate):
    """A year without gaps in training, a price with 60 % gaps, and a tree that splits on their sum."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"year": rng.integers(1990, 2020, 100) * 1.0, "price": rng.normal(50, 10, 100)})
    frame.loc[rng.random(100) < 0.6, "price"] = np.nan
    leaves = jtrees.leaves.Values(jnp.array([0.0, 1.0]))
    tree = jtrees.ObliqueTree(jnp.array([[1.0, 0.5, 0.0]]), jnp.array([-2030.0]), leaves)
    model = jtrees.tables.FrameModel(tree, jtrees.tables.TableEncoder.fit(frame)[0])
    nearest = lambda year, price, x=frame, **how: explain.nearest_change(
        model, pd.DataFrame({"year": [year], "price": [price]}), x, extrapolate=extrapolate, **how
    )
    # A missing value does not change, whether or not the training rows had gaps.
    with pytest.warns(jtrees.tables.ColumnsWarning, match="replaced by typical values: 'year'") as warned:
        change = nearest(np.nan, 30.0)
        assert change is None or set(change.changes) == {"price"}
    assert len(warned) == 1
    change = nearest(2000.0, np.nan)
    assert change is None or set(change.changes) == {"year"}
    # Deviations and ranges are those of values that are not missing; the typical price, 50, is no value of few rows.
    if extrapolate:
        scaled = np.array([1.0, 0.5]) * frame.std(ddof=0)  # the foot of the perpendicular, in deviations
        np.testing.assert_allclose(nearest(2000.0, 50.0).distance, 5 / np.linalg.norm(scaled), rtol=1e-4)
    else:
        few_rows = pd.DataFrame({"year": [2000.0, 2001.0, 2008.0], "price": [10.0, 20.0, np.nan]})
        assert nearest(2000.0, 10.0, few_rows) is None
        assert nearest(2000.0, 10.0, few_rows.fillna(50.0)).x[1] > 20


TREE = random_tree("constant")
ERRORS = {
    explain.path: [
        ((jtrees.Forest(jax.tree.map(lambda a: a[None], TREE)), rows(1)), {}, "must be a single tree, got Forest"),
        ((TREE, rows(2)), {}, "row must be one row, got 2"),
        ((TREE, rows(1)[:, :4]), {}, "row must have 5 columns, got 4"),
        ((TREE, rows(1)), {"feature_names": ["a"]}, "feature_names must hold 5 names, one a column, got 1"),
        ((TREE, rows(1)), {"feature_names": "abcda"}, "feature_names must differ from each other, got 'a' twice"),
    ],
    explain.shapley_values: [((TREE, rows(1), rows(9)), {"permutations": 0}, "permutations must be")],
    explain.permutation_importance: [((TREE, rows(9), rows(9)[:, 0], r2_score), {"repeats": 0}, "repeats must be")],
}


@pytest.mark.parametrize("function", ERRORS)
def test_wrong_arguments_are_refused(function):
    for arguments, options, message in ERRORS[function]:
        with pytest.raises(ValueError, match=message):
            function(*arguments, **options)
    estimator = TreeRegressor(recipes.GET).fit(rows(20), np.ones(20))
    with pytest.raises(ValueError, match=r"got TreeRegressor.*: pass its attribute model_"):
        function(estimator, *ERRORS[function][0][0][1:])


def test_gaps_that_the_training_rows_did_not_have_are_explained_as_medians(fitted):
    tree = fitted(recipes.GET).tree
    medians, gaps = np.median(tables.X, axis=0), tables.GAPS
    filled = np.where(np.isnan(gaps), medians, gaps)
    row = int((np.isnan(gaps) == [False, False, False, True]).all(1).argmax())
    with pytest.warns(jtrees.tables.ColumnsWarning):
        assert str(explain.path(tree, gaps[row])) == str(explain.path(tree, filled[row]))
        assert tree.to_text(x=gaps, max_terms=2) == tree.to_text(x=filled, max_terms=2)
        actual, expected = (explain.shapley_values(tree, x[[row]], tables.X[:50]).values for x in (gaps, filled))
        change = explain.nearest_change(tree, gaps[row], gaps, extrapolate=True)
    np.testing.assert_array_equal(actual, expected)
    assert change is not None and "x3" not in change.changes  # a missing value does not change


def test_what_does_not_vary_or_contribute_is_left_out():
    """The deviation of equal numbers may be a rounding error."""
    tree = jtrees.ObliqueTree(jnp.array([[1.0]]), jnp.array([-0.05]), jtrees.leaves.Values(jnp.array([0.0, 1.0])))
    assert explain.nearest_change(tree, [0.1], np.full((3, 1), 0.1), extrapolate=True) is None
    assert str(explain.path(tree, [0.0])) == "node 0: -0.05 = -0.05, left\nleaf 0: 0."


def test_the_background_of_shapley_values_is_named():
    with pytest.raises(ValueError, match="background must have 5 columns, got 4"):
        explain.shapley_values(TREE, rows(1), rows(9)[:, :4])


def test_an_empty_background_is_refused():
    frame = pd.DataFrame({"size": np.arange(20.0), "colour": ["red", "blue"] * 10})
    model = jtrees.fit(recipes.DGT.replace(depth=1), frame, np.arange(20.0), key=jax.random.key(0)).model
    with pytest.raises(ValueError, match="background must have at least one row, got 0"):
        explain.shapley_values(model, frame[:1], frame[:0])
    with pytest.raises(ValueError, match="x must have at least one row, got 0"):
        explain.nearest_change(model, frame[:1], frame[:0])
