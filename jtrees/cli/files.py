"""Reading of tables from CSV and Parquet files, with clear errors for unreadable files."""

import codecs
from dataclasses import dataclass
from decimal import Decimal
from io import StringIO
from pathlib import Path
import re
from typing import Any
import warnings

import numpy as np
import pandas as pd

from jtrees import validation as checks
from jtrees.data.cells import MISSING, ORDERS, Reading
from jtrees.data.file_columns import FileColumns, read_cells
from jtrees.data.frame import RawColumn

_DAY = 86_400_000  # milliseconds
# First bytes of other formats, and how to get a file that can be read. Some encodings would read their bytes as text.
_OTHER_FORMATS = (
    (b"\x1f\x8b", "a gzip file", "decompress it, such as by gunzip"),
    (b"PK\x03\x04", "an Excel or zip file", "save the table as CSV"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Excel file", "save the table as CSV"),
    (b"PAR1\x15", "Parquet under another name", "give it the ending .parquet"),
)


class DataError(ValueError):
    """The requested data is not available; the message gives the reason and the available data."""


@dataclass(frozen=True)
class Rules:
    """How a file is read.

    Attributes:
      separator: the field separator of CSV.
      decimal: the decimal separator of CSV; None: a point, unless the numbers of a column need a comma.
      encoding: the character encoding of CSV.
      missing: texts that mean a missing value in CSV. An empty cell is always a missing value. In text of Parquet,
        only the texts that are not in ``MISSING`` count, because Parquet has missing values.
      order: the order of day and month, ``"dmy"`` or ``"mdy"``, for columns of ambiguous dates.
      text: names of columns that are text.
    """

    separator: str = ","
    decimal: str | None = None
    encoding: str = "utf-8"
    missing: tuple[str, ...] = MISSING
    order: str | None = None
    text: tuple[str, ...] = ()


PLAIN_RULES = Rules()


def add_rules(parser: Any, *, training: bool) -> None:
    """Adds the options for reading a file, and, if ``training``, the options for the kinds of its columns."""
    add = parser.add_argument
    add("--separator", default=",", help="field separator of CSV (default: a comma)")
    decimal = "as the cells say, else a point" if training else "as in training"
    add("--decimal", metavar="MARK", help=f"decimal separator of CSV (default: {decimal})")
    add("--encoding", default="utf-8", metavar="NAME", help="the encoding of CSV, such as latin-1 (default: utf-8)")
    default = "NA, nan, null, ? and others" if training else "those of the training"
    missing_help = f"further texts that mean a missing value, besides {default}; without TEXT, only an empty cell does"
    add("--missing", nargs="*", metavar="TEXT", help=missing_help)
    if training:
        add("--text", nargs="+", default=[], metavar="COLUMN", help="columns to read as text")
        add("--dates", choices=list(ORDERS), help="order of day and month in columns of ambiguous dates")


def rules_of(options: Any, missing: tuple[str, ...] = MISSING) -> Rules:
    """Returns the rules for reading a file; ``missing`` is the default for the option ``--missing``.

    Raises:
      DataError: for an invalid separator, or if the two separators are equal.
    """
    decimal = options.decimal
    if decimal not in (".", ",", None):
        raise DataError(f"--decimal must be a point or a comma, got {checks.quoted(decimal)}")
    separator = "\t" if options.separator == "\\t" else options.separator
    if decimal == separator:
        raise DataError(f"--decimal and --separator must differ, got {checks.quoted(decimal)} for both")
    if len(separator) != 1:
        raise DataError(f"--separator must be one character, got {checks.quoted(options.separator)}")
    if options.missing is not None:
        missing = (*dict.fromkeys((*missing, *options.missing)),) if options.missing else ("",)
    text, order = tuple(getattr(options, "text", ())), getattr(options, "dates", None)
    return Rules(separator, decimal, options.encoding, missing, order, text)


def read_rows(file: Path, rules: Rules) -> tuple[pd.DataFrame, list[str]]:
    """Returns the rows in a file, and a list of the changes made while reading, as lines of text.

    A file whose name ends in ``.parquet`` is Parquet. Every other file is CSV. Cells of CSV are text without spaces at
    the ends, and None for missing values. All rows are returned.

    Raises:
      DataError: if the file cannot be read.
      ImportError: if the file is Parquet and pyarrow is not installed.
    """
    if file.suffix == ".parquet":
        frame, texts = _read_parquet(file), [text for text in rules.missing if text not in MISSING]
        for name in frame if texts else ():
            if pd.api.types.is_string_dtype(frame[name]) or frame[name].dtype == "object":
                frame[name] = frame[name].where(~frame[name].isin(texts), None)
        return frame, []
    frame = _read_csv(file, rules)
    gaps, changes = frozenset(("", *rules.missing)), []
    stripped: dict[str, int] = {}
    for name in frame:
        cells = frame[name].to_numpy(object)
        short = [cell.strip() if isinstance(cell, str) else None for cell in cells]  # a short row lacks cells
        stripped[name] = sum(a is not None and a != b and a not in gaps for a, b in zip(short, cells, strict=True))
        frame[name] = pd.Series([None if cell is None or cell in gaps else cell for cell in short], dtype=object)
    if any(stripped.values()):
        which = checks.quoted_list(name for name, count in stripped.items() if count)
        changes.append(f"spaces at the ends of cells are left out, {sum(stripped.values())} times, in {which}")
    return frame, changes


def _read_csv(file: Path, rules: Rules) -> pd.DataFrame:
    """Returns the cells of CSV with a header as text."""
    text = _decoded(file, rules.encoding)
    # If rows end in a separator, pandas would otherwise use the first column as an index.
    options: Any = {
        "sep": rules.separator,
        "dtype": str,
        "keep_default_na": False,
        "na_values": [""],
        "skipinitialspace": True,
        "index_col": False,
    }
    names: list[str] = []
    try:
        # The header is read separately, because rows may have different lengths if the separator is wrong.
        header = pd.read_csv(StringIO(text), nrows=1, header=None, **options)
        cells = [cell.strip() if isinstance(cell, str) else "" for cell in header.iloc[0]] if len(header) else [""]
        names += [name or f"Unnamed: {place}" for place, name in enumerate(cells)]
        other = next((c for c in (";", "\t", "|", ",") if c != rules.separator and c in names[0]), None)
        wrong = len(names) == 1 and other is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of header", pd.errors.ParserWarning)
            # A blank line is a row with an empty cell if the table has one column. Otherwise it is ignored.
            how = {"skip_blank_lines": len(names) > 1, "header": _blank_lines(text) if len(names) == 1 else 0}
            frame: Any = pd.read_csv(StringIO(text), nrows=0 if wrong else None, **how, **options)
    except pd.errors.ParserWarning as error:
        named = checks.quoted_list(names)
        raise DataError(f"{file}: rows have more fields than the header, which names {named}") from error
    except ValueError as error:
        raise DataError(f"cannot read {file}: {one_line(error)}") from error
    if wrong:
        raise DataError(f"{file} has one column, {checks.quoted(names[0])}: try --separator {checks.quoted(other)}")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{file} must have columns of different names, got {checks.quoted(repeated[0])} twice")
    frame.columns = pd.Index(names)
    return frame


def _decoded(file: Path, encoding: str) -> str:
    try:
        contents = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or one_line(error)}") from error
    for start, kind, remedy in _OTHER_FORMATS:
        if contents.startswith(start):
            raise DataError(f"{file} must be CSV or Parquet, got {kind}: {remedy}")
    try:
        marked = contents.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        if marked and not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
            raise DataError(f"cannot read {file} as {encoding}, because it is UTF-16: use --encoding utf-16")
        # The file may begin with a byte-order mark.
        return contents.decode("utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)
    except UnicodeDecodeError as error:
        where = f"byte {contents[error.start]:#04x} at {error.start}"
        raise DataError(f"cannot read {file} as {encoding} ({where}): try --encoding latin-1") from error
    except LookupError as error:
        raise DataError(f"--encoding must be the name of an encoding, got {checks.quoted(encoding)}") from error


def _blank_lines(text: str) -> int:
    """Returns the number of blank lines before the header."""
    match = re.match(r"(?:[ \t]*\r?\n)*", text)
    return match[0].count("\n") if match else 0


def read_table(file: Path, rules: Rules, *, keep: str | None = None) -> tuple[pd.DataFrame, FileColumns, list[str]]:
    """Returns the table in a file with typed columns, how its cells were read, and a list of changes.

    Args:
      file: the file.
      rules: how the file is read.
      keep: name of a column in which dates remain text, or None.

    Raises:
      DataError: if the file cannot be read.
      ImportError: if the file is Parquet and pyarrow is not installed.
    """
    rows, changes = read_rows(file, rules)
    if file.suffix == ".parquet":
        for name in set(rules.text) & set(rows.columns):
            if pd.api.types.is_datetime64_any_dtype(rows[name]):
                raise DataError(
                    f"--text must name columns of text or numbers, got {checks.quoted(name)}, which has dates"
                )
            rows[name] = rows[name].astype("category")
        return rows, FileColumns({}, {}, {}), changes
    cells = {name: rows[name].to_numpy(object) for name in rows}
    read = read_cells(cells, decimal=rules.decimal, order=rules.order, text=rules.text)
    typed = {name: _typed(raw, cells[name], dates=name != keep) for name, raw in read.columns.items()}
    return pd.DataFrame(typed, index=rows.index), read, changes


def numbers_of(name: str, cells: Any, rules: Rules) -> np.ndarray:
    """Returns the cells of a column as numbers.

    Raises:
      DataError: if a cell is not a number. The message names the column and the row.
    """
    values, wrong = Reading("numeric", decimal=rules.decimal or ".").read(cells.tolist())
    if wrong.any():
        row = int(np.argmax(wrong))
        cell = f"{checks.quoted(cells.iloc[row])} in row {row}"
        raise DataError(f"x must hold numbers in column {checks.quoted(name)}, got {cell}")
    return values


def _typed(raw: RawColumn, cells: np.ndarray, *, dates: bool) -> Any:
    """Returns a column as an array of pandas; ``dates`` says whether dates become pandas dates or remain text."""
    if raw.kind == "text":
        return pd.Categorical(cells) if raw.source == "levels" else pd.Series(cells, dtype=object)
    if raw.kind == "boolean":
        values = pd.array(np.where(raw.missing, False, raw.values != 0), dtype="boolean")
        values[raw.missing] = pd.NA
        return values if raw.missing.any() else values.to_numpy(bool)
    if raw.kind == "date" and not dates:
        return pd.Series(cells, dtype=object)
    if raw.kind == "date":  # dates in local time, because the columns of a model handle offsets
        days = np.where(raw.missing, 0, np.round(raw.values * _DAY)).astype("datetime64[ms]")
        local = pd.Series(np.where(raw.missing, np.datetime64("NaT", "ms"), days))
        return local if raw.zone is None else local.dt.tz_localize("UTC")  # does not change the local time
    is_integer = all(cell is not None and len(cell) < 18 and cell.lstrip("+-").isdigit() for cell in cells)
    return raw.values.astype(np.int64) if is_integer else raw.values


def _read_parquet(file: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(file)
        frame = frame.reset_index([name for name in frame.index.names if name is not None]).reset_index(drop=True)
    except ImportError as error:
        raise ImportError('Parquet needs pyarrow: pip install "jtrees[cli]"') from error
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or one_line(error)}") from error
    except ValueError as error:  # includes the errors of pyarrow
        raise DataError(f"cannot read {file}: {one_line(error)}") from error
    frame.columns = pd.Index([str(name) for name in frame.columns])
    for name in frame:
        if frame[name].dtype == "object" and any(isinstance(value, Decimal) for value in frame[name]):
            frame[name] = pd.to_numeric(frame[name])
    return frame


def one_line(error: Exception) -> str:
    """Returns the message of an error on one line, or the name of its class if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
