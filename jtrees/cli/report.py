"""The report: one HTML page of its own, with no other file and no script, on a table and a tree fitted to it."""

import base64
from collections.abc import Callable
import html
import io as streams
from pathlib import Path
import platform
import tempfile
import time
from typing import Any
import warnings

import jax
import matplotlib.pyplot as plt
import numpy as np
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.ensemble import (
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import (
    GammaRegressor,
    LogisticRegression,
    PoissonRegressor,
    QuantileRegressor,
    Ridge,
    TweedieRegressor,
)
from sklearn.metrics import (
    accuracy_score,
    balanced_accuracy_score,
    log_loss,
    mean_absolute_error,
    r2_score,
    roc_auc_score,
    root_mean_squared_error,
)
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

import jtrees
from jtrees import explain, export, io, losses, plotting
from jtrees.cli.tables import Frame, Task, targets_of
from jtrees.data import Columns

MAX_TERMS = 5  # of a condition
_HELD_OUT = 0.25
_SHUFFLED = 2000  # rows whose columns are shuffled for importances, at most
_LINEAR_ROWS = 5000  # training rows, at most, for a linear program of quantiles
_CART_DEPTH = 4  # where the model is no tree, whose depth it would have
_PNG = 110  # dots per inch


def name_of(loss: losses.Loss) -> str:
    """Returns what the mean of a loss is called."""
    return {
        losses.SquaredError: "mean squared error",
        losses.AbsoluteError: "mean absolute error",
        losses.Huber: "Huber loss",
        losses.Quantile: "pinball loss",
        losses.Poisson: "Poisson deviance",
        losses.Gamma: "gamma deviance",
        losses.Tweedie: "Tweedie deviance",
    }[type(loss)]


def write_report(
    path: Path, frame: Frame, task: Task, model: Any, loss: losses.Loss, *, seed: int, command: str
) -> None:
    """Fits an estimator to three quarters of a table, compares it on the others, and writes what it is as a page.

    Args:
      path: the page, which is written whole or not at all.
      frame: the data set.
      task: what is predicted.
      model: the estimator, not fitted.
      loss: the loss of regression.
      seed: seed of the split and of the rivals.
      command: what made the report.

    Raises:
      OSError: if the page cannot be written.
    """
    y = targets_of(frame.y)
    by_class: Any = y if task == "classification" else None
    train, test = train_test_split(np.arange(len(y)), test_size=_HELD_OUT, stratify=by_class, random_state=seed)
    x_train, x_test = frame.x.iloc[train], frame.x.iloc[test]
    started = time.perf_counter()
    model.fit(x_train, y[train])
    seconds = time.perf_counter() - started
    model.columns_ = frame.remember(model.columns_)
    model.model_ = model.model_.replace(columns=model.columns_)
    page = _Page(model, task, loss, frame.name, str(frame.y.name), (x_train, y[train]), (x_test, y[test]))
    rivals = page.rivals(seed, seconds)
    sections = [
        _section("Data", page.data()),
        _section("Comparison", page.comparison(rivals)),
        *page.tree(),
        _section("Importances", page.importances()),
        page.errors(),
        _section("One prediction explained", page.one_prediction()),
        _section("Use", page.use(path)),
        _section("How this was made", page.made(command, seed)),
    ]
    title = html.escape(f"{frame.name}: {frame.y.name}")
    text = _PAGE.replace("@TITLE@", title).replace("@BODY@", "\n".join(sections))
    with io.written_whole(path) as file:
        file.write(text.encode())


class _Page:
    """The parts of a page, as HTML."""

    def __init__(self, model: Any, task: Any, loss: losses.Loss, name: str, target: str, train: Any, test: Any):
        self.model, self.task, self.loss, self.name, self.target = model, task, loss, name, target
        (self.x_train, self.y_train), (self.x_test, self.y_test) = train, test
        self.regression = task == "regression"
        self.classes: list[str] = [] if self.regression else [str(label) for label in model.classes_]
        self.class_names = self.classes or None  # as plots and rules take them
        self.column_names = [str(name) for name in self.x_train.columns]

    def _codes(self, y: np.ndarray) -> np.ndarray:
        """Returns labels as classes 0..K-1."""
        return np.searchsorted(self.model.classes_, y)

    # --- Data --------------------------------------------------------------------------------------------------------

    def data(self) -> str:
        rows = [[name, what] for name, what in self.model.columns_.described().items()]
        return (
            _paragraph(
                f"{self.name} has {len(self.y_train) + len(self.y_test)} rows that can be used. The model predicts "
                f"{self.target}. It was fitted to {len(self.y_train)} of the rows, drawn at random; all scores below "
                f"are those of the other {len(self.y_test)}."
            )
            + _table(["column", "read as"], rows)
            + _figure(self._targets(), f"{self.target} in the training rows")
        )

    def _targets(self) -> Any:
        ax = plt.subplots(figsize=(6, 3), layout="tight")[1]
        if self.regression:
            ax.hist(self.y_train, bins=40, color="#4472a8")
        else:
            ax.bar(self.classes, np.bincount(self._codes(self.y_train), minlength=len(self.classes)), color="#4472a8")
        ax.set(xlabel=self.target, ylabel="rows")
        return ax

    # --- Comparison --------------------------------------------------------------------------------------------------

    def rivals(self, seed: int, seconds: float) -> dict[str, tuple[float, np.ndarray]]:
        """Returns seconds to fit, and predictions or probabilities for the held-out rows, by name."""
        columns, x = Columns.fit(self.x_train, self._fitted(self.y_train), task=self.task)
        x_test = _quiet(lambda: columns.transform(self.x_test))
        depth = _CART_DEPTH if self.model.tree_ is None else self.model.tree_.depth
        if self.regression:
            kinds = _regressors(self.loss, depth, seed, len(x))
        else:
            kinds = {
                "constant": DummyClassifier(),
                "linear model": make_pipeline(StandardScaler(), LogisticRegression()),
                f"CART, depth {depth}": DecisionTreeClassifier(max_depth=depth, random_state=seed),
                "random forest": RandomForestClassifier(random_state=seed, n_jobs=-1),
                "gradient boosting": HistGradientBoostingClassifier(random_state=seed),
            }
        found = {self._own_name(): (seconds, self._predicted(self.model, self.x_test))}
        for name, rival in kinds.items():
            started = time.perf_counter()
            _quiet(lambda rival=rival: rival.fit(x, self._fitted(self.y_train)))
            found[name] = time.perf_counter() - started, self._predicted(rival, x_test)
        return found

    def _own_name(self) -> str:
        return f"jtrees, {type(self.model.recipe).__name__}"

    def _fitted(self, y: np.ndarray) -> np.ndarray:
        return y if self.regression else self._codes(y)

    def _predicted(self, model: Any, x: Any) -> np.ndarray:
        return _quiet(lambda: model.predict(x) if self.regression else model.predict_proba(x))

    def comparison(self, found: dict[str, tuple[float, np.ndarray]]) -> str:
        rows = [[name, *self._scores(predicted), f"{seconds:.1f}"] for name, (seconds, predicted) in found.items()]
        head = self._measures() if self.regression else ["accuracy", "balanced accuracy", "AUC", "log loss"]
        size = f"{self.model.model_.num_parameters} numbers" if hasattr(self.model.model_, "num_parameters") else ""
        leaves = f", {self.model.tree_.num_leaves} leaves" if self.model.tree_ is not None else ""
        return _table(["model", *head, "seconds to fit"], rows) + _paragraph(
            f"Scores on the {len(self.y_test)} held-out rows. The model of jtrees has {size}{leaves}. The others have "
            f"the same columns as numbers, and scikit-learn's default options{self._same_loss()}. Seconds include "
            "compilation."
        )

    def _same_loss(self) -> str:
        same = self.task == "classification" or isinstance(self.loss, losses.SquaredError)
        return "" if same else ", and minimise the same loss where scikit-learn has it for them"

    def _measures(self) -> list[str]:
        """Returns the measures of regression: those of the loss, but for quantiles those of means, too."""
        if isinstance(self.loss, losses.Quantile):
            return [name_of(self.loss), "rows below the prediction"]
        own = [] if isinstance(self.loss, (losses.SquaredError, losses.AbsoluteError)) else [name_of(self.loss)]
        return [*own, "R²", "RMSE", "mean absolute error"]

    def _mean_loss(self, y: np.ndarray, predicted: np.ndarray) -> float:
        """Returns the mean loss; infinite for means of counts that are not positive."""
        if self.loss.link == "exp" and predicted.min() <= 0:
            return np.inf
        return float(self.loss.of_predictions(predicted, y.astype(np.float64)).mean())

    def _scores(self, predicted: np.ndarray) -> list[str]:
        if self.regression:
            of: dict[str, Callable[..., float]] = {
                name_of(self.loss): self._mean_loss,
                "rows below the prediction": lambda y, predicted: float(np.mean(y < predicted)),
                "R²": r2_score,
                "RMSE": root_mean_squared_error,
                "mean absolute error": mean_absolute_error,
            }
            return [f"{of[measure](self.y_test, predicted):.4g}" for measure in self._measures()]
        y, chance = self._codes(self.y_test), predicted / predicted.sum(1, keepdims=True)
        auc = roc_auc_score(y, chance[:, 1] if chance.shape[1] == 2 else chance, multi_class="ovr")
        best = chance.argmax(1)
        lost = log_loss(y, chance, labels=np.arange(chance.shape[1]))
        return [f"{score:.4g}" for score in (accuracy_score(y, best), balanced_accuracy_score(y, best), auc, lost)]

    # --- The tree ----------------------------------------------------------------------------------------------------

    def tree(self) -> list[str]:
        """Returns the sections on the tree; none for another model."""
        if self.model.tree_ is None:
            return []
        shown: Any = {"x": self.x_train, "class_names": self.class_names}
        drawn = plotting.plot_tree(self.model.model_, max_terms=3, **shown)
        rules = self.model.model_.to_text(max_terms=MAX_TERMS, **shown)
        bars = plotting.plot_splits(self.model.model_, self.x_train)[0] if self.model.tree_.splits.any() else None
        leaves = plotting.plot_leaves(
            self.model.model_, self.x_train, self._fitted(self.y_train), class_names=self.class_names
        )
        explained = (
            "A row goes to the yes side of a split if the sum on its left is above the number on its right. Terms are "
            "the largest by weight times standard deviation."
        )
        return [
            _section("The tree", _figure(drawn, "the tree", svg=True) + _paragraph(explained)),
            _section("Rules", f"<pre>{html.escape(rules)}</pre>"),
            _section("Splits and leaves", (_figure(bars, "splits") if bars else "") + _figure(leaves, "leaves")),
        ]

    # --- What the model does -----------------------------------------------------------------------------------------

    def importances(self) -> str:
        some = slice(0, _SHUFFLED)
        y = self._fitted(self.y_test)[some]
        score: Callable[..., float] = lambda y, chance: -log_loss(y, chance, labels=range(chance.shape[1]))
        what = "the log likelihood falls"
        if self.regression and isinstance(self.loss, losses.SquaredError):
            score, what = r2_score, "R² falls"
        elif self.regression:
            score, what = lambda y, predicted: -self._mean_loss(y, predicted), f"the {name_of(self.loss)} rises"
        falls = _quiet(lambda: explain.permutation_importance(self.model.model_, self.x_test.iloc[some], y, score))
        return _figure(plotting.plot_importances(falls), "importances") + _paragraph(
            f"By how much {what} on held-out rows when the values of a column are shuffled, five times."
        )

    def errors(self) -> str:
        predicted = self._predicted(self.model, self.x_test)
        if not self.regression:
            ax = plotting.plot_calibration(self._codes(self.y_test), predicted, class_names=self.classes)
            return _section("Calibration", _figure(ax, "calibration"))
        ax = plt.subplots(figsize=(5, 4.5), layout="tight")[1]
        ax.scatter(predicted, self.y_test - predicted, s=6, alpha=0.4)
        ax.axhline(0, color="0.3", lw=0.8)
        ax.set(xlabel="prediction", ylabel=f"{self.target} - prediction")
        return _section("Residuals", _figure(ax, "residuals on held-out rows"))

    def one_prediction(self) -> str:
        row = self.x_test.iloc[[0]]
        said = [f"prediction: {_quiet(lambda: self.model.predict(row))[0]}, in truth: {self.y_test[0]}", ""]
        said += [f"{name} = {row[name].iloc[0]}" for name in row.columns]
        if self.model.tree_ is not None:
            said += ["", *str(_quiet(lambda: explain.path(self.model.model_, row))).splitlines()]
            nearest = _quiet(lambda: explain.nearest_change(self.model.model_, row, self.x_train))
            if nearest is not None:
                changes = ", ".join(f"{name} = {value:.6g}" for name, value in nearest.changes.items())
                other = "another leaf" if self.regression else "another class"
                said += ["", f"the smallest change to {other}: {nearest.distance:.3g} deviations, {changes}"]
        return _paragraph("The first of the held-out rows.") + f"<pre>{html.escape(chr(10).join(said))}</pre>"

    # --- Use ---------------------------------------------------------------------------------------------------------

    def use(self, path: Path) -> str:
        commands = (
            "jtrees predict model.jtrees rows.csv --out predictions.csv\n"
            "jtrees explain model.jtrees rows.csv --row 0\n"
            "jtrees export model.jtrees model.h      # or model.py, model.onnx"
        )
        files = _paragraph("This kind of model is not exported as C or NumPy.")
        if (written := self._exported()) is not None:
            files = _paragraph("The model, to be run without this library. It predicts as the model above does:")
            files += "<ul>" + "".join(written) + "</ul>"
            if self.classes:
                files += _paragraph(f"Outputs are the probabilities of {', '.join(self.classes)}, in this order.")
        return files + _paragraph("With a model that jtrees fit has saved:") + f"<pre>{html.escape(commands)}</pre>"

    def _exported(self) -> list[str] | None:
        """Returns links to the exported files, which are part of the page; None for models that are not exported."""
        links = []
        of: list[tuple[str, Callable[..., None], str, str]] = [
            ("model.h", export.to_c, "text/x-c", "C99: jtrees_predict(row, out); no library, no allocation"),
            ("model.py", export.to_numpy, "text/x-python", "Python with NumPy alone: predict(table)"),
        ]
        with tempfile.TemporaryDirectory() as folder:
            for name, write, kind, what in of:
                try:
                    write(self.model.model_, file := Path(folder) / name)
                except ValueError:
                    return None
                contents = base64.b64encode(file.read_bytes()).decode()
                link = f'<a download="{name}" href="data:{kind};base64,{contents}">{name}</a>'
                links.append(f"<li>{link}: {html.escape(what)}</li>")
        return links

    def made(self, command: str, seed: int) -> str:
        options = [f"{name}: {value}" for name, value in self.model.report_.get("recipe", {}).items()]
        machine = f"{platform.machine()}, {jax.devices()[0].device_kind}"
        versions = f"jtrees {jtrees.__version__}, jax {jax.__version__}, Python {platform.python_version()}"
        return _paragraph(f"{versions}, on {machine}; seed {seed}.") + (
            f"<pre>{html.escape(chr(10).join([command, '', *options]))}</pre>"
        )


def _regressors(loss: losses.Loss, depth: int, seed: int, rows: int) -> dict[str, Any]:
    """Returns scikit-learn's regressors by name, of the same loss where they have it, else of least squares."""
    constant, linear, split = DummyRegressor(), Ridge(), "squared_error"
    boosted: dict[str, Any] = {}
    if isinstance(loss, losses.AbsoluteError):
        constant, boosted = DummyRegressor(strategy="median"), {"loss": "absolute_error"}
    elif isinstance(loss, losses.Quantile):
        level: Any = loss.levels
        constant = DummyRegressor(strategy="quantile", quantile=level)
        linear = QuantileRegressor(quantile=level, alpha=0) if rows <= _LINEAR_ROWS else None
        boosted = {"loss": "quantile", "quantile": level}
    elif isinstance(loss, losses.Poisson):
        linear, split, boosted = PoissonRegressor(), "poisson", {"loss": "poisson"}
    elif isinstance(loss, losses.Gamma):
        linear, boosted = GammaRegressor(), {"loss": "gamma"}
    elif isinstance(loss, losses.Tweedie):
        linear, boosted = TweedieRegressor(power=loss.variance_power, link="log"), {"loss": "poisson"}
    kinds: dict[str, Any] = {
        "constant": constant,
        "linear model": None if linear is None else make_pipeline(StandardScaler(), linear),
        f"CART, depth {depth}": DecisionTreeRegressor(criterion=split, max_depth=depth, random_state=seed),
        "random forest": RandomForestRegressor(criterion=split, random_state=seed, n_jobs=-1),
        "gradient boosting": HistGradientBoostingRegressor(random_state=seed, **boosted),
    }
    return {name: kind for name, kind in kinds.items() if kind is not None}


# --- HTML ------------------------------------------------------------------------------------------------------------


def _quiet(function: Callable[[], Any]) -> Any:
    """Returns a result without warnings of gaps, convergence and the like."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


def _section(title: str, body: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>\n{body}</section>"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = lambda kind, row: "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in row) + "</tr>"
    body = "\n".join(cells("td", row) for row in rows)
    return f'<div class="wide"><table><thead>{cells("th", head)}</thead><tbody>{body}</tbody></table></div>'


def _figure(ax: Any, name: str, *, svg: bool = False) -> str:
    """Returns a figure as an image within the page."""
    stream = streams.BytesIO()
    kind = "svg" if svg else "png"
    ax.figure.savefig(stream, format=kind, dpi=_PNG, bbox_inches="tight")
    plt.close(ax.figure)
    data = base64.b64encode(stream.getvalue()).decode()
    mime = "image/svg+xml" if svg else "image/png"
    return f'<div class="wide"><img alt="{html.escape(name)}" src="data:{mime};base64,{data}"></div>'


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>@TITLE@</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 64rem; padding: 1rem; color: #222; }
h1, h2 { line-height: 1.2; }
h2 { border-bottom: 1px solid #ddd; margin-top: 2.5rem; }
table { border-collapse: collapse; }
th, td { border-bottom: 1px solid #ddd; padding: 0.3rem 0.8rem 0.3rem 0; text-align: left; vertical-align: top; }
.wide, pre { overflow-x: auto; }
pre { background: #f6f6f4; padding: 0.8rem; font-size: 0.85rem; }
img { max-width: none; }
</style>
</head>
<body>
<h1>@TITLE@</h1>
@BODY@
</body>
</html>
"""
