"""A tree distilled from boosted trees, beside the same tree fitted to the labels.

python -m experiments.distillation --data-dir DATA --seeds 3 [--datasets kin8nm ...] [--parts regression classification]

The teacher is CatBoost with its defaults (``make peers``), or scikit-learn's HistGradientBoosting if CatBoost is not
installed. The student is ``GET(depth=5)``. It is fitted to the teacher's predictions on the training rows and on rows
made from them. For comparison, the same recipe is fitted to the labels.

The result of a (part, set, seed) is a row of --out. Three quarters of the rows are training rows, stratified by class.
Scores are R^2 or accuracy in per cent.
"""

import argparse
import time
from typing import Any

import jax
import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

from experiments import benchmark, data, packages, studies
import jtrees

SETS = {
    "regression": ("airfoil-self-noise", "cpu-act", "kin8nm", "elevators"),
    "classification": ("vehicle", "segmentation", "churn", "satimage"),
}
RECIPE = jtrees.GET(depth=5)
TEACHER = "CatBoost" if benchmark.installed(packages.PACKAGES["CatBoost"].package) else "HistGradientBoosting"


def teacher_of(classifies: bool, seed: int) -> Any:
    """Returns the teacher with its defaults."""
    if TEACHER in packages.PACKAGES:
        return packages.default(TEACHER, classifies, seed)
    return (HistGradientBoostingClassifier if classifies else HistGradientBoostingRegressor)(random_state=seed)


def measure(task: Any, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns scores in per cent, log losses of classes, fidelity in per cent, and seconds."""
    x, x_test, y, y_test = data.split_of(name, seed, options.data_dir)
    classifies = task == "classification"
    key, value = jax.random.key(seed), {"rows": len(x), "features": x.shape[1]}
    start = time.perf_counter()
    teacher = teacher_of(classifies, seed).fit(x, y)
    trained = time.perf_counter()
    labels = jtrees.fit(RECIPE, x, y, key=key, task=task)
    fitted = time.perf_counter()
    student = jtrees.distill(teacher, RECIPE, x, key=key, task=task, held_out=(x_test, y_test))
    end = time.perf_counter()
    predictions = teacher.predict_proba if classifies else teacher.predict
    for name, outputs, seconds in (
        ("teacher", predictions(x_test), trained - start),
        ("labels", labels.predict(x_test), fitted - trained),
        ("distilled", student.predict(x_test), end - fitted),
    ):
        value[name] = {"score": studies.percent(outputs, y_test), "seconds": seconds}
        if classifies:
            chances = np.asarray(outputs, np.float64)[np.arange(len(y_test)), y_test]
            value[name]["log_loss"] = float(-np.log(np.maximum(chances, np.finfo(np.float32).tiny)).mean())
    return value | {"fidelity": 100 * student.fidelity, "made": student.synthetic, "taught_by": TEACHER}


def task_report(results: studies.Results, part: str) -> tuple[str, list[float]]:
    """Returns the tables of a part, and the gain of the distilled tree on each set."""
    rows, losses, gains = [], [], []
    for name in results.datasets(part):
        values = results.values(part, name)
        cells = lambda key, digits, name=name: [
            studies.spread(results.values(part, name, model, key), digits)
            for model in ("teacher", "labels", "distilled")
        ]
        gains.append(float(np.mean([value["distilled"]["score"] - value["labels"]["score"] for value in values])))
        size = f"{values[0]['rows']} + {values[0]['made']} x {values[0]['features']}"
        fidelity = studies.spread(results.values(part, name, "fidelity"), 1)
        rows.append([name, size, *cells("score", 2), f"{gains[-1]:+.2f}", fidelity, *cells("seconds", 1)])
        if part == "classification":
            losses.append([name, *cells("log_loss", 3)])
    if not rows:
        return "", []
    models = ["teacher", "on labels", "distilled"]
    header = ["set", "rows + made rows x features", *models, "gain", "fidelity, %", *(f"{m}, s" for m in models)]
    parts = [f"## {part.capitalize()}", benchmark.markdown(header, rows).rstrip()]
    if losses:
        parts += ["Log loss:", benchmark.markdown(["set", *models], losses).rstrip()]
    return "\n\n".join(parts) + "\n", gains


def report(results: studies.Results, command: str) -> str:
    """Returns the tables of both tasks."""
    tasks = [task_report(results, part) for part in SETS]
    gains = [gain for _, gains in tasks for gain in gains]
    teachers = " or ".join(sorted({row.value["taught_by"] for row in results.rows}))
    head = (
        f"# A tree distilled from boosted trees\n\nMade by `{command}` on {results.machines}. The teacher is "
        f"{teachers} with its defaults. Both trees are `{studies.recipe_text(RECIPE)}`. R² or accuracy "
        "in per cent on a quarter of the rows, mean and deviation over random splits. Fidelity is the R² of the "
        "distilled tree with the teacher's predictions as targets, or the share of rows for which both predict the "
        "same class. The seconds of a fit of jtrees have compilation in them, and those of distillation the "
        "predictions of the teacher.\n"
    )
    summary = f"The distilled tree is at least as good on {sum(gain >= 0 for gain in gains)} of {len(gains)} sets"
    summary += f", by {np.mean(gains):+.2f} points on average.\n" if gains else ".\n"
    return "\n".join([head, summary, *filter(None, (text for text, _ in tasks))])


STUDY = studies.Study(
    *("distillation", __doc__, SETS, [*SETS["regression"], *SETS["classification"]], 3, measure, report),
    settings=lambda part, name, options: {"recipe": studies.recipe_text(RECIPE)} if name in SETS[part] else None,
    closed=True,
)

if __name__ == "__main__":
    benchmark.compile_all_programs()
    studies.main(STUDY)  # on one device, as for users
