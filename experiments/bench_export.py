"""Speed of exported trees, C, ONNX and NumPy, beside predict, scikit-learn and XGBoost; and rows whose leaf differs.

python -m experiments.bench_export [--rows 1000000] [--write]
"""

from collections.abc import Callable
import ctypes
from pathlib import Path
import runpy
import subprocess
import tempfile
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from sklearn.tree import DecisionTreeRegressor

from experiments import benchmark
from experiments.bench_prediction import FEATURES, oblique
import jtrees

_ROWS = """#include "model.h"
void predict(const double *x, int n, double *out) {
  for (int i = 0; i < n; i++) jtrees_predict(x + i * JTREES_FEATURES, out + i);
}
void leaf(const double *x, int n, int *out) {
  for (int i = 0; i < n; i++) out[i] = jtrees_leaf(x + i * JTREES_FEATURES);
}
"""


def exported(tree: jtrees.ObliqueTree, folder: Path) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Functions of rows for predictions and for leaves, by format."""
    jtrees.export.to_c(tree, folder / "model.h")
    (folder / "rows.c").write_text(_ROWS)
    subprocess.run(
        ["cc", "-std=c99", "-O2", "-shared", "-fPIC", folder / "rows.c", "-o", folder / "rows.so"], check=True
    )
    library = ctypes.CDLL(str(folder / "rows.so"))

    def in_c(function: Any, dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
        def call(x: np.ndarray) -> np.ndarray:
            out = np.empty(len(x), dtype)
            function(*(a.ctypes.data_as(ctypes.c_void_p) if isinstance(a, np.ndarray) else a for a in (x, len(x), out)))
            return out

        return call

    jtrees.export.to_onnx(tree, folder / "model.onnx")
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    jtrees.export.to_numpy(tree, folder / "model.py")
    written = runpy.run_path(str(folder / "model.py"))
    return {
        "C, one core": (in_c(library.predict, np.float64), in_c(library.leaf, np.int32)),
        "ONNX": (
            lambda x: session.run(["prediction"], {"x": x})[0],
            lambda x: session.run(["leaf"], {"x": x})[0],
        ),
        "NumPy": (written["predict"], written["leaf"]),
    }


def main() -> None:
    """Times each format on the same array, one after the other."""
    parser = benchmark.parser(__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.random((options.rows, FEATURES), dtype=np.float32)
    y, wide = np.sin(5 * x[:20_000, 0]) + x[:20_000, 1] * x[:20_000, 2], x.astype(np.float64)
    rows = []

    def add(name: str, predict: Callable[..., Any], x: np.ndarray, differing: str) -> None:
        rates, single = [], []
        first = benchmark.seconds(lambda: predict(x), 1)[0]
        for _ in range(7 if first < 1 else 3):
            rates.append(len(x) / benchmark.seconds(lambda: predict(x), 1)[0])
            single += benchmark.seconds(lambda: predict(x[:1]), 50)
        rows.append([name, benchmark.spread(rates, 1e-6), benchmark.spread(single, 1e6), differing])
        print(*rows[-1], flush=True)

    for depth in (4, 8, 12):
        tree = oblique(depth, rng)
        expected = tree.leaf_index(x)
        add(f"jtrees, depth {depth}", tree.predict, x, "")
        with tempfile.TemporaryDirectory() as folder:
            for name, (predict, leaf) in exported(tree, Path(folder)).items():
                some = slice(None if name != "NumPy" else 100_000)
                differing = int((leaf(wide[some]) != expected[some]).sum())
                add(f"{name}, depth {depth}", predict, wide[some], f"{differing} of {len(wide[some])}")
    for depth in (8, 12):
        cart = DecisionTreeRegressor(max_depth=depth).fit(x[:20_000], y)
        add(f"scikit-learn, CART, depth {depth}", cart.predict, x, "")
    if benchmark.installed("xgboost"):
        import xgboost  # type: ignore[import-not-found]

        add("XGBoost, 100 trees, depth 6", xgboost.XGBRegressor(n_estimators=100).fit(x[:20_000], y).predict, x, "")
    header = ["model", "million rows/s", "one row, µs", "rows with another leaf"]
    notes = (
        f"{options.rows} rows of {FEATURES} features in a NumPy array, float64 for exported files, else float32; "
        "answers in NumPy. C is compiled with -O2 and runs on one core; the time of one row is that of a call from "
        "Python by ctypes, of a row within C the inverse of the rate. jtrees and ONNX use all cores. Leaves are "
        "compared with those of leaf_index. Median and half the interquartile range."
    )
    arguments = "" if options.rows == parser.get_default("rows") else f"--rows {options.rows}"
    benchmark.write("bench_export", arguments, header, rows, notes, committed=options.write)


if __name__ == "__main__":
    benchmark.use_all_cores()
    main()
