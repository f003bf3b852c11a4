"""Eight devices have the result of one, and no row moves. Run by test_sharding.py, in a process that has eight."""

from functools import partial
import math
import re

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import jtrees
from jtrees import blocking, ops, sharding
from jtrees.routing import sharp
from jtrees.training import Batch, step
from tests import sweeps
from tests.test_battery import METHODS

N, FEATURES = 512, 3
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, FEATURES)).astype(np.float32)
Y = (np.abs(X[:, 0]) + X[:, 1]).astype(np.float32)
CLASS = np.digitize(Y, (0.5, 1.0)).astype(np.int32)
WEIGHT = RNG.uniform(0.5, 1.5, N).astype(np.float32)
KEY = jax.random.key(0)

CASES = {name: (make(numbers[0]), CLASS if y.dtype.kind == "i" else Y) for name, (make, numbers, y) in METHODS.items()}
CASES["tel, by paths"] = (jtrees.methods.tel(4, 3, 0.3, width=6), Y)
CASES["get, by paths"] = (jtrees.methods.get(4, 100.0), Y)
SOME = ("get, linear leaves", "dgt")  # the others are wide


@pytest.fixture(autouse=True)
def eight(monkeypatch, standard_promotion):
    """Eight devices; and blocks so small that each goes through several."""
    assert jax.device_count() == 8
    monkeypatch.setattr(blocking, "block_size", lambda nodes, n: max(1, min(n, 2**7 // nodes)))
    monkeypatch.setattr(blocking, "samples_on_paths", lambda trees: 32)
    monkeypatch.setitem(sharp.WIDTHS, 4, 6)


def collectives(text):
    """The kinds of collectives in a compiled program, and the most numbers that one sends."""
    calls = re.findall(r"= (\([^)]*\)|\S+) (all-\w+|collective-\w+|reduce-scatter|ragged-\S+)(?:-start)?\(", text)
    shapes = [dims for out, _ in calls for dims in re.findall(r"\[([\d,]*)\]", out)]
    sizes = [math.prod(map(int, dims.split(","))) if dims else 1 for dims in shapes]
    return {kind for _, kind in calls}, max(sizes, default=0)


def near(first, other, rtol=1e-4, atol=2e-5):
    """Two pytrees, equal up to float32 sums in another order."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=rtol, atol=atol), first, other)


def test_collectives_are_found_in_what_moves_rows():
    """The check that the others rest on can fail."""
    with jax.set_mesh(sharding.mesh()):
        turned = jax.jit(lambda x: x[::-1].cumsum(0)).lower(sharding.put_rows(X)).compile().as_text()
    kinds, size = collectives(turned)
    assert kinds and kinds != {"all-reduce"} and size >= N // 8


@pytest.mark.parametrize("name", sweeps.quick(CASES, SOME, []))
def test_a_step_is_that_of_one_device_and_moves_no_row(name):
    method, y = CASES[name]
    data, optimizer = Batch(X, y, WEIGHT), optax.sgd(0.1)
    state = jtrees.training.start(method, data, key=KEY, optimizer=optimizer)
    advance = lambda state, data: jtrees.training.advance(
        method, state, data, optimizer=optimizer, steps=3, score_every=1
    )
    alone, history = jax.jit(advance)(state, data)
    with jax.set_mesh(sharding.mesh()):
        program = jax.jit(advance).lower(state, sharding.put_rows(data)).compile()
        shared, shared_history = program(state, sharding.put_rows(data))
    kinds, size = collectives(program.as_text())
    largest = max(a.size for a in jax.tree.leaves(state.params))
    assert kinds == {"all-reduce"} and size <= max(2 * largest, largest + 64) < N
    near((alone.params, history), (shared.params, shared_history))


def test_a_mini_batch_takes_as_many_rows_of_each_part_and_moves_none():
    data, order = Batch(jnp.asarray(X), jnp.arange(N)), jnp.arange(N, dtype=jnp.int32)
    with jax.set_mesh(sharding.mesh(2, 4)):
        draw = jax.jit(partial(step.mini_batch, batch_size=64))
        data, visited = sharding.put_rows(data), []
        program = draw.lower(data, order, KEY, jnp.int32(0)).compile()
        assert collectives(program.as_text())[0] == set()
        for number in range(8):
            batch, order = draw(data, order, KEY, jnp.int32(number))
            assert batch.x.sharding.spec == P("data")
            rows = np.asarray(batch.y).reshape(4, 16)
            assert (rows // 128 == np.arange(4)[:, None]).all()
            np.testing.assert_array_equal(batch.x, X[rows.ravel()])
            visited.append(rows.ravel())
    visited = np.concatenate(visited)
    assert np.array_equal(np.sort(visited), np.arange(N)) and not np.array_equal(visited, np.arange(N))


@pytest.mark.wide
@pytest.mark.parametrize(("shape", "batch_size"), [((8, 1), None), ((8, 1), 100), ((4, 2), None)])
def test_starts_over_a_mesh_are_those_of_one_device(shape, batch_size):
    """Runs in a program of the user's own."""
    method, y = CASES["get"]
    watch = {"steps": 5, "score_every": 1, "batch_size": batch_size}
    run = lambda data, key: jtrees.train(method, data, key=key, optimizer=optax.sgd(0.1), **watch)
    keys, data = jax.random.split(KEY, 8), Batch(jnp.asarray(X), jnp.asarray(y))
    one_by_one = jax.jit(lambda data, keys: jax.lax.map(partial(run, data), keys))(data, keys)
    with jax.set_mesh(sharding.mesh(*shape)):
        many = jax.jit(lambda data, keys: jax.vmap(partial(run, data), spmd_axis_name="starts")(keys))
        values = many(sharding.put_rows(data), jax.device_put(keys, P("starts")))
    assert values.score.sharding.spec == P("starts")
    near(one_by_one, values)


GET, DGT = jtrees.GET(depth=2, starts=3, epochs=5), jtrees.DGT(depth=2, epochs=2, cycles=1, batch_size=N)
WEAK = GET.replace(starts=1, cart="binned", halving=False, precondition=0, shrink=False)
RECIPES = {
    "GET": GET,
    "DGT": DGT,
    "BestOf": jtrees.BestOf(DGT, runs=3),
    "Bagged": jtrees.Bagged(DGT, trees=3),
    "Polished": jtrees.Polished(DGT.replace(depth=1), epochs=5),
    "Boosted": jtrees.Boosted(WEAK, rounds=3, patience=None),
}


WAYS = [*((name, (2, 4)) for name in RECIPES), ("Bagged", (8, 1))]


@pytest.mark.parametrize("way", sweeps.quick(WAYS, WAYS[:1], []), ids=str)
def test_recipes_have_the_same_result_on_a_mesh(way):
    """All 512 rows are one mini-batch, so that their order does not matter."""
    name, shape = way
    alone = jtrees.fit(RECIPES[name], X, Y, key=KEY)
    with jax.set_mesh(sharding.mesh(*shape)):
        shared = jtrees.fit(RECIPES[name], X, Y, key=KEY)
    np.testing.assert_allclose(shared.loss, alone.loss, rtol=1e-4)
    np.testing.assert_allclose(shared.model.predict(X), alone.model.predict(X), rtol=1e-3, atol=1e-3)


def test_rows_are_padded_to_the_devices():
    """201 rows are no multiple of 8: the table is padded by rows of weight 0."""
    alone = jtrees.fit(DGT, X[:201], Y[:201], key=KEY)
    with jax.set_mesh(sharding.mesh()):
        shared = jtrees.fit(DGT, X[:201], Y[:201], key=KEY)
    np.testing.assert_allclose(shared.loss, alone.loss, rtol=1e-4)


def test_kernels_work_on_rows_where_they_lie():
    tree = jtrees.fit(GET, X, Y, key=KEY).tree
    operands = tree.weights, tree.bias, tree.leaves.values

    def results(weights, bias, values, x, y, how):
        expected = lambda weights, bias, values: ops.expected_loss(
            weights, bias, jtrees.leaves.Values(values), x, y, implementation=how
        )
        loss = lambda *args: expected(*args)[0]
        square = lambda *args: jnp.square(ops.soft(*args, x, implementation=how)).sum()
        gradients = [jax.grad(fn, argnums=(0, 1, 2))(weights, bias, values) for fn in (loss, square)]
        return expected(weights, bias, values), gradients, ops.hard(weights, bias, x, implementation=how)

    plain = jax.jit(partial(results, how="xla"))(*operands, X, Y)
    with jax.set_mesh(sharding.mesh()):
        fused = jax.jit(partial(results, how="interpret"))
        x, y = sharding.put_rows((X, Y))
        assert collectives(fused.lower(*operands, x, y).compile().as_text())[0] == {"all-reduce"}
        values = fused(*operands, x, y)
    near(plain, values, atol=1e-4)


def test_rows_and_batches_that_do_not_fit():
    """Meshes: test_sharding."""
    with jax.set_mesh(sharding.mesh()):
        assert sharding.join_rows({"x": X})["x"].shape == X.shape
        with pytest.raises(ValueError, match=r"rows must be a multiple of 8.*got 510"):
            sharding.put_rows(X[:510])
        with pytest.raises(ValueError, match="batch_size must be a multiple of the 8 parts of the rows, got 12"):
            jtrees.train(CASES["dgt"][0], Batch(X, Y), key=KEY, optimizer=optax.sgd(0.1), steps=1, batch_size=12)


@pytest.mark.wide
def test_meshes_of_others():
    """One of other axes is ignored; one whose data axis is explicit is refused."""
    method, y = CASES["dgt"]
    run = lambda: jtrees.train(method, Batch(X, y), key=KEY, optimizer=optax.sgd(0.1), steps=2)
    alone = run()
    with jax.set_mesh(jax.make_mesh((8,), ("x",))):
        np.testing.assert_allclose(run().losses, alone.losses, rtol=1e-6)
    with (
        jax.set_mesh(jax.make_mesh((8,), ("data",))),
        pytest.raises(ValueError, match="the axis data must be automatic"),
    ):
        run()
