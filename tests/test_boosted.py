"""Boosting: the sum of trees is that of a plain loop; losses, early stopping, rows and columns drawn."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import Classification, Policy, Regression, losses, pytree, training
from jtrees.data import Data
from jtrees.ensembles import boosting_sums
from jtrees.search import Fitted, Run, options
from jtrees.search.monitor import Monitor
from jtrees.tables import checked_table
from jtrees.tasks.base import linked
from tests import sweeps

pytestmark = pytest.mark.usefixtures("standard_promotion")  # Adam; see the fixture

KEY = jax.random.key(0)
rng = np.random.default_rng(0)
X = rng.normal(size=(256, 3)).astype(np.float32)
Y = np.where(X[:, 0] + X[:, 1] > 0, 2.0, -1.0) + X[:, 2] + 0.1 * rng.normal(size=256)
LONG_X, LONG_Y = np.tile(X, (16, 1)) + 0.01 * rng.normal(size=(4096, 3)), np.tile(Y, 16)  # a single sum
COUNTS = rng.poisson(np.exp(0.5 * X[:, 0]))
CLASSES = np.digitize(X[:, 0] + 0.3 * X[:, 1], [-0.5, 0.5])
WEAK = jtrees.GET(depth=2, starts=1, epochs=6, cart="binned", halving=False, precondition=0, shrink=False)


@pytree.dataclass
class Corner(jtrees.Recipe):
    """One split, at 0 of the column with the largest absolute weighted covariance with the targets."""

    async def search(self, problem):
        return Fitted((await problem.map(corner)).host, 0.0, 0, np.zeros(0, np.float32))


def corner(run: Run):
    x, y, weight = training.state.normalised(run.batch)
    flat = y.reshape(len(y), -1)
    centred = flat - (weight[:, None] * flat).mean(0)
    column = jnp.abs(jnp.einsum("np,n,nk->pk", x, weight, centred)).sum(1).argmax()
    leaves = jtrees.leaves.kind_of("constant", run.task).empty(2, 0, run.task.shape)
    tree = jtrees.ObliqueTree(jax.nn.one_hot(column, x.shape[1])[None], jnp.zeros(1), leaves)
    return tree.refit(*run.batch)


def by_hand(x, y, w, loss, rounds, rate, l2):
    """Outputs after all rounds, in NumPy: split of the Newton steps, Newton leaf values."""
    outputs = np.broadcast_to(loss.initial(jnp.asarray(y), jnp.float32(w), 3), (len(y), 3))
    outputs = np.array(outputs if isinstance(loss, losses.LogLoss) else outputs[:, 0], np.float64)
    for number in range(rounds):
        g, h = (np.asarray(a, np.float64) for a in loss.derivatives(jnp.float32(outputs), jnp.asarray(y)))
        if number == 0:
            added = l2 * np.average(h, axis=0, weights=w)
        step, weight = (-g / h).reshape(len(y), -1), w * h.reshape(len(y), -1).mean(1)
        g, h = (np.einsum("n,n...->n...", w, a) for a in (g, h))
        step = step if loss.link == "identity" else np.clip(step, -4, 4)
        target = (step - step.min(0)) / np.ptp(step, axis=0)
        target = target - np.average(target, axis=0, weights=weight)
        leaf = x[:, np.abs((x * weight[:, None]).T @ target).sum(1).argmax()] > 0
        for inside in (leaf, ~leaf):
            outputs[inside] += rate * -g[inside].sum(0) / (h[inside].sum(0) + added)
    return outputs


@pytest.mark.parametrize(
    ("task", "y", "loss"),
    [
        (Regression(), Y, losses.SquaredError()),
        pytest.param(Regression(loss_function="poisson"), COUNTS, losses.Poisson(), marks=pytest.mark.wide),
        pytest.param(Classification(3), CLASSES, losses.LogLoss(), marks=pytest.mark.slow),
    ],
    ids=["squared", "poisson", "classes"],
)
def test_boosting_is_that_of_a_plain_loop(task, y, loss):
    recipe = jtrees.Boosted(Corner(), rounds=7, learning_rate=0.3, subsample=1.0, patience=None, l2=2.0)
    weight = np.exp(np.linspace(-2, 2, 256))
    weight /= weight.mean()
    table = checked_table(X, y, weight, task)
    scaling = options.checked(recipe).scaling(table)
    batch = scaling.batch(table)
    x = np.asarray(batch.x[: len(X)], np.float64)
    scaled = np.asarray(scaling.transform_y(y + 0.0 if task.in_units and loss.link != "softmax" else y))
    expected = by_hand(x, scaled, weight, loss, 7, 0.3, 2.0)
    fit = jtrees.fit(recipe, X, y, key=KEY, task=task, sample_weight=weight)
    assert len(fit.model) == fit.report.search.rounds == 7 and fit.report.search.dropped == 0
    predictions = np.asarray(linked(loss.link, jnp.asarray(expected, jnp.float32)), np.float64)
    np.testing.assert_allclose(fit.predict(X), scaling.inverse(predictions), rtol=2e-4, atol=2e-5)
    mean = np.average(loss.samples(jnp.asarray(expected, jnp.float32), jnp.asarray(scaled)), weights=weight)
    assert fit.loss / Data(table, None, scaling, batch).loss_unit == pytest.approx(mean, rel=1e-4)
    assert fit.history.shape == (7,) and fit.step == 7
    assert (np.diff(fit.history) < 0).all()  # the loss before each round


FUNCTIONS = {
    "absolute of a user": lambda p, t: jnp.abs(p - t),
    "pinball of a user": lambda p, t: jnp.maximum(0.7 * (t - p), 0.3 * (p - t)),
    "pseudo-Huber": lambda p, t: jnp.sqrt(1 + jnp.square((p - t) / 0.01)) - 1,
    "log cosh": lambda p, t: jnp.logaddexp(50 * (p - t), 50 * (t - p)),
    "fourth power": lambda p, t: (p - t) ** 4,
}
BUILT_IN = ("squared_error", "absolute_error", "huber", "poisson", "gamma", "tweedie", losses.Quantile(0.8))
SUM = jtrees.Boosted(WEAK, rounds=20, learning_rate=0.3, patience=None)
SUMS = {
    "Boosted": SUM,
    "linear": SUM.replace(base=WEAK.replace(leaves="linear"), rounds=8),
    "DGT": SUM.replace(base=jtrees.DGT(depth=2, epochs=4, batch_size=64, widths=(8,)), rounds=8),
    "Refined": jtrees.Refined(SUM.replace(rounds=8, patience=8), epochs=4),
    "Bagged": jtrees.Bagged(SUM.replace(rounds=8), trees=2),
    "monotone": SUM.replace(rounds=8),
    "one tree": jtrees.Bagged(WEAK, trees=2),
}
CASES = [(recipe, loss) for recipe in SUMS for loss in (*BUILT_IN, *FUNCTIONS)]
SLOW = [("Boosted", "absolute of a user")]


@pytest.mark.filterwarnings("ignore::UserWarning")  # that a simpler model is better
@pytest.mark.parametrize("case", sweeps.slow(CASES, SLOW), ids=str)
def test_every_loss_is_learned_at_every_scale(case):
    """The loss on the training rows is below that of the best constant. Good losses have a good R2."""
    recipe, loss = case
    options = {"monotone": [1, 0, 0]} if recipe == "monotone" else {}
    y = 100 * (np.sin(2 * X[:, 0]) + X[:, 1])
    y = y - y.min() + 1  # a deviance needs positive targets
    for scale in (1e-5, 0.01, 100.0):  # targets of standard deviation 1e-3, 1 and 1e4
        task = Regression(loss_function=FUNCTIONS.get(loss, loss))
        fit = jtrees.fit(SUMS[recipe], X, scale * y, key=KEY, task=task, **options)
        predictions = fit.predict(X)
        assert training_loss(task, predictions, scale * y) <= best_constant_loss(task, scale * y)
        if recipe == "Boosted":
            assert 1 - np.mean((predictions / scale - y) ** 2) / y.var() > 0.7


def training_loss(task, predictions, y):
    """The mean loss; a function of the user is a loss of scaled targets."""
    unit = 1.0 if task.in_units else np.ptp(y)
    mean_loss = task.loss_function.of_predictions if task.in_units else task.loss_function.function
    return float(mean_loss(predictions / unit, y / unit).mean())


def best_constant_loss(task, y):
    constants = [task.loss_function.best(y, None)] if task.in_units else np.quantile(y, np.linspace(0, 1, 41))
    return min(training_loss(task, constant, y) for constant in constants)


# These bases have few updates, so that equal trees do not depend on rounding errors.
GET = WEAK.replace(alpha_ranges=((5, 25), (50, 150)), epochs=7)
DGT = jtrees.DGT(depth=2, epochs=4, batch_size=64, widths=(8,))
CO2 = jtrees.CO2(depth=3, epochs=2)


@pytest.mark.parametrize("base", sweeps.slow([GET, GET.replace(leaves="linear"), DGT, CO2], [GET, CO2]), ids=type)
@pytest.mark.parametrize("task", sweeps.slow(["regression", "classification"], ["regression"]))
def test_a_program_of_many_rounds_grows_the_trees_of_searches(base, task, monkeypatch):
    async def only_search(self, problem):
        """The ``grow_arguments`` of a base that has no ``grow``."""
        return None

    targets, options = (Y, {}) if task == "regression" else (CLASSES, {"task": task})
    if task == "regression" and base.tree_leaves(Regression()) == "constant":
        options["monotone"] = [1, 0, 0]
    recipe = jtrees.Boosted(base, rounds=3, learning_rate=0.5, columns=0.5)
    fit = lambda: jtrees.fit(recipe, X, targets, key=KEY, sample_weight=np.linspace(0.1, 3, 256), **options)
    program = fit()
    monkeypatch.setattr(type(base), "grow_arguments", only_search)
    searched = fit()
    np.testing.assert_allclose(program.report.search.losses[:3], searched.report.search.losses[:3], rtol=1e-4)
    np.testing.assert_allclose(program.predict(X), searched.predict(X), rtol=1e-3, atol=1e-3)


def test_a_long_table_holds_out_a_fifth_for_the_rounds_and_fits_leaves_to_all_rows():
    x, y = LONG_X, LONG_Y
    fit = jtrees.fit(jtrees.Boosted(WEAK, rounds=3, learning_rate=0.5, patience=3, l2=2.0), x, y, key=KEY)
    rounds = fit.report.search.rounds
    assert rounds == np.argmin(fit.report.search.losses) + 1 == len(fit.model) == fit.step
    assert fit.history.shape == (rounds,) and (np.diff(fit.history) < 0).all()
    outputs = np.full(len(x), y.mean())
    for number in range(rounds):
        tree, residual = fit.model[number], y - outputs
        leaf = np.asarray(tree.leaf_index(x))
        step = 0.5 * (np.bincount(leaf, residual, 4) / (np.bincount(leaf, minlength=4) + 2.0))[leaf]
        np.testing.assert_allclose(np.diff(tree.predict(x)), np.diff(step), rtol=1e-3, atol=1e-4)
        outputs = outputs + step
    np.testing.assert_allclose(fit.predict(x), outputs, rtol=1e-3, atol=1e-3)


DGT_OF_CODES = jtrees.DGT(depth=3, epochs=20, widths=(8,))


@pytest.mark.parametrize("base", [WEAK, pytest.param(DGT_OF_CODES, marks=pytest.mark.slow)], ids=["program", "search"])
def test_the_first_half_of_the_trees_keeps_its_splits_and_the_second_half_sees_all_rows(base, monkeypatch):
    recipe = jtrees.Boosted(base, rounds=6, learning_rate=0.5, patience=6)
    fit = jtrees.fit(recipe, LONG_X, LONG_Y, key=KEY)
    assert fit.report.search.rounds == 6
    assert fit.report.ended_at == "Boosted: 6 of at most 6 rounds" and fit.report.ended == "finished"

    async def late(*_):
        return None

    monkeypatch.setattr("jtrees.ensembles.boosted.regrown", late)
    held_out = jtrees.fit(recipe, LONG_X, LONG_Y, key=KEY)  # with leaves fitted to all rows
    keeps = [
        np.array_equal(a.weights, b.weights) and np.array_equal(a.bias, b.bias)
        for a, b in zip(fit.model, held_out.model, strict=True)
    ]
    assert keeps[:3] == 3 * [True] and not all(keeps[3:])
    assert np.array_equal(fit.model[2].predict(LONG_X), held_out.model[2].predict(LONG_X))
    assert fit.report.held_out_loss == held_out.report.held_out_loss


@pytest.mark.slow
def test_rounds_of_a_table_beyond_all_limits_take_a_sample_of_its_rows(monkeypatch):
    """The rows of the sample have their weights, and the loss is that of the last round."""

    async def late(*_):
        return None

    monkeypatch.setattr("jtrees.ensembles.boosted.refitted", late)  # the model is the sum that held out rows
    random, n = np.random.default_rng(1), 270_000
    x, weight = random.normal(size=(n, 1)), random.lognormal(size=n)
    y = x[:, 0] + weight * random.normal(size=n)
    fit = jtrees.fit(jtrees.Boosted(WEAK, rounds=2, patience=2), x, y, key=KEY, sample_weight=weight)
    rows = fit.report.held_out_rows
    assert fit.report.search.rows <= 160_000 and len(rows) == 40_000
    losses = (fit.predict(x) - y) ** 2
    assert fit.report.held_out_loss == pytest.approx(np.average(losses[rows], weights=weight[rows]), rel=1e-4)
    assert fit.loss != np.average(losses, weights=weight)  # of other rows, in single precision


@pytest.mark.parametrize("base", [jtrees.GET(depth=2), jtrees.RADDT(depth=2)], ids=["GET", "RADDT"])
def test_a_tree_of_a_sum_needs_less_than_a_tree_on_its_own(base):
    alone, weak = options.checked(base), options.checked(jtrees.Boosted(base)).base
    assert (alone.starts, alone.cart, alone.halving, alone.rows) == (10, True, True, "auto")
    assert (weak.starts, weak.cart, weak.halving, weak.precondition) == (1, "binned", False, 0.0)
    assert weak.updates < alone.updates / 10 and weak.rows >= 60 * 2**weak.depth
    assert options.checked(jtrees.Boosted(jtrees.GET(depth=9))).base.rows == 60 * 2**9
    chosen = {"starts": 3, "cart": True, "rows": None, "epochs": 7}
    remaining = options.checked(jtrees.Boosted(base.replace(**chosen))).base
    assert {name: getattr(remaining, name) for name in chosen} == chosen
    nested = options.checked(jtrees.Bagged(jtrees.Boosted(base)))
    assert repr(nested.base.base) == repr(weak) and repr(options.checked(jtrees.Bagged(base)).base) == repr(alone)


@pytest.mark.slow
def test_splits_of_many_outputs_are_found_for_five_combinations_of_them(monkeypatch):
    recorded, search = [], Corner.search
    monkeypatch.setattr(Corner, "search", lambda self, problem: (recorded.append(problem), search(self, problem))[1])
    labels = np.digitize(X[:, 0], np.quantile(X[:, 0], np.arange(1, 8) / 8))
    recipe = jtrees.Boosted(Corner(), rounds=6, learning_rate=0.5, patience=None)
    fit = jtrees.fit(recipe, X, labels, key=KEY, task="classification")
    assert len(recorded) == 6 and all(problem.task == Regression(5) for problem in recorded)
    first, second = (np.asarray(problem.batch.y) for problem in recorded[:2])
    assert first.shape[1] == 5 and first.min() == 0 and first.max() == 1 and not np.allclose(first, second)
    assert fit.predict(X).shape == (256, 8) and (np.diff(fit.history) < 0).all()
    three_classes = jtrees.fit(recipe, X, CLASSES, key=KEY, task="classification")
    assert recorded[-1].task == Regression(3) and three_classes.predict(X).shape == (256, 3)


@pytest.mark.slow
def test_bagged_sums_have_rounds_of_their_own():
    recipe = jtrees.Boosted(WEAK.replace(leaves="linear"), rounds=20, learning_rate=0.5, patience=2)
    x, y = X.astype(np.float64) + 1e6, Y + np.random.default_rng(1).normal(size=len(Y)) + 1e6
    fit = jtrees.fit(jtrees.Bagged(recipe, trees=3), x, y, key=KEY)
    rounds = [base.rounds for base in fit.report.search.bases]
    assert len(set(rounds)) > 1 and len(fit.model) == 3 and len(fit.model[0]) == 5 * max(rounds)
    each = [fit.model[i].predict(x) for i in range(3)]
    np.testing.assert_allclose(fit.predict(x), np.mean(each, 0), rtol=1e-6, atol=1e-4)
    assert np.mean((fit.predict(x) - y) ** 2) < 0.5 * y.var()


def test_of_small_tables_the_model_is_the_mean_of_sums_that_leave_out_a_fifth_each():
    weight, y = np.ones(len(X)), Y.copy()
    weight[3], y[3] = 1e6, 20  # its loss is that of the sum that leaves it out
    recipe = jtrees.Boosted(WEAK, rounds=20, learning_rate=0.5, patience=2)
    fit = jtrees.fit(recipe, X, y, key=KEY, sample_weight=weight)
    round_losses = fit.report.search.losses
    assert fit.report.search.rounds == len(fit.model) / 5 == np.argmin(round_losses) + 1
    assert np.isfinite(round_losses).sum() == np.argmin(round_losses) + 1 + 2 < 20
    # Every row but one is left out by a sum, so the held-out loss stands beside those of the baselines on all rows.
    assert fit.report.held_out_loss == pytest.approx(round_losses.min() * np.ptp(y) ** 2, rel=1e-4)
    assert 0.6 * 20**2 < fit.report.held_out_loss < 1.5 * 20**2  # a fifth of it, if fifths counted alike
    assert fit.report.baselines["model"] == fit.report.held_out_loss


@pytest.mark.slow
def test_a_base_does_not_choose_the_shrinkage_of_leaves_that_are_replaced(monkeypatch):
    shrinks, search = [], jtrees.NonGreedy.search
    spied = lambda self, problem: (shrinks.extend([self.shrink, problem.recipe.shrink]), search(self, problem))[1]
    monkeypatch.setattr(jtrees.NonGreedy, "search", spied)
    jtrees.fit(jtrees.Boosted(jtrees.NonGreedy(depth=2, epochs=3), rounds=2, patience=None), X, Y, key=KEY)
    assert shrinks == 4 * [False]


@pytest.mark.parametrize("patience", [None, 6], ids=["one sum", "five sums"])
@pytest.mark.parametrize("failing", [(0,), (2, 3), range(99)])
def test_a_round_whose_base_is_not_finite_adds_nothing(failing, patience, monkeypatch):
    calls, search, recipe = itertools.count(), Corner.search, jtrees.Boosted(Corner(), rounds=6, patience=patience)

    async def fails(self, problem):
        if next(calls) in failing:
            raise FloatingPointError
        return await search(self, problem)

    plain = jtrees.fit(recipe, X, Y, key=KEY)
    monkeypatch.setattr(Corner, "search", fails)
    if len(failing) == 99:
        with pytest.raises(FloatingPointError, match="training became non-finite"):
            jtrees.fit(recipe, X, Y, key=KEY)
        return
    fit = jtrees.fit(recipe, X, Y, key=KEY)
    report, sums = fit.report.search, 1 if patience is None else 5
    assert report.rounds == 6 and len(fit.model) == 6 * sums
    assert np.isfinite(fit.predict(X)).all() and fit.loss < Y.var()
    assert report.dropped == (len(failing) if sums == 1 else 0)
    zero = ~np.any(np.asarray(fit.model.trees.weights) != 0, axis=(1, 2))
    assert zero.sum() == len(failing)  # merged: all leaves are equal
    if sums == 1:
        assert all(fit.history[k] == fit.history[k + 1] for k in failing)
    elif failing == (0,):
        assert fit.history[0] == plain.history[0] and fit.history[1] > plain.history[1]


def test_bases_and_tasks_that_are_refused():
    with pytest.raises(ValueError, match=r"base must end in a single tree, got TEL\("):
        jtrees.fit(jtrees.Boosted(jtrees.TEL()), X, Y, key=KEY)
    with pytest.raises(ValueError, match="task must not be a Policy"):
        jtrees.fit(jtrees.Boosted(WEAK), X, np.stack([Y, -Y], 1), key=KEY, task=Policy(2))


def test_few_rows_are_refused_and_columns_are_drawn():
    with pytest.raises(ValueError, match="patience must be None for fewer than 10 rows"):
        jtrees.fit(jtrees.Boosted(WEAK), X[:8], Y[:8], key=KEY)
    fit = jtrees.fit(jtrees.Boosted(WEAK, rounds=12, columns=1 / 3, patience=None), X, Y, key=KEY)
    used = (np.asarray(fit.model.trees.weights) != 0).any(1)  # columns of each tree
    assert (used.sum(1) == 1).all() and len(np.unique(used.argmax(1))) == 3


@pytest.mark.parametrize("has_time", [True, False], ids=["five sums", "one sum"])
def test_the_first_of_five_long_sums_chooses_the_kind_and_is_alone_if_there_is_no_time_for_the_others(
    has_time, monkeypatch
):
    added, add = [], boosting_sums.GrowingSum.add
    monkeypatch.setattr(
        boosting_sums.GrowingSum, "add", lambda growing, count: added.append(growing) or add(growing, count)
    )
    if not has_time:
        monkeypatch.setattr(Monitor, "may_be_late", lambda monitor, seconds=0.0: not seconds or monitor.cut())
    x, y = LONG_X[:1280], (LONG_X[:1280, 0] > 0) + 0.1 * np.random.default_rng(1).normal(size=1280)
    fit = jtrees.fit(jtrees.Boosted(WEAK, rounds=12, learning_rate=0.5, patience=12), x, y, key=KEY)
    rounds, sums = fit.report.search.rounds, 5 if has_time else 1
    assert len(fit.model) == sums * rounds and fit.report.ended == ("finished" if has_time else "max_seconds")
    assert not fit.report.search.is_oblique and ((fit.model.trees.weights != 0).sum(-1) <= 1).all()
    assert len({*map(id, added)}) == (6 if has_time else 3)  # two kinds in the first fold, then one kind
    predicted, rows = fit.predict(x), fit.report.held_out_rows
    assert np.mean((predicted - y) ** 2) < 0.2 * y.var() and (rows is None) == has_time
    if has_time:
        outputs = sum(np.asarray(tree.predict(x)) for tree in fit.model)
        np.testing.assert_allclose(predicted, outputs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_rows_are_drawn_for_the_rounds_that_are_made(monkeypatch):
    numbers, draw = [], boosting_sums.draws_of_round
    monkeypatch.setattr(
        boosting_sums, "draws_of_round", lambda problem, number: numbers.append(number) or draw(problem, number)
    )
    noise = np.random.default_rng(1).normal(size=len(LONG_X))
    fit = jtrees.fit(jtrees.Boosted(WEAK, rounds=200, patience=3), LONG_X, noise, key=KEY)
    finished = np.isfinite(fit.report.search.losses).sum()
    assert {*range(finished)} <= {*numbers} and max(numbers) < 100  # the other kind of trees may make more rounds


def test_a_base_with_a_search_of_its_own_is_searched():
    calls = []

    @pytree.dataclass(kw_only=True)
    class Counted(jtrees.GET):
        async def search(self, problem):
            calls.append(1)
            return await super().search(problem)

    base = Counted(depth=2, epochs=6, starts=1, cart="binned", halving=False)
    jtrees.fit(jtrees.Boosted(base, rounds=3, patience=None), X, Y, key=KEY)
    assert len(calls) == 3


@pytest.mark.parametrize("is_oblique", sweeps.slow([False, True], [False, True]))
def test_held_out_rows_choose_between_oblique_trees_and_those_of_cart(is_oblique):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(600, 8)).astype(np.float32)
    steps = np.where(x[:, 0] > 0.3, 2.0 * (x[:, 1] > -0.2), 1.0 * (x[:, 2] > 0.5))
    y = (np.tanh(x.sum(1)) if is_oblique else steps) + 0.3 * rng.normal(size=600)
    fit = jtrees.fit(jtrees.Boosted(jtrees.GET(depth=3), rounds=30), x, y, key=KEY)
    assert fit.report.search.is_oblique == is_oblique
    features_of_splits = (np.asarray(fit.model.trees.weights) != 0).sum(-1)
    assert (features_of_splits.max() > 1) == is_oblique


@pytest.mark.slow
def test_a_kind_of_trees_that_is_far_behind_ends():
    x = np.random.default_rng(1).normal(size=(1200, 6)).astype(np.float32)
    lengths = {}

    class Counted(boosting_sums.GrowingSum):
        async def add(self, count):
            await super().add(count)
            lengths[id(self)] = len(self.losses)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boosting_sums, "GrowingSum", Counted)
        recipe = jtrees.Boosted(jtrees.GET(depth=3), rounds=60, patience=30, learning_rate=0.3)
        fit = jtrees.fit(recipe, x, np.tanh(2 * x.sum(1)), key=KEY)
    both = list(lengths.values())[:2]  # of both kinds, before the sum is refitted
    assert fit.report.search.is_oblique and 2 * min(both) < max(both)


@pytest.mark.slow
def test_a_tree_of_a_wide_table_splits_64_features():
    x = np.random.default_rng(1).normal(size=(300, 150)).astype(np.float32)
    y = 2.0 * (x[:, 140] > 0) + np.abs(x[:, 141])
    fit = jtrees.fit(jtrees.Boosted(jtrees.GET(depth=2, epochs=2), rounds=20), x, y, key=KEY)
    features = (np.asarray(fit.model.trees.weights) != 0).any(1)
    assert features.sum(1).max() <= 64
    # Each tree draws half of the features, and splits those that tell most.
    assert features[:, 140].mean() > 0.3 and features[:, 141].mean() > 0.3


@pytest.mark.slow
def test_the_choice_of_trees_is_that_of_a_loss_with_another_offset():
    x = np.random.default_rng(1).normal(size=(400, 3)).astype(np.float32)
    y = (x[:, 0] > 0) + np.sin(3 * x[:, 1])
    fits = [
        jtrees.fit(jtrees.Boosted(jtrees.GET(depth=2), rounds=60), x, y, task=Regression(loss_function=loss), key=KEY)
        for loss in (lambda p, t: jnp.square(p - t), lambda p, t: jnp.square(p - t) - 1)
    ]
    plain, shifted = (fit.report.search for fit in fits)
    assert plain.rounds > 20 and abs(plain.rounds - shifted.rounds) < 10
    np.testing.assert_allclose(*(fit.predict(x) for fit in fits), atol=0.1)


@pytest.mark.parametrize("patience", [pytest.param(None, marks=pytest.mark.wide), 10], ids=["one sum", "five sums"])
@pytest.mark.parametrize(
    ("base", "values"),
    [
        (DGT_OF_CODES, "codes"),
        pytest.param(DGT_OF_CODES, "outliers", marks=pytest.mark.wide),
        pytest.param(WEAK.replace(depth=3, leaves="linear"), "codes", marks=pytest.mark.slow),
    ],
    ids=["constant leaves, codes", "constant leaves, outliers", "linear leaves, codes"],
)
def test_losses_are_those_of_the_model_if_features_are_clipped(base, values, patience):
    """Training clips outliers and codes, and the model of the user's units does not."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    y = np.sin(2 * x[:, 0]) + x[:, 1] + 0.1 * rng.normal(size=400)
    if values == "codes":
        x[rng.random(400) < 0.2, 1] = 999_999.0
    else:
        x[:2, 1] = 3000.0
    recipe = jtrees.Boosted(base, rounds=20, learning_rate=0.3, patience=patience)
    fit, unit = jtrees.fit(recipe, x, y, key=KEY), np.ptp(y) ** 2
    if patience is None:  # the history has the loss before each round
        extended = jtrees.fit(recipe.replace(rounds=21), x, y, key=KEY)
        assert extended.history[20] * unit == pytest.approx(fit.loss, rel=1e-3)
    else:
        assert np.min(fit.report.search.losses) * unit == pytest.approx(fit.report.held_out_loss, rel=1e-3)
    assert fit.loss < 0.7 * y.var()


@pytest.mark.slow
def test_an_outlier_does_not_determine_slopes_beside_a_column_of_codes():
    """The leaves are fitted again to the codes, but not to the outlier of another column."""
    rng = np.random.default_rng(1)
    x, test = rng.normal(size=(130, 4)), rng.normal(size=(500, 4))
    y, y_test = (2 * rows[:, 0] + (rows[:, 1] > 0) for rows in (x, test))
    x[::11, 2], x[5, 0] = 999_999_999.0, 1e6
    recipe = jtrees.Boosted(jtrees.GET(depth=2, starts=2, epochs=5, leaves="linear"), rounds=30)
    fit = jtrees.fit(recipe, x, y, key=KEY)
    assert np.square(fit.predict(test) - y_test).mean() < 0.15 * y_test.var()  # 0.3 if the outlier counts
