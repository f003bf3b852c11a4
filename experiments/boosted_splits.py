"""Defaults of Boosted: oblique or axis-aligned splits, chosen by held-out rows, and the shrinkage of leaves, l2.

python -m experiments.boosted_splits --data-dir DATA --tables-dir TABLES [--write] [--sets titanic ...]

The score is the test log loss of classes, or R^2 in per cent, of one split: three quarters of the rows are training
rows, at most 8000. ``TABLES`` is the folder of raw tables of ``experiments.raw_tables``.
"""

from collections.abc import Callable
import contextlib
from typing import Any
from unittest import mock
import warnings

import numpy as np

from experiments import benchmark, data, raw_tables, studies
import jtrees
from jtrees.ensembles import boosted
from jtrees.estimators import BoostedClassifier, BoostedRegressor

ROWS = 8000  # upper limit of the training rows
SETS = (
    *("titanic", "loan", "adult", "telco", "diabetes", "vehicle"),
    *("auto", "bike", "kin8nm", "airfoil-self-noise", "bengaluru"),
)
L2 = (1.0, 10.0, 30.0, 100.0)
_begin = boosted.begin


def only(kind: slice) -> Any:
    """Returns a context in which Boosted has some of its kinds of trees: it has no option for this."""

    async def begin(problem: Any) -> Any:
        return (await _begin(problem))[kind]

    return mock.patch.object(boosted, "begin", begin)


SPLITS: dict[str, Callable[[], Any]] = {
    "oblique": lambda: only(slice(-1, None)),
    "axis-aligned": lambda: only(slice(1)),
    "chosen": contextlib.nullcontext,
}


def split_of(name: str, data_dir: str | None, tables_dir: str | None) -> tuple[Any, ...]:
    """Returns training and test features, and training and test targets, of a raw table or of a set of numbers."""
    if name in raw_tables.SOURCES:
        return raw_tables.split_of(raw_tables.read(tables_dir, name), raw_tables.SOURCES[name], 0)
    return data.split_of(name, 0, data_dir, limit=ROWS)


def score(recipe: Any, split: tuple[Any, ...]) -> tuple[float, bool]:
    """Returns log loss or R^2 in per cent on the test rows, and whether held-out rows preferred oblique splits."""
    x, x_test, y, y_test = split
    classifies = y.dtype.kind != "f"
    model: Any = (BoostedClassifier if classifies else BoostedRegressor)(recipe, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # readings of columns, models behind a linear model
        model.fit(x, y)
        if not classifies:
            return studies.percent(np.ravel(model.predict(x_test)), y_test), model.report_.search.is_oblique
        loss = studies.class_scores(model.predict_proba(x_test), y_test, model.classes_)["log_loss"]
    return loss, model.report_.search.is_oblique


def main(arguments: list[str] | None = None) -> None:
    """Measures, and writes the table."""
    several = benchmark.several(SETS)
    options = benchmark.parse("boosted_splits", __doc__, arguments, data_dir=None, tables_dir=None, sets=several, l2=L2)
    heads = [*(f"l2 = {l2:g}" for l2 in options.l2), *SPLITS, "choice"]
    table = benchmark.Table("set", "score", *heads)
    for name in options.sets:
        split = split_of(name, options.data_dir, options.tables_dir)
        classifies = split[2].dtype.kind != "f"
        digits = 4 if classifies else 2
        scores = [score(jtrees.Boosted(l2=l2), split)[0] for l2 in options.l2]
        is_oblique = True
        for context in SPLITS.values():
            with context():
                value, is_oblique = score(jtrees.Boosted(), split)
            scores.append(value)
        choice = "oblique" if is_oblique else "axis-aligned"  # of the last context, where held-out rows choose
        table.add(name, "log loss" if classifies else "R², %", *(f"{value:.{digits}f}" for value in scores), choice)
    notes = (
        "One split and one key. Lower is better for the log loss, higher for R². In the columns of `l2`, held-out "
        "rows choose between oblique and axis-aligned splits. The next three columns have the default `l2`, 10 for "
        "classes and 1 for numbers. The first two of them have one kind of splits only; the last column names the "
        f"choice. Three quarters of the rows are training rows, at most {ROWS}. The raw tables are those of "
        "`experiments.raw_tables`.\n"
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    main()
