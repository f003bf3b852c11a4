"""Writes a tree or a forest as a Python file that needs only NumPy."""

import datetime
import inspect
import os
from typing import Any
import zoneinfo

import numpy as np

from jtrees import io
from jtrees.export.encoding import MICROSECONDS, fields_of
from jtrees.export.program import Program, fill_template, program_of
from jtrees.tables import TableEncoder, parse
from jtrees.tables.cells import OFFSETS
from jtrees.tables.frame import Frame, RawColumn


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
    source = _source(program_of(model))
    with io.written_whole(path) as file:
        file.write(source.encode())


def _source(program: Program) -> str:
    test_rows, rows = program.test_rows()
    out, leaf = program.predict(rows), program.leaf(rows)
    arrays = [("WEIGHTS", program.weights), ("BIAS", program.bias), ("INTERCEPT", program.intercept)]
    arrays += [("COEFFICIENTS", program.coefficients), ("LOWER", program.lower), ("UPPER", program.upper)]
    arrays += [("ZERO", program.zero), ("OFFSET", program.offset)]
    arrays += [
        ("TEST_LEAF", leaf[:, 0] if program.single else leaf),
        ("TEST_OUT", out[:, 0] if program.scalar else out),
    ]
    if program.encoder is None:
        features, test_x = _FEATURES.replace("@WIDTH@", str(len(program.zero))), _array(rows)
        arrays += [("MEDIANS", program.medians)]
    else:
        features, test_x = _columns_source(program.encoder, test_rows)
    tables = "\n".join(f"{name} = {_array(values)}" for name, values in arrays)
    parts = {
        "WHAT": program.described(),
        "LEAVES": "(n,)" if program.single else "(n, trees)",
        "OUTPUTS": "(n,)" if program.scalar else "(n, k)",
        "TABLES": f"{tables}\nTEST_X = {test_x}",
        "FEATURES": features,
        "DIVISOR": program.divisor,
        "LINK": _LINKS[program.link],
        "OF_LEAF": "leaf[:, 0]" if program.single else "leaf",
        "OF_OUT": "out[:, 0]" if program.scalar else "out",
    }
    return fill_template(_TEMPLATE, parts)


def _columns_source(encoder: TableEncoder, test_rows: Frame) -> tuple[str, str]:
    """Returns the source that computes features from the columns of a raw table, and the rows of the self-test."""
    listed, schema = [], encoder.schema
    for field in fields_of(encoder):
        tables = ", ".join(f"{part!r}: {_array(features)}" for part, features in field.tables.items())
        numbers = f"{float(field.start)!r}, {float(field.center)!r}, {field.masked}"
        where = field.name if schema.named else field.place
        text_format = field.missing if field.kind == "text" else field.reading.form(field.zone)
        kind = "durations" if field.durations else field.kind
        listed.append(f"    ({where!r}, {kind!r}, {numbers}, {text_format!r}, {field.levels!r}, {{{tables}}}),")
    if schema.named:
        rows = [f"{field.name!r}: {_column(test_rows.columns[field.name])}" for field in fields_of(encoder)]
        check, test_x = _CHECK_MAPPING, "{" + ",\n".join(rows) + "}"
    else:
        check = _CHECK_ARRAY.replace("@WIDTH@", str(len(schema.columns))) + "    x = x.T\n"
        test_x = _array(np.stack([raw.values for raw in test_rows.columns.values()], axis=1))
    parts = {"CHECK": check, "COLUMNS": "\n".join(listed), "MISSING": repr(schema.missing), "PARSE": _PARSE}
    return fill_template(_FEATURES_OF_COLUMNS, parts), test_x


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
    text = str(milliseconds.astype("datetime64[D]") if days == np.floor(days) and zone is None else milliseconds)
    if zone is None:
        return text
    moment = milliseconds.astype(datetime.datetime)
    offset = zoneinfo.ZoneInfo("UTC" if zone == OFFSETS else zone)
    return moment.replace(tzinfo=offset).isoformat(timespec="milliseconds")


def _array(values: np.ndarray | None) -> str:
    if values is None:
        return "None"
    # Each float32 number is the shortest text that reads back as the same number.
    lists = np.vectorize(str, otypes=[object])(values).tolist()
    listed = str(lists).replace("'", "").replace("], [", "],\n[").replace("nan", "np.nan")
    return f"np.array({listed}, np.{values.dtype})"


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
    z = (x - ZERO).astype(np.float32)  # products of float32 numbers are exact in double precision
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

_FEATURES = f"""\
def _features(x):
{_CHECK_ARRAY}    x = x if MEDIANS is None else np.where(np.isnan(x), MEDIANS, x)
    if not np.isfinite(x).all():
        raise ValueError("x must be finite, got NaN or infinite values")
    return x
"""

_CHECK_MAPPING = """\
    for name, *_ in COLUMNS:
        if name not in x:
            raise ValueError(f"x must have a column {name!r:.80}")
"""

_FEATURES_OF_COLUMNS = """\
# An entry for each column: its name or position, its kind, the number to subtract, the number for a missing value,
# whether a feature marks missing values, the format of text, the levels, and tables of features. The format of levels
# is the texts that mean a missing value. The format of numbers is the text before and after them, and the separators of
# thousands and decimals. The format of dates is the style, whether dates have an offset from UTC, and the time zone in
# which days count. A table has a row for each level or period of dates, then a row for any other value, and a row for a
# missing value.
COLUMNS = [
@COLUMNS@
]
MISSING = @MISSING@

# --- Cells ---

@PARSE@


def _number(value, kind, text_format):
    if is_missing(value) or (isinstance(value, str) and level_of(value) in MISSING):
        return np.nan
    number = value_of(value, kind, *text_format)
    return np.nan if number is None else number


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
    for name, kind, start, center, masked, text_format, levels, tables in COLUMNS:
        if kind == "text":
            codes = {level: i for i, level in enumerate(levels)} | {None: len(levels) + 1}
            texts = [level_of(value) for value in _items(x[name])]
            texts = [None if text in text_format else text for text in texts]
            places = {"level": np.array([codes.get(text, len(levels)) for text in texts], np.int64)}
        else:
            values = _numbers(x[name], kind, text_format)
            missing = np.isnan(values)
            out += [np.where(missing, center, values - start), *([missing] if masked else [])]
            day = np.floor(np.where(missing, 0, values)).astype(np.int64)
            month = day.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64) % 12
            time = np.floor((np.where(missing, 0, values) - day) * 86400000 + 0.5).astype(np.int64)  # in milliseconds
            hour, minute = time // 3600000 % 24, time // 60000 % 60
            parts = {"month": month, "weekday": (day + 3) % 7, "hour": hour, "minute": minute}
            places = {part: np.where(missing, len(tables[part]) - 1, parts[part]) for part in tables}
        out += [features[places[part]] for part, features in tables.items()]
    return np.column_stack(out).astype(np.float64)
"""

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
