"""Optuna's TPE asks for combinations in batches, and a sweep answers: all batches are one compiled program.

python -m experiments.ask_and_tell [--dataset kin8nm] [--rounds 4] [--batch 16]

Needs Optuna (``make peers`` installs it).
"""

import argparse

import jax
import numpy as np
import optuna  # pyright: ignore[reportMissingImports]

from experiments import benchmark, data
import jtrees


def ask(study: optuna.Study, batch: int) -> tuple[list[optuna.Trial], list[dict[str, float]]]:
    """Trials, and the options of each."""
    trials = [study.ask() for _ in range(batch)]
    options = [
        {
            "learning_rate": trial.suggest_float("learning_rate", 1e-3, 0.1, log=True),
            "l1": trial.suggest_float("l1", 1e-7, 1e-2, log=True),
        }
        for trial in trials
    ]
    return trials, options


def tell(study: optuna.Study, trials: list[optuna.Trial], losses: np.ndarray) -> None:
    """What became of them; those that diverged have failed."""
    for trial, loss in zip(trials, losses, strict=True):
        if np.isfinite(loss):
            study.tell(trial, loss)
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)


def main(arguments: list[str] | None = None) -> optuna.Study:
    """The study, after some rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder of .npz files (default: $JTREES_DATA)")
    parser.add_argument("--dataset", default=data.DEFAULT)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=250)
    options = parser.parse_args(arguments)
    table = data.load(options.dataset, data_dir=options.data_dir)
    task = "classification" if table.is_classification else "regression"
    recipe = jtrees.GET(depth=4, leaves="linear" if task == "regression" else "constant", starts=1)
    recipe = recipe.replace(epochs=options.epochs)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Within a batch, trials that have no answer yet count as bad ones, so that they are not asked for again.
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True))
    for i in range(options.rounds):
        trials, samples = ask(study, options.batch)
        key = jax.random.key(0)  # the same for all: what differs is the options
        found = jtrees.sweep(recipe, table.x, table.y, samples=samples, validation=0.25, key=key, task=task)
        tell(study, trials, found.losses.mean((1, 2)))
        print(f"round {i + 1}: loss {study.best_value:.5g} with {study.best_params}", flush=True)
    return study


if __name__ == "__main__":
    benchmark.use_all_cores()
    main()
