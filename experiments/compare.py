"""The main job: methods side by side on one table of numbers.

python -m experiments.compare                                        # the embedded data set, under a minute
python -m experiments.compare --data-dir FOLDER --dataset kin8nm --depth 6
python -m experiments.compare --csv houses.csv --target price --methods cart get --depth 3 5
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
import importlib.metadata
import json
import os
from pathlib import Path
import platform
import shutil
import sys
import tempfile
import time
from typing import Any

import jax
from matplotlib.figure import Figure
import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from sklearn.ensemble import RandomForestRegressor
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.tree import DecisionTreeRegressor

from experiments import benchmark, data
import jtrees
from jtrees import plotting, warmstart
from jtrees.table import checked_table


@dataclass(frozen=True)
class Row:
    """One line of the table. Scores are R^2; seconds include compilation."""

    method: str
    depth: int | None
    train_r2: float
    test_r2: float
    leaves: int
    parameters: int
    train_seconds: float
    rows_per_second: float


def _get(depth: Any, options: argparse.Namespace, **others: Any) -> Any:
    return jtrees.GET(depth=depth, starts=options.starts, epochs=options.epochs, **others)


def _raddt(depth: Any, options: argparse.Namespace) -> Any:
    # Five scales where GET has two: as many updates in all.
    return jtrees.RADDT(depth=depth, starts=options.starts, epochs=max(1, 2 * options.epochs // 5))


def _batch_epochs(n: int) -> int:
    """About two thousand mini-batches of 128, and at least the default."""
    return max(100, 2000 * 128 // n)


# Depth, command line and number of rows -> a recipe, or an estimator of scikit-learn.
MODELS: dict[str, Callable[[Any, argparse.Namespace, int], Any]] = {
    "cart": lambda depth, options, n: DecisionTreeRegressor(max_depth=depth, random_state=options.seed),
    "get": lambda depth, options, n: _get(depth, options),
    "get-polished": lambda depth, options, n: jtrees.Polished(base=_get(depth, options), epochs=options.epochs),
    "get-linear": lambda depth, options, n: _get(depth, options, leaves="linear"),
    "raddt": lambda depth, options, n: _raddt(depth, options),
    "dgt": lambda depth, options, n: jtrees.DGT(depth=depth, epochs=_batch_epochs(n)),
    "dgt-forest": lambda depth, options, n: jtrees.Bagged(base=jtrees.DGT(depth=depth, epochs=_batch_epochs(n))),
    "latent": lambda depth, options, n: jtrees.LatentTree(depth=depth, epochs=_batch_epochs(n)),
    "forest": lambda depth, options, n: RandomForestRegressor(n_estimators=100, random_state=options.seed, n_jobs=-1),
}
WITHOUT_DEPTH = ("forest",)
# Rows from which training takes longer than what compiling for several devices takes in addition (two thirds).
_MANY = 2000
DEFAULT_METHODS = ["cart", "get", "get-linear", "forest"]  # what the main job has time for


def _fitted(model: Any, x: np.ndarray, y: np.ndarray, seed: int) -> Any:
    """What answers: of a recipe the model that it finds, or the estimator itself."""
    recipe = isinstance(model, jtrees.Recipe)
    return jtrees.fit(model, x, y, key=jax.random.key(seed)).model if recipe else model.fit(x, y)


def _size(model: Any, x: np.ndarray) -> tuple[int, int, jtrees.ObliqueTree | None]:
    """Leaves, parameters, and the oblique tree that a model is (what divides no training sample left out)."""
    if isinstance(model, RandomForestRegressor):
        trees = [member.tree_ for member in model.estimators_]
        leaves = sum(tree.n_leaves for tree in trees)
        return leaves, 2 * (sum(tree.node_count for tree in trees) - leaves) + leaves, None
    if isinstance(model, jtrees.Forest):
        members = [tree.prune(x) for tree in model]
        return sum(tree.num_leaves for tree in members), sum(tree.num_parameters for tree in members), None
    if isinstance(model, jtrees.LatentModel):  # a tree and a predictor on it
        return int((np.asarray(model.active[len(model.active) // 2 :]) > 0).sum()), model.num_parameters, None
    tree = warmstart.from_sklearn(model) if isinstance(model, DecisionTreeRegressor) else model.prune(x)
    return tree.num_leaves, tree.num_parameters, tree


def measure(
    method: str, depth: int | None, splits: Sequence[Any], options: argparse.Namespace
) -> tuple[Row, jtrees.ObliqueTree | None]:
    """Fits one method; its row, and its tree if it is one."""
    x_train, x_test, y_train, y_test = splits
    start = time.perf_counter()
    model = _fitted(MODELS[method](depth, options, len(x_train)), x_train, y_train, options.seed)
    seconds = time.perf_counter() - start
    leaves, parameters, tree = _size(model, x_train)
    many = np.tile(x_test, (max(1, 20_000 // len(x_test)), 1))
    model.predict(many)  # the first call compiles
    start = time.perf_counter()
    model.predict(many)
    rate = len(many) / (time.perf_counter() - start)
    train_r2 = float(r2_score(y_train, model.predict(x_train)))
    test_r2 = float(r2_score(y_test, model.predict(x_test)))
    return Row(method, depth, train_r2, test_r2, leaves, parameters, seconds, rate), tree


def run(options: argparse.Namespace, console: Console) -> Path:
    """Runs everything, prints the table, writes the results folder and returns its path."""
    table = data.load(options.dataset, data_dir=options.data_dir, csv=options.csv, target=options.target)
    if table.is_classification:
        raise data.DataError(f"data set {table.name} has class labels ({table.y.dtype}): compare is about regression")
    checked_table(table.x, table.y, None, "regression")
    splits = train_test_split(table.x, table.y, train_size=options.train_fraction, random_state=options.seed)
    jobs = [(m, d) for m in options.methods if m not in WITHOUT_DEPTH for d in options.depth]
    jobs += [(m, None) for m in options.methods if m in WITHOUT_DEPTH]
    n, p = table.x.shape
    if n >= _MANY:
        benchmark.use_all_cores()
    console.print(f"[bold]{table.name}[/bold]: {n} rows, {p} features, {len(splits[0])} to train on")
    rows, trees = [], {}
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for method, depth in jobs:
            progress.update(task, description=method if depth is None else f"{method}, depth {depth}")
            row, tree = measure(method, depth, splits, options)
            rows.append(row)
            if tree is not None:
                trees[f"{method}_depth{depth}"] = tree
            progress.advance(task)
    console.print(_rich_table(rows))
    folder = write(options, table, rows, trees)
    console.print(f"written to {folder}")
    return folder


def _text(row: Row) -> list[str]:
    scores = [f"{row.train_r2:.4f}", f"{row.test_r2:.4f}", str(row.leaves), str(row.parameters)]
    times = [f"{row.train_seconds:.2f}", f"{row.rows_per_second / 1e6:.2f} M"]
    return [row.method, "-" if row.depth is None else str(row.depth), *scores, *times]


HEADER = ["method", "depth", "train R2", "test R2", "leaves", "numbers", "train s", "rows/s"]


def _rich_table(rows: list[Row]) -> RichTable:
    out = RichTable()
    for name in HEADER:
        out.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        out.add_row(*_text(row))
    return out


def write(options: argparse.Namespace, table: data.Table, rows: list[Row], trees: dict[str, Any]) -> Path:
    """Writes the results beside their place, then renames: the folder is whole or not there."""
    parent = Path(options.out)
    parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=parent))
    try:
        pd.DataFrame([asdict(row) for row in rows]).to_csv(aside / "table.csv", index=False)
        (aside / "table.md").write_text(benchmark.markdown(HEADER, list(map(_text, rows))))
        (aside / "config.json").write_text(json.dumps(_config(options, table), indent=2) + "\n")
        for name, tree in trees.items():
            parts = {"leaf": vars(tree.leaves), "origin": {} if tree.origin is None else vars(tree.origin)}
            rest = {f"{part}_{k}": v for part, of in parts.items() for k, v in of.items() if v is not None}
            np.savez(aside / f"{name}.npz", weights=tree.weights, bias=tree.bias, **rest)
            (aside / f"{name}.txt").write_text(tree.to_text(table.feature_names) + "\n")
        _figure(aside / "figure.png", rows, trees, table)
        aside.chmod(0o755)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for suffix in ["", *(f"-{i}" for i in range(2, 1000))]:
            folder = parent / f"{table.name}-{stamp}{suffix}"
            if not folder.exists():
                os.rename(aside, folder)
                return folder
        raise FileExistsError(f"no free name for the results in {parent}")
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _config(options: argparse.Namespace, table: data.Table) -> dict[str, Any]:
    packages = ["jtrees", "jax", "jaxlib", "optax", "flax", "numpy", "scikit-learn"]
    versions = {name: importlib.metadata.version(name) for name in packages} | {"python": platform.python_version()}
    asked = {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()}
    devices = [device.device_kind for device in jax.devices()]
    return {
        "options": asked,
        "data": {"name": table.name, "rows": len(table.x), "features": table.feature_names},
        "versions": versions,
        "machine": {"devices": devices, "cpus": os.cpu_count(), "processor": platform.machine()},
    }


def _figure(file: Path, rows: list[Row], trees: dict[str, Any], table: data.Table) -> None:
    """Score against parameters, and the best learnt tree (the smaller, if two are equal)."""
    learnt = {name: tree for name, tree in trees.items() if not name.startswith("cart")} or trees
    figure = Figure(figsize=(16 if learnt else 5, 5), layout="tight")
    axes = np.atleast_1d(figure.subplots(1, 1 + bool(learnt), width_ratios=[1, 2][: 1 + bool(learnt)]))
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method]
        axes[0].plot([r.parameters for r in own], [r.test_r2 for r in own], "o-", label=method)
        for row in own:
            where = {"xytext": (3, 3), "textcoords": "offset points"}
            axes[0].annotate("" if row.depth is None else f"{row.depth}", (row.parameters, row.test_r2), **where)
    axes[0].set(xscale="log", xlabel="parameters", ylabel="test $R^2$", title=f"{table.name} (numbers: depth)")
    axes[0].legend()
    if learnt:
        score = {f"{row.method}_depth{row.depth}": row.test_r2 for row in rows}
        best = max(learnt, key=lambda name: score.get(name, -np.inf))
        plotting.plot_tree(learnt[best], axes[1], feature_names=table.feature_names)
        axes[1].set_title(best.replace("_depth", ", depth "))
    figure.savefig(file, dpi=110)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.compare", description="Methods side by side on a table."
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--dataset", help="a data set by name (default: diabetes, which is embedded)")
    source.add_argument("--csv", type=Path, help="a CSV file with a header")
    parser.add_argument("--target", help="the column of the CSV to learn")
    parser.add_argument("--data-dir", help="a folder of .npz files with X and y (default: $JTREES_DATA)")
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=MODELS,
        default=DEFAULT_METHODS,
        metavar="M",
        help=f"{', '.join(MODELS)} (default: {' '.join(DEFAULT_METHODS)})",
    )
    parser.add_argument("--depth", nargs="+", type=int, default=[1, 2, 3], help="depths (default: 1 2 3)")
    parser.add_argument("--starts", type=int, default=10, help="starts of GET (default: 10)")
    parser.add_argument("--epochs", type=int, default=1000, help="epochs of GET under each scale (default: 1000)")
    parser.add_argument("--train-fraction", type=float, default=0.75, help="part to train on (default: 0.75)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="results", help="where the results folder goes (default: results)")
    options = parser.parse_args(arguments)
    if not 0 < options.train_fraction < 1:
        parser.error(f"argument --train-fraction: must be between 0 and 1, got {options.train_fraction}")
    if options.target is not None and options.csv is None:
        parser.error("argument --target: goes with --csv")
    for depth in options.depth:
        jtrees.validation.check_depth(depth)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0, or 2 with one line that says what was wrong with the arguments or the data."""
    try:
        run(parse(arguments), Console())
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
