"""GET's tables: test R^2 against CART and random forest (Table 8), and what annealing and polish bring (Table 4).

python -m experiments.paper_get --data-dir DATA --seeds 3 [--datasets kin8nm ...] [--parts get forest ablation ...]

Every (part, set, seed) is a file under --out (by default the committed ones), so that a run that was ended goes on
where it was; files are written aside and renamed. The report, experiments/results/paper_get.md, is made of the files
that are there.

Protocol of the paper: 75 % to train, 25 % to test; depth from 1..12 by a 2:1 split of the training part (given up after
two depths that bring nothing), then a fit to all of it; scores are R^2 in per cent.
"""

import argparse
from collections.abc import Callable
from functools import partial
import json
from pathlib import Path
import time
from typing import Any

import jax
import numpy as np
from rich.progress import Progress
from scipy.stats import rankdata
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from sklearn.model_selection import train_test_split
from sklearn.tree import DecisionTreeRegressor

from experiments import benchmark, data
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
# Scale factors to choose from: the paper's; and larger ones, from which the CART start goes further.
SCALES = (((5.0, 25.0), (50.0, 150.0)), ((25.0, 75.0), (100.0, 300.0)))
ABLATION_DEPTHS = (4, 8)
SWEEP_DEPTHS = tuple(range(1, 13))

Found = dict[int, dict[str, Any]]  # by seed, what a part found
Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Fit = Callable[[Split, int, argparse.Namespace], tuple[Any, dict[str, Any]]]


def percent(model: Any, x: Any, y: Any) -> float:
    """R^2 in per cent."""
    return 100 * float(r2_score(y, model.predict(x)))


def linear_regression(x: np.ndarray, y: np.ndarray) -> LinearRegression:
    """Least squares, in float64."""
    return LinearRegression().fit(x.astype(np.float64), y.astype(np.float64))


def tuned_cart(split: Split, seed: int, options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """CART of the depth that does best on a third of the training part."""
    x, _, y, _ = split
    a, b, ya, yb = train_test_split(x, y, test_size=1 / 3, random_state=seed)
    model = lambda depth: DecisionTreeRegressor(max_depth=depth, random_state=seed)
    depth = max(range(1, 13), key=lambda depth: percent(model(depth).fit(a, ya), b, yb))
    return model(depth).fit(x, y), {"depth": depth}


def tuned_forest(split: Split, seed: int, options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Random forest, depth and number of trees chosen on a third of the training part."""
    x, _, y, _ = split
    a, b, ya, yb = train_test_split(x, y, test_size=1 / 3, random_state=seed)
    model = lambda depth, trees: RandomForestRegressor(trees, max_depth=depth, random_state=seed, n_jobs=-1)
    scores = {}
    for depth in FOREST_DEPTHS:
        grown = model(depth, max(FOREST_TREES)).fit(a, ya)
        # The first trees of a large forest are a smaller forest: one fit judges every number of trees.
        answers = np.cumsum([tree.predict(b) for tree in grown.estimators_], axis=0)
        scores |= {(depth, trees): r2_score(yb, answers[trees - 1] / trees) for trees in FOREST_TREES}
    depth, trees = max(scores, key=lambda pair: scores[pair])
    return model(depth, trees).fit(x, y), {"depth": depth, "trees": trees}


def tuned_get(split: Split, seed: int, options: argparse.Namespace, leaves: Any) -> tuple[Any, dict[str, Any]]:
    """GET tuned with a small budget, fitted with a larger one.

    Of constant leaves depth and scale factors are tuned, and the tree is polished; of linear ones depth and L1.
    """
    x, _, y, _ = split
    keys = jax.random.split(jax.random.key(seed), 3)
    fit = partial(jtrees.fit_get, x, y, leaves=leaves)
    tuned = []
    for ranges in SCALES if leaves == "constant" else SCALES[:1]:
        l1 = 0.0 if leaves == "constant" else options.l1
        starts, epochs = options.tuning
        found = fit(key=keys[0], depth="auto", starts=starts, epochs=epochs, alpha_ranges=ranges, l1=l1)
        assert found.report.tuning is not None
        tuned += [(loss, int(depth), float(l1), ranges) for depth, l1, loss in found.report.tuning]
    _, depth, l1, ranges = min(tuned)
    starts, epochs = options.final
    result = fit(key=keys[1], depth=depth, starts=starts, epochs=epochs, alpha_ranges=ranges, l1=l1)
    tree = result.tree
    if leaves == "constant":
        tree = jtrees.polish(tree, x, y, key=keys[2], epochs=options.polish).tree
    chosen = {"depth": depth, "l1": l1, "scales": ranges, "chosen": result.report.chosen}
    return tree, {**chosen, "parameters": tree.prune(x).num_parameters}


def table_part(fit: Fit, split: Split, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """A column of Table 8: one method, tuned, on one split."""
    start = time.perf_counter()
    model, found = fit(split, seed, options)
    seconds = time.perf_counter() - start
    scores = {"train": percent(model, split[0], split[2]), "test": percent(model, split[1], split[3])}
    return {**scores, **found, "seconds": seconds}


def ablation_part(split: Split, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Table 4: training R^2 at fixed depth under a fixed scale or an annealed one, and then with polish."""
    x, x_test, y, y_test = split
    ranges = {
        "alpha 1": ((1.0, 1.0),) * 2,
        "alpha 100": ((100.0, 100.0),) * 2,
        "annealed": ((5.0, 25.0), (50.0, 150.0)),
    }
    out = {}
    for depth in ABLATION_DEPTHS:
        trees, (starts, epochs), keys = {}, options.final, jax.random.split(jax.random.key(seed))
        for name, pair in ranges.items():
            fit = jtrees.fit_get(x, y, key=keys[0], depth=depth, starts=starts, epochs=epochs, alpha_ranges=pair)
            trees[name] = fit.tree
        trees["+ polish"] = jtrees.polish(trees["annealed"], x, y, key=keys[1], epochs=options.polish).tree
        for name, tree in trees.items():
            out[f"{name}, depth {depth}"] = {"train": percent(tree, x, y), "test": percent(tree, x_test, y_test)}
    return out


def depths_part(split: Split, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Test R^2 of constant and linear leaves at every depth: does regularisation hold where trees are too deep?"""
    x, x_test, y, y_test = split
    out: dict[str, Any] = {"linear": {"test": percent(linear_regression(x, y), x_test, y_test)}}
    for leaves in ("constant", "linear"):
        for depth in SWEEP_DEPTHS:
            starts, epochs = options.tuning[0], options.tuning[1] // (1 if depth <= 8 else 5)
            fit = jtrees.fit_get(
                x, y, key=jax.random.key(seed), depth=depth, leaves=leaves, starts=starts, epochs=epochs
            )
            scores = {"train": percent(fit.tree, x, y), "test": percent(fit.tree, x_test, y_test)}
            out[f"{leaves}, depth {depth}"] = scores
    return out


METHODS: dict[str, Fit] = {
    "linear": lambda split, seed, options: (linear_regression(split[0], split[2]), {}),
    "cart": tuned_cart,
    "get": partial(tuned_get, leaves="constant"),
    "get_linear": partial(tuned_get, leaves="linear"),
    "forest": tuned_forest,
}
PARTS = {name: partial(table_part, fit) for name, fit in METHODS.items()}
PARTS |= {"ablation": ablation_part, "depths": depths_part}
# What a piece depends on, and is made again for if it differs.
SETTINGS = {"get": ("tuning", "final", "polish"), "get_linear": ("tuning", "final", "l1")}
SETTINGS |= {"ablation": ("final", "polish"), "depths": ("tuning",)}


def settings_of(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """The settings that a part depends on."""
    scales = {"scales": [[list(one) for one in pair] for pair in SCALES]} if part == "get" else {}
    return {name: getattr(options, name) for name in SETTINGS.get(part, ())} | scales


def check_settings(options: argparse.Namespace) -> None:
    """Ends the program before anything is spent if --out holds pieces that were made with other settings."""
    for part in options.parts:
        for file in sorted(options.out.glob(f"{part}-*.json")):
            made = json.loads(file.read_text())["settings"]
            if made != settings_of(part, options):
                raise SystemExit(f"{file} was made with {made}: give the same settings, or another --out")


def run(options: argparse.Namespace) -> None:
    """Everything that is not there yet, seed by seed."""
    options.out.mkdir(parents=True, exist_ok=True)
    check_settings(options)
    jax.config.update("jax_compilation_cache_dir", str(Path("results/compiled").resolve()))
    jobs = [(s, part, name) for s in range(options.seeds) for part in options.parts for name in options.datasets]
    with Progress() as progress:
        task = progress.add_task("", total=len(jobs))
        for seed, part, name in jobs:
            progress.update(task, description=f"{part}, {name}, seed {seed}")
            file = options.out / f"{part}-{name}-{seed}.json"
            if not file.exists():
                table = data.load(name, data_dir=options.data_dir)
                split = train_test_split(table.x, table.y, train_size=0.75, random_state=seed)
                make = partial(PARTS[part], split, seed, options)  # type: ignore[arg-type]
                benchmark.piece(file, make, settings=settings_of(part, options))
                # Hundreds of programs in one process use up what the kernel allows of memory maps.
                jax.clear_caches()
            progress.advance(task)


# --- The report ------------------------------------------------------------------------------------------------------


def collect(options: argparse.Namespace, part: str) -> tuple[dict[str, Found], str]:
    """What is there of a part: for each set, what was found under each seed; and with which settings.

    Raises:
      SystemExit: if pieces were made with different settings, which must not stand in one table.
    """
    out, settings, machines = {}, {}, set()
    for name in options.datasets:
        files = {seed: options.out / f"{part}-{name}-{seed}.json" for seed in range(options.seeds)}
        records = {seed: json.loads(file.read_text()) for seed, file in files.items() if file.exists()}
        settings |= {json.dumps(record["settings"]): record["settings"] for record in records.values()}
        machines.update(record["machine"] for record in records.values())
        if records:
            out[name] = {seed: record["found"] for seed, record in records.items()}
    if len(settings) > 1:
        raise SystemExit(f"{options.out} holds pieces of {part} made with different settings: {', '.join(settings)}")
    said = next((_settings(part, one) for one in settings.values()), "")
    return out, f"{said} On {', '.join(sorted(machines))}." if said else ""


def _settings(part: str, settings: dict[str, Any]) -> str:
    """The settings that a part depends on, as a sentence."""
    tuning, final = (
        "{} starts x {} epochs under each of two scale factors".format(*settings.get(name, "--"))
        for name in ("tuning", "final")
    )
    polished = f"polished with {settings.get('polish')} epochs"
    return {
        "get": f"GET: depth and the ranges of scale factors, of {SCALES}, tuned with {tuning}, without polish; fitted "
        f"with {final}, {polished}.",
        "get_linear": f"GET-Linear: depth, and L1 from {settings.get('l1')}, tuned with {tuning}; fitted with {final}.",
        "ablation": f"Fitted with {final}; {polished}.",
        "depths": f"Fitted with {tuning}, a fifth of the epochs from depth 9 on.",
    }.get(part, "")


def _mean(found: Found, method: str, what: str) -> float:
    return float(np.mean([one[method][what] for one in found.values()]))


def _spread(found: Found, method: str) -> str:
    values = [one[method]["test"] for one in found.values()]
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else f"{values[0]:.2f}"


def table_report(options: argparse.Namespace) -> str:
    """Table 8, with the paper's figures beside."""
    by_method = {method: collect(options, method) for method in METHODS}
    there: dict[str, Found] = {}
    for name in options.datasets:
        ran = [by_method[method][0].get(name, {}) for method in METHODS]
        seeds = sorted(set.intersection(*map(set, ran)))
        if seeds:
            there[name] = {seed: {m: one[seed] for m, one in zip(METHODS, ran, strict=True)} for seed in seeds}
    if not there:
        return ""
    settings, rows = " ".join(filter(None, (said for _, said in by_method.values()))), []
    for name, found in there.items():
        paper = dict(zip(["cart", "get", "get_linear", "forest"], PAPER.get(name, ()), strict=False))
        cells = [f"{_spread(found, m)}" + (f" ({paper[m]:.2f})" if m in paper else "") for m in METHODS]
        sizes = [f"{_mean(found, m, 'depth'):.1f}, {_mean(found, m, 'parameters'):.0f}" for m in ("get", "get_linear")]
        rows.append([name, str(len(found)), *cells, *sizes])
    means = {m: float(np.mean([_mean(found, m, "test") for found in there.values()])) for m in METHODS}
    known = all(name in PAPER for name in there)  # else the means would be over different sets
    papers = {m: np.mean([PAPER[n][i] for n in there]) for i, m in enumerate(list(METHODS)[1:])} if known else {}
    cells = [f"{means[m]:.2f}" + (f" ({papers[m]:.2f})" if m in papers else "") for m in METHODS]
    rows.append(["**mean**", "", *cells, "", ""])
    scores = np.array([[_mean(found, m, "test") for m in METHODS] for found in there.values()])
    ranks = np.mean([rankdata(-row) for row in scores], axis=0)
    rows.append(["Friedman rank", "", *(f"{rank:.2f}" for rank in ranks), "", ""])
    header = ["set", "seeds", "linear regression", "CART", "GET", "GET-Linear", "random forest"]
    header += ["GET: depth, numbers", "GET-Linear: depth, numbers"]
    lines = []
    for method, label in (("get", "GET"), ("get_linear", "GET-Linear")):
        differences = scores[:, list(METHODS).index(method)] - scores[:, list(METHODS).index("forest")]
        common = sorted(set.intersection(*map(set, there.values())))
        of = lambda seed, m=method: np.mean([f[seed][m]["test"] - f[seed]["forest"]["test"] for f in there.values()])
        seeds = ", ".join(f"{of(seed):+.2f}" for seed in common)
        lines.append(f"- mean({label} - forest) = {np.mean(differences):+.2f} (seed by seed: {seeds})")
    seconds = {m: np.median([one[m]["seconds"] for found in there.values() for one in found.values()]) for m in METHODS}
    times = ", ".join(f"{m} {seconds[m]:.0f}" for m in METHODS)
    return (
        f"## Test R², per cent (Table 8; the paper's figures in brackets)\n\n{settings}\n\n"
        + benchmark.markdown(header, rows)
        + "\n"
        + "\n".join(lines)
        + f"\n- median seconds for one set and seed, tuning and compilation included: {times}\n"
    )


def ablation_report(options: argparse.Namespace) -> str:
    """Table 4."""
    there, settings = collect(options, "ablation")
    if not there:
        return ""
    names = ["alpha 1", "alpha 100", "annealed", "+ polish"]
    columns = [f"{name}, depth {depth}" for depth in ABLATION_DEPTHS for name in names]
    rows = [
        [name, str(len(found)), *(f"{_mean(found, c, 'train'):.2f}" for c in columns)] for name, found in there.items()
    ]
    for what in ("train", "test"):
        means = [np.mean([_mean(found, c, what) for found in there.values()]) for c in columns]
        rows.append([f"**mean, {what}**", "", *(f"{mean:.2f}" for mean in means)])
    note = "The paper's means over its 16 sets, training R²: depth 4 65.38, 77.22, 80.30, 82.40; depth 8 81.91, 87.09, "
    note += "89.45, 91.02.\n"
    return (
        f"## Training R², per cent, at fixed depth (Table 4)\n\n{settings}\n\n"
        + benchmark.markdown(["set", "seeds", *columns], rows)
        + "\n"
        + note
    )


def depths_report(options: argparse.Namespace) -> str:
    """Every depth."""
    there, settings = collect(options, "depths")
    if not there:
        return ""
    rows, worst, worst_constant = [], [], []
    for name, found in there.items():
        for leaves in ("constant", "linear"):
            cells = [f"{_mean(found, f'{leaves}, depth {depth}', 'test'):.1f}" for depth in SWEEP_DEPTHS]
            rows.append([name if leaves == "constant" else "", leaves, f"{_mean(found, 'linear', 'test'):.1f}", *cells])
        for one in found.values():
            for depth in SWEEP_DEPTHS:
                tree = one[f"linear, depth {depth}"]["test"]
                worst.append((tree - one["linear"]["test"], name, depth))
                worst_constant.append((tree - one[f"constant, depth {depth}"]["test"], name, depth))
    header = ["set", "leaves", "linear regression", *map(str, SWEEP_DEPTHS)]
    say = lambda w: f"{w[0]:+.2f} points ({w[1]}, depth {w[2]})"
    return (
        f"## Test R², per cent, at every depth\n\n{settings}\n\n"
        + benchmark.markdown(header, rows)
        + f"\nWorst difference over sets, depths and seeds (at least {min(map(len, there.values()))} a set): "
        + f"GET-Linear - linear regression {say(min(worst))}; GET-Linear - GET {say(min(worst_constant))}.\n"
    )


def report(options: argparse.Namespace) -> str:
    """The whole report."""
    head = (
        "# GET: the paper's tables\n\n"
        f"Made by `python -m experiments.paper_get --data-dir DATA --seeds {options.seeds}`, with the settings said "
        "below; the paper has 16 sets, 10 starts x 3000 epochs, and one split of each set, which is not published.\n"
        "Splits here are random, 75/25, one a seed. Depths of GET: from 1 up to 12, given up after two that bring "
        "nothing. GET-Linear is ours in its leaves, which shrink by cross-validation, not the paper's least squares. "
        f"CART: depth 1..12. Forest: depth from {FOREST_DEPTHS}, trees from {FOREST_TREES}.\n"
    )
    parts = [table_report(options), ablation_report(options), depths_report(options)]
    return "\n".join([head, *filter(None, parts)])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder of .npz files with X and y (default: $JTREES_DATA)")
    parser.add_argument("--datasets", nargs="+", default=list(PAPER))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--tuning", nargs=2, type=int, default=[2, 300], metavar=("STARTS", "EPOCHS"))
    parser.add_argument("--final", nargs=2, type=int, default=[4, 1000], metavar=("STARTS", "EPOCHS"))
    parser.add_argument("--polish", type=int, default=300, metavar="EPOCHS")
    parser.add_argument("--l1", nargs="+", type=float, default=[0.0])
    parser.add_argument(
        "--out", type=Path, default=benchmark.RESULTS / "paper_get", help="where finished pieces are kept"
    )
    parser.add_argument("--report-only", action="store_true", help="make the report of what is there")
    parser.add_argument(
        "--report",
        type=Path,
        help="default: experiments/results/paper_get.md, or for less than the whole of it report.md under --out",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs what is missing and writes the report."""
    options = parse(arguments)
    if not options.report_only:
        run(options)
    text = report(options)
    print(text)
    whole = options.datasets == list(PAPER) and options.seeds >= 3
    file = options.report or (benchmark.RESULTS / "paper_get.md" if whole else options.out / "report.md")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    print(f"written to {file}")


if __name__ == "__main__":
    main()
