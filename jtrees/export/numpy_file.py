"""Writes a tree or a forest as a Python file that needs only NumPy."""

import datetime
import inspect
import os
from typing import Any

import numpy as np

from jtrees import io
from jtrees.export.program import MICROSECONDS, Field, Program, fields_of, program_of
from jtrees.export.template import array, fill, period_code
from jtrees.tables import TableEncoder, parse
from jtrees.tables.cells import OFFSETS
from jtrees.tables.frame import Frame, RawColumn
from jtrees.tables.periods import PERIODS


def to_numpy(model: Any, path: str | os.PathLike) -> None:
    """Writes a model as a Python file with ``leaf(x)`` and ``predict(x)``. The file tests itself if it is run.

    For a model of DataFrames, x is a DataFrame or another mapping from names to columns. For a model of arrays, x is an
    array, in which NaN is a missing value. A tree without ``medians`` refuses NaN.

    Args:
      model: as for :func:`jtrees.export.to_c`.
      path: path of the file. The file is written completely or not at all.

    Raises:
      ValueError: for any other model.
      OSError: if the file cannot be written.

    Example:
      >>> import runpy
      >>> leaves = jtrees.leaves.Values(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> jtrees.export.to_numpy(tree, "tree.py")
      >>> print(runpy.run_path("tree.py")["predict"](np.array([[2.0, 1.0]])))
      [10.]
    """
    io.write_file(path, _source(program_of(model)))


def _source(program: Program) -> str:
    test_rows, rows = program.test_rows()
    out, leaf = program.predict(rows), program.leaf(rows)
    tests = {"test_leaf": leaf[:, 0] if program.single else leaf, "test_out": out[:, 0] if program.scalar else out}
    if program.encoder is None:
        features, test_x = fill(_FEATURES, CHECK=fill(_CHECK_ARRAY, WIDTH=len(program.zero))), _array(rows)
    else:
        features, test_x = _columns_source(program.encoder, test_rows)
    tables = "\n".join(f"{name.upper()} = {_array(values)}" for name, values in (program.arrays | tests).items())
    return fill(
        _TEMPLATE,
        WHAT=program.described(),
        LEAVES="(n,)" if program.single else "(n, trees)",
        OUTPUTS="(n,)" if program.scalar else "(n, k)",
        TABLES=f"{tables}\nTEST_X = {test_x}",
        FEATURES=features,
        DIVISOR=program.divisor,
        LINK=_LINKS[program.link],
        OF_LEAF="leaf[:, 0]" if program.single else "leaf",
        OF_OUT="out[:, 0]" if program.scalar else "out",
    )


def _columns_source(encoder: TableEncoder, test_rows: Frame) -> tuple[str, str]:
    """Returns the source that computes features from the columns of a raw table, and the rows of the self-test."""
    schema, fields = encoder.schema, fields_of(encoder)
    if schema.named:
        rows = [f"{field.name!r}: {_column(test_rows.columns[field.name])}" for field in fields]
        check, test_x = _CHECK_MAPPING, "{" + ",\n".join(rows) + "}"
    else:
        check = fill(_CHECK_ARRAY, WIDTH=len(schema.columns)) + "    x = x.T\n"
        test_x = _array(np.stack([raw.values for raw in test_rows.columns.values()], axis=1))
    periods = [f'    "{name}": lambda day, time: {period_code(name, _STEPS)},' for name in PERIODS]
    listed = "\n".join(f"    ({_entry(field, named=schema.named)})," for field in fields)
    parts = {"CHECK": check, "COLUMNS": listed, "PERIODS": "\n".join(periods)}
    numbers = sorted({number for field in fields for number in field.missing_numbers})
    parts["IS_LISTED"] = f' | ((kind == "number") & np.isin(values, {numbers}))' if numbers else ""
    return fill(_FEATURES_OF_COLUMNS, MISSING=repr(schema.missing), PARSE=_PARSE, **parts), test_x


def _entry(field: Field, *, named: bool) -> str:
    """Returns the entry of a column in the file."""
    text_format = field.missing if field.kind == "text" else field.column.text_reading.form(field.column.zone)
    cells = field.name if named else field.place, field.column.value_kind, text_format, field.column.level_numbers()
    literal = lambda value: _array(value) if isinstance(value, np.ndarray) else repr(value)
    listed = lambda values: f"[{', '.join(values)}]"
    program = [listed(map(literal, (operation.name, *operation.arguments))) for operation in field.operations]
    return ", ".join([*map(repr, cells), listed(program)])


def _column(raw: RawColumn) -> str:
    if raw.kind == "date":
        return repr([None if np.isnan(days) else _moment(days, raw.zone) for days in raw.values.tolist()])
    if raw.source == "durations":
        duration = lambda days: f"np.timedelta64({round(days * MICROSECONDS)}, 'us')"
        return f"[{', '.join('None' if np.isnan(days) else duration(days) for days in raw.values.tolist())}]"
    return repr([None if gap else value for value, gap in zip(raw.values.tolist(), raw.missing, strict=True)])


def _moment(days: float, zone: str | None) -> str:
    """Returns the text of local days since 1970, with the offset of the zone from UTC if there is a zone."""
    milliseconds = np.datetime64(round(days * parse.DAY), "ms")
    if zone is None:
        return str(milliseconds)
    moment = milliseconds.astype(datetime.datetime)
    offset = parse.time_zone("UTC" if zone == OFFSETS else zone)
    return moment.replace(tzinfo=offset).isoformat(timespec="milliseconds")


def _array(values: np.ndarray | None) -> str:
    if values is None:
        return "None"
    return f"np.array({array(values).replace('nan', 'np.nan')}, np.{values.dtype})"


_PARSE = inspect.getsource(parse).removeprefix(f'"""{parse.__doc__}"""').strip()

_TEMPLATE = '''\
"""@WHAT@, written by jtrees.

leaf(x) returns the leaf of each row, @LEAVES@, from 0. predict(x) returns predictions, @OUTPUTS@, in double precision.
"""

import numpy as np

@TABLES@


@FEATURES@

def _leaves(x):
    x = _features(x)
    with np.errstate(over="ignore"):
        z = (x - ZERO).astype(np.float32)  # products of float32 numbers are exact in double precision
    if not np.isfinite(z).all():
        raise ValueError("x must be finite in float32, got NaN or infinite values")
    leaf = np.empty((len(x), len(BIAS)), np.int64)
    for tree, (weights, bias) in enumerate(zip(WEIGHTS, BIAS)):
        node = np.zeros(len(x), np.int64)
        while node.size and node[0] < len(bias):
            sums = np.zeros((4, len(x)))
            sums[0] = bias[node]
            for j in range(len(ZERO)):
                sums[j % 4] += np.multiply(weights[node, j], z[:, j], dtype=np.float64)
            node = 2 * node + 1 + ((sums[0] + sums[1]) + (sums[2] + sums[3]) > 0)
        leaf[:, tree] = node - len(bias)
    return z, leaf


def leaf(x):
    _, leaf = _leaves(x)
    return @OF_LEAF@


def predict(x):
    z, leaf = _leaves(x)
    out = np.zeros((len(z), len(OFFSET)))
    for tree in range(len(BIAS)):
        at = leaf[:, tree]
        value = INTERCEPT[tree, at]
        if COEFFICIENTS is not None:
            value += np.einsum("nkp,np->nk", COEFFICIENTS[tree, at], z.astype(np.float64))
        if LOWER is not None:
            value = np.clip(value, LOWER[tree, at], UPPER[tree, at])
        out += value
    out = out / @DIVISOR@ + OFFSET
@LINK@    return @OF_OUT@


if __name__ == "__main__":
    assert (leaf(TEST_X) == TEST_LEAF).all()
    np.testing.assert_allclose(predict(TEST_X), TEST_OUT, rtol=1e-12, atol=1e-12)
'''

_CHECK_ARRAY = """\
    x = np.asarray(x, np.float64)
    if x.ndim != 2 or x.shape[1] != @WIDTH@:
        raise ValueError(f"x must have shape (n, @WIDTH@), got {x.shape}")
"""

_FEATURES = """\
def _features(x):
@CHECK@    return x if MEDIANS is None else np.where(np.isnan(x), MEDIANS, x)
"""

_CHECK_MAPPING = """\
    names = getattr(x, "column_names", getattr(x, "columns", x))
    x = {str(name): x[name] for name in names}
    for name, *_ in COLUMNS:
        if name not in x:
            raise ValueError(f"x must have a column {name!r:.80}")
"""

_FEATURES_OF_COLUMNS = """\
# An entry for each column: its name or position, its kind, the format of text, the numbers of the levels by their
# texts, and the operations that make features. The format of levels is the texts that mean a missing value. The format
# of numbers is the text before and after them, and the separators of thousands and decimals. The format of dates is the
# style, whether dates have an offset from UTC, and the time zone in which days count.
COLUMNS = [
@COLUMNS@
]
MISSING = @MISSING@

# The features of each operation. Numbers are those of levels and periods. A table has a row for each of them, then a
# row for any other value, and a row for a missing value.
OPERATIONS = {
    "difference": lambda values, missing, numbers, start, center: np.where(missing, center, values - start),
    "missing": lambda values, missing, numbers: missing,
    "lookup": lambda values, missing, numbers, part, table: table[np.where(missing, -1, numbers[part])],
}

# The numbers of the periods of a day since 1970 and of a time in milliseconds.
PERIODS = {
@PERIODS@
}

# --- Cells ---

@PARSE@


def _number(value, kind, text_format):
    if is_missing(value) or (isinstance(value, str) and level_of(value) in MISSING):
        return np.nan
    number = value_of(value, kind, *text_format)
    return np.nan if number is None else number


def _level(text, levels):
    return -2 if text is None else levels.get(text, levels.get(plain_level(text), -2))


def _items(values):
    array = np.asarray(values)
    return array if array.dtype.kind == "f" else values  # floats keep their precision


def _numbers(values, kind, text_format):
    array = np.asarray(values)
    if kind == "number" and array.dtype.kind in "biuf":
        array = array.astype(np.float64)
        return np.where(np.abs(array) <= LARGEST, array, np.nan)
    return np.array([_number(value, kind, text_format) for value in _items(values)], np.float64)


def _features(x):
@CHECK@    out = []
    for name, kind, text_format, levels, operations in COLUMNS:
        values, numbers = None, {}
        if kind == "text":
            texts = [level_of(value) for value in _items(x[name])]
            missing = np.array([text is None or text in text_format for text in texts], bool)
            codes = {text: _level(text, levels) for text in set(texts)}
            numbers["level"] = np.array([codes[text] for text in texts], np.int64)
        else:
            values = _numbers(x[name], kind, text_format)
            missing = np.isnan(values)@IS_LISTED@
        if kind == "date":
            days = np.where(missing, 0, values)
            day = np.floor(days).astype(np.int64)
            time = np.floor((days - day) * DAY + 0.5).astype(np.int64)
            numbers = {part: number(day, time) for part, number in PERIODS.items()}
        out += [OPERATIONS[operation](values, missing, numbers, *parts) for operation, *parts in operations]
    return np.column_stack(out).astype(np.float64)
"""

# The code of the steps of the calendar.
_STEPS = {"+": "({0} + {1})", "*": "{0} * {1}", "//": "{0} // {1}", "%": "{0} % {1}"}

_SOFTMAX = """\
    out = np.exp(out - out.max(1, keepdims=True))
    out /= out.sum(1, keepdims=True)
"""

_LINKS = {
    "identity": "",
    "softmax": _SOFTMAX,
    "exp": "    out = np.exp(out)\n",
    "sorted": "    out = np.sort(out, axis=1)\n",
}
