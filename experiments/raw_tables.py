"""The estimators with their defaults on raw tables, beside boosting packages with their defaults.

python -m experiments.raw_tables --tables-dir FOLDER --seeds 3 [--tables titanic ...] [--models "CatBoost" ...]

The result of a (model, table, seed) is a row of --out. A table is what ``pd.read_csv`` returns, and nothing else. Three
quarters of the rows are training rows, stratified by class. Regression omits the highest half per cent of the targets,
because a few typing errors would decide R^2. The models of jtrees take the table unchanged; the rivals take text as
categories (``packages.CATEGORIES``). The report names rivals that are not installed (``make peers``).

The folder has NAME.csv or NAME.csv.gz of each table. The tables are not shipped; SOURCES says where they come from.
"""

import argparse
import os
from pathlib import Path
import time
from typing import Any, NamedTuple
import warnings

import numpy as np
import pandas as pd
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import train_test_split

from experiments import benchmark, packages, studies
import jtrees
from jtrees.estimators import BoostedClassifier, BoostedRegressor, TreeClassifier, TreeRegressor


class Source(NamedTuple):
    """A raw table: its target, whether the targets are classes, and where it comes from."""

    target: str
    classifies: bool
    origin: str


SOURCES = {
    "titanic": Source("Survived", True, "Titanic, the training file of Kaggle's competition, without the names"),
    "ames": Source("SalePrice", False, "houses of Ames, Iowa (De Cock 2011), with the column names of R"),
    "adult": Source("income", True, "UCI Adult, with the space after each comma; 4000 of its rows"),
    "auto": Source("price", False, "UCI Automobile, with a line of names"),
    "telco": Source("Churn", True, "customers of a telephone company, a sample data set of IBM; 4000 of its rows"),
    "loan": Source(
        "Loan_Status",
        True,
        "loan prediction of Analytics Vidhya; 491 of its rows, with row numbers and a target of 0 and 1",
    ),
    "diamonds": Source("price", False, "diamonds of ggplot2; 4000 of its rows"),
    "bike": Source(
        "cnt",
        False,
        "UCI Bike Sharing, hours, with dates as day-month-year, without casual and registered; 4000 of its rows",
    ),
    "bengaluru": Source("price", False, "prices of houses in Bengaluru, of Kaggle; 4000 of its rows"),
}
HIGHEST = 0.995  # quantile of the targets of regression; rows above it are omitted
KINDS: dict[str, tuple[Any, Any]] = {  # for numbers, for classes
    "Boosted()": (BoostedRegressor, BoostedClassifier),
    "Tree()": (TreeRegressor, TreeClassifier),
    "Refined()": (
        lambda **options: TreeRegressor(jtrees.Refined(), **options),
        lambda **options: TreeClassifier(jtrees.Refined(), **options),
    ),
}
BINS = "HistGradientBoosting"
MODELS = (*KINDS, BINS, *packages.PACKAGES)
STRONGEST = (BINS, "CatBoost")  # the rivals that our models are compared with


def read(folder: str | None, name: str) -> pd.DataFrame:
    """Returns a table as ``pd.read_csv`` reads it. The default folder is the environment variable JTREES_TABLES.

    Raises:
      SystemExit: the folder has no such table.
    """
    files = [Path(folder or os.environ.get("JTREES_TABLES", ".")) / f"{name}{ending}" for ending in (".csv", ".csv.gz")]
    file = next(filter(Path.exists, files), None)
    if file is None:
        raise SystemExit(f"--tables-dir must have {name}.csv or {name}.csv.gz: {SOURCES[name].origin}")
    return pd.read_csv(file)


def split_of(frame: pd.DataFrame, source: Source, seed: int) -> tuple[Any, ...]:
    """Returns training and test rows of a table, three quarters and one quarter, and their targets."""
    column: Any = frame[source.target]
    y: Any = column if source.classifies else pd.to_numeric(column, errors="coerce")
    keep = y.notna() if source.classifies else y <= y.quantile(HIGHEST)  # False for a missing number
    x, targets = frame[keep].drop(columns=source.target), y[keep].to_numpy().astype(str if source.classifies else float)
    strata = targets if source.classifies else None
    return tuple(train_test_split(x, targets, test_size=0.25, random_state=seed, stratify=strata))


def model_of(name: str, classifies: bool, seed: int, x: pd.DataFrame) -> Any:
    """Returns a model with its defaults."""
    if name in KINDS:
        return KINDS[name][classifies](random_state=seed)
    if name == BINS:
        kind = HistGradientBoostingClassifier if classifies else HistGradientBoostingRegressor
        return kind(categorical_features="from_dtype", random_state=seed)
    return packages.default(name, classifies, seed, x)


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns our recipe as text, or nothing for a rival."""
    if part not in KINDS:
        return {}
    recipe = model_of(part, SOURCES[name].classifies, 0, pd.DataFrame()).recipe
    default = KINDS[part][SOURCES[name].classifies]
    return {"recipe": studies.recipe_text(default.default_recipe if recipe is None else recipe)}


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fits a model to a table: score in per cent, log loss, seconds of the fit, rows, columns, our features."""
    source = SOURCES[name]
    x, x_test, y, y_test = split_of(read(options.data_dir, name), source, seed)
    value: dict[str, Any] = {"rows": len(x), "columns": x.shape[1]}
    if part not in KINDS:
        x, x_test = packages.with_categories(part, x, x_test)
        if source.classifies:  # XGBoost takes numbers of classes only
            classes, y = np.unique(y, return_inverse=True)
            y_test = np.searchsorted(classes, y_test)
    model = model_of(part, source.classifies, seed, x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # readings of columns, models behind a linear model
        start = time.perf_counter()
        model.fit(x, y)
        value["seconds"] = time.perf_counter() - start
        if source.classifies:
            value |= studies.class_scores(model.predict_proba(x_test), y_test, model.classes_)
        else:
            value["score"] = studies.percent(np.ravel(model.predict(x_test)), y_test)
    if part in KINDS:
        value["features"] = len(model.get_feature_names_out())
    return value


# --- The report ------------------------------------------------------------------------------------------------------


def gap_to_rivals(results: studies.Results, ours: str, name: str) -> float | None:
    """Returns how far a model of ours is ahead of the better strong rival, on the seeds that both have; or None.

    The unit is a point of R^2, or a hundredth of log loss.
    """
    rivals = [rival for rival in STRONGEST if results.values(rival, name)]
    key, scale, best = ("log_loss", -100, min) if SOURCES[name].classifies else ("score", 1, max)
    seeds = results.common(name, ours, *rivals).values() if rivals else ()
    gap = lambda values: scale * (values[ours][key] - best(values[rival][key] for rival in rivals))
    return float(np.mean([gap(values) for values in seeds])) if seeds else None


def summary(results: studies.Results) -> str:
    """Returns a table of our models: how far ahead, the longest fit, the most features."""
    rows = []
    for ours in KINDS:
        gaps = {name: gap for name in results.datasets(ours) if (gap := gap_to_rivals(results, ours, name)) is not None}
        if not gaps:
            continue
        rows_of_model = [row.value for row in results.select(ours).rows]
        means = [f"{statistic(list(gaps.values())):+.2f}" for statistic in (np.mean, np.median)]
        task_means = [
            f"{np.mean(values):+.2f}" if values else "-"
            for classifies in (False, True)
            for values in [[gap for name, gap in gaps.items() if SOURCES[name].classifies == classifies]]
        ]
        wins = f"{sum(gap > 0 for gap in gaps.values())} of {len(gaps)}"
        longest = max(value["seconds"] for value in rows_of_model)
        features = max(value["features"] / value["columns"] for value in rows_of_model)
        rows.append([ours, *means, *task_means, wins, f"{longest:.0f}", f"{features:.1f}"])
    heads = ["mean", "median", "R², points", "log loss, hundredths", "ahead on", "longest fit, s", "features / columns"]
    return benchmark.markdown(["model", *heads], rows)


def cells_table(
    results: studies.Results, models: list[str], names: list[str], key: str, digits: int, text: Any = studies.spread
) -> str:
    """Returns a table of a number of each model on each table. ``text(values, digits)`` shows its splits."""
    rows = []
    for name in names:
        values = {model: results.values(model, name) for model in models}
        size = next(iter(value for cells in values.values() for value in cells))
        cells = [text([value[key] for value in values[model]], digits) for model in models]
        rows.append([name, f"{size['rows']} x {size['columns']}", *cells])
    return benchmark.markdown(["table", "rows x columns", *models], rows)


def report(results: studies.Results, command: str) -> str:
    """Returns the comparison with the strong rivals, and scores, log loss, seconds and features by table."""
    models = [model for model in MODELS if results.datasets(model)]
    names = [name for name in SOURCES if name in results.datasets()]
    seeds = len({row.seed for row in results.rows})
    tasks = {task: [n for n in names if SOURCES[n].classifies == task] for task in (False, True)}
    present = {row.key for row in results.rows}
    lacking: dict[str, int] = {}
    for model, name, seed in ((m, n, s) for m in MODELS for n in SOURCES for s in range(seeds)):
        lacking[model] = lacking.get(model, 0) + ((model, name, seed) not in present)
    missing = [f"{model} ({count} of {len(SOURCES) * seeds})" for model, count in lacking.items() if count]
    head = (
        f"# Raw tables\n\nMade by `{command}` on {results.machines}. Each table is what `pd.read_csv` returns. "
        "`Boosted()`, `Tree()` and `Refined()` are `BoostedRegressor()`, `TreeRegressor()` and "
        "`TreeRegressor(Refined())`, or the same for classes. They take the table unchanged. The rivals take text as "
        "categories. All models have their defaults. Scores are of a quarter of the rows, means over "
        f"{seeds} random split{'s' if seeds > 1 else ''}. Regression omits the highest half per cent of the targets. "
        "Seconds are of a first fit, which compiles all of its programs. On a busy machine they are upper bounds.\n"
    )
    about = (
        "Each model minus the better of HistGradientBoosting and CatBoost on the table. The unit is a point of R², or "
        "a hundredth of log loss; above 0, the model of jtrees is better. Mean and median are over all tables; the "
        "next two columns are means over the tables of each task. A mean can depend on one table, so read "
        "it beside the median and the number of tables on which the model is ahead."
    )
    parts = [head.rstrip(), about, summary(results)]
    if tasks[False]:
        parts += ["R² in per cent:", cells_table(results, models, tasks[False], "score", 1)]
    if tasks[True]:
        parts += ["Log loss:", cells_table(results, models, tasks[True], "log_loss", 3)]
        parts += ["Accuracy in per cent:", cells_table(results, models, tasks[True], "score", 1)]
    if names:
        shortest = lambda values, digits: f"{min(values, default=np.nan):.{digits}f}"
        parts += ["Seconds of a fit, the shortest of the splits:"]
        parts += [cells_table(results, models, names, "seconds", 1, shortest)]
        ours = [model for model in models if model in KINDS]
        parts += ["Features:", cells_table(results, ours, names, "features", 0)] if ours else []
    recipes = {row.settings["recipe"]: None for row in results.rows if row.part in KINDS}
    parts.append("Recipes of jtrees:\n\n" + "\n".join(f"- `{recipe}`" for recipe in recipes))
    origins = "\n".join(f"- {name}: {source.origin}; target `{source.target}`." for name, source in SOURCES.items())
    parts.append(f"The tables are public and not shipped. Their sources:\n\n{origins}")
    if missing:
        parts.append(f"Without results: {', '.join(missing)}.")
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


STUDY = studies.Study(
    *("raw_tables", __doc__, MODELS, SOURCES, 3, measure, report, settings),
    closed=True,
    available=packages.available,
    flags=("tables-dir", "tables", "models"),
)

if __name__ == "__main__":
    benchmark.compile_all_programs()  # as in the first fit of a user
    studies.main(STUDY)  # on one device, as for users
