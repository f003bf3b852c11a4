"""The pruning layer, against sequential pooling and recorded cases of the authors' program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import approx_fprime

from jtrees import blocking, isotonic
from jtrees.isotonic import prune
from jtrees.routing.traversal import rewards
from tests import sweeps
from tests.oracles import prune_pav


def nodes_of(depth: int) -> int:
    return 2 ** (depth + 1) - 1


def rising(nodes: int, n: int) -> np.ndarray:
    """Every node pulls harder than its parent: all of the tree merges into one group."""
    level = np.log2(np.arange(1, nodes + 1)).astype(int)
    return level[:, None] / 5 - 1 + np.linspace(-0.1, 0.1, n)


def alternating(nodes: int, n: int) -> np.ndarray:
    """Left chains that rise and right ones that fall."""
    out = np.zeros(nodes)
    for node in range(1, nodes):
        out[node] = out[(node - 1) // 2] + (0.2 if node % 2 else -0.3)
    return out[:, None] + np.zeros(n)


def uniform(nodes: int, n: int) -> np.ndarray:
    return np.random.default_rng(nodes + n).uniform(-1, 1, (nodes, n))


def traversed(nodes: int, n: int) -> np.ndarray:
    scores = np.random.default_rng(n).normal(size=(nodes // 2, n))
    return np.asarray(jax.jit(rewards)(scores)) if nodes > 1 else np.ones((1, n))


KINDS = {
    "uniform": uniform,
    "tied": lambda nodes, n: np.round(2 * uniform(nodes, n)) / 2,
    "traversed": traversed,
    "rising": rising,
    "alternating": alternating,
    "all equal": lambda nodes, n: np.full((nodes, n), 0.1),
    "all very negative": lambda nodes, n: np.full((nodes, n), -50.0),
    "all above a half": lambda nodes, n: np.full((nodes, n), 0.7),
}
# Samples, depth: both ends of both ranges. Those of depth 1 are quick.
SIZES = [(4, 1), (1, 10), (300, 3), (17, 6), (4096, 2)]
PENALTIES = [1e-3, 1.0, 1.4837, 40.0, 1e4]
# Compiling is what takes time here: tests share programs, and sizes where these do not matter.
SOLVE = jax.jit(lambda q, penalty, weight: isotonic.prune_with_groups(q, penalty, weight, False))  # called by solved
PUSH = jax.jit(lambda point, tangent: jax.jvp(prune, point, tangent)[1])
PULL = jax.jit(lambda point, cotangent: jax.vjp(prune, *point)[1](cotangent))
# Rounding: of sums, whose noise is a few units in the last place of each value, however small the value.
RTOL = {np.float64: 1e-12, np.float32: 16 * 2.0**-23}


def solved(q, penalty, weight=None) -> tuple[np.ndarray, np.ndarray]:
    """Values of :func:`prune` and their groups, in the dtype of q, by one program for each shape."""
    q = np.asarray(q)
    result = SOLVE(q, np.asarray(penalty, q.dtype), None if weight is None else np.asarray(weight, q.dtype))
    return np.asarray(result[0]), np.asarray(result[1])


def assert_solves(q, penalty, weight=None, groups=True) -> None:
    """In double and single precision: in order bit for bit, and right relative to each value."""
    for dtype, rtol in RTOL.items():
        rounded = [None if part is None else np.asarray(part, dtype) for part in (q, penalty, weight)]
        (a, group), (expected, expected_group) = solved(*rounded), prune_pav(*rounded)
        np.testing.assert_allclose(a, expected, rtol=rtol, atol=0)
        assert (a[1:] <= a[(np.arange(1, len(a)) - 1) // 2]).all()
        if groups and dtype is np.float64:
            np.testing.assert_array_equal(group, expected_group)


@pytest.mark.parametrize("size", sweeps.quick(SIZES, SIZES[:1], SIZES[2:4]), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_prune_equals_sequential_pooling(kind, size, x64):
    n, depth = size
    q = KINDS[kind](nodes_of(depth), n)
    for penalty in PENALTIES[:: 1 if depth < 10 else 2]:
        # Where values tie but for rounding, groups are a matter of taste.
        assert_solves(q, penalty, groups=kind not in ("alternating", "tied"))


@pytest.mark.parametrize("case", ["1_uniform_n13_D3_lam1", "3_real_n128_D4_lam1", "4_real_n512_D6_lam1.4837"])
def test_prune_equals_the_authors_program(case, golden_dir, x64):
    recorded = np.load(golden_dir / f"pav_{case}.npz")
    q, penalty = jnp.asarray(recorded["q"].T, jnp.float64), float(recorded["lam"])
    values, group = solved(q, penalty)
    exact = recorded["d_exact_f64"]
    np.testing.assert_allclose(values, np.clip(exact, 0, 1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(values, recorded["d_clamped01"], rtol=0, atol=1e-6)  # printed in float32
    np.testing.assert_array_equal(group, recorded["colour"])
    inside = (values > 0) & (values < 1)
    active = np.bincount(group, (q + 0.5 > values[:, None]).sum(1))[group]
    np.testing.assert_array_equal(active[inside], recorded["n_active"][inside])

    cotangent = jnp.asarray(recorded["cotangent"], jnp.float64)
    slope = jax.jit(jax.grad(lambda q, penalty: prune(q, penalty) @ cotangent, argnums=(0, 1)))
    slope_q, slope_penalty = slope(q, penalty)
    # Recorded before the clip: a value that was clipped has no gradient here.
    expected = np.where(((exact > 0) & (exact < 1))[:, None], recorded["grad_q_exact_f64"].T, 0)
    np.testing.assert_allclose(slope_q, expected, rtol=0, atol=1e-15)
    if inside.all():
        np.testing.assert_allclose(slope_penalty, recorded["grad_lam_exact_f64"], rtol=1e-12)


@pytest.fixture
def smooth_point(x64):
    """A point with merged groups, clipped ends and support of all sizes, away from kinks."""
    q = np.array(uniform(nodes_of(3), 6))
    q[0] += 2.0  # the root is clipped at 1
    q[[1, 3, 4, 7, 8, 9, 10]] += np.array([0.4, 0.1, 0.9, 0.3, 0.4, 1.2, -0.2])[:, None]
    q[[2, 5, 6, 11, 12, 13, 14]] = -2.0  # and these nodes at 0
    q, penalty = jnp.asarray(q), 2.5
    values, group = solved(q, penalty)
    assert values[0] == 1 and values[2] == 0
    assert len(np.unique(group)) < len(group)
    inside = (values > 0) & (values < 1)
    assert np.unique(group[inside]).size > 1
    return q, penalty


def closed_form(q, penalty, weight) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The Jacobians of the values in q, ``(nodes, nodes, n)``, in the penalty and in the weights, entry by entry."""
    values, group = prune_pav(q, penalty, weight)
    zeros = lambda *shape: np.zeros((len(q), *shape))
    slope_q, slope_penalty, slope_weight = zeros(*q.shape), zeros(), zeros(q.shape[1])
    for t, a in enumerate(values):
        if not 0 < a < 1:
            continue
        members = np.flatnonzero(group == group[t])
        support = [(u, i) for u in members for i in range(q.shape[1]) if q[u, i] + 0.5 > a]
        slope = penalty * len(members) + sum(weight[i] for _, i in support)
        slope_penalty[t] = -len(members) * a / slope
        for u, i in support:
            slope_q[t, u, i] = weight[i] / slope
            slope_weight[t, i] += (q[u, i] + 0.5 - a) / slope
    return slope_q, slope_penalty, slope_weight


def apart(numbers, q) -> tuple:
    slope_q, penalty, weight = numbers[: q.size], numbers[q.size], numbers[q.size + 1 :]
    return slope_q.reshape(q.shape), penalty, *([weight] if len(weight) else [])


def joined(arguments) -> np.ndarray:
    return np.concatenate([np.ravel(argument) for argument in arguments])


@pytest.mark.parametrize("weighted", [False, True])
def test_the_rule_five_ways(weighted, smooth_point):
    q, penalty = smooth_point
    weight = np.array([0.3, 2.0, 0.7, 1.0, 0.0, 1.4]) if weighted else np.ones(6)  # at 0 it is smooth, formally
    slope_q, slope_penalty, slope_weight = closed_form(np.asarray(q), penalty, weight)
    exact = np.hstack([slope_q.reshape(15, -1), slope_penalty[:, None], slope_weight[:, : 6 * weighted]])
    numbers = joined([q, penalty, *([weight] if weighted else [])])
    point, basis = apart(numbers, q), np.eye(len(numbers))
    push = lambda tangent: np.asarray(PUSH(point, apart(tangent, q)))
    pull = lambda cotangent: joined(PULL(point, cotangent))
    np.testing.assert_allclose(np.stack([push(along) for along in basis], axis=1), exact, rtol=0, atol=1e-14)
    np.testing.assert_allclose([pull(along) for along in np.eye(15)], exact, rtol=0, atol=1e-14)
    # Central differences: the values are piecewise rational, so what is left is rounding, 1e-16 / 1e-6.
    position = lambda p: solved(*apart(p, q))[0]
    difference = lambda along: (position(numbers + 1e-6 * along) - position(numbers - 1e-6 * along)) / 2e-6
    np.testing.assert_allclose(np.stack([*map(difference, basis)], axis=1), exact, rtol=0, atol=1e-8)
    # Product identity: <J v, u> = <v, J^T u>.
    rng = np.random.default_rng(0)
    v, u = rng.normal(size=numbers.shape), rng.normal(size=15)
    np.testing.assert_allclose(push(v) @ u, v @ pull(u), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_second_derivatives(weighted, smooth_point):
    q, penalty = smooth_point
    cotangent = np.random.default_rng(1).normal(size=q.shape[0])
    numbers = joined([q, penalty, *([np.linspace(0.5, 2, q.shape[1])] if weighted else [])])
    gradient = jax.grad(lambda p: jnp.sin(prune(*apart(p, q))) @ cotangent)

    def by_hand(p: np.ndarray) -> np.ndarray:
        position = apart(p, q)
        return joined(PULL(position, np.cos(solved(*position)[0]) * cotangent))

    forward = jax.jit(jax.jacfwd(gradient))(numbers)
    # One-sided differences with steps of 1e-7: an error of that order.
    np.testing.assert_allclose(forward, approx_fprime(numbers, by_hand, 1e-7), rtol=0, atol=2e-6)
    if not weighted:
        np.testing.assert_allclose(jax.jit(jax.jacrev(gradient))(numbers), forward, rtol=0, atol=1e-14)


@pytest.mark.parametrize("weighted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_any_scale_of_q_penalty_and_weight(weighted, x64):
    """Rows of many scales, among them near ties."""
    rng = np.random.default_rng(weighted)
    for _ in range(40):
        near = rng.choice([-0.4, 0.1, 0.9, -0.5], (15, 5)) + rng.choice([1e-16, 1e-7]) * rng.integers(-3, 4, (15, 5))
        scaled = 10.0 ** rng.uniform(-9, 8, (15, 5)) * rng.choice([-1, 1], (15, 5)) - rng.choice([0, 0.5])
        weight = 10.0 ** rng.uniform(-8, 4, 5) * (rng.random(5) > 0.3) if weighted else None
        assert_solves((near, scaled)[rng.integers(2)], 10 ** rng.uniform(-8, 8), weight, groups=False)


def test_derivatives_at_kinks_are_the_papers(x64):
    jacobian = lambda q: [jax.tree.map(np.asarray, PULL((q, np.float64(1)), along)) for along in np.eye(3)]
    # Three groups of one: equal values are no violation. a = 4 * 0.6 / (1 + 4).
    equal = np.full((3, 4), 0.1)
    np.testing.assert_allclose(solved(equal, 1.0)[0], 2.4 / 5, rtol=1e-15)
    for node, (slope_q, _) in enumerate(jacobian(equal)):
        np.testing.assert_allclose(slope_q, np.outer(np.eye(3)[node], np.full(4, 1 / 5)), rtol=1e-15)
    # An entry exactly at the value does not belong to the support: a = 1 / (1 + 1) with q + 1/2 = (1, 1/2, ...).
    border = np.full((3, 4), -1.0)
    border[0, :2] = 0.5, 0
    np.testing.assert_allclose(solved(border, 1.0)[0], [0.5, 0, 0], rtol=1e-15)
    np.testing.assert_allclose(jacobian(border)[0][0][0], [0.5, 0, 0, 0], rtol=1e-15)
    # At the ends of [0, 1] nothing moves; 5/4 for each of four is the value 1 exactly.
    for q in (np.full((3, 4), -0.5), np.full((3, 4), 9.0), np.full((3, 4), 0.75)):
        assert not any(slope_q.any() or slope_penalty for slope_q, slope_penalty in jacobian(q))


def test_prune_reads_rows_in_chunks_of_any_size(monkeypatch, x64):
    for n, chunk in ((8, 1), (11, 4)):  # shapes of no other test, so that the program has this chunk
        monkeypatch.setattr(blocking, "chunk_of_rows", lambda rows, n, chunk=chunk: chunk)
        q = jnp.asarray(uniform(15, n))
        values, group = solved(q, 2.0)
        expected, expected_group = prune_pav(q, 2.0)
        np.testing.assert_allclose(values, expected, rtol=0, atol=1e-14)
        np.testing.assert_array_equal(group, expected_group)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_prune_keeps_the_dtype(dtype):
    q = jnp.asarray(uniform(15, 20), dtype)
    solve = jax.jit(prune)
    result = solve(q, 2.0)
    assert result.dtype == dtype
    expected = prune_pav(np.asarray(q, np.float64), 2.0)[0]
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, atol=float(jnp.finfo(dtype).eps))
    assert jax.eval_shape(jax.grad(lambda q: prune(q, 2.0).sum()), q).dtype == dtype
    # The penalty need not be a number of that dtype.
    np.testing.assert_allclose(np.asarray(solve(q, 1e-9), np.float64), np.where(q.max(1) > -0.5, 1, 0), atol=1e-3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sample_of_weight_zero_has_no_influence(dtype, x64):
    """Bit for bit, whatever it would want: on values, groups, derivatives."""
    q, weight = uniform(15, 6).astype(dtype), np.array([1, 0, 0.5, 2, 3, 1], dtype)
    remaining, penalty, cotangent = weight > 0, dtype(1.3), np.arange(15, dtype=dtype)

    def everything(q: np.ndarray) -> tuple:
        slope_q, slope_penalty, slope_weight = map(np.asarray, PULL((q, penalty, weight), cotangent))
        assert not slope_q[:, ~remaining].any() and slope_q[:, remaining].any()
        return solved(q, penalty, weight), slope_q, slope_penalty, slope_weight[remaining]

    expected = everything(q)
    for other in (-1e3, -0.5, 1e-40, 0.3, q[:, :1], 1e6):
        changed = q.copy()
        changed[:, ~remaining] = other
        jax.tree.map(np.testing.assert_array_equal, everything(changed), expected)
    values, group = solved(q[:, remaining], penalty, weight[remaining])
    np.testing.assert_allclose(expected[0][0], values, rtol=RTOL[dtype])
    np.testing.assert_array_equal(expected[0][1], group)
    assert not solved(q, penalty, 0 * weight)[0].any()


REFUSED = [
    ({"q": np.zeros((6, 3))}, r"q must have shape \(2\*\*\(depth \+ 1\) - 1, n\).*got \(6, 3\)"),
    *(({"q": np.zeros(shape)}, "q must have shape") for shape in ((7,), (7, 0), (0, 3))),
    ({"q": np.zeros((7, 3), int)}, "q must be of a floating dtype"),
    ({"q": np.full((7, 3), np.nan)}, "q must be finite, got 21 NaN"),
    ({"q": np.full((7, 3), 1e38, np.float32)}, r"q, also times its weight, must be within \+-4.1e\+36"),
    *(({"penalty": number}, "penalty must be a finite number above 0") for number in (0.0, np.nan)),
    ({"penalty": np.ones(2)}, r"penalty must be one number, got shape \(2,\)"),
    ({"penalty": "much"}, "penalty must be a finite number above 0"),
    *(({"penalty": number}, "penalty must be a normal number of float32") for number in (1e-40, 1e38)),
    ({"weight": np.ones(7)}, r"weight must have shape \(3,\)"),
    *(({"weight": np.array([1, w, 1])}, "weight must be a finite number of at least 0") for w in (-1.0, np.nan)),
    ({"weight": np.full(3, 1e37)}, "q, also times its weight, must be within"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_bad_input_to_prune(change, message):
    with pytest.raises(ValueError, match=message):
        prune(**{"q": np.zeros((7, 3), np.float32), "penalty": 1.0} | change)
