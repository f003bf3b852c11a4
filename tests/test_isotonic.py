"""The pruning layer and tree-ordered least squares, against sequential pooling, solvers of others, recorded cases."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import approx_fprime, lsq_linear
from sklearn.isotonic import IsotonicRegression

from jtrees import isotonic
from jtrees.isotonic import prune, prune_pav, prune_with_groups, tree_isotonic
from jtrees.routing.traversal import rewards


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


def tied(nodes: int, n: int) -> np.ndarray:
    return np.round(2 * uniform(nodes, n)) / 2


def traversed(nodes: int, n: int) -> np.ndarray:
    scores = np.random.default_rng(n).normal(size=(nodes // 2, n))
    return np.asarray(rewards(jnp.asarray(scores))) if nodes > 1 else np.ones((1, n))


def constant(nodes: int, n: int, value: float) -> np.ndarray:
    return np.full((nodes, n), value)


KINDS = {
    "uniform": uniform,
    "tied": tied,
    "traversed": traversed,
    "rising": rising,
    "alternating": alternating,
    "all equal": partial(constant, value=0.1),
    "all very negative": partial(constant, value=-50.0),
    "all above a half": partial(constant, value=0.7),
}
# Samples, depth: both ends of both ranges (the reference sorts a group at each merge, hence not 4096 at depth 10).
SIZES = [(1, 1), (1, 10), (2, 4), (300, 3), (17, 6), (4096, 2)]
PENALTIES = [1e-3, 1.0, 1.4837, 40.0, 1e4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "depth"), SIZES)
def test_prune_equals_sequential_pooling(kind, n, depth, x64):
    q = KINDS[kind](nodes_of(depth), n)
    solve = jax.jit(prune_with_groups)
    solve_32 = jax.jit(prune)
    for penalty in PENALTIES[:: 1 if depth < 10 else 2]:
        values, group = prune_pav(q, penalty)
        found = solve(jnp.asarray(q), penalty)
        # The bounds: rounding only; the values are at most 1.
        np.testing.assert_allclose(found.values, values, rtol=0, atol=1e-12)
        if kind not in ("alternating", "tied"):  # where values tie but for rounding, groups are a matter of taste
            np.testing.assert_array_equal(found.group, group)
        single = solve_32(jnp.asarray(q, jnp.float32), jnp.float32(penalty))
        exact = prune_pav(q.astype(np.float32), float(np.float32(penalty)))[0]
        np.testing.assert_allclose(single, exact, rtol=0, atol=1e-6)


def test_prune_of_large_trees(x64):
    q = traversed(nodes_of(10), 512)
    expected = np.array([prune_pav(row[None], 3.0)[0][0] for row in q])  # q falls along paths: nothing merges
    np.testing.assert_allclose(prune(jnp.asarray(q), 3.0), expected, rtol=0, atol=1e-12)
    single = prune(jnp.asarray(q, jnp.float32), 3.0)
    np.testing.assert_allclose(single, expected, rtol=0, atol=1e-6)
    merged = rising(nodes_of(10), 4096)  # one group of eight million entries
    value = isotonic._pooled(merged + 0.5, 1e4)
    np.testing.assert_allclose(prune(jnp.asarray(merged), 1e4), value, rtol=0, atol=1e-12)
    np.testing.assert_allclose(prune(jnp.asarray(merged, jnp.float32), 1e4), value, rtol=0, atol=1e-6)


def test_prune_of_many_small_random_trees(x64):
    rng = np.random.default_rng(5)
    for _ in range(40):
        depth, n = rng.integers(0, 4), rng.integers(1, 4)
        q, penalty = rng.normal(size=(nodes_of(depth), n)), 10 ** rng.uniform(-3, 2)
        values, group = prune_pav(q, penalty)
        found = prune_with_groups(jnp.asarray(q), penalty)
        np.testing.assert_allclose(found.values, values, rtol=0, atol=1e-12)
        np.testing.assert_array_equal(found.group, group)


def test_prune_satisfies_the_optimality_conditions(x64):
    """Feasible; and with multipliers of the edges folded up from the leaves, none negative, none on a slack edge."""
    q, penalty = np.array(uniform(nodes_of(5), 40)), 3.0
    q -= 0.2
    a = np.asarray(prune(jnp.asarray(q), penalty))
    assert ((a > 0) & (a < 1)).all()  # so the bounds have no part in it
    parent = (np.arange(1, len(a)) - 1) // 2
    assert (a[1:] <= a[parent]).all()
    assert (a[1:] == a[parent]).any() and (a[1:] < a[parent]).any()
    derivative = penalty * a - np.maximum(q + 0.5 - a[:, None], 0).sum(1)
    multiplier = -derivative
    for node in range(len(a) - 1, 0, -1):
        multiplier[(node - 1) // 2] += multiplier[node]
    assert abs(multiplier[0]) < 1e-10
    assert multiplier[1:].min() > -1e-10
    assert np.abs(multiplier[1:][a[1:] < a[parent]]).max() < 1e-10


@pytest.mark.parametrize(
    "case", ["pav_1_uniform_n13_D3_lam1", "pav_3_real_n128_D4_lam1", "pav_4_real_n512_D6_lam1.4837"]
)
def test_prune_equals_the_authors_program(case, golden_dir, x64):
    recorded = np.load(golden_dir / f"{case}.npz")
    q, penalty = jnp.asarray(recorded["q"].T, jnp.float64), float(recorded["lam"])
    found = prune_with_groups(q, penalty)
    exact = recorded["d_exact_f64"]
    np.testing.assert_allclose(found.values, np.clip(exact, 0, 1), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.values, recorded["d_clamped01"], rtol=0, atol=1e-6)  # printed in float32
    np.testing.assert_array_equal(found.group, recorded["colour"])
    inside = np.asarray((found.values > 0) & (found.values < 1))
    active = np.asarray(jax.ops.segment_sum(found.support.sum(1), found.group, len(inside))[found.group])
    np.testing.assert_array_equal(active[inside], recorded["n_active"][inside])

    cotangent = jnp.asarray(recorded["cotangent"], jnp.float64)
    by_q, by_penalty = jax.grad(lambda q, penalty: prune(q, penalty) @ cotangent, argnums=(0, 1))(q, penalty)
    # Recorded before the clip: a value that was clipped has no gradient here.
    expected = np.where(((exact > 0) & (exact < 1))[:, None], recorded["grad_q_exact_f64"].T, 0)
    np.testing.assert_allclose(by_q, expected, rtol=0, atol=1e-15)
    if inside.all():
        np.testing.assert_allclose(by_penalty, recorded["grad_lam_exact_f64"], rtol=1e-12)


# --- The rule, five ways ---------------------------------------------------------------------------------------------


@pytest.fixture
def smooth_point(x64):
    """A point with merged groups, clipped ends and support of all sizes, away from kinks."""
    q = np.array(uniform(nodes_of(3), 6))
    q[0] += 2.0  # the root is clipped at 1
    q[[1, 3, 4, 7, 8, 9, 10]] += np.array([0.4, 0.1, 0.9, 0.3, 0.4, 1.2, -0.2])[:, None]
    q[[2, 5, 6, 11, 12, 13, 14]] = -2.0  # and these nodes at 0
    q, penalty = jnp.asarray(q), 2.5
    found = prune_with_groups(q, penalty)
    values, group = np.asarray(found.values), np.asarray(found.group)
    assert values[0] == 1 and values[2] == 0
    assert len(np.unique(group)) < len(group)
    inside = (values > 0) & (values < 1)
    assert np.unique(group[inside]).size > 1
    return q, penalty


def closed_form(q, penalty) -> tuple[np.ndarray, np.ndarray]:
    """The Jacobian of the values in q, ``(nodes, nodes, n)``, and in the penalty, written out entry by entry."""
    values, group = prune_pav(q, penalty)
    by_q, by_penalty = np.zeros((len(values), *q.shape)), np.zeros(len(values))
    for t, a in enumerate(values):
        if not 0 < a < 1:
            continue
        members = np.flatnonzero(group == group[t])
        support = [(u, i) for u in members for i in range(q.shape[1]) if q[u, i] + 0.5 > a]
        slope = penalty * len(members) + len(support)
        by_penalty[t] = -len(members) * a / slope
        for u, i in support:
            by_q[t, u, i] = 1 / slope
    return by_q, by_penalty


def test_the_rule_five_ways(smooth_point):
    q, penalty = smooth_point
    by_q, by_penalty = closed_form(np.asarray(q), penalty)
    for jacobian in (jax.jacfwd, jax.jacrev):
        np.testing.assert_allclose(jacobian(prune)(q, penalty), by_q, rtol=0, atol=1e-14)
        np.testing.assert_allclose(jacobian(prune, argnums=1)(q, penalty), by_penalty, rtol=0, atol=1e-14)
    # Central differences: the values are piecewise rational, so what is left is rounding, 1e-16 / 1e-6.
    numbers = np.concatenate([np.ravel(q), [penalty]])
    difference = np.zeros((len(numbers), len(by_penalty)))
    for i, step in enumerate(1e-6 * np.eye(len(numbers))):
        up, down = (prune(jnp.reshape(p[:-1], q.shape), p[-1]) for p in (numbers + step, numbers - step))
        difference[i] = (up - down) / 2e-6
    np.testing.assert_allclose(difference[:-1].T.reshape(by_q.shape), by_q, rtol=0, atol=1e-8)
    np.testing.assert_allclose(difference[-1], by_penalty, rtol=0, atol=1e-8)
    # Product identity: <J v, u> = <v, J^T u>.
    keys = jax.random.split(jax.random.key(0), 3)
    v, w = jax.random.normal(keys[0], q.shape, q.dtype), jax.random.normal(keys[1], (), q.dtype)
    u = jax.random.normal(keys[2], by_penalty.shape, q.dtype)
    _, forward = jax.jvp(prune, (q, penalty), (v, w))
    back_q, back_penalty = jax.vjp(prune, q, jnp.asarray(penalty))[1](u)
    np.testing.assert_allclose(forward @ u, (v * back_q).sum() + w * back_penalty, rtol=1e-12)


def test_second_derivatives(smooth_point):
    q, penalty = smooth_point
    weight = jnp.asarray(np.random.default_rng(1).normal(size=q.shape[0]))
    value = lambda q, penalty: jnp.sin(prune(q, penalty)) @ weight
    gradient = lambda p: np.append(*map(np.ravel, jax.grad(value, (0, 1))(jnp.reshape(p[:-1], q.shape), p[-1])))
    point = np.append(np.ravel(q), penalty)
    expected = approx_fprime(point, gradient, 1e-7)
    blocks = jax.hessian(value, (0, 1))(q, jnp.asarray(penalty))
    size = q.size
    found = np.zeros((size + 1, size + 1))
    found[:size, :size], found[:size, size] = np.reshape(blocks[0][0], (size, size)), np.ravel(blocks[0][1])
    found[size, :size], found[size, size] = np.ravel(blocks[1][0]), blocks[1][1]
    # One-sided differences with steps of 1e-7: an error of that order.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)
    reverse = jax.jacrev(jax.jacrev(value, argnums=1), argnums=1)(q, jnp.asarray(penalty))
    np.testing.assert_allclose(reverse, blocks[1][1], rtol=1e-12)


def test_derivatives_at_kinks_are_the_papers(x64):
    equal = jnp.full((3, 2), 0.1)
    # Three groups of one: equal values are no violation. a = 2 * 0.6 / (1 + 2).
    jacobian = jax.jacrev(prune)(equal, 1.0)
    np.testing.assert_allclose(prune(equal, 1.0), 0.4, rtol=1e-15)
    np.testing.assert_allclose(jacobian, np.einsum("tu,i->tui", np.eye(3), np.ones(2)) / 3, rtol=1e-15)
    # An entry exactly at the value does not belong to the support: a = 1 / (1 + 1) with q + 1/2 = (1, 1/2).
    at_value = jnp.asarray([[0.5, 0.0]])
    np.testing.assert_allclose(prune(at_value, 1.0), 0.5, rtol=1e-15)
    np.testing.assert_allclose(jax.grad(lambda q: prune(q, 1.0)[0])(at_value), [[0.5, 0]], rtol=1e-15)
    # At the ends of [0, 1] nothing moves.
    for q in (jnp.full((3, 2), -0.5), jnp.full((3, 2), 9.0), jnp.full((1, 1), 1.5)):
        by_q, by_penalty = jax.grad(lambda q, penalty: prune(q, penalty).sum(), (0, 1))(q, 1.0)
        assert not by_q.any() and by_penalty == 0


def test_prune_under_vmap_and_jit(x64):
    q = jnp.stack([jnp.asarray(KINDS[kind](15, 8)) for kind in ("uniform", "traversed", "rising", "all above a half")])
    penalties = jnp.asarray([0.1, 1.0, 30.0])
    all_of_them = jax.jit(jax.vmap(jax.vmap(prune, (None, 0)), (0, None)))(q, penalties)
    gradient = jax.grad(lambda q: (prune(q, 1.0) ** 2).sum())
    gradients, alone = jax.jit(jax.vmap(gradient))(q), jax.jit(gradient)
    for i in range(4):
        np.testing.assert_allclose(gradients[i], alone(q[i]), atol=1e-15)
        for j in range(3):
            np.testing.assert_allclose(all_of_them[i, j], prune(q[i], penalties[j]), rtol=0, atol=1e-15)


def test_prune_reads_rows_in_chunks_of_any_size(monkeypatch, x64):
    q = jnp.asarray(uniform(31, 9))
    expected = prune_pav(q, 2.0)
    for chunk in (1, 4, 31):
        monkeypatch.setattr(isotonic.blocking, "chunk_of_rows", lambda rows, n, chunk=chunk: chunk)
        found = jax.jit(lambda q: prune_with_groups(q, 2.0))(q)
        np.testing.assert_allclose(found.values, expected[0], rtol=0, atol=1e-14)
        np.testing.assert_array_equal(found.group, expected[1])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_prune_keeps_the_dtype(dtype):
    q = jnp.asarray(uniform(15, 20), dtype)
    found = prune(q, 2.0)
    assert found.dtype == dtype
    expected = prune_pav(np.asarray(q, np.float64), 2.0)[0]
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=float(jnp.finfo(dtype).eps))
    assert jax.grad(lambda q: prune(q, 2.0).sum())(q).dtype == dtype
    # The penalty need not be a number of that dtype.
    np.testing.assert_allclose(np.asarray(prune(q, 1e-9), np.float64), np.where(q.max(1) > -0.5, 1, 0), atol=1e-3)


def test_prune_compiles_once(count_compilations):
    step = jax.jit(jax.value_and_grad(lambda q, penalty: prune(q, penalty).sum()))
    q = jnp.asarray(uniform(15, 20), jnp.float32)
    step(q, jnp.float32(1.0))
    assert count_compilations(step, jnp.asarray(rising(15, 20), jnp.float32), jnp.float32(3.0)) == 0


@pytest.mark.parametrize(
    ("q", "penalty", "message"),
    [
        (np.zeros((6, 3)), 1.0, r"q must have shape \(2\*\*\(depth \+ 1\) - 1, n\).*got \(6, 3\)"),
        (np.zeros((2, 3)), 1.0, r"got \(2, 3\)"),
        (np.zeros(7), 1.0, r"got \(7,\)"),
        (np.zeros((7, 0)), 1.0, r"got \(7, 0\)"),
        (np.zeros((0, 3)), 1.0, r"got \(0, 3\)"),
        (np.zeros((7, 3), int), 1.0, "q must be of a floating dtype"),
        (np.full((7, 3), np.nan), 1.0, "q must be finite, got 21 NaN"),
        (np.full((7, 3), np.inf), 1.0, "q must be finite"),
        (np.zeros((7, 3)), 0.0, "penalty must be finite and above 0, got 0.0"),
        (np.zeros((7, 3)), -1.0, "penalty must be finite and above 0"),
        (np.zeros((7, 3)), np.nan, "penalty must be finite and above 0"),
        (np.zeros((7, 3)), np.ones(2), r"penalty must be one number, got shape \(2,\): vmap"),
        (np.zeros((7, 3)), "much", "penalty must be a number above 0"),
        (np.zeros((7, 3)), lambda step: 1.0, "penalty must be a number above 0"),
        (np.zeros((7, 3), np.float32), 1e-40, "penalty must be a normal number of float32"),
        (np.zeros((7, 3), np.float32), 1e38, "penalty must be a normal number of float32 up to 4.1e[+]36, got 1e[+]38"),
        (np.full((7, 3), 1e38, np.float32), 1.0, r"q must be within \+-4.1e\+36 in float32"),
    ],
)
def test_bad_input_to_prune(q, penalty, message):
    for solve in (prune, prune_with_groups, prune_pav):
        with pytest.raises(ValueError, match=message):
            solve(q, penalty)


# --- Weighted least squares ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 50])
def test_tree_isotonic_on_chains_equals_scikit_learn(nodes, x64):
    rng = np.random.default_rng(nodes)
    targets, weights = np.round(rng.normal(size=nodes), 1), rng.uniform(0.1, 3, nodes)
    found = tree_isotonic(jnp.asarray(weights), jnp.asarray(targets), parent=np.arange(nodes) - 1)
    expected = IsotonicRegression(increasing=False).fit_transform(np.arange(nodes), targets, sample_weight=weights)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


def by_quadratic_program(weights, targets, parent) -> np.ndarray:
    """With a = its root's value - falls along the path, falls at least 0: bounded least squares."""
    nodes = len(targets)
    design, bounds = np.zeros((nodes, nodes)), np.zeros(nodes)
    for node in range(nodes):
        at = node
        while parent[at] >= 0:
            design[node, at] = -1
            at = parent[at]
        design[node, at], bounds[at] = 1, -np.inf
    root = np.sqrt(weights)
    found = lsq_linear(root[:, None] * design, root * targets, (bounds, np.inf), method="bvls", tol=1e-15)
    return design @ found.x


def test_tree_isotonic_equals_a_quadratic_program(x64):
    rng = np.random.default_rng(0)
    for trial in range(20):
        nodes = int(rng.integers(1, 16))
        forest = np.array([rng.integers(-1, node) if node else -1 for node in range(nodes)])
        names = rng.permutation(nodes)  # parents need not come first
        parent = np.full(nodes, -1)
        parent[names] = np.where(forest >= 0, names[forest], -1)
        if trial % 4 == 0:
            nodes, parent = 15, (np.arange(15) - 1) // 2
            parent[0] = -1
        weights, targets = rng.uniform(0.1, 3, nodes), rng.normal(size=nodes)
        found = tree_isotonic(jnp.asarray(weights), jnp.asarray(targets), parent=parent)
        np.testing.assert_allclose(found, by_quadratic_program(weights, targets, parent), rtol=0, atol=1e-8)
        if trial % 4 == 0:
            np.testing.assert_array_equal(found, tree_isotonic(jnp.asarray(weights), jnp.asarray(targets)))


def test_the_derivative_of_tree_isotonic(x64):
    rng = np.random.default_rng(3)
    weights, targets = jnp.asarray(rng.uniform(0.5, 2, 15)), jnp.asarray(rng.normal(size=15))
    assert len(np.unique(tree_isotonic(weights, targets))) < 15
    jax.test_util.check_grads(tree_isotonic, (weights, targets), order=2, modes=("fwd", "rev"), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_tree_isotonic_in_half_precision(dtype):
    nodes = 4095  # more than either dtype can count to
    targets = jnp.linspace(0, 1, nodes).astype(dtype)
    found = tree_isotonic(jnp.ones(nodes, dtype), targets, parent=np.arange(nodes) - 1)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), 0.5, atol=0.005)  # rises: one group


def test_only_ratios_of_weights_matter():
    targets = jnp.asarray([0.2, 0.9, 0.1])
    expected = tree_isotonic(jnp.ones(3), targets)
    np.testing.assert_allclose(tree_isotonic(jnp.full(3, 1e30), targets), expected, rtol=1e-6)
    np.testing.assert_allclose(tree_isotonic(jnp.full(3, 1e-30), targets), expected, rtol=1e-6)


def test_tree_isotonic_under_vmap(x64):
    targets = jnp.asarray(np.random.default_rng(2).normal(size=(5, 7)))
    found = jax.jit(jax.vmap(lambda y: tree_isotonic(jnp.ones(7), y)))(targets)
    for row, y in zip(found, targets, strict=True):
        np.testing.assert_array_equal(row, tree_isotonic(jnp.ones(7), y))


@pytest.mark.parametrize(
    ("weights", "targets", "parent", "message"),
    [
        (np.ones(3), np.zeros(4), None, r"weights must have the shape of targets, \(4,\), got \(3,\)"),
        (np.ones(4), np.zeros(4), None, r"targets must have 2\*\*\(depth \+ 1\) - 1 entries unless parent"),
        (np.zeros(3), np.zeros(3), None, "weights must be finite and above 0"),
        (np.ones(3), np.full(3, np.nan), None, "targets must be finite"),
        (np.ones(3), np.zeros(3, int), None, "targets must be floating"),
        (np.ones((3, 1)), np.zeros((3, 1)), None, r"targets must be floating, of shape \(nodes,\)"),
        (np.ones(3), np.zeros(3), [-1, 0], "parent must hold a number from -1 to 2 for each of 3 nodes"),
        (np.ones(3), np.zeros(3), [-1, 0, 3], "parent must hold a number from -1 to 2"),
        (np.ones(3), np.zeros(3), [-1.0, 0.0, 0.0], "parent must hold a number"),
        (np.ones(3), np.zeros(3), [-1, 2, 1], "parent must be a tree, got a circle through node 1"),
        (np.ones(3), np.zeros(3), [0, 0, 0], "parent must be a tree, got a circle"),
    ],
)
def test_bad_input_to_tree_isotonic(weights, targets, parent, message):
    with pytest.raises(ValueError, match=message):
        tree_isotonic(weights, targets, parent=parent)
