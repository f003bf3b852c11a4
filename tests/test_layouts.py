"""A table gives the same model, bit for bit, however it lies in memory, and whatever holds it."""

import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees.leaves import Values
from jtrees.tables import checked_table
from jtrees.tables.dataset import held_out_table
from tests.nasty import LAYOUTS as IN_MEMORY

NAMES = ["flag", "size", "age"]

# A first column of 0 and 1, others of many values, all of them exact in float32.
_rng = np.random.default_rng(0)
X = np.column_stack([_rng.integers(0, 2, 128), _rng.normal(size=(128, 2))]).astype(np.float32).astype(np.float64)
Y = np.round(1e6 + np.stack([X[:, 1] + X[:, 0], X[:, 2] ** 2], axis=1), 1)
WEIGHT = _rng.integers(1, 4, 128).astype(float)
TREE = jtrees.ObliqueTree(_rng.normal(size=(3, 3)), np.zeros(3), Values(np.arange(4.0)))


def framed(dtypes):
    return lambda x: pd.DataFrame({name: x[:, i] for i, name in enumerate(NAMES)}).astype(dtypes)


LAYOUTS = IN_MEMORY | {
    "float32": lambda x: x.astype(np.float32),
    "float32, columns first": lambda x: np.asfortranarray(x, np.float32),
    "masked, nothing missing": lambda x: np.ma.masked_array(x, mask=np.zeros(x.shape, bool)),
}
FRAMES = {
    "several dtypes": framed({"flag": np.int8, "size": np.float32, "age": np.float64}),
    "nullable": framed({"flag": "boolean", "size": "Float32", "age": "Float64"}),
    "Arrow": framed({"flag": "int8[pyarrow]", "size": "float[pyarrow]", "age": "double[pyarrow]"}),
}


@pytest.mark.parametrize("layout", [*LAYOUTS, *FRAMES])
def test_a_layout_is_one_table_after_it_was_checked(layout):
    """Arrays in C order and native byte order have sums that round equally."""
    frame = LAYOUTS["frame"]
    convert = {"Arrow": lambda a: frame(a).astype("double[pyarrow]")}.get(layout, LAYOUTS.get(layout, frame))
    x = FRAMES.get(layout, convert)(X)
    table = checked_table(x, Y if "32" in layout else convert(Y), convert(WEIGHT), "regression")
    plain = checked_table(X, Y, WEIGHT, "regression")
    held_out = held_out_table(x, table.y, table)
    pairs = (table.x, plain.x), (table.y, plain.y), (table.weight, plain.weight), (held_out.x, plain.x)
    for array, expected in pairs:
        np.testing.assert_array_equal(array, expected)
        assert array.flags.c_contiguous and array.dtype.isnative
    np.testing.assert_array_equal(TREE.predict(x), TREE.predict(X))
