"""A tree or a forest as a Python file that needs NumPy alone."""

import os
from typing import Any

import numpy as np

from jtrees import io
from jtrees.export.program import Program, program_of


def to_numpy(model: Any, path: str | os.PathLike) -> None:
    """Writes a model as a Python file with ``leaf(x)`` and ``predict(x)``; run as a program it tests itself.

    Args:
      model: an :class:`jtrees.ObliqueTree`, or a :class:`jtrees.Forest` of them.
      path: path of the file, which is written whole or not at all.

    Raises:
      ValueError: for another model.
      OSError: if the file cannot be written.
    """
    program = program_of(model)
    with io.written_whole(path) as file:
        file.write(_source(program).encode())


def _source(of: Program) -> str:
    rows = of.test_rows()
    out, leaf = of.predict(rows), of.leaf(rows)
    arrays = [("WEIGHTS", of.weights), ("BIAS", of.bias), ("INTERCEPT", of.intercept)]
    arrays += [("COEFFICIENTS", of.coefficients), ("LOWER", of.lower), ("UPPER", of.upper)]
    arrays += [("ZERO", of.zero), ("OFFSET", of.offset), ("TEST_X", rows)]
    arrays += [("TEST_LEAF", leaf[:, 0] if of.single else leaf), ("TEST_OUT", out[:, 0] if of.scalar else out)]
    tables = "\n".join(f"{name} = {_array(values)}" for name, values in arrays)
    parts = {
        "WHAT": of.described(),
        "LEAVES": "(n,)" if of.single else "(n, trees)",
        "OUTPUTS": "(n,)" if of.scalar else "(n, k)",
        "TABLES": tables,
        "DIVISOR": of.divisor,
        "SOFTMAX": _SOFTMAX if of.softmax else "",
        "OF_LEAF": "leaf[:, 0]" if of.single else "leaf",
        "OF_OUT": "out[:, 0]" if of.scalar else "out",
    }
    text = _TEMPLATE
    for key, part in parts.items():
        text = text.replace(f"@{key}@", str(part))
    return text


def _array(values: np.ndarray | None) -> str:
    if values is None:
        return "None"
    # Numbers of float32 as the shortest text that reads back as themselves.
    lists = np.vectorize(str, otypes=[object])(values).tolist()
    listed = str(lists).replace("'", "").replace("], [", "],\n[")
    return f"np.array({listed}, np.{values.dtype})"


_TEMPLATE = '''\
"""@WHAT@, written by jtrees.

leaf(x): the leaf of each row, @LEAVES@, from 0; predict(x): predictions, @OUTPUTS@, in double precision.
"""

import numpy as np

@TABLES@


def _leaves(x):
    x = np.asarray(x, np.float64)
    if x.ndim != 2 or x.shape[1] != len(ZERO):
        raise ValueError(f"x must have shape (n, {len(ZERO)}), got {x.shape}")
    z = (x - ZERO).astype(np.float32)  # products of float32 numbers are exact in double precision
    leaf = np.empty((len(x), len(BIAS)), np.int64)
    for tree, (weights, bias) in enumerate(zip(WEIGHTS, BIAS)):
        node = np.zeros(len(x), np.int64)
        while node.size and node[0] < len(bias):
            sums = np.zeros((4, len(x)))
            sums[0] = bias[node]
            for j in range(len(ZERO)):
                sums[j % 4] += np.multiply(weights[node, j], z[:, j], dtype=np.float64)
            node = 2 * node + 1 + ((sums[0] + sums[1]) + (sums[2] + sums[3]) > 0)
        leaf[:, tree] = node - len(bias)
    return z, leaf


def leaf(x):
    _, leaf = _leaves(x)
    return @OF_LEAF@


def predict(x):
    z, leaf = _leaves(x)
    out = np.zeros((len(z), len(OFFSET)))
    for tree in range(len(BIAS)):
        at = leaf[:, tree]
        value = INTERCEPT[tree, at].astype(np.float64)
        if COEFFICIENTS is not None:
            value += np.einsum("nkp,np->nk", COEFFICIENTS[tree, at], z.astype(np.float64))
        if LOWER is not None:
            value = np.clip(value, LOWER[tree, at], UPPER[tree, at])
        out += value
    out = out / @DIVISOR@ + OFFSET
@SOFTMAX@    return @OF_OUT@


if __name__ == "__main__":
    assert (leaf(TEST_X) == TEST_LEAF).all()
    np.testing.assert_allclose(predict(TEST_X), TEST_OUT, rtol=1e-12, atol=1e-12)
'''

_SOFTMAX = """\
    out = np.exp(out - out.max(1, keepdims=True))
    out /= out.sum(1, keepdims=True)
"""
