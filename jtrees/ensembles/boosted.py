"""Newton boosting of any recipe that ends in a tree."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import leaves as kinds, losses, ops, pytree, sharding
from jtrees.data import Data
from jtrees.forest import Forest
from jtrees.methods.get import GET
from jtrees.search import Finished, Recipe, Round, Rounds, Search, SearchResult, check_finite, options
from jtrees.search._precondition import drawn_rows
from jtrees.tasks import Policy, Regression, Task, check_log_loss
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_FEWEST_HELD_OUT = 10  # rows that the number of rounds is chosen by
_WEAK = GET(depth=5, starts=1, epochs=50, cart="binned", precondition=0, shrink=False, halving=False)


# A round fits the quadratic approximation of the loss at the current outputs F, with gradient g and curvature h:
#
#     sum_i w_i (g_i f(x_i) + h_i f(x_i)^2 / 2) = sum_i w_i h_i / 2 (f(x_i) - t_i)^2 + a constant,   t_i = -g_i / h_i,
#
# least squares with targets t and weights w h (Friedman, Hastie & Tibshirani 2000). The base finds the splits that way;
# of several outputs it has one weight, the mean of their curvatures. Leaf values are then the Newton steps of each
# output, -sum w g / (sum w h + l2), or best constants of the residuals for losses without a curvature (Friedman 2001).


class Prepared(NamedTuple):
    """What ``prepare`` returns.

    Attributes:
      start: the base's ``prepare`` for the first round.
      held_out: rows that the number of rounds is chosen by, ``(n,)``; None: it is given, or there are too few.
    """

    start: Any
    held_out: Any


class Boosting(NamedTuple):
    """The state of the search. Outputs are those of scaled targets, before the link.

    Attributes:
      key: random key.
      start: as in :class:`Prepared`.
      held_out: as in :class:`Prepared`.
      initial: the outputs that boosting starts from, ``(*k,)``.
      outputs: current outputs of the training rows, ``(n, *k)``.
      trees: the trees so far, on scaled features, ``(rounds, ...)``; those to come are zero.
      count: their number.
      tried: the trees of the rows that were not held out, and their number, once all rows are trained on.
      target: the batch of the current round.
      features: the features of the current round, ``(p,)``, 1 or 0.
      run: the state of the base.
      losses: loss after each round on the rows that choose their number, infinite before, ``(rounds,)``.
      given: whether these are a validation set.
      dropped: number of rounds without a finite tree.
    """

    key: Array
    start: Any
    held_out: Any
    initial: Array
    outputs: Array
    trees: ObliqueTree
    count: Array
    tried: tuple[ObliqueTree, Array]
    target: Batch
    features: Array
    run: Any
    losses: Array
    given: Array
    dropped: Array

    @property
    def best(self) -> Array:
        """Number of rounds with the lowest loss; all without any loss."""
        chosen = 1 + jnp.argmin(self.losses)
        return jnp.where(jnp.isfinite(self.losses).any(), chosen, len(self.losses)).astype(jnp.int32)


@pytree.dataclass(kw_only=True)
class Boosted(Recipe):
    """Gradient boosting with Newton steps (Friedman 2001; Friedman, Hastie & Tibshirani 2000).

    Round by round, a tree of the base is fitted by weighted least squares to the negative gradient of the loss divided
    by its curvature, on rows drawn anew, and added with a learning rate. It takes every loss of regression and
    classification, and refuses a :class:`jtrees.Policy`. The model is a :class:`jtrees.Forest` of summed outputs with
    the task's link; ``tree`` is None.

    With ``patience``, boosting ends after as many rounds without a lower loss on ``validation``, and the model has the
    rounds up to the lowest one. Without ``validation``, a fifth of the rows is held out at first to find the number of
    rounds, and then as many rounds are fitted to all rows; if that is ended by a deadline or Ctrl-C, the model is the
    first one. Fewer than 50 rows need ``patience=None``.

    The report has ``rounds``, the number of trees; ``losses``, the loss after each round on the rows that chose the
    number, on scaled targets, ``(rounds,)``, infinite for rounds not taken; ``dropped``, the number of rounds whose
    tree was not finite and was left out.

    Attributes:
      base: a recipe whose model is a tree, with constant or linear leaves; by default GET of depth 5 from CART over
        bins, 2 x 50 epochs. What a base prepares on the host, such as a tree of scikit-learn's CART, is that of the
        first round.
      rounds: largest number of trees.
      learning_rate: factor of each tree's outputs.
      subsample: part of the rows that each tree is fitted to, above 0 and up to 1; drawn without replacement.
      columns: part of the features that each tree is fitted to, likewise.
      l2: number of samples without a gradient that are added to each constant leaf.
      patience: rounds without a lower loss before boosting ends; None: it has all rounds.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> base = jtrees.GET(depth=1, starts=1, epochs=10, cart="binned", halving=False)
      >>> recipe = jtrees.Boosted(base, rounds=5, learning_rate=0.5, patience=None)
      >>> fit = jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> print(len(fit.model), fit.predict(np.array([[-0.5], [0.5]])).round(1))
      5 [-1.  1.]
    """

    base: Recipe = pytree.field(kw_only=False, default=_WEAK, metadata={"check": options.checked_base})
    rounds: int = options.count(300)
    learning_rate: float = options.positive(0.1)
    subsample: float = options.share(0.8)
    columns: float = options.share(1.0)
    l2: float = options.not_negative(1.0)
    patience: int | None = options.optional_count(30)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        if isinstance(task, Policy):
            raise ValueError("task must not be a Policy: a sum of trees plays no single action in a leaf")
        check_log_loss(task)
        (n, p), loss, chooses = shape, task.loss_function, self.patience is not None
        size = lambda n: max(1, round(self.subsample * n))  # rows of a round, of n rows
        used = max(1, round(self.columns * p))
        steps_of = Regression(task.shape[0] if task.shape else None)  # what the base fits
        base = self.base.search(steps_of, (size(n), p))
        if base.tree_leaves is None:
            raise ValueError(f"base must end in a single tree, got {self.base!r}")
        kind, stages = kinds.kind_of(base.tree_leaves, steps_of), len(base.rounds.lengths)

        def weight_of(batch: Batch, held_out: Any = False) -> Array:
            """Returns the weights of the rows, 0 for those held out."""
            weight = jnp.ones(len(batch.x), batch.x.dtype) if batch.weight is None else batch.weight
            return jnp.where(held_out, 0, weight)

        def target_of(batch: Batch, outputs: Array, weight: Array, key: Array, used: int = used) -> tuple[Batch, Array]:
            """Returns the rows, targets and weights of a round, and its features, 1 or 0."""
            row_key, column_key = jax.random.split(key)
            rows, n = (batch.x, batch.y, outputs, weight), len(batch.x)
            if (drawn := size(n)) < n:  # rows of weight first, in random order
                order = jnp.argsort(jnp.where(weight > 0, jax.random.uniform(row_key, (n,)), 2))
                rows = jax.tree.map(lambda a: a[order[:drawn]], sharding.keep_rows(rows))
            features = jnp.ones(p, batch.x.dtype)
            if used < p:
                features = (jnp.argsort(jax.random.uniform(column_key, (p,))) < used).astype(batch.x.dtype)
            x, y, outputs, weight = rows
            step, share = _newton(loss, outputs, y, weight)
            inside = (weight > 0).reshape(-1, *[1] * len(task.shape))
            low = jnp.where(inside, step, jnp.inf).min(0)
            unit = jnp.where(inside, step, -jnp.inf).max(0) - low
            return Batch(x * features, (step - low) / jnp.where(unit > 0, unit, 1), share), features

        def prepare(batch: Batch, *, key: Array) -> Prepared:
            held_out = drawn_rows(batch, key) if chooses else None
            if held_out is not None and held_out.sum() < _FEWEST_HELD_OUT:
                held_out = None
            batch = jax.tree.map(jnp.asarray, batch)
            weight = weight_of(batch)
            initial = loss.initial(batch.y, weight, math.prod(task.shape))
            outputs = jnp.broadcast_to(initial, (len(batch.x), *task.shape))
            first = jax.device_get(target_of(batch, outputs, weight, key, used=p)[0])
            return Prepared(base.prepare(first, key=key), held_out)

        def init(prepared: Prepared, batch: Batch, *, key: Array) -> Boosting:
            prepared, weight = jax.tree.map(jnp.asarray, prepared), weight_of(batch)
            initial = loss.initial(batch.y, weight, math.prod(task.shape))
            outputs = jnp.broadcast_to(initial, (len(batch.x), *task.shape))
            target, features = target_of(batch, outputs, weight, key)
            run = base.init(prepared.start, target, key=key)
            splits = jax.eval_shape(lambda: base.result(run, target, None).model.replace(leaves=None))
            leaves = kind.empty(len(splits.bias) + 1, p, task.shape, batch.x.dtype)
            if base.tree_leaves == "linear":
                leaves = leaves.replace(lower=leaves.intercept, upper=leaves.intercept)
            tree = splits.replace(leaves=leaves)
            trees = jax.tree.map(lambda a: jnp.zeros((self.rounds, *a.shape), a.dtype), tree)
            zero = jnp.zeros((), jnp.int32)
            lost = jnp.full(self.rounds, jnp.inf, batch.x.dtype)
            start = prepared.start, prepared.held_out
            before = outputs, trees, zero, (trees, zero)
            return Boosting(key, *start, initial, *before, target, features, run, lost, zero > 0, zero)

        def begun(state: Boosting, batch: Batch, number: Array) -> Boosting:
            """Returns the state at the beginning of a round."""
            again = number == self.rounds if chooses else jnp.array(False)
            reset = lambda new, old: jnp.where(again, new, old)
            outputs = reset(jnp.broadcast_to(state.initial, state.outputs.shape), state.outputs)
            trees = jax.tree.map(lambda a: reset(0, a), state.trees)
            tried = jax.tree.map(reset, (state.trees, jnp.minimum(state.best, state.count)), state.tried)
            key, run_key = jax.random.split(jax.random.fold_in(state.key, number))
            target, features = target_of(batch, outputs, weight_of(batch, left_out(state, number)), key)
            run = base.init(state.start, target, key=run_key)
            count, dropped = reset(0, state.count), reset(0, state.dropped)
            state = state._replace(outputs=outputs, trees=trees, count=count, tried=tried, dropped=dropped)
            return state._replace(target=target, features=features, run=run)

        def left_out(state: Boosting, number: Array) -> Any:
            """Returns the rows that a round is not trained on."""
            in_trial = (number < self.rounds) & ~state.given
            return False if state.held_out is None else state.held_out & in_trial

        def stalled(state: Boosting) -> Array:
            """Whether the last rounds had no lower loss, so that the others do not matter."""
            return (state.count > 0) & (state.count - 1 - jnp.argmin(state.losses) >= (self.patience or 0))

        def ended(state: Boosting, batch: Batch, validation: Batch | None, number: Array) -> Boosting:
            """Returns the state with the tree of a round."""
            over = stalled(state)
            result, weight = base.result(state.run, state.target, None), weight_of(batch, left_out(state, number))
            tree = result.model.replace(weights=result.model.weights * state.features, leaves=state.trees.leaves)
            leaf, leaves = ops.hard(tree.weights, tree.bias, batch.x), len(tree.bias) + 1
            if base.tree_leaves == "linear":
                step, share = _newton(loss, state.outputs, batch.y, weight)
                fitted = kind.empty(leaves, p, task.shape, batch.x.dtype).refit(
                    leaf, batch.x * state.features, step, share
                )
            else:
                fitted = kinds.Constant(loss.steps(leaf, state.outputs, batch.y, leaves, weight, self.l2))
            fitted = jax.tree.map(lambda a: self.learning_rate * a, fitted)
            outputs = state.outputs + fitted.at(leaf, batch.x)
            finite = result.finite & jnp.isfinite(outputs).all()
            tree = jax.tree.map(lambda a: jnp.where(finite, a, 0), tree.replace(leaves=fitted))
            state = state._replace(
                outputs=jnp.where(finite, outputs, state.outputs),
                trees=jax.tree.map(lambda all_, one: all_.at[state.count].set(one), state.trees, tree),
                count=state.count + 1,
                dropped=state.dropped + ~finite,
            )
            if not chooses:
                return state
            if validation is not None:
                of_round = _mean_loss(loss, _outputs(state, validation.x), validation.y, validation.weight)
            else:
                of_round = _mean_loss(loss, state.outputs, batch.y, jnp.where(state.held_out, weight_of(batch), 0))
            of_round = jnp.where(over, jnp.inf, of_round)
            if validation is None:  # the last run keeps the losses of the trial
                of_round = jnp.where(number < self.rounds, of_round, state.losses[state.count - 1])
            return state._replace(losses=state.losses.at[state.count - 1].set(of_round))

        def one_round(at: Round, state: Boosting, batch: Batch, validation: Batch | None) -> tuple[Boosting, Array]:
            if chooses and validation is None and state.held_out is None:
                least = 5 * _FEWEST_HELD_OUT
                raise ValueError(f"patience must be None for fewer than {least} rows without a validation set")
            number, stage = at.stage // stages, at.stage % stages

            def trained(state: Boosting) -> Boosting:
                first, last = (stage == 0) & (at.before == 0), (stage == stages - 1) & at.last
                state = jax.lax.cond(first, lambda: begun(state, batch, number), lambda: state)
                run, _ = base.round(at._replace(stage=stage), state.run, state.target, None)
                state = state._replace(run=run)
                return jax.lax.cond(last, lambda: ended(state, batch, validation, number), lambda: state)

            if chooses and validation is not None:  # which takes the place of the rows held out
                state = state._replace(given=jnp.array(True))
                state = jax.lax.cond(number < self.rounds, lambda: state, lambda: trained(state))
            else:
                state = trained(state)
            lost = _mean_loss(loss, state.outputs, batch.y, weight_of(batch))
            return state, jnp.where(jnp.arange(at.most) < at.count, lost, jnp.nan)

        def following(i: Array, state: Boosting, rounds: Rounds) -> Array:
            if self.patience is None:
                return i
            first = jnp.asarray(rounds.first[::stages])
            number = jnp.searchsorted(first, i, side="right") - 1
            in_trial, boundary = number < self.rounds, i == first[number]
            over = stalled(state)
            done = jnp.where(state.given, over & (number > self.rounds), number - self.rounds >= state.best)
            return jnp.where(
                in_trial,
                jnp.where(state.given | (over & boundary), first[self.rounds], i),
                jnp.where(done & boundary, rounds.count, i),
            )

        def result(state: Boosting, batch: Batch, validation: Batch | None) -> SearchResult:
            count = jnp.minimum(state.best, state.count)
            # A run on all rows that was ended has fewer trees than the one before, on rows that were not held out.
            earlier = (state.tried[1] > 0) & (count < state.best)
            choose = lambda old, new: jnp.where(earlier, old, new)
            trees, count = jax.tree.map(choose, state.tried, (state.trees, count))
            kept = jnp.arange(self.rounds) < count
            trees = jax.tree.map(lambda a: jnp.where(kept.reshape(-1, *[1] * (a.ndim - 1)), a, 0), trees)
            state = state._replace(trees=trees, count=count)
            by = batch if validation is None else validation
            score = _mean_loss(loss, _outputs(state, by.x), by.y, by.weight)
            extra = {"count": count, "losses": state.losses, "dropped": state.dropped}
            finite = jnp.isfinite(score) & ((state.count == 0) | (state.count > state.dropped))
            return SearchResult((trees, state.initial), score, finite, count * sum(base.rounds.lengths), extra)

        def finish(result: SearchResult, start: Any, data: Data, **_: Any) -> Finished:
            check_finite(result)
            count, (trees, initial) = int(result.extra["count"]), jax.device_get(result.model)
            trees = jax.tree.map(lambda a: jnp.asarray(a[: max(1, count)]), trees)
            # The initial outputs are part of the first tree.
            parts = ("values",) if base.tree_leaves == "constant" else ("intercept", "lower", "upper")
            leaves = trees.leaves.replace(**{name: getattr(trees.leaves, name).at[0].add(initial) for name in parts})
            forest = Forest(trees.replace(leaves=leaves), "sum", task.link_name).restored(data.scaling)
            report: dict[str, Any] = {"rounds": count, "dropped": int(result.extra["dropped"])}
            report["losses"] = np.asarray(result.extra["losses"])
            return Finished(forest, None, data.loss(forest) if task.in_units else float(result.score), report)

        lengths, trial = base.rounds.lengths * self.rounds, stages * self.rounds if chooses else 0
        return base._replace(
            task=task,
            rounds=Rounds(lengths * (2 if chooses else 1), base.rounds.elements, trial),
            init=init,
            round=one_round,
            result=result,
            finish=finish,
            prepare=prepare,
            tree_leaves=None,
            next=following,
        )


def _newton(loss: losses.Loss, outputs: Array, y: Array, weight: Array) -> tuple[Array, Array]:
    """Returns the Newton steps of the outputs, and weights of mean 1 with the curvatures as factors."""
    step, curvature = loss.newton(outputs, y)
    weight = weight * curvature.reshape(len(step), -1).mean(1)
    return step, weight / jnp.maximum(weight.mean(), jnp.finfo(weight.dtype).tiny)


def _mean_loss(loss: losses.Loss, outputs: Array, y: Array, weight: Array | None) -> Array:
    """Returns the weighted mean loss of outputs."""
    each = loss.samples(outputs, y)
    return each.mean() if weight is None else (weight * each).sum() / weight.sum()


def _outputs(state: Boosting, x: Array) -> Array:
    """Returns the outputs of the trees so far for other rows."""

    def add(i: Array, outputs: Array) -> Array:
        tree = jax.tree.map(lambda a: a[i], state.trees)
        return outputs + tree.leaves.at(ops.hard(tree.weights, tree.bias, x), x)

    return jax.lax.fori_loop(0, state.count, add, jnp.broadcast_to(state.initial, (len(x), *state.initial.shape)))
