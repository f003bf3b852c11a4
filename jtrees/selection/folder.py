"""Folders of runs: a sweep writes each finished run to files, and continues with the other runs after it was ended."""

from collections.abc import Mapping, Sequence
import contextlib
import copy
import io as streams
import json
import os
from typing import Any, Literal, NamedTuple

import jax
from jaxtyping import Array
import numpy as np

from jtrees import __version__, distributed, io
from jtrees.search import Recipe
from jtrees.search.fit import FitResult, Fold
from jtrees.selection.definition import checksum, definition
from jtrees.selection.grid import all_options
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
    numbers, and a file of its fit or of its row losses. The JSON file is written last, and says whether there is a file
    of the fit. A run is finished if its files are complete.

    ``keeps`` is ``"fits"``, of which those that cannot be saved are left out, or ``"row losses"``. This process makes
    share ``(k, n)`` of the runs, the k-th of n. Names of files depend on the training rows of the splits.
    ``ValueError`` is raised if ``sweep.json`` cannot be read, or has another description; the message names what
    differs.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        description: Mapping[str, str],
        keeps: Literal["fits", "row losses"],
        share: tuple[int, int],
        splits: Sequence[Fold],
    ):
        self._path, self._keeps, (self._part, self._parts) = io.as_path(path), keeps, share
        self._rows = _row_checksums(splits)
        description = {"runs": keeps, **description}
        self._checksum = checksum(sorted(description.items()))
        if distributed.is_first():
            self._path.mkdir(parents=True, exist_ok=True)
        file = self._path / _DESCRIPTION
        if file.exists():
            _check_same(file, description, os.fspath(path))
        elif distributed.is_first():
            io.write_file(file, json.dumps(description, indent=1))

    def on(self, splits: Sequence[Fold]) -> "RunFolder":
        """Returns the same folder for runs on other splits, such as splits with fewer training rows."""
        folder = copy.copy(self)
        folder._rows = _row_checksums(splits)
        return folder

    def read(self, name: str) -> RunResult | None:
        """Returns a finished run, or None. All processes must read the same runs in the same order."""
        run, fit, row_losses = None, None, np.zeros(0)
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # missing or damaged: it is run again
            numbers = json.loads((self._path / f"{name}.json").read_text())
            if self._keeps == "row losses":
                stream = streams.BytesIO((self._path / f"{name}.npy").read_bytes())
                row_losses = np.lib.format.read_array(stream, allow_pickle=False)
            elif numbers["has_fit"]:
                fit = io.load(self._path / f"{name}.jtrees")
            loss, size, seconds = (float(numbers[field]) for field in ("loss", "size", "seconds"))
            run = RunResult(fit, row_losses, loss, size, str(numbers["state"]), seconds)
        return run if distributed.minimum(float(run is not None)) else None

    def is_mine(self, name: str) -> bool:
        """Returns whether a run is in the share of this process. Names are checksums, so shares are about equal."""
        return int(name, 16) % self._parts == self._part

    def run_name(self, options: Mapping[str, Any], seed: int, fold: int) -> str:
        """Returns the name of a run's files: a checksum of the description, options, seed and training rows."""
        return checksum([self._checksum, _options_text(options), seed, self._rows[fold]])

    def write(self, name: str, run: RunResult, identity: dict[str, Any]) -> None:
        """Writes a finished run. ``identity`` has its options, its seed and its fold."""
        if run.state == "interrupted" or not distributed.is_first():
            return
        has_fit = False
        if self._keeps == "row losses":
            np.save(stream := streams.BytesIO(), run.row_losses, allow_pickle=False)
            io.write_file(self._path / f"{name}.npy", stream.getvalue())
        elif run.fit is not None:
            with contextlib.suppress(ValueError):  # a model or a report that is not data costs the file of its fit
                io.save(run.fit, self._path / f"{name}.jtrees")
                has_fit = True
        numbers = {"loss": run.loss, "size": run.size, "state": run.state, "seconds": round(run.seconds, 3)}
        contents = json.dumps(identity | numbers | {"has_fit": has_fit}, default=repr)
        io.write_file(self._path / f"{name}.json", contents)


def folder_of(
    folder: str | os.PathLike | None,
    share: tuple[int, int],
    recipe: Recipe,
    key: Array,
    splits: Sequence[Fold],
    keeps: Literal["fits", "row losses"],
    combinations: Sequence[Mapping[str, Any]],
) -> RunFolder | None:
    """Returns the folder of the runs of combinations of options, or None.

    Raises ``ValueError`` if the share is not ``(k, n)`` with 0 <= k < n, or if there is a share without a folder. Also
    if the recipe, the task or an option has no :func:`~jtrees.selection.definition.definition`.
    """
    is_pair = isinstance(share, (tuple, list)) and len(share) == 2
    if not is_pair or not all(isinstance(k, (int, np.integer)) for k in share) or not 0 <= share[0] < share[1]:
        raise ValueError(f"share must be (k, n) with whole numbers 0 <= k < n, got {quoted(share)}")
    if folder is None:
        if share[1] > 1:
            raise ValueError(f"folder must be given with a share, got None and the share {share}")
        return None
    for options in combinations:  # before the first run
        _options_text(options)
    return RunFolder(folder, _description(recipe, key, splits), keeps, (int(share[0]), int(share[1])), splits)


def _check_same(file: Any, description: Mapping[str, str], folder: str) -> None:
    """Raises ``ValueError`` if a file is damaged, or has another description; the message has the first difference."""
    try:
        written = json.loads(file.read_text())
    except ValueError:
        written = None
    if not isinstance(written, dict) or not all(isinstance(text, str) for text in written.values()):
        remedy = "delete the file, and the same call continues, as the names of the other files depend on the sweep"
        raise ValueError(f"folder must hold a complete {_DESCRIPTION}, got the damaged {file}: {remedy}")
    for name in {**written, **description}:
        texts = written.get(name, "none"), description.get(name, "none")
        if texts[0] != texts[1]:
            # The texts may be longer than a quotation in a message, so they begin shortly before they differ.
            differs = (i for i, (before, after) in enumerate(zip(*texts, strict=False)) if before != after)
            start = max(0, next(differs, min(map(len, texts))) - _CONTEXT)
            before, after = (quoted(f"...{text[start:]}" if start else text) for text in texts)
            raise ValueError(f"folder must hold runs of this sweep: {quoted(folder)} has {name} {before}, got {after}")


def _description(recipe: Recipe, key: Array, splits: Sequence[Fold]) -> dict[str, str]:
    """Returns what all runs of a sweep share, by name: the version, the precision, the recipe, the key and the rows."""
    tables = [split.table for split in splits]
    rows = {"x": "x", "y": "y", "sample_weight": "weight", "monotone": "monotone"}
    arrays: dict[str, Any] = {name: [getattr(table, field) for table in tables] for name, field in rows.items()}
    held_out = [table for split in splits if (table := split.evaluated) is not None]
    arrays["validation"] = [(table.x, table.y, table.weight) for table in held_out]
    encoder = tables[0].encoder
    options = {name: value for name, value in all_options(recipe).items() if not isinstance(value, Mapping)}
    schema = None if encoder is None else {**encoder.schema.columns, "": encoder.schema.missing}
    return {
        "jtrees": __version__,
        "jax_enable_x64": str(jax.config.jax_enable_x64),
        "recipe": definition("recipe", type(recipe)),
        **{name: definition(name, type(v) if isinstance(v, Recipe) else v) for name, v in options.items()},
        "key": definition("key", key),
        "task": definition("task", tables[0].task),
        "columns": checksum(definition("columns", schema)),
        **{name: checksum(values) for name, values in arrays.items()},
    }


def _options_text(options: Mapping[str, Any]) -> str:
    return str([(name, definition(name, value)) for name, value in sorted(options.items())])


def _row_checksums(splits: Sequence[Fold]) -> list[str]:
    return [checksum([split.table.x, split.table.y, split.table.weight]) for split in splits]
