"""Speed of TEL's conditional computation: loss and gradients of initial and trained trees, training steps against the
dense logistic layer, memory, and the crossover of the two algorithms.

python -m experiments.bench_tel [--repeats 15] [--write]

The task has ten trees, batches of 256 of 2560 samples with 20 features, and two classes. Training is 50 epochs of the
method with lazy Adam at 0.01. The floor is the three products that an algorithm over all splits cannot avoid: the
scores, the gradients of the weights and the gradients of the leaves. An algorithm that follows paths avoids them.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import benchmark
import jtrees
from jtrees import routing
from jtrees.routing import conditional
from jtrees.routing.by_level import Operands

TREES, BATCH, FEATURES, ROWS, EPOCHS, RATE = 10, 256, 20, 2560, 50, 0.01
STEPS = 20  # steps per timed call
# ms of loss and gradients of the authors' TensorFlow operator with 2 threads of a similar machine, as reported to us.
# The trained tree has gamma = 1.
AUTHORS = {4: (2.2, 2.2), 6: (5.9, 3.8), 8: (20.0, 10.0), 10: (81.0, 40.0)}
NAIVE = {10: 49.0, 12: 238.0, 14: 911.0}  # ms of a dense logistic layer, as reported to us


def samples() -> jtrees.Batch:
    """Returns the samples of a task that needs more than one split."""
    rng = np.random.default_rng(0)
    x, direction = rng.normal(size=(ROWS, FEATURES)), rng.normal(size=FEATURES)
    y = (x @ direction > 0) ^ (x[:, 0] * x[:, 1] > 0)
    return jtrees.Batch(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32))


def method(depth: int, gamma: float, kind: str) -> tuple[jtrees.Method, optax.GradientTransformation]:
    """Returns method and optimiser of ``"lazy"``, ``"dense"`` (Adam on all parameters) or ``"logistic"``."""
    options: dict[str, Any] = {"task": jtrees.Classification(2), "step": "logistic" if kind == "logistic" else "smooth"}
    rate = RATE if kind == "lazy" else None
    optimizer = jtrees.training.lazy_adam(RATE) if kind == "lazy" else optax.adam(RATE)
    return jtrees.methods.tel(depth, TREES, gamma, learning_rate=rate, **options), optimizer


def runner(depth: int, gamma: float, kind: str, data: jtrees.Batch) -> tuple[jtrees.training.TrainState, Any]:
    """Returns the initial state of a run, and a compiled function that makes a number of its steps."""
    ensemble, optimizer = method(depth, gamma, kind)
    state = jtrees.training.start(ensemble, data, key=jax.random.key(0), optimizer=optimizer)
    once = jtrees.training.step.one_step(ensemble, data, optimizer, batch_size=BATCH)
    updates = ROWS // BATCH * EPOCHS
    return state, jax.jit(lambda state, steps: jtrees.training.loop.advance_up_to(once, state, steps, length=updates))


@cache
def trained(depth: int, gamma: float) -> jtrees.methods.Ensemble:
    """Returns the ensemble after all epochs."""
    state, advance = runner(depth, gamma, "lazy", samples())
    return advance(state, jnp.int32(ROWS // BATCH * EPOCHS))[0].params


def loss_and_gradients(way: str, width: int = 1) -> Any:
    """Returns a function of sequential batches, by ``"level"``, along ``"paths"``, or as the library ``"chooses"``."""

    def outputs(inputs: Operands) -> jax.Array:
        if way == "level":
            return conditional._conditional(None, inputs)
        if way == "paths":
            return conditional._conditional(width, inputs)
        return routing.conditional_ensemble(*inputs)

    def loss(params: jtrees.methods.Ensemble, x: jax.Array, y: jax.Array, gamma: jax.Array) -> jax.Array:
        out = outputs(conditional.checked(x, params.weights, params.bias, params.leaf_values, gamma))
        return optax.losses.softmax_cross_entropy_with_integer_labels(out, y).mean()

    @jax.jit
    def over_batches(params: jtrees.methods.Ensemble, x: jax.Array, y: jax.Array, gamma: jax.Array) -> Any:
        zeros = jnp.zeros((), x.dtype), jax.tree.map(jnp.zeros_like, params)
        step = lambda _, batch: (jax.value_and_grad(loss)(params, *batch, gamma), None)
        return jax.lax.scan(step, zeros, (x, y))[0]

    return over_batches


@jax.jit
def floor(params: jtrees.methods.Ensemble, batches: jax.Array) -> Any:
    """Computes the products, tree by tree."""

    def products(tree: tuple[jax.Array, jax.Array], x: jax.Array) -> Any:
        weights, values = tree
        z = weights @ x.T
        return z @ x, jnp.concatenate([z, z[:1]]) @ (x[:, :2] * values[0])

    trees = lambda x: jax.lax.map(lambda tree: products(tree, x), (params.weights, params.leaf_values))
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(trees, batches[0]))
    return jax.lax.scan(lambda _, x: (trees(x), None), zeros, batches)[0]


def add_gradients(table: benchmark.Table, depth: int, repeats: int, data: jtrees.Batch) -> None:
    """Adds three rows: initial, trained with gamma = 1, trained with gamma = 0.1."""
    x, y = data.x.reshape(-1, BATCH, FEATURES), data.y.reshape(-1, BATCH)
    states = [("initial", 1.0, method(depth, 1.0, "lazy")[0].init(data, key=jax.random.key(0)))]
    states += [("trained", gamma, trained(depth, gamma)) for gamma in (1.0, 0.1)]
    chooses, level = loss_and_gradients("chooses"), loss_and_gradients("level")
    for i, (label, gamma, params) in enumerate(states):
        inputs = params, x, y, jnp.float32(gamma)
        count, _ = routing.reachable_leaves(x[0], params.weights, params.bias, gamma)
        calls: dict[str, Any] = {"ours": lambda a=inputs: chooses(*a), "level": lambda a=inputs: level(*a)}
        if count.mean() < 10:
            paths = loss_and_gradients("paths", int(count.mean()) + 1)
            calls["paths"] = lambda a=inputs, paths=paths: paths(*a)
        calls["floor"] = lambda params=params: floor(params, x)
        times = {
            name: [seconds / len(x) for seconds in calls] for name, calls in benchmark.in_turn(calls, repeats).items()
        }
        theirs = "-"
        if depth in AUTHORS and i < 2:
            reported = AUTHORS[depth][i]
            theirs = f"{reported:g} ({benchmark.ratio([reported / 1e3], times['ours'], 1)} x)"
        leaves = f"{count.mean():.2f}", count.max()
        ms = times["ours"], times["level"], times.get("paths", "-"), times["floor"]
        table.add(depth, label, f"{gamma:g}", *leaves, *ms, theirs)


def step_row(depth: int, repeats: int, data: jtrees.Batch, gamma: float = 0.1) -> list[Any]:
    """Returns a row of whole steps on a trained ensemble, of three kinds."""
    calls, compiled, memory = {}, [], 0.0
    for kind in ("lazy", "dense", "logistic"):
        state, advance = runner(depth, gamma, kind, data)
        compiled += benchmark.seconds(lambda a=advance, s=state: jax.block_until_ready(a(s, jnp.int32(1))), 1)
        if kind == "lazy":
            needs = advance.lower(state, jnp.int32(1)).compile().memory_analysis()
            memory = (needs.temp_size_in_bytes + needs.argument_size_in_bytes + needs.output_size_in_bytes) / 1e9
        many = jnp.int32(ROWS // BATCH * EPOCHS)
        state = state if kind == "logistic" else jax.block_until_ready(advance(state, many)[0])
        steps = jnp.int32(STEPS if kind != "logistic" or depth < 12 else 2)
        calls[kind] = lambda advance=advance, state=state, steps=steps: advance(state, steps)
    times = {}
    for kind, call in calls.items():  # not alternating: each kind keeps its arrays in the cache, as in a run
        jax.block_until_ready(call())
        steps = 2 if kind == "logistic" and depth >= 12 else STEPS
        calls = max(3, repeats // 3) if kind == "logistic" else repeats
        times[kind] = [t / steps for t in benchmark.seconds(lambda call=call: jax.block_until_ready(call()), calls)]
    lazy, dense, logistic = (times[kind] for kind in ("lazy", "dense", "logistic"))
    reported = f"{benchmark.ratio([NAIVE[depth] / 1e3], lazy, 0)} x" if depth in NAIVE else "-"
    ratios = f"{benchmark.ratio(logistic, lazy, 0)} x", f"{benchmark.ratio(dense, lazy, 1)} x", reported
    return [depth, lazy, dense, logistic, *ratios, " ".join(f"{first:.1f}" for first in compiled), f"{memory:.2f}"]


def crossover(depth: int, repeats: int, data: jtrees.Batch) -> list[str]:
    """Returns the row of the crossover: the leaves per sample and tree at which both algorithms cost the same."""
    x, y, params = data.x.reshape(-1, BATCH, FEATURES), data.y.reshape(-1, BATCH), trained(depth, 0.1)
    points, level = [], loss_and_gradients("level")
    for gamma in (0.1, 0.4, 0.8):
        count, _ = routing.reachable_leaves(x[0], params.weights, params.bias, gamma)
        if (mean := float(count.mean())) > 40:
            break
        inputs, paths = (params, x, y, jnp.float32(gamma)), loss_and_gradients("paths", int(mean) + 1)
        times = benchmark.in_turn(
            {"paths": lambda a=inputs, f=paths: f(*a), "level": lambda a=inputs: level(*a)}, repeats
        )
        points.append((mean, *(float(np.median(t)) / len(x) for t in times.values())))
    leaves, path_times, all_splits = np.array(points).T
    slope, start = np.polyfit(leaves, path_times, 1)
    equal = (np.median(all_splits) - start) / slope
    width = conditional.checked_width(None, depth)
    measured = ", ".join(f"{a:.2f}: {1e3 * b:.3g}" for a, b in zip(leaves, path_times, strict=True))
    return [str(depth), f"{1e3 * np.median(all_splits):.3g}", measured, f"{equal:.1f}", str(width)]


def main(arguments: list[str] | None = None) -> None:
    """Measures and writes three tables."""
    options = benchmark.parse("bench_tel", __doc__, arguments, repeats=15)
    data = samples()
    header = ["depth", "state", "gamma", "leaves a sample and tree", "at most", "ms", "by level", "by paths"]
    gradients = benchmark.Table(*header, "three products", "the authors' operator")
    for depth in (4, 6, 8, 10):
        add_gradients(gradients, depth, options.repeats, data)
    header = ["depth", "lazy Adam, ms", "Adam, ms", "logistic, ms", "logistic / lazy", "Adam / lazy", "reported"]
    steps = benchmark.Table(*header, "first calls, s", "GB")
    for depth in (8, 10, 12, 14):
        steps.add(*step_row(depth, options.repeats, data))
    ways = benchmark.Table("depth", "all splits", "leaves: paths", "equal at", "width")
    for depth in (6, 7, 8, 9, 10, 12):
        ways.add(*crossover(depth, options.repeats, data))
    notes = (
        f"Loss and gradients of all parameters, ms, median ± half the middle half of {options.repeats} alternating "
        "calls with ten batches each. The authors' figures (their TensorFlow operator, 2 threads, loss gradient "
        "included) were reported to us, from a similar machine on another day. Brackets show our speed relative to "
        "theirs.\n\n"
        "Whole training steps (forward, backward, update) with gamma = 0.1 after 50 epochs. The dense logistic layer "
        "is `ops.soft` under `vmap` with Adam, in its initial state. `reported`: relative to a dense logistic layer's "
        f"{', '.join(f'{v:g}' for v in NAIVE.values())} ms at depth {', '.join(map(str, NAIVE))}, as reported to us. "
        "First calls are in seconds. GB is the memory of the lazy program by the compiler's account: the states before "
        f"and after the step, and all temporary arrays of both algorithms.\n\n{steps}\n"
        "The crossover. `all splits`: ms of scoring all splits. `leaves: paths`: ms of following paths, by mean "
        "leaves per sample and tree. `equal at`: the number of leaves at which a straight line through these times "
        f"reaches the time of all splits. `width`: the default width.\n\n{ways}"
    )
    benchmark.write(options, gradients, notes)


if __name__ == "__main__":
    benchmark.compile_all_programs()
    main()
