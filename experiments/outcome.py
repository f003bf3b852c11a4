"""What the main job tells and keeps: rows as they come, every model, and a figure."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
import json
import os
from pathlib import Path
import shutil
import tempfile
import time
from typing import Any, Self

import joblib
from matplotlib.figure import Figure
import numpy as np
import pandas as pd
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from experiments import benchmark
import jtrees
from jtrees import plotting, warmstart

SMALL = 8  # leaves of the tree that is drawn, at most: more cannot be read
MAX_TERMS = 5  # of a condition, in rules and in the figure


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      method: by name.
      depth: None where there is none.
      train: R^2 or accuracy on the rows to train on.
      validate: likewise on those to choose by.
      test: likewise on those to test with.
      log_loss: on the rows to test with, in classification.
      leaves: of all trees together.
      numbers: that the model holds.
      seconds: of training, compilation included.
      rate: rows predicted a second.
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

    @property
    def name(self) -> str:
        """Of its files."""
        return self.method if self.depth is None else f"{self.method}_depth{self.depth}"

    def cells(self) -> dict[str, str]:
        """The line as text, by the heads of the columns."""
        score = "R2" if self.log_loss is None else "acc."
        loss = {} if self.log_loss is None else {"log loss": f"{self.log_loss:.4f}"}
        return {
            "method": self.method,
            "depth": "-" if self.depth is None else str(self.depth),
            f"train {score}": f"{self.train:.4f}",
            f"test {score}": f"{self.test:.4f}",
            **loss,
            "leaves": _short(self.leaves),
            "numbers": _short(self.numbers),
            "train s": f"{self.seconds:.2f}",
            "rows/s": _short(self.rate),
        }


def as_tree(model: Any, x: np.ndarray) -> jtrees.ObliqueTree | None:
    """The oblique tree that a model is, without what divides no row of x; None if it is no single tree."""
    if isinstance(model, (DecisionTreeRegressor, DecisionTreeClassifier)):
        return warmstart.from_sklearn(model)
    return model.prune(x) if isinstance(model, jtrees.ObliqueTree) else None


def size(model: Any, x: np.ndarray) -> tuple[int, int]:
    """Leaves and numbers of a model."""
    if (tree := as_tree(model, x)) is not None:
        return tree.num_leaves, tree.num_parameters
    if isinstance(model, (RandomForestRegressor, RandomForestClassifier)):
        trees = [member.tree_ for member in model.estimators_]
        leaves = sum(int(tree.n_leaves) for tree in trees)
        answers = trees[0].value[0].size
        return leaves, 2 * (sum(tree.node_count for tree in trees) - leaves) + leaves * answers
    if isinstance(model, jtrees.Forest):
        sizes = [size(member, x) for member in model]
        return sum(leaves for leaves, _ in sizes), sum(numbers for _, numbers in sizes)
    if isinstance(model, jtrees.EnsembleModel):
        return int(np.prod(model.params.leaf_values.shape[:2])), model.num_parameters
    # A LatentTree: a tree and a predictor on it.
    return int((np.asarray(model.active[len(model.active) // 2 :]) > 0).sum()), model.num_parameters


class Outcome:
    """A folder of results, in which everything is kept as it comes; it gets its name when it is whole.

    A context, which leaves nothing behind if something goes wrong.

    Raises:
      OSError: if nothing can be written there.
    """

    def __init__(
        self, parent: Path, say: Callable[[str], None], names: list[str], classes: list[Any] | None, train: Any
    ):
        """``say`` prints a line; ``train`` is the pair (x, y) that rules count rows and measure features by."""
        parent.mkdir(parents=True, exist_ok=True)
        self.parent, self.say, self.rows, self.trees = parent, say, [], {}
        rows = {"x": train[0], "y": None if classes is None else train[1]}
        self.shown: Any = {"feature_names": names, "class_names": classes, "max_terms": MAX_TERMS, **rows}
        self.aside = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=parent))
        self.aside.chmod(0o755)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        shutil.rmtree(self.aside, ignore_errors=True)  # what is whole is there no longer

    def add(self, row: Row, model: Any, tree: jtrees.ObliqueTree | None, columns: Any) -> None:
        """Prints and keeps a line, its model with what makes numbers of a table, and its tree as arrays and rules."""
        if not self.rows:
            self.say(_line({head: head for head in row.cells()}))
        self.say(_line(row.cells()))
        self.rows.append(row)
        pd.DataFrame([asdict(row) for row in self.rows]).to_csv(self.aside / "table.csv", index=False)
        cells = [row.cells() for row in self.rows]
        (self.aside / "table.md").write_text(benchmark.markdown([*cells[0]], [[*line.values()] for line in cells]))
        kept = {"columns": columns, "model": model, "classes": self.shown["class_names"]}
        joblib.dump(kept, self.aside / f"{row.name}.joblib", compress=1)
        if tree is not None:
            self.trees[row.name] = tree
            np.savez(self.aside / f"{row.name}.npz", **arrays(tree))
            (self.aside / f"{row.name}.txt").write_text(tree.to_text(**self.shown) + "\n")

    def finish(self, title: str, config: dict[str, Any]) -> Path | None:
        """Draws the figure, and gives the folder its name, which is returned; None if there is nothing in it."""
        if not self.rows:
            return None
        (self.aside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _figure(self.aside / "figure.png", self.rows, self.drawn(), title, self.shown)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        for suffix in ["", *(f"-{i}" for i in range(2, 1000))]:
            folder = self.parent / f"{title}-{stamp}{suffix}"
            if not folder.exists():
                os.rename(self.aside, folder)
                return folder
        raise FileExistsError(f"no free name for the results in {self.parent}")

    def drawn(self) -> tuple[Row, jtrees.ObliqueTree] | None:
        """The tree to draw: of small ones the best on the rows to choose by; CART's if there is no other."""
        there = [(row, self.trees[row.name]) for row in self.rows if row.name in self.trees and row.leaves <= SMALL]
        learnt = [(row, tree) for row, tree in there if row.method != "cart"] or there
        return max(learnt, key=lambda pair: pair[0].validate, default=None)


def arrays(tree: jtrees.ObliqueTree) -> dict[str, Any]:
    """A tree as arrays: what is subtracted from the features and added to the answers is 0 if there is no such."""
    origin = tree.origin
    zeros = {"x_zero": np.zeros(tree.features, np.float32), "y_zero": np.float32(0)}
    if origin is not None:
        zeros = {"x_zero": origin.x, "y_zero": zeros["y_zero"] if origin.y is None else origin.y}
    of_leaves = {f"leaf_{name}": array for name, array in vars(tree.leaves).items()}
    return {k: np.asarray(a) for k, a in {"weights": tree.weights, "bias": tree.bias, **of_leaves, **zeros}.items()}


def _short(value: float) -> str:
    """A count or a rate in at most six characters, below a thousand millions."""
    if isinstance(value, int) and value < 1e6:
        return str(value)
    unit, letter = (1e6, "M") if value >= 999_500 else (1e3, "k")  # what rounds to 1000 k is 1 M
    return f"{value / unit:.3g} {letter}"


_WIDTHS = {"method": -12, "depth": 5, "leaves": 6, "numbers": 7, "train s": 7, "rows/s": 7, "log loss": 8}


def _line(cells: dict[str, str]) -> str:
    """A line of the table, within 80 columns."""
    width = lambda head: _WIDTHS.get(head, 10)
    return " ".join(f"{text:{'<' if width(head) < 0 else '>'}{abs(width(head))}}" for head, text in cells.items())


def _figure(file: Path, rows: list[Row], drawn: Any, title: str, shown: dict[str, Any]) -> None:
    """Score against size, and a tree."""
    figure = Figure(figsize=(6.5, 6), layout="tight")
    axes = np.atleast_1d(figure.subplots(1, 2 if drawn else 1))
    for method in dict.fromkeys(row.method for row in rows):
        own = [row for row in rows if row.method == method]
        axes[0].plot([row.numbers for row in own], [row.test for row in own], "o-", label=method)
        for row in own:
            where = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 10}
            axes[0].annotate("" if row.depth is None else f"{row.depth}", (row.numbers, row.test), **where)
    score = "test $R^2$" if rows[0].log_loss is None else "test accuracy"
    axes[0].set(xscale="log", title=f"{title} (beside the points: depth)")
    axes[0].set_xlabel("numbers in the model", fontsize=12)
    axes[0].set_ylabel(score, fontsize=12)
    axes[0].legend()
    axes[0].grid(alpha=0.3)
    if drawn:
        row, tree = drawn
        width, height = plotting.inches(plotting.plot_tree(tree, axes[1], **shown))
        figure.set_size_inches(6.5 + width, max(6, height + 0.5))
        axes[0].get_gridspec().set_width_ratios([6.5, width])
        axes[1].set_title(f"{row.name.replace('_depth', ', depth ')}: {score} {row.test:.3f}, {row.numbers} numbers")
    figure.savefig(file, dpi=110)
