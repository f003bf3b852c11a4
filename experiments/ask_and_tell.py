"""Optuna's TPE proposes combinations in batches, and a sweep evaluates them: one compiled program for all batches.

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
    """Returns new trials and the options of each trial."""
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
    """Reports the losses to Optuna; diverged trials count as failed."""
    for trial, loss in zip(trials, losses, strict=True):
        if np.isfinite(loss):
            study.tell(trial, loss)
        else:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)


def main(arguments: list[str] | None = None) -> optuna.Study:
    """Runs some rounds and returns the study."""
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
    # constant_liar counts pending trials of a batch as bad results, and the sampler does not propose them again.
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True))
    for i in range(options.rounds):
        trials, samples = ask(study, options.batch)
        key = jax.random.key(0)  # the same key in all rounds: only the options differ
        found = jtrees.sweep(recipe, table.x, table.y, samples=samples, validation=0.25, key=key, task=task)
        tell(study, trials, found.losses.mean((1, 2)))
        print(f"round {i + 1}: loss {study.best_value:.5g} with {study.best_params}", flush=True)
    return study


if __name__ == "__main__":
    benchmark.use_all_cores()
    main()
