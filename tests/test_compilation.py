"""How programs of a fit are compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import compilation
from jtrees.data import scaling
from jtrees.search import engine, run


def test_equals_the_plain_function_and_compiles_once_for_each_shape_and_static_option(count_compilations):
    @compilation.once(static_argnames="power")
    def total(x, power):
        return (x**power).sum()

    x, large = jnp.arange(4.0), jnp.ones(2**16 + 1)
    assert total(x, 2) == total.__wrapped__(x, 2) == 14
    assert total(large, 3) == len(large)
    assert count_compilations(lambda: (total(x, 2), total(large, 3))) == 0
    assert total(x, 3) == 36


@pytest.mark.parametrize("backend, size, level", [("cpu", 2**16, 0), ("cpu", 2**16 + 1, 1), ("gpu", 1, None)])
def test_the_level_of_optimisation_goes_by_the_device_and_the_size(monkeypatch, backend, size, level):
    monkeypatch.setattr(jax, "jit", lambda fn, compiler_options=None: lambda x: compiler_options)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    options = compilation.once()(jnp.sum)(np.zeros(size))
    assert options == (None if level is None else compilation._options(level))


def test_programs_beyond_a_number_are_dropped(monkeypatch, count_compilations):
    monkeypatch.setattr(compilation, "_OURS", [])
    monkeypatch.setattr(compilation, "_AHEAD", set())
    total = compilation.often()(lambda x: x.sum())
    call = lambda: [total(jnp.ones(n)) for n in range(1, 4)]
    call()
    monkeypatch.setattr(compilation, "_KEPT", 3)
    compilation.bound_memory()
    assert total.programs() == 3 and count_compilations(call) == 0
    monkeypatch.setattr(compilation, "_KEPT", 2)
    compilation.bound_memory()
    assert total.programs() == 0
    call()
    assert total.programs() == 3


RECIPES = [jtrees.GET(epochs=20), jtrees.LatentTree(epochs=5), jtrees.TEL(epochs=5)]


@pytest.mark.slow
@pytest.mark.exact
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("small", [2**16, 0], ids=["level 0", "level 1"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_code_compiled_quickly_makes_the_same_model(monkeypatch, data, recipe, small):
    x, y = data
    fit = lambda: jtrees.fit(recipe, x, y, key=jax.random.key(0))
    monkeypatch.setattr(compilation, "_SMALL", small)
    quickly = fit().predict(x)
    well = jax.jit(run.results_of, static_argnums=0)
    well.programs, well.compiled = lambda: 0, lambda *args: well.lower(*args).compile()
    monkeypatch.setattr(engine, "rarely_compiled", well)
    monkeypatch.setattr(engine, "often_compiled", well)
    monkeypatch.setattr(scaling, "_refit", jax.jit(scaling._refit.__wrapped__))
    # Rounding of float32, through some hundred updates.
    np.testing.assert_allclose(quickly, fit().predict(x), rtol=1e-3, atol=1e-3 * np.ptp(y))
