"""Studies: long experiments in pieces. Each finished piece is a row of one file, so an interrupted run resumes.

The file has a JSON object a line. The report is a function of its rows.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property, reduce
import json
from pathlib import Path
import time
from typing import Any
import warnings

import jax
import numpy as np
from rich.progress import Progress
from sklearn.metrics import accuracy_score, log_loss, r2_score

from experiments import benchmark
import jtrees

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # training and test features, training and test targets
Key = tuple[str, str, int]  # part, data set and seed, which identify a piece in its study


@dataclass(frozen=True)
class Measurement:
    """A finished piece.

    Attributes:
      part: part of the study.
      dataset: name of the data set.
      seed: seed of the piece; 0 if a piece has all seeds.
      value: result of the measurement, as JSON.
      settings: settings of the measurement, as JSON.
      machine: the machine and the versions.
      seconds: seconds of the measurement.
      stale: whether the settings differ from the current settings; not in the file.
    """

    part: str
    dataset: str
    seed: int
    value: Any
    settings: dict[str, Any] = field(default_factory=dict)
    machine: str = ""
    seconds: float = 0.0
    stale: bool = False

    @property
    def key(self) -> Key:
        """What identifies the piece in its study."""
        return self.part, self.dataset, self.seed

    def line(self) -> str:
        """Returns the row as a line of the file."""
        columns = asdict(self)
        del columns["stale"]
        return json.dumps(columns, sort_keys=True, separators=(",", ":")) + "\n"


@dataclass(frozen=True)
class Results:
    """The rows of a study, in the order of its pieces."""

    rows: list[Measurement]

    @cached_property
    def _cells(self) -> dict[tuple[str, str], dict[int, Measurement]]:
        cells: dict[tuple[str, str], dict[int, Measurement]] = {}
        for row in self.rows:
            cells.setdefault((row.part, row.dataset), {})[row.seed] = row
        return cells

    def seed_values(self, part: str, dataset: str) -> dict[int, Any]:
        """Returns the values of a part on a data set, by seed."""
        return {seed: row.value for seed, row in self._cells.get((part, dataset), {}).items()}

    def common(self, dataset: str, *parts: str) -> dict[int, dict[str, Any]]:
        """Returns the values of several parts on a data set, by seed and part, of the seeds that all parts have."""
        values = {part: self.seed_values(part, dataset) for part in parts}
        seeds = sorted(set.intersection(*map(set, values.values())))
        return {seed: {part: values[part][seed] for part in parts} for seed in seeds}

    def values(self, part: str, dataset: str, *keys: str) -> list[Any]:
        """Returns the values of a part on a data set, or what they have under some keys."""
        get = lambda value: reduce(lambda inner, key: inner[key], keys, value)
        return list(map(get, self.seed_values(part, dataset).values()))

    def datasets(self, *parts: str) -> list[str]:
        """Returns the data sets that have rows of a part, or of any part by default."""
        return list(dict.fromkeys(row.dataset for row in self.rows if not parts or row.part in parts))

    def select(self, part: str, dataset: str | None = None) -> "Results":
        """Returns the results of a part, on one data set or on all."""
        return Results([row for row in self.rows if row.part == part and dataset in (None, row.dataset)])

    @property
    def machines(self) -> str:
        """The machines that measured the rows."""
        return ", ".join(sorted({row.machine for row in self.rows}))

    @property
    def seconds(self) -> float:
        """The seconds of all rows."""
        return sum(row.seconds for row in self.rows)


@dataclass(frozen=True)
class Study:
    """A long experiment.

    Attributes:
      name: name of the module, of the file of its rows and of its report.
      doc: description for the command line.
      parts: parts of the study.
      datasets: default data sets.
      seeds: default number of seeds.
      measure: ``(part, data set, seed, options) -> value``, which must be JSON.
      report: ``(results, command) -> text``.
      settings: ``(part, data set, options) -> settings`` that determine the value, as JSON. A row with other settings
        is stale. None if the data set does not have the part.
      together: whether one piece has all seeds; ``measure`` then takes their number from the options.
      once: parts with the first seed only.
      closed: whether other data sets than the default ones are refused.
      available: ``(part)``: whether a part can be measured here; otherwise, its pieces are skipped.
      figure: ``(results, file)``: draws a figure.
      arguments: ``(parser)``: adds options of the study.
      flags: names of the options for the folder of the data, the data sets and the parts.
    """

    name: str
    doc: str | None
    parts: Iterable[str]
    datasets: Iterable[str]
    seeds: int
    measure: Callable[[str, str, int, argparse.Namespace], Any]
    report: Callable[[Results, str], str]
    settings: Callable[[str, str, argparse.Namespace], dict[str, Any] | None] = lambda part, name, options: {}
    together: bool = False
    once: tuple[str, ...] = ()
    closed: bool = False
    available: Callable[[str], bool] = lambda part: True
    figure: Callable[[Results, Path], None] = lambda results, file: None
    arguments: Callable[[argparse.ArgumentParser], Any] = lambda parser: None
    flags: tuple[str, str, str] = ("data-dir", "datasets", "parts")

    def pieces(self, options: argparse.Namespace) -> dict[Key, dict[str, Any]]:
        """Returns the settings of all pieces, of the default and of further selected data sets."""
        out = {}
        for part in self.parts:
            for name in dict.fromkeys([*self.datasets, *options.datasets]):
                settings = self.settings(part, name, options)
                if settings is not None:
                    shared = {"seeds": options.seeds} if self.together else {}
                    seeds = 1 if self.together or part in self.once else max(self.seeds, options.seeds)
                    out |= {(part, name, seed): json.loads(json.dumps(settings | shared)) for seed in range(seeds)}
        return out


# --- The file --------------------------------------------------------------------------------------------------------


def read(file: Path) -> dict[Key, Measurement]:
    """Returns the rows of a file; none without a file.

    A later row replaces an earlier row with the same key. A last line that is not finished is ignored.

    Raises:
      SystemExit: another line is not a row.
    """
    rows = {}
    *lines, _ = file.read_text(encoding="utf-8").split("\n") if file.exists() else [""]
    for number, line in enumerate(lines, 1):
        try:
            row = Measurement(**json.loads(line))
        except (TypeError, ValueError) as error:
            raise SystemExit(f"{file}, line {number}: expected a row of a study, got {line[:80]!r}") from error
        rows[row.key] = row
    return rows


def tidy(file: Path) -> None:
    """Removes an unfinished last line, and rows that a later row replaces."""
    text = "".join(row.line() for row in read(file).values())
    if file.exists() and file.read_text(encoding="utf-8") != text:
        benchmark.write_whole(file, text)


def current(study: Study, options: argparse.Namespace, file: Path) -> Results:
    """Returns the rows of a study, in the order of its pieces; rows with other settings are marked as stale."""
    rows = read(file)
    return Results(
        [
            replace(rows[key], stale=rows[key].settings != settings)
            for key, settings in study.pieces(options).items()
            if key in rows
        ]
    )


# --- A run -----------------------------------------------------------------------------------------------------------


def parse(study: Study, arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=study.doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    names, file = list(study.datasets), benchmark.RESULTS / f"{study.name}.jsonl"
    folder, sets, parts = (f"--{flag}" for flag in study.flags)
    variable = f"$JTREES_{folder_name(study)}"
    parser.add_argument(folder, dest="data_dir", help=f"the folder of the data (default: {variable})")
    parser.add_argument(sets, dest="datasets", nargs="+", choices=names if study.closed else None, default=names)
    parser.add_argument(parts, dest="parts", nargs="+", choices=list(study.parts), default=list(study.parts))
    parser.add_argument("--seeds", type=int, default=study.seeds)
    parser.add_argument("--out", type=Path, default=file, help="file of the rows; the report goes beside it")
    parser.add_argument("--report-only", action="store_true", help="make the report from the existing rows")
    study.arguments(parser)
    return parser.parse_args(arguments)


def folder_name(study: Study) -> str:
    """Returns the word for the folder of the data in commands and in the environment variable JTREES_..."""
    return study.flags[0].removesuffix("-dir").upper()


def command_of(study: Study, options: argparse.Namespace, results: Results) -> str:
    """Returns the command that makes the report. A file with another name than the study's may have fewer pieces."""
    defaults, parts = parse(study, []), {row.part for row in results.rows}
    words = [f"python -m experiments.{study.name} --{study.flags[0]} {folder_name(study)} --seeds {options.seeds}"]
    if options.out.name != defaults.out.name:
        pieces = (study.datasets, results.datasets()), (study.parts, parts)
        for flag, (names, measured) in zip(study.flags[1:], pieces, strict=True):
            words.append(benchmark.option_text(flag, [name for name in names if name in measured], [*names]))
        words.append(f"--out {options.out.name}")
    common = ("data_dir", "datasets", "parts", "seeds", "out", "report_only")
    further = [name for name in vars(options) if name not in common]
    words += [benchmark.option_text(name, getattr(options, name), getattr(defaults, name)) for name in further]
    return " ".join(filter(None, words))


def main(study: Study, arguments: list[str] | None = None) -> None:
    """Measures the missing and stale pieces that the options select, and makes the report of all existing rows."""
    options = parse(study, arguments)
    if not options.report_only:
        measure(study, options)
    results = current(study, options, options.out)
    text = page(study, results, command_of(study, options, results))
    print(text)
    report = options.out.with_suffix(".md")
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(text, encoding="utf-8")
    study.figure(results, report.with_suffix(".png"))


def program(study: Study) -> None:
    """Runs :func:`main` as a program: on all cores, with compiled programs cached."""
    benchmark.use_all_cores()
    main(study)


def measure(study: Study, options: argparse.Namespace) -> None:
    """Measures the selected pieces that have no row or a stale row, seed by seed. An interrupted piece has no row."""
    file = options.out
    file.parent.mkdir(parents=True, exist_ok=True)
    tidy(file)
    rows, pieces = read(file), study.pieces(options)
    missing = [key for key, settings in pieces.items() if key not in rows or rows[key].settings != settings]
    with Progress() as progress:
        task = progress.add_task("", total=len(missing))
        for key in sorted(missing, key=lambda key: key[2]):
            part, name, seed = key
            progress.update(task, description=f"{part} {name} {seed}")
            selected = part in options.parts and name in options.datasets and seed < options.seeds
            if selected and study.available(part):
                start = time.perf_counter()
                with benchmark.uninterrupted():
                    value = study.measure(part, name, seed, options)
                row = Measurement(*key, value, pieces[key], benchmark.machine(), time.perf_counter() - start)
                with file.open("a", encoding="utf-8") as out:
                    out.write(row.line())
                # Hundreds of programs in one process would exceed the kernel's limit of memory maps.
                jax.clear_caches()
            progress.advance(task)
    tidy(file)


def page(study: Study, results: Results, command: str) -> str:
    """Returns the report, and below it the stale rows, if any."""
    stale: dict[str, list[int]] = {}
    for row in results.rows:
        if row.stale:
            stale.setdefault(f"{row.part} {row.dataset}", []).append(row.seed)
    cells = [f"{cell} (seeds {', '.join(map(str, seeds))})" for cell, seeds in stale.items()]
    note = f"\nRows of older settings, which the next run measures again: {'; '.join(cells)}.\n" if cells else ""
    return study.report(results, command) + note


# --- Parts of studies ------------------------------------------------------------------------------------------------


def fit(recipe: Any, split: Split, seed: int, **options: Any) -> jtrees.FitResult:
    """Fits a recipe to the training part, without warnings of models that are worse than a linear model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return jtrees.fit(recipe, split[0], split[2], key=jax.random.key(seed), **options)


def scores(model: Any, split: Split) -> dict[str, float]:
    """Returns a model's R^2, or accuracy of the most probable classes, on both parts, in per cent."""
    x, x_test, y, y_test = split
    return {"train": percent(model.predict(x), y), "test": percent(model.predict(x_test), y_test)}


def recipe_text(recipe: Any) -> str:
    """Returns a recipe as text for settings.

    Options are in alphabetical order. Options that depend on the context are settled; options that are None are
    omitted. A tuple of recipes of one kind gives a single text: an option that differs between the recipes is a tuple.
    """
    recipes = recipe if isinstance(recipe, tuple) else (recipe,)
    recipes = [
        candidate.with_defaults() if isinstance(candidate, jtrees.Recipe) else candidate for candidate in recipes
    ]
    texts = []
    for name in sorted(option.name for option in fields(recipes[0])):
        values = tuple(getattr(candidate, name) for candidate in recipes)
        value = values[0] if all(other == values[0] for other in values) else values
        if value is not None:
            texts.append(f"{name}={recipe_text(value) if is_dataclass(value) else repr(value)}")
    return f"{type(recipes[0]).__name__}({', '.join(texts)})"


def class_scores(probabilities: Any, y: np.ndarray, classes: np.ndarray) -> dict[str, float]:
    """Returns accuracy in per cent and log loss of the probabilities of classes ``(n, k)``."""
    probabilities = np.asarray(probabilities, np.float64)
    probabilities = probabilities / probabilities.sum(1, keepdims=True)  # sums of float32 are not exactly 1
    score = percent(classes[probabilities.argmax(1)], y)
    return {"score": score, "log_loss": float(log_loss(y, probabilities, labels=classes))}


def percent(outputs: Any, y: Any) -> float:
    """Returns R^2 of numbers, or accuracy of classes or of the most probable classes; in per cent."""
    outputs = np.asarray(outputs)
    if y.dtype.kind == "f":
        return 100 * float(r2_score(y, outputs))
    return 100 * float(accuracy_score(y, outputs if outputs.ndim == 1 else outputs.argmax(1)))


def best_trial(objective: Callable[[Any], float], trials: int, *, seed: int, direction: Any = "minimize") -> Any:
    """Returns the best trial of Optuna's TPE."""
    import optuna  # pyright: ignore[reportMissingImports]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction=direction, sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(objective, n_trials=trials)
    return study.best_trial


def spread(values: list[float], digits: int = 2) -> str:
    """Returns mean and standard deviation as text; ``-`` without values."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "-"
    return f"{np.mean(values):.{digits}f} ± {np.std(values):.{digits}f}"
