"""The main job: methods side by side on one table.

python -m experiments.compare                                        # the embedded data set, within a minute
python -m experiments.compare --dataset digits                       # a set of scikit-learn or OpenML
python -m experiments.compare --csv houses.csv --target price --methods cart get --depth 3 5
"""

import argparse
from collections.abc import Callable
import contextlib
from dataclasses import replace
import importlib
import importlib.metadata
import math
import os
from pathlib import Path
import platform
import signal
import sys
import threading
import time
from typing import Any, NamedTuple
import warnings

import jax
import numpy as np
from rich.console import Console
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.metrics import accuracy_score, balanced_accuracy_score, log_loss, r2_score, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from experiments import benchmark, data
from experiments.outcome import LEGEND, SMALL, Outcome, Row, as_tree, size
import jtrees
from jtrees.cli.files import DataError, one_line, rules_of
from jtrees.cli.parser import add_rules
from jtrees.cli.tables import LabelledTable, Task, as_options, check_named, check_rows, guess, read_labelled, usable
from jtrees.search.result import described
from jtrees.tables import ColumnsWarning, TableEncoder


class Parts(NamedTuple):
    """Training, validation and test rows: features and targets of each, as numbers.

    The validation rows choose the tree to draw. ``classes`` are the labels in the order of their numbers; None in
    regression.
    """

    train: tuple[np.ndarray, np.ndarray]
    validate: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    classes: list[Any] | None

    @property
    def task(self) -> Task:
        return "regression" if self.classes is None else "classification"


class Model(NamedTuple):
    """A method ``(depth, command line, task) -> a recipe, or an estimator of scikit-learn``, and its default depths."""

    make: Callable[[Any, argparse.Namespace, Task], Any]
    depths: tuple[int | None, ...]


def _either(regressor: Any, classifier: Any, **options: Any) -> Callable[[Any, argparse.Namespace, Task], Any]:
    """Returns a method of scikit-learn; ``options`` are functions of the depth and the command line."""
    kind = lambda task: regressor if task == "regression" else classifier
    return lambda depth, arguments, task: kind(task)(
        **{name: value(depth, arguments) for name, value in options.items()}
    )


def _get(depth: Any, options: argparse.Namespace, **arguments: Any) -> Any:
    return jtrees.GET(depth=depth, starts=options.starts, epochs=options.epochs, **arguments)


def _raddt(depth: Any, options: argparse.Namespace, task: Task) -> Any:
    # RADDT has five scales and GET has two. This number of epochs makes their total number of updates equal.
    return jtrees.RADDT(depth=depth, starts=options.starts, epochs=max(1, 2 * options.epochs // 5))


def _polished(depth: Any, options: argparse.Namespace, task: Task) -> Any:
    return jtrees.Polished(_get(depth, options), epochs=options.epochs)


_SEED: Any = {"random_state": lambda depth, arguments: arguments.seed}
_CART = _either(DecisionTreeRegressor, DecisionTreeClassifier, max_depth=lambda depth, arguments: depth, **_SEED)
_TREES: Any = {"n_estimators": lambda depth, arguments: 100, "n_jobs": lambda depth, arguments: -1}
_FOREST = _either(RandomForestRegressor, RandomForestClassifier, **_TREES, **_SEED)
_BASELINE = _either(DummyRegressor, DummyClassifier)  # the mean, or the class frequencies
MODELS = {
    "cart": Model(_CART, (2, 4, 6, 8)),
    "get": Model(lambda depth, options, task: _get(depth, options), (2, 4)),
    "get-linear": Model(lambda depth, options, task: _get(depth, options, leaves="linear"), (2, 4)),
    "dgt": Model(lambda depth, options, task: jtrees.DGT(depth=depth), (4, 6)),
    "latent": Model(lambda depth, options, task: jtrees.LatentTree(depth=depth), (4,)),
    "tel": Model(lambda depth, options, task: jtrees.TEL(depth=depth), (4,)),
    "co2": Model(lambda depth, options, task: jtrees.CO2(depth=depth), (8,)),
    "nongreedy": Model(lambda depth, options, task: jtrees.NonGreedy(depth=depth), (8,)),
    "forest": Model(_FOREST, (None,)),
    "get-polished": Model(_polished, (2, 4)),
    "raddt": Model(_raddt, (2, 4)),
    "dgt-forest": Model(lambda depth, options, task: jtrees.Bagged(jtrees.DGT(depth=depth)), (6,)),
}
BASELINE = "baseline"  # the first row of every table
DEFAULT_METHODS = ["cart", "get", "get-linear", "dgt", "latent", "tel", "forest"]
REGRESSION_ONLY = ("get-linear",)
# Several devices add two thirds to the compilation time. Training takes longer than this addition from MANY rows on.
MANY = 10_000
_TIMED = 8192  # minimum number of rows in a timed prediction


def split(frame: LabelledTable, task: Task, options: argparse.Namespace) -> tuple[Parts, TableEncoder]:
    """Splits a table and fits its columns to the training rows.

    A quarter of the rows are test rows, and three twentieths are validation rows. The parts are stratified by class,
    and each part has at least one row per class.

    Raises:
      ValueError: the table has no usable column, or columns that cannot be read.
    """
    classes, y = None, frame.y.to_numpy()
    if task == "classification":
        classes, y = np.unique(y.astype(str) if y.dtype.kind == "O" else y, return_inverse=True)
    rows = np.arange(len(y))
    options_of_split: Any = {"random_state": options.seed}
    rest, test = train_test_split(rows, test_size=0.25, stratify=None if classes is None else y, **options_of_split)
    strata = None if classes is None else y[rest]
    fifth = max(math.ceil(0.2 * len(rest)), 0 if classes is None else len(classes))
    train, validate = train_test_split(rest, test_size=fifth, stratify=strata, **options_of_split)
    encoder, x = TableEncoder.fit(frame.x.iloc[train], y[train], task=task, columns=frame.schema)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ColumnsWarning)  # missing values in columns that have none in the training rows
        part = lambda rows: (encoder.transform(frame.x.iloc[rows]), y[rows])
        parts = Parts((x, y[train]), part(validate), part(test), None if classes is None else classes.tolist())
    return parts, encoder


def measure(method: str, depth: int | None, parts: Parts, options: argparse.Namespace, bar: bool) -> tuple[Row, Any]:
    """Fits one method; returns its row and its model.

    Raises:
      KeyboardInterrupt: the fit was interrupted.
    """
    x, y = parts.train
    if method in options.recipes:
        model = options.recipes[method]
    else:
        model = (_BASELINE if method == BASELINE else MODELS[method].make)(depth, options, parts.task)
    start = time.perf_counter()
    if isinstance(model, jtrees.Recipe):
        fit = jtrees.fit(model, x, y, key=jax.random.key(options.seed), task=parts.task, progress=bar)
        if fit.report.ended == "interrupted":
            raise KeyboardInterrupt
        # Splits without rows are pruned before the measurements, and the saved model is the measured model.
        model = fit.model.prune(x) if isinstance(fit.model, jtrees.ObliqueTree) else fit.model
    else:
        model.fit(x, y)
    seconds = time.perf_counter() - start
    sets = (parts.train, parts.validate, parts.test)
    rows = np.concatenate([x for x, _ in sets])
    many = np.tile(rows, (-(-_TIMED // len(rows)), 1))
    predict = getattr(model, "predict_proba", model.predict)
    answers = np.asarray(predict(many), np.float64)[: len(rows)]  # the first call compiles
    start = time.perf_counter()
    predict(many)
    rate = len(many) / (time.perf_counter() - start)
    set_answers = np.split(answers, np.cumsum([len(x), len(parts.validate[0])]))
    train, validate, test = (_score(a, y, parts.task) for a, (_, y) in zip(set_answers, sets, strict=True))
    cost = (*size(model, x), seconds, rate)
    if parts.classes is None:
        return Row(method, depth, train, validate, test, None, *cost), model
    loss, balanced, auc = _of_classes(set_answers[2], parts.test[1])
    return Row(method, depth, train, validate, test, loss, *cost, balanced, auc), model


def _score(answers: np.ndarray, y: np.ndarray, task: Task) -> float:
    return float(r2_score(y, answers) if task == "regression" else accuracy_score(y, answers.argmax(1)))


def _of_classes(chances: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Returns log loss, balanced accuracy and area under the ROC curve."""
    chances = chances / chances.sum(1, keepdims=True)
    loss = log_loss(y, chances, labels=np.arange(chances.shape[1]))
    auc = roc_auc_score(y, chances[:, 1] if chances.shape[1] == 2 else chances, multi_class="ovr")
    return float(loss), float(balanced_accuracy_score(y, chances.argmax(1))), float(auc)


def run(options: argparse.Namespace, console: Console, interrupted: Callable[[], bool]) -> int:
    """Runs all jobs until an interruption, and prints and keeps finished rows; returns the exit code.

    Raises:
      DataError: the data are unavailable or unusable.
      OSError: results cannot be written.
    """
    check_rows(frame := _loaded(options))
    task, why = guess(frame.y)
    described_task = f"{task}, as {why} (--task says otherwise)" if options.task is None else options.task
    task = options.task or task
    frame, left_out = usable(frame, task)
    check_rows(frame)
    jobs = jobs_of(options, task)
    if len(frame.x) >= MANY:
        benchmark.use_all_cores()
    parts, encoder = split(frame, task, options)
    names, done = encoder.feature_names, described_columns(encoder)
    messages = [f"{frame.name}: {len(frame.x)} rows, {len(names)} features, {len(parts.train[0])} rows to train on"]
    messages += [f"task: {described_task}", *left_out, *done, *([] if parts.classes is None else LEGEND), ""]
    # Lines are not wrapped, whatever the width of the terminal.
    say = lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True)
    how: Any = {"names": names, "classes": parts.classes, "train": parts.train}
    with Outcome(Path(options.out), say, longest=max(len(method) for method, _ in jobs), **how) as outcome:
        for line in messages:
            say(line)
        try:
            for method, depth in jobs:
                if interrupted():
                    raise KeyboardInterrupt
                row, model = measure(method, depth, parts, options, console.is_terminal)
                outcome.add(row, model, as_tree(model, parts.train[0]), encoder)
            code = 0
        except KeyboardInterrupt:
            code = 130
        folder = outcome.finish(frame.name, _config(options, frame, messages[:-1]))
    if code:
        rows = f"{len(outcome.rows)} of {len(jobs)} rows are in {folder}" if folder else "no row was finished"
        say(f"compare: interrupted; {rows}")
        return code
    baseline, *models = outcome.rows
    if all(row.test <= baseline.test for row in models):
        constant = "the mean" if task == "regression" else "the majority class"
        say(f"\nNo model is better on the test rows than always answering {constant}.")
    if plots := outcome.shown_tree():
        name = plots[0].name.replace("_depth", ", depth ")
        say(f"\ndrawn: {name}, the best on the validation set with at most {SMALL} leaves")
    say(f"written to {folder}")
    return code


def described_columns(encoder: TableEncoder) -> list[str]:
    """Returns a line on each column that is more than numbers without missing values."""

    def plain(name: str) -> bool:
        column = encoder.schema.columns[name]
        has_text = column.reading is not None or column.note
        is_requested = column.kind == "drop" and not column.note
        return is_requested or (column.kind in ("number", "boolean") and not column.missing and not has_text)

    def remedy(name: str) -> str:
        column = encoder.schema.columns[name]
        is_open = column.kind != "drop" and column.otherwise
        return f": {as_options({name: column.otherwise})} reads it otherwise" if is_open else ""

    return [f"{name}: {text}{remedy(name)}" for name, text in encoder.described().items() if not plain(name)]


def _loaded(options: argparse.Namespace) -> LabelledTable:
    if options.csv is not None:
        frame = read_labelled(options.csv, options.target, rules_of(options))
    else:
        frame = data.load_frame(options.dataset, data_dir=options.data_dir)
        kinds = rules_of(options).columns
        check_named(kinds, list(map(str, frame.x.columns)))
        frame = replace(frame, reading={"columns": kinds})
    return frame


def jobs_of(options: argparse.Namespace, task: Task) -> list[tuple[str, int | None]]:
    """Returns the baseline, the user's own recipes, and methods with depths, in this order.

    Raises:
      DataError: no method is for the task.
    """
    methods = [m for m in options.methods if task == "regression" or m not in REGRESSION_ONLY]
    if not methods:
        raise DataError(f"--methods {' '.join(options.methods)} are for regression, and the task is {task}")
    depths = lambda defaults: defaults if options.depth is None or defaults == (None,) else options.depth
    first = [(BASELINE, None)] + [(name, _depth(recipe)) for name, recipe in options.recipes.items()]
    return first + [(method, depth) for method in methods for depth in depths(MODELS[method].depths)]


def _depth(recipe: Any) -> int | None:
    """Returns the depth of the trees of a recipe, if it has a depth."""
    return getattr(getattr(recipe, "base", recipe), "depth", None)


def _user_recipe(argument: str) -> tuple[str, jtrees.Recipe]:
    """Returns name and recipe of ``MODULE:NAME``.

    Raises:
      DataError: there is no such recipe, or a method has the same name.
    """
    module, _, name = argument.partition(":")
    if not module or not name:
        raise DataError(f"--method must be MODULE:NAME, such as my_file:RECIPE, got {argument!r}")
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # the user's file may raise any error
        raise DataError(f"--method {argument}: cannot import {module}: {one_line(error)}") from error
    if not hasattr(imported, name):
        raise DataError(f"--method {argument}: module {module} has no {name}")
    recipe = getattr(imported, name)
    if callable(recipe):
        try:
            recipe = recipe()
        except Exception as error:
            raise DataError(f"--method {argument}: {name}() failed: {one_line(error)}") from error
    if not isinstance(recipe, jtrees.Recipe):
        expected = "must be a recipe, such as jtrees.GET(depth=4), or a function that makes one"
        raise DataError(f"--method {argument}: {expected}, got {recipe!r}")
    if name in MODELS or name == BASELINE:
        raise DataError(f"--method {argument}: there is a method of this name already")
    return name, recipe


@contextlib.contextmanager
def _interruptible() -> Any:
    """Lets Ctrl-C end the job between two lines of the table, because compiled programs cannot be interrupted.

    Yields a function that returns whether Ctrl-C was pressed. A second Ctrl-C raises KeyboardInterrupt.
    """
    pressed: list[int] = []

    def note(*_: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(1)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _config(options: argparse.Namespace, frame: LabelledTable, messages: list[str]) -> dict[str, Any]:
    packages = ["jtrees", "jax", "jaxlib", "optax", "flax", "numpy", "scikit-learn"]
    versions = {name: importlib.metadata.version(name) for name in packages} | {"python": platform.python_version()}
    arguments = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items() if k != "recipes"}
    devices = [device.device_kind for device in jax.devices()]
    return {
        "options": arguments,
        "recipes": {name: described(recipe) for name, recipe in options.recipes.items()},
        "data": {"name": frame.name, "rows": len(frame.x), "columns": [*map(str, frame.x.columns)], "done": messages},
        "versions": versions,
        "machine": {"devices": devices, "cpus": os.cpu_count(), "processor": platform.machine()},
    }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.compare", description="Compares methods on a table.")
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    names = f"{', '.join(data.BUNDLED)}, a file of --data-dir, or one on OpenML"
    source.add_argument("--dataset", default=data.DEFAULT, help=f"by name (default: {data.DEFAULT}, embedded; {names})")
    source.add_argument("--csv", type=Path, help="a CSV file with a header")
    add("--target", help="the column of the CSV to learn")
    add_rules(parser, training=True)
    add("--data-dir", help="a folder of .npz files with X and y (default: $JTREES_DATA)")
    add("--task", choices=["regression", "classification"], help="(default: inferred from the target)")
    methods_help = f"{', '.join(MODELS)} (default: {' '.join(DEFAULT_METHODS)})"
    add("--methods", nargs="+", choices=MODELS, default=DEFAULT_METHODS, metavar="M", help=methods_help)
    add("--method", nargs="+", default=[], metavar="MODULE:NAME", help="recipes of your own, such as my_file:RECIPE")
    add("--depth", nargs="+", type=int, help="depths of --methods (default: some for each)")
    add("--starts", type=int, default=10, help="starts of GET (default: 10)")
    add("--epochs", type=int, default=500, help="epochs of GET under each scale (default: 500)")
    add("--seed", type=int, default=0)
    add("--out", default="results", help="where the results folder goes (default: results)")
    options = parser.parse_args(arguments)
    if options.target is not None and options.csv is None:
        parser.error("argument --target: goes with --csv")
    if options.decimal is not None and options.csv is None:
        parser.error("argument --decimal: goes with --csv")
    for depth in options.depth or ():
        jtrees.validation.check_depth(depth)
    named = [_user_recipe(argument) for argument in options.method]
    options.recipes = dict(named)
    if len(options.recipes) < len(named):
        raise DataError(f"--method must name recipes of different names, got {' '.join(options.method)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0; 2 after one line on wrong arguments, data or results folder; 130 after Ctrl-C."""
    try:
        with _interruptible() as interrupted:
            return run(parse(arguments), Console(), interrupted)
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
    except OSError as error:
        print(f"compare: cannot write results: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
