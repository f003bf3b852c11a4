"""Reports: the results of a fit besides its model.

Each recipe has its own class of reports, in the recipe's module. This module has the reports that recipes share.
Reports are nested. The report of a fit contains the report of its recipe. If the recipe has a base recipe, the report
of the recipe contains the report of the base. Arrays are on the host.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jtrees import io

_LONGEST, _SHORTEST = 80, 24  # largest number of characters of a value in a table, and in ``repr``
_MOST_NUMBERS = 6  # a longer array is shown by its shape


@io.family
@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Report:
    """The report of a recipe on a fit: a dataclass with a documented attribute for each result.

    ``print(report)`` shows a table, in which long arrays are shown by their shapes. An attribute is None if it does not
    apply. ``dataclasses.asdict(report)`` returns nested dictionaries.
    """

    def replace(self, **values: Any) -> Any:
        """Returns the report with changed values."""
        return dataclasses.replace(self, **values)

    def names(self) -> list[str]:
        """Returns the names of all attributes that are not None, in a nested report as ``"search.chosen"``."""
        names = []
        for name, value in self._present():
            inner = value.names() if isinstance(value, Report) else []
            names += [f"{name}.{inner_name}" for inner_name in inner] or [name]
        return names

    def _present(self) -> Iterator[tuple[str, Any]]:
        """Yields the name and the value of each attribute that is not None, nested reports last."""
        values = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        values.sort(key=lambda item: isinstance(item[1], Report))
        return ((name, value) for name, value in values if value is not None)

    def _rows(self, depth: int = 1) -> Iterator[tuple[str, str]]:
        """Yields the indented name and the text of each attribute, nested reports below their name."""
        for name, value in self._present():
            yield "  " * depth + name, type(value).__name__ if isinstance(value, Report) else _shown(value)
            if isinstance(value, Report):
                yield from value._rows(depth + 1)

    def __str__(self) -> str:
        rows = [*self._rows()]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([type(self).__name__, *(f"{name:{width}}  {text}".rstrip() for name, text in rows)])

    def __repr__(self) -> str:
        parts = (f"{name}={_cut(_shown(value), _SHORTEST)}" for name, value in self._present())
        return f"{type(self).__name__}({', '.join(parts)})"


def _shown(value: Any) -> str:
    if isinstance(value, Report):
        return f"{type(value).__name__}(...)"
    if isinstance(value, np.ndarray) and (value.ndim != 1 or value.size > _MOST_NUMBERS):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, np.ndarray):
        return f"[{' '.join(map(_shown, value))}]"
    if isinstance(value, (float, np.floating)):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        items = ", ".join(f"{name}={_shown(item)}" for name, item in value.items())
        return _cut(f"{{{items}}}")
    if isinstance(value, (list, tuple)) and value and not isinstance(value[0], (str, int, float)):
        return f"{len(value)} of {type(value[0]).__name__}"
    return value if isinstance(value, str) else _cut(str(value))


def _cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Preconditioning(Report):
    """How the features were preconditioned.

    Attributes:
      strength: the strength, at least 0 and below 1. Strength 0 is no preconditioning.
      losses: the loss of the trial of each strength, on scaled data, ``(strengths,)``; infinite if the trial failed or
        was not made.
    """

    strength: float
    losses: np.ndarray


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TrainingReport(Report):
    """The report of a recipe that trains by gradient descent.

    Attributes:
      preconditioning: how the features were preconditioned. None: no strength was tried, and none above 0 was given.
    """

    preconditioning: Preconditioning | None = None


@io.part
class Trial(NamedTuple):
    """One combination of options.

    Attributes:
      options: the options by name.
      loss: mean loss on held-out rows (as in :class:`jtrees.FitResult`); infinite if the search was not finite.
      error: standard error of the paired difference to the losses of the best combination.
      size: number of parameters of a model, as a mean over folds.
      rows: number of training rows of a fold in the last trial of the combination. It is below the number of rows of a
        fold only if halving dropped the combination, or if a deadline or Ctrl-C ended halving.
      state: ``"finished"``; ``"interrupted"``: a deadline or Ctrl-C ended its training early, or left out a part;
        ``"diverged"``: its training was not finite.
    """

    options: dict[str, Any]
    loss: float
    error: float
    size: float
    rows: int | None = None
    state: str = "finished"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Tuning(Report):
    """How :func:`jtrees.tune` chose options.

    Attributes:
      options: the options of the fit, by name.
      trials: the trials of the combinations that were tried; for each combination, the trial with the largest number of
        rows. A deadline or Ctrl-C can end the trials before all combinations are tried: see ``ended`` of the report of
        the fit.
    """

    options: dict[str, Any]
    trials: list[Trial]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FitReport(Report):
    """The report of a fit.

    Attributes:
      verdict: a sentence that says which is better: the model, a linear model or a constant. None if ``baselines`` is
        None.
      baselines: the losses ``model``, ``linear`` and ``constant`` (see :func:`jtrees.report.compared`). None
        for a user-defined loss, and for fits of a sweep.
      ended: ``"finished"``, ``"max_seconds"`` or ``"interrupted"``. It is ``"max_seconds"``, too, if the
        deadline left out a part, such as a start or a tree.
      ended_at: the last search and its number of updates, in words.
      seconds: duration of the fit. In a sweep it includes the runs beside the fit.
      updates: number of updates of each run in the history, before the run ended, was dropped or became non-finite.
        The shape is the shape of the history without the last axis.
      held_out_loss: mean loss, in the units of ``loss``, on the rows that the search held out. The evaluated models
        are parts of the search that were not trained on these rows. For a bag that votes, it is the error rate.
      held_out_rows: numbers of these rows among the rows of x. None if several models held out different rows.
      recipe: the recipe's name and options as plain data.
      search: the report of the recipe.
      tuning: how :func:`jtrees.tune` chose options, a :class:`Tuning`; None if ``jtrees.tune`` was not used.
    """

    verdict: str | None = None
    baselines: dict[str, float] | None = None
    ended: str = "finished"
    ended_at: str = ""
    seconds: float = 0.0
    updates: Any = None
    held_out_loss: float | None = None
    held_out_rows: np.ndarray | None = None
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    search: Any = Report()
    tuning: Any = None

    @property
    def chosen(self) -> int | None:
        """Index of the start that GET or RADDT chose, also as a base recipe; None for every other recipe."""
        report = self.search
        while hasattr(report, "base"):
            report = report.base
        return getattr(report, "chosen", None)
