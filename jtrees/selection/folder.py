"""Folders of runs: a sweep writes each finished run to files, and continues with the other runs after it was ended."""

from collections.abc import Mapping, Sequence
import copy
import dataclasses
import functools
import hashlib
import inspect
import io as streams
import itertools
import json
import os
import re
import types
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array
import numpy as np

from jtrees import distributed, io
from jtrees.search import Recipe
from jtrees.search.fit import FitResult, Split
from jtrees.selection.grid import options_of
from jtrees.validation import quoted

_DESCRIPTION = "sweep.json"
_CONTEXT = 20  # characters before a difference that a message shows


class RunResult(NamedTuple):
    """The result of a run.

    Attributes:
      fit: the fit; None if the run was not finite, or if a folder holds no fit.
      row_losses: loss on each held-out row. It is infinite if the run was not finite, and empty if there are no
        held-out rows.
      loss: the mean loss on the held-out rows, else the loss of the fit; infinite if the run was not finite.
      size: number of parameters of the model; NaN if the run was not finite.
      state: ``"finished"``, ``"interrupted"`` by Ctrl-C or a deadline, or ``"diverged"``.
      seconds: seconds of the run; of concurrent runs, an equal share of their seconds.
    """

    fit: FitResult | None
    row_losses: np.ndarray
    loss: float
    size: float
    state: str
    seconds: float


class RunFolder:
    """The files of the runs of a sweep, on a disk or in a bucket.

    ``sweep.json`` describes what all runs share. A finished run has a JSON file with its options, seed, fold and
    numbers, and a file of its fit or of its row losses. The JSON file is written last, so a run that has a JSON file is
    complete.

    Args:
      path: the folder, which is made if it does not exist.
      description: what all runs share, by name, as text.
      keeps: what a run keeps besides its numbers, ``"fits"`` or ``"row losses"``. A fit that cannot be saved is left
        out.
      share: ``(k, n)``: this process makes the k-th of n shares of the runs.
      splits: the split of each fold. Names of files depend on the training rows.

    Raises:
      ValueError: if the folder holds runs with another description. The message names what differs.
      OSError: if the folder cannot be read or written.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        description: Mapping[str, str],
        keeps: Literal["fits", "row losses"],
        share: tuple[int, int],
        splits: Sequence[Split],
    ):
        self._path, self._keeps, (self._part, self._parts) = io.as_path(path), keeps, share
        self._rows = _row_checksums(splits)
        description = {"runs": keeps, **description}
        self._checksum = checksum(sorted(description.items()))
        if distributed.is_first():
            self._path.mkdir(parents=True, exist_ok=True)
        file = self._path / _DESCRIPTION
        if file.exists():
            _check_same(json.loads(file.read_text()), description, os.fspath(path))
        elif distributed.is_first():
            self._write(_DESCRIPTION, json.dumps(description, indent=1).encode())

    def on(self, splits: Sequence[Split]) -> "RunFolder":
        """Returns the same folder for runs on other splits, such as splits with fewer training rows."""
        folder = copy.copy(self)
        folder._rows = _row_checksums(splits)
        return folder

    def read(self, name: str) -> RunResult | None:
        """Returns a finished run, or None. All processes must read the same runs in the same order."""
        try:
            run = self._run(name)
        except (OSError, ValueError, KeyError, EOFError):  # the run is missing, or a file is damaged: it is made again
            run = None
        return run if distributed.minimum(float(run is not None)) else None

    def _run(self, name: str) -> RunResult:
        """Returns a finished run; raises an error if a file is missing or damaged."""
        numbers, fit, row_losses = json.loads((self._path / f"{name}.json").read_text()), None, np.zeros(0)
        if self._keeps == "row losses":
            row_losses = np.load(streams.BytesIO((self._path / f"{name}.npy").read_bytes()), allow_pickle=False)
        elif (file := self._path / f"{name}.jtrees").exists():
            fit = io.load(file)
        return RunResult(fit, row_losses, *(numbers[field] for field in ("loss", "size", "state", "seconds")))

    def is_mine(self, name: str) -> bool:
        """Returns whether a run is in the share of this process. Names are checksums, so shares are about equal."""
        return int(name, 16) % self._parts == self._part

    def run_name(self, options: Mapping[str, Any], seed: int, fold: int) -> str:
        """Returns the name of a run's files: a checksum of the description, options, seed and training rows."""
        return checksum([self._checksum, _text(sorted(options.items())), seed, self._rows[fold]])

    def write(self, name: str, run: RunResult, identity: dict[str, Any]) -> None:
        """Writes a finished run. ``identity`` has its options, its seed and its fold."""
        if run.state == "interrupted" or not distributed.is_first():
            return
        if self._keeps == "row losses":
            np.save(stream := streams.BytesIO(), run.row_losses, allow_pickle=False)
            self._write(f"{name}.npy", stream.getvalue())
        elif run.fit is not None and io.is_data(run.fit.model):
            io.save(run.fit, self._path / f"{name}.jtrees")
        numbers = {"loss": run.loss, "size": run.size, "state": run.state, "seconds": round(run.seconds, 3)}
        self._write(f"{name}.json", json.dumps(identity | numbers, default=_text).encode())

    def _write(self, name: str, contents: bytes) -> None:
        with io.written_whole(self._path / name) as file:
            file.write(contents)


def folder_of(
    folder: str | os.PathLike | None,
    share: tuple[int, int],
    recipe: Recipe,
    key: Array,
    splits: Sequence[Split],
    keeps: Literal["fits", "row losses"],
    **arguments: Any,
) -> RunFolder | None:
    """Returns the folder of the runs of a sweep, or None; ``arguments`` are what all runs share besides the rows.

    Raises:
      ValueError: if the share is not ``(k, n)`` with 0 <= k < n, or if there is a share without a folder. Also in the
        cases of :class:`RunFolder`.
    """
    is_pair = (
        isinstance(share, (tuple, list)) and len(share) == 2 and all(isinstance(k, (int, np.integer)) for k in share)
    )
    if not is_pair or not 0 <= share[0] < share[1]:
        raise ValueError(f"share must be (k, n) with whole numbers 0 <= k < n, got {quoted(share)}")
    if folder is None:
        if share[1] > 1:
            raise ValueError(f"folder must be given with a share, got None and the share {share}")
        return None
    part, parts = map(int, share)
    return RunFolder(folder, _description(recipe, key, splits, **arguments), keeps, (part, parts), splits)


def _check_same(kept: Mapping[str, str], description: Mapping[str, str], folder: str) -> None:
    """Raises ``ValueError`` if two descriptions differ; the message has the first difference."""
    for name in {**kept, **description}:
        before, now = kept.get(name, "none"), description.get(name, "none")
        if before != now:
            # The texts may be longer than what a message quotes, so they begin shortly before they differ.
            equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False))
            start = max(0, len(list(equal)) - _CONTEXT)
            before, now = (f"...{text[start:]}" if start else text for text in (before, now))
            raise ValueError(
                f"folder must hold runs of this sweep: {quoted(folder)} has {name} {quoted(before)}, got {quoted(now)}"
            )


def _description(recipe: Recipe, key: Array, splits: Sequence[Split], **arguments: Any) -> dict[str, str]:
    """Returns what all runs of a sweep share, by name: the recipe, the key, the rows and further arguments."""
    tables = [split.table for split in splits]
    held_out = [(table.x, table.y, table.weight) for split in splits if (table := split.evaluated) is not None]
    rows = {
        "x": [table.x for table in tables],
        "y": [table.y for table in tables],
        "sample_weight": [table.weight for table in tables],
        "monotone": [table.monotone for table in tables],
        "validation": held_out,
    }
    texts = {name: "none" if value is None else _text(value) for name, value in arguments.items()}
    key_text = str(np.asarray(jax.random.key_data(key)).tolist())
    checksums = {name: checksum(arrays) for name, arrays in rows.items()}
    encoder = tables[0].encoder
    schema = None if encoder is None else {**encoder.schema.columns, "": encoder.schema.missing}
    about = {"task": _text(tables[0].task), "columns": checksum(_text(schema))}
    return {"recipe": type(recipe).__name__, **_option_texts(recipe), "key": key_text, **texts, **about, **checksums}


def _option_texts(recipe: Any, prefix: str = "") -> dict[str, str]:
    """Returns the options of a recipe and of its base recipes as text, by their full names."""
    texts = {}
    for name, value in options_of(recipe).items():
        full = f"{prefix}{name}"
        is_recipe = isinstance(value, Recipe)
        texts[full] = type(value).__name__ if is_recipe else _text(value)
        texts |= _option_texts(value, f"{full}__") if is_recipe else {}
    return texts


def _row_checksums(splits: Sequence[Split]) -> list[str]:
    """Returns the checksum of the training rows of each split."""
    return [checksum([split.table.x, split.table.y, split.table.weight]) for split in splits]


def _text(value: Any, around: tuple[Any, ...] = ()) -> str:
    """Returns a value as text that is equal in all processes, and differs for functions with different code.

    ``around`` are the functions whose text is being made, because a recursive function holds itself.
    """
    text = functools.partial(_text, around=around)
    if isinstance(value, (np.ndarray, jax.Array)):
        return f"array {checksum(np.asarray(value))}"
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, functools.partial):
        return f"partial({text([value.func, value.args, value.keywords])})"
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__} {_code_checksum(value, around)}"
    if callable(value) and hasattr(value, "__wrapped__"):  # such as a function under jit
        return text(value.__wrapped__)
    if isinstance(value, types.CodeType):
        return text([value.co_code.hex(), value.co_consts, value.co_names])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}({text({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{text(name)}: {text(item)}' for name, item in value.items())}}}"
    if isinstance(value, (set, frozenset)):  # the order of text in a set differs between processes
        return f"set({sorted(map(text, value))})"
    if isinstance(value, (list, tuple)):
        texts = ", ".join(map(text, value))
        return f"[{texts}]" if isinstance(value, list) else f"({texts})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _code_checksum(function: types.FunctionType, around: tuple[Any, ...]) -> str:
    """Returns the checksum of a function's code, defaults and closure."""
    if function in around:
        return "itself"
    closure = inspect.getclosurevars(function).nonlocals
    parts = [function.__code__, function.__defaults__, function.__kwdefaults__, closure]
    return checksum(_text(parts, (*around, function)))


def checksum(values: Any) -> str:
    """Returns a checksum of nested lists and tuples of arrays, numbers and text."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            digest.update(f"[{len(value)}".encode())
            for item in value:
                add(item)
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(repr(value).encode())

    add(values)
    return digest.hexdigest()[:16]
