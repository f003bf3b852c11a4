"""The result of a sweep: its runs, the best of them, and tables."""

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import numpy as np

from jtrees import validation as checks
from jtrees.search.fit import FitResult


class SweepResult(NamedTuple):
    """The result of a sweep over C combinations of options, S seeds and F folds (F = 1 if there are no folds).

    Attributes:
      options: options of each combination, by name.
      seeds: the seeds.
      fits: fit of each run, ``(C, S, F)``; None if the run diverged or did not start,
        or if its file is no longer in the folder.
      losses: mean loss of each run, ``(C, S, F)``, as in :class:`jtrees.FitResult`. The loss is on held-out rows if
        there are any, else on the training data. It is infinite if the run diverged or did not start.
      sizes: number of parameters of each model, ``(C, S, F)``; NaN if there is no model.
      seconds: seconds of each run, ``(C, S, F)``; NaN if it did not start. Concurrent runs have equal shares of their
        seconds.
      states: state of each run, ``(C, S, F)``. ``"finished"``; ``"interrupted"``: Ctrl-C ended its training early;
        ``"not started"``: Ctrl-C ended the sweep before it, or it is the share of another sweep; ``"diverged"``: it
        became non-finite.
    """

    options: list[dict[str, Any]]
    seeds: tuple[int, ...]
    fits: np.ndarray
    losses: np.ndarray
    sizes: np.ndarray
    seconds: np.ndarray
    states: np.ndarray

    @property
    def best(self) -> dict[str, Any]:
        """The options of the combination with the lowest mean loss over seeds and folds.

        If losses are equal, the combination with the smaller models is the best. A combination is compared if all of
        its runs are finished. If there are none, the combinations with the most finished runs are compared.
        """
        return self.options[self._order()[0]]

    @property
    def best_run(self) -> tuple[int, int]:
        """The indices of the combination and the seed with the lowest mean loss over the folds.

        If losses are equal, the smaller model is the best. Only runs that finished all folds are compared. If there are
        none, the runs with the most finished folds are compared, because folds differ.
        """
        finite = np.isfinite(self.losses)
        count = finite.sum(2)
        compared = (finite & (self.states == "finished")).all(2)
        if not compared.any():
            compared = count == max(1, count.max())
        means = np.where(compared, self.losses.sum(2, where=finite) / np.maximum(count, 1), np.inf)
        sizes = self.sizes.mean(2)
        combination, seed = min(np.ndindex(*means.shape), key=lambda cell: (means[cell], sizes[cell]))
        return combination, seed

    @property
    def fit(self) -> FitResult:
        """The fit of the best run; if there are several folds, the fit of the first fold that has a fit.

        Raises:
          ValueError: if the fit is not in memory, because it is of a kind that the folder of the sweep cannot keep.
        """
        fits = [fit for fit in self.fits[self.best_run] if fit is not None]
        if not fits:
            options, seed = self.options[self.best_run[0]], self.seeds[self.best_run[1]]
            missing = f"{checks.quoted(options)}, seed {seed}"
            raise ValueError(f"the best run must have a fit in memory or in the folder, got none for {missing}")
        return fits[0]

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each combination and seed.

        A row has the options, ``seed``, ``loss`` and ``size`` (means over folds), ``seconds`` (a sum over folds), and
        ``state``. If the folds have different states, the state is ``"diverged"`` if a fold diverged, else
        ``"interrupted"``.
        """
        return [
            self.options[c]
            | {"seed": self.seeds[s], "loss": float(self.losses[c, s].mean()), "size": float(self.sizes[c, s].mean())}
            | {"seconds": float(self.seconds[c, s].sum()), "state": state_of_folds(self.states[c, s])}
            for c, s in np.ndindex(self.losses.shape[:2])
        ]

    def _mean_row(self, combination: int) -> dict[str, Any]:
        """Returns the row of a combination in :meth:`frame` by the mean."""
        states = np.array([state_of_folds(folds) for folds in self.states[combination]])
        is_finished = states == "finished"
        count = int(is_finished.sum())
        mean = lambda values: float(values.mean()) if count else np.nan
        losses = self.losses[combination][is_finished].mean(1)
        return self.options[combination] | {
            "loss": mean(losses) if count else np.inf,
            "error": float(losses.std(ddof=1) / np.sqrt(count)) if count > 1 else np.nan,
            "seeds": count,
            "diverged": int((states == "diverged").sum()),
            "size": mean(self.sizes[combination][is_finished]),
            "seconds": mean(self.seconds[combination][is_finished].sum(1)),
        }

    def frame(self, by: Literal["mean"] | None = None) -> Any:
        """Returns :meth:`rows` as a pandas DataFrame, from the best to the worst; runs that are not finished come last.

        If ``by`` is ``"mean"``, the frame has a row for each combination. A row has the options, and the means
        ``loss``, ``size`` and ``seconds`` of the finished seeds. ``error`` is the standard error of the mean loss (NaN
        for a single seed). ``seeds`` is the number of finished seeds, and ``diverged`` the number of diverged seeds.

        Raises:
          ValueError: if ``by`` is not None or ``"mean"``.
          ImportError: if pandas is not installed.
        """
        import pandas as pd

        if by is not None:
            checks.check_choice("by", by, ("mean",))
            return self._with_options(pd.DataFrame([self._mean_row(c) for c in self._order()]), self._order())
        frame = pd.DataFrame(self.rows())
        frame = self._with_options(frame, np.repeat(range(len(self.options)), len(self.seeds)).tolist())
        order = np.lexsort((frame["size"], frame["loss"], frame["state"] != "finished"))
        return frame.iloc[order].reset_index(drop=True)

    def _with_options(self, frame: Any, combinations: list[int]) -> Any:
        """Returns a frame whose options None stay None beside numbers; pandas writes NaN for them."""
        options = [self.options[c] for c in combinations]
        for name in {name for row in options for name, value in row.items() if value is None}:
            frame[name] = np.array([*(row.get(name, np.nan) for row in options), None], object)[:-1]
        return frame

    def _order(self) -> list[int]:
        """Returns the combinations from the best to the worst."""
        rows = [self._mean_row(c) for c in range(len(self.options))]
        return sorted(range(len(rows)), key=lambda c: (-rows[c]["seeds"], rows[c]["loss"], rows[c]["size"]))

    def __repr__(self) -> str:
        combination, seed = self.best_run
        runs = f"{len(self.options)} combinations x {len(self.seeds)} seeds x {self.losses.shape[2]} folds"
        if np.isin(self.states, ("interrupted", "not started")).any():
            runs = f"{(self.states == 'finished').sum()} of {self.states.size} runs finished: {runs}"
        loss = float(np.ma.masked_invalid(self.losses[self.best_run]).mean())
        best = f"{self.options[combination]}, seed {self.seeds[seed]}, loss {loss:.6g}"
        return f"SweepResult({runs}, best run: {best})"


def state_of_folds(states: Iterable[str]) -> str:
    """Returns the common state of all folds; else ``"diverged"`` if a fold diverged, else ``"interrupted"``."""
    distinct = set(map(str, states))
    if len(distinct) == 1:
        return distinct.pop()
    return "diverged" if "diverged" in distinct else "interrupted"
