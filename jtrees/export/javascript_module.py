"""Writes a tree or a forest as a JavaScript module."""

import json
import os
from typing import Any

import numpy as np

from jtrees import io
from jtrees.export.program import Field, Program, program_of
from jtrees.export.template import array, fill, period_code
from jtrees.tables.cells import missing_numbers
from jtrees.tables.model import column_names
from jtrees.tables.parse import BOOLEANS, CLOCK, DATES, ISO, LARGEST, MONTHS, TIME
from jtrees.tables.periods import PERIODS


def to_javascript(model: Any, path: str | os.PathLike) -> None:
    """Writes a model as an ES module without dependencies, for browsers, Node.js and Deno.

    The module exports two functions of a single row. ``predict(row)`` returns a number, or an array of numbers for
    several outputs. ``leaf(row)`` returns the leaf from 0, or an array of the leaves of a forest.

    For a model of DataFrames, a row is an object with a property for each column that the model uses. For a model of
    arrays, a row is an array. Text is read as ``predict`` reads it, durations are days or texts of times of day, and
    dates are texts or ``Date`` objects. The day of a ``Date`` is the day in the column's time zone, or in UTC if the
    column has no time zone. ``null``, ``undefined`` and ``NaN`` are missing values. So are the texts and numbers that
    mean a missing value for ``predict``, and cells that do not have the kind of their column. The functions throw a
    ``TypeError`` for a column that does not exist, and for a missing value if the model is a tree of arrays without
    ``medians``.

    Node.js needs a file that ends in ``.mjs``, or a ``package.json`` with ``"type": "module"``.

    Args:
      model: as for :func:`jtrees.export.to_c`.
      path: path of the file. The file is written completely or not at all.

    Raises:
      ValueError: for any other model.
      OSError: if the file cannot be written.

    Example:
      >>> leaves = jtrees.leaves.Values(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> jtrees.export.to_javascript(tree, "tree.js")
      >>> "export function predict(row)" in open("tree.js").read()
      True
    """
    program = program_of(model)
    names = column_names(model, None)
    io.write_file(path, _source(program, program.fields(names), len(names)))


def _source(program: Program, fields: list[Field], width: int) -> str:
    named = program.encoder is not None and program.encoder.schema.named
    periods = [f"  {name}: (day, time) => {period_code(name, _STEPS)}," for name in PERIODS]
    return fill(
        _TEMPLATE,
        WHAT=program.described(),
        ROW="an object with the columns as properties" if named else f"an array of {width} numbers",
        OUTPUTS="a number" if program.scalar else f"an array of {len(program.offset)} numbers",
        LEAVES="the leaf" if program.single else "an array of the leaves",
        FIELDS=",\n".join(f"  {json.dumps(_column(field))}" for field in fields),
        PERIODS="\n".join(periods),
        BOOLEANS=json.dumps(list(BOOLEANS.items())),
        CLOCK=json.dumps(f"^{CLOCK}$".replace("(?P<", "(?<")),
        MONTHS=json.dumps(MONTHS),
        LARGEST=LARGEST,
        TABLES="\n".join(f"const {name.upper()} = {_array(values)};" for name, values in program.arrays.items()),
        CHECK=_CHECK_OBJECT if named else fill(_CHECK_ARRAY, WIDTH=width),
        PLACE="name" if named else "place",
        IS_LISTED=_IS_LISTED if any(missing_numbers(field.missing) for field in fields) else "",
        DIVISOR=program.divisor,
        LINK=_LINKS[program.link],
        LEAF="[0]" if program.single else "",
        OUT="[0]" if program.scalar else "",
    )


def _column(field: Field) -> dict[str, Any]:
    """Returns the description of a column as plain data."""
    plain = lambda argument: argument.tolist() if isinstance(argument, np.ndarray) else argument
    operations = [[operation.name, *map(plain, operation.arguments)] for operation in field.operations]
    column = {key: getattr(field, key) for key in ("name", "place", "kind", "missing")}
    text_format = field.column.text_reading.form(field.column.zone)
    if field.kind == "date":
        patterns = [(DATES[style] + TIME).replace("(?P<", "(?<") for style in (text_format[0], ISO)]
        text_format = patterns, *text_format[1:]
    if field.missing_numbers:
        column["numbers"] = field.missing_numbers
    return column | {"levels": [*field.column.level_numbers().items()], "format": text_format, "operations": operations}


def _array(values: np.ndarray | None) -> str:
    text = "null" if values is None else array(values)
    return f"float32({text})" if values is not None and values.dtype == np.float32 else text


_CHECK_OBJECT = """\
  for (const { name } of FIELDS)
    if (!(name in Object(row))) throw new TypeError(`row must have a column ${JSON.stringify(name)}`);
"""

_CHECK_ARRAY = """\
  if (row?.length !== @WIDTH@) throw new TypeError(`row must be an array of @WIDTH@ numbers, got ${row?.length}`);
"""

_IS_LISTED = """\
  if ((field.kind === "text" ? field.missing : field.numbers)?.includes(value)) return null;
"""

_SOFTMAX = """\
  const largest = Math.max(...out);
  out = out.map((value) => Math.exp(value - largest));
  const total = out.reduce((sum, power) => sum + power);
  out = out.map((power) => power / total);
"""

_LINKS = {
    "identity": "",
    "softmax": _SOFTMAX,
    "exp": "  out = out.map(Math.exp);\n",
    "sorted": "  out.sort((a, b) => a - b);\n",
}

# The code of the steps of the calendar.
_STEPS = {"+": "({0} + {1})", "*": "{0} * {1}", "//": "Math.floor({0} / {1})", "%": "({0} % {1} + {1}) % {1}"}

_TEMPLATE = r"""// @WHAT@, written by jtrees.
//
// predict(row) returns @OUTPUTS@. leaf(row) returns @LEAVES@, from 0. A row is @ROW@.

const float32 = (values) => (typeof values[0] === "number" ? Float32Array.from(values) : values.map(float32));

// The columns, and the operations that make their features. The format of numbers in text is what may be before and
// after them, and the separators of thousands and decimals. The format of dates is their patterns, whether they have an
// offset from UTC, and the zone in which days count.
const FIELDS = [
@FIELDS@,
];
for (const field of FIELDS) field.levels = new Map(field.levels);

// The features of each operation. Numbers are those of levels and periods. A table has a row for each of them, then a
// row for any other value, and a row for a missing value.
const OPERATIONS = {
  difference: (value, numbers, start, center) => [value === null ? center : value - start],
  missing: (value) => [value === null ? 1 : 0],
  lookup: (value, numbers, part, rows) => rows.at(value === null ? -1 : numbers[part]),
};

// The numbers of the periods of a day since 1970 and of a time in milliseconds.
const PERIODS = {
@PERIODS@
};

const BOOLEANS = new Map(@BOOLEANS@);
const MONTHS = @MONTHS@;
const CLOCK = new RegExp(@CLOCK@);
const NUMBER = /^(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?$/i;
const LARGEST = @LARGEST@;
const DAY = 86400000; // milliseconds
const SPACE = "[\\t-\\r\\x1c- \\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]"; // as in Python
const SPACES = new RegExp(`^${SPACE}+|${SPACE}+$`, "g");
const trim = (text) => text.replace(SPACES, "");

@TABLES@

/** A number of a cell. Text may have the minus sign of print, and brackets for numbers below 0. */
function numberOf(cell, before, after, thousands, point) {
  if (typeof cell !== "string") return ["number", "boolean", "bigint"].includes(typeof cell) ? Number(cell) : undefined;
  if (point === undefined) return clockOf(CLOCK.exec(trim(cell))?.groups) / DAY; // a duration
  let text = trim(cell).replaceAll("\u2212", "-");
  if (/^\([^-+(].*\)$/s.test(text)) text = `-${text.slice(1, -1)}`;
  let [, sign, body] = /^([-+]?)(.*)$/s.exec(text);
  if (point === "." && !thousands && NUMBER.test(body)) return Number(text);
  body = trim(body);
  if (body.startsWith(before)) body = trim(body.slice(before.length));
  if (body.endsWith(after)) body = trim(body.slice(0, body.length - after.length));
  if (!sign) [, sign, body] = /^([-+]?)(.*)$/s.exec(body);
  const parts = body.split(point);
  if (thousands) {
    const groups = parts[0].split(thousands);
    const isOdd = (group, i) => (i ? group.length !== 3 : group.length < 1 || group.length > 3);
    if (groups.length > 1 && groups.some(isOdd)) return undefined;
    parts[0] = groups.join("");
  }
  if (point !== "." && parts.join("").includes(".")) return undefined;
  body = parts.join(".");
  return NUMBER.test(body) ? Number(sign + body) : undefined;
}

/** Days since 1970 in local time. */
function daysOf(cell, patterns, zoned, zone) {
  if (cell instanceof Date) return localTime(cell.getTime(), zone) / DAY;
  if (typeof cell !== "string") return undefined;
  const parts = patterns.map((pattern) => new RegExp(`^${pattern}$`).exec(trim(cell))?.groups).find(Boolean);
  if (!parts || Boolean(parts.zone) !== zoned || parts.year === "0000") return undefined;
  const name = parts.name?.toLowerCase();
  const month = name ? MONTHS.findIndex((text) => [text, text.slice(0, 3)].includes(name)) + 1 : parts.month;
  const digits = (text = "0") => String(text).padStart(2, "0");
  const century = parts.year.length === 2 ? (parts.year >= 69 ? "19" : "20") : "";
  const date = [century + parts.year, digits(month), digits(parts.day)].join("-");
  const midnight = Date.parse(`${date}T00:00:00Z`);
  const local = midnight + clockOf(parts);
  if (Number.isNaN(local) || !new Date(midnight).toISOString().startsWith(date)) return undefined;
  const offset = offsetOf(parts.zone);
  if (offset === undefined) return undefined;
  return (zone ? localTime(local - offset, zone) : local) / DAY;
}

/** The milliseconds since midnight of a time of day; NaN for no such time. */
function clockOf({ hour = 0, minute = 0, second = 0, part = "", half } = { hour: 24 }) {
  const isWrong = half ? hour < 1 || hour > 12 : hour > 23;
  if (isWrong || minute > 59 || second > 59) return NaN;
  const hours = half ? (hour % 12) + (/p/i.test(half) ? 12 : 0) : Number(hour);
  return (60 * (60 * hours + Number(minute)) + Number(second)) * 1000 + Number(part.padEnd(3, "0").slice(0, 3));
}

/** The milliseconds of an offset from UTC. */
function offsetOf(text) {
  const [, sign, hours, minutes = "0"] = /([+-])(\d\d):?(\d\d)?/.exec(text) ?? ["", "+", "0"];
  return hours > 23 || minutes > 59 ? undefined : Number(`${sign}1`) * (60 * hours + Number(minutes)) * 60000;
}

/** The milliseconds of the local clock at a moment. Without a zone, the clock is that of UTC. */
function localTime(moment, zone) {
  if (!zone || /^[-+]/.test(zone)) return moment + offsetOf(zone);
  const units = ["year", "month", "day", "hour", "minute", "second"];
  const options = { ...Object.fromEntries(units.map((unit) => [unit, "numeric"])), hourCycle: "h23", timeZone: zone };
  const parts = new Intl.DateTimeFormat("en-US", options).formatToParts(moment);
  const [year, month, ...others] = units.map((unit) => Number(parts.find(({ type }) => type === unit).value));
  const local = Date.UTC(2000, month - 1, ...others) + (((moment % 1000) + 1000) % 1000);
  return new Date(local).setUTCFullYear(year, month - 1, others[0]); // Date.UTC reads 1 as 1901
}

/** The canonical text of a level, as Python writes numbers and booleans, without spaces at the ends. */
function levelOf(value) {
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "number") return ["string", "bigint"].includes(typeof value) ? trim(String(value)) : undefined;
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  if (Number.isInteger(value) && Math.abs(value) < 2 ** 53) return String(value);
  const [digits, exponent] = value.toExponential().split("e");
  if (exponent >= -4 && exponent < 16) return Number.isInteger(value) ? `${value}.0` : String(value);
  return `${digits}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
}

/** The level of the number or the boolean in a text, such as 2 of 2.0. */
function plainLevel(text) {
  if (/^(?:true|false)$/i.test(text)) return levelOf(text.toLowerCase() === "true");
  if (!NUMBER.test(text?.replace(/^[-+]/, "")) || /^[-+]?0\d/.test(text)) return undefined;
  const number = Number(text);
  const isExact = Math.abs(number) < 2 ** 53 || !/^[-+]?\d+$/.test(text);
  return isExact && Number.isFinite(number) ? levelOf(number) : undefined;
}

const READ = {
  number: numberOf,
  boolean: (cell) => (typeof cell === "object" ? undefined : BOOLEANS.get(trim(String(cell)).toLowerCase())),
  date: daysOf,
  text: levelOf,
};

/** The value of a column; null if it is missing, or if the cell does not have the kind of the column. */
function valueOf(row, field) {
  const cell = row[field.@PLACE@];
  const number = cell instanceof Date ? cell.getTime() : cell;
  const isMissing = typeof cell === "string" ? field.missing.includes(trim(cell)) : Number.isNaN(number ?? NaN);
  const value = isMissing ? null : READ[field.kind](cell, ...field.format);
@IS_LISTED@  if (field.kind === "text" || (value !== null && Math.abs(value) <= LARGEST)) return value;
  if (!Number.isNaN(field.operations[0][2])) return null;
  const got = typeof cell === "string" ? JSON.stringify(cell.slice(0, 80)) : String(cell).slice(0, 80);
  throw new TypeError(`row must have a ${field.kind} in column ${JSON.stringify(field.name)}, got ${got}`);
}

/** The features relative to the origin, in single precision. */
function relative(row) {
@CHECK@  const features = [];
  for (const field of FIELDS) {
    const value = valueOf(row, field);
    const numbers = {};
    if (field.kind === "text") numbers.level = field.levels.get(value) ?? field.levels.get(plainLevel(value)) ?? -2;
    if (field.kind === "date") {
      const day = Math.floor(value);
      const time = Math.floor((value - day) * DAY + 0.5);
      for (const [part, number] of Object.entries(PERIODS)) numbers[part] = number(day, time);
    }
    for (const [name, ...parts] of field.operations) features.push(...OPERATIONS[name](value, numbers, ...parts));
  }
  return Float32Array.from(features, (feature, j) => feature - ZERO[j]);
}

/** The score of a split. Products are exact. Four partial sums, in the order of jtrees. */
function score(weights, bias, z) {
  const sums = [bias, 0, 0, 0];
  for (let j = 0; j < z.length; j++) sums[j % 4] += weights[j] * z[j];
  return sums[0] + sums[1] + (sums[2] + sums[3]);
}

function leaves(z) {
  return WEIGHTS.map((weights, tree) => {
    let node = 0;
    while (node < weights.length) node = 2 * node + (score(weights[node], BIAS[tree][node], z) > 0 ? 2 : 1);
    return node - weights.length;
  });
}

export function leaf(row) {
  return leaves(relative(row))@LEAF@;
}

export function predict(row) {
  const z = relative(row);
  const sums = OFFSET.map(() => 0);
  leaves(z).forEach((leaf, tree) => {
    for (let k = 0; k < sums.length; k++) {
      let value = INTERCEPT[tree][leaf][k];
      if (COEFFICIENTS) for (let j = 0; j < z.length; j++) value += COEFFICIENTS[tree][leaf][k][j] * z[j];
      if (LOWER) value = Math.min(Math.max(value, LOWER[tree][leaf][k]), UPPER[tree][leaf][k]);
      sums[k] += value;
    }
  });
  let out = sums.map((sum, k) => sum / @DIVISOR@ + OFFSET[k]);
@LINK@  return out@OUT@;
}
"""
