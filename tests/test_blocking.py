"""How samples are cut into blocks, and that a loop over blocks is the sum over samples."""

from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees import blocking


@given(st.integers(1, 2**16), st.integers(1, 10**7))
def test_blocks_cover_the_samples_within_the_limit(nodes, n):
    block = blocking.block_size(nodes, n)
    assert 1 <= block <= n
    if jax.default_backend() == "cpu":
        limit = 2**19
        assert block * nodes < limit + nodes  # rounded up to a whole sample
        assert -(-n // block) <= -(-n * nodes // limit)  # no more blocks than memory asks for


@pytest.mark.parametrize(("n", "block"), [(6, 3), (7, 3), (2, 3), (1, 1)])
@pytest.mark.parametrize("mode", ["edge", "constant"])
def test_into_blocks_pads_the_last(n, block, mode):
    rows = {"x": jnp.arange(1.0, 1 + 2 * n).reshape(n, 2), "leaf": jnp.arange(1, 1 + n)}
    cut = blocking.into_blocks(rows, block, mode)
    blocks = -(-n // block)
    assert cut["x"].shape == (blocks, block, 2)
    assert cut["leaf"].shape == (blocks, block)
    for name in rows:
        flat = cut[name].reshape(blocks * block, *rows[name].shape[1:])
        assert np.array_equal(flat[:n], rows[name])
        assert np.all(flat[n:] == (rows[name][-1] if mode == "edge" else 0))


@pytest.mark.parametrize("block", [1, 3, 10, 11])
def test_sum_over_blocks_is_the_sum_over_samples(block):
    x, y = jnp.arange(20, dtype=jnp.int32).reshape(10, 2), jnp.arange(10, dtype=jnp.int32)

    weight = jnp.arange(1, 11, dtype=jnp.int32)

    def fn(weight, x, y):
        return {"dot": x.T @ (weight * y), "total": weight.sum()}, x * y[:, None]

    total, rows = jax.jit(lambda *arrays: blocking.sum_over_blocks(fn, *arrays, block=block))(weight, x, y)
    expected, expected_rows = fn(weight, x, y)
    assert jax.tree.all(jax.tree.map(np.array_equal, total, expected))
    assert np.array_equal(rows, expected_rows)


def test_sum_over_blocks_under_vmap_and_grad():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(10, 2)), jnp.float32)

    def loss(w, block):
        fn = lambda weight, x: (weight @ jnp.square(x @ w), x[:, 0])
        return blocking.sum_over_blocks(fn, jnp.ones(10), x, block=block)[0]

    gradient = lambda block: jax.vmap(jax.grad(lambda w: loss(w, block)))(jnp.asarray([[1.0, 2], [0, -1]]))
    np.testing.assert_allclose(gradient(3), gradient(10), rtol=1e-5)
    np.testing.assert_allclose(gradient(10)[1], -2 * x.T @ x[:, 1], rtol=1e-5)


@pytest.mark.parametrize("depth", [1, 6, 16])
def test_prediction_blocks_are_the_sizes_that_padding_makes(depth):
    block = blocking.prediction_block(depth)
    assert block > 0
    assert block & (block - 1) == 0
