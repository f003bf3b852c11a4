"""TEL's tables and figures: smooth-step beside logistic routing (Table 2); TEL beside gradient boosting, logistic
regression and CART (Table 3); reachable leaves in training (Figure 2), seconds by depth (Figure 3), score by trees
(Figure 4).

python -m experiments.paper_tel --data-dir DATA [--seeds 15] [--datasets spambase ...] [--parts steps tuned ...]

Needs xgboost and optuna (``make peers``). The result of a (part, set, seed) is a row of --out.

70 % of the rows are training rows, stratified by class. Scores are areas under the ROC curve in per cent; for more than
two classes the mean of each class versus the rest. Optuna's TPE tunes all methods with the same number of rounds. A
round is scored by the mean over stratified folds of the training part: five folds, or a held-out quarter from 2000 rows
on. The best options are then fitted to the whole training part.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
import time
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from experiments import benchmark, data, studies
from experiments.sizes import size
import jtrees
from jtrees import routing

SETS = ("heart-c", "ecoli", "breast-cancer-wisconsin", "diabetes", "vehicle", "dna", "spambase", "churn", "optdigits")
SETS += ("satimage", "ann-thyroid")
ROUNDS = 20  # rounds of each tuning
LARGE = 2000  # number of rows from which a held-out part replaces the folds
GAMMAS = (1.0, 0.1, 0.01)  # for Figure 2
DEPTHS = (2, 4, 6, 8, 10)  # for Figure 3
TIMED = ("churn", "spambase")  # sets of Figures 2 and 3
STEPS = ("smooth", "logistic")  # for Figure 3
TREES = (1, 2, 5, 10, 30, 100)  # for Figure 4
ROUTING: Any = jtrees.TEL(trees=10, depth=4, epochs=50, early_stopping=False, precondition=0.0)  # for Table 2

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Answers = Callable[[np.ndarray], np.ndarray]


def auc(y: np.ndarray, chances: np.ndarray) -> float:
    """Returns the area under the ROC curve in per cent."""
    chances = np.asarray(chances, np.float64)
    if chances.shape[1] == 2:
        return 100 * float(roc_auc_score(y, chances[:, 1]))
    chances = chances / chances.sum(1, keepdims=True)
    return 100 * float(roc_auc_score(y, chances, multi_class="ovr", labels=np.arange(chances.shape[1])))


def folds(x: np.ndarray, y: np.ndarray, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns training and validation rows of each fold."""
    if len(x) >= LARGE:
        a, b = train_test_split(np.arange(len(x)), test_size=0.25, stratify=y, random_state=seed)
        return [(np.asarray(a), np.asarray(b))]
    fewest = int(np.bincount(y).min())
    return list(StratifiedKFold(min(5, max(2, fewest)), shuffle=True, random_state=seed).split(x, y))


def tune(propose: Callable[[Any], Any], fitted: Callable[[Any, Any, Any], Answers], split: Split, seed: int) -> Any:
    """Returns the best proposal of all rounds, and its test score after a fit to the whole training part."""
    x, x_test, y, y_test = split
    parts = folds(x, y, seed)

    def objective(trial: Any) -> float:
        proposed = propose(trial)
        trial.set_user_attr("proposed", proposed)
        return float(np.mean([auc(y[b], fitted(proposed, x[a], y[a])(x[b])) for a, b in parts]))

    best = studies.best_trial(objective, ROUNDS, seed=seed, direction="maximize").user_attrs["proposed"]
    return best, auc(y_test, fitted(best, x, y)(x_test))


def tel(options: dict[str, Any], x: np.ndarray, y: np.ndarray, *, seed: int = 0, base: Any = ROUTING) -> Answers:
    """Fits the recipe with some options; returns its predict function."""
    recipe = base.replace(**options)
    return jtrees.fit(recipe, x, y, key=jax.random.key(seed), task="classification").model.predict


# --- Table 2 ---------------------------------------------------------------------------------------------------------

# The paper has gamma up to 1 for the smooth-step. Its logistic step has alpha = gamma / 6, and is nearly flat on such
# data at the upper limit. The second kind is a smooth-step that may be as wide as this logistic step.
KINDS = ("smooth-step", "smooth", 1.0), ("smooth-step as wide", "smooth", 60.0), ("logistic", "logistic", 60.0)


def steps(split: Split, seed: int) -> dict[str, Any]:
    """Fits ten trees of depth 4 with each step; learning rate and width of the step are tuned."""
    out = {}
    for name, step, largest in KINDS:

        def propose(trial: Any, step: str = step, largest: float = largest) -> dict[str, Any]:
            rate = trial.suggest_float("learning_rate", 1e-3, 0.1, log=True)
            return {"step": step, "learning_rate": rate, "gamma": trial.suggest_float("gamma", 1e-3, largest, log=True)}

        best, test = tune(propose, tel, split, seed)
        out[name] = {"test": test, "options": best}
    return out


# --- Table 3 ---------------------------------------------------------------------------------------------------------


def tuned(split: Split, seed: int) -> dict[str, Any]:
    """Fits TEL, boosting, logistic regression and CART; also counts the numbers in the models of TEL and boosting."""
    out: dict[str, Any] = {}
    x, x_test, y, y_test = split
    best, test = tune(_propose_tel, tel, split, seed)
    recipe = ROUTING.replace(**best)
    fit = jtrees.fit(recipe, x, y, key=jax.random.key(0), task="classification")
    hard = tel(best | {"hard": True}, x, y)(x_test)
    dense = tel(best | {"lazy": False}, x, y)(x_test)
    out["tel"] = {"test": test, "options": best, "numbers": fit.model.num_parameters, "hard": auc(y_test, hard)}
    params, scaled = fit.model.network.params, fit.model.scaling.transform(x)
    count, _ = routing.reachable_leaves(scaled, params.weights, params.bias, recipe.gamma, width=recipe.width)
    out["tel"] |= {"dense Adam": auc(y_test, dense), "reachable": float(count.mean())}
    best, test = tune(_propose_boosting, boosting, split, seed)
    out["boosting"] = {"test": test, "options": best, "numbers": size(boosted(best, x, y), x)[1]}
    best, test = tune(lambda trial: trial.suggest_float("C", 1e-8, 1e4, log=True), logistic, split, seed)
    out["logistic"] = {"test": test, "options": best}
    best, test = tune(lambda trial: trial.suggest_int("max_depth", 2, 20), cart, split, seed)
    out["cart"] = {"test": test, "options": best}
    return out


def _propose_tel(trial: Any) -> dict[str, Any]:
    return {
        "depth": trial.suggest_int("depth", 2, 6, step=2),
        "trees": trial.suggest_categorical("trees", [3, 10, 30, 100]),
        "epochs": trial.suggest_categorical("epochs", [15, 50, 100]),
        "learning_rate": trial.suggest_float("learning_rate", 1e-3, 0.1, log=True),
        "gamma": trial.suggest_float("gamma", 1e-2, 1, log=True),
        "l2": trial.suggest_float("l2", 1e-8, 1e-2, log=True),
    }


def _propose_boosting(trial: Any) -> dict[str, Any]:
    plain = trial.suggest_categorical("plain", [True, False])
    return {
        "learning_rate": trial.suggest_float("learning_rate", 1e-3, 0.5, log=True),
        "max_depth": trial.suggest_int("max_depth", 2, 20),
        "n_estimators": trial.suggest_int("n_estimators", 1, 500),
        "reg_lambda": 0.0 if plain else trial.suggest_float("reg_lambda", 1e-8, 1e2, log=True),
    }


def boosted(options: dict[str, Any], x: np.ndarray, y: np.ndarray) -> Any:
    """Fits XGBoost as in the paper."""
    import xgboost  # pyright: ignore[reportMissingImports]

    fixed: Any = {"tree_method": "hist", "min_child_weight": 0, "n_jobs": -1, "random_state": 0}
    return xgboost.XGBClassifier(**fixed, **options).fit(x, y)


def boosting(options: dict[str, Any], x: np.ndarray, y: np.ndarray) -> Answers:
    """Returns the predict function of XGBoost."""
    return boosted(options, x, y).predict_proba


def logistic(strength: float, x: np.ndarray, y: np.ndarray) -> Answers:
    """Fits a logistic regression to standardised features; returns its predict function."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=1000)).fit(x, y).predict_proba


def cart(depth: int, x: np.ndarray, y: np.ndarray) -> Answers:
    """Fits one axis-aligned tree; returns its predict function."""
    model: Any = DecisionTreeClassifier(max_depth=depth, random_state=0).fit(x, y)
    return model.predict_proba


# --- Figures ---------------------------------------------------------------------------------------------------------


def leaves(split: Split, seed: int) -> dict[str, Any]:
    """Returns the reachable leaves of 256 training samples after each of 50 epochs, depth 10."""
    out = {}
    for gamma in GAMMAS:
        state, advance, x = _run(split, seed, 10, gamma, "smooth")
        curve = []
        for _ in range(50):
            state, _ = advance(state)
            splits = state.params.weights, state.params.bias
            curve.append(float(routing.reachable_leaves(x[:256], *splits, gamma)[0].mean()))
        out[f"{gamma:g}"] = curve
    return out


def seconds(split: Split, seed: int) -> dict[str, Any]:
    """Returns the seconds of 50 epochs without compilation, gamma 1, ten trees, batches of 256."""
    out = {}
    for step in STEPS:
        out[step] = []
        for depth in DEPTHS:
            state, advance, _ = _run(split, seed, depth, 1.0, step)
            jax.block_until_ready(advance(state))
            start = time.perf_counter()
            for _ in range(50):
                state, _ = advance(state)
            jax.block_until_ready(state)
            out[step].append(time.perf_counter() - start)
    return out


def _run(split: Split, seed: int, depth: int, gamma: float, step: str) -> tuple[jtrees.training.TrainState, Any, Any]:
    """Returns the initial state of ten trees, a compiled epoch of training, and the standardised training rows."""
    x, y = jnp.asarray(StandardScaler().fit_transform(split[0]), jnp.float32), jnp.asarray(split[2], jnp.int32)
    batch, rate = jtrees.Batch(x, y), 0.1  # the paper's learning rate
    options: dict[str, Any] = {"task": jtrees.Classification(int(y.max()) + 1), "step": step}
    optimizer = optax.adam(rate)
    if step == "smooth":
        options["learning_rate"], optimizer = rate, jtrees.training.lazy_adam(rate)
    method = jtrees.methods.tel(depth, 10, gamma, **options)
    state = jtrees.training.start(method, batch, key=jax.random.key(seed), optimizer=optimizer)
    size = min(256, len(x))
    epoch: Any = {"optimizer": optimizer, "steps": len(x) // size, "batch_size": size}
    return state, jax.jit(lambda state: jtrees.training.advance(method, state, batch, **epoch)), x


def trees(split: Split, seed: int) -> dict[str, Any]:
    """Returns test scores and numbers in the model by number of trees, of TEL and of boosting (depths 2 and 4 each).

    Each model takes the best of four candidates on a part of the training rows: learning rates and gammas for TEL,
    learning rates for boosting.
    """
    x, x_test, y, y_test = split
    out: dict[str, Any] = {"tel": [], "boosting": []}
    a, b = folds(x, y, seed)[0]
    for depth in (2, 4):
        for count in TREES:
            grid = [(rate, gamma) for rate in (0.01, 0.05) for gamma in (0.3, 1.0)]
            candidates = [
                {"depth": depth, "trees": count, "learning_rate": rate, "gamma": gamma, "epochs": 50}
                for rate, gamma in grid
            ]
            best = max(candidates, key=lambda options: auc(y[b], tel(options, x[a], y[a])(x[b])))
            fit = jtrees.fit(ROUTING.replace(**best), x, y, key=jax.random.key(seed), task="classification")
            score = auc(y_test, fit.model.predict(x_test))
            out["tel"].append([depth, count, score, fit.model.num_parameters])
            candidates = [
                {"max_depth": depth, "n_estimators": count, "learning_rate": rate} for rate in (0.03, 0.1, 0.3, 1.0)
            ]
            best = max(candidates, key=lambda options: auc(y[b], boosting(options, x[a], y[a])(x[b])))
            model = boosted(best, x, y)
            out["boosting"].append([depth, count, auc(y_test, model.predict_proba(x_test)), size(model, x)[1]])
    return out


# --- Pieces and report -----------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Split, int], dict[str, Any]]] = {
    "steps": steps,
    "tuned": tuned,
    "leaves": leaves,
    "seconds": seconds,
    "trees": trees,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "steps": {"rounds": ROUNDS, "epochs": 50, "kinds": KINDS},
    "tuned": {"rounds": ROUNDS},
    "leaves": {"gammas": GAMMAS},
    "seconds": {"depths": DEPTHS},
    "trees": {"trees": TREES},
}


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures a part on a split."""
    return PARTS[part](data.split_of(name, seed, options.data_dir, share=0.7), seed)


def report(results: studies.Results, command: str) -> str:
    """Returns Tables 2 and 3, and tables of the figures."""
    text = [f"# TEL\n\nMade by `{command}` on {results.machines}. Each method has {ROUNDS} rounds of TPE on each set."]
    text += [_smooth_or_logistic(results), _tuned(results), compact(results), _curves(results)]
    return "\n\n".join(part for part in text if part) + "\n"


def _smooth_or_logistic(results: studies.Results) -> str:
    names = results.datasets("steps")
    if not names:
        return ""
    kinds = [kind[0] for kind in KINDS]
    scores = lambda name, kind: [value[kind]["test"] for value in results.values("steps", name)]
    counts = {name: len(results.values("steps", name)) for name in names}
    rows = [[name, str(counts[name]), *(studies.spread(scores(name, kind)) for kind in kinds)] for name in names]
    means = np.array([[np.mean(scores(name, kind)) for kind in kinds] for name in names])
    rows.append(["**mean**", "", *(f"{mean:.2f}" for mean in means.mean(0))])
    return "## Smooth-step and logistic routing (Table 2), ten trees of depth 4\n\n" + benchmark.markdown(
        ["set", "splits", "smooth-step, gamma up to 1", "up to 60", "logistic, up to 60"], rows
    )


def _tuned(results: studies.Results) -> str:
    names = results.datasets("tuned")
    if not names:
        return ""
    kinds = ("tel", "boosting", "logistic", "cart")
    rows, means = [], []
    for name in names:
        values = lambda kind, key, name=name: [value[kind][key] for value in results.values("tuned", name)]
        further = [values("tel", key) for key in ("hard", "dense Adam", "reachable")]
        means.append([*(np.mean(values(kind, "test")) for kind in kinds), *map(np.mean, further)])
        numbers = [f"{np.median(values(kind, 'numbers')):,.0f}" for kind in kinds[:2]]
        scores = [studies.spread(values(kind, "test")) for kind in kinds]
        splits = str(len(results.values("tuned", name)))
        rows.append([name, splits, *scores, *(f"{mean:.2f}" for mean in means[-1][4:]), *numbers])
    rows.append(["**mean**", "", *(f"{mean:.2f}" for mean in np.mean(means, axis=0)), "", ""])
    header = ["set", "splits", "TEL", "boosting", "logistic regression", "CART", "TEL, hardened", "TEL, dense Adam"]
    header += ["leaves a sample and tree", "TEL's numbers", "boosting's"]
    return "## Tuned (Table 3)\n\n" + benchmark.markdown(header, rows)


def compact(results: studies.Results) -> str:
    """Returns a table of the smallest ensembles within half a point of tuned boosting, by the test score."""
    rows = []
    for name in results.datasets("trees"):
        for values in results.common(name, "trees", "tuned").values():
            trees, tuned = values["trees"], values["tuned"]
            goal, numbers = tuned["boosting"]["test"] - 0.5, tuned["boosting"]["numbers"]
            ours, theirs = (
                min(((size, depth, count) for depth, count, score, size in trees[kind] if score >= goal), default=None)
                for kind in ("tel", "boosting")
            )
            cells = ["-"] * 4
            if ours is not None:
                size, depth, count = ours
                cells = [f"{count} of depth {depth}", f"{size:,}", f"{numbers / size:.1f}"]
                cells.append("-" if theirs is None else f"{theirs[0] / size:.1f}")
            rows.append([name, f"{goal + 0.5:.2f}", f"{numbers:,}", *cells])
    if not rows:
        return ""
    header = ["set", "boosting, tuned", "its numbers", "smallest TEL within 0.5", "its numbers", "times fewer"]
    header += ["than the smallest boosting within 0.5"]
    return (
        "## Compactness (Figure 4)\n\nThe test score chooses the smallest TEL and the smallest boosting. Tuned "
        "boosting was tuned for its score alone, so only the last column compares like with like.\n\n"
        + benchmark.markdown(header, rows)
    )


def _series(results: studies.Results, part: str, name: str) -> list[tuple[str, list[Any]]]:
    """Returns the labelled series of the first seed of a part, in the order of the figures."""
    labels = {"leaves": [f"{gamma:g}" for gamma in GAMMAS], "seconds": STEPS, "trees": ("tel", "boosting")}[part]
    return [(label, value[label]) for value in results.values(part, name)[:1] for label in labels]


def _curves(results: studies.Results) -> str:
    rows, times = [], []
    for name in TIMED:
        for gamma, curve in _series(results, "leaves", name):
            below = next((str(i + 1) for i, value in enumerate(curve) if value < 2), "never")
            rows.append([name, gamma, f"{curve[0]:.2f}", f"{curve[9]:.2f}", f"{curve[-1]:.2f}", below])
        for step, values in _series(results, "seconds", name):
            times.append([name, step, *(f"{value:.2f}" for value in values)])
    text = ""
    if rows:
        header = ["set", "gamma", "leaves after 1 epoch", "10", "50", "below 2 from epoch"]
        text += "## Reachable leaves a sample and tree, depth 10 (Figure 2)\n\n" + benchmark.markdown(header, rows)
    if times:
        header = ["set", "step", *(f"depth {depth}" for depth in DEPTHS)]
        text += "\n## Seconds of 50 epochs, gamma 1 (Figure 3)\n\n" + benchmark.markdown(header, times)
    return text


def figure(results: studies.Results, file: Path) -> None:
    """Draws Figures 2, 3 and 4, a row each."""
    canvas = Figure(figsize=(9, 8), layout="constrained")
    axes = canvas.subplots(3, 2)
    for column, name in enumerate(TIMED):
        for gamma, curve in _series(results, "leaves", name):
            axes[0, column].semilogy(range(1, len(curve) + 1), curve, label=f"gamma {gamma}")
        for step, values in _series(results, "seconds", name):
            axes[1, column].semilogy(DEPTHS, values, marker="o", label=step)
        axes[0, column].set(title=name, xlabel="epoch", ylabel="leaves a sample and tree")
        axes[1, column].set(title=name, xlabel="depth", ylabel="seconds of 50 epochs")
    for column, name in enumerate(("diabetes", "spambase")):
        for kind, values in _series(results, "trees", name):
            for depth in (2, 4):
                points = [(count, score) for d, count, score, _ in values if d == depth]
                axes[2, column].semilogx(*zip(*points, strict=True), marker=".", label=f"{kind}, depth {depth}")
        axes[2, column].set(title=name, xlabel="trees", ylabel="AUC, per cent")
    for axis in axes.flat:
        if axis.lines:
            axis.legend(fontsize=7)
    canvas.savefig(file, dpi=110)


STUDY = studies.Study(
    *("paper_tel", __doc__, PARTS, SETS, 15, measure, report),
    settings=lambda part, name, options: (
        None if part in ("leaves", "seconds") and name not in TIMED else SETTINGS[part]
    ),
    figure=figure,
)

if __name__ == "__main__":
    studies.program(STUDY)
