"""Indicators: features of 0 and 1 that mark levels of text, and missing values. A table has a budget of features."""

from collections.abc import Mapping
import dataclasses

import numpy as np

from jtrees.tables.frame import ColumnSchema, RawColumn, level_codes

FEW_LEVELS, _MANY_LEVELS = 10, 32  # levels of a column with indicators, at most, in short and in long tables
RARE = 5  # levels with fewer rows are rare, and share a feature; fewer missing values have no feature
_BUDGET = 2  # features for each column
_SMALL = 16  # features that every table may have
_LONG = 64  # features of a long table that a column of many levels may reach
_ROWS = 30  # rows for each level of such a column, and for each feature of such a table
_FEATURES_OF_MEANS = 2  # of a column of text: target means, and means of residuals if the table has numbers


def with_indicators(columns: Mapping[str, ColumnSchema], frame: Mapping[str, RawColumn]) -> dict[str, ColumnSchema]:
    """Returns the columns of a table with their indicators.

    The rule depends on all columns and on their order, and not on the targets.

    1. A column of numbers, booleans or dates gets an indicator for missing values if it has at least five of them.
    2. The categories of a column of text are its levels, its rare levels together, and missing values. If a column has
       two categories, the less common category has an indicator. If it has more categories, each category has an
       indicator, except rare levels or missing values in fewer than five rows.
    3. The number of features may be twice the number of used columns, or 16 if that is more. Columns of text get their
       indicators while the table keeps within this budget. Columns with the fewest indicators come first. All other
       columns of text are encoded by target means. So are columns of more than ten levels, of which each rare level
       counts, and missing values count as a level. But target means hide how a level acts together with another column.
       So a column of up to 32 levels has indicators if the table has thirty rows for each of its levels, and for each
       of the features, which are at most 64.
    4. An indicator that equals an earlier one in all rows, or is its complement, is left out. A column of text keeps at
       least one feature.
    """
    used = {name: column for name, column in columns.items() if column.kind != "drop"}
    numbers = [name for name, column in used.items() if column.kind != "text"]
    features_of_means = _FEATURES_OF_MEANS if numbers else 1
    features = len(numbers) + features_of_means * (len(used) - len(numbers))
    affordable = max((len(raw.values) for raw in frame.values()), default=0) // _ROWS
    budget = max(_BUDGET * len(used), _SMALL)
    budget_of_many = max(budget, min(affordable, _LONG))
    most_levels = max(FEW_LEVELS, min(affordable, _MANY_LEVELS))
    result, marks_so_far = dict(columns), set[bytes]()
    for name in numbers:
        mark = _fingerprint(frame[name].missing)
        if used[name].missing >= RARE and mark not in marks_so_far:
            result[name] = dataclasses.replace(used[name], indicators=(1,))
            features += 1
            marks_so_far.add(mark)
    texts = {name: column for name, column in used.items() if column.kind == "text"}
    candidates = [
        (name, *_categories(column, frame[name]))
        for name, column in texts.items()
        if len(column.levels) + bool(column.missing) <= most_levels
    ]
    for name, column, codes in sorted(candidates, key=lambda candidate: len(candidate[1].indicators)):
        marks = {number: _fingerprint(codes == number) for number in column.indicators}
        new = {mark: number for number, mark in reversed(marks.items()) if mark not in marks_so_far}
        indicators = tuple(sorted(new.values())) or column.indicators[:1]
        change = len(indicators) - features_of_means
        if features + change <= (budget if len(indicators) <= FEW_LEVELS else budget_of_many):
            result[name] = dataclasses.replace(column, indicators=indicators)
            features += change
            marks_so_far.update(new)
    return result


def _categories(column: ColumnSchema, raw: RawColumn) -> tuple[ColumnSchema, np.ndarray]:
    """Returns a column with an indicator for each category, and the number of the category of each row."""
    codes = level_codes(column.levels, raw)
    counts = np.bincount(codes, minlength=len(column.levels) + 2)[:-2]
    common = counts >= min(RARE, counts.max())
    levels, rare = (tuple(np.array(column.levels, object)[rows]) for rows in (common, ~common))
    numbers = np.where(common, np.cumsum(common) - 1, len(levels))
    codes = np.append(numbers, [len(levels), len(levels) + 1])[codes]
    rows = np.bincount(codes, minlength=len(levels) + 2)
    order = sorted(np.flatnonzero(rows).tolist(), key=lambda number: (-rows[number], number))
    indicators = order[:2] + [number for number in order[2:] if number < len(levels) or rows[number] >= RARE]
    indicators = indicators[1:] if len(indicators) == 2 else indicators  # without the more common of two categories
    return dataclasses.replace(column, levels=levels, rare=rare, indicators=tuple(sorted(indicators))), codes


def _fingerprint(mask: np.ndarray) -> bytes:
    """Returns bytes of a mask of rows, ``(n,)``, which are the same for its complement."""
    return np.packbits(mask ^ mask[0]).tobytes()
