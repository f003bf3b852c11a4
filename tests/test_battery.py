"""What holds for every method and for every recipe, in one table each: whatever is added is to be added here."""

import copy
import dataclasses
from functools import cache
import inspect
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import Batch, Classification
from jtrees.search import Run, checked_values, options
from jtrees.selection.grid import with_options
from tests import sweeps
from tests.recipes import RECIPES
from tests.tables import CLASSES as CLASS, X, Y

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)


def same(a, b, **tolerance):
    """Two pytrees of one structure, and equal (or up to a tolerance)."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    check = np.testing.assert_allclose if tolerance else np.testing.assert_array_equal
    jax.tree.map(lambda single, other: check(np.asarray(single), np.asarray(other), **tolerance), a, b)


# A function of a number that may be traced, two such numbers, and the targets.
METHODS = {
    "get": (lambda alpha: jtrees.methods.get(2, alpha), (5.0, 20.0), Y),
    "get, linear leaves": (lambda alpha: jtrees.methods.get(2, alpha, leaves="linear"), (5.0, 20.0), Y),
    "get, classes": (lambda alpha: jtrees.methods.get(2, alpha, task=Classification(3)), (5.0, 20.0), CLASS),
    "raddt": (lambda sharpness: jtrees.methods.raddt(2, sharpness), (5.0, 20.0), Y),
    "dgt": (lambda l1: jtrees.methods.dgt(2, widths=(4,), l1=l1), (0.0, 0.1), Y),
    "latent": (lambda penalty: jtrees.methods.latent(2, penalty), (0.1, 1.0), Y),
    "tel": (lambda gamma: jtrees.methods.tel(2, 3, gamma), (0.5, 1.0), Y),
    "node": (lambda _: jtrees.methods.node(2, 3, 2), (0.0, 1.0), Y),
    "grande": (lambda dropout: jtrees.methods.grande(2, 3, dropout=dropout), (0.0, 0.1), Y),
    "dtsemnet": (lambda _: jtrees.methods.dtsemnet(2), (0.0, 1.0), Y),
    "dtsemnet, classes": (lambda _: jtrees.methods.dtsemnet(2, task=Classification(3)), (0.0, 1.0), CLASS),
    "soft_decision_tree": (lambda balance: jtrees.methods.soft_decision_tree(2, balance=balance), (0.1, 0.2), Y),
    "nongreedy": (lambda nu: jtrees.methods.nongreedy(2, nu, task=Classification(3)), (1.0, 10.0), CLASS),
}


def test_the_table_of_methods_is_complete():
    functions = {name: member for name, member in vars(jtrees.methods).items() if inspect.isfunction(member)}
    expected = {name for name, fn in functions.items() if fn.__annotations__.get("return") is jtrees.Method}
    assert expected == {name.partition(",")[0] for name in METHODS}


def batch_of(y, dtype=np.float32):
    return Batch(jnp.asarray(X, dtype), jnp.asarray(y, dtype if y.dtype.kind == "f" else np.int32))


def evaluation(name, dtype=np.float32):
    """A function of a key and a number: parameters, loss, score, gradient; and the numbers."""
    make, numbers, y = METHODS[name]
    batch = batch_of(y, dtype)

    def evaluate(key, number):
        method = make(number)
        params = method.project(method.init(batch, key=key))
        pair = lambda params: method.loss(params, batch, key=key, step=jnp.int32(0))
        (loss, score), slope = jax.value_and_grad(pair, has_aux=True)(params)
        return params, loss, score, slope

    return evaluate, jnp.asarray(numbers, dtype)


# Those left to the slow tests are swept over in files of their own as well.
@pytest.mark.parametrize("name", sweeps.quick(METHODS, ("raddt", "dgt", "latent", "tel"), ("get", "nongreedy")))
def test_methods_compile_once_and_are_vmapped_over_keys_and_numbers(name, count_compilations):
    evaluate, numbers = evaluation(name)
    keys = jax.random.split(KEY, 2)
    alone, together = jax.jit(evaluate), jax.jit(jax.vmap(evaluate))
    stacked = together(keys, numbers)
    for i in range(2):
        single = alone(keys[i], numbers[i])
        same(jax.tree.map(lambda a, i=i: a[i], stacked), single, rtol=1e-4, atol=1e-5)  # float32
        params, loss, score, slope = single
        assert all(np.isfinite(a).all() for a in jax.tree.leaves(single))
        assert any(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(slope))
        assert loss.shape == score.shape == ()
        assert {a.dtype for a in jax.tree.leaves(single)} == {jnp.dtype(jnp.float32)}
    assert count_compilations(alone, jax.random.key(7), numbers[0]) == 0
    written(params)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_methods_keep_double_precision_and_harden_to_trees(name, x64):
    evaluate, numbers = evaluation(name, np.float64)
    make, _, y = METHODS[name]
    method, batch = make(numbers[0]), batch_of(y, np.float64)
    shapes = jax.eval_shape(evaluate, KEY, numbers[0])
    assert {a.dtype for a in jax.tree.leaves(shapes)} == {jnp.dtype(jnp.float64)}
    model = jax.eval_shape(method.harden, shapes[0], batch)
    if name in ("latent", "node"):  # whose predictors are no trees
        assert model is None
        return
    is_forest = name in ("tel", "grande")
    trees = model.trees if is_forest else model
    assert isinstance(model, jtrees.Forest if is_forest else jtrees.ObliqueTree)
    assert trees.weights.shape == ((3, 3, 4) if is_forest else (3, 4))
    predictions = jax.eval_shape(lambda model, x: model.apply(x), model, batch.x)
    assert (predictions.shape, predictions.dtype) == ((400, 3) if y is CLASS else (400,), jnp.float64)


def written(tree):
    """By pickle, and read again."""
    same(pickle.loads(pickle.dumps(tree)), tree)


# The name of a number of each recipe, and two values.
NUMBERS = dict.fromkeys(RECIPES, ("learning_rate", (0.01, 0.05))) | {
    "GET": ("alpha_ranges", (((5.0, 25.0), (50.0, 150.0)), ((1.0, 5.0), (10.0, 20.0)))),
    "DGT": ("l1", (0.0, 0.01)),
    "LatentTree": ("penalty", (0.01, 0.1)),
    "LatentClustering": ("penalty", (0.1, 0.2)),
    "TEL": ("gamma", (0.2, 0.4)),
    "SoftDecisionTree": ("balance", (0.1, 0.2)),
    **dict.fromkeys(("CO2", "NonGreedy"), ("nu", (1.0, 10.0))),
    **dict.fromkeys(("Bagged", "BestOf"), ("base__learning_rate", (0.01, 0.02))),
}
QUICK = ("GET", "DGT", "LatentTree", "Bagged")
SUPERVISED = [name for name in RECIPES if name != "LatentClustering"]


def each(quick=QUICK):
    """The names of the recipes, those that are not quick marked as wide."""
    return sweeps.quick(RECIPES, quick, [])


def test_the_table_of_recipes_is_complete():
    classes = {name: member for name, member in vars(jtrees).items() if isinstance(member, type)}
    expected = {name for name, member in classes.items() if issubclass(member, jtrees.Recipe)}
    assert expected - {"Recipe"} == set(RECIPES)
    assert [type(recipe).__name__ for recipe in RECIPES.values()] == list(RECIPES)


@pytest.mark.parametrize("make", [jtrees.GET, jtrees.RADDT, jtrees.CO2, jtrees.NonGreedy])
def test_defaults_of_a_base_are_those_of_the_recipe_alone_or_in_a_sum(make):
    alone, in_a_sum = make().with_defaults(), make().with_boosting_defaults().with_defaults()
    assert jtrees.BestOf(make()).with_defaults().base == alone
    assert jtrees.BestOf(make()).with_boosting_defaults().with_defaults().base == in_a_sum
    assert alone != in_a_sum
    base = options.checked(jtrees.Boosted(make())).base
    jax.tree.map(np.testing.assert_array_equal, base, options.checked(in_a_sum))


# The smallest and largest numbers of an option in any recipe, and numbers that every recipe with the option refuses.
RANGES = {
    "depth": ((1,), (0, 21)),
    **dict.fromkeys(
        ("epochs", "batch_size", "trees", "rounds", "starts", "runs", "cycles", "hidden"), ((1,), (0, True))
    ),
    "bins": ((2,), (1,)),
    **dict.fromkeys(("momentum", "dropout", "precondition"), ((0, 0.99), (-0.01, 1))),
    **dict.fromkeys(("l1", "l2", "weight_decay", "balance"), ((0,), (-0.01,))),
    **dict.fromkeys(("selected", "fraction", "subsample", "columns"), ((0.01, 1), (0, 1.01))),
    **dict.fromkeys(("learning_rate", "penalty", "nu", "gamma", "clip"), ((0.001,), (0, True))),
    **dict.fromkeys(("first_sharpness", "last_sharpness"), ((0.001,), (0,))),
}


@pytest.mark.parametrize("name", RECIPES)
def test_options_have_ranges(name):
    options = {field.name: field.metadata.get("option") for field in dataclasses.fields(RECIPES[name])}
    with_bounds = {name for name, option in options.items() if option is not None and option.bounds}
    for option in (RANGES.keys() & options.keys()) | with_bounds:
        accepted, refused = RANGES[option]
        for value in accepted:
            checked_values(RECIPES[name], **{option: value})
        for value in refused:
            with pytest.raises(ValueError, match=f"^{option} must be "):
                checked_values(RECIPES[name], **{option: value})


def fit(name, x=X, y=Y, *, value=0, key=KEY, **options):
    number, values = NUMBERS[name]
    recipe = with_options(RECIPES[name], {number: values[value]})
    return jtrees.fit(recipe, x, y, key=key, validation=(x[:200], y[:200]), **options)


@cache
def fitted(name):
    with jax.numpy_dtype_promotion("standard"):
        return fit(name)


@pytest.mark.parametrize("name", each(QUICK))
def test_a_fit_is_a_model_of_the_table(name):
    result = fitted(name)
    predictions = result.model.predict(X)
    clustering = name == "LatentClustering"
    assert predictions.shape == ((400, 1) if clustering else (400,)) and np.isfinite(predictions).all()
    loss = np.mean((predictions[:200] - Y[:200]) ** 2)
    assert clustering or result.loss == pytest.approx(loss, rel=1e-5)
    assert result.history.shape[-1] >= result.step >= 0 and np.isfinite(result.history[..., 0]).all()
    assert np.isfinite(result.history).all() or name in ("GET", "RADDT")  # of starts that do not go on
    assert result.report.ended == "finished" and 0 < result.report.seconds < 600
    assert result.model.num_parameters > 0
    # A line or two, whatever it holds: what it is, and the names of what there is to say.
    assert len(repr(result)) < 400 and type(result.model).__name__ in repr(result) and "ended" in repr(result)


@pytest.mark.parametrize("name", each())
def test_other_keys_numbers_and_kinds_of_input_compile_nothing(name, count_compilations):
    fit(name, key=jax.random.key(2)).model.predict(X)  # in the same context, which is part of a program's name
    actual = []
    other = lambda *data, **options: actual.append(fit(name, *data, **options).model.predict(X))
    assert count_compilations(lambda: other(key=jax.random.key(1), value=1)) == 0
    assert count_compilations(lambda: other(X.astype(np.float32), Y.astype(np.float32))) == 0
    assert count_compilations(lambda: other((10 * X).astype(int), np.round(Y).astype(int))) == 0
    assert count_compilations(lambda: other(X.tolist(), Y.tolist())) == 0
    assert all(np.isfinite(predictions).all() for predictions in actual)
    np.testing.assert_array_equal(actual[3], fitted(name).model.predict(X))


@pytest.mark.parametrize("name", sweeps.quick(["DGT", "TEL"], ["DGT"], []))
def test_scores_are_evaluated_once_an_epoch_and_not_in_every_step(name, monkeypatch):
    """Counted by a pure callback, which the compiler may move as it may move any computation."""
    kind = type(RECIPES[name])
    counter, evaluate = itertools.count(), kind.evaluate

    def counted(*args):
        count = lambda value: (next(counter), value)[1]
        value = evaluate(*args)
        return jax.pure_callback(count, jax.ShapeDtypeStruct((), value.dtype), value, vmap_method="sequential")

    monkeypatch.setattr(kind, "evaluate", counted)
    # Programs that no other test has compiled. With a validation set there is a single training.
    recipe = RECIPES[name].replace(epochs=40, precondition=0, early_stopping=False)
    jtrees.fit(recipe, X, Y, key=KEY, validation=(X[:200], Y[:200]))
    assert next(counter) == 40


@pytest.mark.parametrize("name", each())
def test_models_are_written_and_read(name, tmp_path):
    result = fitted(name)
    written(result.model)
    jtrees.save(result, tmp_path / "fit.jtrees", feature_names=["a", "b", "c", "d"])
    jtrees.save(result.model, tmp_path / "model.jtrees")
    for read in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result), jtrees.load(tmp_path / "fit.jtrees")):
        same((read.model, read.tree, read.history), (result.model, result.tree, result.history))
        assert (read.loss, read.step) == (result.loss, result.step)
        assert type(read.report.search) is type(result.report.search)
        np.testing.assert_equal(dataclasses.asdict(read.report), dataclasses.asdict(result.report))
        np.testing.assert_array_equal(read.model.predict(X), result.model.predict(X))
    same(jtrees.load(tmp_path / "model.jtrees"), result.model)
    header = jtrees.io.header(tmp_path / "fit.jtrees")
    assert header["recipe"] == result.report.recipe and header["recipe"]["name"] == name
    assert header["feature_names"] == ["a", "b", "c", "d"]


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_data(name):
    recipe, (number, values) = RECIPES[name], NUMBERS[name]
    for twin in (pickle.loads(pickle.dumps(recipe)), recipe.replace()):
        assert twin == recipe and twin is not recipe and hash(twin) == hash(recipe)
    assert with_options(recipe, {number: values[1]}) != recipe
    assert repr(recipe).startswith(f"{name}(") and ("depth=" in repr(recipe) or name == "FromMethod")
    with pytest.raises(AttributeError):
        recipe.epochs = 7
    with pytest.raises(TypeError, match="positional"):
        type(recipe)(recipe, 3)


@pytest.mark.parametrize("name", each())
def test_one_trial_of_tuning_is_a_fit(name, count_compilations):
    fitted(name)
    recipe, (number, values) = RECIPES[name], NUMBERS[name]
    results, how = [], {"grid": {number: values[:1]}, "validation": (X[:200], Y[:200])}
    tune = lambda: results.append(jtrees.tune(recipe, X, Y, key=KEY, **how))
    # The programs are those of the fit; what is compiled is for other keys, and for taking results apart.
    assert count_compilations(tune) <= 6  # five where an earlier test has compiled the small one for keys
    [trial] = results[0].report.tuning.trials
    assert trial.options == {number: values[0]} == results[0].report.tuning.options and trial.size > 0
    key = jax.random.split(KEY, 3)[1]
    alone = jtrees.fit(with_options(recipe, trial.options), X, Y, key=key, validation=how["validation"])
    assert trial.loss == pytest.approx(np.square(alone.predict(X[:200]) - Y[:200]).mean(), rel=1e-4)


TRAINED = [
    name for name in SUPERVISED if isinstance(RECIPES[name], jtrees.search.MiniBatchRecipe) and name != "LatentTree"
]


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("y", [CLASS, np.stack([Y, X[:, 1]], 1)], ids=["classes", "two targets"])
def test_the_method_of_a_recipe_has_the_outputs_of_the_task(name, y):
    batch, task = batch_of(y), Classification(3) if y is CLASS else jtrees.Regression(2)
    recipe = options.checked(RECIPES[name].with_defaults())

    def outputs(run):
        model = recipe.model(run, recipe.method(run).init(run.batch, key=KEY))
        return model.apply(batch.x) if isinstance(model, jtrees.ObliqueTree | jtrees.Forest) else model.outputs(batch.x)

    shape = jax.eval_shape(outputs, Run(recipe, task, batch, batch, KEY)).shape
    assert shape == (400, 3 if y is CLASS else 2)


@pytest.mark.parametrize("name", ["LatentTree", *TRAINED])
def test_more_updates_than_a_number_counts_are_refused_before_the_search(name):
    with pytest.raises(ValueError, match="epochs must be at most"):
        RECIPES[name].replace(epochs=2**31 - 2).with_defaults().check(jtrees.Regression(), (1000, 4))


@pytest.mark.parametrize("name", SUPERVISED)
@pytest.mark.wide  # a program for each recipe; classes are below and in test_properties
def test_several_targets(name):
    y = np.stack([Y, X[:, 1]], 1)
    result = fit(name, y=y)
    predictions = result.model.predict(X)
    assert predictions.shape == (400, 2)
    assert result.loss == pytest.approx(np.mean(((predictions - y)[:200] / np.ptp(y, axis=0)) ** 2), rel=1e-4)
    written(result.model)


@pytest.mark.parametrize("name", sweeps.quick(SUPERVISED, ["DGT"], []))
def test_one_hot_probabilities_are_labels(name):
    recipe, options = RECIPES[name], {"key": KEY, "task": "classification"}
    weight = np.linspace(1, 2, 400)
    labelled = jtrees.fit(recipe, X, CLASS, sample_weight=weight, **options)
    one_hot = jtrees.fit(recipe, X, np.eye(3)[CLASS], sample_weight=weight, **options)
    np.testing.assert_allclose(one_hot.predict(X), labelled.predict(X), rtol=1e-4, atol=1e-5)
    assert one_hot.loss == pytest.approx(labelled.loss, rel=1e-5)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "Bagged"])
@pytest.mark.wide  # a program for each; the table has one of regression, which differs in the leaves alone
def test_every_recipe_can_be_bagged(name):
    y, task = (Y, "regression") if name == "LatentClustering" else (CLASS, "classification")  # the first sees no y
    bagged = jtrees.Bagged(RECIPES[name], trees=2)
    result = jtrees.fit(bagged, X, y, key=KEY, task=task, validation=(X[:200], y[:200]))
    assert len(result.model) == 2
    predictions = result.model.predict(X)
    assert len(predictions) == 400 and np.isfinite(predictions).all()
    if task == "classification":
        assert predictions.shape == (400, 3)
        np.testing.assert_allclose(predictions.sum(1), 1, rtol=1e-5)
        chosen = np.maximum(predictions[np.arange(200), CLASS[:200]], np.finfo(np.float32).tiny)
        assert result.loss == pytest.approx(-np.log(chosen).mean(), rel=1e-4)
    assert result.report.search.in_bag.shape == (2, 400)
