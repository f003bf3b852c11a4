"""Output of the main job: rows as they finish, every model, and a figure."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
import json
import os
from pathlib import Path
import shutil
import tempfile
import time
from typing import Any, Self

import jax
import joblib
from matplotlib.figure import Figure
import numpy as np
import pandas as pd
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from experiments import benchmark
import jtrees
from jtrees import plotting, warmstart

SMALL = 8  # upper limit of the leaves of the tree in the figure: a larger tree is illegible
MAX_TERMS = 5  # upper limit of the terms of a condition, in rules and in the figure


@dataclass(frozen=True)
class Row:
    """One line of the table: scores are R^2 or accuracy of the parts, those of classes on the test rows.

    Attributes:
      method: name of the method.
      depth: depth of the trees, or None.
      leaves: number of leaves of all trees.
      numbers: number of numbers in the model.
      seconds: training time, compilation included.
      rate: predicted rows per second.
      auc: area under the ROC curve; for more than two classes the mean of each class versus the rest.
    """

    method: str
    depth: int | None
    train: float
    validate: float
    test: float
    log_loss: float | None
    leaves: int
    numbers: int
    seconds: float
    rate: float
    balanced_accuracy: float | None = None
    auc: float | None = None

    @property
    def name(self) -> str:
        """Name of the files of this row."""
        return self.method if self.depth is None else f"{self.method}_depth{self.depth}"

    def cells(self) -> dict[str, str]:
        """Returns the line as text, by the heads of the columns."""
        if self.log_loss is None:
            scores = {"train R2": f"{self.train:.4f}", "test R2": f"{self.test:.4f}"}
        else:
            class_scores = {"train": self.train, "acc.": self.test, "bal.": self.balanced_accuracy, "AUC": self.auc}
            scores = {head: f"{score:.3f}" for head, score in (class_scores | {"loss": self.log_loss}).items()}
        return {
            "method": self.method,
            "depth": "-" if self.depth is None else str(self.depth),
            **scores,
            "leaves": _short(self.leaves),
            "numbers": _short(self.numbers),
            "train s": f"{self.seconds:.2f}",
            "rows/s": _short(self.rate),
        }


# The heads of the columns in classification, as lines of the report.
LEGEND = [
    "train: accuracy on the training rows; on the test rows acc.: accuracy,",
    "bal.: balanced accuracy, AUC: mean of each class versus the rest, loss: log loss",
]


def as_tree(model: Any, x: np.ndarray) -> jtrees.ObliqueTree | None:
    """Returns the model as an oblique tree without splits that divide no row of x; None if it is not a single tree."""
    if isinstance(model, (DecisionTreeRegressor, DecisionTreeClassifier)):
        return warmstart.from_sklearn(model)
    return model.prune(x) if isinstance(model, jtrees.ObliqueTree) else None


def size(model: Any, x: np.ndarray) -> tuple[int, int]:
    """Returns leaves and numbers of a model; an axis-parallel split counts its feature and its threshold."""
    counted = lambda nodes, leaves, outputs=1: (leaves, 2 * (nodes - leaves) + leaves * outputs)
    if (tree := as_tree(model, x)) is not None:
        return tree.num_leaves, tree.num_parameters
    if isinstance(model, (DummyRegressor, DummyClassifier)):
        return 1, len(getattr(model, "classes_", [0]))
    if isinstance(model, (RandomForestRegressor, RandomForestClassifier)):
        trees = [member.tree_ for member in model.estimators_]
        return counted(sum(t.node_count for t in trees), sum(int(t.n_leaves) for t in trees), trees[0].value[0].size)
    if hasattr(model, "get_booster"):  # XGBoost
        nodes = model.get_booster().trees_to_dataframe()["Feature"]
        return counted(len(nodes), int((nodes == "Leaf").sum()))
    if hasattr(model, "booster_"):  # LightGBM
        trees = [tree["tree_structure"] for tree in model.booster_.dump_model()["tree_info"]]
        return tuple(map(sum, zip(*map(lightgbm_size, trees), strict=True)))  # type: ignore[return-value]
    if hasattr(model, "get_tree_leaf_counts"):  # CatBoost: all splits of a level are equal
        counts = model.get_tree_leaf_counts()
        return int(counts.sum()), len(model.get_leaf_values()) + 2 * int(np.log2(counts).sum())
    if isinstance(model, jtrees.Forest):
        return tuple(map(sum, zip(*(size(member, x) for member in model), strict=True)))  # type: ignore[return-value]
    if isinstance(model, jtrees.methods.EnsembleModel):
        return int(np.prod(model.network.params.leaf_values.shape[:2])), model.num_parameters
    # A LatentTree: a tree and a predictor on it.
    active = np.asarray(model.network.active)
    return int((active[len(active) // 2 :] > 0).sum()), model.num_parameters


def lightgbm_size(node: dict[str, Any]) -> tuple[int, int]:
    """Returns leaves and numbers of a tree of LightGBM; a linear leaf counts coefficients, features and a constant."""
    if "left_child" not in node:
        return 1, 1 + 2 * len(node.get("leaf_coeff", []))
    (left, a), (right, b) = lightgbm_size(node["left_child"]), lightgbm_size(node["right_child"])
    return left + right, 2 + a + b


class Outcome:
    """A folder of results, which keeps each result as it finishes; the folder gets its name at the end.

    This is a context manager; after an error it removes the unfinished folder.

    Raises:
      OSError: the folder cannot be written.
    """

    def __init__(
        self,
        parent: Path,
        say: Callable[[str], None],
        *,
        names: list[str],
        classes: list[Any] | None,
        train: tuple[np.ndarray, np.ndarray],
        longest: int = 0,
    ):
        """Makes the folder.

        Args:
          parent: parent of the folder.
          say: prints a line.
          names: names of the features.
          classes: the labels in the order of their numbers; None in regression.
          train: features and targets of the rows that rules count and that measure the terms.
          longest: length of the longest name of a method.
        """
        parent.mkdir(parents=True, exist_ok=True)
        self.parent, self.say, self.rows, self.trees = parent, say, [], {}
        self.longest = max(_LONGEST, longest)
        rows = {"x": train[0], "y": None if classes is None else train[1]}
        self.shown: Any = {"feature_names": names, "class_names": classes, "max_terms": MAX_TERMS, **rows}
        self.aside = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=parent))
        self.aside.chmod(0o755)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        shutil.rmtree(self.aside, ignore_errors=True)  # a finished folder has been renamed

    def add(self, row: Row, model: Any, tree: jtrees.ObliqueTree | None, encoder: Any) -> None:
        """Prints and keeps a line, its model with the column encoder, and its tree as arrays and rules."""
        if not self.rows:
            self.say(table_line({head: head for head in row.cells()}, self.longest))
        self.say(table_line(row.cells(), self.longest))
        self.rows.append(row)
        pd.DataFrame([asdict(row) for row in self.rows]).to_csv(self.aside / "table.csv", index=False)
        cells = [row.cells() for row in self.rows]
        notes = "" if row.log_loss is None else f"\n{' '.join(LEGEND)}\n"
        table = benchmark.markdown([*cells[0]], [[*line.values()] for line in cells])
        (self.aside / "table.md").write_text(table + notes)
        saved = {"encoder": encoder, "model": model, "classes": self.shown["class_names"]}
        joblib.dump(saved, self.aside / f"{row.name}.joblib", compress=1)
        if tree is not None:
            self.trees[row.name] = tree
            np.savez(self.aside / f"{row.name}.npz", **arrays(tree))
            (self.aside / f"{row.name}.txt").write_text(tree.to_text(**self.shown) + "\n")

    def finish(self, title: str, config: dict[str, Any]) -> Path | None:
        """Draws the figure and renames the folder; returns the folder, or None if there is no row."""
        if not self.rows:
            return None
        (self.aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _figure(self.aside / "figure.png", self.rows, self.shown_tree(), title, self.shown)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for suffix in ["", *(f"-{i}" for i in range(2, 1000))]:
            folder = self.parent / f"{title}-{stamp}{suffix}"
            if not folder.exists():
                os.rename(self.aside, folder)
                return folder
        raise FileExistsError(f"no free name for the results in {self.parent}")

    def shown_tree(self) -> tuple[Row, jtrees.ObliqueTree] | None:
        """Returns the small tree that is best on the validation set; CART's tree only if there is no other tree."""
        trees = [(row, self.trees[row.name]) for row in self.rows if row.name in self.trees and row.leaves <= SMALL]
        learnt = [(row, tree) for row, tree in trees if row.method != "cart"] or trees
        return max(learnt, key=lambda pair: pair[0].validate, default=None)


def arrays(tree: jtrees.ObliqueTree) -> dict[str, Any]:
    """Returns a tree as arrays; the origins of the features and the outputs are 0 if there are none."""
    origin = tree.origin
    zeros = {"x_zero": np.zeros(tree.features, np.float32), "y_zero": np.float32(0)}
    if origin is not None:
        zeros = {"x_zero": origin.x, "y_zero": zeros["y_zero"] if origin.y is None else origin.y}
    is_array = lambda value: isinstance(value, (np.ndarray, jax.Array))
    leaf_arrays = {f"leaf_{name}": value for name, value in vars(tree.leaves).items() if is_array(value)}
    return {k: np.asarray(a) for k, a in {"weights": tree.weights, "bias": tree.bias, **leaf_arrays, **zeros}.items()}


def _short(value: float) -> str:
    """Returns a count or a rate in at most six characters, for values below 10^9."""
    if isinstance(value, int) and value < 1e6:
        return str(value)
    unit, letter = (1e6, "M") if value >= 999_500 else (1e3, "k")  # 999,500 rounds to 1000 k, which is 1 M
    return f"{value / unit:.3g} {letter}"


_LONGEST = 12  # length of the longest name of our methods
_WIDTHS = {"depth": 5, "leaves": 6, "numbers": 7, "train s": 7, "rows/s": 7, "train R2": 10, "test R2": 10, "loss": 6}


def table_line(cells: dict[str, str], longest: int = _LONGEST) -> str:
    """Returns a line of the table, within 80 columns."""
    method, *heads = cells
    return " ".join([f"{cells[method]:<{longest}}", *(f"{cells[head]:>{_WIDTHS.get(head, 5)}}" for head in heads)])


def _figure(file: Path, rows: list[Row], small_tree: Any, title: str, shown: dict[str, Any]) -> None:
    """Draws score against size, and a tree."""
    figure = Figure(figsize=(6.5, 6), layout="tight")
    axes = np.atleast_1d(figure.subplots(1, 2 if small_tree else 1))
    (baseline, *models) = rows
    axes[0].axhline(baseline.test, color="0.5", ls="--", label=baseline.method)
    for method in dict.fromkeys(row.method for row in models):
        method_rows = [row for row in rows if row.method == method]
        axes[0].plot([row.numbers for row in method_rows], [row.test for row in method_rows], "o-", label=method)
        for row in method_rows:
            where = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 10}
            axes[0].annotate("" if row.depth is None else f"{row.depth}", (row.numbers, row.test), **where)
    score = "test $R^2$" if rows[0].log_loss is None else "test accuracy"
    axes[0].set(xscale="log", title=f"{title} (beside the points: depth)")
    axes[0].set_xlabel("numbers in the model", fontsize=12)
    axes[0].set_ylabel(score, fontsize=12)
    axes[0].legend()
    axes[0].grid(alpha=0.3)
    if small_tree:
        row, tree = small_tree
        width, height = plotting.trees.inches(plotting.plot_tree(tree, axes[1], **shown))
        figure.set_size_inches(6.5 + width, max(6, height + 0.5))
        axes[0].get_gridspec().set_width_ratios([6.5, width])
        axes[1].set_title(f"{row.name.replace('_depth', ', depth ')}: {score} {row.test:.3f}, {row.numbers} numbers")
    figure.savefig(file, dpi=110)
