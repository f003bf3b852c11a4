"""Writes a tree or a forest as a SELECT statement."""

from collections import Counter
from collections.abc import Iterable, Sequence
import os
from typing import Any

import numpy as np

from jtrees import io
from jtrees.export.program import Field, Program, program_of
from jtrees.export.template import fill, sql_literal, sql_name
from jtrees.tables.model import column_names
from jtrees.tables.parse import BOOLEANS
from jtrees.tables.program import Operation
from jtrees.validation import quoted, quoted_list

_SPLITTER = "536870913.0"  # 2^29 + 1, which splits a double into its first 24 bits and the rest (Veltkamp 1968)
_LARGEST = repr(float(np.finfo(np.float32).max))  # a model refuses larger numbers
_NAME_BYTES = 63  # of a name in PostgreSQL, which cuts off the rest


def to_sql(
    model: Any,
    path: str | os.PathLike,
    *,
    table: str | Sequence[str] = "rows",
    keys: str | Sequence[str] = (),
    feature_names: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
) -> None:
    """Writes a model as one ``SELECT`` statement for SQLite 3.25 or newer and for PostgreSQL.

    The result has a row for each row of the table. Its columns are the keys, then ``prediction``, or ``prediction_0``,
    ``prediction_1`` and so on for several outputs. For a single tree, the last column is ``leaf``, from 0.

    Columns of numbers hold numbers, and durations are days. Booleans are booleans, or 0 and 1. Text is the canonical
    text of a level: ``1``, not ``1.0``. Dates are refused. NULL and NaN are missing values. So are the texts and
    numbers that mean a missing value for ``predict``, such as ``NA``. The prediction is NULL for a row with a number
    that is infinite or outside the range of float32. If the model is a tree of arrays without ``medians``, it is also
    NULL for a row with a missing value. Other text in a column of numbers has no defined prediction.

    The statement uses only standard SQL and ``LIMIT``. Probabilities of boosted classes, and boosted counts, also need
    the function ``EXP``, which SQLite has if it was built with its mathematical functions. Both databases limit the
    number of columns: a model may have some 1500 features. Scores are summed in the order of jtrees. Linear leaves and
    exponentials of classes are summed in pairs, because SQLite limits the depth of expressions. So these predictions
    differ from ``predict`` by rounding.

    Args:
      model: as for :func:`jtrees.export.to_c`.
      path: path of the file. The file is written completely or not at all.
      table: name of the table, or of a view, that holds the rows; or the names of its schema and itself, such as
        ``("public", "rows")``.
      keys: names of the columns that identify a row in the result.
      feature_names: names of the p columns, for a model of arrays. None: ``x0``, ``x1`` and so on.
      class_names: names of the k outputs, such as the classes. The columns of the result are then called
        ``prediction_NAME``.

    Raises:
      ValueError: for any other model, or for a wrong number of names. For a column of dates, of times of day in text,
        or of numbers that are text with a currency, a unit or separators. For two columns of the table, or of the
        result, whose names a database does not distinguish. Such names differ only in the case of letters, or after 63
        bytes. For the character 0 or a carriage return in a name or a level.
      OSError: if the file cannot be written.

    Example:
      >>> import sqlite3
      >>> leaves = jtrees.leaves.Values(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> jtrees.export.to_sql(tree, "tree.sql", keys="id", feature_names=["width", "height"])
      >>> database = sqlite3.connect(":memory:")
      >>> _ = database.executescript("CREATE TABLE rows (id, width, height); INSERT INTO rows VALUES (7, 2.0, 1.0)")
      >>> database.execute(open("tree.sql").read()).fetchall()
      [(7, 10.0, 1)]
    """
    program = program_of(model)
    fields = program.fields(column_names(model, feature_names))
    if dates := [field.name for field in fields if field.kind == "date"]:
        hint = "fit the model to numbers of days, or drop the column"
        raise ValueError(f"columns must not be dates, which differ between databases, got {quoted(dates[0])}: {hint}")
    if written := [field for field in fields if field.kind == "number" and not _is_plain(field.column.reading)]:
        got = f"got {quoted(written[0].name)} with {quoted(written[0].column.text_reading.example)}"
        raise ValueError(f"columns must hold plain numbers in SQL, {got}: convert the column to numbers before the fit")
    if repeated := _repeated([field.name for field in fields]):
        raise ValueError(f"columns must have different names in SQL, got {quoted_list(repeated)}: rename them")
    keys = [keys] if isinstance(keys, str) else list(keys)
    qualified = ".".join(map(sql_name, [table] if isinstance(table, str) else table))
    io.write_file(path, _statement(program, fields, qualified, keys, _output_names(program, keys, class_names)))


def _is_plain(reading: Any) -> bool:
    """Returns whether a database reads the numbers: no currency, no unit, no foreign separators, no times of day."""
    if reading is None:
        return True
    is_number = reading.kind != "durations" and reading.decimal == "."
    return is_number and not (reading.before or reading.after or reading.thousands)


def _output_names(program: Program, keys: list[str], class_names: Sequence[str] | None) -> list[str]:
    """Returns the names of the columns of the result that are not keys."""
    count = len(program.offset)
    if class_names is not None and len(class_names) != count:
        raise ValueError(f"class_names must hold {count} names, one an output, got {len(class_names)}")
    names = [f"prediction_{name}" for name in (range(count) if class_names is None else class_names)]
    names = ["prediction"] if program.scalar and class_names is None else names
    names += ["leaf"] if program.single else []
    if repeated := _repeated([*keys, *names]):
        argument = "keys" if repeated[0] in keys else "class_names"
        raise ValueError(f"{argument} must give different columns of the result, got {quoted_list(repeated)}")
    return names


def _repeated(names: Sequence[str]) -> list[str]:
    """Returns the first names that a database does not distinguish, or an empty list."""
    groups: dict[str, list[str]] = {}
    for name in names:  # SQLite ignores the case of the letters of ASCII
        groups.setdefault(name.encode()[:_NAME_BYTES].lower().decode(errors="ignore"), []).append(name)
    return next((group for group in groups.values() if len(group) > 1), [])


def _statement(program: Program, fields: list[Field], table: str, keys: list[str], names: list[str]) -> str:
    """Returns a chain of subqueries: columns, features, the levels of all trees, values of leaves, and their sums."""
    row = ['"row"', *(f'"key_{i}"' for i in range(len(keys)))]
    features = [f'"z{j}"' for j in range(len(program.zero))]
    sums = [f'"sum_{k}"' for k in range(len(program.offset))]
    columns = {'"row"': "ROW_NUMBER() OVER ()"}
    columns |= {name: f'"t".{sql_name(key)}' for name, key in zip(row[1:], keys, strict=True)}
    columns |= {f'"x{i}"': _value(field, f'"t".{sql_name(field.name)}') for i, field in enumerate(fields)}

    queries = _tables(program)
    queries["jtrees_columns"] = _select(columns, f'{table} AS "t"')
    relative = dict(zip(features, _features(program, fields), strict=True))
    queries["jtrees_features"] = _select(_copied(row) | relative, '"jtrees_columns"')

    right = f"CASE {_score(features)} > 0 WHEN TRUE THEN 2 WHEN FALSE THEN 1 END"
    split = {'"tree"': '"s"."tree"', '"node"': f'2 * "s"."node" + {right}'}
    previous, node = "jtrees_features", '"s"."node" = 0'
    for level in range(program.depth):
        source = f'"{previous}" AS "r" LEFT JOIN "jtrees_splits" AS "s" ON {node}'
        previous, node = f"jtrees_level_{level}", '"s"."tree" = "r"."tree" AND "s"."node" = "r"."node"'
        queries[previous] = _select(_copied(row + features) | split, source)

    value = {'"leaf"': f'"s"."node" - {program.bias.shape[1]}', '"value"': '"value"'}
    if program.coefficients is not None:
        value['"value"'] = _sum(['"value"', *(f'"w{j}" * {z}' for j, z in enumerate(features))])
    value |= _copied(['"output"'] if program.lower is None else ['"output"', '"lower"', '"upper"'])
    source = f'"{previous}" AS "r" LEFT JOIN "jtrees_leaves" AS "s" ON {node}'
    queries["jtrees_values"] = _select(_copied(row) | value, source)
    total = {'"leaf"': 'MAX("leaf")'} | dict(zip(sums, _sums(program), strict=True))
    queries["jtrees_sums"] = _select(_copied(row) | total, f'"jtrees_values"\nGROUP BY {", ".join(row)}')

    outputs = [*row[1:], *_linked(program.link, sums), '"leaf"']
    result = _select(dict(zip(map(sql_name, keys + names), outputs, strict=False)), '"jtrees_sums"\nORDER BY "row"')
    listed = ", ".join(f"{name} AS (\n{query}\n)" for name, query in queries.items())
    return fill(_TEMPLATE, WHAT=program.described(), QUERIES=listed, RESULT=result)


_TEMPLATE = """\
-- @WHAT@, written by jtrees.
-- x: values of columns. z: features relative to the origin, rounded to single precision by the factor 2^29 + 1.
-- The limits keep a database from merging the subqueries, which would compute shared columns many times.
WITH @QUERIES@
@RESULT@;
"""


def _copied(columns: Iterable[str]) -> dict[str, str]:
    return {column: column for column in columns}


def _select(columns: dict[str, str], source: str) -> str:
    listed = ",\n".join(f"  {name}" if value == name else f"  {value} AS {name}" for name, value in columns.items())
    return f"SELECT\n{listed}\nFROM {source}\nLIMIT 9223372036854775807"


def _tables(program: Program) -> dict[str, str]:
    """Returns tables of all splits, and of all outputs of leaves. In a tree, leaves are the nodes after the splits."""
    trees, nodes, p = program.weights.shape
    weights = ", ".join(f'"w{j}"' for j in range(p))
    splits = np.dstack([program.bias, program.weights.astype(np.float64)]).reshape(trees * nodes, p + 1)
    optional = [(program.lower, '"lower"'), (program.upper, '"upper"'), (program.coefficients, weights)]
    parts = [program.intercept, *(values for values, _ in optional if values is not None)]
    leaves = np.concatenate([part.reshape(program.intercept.size, -1) for part in parts], axis=1, dtype=np.float64)
    names = ", ".join(['"tree", "node", "output", "value"', *(name for values, name in optional if values is not None)])
    numbered = [(tree, nodes + leaf, k) for tree, leaf, k in np.ndindex(program.intercept.shape)]
    return {
        f'"jtrees_splits" ("tree", "node", "bias", {weights})': _rows(list(np.ndindex(trees, nodes)), splits),
        f'"jtrees_leaves" ({names})': _rows(numbered, leaves),
    }


def _rows(places: Sequence[tuple[int, ...]], numbers: np.ndarray) -> str:
    """Returns rows of integers and numbers. The types of the first row make PostgreSQL use double precision."""
    rows = [[*map(str, place), *map(_number, values)] for place, values in zip(places, numbers, strict=True)]
    width = numbers.shape[1]
    rows[0][-width:] = [f"CAST({number} AS DOUBLE PRECISION)" for number in rows[0][-width:]]
    return "VALUES\n" + ",\n".join(f"({', '.join(row)})" for row in rows)


def _value(field: Field, column: str) -> str:
    """Returns the value of a column: a number, NULL if it is missing, or the number of a level's row."""
    text = f"TRIM(CAST({column} AS VARCHAR))"
    if field.kind == "boolean":  # as text, because PostgreSQL has booleans, and SQLite has 0 and 1
        cases = " ".join(f"WHEN {sql_literal(word)} THEN {number}" for word, number in BOOLEANS.items())
        return f"CAST(CASE LOWER({text}) {cases} END AS DOUBLE PRECISION)"
    missing = f" OR {text} IN ({', '.join(map(sql_literal, field.missing))})" if field.missing else ""
    if field.kind == "number":  # in PostgreSQL, NaN and its negative are larger than any number
        number = f"CAST({column} AS DOUBLE PRECISION)"
        is_nan = f"WHEN {number} > {_LARGEST} AND -{number} > {_LARGEST} THEN NULL"
        listed = ", ".join(map(_number, field.missing_numbers))
        is_listed = f" WHEN {number} IN ({listed}) THEN NULL" if listed else ""
        return f"CASE WHEN {column} IS NULL{missing} THEN NULL {is_nan}{is_listed} ELSE {number} END"
    count = len(field.column.levels)
    cases = " ".join(f"WHEN {sql_literal(level)} THEN {i}" for i, level in enumerate(field.column.levels))
    number = f"CASE {text} {cases} ELSE {count} END"  # a database computes the text once, and not for each level
    return f"CASE WHEN {column} IS NULL{missing} THEN {count + 1} ELSE {number} END"


def _features(program: Program, fields: list[Field]) -> list[str]:
    """Returns the features relative to the origin in single precision, in which SQL has no numbers in all databases."""
    relative: list[str] = []
    for i, field in enumerate(fields):
        for operation in field.operations:
            zeros = program.zero[len(relative) : len(relative) + operation.width]
            relative += _OPERATIONS[operation.name](operation, f'"x{i}"', zeros)
    return relative


def _difference(operation: Operation, column: str, zeros: np.ndarray) -> list[str]:
    """Returns the feature of a number. ``start`` is 0, because only dates have another start."""
    number = f"({column} - {_number(zeros[0])})" if zeros[0] else column
    rounded = f"{_SPLITTER} * {number} - ({_SPLITTER} * {number} - {number})"
    default = "NULL" if np.isnan(operation.center) else _constant(operation.center, zeros[0])
    in_range = f"WHEN {column} BETWEEN -{_LARGEST} AND {_LARGEST} THEN {rounded}"
    return [f"CASE WHEN {column} IS NULL THEN {default} {in_range} END"]


def _missing(operation: Operation, column: str, zeros: np.ndarray) -> list[str]:
    cases = [_constant(1, zeros[0]), _constant(0, zeros[0])]
    return [_case(f"CASE WHEN {column} IS NULL THEN 0 ELSE 1 END", cases)]


def _lookup(operation: Operation, column: str, zeros: np.ndarray) -> list[str]:
    features = zip(operation.table.T, zeros, strict=True)
    return [_case(column, [_constant(value, zero) for value in values]) for values, zero in features]


# The code of the features of each operation of a column's program, relative to the origin.
_OPERATIONS = {"difference": _difference, "missing": _missing, "lookup": _lookup}


def _constant(value: float, zero: float) -> str:
    return _number(np.float32(value - zero))


def _case(code: str, values: Sequence[str]) -> str:
    """Returns the value of a code. The type of the last value makes PostgreSQL compute in double precision."""
    default = Counter(values).most_common(1)[0][0]
    default_value = f"CAST({default} AS DOUBLE PRECISION)"
    cases = " ".join(f"WHEN {i} THEN {value}" for i, value in enumerate(values) if value != default)
    return f"CASE {code} {cases} ELSE {default_value} END" if cases else default_value


def _score(features: Sequence[str]) -> str:
    """Returns the score of a split, in four partial sums, in the order of jtrees."""
    terms = [f'"w{j}" * {z}' for j, z in enumerate(features)]
    sums = [['"bias"', *terms[::4]], *(terms[i::4] for i in (1, 2, 3))]
    return _sum(f"({' + '.join(part)})" for part in sums if part)


def _sums(program: Program) -> list[str]:
    """Returns the outputs of the model before the link. They are NULL if a value is missing."""
    value = '"value"'
    if program.lower is not None:
        value = f'CASE WHEN {value} < "lower" THEN "lower" WHEN {value} > "upper" THEN "upper" ELSE {value} END'
    sums = [f'SUM(CASE WHEN "output" = {k} THEN {value} END)' for k in range(len(program.offset))]
    sums = [f"{total} / {float(program.divisor)} + {_number(k)}" for total, k in zip(sums, program.offset, strict=True)]
    return [f'CASE WHEN COUNT("value") = COUNT(*) THEN {total} END' for total in sums]


def _linked(link: str, sums: list[str]) -> list[str]:
    """Returns predictions from sums over the trees."""
    if link == "exp":
        return [_exponential(value) for value in sums]
    if link == "softmax":
        odds = lambda value: [_exponential(f"({other} - {value})") for other in sums if other != value]
        return [f"1.0 / {_sum(['1.0', *odds(value)])}" for value in sums]
    if link == "sorted":
        listed = " UNION ALL ".join(f'SELECT {value} AS "value"' for value in sums)
        ordered = f'(SELECT "value" FROM ({listed}) AS "values" ORDER BY "value" LIMIT 1 OFFSET'
        return [f"{ordered} {k})" for k in range(len(sums))]
    return sums


def _exponential(value: str) -> str:
    """Returns the exponential of a value in [-700, 700], because PostgreSQL refuses overflow and underflow."""
    return f"EXP(CASE WHEN {value} < -700 THEN -700.0 WHEN {value} > 700 THEN 700.0 ELSE {value} END)"


def _sum(terms: Iterable[str]) -> str:
    """Returns a sum of terms in pairs, ``((a + b) + (c + d))``, as an expression of small depth."""
    terms = list(terms)
    while len(terms) > 1:
        terms = [f"({' + '.join(terms[i : i + 2])})" for i in range(0, len(terms), 2)]
    return terms[0]


def _number(value: Any) -> str:
    """Returns a number as the shortest text that reads back as itself in double precision."""
    return repr(float(value))
