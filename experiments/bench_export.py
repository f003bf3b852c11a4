"""Speed of exported trees (C, ONNX, NumPy) beside predict, scikit-learn and XGBoost; and rows with a different leaf.

python -m experiments.bench_export [--rows 1000000] [--write]
"""

from collections.abc import Callable
import ctypes
from functools import partial
import os
from pathlib import Path
import runpy
import subprocess
import tempfile
import time
from typing import Any, NamedTuple

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from sklearn.tree import DecisionTreeRegressor

from experiments import benchmark
from experiments.bench_prediction import FEATURES, oblique
import jtrees

_ROWS = """#include "model.h"
void one_by_one(const double *x, int n, double *out) {
  for (int i = 0; i < n; i++) jtrees_predict(x + i * JTREES_FEATURES, out + i * JTREES_OUTPUTS);
}
void many(const double *x, int n, double *out) { jtrees_predict_rows(x, n, out); }
"""
_LEAF = """void leaf(const double *x, int n, int *out) {
  for (int i = 0; i < n; i++) out[i] = jtrees_leaf(x + i * JTREES_FEATURES);
}
"""
ROUNDS = 15


class Entry(NamedTuple):
    """Functions of rows, and the rows that each call gets."""

    predict: Callable[..., Any]
    leaf: Callable[..., Any] | None
    x: np.ndarray


def in_c(folder: Path, flags: str, precision: str, outputs: int = 1) -> dict[str, Callable[..., Any]]:
    """Returns the functions of a compiled header, on arrays; the function of leaves exists only for a single tree."""
    kind, library = {"double": np.float64, "float": np.float32}[precision], folder / f"rows{flags}{precision}.so"
    one_tree = "leaf(int tree" not in (folder / "model.h").read_text()
    (folder / "rows.c").write_text((_ROWS + _LEAF * one_tree).replace("double", precision))
    subprocess.run(["cc", "-std=c99", flags, "-shared", "-fPIC", folder / "rows.c", "-o", library], check=True)
    functions = ctypes.CDLL(str(library))

    def call(function: Any, dtype: Any, count: int, x: np.ndarray) -> np.ndarray:
        x, out = np.ascontiguousarray(x, kind), np.empty(len(x) * count, dtype)
        function(x.ctypes.data_as(ctypes.c_void_p), len(x), out.ctypes.data_as(ctypes.c_void_p))
        return out

    answers = {name: partial(call, getattr(functions, name), kind, outputs) for name in ("one_by_one", "many")}
    return answers | ({"leaf": partial(call, functions.leaf, np.int32, 1)} if one_tree else {})


def exported(tree: jtrees.ObliqueTree, folder: Path, x: np.ndarray) -> dict[str, Entry]:
    """Returns functions of rows for predictions and for leaves, by format."""
    wide, entries = x.astype(np.float64), {}
    for flags, precision in (("-O2", "double"), ("-O3", "double"), ("-O2", "float")):
        jtrees.export.to_c(tree, folder / "model.h", precision=precision)  # type: ignore[arg-type]
        functions, rows = in_c(folder, flags, precision), wide if precision == "double" else x
        if precision == "double":
            entries[f"C, row by row, {flags}"] = Entry(functions["one_by_one"], functions["leaf"], rows)
        entries[f"C, rows, {precision}, {flags}"] = Entry(functions["many"], functions["leaf"], rows)
    jtrees.export.to_onnx(tree, folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    jtrees.export.to_numpy(tree, folder / "model.py")
    written = runpy.run_path(str(folder / "model.py"))
    entries["ONNX"] = Entry(
        lambda x: session.run(["prediction"], {"x": x})[0], lambda x: session.run(["leaf"], {"x": x})[0], wide
    )
    entries["NumPy"] = Entry(written["predict"], written["leaf"], wide[:100_000])
    return entries


def main(arguments: list[str] | None = None) -> None:
    """Times the formats of each depth in alternation, which spreads other load of the machine over all formats."""
    options = benchmark.parse("bench_export", __doc__, arguments, rows=1_000_000)
    table = benchmark.Table("model", "million rows/s", "of CART's per core", "one row, µs", "rows with another leaf")
    rng = np.random.default_rng(0)
    x = rng.random((options.rows, FEATURES), dtype=np.float32)
    y = np.sin(5 * x[:20_000, 0]) + x[:20_000, 1] * x[:20_000, 2]

    def add(entries: dict[str, Entry], peer: str, suffix: str, expected: np.ndarray | None) -> None:
        times, processor = ({name: [] for name in entries} for _ in range(2))
        for i in range(ROUNDS + 1):
            for name, (predict, _, x) in entries.items():
                start = time.perf_counter(), time.process_time()
                predict(x)
                if i:  # the first call may compile
                    times[name].append(time.perf_counter() - start[0])
                    processor[name].append(time.process_time() - start[1])
        for name, (predict, leaf, x) in entries.items():
            rates = len(x) / np.array(times[name])
            faster = len(x) / min(processor[name]) * min(processor[peer]) / len(entries[peer].x)
            single = benchmark.spread(benchmark.seconds(lambda p=predict, x=x: p(x[:1]), 200), 1e6)
            differing = "" if leaf is None else f"{int((leaf(x) != expected[: len(x)]).sum())} of {len(x)}"  # type: ignore[index]
            table.add(f"{name}{suffix}", benchmark.spread(rates.tolist(), 1e-6), f"{faster:.2f}", single, differing)

    for depth in (4, 8, 12):
        tree = oblique(depth, rng)
        cart = DecisionTreeRegressor(max_depth=depth).fit(x[:20_000], y)
        with tempfile.TemporaryDirectory() as folder:
            entries = {"scikit-learn, CART": Entry(cart.predict, None, x), "jtrees": Entry(tree.predict, None, x)}
            entries |= exported(tree, Path(folder), x)
            add(entries, "scikit-learn, CART", f", depth {depth}", tree.leaf_index(x))
    if benchmark.installed("xgboost"):
        import xgboost  # type: ignore[import-not-found]

        boosted = xgboost.XGBRegressor(n_estimators=100).fit(x[:20_000], y)
        name = "XGBoost, 100 trees, depth 6"
        add({name: Entry(boosted.predict, None, x)}, name, "", None)
        table.rows[-1][2] = ""
    notes = (
        f"{options.rows} rows of {FEATURES} features in a NumPy array, float64 for exported files, else float32; "
        "answers in NumPy. C and CART run on one core; jtrees and ONNX use all cores. The time of one row is a call "
        "from Python by ctypes; within C, a row takes the inverse of the rate. `C, rows` calls "
        f"jtrees_predict_rows. The formats of a depth are timed in alternation, {ROUNDS} times. The third column "
        "divides the highest number of rows per second of processor time by CART's number at equal depth. Other load "
        "on the machine disturbs this ratio least. Leaves are compared with leaf_index. Median and half the "
        f"interquartile range. Mean load of the machine at the end: {os.getloadavg()[2]:.1f} processes."
    )
    benchmark.write(options, table, notes)


if __name__ == "__main__":
    benchmark.use_all_cores()
    main()
