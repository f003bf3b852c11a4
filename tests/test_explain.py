"""Explanations, held against enumeration: of all orders of columns, all sets of constraints, and a grid of samples."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, r2_score

import jtrees
from jtrees import exact, explain, losses
from jtrees.estimators import TreeRegressor
from jtrees.explain import shapley
from jtrees.explain.least_distance import nearest_leaves

KEY = jax.random.key(0)


def drawn(kind="constant", depth=3, p=5, seed=0, origin=False):
    """A random tree."""
    rng = np.random.default_rng(seed)
    f32 = lambda *shape: jax.device_put(rng.normal(size=shape).astype(np.float32))
    nodes, leaves = 2**depth - 1, 2**depth
    made = {
        "constant": lambda: jtrees.leaves.Values(f32(leaves)),
        "outputs": lambda: jtrees.leaves.Values(f32(leaves, 2)),
        "linear": lambda: jtrees.leaves.Linear(f32(leaves, p), f32(leaves)),
        "classes": lambda: jtrees.leaves.Values(jax.nn.softmax(f32(leaves, 3)), jtrees.losses.Frequencies()),
        "counts": lambda: jtrees.leaves.Values(f32(leaves), losses.Poisson()),
        "quantiles": lambda: jtrees.leaves.Values(f32(leaves, 2), losses.Quantile((0.1, 0.9))),
        "actions": lambda: jtrees.leaves.Values(1e4 * jax.nn.one_hot(f32(leaves, 3).argmax(1), 3), losses.Rewards()),
    }
    far = None if kind in ("classes", "counts", "actions") else jnp.float32(3.0)
    zero = jtrees.Origin(f32(p), far) if origin else None
    return jtrees.ObliqueTree(f32(nodes, p), f32(nodes) / 2, made[kind](), zero)


def rows(n, p=5, seed=1):
    return np.random.default_rng(seed).normal(size=(n, p))


@pytest.fixture(scope="module")
def raw():
    """A table with a category, gaps and an unused column, and a model of it."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({
        "area": np.where(rng.random(200) < 0.1, np.nan, rng.normal(70, 20, 200)),
        "heating": rng.choice(["gas", "oil", "wood"], 200),
        "rooms": rng.integers(1, 6, 200),
        "same": 1.0,
    })  # fmt: skip
    y = frame["area"].fillna(70) / 20 + 2 * (frame["heating"] == "gas") + frame["rooms"]
    with jax.numpy_dtype_promotion("standard"), pytest.warns(jtrees.tables.ColumnsWarning):
        return frame, y, jtrees.fit(jtrees.GET(depth=2, starts=2, epochs=50), frame, y, key=KEY).model


# --- The path of a sample --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("reference", [None, rows(1, seed=7)[0]])
@pytest.mark.parametrize("origin", [False, True])
@pytest.mark.parametrize("kind", ["constant", "linear", "classes", "counts", "quantiles", "actions"])
def test_parts_add_up(kind, origin, reference):
    tree = drawn(kind, origin=origin)
    for x in rows(20):
        path = explain.path(tree, x, reference=reference)
        assert path.leaf == tree.leaf_index(x[None])[0]
        nodes = tree.decision_path(x[None])[:, 0]
        assert [split.node for split in path.splits] == nodes[:-1].tolist()
        for split, child in zip(path.splits, nodes[1:], strict=True):
            assert (split.margin > 0) == (child == 2 * split.node + 2)
            assert split.reference + sum(split.parts.values()) == pytest.approx(split.margin, abs=1e-12)
        np.testing.assert_array_equal(path.prediction, tree.predict(x[None])[0])
        if kind == "linear":
            at = np.zeros(5) if reference is None else reference - (tree.origin.x if origin else 0)
            at = np.asarray(at, np.float32)[None]
            base = tree.at_leaf(jnp.array([path.leaf]), jnp.asarray(at))[0] + (3 if origin else 0)
            assert base + sum(path.parts.values()) == pytest.approx(float(path.prediction), abs=1e-5)  # float32
        else:
            assert path.parts is None


def test_a_path_in_words():
    tree = jtrees.ObliqueTree(jnp.array([[2.0, -1.0]]), jnp.array([0.5]), jtrees.leaves.Values(jnp.array([1.0, 7.0])))
    text = str(explain.path(tree, [1.0, 0.5], feature_names=["age", "bmi"]))
    assert text == "node 0: 2 = 0.5 + 2 (age) - 0.5 (bmi), right\nleaf 1: 7."
    stump = tree.replace(weights=jnp.zeros((1, 2)))
    assert explain.path(stump, [1.0, 0.5]).splits == []
    quantiles = jtrees.leaves.Values(jnp.array([[1.0, 2.0], [7.0, 3.0]]), losses.Quantile((0.1, 0.9)))
    assert str(explain.path(tree.replace(leaves=quantiles), [1.0, 0.5])).endswith("\nleaf 1: [3., 7.]")


# --- The nearest change ----------------------------------------------------------------------------------------------


def nearest_by_active_sets(tree, x, deviation, wanted, bounds=None):
    """The distance to the nearest wanted leaf: of the points nearest to x on all sets of splits, the first inside.

    Bounds of x are constraints as splits are.
    """
    best, bias = np.inf, np.asarray(tree.bias, np.float64)
    weights = np.asarray(tree.weights, np.float64)
    for leaf in np.flatnonzero(wanted):
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "p", "kind"),
    [
        *(
            (depth, p, kind)
            for depth, p in ((1, 1), (2, 2), (3, 5), (4, 3), (6, 4))
            for kind in ("constant", "classes")
        ),
        (3, 5, "quantiles"),
        (4, 3, "actions"),
    ],
)
def test_the_nearest_change_is_that_of_all_active_sets(depth, p, kind):
    tree, table = drawn(kind, depth, p), rows(100, p) * np.arange(1, p + 1)
    deviation = table.std(0)
    for x in table[: 8 if depth < 6 else 2]:
        now = tree.leaf_index(x[None])[0]
        leaves = np.arange(2**depth)
        answer = np.asarray(tree.leaves.values).argmax(-1) if kind in ("classes", "actions") else leaves
        wanted = answer != answer[now]
        change = explain.nearest_change(tree, x, table, extrapolate=True)
        if change is None:
            assert not wanted.any()
            continue
        expected = nearest_by_active_sets(tree, x.astype(np.float32).astype(float), deviation, wanted)
        assert change.distance == pytest.approx(expected, rel=1e-4, abs=1e-4)  # beyond the splits by 1e-6, and float32
        assert change.leaf == tree.leaf_index(change.x[None])[0] and wanted[change.leaf]
        assert change.distance == pytest.approx(np.linalg.norm((change.x - x) / deviation))
        assert change.changes == {f"x{i}": change.x[i] for i in np.flatnonzero(change.x != x)}


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(("depth", "p"), [(1, 1), (2, 2), (3, 3)])
def test_nearest_change_within_the_ranges_is_that_of_all_active_sets(depth, p, inside):
    tree, table = drawn("constant", depth, p), rows(30, p) * np.arange(1, p + 1) / 4
    deviation, free = table.std(0), 0
    for x in table[:20] + (0 if inside else 10 * deviation):
        bounds = np.minimum(table.min(0), x), np.maximum(table.max(0), x)  # a value outside may stay
        wanted = np.arange(2**depth) != tree.leaf_index(x[None])[0]
        expected = nearest_by_active_sets(tree, x.astype(np.float32).astype(float), deviation, wanted, bounds)
        change = explain.nearest_change(tree, x, table)
        if change is None:
            assert not np.isfinite(expected)
            continue
        assert change.distance == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert np.all((change.x >= bounds[0]) & (change.x <= bounds[1]))
        assert change.leaf == tree.leaf_index(change.x[None])[0] and wanted[change.leaf]
        free += change.distance > explain.nearest_change(tree, x, table, extrapolate=True).distance + 1e-3
    assert free or p < 3 or not inside  # the ranges matter


def test_nearest_change_of_an_age_stays_within_the_ages_of_the_table():
    """The threshold is beyond the oldest of the table, so income must change, or nothing."""
    table = np.stack([np.linspace(20, 80, 50), np.tile([1.0, 2.0], 25)], 1)
    leaves = jtrees.leaves.Values(jnp.array([0.0, 1.0]))
    tree = jtrees.ObliqueTree(jnp.array([[1.0, 40.0]]), jnp.array([-140.0]), leaves)
    change = explain.nearest_change(tree, [50.0, 1.0], table)
    assert change.x[0] <= 80 and change.x[1] <= 2 and change.leaf == 1
    only_age = {"columns": ["age"], "feature_names": ["age", "income"]}
    assert explain.nearest_change(tree, [50.0, 1.0], table, **only_age) is None
    beyond = explain.nearest_change(tree, [50.0, 1.0], table, extrapolate=True, **only_age)
    assert beyond.changes["age"] == pytest.approx(100, abs=1e-3) and beyond.previous == {"age": 50.0}
    assert str(beyond) == "age: 50 -> 100"


@pytest.mark.parametrize("fixed", [0, 2])
def test_leaves_are_visited_in_the_order_of_their_distances(fixed):
    """Also with splits that send all samples one way, and with columns that do not change."""
    tree = drawn(depth=4, p=3)
    tree = tree.replace(weights=tree.weights.at[5].set(0).at[6, fixed:].set(0))
    weights, bias, deviation = np.asarray(tree.weights), np.asarray(tree.bias), np.array([1.0, 2.0, 0.5])
    deviation[:fixed] = 0
    for x in rows(20, 3).astype(np.float32):
        margins = exact.row_scores(weights, bias, x)
        unbounded = np.array([[-np.inf] * 3, [np.inf] * 3])
        found = list(nearest_leaves(weights, margins, deviation, np.ones(16, bool), unbounded))
        lengths = [np.linalg.norm(step) for step, _ in found]
        assert lengths == sorted(lengths)
        expected = [nearest_by_active_sets(tree, x.astype(float), deviation, np.arange(16) == i) for i in range(16)]
        expected = [length for length in expected if np.isfinite(length)]
        np.testing.assert_allclose(lengths, sorted(expected), rtol=1e-6, atol=1e-8)


def test_a_class_and_columns_can_be_asked_for():
    tree, table = drawn("classes", p=3), rows(100, 3)
    predicted = tree.predict(table).argmax(-1)
    reached = 0
    for x, now in zip(table, predicted, strict=True):
        change = explain.nearest_change(tree, x, table, columns=["x1"], target=2, extrapolate=True)
        along = np.repeat(x[None], 4001, 0)
        along[:, 1] += np.linspace(-20, 20, 4001)
        possible = np.flatnonzero(tree.predict(along).argmax(-1) == 2)
        if change is None:
            assert not len(possible)
            continue
        assert tree.predict(change.x[None])[0].argmax() == 2 and np.all(change.x[[0, 2]] == x[[0, 2]])
        length = abs(change.x[1] - x[1])
        assert length <= 0.005 + np.abs(along[possible, 1] - x[1]).min() if len(possible) else length > 19.9
        assert (change.distance == 0) == (now == 2)
        reached += 1
    assert reached > 5


def test_nothing_to_change():
    only = jtrees.ObliqueTree(jnp.zeros((1, 2)), jnp.array([-1.0]), jtrees.leaves.Values(jnp.array([1.0, 2.0])))
    assert explain.nearest_change(only, [0.0, 0.0], rows(10, 2)) is None
    whole = drawn(depth=2, p=2)
    part = whole.replace(weights=whole.weights.at[1].set(0), bias=whole.bias.at[1].set(1.0))  # leaf 0 is out of reach
    for x in rows(20, 2):
        change = explain.nearest_change(part, x, rows(10, 2), extrapolate=True)
        assert change.leaf == part.leaf_index(change.x[None])[0] != part.leaf_index(x[None])[0]
    tree = only.replace(weights=jnp.array([[1.0, 0.0]]))
    assert explain.nearest_change(tree, [0.0, 0.0], rows(10, 2), columns=["x1"]) is None
    assert explain.nearest_change(tree, [0.0, 0.0], rows(10, 2) * [0, 1]) is None  # it does not vary


# --- Shapley values --------------------------------------------------------------------------------------------------


def by_orders(predict, x, background, groups):
    """The definition: the mean over all orders of the columns."""
    values = []
    for row in x:
        total = [0.0] * len(groups)
        for order in itertools.permutations(range(len(groups))):
            mixed = background.copy()
            last = predict(mixed).mean(0)
            for player in order:
                mixed[:, groups[player]] = row[groups[player]]
                total[player] = total[player] + (now := predict(mixed).mean(0)) - last
                last = now
        values.append(np.array(total) / len(list(itertools.permutations(groups))))
    return np.array(values)


@pytest.mark.parametrize("origin", [False, True])
@pytest.mark.parametrize("kind", ["constant", "outputs", "linear", "classes", "counts", "quantiles"])
def test_shapley_values_are_means_over_all_orders(kind, origin):
    tree, x, background = drawn(kind, p=4, origin=origin), rows(3, 4), rows(9, 4, seed=2)
    found = explain.shapley_values(tree, x, background)
    expected = by_orders(tree.predict, x, background, [[0], [1], [2], [3]])
    np.testing.assert_allclose(found.values, expected, atol=1e-5)  # float32
    np.testing.assert_allclose(found.base_values + found.values.sum(1), tree.predict(x), atol=1e-5)
    np.testing.assert_allclose(found.base_values[0], tree.predict(background).mean(0), atol=1e-5)
    assert found.feature_names == ["x0", "x1", "x2", "x3"] and found.data.shape == x.shape


@pytest.mark.slow
@pytest.mark.parametrize("p", [1, 12, 15])
def test_they_add_up_and_are_symmetric(p):
    """Two columns that are alike, in the model and in the rows, have one value; one that is not used has 0."""
    tree = drawn("linear", p=p, depth=2)
    x, background = rows(2, p), rows(5, p, seed=2)
    if p > 1:
        alike = lambda a: a.at[:, 1].set(a[:, 0]).at[:, 2].set(0)
        tree = tree.replace(weights=alike(tree.weights))
        tree = tree.replace(leaves=tree.leaves.replace(coefficients=alike(tree.leaves.coefficients)))
        x[:, 1], background[:, 1] = x[:, 0], background[:, 0]
    found = explain.shapley_values(tree, x, background, permutations=200)
    np.testing.assert_allclose(found.base_values + found.values.sum(1), tree.predict(x), atol=1e-4)
    if p > 1:
        np.testing.assert_allclose(found.values[:, 2], 0, atol=1e-6)
        # Above 12 columns the orders are drawn: 400 of them, of differences below 4.
        np.testing.assert_allclose(found.values[:, 0], found.values[:, 1], atol=1e-5 if p <= 12 else 0.5)


def test_drawn_orders_come_near_all_orders(monkeypatch):
    tree, x, background = drawn("constant", p=6), rows(3, 6), rows(8, 6, seed=2)
    all_orders = explain.shapley_values(tree, x, background).values
    monkeypatch.setattr(shapley, "_EXACT", 5)
    far = lambda number, seed=0: np.abs(
        explain.shapley_values(tree, x, background, permutations=number, key=jax.random.key(seed)).values - all_orders
    ).mean()
    assert far(1000) < 0.02  # some 1/sqrt(2000) of differences of about 1
    assert far(1000) < far(5) / 3
    assert far(5) == far(5) != far(5, seed=1)


@pytest.mark.parametrize(
    ("kind", "link"), [("constant", "exp"), ("outputs", "sorted"), ("outputs", "softmax"), ("constant", "identity")]
)
def test_shapley_values_of_boosted_trees(kind, link):
    """They are those of predictions, also of targets far from zero, of which each tree has a part."""
    trees = [drawn(kind, p=3, seed=seed, depth=2, origin=True) for seed in range(3)]
    far = np.float32(100) if link in ("identity", "sorted") else None
    trees = [tree.replace(origin=trees[0].origin.replace(y=far)) for tree in trees]
    forest = jtrees.Forest(jax.tree.map(lambda *a: jnp.stack(a), *trees), "sum", link)
    x, background = rows(2, 3), rows(6, 3, seed=2)
    found = explain.shapley_values(forest, x, background)
    expected = by_orders(forest.predict, x, background, [[0], [1], [2]])
    np.testing.assert_allclose(found.values, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.base_values[0], forest.predict(background).mean(0), rtol=1e-6)


@pytest.mark.slow
def test_shapley_values_of_other_models(raw):
    forest = jtrees.Forest(jax.tree.map(lambda *a: jnp.stack(a), drawn(p=4), drawn(p=4, seed=5)))
    x, background = rows(2, 4), rows(6, 4, seed=2)
    expected = by_orders(forest.predict, x, background, [[0], [1], [2], [3]])
    np.testing.assert_allclose(explain.shapley_values(forest, x, background).values, expected, atol=1e-5)
    with jax.numpy_dtype_promotion("standard"):
        soft = jtrees.fit(jtrees.TEL(depth=2, trees=2, epochs=5), rows(50, 4), 100 + rows(50, 4)[:, 0], key=KEY).model
    found = explain.shapley_values(soft, x, background)
    np.testing.assert_allclose(found.values, by_orders(soft.predict, x, background, [[0], [1], [2], [3]]), atol=1e-4)
    np.testing.assert_allclose(found.base_values + found.values.sum(1), soft.predict(x), rtol=1e-5)
    frame, _, model = raw
    found = explain.shapley_values(model, frame[:3], frame[50:60])
    assert found.feature_names == ["area", "heating", "rooms"] and found.data is None
    encode = model.encoder.transform
    groups = [[0, 1], [2, 3, 4], [5]]
    expected = by_orders(model.model.predict, encode(frame[:3]), encode(frame[50:60]), groups)
    np.testing.assert_allclose(found.values, expected, atol=1e-5)


# --- Importances -----------------------------------------------------------------------------------------------------


def test_importances():
    tree, x = drawn("classes", p=4), rows(300, 4)
    tree = tree.replace(weights=tree.weights.at[:, 3].set(0))
    y = tree.predict(x).argmax(-1)
    score = lambda y, found: accuracy_score(y, found.argmax(-1))
    shuffled = explain.permutation_importance(tree, x, y, score, repeats=3)
    assert list(shuffled) == ["x0", "x1", "x2", "x3"]
    assert np.all(shuffled["x3"] == 0)
    for i in range(3):
        assert shuffled[f"x{i}"].shape == (3,) and np.all(shuffled[f"x{i}"] > 0)


def test_models_of_raw_tables(raw):
    frame, y, model = raw
    falls = explain.permutation_importance(model, frame, y, r2_score)
    assert list(falls) == ["area", "heating", "rooms"] and all(fall.mean() > 0 for fall in falls.values())
    there = frame[frame["area"].notna()]
    path = explain.path(model, there[:1])
    assert list(path.splits[0].parts) == ["area", "heating", "rooms"]
    change = explain.nearest_change(model, there[:1], frame)
    moved = there[:1].assign(**change.changes)
    assert set(change.changes) <= {"area", "rooms"}
    assert model.leaf_index(moved)[0] == change.leaf != model.leaf_index(there[:1])[0]
    gap = frame[frame["area"].isna()][:1]
    assert set(explain.nearest_change(model, gap, frame).changes) == {"rooms"}
    with pytest.raises(ValueError, match="columns must be among 'area', 'rooms', got 'heating'"):
        explain.nearest_change(model, gap, frame, columns=["heating"])
    with pytest.raises(ValueError, match="feature_names must be None"):
        explain.path(model, gap, feature_names=["a"])


@pytest.fixture(scope="module")
def gappy():
    """A year without gaps in training, a price with 60 % gaps, and a tree that splits on their sum."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"year": rng.integers(1990, 2020, 100) * 1.0, "price": rng.normal(50, 10, 100)})
    frame.loc[rng.random(100) < 0.6, "price"] = np.nan
    columns, _ = jtrees.tables.TableEncoder.fit(frame)
    tree = jtrees.ObliqueTree(
        jnp.array([[1.0, 0.5, 0.0]]), jnp.array([-2030.0]), jtrees.leaves.Values(jnp.array([0.0, 1.0]))
    )
    return frame, jtrees.tables.FrameModel(tree, columns)


@pytest.mark.parametrize("extrapolate", [False, True])
def test_a_missing_value_does_not_change_whether_or_not_the_training_rows_had_gaps(gappy, extrapolate):
    frame, model = gappy
    row = pd.DataFrame({"year": [np.nan], "price": [30.0]})
    with pytest.warns(jtrees.tables.ColumnsWarning, match="replaced by typical values: 'year'") as said:
        change = explain.nearest_change(model, row, frame, extrapolate=extrapolate)
        assert change is None or set(change.changes) == {"price"}
        assert explain.nearest_change(model, row, frame, columns=["year"], extrapolate=extrapolate) is None
    assert len(said) == 2  # once a call
    row = pd.DataFrame({"year": [2000.0], "price": [np.nan]})
    change = explain.nearest_change(model, row, frame, extrapolate=extrapolate)
    assert change is None or set(change.changes) == {"year"}
    neither = pd.DataFrame({"year": [np.nan], "price": [np.nan]})
    with pytest.warns(jtrees.tables.ColumnsWarning):
        assert explain.nearest_change(model, neither, frame, extrapolate=extrapolate) is None


def test_changes_are_measured_by_the_values_that_are_not_missing(gappy):
    frame, model = gappy
    row = pd.DataFrame({"year": [2000.0], "price": [50.0]})
    change = explain.nearest_change(model, row, frame, extrapolate=True)
    moved = [change.changes["year"] - 2000, change.changes["price"] - 50]
    deviations = [frame["year"].std(ddof=0), frame["price"].std(ddof=0)]
    np.testing.assert_allclose(change.distance, np.linalg.norm(np.divide(moved, deviations)), rtol=1e-6)
    scaled = np.array([1.0, 0.5]) * deviations  # the foot of the perpendicular, in deviations
    np.testing.assert_allclose(change.distance, 5 / np.linalg.norm(scaled), rtol=1e-4)


def test_the_range_of_a_column_is_that_of_its_values_that_are_not_missing(gappy):
    """The typical value of the training rows, 50, is no value of these samples."""
    _, model = gappy
    few = pd.DataFrame({"year": [2000.0, 2001.0, 2008.0], "price": [10.0, 20.0, np.nan]})
    assert explain.nearest_change(model, few[:1], few) is None
    assert explain.nearest_change(model, few[:1], few.fillna(50.0)).x[1] > 20
    without = few.assign(price=np.nan)
    assert explain.nearest_change(model, few[:1], without, columns=["price"]) is None


def test_errors():
    tree = drawn()
    forest = jtrees.Forest(jax.tree.map(lambda a: a[None], tree))
    estimator = TreeRegressor(jtrees.GET(depth=1, starts=1, epochs=5)).fit(
        np.arange(20.0)[:, None], np.arange(20) // 10
    )
    with pytest.raises(ValueError, match=r"got TreeRegressor.*: pass its attribute model_"):
        explain.path(estimator, np.zeros((1, 1)))
    with pytest.raises(ValueError, match="model must be a single tree, got Forest"):
        explain.path(forest, rows(1))
    with pytest.raises(ValueError, match="row must be one row, got 2"):
        explain.path(tree, rows(2))
    with pytest.raises(ValueError, match="reference must be one row, got 2"):
        explain.path(tree, rows(1), reference=rows(2))
    with pytest.raises(ValueError, match="feature_names must hold 5 names, one a column, got 1"):
        explain.path(tree, rows(1), feature_names=["a"])
    with pytest.raises(ValueError, match="target must be None: the leaves of this tree hold no classes"):
        explain.nearest_change(tree, rows(1), rows(9), target=1)
    with pytest.raises(ValueError, match="target must be a class from 0 to 2, got 3"):
        explain.nearest_change(drawn("classes"), rows(1), rows(9), target=3)
    with pytest.raises(ValueError, match="target must be an action from 0 to 2, got -1"):
        explain.nearest_change(drawn("actions"), rows(1), rows(9), target=-1)
    with pytest.raises(ValueError, match=r"columns must be among 'x0', .*, got 'x9'"):
        explain.nearest_change(tree, rows(1), rows(9), columns=["x9"])
    with pytest.raises(ValueError, match="permutations"):
        explain.shapley_values(tree, rows(1), rows(9), permutations=0)
    with pytest.raises(ValueError, match="repeats"):
        explain.permutation_importance(tree, rows(9), rows(9)[:, 0], r2_score, repeats=0)
