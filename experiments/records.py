"""The papers' figures, set by set, for data that we have, beside ours; and thirty trees beside their rivals.

python -m experiments.records [--write]

Nothing is trained: ours is read from the committed pieces of the ``paper_*`` scripts (and the report of ``cnn_tel``).
"""

from collections.abc import Iterator
from pathlib import Path
import re
from typing import Any, NamedTuple

import numpy as np

from experiments import (
    benchmark,
    paper_bandit,
    paper_dgt,
    paper_forest,
    paper_get,
    paper_latent,
    paper_nongreedy,
    paper_tel,
    pieces,
)

ROOM = 0.5  # points that a single run may be behind
SCRIPTS = (paper_get, paper_dgt, paper_bandit, paper_nongreedy, paper_latent, paper_tel, paper_forest)
RMSE, RMSE_E4, R2, ACCURACY, AUC, LOSS = "RMSE", "RMSE x 1e4", "R², %", "accuracy, %", "AUC, %", "log loss"
LOWER = (RMSE, RMSE_E4, LOSS)  # is better

# The best that is published, on other splits than ours: of single hard trees, but R² of any model. By set and metric,
# with its source, empty where none is on record. TAO-linear: Zharmagambetov & Carreira-Perpinan, 2020, as in Table 5
# of DGT's paper. DTSemNet: Panda et al., "Vanilla Gradient Descent for Oblique Decision Trees", 2024.
PUBLISHED: dict[tuple[str, str], tuple[float, str]] = {
    ("abalone_dgt", RMSE): (2.07, "TAO-linear"),
    ("cpu-act", RMSE): (2.48, "DTSemNet"),
    ("ailerons", RMSE_E4): (1.652, ""),
    ("pendigits", ACCURACY): (97.0, ""),
    ("satimage", ACCURACY): (87.6, ""),
    ("segmentation", ACCURACY): (96.1, ""),
    ("letter", ACCURACY): (91.0, ""),
    ("connect-4", ACCURACY): (82.0, ""),
    ("mnist", ACCURACY): (96.2, "DTSemNet"),
    ("airfoil-self-noise", R2): (97.6, ""),
    ("combined-cycle-power-plant", R2): (97.0, ""),
    ("ailerons", R2): (86.3, ""),
    ("kin8nm", R2): (94.1, ""),
    ("elevators", R2): (93.0, ""),
    ("cpu-act", R2): (98.65, ""),
    ("abalone", R2): (61.2, ""),
}

TEL_ROUTING = {  # Table 2: AUC, smooth-step and logistic
    "ann-thyroid": (0.997, 0.996),
    "breast-cancer-wisconsin": (0.992, 0.994),
    "churn": (0.897, 0.898),
    "diabetes": (0.832, 0.816),
    "dna": (0.993, 0.994),
    "ecoli": (0.970, 0.952),
    "heart-c": (0.936, 0.927),
    "satimage": (0.988, 0.987),
    "vehicle": (0.956, 0.965),
}
TEL_TUNED = {  # Table 3: AUC
    "ann-thyroid": 0.996,
    "breast-cancer-wisconsin": 0.995,
    "churn": 0.916,
    "diabetes": 0.831,
    "dna": 0.993,
    "ecoli": 0.970,
    "heart-c": 0.903,
    "optdigits": 1.000,
    "satimage": 0.990,
    "spambase": 0.986,
    "vehicle": 0.953,
}
UNLIKE = ("space-ga",)  # whose target is probably not the paper's: shown, not counted
TEL_NETWORK = {ACCURACY: 99.30, LOSS: 0.0338}  # Table 4: CNN-TEL on MNIST
NONGREEDY = {"letter": "91", "connect-4": "plot only", "mnist": "plot only"}  # Figure 2; of Letter as DGT quotes it
ACTIVE = "45 to 55"  # Figure 7 of LatentTree: per cent of nodes on Glass, depth 6, lambda 10

OWN_PARTS = "yes: the set's own"
SPLITS = {
    "abalone_dgt": "yes: the paper's five",
    "ailerons": "yes: first 7154 rows to train",
    "cpu-act": "no: five at random, 60/40",
    "segmentation": "no: 80/20 at random",
    "connect-4": "no: 80/20 at random",
}
HEADER = ["table", "set", "what", "metric", "paper", "best published", "ours", "runs", "same splits", "numbers"]
HEADER += ["seconds", "difference", "reached"]


class Ours(NamedTuple):
    """What was measured: mean and deviation over so many runs; numbers in a model, and seconds of all that made it."""

    mean: float
    deviation: float
    runs: int
    numbers: float | None = None
    seconds: float | None = None


class Row(NamedTuple):
    """A figure of a paper.

    Attributes:
      table: of the paper.
      name: of the set.
      what: method or variant.
      metric: of the figure.
      paper: the paper's figure; text if it is none that can be compared.
      ours: None if not run.
      command: that would make ours.
      same: whether the splits are the paper's.
      variant: whether it is of an ablation, which is counted by itself.
      tree: whether the best that is published may stand beside it.
    """

    table: str
    name: str
    what: str
    metric: str
    paper: float | str
    ours: Ours | None
    command: str
    same: str
    variant: bool = False
    tree: bool = False

    @property
    def ahead(self) -> float | None:
        """By how much ours is better; None if that cannot be said."""
        if isinstance(self.paper, str) or self.ours is None or self.name in UNLIKE:
            return None
        ahead = self.ours.mean - self.paper
        return -ahead if self.metric in LOWER else ahead

    @property
    def reached(self) -> bool | None:
        """Whether ours is as good, with the page's allowance; None if that cannot be said."""
        if self.ours is None or self.ahead is None:
            return None
        single = ROOM if self.metric.endswith("%") else 0.0
        return self.ahead >= -(self.ours.deviation if self.ours.runs > 1 else single)

    def cells(self) -> list[str]:
        """As a line of the table."""
        fine = 4 if self.metric == LOSS else 3 if self.metric == "purity" else 2
        shown = lambda value: value if isinstance(value, str) else f"{value:.{fine}f}"
        best, by = PUBLISHED.get((self.name, self.metric), (None, "")) if self.tree else (None, "")
        start = [self.table, self.name, self.what, self.metric, shown(self.paper)]
        start.append("-" if best is None else f"{best}{f' ({by})' if by else ''}")
        ours = self.ours
        if ours is None:
            return [*start, f"not run: {self.command}", "-", self.same, "-", "-", "-", "-"]
        value = shown(ours.mean) + (f" ± {ours.deviation:.{fine}f}" if ours.runs > 1 else "")
        size, time = ("-" if one is None else f"{one:,.0f}" for one in (ours.numbers, ours.seconds))
        difference = "-" if isinstance(self.paper, str) else f"{ours.mean - self.paper:+.{fine}f}"
        verdict = {None: "-", True: "yes", False: "no"}[self.reached]
        return [*start, value, str(ours.runs), self.same, size, time, difference, verdict]


class Results(NamedTuple):
    """What the pieces of all scripts hold, by the name of the script, and the folder that they are in."""

    found: dict[str, pieces.Found]
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> "Results":
        """Reads them."""
        found = {}
        for script in (module.SCRIPT for module in SCRIPTS):
            options = pieces.parse(script, ["--out", str(folder / script.name)])
            found[script.name] = pieces.gathered(pieces.all_pieces(script, options), options.out)
        return cls(found, folder)

    def of(self, script: str, part: str, name: str) -> list[Any]:
        """What was found in a part, by seed."""
        return list(pieces.of_seeds(self.found[script], part, name).values())

    def seconds(self, script: str, part: str, name: str) -> float:
        """Of all of a part's pieces."""
        return sum(one["seconds"] for one in self.found[script].get(part, {}).get(name, {}).values())

    def ours(self, script: str, part: str, name: str, values: list[float], numbers: Any = None) -> Ours | None:
        """Values of a part as what was measured."""
        if not values:
            return None
        size = None if numbers is None else float(np.mean(numbers))
        spread = float(np.mean(values)), float(np.std(values))
        return Ours(*spread, len(values), size, self.seconds(script, part, name))


def command(script: str, part: str, name: str) -> str:
    """That makes a part of a set."""
    return f"`python -m experiments.{script} --data-dir DATA --datasets {name} --parts {part}`"


# --- The papers ------------------------------------------------------------------------------------------------------


def get_rows(results: Results) -> Iterator[Row]:
    """Table 8."""
    for name, (_, constant, linear, _) in paper_get.PAPER.items():
        for part, what, paper in (("get", "GET", constant), ("get_linear", "GET-Linear", linear)):
            runs = results.of("paper_get", part, name)
            test, numbers = ([one[key] for one in runs] for key in ("test", "parameters"))
            ours = results.ours("paper_get", part, name, test, numbers)
            again = command("paper_get", part, name)
            yield Row("8", name, what, R2, paper, ours, again, "no: 75/25 at random", tree=True)


def metric_of(name: str) -> str:
    """Of a set of DGT's tables."""
    return RMSE_E4 if name == "ailerons" else RMSE if name in paper_dgt.REGRESSION else ACCURACY


def dgt_rows(results: Results) -> Iterator[Row]:
    """Tables 1, 2, 4, 6 and 7, and what was learnt of MNIST in Figure 2."""
    same = lambda name: SPLITS.get(name, OWN_PARTS)
    for part, what in (("trees", "DGT"), ("forests", f"{paper_dgt.TREES} trees of DGT")):
        for name, setting in paper_dgt.SETS.items():
            paper = setting.tree if part == "trees" else setting.forest
            if paper is not None:
                values = [value for one in results.of("paper_dgt", part, name) for value in one["test"]]
                ours, again = results.ours("paper_dgt", part, name, values), command("paper_dgt", part, name)
                table = "4" if part == "forests" else "1" if name in paper_dgt.REGRESSION else "2"
                yield Row(table, name, what, metric_of(name), paper, ours, again, same(name), tree=part == "trees")
    for name, (_, *papers) in paper_dgt.ABLATED.items():
        for kind, paper in zip(paper_dgt.ABLATIONS[1:], papers, strict=True):
            values = [value for one in results.of("paper_dgt", "ablations", name) for value in one[kind]]
            ours, again = results.ours("paper_dgt", "ablations", name, values), command("paper_dgt", "ablations", name)
            yield Row("7", name, kind, metric_of(name), paper, ours, again, same(name), variant=True)
    bandits = [("6", name, "bandit, two-point", tree) for name, (tree, _) in paper_bandit.PAPER.items()]
    for table, name, what, paper in [*bandits, ("Figure 2", "mnist", "bandit", float(paper_bandit.PAPER_MNIST))]:
        values = [curve[-1] for one in results.of("paper_bandit", "tree", name) for curve in one["scores"]]
        ours, again = results.ours("paper_bandit", "tree", name, values), command("paper_bandit", "tree", name)
        first = {paper_dgt.SHUFFLES: "yes: the first of the paper's five", "cpu-act": "no: at random, 60/40"}
        one_split = first.get(name, same(name))
        yield Row(table, name, what, metric_of(name), paper, ours, again, one_split)


def nongreedy_rows(results: Results) -> Iterator[Row]:
    """Figure 2: the depth that is best, as in a plot."""
    script, part = "paper_nongreedy", "nongreedy"
    for name, paper in NONGREEDY.items():
        test = paper_nongreedy.curve(results.found[script], part, name, "test")
        depth = max(test, key=lambda depth: test[depth]) if test else 0
        values = [one[str(depth)]["test"] for one in results.of(script, part, name)]
        what = f"best depth, {depth}" if test else "best depth"
        same = {"letter": "not known", "connect-4": "no: 80/20 at random"}.get(name, OWN_PARTS)
        figure = float(paper) if paper.isdigit() else paper
        ours = results.ours(script, part, name, values)
        yield Row("Figure 2", name, what, ACCURACY, figure, ours, command(script, part, name), same, tree=True)


def latent_rows(results: Results) -> Iterator[Row]:
    """Table 3 and Figure 7."""
    script, name = "paper_latent", "glass"
    values = [value for one in results.of(script, "clustering", name) for value in one["LatentTree, test"]]
    ours, same = results.ours(script, "clustering", name, values), "no: 60/20/20 at random, 205 of 214 rows"
    paper, again = paper_latent.PURITY["LatentTree"][0], command(script, "clustering", name)
    yield Row("3", name, "LatentTree", "purity", paper, ours, again, same)
    lambdas = paper_latent.PENALTIES.index(10.0)
    last = [curve[-1] for one in results.of(script, "pruning", name) for curve in one["batches of 8"][lambdas]]
    ours, again = results.ours(script, "pruning", name, last), command(script, "pruning", name)
    yield Row("Figure 7", name, "active nodes, lambda 10", "share, %", ACTIVE, ours, again, "all rows")


def tel_rows(results: Results) -> Iterator[Row]:
    """Tables 2, 3 and 4."""
    script, same = "paper_tel", "no: 70/30 at random"
    for name, paper in TEL_TUNED.items():
        found = [one["tel"] for one in results.of(script, "tuned", name)]
        test, numbers = ([one[key] for one in found] for key in ("test", "numbers"))
        ours = results.ours(script, "tuned", name, test, numbers)
        yield Row("3", name, "TEL, tuned", AUC, 100 * paper, ours, command(script, "tuned", name), same)
    for name, papers in TEL_ROUTING.items():
        for kind, paper in zip(("smooth-step", "logistic"), papers, strict=True):
            test = [one[kind]["test"] for one in results.of(script, "steps", name)]
            ours, again = results.ours(script, "steps", name, test), command(script, "steps", name)
            what = f"ten trees of depth 4, {kind}"
            yield Row("2", name, what, AUC, 100 * paper, ours, again, same, variant=kind == "logistic")
    network, rows = of_network(results.folder / "cnn_tel.md")
    for metric, paper in TEL_NETWORK.items():
        again = "`python -m experiments.cnn_tel --data-dir DATA --write`"
        same = f"no: random, {rows} rows to train"
        yield Row("4", "mnist", "CNN-TEL", metric, paper, network.get(metric), again, same)


def of_network(file: Path) -> tuple[dict[str, Ours], str]:
    """What the report of ``cnn_tel`` says of the network with trees, and of the rows; empty if it is not there."""
    text = file.read_text() if file.exists() else ""
    line = re.search(r"^\| CNN-TEL \|.*$", text, re.MULTILINE)
    rows, runs = (re.search(pattern, text) for pattern in (r"(\d+) rows to train", r"over (\d+) seeds"))
    if line is None or rows is None or runs is None:
        return {}, "fewer"
    _, numbers, *measured, _ = (cell.strip() for cell in line[0].strip("|").split("|"))
    size, out = float(numbers.replace(",", "")), {}
    for metric, cell, unit in zip((ACCURACY, LOSS), measured, (100, 1), strict=True):
        mean, deviation = (unit * float(one) for one in [*cell.split(" ± "), "0"][:2])
        out[metric] = Ours(mean, deviation, int(runs[1]), size)
    return out, rows[1]


PAPERS = {
    "GET": (
        get_rows,
        "Best published: R² of any model. space-ga is not counted: its target here, ln(VOTES/POP), is probably not the "
        "paper's, whose random forest is far below ours. Table 4 of the paper, training R² by scale factor, is a mean "
        "over 16 sets, of which these are eight: `paper_get.md`.",
    ),
    "DGT": (
        dgt_rows,
        "Seconds are of all shuffles and keys, with what is beside the trees in `paper_dgt.md`. cpu-act "
        "is the paper's Comp-Activ. Table 7: one part of DGT replaced, untuned here. The bandits are in "
        "`paper_bandit.md`: the score after the last query.",
    ),
    "Non-greedy": (
        nongreedy_rows,
        "The paper has plots alone; the figure of letter is about what the DGT paper reads from a plot of these "
        "authors. The depth is that of the best mean test accuracy: read it as a plot. Seconds are of all depths: "
        "`paper_nongreedy.md`.",
    ),
    "LatentTree": (
        latent_rows,
        "The sets of its Tables 1 and 2 are too large to ship. Active nodes: after 59 epochs. "
        "`paper_latent.md` has seven other sets and the other lambdas.",
    ),
    "TEL": (
        tel_rows,
        "One split here, the paper's Table 3 is of 15. Smooth-step: gamma up to 1, as there. Seconds are of all that "
        "is tuned beside it, too: `paper_tel.md`. The network: `cnn_tel.md`.",
    ),
}


# --- The page --------------------------------------------------------------------------------------------------------


def counted(rows: list[Row]) -> str:
    """How many figures are reached."""
    parts = []
    for label, variant in (("figures", False), ("figures of ablations and variants", True)):
        some = [row for row in rows if row.variant == variant]
        able = [row for row in some if row.reached is not None]
        if able:
            strictly = sum(row.ahead is not None and row.ahead >= 0 for row in able)
            count = f"{sum(bool(row.reached) for row in able)} of {len(able)} {label}"
            parts.append(f"{count} ({strictly} without the allowance)")
    lacking = sum(row.ours is None for row in rows)
    text = f"**Reached: {' and '.join(parts) or 'nothing to compare'}**"
    return f"{text}; {lacking} not run." if lacking else f"{text}."


def rivals(results: Results) -> str:
    """Forests, boosted trees and one tree beside other boosting and a random forest, with the numbers they hold."""
    found, rows = results.found["paper_forest"], []
    for name in paper_forest.SETS:
        row, runs = [name], 0
        for part in paper_forest.PARTS:
            of = results.of("paper_forest", part, name)
            runs = max(runs, len(of))
            size = f" ({np.median([one['numbers'] for one in of]):,.0f})" if of else ""
            row.append(pieces.spread([one["test"] for one in of]) + size)
        best, _ = PUBLISHED.get((name, R2), (None, ""))
        rows.append([*row, str(runs), "-" if best is None else str(best)])
    table = benchmark.markdown(["set", *paper_forest.TITLES, "splits", "best published"], rows)
    lines = paper_forest.differences(found, paper_forest.SETS)
    about = (
        "Test R² in per cent, mean and deviation over random splits, 75/25, the same for all; numbers in the model in "
        "brackets; `-` where there is none. What is tuned, and seconds: `paper_forest.md`; what is "
        f"missing: {command('paper_forest', 'PART', 'SET')}. A method may have fewer splits than said."
    )
    return f"## The strongest rivals\n\n{about}\n\n{table}\n" + "\n".join(lines) + "\n"


def page(folder: Path) -> str:
    """The whole page, of the pieces in a folder of results."""
    results = Results.read(folder)
    parts = {f"{script} {part}": of for script, found in results.found.items() for part, of in found.items()}
    about = (
        f"Made by `python -m experiments.records --write` of the pieces in this folder, which were made on "
        f"{pieces.machines(parts)}.\n\n"
        "What the five papers' tables give, set by set, for their own methods on data that we have, beside ours. Ours: "
        "mean ± standard deviation over the runs (divisor: their number), which are splits, seeds or both. "
        "**Reached**: ours is at least the paper's less one standard deviation of ours, of an error at most the "
        f"paper's and one deviation more; of a single run, within {ROOM} points. Difference: ours less the paper's; "
        "lower is better of RMSE and log loss, higher of all else. Splits are said to be the same where the rows are. "
        "Numbers in the model and seconds (of all runs, tuning included, on two cores that were at times busy) where "
        "the pieces have them. Best published: of single hard trees, and of R² of any model, its method in brackets "
        "where that is on record; on other splits, so no more than an orientation.\n"
    )
    text = ["# The papers' figures beside ours\n", about]
    for paper, (rows_of, note) in PAPERS.items():
        rows = sorted(rows_of(results), key=lambda row: row.table)
        table = benchmark.markdown(HEADER, [row.cells() for row in rows])
        text.append(f"## {paper}\n\n{note}\n\n{table}\n{counted(rows)}\n")
    return "\n".join([*text, rivals(results)])


def main(arguments: list[str] | None = None) -> None:
    """The page."""
    options = benchmark.parser(__doc__).parse_args(arguments)
    text = page(benchmark.RESULTS)
    print(text)
    file = (benchmark.RESULTS if options.write else Path("results")) / "records.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


if __name__ == "__main__":
    main()
