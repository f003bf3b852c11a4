"""Thirty small trees against boosting on the eight sets of ``paper_get``: forests of GET with linear leaves and of DGT,
boosted and refined trees of GET, tuned boosting packages, a random forest and one tree.

python -m experiments.paper_forest --data-dir DATA --seeds 3 [--datasets kin8nm ...] [--parts get boosting ...]

Needs xgboost, lightgbm, catboost and optuna (``make peers``). The results of a (part, set, seed) are a file under
--out. By default these are the committed files. The report beside that folder is made from the existing files.

Three quarters of the rows are training rows. Targets are scaled to mean 0 and standard deviation 1. Scores are R^2 in
per cent. Tuned methods are tuned on a third of the training part, and then fitted to the whole training part.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from sklearn.ensemble import RandomForestRegressor
from sklearn.model_selection import train_test_split

from experiments import benchmark, data, pieces, rivals
from experiments.outcome import size
from experiments.paper_get import PAPER
from experiments.pieces import percent
from experiments.rivals import Split
import jtrees

SETS = tuple(PAPER)
OURS, RIVALS = ("get", "dgt", "boosted", "refined"), ("boosting", "lightgbm", "catboost")
UPDATES = 2000  # per tree of DGT
BOOSTED_SECONDS = 150  # limit of each recipe
GET_FOREST: Any = jtrees.Bagged(
    jtrees.GET(
        rows=None,
        depth=5,
        leaves="linear",
        starts=1,
        epochs=1000,
        ridge=False,
        precondition=0.0,
        shrink=False,
        halving=False,
    ),
    trees=30,
)
GET_DEPTHS = (4, 6)
WEAK = jtrees.GET(
    depth=5,
    starts=1,
    epochs=50,
    learning_rate=0.01,
    alpha_ranges=((5.0, 25.0), (50.0, 150.0)),
    cart="binned",
    ridge=False,
    precondition=0.0,
    shrink=False,
    halving=False,
    rows=None,
)  # the default recipe at the time of the measurement
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


def fitted(recipe: Any, split: Split, seed: int) -> dict[str, Any]:
    """Fits a recipe; returns its test score and the numbers in its model."""
    x, x_test, y, y_test = split
    model = jtrees.fit(recipe, x, y, key=jax.random.key(seed)).model
    return {"test": percent(model.predict(x_test), y_test), "numbers": size(model, x)[1]}


def get_forest(split: Split, seed: int) -> dict[str, Any]:
    """Fits a forest of GET with linear leaves; its depth is the best depth with four trees.

    ``tune`` would take the smallest depth that is hardly worse. Depth costs a forest less than a single tree.
    """
    x, _, y, _ = split
    few, key = GET_FOREST.replace(trees=4), jax.random.key(1000 + seed)
    trials = jtrees.tune(few, x, y, key=key, grid={"base__depth": GET_DEPTHS}).report.tuning.trials
    depth = min(trials, key=lambda trial: trial.loss).options["base__depth"]
    found = fitted(GET_FOREST.replace(base=GET_FOREST.base.replace(depth=depth)), split, seed)
    return found | {"depth": depth}


def boosted(split: Split, seed: int) -> dict[str, Any]:
    """Fits boosted trees of GET: the best of three recipes by their loss on a held-out fifth of the training rows."""
    x, x_test, y, y_test = split
    fits = [jtrees.fit(recipe, x, y, key=jax.random.key(seed), max_seconds=BOOSTED_SECONDS) for recipe in BOOSTED]
    chosen = int(np.argmin([fit.report.search.losses.min() for fit in fits]))
    model = fits[chosen].model
    found = {"test": percent(model.predict(x_test), y_test), "numbers": size(model, x)[1]}
    each = [percent(fit.predict(x_test), y_test) for fit in fits]
    rounds, ended = [fit.report.search.rounds for fit in fits], [fit.report.ended for fit in fits]
    return found | {"chosen": chosen, "each": each, "rounds": rounds, "ended": ended}


def best_way(recipes: Any, x: Any, y: Any, **options: Any) -> tuple[Any, int, float]:
    """Returns the fit with the lowest held-out loss, the number of its recipe, and that loss.

    All recipes hold out the same rows if they have the same key.
    """
    fits = [jtrees.fit(recipe, x, y, **options) for recipe in recipes]
    losses = [float(min(fit.report.search.losses.min(), fit.report.search.boosted_loss)) for fit in fits]
    best = int(np.argmin(losses))
    return fits[best], best, losses[best]


def refined(split: Split, seed: int) -> dict[str, Any]:
    """Trains boosted trees together: the best of two sums and four candidates by the loss on a held-out fifth."""
    x, x_test, y, y_test = split
    found = [best_way(recipes, x, y, key=jax.random.key(seed)) for recipes in REFINED]
    fits, ways, held_out = zip(*found, strict=True)
    model = fits[chosen := int(np.argmin(held_out))].model
    found = {"test": percent(model.predict(x_test), y_test), "numbers": model.num_parameters}
    each = [percent(fit.predict(x_test), y_test) for fit in fits]
    rounds = [fit.report.search.base.rounds for fit in fits]
    return found | {"chosen": chosen, "ways": list(ways), "each": each, "rounds": rounds}


def dgt_forest(split: Split, seed: int) -> dict[str, Any]:
    """Fits a forest of DGT, untuned."""
    epochs = max(10, UPDATES * 128 // len(split[0]))
    return fitted(
        jtrees.Bagged(jtrees.DGT(depth=6, epochs=epochs, precondition=0.0, early_stopping=False), trees=30), split, seed
    )


def rival(name: str, split: Split, seed: int) -> dict[str, Any]:
    """Tunes a package of boosted trees."""
    x, x_test, _, y_test = split
    model, found = rivals.tuned(name, split, seed)
    return {"test": percent(model.predict(x_test), y_test), "numbers": size(model, x)[1], **found}


def random_forest(split: Split, seed: int) -> dict[str, Any]:
    """Fits scikit-learn's random forest with 500 trees."""
    x, x_test, y, y_test = split
    model = RandomForestRegressor(500, random_state=seed, n_jobs=-1).fit(x, y)
    return {"test": percent(model.predict(x_test), y_test), "numbers": size(model, x)[1]}


def one_tree(split: Split, seed: int) -> dict[str, Any]:
    """Fits one tree of GET with linear leaves, the default of ``TreeRegressor``."""
    return fitted(ONE_TREE, split, seed)


PARTS: dict[str, Callable[[Split, int], dict[str, Any]]] = {
    "get": get_forest,
    "dgt": dgt_forest,
    "boosted": boosted,
    "refined": refined,
    "boosting": partial(rival, "XGBoost"),
    "lightgbm": partial(rival, "LightGBM"),
    "catboost": partial(rival, "CatBoost"),
    "forest": random_forest,
    "tree": one_tree,
}
TITLES = (
    "30 trees of GET-Linear",
    "30 trees of DGT",
    "boosted GET",
    "refined GET",
    "XGBoost, tuned",
    "LightGBM, tuned",
    "CatBoost, tuned",
    "random forest",
    "one tree of GET-Linear",
)
SETTINGS: dict[str, Any] = {
    "get": {"recipe": pieces.recipe_text(GET_FOREST), "depths": GET_DEPTHS},
    "dgt": {"updates": UPDATES},
    "boosted": {"recipes": [pieces.recipe_text(recipe) for recipe in BOOSTED]},
    "refined": {"recipes": [pieces.recipe_text(recipe) for recipe in REFINED]},
    **{part: {"trials": rivals.TRIALS, "rounds": rivals.ROUNDS} for part in RIVALS},
    "forest": {},
    "tree": {"recipe": pieces.recipe_text(ONE_TREE)},
}


def pieces_of(part: str, name: str, options: argparse.Namespace) -> Iterator[pieces.Piece]:
    """Yields a piece per seed."""

    def make(seed: int) -> dict[str, Any]:
        table = data.load(name, data_dir=options.data_dir)
        parts: Any = train_test_split(table.x, table.y, train_size=0.75, random_state=seed)
        x, x_test, y, y_test = parts
        mean, deviation = y.mean(dtype=np.float64), y.std(dtype=np.float64)
        return PARTS[part]((x, x_test, (y - mean) / deviation, (y_test - mean) / deviation), seed)

    yield from pieces.for_seeds(part, name, make, SETTINGS[part], options.all_seeds)


def ahead(found: pieces.Found, part: str, name: str, others: tuple[str, ...] = ("boosting",)) -> float:
    """Returns how far a part is ahead of the best of some rivals on a set, over the splits that it shares with XGBoost.

    A rival that lacks a split is left out.
    """
    of = lambda which: pieces.of_seeds(found, which, name)
    seeds = of(part).keys() & of("boosting").keys()
    mean = lambda which: float(np.mean([of(which)[seed]["test"] for seed in seeds]))
    return mean(part) - max(mean(other) for other in others if of(other).keys() >= seeds)


def differences(found: pieces.Found, names: Iterable[str]) -> list[str]:
    """Returns lines on how far each of our parts is ahead of XGBoost, and of the best rival of each set."""
    lines = []
    for part, title in zip(PARTS, TITLES, strict=True):
        both = [
            one for one in names if {*pieces.of_seeds(found, part, one)} & {*pieces.of_seeds(found, "boosting", one)}
        ]
        if not both or part not in OURS:
            continue
        for others, of in ((("boosting",), "XGBoost"), (RIVALS, "the best rival of each set")):
            by = [ahead(found, part, name, others) for name in both]
            counts = f"ahead on {sum(one > 0 for one in by)} of {len(by)}"
            lines.append(f"- {title} - {of}: {np.mean(by):+.2f} on average, {counts}")
    return lines


def report(found: pieces.Found, command: str) -> str:
    """Returns the table: scores with their spread over the splits, numbers in the models, seconds."""
    needed = ("get", "dgt", "boosting", "forest", "tree")  # the other parts may lack sets
    whole = [name for name in SETS if all(found.get(part, {}).get(name) for part in needed)]
    of = lambda part, name, what: [one[what] for one in pieces.of_seeds(found, part, name).values()]
    mean = lambda values: float(np.mean(values)) if values else np.nan
    median = lambda values: f"{np.median(values):,.0f}" if values else "-"
    means = np.array([[mean(of(part, name, "test")) for part in PARTS] for name in whole])
    cell = lambda values: pieces.spread(values) if values else "-"
    rows = [[name, *(cell(of(part, name, "test")) for part in PARTS)] for name in whole]
    header = ["set", *TITLES]
    lines = []
    if whole:
        rows.append(["**mean**", *("-" if np.isnan(mean) else f"{mean:.2f}" for mean in means.mean(0))])
        numbers = [[n for name in whole for n in of(part, name, "numbers")] for part in PARTS]
        records = lambda part, name: found.get(part, {}).get(name, {}).values()
        seconds = [[one["seconds"] for name in whole for one in records(part, name)] for part in PARTS]
        rows.append(["median of numbers in the model", *map(median, numbers)])
        rows.append(["median of seconds, tuning included", *map(median, seconds)])
        lines = differences(found, whole)
    splits = lambda part: max((len(of(part, name, "test")) for name in whole), default=0)
    about = (
        f"Made by `{command}` on {pieces.machines(found)}. Test R² in per cent, mean and standard deviation over "
        f"random splits (75/25). GET-Linear: the depth from {GET_DEPTHS} is chosen with four trees; one start x "
        f"{GET_FOREST.base.epochs} epochs under each of two scale factors. DGT: depth 6, {UPDATES} updates, untuned. "
        "Boosted GET: the best of three recipes (constant leaves at depth 6 and 8, linear leaves at depth 4), at most "
        f"{BOOSTED_SECONDS} s each. The loss on a held-out fifth of the training rows chooses the recipe and its "
        "number of rounds. Refined GET: the better of two recipes (100 trees, of depth 4 with linear leaves or of "
        "depth 5 with constant leaves). Each recipe has four candidates of training all trees together, and the same "
        "held-out loss chooses. XGBoost, LightGBM (also with linear leaves) and CatBoost: seven options each, chosen "
        f"by {rivals.TRIALS} trials of Optuna's TPE, up to {rivals.ROUNDS} trees with early stopping. Random forest: "
        "500 trees. Number of splits, at most: "
        + ", ".join(f"{title} {splits(part)}" for part, title in zip(PARTS, TITLES, strict=True))
        + "; differences use the common splits. Targets are scaled to mean 0 and standard deviation 1 for all methods. "
        "The machine was busy with other work at times: seconds are upper bounds."
    )
    return (
        f"# Thirty small trees against boosting\n\n{about}\n\n"
        + benchmark.markdown(header, rows)
        + "\n"
        + "\n".join(lines)
        + "\n"
    )


SCRIPT = pieces.Script("paper_forest", __doc__, PARTS, SETS, 3, pieces_of, report)

if __name__ == "__main__":
    pieces.program(SCRIPT)
