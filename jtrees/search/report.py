"""Reports: what a fit says besides its model. Each recipe has a class of its own, beside it; here are the others.

Reports nest: a fit's holds that of its recipe, and that of a recipe over another recipe holds that of its base. Arrays
are on the host.
"""

from collections.abc import Iterator, Mapping
import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jtrees import io

_LONGEST, _SHORTEST = 80, 24  # characters of a value in a table, and in the representation
_MOST_NUMBERS = 6  # of an array that is shown itself, not its shape


@io.family
@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Report:
    """What a recipe has to say of a fit: a dataclass with a documented attribute for each result.

    ``print(report)`` shows a table, with arrays as their shapes. An attribute is None if there is nothing to say.
    ``dataclasses.asdict(report)`` returns nested dictionaries.
    """

    def replace(self, **values: Any) -> Any:
        """Returns the report with other values."""
        return dataclasses.replace(self, **values)

    def names(self) -> list[str]:
        """Returns the names of all that is there, those of a nested report as ``"search.chosen"``."""
        names = []
        for name, value in self._there():
            inner = value.names() if isinstance(value, Report) else []
            names += [f"{name}.{one}" for one in inner] or [name]
        return names

    def _there(self) -> Iterator[tuple[str, Any]]:
        """Yields the name and the value of each attribute that is not None."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return ((name, value) for name, value in values if value is not None)

    def _rows(self, depth: int = 1) -> Iterator[tuple[str, str]]:
        """Yields the indented name and the text of each attribute, nested reports below their name."""
        for name, value in self._there():
            yield "  " * depth + name, type(value).__name__ if isinstance(value, Report) else _shown(value)
            if isinstance(value, Report):
                yield from value._rows(depth + 1)

    def __str__(self) -> str:
        rows = [*self._rows()]
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([type(self).__name__, *(f"{name:{width}}  {text}".rstrip() for name, text in rows)])

    def __repr__(self) -> str:
        parts = (f"{name}={_cut(_shown(value), _SHORTEST)}" for name, value in self._there())
        return f"{type(self).__name__}({', '.join(parts)})"


def _shown(value: Any) -> str:
    """Returns a value as short text."""
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


# --- Reports that several recipes share ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Preconditioning(Report):
    """How the features were preconditioned.

    Attributes:
      strength: the strength, from 0 (none) to below 1.
      losses: the loss of the trial of each strength, on scaled data, ``(strengths,)``; infinite if it was not run.
    """

    strength: float
    losses: np.ndarray


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TreeReport(Report):
    """The report of a recipe that ends in one tree.

    Attributes:
      reached: the number of internal nodes that at least one training row reaches; ``tree.prune(x)`` removes the
        others.
      preconditioning: how features were preconditioned; None: no strength was tried or given.
    """

    reached: int
    preconditioning: Preconditioning | None = None


# --- The report of a fit ---------------------------------------------------------------------------------------------


@io.part
class Trial(NamedTuple):
    """One combination of options.

    Attributes:
      options: the options by name.
      loss: mean loss on held-out rows (as in :class:`jtrees.FitResult`); infinite if the search was not finite.
      error: standard error of the paired difference between its losses and those of the best.
      size: number of parameters of its models (mean over folds).
      rows: number of rows that it was fitted to the last time, and of which a fold leaves some out; less than all
        training rows if halving dropped it.
    """

    options: dict[str, Any]
    loss: float
    error: float
    size: float
    rows: int | None = None


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Tuning(Report):
    """How :func:`jtrees.tune` chose options.

    Attributes:
      options: the options of the fit, by name.
      trials: all combinations that were tried; of each, the trial on the most rows.
    """

    options: dict[str, Any]
    trials: list[Trial]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class FitReport(Report):
    """The report of a fit.

    Attributes:
      verdict: one sentence on which is better, the model, a linear model or a constant. None without ``baselines``.
      baselines: the losses ``model``, ``linear`` and ``constant`` (see :func:`jtrees.data.baselines.compared`). None
        if the loss is a function of the user's, and for fits of a sweep.
      ended: ``"finished"``, ``"max_seconds"`` or ``"interrupted"``.
      ended_at: the last search and its number of updates, in words.
      seconds: what the fit took, with all that ran beside it in a sweep.
      updates: the number of updates that each run in the history took before it ended, was dropped or became
        non-finite: the shape of the history without its last axis.
      held_out_loss: where the search left rows out, the loss on these rows of a model that was not trained on them.
      held_out_rows: their numbers among the rows of positive weight; None if they are all rows.
      recipe: the recipe's name and options as plain data.
      search: the report of the recipe.
      tuning: how :func:`jtrees.tune` chose options, a :class:`Tuning`; None for other fits.
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
        """The start that GET or RADDT chose, also as the base of another recipe; None: of other recipes."""
        report = self.search
        while hasattr(report, "base"):
            report = report.base
        return getattr(report, "chosen", None)
