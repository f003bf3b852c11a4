"""What the paper's experiments add to the library: variants of DGT, and pieces that are made once."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import benchmark
from experiments.paper_dgt import ABLATIONS, variant
from jtrees.methods.dgt import random_chain

# optax's schedules divide an integer step by an integer.
pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize("kind", ABLATIONS)
def test_variants_differ_in_the_gradient_alone(data, kind):
    x, y = map(jnp.asarray, data)
    params = random_chain(jax.random.key(0), 3, 3, (240, 240) if "L = 3" in kind else (), None, jnp.float32)
    method = variant(kind, 3, steps=100)
    value, gradient = jax.value_and_grad(
        lambda params: method.loss(params, x, y, key=jax.random.key(0), step=jnp.int32(10))[0]
    )(params)
    assert value == pytest.approx(float(jnp.square(params.tree().predict(x) - y).mean()), rel=1e-5)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))
    assert np.count_nonzero(gradient.factors[0]) > 0


def test_product_form_teaches_the_nodes_on_the_path_alone(data):
    x, y = jnp.asarray(data[0][:1]), jnp.asarray(data[1][:1])
    params = random_chain(jax.random.key(0), 3, 3, (), None, jnp.float32)
    tree = params.tree()
    path = set(np.asarray(tree.decision_path(x))[:-1, 0].tolist())
    learns = {}
    for kind in ("product, sign, L = 1", "sum, sign, L = 1"):
        loss = variant(kind, 3, steps=100).loss
        slope = jax.grad(lambda p, loss=loss: loss(p, x, y, key=jax.random.key(0), step=jnp.int32(0))[0])(params)
        learns[kind] = set(np.flatnonzero(np.any(np.asarray(slope.factors[0]) != 0, axis=1)).tolist())
    assert learns["product, sign, L = 1"] <= path
    assert len(learns["sum, sign, L = 1"] - path) > 0


def test_a_piece_is_made_once(tmp_path):
    calls = []
    make = lambda: calls.append(1) or {"answer": 42}
    file = tmp_path / "piece.json"
    first, second = benchmark.piece(file, make, seeds=3), benchmark.piece(file, make, seeds=3)
    assert first["found"] == second["found"] == {"answer": 42}
    assert len(calls) == 1
    assert json.loads(file.read_text())["seeds"] == 3
    assert [f.name for f in tmp_path.iterdir()] == ["piece.json"]
    with pytest.raises(SystemExit, match="made with"):
        benchmark.piece(file, make, seeds=4)


def test_a_piece_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        benchmark.piece(tmp_path / "piece.json", lambda: 1 / 0)
    assert list(tmp_path.iterdir()) == []
