"""DGT-Bandit's figures: learning from the losses of the played actions (Figures 2 and 3, Table 6).

python -m experiments.paper_bandit --data-dir DATA [--seeds 10] [--datasets pendigits letter mnist ...]

Contexts are drawn from the training part, with replacement. The held-out score is the score on the test part, without
exploration. All seeds of a learner run in one compiled program; each seed has its own contexts. The rivals of the tree
are the linear epsilon-greedy learner (or linear regression with the same feedback), and Vowpal Wabbit if installed.

The result of a (learner, set) is a row of --out. MNIST is fetched from OpenML if the data folder lacks it.
"""

import argparse
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax

from experiments import benchmark, studies
from experiments.paper_dgt import REGRESSION, SETS, splits
import jtrees
from jtrees.data import Scaling, Table
from jtrees.tasks import Classification, Regression
from jtrees.training import rmsprop

ROUNDS = {"pendigits": 50_000, "letter": 50_000, "mnist": 76_000}
ROUNDS |= {"abalone_dgt": 200_000, "ailerons": 200_000, "cpu-act": 200_000}
ACTIONS, DEPTHS = {"pendigits": 10, "letter": 26, "mnist": 10}, {"letter": 8}  # depth 6 for the other sets
VOWPAL_WABBIT = ("pendigits", "letter")  # its lines of text are too slow for MNIST
LOOKS = 20  # number of evaluations
ACCUMULATE, RATE = 16, 0.01  # in regression; the learning rate falls to zero by a cosine over the stream
# The linear learner takes the best rate by its own held-out score.
LINEAR_RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01)
DELTA, EXPLORATION = 0.5, 0.3
PAPER = {
    "ailerons": (1.71, 1.78),
    "abalone_dgt": (2.16, 2.28),
    "cpu-act": (3.05, 10.05),
}  # Table 6: RMSE of the tree, RMSE of linear regression
PAPER_MNIST = 80  # accuracy after all queries, per cent (Figure 2)
PARTS = ("tree", "linear", "vowpal", "tree-one-point", "linear-one-point")


class Stream(NamedTuple):
    """Scaled contexts and targets; the rows that each seed plays, ``(seeds, rounds)``; and the test part."""

    x: jax.Array
    y: jax.Array
    rows: jax.Array
    test: jax.Array
    y_test: jax.Array


@lru_cache(maxsize=1)
def stream(name: str, data_dir: str | None, seeds: int) -> tuple[Stream, Scaling]:
    """Returns the stream of a set, and its scaling: features as in the recipes, regression targets in [0, 1]."""
    x, y, x_test, y_test = splits(name, data_dir)[0]
    task = Regression() if name in REGRESSION else Classification(ACTIONS[name])
    scaling = Scaling.fit(Table(x, y.astype(np.float64) if name in REGRESSION else y, None, task))
    rows = np.stack([np.random.default_rng(seed).integers(0, len(x), ROUNDS[name]) for seed in range(seeds)])
    arrays = scaling.transform(x), scaling.transform_y(y), rows, scaling.transform(x_test), y_test
    return Stream(*map(jnp.asarray, arrays)), scaling


def played(name: str, learner: jtrees.methods.Bandit, data: Stream, scaling: Scaling) -> dict[str, Any]:
    """Runs a learner on the streams of all seeds in one program; returns curves of held-out score and regret."""
    (seeds, rounds), every = data.rows.shape, data.rows.shape[1] // LOOKS
    side_by_side = max(1, 2**30 // (4 * rounds * data.x.shape[1]))  # contexts of these seeds fit in a gigabyte

    def score(params: Any, data: Stream) -> jax.Array:
        answers = learner.predict(params, data.test)
        if name in REGRESSION:
            return SETS[name].unit * jnp.sqrt(jnp.square(scaling.inverse(answers) - data.y_test).mean())
        return 100 * (answers.argmax(1) == data.y_test).mean()

    def run(data: Stream, seed: jax.Array, rows: jax.Array) -> jtrees.methods.BanditRun:
        targets = data.y[rows]
        if name in REGRESSION:
            loss = lambda i, action: jnp.square(action - targets[i])
        else:
            loss = lambda i, action: (action != targets[i]).astype(jnp.float32)
        how: Any = {"key": jax.random.key(seed), "score": partial(score, data=data), "score_every": every}
        return jtrees.methods.run_bandit(learner, data.x[rows], loss, **how)

    @jax.jit
    def all_seeds(data: Stream) -> jtrees.methods.BanditRun:
        return benchmark.map_over_devices(partial(run, data), jnp.arange(seeds), data.rows, batch_size=side_by_side)

    result = all_seeds(data)
    return {
        "queries": np.asarray(result.queries[0]).tolist(),
        "scores": np.asarray(result.scores, np.float64).tolist(),
        "regret": np.asarray(result.regret[:, every - 1 :: every], np.float64).tolist(),
        "skipped": int(result.state.skipped.sum()),
    }


def learners(part: str, name: str) -> list[Callable[[], jtrees.methods.Bandit]]:
    """Returns the learners of a part; the report shows the best."""
    depth, rates = (DEPTHS.get(name, 6), (RATE,)) if part.startswith("tree") else (0, LINEAR_RATES)
    if name not in REGRESSION:
        learner = partial(jtrees.methods.bandit_classifier, depth, ACTIONS[name], exploration=EXPLORATION)
        return [partial(learner, optimizer=rmsprop(rate)) for rate in rates] if depth == 0 else [learner]
    falling = lambda rate: rmsprop(optax.cosine_decay_schedule(rate, ROUNDS[name] // ACCUMULATE))
    feedback: Any = "one-point" if part.endswith("one-point") else "two-point"
    learner = partial(jtrees.methods.bandit_regressor, depth, feedback=feedback, delta=DELTA, accumulate=ACCUMULATE)
    return [partial(learner, optimizer=falling(rate)) for rate in rates]


def label(part: str, name: str) -> str:
    """Returns the name of a learner."""
    if part == "vowpal":
        return "Vowpal Wabbit"
    kind = f"DGT-Bandit, height {DEPTHS.get(name, 6)}" if part.startswith("tree") else "linear"
    if name in REGRESSION:
        return f"{kind}, {'one-point' if part.endswith('one-point') else 'two-point'}"
    return kind if part == "tree" else f"{kind}, epsilon-greedy"


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the best learner of a part, by the mean score over the last quarter of the evaluations."""
    data, scaling = stream(name, options.data_dir, options.seeds)
    if part == "vowpal":
        return vowpal_wabbit(name, data)
    last = lambda curves: np.mean(np.asarray(curves["scores"])[:, -LOOKS // 4 :])
    candidates = [played(name, learner(), data, scaling) for learner in learners(part, name)]
    return (min if name in REGRESSION else max)(candidates, key=last)


def vowpal_wabbit(name: str, data: Stream) -> dict[str, Any]:
    """Runs Vowpal Wabbit's contextual bandit: epsilon-greedy with the same exploration, otherwise defaults."""
    from vowpalwabbit import Workspace  # type: ignore[import-not-found]

    actions, every = ACTIONS[name], ROUNDS[name] // LOOKS
    text = lambda x: "| " + " ".join(f"f{i}:{v:.5f}" for i, v in enumerate(x))
    lines, test = [text(x) for x in np.asarray(data.x)], [text(x) for x in np.asarray(data.test)]
    targets, y_test, scores, regret = np.asarray(data.y), np.asarray(data.y_test), [], []
    for seed, rows in enumerate(np.asarray(data.rows)):
        model, draw = Workspace(f"--cb_explore {actions} --epsilon {EXPLORATION} --quiet"), np.random.default_rng(seed)
        total, curve, losses = 0.0, [], []
        for i, row in enumerate(rows):
            chances = np.asarray(model.predict(lines[row]))
            action = int(draw.choice(actions, p=chances / chances.sum()))
            loss = float(action != targets[row])
            model.learn(f"{action + 1}:{loss}:{chances[action]} {lines[row]}")
            total += loss
            if (i + 1) % every == 0:
                best = [int(np.argmax(np.asarray(model.predict(line)))) for line in test]
                curve.append(100 * float(np.mean(np.asarray(best) == y_test)))
                losses.append(total)
        model.finish()
        scores.append(curve)
        regret.append(losses)
    return {"queries": [every * (i + 1) for i in range(LOOKS)], "scores": scores, "regret": regret, "skipped": 0}


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Returns no settings; None for one-point feedback with classes, and for Vowpal Wabbit on other sets."""
    has = (name in VOWPAL_WABBIT) if part == "vowpal" else (name in REGRESSION or not part.endswith("one-point"))
    return {} if has else None


# --- The report ------------------------------------------------------------------------------------------------------


def by_set(results: studies.Results) -> dict[str, dict[str, studies.Measurement]]:
    """Returns the rows by set and label."""
    return {
        name: {label(part, name): row for part in PARTS for row in results.select(part, name).rows}
        for name in ROUNDS
        if name in results.datasets()
    }


def curves(results: studies.Results, file: Path) -> None:
    """Draws held-out score and regret against queries: mean over seeds, and 95 % confidence bands of the mean."""
    rows = by_set(results)
    if not rows:
        return
    figure = Figure(figsize=(4 * len(rows), 6), layout="constrained")
    axes = np.atleast_2d(figure.subplots(2, len(rows), squeeze=False))
    for column, (name, measurements) in enumerate(rows.items()):
        for learner, row in measurements.items():
            for axis, quantity in zip(axes[:, column], ("scores", "regret"), strict=True):
                values = np.asarray(row.value[quantity])
                mean, queries = values.mean(0), row.value["queries"]
                band = 1.96 * values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0 * mean
                (line,) = axis.plot(queries, mean, label=learner)
                axis.fill_between(queries, mean - band, mean + band, color=line.get_color(), alpha=0.2)
        axes[0, column].set(title=name, ylabel="test RMSE" if name in REGRESSION else "test accuracy, %")
        axes[1, column].set(xlabel="queries", ylabel="cumulative loss")
        axes[0, column].legend(fontsize=7)
        if name in REGRESSION:
            axes[1, column].set_yscale("log")
    figure.savefig(file, dpi=110)


def report(results: studies.Results, command: str) -> str:
    """Returns a table of the intermediate and final scores."""
    rows = by_set(results)
    seeds = {row.settings["seeds"] for row in results.rows}
    table = []
    for name, measurements in rows.items():
        for learner, row in measurements.items():
            scores, queries = np.asarray(row.value["scores"]), row.value["queries"]
            columns = (LOOKS // 5 - 1, LOOKS - 1)
            cells = [f"{queries[i]}: {scores[:, i].mean():.2f} ± {scores[:, i].std():.2f}" for i in columns]
            total = np.mean(np.asarray(row.value["regret"])[:, -1])
            table.append([name, learner, *cells, f"{total:.0f}", f"{row.seconds:.0f}"])
    header = ["set", "learner", "queries: score", "queries: score", "cumulative loss", "seconds, all seeds"]
    figures = [f"{name.split('_')[0]} {tree:.2f} (linear {linear:.2f})" for name, (tree, linear) in PAPER.items()]
    return (
        f"# DGT-Bandit: curves\n\nMade by `{command}` on {results.machines}; seeds: "
        f"{', '.join(map(str, sorted(seeds)))}.\n\n"
        f"Scores are test accuracy in per cent ({', '.join(name for name in rows if name not in REGRESSION)}) or RMSE "
        "(abalone and cpu-act, first shuffle; ailerons times 1e4): mean ± standard deviation over seeds, after a fifth "
        "of the queries and after all queries. A query is a round; a two-point round has two losses. Classification: "
        f"the learners' defaults, exploration {EXPLORATION}. Regression: delta {DELTA}, gradients over {ACCUMULATE} "
        f"rounds, RMSprop with a learning rate that falls from {RATE} to zero. The linear learners take the best of "
        f"the learning rates {LINEAR_RATES} by their own final scores. The paper's figures with two points: "
        f"{', '.join(figures)}"
        + (f"; MNIST {PAPER_MNIST} % after 76 000 queries.\n\n" if "mnist" in rows else ".\n\n")
        + benchmark.markdown(header, table)
        + "\n![curves](paper_bandit.png)\n"
    )


STUDY = studies.Study(
    *("paper_bandit", __doc__, PARTS, ROUNDS, 10, measure, report, settings),
    together=True,
    closed=True,
    available=lambda part: part != "vowpal" or benchmark.installed("vowpalwabbit"),
    figure=curves,
)

if __name__ == "__main__":
    studies.program(STUDY)
