"""Programs that a fit runs once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import compilation


def test_equals_the_plain_function_and_compiles_once_for_each_shape_and_static_option(count_compilations):
    @compilation.once(static_argnames="power")
    def total(x, power):
        return (x**power).sum()

    x, large = jnp.arange(4.0), jnp.ones(2**19 + 1)
    assert total(x, 2) == total.__wrapped__(x, 2) == 14
    assert total(large, 3) == len(large)
    assert count_compilations(lambda: (total(x, 2), total(large, 3))) == 0
    assert total(x, 3) == 36


@pytest.mark.parametrize("size, quickly", [(2**19, True), (2**19 + 1, False)])
def test_only_small_arguments_are_compiled_quickly(monkeypatch, size, quickly):
    monkeypatch.setattr(jax, "jit", lambda fn, compiler_options=None: lambda x: compiler_options)
    options = compilation.once()(jnp.sum)(np.zeros(size))
    assert options == (compilation._QUICK if quickly else None)


RECIPES = [jtrees.GET(epochs=20), jtrees.LatentTree(epochs=5), jtrees.TEL(epochs=5)]


@pytest.mark.exact
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_code_that_is_not_optimised_makes_the_same_model(monkeypatch, data, recipe):
    x, y = data
    fit = lambda: jtrees.fit(recipe, x, y, key=jax.random.key(0))
    quickly = fit().predict(x)
    monkeypatch.setattr(compilation, "_SMALL", 0)
    # Rounding of float32, through some hundred updates.
    np.testing.assert_allclose(quickly, fit().predict(x), rtol=1e-3, atol=1e-3 * np.ptp(y))
