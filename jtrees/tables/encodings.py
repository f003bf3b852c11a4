"""Encodings of columns: how the values of a column become features.

An encoding is fitted to training rows. The number of its features depends only on the schema of the column and the
number of outputs. Encodings are plain data, so a saved model contains them.
"""

import dataclasses

import numpy as np

from jtrees import io, validation as checks
from jtrees.tables.cells import OFFSETS
from jtrees.tables.columns import ColumnSchema
from jtrees.tables.frame import RawColumn
from jtrees.tables.means import FOLDS, Targets, shrunk_means, variances
from jtrees.tables.periods import PERIODS, periods

_HELPS = 0.01  # least fraction of the variance that months or weekdays must explain beyond a trend


@io.part
@dataclasses.dataclass(frozen=True)
class Numeric:
    """Numbers, booleans (0 and 1) or days.

    A missing value is replaced by the median. If the table has missing values, a second feature marks them.

    Attributes:
      kind: ``"number"``, ``"boolean"`` or ``"date"``.
      center: the median, which replaces a missing value.
      spread: the standard deviation.
      start: offset that is subtracted from the values: the first day for dates, else 0.
      missing: number of missing values in the table of the schema.
      durations: whether the numbers are durations in days.
    """

    kind: str
    center: float
    spread: float
    start: float
    missing: int
    durations: bool = False

    @classmethod
    def fit(cls, column: ColumnSchema, raw: RawColumn) -> "Numeric":
        """Returns the encoding of a column. A column whose training rows have no value has the median 0."""
        present = raw.values[~raw.missing]
        present = present if len(present) else np.zeros(1)
        start = float(np.floor(present.min())) if column.kind == "date" else 0.0
        center, spread = float(np.median(present) - start), float(present.std())
        return cls(column.kind, center, spread, start, column.missing, column.durations)

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
    """Levels, each with a feature that is 0 or 1. Rare and new levels share a feature if the table has rare levels.

    Attributes:
      levels: the levels that have a feature, sorted.
      rare: number of rare levels.
      missing: number of missing values in the table of the schema. If there are any, they have a feature.
    """

    levels: tuple[str, ...]
    rare: int
    missing: int

    def features(self, name: str) -> list[str]:
        """Returns the names of the features."""
        names = [f"[{name} = {level}]" for level in self.levels]
        return names + [f"[{name} other]"] * bool(self.rare) + [f"[{name} missing]"] * bool(self.missing)

    def encode(self, raw: RawColumn) -> np.ndarray:
        """Returns the features of rows, ``(n, k)``."""
        code = codes_of(raw, self.levels)
        columns = [code == i for i in range(len(self.levels))]
        columns += [(code < 0) & ~raw.missing] if self.rare else []
        columns += [raw.missing] if self.missing else []
        return np.column_stack(columns).astype(np.float64)

    def __str__(self) -> str:
        other = f", {self.rare} rare levels together" if self.rare else ""
        gaps = f", {self.missing} missing" if self.missing else ""
        return f"text, levels {checks.quoted_list(self.levels)}{other}{gaps}"


@io.part
@dataclasses.dataclass(frozen=True)
class TargetMeans:
    """Levels, encoded by their mean target, and by their frequency.

    In classification, the mean target is the mean of each class indicator. For two classes it is the mean of the second
    indicator alone.

    Attributes:
      levels: the levels.
      outputs: names of the outputs.
      means: shrunk mean of each output at each level. If values are missing, the last entry is for missing values.
      shares: fraction of the training rows of each entry of ``means``; empty if the frequency is not a feature.
      prior: the mean of all targets, which encodes new levels.
      missing: number of missing values in the table of the schema.
    """

    levels: tuple[str, ...]
    outputs: tuple[str, ...]
    means: tuple[tuple[float, ...], ...]
    shares: tuple[float, ...]
    prior: tuple[float, ...]
    missing: int

    @classmethod
    def fit(
        cls, levels: tuple[str, ...], missing: int, raw: RawColumn, targets: Targets, *, frequencies: bool = True
    ) -> tuple["TargetMeans", np.ndarray]:
        """Returns the encoding of a column of text, and the features of the training rows.

        The features of a training row use means over the four folds that do not contain the row (cross-fitting). Means
        over all rows would leak the target of the row into its features.
        """
        entries = len(levels) + bool(missing)
        code = np.where(raw.missing, len(levels), codes_of(raw, levels))
        shares = np.bincount(code, minlength=entries) / len(code)
        prior, means = shrunk_means(code, entries, targets, np.ones(len(code), bool))
        features = np.empty((len(code), means.shape[1]))
        for fold in range(FOLDS):
            held_out = targets.fold == fold
            features[held_out] = shrunk_means(code, entries, targets, ~held_out)[1][code[held_out]]
        rows = lambda array: tuple(tuple(row) for row in array.tolist())
        kept = tuple(shares.tolist()) if frequencies else ()
        described = cls(levels, targets.names, rows(means), kept, rows(prior[None])[0], missing)
        return described, np.column_stack([features, shares[code]]) if frequencies else features

    @classmethod
    def constant(cls, levels: tuple[str, ...], missing: int, outputs: tuple[str, ...]) -> "TargetMeans":
        """Returns an encoding whose features are 0 for all levels, without frequencies."""
        zeros = (0.0,) * len(outputs)
        return cls(levels, outputs, (zeros,) * (len(levels) + bool(missing)), (), zeros, missing)

    def features(self, name: str) -> list[str]:
        """Returns the names of the features."""
        frequency = [f"[frequency of {name}]"] * bool(self.shares)
        return [f"[mean {output} by {name}]" for output in self.outputs] + frequency

    def encode(self, raw: RawColumn) -> np.ndarray:
        """Returns the features of new rows, ``(n, k + 1)``."""
        code = codes_of(raw, self.levels)
        if self.missing:
            code[raw.missing] = len(self.levels)
        table = np.array([*self.means, self.prior])
        table = np.column_stack([table, [*self.shares, 0.0]]) if self.shares else table
        return table[np.where(code < 0, len(self.means), code)]

    def __str__(self) -> str:
        gaps = f", {self.missing} missing" if self.missing else ""
        return f"text, {len(self.levels)} levels by target mean{' and frequency' * bool(self.shares)}{gaps}"


@io.part
@dataclasses.dataclass(frozen=True)
class Date:
    """Dates: days since the first date of the training rows, and target means by month and by weekday.

    The means by a period are 0 if the period does not explain the targets of the training rows beyond a linear trend.

    Attributes:
      days: the encoding of the days.
      parts: the encoding of each period that varies in the table.
      zone: the time zone in which days are counted, as in :class:`jtrees.tables.columns.ColumnSchema`.
    """

    days: Numeric
    parts: dict[str, TargetMeans]
    zone: str | None = None

    @classmethod
    def fit(cls, column: ColumnSchema, raw: RawColumn, targets: Targets) -> tuple["Date", np.ndarray]:
        """Returns the encoding of a column of dates, and the features of the training rows."""
        days, parts = Numeric.fit(column, raw), {}
        features = [days.encode(raw)]
        for name in column.parts:
            levels = PERIODS[name]
            if _helps(part := periods(name, raw), raw, targets):
                parts[name], encoded = TargetMeans.fit(levels, column.missing, part, targets, frequencies=False)
            else:
                parts[name] = TargetMeans.constant(levels, column.missing, targets.names)
                encoded = parts[name].encode(part)
            features.append(encoded)
        return cls(days, parts, column.zone), np.column_stack(features)

    @property
    def missing(self) -> int:
        """Number of missing values in the table of the schema."""
        return self.days.missing

    def features(self, name: str) -> list[str]:
        """Returns the names of the features."""
        return self.days.features(name) + [f for p, part in self.parts.items() for f in part.features(f"{name} {p}")]

    def encode(self, raw: RawColumn) -> np.ndarray:
        """Returns the features of new rows, ``(n, k)``."""
        parts = [part.encode(periods(name, raw)) for name, part in self.parts.items()]
        return np.column_stack([self.days.encode(raw), *parts])

    def __str__(self) -> str:
        zone = "" if self.zone is None else f", local days{'' if self.zone == OFFSETS else f' of {self.zone}'}"
        helpful = [name for name, part in self.parts.items() if any(map(any, part.means))]
        return f"{self.days}{', with ' * bool(helpful)}{' and '.join(helpful)}{zone}"


Encoding = Numeric | OneHot | TargetMeans | Date


def fitted(column: ColumnSchema, raw: RawColumn, targets: Targets) -> tuple[Encoding, np.ndarray]:
    """Returns the encoding of a column that is fitted to training rows, and the features of these rows."""
    if column.kind == "date":
        return Date.fit(column, raw, targets)
    if column.by_mean:
        return TargetMeans.fit(column.levels, column.missing, raw, targets)
    is_text = column.kind == "text"
    encoding = OneHot(column.levels, len(column.rare), column.missing) if is_text else Numeric.fit(column, raw)
    return encoding, encoding.encode(raw)


def codes_of(raw: RawColumn, levels: tuple[str, ...]) -> np.ndarray:
    """Returns the index of each value among the levels, ``(n,)``; -1 for an unknown value."""
    places = {level: i for i, level in enumerate(levels)}
    return np.array([places.get(value, -1) for value in raw.values], int)


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
