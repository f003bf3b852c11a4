"""The estimators with nothing but data, beside CART tuned by depth and a random forest.

python -m experiments.estimators --data-dir DATA --seeds 3 [--datasets kin8nm ...] [--parts regression classification]

Every (part, set, seed) is a file under --out (by default the committed ones); the report, beside that folder, is made
of the files that are there. Three quarters of the rows to train, by class; scores are R^2 or accuracy in per cent.
"""

import argparse
from collections.abc import Iterator
import time
from typing import Any

import numpy as np
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from experiments import benchmark, data, pieces
from experiments.paper_get import PAPER
from jtrees.estimators import TreeClassifier, TreeRegressor

SETS = {
    "regression": tuple(PAPER),
    "classification": (
        *("heart-c", "breast-cancer-wisconsin", "diabetes", "glass", "ecoli", "vehicle", "segmentation", "dna"),
        *("churn", "spambase", "optdigits", "satimage", "ann-thyroid", "pendigits", "letter", "connect-4"),
    ),
}
DEPTHS = {"max_depth": range(1, 16)}


def models(task: str, seed: int) -> dict[str, Any]:
    """By the heads of the columns."""
    if task == "regression":
        cart, forest, tree = DecisionTreeRegressor, RandomForestRegressor, TreeRegressor
    else:
        cart, forest, tree = DecisionTreeClassifier, RandomForestClassifier, TreeClassifier
    return {
        "CART": GridSearchCV(cart(random_state=seed), DEPTHS, cv=5),
        "random forest": forest(100, random_state=seed, n_jobs=-1),
        "jtrees": tree(random_state=seed),
    }


def pieces_of(part: str, name: str, options: argparse.Namespace) -> Iterator[pieces.Piece]:
    """One a seed."""
    if name not in SETS[part]:
        return
    of = models(part, 0)["jtrees"]
    settings = {"recipe": pieces.recipe_text(of.default_recipe)}

    def make(seed: int) -> dict[str, Any]:
        table = data.load(name, data_dir=options.data_dir)
        by_class = table.y if part == "classification" else None
        parted: Any = train_test_split(table.x, table.y, train_size=0.75, random_state=seed, stratify=by_class)
        x, x_test, y, y_test = parted
        found: dict[str, Any] = {"rows": len(x), "features": x.shape[1]}
        for method, model in models(part, seed).items():
            start = time.perf_counter()
            model.fit(x, y)
            found[f"{method} seconds"] = time.perf_counter() - start
            found[method] = 100 * float(model.score(x_test, y_test))
        return found

    yield from pieces.for_seeds(part, name, make, settings, options.all_seeds)


def _of_task(found: pieces.Found, task: str) -> str:
    records = [one for by_seed in found.get(task, {}).values() for one in by_seed.values()]
    if not records:
        return ""
    there = {name: list(pieces.of_seeds(found, task, name).values()) for name in found[task]}
    methods, rows, means = list(models(task, 0)), [], []
    for name, ones in there.items():
        seconds = [one["jtrees seconds"] for one in ones]
        of = lambda what, ones=ones: [one[what] for one in ones]
        means.append([np.mean(of(method)) for method in methods])
        size = f"{ones[0]['rows']} x {ones[0]['features']}"
        rows.append([name, size, *(pieces.spread(of(method)) for method in methods), f"{max(seconds):.0f}"])
    scores = np.array(means)
    rows.append(["**mean**", "", *(f"{mean:.2f}" for mean in scores.mean(0)), ""])
    header = ["set", "rows x features", "CART, depth tuned", "random forest of 100", "jtrees", "seconds at most"]
    said = (
        f"jtrees is ahead of CART on {(scores[:, 2] > scores[:, 0]).sum()} of {len(scores)} sets, and on average "
        f"{(scores[:, 2] - scores[:, 1]).mean():+.2f} points from the random forest."
    )
    estimator, recipe = type(models(task, 0)["jtrees"]).__name__, records[0]["settings"]["recipe"]
    return (
        f"## {task.capitalize()}: `{estimator}()`\n\n`{recipe}`\n\n" + benchmark.markdown(header, rows) + f"\n{said}\n"
    )


def report(found: pieces.Found, command: str) -> str:
    """Both tables."""
    head = (
        f"# The estimators with nothing but data\n\nMade by `{command}` on {pieces.machines(found)}. R² or accuracy in "
        "per cent on a quarter of the rows, mean and deviation over random splits. CART: depth 1..15 by five folds. "
        "Seconds: the longest fit of jtrees, compilation included.\n"
    )
    return "\n".join([head, *filter(None, (_of_task(found, task) for task in SETS))])


NAMES = [name for names in SETS.values() for name in names]
SCRIPT = pieces.Script("estimators", __doc__, SETS, NAMES, 3, pieces_of, report)

if __name__ == "__main__":
    pieces.main(SCRIPT)  # on one device, and compiling anew: as users find it
