"""Thirty small trees against boosting on the eight sets of ``paper_get``: forests of GET with linear leaves and of DGT,
boosted and refined trees of GET, tuned boosting packages, a random forest and one tree.

python -m experiments.paper_forest --data-dir DATA --seeds 3 [--datasets kin8nm ...] [--parts get boosting ...]

Needs xgboost, lightgbm, catboost and optuna (``make peers``). The result of a (part, set, seed) is a row of --out.

Three quarters of the rows are training rows. Targets are scaled to mean 0 and standard deviation 1. Scores are R^2 in
per cent. Tuned methods are tuned on a third of the training part, and then fitted to the whole training part.
"""

import argparse
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from sklearn.ensemble import RandomForestRegressor

from experiments import benchmark, data, packages, studies
from experiments.paper_get import PAPER
from experiments.sizes import size
from experiments.studies import Split, percent
import jtrees

SETS = tuple(PAPER)
OURS, RIVALS = ("get", "dgt", "boosted", "refined"), ("boosting", "lightgbm", "catboost")
UPDATES = 2000  # per tree of DGT
BOOSTED_SECONDS = 150  # limit of each recipe
PLAIN: Any = {"rows": None, "starts": 1, "ridge": False, "precondition": 0.0, "shrink": False, "halving": False}
GET_FOREST: Any = jtrees.Bagged(jtrees.GET(depth=5, leaves="linear", epochs=1000, **PLAIN), trees=30)
GET_DEPTHS = (4, 6)
# The default recipe at the time of the measurement.
WEAK = jtrees.GET(
    depth=5, epochs=50, learning_rate=0.01, alpha_ranges=((5.0, 25.0), (50.0, 150.0)), cart="binned", **PLAIN
)
_TRIED: Any = (
    ({"depth": 6}, {}),
    ({"depth": 8, "epochs": 20, "alpha_ranges": ((30.0, 60.0),)}, {"learning_rate": 0.05, "patience": 40}),
    ({"depth": 4, "leaves": "linear"}, {"subsample": 0.5}),
)
# Three recipes; the recipe with the lowest held-out loss is taken.
BOOSTED: Any = tuple(jtrees.Boosted(WEAK.replace(**tree), rounds=1000, **sum_) for tree, sum_ in _TRIED)
_SLOWLY, _SOFTLY = {"learning_rate": 0.0003}, {"first_sharpness": 5.0, "last_sharpness": 30.0}
_WAYS: Any = (_SLOWLY, {}, {"learning_rate": 0.003}, _SOFTLY)


def in_ways(base: jtrees.Recipe) -> tuple[Any, ...]:
    """Returns four recipes that train all trees of a boosted sum together, with other learning rates or sharpness."""
    return tuple(jtrees.Refined(base, **way) for way in _WAYS)


# Two boosted sums, each with four candidates of training all trees together; the lowest held-out loss is taken.
REFINED: Any = (
    in_ways(jtrees.Boosted(WEAK.replace(depth=4, leaves="linear"), rounds=100, subsample=0.5)),
    in_ways(jtrees.Boosted(WEAK, rounds=100)),
)
ONE_TREE: Any = GET_FOREST.base.replace(starts=4)


def result(model: Any, split: Split) -> dict[str, Any]:
    """Returns the test score of a model and its numbers."""
    return {"test": percent(model.predict(split[1]), split[3]), "numbers": size(model, split[0])[1]}


def fitted(recipe: Any, split: Split, seed: int) -> dict[str, Any]:
    """Fits a recipe."""
    return result(studies.fit(recipe, split, seed).model, split)


def get_forest(split: Split, seed: int) -> dict[str, Any]:
    """Fits a forest of GET with linear leaves; its depth is the best depth with four trees.

    ``tune`` would take the smallest depth that is hardly worse. Depth costs a forest less than a single tree.
    """
    small_forest, key = GET_FOREST.replace(trees=4), jax.random.key(1000 + seed)
    tuned = jtrees.tune(small_forest, split[0], split[2], key=key, grid={"base__depth": GET_DEPTHS})
    depth = min(tuned.report.tuning.trials, key=lambda trial: trial.loss).options["base__depth"]
    return fitted(GET_FOREST.replace(base=GET_FOREST.base.replace(depth=depth)), split, seed) | {"depth": depth}


def boosted(split: Split, seed: int) -> dict[str, Any]:
    """Fits boosted trees of GET: the best of three recipes by their loss on a held-out fifth of the training rows."""
    fits = [studies.fit(recipe, split, seed, max_seconds=BOOSTED_SECONDS) for recipe in BOOSTED]
    chosen = int(np.argmin([fit.report.search.losses.min() for fit in fits]))
    scores = [percent(fit.predict(split[1]), split[3]) for fit in fits]
    rounds, endings = [fit.report.search.rounds for fit in fits], [fit.report.ended for fit in fits]
    return result(fits[chosen].model, split) | {"chosen": chosen, "each": scores, "rounds": rounds, "ended": endings}


def best_way(recipes: Any, split: Split, seed: int, **options: Any) -> tuple[Any, int, float]:
    """Returns the fit with the lowest held-out loss, the number of its recipe, and that loss.

    All recipes hold out the same rows if they have the same key.
    """
    fits = [studies.fit(recipe, split, seed, **options) for recipe in recipes]
    searches = [fit.report.search for fit in fits]
    losses = [float(min(search.losses.min(), getattr(search, "boosted_loss", np.inf))) for search in searches]
    best = int(np.argmin(losses))
    return fits[best], best, losses[best]


def refined(split: Split, seed: int) -> dict[str, Any]:
    """Trains boosted trees together: the best of two sums and four candidates by the loss on a held-out fifth."""
    fits, ways, held_out = zip(*(best_way(recipes, split, seed) for recipes in REFINED), strict=True)
    chosen = int(np.argmin(held_out))
    scores = [percent(fit.predict(split[1]), split[3]) for fit in fits]
    best = {"test": scores[chosen], "numbers": fits[chosen].model.num_parameters, "chosen": chosen}
    return best | {"ways": list(ways), "each": scores, "rounds": [fit.report.search.base.rounds for fit in fits]}


def dgt_forest(split: Split, seed: int) -> dict[str, Any]:
    """Fits a forest of DGT, untuned."""
    epochs = max(10, UPDATES * 128 // len(split[0]))
    base = jtrees.DGT(depth=6, epochs=epochs, precondition=0.0, early_stopping=False)
    return fitted(jtrees.Bagged(base, trees=30), split, seed)


def rival(name: str, split: Split, seed: int) -> dict[str, Any]:
    """Tunes a package of boosted trees."""
    model, details = packages.tuned(name, split, seed)
    return result(model, split) | details


def random_forest(split: Split, seed: int) -> dict[str, Any]:
    """Fits scikit-learn's random forest with 500 trees."""
    return result(RandomForestRegressor(500, random_state=seed, n_jobs=-1).fit(split[0], split[2]), split)


# Title, function and settings of each part.
_BUDGET = {"trials": packages.TRIALS, "rounds": packages.ROUNDS}
_TEXTS = {name: [*map(studies.recipe_text, recipes)] for name, recipes in (("boosted", BOOSTED), ("refined", REFINED))}
_FOREST = {"recipe": studies.recipe_text(GET_FOREST), "depths": GET_DEPTHS}
PARTS: dict[str, tuple[str, Callable[[Split, int], dict[str, Any]], dict[str, Any]]] = {
    "get": ("30 trees of GET-Linear", get_forest, _FOREST),
    "dgt": ("30 trees of DGT", dgt_forest, {"updates": UPDATES}),
    "boosted": ("boosted GET", boosted, {"recipes": _TEXTS["boosted"]}),
    "refined": ("refined GET", refined, {"recipes": _TEXTS["refined"]}),
    "boosting": ("XGBoost, tuned", partial(rival, "XGBoost"), _BUDGET),
    "lightgbm": ("LightGBM, tuned", partial(rival, "LightGBM"), _BUDGET),
    "catboost": ("CatBoost, tuned", partial(rival, "CatBoost"), _BUDGET),
    "forest": ("random forest", random_forest, {}),
    "tree": ("one tree of GET-Linear", partial(fitted, ONE_TREE), {"recipe": studies.recipe_text(ONE_TREE)}),
}
TITLES = {part: title for part, (title, _, _) in PARTS.items()}


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures a part on a split."""
    x, x_test, y, y_test = data.split_of(name, seed, options.data_dir)
    mean, deviation = y.mean(dtype=np.float64), y.std(dtype=np.float64)
    return PARTS[part][1]((x, x_test, (y - mean) / deviation, (y_test - mean) / deviation), seed)


def lead(results: studies.Results, part: str, name: str, rivals: tuple[str, ...] = ("boosting",)) -> float:
    """Returns how far a part is ahead of the best of some rivals on a set, over the splits that it shares with XGBoost.

    A rival that lacks a split is left out.
    """
    seeds = results.common(name, part, "boosting").keys()
    values = {method: results.seed_values(method, name) for method in (part, *rivals)}
    mean = lambda method: float(np.mean([values[method][seed]["test"] for seed in seeds]))
    return mean(part) - max(mean(other) for other in rivals if values[other].keys() >= seeds)


def differences(results: studies.Results, names: Iterable[str]) -> list[str]:
    """Returns lines on how far each of our parts is ahead of XGBoost, and of the best rival of each set."""
    lines = []
    for part in OURS:
        shared = [name for name in names if results.common(name, part, "boosting")]
        if not shared:
            continue
        for rivals, rival in ((("boosting",), "XGBoost"), (RIVALS, "the best rival of each set")):
            points = [lead(results, part, name, rivals) for name in shared]
            counts = f"ahead on {sum(point > 0 for point in points)} of {len(points)}"
            lines.append(f"- {TITLES[part]} - {rival}: {np.mean(points):+.2f} on average, {counts}")
    return lines


def report(results: studies.Results, command: str) -> str:
    """Returns the table: scores with their spread over the splits, numbers in the models, seconds."""
    common_parts = ("get", "dgt", "boosting", "forest", "tree")  # the other parts may lack sets
    names = [name for name in SETS if all(results.values(part, name) for part in common_parts)]
    scores = lambda part, name: results.values(part, name, "test")
    mean = lambda values: float(np.mean(values)) if values else np.nan
    median = lambda values: f"{np.median(values):,.0f}" if values else "-"
    rows = [[name, *(studies.spread(scores(part, name)) for part in PARTS)] for name in names]
    lines = []
    if names:
        means = np.array([[mean(scores(part, name)) for part in PARTS] for name in names]).mean(0)
        rows.append(["**mean**", *("-" if np.isnan(mean) else f"{mean:.2f}" for mean in means)])
        cells = [[row for row in results.select(part).rows if row.dataset in names] for part in PARTS]
        numbers = (median([row.value["numbers"] for row in cell]) for cell in cells)
        rows.append(["median of numbers in the model", *numbers])
        rows.append(["median of seconds, tuning included", *(median([row.seconds for row in cell]) for cell in cells)])
        lines = differences(results, names)
    splits = lambda part: max((len(results.values(part, name)) for name in names), default=0)
    about = (
        f"Made by `{command}` on {results.machines}. Test R² in per cent, mean and standard deviation over "
        f"random splits (75/25). GET-Linear: the depth from {GET_DEPTHS} is chosen with four trees; one start x "
        f"{GET_FOREST.base.epochs} epochs under each of two scale factors. DGT: depth 6, {UPDATES} updates, untuned. "
        "Boosted GET: the best of three recipes (constant leaves at depth 6 and 8, linear leaves at depth 4), at most "
        f"{BOOSTED_SECONDS} s each. The loss on a held-out fifth of the training rows chooses the recipe and its "
        "number of rounds. Refined GET: the better of two recipes (100 trees, of depth 4 with linear leaves or of "
        "depth 5 with constant leaves). Each recipe has four candidates of training all trees together, and the same "
        "held-out loss chooses. XGBoost, LightGBM (also with linear leaves) and CatBoost: seven options each, chosen "
        f"by {packages.TRIALS} trials of Optuna's TPE, up to {packages.ROUNDS} trees with early stopping. Random "
        "forest: 500 trees. Number of splits, at most: "
        + ", ".join(f"{title} {splits(part)}" for part, title in TITLES.items())
        + "; differences use the common splits. Targets are scaled to mean 0 and standard deviation 1 for all methods. "
        "The machine was busy with other work at times: seconds are upper bounds."
    )
    return (
        f"# Thirty small trees against boosting\n\n{about}\n\n"
        + benchmark.markdown(["set", *TITLES.values()], rows)
        + "\n"
        + "\n".join(lines)
        + "\n"
    )


STUDY = studies.Study(
    *("paper_forest", __doc__, PARTS, SETS, 3, measure, report),
    settings=lambda part, name, options: PARTS[part][2],
    closed=True,
)

if __name__ == "__main__":
    studies.program(STUDY)
