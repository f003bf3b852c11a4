"""GET's tables: test R^2 beside CART and random forest (Table 8), and the effects of annealing and polishing (Table 4).

python -m experiments.paper_get --data-dir DATA --seeds 3 [--datasets kin8nm ...] [--parts get forest ablation ...]

The result of a (part, set, seed) is a row of --out.

The protocol is the paper's: 75 % training rows, 25 % test rows. A 2:1 split of the training part chooses the depth from
1..12; the search ends after two depths without improvement. The final fit takes the whole training part. Scores are R^2
in per cent.

GET's choice of options differs from the paper. `jtrees.tune` chooses the smallest tree within one standard error of the
best, and an improvement within this error does not count. CART and the forest take the best score.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from scipy.stats import rankdata
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.tree import DecisionTreeRegressor

from experiments import benchmark, data, studies
from experiments.studies import Split, percent, scores
import jtrees

# Table 8 of the paper, test R^2 in per cent: CART, GET, GET-Linear, random forest.
PAPER = {
    "airfoil-self-noise": (85.27, 89.21, 89.96, 92.58),
    "abalone": (47.29, 57.29, 60.24, 57.64),
    "cpu-act": (96.98, 98.01, 98.23, 98.27),
    "kin8nm": (42.56, 79.82, 86.67, 70.48),
    "combined-cycle-power-plant": (93.33, 93.86, 94.04, 95.92),
    "elevators": (69.12, 89.41, 90.88, 83.59),
    "ailerons": (75.96, 81.18, 82.53, 83.24),
    "space-ga": (42.14, 62.07, 62.07, 53.22),
}
FOREST_DEPTHS, FOREST_TREES = (10, 15, 20, 50), (50, 100, 200, 300, 400, 500)
# Candidates of scale factors: the paper's factors, and larger factors, which take the CART start further.
SCALES = (((5.0, 25.0), (50.0, 150.0)), ((25.0, 75.0), (100.0, 300.0)))
DEFAULT = jtrees.GET(rows=None)
DEFAULT_TUNING, DEFAULT_FINAL = (4, 300), (10, 1000)  # starts and epochs
PUBLISHED = jtrees.GET(rows=None, ridge=False, precondition=0.0, shrink=False, halving=False)
FIXED = {"alpha 1": ((1.0, 1.0),) * 2, "alpha 100": ((100.0, 100.0),) * 2, "annealed": SCALES[0]}  # Table 4
ABLATION_DEPTHS = (4, 8)
SWEEP_DEPTHS = tuple(range(1, 13))

Values = dict[int, dict[str, Any]]  # values of several methods, by seed and method
Fit = Callable[[Split, int, argparse.Namespace], tuple[Any, dict[str, Any]]]


def linear_regression(split: Split, *_: Any) -> tuple[LinearRegression, dict[str, Any]]:
    """Fits least squares in float64."""
    return LinearRegression().fit(split[0].astype(np.float64), split[2].astype(np.float64)), {}


def tuned_cart(split: Split, seed: int, options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Fits CART with the best depth on a third of the training part."""
    x, _, y, _ = split
    a, b, ya, yb = train_test_split(x, y, test_size=1 / 3, random_state=seed)
    model = lambda depth: DecisionTreeRegressor(max_depth=depth, random_state=seed)
    depth = max(range(1, 13), key=lambda depth: percent(model(depth).fit(a, ya).predict(b), yb))
    return model(depth).fit(x, y), {"depth": depth}


def tuned_forest(split: Split, seed: int, options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Fits a random forest; depth and number of trees are chosen on a third of the training part."""
    x, _, y, _ = split
    a, b, ya, yb = train_test_split(x, y, test_size=1 / 3, random_state=seed)
    model = lambda depth, trees: RandomForestRegressor(trees, max_depth=depth, random_state=seed, n_jobs=-1)
    scores = {}
    for depth in FOREST_DEPTHS:
        forest = model(depth, max(FOREST_TREES)).fit(a, ya)
        # The first trees of a large forest are a smaller forest: a single fit serves every number of trees.
        answers = np.cumsum([tree.predict(b) for tree in forest.estimators_], axis=0)
        scores |= {(depth, trees): r2_score(yb, answers[trees - 1] / trees) for trees in FOREST_TREES}
    depth, trees = max(scores, key=lambda pair: scores[pair])
    return model(depth, trees).fit(x, y), {"depth": depth, "trees": trees}


def tuned_get(split: Split, seed: int, options: argparse.Namespace, leaves: Any = None) -> tuple[Any, dict[str, Any]]:
    """Tunes GET with a small budget, and fits it with a larger budget.

    Constant leaves: depth and scale factors are tuned, and the tree is polished. Linear leaves: depth and L1 are tuned.
    Without ``leaves``, GET has constant leaves and the library's options; halving is tuned, too.
    """
    keys = jax.random.split(jax.random.key(seed))
    grid: dict[str, Any] = {"depth": SWEEP_DEPTHS}
    base, tuning, final = PUBLISHED.replace(leaves=leaves or "constant"), options.tuning, options.final
    if leaves is None:
        base, tuning, final, grid = DEFAULT, DEFAULT_TUNING, DEFAULT_FINAL, grid | {"halving": (True, False)}
    grid |= {"l1": options.l1} if leaves == "linear" else {"alpha_ranges": SCALES}
    recipe = lambda budget: base.replace(starts=budget[0], epochs=budget[1])
    tuned = jtrees.tune(recipe(tuning), split[0], split[2], key=keys[0], grid=grid)
    polish: Any
    chosen, polish = tuned.report.tuning.options, {} if leaves is None else {"shrink": False}
    fitted: Any = recipe(final).replace(**chosen)
    if leaves != "linear":
        fitted = jtrees.Polished(fitted, epochs=options.polish, **polish)
    fit = jtrees.fit(fitted, split[0], split[2], key=keys[1])
    parameters = fit.model.prune(split[0]).num_parameters
    return fit.tree, {**chosen, "chosen": fit.report.chosen, "parameters": parameters}


def table_part(fit: Fit, split: Split, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures a column of Table 8: one tuned method on one split."""
    model, details = fit(split, seed, options)
    return scores(model, split) | details


def ablation_part(split: Split, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures Table 4: R^2 at fixed depth with a fixed or an annealed scale, and with polishing."""
    out, (starts, epochs) = {}, options.final
    for depth in ABLATION_DEPTHS:
        recipe = PUBLISHED.replace(depth=depth, starts=starts, epochs=epochs)
        recipes: dict[str, Any] = {name: recipe.replace(alpha_ranges=pair) for name, pair in FIXED.items()}
        recipes["+ polish"] = jtrees.Polished(base=recipes["annealed"], epochs=options.polish, shrink=False)
        for name, candidate in recipes.items():
            fit = studies.fit(candidate, split, seed)
            out[f"{name}, depth {depth}"] = scores(fit.tree, split)
    return out


def depths_part(split: Split, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures R^2 of constant and linear leaves at every depth, to test the regularisation of too deep trees."""
    out: dict[str, Any] = {"linear": {"test": scores(linear_regression(split)[0], split)["test"]}}
    for leaves in ("constant", "linear"):
        for depth in SWEEP_DEPTHS:
            starts, epochs = options.tuning[0], options.tuning[1] // (1 if depth <= 8 else 5)
            recipe = PUBLISHED.replace(depth=depth, leaves=leaves, starts=starts, epochs=epochs)
            fit = studies.fit(recipe, split, seed)
            out[f"{leaves}, depth {depth}"] = scores(fit.tree, split)
    return out


METHODS: dict[str, Fit] = {
    "linear": linear_regression,
    "cart": tuned_cart,
    "get": partial(tuned_get, leaves="constant"),
    "get_linear": partial(tuned_get, leaves="linear"),
    "forest": tuned_forest,
}
PARTS: dict[str, Any] = {name: partial(table_part, fit) for name, fit in METHODS.items()}
PARTS |= {"get_default": partial(table_part, tuned_get), "ablation": ablation_part, "depths": depths_part}
# The options that a piece depends on.
SETTINGS = {"get": ("tuning", "final", "polish"), "get_linear": ("tuning", "final", "l1")}
SETTINGS |= {"get_default": ("polish",), "ablation": ("final", "polish"), "depths": ("tuning",)}


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the budgets that a piece depends on."""
    values: dict[str, Any] = {setting: getattr(options, setting) for setting in SETTINGS.get(part, ())}
    default = {"recipe": studies.recipe_text(DEFAULT), "tuning": DEFAULT_TUNING, "final": DEFAULT_FINAL}
    return values | {"get": {"scales": SCALES}, "get_default": default}.get(part, {})


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures a part on a split."""
    return PARTS[part](data.split_of(name, seed, options.data_dir), seed, options)


# --- The report ------------------------------------------------------------------------------------------------------


def by_set(results: studies.Results, *parts: str) -> dict[str, Values]:
    """Returns the values of some parts, by set, seed and part, on the sets and seeds that all parts have."""
    values = {name: results.common(name, *parts) for name in results.datasets(parts[0])}
    return {name: seeds for name, seeds in values.items() if seeds}


def about(results: studies.Results, part: str) -> str:
    """Returns the settings of a part, and the machine, as sentences."""
    results = results.select(part)
    settings = results.rows[0].settings if results.rows else {}
    tuning, final = (
        "{} starts x {} epochs under each of two scale factors".format(*settings.get(name, "--"))
        for name in ("tuning", "final")
    )
    polished = f"polished with {settings.get('polish')} epochs"
    sentence = {
        "get": f"GET: depth and the ranges of scale factors (from {SCALES}) are tuned with {tuning}, without "
        f"polishing. The final fit has {final}, {polished}.",
        "get_linear": f"GET-Linear: depth, and L1 from {settings.get('l1')}, are tuned with {tuning}. The final fit "
        f"has {final}.",
        "ablation": f"The fits have {final}, {polished}.",
        "depths": f"The fits have {tuning}, and a fifth of the epochs from depth 9 on.",
    }.get(part)
    return f"{sentence} On {results.machines}." if sentence and settings else ""


def mean(values: Values, method: str, metric: str) -> float:
    """Returns the mean over the seeds."""
    return float(np.mean([methods[method][metric] for methods in values.values()]))


def spread(values: Values, method: str) -> str:
    """Returns mean and standard deviation over the seeds as text."""
    return studies.spread([methods[method]["test"] for methods in values.values()])


def table_report(results: studies.Results) -> str:
    """Returns Table 8, with the paper's figures in brackets."""
    values = by_set(results, *METHODS)
    if not values:
        return ""
    rows = []
    for name, seeds in values.items():
        paper = dict(zip(["cart", "get", "get_linear", "forest"], PAPER.get(name, ()), strict=False))
        cells = [spread(seeds, method) + (f" ({paper[method]:.2f})" if method in paper else "") for method in METHODS]
        size = lambda method, v=seeds: f"{mean(v, method, 'depth'):.1f}, {mean(v, method, 'parameters'):.0f}"
        rows.append([name, str(len(seeds)), *cells, size("get"), size("get_linear")])
    tested = np.array([[mean(seeds, method, "test") for method in METHODS] for seeds in values.values()])
    has_paper = all(name in PAPER for name in values)  # otherwise the means would be over different sets
    papers = (
        ["", *(f" ({mean:.2f})" for mean in np.mean([PAPER[n] for n in values], axis=0))] if has_paper else [""] * 5
    )
    rows.append(["**mean**", "", *(f"{m:.2f}{p}" for m, p in zip(tested.mean(0), papers, strict=True)), "", ""])
    ranks = np.mean([rankdata(-row) for row in tested], axis=0)
    rows.append(["Friedman rank", "", *(f"{rank:.2f}" for rank in ranks), "", ""])
    header = ["set", "seeds", "linear regression", "CART", "GET", "GET-Linear", "random forest"]
    header += ["GET: depth, numbers", "GET-Linear: depth, numbers"]
    lines = []
    score = lambda seed, method: np.mean([seeds[seed][method]["test"] for seeds in values.values()])
    for method, label in (("get", "GET"), ("get_linear", "GET-Linear")):
        lead = lambda seed, method=method: score(seed, method) - score(seed, "forest")
        leads = ", ".join(f"{lead(seed):+.2f}" for seed in sorted(set.intersection(*map(set, values.values()))))
        differences = tested[:, list(METHODS).index(method)] - tested[:, list(METHODS).index("forest")]
        lines.append(f"- mean({label} - forest) = {np.mean(differences):+.2f} (seed by seed: {leads})")
    is_in_table = lambda row: row.seed in values.get(row.dataset, {})
    seconds = lambda method: np.median([row.seconds for row in results.select(method).rows if is_in_table(row)])
    times = ", ".join(f"{method} {seconds(method):.0f}" for method in METHODS)
    return (
        "## Test R², per cent (Table 8; the paper's figures in brackets)\n\n"
        + " ".join(filter(None, (about(results, method) for method in METHODS)))
        + "\n\n"
        + benchmark.markdown(header, rows)
        + "\n"
        + "\n".join(lines)
        + f"\n- median seconds for one set and seed, tuning and compilation included: {times}\n"
    )


def default_report(results: studies.Results) -> str:
    """Returns GET's defaults beside a forest and the paper's procedure, on the seeds that all have."""
    methods = ("get", "get_default", "forest")
    rows, leads = [], []
    for name, values in by_set(results, *methods).items():
        rows.append([name, str(len(values)), *(spread(values, method) for method in methods)])
        rows[-1].append(f"{mean(values, 'get_default', 'depth'):.1f}, {mean(values, 'get_default', 'parameters'):.0f}")
        leads.append([mean(values, method, "test") - mean(values, "forest", "test") for method in methods[:2]])
    if not rows:
        return ""
    header = ["set", "seeds", "GET, the paper's procedure", "GET, the library's", "random forest", "depth, numbers"]
    budget = "{} starts x {} epochs".format
    return (
        "## Test R², per cent, with the options of the library\n\n"
        "The recipe has constant leaves, a start from a ridge regression, preconditioned starts, and leaves that "
        f"shrink towards their ancestors. Depth, scale factors and halving are tuned with {budget(*DEFAULT_TUNING)}. "
        f"The final fit has {budget(*DEFAULT_FINAL)} and is polished. On {results.select('get_default').machines}.\n\n"
        + benchmark.markdown(header, rows)
        + "\nMean difference to the forest: the paper's procedure "
        + ", the library's ".join(f"{value:+.2f}" for value in np.mean(leads, axis=0))
        + ".\n"
    )


def ablation_report(results: studies.Results) -> str:
    """Returns Table 4."""
    values = {name: results.seed_values("ablation", name) for name in results.datasets("ablation")}
    if not values:
        return ""
    columns = [f"{name}, depth {depth}" for depth in ABLATION_DEPTHS for name in (*FIXED, "+ polish")]
    cells = lambda seeds: [f"{mean(seeds, column, 'train'):.2f}" for column in columns]
    rows = [[name, str(len(seeds)), *cells(seeds)] for name, seeds in values.items()]
    for part in ("train", "test"):
        means = [np.mean([mean(seeds, column, part) for seeds in values.values()]) for column in columns]
        rows.append([f"**mean, {part}**", "", *(f"{mean:.2f}" for mean in means)])
    return (
        f"## Training R², per cent, at fixed depth (Table 4)\n\n{about(results, 'ablation')}\n\n"
        + benchmark.markdown(["set", "seeds", *columns], rows)
        + "\nThe paper's means over its 16 sets, training R²: depth 4 65.38, 77.22, 80.30, 82.40; depth 8 81.91, "
        "87.09, 89.45, 91.02.\n"
    )


def depths_report(results: studies.Results) -> str:
    """Returns the table of every depth."""
    values = {name: results.seed_values("depths", name) for name in results.datasets("depths")}
    if not values:
        return ""
    rows, worst, worst_constant = [], [], []
    for name, seeds in values.items():
        for leaves in ("constant", "linear"):
            columns = ["linear", *(f"{leaves}, depth {depth}" for depth in SWEEP_DEPTHS)]
            cells = [f"{mean(seeds, column, 'test'):.1f}" for column in columns]
            rows.append([name if leaves == "constant" else "", leaves, *cells])
        for methods in seeds.values():
            for depth in SWEEP_DEPTHS:
                tree = methods[f"linear, depth {depth}"]["test"]
                worst.append((tree - methods["linear"]["test"], name, depth))
                worst_constant.append((tree - methods[f"constant, depth {depth}"]["test"], name, depth))
    header = ["set", "leaves", "linear regression", *map(str, SWEEP_DEPTHS)]
    text = lambda worst: "{:+.2f} points ({}, depth {})".format(*min(worst))
    return (
        f"## Test R², per cent, at every depth\n\n{about(results, 'depths')}\n\n"
        + benchmark.markdown(header, rows)
        + f"\nWorst difference over sets, depths and seeds (at least {min(map(len, values.values()))} per set): "
        + f"GET-Linear - linear regression {text(worst)}; GET-Linear - GET {text(worst_constant)}.\n"
    )


def report(results: studies.Results, command: str) -> str:
    """Returns the whole report."""
    reports = table_report, default_report, ablation_report, depths_report
    head = (
        f"# GET: the paper's tables\n\nMade by `{command}`, with the settings named below. The paper has 16 sets, 10 "
        "starts x 3000 epochs, and one split of each set, which is not published.\n"
        "Splits here are random, 75/25, one per seed. Depths of GET are 1 to 12; the search ends after two depths "
        "without improvement. The linear leaves of GET-Linear are ours: cross-validation shrinks them, while the paper "
        f"uses least squares. CART: depth 1..12. Forest: depth from {FOREST_DEPTHS}, trees from {FOREST_TREES}.\n"
    )
    return "\n".join([head, *filter(None, [part(results) for part in reports])])


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the budgets."""
    parser.add_argument("--tuning", nargs=2, type=int, default=[2, 300], metavar=("STARTS", "EPOCHS"))
    parser.add_argument("--final", nargs=2, type=int, default=[4, 1000], metavar=("STARTS", "EPOCHS"))
    parser.add_argument("--polish", type=int, default=300, metavar="EPOCHS")
    parser.add_argument("--l1", nargs="+", type=float, default=[0.0])


STUDY = studies.Study("paper_get", __doc__, PARTS, PAPER, 3, measure, report, settings, arguments=arguments)

if __name__ == "__main__":
    studies.program(STUDY)
