"""Long experiments in pieces, each kept in a file, so that an interrupted run resumes.

What the ``paper_*`` scripts share: the command line, the loop over what is missing, and a report of what is there.
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

Found = dict[str, dict[str, dict[int, dict[str, Any]]]]  # by part, set and seed, what the files hold


@dataclass(frozen=True)
class Piece:
    """Something to be found out and kept.

    Attributes:
      part: of the experiment.
      name: of the data set.
      make: what finds it out: something that JSON can hold.
      settings: what it depends on, likewise; not made again, nor shown, if they are others than those of its file.
      seed: 0 where a piece has all seeds.
      file: name of its file without the suffix.
    """

    part: str
    name: str
    make: Callable[[], Any]
    settings: dict[str, Any]
    seed: int = 0
    file: str = ""

    def under(self, folder: Path) -> Path:
        """Its file."""
        return folder / f"{self.file or f'{self.part}-{self.name}'}.json"


@dataclass(frozen=True)
class Script:
    """A long experiment.

    Attributes:
      name: of the module, of the folder of its pieces and of its report.
      doc: for the command line.
      parts: the parts that it has.
      sets: data sets that it runs on unless told otherwise.
      seeds: how many, likewise.
      pieces: ``(part, set, options) -> pieces``: none where the set has no such part.
      report: ``(found, command) -> text``.
      figure: ``(found, file)``: draws it.
      arguments: ``(parser)``: adds options of its own.
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
    """A piece for each seed, made by ``make(seed)``."""
    for seed in range(seeds):
        yield Piece(part, name, partial(make, seed), settings, seed, f"{part}-{name}-{seed}")


def of_seeds(found: Found, part: str, name: str) -> dict[int, Any]:
    """What was found in a part of a set, by seed; empty if nothing was."""
    return {seed: record["found"] for seed, record in found.get(part, {}).get(name, {}).items()}


def percent(outputs: Any, y: Any) -> float:
    """R^2 of numbers, accuracy of classes or of the most probable classes; in per cent."""
    if y.dtype.kind == "f":
        return 100 * float(r2_score(y, outputs))
    return 100 * float(accuracy_score(y, outputs if outputs.ndim == 1 else outputs.argmax(1)))


def best_trial(objective: Callable[[Any], float], trials: int, *, seed: int, direction: Any = "minimize") -> Any:
    """The best of some trials of Optuna's TPE."""
    import optuna  # pyright: ignore[reportMissingImports]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(objective, n_trials=trials)
    return study.best_trial


# Options that older files do not have, with the values that do what was done then.
LATER = {
    "precondition": 0.0,
    "shrink": False,
    "early_stopping": False,
    "halving": False,
    "weight_decay": 0.0,
    "ridge": False,
    "rows": "auto",  # of tables of up to 20,000 rows, which takes all
}


# Options that older files have and recipes have no longer, with the values that do what is done now.
GONE = {"Refined": {"hard": False}}


def recipe_text(recipe: Any) -> str:
    """A recipe as text for settings, with options by context settled, without those that are None and later ones that
    are off.

    Of several recipes of one kind, a tuple, the text of one: an option in which they differ is a tuple.
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
    """The command line."""
    out = argparse.ArgumentParser(description=script.doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--data-dir", help="a folder of .npz files (default: $JTREES_DATA)")
    out.add_argument("--datasets", nargs="+", default=list(script.sets))
    out.add_argument("--parts", nargs="+", choices=list(script.parts), default=list(script.parts))
    out.add_argument("--seeds", type=int, default=script.seeds)
    folder = benchmark.RESULTS / script.name
    out.add_argument("--out", type=Path, default=folder, help="folder of the pieces; the report goes beside it")
    out.add_argument("--report-only", action="store_true", help="make the report of what is there")
    script.arguments(out)
    options = out.parse_args(arguments)
    options.all_seeds = max(script.seeds, options.seeds)  # those whose files may be there
    return options


def main(script: Script, arguments: list[str] | None = None) -> None:
    """Makes what is missing of what is asked for, and the report of all that is there."""
    options = parse(script, arguments)
    pieces = all_pieces(script, options)
    for piece in pieces:  # before anything is spent
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
    """Those of a script's own sets and of others that are asked for, whether they are there or not."""
    names = dict.fromkeys([*script.sets, *options.datasets])
    return [one for part in script.parts for name in names for one in script.pieces(part, name, options)]


def gathered(pieces: Iterable[Piece], folder: Path) -> Found:
    """What the files of those hold that are there."""
    found: Found = {}
    for piece in pieces:
        if (record := read(piece, folder)) is not None:
            found.setdefault(piece.part, {}).setdefault(piece.name, {})[piece.seed] = record
    return found


def program(script: Script) -> None:
    """:func:`main` as a program of its own: on all cores, with compiled programs kept."""
    benchmark.use_all_cores()
    keep_programs()
    main(script)


def run(pieces: list[Piece], folder: Path) -> None:
    """Makes the pieces that are not there, seed by seed."""
    folder.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        task = progress.add_task("", total=len(pieces))
        for piece in sorted(pieces, key=lambda piece: piece.seed):
            progress.update(task, description=piece.under(folder).stem)
            if not piece.under(folder).exists():
                make(piece, folder)
                # Hundreds of programs in one process use up what the kernel allows of memory maps.
                jax.clear_caches()
            progress.advance(task)


def make(piece: Piece, folder: Path) -> None:
    """Makes a piece."""
    start = time.perf_counter()
    found = piece.make()
    record = {"settings": piece.settings, "machine": benchmark.machine(), "seconds": time.perf_counter() - start}
    benchmark.write_whole(piece.under(folder), json.dumps(record | {"found": found}, indent=1))


def read(piece: Piece, folder: Path) -> dict[str, Any] | None:
    """What the file of a piece holds, None if it is not there: ``settings``, ``machine``, ``seconds`` and ``found``.

    Raises:
      SystemExit: if it was made with other settings.
    """
    file = piece.under(folder)
    if not file.exists():
        return None
    record = json.loads(file.read_text())
    # Older files have their settings among the rest.
    record.setdefault("settings", {name: record[name] for name in piece.settings if name in record})
    made, settings = record["settings"], json.loads(json.dumps(piece.settings))
    if _in_order(made) != _in_order(settings):
        raise SystemExit(f"{file} was made with {made}, not {piece.settings}: give the same settings, or another --out")
    return record


def _in_order(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the options of recipes in alphabetical order, as their order may change, without gone ones."""
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
    """On which machines."""
    records = [one for by_name in found.values() for by_seed in by_name.values() for one in by_seed.values()]
    return ", ".join(sorted({one["machine"] for one in records}))


def spread(values: list[float], digits: int = 2) -> str:
    """Mean and standard deviation."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "-"
    return f"{np.mean(values):.{digits}f} ± {np.std(values):.{digits}f}"
