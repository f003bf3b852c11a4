"""The scikit-learn estimators. Scikit-learn's own checks: ``test_checks.py``."""

import dataclasses
import datetime
from decimal import Decimal
import enum
import pickle
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.tree import DecisionTreeRegressor
from sklearn.utils import check_random_state

import jtrees
from jtrees import warmstart
from jtrees.estimators import BoostedClassifier, BoostedRegressor, TreeClassifier, TreeRegressor
from tests import recipes, sweeps, tables

# optax's Adam raises a float to an int32 power, and users have jax's own promotion.
pytestmark = pytest.mark.usefixtures("standard_promotion")
DGT, GET = recipes.DGT, recipes.GET
X, Y = tables.X, tables.Y
LABELS = np.array(["low", "middle", "high"])[tables.CLASSES]
DAYS = np.arange(400).astype("M8[D]")


def regressor(recipe=DGT, **options):
    return TreeRegressor(recipe, random_state=0, **options)


def classifier(recipe=DGT, **options):
    return TreeClassifier(recipe, random_state=0, **options)


def test_regressor():
    model = regressor(GET).fit(X, Y)
    predictions = model.predict(X)
    assert predictions.shape == Y.shape and predictions.dtype == np.float64 and model.score(X, Y) > 0.4
    np.testing.assert_array_equal(predictions, model.tree_.predict(X))
    assert isinstance(model.model_, jtrees.ObliqueTree) and model.report_.ended == "finished"
    assert model.loss_ == pytest.approx(np.square(predictions - Y).mean(), rel=1e-5)  # float32 against float64 sums
    column = regressor(GET).fit(X, Y[:, None]).predict(X)
    np.testing.assert_array_equal(column, predictions[:, None])
    assert (regressor().fit(X, np.stack([Y, np.full(400, 0.1)], 1)).predict(X)[:, 1] == 0.1).all()  # as it is


def test_classifier_of_names():
    model = classifier(GET).fit(X, LABELS)
    chances = model.predict_proba(X)
    assert model.classes_.tolist() == ["high", "low", "middle"]
    np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-12)
    np.testing.assert_array_equal(model.predict(X), model.classes_[chances.argmax(1)])
    assert chances.dtype == np.float64 and model.score(X, LABELS) > 0.7
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), chances, rtol=1e-12)


def test_nothing_varies():
    model = TreeRegressor(DGT).fit(X, np.full(400, 0.1))
    assert (model.predict(X) == 0.1).all() and model.get_depth() == 0 and model.get_n_leaves() == 1
    assert model.tree_.to_text() == "-> leaf 0: 0.1" and model.feature_importances_.tolist() == [0, 0, 0, 0]
    assert set(model.apply(X)) == {1} and model.decision_path(X).toarray().tolist() == [[1, 1, 0]] * 400
    model = TreeClassifier(DGT).fit(X, ["one"] * 400)
    assert (model.predict(X) == "one").all() and (model.predict_proba(X) == 1).all()
    frame = TreeRegressor(DGT).fit(tables.frame(), np.ones(400))
    assert (frame.predict(tables.frame()) == 1).all() and frame.encoder_.feature_names


def test_the_tree_of_cart():
    cart = DecisionTreeRegressor(max_depth=3, min_samples_leaf=20, random_state=0).fit(X, Y)
    model = TreeRegressor(DGT).fit(X, np.ones(400))
    model.tree_ = model.model_ = warmstart.from_sklearn(cart)
    assert model.get_depth() == cart.get_depth() and model.get_n_leaves() == cart.get_n_leaves()
    path, ends, theirs = model.decision_path(X), model.apply(X), cart.apply(X)
    assert path.shape == (400, 15) and (path[np.arange(400), ends] == 1).all()
    # The same leaves, by other numbers.
    assert len(set(zip(ends, theirs, strict=True))) == len(set(theirs)) == len(set(ends)) == cart.get_n_leaves()


def test_random_state():
    """A generator goes on: two fits with it differ, as everywhere in scikit-learn."""
    generator = np.random.RandomState(1)
    seeds = (1, 1, 2, generator, generator, np.random.default_rng(5), np.random.default_rng(5))
    fits = [TreeRegressor(DGT, random_state=seed).fit(X, Y).predict(X) for seed in seeds]
    for i, j, equal in ((0, 1, True), (0, 2, False), (0, 3, True), (3, 4, False), (5, 6, True)):
        assert (fits[i] == fits[j]).all() == equal


def test_parameters_of_the_recipe():
    model = TreeRegressor(jtrees.Bagged(DGT, trees=2))
    assert model.get_params()["recipe__trees"] == 2 and model.get_params()["recipe__base__depth"] == 2
    model.set_params(recipe__base__depth=5, recipe__trees=4, random_state=1)
    assert model.recipe == jtrees.Bagged(DGT.replace(depth=5), trees=4) and model.random_state == 1
    assert DGT.depth == 2 and clone(model).recipe == model.recipe
    assert TreeRegressor().set_params(recipe__depth=7).get_params()["recipe__depth"] == 7
    with pytest.raises(ValueError, match=r"options of DGT are .*depth.*got 'deepness'"):
        model.set_params(recipe__base__deepness=3)
    with pytest.raises(ValueError, match="Invalid parameter 'depth'"):
        model.set_params(depth=3)
    assert "Bagged(base=DGT(" in repr(model)


@pytest.mark.slow
def test_folds_compile_once(count_compilations):
    x, y = np.tile(X, (2, 1))[:-1], np.tile(Y, 2)[:-1]
    x[:, 1] += np.arange(len(x))  # all rows differ
    assert count_compilations(lambda: regressor().fit(x[160:], y[160:]).predict(x[:160]) is None) > 0
    assert count_compilations(lambda: cross_val_score(regressor(), x, y, cv=5)) == 0


@pytest.mark.slow
def test_an_estimator_is_the_fit_with_the_key_of_its_seed_to_the_rows_that_have_weight():
    weight = np.arange(len(X)) % 4.0
    rows, key = weight > 0, jax.random.key(int(check_random_state(0).randint(np.iinfo(np.int32).max)))
    fit = jtrees.fit(DGT, X[rows], Y[rows], key=key, sample_weight=weight[rows])
    estimator = regressor().fit(X, Y, sample_weight=weight)
    np.testing.assert_array_equal(estimator.predict(X), fit.predict(X))
    assert estimator.loss_ == fit.loss


@pytest.mark.parametrize("later", [{"monotonic_cst": [1, 0, 0, 0]}, {"loss": "quantile", "quantile": 0.9}], ids=str)
def test_options_of_the_default_recipe_and_parameters_are_set_in_any_order(later):
    """The default recipe has constant leaves for other losses and for monotone columns."""
    options = {"recipe__depth": 1, "recipe__starts": 1, "recipe__epochs": 2}
    first, last = TreeRegressor(random_state=0), TreeRegressor(random_state=0)
    first.set_params(**options).set_params(**later)
    last.set_params(**later).set_params(**options)
    x, y = X[:60], np.abs(Y[:60]) + 0.1
    predictions = [model.fit(x, y).predict(x) for model in (first, clone(first), last)]
    assert first.tree_.depth == 1 and first.tree_.leaves.is_constant
    np.testing.assert_array_equal(predictions, predictions[:1] * 3)
    assert clone(first).get_params()["recipe__depth"] == 1
    classes = BoostedClassifier(random_state=0).set_params(recipe__base__depth=1)  # the default recipe for few rows
    assert classes.fit([[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1]).predict([[0.0], [3.0]]).tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"options of GET are .*, got 'deepness'"):
        TreeRegressor({"deepness": 3}).fit(x, y)


# Without the recipe that learns without targets, and the recipe that holds a function.
PICKLED = [name for name in recipes.RECIPES if name not in ("LatentClustering", "FromMethod")]


@pytest.mark.slow
@pytest.mark.parametrize("name", sweeps.quick(["constant", *PICKLED], ["GET", "Boosted", "constant"], []))
@pytest.mark.parametrize("raw", [False, True])
def test_fitted_estimators_hold_numpy_arrays(name, raw):
    """A pickle needs no JAX arrays, whose form depends on the version of JAX."""
    x = pd.DataFrame(X, columns=[*"abcd"]).assign(e=np.resize(["u", "v"], 400)) if raw else X
    is_classifier = name in ("DGT", "Boosted")
    y = np.ones(400) if name == "constant" else tables.BINARY if is_classifier else Y
    model = (classifier if is_classifier else regressor)(recipes.RECIPES.get(name, GET)).fit(x, y)
    assert b"jax" not in pickle.dumps(model).replace(b"jaxtyping", b"")
    expected = (model.predict_proba if is_classifier else model.predict)(x)
    inner, features = (model.model_.model, model.encoder_.transform(x)) if raw else (model.model_, x)
    on_device = jax.jit(lambda model, x: model.apply(x))(inner, jnp.asarray(features, jnp.float32))
    np.testing.assert_allclose(on_device.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


def read_again(model, x, tmp_path):
    """By jtrees.save and by joblib, with importances instead of training rows."""
    assert X[0].tobytes() not in pickle.dumps(model)
    jtrees.save(model, tmp_path / "it.jtrees")
    joblib.dump(model, tmp_path / "it.joblib")
    reloaded = jtrees.load(tmp_path / "it.jtrees")
    assert type(reloaded) is type(model) and reloaded.get_params() == clone(reloaded).get_params() == model.get_params()
    assert set(vars(reloaded)) == set(vars(model)) and reloaded.n_features_in_ == model.n_features_in_
    np.testing.assert_equal(dataclasses.asdict(reloaded.report_), dataclasses.asdict(model.report_))
    for read in (reloaded, joblib.load(tmp_path / "it.joblib")):
        assert read.recipe == model.recipe
        np.testing.assert_array_equal(read.feature_importances_, model.feature_importances_)
        np.testing.assert_array_equal(read.predict(x), model.predict(x))
    return reloaded


FORMS = {
    "text": lambda y: y,
    "whole numbers": lambda y: np.where(y == "low", -3, 7),
    "truth values": lambda y: y == "low",
    "objects of truth values": lambda y: (y == "low").astype(object),  # a column that once had gaps
    "one class": lambda y: np.full(len(y), "low"),
}


@pytest.mark.parametrize("form", sweeps.quick(FORMS, ["truth values"]))
def test_a_classifier_saved_and_loaded(form, tmp_path):
    frame = pd.DataFrame(X, columns=["age", "höhe", "size", "weight"])
    model = classifier().fit(frame, FORMS[form](LABELS))
    reloaded = read_again(model, frame, tmp_path)
    np.testing.assert_array_equal(reloaded.predict_proba(frame), model.predict_proba(frame))
    assert reloaded.classes_.tolist() == model.classes_.tolist() and reloaded.classes_.dtype == model.classes_.dtype
    assert "truth" not in form or reloaded.classes_.dtype.kind == "b"
    assert reloaded.feature_names_in_.tolist() == [*frame]
    with pytest.raises(ValueError, match="The feature names should match those that were passed during fit"):
        reloaded.predict(frame[["size", "age", "höhe", "weight"]])
    header = jtrees.io.header(tmp_path / "it.jtrees")
    assert header["kind"] == "TreeClassifier" and header["feature_names"] == [*frame]
    assert form == "one class" or header["recipe"]["name"] == "DGT"


@pytest.mark.parametrize(
    ("tree", "boosted", "y"),
    [
        pytest.param(TreeRegressor, BoostedRegressor, Y, marks=pytest.mark.slow),
        (TreeClassifier, BoostedClassifier, LABELS),
    ],
)
def test_names_say_whether_the_default_is_one_tree_or_a_sum(tree, boosted, y, tmp_path):
    task = jtrees.Regression() if tree is TreeRegressor else jtrees.Classification(3)
    assert tree.default_recipe.tree_leaves(task) is not None and boosted.default_recipe == jtrees.Boosted()
    assert tree().get_params(deep=False) == boosted().get_params(deep=False)
    assert (
        issubclass(boosted, BoostedClassifier)
        or boosted(loss="gamma").get_params()["recipe__rounds"] == jtrees.Boosted().rounds
    )
    frame = pd.DataFrame(X, columns=[*"abcd"])
    options = {"rounds": 3, "patience": None, "base__depth": 1, "base__epochs": 2}
    model = boosted(options, random_state=0).fit(frame, y)
    assert model.tree_ is None and len(model.model_.model) == 3 and model.score(frame, y) > 0
    with pytest.raises(AttributeError, match=r"this needs a single tree; this model is a FrameModel\(Forest"):
        model.get_depth()
    reloaded = read_again(model, frame, tmp_path)
    np.testing.assert_array_equal(reloaded.fit(frame, y).predict(frame), model.predict(frame))  # it can be fitted again
    assert jtrees.io.header(tmp_path / "it.jtrees")["kind"] == boosted.__name__


def test_parts_of_an_estimator_that_cannot_be_saved(tmp_path):
    path, model = tmp_path / "it.jtrees", regressor().fit(X, Y)
    alone = r"jtrees.save\(estimator.model_, path\) saves the model alone"
    custom = clone(model).set_params(recipe=recipes.RECIPES["FromMethod"].replace(make=lambda **options: None))
    custom.__dict__ |= {name: value for name, value in vars(model).items() if name.endswith("_")}
    seeded = pickle.loads(pickle.dumps(model)).set_params(random_state=np.random.RandomState(0))
    for subject, options, message in (
        (TreeRegressor(), {}, r"what must be fitted to be saved, got TreeRegressor\(\) before its fit"),
        (custom, {}, r"^\.recipe\.make cannot be saved: <function .*" + alone),
        (seeded, {}, r"^\.random_state cannot be saved: RandomState.*" + alone),
        (model, {"feature_names": ["a"]}, "feature_names must hold 4 names, one a column, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            jtrees.save(subject, path, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # a process of its own
def test_without_scikit_learn(tmp_path):
    path = tmp_path / "it.jtrees"
    jtrees.save(regressor().fit(X, Y), path)
    code = f"import sys; sys.modules['sklearn'] = None; import jtrees; jtrees.load({str(path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert 'ImportError: estimators need scikit-learn: pip install "jtrees[sklearn]"' in done.stderr


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_an_array_of_objects_predicts_as_the_frame_it_comes_from():
    """Some tools turn DataFrames into arrays. Columns are then found by position."""
    frame = tables.frame().assign(same=1.0, floor=pd.Series(np.arange(400) % 3).astype("category"))
    with pytest.warns(jtrees.tables.ColumnsWarning, match="'same'"):
        model = regressor().fit(frame, Y)
    np.testing.assert_array_equal(model.predict(frame.to_numpy(object)), model.predict(frame))
    importances = model.feature_importances_
    assert importances.shape == (7,) and importances.sum() == pytest.approx(1) and importances.argmax() == 0
    assert list(model.get_feature_names_out()) == model.encoder_.feature_names
    with pytest.raises(ValueError, match="X has 4 features, but TreeRegressor is expecting 7"):
        model.predict(frame.to_numpy(object)[:, :4])


@pytest.mark.filterwarnings("ignore")  # of polars, of the names of a lazy table
def test_a_lazy_table_is_refused_by_fit_and_predict_alike():
    table = pl.DataFrame({"a": np.arange(40.0), "b": ["u", "v"] * 20})
    model = regressor().fit(table, np.zeros(40))
    for call in (model.predict, lambda lazy: model.fit(lazy, np.zeros(40))):
        with pytest.raises(ValueError, match="x must be an array or a DataFrame in memory, got LazyFrame"):
            call(table.lazy())


@pytest.mark.parametrize("constant", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_estimators_fill_gaps_that_the_training_array_did_not_have(constant, tmp_path):
    """They say that they allow NaN."""
    new = X.copy()
    new[[1, 4], 1], new[2, 2] = np.nan, np.nan
    filled = np.where(np.isnan(new), np.median(X, axis=0), new)
    model = classifier(recipes.CO2).fit(X, np.ones(400, int) if constant else tables.BINARY)
    assert model.__sklearn_tags__().input_tags.allow_nan
    jtrees.save(model, tmp_path / "model")
    for fitted_model in (model, jtrees.load(tmp_path / "model")):
        with pytest.warns(jtrees.tables.ColumnsWarning, match=r"typical values: 'x1' \(2 rows\), 'x2' \(1 row\)"):
            actual = fitted_model.predict(new)
        np.testing.assert_array_equal(actual, model.predict(filled))
        with pytest.warns(jtrees.tables.ColumnsWarning, match=r"typical values: 'x1' \(2 rows\), 'x2' \(1 row\)"):
            actual = fitted_model.model_.predict(new)
        np.testing.assert_array_equal(actual, model.model_.predict(filled))
    new[:10, 1] = np.nan
    model.fit(new, np.ones(400, int))
    assert list(model.get_feature_names_out()) == ["x0", "x1", "[x1 missing]", "x2", "x3"]


def test_validation_fraction(monkeypatch):
    problems, search = [], jtrees.DGT.search
    recording = lambda self, problem: (problems.append(problem), search(self, problem))[1]
    monkeypatch.setattr(jtrees.DGT, "search", recording)
    classifier(validation_fraction=0.2, max_seconds=100).fit(X, LABELS)
    training, held_out = problems[0].data.table, problems[0].data.validation
    assert len(held_out.x) == 80 and len(training.x) == 320 and 50 < problems[0].monitor.left() <= 100
    np.testing.assert_allclose(np.bincount(held_out.y), np.unique(LABELS, return_counts=True)[1] / 5, atol=1)
    together = np.concatenate([held_out.x, training.x])
    np.testing.assert_array_equal(together[np.lexsort(together.T)], X[np.lexsort(X.T)])
    rare = np.where(np.arange(400) == 3, "rare", LABELS)
    with pytest.raises(ValueError, match=r"Classes with too few members are: \['rare'\]"):
        classifier(validation_fraction=0.2).fit(X, rare)


def test_progress_is_shown_on_request(capsys):
    regressor().fit(X, Y)
    assert capsys.readouterr().out == ""
    regressor(progress=True).fit(X, Y)
    assert "DGT: 16 of 16, loss " in capsys.readouterr().out


def test_an_interrupted_fit_warns(monkeypatch):
    search = jtrees.DGT.search

    async def interrupted(self, problem):
        signal.raise_signal(signal.SIGINT)
        return await search(self, problem)

    monkeypatch.setattr(jtrees.DGT, "search", interrupted)
    with pytest.warns(ConvergenceWarning, match="interrupted"):
        model = regressor().fit(X, Y)
    assert np.isfinite(model.predict(X)).all()


def test_a_class_weight_of_labels_that_are_numbers_is_saved(tmp_path):
    model = classifier(class_weight={0.0: 2.0, np.float32(1): 1.0}).fit(X, np.where(LABELS == "low", 0.0, 1.0))
    jtrees.save(model, tmp_path / "it.jtrees")
    assert jtrees.load(tmp_path / "it.jtrees").class_weight == {0.0: 2.0, 1.0: 1.0}


def test_class_weights_are_factors_of_the_sample_weights():
    y = np.where(X[:, 0] + np.random.default_rng(0).normal(size=400) > 1, "rare", "usual")
    chances = lambda weight, **options: classifier(**options).fit(X, y, weight).predict_proba(X)
    expected = chances(tables.WEIGHTS * np.where(y == "rare", 3.0, 1.0))
    np.testing.assert_array_equal(chances(tables.WEIGHTS, class_weight={"rare": 3.0, "usual": 1.0}), expected)
    assert chances(None, class_weight="balanced")[:, 0].mean() > chances(None)[:, 0].mean() + 0.1
    with pytest.raises(ValueError, match="class_weight"):
        chances(None, class_weight="even")


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, ()),
        ({"loss": "poisson"}, ()),
        ({"loss": "quantile", "quantile": 0.9}, ()),
        ({"loss": "quantile", "quantile": (0.1, 0.9)}, (2,)),
    ],
)
def test_constant_targets_are_predicted_in_the_shape_of_the_loss(options, shape):
    weight = np.repeat([1.0, 0.0], 200)
    for y, weights in ((np.full(400, 3.1), None), (np.where(weight > 0, 3.1, 7), weight)):
        actual = TreeRegressor(GET, **options).fit(X, y, weights).predict(X)
        assert actual.shape == (400, *shape) and (actual == 3.1).all()


VARIES = np.column_stack([np.arange(400.0), np.ones(400)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": jtrees.Bagged(jtrees.LatentClustering())}, "recipe must learn from y, got Bagged.*Clustering"),
        ({"recipe": "get"}, "recipe must be a recipe, such as .*got 'get'"),
        ({"max_seconds": [1.0]}, r"max_seconds must be one number, got shape \(1,\)"),
        ({"loss": "cubic"}, "loss must be one of 'squared_error', 'absolute_error'"),
        ({"quantile": 0.9}, "quantile must be None unless loss is \"quantile\", got loss='squared_error'"),
        ({"loss": "quantile", "quantile": 1}, "levels must be a finite number above 0 and below 1, got 1"),
        ({"loss": "poisson"}, r"y must be at least 0 for Poisson\(\), got .* in row \d+"),
        ({"sample_weight": DAYS}, r"sample_weight must be numeric, got values of type datetime64\[D\]"),
        ({"X": np.full((400, 2), "a")}, "x must have a column to learn from, got 'x0' "),
        ({"X": np.stack([DAYS, DAYS], 1)}, r"X must be numeric, got .* type datetime64\[D\]: make numbers of dates"),
        ({"y": np.full(400, "a")}, "y must be numeric, got values of type <U1: for labels take task="),
        # Constant targets pass the checks of the loss.
        ({"y": np.full(400, -1.0), "loss": "poisson"}, "y must be at least 0 for Poisson.*-1.0 in row 0"),
        ({"y": VARIES, "loss": "huber"}, "loss must be of one target"),
        ({"y": VARIES, "loss": "quantile", "quantile": (0.1, 0.9)}, "outputs must be None"),
    ],
)
def test_refused(change, message):
    arguments = {"X": X, "y": Y, "recipe": DGT} | change
    fit = {name: arguments.pop(name) for name in ("X", "y", "sample_weight") if name in arguments}
    with pytest.raises(ValueError, match=message):
        TreeRegressor(**arguments).fit(**fit)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["gas", "wood"] * 30, "'gas' in column 'heating': encode text, such as by a OneHotEncoder"),
        (pd.date_range("2020", periods=60, tz="UTC"), "Timestamp.* in column 'heat"),
        (pd.period_range("2020", periods=60), "Period.* in column 'heating': make"),
    ],
)
def test_a_model_of_an_array_names_what_is_not_numeric(values, message):
    model = TreeRegressor(DGT).fit(X[:60], np.ones(60))
    with pytest.raises(ValueError, match=f"X must be numeric, got {message}"):
        model.predict(pd.DataFrame({"heating": values, "b": 1.0, "c": 1.0, "d": 1.0}))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "got None in row 3: leave rows without a label out"),
        (1, r"got 'high' and 1 \(in row 3\): make labels one type"),
        (b"low", r"got 'high' and b'low' \(in row 3\): make labels one type"),
    ],
)
def test_labels_that_are_missing_or_mixed(label, message):
    labels = LABELS.astype(object)
    labels[:3], labels[3] = "high", label
    for y in (labels, labels.tolist(), pd.Series(labels, dtype=object)):
        with pytest.raises(ValueError, match=f"y must hold labels of one type, {message}"):
            TreeClassifier(DGT).fit(X, y)


class Answer(enum.Enum):
    NO, YES = 0, 1


@pytest.mark.parametrize(
    "classes",
    [
        (datetime.date(2020, 1, 1), datetime.date(2021, 1, 1)),
        (Decimal("1.5"), Decimal("12345678901234567890")),
        (Answer.NO, Answer.YES),
        (b"a", b"b"),
        ("a", "a\0"),
        (5, 10**40),
        (True, 2),
        ((1, "a"), (1, "b")),
    ],
    ids=str,
)
def test_labels_of_any_type_come_back(classes):
    labels = [classes[int(x > 0)] for x in X[:, 0]]
    array = np.empty(400, object)
    array[:] = labels
    forms = [array, pd.Series(array), labels] if isinstance(classes[0], datetime.date) else [array]
    for y in forms:
        model = classifier(class_weight={classes[1]: 2.0}, validation_fraction=0.2).fit(X, y)
        assert model.classes_.tolist() == list(classes) and list(map(type, model.classes_)) == list(map(type, classes))
        right = [a == b for a, b in zip(model.predict(X).tolist(), labels, strict=True)]
        assert model.score(X, y) == np.mean(right) > 0.6
        assert model.score(X[:4], y[:4], [1, 0, 0, 0]) == right[0]


def test_labels_that_differ_in_spaces_alone_are_warned_of():
    with pytest.warns(UserWarning, match="y has labels that differ only in spaces: 'Yes', 'Yes '"):
        model = classifier().fit(X, np.resize(["No", "Yes", "Yes "], 400))
    assert model.classes_.tolist() == ["No", "Yes", "Yes "]


def test_a_fit_that_fails_leaves_the_estimator_as_it_was():
    model = classifier(GET).fit(X, LABELS)
    before = model.predict(X)
    with pytest.raises(ValueError, match="sample_weight"):
        model.fit(X[:, :2], np.char.add("new ", LABELS), sample_weight=-np.ones(len(X)))
    np.testing.assert_array_equal(model.predict(X), before)
    unfitted = regressor(loss="nope")
    with pytest.raises(ValueError, match="loss must be one of"):
        unfitted.fit(X, Y)
    for use in (lambda: unfitted.predict(X), lambda: classifier().score(X, LABELS)):
        with pytest.raises(NotFittedError):
            use()


def test_a_new_base_replaces_the_options_of_the_old_base():
    model = BoostedRegressor({"base__depth": 4, "rounds": 7}).set_params(recipe__base=GET, recipe__base__depth=3)
    assert model.get_params()["recipe__base"] == GET.replace(depth=3) and model.get_params()["recipe__rounds"] == 7


def test_errors_name_the_parameters_of_the_estimator():
    with pytest.raises(ValueError, match="monotonic_cst must have the signs -1, 0 or 1, got 2"):
        regressor(monotonic_cst=[2, 0, 0, 0]).fit(X, Y)
    with pytest.raises(ValueError, match=r"validation_fraction == 1\.5, must be < 1"):
        regressor(validation_fraction=1.5).fit(X, Y)


def test_a_prediction_for_an_array_of_objects_does_not_depend_on_other_rows():
    rng = np.random.default_rng(0)
    flag = rng.choice(np.array([True, False, "unknown"], object), 100)
    rows = np.stack([rng.normal(size=100).astype(object), flag], axis=1)
    model = regressor().fit(rows, (flag == True) * 5.0)  # noqa: E712
    predictions = model.predict(rows)
    for row in range(0, 100, 9):
        np.testing.assert_array_equal(model.predict(rows[[row]]), predictions[[row]])


def test_lists_and_arrays_of_text_are_tables_as_arrays_of_objects_are():
    frame = pd.DataFrame({"size": X[:, 0].round(3), "town": np.where(X[:, 1] > 0, "Bonn", "Rome")})
    rows = frame.to_numpy(object)
    model = regressor().fit(rows, Y)
    np.testing.assert_array_equal(model.predict(rows.astype(str)), model.predict(rows))
    np.testing.assert_array_equal(model.predict(rows.tolist()), model.predict(rows))
    np.testing.assert_array_equal(regressor().fit(rows.tolist(), Y).predict(rows), model.predict(rows))


@pytest.mark.parametrize("row", [{"size": 1.0}, [{"size": 1.0}], pd.Series([1.0, "Bonn"]), [["Bonn"], 1.0]])
def test_a_row_by_name_is_refused_with_a_remedy(row):
    model = regressor().fit(tables.frame(), Y)
    with pytest.raises(ValueError, match=r"X must be a DataFrame or an array \(n, p\), got .*pd.DataFrame\(\[row\]\)"):
        model.predict(row)


@pytest.mark.filterwarnings("ignore:X has feature names")
def test_a_model_of_an_array_of_objects_takes_a_frame_by_position():
    frame = tables.frame()
    model = regressor().fit(frame.to_numpy(object), Y)
    np.testing.assert_array_equal(model.predict(frame), model.predict(frame.to_numpy(object)))


def test_arrays_of_objects_may_hold_dates_and_missing_values():
    days = pd.date_range("2024-01-01", periods=100, freq="3D")
    for cells in (days.to_numpy(), days.to_pydatetime(), days.astype(object).where(np.arange(100) % 9 > 0, pd.NA)):
        rows = np.stack([np.arange(100.0).astype(object), np.asarray(cells, object)], axis=1)
        assert regressor().fit(rows, np.arange(100.0)).predict(rows[:1]).shape == (1,)


def test_scores_refuse_missing_labels_and_wrong_weights():
    model = classifier().fit(X, LABELS)
    gap = np.asarray(LABELS, object)
    gap[3] = None
    with pytest.raises(ValueError, match="y must hold labels of one type, got None in row 3"):
        model.score(X, gap)
    days = np.where(np.asarray(LABELS) == LABELS[0], datetime.date(2024, 1, 1), datetime.date(2025, 1, 1))
    with pytest.raises(ValueError, match=r"sample_weight must have shape \(400,\)"):
        classifier().fit(X, days).score(X, days, np.ones(3))


def test_a_validation_fraction_that_is_too_small_is_named():
    with pytest.raises(ValueError, match=r"validation_fraction must suit the 400 rows, got 0\.001"):
        classifier(validation_fraction=0.001).fit(X, LABELS)
