"""Products of float32 numbers name their precision: on a TPU a product without one rounds its factors to bfloat16."""

import traceback

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from tests import sweeps
from tests.recipes import LINEAR, RECIPES
from tests.tables import BINARY, X, Y

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]  # Adam; see the fixture
OURS = ("/jtrees/", "/pallas_kernels/", "/tests/")


@pytest.fixture
def unnamed(monkeypatch):
    """The places of products of float32 numbers without a precision, traced from here on."""
    jax.clear_caches()
    product, bind, places = lax.dot_general_p, lax.dot_general_p.bind, set()

    def noting(*args, precision=None, **options):
        if precision is None and all(a.dtype == jnp.float32 for a in args[:2]):
            frames = [f for f in traceback.extract_stack() if f.name != "noting" and any(o in f.filename for o in OURS)]
            places.add(f"{frames[-1].filename}:{frames[-1].lineno}")
        return bind(*args, precision=precision, **options)

    monkeypatch.setattr(product, "bind", noting)
    return places


def test_a_product_without_a_precision_is_found(unnamed):
    square = jnp.ones((2, 2), jnp.float32)
    jax.jit(lambda a: jnp.matmul(a, a, precision="highest"))(square)
    assert not unnamed
    jax.jit(lambda a: a @ a)(square)
    assert len(unnamed) == 1 and __file__ in unnamed.pop()


RECIPES = RECIPES | {
    "GET, linear": LINEAR,
    "GET, binned CART": RECIPES["GET"].replace(cart="binned"),
    "GET, preconditioned": RECIPES["GET"].replace(precondition=0.5),
    "TEL, hard": RECIPES["TEL"].replace(hard=True),
}


@pytest.mark.parametrize("name", sweeps.slow(RECIPES, ["DGT"]))
def test_every_product_of_a_fit_names_its_precision(unnamed, name):
    classes = {} if "linear" in name or "Clustering" in name else {"classification": BINARY}
    for task, targets in {"regression": Y, **classes}.items():
        fit = jtrees.fit(RECIPES[name], X, targets, key=jax.random.key(0), task=task)
        fit.predict(X), fit.predict(jnp.asarray(X, jnp.float32))
    assert not unnamed, sorted(unnamed)


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """Products without a precision, or of the default one, have factors of bfloat16, in what is traced from here on."""
    jax.clear_caches()
    product, bind = lax.dot_general_p, lax.dot_general_p.bind
    fewest = {None, jax.lax.Precision.DEFAULT, (jax.lax.Precision.DEFAULT,) * 2}

    def rounding(*args, precision=None, **options):
        if precision in fewest and args[0].dtype == jnp.float32:
            args = [jax.lax.reduce_precision(a, 8, 7) for a in args]
        return bind(*args, precision=precision, **options)

    yield lambda: (monkeypatch.setattr(product, "bind", rounding), jax.clear_caches())
    monkeypatch.undo()
    jax.clear_caches()


def test_the_emulation_moves_rows_of_a_product_without_a_precision(as_on_a_tpu):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(10_000, 8)).astype(np.float32), rng.normal(size=8).astype(np.float32)
    right = lambda: np.asarray(jax.jit(lambda x: x @ w > 0)(x))
    before = right()
    as_on_a_tpu()
    assert 5 < (right() != before).sum() < 100


@pytest.mark.parametrize("name", sweeps.slow(RECIPES, ["GET", "LatentTree", "TEL"]))
def test_no_row_reaches_another_leaf_where_products_are_of_bfloat16(as_on_a_tpu, name):
    fit = jtrees.fit(RECIPES[name], X, Y, key=jax.random.key(0))
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(20_000, 4)), jnp.float32)
    leaf = lambda: np.asarray(fit.tree.leaf_index(rows)) if fit.tree is not None else np.zeros(1)
    before, reached = np.asarray(fit.predict(rows)), leaf()
    as_on_a_tpu()
    np.testing.assert_array_equal(leaf(), reached)
    np.testing.assert_array_equal(fit.predict(rows), before)
