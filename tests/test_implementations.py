"""The choice between XLA and a kernel in ``ops``, and what is built on it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import losses, ops, routing
from jtrees.leaves import Linear, Values
import pallas_kernels as kernels
from pallas_kernels import Config, Unsupported, choice
from pallas_kernels.config import HEURISTIC
from tests import sweeps

SMALL = Config("triton", tile=16, block=8, features=16, subtree=2, steps=2, programs=1, interpret=True)


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    shapes = (7, 5), (7,), (8, 2), (37, 5)
    return tuple(jax.device_put(rng.normal(size=shape).astype(np.float32)) for shape in shapes)


def expected_loss(loss, route, w, b, values, x, implementation=None):
    if loss == losses.LogLoss():
        y = (x[:, 0] > 0).astype(jnp.int32)
    else:
        values, y = values[:, 0], x[:, 0]
    options = {"weight": jnp.abs(x[:, 1]), "route": route, "implementation": implementation}
    return ops.expected_loss(w, b, Values(values, loss), x, y, **options)[0]


OPS = {
    "soft": ops.soft,
    "soft by violation": lambda *a, **how: ops.soft(*a, "violation", **how),
    "soft, one number a leaf": lambda w, b, v, x, **how: ops.soft(w, b, v[:, 0], x, **how),
    "path_sum": ops.path_sum,
    "path_sum, a window of the scores": lambda *a, **how: ops.path_sum(*a, routing.mean_size, **how),
    "ensemble": lambda w, b, v, x, **how: ops.ensemble(w[None], b[None], v[None], x, 1.0, **how),
    "expected_loss": partial(expected_loss, losses.SquaredError(), "sigmoid"),
    "expected_loss, violation, classes": partial(expected_loss, losses.LogLoss(), "violation"),
}


def with_gradients(fn, operands, **how):
    def total(*operands):
        out = fn(*operands, **how)
        return jnp.square(out).sum(), out

    gradients, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*operands)
    return out, *gradients


def assert_same(result, expected):
    for a, b in zip(result, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * float(jnp.abs(b).max()))  # sums in another order


@pytest.fixture
def won(monkeypatch):
    """Makes a kernel of these sizes the default."""
    return lambda config: monkeypatch.setattr(choice, "default", lambda *_: config)


def lowered(fn, operands, platform):
    return jax.jit(lambda *operands: fn(*operands)).trace(*operands).lower(lowering_platforms=(platform,)).as_text()


QUICK, SLOW = ["expected_loss"], ["soft by violation", "ensemble"]


@pytest.mark.parametrize("name", sweeps.quick(OPS, QUICK, SLOW))
def test_a_kernel_that_is_asked_for_or_that_won(operands, name, won):
    expected = with_gradients(OPS[name], operands, implementation="xla")
    assert_same(with_gradients(OPS[name], operands, implementation="interpret"), expected)
    assert_same(with_gradients(OPS[name], operands), expected)
    won(SMALL)  # on the CPU, by the interpreter
    assert_same(with_gradients(OPS[name], operands), expected)
    is_default = "pallas_call" in str(jax.make_jaxpr(OPS[name])(*operands))
    assert is_default == (name != "path_sum, a window of the scores")  # for which all scores are computed anyway


@pytest.mark.parametrize("name", sweeps.quick(OPS, QUICK, SLOW))
def test_what_won_elsewhere_is_not_in_a_program_for_a_cpu(operands, name, won):
    call = lambda *operands: with_gradients(OPS[name], operands)
    assert "custom_call @" not in lowered(call, operands, "tpu")  # no kernel is the default here
    won(HEURISTIC["mosaic_tpu"])
    is_default = name != "path_sum, a window of the scores"
    assert ("tpu_custom_call" in lowered(call, operands, "tpu")) == is_default
    assert "custom_call @" not in lowered(call, operands, "cpu")
    assert_same(call(*operands), with_gradients(OPS[name], operands, implementation="xla"))


def test_predictions_go_through_it(operands, won, monkeypatch):
    w, b, values, x = operands
    tree = jtrees.ObliqueTree(w, b, Values(values))
    before, calls, real = tree.predict(x), [], kernels.hard_routing
    monkeypatch.setattr(kernels, "hard_routing", lambda *a, **how: calls.append(how) or real(*a, **how))
    won(SMALL)
    many, many_before = jnp.tile(x, (8, 1)), np.tile(before, (8, 1))  # another program
    np.testing.assert_array_equal(tree.predict(many), many_before)
    assert calls
    calls.clear()  # a kernel does not say for which NumPy rows rounding may have decided
    np.testing.assert_array_equal(tree.predict(np.asarray(many)), many_before)
    assert not calls
    leaf = ops.hard(w, b, x, implementation="interpret")
    np.testing.assert_array_equal(leaf, ops.hard(w, b, x, implementation="xla"))


def test_refused(operands):
    w, b, values, x = operands
    with pytest.raises(ValueError, match=r"implementation must be one of 'xla', .*got 'gpu'"):
        ops.hard(w, b, x, implementation="gpu")
    with pytest.raises(Unsupported, match=r"the kernel soft_routing is for float32.*got \(37, 5\) in float32, depth 3"):
        ops.soft(w, b, values, x, routing.leaf_probabilities, implementation="interpret")
    with pytest.raises(Unsupported, match="the kernel expected_loss is for"):
        leaves = Linear(jnp.ones((8, 5)), jnp.ones(8))
        ops.expected_loss(w, b, leaves, x, x[:, 0], implementation="interpret")
    with jax.enable_x64(True), pytest.raises(Unsupported, match="in float64"):
        ops.hard(w, b, x.astype(jnp.float64), implementation="interpret")


def test_a_kernel_is_taken_by_default_only_for_float32(operands, won, x64):
    won(SMALL)
    for dtype in ("float32", "float64", "bfloat16"):
        program = jax.make_jaxpr(ops.path_sum)(*(a.astype(dtype) for a in operands))
        assert ("pallas" in str(program)) == (dtype == "float32")


def test_an_ensemble_is_left_to_others_by_triton(operands):
    w, b, values, x = (a[None] for a in operands)
    call = lambda how: jax.jit(lambda *trees: ops.ensemble(*trees, x[0], 1.0, implementation=how))(w, b, values)
    np.testing.assert_allclose(call(("triton", "interpret")), call("xla"), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(call(("triton", "xla")), call("xla"))
    with pytest.raises(Unsupported, match="'triton' does not run this ensemble, 'xla' runs everywhere"):
        call("triton")
