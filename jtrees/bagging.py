"""Bagging over any recipe: many models, each from a bootstrap sample, side by side in one compiled program."""

from typing import Any, Literal, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from jtrees import validation as checks
from jtrees.forest import Forest, votes
from jtrees.recipes import Fit, Found, Recipe, Rounds, Watch, static
from jtrees.starts import map_starts
from jtrees.table import Scale, Table, mean_loss


class Bags(NamedTuple):
    """What is prepared: the rows that each bag holds, ``(trees, m)``, and what the base prepares for each."""

    drawn: Any
    starts: Any


@struct.dataclass(kw_only=True)
class Bagged(Recipe):
    """Many models by one recipe, each from a bootstrap sample (bagging, Breiman 1996), as DGT-Forest is.

    The model is a :class:`jtrees.Forest`; ``tree`` is None. The report has ``in_bag``, how often each tree's sample holds
    each row, ``(trees, n)``; ``out_of_bag``, what the trees that did not see a row answer for it, ``(n,)`` or
    ``(n, k)``, NaN where all did; ``out_of_bag_score``, R^2 (of several targets the mean) or accuracy of that over the
    rows that some tree did not see, NaN where those are fewer than two; ``scores``, the base's own score of each tree;
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

    def targets(self, x: Any, y: Any) -> Any:
        return self.base.targets(x, y)

    def checked(self, table: Table) -> "Bagged":
        if not isinstance(self.base, Recipe):
            raise ValueError(f"base must be a recipe, such as jtrees.DGT(), got {self.base!r}")
        if checks.is_traced(self.fraction) or not 0 < float(self.fraction) <= 1:
            raise ValueError(f"fraction must be above 0 and at most 1, got {self.fraction!r}")
        combine = self.combine or ("mean" if table.classes is None else "vote")
        checks.check_choice("combine", combine, ("mean", "vote"))
        if combine == "vote" and table.classes is None:
            raise ValueError('combine must be "mean" in regression, got "vote"')
        base, trees = self.base.checked(table), checks.check_count("trees", self.trees)
        return self.replace(base=base, trees=trees, fraction=float(self.fraction), combine=combine)

    def scale(self, table: Table) -> Scale:
        return self.base.scale(table)

    def bag_size(self, n: int) -> int:
        """Rows in a bootstrap sample of n rows."""
        return max(1, round(self.fraction * n))

    def prepare(self, table: Table, *, key: Array) -> Bags:
        real = int(np.count_nonzero(np.asarray(table.weight) > 0))
        draw_key, base_key = jax.random.split(key)
        drawn = np.asarray(jax.random.randint(draw_key, (self.trees, self.bag_size(len(table.x))), 0, real))
        keys = jax.random.split(base_key, self.trees)
        starts = [self.base.prepare(self._bag(table, rows), key=k) for rows, k in zip(drawn, keys, strict=True)]
        return Bags(jnp.asarray(drawn), jax.tree.map(lambda *a: jnp.stack(a), *starts))

    def _bag(self, table: Table, drawn: Array) -> Table:
        """A bootstrap sample: of a padded table as many rows as of the table itself, in the shape of the padded one."""
        bag = table.rows(drawn)
        real = (table.weight > 0).sum()
        inside = jnp.arange(drawn.shape[0]) < jnp.maximum(jnp.round(self.fraction * real), 1)
        return Table(bag.x, bag.y, bag.weight * inside, bag.classes)

    def rounds(self, shape: tuple[int, int], many: int = 1) -> Rounds:
        return self.base.rounds((self.bag_size(shape[0]), shape[1]), many * self.trees)

    def begin(self, start: Bags, table: Table, *, key: Array) -> Any:
        one = lambda key, drawn, start: (drawn, self.base.begin(start, self._bag(table, drawn), key=key))
        return map_starts(one, jax.random.split(key, self.trees), start.drawn, start.starts)

    def round(self, i: Array, state: Any, table: Table, judge: Table | None, rounds: Rounds) -> tuple[Any, Array]:
        def one(drawn: Array, state: Any) -> tuple[Any, Array]:
            state, losses = self.base.round(i, state, self._bag(table, drawn), judge, rounds)
            return (drawn, state), losses

        return map_starts(one, *state)

    def end(self, state: Any, table: Table, judge: Table | None) -> Found:
        found = map_starts(lambda drawn, one: self.base.end(one, self._bag(table, drawn), judge), *state)
        return Found(found, found.score.mean(), found.finite.all(), found.step.max(), state[0])

    def finish(
        self, found: Found, start: Bags, table: Table, judge: Table | None, *, scale: Scale, key: Array, watch: Watch
    ) -> Fit:
        n = len(table.x)
        drawn = np.asarray(found.extra)[:, : max(1, round(self.fraction * n))]
        of = lambda tree, i: jax.tree.map(lambda a: a[i], tree)
        fits = [
            self.base.finish(
                of(found.model, i), of(start.starts, i), table.rows(rows), judge, scale=scale, key=k, watch=watch
            )
            for i, (rows, k) in enumerate(zip(drawn, jax.random.split(key, self.trees), strict=True))
        ]
        combine: Any = self.combine
        forest = Forest(jax.tree.map(_stacked, *(fit.model for fit in fits)), combine)
        in_bag = np.stack([np.bincount(rows, minlength=n) for rows in drawn])
        out_of_bag = _out_of_bag(forest, table, in_bag)
        report = {"in_bag": in_bag, "out_of_bag": out_of_bag, "out_of_bag_score": _score(out_of_bag, table)}
        report |= {"scores": np.array([fit.loss for fit in fits]), "fits": [fit.report for fit in fits]}
        return Fit(forest, None, mean_loss(forest, judge or table, scale), int(found.step), np.zeros(0), report)


def _stacked(*arrays: Any) -> Any:
    """One array of several; those of NumPy, which may be in double precision, stay there."""
    return np.stack(arrays) if isinstance(arrays[0], (np.ndarray, np.generic, float, bool)) else jnp.stack(arrays)


def _out_of_bag(forest: Forest, table: Table, in_bag: np.ndarray) -> np.ndarray:
    """The mean of what the trees that did not see a row answer for it."""
    answers = np.stack([np.asarray(model.predict(table.x), np.float64) for model in forest])
    if forest.combine == "vote":
        answers = np.asarray(votes(answers), np.float64)
    asked = (in_bag == 0).reshape(*in_bag.shape, *[1] * (answers.ndim - 2))
    count = asked.sum(0)
    return np.where(count > 0, np.where(asked, answers, 0).sum(0) / np.maximum(count, 1), np.nan)


def _score(answers: np.ndarray, table: Table) -> float:
    """R^2 or accuracy over the rows that have an answer."""
    there = np.isfinite(answers.reshape(len(answers), -1)[:, 0])
    y, answers = table.y[there], answers[there]
    if table.classes is not None:
        return float(np.mean(answers.argmax(1) == y)) if len(y) else float("nan")
    if len(y) < 2 or not np.ptp(y, axis=0).all():
        return float("nan")
    return float(np.mean(1 - np.square(y - answers).sum(0) / np.square(y - y.mean(0)).sum(0)))
