"""Recipes and simpler models side by side on one table.

python -m experiments.compare                                   # the embedded data set, within a minute
python -m experiments.compare --dataset digits                  # a set of scikit-learn or OpenML
python -m experiments.compare --csv houses.csv --target price
"""

import argparse
from dataclasses import replace
import json
from pathlib import Path
import pkgutil
import re
import sys
import time
from typing import Any

import jax
import joblib
from matplotlib.figure import Figure
import numpy as np
import pandas as pd

from experiments import benchmark, data, studies
from experiments.sizes import as_tree, size
import jtrees
from jtrees import plotting
from jtrees.cli.files import DataError, one_line, rules_of
from jtrees.cli.parser import add_rules
from jtrees.cli.tables import LabelledTable, as_options, check_named, prepared, read_labelled, targets_of
from jtrees.report.held_out import HeldOutRows
from jtrees.report.page import MAX_TERMS
from jtrees.report.rivals import rivals
from jtrees.search.result import described
from jtrees.text import number_text

HELD_OUT = 0.25  # fraction of the rows that give the scores
CART_DEPTHS = (2, 4, 6, 8)
SMALL = 8  # largest number of leaves of the tree in the figure: a larger tree is illegible
GET = jtrees.GET(starts=10, epochs=500)
RECIPES: dict[str, jtrees.Recipe] = {
    **{f"GET, depth {depth}": GET.replace(depth=depth) for depth in (2, 4)},
    **{f"GET-Linear, depth {depth}": GET.replace(depth=depth, leaves="linear") for depth in (2, 4)},  # for regression
    **{f"DGT, depth {depth}": jtrees.DGT(depth=depth) for depth in (4, 6)},
    "LatentTree, depth 4": jtrees.LatentTree(depth=4),
    "TEL, depth 4": jtrees.TEL(depth=4),
}


class Results:
    """The models in the order of their fits: a table of their scores and sizes, and their files in a folder.

    Attributes:
      rows: the split, the scores and the seconds.
      sizes: the score on the training rows, the leaves and the numbers, by name of the model.
      trees: the models that are single trees, by name.
    """

    def __init__(self, rows: HeldOutRows, folder: Path):
        self.rows, self.folder, self.sizes, self.trees = rows, folder, {}, {}
        names, classes = rows.rows.encoder.feature_names, rows.classes or None
        self.shown: Any = {"feature_names": names, "class_names": classes, "max_terms": MAX_TERMS, "x": rows.features}

    def add(self, name: str, model: Any) -> None:
        """Keeps a model that the split has scores of: with its encoder, and a tree also as arrays and rules."""
        rows = self.rows
        predicted = getattr(model, "predict_proba", model.predict)(rows.features)
        measure, score = next(iter(rows.scores_of(np.asarray(predicted), rows.codes(rows.y_train)).items()))
        leaves, numbers = size(model, rows.features)
        saved = {"encoder": rows.rows.encoder, "model": model, "classes": rows.classes or None}
        joblib.dump(saved, self._file(name, ".joblib"), compress=1)
        if (tree := as_tree(model, rows.features)) is not None:
            self.trees[name] = tree
            np.savez(self._file(name, ".npz"), **arrays(tree))
            self._file(name, ".txt").write_text(tree.to_text(**self.shown) + "\n")
        self.sizes[name] = {f"training {measure}": score, "leaves": leaves, "numbers": numbers}

    def _file(self, name: str, ending: str) -> Path:
        return self.folder / (re.sub(r"\W+", "_", name) + ending)

    def table(self) -> pd.DataFrame:
        """Returns scores, sizes and seconds, a row for each model."""
        table = pd.DataFrame(self.sizes).T.astype({"leaves": int, "numbers": int})
        return table.join(self.rows.table()).rename_axis("model")

    def write(self, title: str, config: dict[str, Any]) -> str:
        """Writes the table, the figure and the options; returns the table as text."""
        table = self.table()
        table.to_csv(self.folder / "table.csv")
        shorten = lambda cell: str(int(cell)) if cell % 1 == 0 else number_text(cell, 4)
        cells = table.map(shorten).reset_index()
        (self.folder / "table.md").write_text(benchmark.markdown([*cells], cells.to_numpy().tolist()))
        (self.folder / "config.json").write_text(json.dumps(config, indent=2, default=str) + "\n")
        self._draw(table, title)
        return cells.to_string(index=False)

    def _draw(self, table: pd.DataFrame, title: str) -> None:
        """Draws the score against the size, and the small tree of the best training score; CART's if it is alone."""
        training, score = table.columns[0], table.columns[3]
        small = [name for name in self.trees if self.sizes[name]["leaves"] <= SMALL]
        rank = lambda name: (not name.startswith("CART"), self.sizes[name][training])
        name = max(small, key=rank, default=None)
        figure = Figure(figsize=(6.5, 6), layout="tight")
        axes = np.atleast_1d(figure.subplots(1, 1 if name is None else 2))
        axes[0].scatter(table["numbers"], table[score])
        for i, (model, row) in enumerate(table.iterrows()):  # neighbours in the table do not overlap
            place: Any = (4, 4 if i % 2 else -9)
            axes[0].annotate(str(model), (row["numbers"], row[score]), place, textcoords="offset points", fontsize=8)
        axes[0].set(xscale="log", title=title, xlabel="numbers in the model", ylabel=f"{score} on held-out rows")
        axes[0].grid(alpha=0.3)
        if name is not None:
            width, height = plotting.trees.inches(plotting.plot_tree(self.trees[name], axes[1], **self.shown))
            figure.set_size_inches(6.5 + width, max(6, height + 0.5))
            axes[0].get_gridspec().set_width_ratios([6.5, width])
            axes[1].set_title(name)
        figure.savefig(self.folder / "figure.png", dpi=110)


def arrays(tree: jtrees.ObliqueTree) -> dict[str, Any]:
    """Returns a tree as arrays; the origins of the features and the outputs are 0 if there are none."""
    origin = tree.origin
    zeros = {"x_zero": np.zeros(tree.features, np.float32), "y_zero": np.float32(0)}
    if origin is not None:
        zeros = {"x_zero": origin.x, "y_zero": zeros["y_zero"] if origin.y is None else origin.y}
    is_array = lambda value: isinstance(value, (np.ndarray, jax.Array))
    leaf_arrays = {f"leaf_{name}": value for name, value in vars(tree.leaves).items() if is_array(value)}
    return {k: np.asarray(a) for k, a in {"weights": tree.weights, "bias": tree.bias, **leaf_arrays, **zeros}.items()}


def run(options: argparse.Namespace) -> int:
    """Fits the models, and prints and writes their table; returns the exit code. Ctrl-C keeps the finished rows.

    Raises:
      DataError: the data are unavailable or unusable.
      OSError: results cannot be written.
    """
    frame, task, lines = prepared(_loaded(options), options.task)
    schema: Any = frame.schema
    loss = jtrees.losses.SquaredError()
    split: Any = {"frame": frame.frame, "share": HELD_OUT, "seed": options.seed}
    rows = HeldOutRows(frame.x, targets_of(frame.y), task, loss, **split)
    folder = Path(options.out) / f"{frame.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    print(*lines, *schema.messages(as_options), sep="\n")
    results, simple = Results(rows, folder), {}
    for depth in CART_DEPTHS:  # forests come last
        is_last = depth == CART_DEPTHS[-1]
        simple |= rivals(rows.task, len(rows.y_train), depth=depth, seed=options.seed, forests=is_last)[0]
    recipes = {name: r for name, r in RECIPES.items() if task == "regression" or "Linear" not in name} | options.recipes
    try:
        for name, model in simple.items():
            results.add(name, rows.add_rival(name, model))
        for name, recipe in recipes.items():
            fit = lambda recipe=recipe: _fitted(recipe, rows, task, options.seed)
            results.add(name, rows.add(name, fit, rows.features_test))
            print(f"{name}: {rows.seconds[name]:.1f} s", file=sys.stderr)
        code = 0
    except KeyboardInterrupt:
        code = 130
    config = {"options": vars(options), "recipes": {name: described(r) for name, r in recipes.items()}}
    config |= {"versions": f"jtrees {jtrees.__version__}, {benchmark.machine()}"}
    table = results.write(frame.name, config) if results.sizes else "no model was fitted"
    print("", table, *_verdict(rows, [*recipes], [*simple]), f"written to {folder}", sep="\n")
    if code:
        print("compare: interrupted", file=sys.stderr)
    return code


def _fitted(recipe: jtrees.Recipe, rows: HeldOutRows, task: Any, seed: int) -> Any:
    """Returns a model without the splits that divide no training row.

    Raises:
      KeyboardInterrupt: the fit was interrupted, and its model is only the best so far.
    """
    y: Any = rows.codes(rows.y_train)
    fit = studies.fit(recipe, (rows.features, rows.features_test, y, y), seed, task=task)
    if fit.report.ended == "interrupted":
        raise KeyboardInterrupt
    return fit.model.prune(rows.features) if isinstance(fit.model, jtrees.ObliqueTree) else fit.model


def _verdict(rows: HeldOutRows, recipes: list[str], simple: list[str]) -> list[str]:
    """Returns a sentence on the best recipe beside the best simpler model of each kind; none without a recipe."""
    if not (finished := [name for name in recipes if name in rows.predictions]):
        return []
    losses = rows.comparison(*rows.predictions).losses
    best_last = sorted(simple, key=losses.__getitem__, reverse=True)
    kinds = {name.partition(",")[0]: name for name in best_last}
    best = min(finished, key=losses.__getitem__)
    return [f"{rows.comparison(best, *kinds.values()).verdict(best)}."]


def _loaded(options: argparse.Namespace) -> LabelledTable:
    """Returns the data set that the options name."""
    rules = rules_of(options)
    if options.csv is not None:
        return read_labelled(options.csv, options.target, rules)
    frame = data.load_frame(options.dataset, data_dir=options.data_dir)
    check_named(rules.columns, list(map(str, frame.x.columns)))
    return replace(frame, reading={"columns": rules.columns})


def user_recipe(argument: str) -> jtrees.Recipe:
    """Returns the recipe ``MODULE:NAME``, or what the function of this name returns.

    Raises:
      DataError: there is no such recipe.
    """
    try:
        recipe = pkgutil.resolve_name(argument)
        recipe = recipe() if callable(recipe) else recipe
    except Exception as error:  # the user's file may raise any error
        raise DataError(f"--method {argument}: {one_line(error)}") from error
    if not isinstance(recipe, jtrees.Recipe):
        expected = "must be a recipe, such as jtrees.GET(depth=4), or a function that makes one"
        raise DataError(f"--method {argument}: {expected}, got {recipe!r}")
    return recipe


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.compare", description="Compares models on a table.")
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    names = f"{', '.join(data.BUNDLED)}, a file of --data-dir, or one on OpenML"
    source.add_argument("--dataset", default=data.DEFAULT, help=f"by name (default: {data.DEFAULT}, embedded; {names})")
    source.add_argument("--csv", type=Path, help="a CSV file with a header")
    add("--target", help="the column of the CSV to learn")
    add_rules(parser, training=True)
    add("--data-dir", help="a folder of .npz files with X and y (default: $JTREES_DATA)")
    add("--task", choices=["regression", "classification"], help="(default: inferred from the target)")
    add("--method", nargs="+", default=[], metavar="MODULE:NAME", help="recipes of your own, such as my_file:RECIPE")
    add("--seed", type=int, default=0)
    add("--out", default="results", help="parent of the folder of the results (default: results)")
    options = parser.parse_args(arguments)
    if options.csv is None and (options.target or options.decimal) is not None:
        parser.error("arguments --target and --decimal go with --csv")
    options.recipes = {argument: user_recipe(argument) for argument in options.method}
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0; 2 after one line on wrong arguments, data or results folder; 130 after Ctrl-C."""
    try:
        return run(parse(arguments))
    except ValueError as error:
        print(f"compare: {error}", file=sys.stderr)
    except OSError as error:
        print(f"compare: cannot write results: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
