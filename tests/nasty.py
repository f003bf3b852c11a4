"""Tables that break things, by their seeds; and the same numbers in other layouts of memory."""

from dataclasses import dataclass
import tempfile
from typing import Any

import jax
import numpy as np
import pandas as pd

from jtrees import ObliqueTree
from jtrees.leaves import Values

# Columns of a shape ``(n, w)``, given those before.
COLUMNS: dict[str, Any] = {
    "normal": lambda rng, shape, columns: rng.normal(size=shape),
    "constant": lambda rng, shape, columns: np.full(shape, 0.1),
    "far constant": lambda rng, shape, columns: np.full(shape, -1e9),
    "nearly constant": lambda rng, shape, columns: 7 + 7e-6 * rng.normal(size=shape),
    "offset": lambda rng, shape, columns: 1234567890 + rng.normal(size=shape),
    "time": lambda rng, shape, columns: 1.7e9 + 3600.0 * rng.integers(0, 100, shape),
    "huge": lambda rng, shape, columns: 1e30 * rng.normal(size=shape),
    "tiny": lambda rng, shape, columns: 1e-20 * rng.normal(size=shape),
    "heavy tail": lambda rng, shape, columns: rng.standard_cauchy(shape),
    "integers": lambda rng, shape, columns: rng.integers(-3, 4, shape),
    "booleans": lambda rng, shape, columns: rng.random(shape) < 0.5,
    "twin": lambda rng, shape, columns: columns[0],
    "sum": lambda rng, shape, columns: columns[0] + columns[-1],
    "outlier": lambda rng, shape, columns: np.where(np.arange(shape[0])[:, None] == 0, 1e6, rng.normal(size=shape)),
    "negative zero": lambda rng, shape, columns: np.where(rng.random(shape) < 0.5, -0.0, rng.normal(size=shape)),
}
# Targets ``(n,)``, none of them constant.
TARGETS: dict[str, Any] = {
    "plain": lambda rng, signal: signal,
    "offset": lambda rng, signal: 1234567890 + signal,
    "huge": lambda rng, signal: 1e30 * signal,
    "tiny": lambda rng, signal: 1e-20 * signal,
    "few values": lambda rng, signal: np.round(signal) + 5 * (np.arange(len(signal)) == 0),
    "heavy tail": lambda rng, signal: signal + rng.standard_cauchy(len(signal)),
}
# Classes ``(n,)`` by the order of the signal, every one of them present.
CLASSES: dict[str, Any] = {
    "even": lambda order, classes: order * classes // len(order),
    "rare": lambda order, classes: np.maximum(order - (len(order) - classes), 0),
}
# Rows in ``kept`` have weight, so that the others can be left out.
WEIGHTS: dict[str, Any] = {
    "none": lambda rng, n, remaining: None,
    "equal": lambda rng, n, remaining: np.full(n, 3.0),
    "zeros": lambda rng, n, remaining: np.where(np.isin(np.arange(n), remaining), 2.0, rng.integers(0, 3, n)),
    "spanning": lambda rng, n, remaining: 10.0 ** rng.uniform(-6, 6, n),
}


@dataclass
class NastyTable:
    """A table, and what is nasty about it in a line."""

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    task: str
    about: str


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
    """A table by its seed. Of each of some kinds of columns it has ``width``; without ``outputs``, y is ``(n,)``."""
    rng = np.random.default_rng(seed)
    n = max(int(rng.choice(rows)), classes)
    drawn = [str(kind) for kind in rng.permutation([kind for kind in COLUMNS if kind not in without])]
    first = first or next(kind for kind in drawn if kind not in ("twin", "sum"))  # these need columns before them
    chosen = [first, *(kind for kind in drawn if kind != first)][:kinds]
    made_by = CLASSES if classes else {kind: code for kind, code in TARGETS.items() if kind not in without}
    targets = [str(rng.choice(list(made_by))) for _ in range(outputs or 1)]
    weight = str(rng.choice(list(WEIGHTS)))
    about = f"seed {seed}: {n} rows; columns {', '.join(chosen)}, {width} each; of {', '.join(targets)}"
    about += f" ({classes} classes)" if classes else ""

    rng, columns = np.random.default_rng(seed), []
    for kind in chosen:
        columns.append(COLUMNS[kind](rng, (n, width), columns))
    x = np.concatenate(columns, axis=1).astype(float)
    z = (x - x.min(0)) / np.maximum(np.ptp(x, axis=0), 1e-30) - 0.5
    signal = np.sign(z[:, 0]) + z.mean(1) + 0.1 * rng.normal(size=n)
    source = (signal.argsort().argsort(), classes) if classes else (rng, signal)
    each = [made_by[kind](*source) for kind in targets]
    y = each[0] if outputs is None else np.stack(each, axis=1)
    remaining = np.unique(y, return_index=True)[1] if classes else np.ravel([y.argmin(0), y.argmax(0)])
    task = "classification" if classes else "regression"
    return NastyTable(x, y, WEIGHTS[weight](rng, n, remaining), task, f"{about}; weights {weight}")


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


# Names and levels that look like templates, like parts of a language, or like the end of a literal or a comment.
_WORDS = r"""
@MISSING@ @TABLES@ @PARSE@$$ $ \1 \ a\ it's '' " `${x}` {0} %s % */ /* // -- # ??/ <!-- </script>
é 価格 🌲 __proto__ constructor NaN( 0x1 1e3
"""
TEXTS = _WORDS.split()
TEXTS += ['a "b" c', "-- x", "a\nb", "a\tb", "\1", "\2", "\x7f", "a\x85b", "a\u2028b", "\u200f", "a\ufeffb", "e\u0301"]


def near_ties(depth, p, seed=0, n=2000):
    """A tree, and samples whose score at some node on their way is zero but for rounding in single precision."""
    rng = np.random.default_rng(seed)
    nodes = 2**depth - 1
    weights = (rng.normal(size=(nodes, p)) * 10 ** rng.uniform(-3, 3, (nodes, 1))).astype(np.float32)
    bias = (weights @ rng.normal(size=p)).astype(np.float32)
    x = (100 * rng.normal(size=(n, p))).astype(np.float32)
    node = rng.integers(0, nodes, n)
    rest = np.einsum("np,np->n", weights[node, 1:].astype(np.float64), x[:, 1:]) + bias[node]
    x[:, 0] = -rest / weights[node, 0]
    values = rng.permutation(nodes + 1).astype(np.float32)
    weights, bias, values = map(jax.device_put, (weights, bias, values))  # which compiles nothing
    return ObliqueTree(weights, bias, Values(values)), x
