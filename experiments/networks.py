"""RealMLP and TabM, two networks for tables of numbers, as rivals with their defaults.

Their package pytabkit needs torch. Both are in an environment of their own, ``build/networks`` (``make networks``). A
process of this environment fits and keeps all networks of a study. It reads requests from its standard input and writes
answers to its standard output, both pickled.
"""

import atexit
import functools
import os
from pathlib import Path
import pickle
import subprocess
import sys
import time
from typing import Any

import numpy as np

PREFIXES = {"RealMLP": "RealMLP_TD", "TabM": "TabM_D"}  # prefixes of the names of pytabkit's classes
ROOT = Path(__file__).parents[1]
PYTHON = ROOT / "build/networks/bin/python"


@functools.cache
def installed() -> bool:
    """Returns whether the environment exists; prints a line if it does not."""
    if not PYTHON.exists():
        print(f"{' and '.join(PREFIXES)} are left out: `make networks` installs them", file=sys.stderr)
    return PYTHON.exists()


class Network:
    """A network on one thread, with the interface of scikit-learn. It holds out a fifth of the rows for validation.

    Attributes:
      classes_: the classes; unused for numbers.
      num_parameters: number of its parameters.
      processor_seconds: processor seconds of its fit, in the other process.
    """

    def __init__(self, name: str, classifies: bool, seed: int):
        self._kind = PREFIXES[name] + ("_Classifier" if classifies else "_Regressor")
        self._seed = seed
        _process()

    def fit(self, x: np.ndarray, y: np.ndarray) -> "Network":
        """Returns the network, fitted to the rows."""
        self.classes_ = np.unique(y)
        self._number, self.num_parameters, self.processor_seconds = _answer("fit", self._kind, self._seed, x, y)
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Returns numbers or classes."""
        return _answer("predict", self._number, x)

    def predict_proba(self, x: np.ndarray) -> np.ndarray:
        """Returns the probabilities of the classes."""
        return _answer("predict_proba", self._number, x)

    def score(self, x: np.ndarray, y: np.ndarray) -> float:
        """Returns R^2 or accuracy."""
        return _answer("score", self._number, x, y)


@functools.cache
def _process() -> Any:
    """Returns the process, once it has imported its packages."""
    command = [PYTHON, "-W", "ignore", "-c", "from experiments import networks; networks.serve()"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment)
    atexit.register(process.communicate)  # ends it
    pickle.load(process.stdout)  # type: ignore[arg-type]
    return process


def _answer(*request: Any) -> Any:
    process = _process()
    pickle.dump(request, process.stdin)
    process.stdin.flush()
    return pickle.load(process.stdout)


def serve() -> None:
    """Answers requests until the input ends; what the packages print goes to the standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import pytabkit  # pyright: ignore[reportMissingImports]

    fitted: list[Any] = []

    def fit(kind: str, seed: int, x: np.ndarray, y: np.ndarray) -> tuple[int, int, float]:
        start = time.process_time()
        model = getattr(pytabkit, kind)(random_state=seed, n_cv=1, n_threads=1, device="cpu").fit(x, y)
        fitted.append(model)
        seconds = time.process_time() - start
        inner = model.alg_interface_
        network = inner.model if kind.startswith("RealMLP") else inner.sub_split_interfaces[0].model_
        return len(fitted) - 1, sum(parameter.numel() for parameter in network.parameters()), seconds

    answer: Any = "ready"
    while True:
        pickle.dump(answer, answers)
        answers.flush()
        try:
            method, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer = fit(*arguments) if method == "fit" else getattr(fitted[arguments[0]], method)(*arguments[1:])
