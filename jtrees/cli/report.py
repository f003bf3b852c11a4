"""The report: a self-contained HTML page, free of scripts, on a table and a tree that is fitted to the table."""

import base64
from collections.abc import Callable
import html
import io as streams
from pathlib import Path
import platform
import tempfile
from typing import Any
import warnings

import jax
import matplotlib.pyplot as plt
import numpy as np
from sklearn.calibration import CalibrationDisplay

import jtrees
from jtrees import explain, export, io, losses, plotting
from jtrees.cli.rivals import HeldOut, kind_of_model, quiet
from jtrees.cli.tables import Frame, targets_of
from jtrees.data.baselines import BehindBaselineWarning
from jtrees.plotting._common import literal

MAX_TERMS = 5  # largest number of terms of a condition
_HELD_OUT = 0.25
_TICKS = 50  # largest number of characters of class names that fit below bars
_PNG = 110  # dots per inch


def write_report(path: Path, frame: Frame, model: Any, loss: losses.Loss, *, seed: int, command: str) -> None:
    """Fits an estimator to three quarters of a table, compares it on the held-out rows, and writes a page on it.

    Args:
      path: the file of the page. An interrupted write leaves no partial file.
      frame: the data set.
      model: the estimator before its fit.
      loss: the loss of regression.
      seed: seed of the split and of the rivals.
      command: the command that made the report.

    Raises:
      OSError: if the page cannot be written.
    """
    with warnings.catch_warnings():  # the verdict on held-out rows replaces the warning
        warnings.simplefilter("ignore", BehindBaselineWarning)
        held_out = HeldOut(model, loss, frame.x, targets_of(frame.y), share=_HELD_OUT, seed=seed, forests=True)
    page = _Page(held_out, frame.name, str(frame.y.name))
    sections = [
        _section("Summary", page.summary()),
        _section("Data", page.data()),
        _section("Comparison", page.comparison()),
        *page.tree(),
        _section("Importances", page.importances()),
        page.errors(),
        _section("One prediction explained", page.one_prediction()),
        _section("Use", page.use(path)),
        _section("How this was made", page.method(command, seed)),
    ]
    title = html.escape(f"{frame.name}: {frame.y.name}")
    text = _PAGE.replace("@TITLE@", title).replace("@BODY@", "\n".join(sections))
    with io.written_whole(path) as file:
        file.write(text.encode())


class _Page:
    """The parts of a page, as HTML."""

    def __init__(self, held_out: HeldOut, name: str, target: str):
        self.held_out, self.name, self.target = held_out, name, target
        self.model, self.loss, self.classes = held_out.model, held_out.loss, held_out.classes
        self.x_train, self.y_train = held_out.x_train, held_out.y_train
        self.x_test, self.y_test = held_out.x_test, held_out.y_test
        self.regression = not self.classes
        self.class_names = self.classes or None  # plots and rules expect None in regression

    def summary(self) -> str:
        first, *details = self.held_out.summary(kind_of_model(self.model))
        items = "".join(f"<li>{html.escape(line)}</li>" for line in details)
        return f'<p class="verdict">{html.escape(first)}.</p><ul>{items}</ul>'

    # --- Data --------------------------------------------------------------------------------------------------------

    def data(self) -> str:
        rows = [[name, description] for name, description in self.model.encoder_.described().items()]
        return (
            _paragraph(
                f"{self.name} has {len(self.y_train) + len(self.y_test)} rows that can be used. The model predicts "
                f"{self.target}. It was fitted to {len(self.y_train)} of the rows, drawn at random. All scores below "
                f"are on the {len(self.y_test)} held-out rows."
            )
            + _table(["column", "read as"], rows)
            + _figure(self._targets(), f"{self.target} in the training rows")
        )

    def _targets(self) -> Any:
        ax = plt.subplots(figsize=(6, 3), layout="tight")[1]
        if self.regression:
            ax.hist(self.y_train, bins=40, color="#4472a8")
        else:
            counts = np.bincount(self.held_out.codes(self.y_train), minlength=len(self.classes))
            ax.bar(list(map(literal, self.classes)), counts, color="#4472a8")
            ax.tick_params(axis="x", rotation=45 if sum(map(len, self.classes)) > _TICKS else 0)
        ax.set(xlabel=literal(self.target), ylabel="rows")
        return ax

    # --- Comparison --------------------------------------------------------------------------------------------------

    def comparison(self) -> str:
        scores = {name: self.held_out.scores(name) for name in self.held_out.seconds}
        rows = [
            [name, *(f"{score:.4g}" for score in scores[name].values()), f"{seconds:.1f}"]
            for name, seconds in self.held_out.seconds.items()
        ]
        rows[0][0] = f"jtrees, {rows[0][0]}"
        size = f"{self.model.model_.num_parameters} numbers" if hasattr(self.model.model_, "num_parameters") else ""
        leaves = f", {self.model.tree_.num_leaves} leaves" if self.model.tree_ is not None else ""
        return _table(["model", *scores[self.held_out.name], "seconds to fit"], rows) + _paragraph(
            f"Scores on the {len(self.y_test)} held-out rows. The model of jtrees has {size}{leaves}. The rivals have "
            f"the same columns as numbers, and scikit-learn's default options{self._same_loss()}. Seconds include "
            "compilation."
        )

    def _same_loss(self) -> str:
        same = not self.regression or isinstance(self.loss, losses.SquaredError)
        return "" if same else ", and minimise the same loss if scikit-learn supports it"

    # --- The tree ----------------------------------------------------------------------------------------------------

    def tree(self) -> list[str]:
        """Returns the sections on the tree; an empty list if the model is not a tree."""
        if self.model.tree_ is None:
            return []
        tree, x, names = self.model.tree_, self.held_out.features, self.model.encoder_.feature_names
        shown: Any = {"feature_names": names, "class_names": self.class_names}
        drawing = plotting.plot_tree(tree, max_terms=3, x=x, **shown)
        rules = tree.to_text(max_terms=MAX_TERMS, x=x, **shown)
        bars = plotting.plot_splits(tree, x, **shown)[0] if tree.splits.any() else None
        leaves = plotting.plot_leaves(tree, x, self.held_out.codes(self.y_train), class_names=self.class_names)
        explained = (
            "The root is at the top on the left. A row follows the branch > if the sum in the box is above the number "
            "in the box, else the branch ≤. The terms shown have the largest weight times standard deviation. "
            f"All numbers of rows in the tree, the rules and the charts are of the {len(x)} training rows, with the "
            "features that the tree was trained on. A mean target of a level is then a mean over other rows."
        )
        return [
            _section("The tree", _figure(drawing, "the tree", svg=True) + _paragraph(explained)),
            _section("Rules", f"<pre>{html.escape(rules)}</pre>"),
            _section("Splits and leaves", (_figure(bars, "splits") if bars else "") + _figure(leaves, "leaves")),
        ]

    # --- What the model does -----------------------------------------------------------------------------------------

    def importances(self) -> str:
        falls, fall = self.held_out.importances()
        return _figure(plotting.plot_importances(falls), "importances") + _paragraph(
            f"By how much {fall} on held-out rows when the values of a column are shuffled, five times."
        )

    def errors(self) -> str:
        predicted = self.held_out.predictions[self.held_out.name]
        if not self.regression:
            return _section("Calibration", _figure(self._calibration(predicted), "calibration"))
        ax = plt.subplots(figsize=(5, 4.5), layout="tight")[1]
        ax.scatter(predicted, self.y_test - predicted, s=6, alpha=0.4)
        ax.axhline(0, color="0.3", lw=0.8)
        ax.set(xlabel="prediction", ylabel=f"{literal(self.target)} - prediction")
        return _section("Residuals", _figure(ax, "residuals on held-out rows"))

    def _calibration(self, predicted: np.ndarray) -> Any:
        """Returns a plot with a line for each class; for two classes, a line for the second class."""
        ax = plt.subplots(figsize=(4.5, 4.5), layout="tight")[1]
        codes = self.held_out.codes(self.y_test)
        for k in range(1 if len(self.classes) == 2 else 0, len(self.classes)):
            curve: Any = {"name": literal(str(self.classes[k])), "n_bins": 10, "strategy": "quantile"}
            CalibrationDisplay.from_predictions(codes == k, predicted[:, k].clip(0, 1), ax=ax, **curve)
        ax.set(xlabel="predicted probability", ylabel="share of the rows")
        return ax

    def one_prediction(self) -> str:
        row = self.x_test.iloc[[0]]
        lines = [f"prediction: {quiet(lambda: self.model.predict(row))[0]}, target: {self.y_test[0]}", ""]
        lines += [f"{name} = {row[name].iloc[0]}" for name in row.columns]
        if self.model.tree_ is not None:
            lines += ["", *str(quiet(lambda: explain.path(self.model.model_, row))).splitlines()]
            nearest = quiet(lambda: explain.nearest_change(self.model.model_, row, self.x_train))
            if nearest is not None:
                changes = ", ".join(f"{name} = {value:.6g}" for name, value in nearest.changes.items())
                other = "another leaf" if self.regression else "another class"
                lines += ["", f"the smallest change to {other} within the ranges of the training rows: "]
                lines[-1] += f"{nearest.distance:.3g} deviations, {changes}"
        return _paragraph("The first of the held-out rows.") + f"<pre>{html.escape(chr(10).join(lines))}</pre>"

    # --- Use ---------------------------------------------------------------------------------------------------------

    def use(self, path: Path) -> str:
        commands = (
            "jtrees predict model.jtrees rows.csv --out predictions.csv\n"
            "jtrees explain model.jtrees rows.csv --row 0\n"
            "jtrees export model.jtrees model.h      # or model.py, model.onnx"
        )
        files = _paragraph("This kind of model is not exported as C or NumPy.")
        if (written := self._exported()) is not None:
            files = _paragraph("The model as files that run without this library. The predictions are the same:")
            files += "<ul>" + "".join(written) + "</ul>"
            if self.classes:
                files += _paragraph(f"Outputs are the probabilities of {', '.join(self.classes)}, in this order.")
        return files + _paragraph("With a model that jtrees fit has saved:") + f"<pre>{html.escape(commands)}</pre>"

    def _exported(self) -> list[str] | None:
        """Returns links to the exported files, which are part of the page; None if the model cannot be exported."""
        links = []
        formats: list[tuple[str, Callable[..., None], str, str]] = [
            ("model.h", export.to_c, "text/x-c", "C99: jtrees_predict(row, out); no library, no allocation"),
            ("model.py", export.to_numpy, "text/x-python", "Python with NumPy alone: predict(table)"),
        ]
        with tempfile.TemporaryDirectory() as folder:
            for name, write, kind, description in formats:
                try:
                    write(self.model.model_, file := Path(folder) / name)
                except ValueError:
                    return None
                contents = base64.b64encode(file.read_bytes()).decode()
                link = f'<a download="{name}" href="data:{kind};base64,{contents}">{name}</a>'
                links.append(f"<li>{link}: {html.escape(description)}</li>")
        return links

    def method(self, command: str, seed: int) -> str:
        options = [f"{name}: {value}" for name, value in self.model.report_.recipe.items()]
        machine = f"{platform.machine()}, {jax.devices()[0].device_kind}"
        versions = f"jtrees {jtrees.__version__}, jax {jax.__version__}, Python {platform.python_version()}"
        return _paragraph(f"{versions}, on {machine}; seed {seed}.") + (
            f"<pre>{html.escape(chr(10).join([command, '', *options]))}</pre>"
        )


# --- HTML ------------------------------------------------------------------------------------------------------------


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>\n{body}</section>"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = lambda kind, row: "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row) + "</tr>"
    body = "\n".join(cells("td", row) for row in rows)
    return f'<div class="wide"><table><thead>{cells("th", head)}</thead><tbody>{body}</tbody></table></div>'


def _figure(ax: Any, name: str, *, svg: bool = False) -> str:
    """Returns a figure as an image that is part of the page."""
    stream = streams.BytesIO()
    kind = "svg" if svg else "png"
    ax.figure.savefig(stream, format=kind, dpi=_PNG, bbox_inches="tight")
    plt.close(ax.figure)
    data = base64.b64encode(stream.getvalue()).decode()
    mime = "image/svg+xml" if svg else "image/png"
    tree = ' class="tree"' if svg else ""  # a scrolling image of full size, so the text is legible
    return f'<div class="wide"><img{tree} alt="{html.escape(name)}" src="data:{mime};base64,{data}"></div>'


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>@TITLE@</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 78rem; padding: 1rem; color: #222; }
p, li { max-width: 50rem; overflow-wrap: anywhere; }
.verdict { font-size: 1.15rem; font-weight: 600; }
h1, h2 { line-height: 1.2; }
h2 { border-bottom: 1px solid #ddd; margin-top: 2.5rem; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid #ddd; padding: 0.3rem 0.8rem 0.3rem 0; text-align: left; vertical-align: top; }
.wide, pre { overflow-x: auto; }
pre { background: #f6f6f4; padding: 0.8rem; font-size: 0.85rem; }
td:first-child { overflow-wrap: anywhere; min-width: 6rem; }
img { max-width: 100%; }
img.tree { max-width: none; }
</style>
</head>
<body>
<h1>@TITLE@</h1>
@BODY@
</body>
</html>
"""
