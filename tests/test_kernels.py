"""The fused kernels: one battery against their plain definitions, and what they lower to without the hardware."""

import contextlib
from functools import partial
import itertools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels import Config, Sizes, Unsupported, products
from pallas_kernels.launch import SHELLS
from tests import needs, oracles, sweeps

# Blocks as small as they may be, so that small samples fill several, as each backend would have them. Those of Triton
# have subtrees below a path, two tiles a program, several blocks of features and products of parts in bfloat16.
WHOLE = Config("mosaic_tpu", tile=16, block=8, features=16, interpret=True)
CUT = Config("triton", tile=8, block=8, features=16, subtree=2, steps=2, programs=1, interpret=True)
CONFIGS = {"whole": WHOLE, "cut": CUT}
ROUTES = ("sigmoid", "smooth_step", "violation")

# n around the blocks of 8 and 16; depths 1 to 5 (those to 10: the hard kernel).
SIZES = [("whole", (1, 1, 1, 1)), ("cut", (16, 21, 3, 10)), ("whole", (17, 5, 4, 26)), ("cut", (37, 21, 5, 1))]


def operands(n, p, depth, k, *, dtype=jnp.float32, trees=(), seed=0):
    """``x, weights, bias, leaves``, scores of size 1."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: jax.device_put(rng.normal(size=shape).astype(np.float32))
    splits = draw(*trees, 2**depth - 1, p) / np.float32(np.sqrt(p)), draw(*trees, 2**depth - 1)
    return draw(n, p).astype(dtype), *splits, draw(*trees, 2**depth, k)


def soft(route, implementation, x, *tree):
    return kernels.soft_routing(x, *tree, route=route, scale=0.8, implementation=implementation)


def path_sum(implementation, x, *tree):
    return kernels.path_sum(x, *tree, window=0.7, implementation=implementation)


def loss_of(loss, route, implementation, x, *tree):
    """The loss alone; targets and weights follow from x."""
    k, first_column = tree[-1].shape[-1], x[:, 0].astype(jnp.float32)
    y = jnp.outer(first_column, jnp.arange(1, k + 1, dtype=first_column.dtype)) / k
    if loss == "log":
        y = jnp.floor(first_column * 7).astype(jnp.int32) % k
    share = jnp.abs(first_column)
    result = kernels.expected_loss(x, y, *tree, share=share, loss=loss, route=route, implementation=implementation)
    return result[0]


FUNCTIONS = {f"soft {route}": partial(soft, route) for route in ROUTES} | {"path_sum": path_sum}
LOSSES = {f"{loss} {route}": partial(loss_of, loss, route) for loss in ("squared", "log") for route in ROUTES}


def with_gradients(fn, implementation, args):

    def projected(*args):
        out = fn(implementation, *args)
        return (out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)).sum(), out

    gradients, out = jax.jit(jax.grad(projected, argnums=(0, 1, 2, 3), has_aux=True))(*args)
    return out, *gradients


def assert_same(result, expected, rtol):
    """By the size of the largest number: sums in another order."""
    for a, b in zip(result, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(np.abs(b).max(), 1e-6))


def assert_is_plain(name, config, args, rtol):
    """Value and gradients of a kernel are those of its plain definition, in the same dtypes."""
    fn = (FUNCTIONS | LOSSES)[name]
    result = with_gradients(fn, config, args)
    assert_same(result, with_gradients(fn, "xla", args), rtol)
    return result


# What is not among SOME is in the slow tier. All functions at a sixth of the wide sizes, in turns whole and cut, are
# in the wide tier.
NAMES, ONCE = [*FUNCTIONS, *LOSSES], ("cut", (19, 5, 3, 3))
SOME = [("soft sigmoid", *SIZES[0]), ("soft sigmoid", *SIZES[2]), ("squared sigmoid", *SIZES[1]), ("path_sum", *ONCE)]
SOME += [("log violation", *ONCE)]
SLOW = [("soft violation", *ONCE), ("squared sigmoid", *SIZES[3]), ("soft sigmoid", *SIZES[1])]
WIDE = [(name, *size) for name, size in itertools.product(("soft sigmoid", "squared sigmoid", "path_sum"), SIZES)]
WIDE += [(name, *ONCE) for name in NAMES]
CASES = [pytest.param(case, marks=pytest.mark.slow) for case in SLOW]
CASES += [pytest.param(case, marks=pytest.mark.wide) for case in WIDE if case not in SOME + SLOW]


@pytest.mark.parametrize("case", [*SOME, *CASES], ids=str)
def test_values_and_gradients(case):
    name, config, size = case
    # Weights of leaves come from sums of logarithms, which are rounded once a level.
    assert_is_plain(name, CONFIGS[config], operands(*size), 1e-6 * max(3, size[2]))


# On the accelerator that is here: sizes beside those of its blocks.
DEVICE = {"gpu": "triton", "tpu": "mosaic_tpu"}.get(jax.default_backend(), "")
on_a_device = needs.mark(DEVICE, "a GPU or TPU")
REFUSED = ("soft smooth_step", "triton")


@on_a_device
@pytest.mark.parametrize("size", [(1000, 5, 3, 1), (4097, 32, 8, 3), (300, 32, 5, 10)], ids=str)
@pytest.mark.parametrize("name", [*(name for name in NAMES if (name, DEVICE) != REFUSED), "hard"])
def test_values_and_gradients_on_the_device(name, size):
    if name != "hard":
        assert_is_plain(name, DEVICE, operands(*size), 1e-5 * size[2])
        return
    args = operands(*size)
    leaf, out = jax.jit(partial(kernels.hard_routing, implementation=DEVICE))(*args)
    np.testing.assert_array_equal(leaf, oracles.walk(*args[1:3], args[0]))
    np.testing.assert_array_equal(out, args[3][leaf])


@pytest.mark.parametrize("depth", sweeps.quick(range(1, 11), (1, 4, 5)))
def test_hard(depth):
    config = WHOLE if depth % 2 else CUT
    args = operands(33, 5, depth, 3 if depth < 6 else 1)
    leaf, out = jax.jit(partial(kernels.hard_routing, implementation=config))(*args)
    expected = jax.jit(kernels.hard_routing)(*args)
    np.testing.assert_array_equal(leaf, expected[0])
    np.testing.assert_array_equal(out, expected[1])  # bit for bit: nothing is added to what the leaf holds
    assert leaf.dtype == jnp.int32 and len(np.unique(leaf)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_hard_near_ties(config):
    """Scores of whole numbers over 2^20: exactly 0, or as near as float32 tells apart; no product may be rounded."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-1000, 1000, (200, 3)) / 2**10, jnp.float32)
    weights = jnp.asarray(rng.integers(-1000, 1000, (15, 3)) / 2**10, jnp.float32)
    through = np.asarray(weights, np.float64) @ np.asarray(x[:15], np.float64).T  # node j passes through sample j
    bias = jnp.asarray(-through[np.arange(15), np.arange(15)], jnp.float32)
    bias = bias.at[::2].add(np.float32(2**-20))  # every other node misses by the least difference
    z = np.asarray(weights, np.float64) @ np.asarray(x, np.float64).T + np.asarray(bias, np.float64)[:, None]
    assert (z == 0).sum() >= 7
    leaf, _ = kernels.hard_routing(x, weights, bias, jnp.ones((16, 1)), implementation=config)
    np.testing.assert_array_equal(leaf, oracles.walk(weights, bias, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soft sigmoid", pytest.param("path_sum", marks=pytest.mark.wide)])
def test_bfloat16(name):
    """The weights are not rounded to the type of the samples; the gradient for samples is rounded once."""
    args = operands(17, 5, 3, 2, dtype=jnp.bfloat16)
    with jax.enable_x64(True):  # the kernels are float32 also where 64 bits are asked for
        result = assert_is_plain(name, CUT, args, 1e-2)
    assert {a.dtype for a in result} == {jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)}
    x, weights, bias, _ = operands(2000, 5, 3, 1, dtype=jnp.bfloat16)
    leaf = kernels.hard_routing(x, weights, bias, implementation=CUT)
    np.testing.assert_array_equal(leaf, oracles.walk(weights, bias, np.asarray(x, np.float32)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["soft sigmoid", pytest.param("squared violation", marks=pytest.mark.wide)])
def test_a_batch_of_trees_is_one_kernel(name):
    fn, (x, *trees) = (FUNCTIONS | LOSSES)[name], operands(17, 5, 3, 1, trees=(3,))
    pair = lambda implementation: jax.vmap(lambda *tree: with_gradients(fn, implementation, (x, *tree)))
    assert_same(pair(CUT)(*trees), pair("xla")(*trees), 3e-6)
    leaf, out = jax.vmap(partial(kernels.hard_routing, x, implementation=CUT))(*trees)
    expected = jax.vmap(partial(kernels.hard_routing, x))(*trees)
    np.testing.assert_array_equal(leaf, expected[0])
    np.testing.assert_array_equal(out, expected[1])


# Scores of a tree of depth 2, three a sample: 0, at and beside the ends of the smooth step, far and very far.
EDGES = np.array([[0, 0, 0], [-0.5, 0.5, 0], [0.5, -0.5, 0.25], [-1e4, 1e4, 1e18], [1e18, -1e18, 1e-18], [0, 30, -30]])


@pytest.mark.parametrize("route", ["sigmoid", "smooth_step"])
def test_edges_by_the_textbook_in_double_precision(route):
    values = np.array([[1.0, -2.0], [0.5, 3.0], [-1.5, 0.25], [2.0, 1.0]])
    projection = np.array([1.0, -0.5])

    def projected(*tree):  # of a sample of zeros, so that the scores are the biases
        zeros = jnp.zeros((1, 2)), jnp.zeros((3, 2))
        answer = kernels.soft_routing(*zeros, *tree, route=route, implementation=CUT)
        return (answer @ jnp.asarray(projection, jnp.float32)).sum()

    run = jax.jit(jax.value_and_grad(projected, (0, 1)))
    for z in EDGES:
        out, (d_bias, d_leaves) = run(jnp.asarray(z, jnp.float32), jnp.asarray(values, jnp.float32))
        step = oracles.sigmoid if route == "sigmoid" else partial(oracles.smooth_step, gamma=1.0)
        textbook = lambda z: oracles.expected_value(step(z), values @ projection)  # noqa: B023
        reach = oracles.leaf_probabilities(step(z))
        np.testing.assert_allclose(out, textbook(z), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(d_bias, oracles.numeric_gradient(textbook, z, 1e-8), rtol=1e-5, atol=2e-7)
        np.testing.assert_allclose(d_leaves, np.outer(reach, projection), rtol=1e-5, atol=1e-7)


def test_the_leaf_is_that_of_hard_routing():
    x, *tree = operands(37, 5, 5, 1)
    _, leaf = jax.jit(partial(kernels.expected_loss, implementation=CUT))(x, x[:, :1], *tree)
    np.testing.assert_array_equal(leaf, kernels.hard_routing(x, *tree)[0])


@pytest.mark.parametrize("name", sweeps.slow(["soft violation", "path_sum", "squared sigmoid"], ["path_sum"]))
def test_as_a_tpu_would(name, capfd):
    """Under the interpreter that minds memories, copies and races; uninitialised memory is NaN there."""
    minds = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)
    as_there = Config("mosaic_tpu", tile=128, block=8, features=128, interpret=minds)
    assert_is_plain(name, as_there, operands(300, 5, 4, 2), 4e-6)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def on_device(kind, platform):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


SOFT = {"routing_value": 1, "routing_gradient": 1, "routing_samples": 1}
LOWERED = {  # the kernels in value and gradients, by their number
    "soft smooth_step": SOFT,
    "soft sigmoid": SOFT,
    "path_sum": SOFT,
    "squared sigmoid": {"routing_gradient": 1},
    "log violation": {"routing_gradient": 1},
}


def lowered(name, implementation, platform, args):
    run = lambda *args: with_gradients((FUNCTIONS | LOSSES)[name], implementation, args)
    with on_device("NVIDIA H100", "gpu") if platform == "cuda" else contextlib.nullcontext():
        text = jax.jit(run).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert all(kernel in text for kernel in LOWERED[name])
    return text.count("custom_call @")


@pytest.mark.parametrize(("implementation", "platform"), [("mosaic_tpu", "tpu"), ("triton", "cuda")])
@pytest.mark.parametrize("name", sweeps.slow(LOWERED, ["path_sum", "log violation"]))
def test_lowers(name, implementation, platform):
    """At both ends of the sizes, the small one in the shorter dtype and where 64 bits are asked for."""
    if (name, implementation) == REFUSED:
        with pytest.raises(Unsupported, match="'triton' does not run this soft_routing, 'xla' runs everywhere"):
            lowered(name, implementation, platform, operands(10, 3, 2, 1))
        return
    large = (1000, 2048, 10, 26) if platform == "tpu" else (1000, 32, 10, 16)
    for size, dtype, wide in [(large, jnp.float32, False), ((1000, 21, 3, 1), jnp.bfloat16, True)]:
        with jax.enable_x64(wide):
            # Sums over the subtrees of a path need a visit of their own before their gradients.
            visits = 2 if platform == "cuda" and size[2] > 5 else 0
            visits *= {"path_sum": 1, "log violation": 0.5}.get(name, 0)
            calls = lowered(name, implementation, platform, operands(*size, dtype=dtype))
            assert calls == len(LOWERED[name]) + visits


@pytest.mark.skipif(bool(DEVICE), reason="there is an accelerator here")
@pytest.mark.parametrize("name", ["soft sigmoid", "path_sum", "squared sigmoid"])
def test_refused_where_it_cannot_run(name):
    """Also a gradient alone: where nobody needs the value, what is left must refuse as well, not be zeros."""
    x, *tree = operands(20, 3, 2, 1)
    gradient = jax.jit(jax.grad(lambda w: (FUNCTIONS | LOSSES)[name]("mosaic_tpu", x, w, *tree[1:]).sum()))
    hard = lambda known: partial(kernels.hard_routing, x, *tree, implementation=known)
    calls = (lambda: gradient(tree[0]), "mosaic_tpu"), *((hard(known), known) for known in ("mosaic_tpu", "triton"))
    for call, implementation in calls:
        with pytest.raises(Unsupported, match=f"implementation: '{implementation}' runs on a"):
            call()


@pytest.mark.slow
@pytest.mark.skipif(bool(DEVICE), reason="there is an accelerator here")
def test_a_sequence_is_tried_in_order():
    args, fn = operands(100, 5, 3, 1), FUNCTIONS["soft sigmoid"]
    expected = with_gradients(fn, "xla", args)
    for order in (("mosaic_tpu", "triton", "xla"), ("triton", "interpret"), ("xla", "mosaic_tpu")):
        assert_same(with_gradients(fn, order, args), expected, 3e-6)
    with pytest.raises(Unsupported, match="'mosaic_tpu' runs on a TPU and 'triton' runs on a CUDA GPU only"):
        fn(("mosaic_tpu", "triton"), *args)
    # Each platform has its own in one program.
    traced = jax.jit(partial(fn, ("triton", "mosaic_tpu", "xla"))).trace(*args)
    text = lambda platform: traced.lower(lowering_platforms=(platform,)).as_text()
    assert "tpu_custom_call" in text("tpu") and "custom_call @" not in text("cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "size", "message"),
    [
        ("triton", (10, 65, 3, 1), "takes up to 64 features and one output, or 32 .*got p = 65, k = 1"),
        ("triton", (10, 5, 3, 17), "takes up to 64 features and one output, or 32 .*got p = 5, k = 17"),
        ("mosaic_tpu", (10, 8192, 10, 1), "needs .* MB of fast memory for p = 8192, depth = 10, k = 1"),
    ],
)
def test_too_large_is_refused_by_name_and_left_to_xla(implementation, size, message):
    args = operands(*size)
    with pytest.raises(Unsupported, match=f"implementation '{implementation}' of soft_routing {message}"):
        kernels.soft_routing(*args, implementation=implementation)
    out = kernels.soft_routing(*args, implementation=(implementation, "xla"))
    np.testing.assert_array_equal(out, kernels.soft_routing(*args))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["mosaic_tpu", "triton"])
def test_a_sample_without_weight_does_not_count(backend):
    """Also in the last digits: what squares are centred at is a weighted mean."""
    x, *tree = operands(40, 3, 2, 2)
    how = Config(backend, tile=16, block=8, features=16, subtree=2, interpret=True)
    y, share = x[:, :2].at[3].set(1e6), jnp.full(40, 1 / 39).at[3].set(0)
    loss = lambda how: lambda *tree: kernels.expected_loss(x, y, *tree, share=share, implementation=how)[0]
    pair = [jax.value_and_grad(loss(how), (0, 1, 2))(*tree) for how in (how, "xla")]
    assert_same(*map(jax.tree.leaves, pair), 3e-6)


@pytest.mark.slow
def test_there_is_no_second_derivative():
    x, w, b, v = operands(5, 3, 2, 1)
    once = jax.grad(lambda b: kernels.soft_routing(x, w, b, v, implementation="interpret").sum())
    with pytest.raises(Unsupported, match="has only first-order reverse-mode derivatives, 'xla' has all derivatives"):
        jax.grad(lambda b: once(b).sum())(b)
    leaf = lambda v: kernels.hard_routing(x, w, b, v, implementation="interpret")[1].sum()
    np.testing.assert_array_equal(jax.grad(leaf)(v), jnp.zeros_like(v))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"implementation": ("xla", "bogus")}, "implementation must be one of 'xla', .*got 'bogus'"),
        ({"implementation": 5}, "implementation must be one of 'xla', .*got 5"),
        ({"implementation": ()}, "must name at least one implementation, got an empty sequence"),
        ({"scale": jnp.ones(3)}, r"scale must be one number, got shape \(3,\)"),
        *(({"route": bad}, "route must be one of 'sigmoid'") for bad in (["sigmoid"], "linear")),
        ({"x": jnp.ones(3)}, r"x must be \(n, p\)"),
        ({"x": jnp.ones((3, 2), jnp.int32)}, "x must be float32 or bfloat16, got int32"),
        *(({"weights": jnp.ones(shape)}, r"weights must be \(2\*\*depth - 1, 2\)") for shape in ((3, 4), (4, 2))),
        ({"weights": jnp.ones((2047, 2))}, "depth from 1 to 10"),
        ({"bias": jnp.ones(2)}, r"bias must be \(3,\)"),
        ({"leaves": jnp.ones(4)}, r"leaves must be \(4, k\)"),
        ({"loss": "hinge"}, "loss must be 'squared' or 'log'"),
        ({"y": jnp.ones(5)}, r"y must be \(5, 1\)"),
        ({"share": jnp.ones(4)}, r"share must be \(5,\)"),
        ({"backend": "foo"}, "backend must be 'mosaic_tpu' or 'triton', got 'foo'"),
        ({"tile": 0}, "tile must be an integer of at least 1, got 0"),
        ({"block": 3}, "block must be a power of two, got 3"),
        ({"features": 48}, "features must be a power of two, got 48"),
        ({"interpret": []}, r"interpret must be True, False or parameters, got \[\]"),
    ],
)
def test_refused(change, message):
    x, weights, bias, leaves = operands(5, 2, 2, 1)
    arguments = {"x": x, "weights": weights, "bias": bias, "leaves": leaves, "implementation": "interpret"}
    fn, arguments = kernels.soft_routing, arguments | change
    if change.keys() & {"loss", "y", "share"}:
        fn, arguments = kernels.expected_loss, {"y": x[:, :1]} | arguments
    if change.keys() & {"backend", "tile", "block", "features", "interpret"}:
        fn, arguments = Config, {"backend": "triton", "tile": 128, "block": 8, "features": 512} | change
    with pytest.raises(ValueError, match=message):
        fn(**arguments)


def test_parts_add_up_and_are_rounded():
    a = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)
    high, middle, low = (np.asarray(part, np.float64) for part in products.parts(a))
    np.testing.assert_array_equal(high + middle + low, a)
    assert (np.abs(middle) <= 2.0**-8 * np.abs(high)).all() and (middle < 0).any() and (middle > 0).any()


def test_sizes_that_a_device_cannot_take_are_left_to_xla():
    for small in (Config("mosaic_tpu", 16, 8, 16), Config("triton", 16, 8, 16)):
        with pytest.raises(Unsupported, match=f"implementation '{small.backend}' of path_sum needs"):
            SHELLS[small.backend].check("path_sum", small.layout(Sizes(64, 2, 2, 1)))
