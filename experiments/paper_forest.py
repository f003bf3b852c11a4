"""Thirty small trees against boosting: forests of GET with linear leaves and of DGT, boosted trees of GET, the same
trained all together, XGBoost, a random forest and one tree, on the eight sets of ``paper_get``.

python -m experiments.paper_forest --data-dir DATA --seeds 3 [--datasets kin8nm ...] [--parts get boosting ...]

Needs xgboost, lightgbm, catboost and optuna (``make peers``). Every (part, set, seed) is a file under --out (by default
the committed ones); the report, beside that folder, is made of the files that are there.

Three quarters of the rows to train, targets scaled to mean 0 and deviation 1; scores are R^2 in per cent. What is tuned
is tuned on a third of the training part, and then fitted to all of it.
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
UPDATES = 2000  # of a tree of DGT
BOOSTED_SECONDS = 150  # for each recipe
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
)  # the default when this was measured
_TRIED: Any = (
    ({"depth": 6}, {}),
    ({"depth": 8, "epochs": 20, "alpha_ranges": ((30.0, 60.0),)}, {"learning_rate": 0.05, "patience": 40}),
    ({"depth": 4, "leaves": "linear"}, {"subsample": 0.5}),
)
# Three recipes, of which that with the lowest loss on the rows that it holds out is taken.
BOOSTED: Any = tuple(jtrees.Boosted(WEAK.replace(**tree), rounds=1000, **sum_) for tree, sum_ in _TRIED)
_SLOWLY, _SOFTLY = {"learning_rate": 0.0003}, {"first_sharpness": 5.0, "last_sharpness": 30.0}
_WAYS: Any = (_SLOWLY, {}, {"learning_rate": 0.003}, _SOFTLY)


def in_ways(base: jtrees.Recipe) -> tuple[Any, ...]:
    """Returns four recipes that train the trees of a boosted sum all together, each in another way."""
    return tuple(jtrees.Refined(base, **way) for way in _WAYS)


# Two sums, likewise, each with four ways to train all trees together.
REFINED: Any = (
    in_ways(jtrees.Boosted(WEAK.replace(depth=4, leaves="linear"), rounds=100, subsample=0.5)),
    in_ways(jtrees.Boosted(WEAK, rounds=100)),
)
ONE_TREE: Any = GET_FOREST.base.replace(starts=4)


def fitted(recipe: Any, split: Split, seed: int) -> dict[str, Any]:
    """What a recipe scores, and how many numbers its model holds."""
    x, x_test, y, y_test = split
    model = jtrees.fit(recipe, x, y, key=jax.random.key(seed)).model
    return {"test": percent(model.predict(x_test), y_test), "numbers": size(model, x)[1]}


def get_forest(split: Split, seed: int) -> dict[str, Any]:
    """A forest of GET with linear leaves; its depth is the best of four trees, where ``tune`` itself takes the smallest
    that is hardly worse: depth costs a forest less.
    """
    x, _, y, _ = split
    few, key = GET_FOREST.replace(trees=4), jax.random.key(1000 + seed)
    trials = jtrees.tune(few, x, y, key=key, grid={"base__depth": GET_DEPTHS}).report.tuning.trials
    depth = min(trials, key=lambda trial: trial.loss).options["base__depth"]
    found = fitted(GET_FOREST.replace(base=GET_FOREST.base.replace(depth=depth)), split, seed)
    return found | {"depth": depth}


def boosted(split: Split, seed: int) -> dict[str, Any]:
    """Boosted trees of GET: the best of three recipes by the fifth of the training rows that each holds out."""
    x, x_test, y, y_test = split
    fits = [jtrees.fit(recipe, x, y, key=jax.random.key(seed), max_seconds=BOOSTED_SECONDS) for recipe in BOOSTED]
    chosen = int(np.argmin([fit.report.search.losses.min() for fit in fits]))
    model = fits[chosen].model
    found = {"test": percent(model.predict(x_test), y_test), "numbers": size(model, x)[1]}
    each = [percent(fit.predict(x_test), y_test) for fit in fits]
    rounds, ended = [fit.report.search.rounds for fit in fits], [fit.report.ended for fit in fits]
    return found | {"chosen": chosen, "each": each, "rounds": rounds, "ended": ended}


def best_way(recipes: Any, x: Any, y: Any, **options: Any) -> tuple[Any, int, float]:
    """Returns the fit with the lowest loss on the rows held out, the number of its recipe, and that loss.

    With one key all recipes hold out the same rows.
    """
    fits = [jtrees.fit(recipe, x, y, **options) for recipe in recipes]
    losses = [float(min(fit.report.search.losses.min(), fit.report.search.boosted_loss)) for fit in fits]
    best = int(np.argmin(losses))
    return fits[best], best, losses[best]


def refined(split: Split, seed: int) -> dict[str, Any]:
    """Boosted trees trained all together: the best of two sums and four ways by the fifth of the rows held out."""
    x, x_test, y, y_test = split
    found = [best_way(recipes, x, y, key=jax.random.key(seed)) for recipes in REFINED]
    fits, ways, held_out = zip(*found, strict=True)
    model = fits[chosen := int(np.argmin(held_out))].model
    found = {"test": percent(model.predict(x_test), y_test), "numbers": model.num_parameters}
    each = [percent(fit.predict(x_test), y_test) for fit in fits]
    rounds = [fit.report.search.base.rounds for fit in fits]
    return found | {"chosen": chosen, "ways": list(ways), "each": each, "rounds": rounds}


def dgt_forest(split: Split, seed: int) -> dict[str, Any]:
    """A forest of DGT, untuned."""
    epochs = max(10, UPDATES * 128 // len(split[0]))
    return fitted(
        jtrees.Bagged(jtrees.DGT(depth=6, epochs=epochs, precondition=0.0, early_stopping=False), trees=30), split, seed
    )


def rival(name: str, split: Split, seed: int) -> dict[str, Any]:
    """A package of boosted trees, tuned."""
    x, x_test, _, y_test = split
    model, found = rivals.tuned(name, split, seed)
    return {"test": percent(model.predict(x_test), y_test), "numbers": size(model, x)[1], **found}


def random_forest(split: Split, seed: int) -> dict[str, Any]:
    """Scikit-learn's, of 500 trees."""
    x, x_test, y, y_test = split
    model = RandomForestRegressor(500, random_state=seed, n_jobs=-1).fit(x, y)
    return {"test": percent(model.predict(x_test), y_test), "numbers": size(model, x)[1]}


def one_tree(split: Split, seed: int) -> dict[str, Any]:
    """One tree of GET with linear leaves, what ``TreeRegressor`` learns unless told otherwise."""
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
    """One a seed."""

    def make(seed: int) -> dict[str, Any]:
        table = data.load(name, data_dir=options.data_dir)
        parts: Any = train_test_split(table.x, table.y, train_size=0.75, random_state=seed)
        x, x_test, y, y_test = parts
        mean, deviation = y.mean(dtype=np.float64), y.std(dtype=np.float64)
        return PARTS[part]((x, x_test, (y - mean) / deviation, (y_test - mean) / deviation), seed)

    yield from pieces.for_seeds(part, name, make, SETTINGS[part], options.all_seeds)


def ahead(found: pieces.Found, part: str, name: str, others: tuple[str, ...] = ("boosting",)) -> float:
    """How far a part is ahead of the best of some rivals on a set, over the splits that it and XGBoost have.

    A rival without all of these splits is left out.
    """
    of = lambda which: pieces.of_seeds(found, which, name)
    seeds = of(part).keys() & of("boosting").keys()
    mean = lambda which: float(np.mean([of(which)[seed]["test"] for seed in seeds]))
    return mean(part) - max(mean(other) for other in others if of(other).keys() >= seeds)


def differences(found: pieces.Found, names: Iterable[str]) -> list[str]:
    """Of each of our parts, lines that say how far it is ahead of XGBoost, and of the best rival of each set."""
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
    """The table: scores with their spread over the splits, numbers in the models, seconds."""
    needed = ("get", "dgt", "boosting", "forest", "tree")  # the others may lack sets
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
        f"Made by `{command}` on {pieces.machines(found)}. Test R² in per cent, mean and deviation over random "
        f"splits, 75/25. GET-Linear: depth of {GET_DEPTHS} chosen with four trees, one start x "
        f"{GET_FOREST.base.epochs} epochs under each of two scale factors; DGT: depth 6, {UPDATES} updates, untuned. "
        "Boosted GET: the best of three recipes (constant leaves at depth 6 and 8, linear ones at depth 4) by the "
        "fifth of the training rows that each holds out to find its number of rounds, at most "
        f"{BOOSTED_SECONDS} s each. Refined GET: the better of two recipes (100 trees of depth 4 with linear leaves, "
        "of depth 5 with constant ones), each with four ways to train them together, by the same rows. "
        f"XGBoost, LightGBM (also with linear leaves) and CatBoost: seven options each by {rivals.TRIALS} trials of "
        f"Optuna's TPE, up to {rivals.ROUNDS} trees with early stopping. Random forest: 500 trees. Splits: at most "
        + ", ".join(f"{title} {splits(part)}" for part, title in zip(PARTS, TITLES, strict=True))
        + "; differences are of common ones. Targets are scaled to mean 0 and deviation 1 for all. The machine was at "
        "times busy with other work: seconds are upper bounds."
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
