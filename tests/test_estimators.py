"""The two scikit-learn estimators. Scikit-learn's own checks: ``test_checks_*.py``."""

import dataclasses
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import joblib
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.ensemble import BaggingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.tree import DecisionTreeRegressor
import sweeps

import jtrees
from jtrees import _estimator, warmstart
from jtrees.estimators import TreeClassifier, TreeRegressor

GET = jtrees.GET(depth=2, starts=1, epochs=30)
DGT = jtrees.DGT(depth=3, epochs=60, widths=())
SHORT = DGT.replace(epochs=2)
DAYS = np.arange(200).astype("M8[D]")
# optax's Adam raises a float to an int32 power, and users have jax's own promotion.
pytestmark = pytest.mark.usefixtures("standard_promotion")

# --- What users do ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def classes():
    """Three classes by name, ``(150, 3)`` and ``(150,)``."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(150, 3))
    return x, np.array(["low", "middle", "high"])[(x[:, 0] + x[:, 1] > -0.7).astype(int) + (x[:, 0] + x[:, 1] > 0.7)]


def test_regressor(data):
    x, y = (a.astype(np.float64) for a in data)
    model = TreeRegressor(DGT.replace(epochs=300), random_state=1).fit(x, y)
    predictions = model.predict(x)
    assert predictions.shape == y.shape and predictions.dtype == np.float64
    assert model.score(x, y) > 0.8
    np.testing.assert_array_equal(predictions, model.tree_.predict(x))
    assert isinstance(model.model_, jtrees.ObliqueTree) and model.report_.ended == "finished"
    assert model.loss_ == pytest.approx(np.square(predictions - y).mean(), rel=1e-5)  # float32 against float64 sums


def test_classifier_of_names(classes):
    x, y = classes
    model = TreeClassifier(GET.replace(epochs=200), random_state=0).fit(x, y)
    chances = model.predict_proba(x)
    assert model.classes_.tolist() == ["high", "low", "middle"]
    np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-12)
    np.testing.assert_array_equal(model.predict(x), model.classes_[chances.argmax(1)])
    assert chances.dtype == np.float64 and model.score(x, y) > 0.9
    np.testing.assert_allclose(np.exp(model.predict_log_proba(x)), chances, rtol=1e-12)


def test_the_logarithm_of_a_probability_of_zero_is_minus_infinity(classes):
    x, y = classes
    model = TreeClassifier(SHORT, random_state=0).fit(x, y, sample_weight=y != "middle")
    assert (model.predict_log_proba(x)[:, 2] == -np.inf).all()


@pytest.mark.slow
def test_several_targets(data):
    x, y = data
    both = np.stack([y, -1e6 * y, np.full_like(y, 0.1), x[:, 0]], axis=1).astype(np.float64)
    model = TreeRegressor(DGT, random_state=0).fit(x, both)
    predictions = model.predict(x)
    assert predictions.shape == both.shape
    assert (predictions[:, 2] == both[:, 2]).all()  # a constant is predicted as it is
    left = np.square(predictions - both).mean(0) / np.maximum(both.var(0), 1e-30)
    assert (left[[0, 1, 3]] < 0.8).all()  # each learnt, whatever its unit
    column, one = (TreeRegressor(SHORT, random_state=0).fit(x, y).predict(x) for y in (y[:, None], y))
    assert column.shape == (len(y), 1)
    np.testing.assert_array_equal(column[:, 0], one)


def test_nothing_varies(classes):
    x, _ = classes
    model = TreeRegressor(DGT).fit(x, np.full(len(x), 0.1))
    assert (model.predict(x) == 0.1).all() and model.get_depth() == 0 and model.get_n_leaves() == 1
    assert model.tree_.to_text() == "-> leaf 0: 0.1"
    assert set(model.apply(x)) == {1} and model.decision_path(x).toarray().tolist() == [[1, 1, 0]] * len(x)
    model = TreeClassifier(DGT).fit(x, ["one"] * len(x))
    assert (model.predict(x) == "one").all() and (model.predict_proba(x) == 1).all()


def test_classes_whose_rows_have_no_weight(classes):
    x, y = classes
    model = TreeClassifier(DGT, random_state=0).fit(x, y, sample_weight=y != "middle")
    assert model.classes_.tolist() == ["high", "low", "middle"]
    assert model.predict_proba(x).shape == (len(x), 3) and (model.predict_proba(x)[:, 2] == 0).all()
    fewer = TreeClassifier(DGT, random_state=0).fit(x[y != "middle"], y[y != "middle"])
    np.testing.assert_array_equal(model.predict(x), fewer.predict(x))


def test_the_tree_of_cart(data):
    x, y = data
    cart = DecisionTreeRegressor(max_depth=3, min_samples_leaf=20, random_state=0).fit(x, y)
    model = TreeRegressor(DGT).fit(x, y)
    model.tree_ = model.model_ = warmstart.from_sklearn(cart)
    assert model.get_depth() == cart.get_depth() and model.get_n_leaves() == cart.get_n_leaves()
    path, ends = model.decision_path(x), model.apply(x)
    assert path.shape == (len(x), 15) and (path[np.arange(len(x)), ends] == 1).all()
    assert (np.unique(ends, return_inverse=True)[1].max() + 1) == cart.get_n_leaves()
    # The same leaves, by other numbers.
    theirs = cart.apply(x)
    assert len(set(zip(ends, theirs, strict=True))) == len(set(theirs))


@pytest.mark.slow
def test_a_forest_is_no_tree(data):
    model = TreeRegressor(jtrees.Bagged(SHORT, trees=2), random_state=0).fit(*data)
    assert model.tree_ is None and isinstance(model.model_, jtrees.Forest)
    with pytest.raises(AttributeError, match="this needs a single tree; this model is a Forest"):
        model.get_depth()


# --- Parameters, and scikit-learn's tools ----------------------------------------------------------------------------


def test_parameters_of_the_recipe():
    model = TreeRegressor(jtrees.Bagged(DGT, trees=2))
    params = model.get_params()
    assert params["recipe__trees"] == 2 and params["recipe__base__depth"] == 3
    model.set_params(recipe__base__depth=5, recipe__trees=4, random_state=1)
    assert model.recipe == jtrees.Bagged(DGT.replace(depth=5), trees=4) and model.random_state == 1
    assert DGT.depth == 3
    assert clone(model).recipe == model.recipe
    assert set(model.get_params(deep=False)) == {
        *("recipe", "random_state", "validation_fraction", "monotonic_cst", "max_seconds", "progress", "loss"),
        *("columns", "missing", "quantile"),
    }
    default = TreeRegressor().set_params(recipe__depth=2)
    assert default.recipe == TreeRegressor()._recipe().replace(depth=2)
    with pytest.raises(ValueError, match=r"options of DGT are .*depth.*got 'deepness'"):
        model.set_params(recipe__base__deepness=3)
    with pytest.raises(ValueError, match="Invalid parameter 'depth'"):
        model.set_params(depth=3)
    assert "Bagged(base=DGT(" in repr(model)


@pytest.mark.slow  # and in an example of the README
def test_grid_search(classes):
    x, y = classes
    search = GridSearchCV(TreeClassifier(DGT, random_state=0), {"recipe__depth": [1, 3]}, cv=3).fit(x, y)
    assert search.best_params_ == {"recipe__depth": 3}
    assert search.best_estimator_.recipe.depth == 3 and search.best_score_ > 0.8


@pytest.mark.slow
def test_five_folds_compile_once(data, count_compilations):
    x, y = (np.tile(a, (3, *[1] * (a.ndim - 1)))[:-1] for a in data)
    x[:, 1] += np.arange(len(x))  # all rows differ
    model = TreeRegressor(SHORT, random_state=0)
    first = count_compilations(lambda: model.fit(x[120:], y[120:]).predict(x[:120]) is None)
    assert first > 0
    assert count_compilations(lambda: cross_val_score(model, x, y, cv=5)) == 0


MODELS = {
    "tree": (TreeRegressor, GET.replace(epochs=2)),
    "linear leaves": (TreeRegressor, GET.replace(epochs=2, leaves="linear")),
    "classifier": (TreeClassifier, SHORT),
    "Boosted": (TreeClassifier, jtrees.Boosted(jtrees.GET(depth=2), rounds=3, patience=None)),
    "LatentTree": (TreeRegressor, jtrees.LatentTree(depth=2, epochs=1)),
    "TEL": (TreeRegressor, jtrees.TEL(depth=2, trees=2, epochs=1)),
    "Refined": (TreeRegressor, jtrees.Refined(jtrees.Boosted(jtrees.GET(depth=2), rounds=3, patience=1), epochs=1)),
    "Polished": (TreeRegressor, jtrees.Polished(GET.replace(epochs=2))),
    "Sparse": (TreeRegressor, jtrees.Sparse(GET.replace(epochs=2), terms=1)),
    "constant": (TreeRegressor, GET),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sweeps.quick(MODELS, ["tree", "Boosted", "constant"]))
@pytest.mark.parametrize("raw", [False, True])
def test_fitted_estimators_hold_numpy_arrays(data, name, raw):
    """A pickle needs no JAX arrays, whose form depends on the version of JAX."""
    kind, recipe = MODELS[name]
    x, y = data
    y = np.ones_like(y) if name == "constant" else y > 0 if kind is TreeClassifier else y
    x = pd.DataFrame(x, columns=[*"abc"]).assign(d=np.resize(["u", "v"], len(x))) if raw else x
    model = kind(recipe, random_state=0).fit(x, y)
    assert b"jax" not in pickle.dumps(model).replace(b"jaxtyping", b"")
    expected = (model.predict_proba if kind is TreeClassifier else model.predict)(x)
    inner, features = (model.model_.model, model.encoder_.transform(x)) if raw else (model.model_, x)
    on_device = jax.jit(lambda model, x: model.apply(x))(inner, jnp.asarray(features, jnp.float32))
    np.testing.assert_allclose(on_device.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


LABELS = {
    "text": lambda y: y,
    "objects": lambda y: y.astype(object),
    "whole numbers": lambda y: np.where(y == "low", -3, 7),
    "numbers": lambda y: np.where(y == "low", 0.0, 1.0),
    "truth values": lambda y: y == "low",
    "list": lambda y: y.tolist(),
    "series": lambda y: pd.Series(y),
    "one class": lambda y: np.full(len(y), "low"),
}


def read_again(model, x, tmp_path):
    """By jtrees.save and by joblib."""
    jtrees.save(model, tmp_path / "it.jtrees")
    joblib.dump(model, tmp_path / "it.joblib")
    again = jtrees.load(tmp_path / "it.jtrees")
    assert type(again) is type(model) and again.get_params() == model.get_params()
    assert set(vars(again)) == set(vars(model)) and again.n_features_in_ == model.n_features_in_
    assert again.loss_ == model.loss_
    np.testing.assert_equal(dataclasses.asdict(again.report_), dataclasses.asdict(model.report_))
    for read in (again, joblib.load(tmp_path / "it.joblib")):
        assert read.recipe == model.recipe
        np.testing.assert_array_equal(read.predict(x), model.predict(x))
    return again


@pytest.mark.slow
@pytest.mark.parametrize("labels", sweeps.quick(LABELS, ["text", "truth values", "one class"]))
def test_a_classifier_saved_and_loaded(classes, labels, tmp_path):
    x, y = classes
    frame = pd.DataFrame(x, columns=["age", "höhe", "size"])
    model = TreeClassifier(SHORT, random_state=0).fit(frame, LABELS[labels](y))
    again = read_again(model, frame, tmp_path)
    np.testing.assert_array_equal(again.predict_proba(frame), model.predict_proba(frame))
    np.testing.assert_array_equal(again.classes_, model.classes_)
    assert again.classes_.dtype == model.classes_.dtype
    assert again.feature_names_in_.tolist() == ["age", "höhe", "size"]
    with pytest.raises(ValueError, match="The feature names should match those that were passed during fit"):
        again.predict(frame[["size", "age", "höhe"]])
    header = jtrees.io.header(tmp_path / "it.jtrees")
    assert header["kind"] == "TreeClassifier" and header["feature_names"] == ["age", "höhe", "size"]
    assert labels == "one class" or header["recipe"]["name"] == "DGT"
    assert clone(again).get_params() == model.get_params()


SAVED = {"default": None, "GET": GET.replace(epochs=2, leaves="linear"), "Bagged": jtrees.Bagged(SHORT, trees=2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", sweeps.quick(SAVED, ["default", "Bagged"], pytest.mark.wide))
def test_a_regressor_saved_and_loaded(data, name, tmp_path, monkeypatch):
    monkeypatch.setattr(TreeRegressor, "default_recipe", SHORT.replace(widths=(3,)))
    x, y = data
    both = np.stack([y, np.full_like(y, 0.1), x[:, 0]], axis=1)
    options = {"random_state": 3, "validation_fraction": 0.25, "max_seconds": 60.0}
    model = TreeRegressor(SAVED[name], **options).fit(x, both)
    again = read_again(model, x, tmp_path)
    assert not hasattr(again, "feature_names_in_")
    np.testing.assert_array_equal(again.fit(x, both).predict(x), model.predict(x))  # it can be fitted again
    if name == "GET":
        np.testing.assert_array_equal(again.apply(x), model.apply(x))
    with pytest.raises(ValueError, match="X has 2 features, but TreeRegressor is expecting 3 features"):
        again.predict(x[:, :2])


def no_recipe(**options):
    return jtrees.methods.get(2, **options)


def test_parts_of_an_estimator_that_cannot_be_saved(data, tmp_path):
    path = tmp_path / "it.jtrees"
    with pytest.raises(ValueError, match=r"what must be fitted to be saved, got TreeRegressor\(\) before its fit"):
        jtrees.save(TreeRegressor(), path)
    alone = r"jtrees.save\(estimator.model_, path\) saves the model alone"
    own = jtrees.FromMethod(make=no_recipe, options={"alpha": 15.0}, epochs=2)
    model = TreeRegressor(own, random_state=0).fit(*data)
    with pytest.raises(ValueError, match=r"^\.recipe\.make cannot be saved: <function no_recipe .*" + alone):
        jtrees.save(model, path)
    jtrees.save(model.model_, path)
    path.unlink()
    model.set_params(recipe=DGT, random_state=np.random.RandomState(0))
    with pytest.raises(ValueError, match=r"^\.random_state cannot be saved: RandomState.*" + alone):
        jtrees.save(model, path)
    with pytest.raises(ValueError, match=r"what must be one of 'ObliqueTree', .* more, got Pipeline"):
        jtrees.save(make_pipeline(model), path)
    with pytest.raises(ValueError, match="feature_names must hold 3 names, one a column, got 1"):
        jtrees.save(model.set_params(random_state=0), path, feature_names=["a"])
    assert not list(tmp_path.iterdir())


def done(code, blocked=False):
    """A process of its own, for which scikit-learn may be missing."""
    code = ("import sys; sys.modules['sklearn'] = None; " if blocked else "") + code
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=not blocked)


MISSING = 'ImportError: estimators need scikit-learn: pip install "jtrees[sklearn]"'


@pytest.mark.slow
def test_without_scikit_learn():
    assert MISSING in done("import jtrees; import jtrees.estimators", blocked=True).stderr


@pytest.mark.wide  # processes of its own
def test_a_saved_estimator_without_scikit_learn(data, tmp_path):
    path = tmp_path / "it.jtrees"
    jtrees.save(TreeRegressor(SHORT, random_state=0).fit(*data), path)
    assert MISSING in done(f"import jtrees; jtrees.load({str(path)!r})", blocked=True).stderr
    assert done(f"import jtrees; print(jtrees.load({str(path)!r}))").stdout.startswith("TreeRegressor(random_state=0")


def objects_and_frame():
    """A table with text, a date, a number with gaps and a constant, and targets."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "size": np.where(rng.random(120) < 0.1, np.nan, rng.normal(size=120)),
            "colour": rng.choice(["red", "blue"], 120),
            "same": 1.0,
            "floor": pd.Series(rng.integers(0, 3, 120)).astype("category"),
            "sold": pd.date_range("2020", periods=120)[rng.permutation(120)],
        }
    )
    return frame, np.where(frame["size"].fillna(0) + 2 * (frame["colour"] == "red") > 1, 1.0, 0.0)


def test_an_array_of_objects_predicts_as_the_frame_it_comes_from():
    """By position, as the tools pass it that turn DataFrames into arrays."""
    frame, y = objects_and_frame()
    with pytest.warns(jtrees.tables.ColumnsWarning, match="'same'"):
        model = TreeRegressor(SHORT, random_state=0).fit(frame, y)
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        found = model.predict(frame.to_numpy(object))
    np.testing.assert_array_equal(found, model.predict(frame))
    with (
        pytest.raises(ValueError, match="X has 4 features, but TreeRegressor is expecting 5"),
        pytest.warns(UserWarning),
    ):
        model.predict(frame.to_numpy(object)[:, :4])


@pytest.mark.slow
def test_an_array_of_objects_is_learnt_as_a_frame():
    frame, y = objects_and_frame()
    frame = frame.drop(columns=["same", "floor"])  # numbers in an array of objects are no levels
    cells = frame.to_numpy(object)
    as_frame, as_cells = (TreeRegressor(SHORT, random_state=0).fit(x, y) for x in (frame, cells))
    np.testing.assert_array_equal(as_cells.predict(cells), as_frame.predict(frame))
    assert not hasattr(as_cells, "feature_names_in_") and as_cells.n_features_in_ == 3
    assert as_cells.get_feature_names_out()[0] == "x0"
    bag = BaggingRegressor(TreeRegressor(SHORT, random_state=0), n_estimators=2, random_state=0).fit(frame, y)
    assert bag.score(frame, y) > 0


def test_text_gaps_and_names_in_a_pipeline():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"size": rng.normal(size=120), "colour": rng.choice(["red", "blue"], 120)})
    y = np.where(frame["size"] + 2 * (frame["colour"] == "red") > 1, "yes", "no")
    frame.loc[::7, "size"] = np.nan
    columns = make_column_transformer((OneHotEncoder(), ["colour"]), (SimpleImputer(add_indicator=True), ["size"]))
    columns.set_output(transform="pandas")
    columns.transformers[0][1].set_params(sparse_output=False)
    model = make_pipeline(columns, TreeClassifier(GET.replace(epochs=100), random_state=0)).fit(frame, y)
    assert model.score(frame, y) > 0.8  # of those without a size half are guessed
    assert list(model[-1].feature_names_in_)[:2] == ["onehotencoder__colour_blue", "onehotencoder__colour_red"]


# --- Options of fit --------------------------------------------------------------------------------------------------


def test_an_error_about_the_validation_set_names_the_class(classes):
    x, y = classes
    rare = np.where(np.arange(len(y)) == 3, "rare", y)
    with pytest.raises(ValueError, match=r"Classes with too few members are: \['rare'\]"):
        TreeClassifier(SHORT, validation_fraction=0.2).fit(x, rare)


@pytest.mark.slow
def test_validation_fraction(classes, monkeypatch):
    given = {}

    def fit(recipe, x, y, **options):
        given.update(options, x=x, y=y)
        return jtrees.fit(recipe, x, y, **options)

    monkeypatch.setattr(_estimator, "fit", fit)
    x, y = classes
    TreeClassifier(SHORT, random_state=0, validation_fraction=0.2, max_seconds=100).fit(x, y)
    held, labels = given["validation"]
    assert len(held) == 30 and len(given["x"]) == 120 and given["max_seconds"] == 100
    together = np.concatenate([held, given["x"]])
    np.testing.assert_array_equal(together[np.lexsort(together.T)], x[np.lexsort(x.T)])
    share = lambda y: np.unique(y, return_counts=True)[1] / len(y)
    np.testing.assert_allclose(share(labels), share(given["y"]), atol=0.04)  # stratified: but for a row of 30


def test_progress(data, capsys):
    TreeRegressor(SHORT).fit(*data)
    assert capsys.readouterr().out == ""
    TreeRegressor(SHORT, progress=True).fit(*data)
    assert "DGT: 2 of 2, loss " in capsys.readouterr().out


def test_interrupted(data, monkeypatch):
    def fit(*args, **options):
        result = jtrees.fit(*args, **options)
        return result.replace(report=result.report.replace(ended="interrupted"))

    monkeypatch.setattr(_estimator, "fit", fit)
    with pytest.warns(ConvergenceWarning, match="interrupted"):
        model = TreeRegressor(SHORT).fit(*data)
    assert np.isfinite(model.predict(data[0])).all()


@pytest.mark.slow
def test_losses_by_name(data):
    x, y = (a.astype(np.float64) for a in data)
    y = y - y.min()
    task = jtrees.Regression(loss_function="poisson")
    model = TreeRegressor(GET, loss="poisson", random_state=0).fit(x, y)
    key = jax.random.key(int(np.random.RandomState(0).randint(np.iinfo(np.int32).max)))
    np.testing.assert_array_equal(model.predict(x), jtrees.fit(GET, x, y, key=key, task=task).predict(x))
    assert clone(model).get_params()["loss"] == "poisson"
    assert TreeRegressor(loss="gamma").get_params()["recipe__leaves"] == "constant"  # of the default recipe
    both = TreeRegressor(GET, loss="quantile", quantile=(0.1, 0.9), random_state=0).fit(x, y)
    low, high = both.predict(x).T
    assert (low <= high).all() and (low < high).any()
    same = TreeRegressor(GET, loss=jtrees.losses.Quantile((0.1, 0.9)), random_state=0).fit(x, y)
    np.testing.assert_array_equal(same.predict(x), both.predict(x))
    one = TreeRegressor(GET, loss="quantile", quantile=0.9, random_state=0).fit(x, y)
    assert one.predict(x).shape == y.shape and np.mean(y <= one.predict(x)) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "cubic"}, "loss must be one of 'squared_error', 'absolute_error'"),
        ({"quantile": 0.9}, "quantile must be None unless loss is \"quantile\", got loss='squared_error'"),
        ({"loss": "quantile", "quantile": 1}, "levels must be above 0 and below 1, got 1"),
        ({"loss": "poisson"}, r"y must be at least 0 for Poisson\(\), got .* in row \d+"),
    ],
)
def test_losses_that_do_not_fit_are_refused(data, options, message):
    with pytest.raises(ValueError, match=message):
        TreeRegressor(GET, **options).fit(*data)


def test_random_state(data):
    """A generator goes on: two fits with it differ, as everywhere in scikit-learn."""
    x, y = data
    generator = np.random.RandomState(1)
    seeds = (1, 1, 2, generator, generator)
    one, same, other, first, second = (TreeRegressor(SHORT, random_state=seed).fit(x, y).predict(x) for seed in seeds)
    assert (one == same).all() and (one != other).any()
    assert (first == one).all() and (second != first).any()
    fits = [TreeRegressor(SHORT, random_state=np.random.default_rng(5)) for _ in range(2)]
    drawn = [[model.fit(x, y).predict(x) for _ in range(2)] for model in fits]
    np.testing.assert_array_equal(*drawn)
    assert (drawn[0][0] != drawn[0][1]).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": jtrees.LatentClustering()}, "recipe must learn from y, got LatentClustering"),
        (
            {"recipe": jtrees.Bagged(jtrees.LatentClustering())},
            r"recipe must learn from y, got Bagged\(base=LatentClustering",
        ),
        ({"recipe": "get"}, "recipe must be a recipe, such as .*got 'get'"),
        ({"recipe": DGT.replace(depth=0)}, "depth must be from 1 to 16, got 0"),
        ({"max_seconds": [1.0]}, r"max_seconds must be one number above 0, got \[1\.0\]"),
        ({"sample_weight": [-1] * 200}, "sample_weight must not be negative"),
        ({"sample_weight": [0] * 200}, "sample_weight must not be zero everywhere"),
        ({"sample_weight": DAYS}, r"sample_weight must be numeric, got values of type datetime64\[D\]"),
        ({"X": np.full((200, 2), "a")}, "could not convert string to float"),
        (
            {"X": np.full((200, 2), np.nan)},
            "x must have a column to learn from, got 'x0' .without values., 'x1' .without values.",
        ),
        ({"X": np.stack([DAYS, DAYS], 1)}, r"X must be numeric, got .* type datetime64\[D\]: make numbers of dates"),
        ({"y": np.arange(200).astype("m8[s]")}, r"y must be numeric, got .* type timedelta64\[s\]: make numbers of"),
        ({"y": np.full(200, "a")}, "y must be numeric, got values of type <U1: for labels take task="),
    ],
)
def test_refused(data, change, message):
    given = {"X": data[0], "y": data[1], "recipe": DGT} | change
    own = {name: given.pop(name) for name in ("recipe", "max_seconds") if name in given}
    with pytest.raises(ValueError, match=message):
        TreeRegressor(**own).fit(**given)


FRAME = pd.DataFrame({"area": np.arange(60.0), "heating": ["gas", "wood"] * 30})


@pytest.mark.parametrize(
    ("heating", "message"),
    [
        (FRAME["heating"], "'gas' in column 'heating': encode text, such as by a OneHotEncoder"),
        (pd.Categorical(FRAME["heating"]), "'gas' in column 'heating': encode"),
        (pd.date_range("2020", periods=60, tz="UTC"), "Timestamp.* in column 'heat"),
        (pd.to_timedelta(np.arange(60), "s"), "Timedelta.* in column 'heating': "),
        (pd.period_range("2020", periods=60), "Period.* in column 'heating': make"),
    ],
)
def test_a_model_of_an_array_names_a_column_that_is_not_numeric(heating, message):
    x = FRAME.assign(heating=heating)
    model = TreeRegressor(SHORT, random_state=0).fit(np.random.default_rng(0).normal(size=(60, 2)), np.arange(60) % 7)
    with pytest.raises(ValueError, match=f"X must be numeric, got {message}"):
        model.predict(x)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "y must hold labels of one type, got None in row 3: leave rows without a label out"),
        (np.nan, "y must hold labels of one type, got nan in row 3: leave rows without a label out"),
        (pd.NA, "y must hold labels of one type, got <NA> in row 3: leave rows without a label out"),
        (1, r"y must hold labels of one type, got 'high' and 1 \(in row 3\): make labels one type"),
        (b"low", r"y must hold labels of one type, got 'high' and b'low' \(in row 3\): make labels one type"),
    ],
)
def test_labels_that_are_missing_or_mixed(classes, label, message):
    x, y = classes
    labels = y.astype(object)
    labels[:3], labels[3] = "high", label
    for given in (labels, labels.tolist(), pd.Series(labels, dtype=object)):
        with pytest.raises(ValueError, match=message):
            TreeClassifier(DGT).fit(x, given)


def test_labels_that_are_objects(classes):
    """Numbers and truth values in a column that once had gaps."""
    x, y = classes
    for labels in ((y == "low").astype(object), (y == "low").astype(int).astype(object)):
        model = TreeClassifier(SHORT, random_state=0).fit(x, labels)
        assert model.classes_.tolist() == [0, 1] and model.classes_.dtype.kind in "bi"


@pytest.mark.parametrize("kind", [TreeRegressor, TreeClassifier])
def test_masked_values_are_refused(classes, kind):
    x, y = classes
    y = y if kind is TreeClassifier else x[:, 0]
    hidden = np.ma.masked_greater(x, 1)
    model = kind(SHORT, random_state=0)
    with pytest.raises(ValueError, match="X must have no masked values, got"):
        model.fit(hidden, y)
    with pytest.raises(ValueError, match="y must have no masked values, got 1, the first at"):
        model.fit(x, np.ma.masked_array(y, np.arange(len(y)) == 7))
    with pytest.raises(ValueError, match="sample_weight must have no masked values, got"):
        model.fit(x, y, sample_weight=np.ma.masked_less(np.arange(len(y)), 3))
    model.fit(x, y)
    with pytest.raises(ValueError, match="X must have no masked values, got"):
        model.predict(hidden)


def test_labels_that_differ_in_spaces_alone_are_warned_of():
    x = np.linspace(-1, 1, 40)[:, None]
    with pytest.warns(UserWarning, match="y has labels that differ only in spaces: 'Yes', 'Yes '"):
        model = TreeClassifier(DGT, random_state=0).fit(x, np.resize(["No", "Yes", "Yes "], 40))
    assert model.classes_.tolist() == ["No", "Yes", "Yes "]


# --- Constant targets ------------------------------------------------------------------------------------------------

_CONSTANT_RECIPE = jtrees.GET(depth=1, starts=1, epochs=5, halving=False)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, ()),
        ({"loss": "poisson"}, ()),
        ({"loss": "quantile", "quantile": 0.9}, ()),
        ({"loss": "quantile", "quantile": (0.5,)}, (1,)),
        ({"loss": "quantile", "quantile": (0.1, 0.9)}, (2,)),
    ],
)
def test_constant_targets_are_predicted_in_the_shape_of_the_loss(options, shape):
    x = np.random.default_rng(0).normal(size=(30, 2))
    weight = np.r_[np.ones(10), np.zeros(20)]
    model = TreeRegressor(_CONSTANT_RECIPE, **options)
    for y, weights in ((np.full(30, 3.1), None), (np.where(weight > 0, 3.1, 7), weight)):
        found = model.fit(x, y, weights).predict(x)
        assert found.shape == (30, *shape) and (found == 3.1).all()


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (np.full(30, -1.0), {"loss": "poisson"}, "y must be at least 0 for Poisson.*-1.0 in row 0"),
        (np.zeros(30), {"loss": "poisson"}, "y must not be 0 in every row"),
        (np.zeros(30), {"loss": "gamma"}, "y must be above 0"),
        (np.ones(30), {"loss": "other"}, "loss must be one of"),
        (np.ones(30), {"quantile": 0.5}, "quantile must be None"),
        (np.column_stack([np.arange(30.0), np.full(30, -1)]), {"loss": "poisson"}, "y must be at least 0"),
        (np.column_stack([np.arange(30.0), np.ones(30)]), {"loss": "huber"}, "loss must be of one target"),
        (
            np.column_stack([np.arange(30.0), np.ones(30)]),
            {"loss": "quantile", "quantile": (0.1, 0.9)},
            "outputs must be None",
        ),
    ],
)
def test_constant_targets_pass_the_checks_of_the_loss(y, options, message):
    x = np.random.default_rng(0).normal(size=(30, 2))
    with pytest.raises(ValueError, match=message):
        TreeRegressor(_CONSTANT_RECIPE, **options).fit(x, y)


def test_default_classifier_takes_few_rows():
    x = np.arange(8.0)[:, None]
    model = TreeClassifier(random_state=0).fit(x, x[:, 0] > 3)
    assert len(model.model_) == 10 and model.predict_proba(x).shape == (8, 2)


# --- Importances, class weights and groups ---------------------------------------------------------------------------

SMALL_DGT = jtrees.DGT(depth=3, epochs=20, widths=(), precondition=0)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [SMALL_DGT, jtrees.Boosted(rounds=10, patience=None)], ids=["tree", "forest"])
def test_importances_have_the_order_of_the_effects(recipe):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 5))
    y = 3 * x[:, 3] + 2 * x[:, 0] + x[:, 4]
    model = TreeRegressor(recipe, random_state=0).fit(x, y)
    importances = model.feature_importances_
    assert importances.shape == (5,) and importances.sum() == pytest.approx(1)
    assert np.argsort(-importances)[:3].tolist() == [3, 0, 4]
    np.testing.assert_array_equal(importances, model.feature_importances_)


def test_importances_of_a_raw_table_are_by_column_and_are_saved(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=200), "kind": rng.choice(list("xyz"), 200), "b": rng.normal(size=200)})
    frame.loc[::7, "b"] = np.nan
    model = TreeClassifier(SMALL_DGT, random_state=0).fit(frame, frame["kind"] == "x")
    assert model.feature_importances_.argmax() == 1 and model.feature_importances_[1] > 0.8
    jtrees.save(model, tmp_path / "model.jtrees")
    loaded = jtrees.load(tmp_path / "model.jtrees")
    np.testing.assert_array_equal(loaded.feature_importances_, model.feature_importances_)
    constant = TreeRegressor(SMALL_DGT).fit(frame, np.ones(200))
    assert constant.feature_importances_.tolist() == [0, 0, 0]


def test_importances_of_a_model_are_those_of_its_estimator():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 3))
    model = TreeRegressor(SMALL_DGT, random_state=0).fit(x, x[:, 0] + 0.5 * x[:, 1])
    with pytest.raises(ValueError, match=r"model must be a fitted model, got .*: pass its attribute model_"):
        jtrees.explain.importances(model, x)
    importances = jtrees.explain.importances(model.model_, x)
    assert list(importances) == ["x0", "x1", "x2"]
    np.testing.assert_allclose(list(importances.values()), model.feature_importances_, atol=0.05)  # other shuffles


def test_class_weights_are_factors_of_the_sample_weights():
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(300, 2)), rng.uniform(0.5, 2, 300)
    y = np.where(x[:, 0] + rng.normal(size=300) > 1, "rare", "usual")
    fit = lambda weight, **options: TreeClassifier(SMALL_DGT, random_state=0, **options).fit(x, y, weight)
    factors = {"rare": 3.0, "usual": 1.0}
    expected = fit(weight * np.where(y == "rare", 3.0, 1.0)).predict_proba(x)
    np.testing.assert_array_equal(fit(weight, class_weight=factors).predict_proba(x), expected)
    balanced = fit(None, class_weight="balanced").predict_proba(x)[:, 0].mean()
    assert balanced > fit(None).predict_proba(x)[:, 0].mean() + 0.1
    for wrong in ("even", {"rare": -1.0, "usual": 1.0}, {"rare": 0.0, "usual": 0.0}, {"rare": np.nan, "usual": 1.0}):
        with pytest.raises(ValueError, match="class_weight"):
            fit(None, class_weight=wrong)


def test_groups_are_not_divided(monkeypatch):
    rng = np.random.default_rng(0)
    x, groups = rng.normal(size=(120, 2)), np.repeat(np.arange(30), 4)
    x[:, 1] = groups
    fitted = {}

    def fit(recipe, x, y, *, validation, **options):
        fitted["training"], fitted["held out"] = set(x[:, 1]), set(validation[0][:, 1])
        return jtrees.fit(recipe, x, y, validation=validation, **options)

    monkeypatch.setattr("jtrees._estimator.fit", fit)
    model = TreeRegressor(SMALL_DGT, random_state=0, validation_fraction=0.2)
    model.fit(x, x[:, 0], validation_groups=[f"patient {group}" for group in groups])
    assert len(fitted["held out"]) == 6 and len(fitted["training"]) == 24
    model.fit(x, x[:, 0])
    assert fitted["training"] & fitted["held out"]
    with pytest.raises(ValueError, match=r"validation_groups must be one label a row, \(120,\), got shape \(3,\)"):
        model.fit(x, x[:, 0], validation_groups=[1, 2, 3])
    with pytest.raises(ValueError, match="validation_groups must hold at least two groups"):
        model.fit(x, x[:, 0], validation_groups=np.ones(120))
    with pytest.raises(ValueError, match="validation_groups needs validation_fraction, got None"):
        TreeRegressor(SMALL_DGT).fit(x, x[:, 0], validation_groups=groups)


def test_a_class_in_a_single_group_is_a_training_class():
    rng = np.random.default_rng(0)
    x, groups = rng.normal(size=(60, 2)), np.repeat(np.arange(15), 4)
    labels = np.where(groups == 3, "z", np.where(x[:, 0] > 0, "a", "b"))
    for seed in range(6):
        model = TreeClassifier(SMALL_DGT, random_state=seed, validation_fraction=0.3)
        assert model.fit(x, labels, validation_groups=groups).classes_.tolist() == ["a", "b", "z"]
    with pytest.raises(ValueError, match="validation_groups must leave training rows of every class"):
        model.fit(x, np.where(groups % 2, "a", "b"), validation_groups=groups % 2)


def test_files_and_pickles_hold_importances_and_no_training_rows(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 4)) + 0.123456789
    y = np.where(x[:, 0] > 0, "high", "low")
    model = TreeClassifier(SMALL_DGT, random_state=0, class_weight=dict(zip(np.unique(y), (1.0, 2.0), strict=True)))
    model.fit(x, y)
    copy = pickle.loads(pickle.dumps(model))
    jtrees.save(model, tmp_path / "model.jtrees")
    loaded = jtrees.load(tmp_path / "model.jtrees")
    for other in (copy, loaded):
        np.testing.assert_array_equal(other.feature_importances_, model.feature_importances_)
        assert other.class_weight == {"high": 1.0, "low": 2.0}
    assert (tmp_path / "model.jtrees").stat().st_size < 20_000 and len(pickle.dumps(model)) < 20_000
