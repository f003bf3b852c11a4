"""Effects of factors on scores over data sets: estimates with intervals, and ranks with critical differences."""

from typing import Any, NamedTuple

import numpy as np
from scipy import stats

Lines = Any  # a data frame; the types of pandas tell a type checker too little
LEAST = 0.5  # points: a smaller difference does not matter, however certain it is


def by_set(runs: Lines, factor: str, score: str = "test") -> Lines:
    """Returns means of a score, a row for each set and a column for each level of a factor."""
    return runs.groupby(["set", factor], sort=False)[score].mean().unstack()


class Effect(NamedTuple):
    """Differences between two levels of a factor, one per set: means over seeds and all other factors."""

    name: str
    differences: Any

    def interval(self) -> tuple[float, float, float]:
        """Returns the estimate of Hodges & Lehmann (1963) and the ends of its 95 per cent interval.

        The estimate is the median of the means of all pairs of sets. A single set with a large difference hardly
        changes it. The interval comes from Wilcoxon's signed-rank test, by the normal approximation; it is infinite for
        fewer than six sets.
        """
        values = np.asarray(self.differences, np.float64)
        count = len(values)
        first, second = np.triu_indices(count)
        pairs = np.sort((values[first] + values[second]) / 2)
        spread = np.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        outside = int(count * (count + 1) / 4 - stats.norm.ppf(0.975) * spread)
        ends = (pairs[outside - 1], pairs[-outside]) if outside > 0 else (-np.inf, np.inf)
        return float(np.median(pairs)), float(ends[0]), float(ends[1])

    def estimate(self) -> float:
        """Returns the estimate of :meth:`interval`."""
        return self.interval()[0]

    def verdict(self) -> str:
        """Returns whether the effect matters: the interval is on one side of 0, and the estimate at least LEAST."""
        estimate, low, high = self.interval()
        if abs(estimate) >= LEAST and (low > 0 or high < 0):
            return "matters"
        return "does not matter" if max(-low, high) <= 2 * LEAST else "undecided"

    def clause(self) -> str:
        """Returns the effect as a clause of a sentence."""
        estimate, low, high = self.interval()
        wins = f"better on {(self.differences > 0).sum()} of {len(self.differences)}"
        return f"{self.name} {estimate:+.1f} ({low:+.1f} to {high:+.1f}, {wins})"

    def cells(self) -> list[str]:
        """Returns a row of the table of effects."""
        change, (estimate, low, high) = self.differences, self.interval()
        wins = f"{(change > 0).sum()} of {len(change)}"
        interval = f"{estimate:+.2f} ({low:+.2f} to {high:+.2f})"
        return [self.name, interval, f"{change.mean():+.2f} ± {change.std(ddof=0):.2f}", wins, self.verdict()]


def effect(runs: Lines, factor: str, high: Any, low: Any, name: str) -> Effect:
    """Returns the effect of the level ``high`` against ``low``, on the sets that have both."""
    means = by_set(runs, factor)
    return Effect(name, (means[high] - means[low]).dropna())


# The figure of Demsar (2006): a bar joins methods whose average ranks differ by less than the critical difference.


class Ranks(NamedTuple):
    """Average ranks over sets, 1 the best, in order.

    Attributes:
      ranks: average rank by level.
      sets: number of sets.
      p: p-value of Friedman's test.
      critical: difference of two average ranks that is significant at 5 per cent, by Nemenyi's test.
    """

    ranks: Any
    sets: int
    p: float
    critical: float

    @classmethod
    def from_means(cls, means: Lines) -> "Ranks":
        """Ranks scores, with a row for each set and a column for each level."""
        count, levels = means.shape
        ranks = means.rank(axis=1, ascending=False).mean().sort_values(kind="stable")
        p = float(stats.friedmanchisquare(*means.T.to_numpy()).pvalue) if count > 1 else 1.0
        quantile = stats.studentized_range.ppf(0.95, levels, np.inf) / np.sqrt(2)
        return cls(ranks, count, p, float(quantile * np.sqrt(levels * (levels + 1) / (6 * count))))

    def groups(self) -> list[list[str]]:
        """Returns the maximal groups, of at least two, whose ranks differ by less than the critical difference."""
        names, values = list(self.ranks.index), self.ranks.to_numpy()
        ends = [int(np.searchsorted(values, first + self.critical, side="right")) for first in values]
        pairs = [(i, end) for i, end in enumerate(ends) if end - i > 1 and (i == 0 or ends[i - 1] < end)]
        return [names[i:end] for i, end in pairs]

    def worse(self) -> list[str]:
        """Returns the levels that are significantly behind the first level."""
        return [name for name, rank in self.ranks.items() if rank - self.ranks.iloc[0] > self.critical]  # type: ignore[misc]


def draw_ranks(axis: Any, ranks: Ranks, title: str) -> None:
    """Draws a critical-difference diagram, with the best at the left."""
    count = len(ranks.ranks)
    axis.set(xlim=(-0.3, count + 1.3), ylim=(-0.9 - 0.3 * count, 1.2), title=title)
    axis.axis("off")
    axis.plot([1, count], [0, 0], "k", lw=1)
    for tick in range(1, count + 1):
        axis.plot([tick, tick], [0, 0.12], "k", lw=1)
        axis.text(tick, 0.2, str(tick), ha="center", va="bottom", fontsize=9)
    axis.plot([1, 1 + ranks.critical], [0.85, 0.85], "k", lw=2)
    text = f"critical difference {ranks.critical:.2f}"
    axis.text(1 + ranks.critical / 2, 0.9, text, ha="center", va="bottom", fontsize=8)
    groups = ranks.groups()
    for i, group in enumerate(groups):
        low, high = ranks.ranks[group[0]], ranks.ranks[group[-1]]
        axis.plot([low - 0.03, high + 0.03], [-0.2 - 0.17 * i] * 2, "C0", lw=3, solid_capstyle="butt")
    below = 0.4 + 0.17 * len(groups)
    for i, (name, rank) in enumerate(ranks.ranks.items()):
        left = i < (count + 1) // 2
        y = -below - 0.45 * (i if left else count - 1 - i)
        end = -0.2 if left else count + 1.2
        axis.plot([rank, rank, end], [0, y, y], "0.4", lw=0.8)
        text = f"{name} {rank:.2f}"
        axis.text(end, y + 0.03, text, ha="left" if left else "right", va="bottom", fontsize=9)
