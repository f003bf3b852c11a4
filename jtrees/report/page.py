"""The report: a self-contained HTML page, free of scripts, on a data set and a model that is fitted to it."""

import base64
import io as streams
from pathlib import Path
import platform
import re
import tempfile
from typing import IO, Any

import jax
import numpy as np

import jtrees
from jtrees import explain, export, io, plotting
from jtrees.plotting._common import literal, wrapped
from jtrees.text import common_score, number_text

try:
    import jinja2
    from markupsafe import Markup, escape  # a part of Jinja2
    import matplotlib.pyplot as plt
    import pandas as pd
    from sklearn.calibration import CalibrationDisplay
    from sklearn.metrics import PredictionErrorDisplay

    from jtrees.report.held_out import HeldOut, kind_of_model, quiet
except ImportError as error:
    raise ImportError('reports need Jinja2, matplotlib, pandas and scikit-learn: pip install "jtrees[cli]"') from error

MAX_TERMS = 5  # largest number of terms of a condition
_WIDTH = 4.5  # inches: a narrow figure has readable text on a telephone
_TICKS = 35  # largest number of characters of class names that fit below bars
_DIGITS = 4
_MOST_COLUMNS = 15  # largest number of bars of importances
_PNG = 110  # dots per inch
_PADDING = 5  # dots around a chart
_COLOR = "#4472a8"
_EXPORTS = (
    ("model.h", export.to_c, "text/x-c", "C99: jtrees_predict(row, out); no library, no allocation"),
    ("model.py", export.to_numpy, "text/x-python", "Python with NumPy alone: predict(table)"),
)
_STYLE: Any = {"axes.formatter.limits": (-4, 9), "axes.formatter.useoffset": False}  # no powers of ten beside an axis
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)


def write_report(
    path: Path | IO[bytes], held_out: HeldOut, *, name: str, target: str, command: str, advice: str = ""
) -> None:
    """Writes a page on a fitted estimator and its rivals to a file or an open binary file.

    An interrupted write leaves no partial file. ``name`` is the name of the data set, ``command`` made the report, and
    ``advice`` is a sentence on a better model for the summary, or "". Raises ``OSError`` if the page cannot be written.
    """
    model, (falls, fall) = held_out.model, held_out.importances
    summary = [*held_out.summary(kind_of_model(model)), *filter(None, [advice])]
    with plt.rc_context(_STYLE):
        page = _TEMPLATES.get_template("page.html").render(
            held_out=held_out,
            model=model,
            name=name,
            target=target,
            command=command,
            summary=[_terms(line) for line in (f"{summary[0]}.", *summary[1:])],
            measure=held_out.task.loss_function.measure,
            columns=_table(pd.Series(model.encoder_.described()).to_frame("read as")),
            scores=_table(held_out.table().rename({held_out.name: f"jtrees, {held_out.name}"})),
            targets=_targets(held_out, target),
            tree=None if held_out.tree_estimator is None else _tree(held_out),
            importances=_importances(falls),
            fall=fall,
            errors=_calibration(held_out) if held_out.classes else _residuals(held_out),
            explanation=_lines(_explanation(held_out)),
            files=_exported(model.model_),
            versions=f"jtrees {jtrees.__version__}, jax {jax.__version__}, Python {platform.python_version()}, on "
            f"{platform.machine()}, {jax.devices()[0].device_kind}",
        )
    io.write_file(path, page)


def _tree(held_out: HeldOut) -> dict[str, Any]:
    """Returns the drawing, the rules, and the charts of the splits and leaves.

    A tree without a split has no chart of splits. If all splits divide the same score, there is a single chart.
    """
    model, x, classes = held_out.tree_estimator, held_out.features, held_out.classes or None
    tree, names = model.tree_, model.encoder_.feature_names
    shown: Any = {"feature_names": names, "class_names": classes}
    score = common_score(tree, names, _DIGITS)
    limit: Any = {} if score is None else {"max_splits": 1}
    return {
        "drawing": _image(plotting.plot_tree(tree, max_terms=3, x=x, **shown), "svg"),
        "rules": _lines(tree.to_text(max_terms=MAX_TERMS, x=x, **shown)),
        "score": None if score is None else score.name,
        "splits": _images(plotting.plot_splits(tree, x, **shown, **limit)) if tree.splits.any() else [],
        "leaves": _leaves(held_out),
    }


def _explanation(held_out: HeldOut) -> str:
    """Returns the prediction, the path and the nearest change of the first held-out row."""
    model, row = held_out.model, held_out.frame_test[:1]
    number = lambda value: value if held_out.classes else number_text(float(value), _DIGITS)
    predicted, y = quiet(lambda: model.predict(row))[0], held_out.y_test[0]
    lines = [f"prediction: {number(predicted)}, target: {number(y)}", ""]
    lines += [f"{name} = {held_out.x_test[name].iloc[0]}" for name in held_out.x_test.columns]
    if model.tree_ is not None:
        lines += ["", str(quiet(lambda: explain.path(model.model_, row)))]
        nearest = quiet(lambda: explain.nearest_change(model.model_, row, held_out.frame_train))
        if nearest is not None:
            other = "another class" if held_out.classes else "another leaf"
            lines += ["", f"the smallest change to {other} within the ranges of the training rows: "]
            lines[-1] += f"{nearest.distance:.3g} deviations, {nearest}"
    return "\n".join(lines)


def _exported(model: Any) -> list[tuple[str, str, str]]:
    """Returns the names, the data and the descriptions of the exported files; empty if the model is not exported."""
    files = []
    with tempfile.TemporaryDirectory() as folder:
        for name, write, kind, description in _EXPORTS:
            try:
                write(model, file := Path(folder) / name)
            except ValueError:
                return []
            files.append((name, _data(kind, file.read_bytes()), description))
    return files


def _terms(line: str) -> Markup:
    """Returns a line as HTML that wraps between the terms of a sum outside brackets, and between items with numbers."""
    first, *terms = re.split(r"(?: (?=[-+<>] )|(?<=[,;]) |(?<=:) (?=[^:,;\d]+\d))(?![^(\[]*[)\]])", line)
    parts = [Markup("<span>{}</span>").format(term) if re.search(r"\d", term) else escape(term) for term in terms]
    return Markup(" ").join([escape(first), *parts])


def _lines(text: str) -> list[tuple[int, Markup]]:
    """Returns the indentation of each line, in characters, and the line as HTML."""
    return [(len(line) - len(line.lstrip("| ")), _terms(line)) for line in text.splitlines()]


def _table(frame: pd.DataFrame) -> str:
    """Returns a table as HTML, in which the text is escaped."""
    with pd.option_context("display.max_colwidth", None):
        return frame.to_html(float_format=lambda value: number_text(value, _DIGITS), border=0)


def _targets(held_out: HeldOut, target: str) -> str:
    y, classes = held_out.codes(held_out.y_train), list(map(literal, held_out.classes))
    ax = plt.subplots(figsize=(_WIDTH, 3), layout="tight")[1]
    if classes:
        ax.bar(classes, np.bincount(y, minlength=len(classes)), color=_COLOR)
        ax.tick_params(axis="x", rotation=45 if sum(map(len, classes)) > _TICKS else 0)
    else:
        ax.hist(y, bins=40, color=_COLOR)
    ax.set(xlabel=literal(target), ylabel="rows")
    return _image(ax)


def _leaves(held_out: HeldOut) -> str:
    """Returns a chart of the training targets in each leaf: shares of the classes, or quantiles."""
    leaf, y = np.asarray(held_out.tree_estimator.tree_.leaf_index(held_out.features)), held_out.codes(held_out.y_train)
    leaves = np.unique(leaf)
    ax = plt.subplots(figsize=(_WIDTH, 0.25 * len(leaves) + 1), layout="tight")[1]
    if held_out.classes:
        shares = pd.crosstab(leaf, y, normalize="index").rename_axis(columns=None)
        shares.rename(columns=lambda k: literal(held_out.classes[k])).plot.barh(stacked=True, width=0.8, ax=ax)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    else:
        low, first, median, third, high = np.transpose(
            [np.quantile(y[leaf == k], (0.05, 0.25, 0.5, 0.75, 0.95)) for k in leaves]
        )
        places = np.arange(len(leaves))
        ax.hlines(places, low, high, color=_COLOR, lw=1)
        ax.hlines(places, first, third, color=_COLOR, lw=8)
        ax.plot(median, places, "|", color="white", markersize=8)
    ax.set_yticks(range(len(leaves)), [f"leaf {k}, {np.mean(leaf == k):.0%}" for k in leaves])
    ax.set(xlabel="share of the rows" if held_out.classes else "target", ylabel="")
    return _image(ax)


def _importances(falls: dict[str, np.ndarray]) -> str:
    frame = pd.DataFrame(falls)
    mean = frame.mean().nlargest(_MOST_COLUMNS)[::-1]
    labels = list(map(wrapped, mean.index))
    lines = sum(label.count("\n") for label in labels)
    ax = plt.subplots(figsize=(_WIDTH, 0.35 * len(mean) + 0.18 * lines + 1), layout="tight")[1]
    ax.barh(range(len(mean)), mean, tick_label=labels, xerr=frame[mean.index].std(ddof=0), color=_COLOR)
    ax.axvline(0, color="0.3", lw=0.8)
    ax.set_xlabel("fall of the score without the column")
    return _image(ax)


def _residuals(held_out: HeldOut) -> str:
    ax = plt.subplots(figsize=(_WIDTH, 4), layout="tight")[1]
    points: Any = {"s": 6, "alpha": 0.4}
    PredictionErrorDisplay.from_predictions(
        held_out.y_test, held_out.predictions[held_out.name], kind="residual_vs_predicted", ax=ax, scatter_kwargs=points
    )
    return _image(ax)


def _calibration(held_out: HeldOut) -> str:
    """Returns a chart with a line for each class; for two classes, a line for the second class."""
    ax = plt.subplots(figsize=(_WIDTH, 4.5), layout="tight")[1]
    codes, predicted = held_out.codes(held_out.y_test), held_out.predictions[held_out.name].clip(0, 1)
    for k in range(1 if len(held_out.classes) == 2 else 0, len(held_out.classes)):
        curve: Any = {"name": literal(held_out.classes[k]), "n_bins": 10, "strategy": "quantile"}
        CalibrationDisplay.from_predictions(codes == k, predicted[:, k], ax=ax, **curve)
    ax.set(xlabel="predicted probability", ylabel="share of the rows")
    return _image(ax)


def _image(ax: Any, kind: str = "png") -> str:
    """Returns the figure of the axes as the address of an image, and closes the figure."""
    address = _saved(ax.figure, kind, "tight")
    plt.close(ax.figure)
    return address


def _images(axes: Any) -> list[str]:
    """Returns the axes of a figure as the addresses of separate images, and closes the figure."""
    figure, addresses = axes[0].figure, []
    figure.draw_without_rendering()  # places the axes
    for ax in axes:
        extent = ax.get_tightbbox().padded(_PADDING).transformed(figure.dpi_scale_trans.inverted())
        addresses.append(_saved(figure, "png", extent))
    plt.close(figure)
    return addresses


def _saved(figure: Any, kind: str, extent: Any) -> str:
    stream = streams.BytesIO()
    figure.savefig(stream, format=kind, dpi=_PNG, bbox_inches=extent)
    return _data("image/svg+xml" if kind == "svg" else "image/png", stream.getvalue())


def _data(kind: str, contents: bytes) -> str:
    """Returns an address that holds the contents of a file."""
    return f"data:{kind};base64,{base64.b64encode(contents).decode()}"
