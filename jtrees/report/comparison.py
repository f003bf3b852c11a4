"""The comparison of a model with simpler models on the same rows, and a verdict in one sentence."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from jtrees import distributed
from jtrees.data.scaling import Scaling, row_losses
from jtrees.data.table import Table
from jtrees.description import count_free
from jtrees.forest import Forest
from jtrees.report.rivals import ITERATIONS, LinearModel, baselines
from jtrees.tasks import Classification, Task
from jtrees.text import number_text
from jtrees.training import Batch
from jtrees.tree import ObliqueTree

_WORK = 4e9  # largest number of products of a fit of the linear model, which takes less time than any search
_FEWEST_ROWS, _ROWS = 1000, 10_000  # least number of rows of such a fit; largest number of rows of a comparison
_NUMBERS = 2**22  # largest number of predicted numbers of a comparison with more than the least number of rows
_ARTICLES = {
    "linear": "a linear model",
    "linear model": "a linear model",
    "constant": "a constant",
    "random forest": "a random forest",
}
_SHOWN = 3  # number of best rivals whose losses a verdict states, besides the rivals that it names
_UNSURE = 0.25  # uncertain fraction of the charge for the parameters of a tree
_MARGIN = 0.002  # smallest difference that counts, as a fraction of the loss of a constant
_ERRORS = 2.0  # standard errors of a difference that may be due to chance

TRAINING = "the training rows"
CHARGED = "the training rows, with a penalty for each parameter"
LEFT_OUT = "rows left out in training"
HELD_OUT = "held-out rows"
CHOSE = ", which also chose the model"  # losses on such rows are slightly too low
VALIDATION = f"the validation set{CHOSE}"


class BehindBaselineWarning(UserWarning):
    """A model has a higher loss than a linear model or a constant."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The losses of a model and of simpler models on the same rows.

    Attributes:
      losses: mean losses by name. The first is the loss of the model.
      measure: name of the loss, such as ``"log loss"``.
      where: name of the rows, such as ``"the validation set"``.
      margins: by rival, the difference of losses that may be due to chance. It is the largest of 0.2 % of the
        constant's loss, two standard errors of the mean difference of the two models' losses on the same rows, and a
        quarter of a tree's charge.
    """

    losses: dict[str, float]
    measure: str
    where: str
    margins: dict[str, float]

    @classmethod
    def from_losses(
        cls,
        row_losses: dict[str, np.ndarray],
        weight: np.ndarray | None,
        measure: str,
        where: str,
        charged: dict[str, float] | None = None,
        doubt: float = 0.0,
    ) -> "Comparison":
        """Returns a comparison with its margins.

        ``row_losses`` has the loss of each row by name, first of the model. One name is ``"constant"``. ``charged`` has
        mean losses that include a charge for parameters; None: the means of ``row_losses``. ``doubt`` is a lower bound
        of the margins, such as a part of a tree's charge.
        """
        means = {name: float(np.average(losses, weights=weight)) for name, losses in row_losses.items()}
        losses = means if charged is None else charged
        name, *rivals = row_losses
        minimum = max(_MARGIN * abs(losses["constant"]), doubt)
        weights: Any = np.ones(len(row_losses[name])) if weight is None else weight
        weights = weights / weights.sum()

        def margin(rival: str) -> float:
            with np.errstate(invalid="ignore"):  # both losses of a row may be infinite
                differences = row_losses[name] - row_losses[rival]
            if not np.isfinite(differences).all():
                return minimum
            error = np.sqrt(np.square(weights) @ np.square(differences - weights @ differences))
            return max(minimum, _ERRORS * float(error))

        return cls(losses, measure, where, {rival: margin(rival) for rival in rivals})

    @property
    def rivals(self) -> list[str]:
        """Names of the simpler models, sorted from the best."""
        return sorted(self.margins, key=self.losses.__getitem__)

    @property
    def better(self) -> list[str]:
        """Names of the simpler models that are better than the model, sorted from the best."""
        return [rival for rival in self.rivals if self._lead(rival) > self.margins[rival]]

    def _lead(self, rival: str) -> float:
        """Returns by how much the loss of a rival is lower than the loss of the model."""
        return self.losses[next(iter(self.losses))] - self.losses[rival]

    def verdict(self, name: str) -> str:
        """Returns a sentence that says which model is better; ``name`` is the name of the model."""
        rivals, better = self.rivals, self.better
        similar = [rival for rival in rivals if abs(self._lead(rival)) <= self.margins[rival]]
        if better:
            verdict = f"{phrases(better)} {'is' if len(better) == 1 else 'are'} better than {name}"
        elif similar:
            verdict = f"{name} is neither clearly better nor clearly worse than {phrases(similar)}"
        elif self.where == TRAINING:
            verdict = f"whether {name} is better than {phrases(rivals)} needs held-out rows"
        else:
            verdict = f"{name} is better than {phrases(rivals)}"
        named = better or similar or rivals
        shown = [rival for rank, rival in enumerate(rivals) if rank < _SHOWN or rival in named]
        against = [f"{number_text(self.losses[rival], 4)} for {_phrase(rival)}" for rival in shown]
        model_loss = number_text(self.losses[next(iter(self.losses))], 4)
        verdict = f"{verdict}: {self.measure} {model_loss}, {phrases(against)}, on {self.where}"
        return verdict[0].upper() + verdict[1:]

    def warn_if_behind(self, name: str, advice: str) -> None:
        """Warns with :class:`BehindBaselineWarning` if a simpler model is better. ``advice``: what may do better."""
        if self.better:
            distributed.warn(f"{self.verdict(name)}: {advice}", BehindBaselineWarning)


def compared(
    model: Any,
    table: Table,
    scaling: Scaling,
    *,
    held_out: Table | None,
    where: str = HELD_OUT,
    left_out: Any = None,
    expected_loss: float | None = None,
    monitor: Any = None,
) -> Comparison:
    """Returns the losses of a model of numeric features, of a linear model and of a constant.

    The losses are on ``held_out`` if it is given, rows that the model was not trained on, called ``where``. Else they
    are on the rows that the model's search left out (``left_out``, a :class:`jtrees.search.LeftOut`). If there are no
    such rows, the losses are on the training rows, and each model is charged for its parameters. The charge follows
    generalised cross-validation, or Akaike's criterion for log loss. The parameters of a single tree are counted by
    ``jtrees.description.count_free``. A tree with linear leaves is charged the amount of its search. A model that is
    not a single tree is not charged. Large tables are subsampled.

    Args:
      model: the fitted model of numeric features.
      table: the training rows, in the user's units.
      scaling: scaling of the features.
      held_out: rows that the model was not trained on, or None.
      where: name of the rows ``held_out``.
      left_out: losses of the rows that the search left out, a :class:`jtrees.search.LeftOut`, or None. If several
        models left out different rows, the simpler models are fitted to all rows, and are charged.
      expected_loss: the loss of the model on new rows that its search expects, or None.
      monitor: the :class:`jtrees.search.monitor.Monitor` of the comparison. If the time is short, the linear model is
        fitted to fewer rows or with fewer steps. None: there is no deadline.

    Returns:
      The comparison of ``model``, ``linear`` and ``constant``. Models that vote are compared by the error rate.
    """
    task, votes = table.task, isinstance(model, Forest) and model.combine == "vote"
    trained, doubt = np.arange(len(table.x)), 0.0
    limit = int(np.clip(_NUMBERS // math.prod(task.shape), _FEWEST_ROWS, _ROWS))

    def lose(predictions: np.ndarray, rows: Table) -> np.ndarray:
        return 1 - task.hits(predictions, rows.y) if votes else row_losses(task, predictions, rows.y, scaling)

    if held_out is None and left_out is not None and len(left_out.rows):
        rows = _evenly(left_out.rows, limit)
        evaluated, model_losses = table.rows(rows), left_out.losses[rows]
        where, charges = f"{LEFT_OUT}{CHOSE if left_out.chose else ''}", left_out.several
        trained = trained if left_out.several else np.setdiff1d(trained, left_out.rows)
    else:
        source, charges = table if held_out is None else held_out, held_out is None
        evaluated = source.rows(_evenly(np.arange(len(source.x)), limit)).normalised()
        model_losses = lose(np.asarray(model.predict(evaluated.x), np.float64), evaluated)
        where = TRAINING if held_out is None else where
    mean = lambda losses: float(np.average(losses, weights=evaluated.weight))
    charge = lambda loss, count: _charged(task, loss, count, len(table.x)) if charges and not votes else loss
    losses, charged, model_loss = {"model": model_losses}, {}, mean(model_losses)
    if where == TRAINING and isinstance(model, ObliqueTree):
        uncharged, where = model_loss, CHARGED
        if expected_loss is None:
            model_loss = charge(model_loss, count_free(scaling.transform_splits(model)))
        else:
            model_loss = max(model_loss, expected_loss)
        doubt = _UNSURE * (model_loss - uncharged)
    has_time = None if monitor is None else monitor.has_time
    for name, rival in baselines(task, scaling.transform, has_time).items():
        is_linear = isinstance(rival, LinearModel)
        count = _largest_sample(task, table.x.shape[1]) if is_linear else len(trained)
        sample = table.rows(_evenly(trained, count)).normalised()
        rows, fit_rival = Batch(sample.x, sample.y, sample.weight), lambda rows, fit=rival.fit: fit(*rows)  # type: ignore[arg-type]
        timed = monitor if is_linear else None
        fitted = fit_rival(rows) if timed is None else timed.on_rows(fit_rival, rows, math.prod(task.shape))
        rival_losses = lose(fitted.predict(evaluated.x), evaluated)
        key = name.removesuffix(" model")  # as in the report of a fit
        losses[key], charged[key] = rival_losses, charge(mean(rival_losses), rival.count)
    measured = "error rate" if votes else task.loss_function.measure
    return Comparison.from_losses(losses, evaluated.weight, measured, where, {"model": model_loss, **charged}, doubt)


def _largest_sample(task: Task, width: int) -> int:
    """Returns the largest number of training rows of a linear model of ``width`` features."""
    steps = 10 * ITERATIONS * max(1, int(np.prod(task.shape)))
    cost = width * (width if task.link_name in ("identity", "sorted") else steps)
    return int(np.clip(_WORK / max(1, cost), _FEWEST_ROWS, _ROWS))


def _evenly(rows: np.ndarray, limit: int) -> np.ndarray:
    """Returns at most ``limit`` evenly spaced entries."""
    return rows[:: -(-len(rows) // limit)]


def _charged(task: Task, loss: float, count: float, rows: int) -> float:
    """Returns the expected loss on new rows, from the loss on the training rows and the number of parameters."""
    if isinstance(task, Classification):
        return loss + count / rows  # Akaike
    left = 1 - count / rows
    power = 1.0 if task.loss_function.unit_exponent() == 1 and task.loss_function.link != "exp" else 2.0
    return loss / left**power if left > 0 else np.inf


def _phrase(name: str) -> str:
    """Returns a name as it appears in a sentence: "CART, depth 4" becomes "CART"."""
    return _ARTICLES.get(name, name.partition(",")[0])


def phrases(names: Sequence[str]) -> str:
    """Returns names as text: "a linear model and a constant"."""
    named = list(map(_phrase, names))
    return " and ".join([", ".join(named[:-1]), named[-1]] if len(named) > 1 else named)
