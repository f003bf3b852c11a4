"""The training of one run on mini-batches: its schedule, the best epoch by validation, losses of the user's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.metrics import r2_score

import jtrees
from jtrees import Classification, Regression, blocking
from jtrees.data import Scaling
from jtrees.data.table import without_padding
from jtrees.search.minibatch import Schedule, advanced, has_stopped, initial
from jtrees.search.run import Evaluation, Run
from jtrees.tables import checked_table
from jtrees.tables.dataset import held_out_table
from tests import oracles, recipes, sweeps
from tests.problems import problem_of, run

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)
DGT = jtrees.DGT(depth=3, epochs=30, batch_size=50, widths=(16, 16))


@pytest.fixture(scope="module")
def noise():
    """Targets that are noise, of which 60 rows can be learnt by heart; and as many rows to evaluate on."""
    rng = np.random.default_rng(3)
    return tuple((rng.normal(size=(60, 4)), rng.normal(size=60)) for _ in range(2))


def test_without_epochs_there_are_100_passes_within_two_limits(data):
    steps = lambda n, epochs, **passes: Schedule.for_rows(n, epochs, 128, **passes).steps
    assert [steps(n, None) for n in (100, 128 * 10, 128 * 30, 10**6)] == [300, 1000, 3000, 7500]
    assert steps(128 * 30, None, passes=80) == 2400 and steps(100, None, passes=12, fewest=2000) == 2000
    # As many rows are seen in small batches as in those of 128.
    assert [Schedule.for_rows(10**6, None, size).steps for size in (8, 256)] == [7500 * 16, 7500]
    assert steps(1000, 2) == 14 and Schedule.for_rows(100, 2, 128) == Schedule(2, 1, 100, every=1)
    assert Schedule.for_rows(100, None, 128) == Schedule(300, 1, 100, every=3)
    fit = jtrees.fit(recipes.DGT.replace(epochs=None), *data, key=KEY)
    assert fit.step == len(fit.history) == 300


@pytest.mark.slow
def test_a_run_ends_when_the_loss_on_the_validation_set_no_longer_falls(noise):
    train, held_out = noise
    recipe = DGT.replace(epochs=120)
    long_run = jtrees.fit(recipe.replace(early_stopping=False), *train, key=KEY, validation=held_out)
    fit = jtrees.fit(recipe, *train, key=KEY, validation=held_out)
    updates = fit.step + 44  # one mini-batch and one evaluation an epoch
    assert fit.report.updates == updates == len(fit.history) < 120
    np.testing.assert_array_equal(fit.history, long_run.history[:updates])
    assert long_run.loss <= fit.loss and long_run.report.updates == 120
    # Runs side by side end when they would alone.
    best = jtrees.fit(jtrees.BestOf(recipe, runs=4), *train, key=KEY, validation=held_out)
    assert len(set(best.report.updates)) > 1 and best.step + 44 in best.report.updates


def test_a_run_stops_after_its_patience_of_evaluations(data):
    """DGT waits for 1.1 of its cycles, here of 10 evaluations."""
    rows = jtrees.Batch(*map(jnp.asarray, data))
    recipe = DGT.replace(epochs=40, cycles=4)
    run = Run(recipe, Regression(), rows, rows, KEY)
    state = initial(run)
    for waited in (10, 11):
        state = state.replace(waited=jnp.int32(waited))
        assert bool(has_stopped(run, state)) == (waited == 11)
        assert not has_stopped(run.replace(recipe=recipe.replace(early_stopping=False)), state)


EARLY = {name: recipes.RECIPES[name] for name in ("DGT", "TEL", "NODE", "GRANDE", "LatentTree")}
OTHERS = {name: recipes.RECIPES[name] for name in ("DTSemNet", "SoftDecisionTree", "FromMethod")}


@pytest.mark.wide
@pytest.mark.parametrize("validates", [False, True], ids=["", "validation"])
@pytest.mark.parametrize("recipe", (EARLY | OTHERS).values(), ids=EARLY | OTHERS)
def test_a_recipe_of_few_epochs_is_no_worse_than_the_constant(recipe, validates):
    rng = np.random.default_rng(0)
    x, x_new = rng.normal(size=(2, 2000, 6))
    y, y_new = (np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] for x in (x, x_new))
    recipe = type(recipe)(**({"make": recipe.make, "options": recipe.options} if hasattr(recipe, "make") else {}))
    for epochs in (1, 2, 3, 5):
        fit = jtrees.fit(recipe.replace(epochs=epochs), x, y, key=KEY, validation=(x_new, y_new) if validates else None)
        assert fit.step > 0
        assert r2_score(y, fit.predict(x)) > -0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["TEL", "NODE", "GRANDE"])
def test_the_last_training_has_the_updates_of_the_best_evaluation(noise, name):
    """The number of updates is the number at an evaluation: one for each epoch, here of a single update."""
    recipe = recipes.RECIPES[name].replace(epochs=40, batch_size=12)  # four updates an epoch of 48 rows, five of 60
    x, y = (np.concatenate([a, b]) for a, b in zip(*noise, strict=True))
    for seed in range(3):
        fit = jtrees.fit(recipe, x, y, key=jax.random.key(seed))
        assert fit.step == fit.report.updates
        assert fit.step % (len(x) // 12) == 0 and 0 < fit.step < 40 * (len(x) // 12)


def infinite_after_20_updates(rate):
    return optax.sgd(lambda step: jnp.where(step < 20, rate(step), jnp.inf))


def test_an_evaluation_before_the_training_became_non_finite_is_kept(data):
    recipe = recipes.RECIPES["FromMethod"].replace(epochs=30, batch_size=len(data[0]), rule=infinite_after_20_updates)
    with pytest.warns(UserWarning, match=r"non-finite, so the parameters after update \d+ are kept"):
        fit = jtrees.fit(recipe, *data, key=KEY, validation=data)
    assert 0 < fit.step <= 20 and np.isfinite(fit.loss)
    with pytest.raises(FloatingPointError, match="smaller learning_rate"):
        jtrees.fit(recipe, *data, key=KEY)


@pytest.mark.slow
def test_a_latent_tree_ends_when_its_learning_rate_has_vanished(noise):
    train, held_out = noise
    recipe = jtrees.LatentTree(depth=2, batch_size=25, epochs=200, patience=3, dropout=0.0)
    long_run, fit = (jtrees.fit(recipe.replace(early_stopping=stops), *train, key=KEY) for stops in (False, True))
    updates = fit.report.updates
    assert fit.step == updates == len(fit.history) and 12 < updates < len(long_run.history) // 2
    np.testing.assert_array_equal(fit.history, long_run.history[:updates])
    # What is left out moves weights by at most the sum of the learning rates, a thousandth and less.
    np.testing.assert_allclose(fit.predict(held_out[0]), long_run.predict(held_out[0]), atol=0.02)
    assert not np.array_equal(fit.predict(held_out[0]), long_run.predict(held_out[0]))


def off_one_hot(outputs, y):
    """A loss that changes with what is added to all logits."""
    return jnp.square(outputs - jax.nn.one_hot(y, 3)).mean(1)


def test_epochs_are_chosen_by_the_loss_of_the_logits(data):
    rng = np.random.default_rng(10)
    x_new = rng.normal(size=(100, 3))
    y_new = np.where(x_new[:, 0] + x_new[:, 1] > 0, 2.0, -1.0) + x_new[:, 2] + 0.1 * rng.normal(size=100)
    x, y, y_new = data[0], np.digitize(data[1], [-1, 1]), np.digitize(y_new, [-1, 1])
    recipe = jtrees.DGT(depth=2, epochs=12, batch_size=50, widths=(), learning_rate=0.1)
    task = Classification(3, off_one_hot)
    result = jtrees.fit(recipe, x, y, key=KEY, task=task, validation=(x_new, y_new))

    # The same training, epoch by epoch.
    table = checked_table(x, y, None, task)
    scaling = Scaling.fit(table)
    batch, validation = scaling.batch(table), scaling.batch(held_out_table(x_new, y_new, table))
    problem = problem_of(recipe, batch, task=table.task, key=KEY, validation=validation)
    real = without_padding(validation)

    async def epochs():
        state = await problem.map(initial)
        params = [state.host.params]
        for epoch in range(12):
            state, _ = await problem.train(advanced, state, 4, name="DGT", begins=4 * epoch)
            params.append(state.host.params)
        return params

    [params] = run(epochs(), engine=problem.engine)
    assert len(params) == 13
    losses, normalised = [], []
    for chain in params:
        joined, values = np.asarray(chain.factors[0]), np.asarray(chain.leaves.values, np.float64)
        logits = values[oracles.walk(joined[:, :-1], joined[:, -1], real.x)]
        probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        losses.append(np.mean((logits - np.eye(3)[real.y]) ** 2))
        normalised.append(np.mean((np.log(probabilities) - np.eye(3)[real.y]) ** 2))
    best = int(np.argmin(losses))
    assert result.step == 4 * best
    assert result.loss == pytest.approx(losses[best], rel=1e-4)
    odds = np.exp(np.asarray(params[best].leaves.values))
    np.testing.assert_allclose(result.tree.leaves.values, odds / odds.sum(1, keepdims=True), rtol=1e-5)
    assert best != np.argmin(normalised)  # or nothing was tested


@pytest.mark.parametrize("name", sweeps.quick(["GRANDE", "NODE", "LatentTree"], ["GRANDE"]))
def test_the_loss_in_blocks_of_rows_is_the_loss_of_all_rows(name, monkeypatch):
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    batch = jtrees.Batch(jnp.asarray(x), jnp.asarray(np.abs(x[:, 0])), jnp.asarray(1 + np.abs(x[:, 1])))
    recipe = recipes.RECIPES[name].replace(depth=2)
    run = Run(recipe, Regression(), batch, batch, KEY, Evaluation.EARLY_STOPPING)
    params = jax.jit(lambda: initial(run).params)()
    evaluate = lambda: jax.jit(lambda params: recipe.evaluate(run, params))(params)
    full = evaluate()
    monkeypatch.setattr(blocking, "evaluation_block", lambda numbers, n: 16)  # the last block is padded
    np.testing.assert_allclose(evaluate(), full, rtol=1e-6)


# All parameters and all rows are abstract: the program is compiled, but does not run.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "gigabytes"),
    [
        (jtrees.GRANDE(), 0.3),
        (jtrees.NODE(), 0.3),
        (jtrees.LatentTree(), 0.3),
        pytest.param(jtrees.LatentTree(depth=10), 1.0, marks=pytest.mark.wide),
    ],
    ids=["GRANDE", "NODE", "LatentTree", "LatentTree of depth 10"],
)
def test_an_evaluation_of_many_rows_needs_little_memory(recipe, gigabytes):
    rows, p = 102_400, 20  # a hundred thousand with padding
    batch = jtrees.Batch(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, p), (rows,), (rows,))))
    run = lambda batch: Run(recipe, Regression(), batch, batch, KEY, Evaluation.EARLY_STOPPING)
    params = jax.eval_shape(lambda batch: initial(run(batch)).params, batch)
    loss = lambda params, batch: recipe.evaluate(run(batch), params)
    compiled = jax.jit(loss).lower(params, batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < gigabytes * 1e9
