"""Methods of the user's own as recipes."""

from flax.core import FrozenDict
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from tests.recipes import get_of_depth_2
from tests.tables import BINARY as CLASS, X

KEY = jax.random.key(0)
Y = 100 + 10 * CLASS + 0.1 * X[:, 3]
RECIPE = jtrees.FromMethod(make=get_of_depth_2, options={"alpha": 20.0}, learning_rate=0.03)

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_a_method_fits_a_table_in_its_own_units():
    fit = jtrees.fit(RECIPE, X, Y, key=KEY)
    assert isinstance(fit.tree, jtrees.ObliqueTree) and fit.tree.depth == 2
    assert len(np.unique(fit.tree.decision_path(X)[:-1])) == 3
    assert 1 - fit.loss / Y.var() > 0.9
    assert np.mean((fit.model.predict(X) - Y) ** 2) == pytest.approx(fit.loss)
    assert fit.report.recipe["options"] == {"alpha": 20.0}


def test_the_method_is_given_the_task():
    fit = jtrees.fit(RECIPE, X, CLASS, key=KEY, task="classification")
    assert np.mean(fit.model.predict(X).argmax(1) == CLASS) > 0.95


@pytest.mark.slow
def test_numbers_of_the_method_are_one_program(count_compilations):
    recipe = RECIPE.replace(epochs=5)
    swept = lambda *alphas: jtrees.sweep(recipe, X, Y, grid={"options__alpha": alphas}, key=KEY).losses
    assert len(set(swept(5.0, 20.0).ravel())) == 2
    assert count_compilations(swept, 6.0, 21.0) == 0


def test_static_options_are_tuned():
    recipe = jtrees.FromMethod(make=jtrees.methods.get, options={"alpha": 20.0}, static={"depth": 1}, epochs=5)
    result = jtrees.sweep(recipe, X, Y, grid={"static__depth": (1, 2), "options__alpha": (5.0, 20.0)}, key=KEY)
    assert [fit.tree.depth for fit in result.fits.ravel()] == [1, 1, 2, 2]
    same = jtrees.fit(RECIPE.replace(epochs=5, learning_rate=0.01), X, Y, key=jax.random.fold_in(KEY, 0))
    assert result.losses[3, 0, 0] == same.loss


def of_three_numbers(**_):
    splits = jtrees.ObliqueTree(jnp.zeros((3, 2)), jnp.zeros(3), jtrees.leaves.Values(jnp.zeros((4, 3))))
    return jtrees.Method(lambda batch, *, key: splits, lambda *_, **__: (0.0, 0.0), lambda params, batch: params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"make": 3}, "make must be a function, got 3"),
        ({"make": lambda **_: 3}, "make must give a jtrees.Method, got int"),
        ({"make": lambda **_: jtrees.methods.latent(2, 0.01)}, "a method that hardens to an ObliqueTree, got NoneType"),
        ({"make": of_three_numbers}, r"make must give leaves of shape \(4,\) for .*, got \(4, 3\): does it use task"),
        ({"rule": None}, "rule must be a function, got None"),
        ({"options": 0.1}, "options must be numbers by name, got 0.1"),
        ({"static": 3}, "static must be values by name, got 3"),
        ({"make": jtrees.methods.get, "static": {"dept": 3}}, r"static and options must .*: get\(\) got an .* 'dept'"),
        ({"make": jtrees.methods.get}, r"arguments of make, which are 'depth', .*: get\(\) missing .* 'depth'"),
        ({"static": {"widths": [3]}}, r"static__widths must be hashable, got \[3\]"),
        ({"options": {"alpha": "steep"}}, "options__alpha must be a number, got 'steep'"),
        ({"options": {"alpha": jnp.nan}}, "options__alpha must be a finite number"),
        ({"options": {"alpha": np.ones(2)}}, "options__alpha must be one number"),
    ],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        jtrees.fit(RECIPE.replace(**options), X, Y, key=KEY)
    for kind in (dict, FrozenDict):
        with pytest.raises(ValueError, match="options by name are 'alpha', got 'beta'"):
            jtrees.tune(RECIPE.replace(options=kind(alpha=1.0)), X, Y, key=KEY, grid={"options__beta": (1.0,)})


def test_all_values_of_a_grid_are_checked_before_the_first_run():
    recipe = jtrees.FromMethod(make=jtrees.methods.get, options={"alpha": 4.0}, static={"depth": 1}, epochs=1)
    for search in (jtrees.sweep, jtrees.tune):
        with pytest.raises(ValueError, match=r"alpha must be .* above 0, got Array\(-1"):
            search(recipe, X, Y, key=jax.random.key(0), grid={"options__alpha": (4.0, -1.0)})


def without_score(**options):
    method = jtrees.methods.get(depth=3, **options)
    return method._replace(loss=lambda *args, **keywords: (method.loss(*args, **keywords)[0], jnp.zeros(())))


def with_score(**options):
    return jtrees.methods.get(depth=3, **options)


def test_the_validation_loss_of_the_model_chooses_its_update():
    """The score of the method, whose leaves would be fitted to the validation set, does not matter."""
    validation = X[300:], Y[300:]
    recipe = jtrees.FromMethod(make=with_score, options={"alpha": 20.0}, epochs=10)
    search = lambda make: jtrees.fit(recipe.replace(make=make), X[:300], Y[:300], validation=validation, key=KEY)
    fits = [search(make) for make in (with_score, without_score)]
    assert fits[0].step == fits[1].step and fits[0].loss == fits[1].loss
    assert fits[0].loss == pytest.approx(np.mean((fits[0].predict(X[300:]) - Y[300:]) ** 2))


def test_linear_leaves_of_a_method_are_known():
    options = {"options": {"alpha": 20.0}, "static": {"depth": 2, "leaves": "linear"}}
    recipe = jtrees.FromMethod(make=jtrees.methods.get, **options, epochs=5)
    assert recipe.tree_leaves(jtrees.Regression()) == "linear"
    assert RECIPE.tree_leaves(jtrees.Regression()) == "constant"
    with pytest.raises(ValueError, match="base must end in a tree with constant leaves"):
        jtrees.fit(jtrees.Polished(recipe), X, Y, key=KEY)
