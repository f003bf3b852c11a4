"""DGT-Bandit's figures: what is learnt from the losses of what was played (Figures 2 and 3, Table 6).

python -m experiments.paper_bandit --data-dir DATA [--seeds 10] [--datasets pendigits letter abalone_dgt ailerons]

Contexts are drawn from the training part, with replacement; the held-out score is that of the test part, without
exploration. All seeds of a learner run in one compiled program; each has its own contexts. Beside the tree: the linear
epsilon-greedy learner (or linear regression with the same feedback), and Vowpal Wabbit where it is installed.

Writes experiments/results/paper_bandit.md and .png; learners that were run are kept under --out.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
import numpy as np
import optax

from experiments import benchmark
from experiments.paper_dgt import REGRESSION, SETS, splits
import jtrees
from jtrees.methods.dgt import rmsprop

ROUNDS = {"pendigits": 50_000, "letter": 50_000, "abalone_dgt": 200_000, "ailerons": 200_000}
LOOKS = 20
DEPTH, ACCUMULATE, RATE = 6, 16, 0.01  # of regression, whose rate falls to zero by a cosine over the stream
# The linear learner is given the best of them, judged by its own held-out score.
LINEAR_RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01)
DELTA = 0.5
CLASS_DEPTHS = {"pendigits": 6, "letter": 8}


def stream(name: str, data_dir: str | None, seeds: int) -> dict[str, Any]:
    """Contexts and targets of every seed, and the test part; features z-scored, regression targets in [0, 1]."""
    x, y, x_test, y_test = splits(name, data_dir)[0]
    mean, deviation = x.mean(0), np.maximum(x.std(0), 1e-12)
    low, span = (y.min(), np.ptp(y)) if name in REGRESSION else (0, 1)
    rows = np.stack([np.random.default_rng(seed).integers(0, len(x), ROUNDS[name]) for seed in range(seeds)])
    unit = lambda a: jnp.asarray((a - mean) / deviation, jnp.float32)
    scaled = (y - low) / span if name in REGRESSION else y
    return {"x": unit(x), "y": jnp.asarray(scaled), "rows": jnp.asarray(rows), "test": unit(x_test), "y_test": y_test,
            "low": low, "span": span}  # fmt: skip


def played(name: str, learner: jtrees.Bandit, data: dict[str, Any]) -> dict[str, Any]:
    """A learner on the streams of all seeds, in one program: curves of the held-out score and of the regret."""
    y_test, low, span = jnp.asarray(data["y_test"]), data["low"], data["span"]

    def score(params: Any) -> jax.Array:
        answers = learner.predict(params, data["test"])
        if name in REGRESSION:
            return SETS[name].unit * jnp.sqrt(jnp.square(low + span * answers - y_test).mean())
        return 100 * (answers.argmax(1) == y_test).mean()

    def run(seed: jax.Array, rows: jax.Array) -> jtrees.BanditRun:
        targets = data["y"][rows]
        if name in REGRESSION:
            loss = lambda i, action: jnp.square(action - targets[i])
        else:
            loss = lambda i, action: (action != targets[i]).astype(jnp.float32)
        key, every = jax.random.key(seed), ROUNDS[name] // LOOKS
        return jtrees.run_bandit(learner, data["x"][rows], loss, key=key, score=score, score_every=every)

    result = jax.jit(jax.vmap(run))(jnp.arange(len(data["rows"])), data["rows"])
    every = ROUNDS[name] // LOOKS
    return {
        "queries": np.asarray(result.queries[0]).tolist(),
        "scores": np.asarray(result.scores, np.float64).tolist(),
        "regret": np.asarray(result.regret[:, every - 1 :: every], np.float64).tolist(),
        "skipped": int(result.state.skipped.sum()),
    }


def learners(name: str) -> dict[str, list[Callable[[], jtrees.Bandit]]]:
    """By label, the learners of which the best is shown."""
    if name not in REGRESSION:
        actions = {"pendigits": 10, "letter": 26}[name]
        return {
            f"DGT-Bandit, height {CLASS_DEPTHS[name]}": [
                partial(jtrees.bandit_classifier, CLASS_DEPTHS[name], actions)
            ],
            "linear, epsilon-greedy": [
                partial(jtrees.bandit_classifier, 0, actions, optimizer=rmsprop(rate)) for rate in LINEAR_RATES
            ],
        }
    updates = ROUNDS[name] // ACCUMULATE
    falling = lambda rate: rmsprop(optax.cosine_decay_schedule(rate, updates))
    out: dict[str, list[Callable[[], jtrees.Bandit]]] = {}
    for feedback in ("two-point", "one-point"):
        options: Any = {"feedback": feedback, "delta": DELTA, "accumulate": ACCUMULATE}
        out[f"DGT-Bandit, height {DEPTH}, {feedback}"] = [
            partial(jtrees.bandit_regressor, DEPTH, optimizer=falling(RATE), **options)
        ]
        out[f"linear, {feedback}"] = [
            partial(jtrees.bandit_regressor, 0, optimizer=falling(rate), **options) for rate in LINEAR_RATES
        ]
    return out


def run_learners(name: str, label: str, data: dict[str, Any]) -> dict[str, Any]:
    """The best of the learners of a label, by the mean score over the last quarter of the looks."""
    last = lambda found: np.mean(np.asarray(found["scores"])[:, -LOOKS // 4 :])
    found = [played(name, make(), data) for make in learners(name)[label]]
    return (min if name in REGRESSION else max)(found, key=last)


def vowpal_wabbit(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """Vowpal Wabbit's contextual bandit, epsilon-greedy with the same exploration, its other options by default."""
    from vowpalwabbit import Workspace  # type: ignore[import-not-found]

    actions, exploration, every = {"pendigits": 10, "letter": 26}[name], 0.3, ROUNDS[name] // LOOKS
    text = lambda x: "| " + " ".join(f"f{i}:{v:.5f}" for i, v in enumerate(x))
    lines, test = [text(x) for x in np.asarray(data["x"])], [text(x) for x in np.asarray(data["test"])]
    targets, scores, regret = np.asarray(data["y"]), [], []
    for seed, rows in enumerate(np.asarray(data["rows"])):
        model, draw = Workspace(f"--cb_explore {actions} --epsilon {exploration} --quiet"), np.random.default_rng(seed)
        lost, curve, losses = 0.0, [], []
        for i, row in enumerate(rows):
            chances = np.asarray(model.predict(lines[row]))
            action = int(draw.choice(actions, p=chances / chances.sum()))
            loss = float(action != targets[row])
            model.learn(f"{action + 1}:{loss}:{chances[action]} {lines[row]}")
            lost += loss
            if (i + 1) % every == 0:
                best = [int(np.argmax(np.asarray(model.predict(line)))) for line in test]
                curve.append(100 * float(np.mean(np.asarray(best) == data["y_test"])))
                losses.append(lost)
        model.finish()
        scores.append(curve)
        regret.append(losses)
    return {"queries": [every * (i + 1) for i in range(LOOKS)], "scores": scores, "regret": regret, "skipped": 0}


# --- The report ------------------------------------------------------------------------------------------------------


def curves(file: Path, found: dict[str, dict[str, Any]]) -> None:
    """Held-out score and regret against queries: mean over seeds, and 95 % confidence bands of the mean."""
    figure = Figure(figsize=(4 * len(found), 6), layout="constrained")
    axes = np.atleast_2d(figure.subplots(2, len(found), squeeze=False))
    for column, (name, by_label) in enumerate(found.items()):
        for label, piece in by_label.items():
            for row, what in enumerate(("scores", "regret")):
                values = np.asarray(piece["found"][what])
                mean, queries = values.mean(0), piece["found"]["queries"]
                band = 1.96 * values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0 * mean
                (line,) = axes[row, column].plot(queries, mean, label=label)
                axes[row, column].fill_between(queries, mean - band, mean + band, color=line.get_color(), alpha=0.2)
        what = "test RMSE" if name in REGRESSION else "test accuracy, %"
        axes[0, column].set(title=name, ylabel=what)
        axes[1, column].set(xlabel="queries", ylabel="cumulative loss")
        axes[0, column].legend(fontsize=7)
        if name in REGRESSION:
            axes[1, column].set_yscale("log")
    figure.savefig(file, dpi=110)


def report(found: dict[str, dict[str, Any]], command: str) -> str:
    """A table of the scores on the way and at the end."""
    machines = {piece["machine"] for by_label in found.values() for piece in by_label.values()}
    seeds = {piece["seeds"] for by_label in found.values() for piece in by_label.values()}
    rows = []
    for name, by_label in found.items():
        for label, piece in by_label.items():
            scores, queries = np.asarray(piece["found"]["scores"]), piece["found"]["queries"]
            at = [LOOKS // 5 - 1, LOOKS - 1]
            cells = [f"{queries[i]}: {scores[:, i].mean():.2f} ± {scores[:, i].std():.2f}" for i in at]
            total = np.mean(np.asarray(piece["found"]["regret"])[:, -1])
            rows.append([name, label, *cells, f"{total:.0f}", f"{piece['seconds']:.0f}"])
    header = ["set", "learner", "queries: score", "queries: score", "cumulative loss", "seconds, all seeds"]
    return (
        f"# DGT-Bandit: curves\n\nMade by `{command}` on {', '.join(sorted(machines))}; seeds: "
        f"{', '.join(map(str, sorted(seeds)))}.\n\nTest accuracy in per cent (pendigits, letter) or RMSE (abalone, "
        "first shuffle; ailerons times 1e4): mean ± standard deviation over seeds, after a fifth of the queries and "
        "after all. A query is a round (with two points, two losses). Classification: the learners' defaults, "
        f"exploration 0.3. Regression: delta {DELTA}, gradients over {ACCUMULATE} rounds, RMSprop with rate {RATE} "
        "falling to zero. "
        f"The linear learners: the best of the rates {LINEAR_RATES}, by their own scores at the end. The paper, "
        "two-point: ailerons 1.71 (linear 1.78), abalone 2.16 (linear 2.28).\n\n"
        + benchmark.markdown(header, rows)
        + "\n![curves](paper_bandit.png)\n"
    )


def main() -> None:
    """Every learner that is not there yet, then table and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder of .npz files (default: $JTREES_DATA)")
    parser.add_argument("--datasets", nargs="+", choices=list(ROUNDS), default=list(ROUNDS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=benchmark.RESULTS / "paper_bandit")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for name in options.datasets:
        data = stream(name, options.data_dir, options.seeds)
        jobs = {label: partial(run_learners, name, label, data) for label in learners(name)}
        file = lambda label, name=name: options.out / f"{name}-{label.replace(', ', '-').replace(' ', '-')}.json"
        if name not in REGRESSION and (benchmark.installed("vowpalwabbit") or file("Vowpal Wabbit").exists()):
            jobs["Vowpal Wabbit"] = partial(vowpal_wabbit, name, data)
        for label, job in jobs.items():
            found.setdefault(name, {})[label] = benchmark.piece(file(label), job, seeds=options.seeds)
            print(name, label, "there", flush=True)
    text = report(found, f"python -m experiments.paper_bandit --data-dir DATA --seeds {options.seeds}")
    print(text)
    (benchmark.RESULTS / "paper_bandit.md").write_text(text)
    curves(benchmark.RESULTS / "paper_bandit.png", found)


if __name__ == "__main__":
    main()
