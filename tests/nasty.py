"""Tables that break things. Each is made by a few lines of NumPy, which are printed where a test fails on it."""

from dataclasses import dataclass
import tempfile
from typing import Any

import numpy as np
import pandas as pd

# Columns ``(n, w)``, given those before in ``columns``.
COLUMNS = {
    "normal": "rng.normal(size=(n, w))",
    "constant": "np.full((n, w), 0.1)",
    "far constant": "np.full((n, w), -1e9)",
    "nearly constant": "7 + 7e-6 * rng.normal(size=(n, w))",
    "offset": "1234567890 + rng.normal(size=(n, w))",
    "time": "1.7e9 + 3600.0 * rng.integers(0, 100, (n, w))",
    "huge": "1e30 * rng.normal(size=(n, w))",
    "tiny": "1e-20 * rng.normal(size=(n, w))",
    "heavy tail": "rng.standard_cauchy((n, w))",
    "integers": "rng.integers(-3, 4, (n, w))",
    "booleans": "rng.random((n, w)) < 0.5",
    "twin": "columns[0]",
    "sum": "columns[0] + columns[-1]",
    "outlier": "np.where(np.arange(n)[:, None] == 0, 1e6, rng.normal(size=(n, w)))",
    "negative zero": "np.where(rng.random((n, w)) < 0.5, -0.0, rng.normal(size=(n, w)))",
}
# Targets ``(n,)``, none of them constant.
TARGETS = {
    "plain": "signal",
    "offset": "1234567890 + signal",
    "huge": "1e30 * signal",
    "tiny": "1e-20 * signal",
    "few values": "np.round(signal) + 5 * (np.arange(n) == 0)",
    "heavy tail": "signal + rng.standard_cauchy(n)",
}
# Classes ``(n,)``, every one of them present.
CLASSES = {
    "even": "signal.argsort().argsort() * classes // n",
    "rare": "np.maximum(signal.argsort().argsort() - (n - classes), 0)",
}
# Rows in ``kept`` have weight, so that the others can be left out.
WEIGHTS = {
    "none": "None",
    "equal": "np.full(n, 3.0)",
    "zeros": "np.where(np.isin(np.arange(n), kept), 2.0, rng.integers(0, 3, n))",
    "spanning": "10.0 ** rng.uniform(-6, 6, n)",
}


@dataclass
class NastyTable:
    """A table, what is nasty about it in a line, and the code that makes ``x``, ``y`` and ``weight``."""

    seed: int
    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    task: str
    about: str = ""
    code: str = ""

    def script(self) -> str:
        """The lines that make the table again, exactly."""
        return f"# {self.about}\nimport numpy as np\n\n{self.code}"


def table(
    seed: int,
    *,
    classes: int = 0,
    outputs: int | None = None,
    rows: tuple[int, ...] = (2, 3, 5, 12, 20, 31),
    kinds: int = 6,
    width: int = 1,
    first: str | None = None,
    without: tuple[str, ...] = (),
) -> NastyTable:
    """A table by its seed.

    Args:
      seed: says everything that the other arguments leave open.
      classes: how many; 0: regression.
      outputs: number of targets; None: one, ``(n,)``.
      rows: numbers of rows to choose from.
      kinds: how many kinds of columns.
      width: how many columns of each.
      first: kind of the first.
      without: kinds of columns and targets to do without.
    """
    rng = np.random.default_rng(seed)
    n = max(int(rng.choice(rows)), classes)
    drawn = [str(kind) for kind in rng.permutation([kind for kind in COLUMNS if kind not in without])]
    first = first or next(kind for kind in drawn if kind not in ("twin", "sum"))  # these need columns before them
    chosen = [first, *(kind for kind in drawn if kind != first)][:kinds]
    made_by = CLASSES if classes else {kind: code for kind, code in TARGETS.items() if kind not in without}
    targets = [str(rng.choice(list(made_by))) for _ in range(outputs or 1)]
    weight = str(rng.choice(list(WEIGHTS)))
    lines = [f"rng, n, w, classes = np.random.default_rng({seed}), {n}, {width}, {classes}", "columns = []"]
    lines += [f"columns.append({COLUMNS[kind]})  # {kind}" for kind in chosen]
    lines += [
        "x = np.concatenate(columns, axis=1).astype(float)",
        "z = (x - x.min(0)) / np.maximum(np.ptp(x, axis=0), 1e-30) - 0.5",
    ]
    lines += ["signal = np.sign(z[:, 0]) + z.mean(1) + 0.1 * rng.normal(size=n)"]
    each = [made_by[kind] for kind in targets]
    lines += [f"y = {each[0]}" if outputs is None else f"y = np.stack([{', '.join(each)}], axis=1)"]
    lines += ["kept = np.unique(y, return_index=True)[1] if classes else np.ravel([y.argmin(0), y.argmax(0)])"]
    lines += [f"weight = {WEIGHTS[weight]}"]
    code, made = "\n".join(lines) + "\n", {"np": np}
    exec(code, made)
    task = "classification" if classes else "regression"
    about = f"seed {seed}: {n} rows; columns {', '.join(chosen)}, {width} each; {task} of {', '.join(targets)}"
    about += f" ({classes} classes)" if classes else ""
    return NastyTable(seed, made["x"], made["y"], made["weight"], task, f"{about}; weights {weight}", code)


def _mapped(a: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        a.tofile(file)
        file.flush()
        return np.memmap(file, a.dtype, "r", shape=a.shape)


def _read_only(a: np.ndarray) -> np.ndarray:
    a = a.copy()
    a.setflags(write=False)
    return a


# The same numbers, held otherwise.
LAYOUTS: dict[str, Any] = {
    "Fortran": np.asfortranarray,
    "every other row": lambda a: np.repeat(a, 2, axis=0)[::2],
    "part of a row": lambda a: np.concatenate([a, a], axis=-1)[..., : a.shape[-1]],
    "backwards": lambda a: np.ascontiguousarray(np.flip(a))[(slice(None, None, -1),) * a.ndim],
    "read-only": _read_only,
    "memory-mapped": _mapped,
    "byte-swapped": lambda a: a.astype(a.dtype.newbyteorder("S")),
    "lists": np.ndarray.tolist,
    "objects": lambda a: a.astype(object),
    "frame": lambda a: pd.Series(a) if a.ndim == 1 else pd.DataFrame({f"c{i}": column for i, column in enumerate(a.T)}),
}
