"""Reading of tables from CSV and Parquet files, with clear errors for unreadable files."""

import codecs
from collections.abc import Mapping
import csv
from dataclasses import dataclass, field
from decimal import Decimal
from io import StringIO
from pathlib import Path
import re
from typing import Any
import warnings

import pandas as pd

from jtrees import validation as checks
from jtrees.tables.cells import MISSING
from jtrees.tables.frame import KINDS
from jtrees.tables.inference import checked_missing

# Patterns of the first bytes of other formats, and how to get a file that can be read. Some encodings would read their
# bytes as text.
_OTHER_FORMATS = (
    (b"\x1f\x8b", "a gzip file", "decompress it, such as by gunzip"),
    (b"PK\x03\x04", "an Excel or zip file", "save the table as CSV"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an Excel file", "save the table as CSV"),
    (b"PAR1\x15", "Parquet under another name", "give it the ending .parquet"),
    (b"ARROW1", "an Arrow or Feather file", "save the table as Parquet or CSV"),
    (rb'\s*[\[{]\s*["\[{]', "a JSON file", "save the table as CSV"),
)


class DataError(ValueError):
    """The requested data is not available; the message gives the reason and the available data."""


@dataclass(frozen=True)
class Rules:
    """How a file is read.

    Attributes:
      separator: the field separator of CSV.
      decimal: the decimal separator of CSV; None: as the cells of each column say.
      encoding: the character encoding of CSV.
      missing: texts that mean a missing value in every feature of CSV, as for :func:`jtrees.tables.schema`.
      columns: requested kinds of columns, as for :func:`jtrees.tables.schema`.
    """

    separator: str = ","
    decimal: str | None = None
    encoding: str = "utf-8"
    missing: tuple[str, ...] = MISSING
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing_labels(self) -> tuple[str, ...]:
        """The user's texts that mean a missing value in labels and in Parquet. They may include ``None``."""
        return self.missing[len(MISSING) :] if self.missing[: len(MISSING)] == MISSING else self.missing


def rules_of(options: Any) -> Rules:
    """Returns the rules for reading a file.

    Raises ``DataError`` for an invalid separator, for equal separators, and for kinds that are not ``COLUMN=KIND``.
    """
    decimal = options.decimal
    if decimal not in (".", ",", None):
        raise DataError(f"--decimal must be a point or a comma, got {checks.quoted(decimal)}")
    separator = "\t" if options.separator == "\\t" else options.separator
    if decimal == separator:
        raise DataError(f"--decimal and --separator must differ, got {checks.quoted(decimal)} for both")
    if len(separator) != 1:
        raise DataError(f"--separator must be one character, got {checks.quoted(options.separator)}")
    missing = ("",) if options.missing == [] else (*MISSING, *checked_missing(options.missing or ()))
    kinds = {}
    for argument in getattr(options, "columns", ()):
        name, equals, kind = argument.rpartition("=")
        if not equals or kind not in KINDS:
            among = ", ".join(KINDS)
            raise DataError(f"--columns must be COLUMN=KIND with a kind among {among}, got {checks.quoted(argument)}")
        if kinds.setdefault(name, kind) != kind:
            raise DataError(f"--columns must have one kind for each column, got two for {checks.quoted(name)}")
    return Rules(separator, decimal, options.encoding, missing, kinds)


def read_rows(file: Path, rules: Rules) -> tuple[pd.DataFrame, list[str]]:
    """Returns the rows in a file, and a list of the changes made while reading, as lines of text.

    A file whose name ends in ``.parquet`` is Parquet, which needs pyarrow. Every other file is CSV. Cells of CSV are
    text without spaces at the ends, and None if they are empty. Raises ``DataError`` if the file cannot be read.
    """
    if is_parquet(file):
        return _read_parquet(file), []
    frame, changes = _read_csv(file, rules)
    stripped: dict[str, int] = {}
    for name in frame:
        cells = frame[name].to_list()
        short = [(cell.strip() or None) if isinstance(cell, str) else None for cell in cells]  # a short row lacks cells
        stripped[name] = sum(a is not None and a != b for a, b in zip(short, cells, strict=True))
        frame[name] = pd.Series(short, dtype=object)
    if any(stripped.values()):
        which = checks.quoted_list(name for name, count in stripped.items() if count)
        times = checks.number_of(sum(stripped.values()), "time")
        changes.append(f"spaces at the ends of cells are left out, {times}, in {which}")
    return frame, changes


def is_parquet(file: Path) -> bool:
    """Returns whether a file is Parquet, not CSV."""
    return file.suffix == ".parquet"


def _read_csv(file: Path, rules: Rules) -> tuple[pd.DataFrame, list[str]]:
    """Returns the cells of CSV with a header as text, and a line of text if rows are short."""
    text, separator, first_line = _decoded(file, rules.encoding), rules.separator, 1
    if line := re.match(r'"?sep=(.)"?\r?\n', text, re.IGNORECASE):  # Excel writes it
        text, separator, first_line = text[line.end() :], line[1], 2
    # If rows end in a separator, pandas would otherwise use the first column as an index.
    options: Any = {"sep": separator, "dtype": str, "keep_default_na": False, "na_values": [""]}
    options |= {"skipinitialspace": True, "index_col": False}
    names: list[str] = []
    try:
        # The header is read separately, because rows may have different lengths if the separator is wrong.
        header = pd.read_csv(StringIO(text), nrows=1, header=None, **options)
        cells = [cell.strip() if isinstance(cell, str) else "" for cell in header.iloc[0]] if len(header) else [""]
        names += [name or f"Unnamed: {place}" for place, name in enumerate(cells)]
        other = next((c for c in (";", "\t", "|", ",") if c != separator and c in names[0]), None)
        wrong = len(names) == 1 and other is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Length of header", pd.errors.ParserWarning)
            # A blank line is a row with an empty cell if the table has one column. Otherwise it is ignored.
            blank: Any = re.match(r"(?:[ \t]*\r?\n)*", text)
            how = {"skip_blank_lines": len(names) > 1, "header": blank[0].count("\n") if len(names) == 1 else 0}
            frame: Any = pd.read_csv(StringIO(text), nrows=0 if wrong else None, **how, **options)
    except pd.errors.ParserWarning as error:
        named = checks.quoted_list(names)
        raise DataError(f"{file}: rows have more fields than the header, which names {named}") from error
    except ValueError as error:
        raise DataError(f"cannot read {file}: {one_line(error)}") from error
    if wrong:
        raise DataError(f"{file} has one column, {checks.quoted(names[0])}: try --separator {checks.quoted(other)}")
    if (repeated := checks.first_repeated(names)) is not None:
        raise DataError(f"{file} must have columns of different names, got {checks.quoted(repeated)} twice")
    frame.columns = pd.Index(names)
    # A short row lacks the last cell.
    short = _short_rows(text, separator, len(names)) if len(names) > 1 and frame[names[-1]].isna().any() else []
    if not short:
        return frame, []
    rows = "1 row has" if len(short) == 1 else f"{len(short)} rows have"
    return frame, [f"{rows} fewer fields than the header, the first in line {first_line + short[0]}"]


def _short_rows(text: str, separator: str, width: int) -> list[int]:
    """Returns the number of lines above each row of CSV with fewer fields than ``width``. pandas pads such rows."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # pandas has no limit
    # The module refuses to skip spaces that separate fields.
    reader = csv.reader(StringIO(text, newline=""), delimiter=separator, skipinitialspace=separator != " ")
    short, lines = [], 0
    for row in reader:
        if len(row) < width and (len(row) > 1 or "".join(row).strip()):  # a blank line is none
            short.append(lines)
        lines = reader.line_num
    return short


def _decoded(file: Path, encoding: str) -> str:
    try:
        contents = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror or one_line(error)}") from error
    for start, kind, remedy in _OTHER_FORMATS:
        if re.match(start, contents):
            raise DataError(f"{file} must be CSV or Parquet, got {kind}: {remedy}")
    try:
        marked, null = contents.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)), contents[:100].find(0)
        if (marked or null >= 0) and not codecs.lookup(encoding).name.startswith(("utf-16", "utf-32")):
            reason, name = "it is UTF-16: use", "utf-16"
            if not marked:  # the zero byte of a pair with an ASCII character gives the order
                reason, name = "it has zero bytes, as UTF-16: try", "utf-16-le" if null % 2 else "utf-16-be"
            raise DataError(f"cannot read {file} as {encoding}, because {reason} --encoding {name}")
        return contents.decode(encoding).removeprefix("\ufeff")  # the byte-order mark
    except UnicodeDecodeError as error:
        where = f"byte {contents[error.start]:#04x} at {error.start}"
        raise DataError(f"cannot read {file} as {encoding} ({where}): try --encoding latin-1") from error
    except LookupError as error:
        raise DataError(f"--encoding must be the name of an encoding, got {checks.quoted(encoding)}") from error


def _read_parquet(file: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(file)
        frame = frame.reset_index([name for name in frame.index.names if name is not None]).reset_index(drop=True)
    except ImportError as error:
        raise ImportError('Parquet needs pyarrow: pip install "jtrees[cli]"') from error
    except (OSError, ValueError, NotImplementedError) as error:  # errors of pyarrow are of these classes
        reason = getattr(error, "strerror", None) or one_line(error)
        raise DataError(f"cannot read {file}: {reason}") from error
    frame.columns = pd.Index([str(name) for name in frame.columns])
    for name in frame:
        if frame[name].dtype == "object" and any(isinstance(value, Decimal) for value in frame[name]):
            frame[name] = pd.to_numeric(frame[name])
    return frame


def one_line(error: Exception) -> str:
    """Returns the message of an error on one line, or the name of its class if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__
