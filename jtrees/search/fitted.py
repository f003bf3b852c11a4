"""Fitted: the result of a search."""

from typing import Any, NamedTuple

import numpy as np

from jtrees.search.report import Report
from jtrees.tree import ObliqueTree


class LeftOut(NamedTuple):
    """Losses of rows by models that were not trained on them.

    Attributes:
      losses: the loss of each row of the table in the user's units, as in :class:`jtrees.FitResult`; for votes, 1 for a
        wrong class. NaN for a row that all models were trained on, ``(n,)``.
      chose: whether the rows also chose a part of the model, such as its number of rounds.
      several: whether several models left out different rows.
    """

    losses: np.ndarray
    chose: bool
    several: bool

    @property
    def rows(self) -> np.ndarray:
        """Numbers of the rows with a loss."""
        return np.flatnonzero(~np.isnan(self.losses))


class Fitted(NamedTuple):
    """The result of a search, on the host.

    A part of a larger model, such as a tree of a boosted sum, has no result in the user's units: ``model`` is None.

    Attributes:
      scaled: the model of scaled data, or its splits.
      score: the score by which the model was chosen, on scaled data; lower is better.
      step: number of updates before the model was evaluated.
      history: loss before each update on scaled data, ``(..., updates)``; NaN for updates that were not made.
      model: the model in the user's units, with ``predict(x)``.
      tree: the model if it is a :class:`jtrees.ObliqueTree`, else None.
      loss: the loss by which the model was chosen, in the user's units.
      report: the recipe's report.
      left_out: losses of rows by parts of the search that were not trained on them, or None.
      expected_loss: the loss that the search expects on new rows, in the user's units, or None.
    """

    scaled: Any
    score: float
    step: int
    history: Any
    model: Any = None
    tree: ObliqueTree | None = None
    loss: float = np.nan
    report: Any = Report()
    left_out: LeftOut | None = None
    expected_loss: float | None = None
