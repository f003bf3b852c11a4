"""Predictions: the same whatever the number of rows and their layout; what they cost; no rows; what is refused."""

from concurrent.futures import ThreadPoolExecutor
import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees import Forest, ObliqueTree, Origin, blocking, cli
from jtrees.estimators import TreeClassifier, TreeRegressor
from jtrees.leaves import Linear
from jtrees.tables import FrameModel
from tests import oracles, recipes, sweeps, tables
from tests.exported_models import identity_model

slow = pytest.mark.slow
P, FAR = 5, 1e6
ROWS = (1, 2, 7, 63, 255, 256, 257, 3000)
MANY = 70_000  # more than a chunk
BLOCK = blocking.prediction_block(1)


def draw(depth, origin=False, shift=0.0, seed=0, outputs=()):
    """A tree whose splits pass through the middle of samples around ``shift``; linear leaves show every rounding."""
    rng = np.random.default_rng(seed)
    nodes = 2**depth - 1
    weights, bias = rng.normal(size=(nodes, P)), rng.normal(size=nodes)
    leaves = Linear(rng.normal(size=(nodes + 1, P, *outputs)), rng.normal(size=(nodes + 1, *outputs)))
    zero = Origin(np.full(P, shift, np.float32), np.full(outputs, 3e8, np.float32)) if origin else None
    bias = bias if origin else bias - shift * weights.sum(1)
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), ObliqueTree(weights, bias, leaves)).replace(origin=zero)


def samples(n, shift=0.0, dtype=np.float32, seed=1):
    return (shift + np.random.default_rng(seed).normal(size=(n, P))).astype(dtype)


def forest(depth, trees=2, **options):
    drawn = [draw(depth, seed=seed, **options) for seed in range(1, trees + 1)]
    return Forest(jax.tree.map(lambda *a: np.stack(a), *drawn))


def large_forest(depth, **options):
    """More trees than features: NumPy evaluates few rows."""
    return forest(depth, trees=2 * P, **options)


def assert_the_same_in_pieces(ask, x, rows=ROWS):
    """Predictions of pieces have the same bits, wherever a piece begins."""
    full = np.asarray(ask(x))
    for n in rows:
        for first in (0, 5):
            piece = np.asarray(ask(x[first : first + n]))
            assert piece.tobytes() == full[first : first + n].astype(piece.dtype).tobytes(), (n, first)


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.parametrize(
    ("origin", "shift", "dtype"),
    [(False, 0.0, np.float32), (False, FAR, np.float32), (True, FAR, np.float32), (True, FAR, np.float64)],
)
@pytest.mark.parametrize(
    ("model", "depth", "n"), [(draw, 8, 3005), (forest, 4, 3005), (large_forest, 4, 3005), (draw, 4, MANY)]
)
def test_answers_are_the_same_bit_for_bit_whatever_the_number_of_rows(model, depth, n, origin, shift, dtype):
    """Wherever rows start in memory, and in whatever order they lie there."""
    tree, x = model(depth, origin=origin, shift=shift), samples(n, shift, dtype)
    assert_the_same_in_pieces(tree.predict, x)
    if model is draw:
        assert_the_same_in_pieces(tree.leaf_index, x)
    if n == MANY:
        full = tree.predict(x)
        unaligned = np.empty(x.nbytes + 1, np.uint8)[1:].view(dtype).reshape(x.shape)
        unaligned[:] = x
        for rows, expected in ((x[::-1], full[::-1]), (np.asfortranarray(x)[5:], full[5:]), (unaligned, full)):
            assert np.array_equal(tree.predict(rows), expected)


def test_few_rows_of_many_trees_need_no_program(count_compilations):
    model, x = large_forest(4), samples(400)
    full = model.predict(x)
    fresh = model.replace(trees=jax.tree.map(lambda a: a[:7], model.trees))
    assert count_compilations(lambda: [fresh.predict(x[:n]) for n in (1, 16)]) == 0
    assert np.array_equal(np.concatenate([model.predict(x[i : i + 1]) for i in range(400)]), full)


def test_what_is_prepared_for_one_model_serves_no_other():
    x, trees = samples(50), [draw(3), draw(3).replace(weights=-draw(3).weights)]
    expected = [np.asarray(tree.predict(jnp.asarray(x))) for tree in trees]  # nothing is prepared for JAX arrays
    assert (expected[0] != expected[1]).any()
    for i in (0, 1, 0, 0, 1, 1, 0):
        np.testing.assert_allclose(trees[i].predict(x), expected[i], rtol=1e-5)  # leaves are equal, linear models round
    custom = jax.tree.map(np.array, trees[0])  # arrays that may change
    np.testing.assert_allclose(custom.predict(x), expected[0], rtol=1e-5)
    custom.weights[...] = trees[1].weights
    np.testing.assert_allclose(custom.predict(x), expected[1], rtol=1e-5)


@pytest.mark.slow
def test_what_is_prepared_goes_with_its_model():
    """However often and in however many threads it predicts."""
    gc.collect()
    before, trees, x = len(jax.live_arrays()), [draw(3, seed=seed) for seed in range(4)], samples(50)
    expected = [tree.predict(x) for tree in trees]
    prepared = len(jax.live_arrays())
    ask = lambda i: np.testing.assert_array_equal(trees[i % 4].predict(x), expected[i % 4])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(40)))
    gc.collect()
    assert len(jax.live_arrays()) == prepared > before
    trees.clear()
    gc.collect()
    assert len(jax.live_arrays()) == before


@pytest.mark.exact
@pytest.mark.parametrize("n", [257, pytest.param(7, marks=slow), pytest.param(MANY, marks=slow)])
def test_jax_arrays_are_answered_as_numpy_arrays_are(n):
    # Values and their distances from the origin are exact in float32: both ways round alike.
    tree, x = draw(4, origin=True, shift=FAR), np.round(samples(n, FAR), 2)
    tree = tree.replace(origin=Origin(tree.origin.x, np.zeros((), np.float32)))
    actual = tree.predict(jnp.asarray(x))
    assert isinstance(actual, jax.Array)
    np.testing.assert_allclose(actual, tree.predict(x), rtol=1e-5, atol=1e-5)
    assert np.array_equal(tree.leaf_index(jnp.asarray(x)), tree.leaf_index(x))


@pytest.mark.exact
def test_an_origin_keeps_the_digits_of_values_far_from_zero():
    """Against the same tree around zero: splits on features of 1e8, targets of 3e8."""
    near, x = draw(4), samples(300, dtype=np.float64)
    far = near.replace(origin=Origin(np.full(P, 1e8, np.float32), np.float32(3e8)))
    assert np.array_equal(far.leaf_index(1e8 + x), near.leaf_index(x))
    answers = far.predict(1e8 + x)
    assert answers.dtype == np.float64
    # What is left of a distance of size one from 1e8 in double precision.
    np.testing.assert_allclose(answers - 3e8, near.predict(x), atol=1e-6)
    assert np.array_equal(far.decision_path(1e8 + x), near.decision_path(x))
    pruned = far.prune(1e8 + x)
    assert np.array_equal(pruned.predict(1e8 + x), answers)


@pytest.mark.exact
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    ("dtype", "zero"),
    [*((np.int32, zero) for zero in (1e8, -2e9, 1000.5)), (jnp.float16, 1000.5), (np.uint8, 3.0), (np.bool_, 3.0)],
)
def test_numbers_of_every_type_are_counted_from_the_origin(dtype, zero, convert):
    near, kind = draw(4), np.dtype(dtype).kind
    far = near.replace(origin=Origin(np.full(P, zero, np.float32), np.float32(0)))
    full = np.random.default_rng(0).integers(0, 2 if kind == "b" else 100, (BLOCK, P))
    steps = full if kind in "biu" else samples(BLOCK)
    x = (steps + (0 if kind in "bu" else np.trunc(zero))).astype(dtype)
    expected = near.predict((x.astype(np.float64) - zero).astype(np.float32))
    np.testing.assert_allclose(far.predict(convert(x)), expected, rtol=1e-5, atol=1e-5)


def test_apply_is_predict_as_a_pure_function():
    trees, x = [draw(4, seed=seed) for seed in (3, 4)], jnp.asarray(samples(BLOCK))
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *trees)
    answers = jax.jit(lambda trees, x: jax.vmap(lambda tree: tree.apply(x))(trees))(stacked, x)
    for tree, actual in zip(trees, answers, strict=True):
        # Programs of another shape: sums in another order.
        np.testing.assert_allclose(actual, tree.predict(x), rtol=1e-5, atol=1e-5)
    slope = jax.jit(jax.grad(lambda x: trees[0].apply(x).sum()))(x)
    coefficients = np.asarray(trees[0].leaves.coefficients)[np.asarray(trees[0].leaf_index(x))]
    np.testing.assert_allclose(slope, coefficients, rtol=1e-5, atol=1e-6)


def test_no_compilation_for_each_number_of_rows(count_compilations):
    tree, x = draw(4), samples(1024)
    # Three sizes, the preparation, and the leaves of samples that are scored again.
    assert count_compilations(lambda: [tree.predict(x[: 2**i]) for i in range(11)]) <= 5
    assert count_compilations(lambda: [tree.predict(x[:n]) for n in range(1, 1025, 11)]) == 0
    # Nor for another tree of that shape, with an origin or without, or for rows in another precision.
    rest = [draw(4, seed=1), draw(4, seed=2, origin=True, shift=FAR)]
    assert count_compilations(lambda: [tree.predict(x[:n].astype(float)) for tree in rest for n in (1, 600)]) == 0
    together = Forest(jax.tree.map(lambda a: jnp.stack([a, a]), tree))
    together.predict(x[:BLOCK])
    assert count_compilations(lambda: [together.predict(x[:n]) for n in range(1, BLOCK, 31)]) == 0


def test_nothing_as_large_as_the_rows_times_the_nodes_is_held():
    tree, n = draw(8), 2**16
    program = jax.make_jaxpr(lambda tree, x: tree.predict(x))(tree, jax.ShapeDtypeStruct((n, P), jnp.float32))
    sizes = list(oracles.sizes_in(program.jaxpr))
    assert max(sizes) == n * P
    assert sorted(size for size in sizes if size < n)[-1] <= BLOCK * 255


FRAME = pd.DataFrame(samples(60), columns=[*"abcde"]).assign(b=np.resize(["u", "v"], 60))


MODELS = {"tree": draw(3), "outputs": draw(3, outputs=(2,)), "forest": forest(3), "table": identity_model(FRAME)}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_no_rows_have_no_predictions_of_the_type_of_any_others(model):
    tables = [FRAME[:7]] if isinstance(model, FrameModel) else [samples(7), jnp.asarray(samples(7))]
    for rows, name in itertools.product(tables, ("predict", "leaf_index", "decision_path")):
        if hasattr(model, name):
            seven, none = getattr(model, name)(rows), getattr(model, name)(rows[:0])
            assert type(none) is type(seven) and none.dtype == seven.dtype
            assert none.shape == tuple(0 if size == 7 else size for size in seven.shape)


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("rows", [tables.frame(), tables.X], ids=["frame", "array"])
def test_estimators_predict_no_rows(rows, tmp_path, capsys):
    regressor = TreeRegressor(recipes.DGT, random_state=0).fit(rows, tables.TARGETS["two outputs"])
    assert regressor.predict(rows[:0]).shape == (0, 2)
    classifier = TreeClassifier(recipes.DGT, random_state=0).fit(rows, np.where(tables.BINARY, "u", "v"))
    assert classifier.predict_proba(rows[:0]).shape == (0, 2) and classifier.predict(rows[:0]).dtype == "U1"
    jtrees.save(classifier, tmp_path / "model.jtrees")
    names = list(rows) if isinstance(rows, pd.DataFrame) else [*"abcd"]
    (tmp_path / "rows.csv").write_text(",".join(names) + "\n")
    assert cli.main(["predict", str(tmp_path / "model.jtrees"), str(tmp_path / "rows.csv"), "--probabilities"]) == 0
    assert capsys.readouterr().out == "prediction,probability of u,probability of v\n"


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("row", [0, BLOCK + 2, 2**16 + 2])
def test_not_finite_anywhere_is_noticed_even_where_the_root_does_not_split(convert, row):
    tree, x = draw(4), samples(MANY)
    tree = tree.replace(weights=tree.weights.at[0].set(0))
    x[row, 1] = np.nan
    with pytest.raises(ValueError, match=f"x must be finite, .*({row}, 1)"):
        tree.predict(convert(x))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("unit", sweeps.quick([1.0, 1e5], [1e5]))
def test_hard_splits_of_a_soft_model_decide_the_same_for_arrays_of_both_kinds(unit):
    """The thresholds are features of training rows, so every rounding error would decide a split."""
    x = (FAR + unit * tables.X).astype(np.float32)
    recipe = recipes.RECIPES["GRANDE"].replace(learning_rate=1e-30, trees=64)
    model = jtrees.fit(recipe, x, tables.Y, key=jax.random.key(0)).model
    np.testing.assert_array_equal(model.scaling.transform(x), model.scaling.transform(jnp.asarray(x)))
    np.testing.assert_allclose(model.predict(jnp.asarray(x)), model.predict(x), rtol=1e-6)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    "recipe",
    [
        recipes.GET,
        recipes.BOOSTED,
        pytest.param(recipes.TEL, marks=slow),
        *(pytest.param(jtrees.Bagged(base, trees=2), marks=slow) for base in (recipes.TEL, recipes.BOOSTED)),
        *(pytest.param(recipe, marks=pytest.mark.wide) for recipe in recipes.RECIPES.values()),
    ],
    ids=lambda recipe: type(recipe).__name__,
)
def test_gaps_that_the_training_rows_did_not_have_are_medians(recipe, fitted, tmp_path):
    """In every form of the model, and for every kind of array."""
    model = fitted(recipe).model
    rows, medians = tables.GAPS, np.median(tables.X, axis=0)
    filled = np.where(np.isnan(rows), medians, rows)
    count = np.isnan(rows[:, 0]).sum()
    jtrees.save(model, tmp_path / "model")
    for saved in (model, jtrees.load(tmp_path / "model"), jax.tree.map(np.asarray, model)):
        np.testing.assert_array_equal(saved.medians, medians)
        for convert in (np.asarray, jnp.asarray):
            with pytest.warns(jtrees.tables.ColumnsWarning, match=rf"typical values: 'x0' \({count} rows\)"):
                actual = saved.predict(convert(rows))
            np.testing.assert_array_equal(actual, saved.predict(convert(filled)))
    for pure in (lambda model, x: model.apply(x), lambda model, x: model.predict(x)):  # which cannot warn
        actual, expected = (jax.jit(pure)(model, jnp.asarray(x)) for x in (rows, filled))
        np.testing.assert_array_equal(actual, expected)
    if hasattr(model, "leaf_index"):
        with pytest.warns(jtrees.tables.ColumnsWarning):
            np.testing.assert_array_equal(model.leaf_index(rows), model.leaf_index(filled))


@pytest.mark.parametrize("origin", [False, True])
def test_what_becomes_infinite_in_the_precision_of_the_tree_is_noticed(x64, origin):
    tree, x = draw(4, origin=origin, shift=FAR), samples(300, FAR if origin else 0, np.float64)
    x[7, 2] = 1e300
    for arguments in (x, jnp.asarray(x)):
        with pytest.raises(ValueError, match=r"x, in float32, must be finite, got 1 .* the first at \(7, 2\)"):
            tree.predict(arguments)


@pytest.mark.exact
def test_large_numbers_whose_sums_overflow_are_answered():
    tree, x = draw(4), samples(3)
    x[1] = 3e38
    assert np.array_equal(tree.predict(x)[[0, 2]], tree.predict(x[[0, 2]]))
