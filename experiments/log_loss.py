"""Log loss of classification: boosted and refined trees of GET beside tuned boosting packages, on 16 sets.

python -m experiments.log_loss --data-dir DATA [--seeds 2] [--datasets churn ...] [--parts refined boosting ...]

Needs xgboost, lightgbm, catboost and optuna (``make peers``). The result of a (part, set, seed) is a row of --out.

Training uses three quarters of the rows, at most 6000. The test uses at most 6000 of the remaining rows. Splits are
stratified by class.
"""

import argparse
import itertools
from typing import Any

import numpy as np

from experiments import benchmark, data, estimators, packages, studies
from experiments.paper_forest import WEAK as _OF, best_way, in_ways
from experiments.sizes import size
from experiments.studies import Split
import jtrees

ROWS = 6000  # upper limit of the training rows, and of the test rows
FEATURES = 100  # upper limit of the features with linear leaves
# Each part takes the recipe with the lowest held-out loss. Each recipe of REFINED first takes its best candidate.
_CONSTANT = jtrees.Boosted(_OF.replace(depth=4), rounds=100, subsample=0.5)
REFINED: Any = (
    in_ways(jtrees.Boosted(_OF.replace(depth=4, leaves="linear"), rounds=100, subsample=0.5)),
    in_ways(_CONSTANT),
)
# Each tree has half of the rows and features: shallow trees with small shrinkage, deeper trees with larger shrinkage.
_HALF: Any = {"rounds": 400, "subsample": 0.5, "columns": 0.5}
BOOSTED: Any = (
    jtrees.Boosted(_OF.replace(depth=3), learning_rate=0.05, **_HALF),
    jtrees.Boosted(_OF.replace(depth=5), learning_rate=0.1, **_HALF),
)


def scores(probabilities: np.ndarray, split: Split) -> dict[str, float]:
    """Returns log loss, and accuracy in per cent, on the test part."""
    values = studies.class_scores(probabilities, split[3], np.unique(split[2]))
    return {"log_loss": values["log_loss"], "accuracy": values["score"]}


def chosen(recipes: Any, split: Split, seed: int) -> dict[str, Any]:
    """Returns the recipe with the lowest loss on its held-out fifth of the rows, and the results of each recipe."""
    results = []
    for recipe in recipes:
        candidates = recipe if isinstance(recipe, tuple) else (recipe,)
        fit, _, held_out = best_way(candidates, split, seed, task="classification")
        scored = scores(np.asarray(fit.predict(split[1])), split)
        results.append(scored | {"numbers": fit.model.num_parameters, "held_out": held_out})
    best = min(range(len(results)), key=lambda i: results[i]["held_out"])
    return results[best] | {"chosen": best, "each": results}


OURS = {"refined": "refined GET", "boosted": "boosted GET"}
RIVALS = {"boosting": "XGBoost", "lightgbm": "LightGBM", "catboost": "CatBoost"}
TITLES = OURS | RIVALS


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns our recipes, or the budget of the rivals."""
    if part in RIVALS:
        return {"trials": packages.TRIALS, "rounds": packages.ROUNDS}
    return {"recipes": [studies.recipe_text(recipe) for recipe in {"refined": REFINED, "boosted": BOOSTED}[part]]}


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Fits our recipes, or tunes a rival; linear leaves are tried on few features only."""
    split = data.split_of(name, seed, options.data_dir, limit=ROWS)
    if part in RIVALS:
        model, details = packages.tuned(RIVALS[part], split, seed)
        return scores(model.predict_proba(split[1]), split) | {"numbers": size(model, split[0])[1], **details}
    skipped = int(part == "refined" and split[0].shape[1] > FEATURES)
    value = chosen((REFINED if part == "refined" else BOOSTED)[skipped:], split, seed)
    return value | {"chosen": value["chosen"] + skipped}


def ratio(results: studies.Results, ours: str, part: str, name: str) -> float | None:
    """Returns our mean log loss over a rival's on the splits that both have; None if there is no such split."""
    seeds = results.common(name, ours, part).values()
    mean = lambda method: np.mean([values[method]["log_loss"] for values in seeds])
    return float(mean(ours) / mean(part)) if seeds else None


def report(results: studies.Results, command: str) -> str:
    """Returns log loss and accuracy by set, and the number of sets on which ours is lower than each rival."""
    parts, values = [part for part in TITLES if results.datasets(part)], results.values
    names = [name for name in SETS if name in results.datasets()]
    cell = lambda part, name: (
        f"{studies.spread(values(part, name, 'log_loss'), 3)} ({studies.spread(values(part, name, 'accuracy'), 1)})"
    )
    rows = [[name, *(cell(part, name) if results.values(part, name) else "-" for part in parts)] for name in names]
    numbers = [[np.mean(values(part, name, "numbers")) for name in results.datasets(part)] for part in parts]
    rows.append(["median of numbers in the model", *(f"{np.median(means):,.0f}" for means in numbers)])
    lines = []
    for ours, part in itertools.product(OURS, (part for part in parts if part in RIVALS)):
        ratios = [quotient for name in names if (quotient := ratio(results, ours, part, name)) is not None]
        if ratios:
            lower, mean = sum(quotient < 1 for quotient in ratios), np.exp(np.mean(np.log(ratios)))
            counts = f"lower on {lower} of {len(ratios)}; geometric mean of ratios {mean:.3f}"
            lines.append(f"- {OURS[ours]}, {TITLES[part]}: {counts}")
    about = (
        f"Made by `{command}` on {results.machines}. A cell has the test log loss and, in brackets, the accuracy "
        "in per cent: mean and standard deviation if there are several random splits. Splits are 75/25, with at most "
        f"{ROWS} rows each. Refined GET is the better of two recipes: 100 trees of depth 4 with linear leaves or with "
        f"constant leaves (linear leaves for at most {FEATURES} features). Each recipe has four candidates of training "
        "all trees together. The loss on a held-out fifth of the training rows chooses candidate and recipe. Boosted "
        "GET is the better of two recipes by the same loss. Both have up to 400 trees with constant leaves, on half of "
        "the rows and features: depth 3 with a learning rate of 0.05, and depth 5 with 0.1. The rivals have seven "
        f"options each, chosen by {packages.TRIALS} trials of Optuna's TPE by log loss, and up to {packages.ROUNDS} "
        "trees with early stopping. Two methods are compared on the splits that both have."
    )
    header = ["set", *(TITLES[part] for part in parts)]
    return f"# Log loss of classes\n\n{about}\n\n{benchmark.markdown(header, rows)}\n" + "\n".join(lines) + "\n"


SETS = estimators.SETS["classification"]
STUDY = studies.Study("log_loss", __doc__, TITLES, SETS, 2, measure, report, settings)

if __name__ == "__main__":
    studies.program(STUDY)
