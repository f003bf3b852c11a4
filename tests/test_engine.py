"""The engine: procedures side by side, their calls alone and in stacks, and other problems of a problem."""

import gc
import os
import subprocess
import sys
import time
from typing import Any
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import pytree, training
from jtrees.search import MOST, Engine, Evaluation, Problem, Recipe, Run, engine as search_engine, gather, option
from jtrees.search.monitor import Monitor, Pace
from jtrees.search.problem import OutOfTimeError
from jtrees.search.stage import train_stage
from jtrees.tables import checked_table
from tests import ROOT, compiled, two_devices
from tests.problems import problem_of, problem_of_table, run


@pytree.dataclass(kw_only=True)
class Walk(Recipe):
    """A recipe whose state moves by a rate in each update."""

    rate: float = option(1.0, above=0)


def engine_of(stacked: bool = False, monitor: Monitor | None = None, size: int = 4) -> Engine:
    """An engine that makes a call at a time, or stacks of at most ``size`` calls, as on an accelerator."""
    return Engine(Monitor() if monitor is None else monitor, "threefry2x32", stack_size=size, side_by_side=stacked)


@pytest.fixture(params=[False, True], ids=["alone", "stacked"])
def engine(request) -> Engine:
    return engine_of(request.param)


def batch_of(n: int = 6) -> jtrees.Batch:
    x = np.arange(2.0 * n, dtype=np.float32).reshape(n, 2)
    return jtrees.Batch(x, np.arange(n, dtype=np.float32), np.ones(n, np.float32))


def problems_of(*rates: float, engine: Engine, batch: jtrees.Batch | None = None, **attributes: Any) -> list[Problem]:
    """Problems with different keys and rates, which share their rows."""
    batch = batch_of() if batch is None else batch
    recipes = [Walk(rate=rate) for rate in rates]
    return [problem_of(recipe, batch, key=k, engine=engine, **attributes) for k, recipe in enumerate(recipes)]


def start(run: Run) -> jax.Array:
    return jnp.zeros(())


def move(run: Run, state: jax.Array, before: jax.Array, count: jax.Array):
    """Moves by the rate in each update, whose loss is its number; a rate above 100 ends the run with NaN."""
    updates, rate = jnp.arange(MOST), run.recipe.rate
    losses = jnp.where(updates < count, (before + updates).astype(jnp.float32), training.state.NOT_TAKEN)
    after = jnp.where(rate > 100, jnp.nan, state + rate * count.astype(jnp.float32))
    return after, losses, jnp.isnan(after)


def times(run: Run, value: jax.Array) -> dict[str, jax.Array]:
    return {"value": run.recipe.rate * value, "twice": 2 * run.recipe.rate * value}


def total(run: Run, *values: jax.Array) -> jax.Array:
    return sum(values, run.recipe.rate)


def sums(run: Run) -> tuple[jax.Array, jax.Array]:
    """The weighted sums of the rows to train on, and of those to evaluate on."""
    weighted_sum = lambda batch: (batch.weight[:, None] * batch.x).sum(0)
    return weighted_sum(run.batch), weighted_sum(run.evaluation)


stacked_sizes = []  # numbers of calls of the stacks with a copy of the argument of ``watched`` for each call


@jax.custom_batching.custom_vmap
def watched(x: jax.Array) -> jax.Array:
    return x.sum()


@watched.def_vmap
def _watched_stack(size: int, is_stacked: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    stacked_sizes.append(size)
    return x.sum((1, 2)), True


def sum_of_features(run: Run) -> jax.Array:
    return run.recipe.rate + watched(run.batch.x)


def watched_kind(run: Run) -> jax.Array:
    return run.recipe.rate + watched(jnp.full((1, 1), run.kind, jnp.float32))


def watched_move(run: Run, state: jax.Array, before: jax.Array, count: jax.Array):
    return move(run, state + 0 * watched(run.batch.x + state), before, count)


async def walk(problem: Problem, steps: int, state: Any = None, **options: Any) -> Any:
    state = await problem.map(start) if state is None else state
    return await problem.train(move, state, steps, name="walk", **options)


async def mapped(problem: Problem, fn: Any, *args: Any) -> Any:
    return (await problem.map(fn, *args)).host


def walks(problems: list[Problem], steps: Any) -> tuple[list[float], list[np.ndarray]]:
    """The states after so many updates, and the losses."""
    steps = np.broadcast_to(steps, len(problems)).tolist()
    trained = run(*map(walk, problems, steps), engine=problems[0].engine)
    return [float(state.host) for state, _ in trained], [losses for _, losses in trained]


@pytest.mark.parametrize("steps", [[3] * 9, [3, 0, 5], [3000, 1]], ids=str)
def test_each_run_makes_its_own_updates_and_has_their_losses(engine, steps):
    rates = np.arange(1.0, len(steps) + 1)
    states, losses = walks(problems_of(1000.0, *rates, engine=engine), [7, *steps])
    assert np.isnan(states[0])  # which leaves the others alone
    assert states[1:] == (rates * steps).tolist()
    for count, numbers in zip(steps, losses[1:], strict=True):
        np.testing.assert_array_equal(numbers, np.arange(count))


@pytest.mark.parametrize("stacked", [False, True])
def test_after_a_deadline_states_stay_as_they_are(stacked):
    """The first training of all makes an update in any case; the second makes none."""
    late = engine_of(stacked, Monitor(deadline=time.monotonic() - 1))

    async def twice(problem):
        first, losses = await walk(problem, 100)
        second, no_losses = await walk(problem, 100, first)
        return float(first.host), float(second.host), len(losses), len(no_losses)

    for _ in range(2):  # also in another search
        assert run(*map(twice, problems_of(1.0, 2.0, engine=late)), engine=late) == [(1, 1, 1, 0), (2, 2, 1, 0)]
    assert late.monitor.ended_at == "walk: 0 of at most 100 updates"


@pytest.mark.parametrize("steps", [1, 7])
def test_the_division_into_calls_changes_nothing(engine, monkeypatch, steps):
    monkeypatch.setattr(Pace, "steps", lambda pace, limit: min(limit, steps))
    states, losses = walks(problems_of(1.0, 2.0, engine=engine), [20, 30])
    assert states == [20, 60]
    np.testing.assert_array_equal(losses[1], np.arange(30))
    [rest] = run(walk(problems_of(1.0, engine=engine)[0], 3, begins=40), engine=engine)
    assert rest.losses.tolist() == [40, 41, 42]


def evaluated(run: Run, state: jax.Array, patience: jax.Array):
    """The loss is minus the state, and early stopping ends the training at the state ``patience``."""
    return state, -state, state >= patience.astype(jnp.float32)


def staged(problem: Problem, patience: int) -> Any:
    """A training that is evaluated after 3, 7 and 12 updates."""

    async def search():
        state, options = await problem.map(start), {"patience": patience, "name": "walk"}
        return await train_stage(problem, move, evaluated, state, [0, 3, 7, 12], **options)

    return run(search(), engine=problem.engine)[0]


@pytest.mark.parametrize(("patience", "ends"), [(100, [3, 7, 12]), (7, [3, 7]), (1, [3])])
def test_a_stage_is_evaluated_after_each_part_until_early_stopping(engine, patience, ends):
    stage = staged(problems_of(1.0, engine=engine)[0], patience)
    assert float(stage.state.host) == ends[-1] and stage.evaluations.tolist() == [-end for end in ends]
    np.testing.assert_array_equal(stage.losses, np.arange(ends[-1]))


@pytest.mark.parametrize("concurrent", [1, 4, None])
def test_a_limited_number_of_procedures_run_at_a_time(engine, concurrent):
    """Results are in the order of the procedures, also of those that fail or end without a call."""
    running, counts = set(), []

    async def child(problem, number):
        running.add(number)
        counts.append(len(running))
        for _ in range(number % 3):
            await problem.map(total)
        running.remove(number)
        if number == 4:
            raise FloatingPointError
        return number

    async def parent(problem):
        return await gather(*map(child, problem.repeat(7), range(7)), concurrent=concurrent)

    [results] = run(parent(problems_of(1.0, engine=engine)[0]), engine=engine)
    assert results[:4] == [0, 1, 2, 3] and isinstance(results[4], FloatingPointError) and results[5:] == [5, 6]
    assert max(counts) <= (concurrent or 7) and not running


@pytest.mark.parametrize("error", [FloatingPointError, OutOfTimeError])
def test_an_error_of_a_search_is_a_value_for_its_parent(engine, error):
    """An underflow of NumPy is no error."""

    async def child(problem):
        await walk(problem, 3)
        if problem.recipe.rate == 2:
            raise error("non-finite")
        return float(np.float32(1e-30) * np.float32(1e-30))

    async def parent():
        return await gather(*map(child, problems_of(1.0, 2.0, 3.0, engine=engine)))

    with np.errstate(all="raise"):
        [[first, second, third]] = run(parent(), engine=engine)
    assert (first, third) == (0, 0) and isinstance(second, error)


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_other_errors_end_all_procedures(engine, raised):
    """Those that wait, those that wait for others, and those that have not begun; without a warning of any."""
    closed = []

    async def child(problem):
        try:
            await problem.map(start)
            await problem.map(broken if problem is problems[2] else total)
        finally:
            closed.append(problem)

    async def parent(problem):
        try:
            await gather(*map(child, problem.repeat(3)), concurrent=2)
        finally:
            closed.append(problem)

    def broken(run):
        raise raised("other")

    problems = problems_of(1.0, 2.0, 3.0, engine=engine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(raised, match="other"):
            engine.run(parent(problems[0]), child(problems[2]), child(problems[1]))
        gc.collect()
    assert not caught and len(closed) >= 5
    assert run(mapped(problems[0], total), engine=engine) == [1]  # the engine can go on


def test_ended_procedures_and_their_results_are_not_kept(engine):
    """Many rounds need no more memory than one."""
    living, counts = weakref.WeakSet(), []

    async def child(problem):
        await problem.map(start)
        living.add(large := Walk())
        return large

    async def rounds(problem):
        for _ in range(5):
            await gather(*map(child, problem.repeat(2)))
            counts.append(len(living))

    run(rounds(problems_of(1.0, engine=engine)[0]), engine=engine)
    assert max(counts) <= 2


def test_work_on_the_host_is_done_once_for_the_same_arrays_of_a_run(engine):
    calls, (a, b) = [], (np.ones(3), np.ones(3))

    def work(array, number):
        calls.append(number)
        return array + number

    async def procedure(problem):
        return [problem.computed_once(work, array, number) for array, number in ((a, 1), (a, 2), (b, 1))]

    problems = problems_of(1.0, 2.0, engine=engine)
    for _ in range(2):  # the second run has forgotten the values of the first
        first, second = run(*map(procedure, problems), engine=engine)
        assert first[0] is second[0] and first[0] is not first[2]
    assert calls == 2 * [1, 2, 1]


def test_a_large_array_is_put_on_the_device_once(engine, monkeypatch):
    """In a run of procedures, for all calls of all problems."""
    shapes, put = [], jax.device_put

    def counted(tree, *args):
        shapes.extend(leaf.shape for leaf in jax.tree.leaves(tree) if isinstance(leaf, np.ndarray))
        return put(tree, *args)

    async def procedure(problem):
        return [await mapped(problem, sums) for _ in range(2)]

    monkeypatch.setattr(jax, "device_put", counted)
    run(*map(procedure, problems_of(1.0, 2.0, engine=engine, batch=batch_of(5000))), engine=engine)
    assert shapes.count((5000, 2)) == 1


def test_calls_are_made_together_in_stacks_of_about_equal_size(count_compilations):
    """Nine calls in stacks of at most four: three of three, and no padding. A shared array has no axis in a stack."""
    problems = problems_of(*range(1, 10), engine=engine_of(stacked=True))
    for n, sizes in ((6, []), (8, [3])):
        actual = problems if n == 6 else [problem.replace(batch=batch_of(n)) for problem in problems]
        stacked_sizes.clear()
        results = run(*(mapped(problem, sum_of_features) for problem in actual), engine=problems[0].engine)
        assert results == [rate + actual[0].batch.x.sum() for rate in range(1, 10)] and stacked_sizes == sizes
    # Stacks keep their size, and the last is padded, also in a new engine: another number of problems compiles nothing.
    states = lambda *rates, engine: walks(problems_of(*rates, engine=engine), 3)[0]
    states(1.0, 2.0, 3.0, 4.0, engine=(engine := engine_of(stacked=True)))
    results = []
    for rates in ((5.0, 6.0), (7.0,), tuple(range(1, 10))):
        assert count_compilations(lambda rates=rates: results.extend(states(*rates, engine=engine))) == 0
    assert results == [15, 18, 21, *range(3, 30, 3)]
    assert count_compilations(lambda: states(1.0, 2.0, 3.0, 4.0, engine=engine_of(stacked=True))) == 0


@pytest.mark.parametrize("different", [False, True])
def test_stacked_runs_share_the_kind_of_their_evaluation_rows(different):
    """A branch on a shared kind remains a branch. Runs with and without held-out rows have one program."""
    problems = problems_of(1.0, 2.0, engine=engine_of(stacked=True))
    masks = np.arange(6) == 0, np.zeros(6, bool) if different else np.arange(6) == 1
    parts = [problem.holding_out(mask) for problem, mask in zip(problems, masks, strict=True)]
    stacked_sizes.clear()
    results = run(*(mapped(part, watched_kind) for part in parts), engine=problems[0].engine)
    assert results == [1 + 1, 2 + (0 if different else 1)] and stacked_sizes == ([2] if different else [])


@pytest.mark.parametrize("survivors", [[1, 3], []], ids=str)
def test_survivors_of_a_stack_continue_in_the_programs_of_the_whole_stack(engine, survivors, count_compilations):
    async def procedure(problem, survives=True):
        state = await problem.map(start)
        if not survives:
            raise FloatingPointError
        state, _ = await walk(problem, 4, state)
        return float((await problem.map(total, state)).host)

    problems, results = problems_of(1.0, 2.0, 3.0, 4.0, engine=engine), []
    assert engine.run(*map(procedure, problems)) == [5, 10, 15, 20]
    procedures = [procedure(problem, k in survivors) for k, problem in enumerate(problems)]
    assert count_compilations(lambda: results.extend(engine.run(*procedures))) == 0
    for k, result in enumerate(results):
        assert result == 5 * (k + 1) if k in survivors else isinstance(result, FloatingPointError)


@pytest.mark.parametrize(
    ("steps", "survivors", "smaller"), [(10, (1, 5), set()), (2000, (1, 5), {2}), (2000, (5,), set())]
)
def test_few_survivors_of_many_updates_train_in_a_smaller_stack(steps, survivors, smaller):
    """Of eight calls in stacks of eight: a stack of two trains two if that saves enough updates; one has no stack."""

    async def procedure(problem, steps):
        state = (await problem.train(watched_move, await problem.map(start), 4, name="walk")).state
        if steps:
            state = (await problem.train(watched_move, state, steps, name="walk")).state
        return float((await problem.map(total, state)).host)

    engine = engine_of(stacked=True, size=8)
    rows = batch_of(11 + steps + len(survivors))  # kept programs differ
    problems = problems_of(*map(float, range(1, 9)), engine=engine, batch=rows)
    run(*(procedure(problem, 0) for problem in problems), engine=engine)
    stacked_sizes.clear()
    counts = [steps if k in survivors else 0 for k in range(8)]
    results = run(*map(procedure, problems, counts), engine=engine)
    assert results == [(k + 1) * (5 + count) for k, count in enumerate(counts)]
    assert {*stacked_sizes} - {8} == smaller


@pytest.mark.parametrize("order", [[1, 0], [0, 0, 1], [3, 2, 1, 0], [2]], ids=str)
def test_values_on_the_device_continue_in_any_order(engine, order):
    """Results of a stack of four calls are arguments of fewer, others, or the same in another order."""

    async def parent(problems):
        values = await gather(*(problem.map(times, np.float32(1)) for problem in problems))
        pairs = zip([problems[k] for k in order], [values[k] for k in order], strict=True)
        sums = await gather(*(mapped(problem, with_number, value, np.float32(100)) for problem, value in pairs))
        equal = await gather(*(mapped(problem, with_number, values[0], np.float32(1)) for problem in problems))
        states = [state for state, _ in await gather(*map(walk, problems, (2, 5, 0, 9)))]
        chosen = [problems[k] for k in order], [2] * len(order)
        continued = await gather(*map(walk, *chosen, [states[k] for k in order]))
        swapped = await gather(*map(walk, *chosen, [states[3 - k] for k in order]))
        return sums, equal, [float(state.host) for state, _ in continued + swapped]

    [(sums, equal, states)] = run(parent(problems_of(1.0, 2.0, 3.0, 4.0, engine=engine)), engine=engine)
    assert sums == [100 + 4 * (k + 1) for k in order]
    assert equal == [1 + 3 + rate for rate in (1, 2, 3, 4)]
    ends, moved = [2, 10, 0, 36], [2 * (k + 1) for k in order]
    begins = [ends[k] for k in order] + [ends[3 - k] for k in order]
    assert states == np.add(begins, 2 * moved).tolist()


def with_number(run: Run, values: dict[str, jax.Array], number: jax.Array) -> jax.Array:
    return run.recipe.rate + values["value"] + values["twice"] + number


SOME = ("DGT", "Bagged", "FromMethod")
OTHERS = tuple(name for name in two_devices.RECIPES if name not in SOME)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SOME, pytest.param(OTHERS, marks=pytest.mark.wide)], ids=["some", "others"])
@pytest.mark.usefixtures("standard_promotion")
def test_two_devices_have_the_bits_of_one(names, tmp_path):
    """Fits, and sweeps of five runs in three folds; a second fit compiles nothing."""
    file = tmp_path / "two.npz"
    command = [sys.executable, "-m", "tests.two_devices", str(file), "2", *names]
    subprocess.run(command, check=True, timeout=900, cwd=ROOT, env=os.environ | compiled.environment())
    numbers = dict(np.load(file))
    for name in names:
        np.testing.assert_array_equal(two_devices.results(name), numbers[name], err_msg=name)
    assert not numbers["compilations"].any()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_repeats_have_different_keys(impl):
    """They are of the implementation of the fit."""

    def bits(run):
        return jax.random.bits(run.key)

    engine, key = Engine(Monitor(), impl), jax.random.key(3, impl=impl)
    problem = problem_of(Walk(), batch_of(), engine=engine).replace(key=np.asarray(jax.random.key_data(key)))
    assert run(mapped(problem, bits), engine=engine) == [jax.random.bits(key)]
    repeats, again = problem.repeat(3), problem.repeat(9)
    assert (
        len({start.key.tobytes() for start in repeats}) == len({start.rng("folds").random() for start in repeats}) == 3
    )
    draws = {problem.rng(*purpose).random() for purpose in (("folds",), ("starts",), ("weights",), ("weights", 1))}
    assert len(draws) == 4
    assert [start.key.tolist() for start in repeats] == [start.key.tolist() for start in again[:3]]
    assert repeats[0].key.shape == problem.key.shape


def test_rows_that_are_held_out_are_evaluated_and_not_trained_on(engine, count_compilations):
    """Without any, the training rows are evaluated, in the same program. A validation set remains."""
    sums_of = lambda problem: tuple(part.tolist() for part in run(mapped(problem, sums), engine=engine)[0])
    problem = problems_of(1.0, engine=engine)[0]
    rest, unchanged = problem.holding_out(np.arange(6) == 0), problem.holding_out(np.zeros(6, bool))
    assert sums_of(rest) == ([30, 35], [0, 1])
    assert rest.count == 5 and rest.kind is Evaluation.HELD_OUT and not rest.weighed[0]
    assert count_compilations(lambda: sums_of(unchanged)) == 0
    assert sums_of(unchanged) == sums_of(problem) == ([30, 36], [30, 36])
    assert unchanged.count == 6 and unchanged.kind is Evaluation.TRAINING

    smaller = rest.holding_out(np.arange(6) == 5)
    assert smaller.count == 4 and sums_of(smaller) == ([20, 24], [10, 11])
    bootstrapped = problem.bootstrap(np.array([5, 3, 1, 3, -1])).bootstrap(np.array([1, 3, 2, -1]))  # rows may repeat
    np.testing.assert_array_equal(bootstrapped.batch.x[:3], [[6, 7], [6, 7], [2, 3]])
    np.testing.assert_allclose(bootstrapped.batch.weight, [1, 1, 1, 0])
    assert bootstrapped.count == 3 and bootstrapped.shape == (4, 2)
    sample = problem.sample(np.array([4, 2, -1]), np.array([3.0, 1.0, 0.0], np.float32))
    assert sums_of(sample)[0] == [(3 * 8 + 4) / 2, (3 * 9 + 5) / 2]  # weights of mean 1

    validation = jtrees.Batch(np.ones((3, 2), np.float32), np.zeros(3, np.float32), np.ones(3, np.float32))
    [problem] = problems_of(1.0, engine=engine, validation=validation)
    assert sums_of(problem.holding_out(np.arange(6) == 0)) == ([30, 35], [3, 3])
    assert sums_of(problem.preconditioned_by(2 * np.eye(2, dtype=np.float32))) == ([60, 72], [6, 6])


def test_training_evaluates_on_the_first_fifth_of_the_rows_which_has_all_that_are_held_out(engine):
    def early(run):
        part = run.rows_during_training
        return part.x, part.y, part.weight

    batch = batch_of(12)
    held_out = np.isin(np.arange(12), (3, 8))
    [problem] = problems_of(1.0, engine=engine, batch=batch)
    x, y, weight = run(mapped(problem.holding_out(held_out, Evaluation.EARLY_STOPPING), early), engine=engine)[0]
    assert len(x) == 3 and y[:2].tolist() == [3, 8] and (weight > 0).tolist() == [True, True, False]
    np.testing.assert_array_equal(x, batch.x[y.astype(int)])
    [validated] = problems_of(1.0, engine=engine, batch=batch, validation=batch_of(4))
    assert len(run(mapped(validated.holding_out(held_out, Evaluation.EARLY_STOPPING), early), engine=engine)[0][1]) == 4


@pytest.fixture
def table_problem():
    """A problem of 40 rows of a table, with weights; the features are numbers of rows."""
    weight = np.linspace(0.5, 1.5, 40)
    table = checked_table(np.arange(40.0)[:, None], np.arange(40.0) ** 2, weight, "regression")
    return problem_of_table(Walk(), table, engine=engine_of())


def table_rows(problem: Problem) -> list[int]:
    """The rows of the table that the problem trains on, checked against the scaled rows."""
    rows = problem.rows[problem.weighed]
    assert (rows >= 0).all() and (problem.rows[~problem.weighed] == -1).all()
    numbers = problem.data.table.x[rows, 0]
    scaled = np.asarray(problem.data.scaling.transform(numbers[:, None]))
    np.testing.assert_allclose(problem.batch.x[problem.weighed], scaled, rtol=1e-5)
    assert np.ptp(problem.batch.weight[problem.weighed] / problem.data.table.weight[rows]) < 1e-5
    return numbers.astype(int).tolist()


def test_rows_of_other_problems_are_rows_of_their_tables(table_problem):
    assert table_rows(table_problem) == list(range(40))
    without = table_problem.holding_out(table_problem.rows % 4 == 1)
    rest = [row for row in range(40) if row % 4 != 1]
    assert table_rows(without) == rest == without.data.table.x[:, 0].astype(int).tolist()
    assert without.data.validation.x[:, 0].astype(int).tolist() == list(range(1, 40, 4))
    smaller = without.holding_out(without.rows % 30 == 2)  # rows of the table without the first rows
    assert table_rows(smaller) == rest[:2] + rest[3:]
    bag = np.array([7, 7, 2, 28, 0])
    bag_problem = smaller.bootstrap(np.append(np.flatnonzero(smaller.weighed)[bag], -1))
    assert table_rows(bag_problem) == [table_rows(smaller)[row] for row in bag]
    assert bag_problem.data.table.x[:, 0].astype(int).tolist() == table_rows(bag_problem)
    weights = table_problem.data.table.weight[table_rows(bag_problem)]
    np.testing.assert_allclose(bag_problem.data.table.weight, weights / weights.mean(), rtol=1e-6)
    # A sample keeps the table: leaves are fitted to the rows that were not sampled, too.
    weight = np.append(table_problem.data.table.weight[[3, 8, 20]], 0).astype(np.float32)
    sample = table_problem.sample(np.array([3, 8, 20, -1]), weight)
    assert table_rows(sample) == [3, 8, 20] and len(sample.data.table.x) == 40
    without = sample.holding_out(np.arange(4) == 1)
    assert table_rows(without) == [3, 20] and len(without.data.table.x) == 39


def test_the_losses_of_held_out_rows_are_those_of_the_table(table_problem):
    """Rows are numbered as in the table, whatever is held out; a loss that is no number is as bad as any."""

    class Model:
        def predict(self, x):
            return np.where(x[:, 0] == 5, np.nan, x[:, 0] ** 2 + 3)

    held_out = (table_problem.rows >= 0) & (table_problem.rows % 4 == 1)
    left_out = table_problem.left_out(Model(), held_out)
    assert left_out.rows.tolist() == list(range(1, 40, 4)) and left_out.chose and not left_out.several
    expected = np.where(left_out.rows == 5, np.inf, 9)
    np.testing.assert_allclose(left_out.losses[left_out.rows], expected)


@pytest.mark.parametrize("name", ["rarely_compiled", "often_compiled"])  # the first calls, and updates
def test_stacks_that_need_too_much_memory_are_halved(name, monkeypatch):
    sizes, program = [], getattr(search_engine, name)

    class Program:
        """A program on a device with memory for three runs."""

        def __getattr__(self, attribute):
            return getattr(program, attribute)

        def __call__(self, form, values, counts):
            sizes.append(len(values[1].key))
            if sizes[-1] > 3:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 100 bytes.")
            return program(form, values, counts)

    async def procedure(problem):
        state, _ = await problem.train(move, await problem.map(start), 4, name="walk")
        return float(state.host)

    monkeypatch.setattr(search_engine, name, Program())
    engine = Engine(Monitor(), "threefry2x32", stack_size=8, side_by_side=True)
    with pytest.warns(UserWarning, match="runs at once need more memory") as caught:
        results = run(*map(procedure, problems_of(*map(float, range(1, 9)), engine=engine)), engine=engine)
    assert results == [4.0 * k for k in range(1, 9)]
    assert sizes[:3] == [8, 4, 2] and set(sizes[3:]) == {2}
    assert len(caught) == 2 and "2 run at once (batch=2)" in str(caught[1].message)
