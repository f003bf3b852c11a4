"""Bagging of any recipe: models of bootstrap samples, trained side by side in one compiled program."""

import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import pytree, sharding, validation as checks
from jtrees.data import Data, Table
from jtrees.forest import Forest, votes
from jtrees.search import Finished, Recipe, Round, Search, SearchResult, options
from jtrees.search.monitor import Monitor
from jtrees.search.recipe import HeldOut, next_of_all
from jtrees.tasks import Classification, Task
from jtrees.training import Batch, map_starts


class Bags(NamedTuple):
    """The bootstrap samples (bags) and the preparation of the base for each.

    Attributes:
      drawn: indices of the rows of each bag, ``(trees, m)``, -1 for padding.
      numbers: the same as indices among the rows of positive weight.
      starts: results of the base's ``prepare`` for each bag.
    """

    drawn: Any
    numbers: Any
    starts: Any


@pytree.dataclass(kw_only=True)
class Bagged(Recipe):
    """Bagging (Breiman 1996): many models of one recipe, each fitted to a bootstrap sample, as in DGT-Forest.

    Rows are drawn uniformly, and keep their weights. The model is a :class:`jtrees.Forest`; ``tree`` is None. The
    report has, for the n rows of positive weight, ``in_bag``, how often each tree's sample contains each row,
    ``(trees, n)``, and ``out_of_bag``, the prediction for each row by the trees not trained on it, ``(n,)`` or
    ``(n, k)``, NaN if there is none; ``out_of_bag_score``, weighted R^2 (of several targets the mean) or accuracy of
    these, NaN for fewer than two rows or constant targets; ``scores``, the base's loss of each tree; ``fits``, the
    report of each tree. After a deadline the forest has as many of the trees as there is time to finish.

    Attributes:
      base: any recipe.
      trees: number of trees.
      fraction: size of a bootstrap sample as a part of n, above 0 and up to 1; drawn with replacement.
      combine: ``"mean"`` of predictions, or ``"vote"`` of the trees' most probable classes; None: votes in
        classification, as in the paper, and the mean in regression.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> recipe = jtrees.Bagged(jtrees.DGT(depth=1, epochs=20, widths=()), trees=3)
      >>> fit = jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> len(fit.model), fit.report["out_of_bag"].shape
      (3, (40,))
    """

    base: Recipe = pytree.field(kw_only=False, metadata={"check": options.checked_base})
    trees: int = options.count(30)
    fraction: float = options.share(1.0)
    combine: Literal["mean", "vote"] | None = options.choice(None, ("mean", "vote"), optional=True)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        combine: Any = self.combine or ("vote" if isinstance(task, Classification) else "mean")
        if combine == "vote" and not isinstance(task, Classification):
            raise ValueError('combine must be "mean" in regression, got "vote"')
        size = lambda n: max(1, round(self.fraction * n))  # rows in a bootstrap sample of n rows
        checks.check_count("trees", self.trees, most=checks.MAX_NUMBERS // size(shape[0]))
        base = self.base.search(task, (size(shape[0]), shape[1]))

        def prepare(batch: Batch, *, key: Array, monitor: Monitor | None = None) -> Bags:
            monitor = Monitor() if monitor is None else monitor
            n = len(batch.x)
            real = np.arange(n) if batch.weight is None else np.flatnonzero(np.asarray(batch.weight) > 0)
            draw_key, base_key = jax.random.split(key)
            rng = np.random.default_rng(np.asarray(jax.random.key_data(draw_key)))  # on the host: no compilation
            drawn = rng.choice(real, (self.trees, size(n))).astype(np.int32)
            drawn[:, size(len(real)) :] = -1  # the bag of a padded batch is padded alike
            numbers = np.where(drawn < 0, -1, np.searchsorted(real, drawn)).astype(np.int32)
            starts = []
            for i, rows in enumerate(drawn):
                if i and not monitor.has_time():  # then bags share what was prepared for others
                    starts += [starts[j % i] for j in range(i, self.trees)]
                    break
                of_bag: Any = {"key": jax.random.fold_in(base_key, i), "monitor": monitor.part(1 / (self.trees - i))}
                starts.append(base.prepare(_bag(batch, rows), **of_bag))
            return Bags(jnp.asarray(drawn), jnp.asarray(numbers), jax.tree.map(_stacked, *starts))

        def init(start: Bags, batch: Batch, *, key: Array) -> Any:
            one = lambda key, drawn, start: (drawn, base.init(start, _bag(batch, drawn), key=key))
            return map_starts(one, jax.random.split(key, self.trees), start.drawn, start.starts)

        def one_round(at: Round, state: Any, batch: Batch, validation: Batch | None) -> Any:
            def one(drawn: Array, state: Any) -> Any:
                state, losses = base.round(at, state, _bag(batch, drawn), validation)
                return (drawn, state), losses

            return map_starts(one, *state)

        def result(state: Any, batch: Batch, validation: Batch | None) -> SearchResult:
            results = map_starts(lambda drawn, one: base.result(one, _bag(batch, drawn), validation), *state)
            return SearchResult(results, results.score.mean(), results.finite.all(), results.step.max())

        def finish(result: SearchResult, start: Bags, data: Data, *, key: Array, monitor: Monitor) -> Finished:
            result, start = jax.device_get((result, start))
            fitted, bags, began = [], [], time.monotonic()
            for i, numbers in enumerate(start.numbers):
                if i and not monitor.may_be_late(time.monotonic() - began):  # what follows takes as long again
                    break
                bags.append(rows := numbers[numbers >= 0])
                results, prepared = jax.tree.map(lambda a, i=i: sharding.from_host(a[i]), (result.model, start.starts))
                table = data.table.rows(rows)
                bag = data._replace(table=table, batch=data.scaling.batch(table))
                of_tree: Any = {"key": jax.random.fold_in(key, i), "monitor": monitor}
                fitted.append(base.finish(results, prepared, bag, **of_tree))
            models = [one.model for one in fitted]
            forest = Forest(jax.tree.map(_stacked, *models), combine)
            in_bag = np.stack([np.bincount(rows, minlength=len(data.table.x)) for rows in bags])
            predictions = _predictions(models, combine, data.table)
            out_of_bag = _out_of_bag(predictions, in_bag)
            report = {"in_bag": in_bag, "out_of_bag": out_of_bag, "out_of_bag_score": _score(out_of_bag, data.table)}
            report |= {"scores": np.array([one.loss for one in fitted]), "fits": [one.report for one in fitted]}
            lost = _out_of_bag_loss(predictions, out_of_bag, in_bag, data, combine == "vote")
            return Finished(forest, None, data.loss(forest), report, None if lost is None else HeldOut(lost))

        functions: Any = {"init": init, "round": one_round, "result": result, "finish": finish, "prepare": prepare}
        functions |= {"rounds": base.rounds.shared_by(self.trees), "next": next_of_all(base, lambda state: state[1])}
        return base._replace(**functions, tree_leaves=None)


def _bag(batch: Batch, drawn: Any) -> Batch:
    """Returns the drawn rows, those of index -1 with weight 0; on the host, or traced."""
    xp: Any = np if isinstance(drawn, np.ndarray) else jnp
    batch = jax.tree.map(xp.asarray, batch)
    batch = batch if xp is np else sharding.keep_rows(batch)
    bag, inside = jax.tree.map(lambda a: a[drawn], batch), drawn >= 0
    weight = inside.astype(np.float32) if bag.weight is None else xp.where(inside, bag.weight, 0)
    return bag._replace(weight=weight)


def _stacked(*arrays: Any) -> Any:
    """Stacks arrays; NumPy arrays, which may be in double precision, stay NumPy arrays."""
    stacked = np.stack(arrays)
    return sharding.from_host(stacked) if isinstance(arrays[0], jax.Array) else stacked


def _predictions(models: list[Any], combine: str, table: Table) -> np.ndarray:
    """Returns the predictions or votes of each tree for each row, ``(trees, n, *k)``."""
    predictions = np.stack([model.predict(table.x) for model in models]).astype(np.float64)
    return votes(predictions) if combine == "vote" else predictions


def _out_of_bag(predictions: np.ndarray, in_bag: np.ndarray) -> np.ndarray:
    """Returns the mean prediction for each row of the trees that were not trained on it."""
    left_out = (in_bag == 0).reshape(*in_bag.shape, *[1] * (predictions.ndim - 2))
    count = left_out.sum(0)
    return np.where(count > 0, np.where(left_out, predictions, 0).sum(0) / np.maximum(count, 1), np.nan)


def _out_of_bag_loss(
    predictions: np.ndarray, out_of_bag: np.ndarray, in_bag: np.ndarray, data: Data, votes: bool
) -> float | None:
    """Returns the loss of all trees to expect on new rows; of votes, the share of wrong rows; None without such rows.

    The out-of-bag prediction for a row is that of a few trees alone. The loss of the mean of k trees is about
    ``a + b / k`` (exactly so for squared errors, in expectation), and the losses of single trees and of the out-of-bag
    means give a and b.
    """
    table = data.table
    count = (in_bag == 0).sum(0)
    if not (rows := count > 0).any():
        return None
    weight = np.ones(len(rows)) if table.weight is None else table.weight
    lost = lambda answers, y: table.task.host_losses(answers, y, data.scaling.y_unit)
    if votes:
        return float(np.average(out_of_bag[rows].argmax(1) != table.y[rows], weights=weight[rows]))
    few = float(np.average(lost(out_of_bag[rows], table.y[rows]), weights=weight[rows]))
    inverse = float(np.average(1 / count[rows], weights=weight[rows]))
    if inverse == 1:
        return few
    single = np.zeros(len(rows))
    for answers, out in zip(predictions, in_bag == 0, strict=True):
        single[out] += lost(answers[out], table.y[out])
    one = float(np.average(single[rows] / count[rows], weights=weight[rows]))
    return few - (one - few) / (1 - inverse) * (inverse - 1 / len(predictions))


def _score(predictions: np.ndarray, table: Table) -> float:
    """Returns R^2 or accuracy over the rows with out-of-bag predictions."""
    finite = np.isfinite(predictions.reshape(len(predictions), -1)[:, 0])
    y, weight = table.y[finite], None if table.weight is None else table.weight[finite]
    return float("nan") if len(y) < 2 else table.task.score(predictions[finite], y, weight)
