"""Tables that exceed the memory, as blocks of rows with random access: generated, or read from shards."""

from collections.abc import Callable, Iterator
import contextlib
from functools import lru_cache
import os
from pathlib import Path
from typing import Any
import zlib

import numpy as np

_KEPT = 4  # row groups that stay in memory
_MUCH = 0.01  # share of unused rows above which the note recommends another block

_MOST = float(np.finfo(np.float32).max)

# Features (rows, p) and targets (rows,): float32 if float32 holds every number, else float64; classes are int32.
Block = tuple[np.ndarray, np.ndarray]


class DataError(ValueError):
    """The data or the options do not allow the run; the message says why."""


class Blocks:
    """A table in blocks with equal numbers of rows.

    Attributes:
      names: names of the features.
      described: plain data that must not change when a run is resumed.
      notes: messages for the user about the table.
      stamps: size and time of modification of each file, by its name.
    """

    names: list[str]
    described: dict[str, Any]
    notes: list[str]
    stamps: dict[str, list[int]]

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, i: int) -> Block:
        raise NotImplementedError

    def where(self, i: int, row: int) -> str:
        """Returns the place of a row of block i, for error messages."""
        return f"block {i}, row {row} (from 0)"

    def file(self, i: int) -> str:
        """Returns the name of the file of block i; an empty text if there are no files."""
        return ""


class Checked:
    """A table that records a checksum of every block that is read, and refuses a block that has changed.

    Attributes:
      table: the table.
      checksums: a checksum of each block, ``(blocks,)`` uint32; 0 for a block that was not read.
    """

    def __init__(self, table: Blocks):
        """Wraps a table of which no block was read."""
        self.table, self.checksums = table, np.zeros(len(table), np.uint32)

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, i: int) -> Block:
        block = self.table[i]
        # Numbers are compared as they are read, so the byte order of a file does not matter.
        checksum = 0
        for part in block:
            checksum = zlib.crc32(np.ascontiguousarray(part).data, checksum)
        if self.checksums[i] not in (0, checksum := checksum or 1):
            raise self.changed(i)
        self.checksums[i] = checksum
        return block

    def changed(self, i: int) -> DataError:
        """Returns the error for block i, which has changed."""
        return DataError(
            f"{self.table.where(i, 0)}: the block that begins there has changed since the run read it; restore the "
            "data, or give another --out"
        )


class Synthetic(Blocks):
    """Rows generated on demand, always the same: a function with bends along two hyperplanes, plus noise."""

    def __init__(self, rows: int, p: int, block: int, seed: int = 0, classes: bool = False):
        self.rows, self.p, self.block, self.seed, self.classes = rows, p, block, seed, classes
        self.described = dict(vars(self))
        self.names, self.notes, self.stamps = [f"x{i}" for i in range(p)], [], {}

    def __len__(self) -> int:
        return self.rows // self.block

    def __getitem__(self, i: int) -> Block:
        rng = np.random.default_rng([self.seed, i])
        x = rng.standard_normal((self.block, self.p), dtype=np.float32)
        planes = np.random.default_rng(self.seed).standard_normal((self.p, 3), dtype=np.float32)
        a, b, c = (x @ (planes / np.float32(self.p**0.5))).T
        y = np.where(a > 0, np.abs(b), c) + 0.1 * rng.standard_normal(self.block, dtype=np.float32)
        return x, (y > 0.3).astype(np.int32) if self.classes else y


class Shards(Blocks):
    """A folder of ``.npy`` files ``(rows, p + 1)`` with the target last, or of Parquet files of numbers.

    A block lies within one shard. Rows at the end of a shard that do not fill a block are unused. Parquet files are
    read in whole row groups, and the last few groups stay in memory: a row group should not be much larger than a
    block.
    """

    def __init__(
        self, folder: Path, block: int, target: str | None = None, classes: bool = False, batch: int | None = None
    ):
        """Reads the metadata of the shards, but no rows.

        Args:
          folder: a folder on a disk, or an ``etils.epath.Path`` of a bucket with Parquet shards.
          block: rows of a block.
          target: name of the target column of Parquet files.
          classes: whether the targets are classes.
          batch: a divisor of the block sizes that a note may recommend.

        Raises:
          DataError: the folder has no shards or cannot be read, the shards have different columns, or a target is named
            for shards without names.
        """
        kinds = {".npy": _Npy, ".parquet": _Parquet}
        try:
            files = sorted(file for file in folder.iterdir() if file.suffix in kinds)
        except OSError as error:
            raise DataError(f"cannot read {folder}: {error.strerror}") from error
        if not files:
            raise DataError(f"{folder} has no shards: .npy or .parquet files")
        self.block, self.classes = block, classes
        self.stamps = {file.name: _stamp(file) for file in files}
        self._shards: list[Any] = [kinds[file.suffix](file, target) for file in files]
        self._group = lru_cache(maxsize=_KEPT)(lambda shard, i: self._shards[shard].group(i))
        self.names = self._shards[0].names
        for shard in self._shards[1:]:
            if sorted(shard.names) != sorted(self.names):
                names, expected = (f"{s.file.name} has {_column_list(s.names)}" for s in (shard, self._shards[0]))
                differ = ", ".join(sorted(set(shard.names) ^ set(self.names))[:3])
                raise DataError(
                    f"shards must have the same columns, but {names} and {expected}: not in both is {differ}"
                )
            shard.names = self.names  # Parquet columns are read by name, in the order of the first shard
        self._ends = np.cumsum([shard.rows // block for shard in self._shards])
        self.notes = []
        sizes = np.array([shard.rows for shard in self._shards])
        if left_out := int((sizes % block).sum()):
            share = left_out / sizes.sum()
            note = f"{left_out} rows at the ends of shards fill no block of {block}: they are not used"
            advice = _advice(sizes, block, batch or block) if share > _MUCH else ""
            self.notes.append(f"{note} ({100 * share:.2g} % of all){advice}")
        if (largest := max(shard.largest for shard in self._shards)) > 4 * block:
            note = f"row groups of up to {largest} rows are read whole for each block of {block}"
            self.notes.append(f"{note}: write the shards with smaller ones, or take a larger --block")
        rows = {shard.file.name: shard.rows for shard in self._shards}
        self.described = {"shards": rows, "names": self.names, "block": block, "target": target, "classes": classes}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, i: int) -> Block:
        k, first = self._place(i)
        shard = self._shards[k]
        try:
            x, y = shard.read(first, self.block, lambda group: self._group(k, group))
        except FileNotFoundError as error:
            raise DataError(f"the shard {shard.file} is missing") from error
        except DataError:
            raise
        except Exception as error:  # NumPy and Arrow raise many kinds
            raise DataError(f"the shard {shard.file} cannot be read: {error}") from error
        within = (np.abs(x) <= _MOST).all(1) & (np.abs(y) <= _MOST)
        if not within.all():
            row = int(np.argmin(within))
            numbers = np.append(x[row], y[row])
            expected = "finite, got NaN or infinity"
            if np.isfinite(numbers).all():
                expected = f"within the range of float32, got {np.abs(numbers).max():.3g}"
            raise DataError(f"{self.where(i, row)}: every number must be {expected}")
        if not self.classes:
            return x, y
        if (bad := (y < 0) | (y != np.round(y)) | (y > np.iinfo(np.int32).max)).any():
            row = int(np.argmax(bad))
            raise DataError(f"{self.where(i, row)}: classes must be 0, 1, ..., got {y[row]}")
        return x, y.astype(np.int32)

    def where(self, i: int, row: int) -> str:
        k, first = self._place(i)
        return f"{self._shards[k].file}, row {first + row} (from 0)"

    def file(self, i: int) -> str:
        return self._shards[self._place(i)[0]].file.name

    def _place(self, i: int) -> tuple[int, int]:
        """Returns the number of the shard of block i, and the block's first row in the shard."""
        k = int(np.searchsorted(self._ends, i, side="right"))
        return k, int(i - (self._ends[k - 1] if k else 0)) * self.block


def _advice(sizes: np.ndarray, block: int, batch: int) -> str:
    """Returns advice on a block of half to twice the size that leaves fewer rows unused, or an empty text."""
    steps = batch * np.arange(max(1, -(-block // (2 * batch))), 2 * block // batch + 1)
    left_out = (sizes[:, None] % steps).sum(0) / sizes.sum()
    if len(steps) == 0 or left_out.min() > (sizes % block).sum() / sizes.sum() / 2:
        return ""
    best = len(steps) - 1 - int(np.argmin(left_out[::-1]))
    return f"; with --block {steps[best]} it is {100 * left_out[best]:.2g} %"


def _stamp(file: Path) -> list[int]:
    """Returns the size and the time of modification of a file on a disk or in a bucket."""
    if "://" in str(file):
        of_bucket: Any = file.stat()
        return [of_bucket.length, of_bucket.mtime]
    status = os.stat(file)
    return [status.st_size, status.st_mtime_ns]


def _column_list(names: list[str]) -> str:
    return f"{len(names)} features, " + ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _precision(*kinds: Any) -> Any:
    """Returns the dtype of rows that hold numbers of these dtypes."""
    return np.float32 if all(np.can_cast(kind, np.float32) for kind in kinds) else np.float64


class _Npy:
    """A shard of NumPy, memory-mapped."""

    def __init__(self, file: Path, target: str | None):
        self.file = file
        if "://" in str(file):
            raise DataError(f"{file} cannot be read in parts where it is: copy it to a disk, or write Parquet")
        try:
            shape, kind = (rows := np.load(file, mmap_mode="r")).shape, rows.dtype.kind
        except Exception as error:  # a file that is not an array leads to many kinds of errors
            raise DataError(f"the shard {file} cannot be read: {error}") from error
        if len(shape) != 2 or shape[1] < 2 or kind not in "fiu":
            raise DataError(
                f"{file} must hold numbers (rows, p + 1), the target last, got {rows.dtype} of shape {shape}"
            )
        if target is not None:
            raise DataError(f"--target is for Parquet: in {file} the last column is the target, got {target!r}")
        self.rows, self.names, self.largest = shape[0], [f"x{i}" for i in range(shape[1] - 1)], 0

    def read(self, first: int, count: int, group: Any) -> Block:
        """Returns some of the rows."""
        rows = np.load(self.file, mmap_mode="r")[first : first + count]
        rows = np.asarray(rows, _precision(rows.dtype))
        if rows.shape != (count, len(self.names) + 1):
            raise DataError(f"the shard {self.file} has changed: rows {first} to {first + count} are {rows.shape}")
        return rows[:, :-1], rows[:, -1]


@contextlib.contextmanager
def _parquet(file: Path, **options: Any) -> Iterator[Any]:
    """Opens a file on a disk or in a bucket."""
    import pyarrow.parquet as pq

    with file.open("rb") as source, pq.ParquetFile(source, **options) as parquet:
        yield parquet


class _Parquet:
    """A shard of Parquet; reads only the row groups that overlap a block."""

    def __init__(self, file: Path, target: str | None):
        import pyarrow as pa

        self.file, self.target = file, target
        try:
            with _parquet(file) as parquet:
                schema, meta = parquet.schema_arrow, parquet.metadata
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"the shard {file} cannot be read: {error}") from error
        if target is None or target not in schema.names:
            raise DataError(f"--target must be a column of {file.name}, {_column_list(schema.names)}; got {target!r}")
        numbers = lambda kind: pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
        if text := [field.name for field in schema if not numbers(field.type)]:
            raise DataError(f"{file}: every column must hold numbers, got {schema.field(text[0]).type} in {text[0]!r}")
        self.names = [name for name in schema.names if name != target]
        self.rows, self._meta = meta.num_rows, meta
        sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        self._ends, self.largest = np.cumsum(sizes), max(sizes, default=0)

    def read(self, first: int, count: int, group: Callable[[int], np.ndarray]) -> Block:
        """Returns some of the rows; ``group`` returns a row group, which the caller may cache."""
        low, high = np.searchsorted(self._ends, [first, first + count - 1], side="right")
        groups = [group(int(i)) for i in range(low, high + 1)]
        before = int(self._ends[low - 1]) if low else 0
        rows = np.concatenate(groups)[first - before : first - before + count]
        return rows[:, :-1], rows[:, -1]

    def group(self, i: int) -> np.ndarray:
        """Returns a row group with the target last; missing values are NaN."""
        names = [*self.names, self.target]
        with _parquet(self.file, metadata=self._meta) as parquet:
            table = parquet.read_row_group(i, columns=names, use_threads=False)
        columns = [table[name].to_numpy() for name in names]
        rows = np.empty((len(names), table.num_rows), _precision(*(column.dtype for column in columns)))
        for row, column in zip(rows, columns, strict=True):
            row[:] = column
        return np.ascontiguousarray(rows.T)
