"""How samples are cut into blocks, and that a loop over blocks is the sum over samples."""

from hypothesis import given, strategies as st
import jax
import numpy as np
import pytest

from jtrees import blocking
from jtrees.data.table import bucket

CPU = jax.default_backend() == "cpu"


@given(st.integers(1, 2**16), st.integers(1, 10**7))
def test_blocks_cover_the_samples_within_the_limit(nodes, n):
    block, chunk = blocking.block_size(nodes, n), blocking.chunk_of_rows(nodes, n)
    assert 1 <= block <= n and 1 <= chunk <= nodes
    assert chunk == 1 or chunk * n <= (2**16 if CPU else 2**21)
    if CPU:
        limit = 2**19
        assert block * nodes < limit + nodes  # rounded up to a whole sample
        assert -(-n // block) <= -(-n * nodes // limit)  # no more blocks than memory asks for


def test_a_mesh_of_another_machine_decides_the_sizes_of_its_programs():
    device = jax.sharding.AbstractDevice("TPU v5 lite", None, platform="tpu")
    pod = jax.sharding.AbstractMesh((2,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    here = blocking.block_size(63, 10**6)
    with jax.sharding.use_abstract_mesh(pod):
        assert blocking.platform() == "tpu"
        assert blocking.block_size(63, 10**6) == 31_250 != here  # sixteen blocks on each of two devices
    assert blocking.platform() == jax.default_backend() and blocking.block_size(63, 10**6) == here


@pytest.mark.parametrize("mode", ["edge", "constant"])
def test_into_blocks_pads_the_last(mode):
    cases = {
        (n, block): {"x": 1.0 + np.arange(2.0 * n).reshape(n, 2), "leaf": np.arange(1, 1 + n)}
        for n, block in [(6, 3), (7, 3), (2, 3), (1, 1)]
    }
    cases = jax.tree.map(lambda a: a.astype(np.float32 if a.dtype.kind == "f" else np.int32), cases)
    for (n, block), cut in jax.jit(
        lambda cases: {case: blocking.into_blocks(rows, case[1], mode) for case, rows in cases.items()}
    )(cases).items():
        rows, blocks = cases[n, block], -(-n // block)
        assert cut["x"].shape == (blocks, block, 2)
        assert cut["leaf"].shape == (blocks, block)
        for name in rows:
            flat = np.asarray(cut[name]).reshape(blocks * block, *rows[name].shape[1:])
            assert np.array_equal(flat[:n], rows[name])
            assert np.all(flat[n:] == (rows[name][-1] if mode == "edge" else 0))


def test_sum_over_blocks_is_the_sum_over_samples():
    x, y, weight = (np.arange(size, dtype=np.int32) for size in (20, 10, 10))
    x, weight, sizes = x.reshape(10, 2), weight + 1, (1, 3, 10, 11)

    def fn(weight, x, y):
        return {"dot": x.T @ (weight * y), "total": weight.sum()}, x * y[:, None]

    expected, expected_rows = fn(weight, x, y)
    in_blocks = jax.jit(lambda *arrays: [blocking.sum_over_blocks(fn, *arrays, block=block) for block in sizes])
    for total, rows in in_blocks(weight, x, y):
        assert jax.tree.all(jax.tree.map(np.array_equal, total, expected))
        assert np.array_equal(rows, expected_rows)


@given(st.integers(1, 10**7))
def test_prediction_blocks_are_a_power_of_two_and_on_a_cpu_always_the_same(n):
    block = blocking.prediction_block(n)
    assert block & (block - 1) == 0
    assert block == blocking.prediction_block(1) if CPU else block >= min(n, 2**20)


@given(st.integers(1, 10**9), st.integers(1, 10**7))
def test_blocks_of_evaluations_divide_padded_rows_and_bound_the_numbers(numbers, n):
    rows = bucket(n)
    block = blocking.evaluation_block(numbers, rows)
    assert block == rows or (block & (block - 1) == 0 and (rows < 2**14 or rows % min(block, 512) == 0))
    assert block <= 256 or block * numbers <= 2**21
