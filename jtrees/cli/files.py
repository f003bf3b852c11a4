"""Files of tables, CSV and Parquet: how they are read, and clear errors for those that cannot be."""

from dataclasses import dataclass
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


class DataError(ValueError):
    """The data asked for cannot be had; the message says why and what there is."""


@dataclass(frozen=True)
class Rules:
    """How a file is read.

    Attributes:
      separator: what separates two fields of CSV.
      decimal: what separates the whole number and its decimals in CSV.
      encoding: the encoding of the characters of CSV.
      missing: texts of CSV that mean a missing value; an empty cell always does.
      order: the order of day and month in dates, ``"dmy"`` or ``"mdy"``, where a column leaves it open.
      text: names of columns that are text.
    """

    separator: str = ","
    decimal: str = "."
    encoding: str = "utf-8"
    missing: tuple[str, ...] = MISSING
    order: str | None = None
    text: tuple[str, ...] = ()


PLAIN_RULES = Rules()


def add_rules(parser: Any, *, training: bool) -> None:
    """Adds the options of how a file is read; ``training``: also of what its columns are."""
    add = parser.add_argument
    add("--separator", default=",", help="what separates two fields of CSV (default: a comma)")
    decimal = "a point" if training else "as in training"
    add("--decimal", metavar="MARK", help=f"what precedes the decimals of a number in CSV (default: {decimal})")
    add("--encoding", default="utf-8", metavar="NAME", help="the encoding of CSV, such as latin-1 (default: utf-8)")
    default = "NA, nan, null, ? and others" if training else "as in training"
    said = f"what means a missing value in CSV, besides an empty cell (default: {default})"
    add("--missing", nargs="*", metavar="TEXT", help=said)
    if training:
        add("--text", nargs="+", default=[], metavar="COLUMN", help="columns that are text, whatever they hold")
        add("--dates", choices=list(ORDERS), help="the order of day and month in dates, where a column leaves it open")


def rules_of(options: Any, missing: tuple[str, ...] = MISSING) -> Rules:
    """Returns how a file is read; ``missing``: what means a missing value unless an option says so.

    Raises:
      DataError: for a separator of decimals that is no character of its own.
    """
    decimal = "." if options.decimal is None else options.decimal
    if decimal not in (".", ","):
        raise DataError(f"--decimal must be a point or a comma, got {checks.quoted(decimal)}")
    separator = "\t" if options.separator == "\\t" else options.separator
    if decimal == separator:
        raise DataError(f"--decimal and --separator must differ, got {checks.quoted(decimal)} for both")
    if len(separator) != 1:
        raise DataError(f"--separator must be one character, got {checks.quoted(options.separator)}")
    missing = missing if options.missing is None else ("", *options.missing)
    text, order = tuple(getattr(options, "text", ())), getattr(options, "dates", None)
    return Rules(separator, decimal, options.encoding, missing, order, text)


def read_rows(file: Path, rules: Rules) -> tuple[pd.DataFrame, list[str]]:
    """Returns the rows in a file, and what reading it changed: Parquet, if it ends in ``.parquet``, else CSV.

    Cells of CSV are text without spaces at its ends, None where missing. No row is left out.

    Raises:
      DataError: for a file that cannot be read.
      ImportError: for Parquet without pyarrow.
    """
    if file.suffix == ".parquet":
        return _read_parquet(file), []
    frame = _read_csv(file, rules)
    gaps, said = frozenset(("", *rules.missing)), []
    stripped: dict[str, int] = {}
    for name in frame:
        cells = frame[name].to_numpy(object)
        short = [cell.strip() if isinstance(cell, str) else None for cell in cells]  # a short row has no cell at all
        stripped[name] = sum(a is not None and a != b and a not in gaps for a, b in zip(short, cells, strict=True))
        frame[name] = pd.Series([None if cell is None or cell in gaps else cell for cell in short], dtype=object)
    if any(stripped.values()):
        which = checks.quoted_list(name for name, count in stripped.items() if count)
        said.append(f"spaces at the ends of cells are left out, {sum(stripped.values())} times, in {which}")
    return frame, said


def _read_csv(file: Path, rules: Rules) -> pd.DataFrame:
    """Returns the cells of CSV with a header as text."""
    text = _decoded(file, rules.encoding)
    # Unless told that there is no index, pandas takes the first column for one where rows end in a separator.
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
        # The header by itself: with a wrong separator rows may be ragged.
        header = pd.read_csv(StringIO(text), nrows=1, header=None, **options)
        cells = [cell.strip() if isinstance(cell, str) else "" for cell in header.iloc[0]] if len(header) else [""]
        names += [name or f"Unnamed: {place}" for place, name in enumerate(cells)]
        other = next((c for c in (";", "\t", "|", ",") if c != rules.separator and c in names[0]), None)
        wrong = len(names) == 1 and other is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of header", pd.errors.ParserWarning)
            # In a table of one column a blank line is a row whose cell is empty. In other tables it is no row.
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
    try:
        # With a mark of the byte order, or without.
        return contents.decode("utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding)
    except UnicodeDecodeError as error:
        where = f"byte {contents[error.start]:#04x} at {error.start}"
        raise DataError(f"cannot read {file} as {encoding} ({where}): try --encoding latin-1") from error
    except LookupError as error:
        raise DataError(f"--encoding must be the name of an encoding, got {checks.quoted(encoding)}") from error


def _blank_lines(text: str) -> int:
    """Returns the number of blank lines before the header."""
    found = re.match(r"(?:[ \t]*\r?\n)*", text)
    return found[0].count("\n") if found else 0


def read_table(file: Path, rules: Rules, *, keep: str | None = None) -> tuple[pd.DataFrame, FileColumns, list[str]]:
    """Returns the table in a file with typed columns, how its cells were read, and what reading changed.

    Args:
      file: the file.
      rules: how it is read.
      keep: name of a column in which dates stay text, or None.

    Raises:
      DataError: for a file that cannot be read.
      ImportError: for Parquet without pyarrow.
    """
    rows, said = read_rows(file, rules)
    if file.suffix == ".parquet":
        for name in set(rules.text) & set(rows.columns):
            if pd.api.types.is_datetime64_any_dtype(rows[name]):
                raise DataError(
                    f"--text must name columns of text or numbers, got {checks.quoted(name)}, which has dates"
                )
            rows[name] = rows[name].astype("category")
        return rows, FileColumns({}, {}, {}), said
    cells = {name: rows[name].to_numpy(object) for name in rows}
    read = read_cells(cells, decimal=rules.decimal, order=rules.order, text=rules.text)
    typed = {name: _typed(raw, cells[name], dates=name != keep) for name, raw in read.columns.items()}
    return pd.DataFrame(typed, index=rows.index), read, said


def numbers_of(name: str, cells: Any, rules: Rules) -> np.ndarray:
    """Returns the cells of a column as numbers.

    Raises:
      DataError: for a cell that is none, naming the column and the row.
    """
    values, wrong = Reading("numeric", decimal=rules.decimal).read(cells.tolist())
    if wrong.any():
        row = int(np.argmax(wrong))
        cell = f"{checks.quoted(cells.iloc[row])} in row {row}"
        raise DataError(f"x must hold numbers in column {checks.quoted(name)}, got {cell}")
    return values


def _typed(raw: RawColumn, cells: np.ndarray, *, dates: bool) -> Any:
    """Returns a column as an array of pandas; ``dates``: whether dates are such."""
    if raw.kind == "text":
        return pd.Categorical(cells) if raw.of == "levels" else pd.Series(cells, dtype=object)
    if raw.kind == "boolean":
        values = pd.array(np.where(raw.missing, False, raw.values != 0), dtype="boolean")
        values[raw.missing] = pd.NA
        return values if raw.missing.any() else values.to_numpy(bool)
    if raw.kind == "date" and not dates:
        return pd.Series(cells, dtype=object)
    if raw.kind == "date":  # local ones: the columns of a model know of offsets
        days = np.where(raw.missing, 0, np.round(raw.values * _DAY)).astype("datetime64[ms]")
        local = pd.Series(np.where(raw.missing, np.datetime64("NaT", "ms"), days))
        return local if raw.zone is None else local.dt.tz_localize("UTC")  # which keeps the local clock
    whole = all(cell is not None and len(cell) < 18 and cell.lstrip("+-").isdigit() for cell in cells)
    return raw.values.astype(np.int64) if whole else raw.values


def _read_parquet(file: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(file)
    except ImportError as error:
        raise ImportError('Parquet needs pyarrow: pip install "jtrees[cli]"') from error
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or one_line(error)}") from error
    except ValueError as error:  # pyarrow's own errors are some
        raise DataError(f"cannot read {file}: {one_line(error)}") from error
    frame.columns = pd.Index([str(name) for name in frame.columns])
    return frame


def one_line(error: Exception) -> str:
    """The message of an error on one line, or its kind."""
    return " ".join(str(error).split()) or type(error).__name__
