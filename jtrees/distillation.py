"""Distillation: fits a recipe to the predictions of a teacher (Bucila, Caruana & Niculescu-Mizil, "Model Compression",
KDD 2006; Hinton, Vinyals & Dean, "Distilling the Knowledge in a Neural Network", 2015).
"""

from collections.abc import Callable
from dataclasses import dataclass
import time
from typing import Any, Literal

import jax
from jax.typing import ArrayLike
from jaxtyping import Array
import numpy as np

from jtrees import processes, tasks, validation as checks
from jtrees.data.held_out import held_out_rows
from jtrees.search.fit import FitResult, fit
from jtrees.search.recipe import Recipe
from jtrees.tables.mixing import OriginalRows
from jtrees.tasks import Classification, Policy, Task
from jtrees.tasks.labels import most_probable, shares
from jtrees.tree import ObliqueTree

# Default number of synthetic rows: all rows are _ROWS in total, with at most _MOST synthetic rows for each row.
_ROWS, _MOST = 20_000, 10
_SYNTHETIC = 5  # folded into the key to draw synthetic rows


@dataclass(frozen=True)
class DistillResult:
    """The result of :func:`distill`. ``jtrees.save(result.fit, path)`` saves it.

    Attributes:
      fit: the fit of the student to the teacher's predictions. Its loss and report refer to these predictions.
      fidelity: agreement of student and teacher on the held-out rows. In classification, this is the share of rows for
        which both predict the same class. In regression, it is the score of the student with the teacher's predictions
        as targets, such as R^2 for the squared error. NaN if the teacher's predictions are constant.
      score: accuracy, R^2 or 1 minus a ratio of losses of the student on the held-out rows. None without their targets.
      teacher_score: the same score of the teacher on the held-out rows, or None. This score is too high if the teacher
        was trained on the held-out rows.
      rows: number of rows that the student was fitted to, including synthetic rows.
      synthetic: number of synthetic rows.
      held_out: number of held-out rows.
      seconds: duration of the call.
    """

    fit: FitResult
    fidelity: float
    score: float | None
    teacher_score: float | None
    rows: int
    synthetic: int
    held_out: int
    seconds: float

    @property
    def model(self) -> Any:
        """The student, ``fit.model``."""
        return self.fit.model

    @property
    def tree(self) -> ObliqueTree | None:
        """The student's tree, ``fit.tree``."""
        return self.fit.tree

    def predict(self, x: Any) -> Any:
        """Returns predictions of the student, ``fit.model.predict(x)``."""
        return self.fit.predict(x)

    def __str__(self) -> str:
        return f"{self.fit}\n{self._agreement()}"

    def __repr__(self) -> str:
        return f"DistillResult(model={self.model!r}, {self._agreement()})"

    def _agreement(self) -> str:
        scores = f"fidelity={self.fidelity:.4g}"
        if self.score is not None and self.teacher_score is not None:
            scores += f", score={self.score:.4g}, teacher_score={self.teacher_score:.4g}"
        rows = f"fitted to {self.rows} rows, of which {self.synthetic} are synthetic"
        return f"{scores}, on {self.held_out} held-out rows; {rows}"


def distill(
    teacher: Any,
    recipe: Recipe,
    x: Any,
    y: ArrayLike | None = None,
    *,
    key: Array,
    task: Literal["regression", "classification"] | Task | None = None,
    synthetic: float | None = None,
    held_out: float | tuple[Any, ArrayLike | None] = 0.2,
    sample_weight: ArrayLike | None = None,
    progress: bool = False,
    max_seconds: float | None = None,
) -> DistillResult:
    """Fits a recipe, the student, to the predictions of a teacher.

    The student learns from the rows and from synthetic rows, because the teacher can predict any row; in
    classification, from the teacher's probabilities. A synthetic row is a copy of a first row. Each of its columns is
    replaced, with probability 1/2, by the column of a second row, the nearest of eight random rows. A replaced number
    is drawn between the numbers of the two rows. A replaced column of whole numbers, booleans, dates, text or missing
    values takes the value of the second row.

    Args:
      teacher: a fitted model, or a function of rows. A model is a :class:`jtrees.FitResult`, a model of jtrees, or an
        object with ``predict_proba`` or ``predict``, like the models of scikit-learn. The teacher takes rows in the
        form of ``x``. It returns numbers, ``(n,)`` or ``(n, k)``; probabilities of the classes, ``(n, K)``; or classes
        0..K-1, ``(n,)``.
      recipe: the recipe of the student, such as ``jtrees.GET(depth=5)``.
      x: features of rows, as for :func:`jtrees.fit`. Targets are optional.
      y: targets of these rows. They only score student and teacher on the held-out rows. In classification, these are
        the teacher's classes (its ``classes_``, if it has them), or probabilities, ``(n, K)``.
      key: random key.
      task: as for :func:`jtrees.fit`. None: classification if the teacher has ``predict_proba`` or predicts rows of
        probabilities, else regression.
      synthetic: number of synthetic rows for each row, at least 0. None: all rows are 20,000 in total, with at most 10
        synthetic rows for each row.
      held_out: fraction of the rows on which student and teacher are compared, above 0 and below 1. Or further rows as
        a pair ``(x, y)``, in which y may be None. The student is not fitted to held-out rows.
      sample_weight: nonnegative weights of the rows, ``(n,)``. A synthetic row has the weight of its first row.
      progress: as for :func:`jtrees.fit`.
      max_seconds: as for :func:`jtrees.fit`. The time for the teacher's predictions counts.

    Returns:
      The fit, its fidelity, and the scores of student and teacher.

    Raises:
      ValueError: if the teacher cannot predict, if its predictions cannot be learnt, or if the task is a
        :class:`jtrees.Policy`. Also if the recipe derives its targets from x, as :class:`jtrees.LatentClustering` does,
        and in the cases of :func:`jtrees.fit`.

    Example:
      >>> x = np.linspace(-1, 1, 100)[:, None]
      >>> recipe = jtrees.GET(depth=3, starts=1, epochs=20)
      >>> student = jtrees.distill(lambda x: 2 * x[:, 0], recipe, x, key=jax.random.key(0), synthetic=2)
      >>> student.rows, student.synthetic, student.held_out, student.fidelity > 0.9
      (240, 160, 20, True)
    """
    started = time.monotonic()
    processes.require_xla("jtrees.distill")
    checks.check_key(key)
    predicts, rows = _predictor(teacher), OriginalRows.from_table(x)
    _check(recipe, rows.values.shape[1], task, synthetic, max_seconds)
    rng = np.random.default_rng(np.asarray(jax.random.bits(jax.random.fold_in(key, _SYNTHETIC), (4,))))
    weight = None if sample_weight is None else np.asarray(checks.check_weight(sample_weight, len(rows)), np.float64)
    train, (x_out, y_out, weight_out) = _split(rows, y, weight, held_out, rng)
    if weight is not None:  # a synthetic row mixes rows, whose weights do not count there
        train = train[weight[train] > 0]

    table = rows[train]
    n = len(train)
    count = round(synthetic * n) if synthetic is not None else int(np.clip(_ROWS - n, 0, _MOST * n))
    synthetic_rows, first_rows = table.make_rows(count, rng)
    table = table.followed_by(synthetic_rows)
    if weight is not None:
        weight = weight[train][np.concatenate([np.arange(len(train)), first_rows])]
    targets = _predictions(predicts, table)
    task = _task_of(teacher, targets) if task is None else task
    try:
        task, _ = tasks.checked_targets(task, targets, len(table))
    except ValueError as error:
        raise ValueError(f"predictions of the teacher: {error}") from None

    teacher_targets = task.held_out_targets(_predictions(predicts, x_out), len(x_out))
    y_out = None if y_out is None else task.held_out_targets(_encoded(teacher, task, y_out), len(x_out))
    options: Any = {"task": task, "sample_weight": weight, "progress": progress}
    if max_seconds is not None:
        options["max_seconds"] = max(1e-3, started + max_seconds - time.monotonic())
    student = fit(recipe, table.values, targets, key=key, **options)
    predictions = np.asarray(student.predict(x_out.values), np.float64)
    score = teacher_score = None
    labels, teacher_predictions = teacher_targets, task.loss_function.with_output_axis(teacher_targets)
    if isinstance(task, Classification):
        labels, teacher_predictions = most_probable(labels), shares(labels, task.classes)
    if y_out is not None:
        score = task.score(predictions, y_out, weight_out)
        teacher_score = task.score(teacher_predictions, y_out, weight_out)
    fidelity = task.score(predictions, labels, weight_out)
    seconds = time.monotonic() - started
    return DistillResult(student, fidelity, score, teacher_score, len(table), count, len(x_out), seconds)


def _check(recipe: Any, width: int, task: Any, ratio: Any, max_seconds: Any) -> None:
    if not isinstance(recipe, Recipe):
        raise ValueError(f"recipe must be a recipe, such as jtrees.GET(depth=5), got {checks.quoted(recipe)}")
    if recipe.targets(np.zeros((2, width)), targets := object()) is not targets:
        raise ValueError(f"recipe must learn the targets, got {checks.quoted(recipe)}")
    if isinstance(task, Policy):
        raise ValueError(
            f"task must be regression or classification, got {task}: fit it to the rewards that a teacher predicts"
        )
    if ratio is not None:
        checks.check_scalar("synthetic", ratio, least=0)
    if max_seconds is not None:
        checks.check_number("max_seconds", max_seconds, above=0)


def _split(
    rows: OriginalRows, y: Any, weight: np.ndarray | None, held_out: Any, rng: np.random.Generator
) -> tuple[np.ndarray, tuple[OriginalRows, Any, np.ndarray | None]]:
    """Returns the indices of the training rows, and the held-out rows with their targets and weights."""
    n = len(rows)
    if y is not None:
        checks.check_unmasked("y", y)
        checks.check_rows(y := np.asarray(y), n)
    if isinstance(held_out, (tuple, list)) and len(held_out) == 2:
        if y is not None:
            raise ValueError("y must be None if held_out is a pair (x, y), as y only scores held-out rows of x")
        x_out, y_out = OriginalRows.from_table(held_out[0]), None if held_out[1] is None else np.asarray(held_out[1])
        if y_out is not None and y_out.shape[:1] != (len(x_out),):
            expected = f"{len(x_out)} targets, one a row"
            raise ValueError(f"held_out must hold {expected}, got targets of shape {y_out.shape}")
        return np.arange(n), (x_out, y_out, None)
    share = float(held_out) if isinstance(held_out, (int, float, np.number)) else np.nan
    if not 0 < share < 1:
        got = checks.quoted(held_out)
        raise ValueError(f"held_out must be a fraction of the rows, above 0 and below 1, or a pair (x, y), got {got}")
    out = np.sort(held_out_rows(rng.permutation(n), share))
    train = np.setdiff1d(np.arange(n), out)
    if len(train) < 2:
        raise ValueError(f"held_out must leave at least 2 rows to train on, got {share:g} of {n}")
    if weight is not None and not (weight[out].any() and weight[train].any()):
        raise ValueError("sample_weight must be above 0 in a held-out row and in a training row, got all 0 in one part")
    return train, (rows[out], None if y is None else y[out], None if weight is None else weight[out])


def _predictor(teacher: Any) -> Callable[[Any], Any]:
    """Returns the teacher's prediction function of rows."""
    for name in ("predict_proba", "predict"):
        if callable(method := getattr(teacher, name, None)):
            return method
    if callable(teacher) and not isinstance(teacher, type):
        return teacher
    raise ValueError(
        f"teacher must have predict_proba or predict, or be a function of rows, got {checks.quoted(teacher)}"
    )


def _predictions(predicts: Callable[[Any], Any], rows: OriginalRows) -> np.ndarray:
    """Returns the teacher's predictions; ``ValueError`` if they are not numbers for every row."""
    predictions = np.asarray(checks.as_numeric("predictions of the teacher", predicts(rows.values)))
    if predictions.ndim not in (1, 2) or len(predictions) != len(rows):
        raise ValueError(f"teacher must return ({len(rows)},) or ({len(rows)}, k) predictions, got {predictions.shape}")
    return predictions


def _task_of(teacher: Any, predictions: np.ndarray) -> Literal["regression", "classification"]:
    if hasattr(teacher, "predict_proba"):
        return "classification"
    several = predictions.ndim == 2 and predictions.shape[1] > 1
    chances = several and (predictions >= 0).all() and np.abs(predictions.sum(1) - 1).max() < 1e-3
    return "classification" if chances else "regression"


def _encoded(teacher: Any, task: Task, y: np.ndarray) -> np.ndarray:
    """Returns labels as their positions in the teacher's classes, and other targets unchanged."""
    classes = getattr(teacher, "classes_", None)
    if classes is None or not isinstance(task, Classification) or y.ndim != 1:
        return y
    number, labels = {label: i for i, label in enumerate(np.asarray(classes).tolist())}, y.tolist()
    if unknown := [label for label in labels if label not in number]:
        expected = f"the teacher's classes, {checks.quoted_list(number)}"
        raise ValueError(f"y must hold {expected}, got {checks.quoted(unknown[0])}")
    return np.array([number[label] for label in labels], np.int32)
