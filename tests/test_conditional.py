"""TEL's conditional computation against the textbook formula, the authors' operator, and the example of the paper."""

from functools import partial

from hypothesis import given, strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees import blocking, routing
from jtrees.routing import conditional
from tests import oracles, sweeps


def plain(x, weights, bias, leaf_values, gamma):
    def tree(weights, bias, leaf_values):
        right = routing.smooth_step(weights @ x.T + bias[:, None], gamma)
        return routing.leaf_probabilities(right).T @ leaf_values

    return jax.vmap(tree)(weights, bias, leaf_values).sum(0)


def case(seed, depth, n=12, p=3, trees=2, k=2, scale=1.0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    nodes = 2**depth - 1
    shapes = (n, p), (trees, nodes, p), (trees, nodes), (trees, nodes + 1, k), (n, k)
    x, weights, bias, leaf_values, cotangent = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    return (x, scale * weights, scale * bias, leaf_values), cotangent


@partial(jax.jit, static_argnums=(0, 1))
def pair(fn, width, operands, gamma, cotangent):
    ensemble = plain if fn is plain else partial(routing.conditional_ensemble, width=width)
    out, pull_back = jax.vjp(lambda *operands: ensemble(*operands), *operands, gamma)
    return out, *pull_back(cotangent)


@partial(jax.jit, static_argnums=0)
def reached(width, operands, gamma):
    return routing.reachable_leaves(*operands[:3], gamma, width=width)


def count_plainly(operands, gamma):
    """A leaf is reached if no split of its path is certain to go elsewhere."""
    x, weights, bias, _ = operands
    z = np.einsum("tjp,np->jtn", weights, x) + bias.T[:, :, None]
    goes = lambda node, right: z[node] > -gamma / 2 if right else z[node] < gamma / 2
    paths = [oracles.path_to(leaf, len(z).bit_length()) for leaf in range(len(z) + 1)]
    return sum(np.all([goes(*turn) for turn in path], axis=0).astype(int) for path in paths)


def assert_near(result, expected, tolerance):
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (1e-3 + np.abs(b).max()))


RECORDED = "tel_4_D4_n256_p20_k2_g1_mixed", "tel_1_D1_n16_p5_k1_g1"


@pytest.mark.parametrize("name", sweeps.quick(RECORDED, RECORDED[:1]))
@pytest.mark.parametrize("width", sweeps.quick([None, 3, 16], [None]))
def test_the_authors_operator(name, width, golden_dir, x64):
    golden = dict(np.load(golden_dir / f"{name}.npz"))
    # Theirs is the probability of the left, and has no bias.
    weights = -golden["node_weights"].T[None].astype(np.float64)
    leaf_values = golden["leaf_weights"].T[None].astype(np.float64)
    operands = (golden["x"].astype(np.float64), weights, np.zeros(weights.shape[:2]), leaf_values)
    gamma = 1 / float(golden["smooth_step_param"])
    out, d_x, d_weights, _, d_leaves, _ = pair(None, width, operands, gamma, golden["cotangent"].astype(np.float64))
    result = out, d_x, -d_weights[0].T, d_leaves[0].T
    names = ("out", "grad_x", "grad_node_weights", "grad_leaf_weights")
    assert_near(result, [golden[f"{name}_ref_f64"] for name in names], 1e-5)
    count, _ = reached(width, operands, gamma)
    assert float(count.mean()) == golden["avg_reachable_leaves_ref"]


def score(chance, gamma):
    """The score whose smooth step is this chance, by the trigonometric solution of the cubic."""
    return gamma * -np.sin(np.arcsin(1 - 2 * chance) / 3)


@pytest.mark.parametrize("width", sweeps.quick([None, 1, 4], [1]))
def test_the_example_of_the_paper(width, x64):
    """Figure C.1: 0.8 (0.3 1.5 + 0.7 (-2)) + 0.2 2.1 = -0.34; the leaf behind the right child has 2.1 either way."""
    gamma = 0.7
    bias = np.array([[score(0.2, gamma), score(0.7, gamma), 5.0]])
    operands = np.zeros((1, 1)), np.zeros((1, 3, 1)), bias, np.array([[[1.5], [-2.0], [9.0], [2.1]]])
    out, _, _, d_bias, d_leaves, _ = pair(None, width, operands, gamma, np.ones((1, 1)))
    assert out[0, 0] == pytest.approx(-0.34, abs=1e-6)
    # Reach of the leaves, the one behind the certain split included.
    np.testing.assert_allclose(d_leaves[0, :, 0], [0.24, 0.56, 0, 0.2], atol=1e-6)
    assert d_bias[0, 2] == 0


GAMMAS = 1e-3, 0.1, 1.0, 2.0


@pytest.mark.parametrize("depth", sweeps.quick((1, 2, 5, 9), (2,), (5,)))
def test_all_ways_are_the_textbook_formula(depth, x64):
    operands, cotangent = case(depth, depth)
    required = []
    for gamma in GAMMAS:
        expected = pair(plain, None, operands, gamma, cotangent)
        count = count_plainly(operands, gamma)
        required.append(count.mean())
        for width in (None, 1, 2**depth):
            assert_near(pair(None, width, operands, gamma, cotangent), expected, 1e-9)
            result, overflow = reached(width, operands, gamma)
            np.testing.assert_array_equal(result, count)
            assert bool(overflow) == (count.mean() > (width or conditional.checked_width(None, depth) or 2**depth))
    assert min(required) <= 1.1 < 1.2 < max(required) <= 2**depth


@pytest.mark.slow
def test_single_precision_and_many_samples():
    """More paths than are moved at once, and a last chunk that is not full."""
    operands, cotangent = case(1, 5, n=700, p=4, trees=3, dtype=np.float32)
    expected = pair(plain, None, operands, np.float32(1), cotangent)
    for width in (None, 2, 32):
        result = pair(None, width, operands, np.float32(1), cotangent)
        assert {a.dtype for a in result} == {jnp.dtype(jnp.float32)}
        assert_near(result, expected, 2e-5)  # sums of 700 float32 numbers, slopes 3/2
    np.testing.assert_array_equal(reached(32, operands, 1.0)[0], reached(None, operands, 1.0)[0])


@pytest.mark.slow
def test_more_samples_than_are_followed_together(monkeypatch, x64):
    """In blocks, the last one not full: some fit and others do not."""
    monkeypatch.setattr(blocking, "samples_on_paths", lambda trees: 16)
    (x, *splits, leaf_values), cotangent = case(8, 4, n=41)
    operands = (np.concatenate([x[:16] / 1000, x[16:]]), *splits, leaf_values)  # the first are all uncertain, or none
    expected = pair(plain, None, operands, 0.9, cotangent)
    assert_near(jax.jit(pair.__wrapped__, static_argnums=(0, 1))(None, 3, operands, 0.9, cotangent), expected, 1e-9)
    count, overflow = jax.jit(reached.__wrapped__, static_argnums=0)(3, operands, 0.9)
    np.testing.assert_array_equal(count, count_plainly(operands, 0.9))
    means = [count_plainly((operands[0][i : i + 16], *operands[1:]), 0.9).mean() for i in (0, 16)]
    assert overflow and min(means) < 3 < max(means)


@pytest.mark.slow
@given(st.integers(1, 4), st.integers(1, 7), st.integers(1, 3), st.integers(0, 10**6), st.floats(0.01, 3))
def test_counts_of_any_ensemble(depth, n, trees, seed, gamma):
    """Scores that are exact in float32, so that both counts see the same ties at the ends of the step."""
    rng = np.random.default_rng(seed)
    gamma = max(round(gamma * 8), 1) / 8
    x = rng.integers(-2, 3, size=(n, 2)).astype(np.float32)
    weights = (rng.integers(-2, 3, size=(trees, 2**depth - 1, 2)) / 8).astype(np.float32)
    bias = (rng.integers(-2, 3, size=weights.shape[:2]) / 16).astype(np.float32)
    count = count_plainly((x, weights, bias, None), gamma)
    # Padded to one shape: one program.
    x, weights, bias = np.resize(x, (7, 2)), *(np.resize(a, (3, *a.shape[1:])) for a in (weights, bias))
    for width in (None, 16):
        result, overflow = reached(width, (x, weights, bias), np.float32(gamma))
        np.testing.assert_array_equal(result[:trees, :n], count)
        assert not overflow


def test_bad_input_is_refused():
    (x, weights, bias, leaf_values), _ = case(7, 2, dtype=np.float32)
    valid = {"x": x, "weights": weights, "bias": bias, "gamma": 1.0}
    for change, message in [
        ({"gamma": np.nan}, "gamma must be a finite number above 0"),
        ({"gamma": np.ones(2)}, r"gamma must be one number, got shape \(2,\)"),
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"x": np.full_like(x, np.nan)}, "x must be finite"),
        ({"bias": bias[:, :2]}, r"bias must have shape \(2, 3\) to match weights, got \(2, 2\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            routing.reachable_leaves(**valid | change)
        with pytest.raises(ValueError, match=message):
            routing.conditional_ensemble(**valid | {"leaf_values": leaf_values} | change)
    with pytest.raises(ValueError, match=r"leaf_values must have shape \(2, 4, k\), got \(2, 3, 2\)"):
        routing.conditional_ensemble(**valid, leaf_values=leaf_values[:, :3])
    deep = np.zeros((1, 2**21 - 1, 1), np.float32)
    with pytest.raises(ValueError, match="depth 1 to 20, got depth 21"):
        routing.reachable_leaves(np.zeros((1, 1)), deep, deep[:, :, 0], 1.0)


@pytest.mark.parametrize("gamma", [1e-30, 1e-38, 1e-40, 1e-50])
def test_tiny_widths_are_hard_splits(gamma):
    x, weights = jnp.asarray([[-3.0], [0.0], [3.0]]), jnp.ones((1, 1, 1))
    outputs = lambda weights: routing.conditional_ensemble(x, weights, jnp.zeros((1, 1)), VALUES, gamma)
    np.testing.assert_array_equal(outputs(weights)[:, 0], [0, 5.5, 11])
    assert jnp.isfinite(jax.grad(lambda weights: outputs(weights).sum())(weights)).all()


VALUES = jnp.asarray([[[0.0], [11.0]]])
