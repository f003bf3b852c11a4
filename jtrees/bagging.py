"""Bagging over any recipe: many models, each from a bootstrap sample, side by side in one compiled program."""

from typing import Any, Literal, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import sharding, validation as checks
from jtrees.forest import Forest, votes
from jtrees.recipes import Combined, Fit, Found, Rounds, Watch, static
from jtrees.starts import map_starts
from jtrees.table import Scale, Table, mean_loss
from jtrees.tasks import Classification


class Bags(NamedTuple):
    """What is prepared for the bags.

    Attributes:
      drawn: the rows that each bag holds, ``(trees, m)``, -1 for padding.
      numbers: the same rows, counted among those that have weight.
      starts: what the base prepares for each bag.
    """

    drawn: Any
    numbers: Any
    starts: Any


@struct.dataclass
class Bagged(Combined):
    """Many models by one recipe, each from a bootstrap sample (bagging, Breiman 1996), as DGT-Forest is.

    Rows are drawn evenly, and keep their weights. The model is a :class:`jtrees.Forest`; ``tree`` is None. The report
    has, for the n rows that have weight, ``in_bag``, how often each tree's sample holds each, ``(trees, n)``, and
    ``out_of_bag``, what the trees that did not see a row answer for it, ``(n,)`` or ``(n, k)``, NaN where all did;
    ``out_of_bag_score``, R^2 (of several targets the mean) or accuracy of that, by weight, over the rows that some tree
    did not see, NaN where those are fewer than two or all alike; ``scores``, the base's own loss of each tree;
    ``fits``, the report of each tree.

    Attributes:
      base: any recipe.
      trees: number of trees.
      fraction: size of a bootstrap sample as a part of n, above 0 and up to 1; drawn with replacement.
      combine: ``"mean"`` of answers, ``"vote"`` for the class that most trees find the most probable; None: votes in
        classification, as the paper has it, and else the mean.
    """

    base: Any
    trees: int = static(default=30)
    fraction: float = static(default=1.0)
    combine: Literal["mean", "vote"] | None = static(default=None)

    def checked(self, table: Table) -> "Bagged":
        classifies = isinstance(table.task, Classification)
        fraction, combine = self.fraction, self.combine or ("vote" if classifies else "mean")
        if checks.is_traced(fraction) or np.ndim(fraction) or np.asarray(fraction).dtype.kind not in "iuf":
            raise ValueError(f"fraction must be a number, got {fraction!r}")
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {fraction!r}")
        checks.check_choice("combine", combine, ("mean", "vote"))
        if combine == "vote" and not classifies:
            raise ValueError('combine must be "mean" in regression, got "vote"')
        trees = checks.check_count("trees", self.trees, most=checks.MAX_NUMBERS // self.bag_size(len(table.x)))
        base = self.checked_base().checked(table)
        return self.replace(base=base, trees=trees, fraction=float(fraction), combine=combine)

    def bag_size(self, n: int) -> int:
        """Rows in a bootstrap sample of n rows."""
        return max(1, round(self.fraction * n))

    def prepare(self, table: Table, *, key: Array) -> Bags:
        n = len(table.x)
        real = np.arange(n) if table.weight is None else np.flatnonzero(np.asarray(table.weight) > 0)
        draw_key, base_key = jax.random.split(key)
        rng = np.random.default_rng(np.asarray(jax.random.key_data(draw_key)))  # on the host: nothing to compile
        drawn = rng.choice(real, (self.trees, self.bag_size(n))).astype(np.int32)
        drawn[:, self.bag_size(len(real)) :] = -1  # a bag of a padded table is as padded
        numbers = np.where(drawn < 0, -1, np.searchsorted(real, drawn)).astype(np.int32)
        keys = (jax.random.fold_in(base_key, i) for i in range(self.trees))
        starts = [self.base.prepare(_bag(table, rows), key=k) for rows, k in zip(drawn, keys, strict=True)]
        return Bags(jnp.asarray(drawn), jnp.asarray(numbers), jax.tree.map(_stacked, *starts))

    def rounds(self, shape: tuple[int, int], many: int = 1) -> Rounds:
        return self.base.rounds((self.bag_size(shape[0]), shape[1]), many * self.trees)

    def begin(self, start: Bags, table: Table, *, key: Array) -> Any:
        one = lambda key, drawn, start: (drawn, self.base.begin(start, _bag(table, drawn), key=key))
        return map_starts(one, jax.random.split(key, self.trees), start.drawn, start.starts)

    def round(self, i: Array, state: Any, table: Table, judge: Table | None, rounds: Rounds) -> tuple[Any, Array]:
        def one(drawn: Array, state: Any) -> tuple[Any, Array]:
            state, losses = self.base.round(i, state, _bag(table, drawn), judge, rounds)
            return (drawn, state), losses

        return map_starts(one, *state)

    def end(self, state: Any, table: Table, judge: Table | None) -> Found:
        found = map_starts(lambda drawn, one: self.base.end(one, _bag(table, drawn), judge), *state)
        return Found(found, found.score.mean(), found.finite.all(), found.step.max())

    def finish(
        self, found: Found, start: Bags, table: Table, judge: Table | None, *, scale: Scale, key: Array, watch: Watch
    ) -> Fit:
        found, start = jax.device_get((found, start))
        bags = [rows[rows >= 0] for rows in start.numbers]
        fits = []
        for i, rows in enumerate(bags):
            ended, began = jax.tree.map(lambda a, i=i: jnp.asarray(a[i]), (found.model, start.starts))
            of: Any = {"scale": scale, "key": jax.random.fold_in(key, i), "watch": watch}
            fits.append(self.base.finish(ended, began, table.rows(rows), judge, **of))
        combine: Any = self.combine
        forest = Forest(jax.tree.map(_stacked, *(fit.model for fit in fits)), combine)
        in_bag = np.stack([np.bincount(rows, minlength=len(table.x)) for rows in bags])
        out_of_bag = _out_of_bag([fit.model for fit in fits], combine, table, in_bag)
        report = {"in_bag": in_bag, "out_of_bag": out_of_bag, "out_of_bag_score": _score(out_of_bag, table)}
        report |= {"scores": np.array([fit.loss for fit in fits]), "fits": [fit.report for fit in fits]}
        return Fit(forest, None, mean_loss(forest, judge or table, scale), int(found.step), np.zeros(0), report)


def _bag(table: Table, drawn: Any) -> Table:
    """The rows drawn, those of number -1 with weight 0: on the host, or traced."""
    xp: Any = np if isinstance(drawn, np.ndarray) else jnp
    table = jax.tree.map(xp.asarray, table)
    table = table if xp is np else sharding.keep_rows(table)
    bag, inside = table.rows(drawn), drawn >= 0
    weight = inside.astype(np.float32) if bag.weight is None else xp.where(inside, bag.weight, 0)
    return Table(bag.x, bag.y, weight, bag.task)


def _stacked(*arrays: Any) -> Any:
    """One array of several; those of NumPy, which may be in double precision, stay there."""
    together = np.stack(arrays)
    return jnp.asarray(together) if isinstance(arrays[0], jax.Array) else together


def _out_of_bag(models: list[Any], combine: str, table: Table, in_bag: np.ndarray) -> np.ndarray:
    """The mean of what the trees that did not see a row answer for it."""
    answers = np.stack([model.predict(table.x) for model in models])
    answers = np.asarray(votes(jnp.asarray(answers)) if combine == "vote" else answers, np.float64)
    asked = (in_bag == 0).reshape(*in_bag.shape, *[1] * (answers.ndim - 2))
    count = asked.sum(0)
    return np.where(count > 0, np.where(asked, answers, 0).sum(0) / np.maximum(count, 1), np.nan)


def _score(answers: np.ndarray, table: Table) -> float:
    """R^2 or accuracy over the rows that have an answer."""
    there = np.isfinite(answers.reshape(len(answers), -1)[:, 0])
    y, answers, weight = table.y[there], answers[there], None if table.weight is None else table.weight[there]
    return float("nan") if len(y) < 2 else table.task.score(answers, y, weight)
