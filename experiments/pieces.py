"""Long experiments in pieces. Each piece is kept in a file, and an interrupted run resumes.

The ``paper_*`` scripts share this module: the command line, the loop over missing pieces, and a report of the existing
pieces.
"""

import argparse
import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
import json
from pathlib import Path
import time
from typing import Any

import jax
import numpy as np
from rich.progress import Progress
from sklearn.metrics import accuracy_score, r2_score

from experiments import benchmark
from jtrees.cli import keep_programs
from jtrees.search import Recipe

Found = dict[str, dict[str, dict[int, dict[str, Any]]]]  # contents of the files, by part, set and seed


@dataclass(frozen=True)
class Piece:
    """A measurement that is kept in a file.

    Attributes:
      part: part of the experiment.
      name: name of the data set.
      make: function that measures; its result must be JSON.
      settings: settings that determine the result, as JSON. A file with other settings is an error.
      seed: seed of the piece; 0 if a piece has all seeds.
      file: name of its file without the suffix.
    """

    part: str
    name: str
    make: Callable[[], Any]
    settings: dict[str, Any]
    seed: int = 0
    file: str = ""

    def under(self, folder: Path) -> Path:
        """Returns the file of this piece."""
        return folder / f"{self.file or f'{self.part}-{self.name}'}.json"


@dataclass(frozen=True)
class Script:
    """A long experiment.

    Attributes:
      name: name of the module, of the folder of its pieces and of its report.
      doc: description for the command line.
      parts: parts of the experiment.
      sets: default data sets.
      seeds: default number of seeds.
      pieces: ``(part, set, options) -> pieces``; no pieces if the set does not have the part.
      report: ``(found, command) -> text``.
      figure: ``(found, file)``: draws a figure.
      arguments: ``(parser)``: adds options of the script.
    """

    name: str
    doc: str | None
    parts: Iterable[str]
    sets: Iterable[str]
    seeds: int
    pieces: Callable[[str, str, argparse.Namespace], Iterable[Piece]]
    report: Callable[[Found, str], str]
    figure: Callable[[Found, Path], None] = lambda found, file: None
    arguments: Callable[[argparse.ArgumentParser], Any] = lambda parser: None


def for_seeds(
    part: str, name: str, make: Callable[[int], Any], settings: dict[str, Any], seeds: int
) -> Iterator[Piece]:
    """Yields a piece for each seed, made by ``make(seed)``."""
    for seed in range(seeds):
        yield Piece(part, name, partial(make, seed), settings, seed, f"{part}-{name}-{seed}")


def of_seeds(found: Found, part: str, name: str) -> dict[int, Any]:
    """Returns the results of a part on a set, by seed; empty if there are none."""
    return {seed: record["found"] for seed, record in found.get(part, {}).get(name, {}).items()}


def percent(outputs: Any, y: Any) -> float:
    """Returns R^2 of numbers, or accuracy of classes or of the most probable classes; in per cent."""
    if y.dtype.kind == "f":
        return 100 * float(r2_score(y, outputs))
    return 100 * float(accuracy_score(y, outputs if outputs.ndim == 1 else outputs.argmax(1)))


def best_trial(objective: Callable[[Any], float], trials: int, *, seed: int, direction: Any = "minimize") -> Any:
    """Returns the best of some trials of Optuna's TPE."""
    import optuna  # pyright: ignore[reportMissingImports]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(objective, n_trials=trials)
    return study.best_trial


# Options that older files do not have. These values reproduce the older behaviour.
LATER = {
    "precondition": 0.0,
    "shrink": False,
    "early_stopping": False,
    "halving": False,
    "weight_decay": 0.0,
    "ridge": False,
    "rows": "auto",  # the older files have tables of up to 20,000 rows, and "auto" takes all of them
}


# Options that only older files have. These values reproduce the current behaviour.
GONE = {"Refined": {"hard": False}}


def recipe_text(recipe: Any) -> str:
    """Returns a recipe as text for settings.

    Options that depend on the context are settled. The text omits options that are None, and options of ``LATER`` with
    their old values. A tuple of recipes of one kind gives a single text: an option that differs between the recipes is
    a tuple.
    """
    several = tuple(
        one.settled() if isinstance(one, Recipe) else one
        for one in (recipe if isinstance(recipe, tuple) else (recipe,))
    )
    recipe = several[0]
    options = {field.name: tuple(getattr(one, field.name) for one in several) for field in fields(recipe)}
    options = {k: v[0] if all(one == v[0] for one in v) else v for k, v in options.items()}
    options = {k: v for k, v in options.items() if v is not None and not (k in LATER and v == LATER[k])}
    text = [f"{k}={recipe_text(v) if is_dataclass(v) else repr(v)}" for k, v in options.items()]
    return f"{type(recipe).__name__}({', '.join(text)})"


def parse(script: Script, arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    out = argparse.ArgumentParser(description=script.doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--data-dir", help="a folder of .npz files (default: $JTREES_DATA)")
    out.add_argument("--datasets", nargs="+", default=list(script.sets))
    out.add_argument("--parts", nargs="+", choices=list(script.parts), default=list(script.parts))
    out.add_argument("--seeds", type=int, default=script.seeds)
    folder = benchmark.RESULTS / script.name
    out.add_argument("--out", type=Path, default=folder, help="folder of the pieces; the report goes beside it")
    out.add_argument("--report-only", action="store_true", help="make the report from the existing pieces")
    script.arguments(out)
    options = out.parse_args(arguments)
    options.all_seeds = max(script.seeds, options.seeds)  # seeds that may have files
    return options


def main(script: Script, arguments: list[str] | None = None) -> None:
    """Makes the missing pieces that the options select, and the report of all existing pieces."""
    options = parse(script, arguments)
    pieces = all_pieces(script, options)
    for piece in pieces:  # checks the settings of all files before the measurements
        read(piece, options.out)
    if not options.report_only:
        asked = [one for one in pieces if one.part in options.parts and one.name in options.datasets]
        run([one for one in asked if one.seed < options.seeds], options.out)
    found = gathered(pieces, options.out)
    text = script.report(found, f"python -m experiments.{script.name} --data-dir DATA --seeds {options.seeds}")
    print(text)
    report = options.out.parent / f"{options.out.name}.md"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(text)
    script.figure(found, report.with_suffix(".png"))


def all_pieces(script: Script, options: argparse.Namespace) -> list[Piece]:
    """Returns the pieces of the script's own sets and of further selected sets, whether they exist or not."""
    names = dict.fromkeys([*script.sets, *options.datasets])
    return [one for part in script.parts for name in names for one in script.pieces(part, name, options)]


def gathered(pieces: Iterable[Piece], folder: Path) -> Found:
    """Returns the contents of the existing files."""
    found: Found = {}
    for piece in pieces:
        if (record := read(piece, folder)) is not None:
            found.setdefault(piece.part, {}).setdefault(piece.name, {})[piece.seed] = record
    return found


def program(script: Script) -> None:
    """Runs :func:`main` as a program: on all cores, with compiled programs cached."""
    benchmark.use_all_cores()
    keep_programs()
    main(script)


def run(pieces: list[Piece], folder: Path) -> None:
    """Makes the missing pieces, seed by seed."""
    folder.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        task = progress.add_task("", total=len(pieces))
        for piece in sorted(pieces, key=lambda piece: piece.seed):
            progress.update(task, description=piece.under(folder).stem)
            if not piece.under(folder).exists():
                make(piece, folder)
                # Hundreds of programs in one process would exceed the kernel's limit of memory maps.
                jax.clear_caches()
            progress.advance(task)


def make(piece: Piece, folder: Path) -> None:
    """Makes a piece; an interrupted piece is not kept."""
    start = time.perf_counter()
    with benchmark.uninterrupted():
        found = piece.make()
    record = {"settings": piece.settings, "machine": benchmark.machine(), "seconds": time.perf_counter() - start}
    benchmark.write_whole(piece.under(folder), json.dumps(record | {"found": found}, indent=1))


def read(piece: Piece, folder: Path) -> dict[str, Any] | None:
    """Returns the contents of a piece's file: ``settings``, ``machine``, ``seconds`` and ``found``; None without a
    file.

    Raises:
      SystemExit: the file was made with other settings.
    """
    file = piece.under(folder)
    if not file.exists():
        return None
    record = json.loads(file.read_text())
    # Older files have their settings at the top level.
    record.setdefault("settings", {name: record[name] for name in piece.settings if name in record})
    made, settings = record["settings"], json.loads(json.dumps(piece.settings))
    if _in_order(made) != _in_order(settings):
        raise SystemExit(f"{file} was made with {made}, not {piece.settings}: give the same settings, or another --out")
    return record


def _in_order(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the settings with the options of recipes in alphabetical order, without the options of ``GONE``."""
    settings = dict(settings)
    if "recipe" in settings:
        settings["recipe"] = _recipe_in_order(settings["recipe"])
    if "recipes" in settings:
        settings["recipes"] = [_recipe_in_order(text) for text in settings["recipes"]]
    return settings


def _recipe_in_order(text: str) -> str:
    recipe = ast.parse(text, mode="eval")
    for call in ast.walk(recipe):
        if isinstance(call, ast.Call):
            gone = [ast.dump(ast.keyword(k, ast.Constant(v))) for k, v in GONE.get(ast.unparse(call.func), {}).items()]
            call.keywords = [keyword for keyword in call.keywords if ast.dump(keyword) not in gone]
            call.keywords.sort(key=lambda keyword: str(keyword.arg))
    return ast.unparse(recipe)


def machines(found: Found) -> str:
    """Returns the machines on which the pieces were made."""
    records = [one for by_name in found.values() for by_seed in by_name.values() for one in by_seed.values()]
    return ", ".join(sorted({one["machine"] for one in records}))


def spread(values: list[float], digits: int = 2) -> str:
    """Returns mean and standard deviation as text."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "-"
    return f"{np.mean(values):.{digits}f} ± {np.std(values):.{digits}f}"
