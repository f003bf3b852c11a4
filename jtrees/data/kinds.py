"""Kinds of columns of a raw table, and how each kind converts rows to features.

Each kind is a class that is fitted to a raw column, names its features and encodes rows. Its objects are plain data, so
a saved model contains its fitted columns.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from jtrees import io, validation as checks
from jtrees.data.cells import OFFSETS
from jtrees.data.frame import RawColumn, RawKind
from jtrees.data.means import FOLDS, Targets, shrunk_means, variances

_RARE = 5  # levels with fewer rows are rare, and share a feature
_IDENTIFIES = 20  # least number of distinct texts of a column that identifies rows
_HELPS = 0.01  # least fraction of the variance that months or weekdays must explain beyond a trend


# --- Kinds of columns ------------------------------------------------------------------------------------------------


@io.part
@dataclasses.dataclass(frozen=True)
class Numeric:
    """Numbers, booleans (0 and 1) or days.

    A missing value is replaced by the median. If the training rows had missing values, a second feature marks them.

    Attributes:
      kind: ``"numeric"``, ``"boolean"`` or ``"date"``.
      center: the median, which replaces a missing value.
      spread: the standard deviation.
      start: offset that is subtracted from the values: the first day for dates, else 0.
      missing: number of missing values in the training rows.
      durations: whether the numbers are durations in days.
    """

    kind: str
    center: float
    spread: float
    start: float
    missing: int
    durations: bool = False

    @classmethod
    def fit(cls, raw: RawColumn) -> "Numeric":
        """Returns the description of a raw column with at least one value."""
        present = raw.values[~raw.missing]
        start = float(np.floor(present.min())) if raw.kind == "date" else 0.0
        missing = len(raw.values) - len(present)
        return cls(
            raw.kind, float(np.median(present) - start), float(present.std()), start, missing, raw.source == "durations"
        )

    @property
    def raw_kind(self) -> RawKind:
        """The kind of raw column that is read for new rows."""
        return RawKind(self.kind, durations=self.durations)

    def features(self, name: str) -> list[str]:
        """Returns the names of the features."""
        since = f" (days since {np.datetime64(int(self.start), 'D')})" if self.kind == "date" else ""
        return [name + since, *([f"[{name} missing]"] if self.missing else [])]

    def encode(self, raw: RawColumn) -> np.ndarray:
        """Returns the features of rows, ``(n, 1)`` or ``(n, 2)``."""
        value = np.where(raw.missing, self.center, raw.values - self.start)
        return np.column_stack([value, raw.missing] if self.missing else [value])

    def __str__(self) -> str:
        shown = np.datetime64(int(self.start + self.center), "D") if self.kind == "date" else f"{self.center:.6g}"
        gaps = f", {self.missing} missing" if self.missing else ""
        kind = "durations in days" if self.durations else self.kind
        return f"{kind}, median {shown}, deviation {self.spread:.3g}{' days' * (self.kind == 'date')}{gaps}"


@io.part
@dataclasses.dataclass(frozen=True)
class OneHot:
    """Levels, each with a feature that is 0 or 1.

    Attributes:
      levels: the levels, sorted.
      rare: levels with fewer than five training rows. If there are any, rare and new levels share a feature.
      missing: number of missing values in the training rows. If there are any, they have a feature.
    """

    levels: tuple[str, ...]
    rare: tuple[str, ...]
    missing: int

    raw_kind: ClassVar[RawKind] = RawKind("text")

    @classmethod
    def fit(cls, raw: RawColumn) -> "OneHot":
        """Returns the description of a column of text; levels with fewer than five rows share a feature."""
        levels, counts = _levels(raw)
        common = counts >= min(_RARE, counts.max())
        return cls(tuple(levels[common]), tuple(levels[~common]), int(raw.missing.sum()))

    @property
    def training_levels(self) -> tuple[str, ...]:
        """All levels of the training rows."""
        return self.levels + self.rare

    def features(self, name: str) -> list[str]:
        """Returns the names of the features."""
        names = [f"[{name} = {level}]" for level in self.levels]
        return names + [f"[{name} other]"] * bool(self.rare) + [f"[{name} missing]"] * bool(self.missing)

    def encode(self, raw: RawColumn) -> np.ndarray:
        """Returns the features of rows, ``(n, k)``."""
        code = _codes(raw, self.levels)
        columns = [code == i for i in range(len(self.levels))]
        columns += [(code < 0) & ~raw.missing] if self.rare else []
        columns += [raw.missing] if self.missing else []
        return np.column_stack(columns).astype(np.float64)

    def __str__(self) -> str:
        other = f", {len(self.rare)} rare levels together" if self.rare else ""
        gaps = f", {self.missing} missing" if self.missing else ""
        return f"categorical, levels {checks.quoted_list(self.levels)}{other}{gaps}"


@io.part
@dataclasses.dataclass(frozen=True)
class TargetMeans:
    """Many levels, each encoded by its mean target and its frequency.

    In classification, the mean target is the mean of each class indicator. For two classes it is the mean of the second
    indicator alone.

    Attributes:
      levels: the levels, sorted.
      outputs: names of the outputs.
      means: shrunk mean of each output at each level. If values are missing, the last entry is for missing values.
      shares: fraction of the training rows of each entry of ``means``; empty if the frequency is not a feature.
      prior: the mean of all targets, which encodes new levels.
      missing: number of missing values in the training rows.
    """

    levels: tuple[str, ...]
    outputs: tuple[str, ...]
    means: tuple[tuple[float, ...], ...]
    shares: tuple[float, ...]
    prior: tuple[float, ...]
    missing: int

    raw_kind: ClassVar[RawKind] = RawKind("text")

    @property
    def training_levels(self) -> tuple[str, ...]:
        """All levels of the training rows."""
        return self.levels

    @classmethod
    def fit(cls, raw: RawColumn, targets: Targets) -> tuple["TargetMeans", np.ndarray]:
        """Returns the description of a column of text, and the encoding of the training rows.

        The encoding of a training row uses means over the four folds that do not contain the row (cross-fitting). Means
        over all rows would leak the target of the row into its features.
        """
        levels, counts = _levels(raw)
        missing = int(raw.missing.sum())
        code = np.where(raw.missing, len(levels), _codes(raw, tuple(levels)))
        shares = np.append(counts, [missing] * bool(missing)) / len(code)
        prior, means = shrunk_means(code, len(shares), targets, np.ones(len(code), bool))
        features = np.empty((len(code), means.shape[1]))
        for fold in range(FOLDS):
            held_out = targets.fold == fold
            features[held_out] = shrunk_means(code, len(shares), targets, ~held_out)[1][code[held_out]]
        rows = lambda array: tuple(tuple(row) for row in array.tolist())
        described = cls(
            tuple(levels), targets.names, rows(means), tuple(shares.tolist()), rows(prior[None])[0], missing
        )
        return described, np.column_stack([features, shares[code]])

    def features(self, name: str) -> list[str]:
        """Returns the names of the features."""
        return [f"[mean {output} by {name}]" for output in self.outputs] + [f"[frequency of {name}]"] * bool(
            self.shares
        )

    def encode(self, raw: RawColumn) -> np.ndarray:
        """Returns the features of new rows, ``(n, k + 1)``."""
        code = _codes(raw, self.levels)
        if self.missing:
            code[raw.missing] = len(self.levels)
        table = np.array([*self.means, self.prior])
        table = np.column_stack([table, [*self.shares, 0.0]]) if self.shares else table
        return table[np.where(code < 0, len(self.means), code)]

    def __str__(self) -> str:
        gaps = f", {self.missing} missing" if self.missing else ""
        return f"categorical, {len(self.levels)} levels by target mean{' and frequency' * bool(self.shares)}{gaps}"


@io.part
@dataclasses.dataclass(frozen=True)
class Date:
    """Dates: days since the first date, and the month and the weekday if they explain the targets.

    Attributes:
      days: the description of the days.
      parts: the descriptions of ``"month"`` (target means) and ``"weekday"`` (levels), if they are features.
      zone: the time zone in which days are counted. ``"offsets"``: each date has its own offset. None: the dates have
        no time zone.
    """

    days: Numeric
    parts: dict[str, OneHot | TargetMeans]
    zone: str | None = None

    @classmethod
    def fit(cls, raw: RawColumn, targets: Targets) -> tuple["Date", np.ndarray]:
        """Returns the description of a column of dates, and the encoding of the training rows."""
        days, parts = Numeric.fit(raw), {}
        features = [days.encode(raw)]
        for name in _PARTS:
            part = _part_of_date(name, raw)
            if not _helps(part, raw, targets):
                continue
            if name == "weekday":
                parts[name] = OneHot.fit(part)
                features.append(parts[name].encode(part))
            else:
                month, encoded = TargetMeans.fit(part, targets)
                parts[name] = dataclasses.replace(month, shares=())  # months have nearly equal frequencies
                features.append(encoded[:, :-1])
        return cls(days, parts, raw.zone), np.column_stack(features)

    @property
    def raw_kind(self) -> RawKind:
        """The kind of raw column that is read for new rows."""
        return RawKind("date", self.zone)

    @property
    def missing(self) -> int:
        """Number of missing values in the training rows."""
        return self.days.missing

    def features(self, name: str) -> list[str]:
        """Returns the names of the features."""
        return self.days.features(name) + [f for p, part in self.parts.items() for f in part.features(f"{name} {p}")]

    def encode(self, raw: RawColumn) -> np.ndarray:
        """Returns the features of new rows, ``(n, k)``."""
        parts = [part.encode(_part_of_date(name, raw)) for name, part in self.parts.items()]
        return np.column_stack([self.days.encode(raw), *parts])

    def __str__(self) -> str:
        zone = "" if self.zone is None else f", local days{'' if self.zone == OFFSETS else f' of {self.zone}'}"
        return f"{self.days}{', with ' * bool(self.parts)}{' and '.join(self.parts)}{zone}"


@io.part
@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A column without features.

    Attributes:
      why: the reason.
    """

    why: str
    missing: int = 0

    raw_kind: ClassVar[RawKind] = RawKind("text")

    def features(self, name: str) -> list[str]:
        """Returns no names."""
        return []

    def encode(self, raw: RawColumn) -> np.ndarray:
        """Returns no features, ``(n, 0)``."""
        return np.zeros((len(raw.values), 0))

    def __str__(self) -> str:
        return f"left out: {self.why}"


Column = Numeric | OneHot | TargetMeans | Date | LeftOut


def fitted(raw: RawColumn, targets: Targets, max_levels: int) -> tuple[Column, np.ndarray | None]:
    """Returns the description of a column, and the features of the training rows; None if ``encode`` gives them."""
    present = raw.values[~raw.missing]
    missing = len(raw.values) - len(present)
    if not len(present):
        return LeftOut("without values"), None
    if raw.kind == "text":
        levels, counts = _levels(raw)
        if len(levels) > max(_IDENTIFIES, len(present) / 2):
            return LeftOut(f"{len(levels)} different texts in {len(present)} rows"), None
        if len(levels) == 1 and not missing:
            return LeftOut("constant"), None
        rare = counts < _RARE
        if (~rare).sum() + rare.any() <= max_levels:
            return OneHot.fit(raw), None
        return TargetMeans.fit(raw, targets)
    if not missing and (present == present[0]).all():
        return LeftOut("whole numbers that double precision cannot distinguish" if raw.merged else "constant"), None
    return Date.fit(raw, targets) if raw.kind == "date" else (Numeric.fit(raw), None)


# --- Levels and dates ------------------------------------------------------------------------------------------------


def _levels(raw: RawColumn) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sorted levels of a column of text, and the number of rows of each."""
    return np.unique(raw.values[~raw.missing], return_counts=True)


def _codes(raw: RawColumn, levels: tuple[str, ...]) -> np.ndarray:
    """Returns the index of each value among the levels, ``(n,)``; -1 for an unknown value."""
    places = {level: i for i, level in enumerate(levels)}
    return np.array([places.get(value, -1) for value in raw.values], int)


def _part_of_date(part: str, raw: RawColumn) -> RawColumn:
    """Returns the months (Jan to Dec) or weekdays (Mon to Sun) of days since 1970 as text."""
    days = np.floor(np.where(raw.missing, 0, raw.values)).astype(np.int64)
    if part == "month":
        number, names = days.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12, MONTHS
    else:
        number, names = (days + 3) % 7, WEEKDAYS  # the first day of 1970 was a Thursday
    values = np.array(names, object)[number]
    values[raw.missing] = None
    return RawColumn("text", values)


_PARTS = ("month", "weekday")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


def _helps(part: RawColumn, raw: RawColumn, targets: Targets) -> bool:
    """Returns whether levels explain an output beyond a linear trend in the days.

    The levels must explain more than a hundredth of the variance that the trend leaves, and more than chance would. The
    ratio of the mean squares between and within L random levels is about 1, with standard deviation sqrt(2 / (L - 1)).
    """
    rows = ~part.missing
    levels, code = np.unique(part.values[rows], return_inverse=True)
    if len(levels) < 2:
        return False
    weight, days = targets.weight[rows], raw.values[rows]
    root, days = np.sqrt(weight), days - np.average(days, weights=weight)
    trend = np.column_stack([np.ones(len(days)), days])
    for y in targets.values[rows].T:
        y = y - trend @ np.linalg.lstsq(trend * root[:, None], y * root, rcond=None)[0]
        total, count = np.bincount(code, weight * y, len(levels)), np.bincount(code, weight, len(levels))
        variance_within, variance_between, size = variances(total, count, weight @ np.square(y))
        surprising = size * variance_between > 3 * np.sqrt(2 / (len(levels) - 1)) * variance_within
        if surprising and variance_between > _HELPS * (variance_within + variance_between):
            return True
    return False
