"""Runs side by side: other runs of them, compiled functions of all of them, and the loop of updates."""

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import pytree, training
from jtrees.search import Recipe, Run, Runs, advanced, initial, options
from jtrees.search.monitor import Monitor
from jtrees.search.runs import MOST


@pytree.dataclass(kw_only=True)
class Walk(Recipe):
    """A recipe whose state moves by a rate in each update."""

    rate: float = options.positive(1.0)


def runs_of(*rates: float, n: int = 6, validation: Any = None, monitor: Monitor | None = None) -> Runs:
    x = np.arange(2.0 * n, dtype=np.float32).reshape(n, 2)
    batch = jtrees.Batch(x, np.arange(n, dtype=np.float32), np.ones(n, np.float32))
    recipes = [options.checked(Walk(rate=rate)) for rate in rates]
    keys = [np.array([0, k], np.uint32) for k in range(len(rates))]
    monitor = Monitor() if monitor is None else monitor
    return Runs(recipes, keys, jtrees.Regression(), batch, validation, monitor, impl="threefry2x32")


def start(run: Run) -> jax.Array:
    return jnp.zeros(())


def move(run: Run, state: jax.Array, before: jax.Array, count: jax.Array, evaluates: jax.Array):
    """Moves by the rate in each update; a run whose rate is above 100 becomes NaN and is over."""
    lost = jnp.where(
        jnp.arange(MOST) < count,
        state + run.recipe.rate * jnp.arange(MOST, dtype=jnp.float32),
        training.state.NOT_TAKEN,
    )
    after = state + run.recipe.rate * count.astype(jnp.float32)
    after = jnp.where(run.recipe.rate > 100, jnp.nan, after)
    return after, lost, jnp.isnan(after)


def weighted_sum(run: Run) -> jax.Array:
    return (run.batch.weight[:, None] * run.batch.x).sum(0)


def sum_to_evaluate(run: Run) -> jax.Array:
    return (run.by.weight[:, None] * run.by.x).sum(0)


def train(runs: Runs, steps: Any, **options: Any):
    return runs.train(move, runs.map(start), steps, name="walk", **options)


def test_each_run_has_its_own_numbers():
    runs = runs_of(1.0, 2.0, 3.0)
    found = runs.fetch(train(runs, 4).states)
    np.testing.assert_allclose(found, [4, 8, 12])


def test_losses_of_all_updates_are_recorded_once():
    found = train(runs_of(2.0), 3000)
    np.testing.assert_allclose(found.losses[0], 2 * np.arange(3000))


def test_runs_may_have_different_numbers_of_updates():
    runs = runs_of(1.0, 1.0, 1.0)
    found = train(runs, [3, 0, 5])
    np.testing.assert_allclose(runs.fetch(found.states), [3, 0, 5])
    assert [len(lost) for lost in found.losses] == [3, 0, 5]


def test_a_run_that_is_over_leaves_the_others_alone():
    runs = runs_of(1000.0, 1.0)
    found = train(runs, 50)
    states = runs.fetch(found.states)
    assert np.isnan(states[0]) and states[1] == 50


def test_parts_call_between_at_equal_distances():
    seen = []

    def between(states, done):
        seen.append(done)
        return states

    train(runs_of(1.0), 10, parts=4, between=between)
    assert seen == [3, 5, 8, 10]


def test_after_a_deadline_states_stay_as_they_are():
    runs = runs_of(1.0, monitor=Monitor(deadline=time.monotonic() - 1))
    first = train(runs, 100)  # the first training of a search has an update in any case
    assert runs.fetch(first.states) == [1]
    second = runs.train(move, first.states, 100, name="walk")
    assert runs.fetch(second.states) == [1] and len(second.losses[0]) == 0


def test_repeats_have_keys_of_their_own():
    runs = runs_of(1.0, 2.0).repeat(3)
    drawn = [runs.rng(i).random() for i in range(len(runs))]
    assert [float(one.rate) for one in runs.recipes] == [1, 1, 1, 2, 2, 2]
    assert len(set(drawn)) == 6
    assert drawn == [runs_of(1.0, 2.0).repeat(3).rng(i).random() for i in range(6)]
    assert len({bytes(jax.random.key_data(runs.key(i)).tobytes()) for i in range(6)}) == 6


def test_pairs_give_the_results_of_single_runs():
    runs, pairs = runs_of(1.0, 2.0).repeat(2), runs_of(1.0, 2.0).repeat(2, together=2)
    np.testing.assert_array_equal(runs.fetch(train(runs, 7).states), pairs.fetch(train(pairs, 7).states))


def test_selected_runs_keep_their_data():
    weights = [np.eye(6, dtype=np.float32)[i] * w for i, w in enumerate((1, 2, 3))]
    runs = runs_of(1.0, 1.0, 1.0).on(weight=weights).select([2, 0])
    sums = runs.fetch(runs.map(weighted_sum))
    np.testing.assert_allclose(sums, [[4, 5], [0, 1]])  # weights have mean 1 over the rows with weight


def test_rows_of_rows_are_rows_of_the_table():
    runs = runs_of(1.0).on(rows=[np.array([5, 3, 1, -1])]).on(rows=[np.array([2, 0, -1])])
    np.testing.assert_array_equal(runs.rows(0).x, [[2, 3], [10, 11], [10, 11]])
    np.testing.assert_array_equal(runs.rows(0).weight, [1, 1, 0])
    np.testing.assert_allclose(runs.fetch(runs.map(weighted_sum)), [[12, 14]])


@pytest.mark.parametrize("number", [0, 1])
def test_held_out_rows_are_evaluated_and_not_trained_on(number):
    out = [np.arange(6) == 0, np.zeros(6, bool)]
    runs = runs_of(1.0, 1.0).on(held_out=out)
    trained, evaluated = (runs.fetch(runs.map(fn)) for fn in (weighted_sum, sum_to_evaluate))
    if number == 0:
        np.testing.assert_allclose((trained[0], evaluated[0]), ([30, 35], [0, 1]))
        assert runs.rows(0).weight[0] == 0
    else:  # without any, the rows to evaluate on are those of training
        np.testing.assert_allclose((trained[1], evaluated[1]), ([30, 36], [30, 36]))


def test_mapped_features_are_those_of_the_validation_set_too():
    validation = jtrees.Batch(np.ones((3, 2), np.float32), np.zeros(3, np.float32), np.ones(3, np.float32))
    doubled = 2 * np.eye(2, dtype=np.float32)
    runs = runs_of(1.0, validation=validation).on(matrix=[doubled], features=[np.array([1, 0], np.float32)])
    np.testing.assert_allclose(runs.fetch(runs.map(weighted_sum)), [[60, 0]])
    np.testing.assert_allclose(runs.fetch(runs.map(sum_to_evaluate)), [[6, 0]])
    np.testing.assert_allclose(runs.rows(0).x[:, 1], 0)


def test_runs_of_the_same_data_share_what_is_computed_once():
    calls, weights = [], [np.ones(6, np.float32), np.zeros(6, np.float32)]
    runs = runs_of(1.0, 2.0, 3.0).on(weight=[weights[0], weights[1], weights[0]])
    assert runs.each_once(lambda i: calls.append(i) or i) == [0, 1, 0]
    assert calls == [0, 1]
    assert runs.each_once(lambda i: i, keyed=True) == [0, 1, 2]


def test_another_number_of_runs_compiles_nothing(count_compilations):
    train(runs_of(1.0), 3)
    assert count_compilations(lambda: train(runs_of(2.0, 3.0, 4.0).repeat(2), 20)) == 0


def test_chosen_runs_continue_from_fetched_states():
    """Successive halving: states with random keys go to the host, and the best runs continue with them."""
    x = np.random.default_rng(0).normal(size=(300, 2)).astype(np.float32)
    batch = jtrees.Batch(x, (x[:, 0] > 0).astype(np.float32), np.ones(300, np.float32))
    recipe = options.checked(jtrees.DGT(depth=2, epochs=10, widths=()))
    one = Runs(
        [recipe], [np.array([0, 1], np.uint32)], jtrees.Regression(), batch, None, Monitor(), impl="threefry2x32"
    )
    starts = one.repeat(4)
    host = starts.fetch(starts.train(advanced, starts.map(initial), 20, name="all").states)
    chosen = starts.select(np.array([3, 1]))
    found = chosen.train(advanced, [host[3], host[1]], 20, name="chosen", begins=20)
    expected = starts.fetch(starts.train(advanced, starts.map(initial), 40, name="all").states)
    for after, without in zip(chosen.fetch(found.states), [expected[3], expected[1]], strict=True):
        jax.tree.map(np.testing.assert_array_equal, after.params, without.params)
