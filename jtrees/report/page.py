"""The report: a self-contained HTML page, free of scripts, on a data set and a model that is fitted to it."""

import base64
import io as streams
from pathlib import Path
import platform
import tempfile
from typing import Any

import jax
import numpy as np

import jtrees
from jtrees import explain, export, io, plotting
from jtrees.plotting._common import literal

try:
    import jinja2
    import matplotlib.pyplot as plt
    import pandas as pd
    from sklearn.calibration import CalibrationDisplay
    from sklearn.metrics import PredictionErrorDisplay

    from jtrees.report.held_out import HeldOut, kind_of_model, quiet
except ImportError as error:
    raise ImportError('reports need Jinja2, matplotlib, pandas and scikit-learn: pip install "jtrees[cli]"') from error

MAX_TERMS = 5  # largest number of terms of a condition
_TICKS = 50  # largest number of characters of class names that fit below bars
_MOST_COLUMNS = 15  # largest number of bars of importances
_PNG = 110  # dots per inch
_COLOR = "#4472a8"
_EXPORTS = (
    ("model.h", export.to_c, "text/x-c", "C99: jtrees_predict(row, out); no library, no allocation"),
    ("model.py", export.to_numpy, "text/x-python", "Python with NumPy alone: predict(table)"),
)
_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
)


def write_report(path: Path, held_out: HeldOut, *, name: str, target: str, command: str) -> None:
    """Writes a page on a fitted estimator and its rivals.

    Args:
      path: the file of the page. An interrupted write leaves no partial file.
      held_out: the estimator and its rivals on held-out rows.
      name: name of the data set.
      target: name of the target.
      command: the command that made the report.

    Raises:
      OSError: if the page cannot be written.
    """
    model, (falls, fall) = held_out.model, held_out.importances
    scores = pd.DataFrame({name: held_out.scores(name) for name in held_out.predictions})
    scores.loc["seconds to fit"] = pd.Series(held_out.seconds).round(2)
    text = _TEMPLATES.get_template("page.html").render(
        held_out=held_out,
        model=model,
        name=name,
        target=target,
        command=command,
        summary=held_out.summary(kind_of_model(model)),
        measure=held_out.task.loss_function.measure,
        columns=_table(pd.Series(model.encoder_.described()).to_frame("read as")),
        scores=_table(scores.rename(columns={held_out.name: f"jtrees, {held_out.name}"}).T),
        targets=_targets(held_out, target),
        tree=None if model.tree_ is None else _tree(held_out),
        importances=_importances(falls),
        fall=fall,
        errors=_calibration(held_out) if held_out.classes else _residuals(held_out),
        explanation=_explanation(held_out),
        files=_exported(model.model_),
        versions=f"jtrees {jtrees.__version__}, jax {jax.__version__}, Python {platform.python_version()}, on "
        f"{platform.machine()}, {jax.devices()[0].device_kind}",
    )
    with io.written_whole(path) as file:
        file.write(text.encode())


def _tree(held_out: HeldOut) -> dict[str, Any]:
    """Returns the drawing, the rules, and the charts of the splits and leaves; no chart for a tree without a split."""
    model, x, classes = held_out.model, held_out.features, held_out.classes or None
    tree, shown = model.tree_, {"feature_names": model.encoder_.feature_names, "class_names": classes}
    return {
        "drawing": _image(plotting.plot_tree(tree, max_terms=3, x=x, **shown), "svg"),
        "rules": tree.to_text(max_terms=MAX_TERMS, x=x, **shown),
        "splits": _image(plotting.plot_splits(tree, x, **shown)[0]) if tree.splits.any() else None,
        "leaves": _leaves(held_out),
    }


def _explanation(held_out: HeldOut) -> str:
    """Returns the prediction, the path and the nearest change of the first held-out row."""
    model, row = held_out.model, held_out.x_test.iloc[[0]]
    lines = [f"prediction: {quiet(lambda: model.predict(row))[0]}, target: {held_out.y_test[0]}", ""]
    lines += [f"{name} = {row[name].iloc[0]}" for name in row.columns]
    if model.tree_ is not None:
        lines += ["", str(quiet(lambda: explain.path(model.model_, row)))]
        nearest = quiet(lambda: explain.nearest_change(model.model_, row, held_out.x_train))
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


# --- Tables and charts -----------------------------------------------------------------------------------------------


def _table(frame: pd.DataFrame) -> str:
    """Returns a table as HTML, in which the text is escaped."""
    with pd.option_context("display.max_colwidth", None):
        return frame.to_html(float_format="{:.4g}".format, border=0)


def _targets(held_out: HeldOut, target: str) -> str:
    y, classes = held_out.codes(held_out.y_train), list(map(literal, held_out.classes))
    ax = plt.subplots(figsize=(6, 3), layout="tight")[1]
    if classes:
        ax.bar(classes, np.bincount(y, minlength=len(classes)), color=_COLOR)
        ax.tick_params(axis="x", rotation=45 if sum(map(len, classes)) > _TICKS else 0)
    else:
        ax.hist(y, bins=40, color=_COLOR)
    ax.set(xlabel=literal(target), ylabel="rows")
    return _image(ax)


def _leaves(held_out: HeldOut) -> str:
    """Returns a chart of the training targets in each leaf: shares of the classes, or box plots."""
    leaf, y = np.asarray(held_out.model.tree_.leaf_index(held_out.features)), held_out.codes(held_out.y_train)
    labels = [f"{k}\n{np.mean(leaf == k):.0%}" for k in np.unique(leaf)]
    ax = plt.subplots(figsize=(max(5, 0.6 * len(labels) + 2), 4), layout="tight")[1]
    if held_out.classes:
        shares = pd.crosstab(leaf, y, normalize="index").set_axis(labels).rename_axis(columns=None)
        shares.rename(columns=lambda k: literal(held_out.classes[k])).plot.bar(stacked=True, rot=0, ax=ax)
    else:
        ax.boxplot([y[leaf == k] for k in np.unique(leaf)], tick_labels=labels, showfliers=False)
    ax.set(xlabel="leaf, and its share of all rows", ylabel="share of the rows" if held_out.classes else "target")
    return _image(ax)


def _importances(falls: dict[str, np.ndarray]) -> str:
    frame = pd.DataFrame(falls).rename(columns=literal)
    mean = frame.mean().nlargest(_MOST_COLUMNS)[::-1]
    ax = plt.subplots(figsize=(6, 0.35 * len(mean) + 1), layout="tight")[1]
    ax.barh(mean.index, mean, xerr=frame[mean.index].std(ddof=0), color=_COLOR)
    ax.axvline(0, color="0.3", lw=0.8)
    ax.set_xlabel("fall of the score without the column")
    return _image(ax)


def _residuals(held_out: HeldOut) -> str:
    ax = plt.subplots(figsize=(5, 4.5), layout="tight")[1]
    points: Any = {"s": 6, "alpha": 0.4}
    PredictionErrorDisplay.from_predictions(
        held_out.y_test, held_out.predictions[held_out.name], kind="residual_vs_predicted", ax=ax, scatter_kwargs=points
    )
    return _image(ax)


def _calibration(held_out: HeldOut) -> str:
    """Returns a chart with a line for each class; for two classes, a line for the second class."""
    ax = plt.subplots(figsize=(4.5, 4.5), layout="tight")[1]
    codes, predicted = held_out.codes(held_out.y_test), held_out.predictions[held_out.name].clip(0, 1)
    for k in range(1 if len(held_out.classes) == 2 else 0, len(held_out.classes)):
        curve: Any = {"name": literal(held_out.classes[k]), "n_bins": 10, "strategy": "quantile"}
        CalibrationDisplay.from_predictions(codes == k, predicted[:, k], ax=ax, **curve)
    ax.set(xlabel="predicted probability", ylabel="share of the rows")
    return _image(ax)


def _image(ax: Any, kind: str = "png") -> str:
    """Returns the figure of the axes as the address of an image, and closes the figure."""
    stream = streams.BytesIO()
    ax.figure.savefig(stream, format=kind, dpi=_PNG, bbox_inches="tight")
    plt.close(ax.figure)
    return _data("image/svg+xml" if kind == "svg" else "image/png", stream.getvalue())


def _data(kind: str, contents: bytes) -> str:
    """Returns an address that holds the contents of a file."""
    return f"data:{kind};base64,{base64.b64encode(contents).decode()}"
