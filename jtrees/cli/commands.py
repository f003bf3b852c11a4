"""The five commands."""

import argparse
from collections.abc import Iterator
import contextlib
import logging
import os
from pathlib import Path
import shlex
import sys
import time
from typing import Any
import warnings

from jax.errors import JaxRuntimeError
import matplotlib
import numpy as np
import pandas as pd
from sklearn.base import is_classifier

import jtrees
from jtrees import explain, export, io, validation
from jtrees._estimator import TreeEstimator
from jtrees.cli.arguments import default_recipe, estimator_of, loss_of, recipe_of
from jtrees.cli.files import DataError, is_parquet, one_line, read_rows, rules_of
from jtrees.cli.parser import SUFFIXES
from jtrees.cli.tables import LabelledTable, Task, as_options, prepared, read_labelled, targets_of
from jtrees.report import BehindBaselineWarning
from jtrees.report.comparison import phrases
from jtrees.report.held_out import HeldOut, encoded, kind_of_model
from jtrees.report.page import MAX_TERMS, write_report
from jtrees.tables import ColumnsWarning, FrameModel, Schema
from jtrees.tables.cells import Reading, missing_mask
from jtrees.tables.frame import RawColumn
from jtrees.tables.inference import checked_missing
from jtrees.tables.schemas import warn_of_odd_cells

_HELD_OUT = 0.1  # fraction of the rows that are held out for the verdict
_HELD_OUT_OF_REPORT = 0.25
_FEWEST = 30  # least number of rows of a table for a verdict
_BACKGROUND = 100  # largest number of background rows of Shapley values
_FORMATS = export.to_c, export.to_numpy, export.to_onnx, export.to_stablehlo, export.to_sql, export.to_javascript
_OPTIONS = {"monotonic_cst": "--monotone", "max_seconds": "--max-seconds"}  # by the parameter in a message
_WRITERS = dict(zip(SUFFIXES, [*_FORMATS, export.to_javascript], strict=True))  # .js and .mjs


def run(options: argparse.Namespace) -> int:
    """Runs a command: see :func:`jtrees.cli.main`."""
    matplotlib.use("Agg")
    command = {"fit": _fit, "predict": _predict, "explain": _explain, "export": _export, "report": _report}
    try:
        with _messages_as_lines():
            _check_output(options)
            return command[options.command](options)
    except (ValueError, ImportError, FloatingPointError, MemoryError, JaxRuntimeError) as error:
        first, *words = one_line(error).split(" ")
        print("jtrees:", _OPTIONS.get(first, first), *words, file=sys.stderr)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(f"jtrees: cannot read or write{where}: {error.strerror or one_line(error)}", file=sys.stderr)
    except KeyboardInterrupt:
        print("jtrees: interrupted", file=sys.stderr)
        return 130
    return 2


def _check_output(options: argparse.Namespace) -> None:
    """Raises :class:`DataError` if the output would replace an input, or has the name of another format."""
    argument = "FILE" if options.command == "export" else "--out"
    output: Path | None = getattr(options, "file" if argument == "FILE" else "out", None)
    if output is None:
        return
    got = f"got {validation.quoted(str(output))}"
    if str(output) == "-":
        raise DataError(f"{argument} must be the name of a file, {got}")
    if options.command == "predict" and is_parquet(output):
        raise DataError(f"{argument} must be a CSV file, {got}")
    for name in ("table", "model"):
        source: Path | None = getattr(options, name, None)
        # A terminal may be both, as /dev/stdin and /dev/stdout.
        if source is not None and source.exists() and output.is_file() and os.path.samefile(source, output):
            raise DataError(f"{argument} must be another file than {name.upper()}, {got}")


def _fit(options: argparse.Namespace) -> int:
    with io.written_whole(options.out) as file:  # before the training, so a wrong path costs no time
        table, task = _labelled(options)
        if options.max_seconds is not None:
            validation.check_number("max_seconds", options.max_seconds, above=0)
        recipe, y = recipe_of(options, task), targets_of(table.y)
        started, first = time.perf_counter(), None
        if len(y) >= _FEWEST:
            third = options.max_seconds and options.max_seconds / 3
            with warnings.catch_warnings(action="ignore"):  # the fit to all rows repeats the warnings
                first = _held_out(options, recipe, table, task, third, share=_HELD_OUT, forests=False)
        interrupted = first is not None and _is_interrupted(first)
        if first is not None and interrupted:
            model, features = first.model, first.features
        else:
            # The rows as the model is trained on them: their target means are means over other rows.
            rows = encoded(table.frame, y, task)
            features = rows.features
            left = options.max_seconds and max(1e-3, options.max_seconds - (time.perf_counter() - started))
            model = estimator_of(options, recipe, task, left, table.schema)
            # The verdict on held-out rows says whether a baseline is better.
            with warnings.catch_warnings(action=None if first is None else "ignore", category=BehindBaselineWarning):
                model.fit(rows, y)
        io.save(model, file)
    seconds = time.perf_counter() - started
    verdict = [f"no verdict: a verdict needs {_FEWEST} rows, because a tenth is held out"]
    print("\n".join(verdict if first is None else first.summary(kind_of_model(model))))
    if first is None or model is not first.model:
        print(f"{type(recipe).__name__} fitted to all {len(y)} rows, {seconds:.1f} s in all")
    print(f"\n{model.encoder_}\n")
    if model.tree_ is not None:
        _print_rules(model, features)
    elif first is not None and first.tree_estimator is not None:
        print(f"one tree to read beside it, which {_command(options, tree=True)} fits to all rows")
        _print_rules(first.tree_estimator, first.features)
    print(f"written to {options.out}")
    if first is not None and (advice := _advice(options, first)):
        print(advice)
    if interrupted or model.report_.ended == "interrupted":
        return _interrupted()
    return 0


def _is_interrupted(held_out: Any) -> bool:
    """Returns whether Ctrl-C ended a fit of the models of a comparison."""
    return "interrupted" in (held_out.model.report_.ended, held_out.other.report_.ended)


def _interrupted() -> int:
    """Prints that Ctrl-C ended a fit, and returns the exit status."""
    print("jtrees: interrupted: the model is the best one so far", file=sys.stderr)
    return 130


def _print_rules(model: Any, features: np.ndarray) -> None:
    """Prints the rules of one tree; ``features`` are its training rows."""
    classes = list(map(str, model.classes_)) if is_classifier(model) else None
    print(f"# {kind_of_model(model)}; rows are of the {len(features)} training rows")
    print(model.tree_.to_text(model.encoder_.feature_names, x=features, class_names=classes, max_terms=MAX_TERMS))


def _advice(options: argparse.Namespace, held_out: HeldOut) -> str:
    """Returns the command of the better of a tree and a sum, else a sentence on better rivals, else nothing."""
    name, better = held_out.name, held_out.comparison().better
    if held_out.other_name in better:
        command = _command(options, tree=held_out.other_name != jtrees.Boosted.__name__)
        return f"{held_out.other_name} is better than {name}: {command}"
    return f"{phrases(better)} {'is' if len(better) == 1 else 'are'} better than {name} on this table" if better else ""


def _command(options: argparse.Namespace, *, tree: bool) -> str:
    """Returns the command with the default recipe of one tree, or of a sum of trees."""
    recipe_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    recipe_parser.add_argument("--tree", action="store_true")
    recipe_parser.add_argument("--recipe")
    recipe_parser.add_argument("--set", nargs="+")
    words = recipe_parser.parse_known_args(list(map(str, options.words)))[1]
    return shlex.join(["jtrees", *words, *(["--tree"] if tree else [])])


def _held_out(
    options: argparse.Namespace, recipe: jtrees.Recipe, table: LabelledTable, task: Task, max_seconds: Any, **split: Any
) -> HeldOut:
    """Returns the fitted estimator of a recipe, a tree beside a sum or a sum beside any other model, and rivals."""
    other = default_recipe(options, task, boosted=not isinstance(recipe, jtrees.Boosted))
    pair = [estimator_of(options, candidate, task, max_seconds, table.schema) for candidate in (recipe, other)]
    data: Any = {"x": table.x, "y": targets_of(table.y), "frame": table.frame, "loss": loss_of(options)}
    return HeldOut(*pair, seed=options.seed, **data, **split)


def _predict(options: argparse.Namespace) -> int:
    with contextlib.nullcontext() if options.out is None else io.written_whole(options.out) as file:
        model = _loaded(options.model)
        x = _rows(model, options, fewest=0)
        columns = {"prediction": model.predict(x)}
        if np.ndim(columns["prediction"]) == 2:
            columns = {f"prediction {i}": column for i, column in enumerate(np.transpose(columns["prediction"]))}
        if options.probabilities:
            if not is_classifier(model):
                raise DataError("--probabilities are for a classifier, and this model is a regressor")
            probabilities = model.predict_proba(x)
            columns |= {f"probability of {label}": probabilities[:, k] for k, label in enumerate(model.classes_)}
        text = pd.DataFrame(columns).to_csv(index=False)
        if file is not None:
            file.write(text.encode())
    if file is None:
        output: Any = sys.stdout
        output.write_data(text)
    else:
        print(f"{validation.number_of(len(x), 'row')} written to {options.out}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    model = _loaded(options.model)
    x = _rows(model, options)
    if not 0 <= options.row < len(x):
        raise DataError(f"--row must be from 0 to {len(x) - 1}, got {options.row}")
    row, has_classes = x.iloc[[options.row]], is_classifier(model)
    print(f"prediction: {model.predict(row)[0]}")
    if model.tree_ is not None:
        print(f"\npath\n{explain.path(model.model_, row)}")
        nearest = explain.nearest_change(model.model_, row, x, extrapolate=options.extrapolate)
        other = "class" if has_classes else "leaf"
        ranges = "" if options.extrapolate else " within their ranges in the table"
        if len(x) == 1:
            print(f"\nnearest {other}: the table must have other rows to measure changes by")
        elif nearest is None:
            print(f"\nno change of the columns of numbers{ranges} leads to another {other}")
        else:
            print(f"\nnearest {other}: {nearest.distance:.3g} deviations away, with {nearest}")
    background = x.sample(min(_BACKGROUND, len(x)), random_state=0)
    shapley = explain.shapley_values(model.model_, row, background)
    values, base, output = shapley.values[0], shapley.base_values[0], ""
    if values.ndim == 2:
        # Several outputs are classes, the levels of a quantile, or several targets.
        levels = model.quantile if not has_classes and isinstance(model.quantile, (tuple, list)) else None
        k = int(np.asarray(model.model_.predict(row))[0].argmax()) if levels is None else len(levels) // 2
        values, base = values[:, k], base[k]
        output = f" of output {k}" if levels is None else f" of the quantile {levels[k]:g}"
        output = f" of the probability of {_class_names(model)[k]}" if has_classes else output
    print(f"\nShapley values{output}\n{base:+.4g} mean")
    for i in np.argsort(-np.abs(values), kind="stable"):
        print(f"{values[i]:+.4g} {shapley.feature_names[i]}")
    return 0


def _class_names(model: Any) -> list[str]:
    """Returns the labels of the outputs of a classifier's model, which lacks labels without rows of positive weight."""
    return list(map(str, model.classes_[model._present]))


def _export(options: argparse.Namespace) -> int:
    if (write := _WRITERS.get(options.file.suffix)) is None:
        raise DataError(f"FILE must end in {', '.join(_WRITERS)}, got {validation.quoted(str(options.file))}")
    model = _loaded(options.model)
    has_names = write is export.to_sql and is_classifier(model)
    how: Any = {"class_names": _class_names(model)} if has_names else {}
    exported, names = model.model_, None
    if write is export.to_stablehlo and isinstance(exported, FrameModel):
        exported, names = exported.model, exported.encoder.feature_names
    write(exported, options.file, **how)
    if names is not None:
        print(f"its features are {', '.join(names)}")
    if is_classifier(model):
        print(f"its outputs are probabilities of {', '.join(_class_names(model))}")
    print(f"written to {options.file}")
    return 0


def _report(options: argparse.Namespace) -> int:
    with io.written_whole(options.out) as file:
        table, task = _labelled(options)
        recipe, split = recipe_of(options, task), {"share": _HELD_OUT_OF_REPORT, "forests": True}
        # The verdict on held-out rows replaces the warning.
        with warnings.catch_warnings(action="ignore", category=BehindBaselineWarning):
            held_out = _held_out(options, recipe, table, task, options.max_seconds, **split)
        command, advice = shlex.join(["jtrees", *map(str, options.words)]), _advice(options, held_out)
        write_report(file, held_out, name=table.name, target=str(table.y.name), command=command, advice=advice)
    print(f"written to {options.out}")
    return _interrupted() if _is_interrupted(held_out) else 0


def _labelled(options: argparse.Namespace) -> tuple[LabelledTable, Task]:
    """Returns the data set and its task, and prints which rows and columns are left out.

    Raises ``DataError`` if the data cannot be used, or if the targets do not suit the loss.
    """
    loss = loss_of(options)
    data = read_labelled(options.table, options.target, rules_of(options))
    task, reason = options.task, ""
    if task is None and options.loss is not None:
        task, reason = "regression", f"--loss {options.loss} is for numbers"
    table, task, lines = prepared(data, task, reason)
    if task == "regression":
        try:
            loss.check(data.y.to_numpy(np.float64, na_value=np.nan))  # numbers the rows as in the file
        except ValueError as error:
            raise DataError(f"target {validation.quoted(data.y.name)} {str(error).removeprefix('y ')}") from None
    print("\n".join(lines))
    schema: Any = table.schema
    for line in schema.messages(as_options):
        print(f"jtrees: {line}", file=sys.stderr)
    return table, task


def _loaded(path: Path) -> Any:
    """Returns the estimator in a file; raises ``DataError`` for another object."""
    model = io.load(path)
    if not isinstance(model, TreeEstimator):
        raise DataError(f"{path} must hold a model of jtrees fit, or an estimator, got {type(model).__name__}")
    return model


def _rows(model: Any, options: argparse.Namespace, fewest: int = 1) -> pd.DataFrame:
    """Returns the columns of a table for a model, in the model's order; columns that it does not use may be missing.

    Raises ``DataError`` if the table cannot be read, or if a column that the model uses is missing.
    """
    schema: Schema | None = None if model.encoder_ is None else model.encoder_.schema
    rules = rules_of(options)
    table, changes = read_rows(options.table, rules)
    for line in changes:
        print(f"jtrees: {line}", file=sys.stderr)
    if further := checked_missing(options.missing or ()):
        gaps = {name: missing_mask(table[name], further) for name in table}
        table = table.mask(pd.DataFrame(gaps, index=table.index, dtype=bool), None)
    if not is_parquet(options.table):
        missing = rules.missing if schema is None else schema.missing
        numbers = {
            name: RawColumn("text", table[name].to_numpy(object)).masked(missing).in_kind(reading).masked(missing)
            for name, reading in _readings(schema, list(table), options.decimal).items()
        }
        warn_of_odd_cells({name: raw.odd for name, raw in numbers.items()})
        table = table.assign(**{name: raw.values for name, raw in numbers.items()})
    described = {} if schema is None or not schema.named else schema.columns
    names = list(getattr(model, "feature_names_in_", described))
    dropped = {name for name, column in described.items() if column.kind == "drop"}
    if absent := [name for name in names if name not in table and name not in dropped]:
        named = validation.quoted(absent[0])
        raise DataError(f"{options.table} must have the columns of the model, got none called {named}")
    if len(table) < fewest:
        raise DataError(f"{options.table} has no rows")
    return table.reindex(columns=names) if names else table


def _readings(schema: Schema | None, names: list[str], decimal: str | None) -> dict[str, Reading]:
    """Returns how numbers are read if ``decimal`` replaces the model's rule. Without a schema: all columns."""
    if schema is None:
        return dict.fromkeys(names, Reading("number", decimal=decimal or "."))
    if decimal is None:
        return {}
    columns = schema.columns if schema.named else dict(zip(names, schema.columns.values(), strict=False))
    numbers = {name: column for name, column in columns.items() if column.kind == "number" and name in names}
    return {name: column.text_reading.with_decimal(decimal) for name, column in numbers.items()}


@contextlib.contextmanager
def _messages_as_lines() -> Iterator[None]:
    """Context in which warnings, and information messages of the library's log, are lines on standard error."""
    log, handler = logging.getLogger("jtrees"), logging.StreamHandler(sys.stderr)
    level = log.level
    handler.setFormatter(logging.Formatter("jtrees: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    shown = lambda message, *_, **__: print(f"jtrees: {one_line(Exception(message))}", file=sys.stderr)
    try:
        with warnings.catch_warnings(action="default"):
            for package in ("jax", "sklearn", "pandas", "matplotlib"):
                warnings.filterwarnings("ignore", module=rf"{package}\.")
            warnings.filterwarnings("ignore", "columns of x ", ColumnsWarning)  # these lines name options instead
            warnings.showwarning = shown
            yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
