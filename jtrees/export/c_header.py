"""A tree or a forest as one C99 header."""

import os
import re
from typing import Any, Literal

from jtrees import io, validation
from jtrees.export.c_columns import Columns
from jtrees.export.c_text import released, table
from jtrees.export.encoding import fields_of
from jtrees.export.program import Program, program_of


def to_c(
    model: Any, path: str | os.PathLike, *, prefix: str = "jtrees", precision: Literal["double", "float"] = "double"
) -> None:
    """Writes a model as a C99 header that allocates nothing and calls nothing.

    With ``prefix="jtrees"`` it has ``int jtrees_leaf(const double *x)``, of a forest ``int jtrees_leaf(int tree, const
    double *x)``, the leaf of one row; ``void jtrees_predict(const double *x, double *out)``, its ``JTREES_OUTPUTS``
    predictions; and ``int jtrees_selftest(void)``, the number of rows of ten whose leaf or predictions differ from
    those recorded in the file. With ``-DJTREES_MAIN`` it is a program whose exit status is that number.

    For a model of DataFrames a row is a struct ``jtrees_row`` with a member for each column that is used: doubles for
    numbers, booleans (0 and 1) and dates (days since 1970-01-01), in which NaN is a missing value; and for text an int,
    a level of an enum, which ``jtrees_COLUMN_of(text)`` returns. Of arrays with missing values it is a ``const double
    *`` with NaN.

    Args:
      model: an :class:`jtrees.ObliqueTree`, a :class:`jtrees.Forest` of them, or either of a raw table
        (:class:`jtrees.data.FrameModel`).
      path: path of the file, which is written whole or not at all.
      prefix: what all names in the file begin with.
      precision: type of features and predictions; of raw tables that of predictions alone. Scores are in double
        precision for both.

    Raises:
      ValueError: for another model, a prefix that is not a name in C, or another precision.
      OSError: if the file cannot be written.
    """
    program = program_of(model)
    validation.check_choice("precision", precision, ("double", "float"))
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", prefix):
        raise ValueError(f"prefix must be a name in C, got {prefix!r}")
    with io.written_whole(path) as file:
        file.write(_header(program, prefix, precision).encode())


def _header(of: Program, prefix: str, precision: str) -> str:
    trees, nodes, p = of.weights.shape
    k, linear, bounded = len(of.offset), of.coefficients is not None, of.lower is not None
    given, rows = of.test_rows()
    tables: list[Any] = [("float", "weights", of.weights), ("float", "bias", of.bias)]
    tables += [("float", "intercept", of.intercept)]
    tables += [("float", "coefficients", of.coefficients)] if linear else []
    tables += [("float", "lower", of.lower), ("float", "upper", of.upper)] if bounded else []
    tables += [("double", "zero", of.zero), ("double", "offset", of.offset)]
    tables += [("int", "test_leaf", of.leaf(rows)), ("double", "test_out", of.predict(rows))]
    if of.columns is None:
        encode, row, tests, test_row, address = "", precision, table(precision, "test_x", rows), _TEST_ROW, "x"
    else:
        columns = Columns(fields_of(of.columns), named=of.columns.named)
        encode, row = columns.text, columns.row
        tests, test_row = columns.test_rows(given)
        address = "&x" if of.columns.named else "x"
    parts = {
        "COLUMNS": ""
        if row == "$_row"
        else f"  $$_COLUMNS = {p if of.columns is None else len(of.columns.columns)},\n",
        "TABLES": "\n".join(table(*each) for each in tables),
        "RELATIVE": _RELATIVE if of.columns is None else _RELATIVE_TO_ENCODED,
        "ENCODE": encode,
        "ROW": row,
        "TESTS": tests,
        "TEST_ROW": test_row,
        "ADDRESS": address,
        "LEAF": "tree, " if not of.single else "0, ",
        "TREE_ARGUMENT": "int tree, " if not of.single else "",
        "TEST_TREE": "t, " if not of.single else "",
        "TERMS": _TERMS if linear else "",
        "BOUNDS": _BOUNDS if bounded else "",
        "SOFTMAX": _SOFTMAX if of.softmax else "",
        "EXP": _EXP if of.softmax else "",
        "TOLERANCE": "1e-12" if precision == "double" else "1e-6",
        "WHAT": of.described(),
        "FEATURES": p,
        "TREES": trees,
        "NODES": nodes,
        "DEPTH": of.depth,
        "OUTPUTS": k,
        "DIVISOR": of.divisor,
        "REAL": precision,
        "TESTED": len(rows),
    }
    text = _TEMPLATE
    for key, part in parts.items():
        text = text.replace(f"@{key}@", str(part))
    return released(text.replace("$$", prefix.upper()).replace("$", prefix))


_TEMPLATE = """\
/* @WHAT@, written by jtrees.
 *
 * $_leaf: the leaf of a row, from 0. $_predict: its predictions. $_selftest: 0 if both are what jtrees
 * computed for ten rows. With -D$$_MAIN a program whose exit status is that of the self-test.
 */
#ifndef $$_H
#define $$_H

enum {
@COLUMNS@  $$_FEATURES = @FEATURES@,
  $$_TREES = @TREES@,
  $$_DEPTH = @DEPTH@,
  $$_OUTPUTS = @OUTPUTS@
};

@TABLES@

@ENCODE@
/* A row relative to the origin, in single precision, so that products with weights are exact. */
static inline void $_relative(const @ROW@ *x, double *z) {
@RELATIVE@}

/* The leaf of a relative row. Four partial sums, in the order of jtrees. */
static inline int $_descend(int tree, const double *z) {
  int node = 0;
  for (int level = 0; level < $$_DEPTH; level++) {
    const float *w = $_weights[tree][node];
    double a = $_bias[tree][node], b = 0, c = 0, d = 0;
    int j = 0;
    for (; j + 4 <= $$_FEATURES; j += 4) {
      a += w[j] * z[j];
      b += w[j + 1] * z[j + 1];
      c += w[j + 2] * z[j + 2];
      d += w[j + 3] * z[j + 3];
    }
    if (j < $$_FEATURES) a += w[j] * z[j];
    if (j + 1 < $$_FEATURES) b += w[j + 1] * z[j + 1];
    if (j + 2 < $$_FEATURES) c += w[j + 2] * z[j + 2];
    node = 2 * node + 1 + ((a + b) + (c + d) > 0);
  }
  return node - @NODES@;
}

static inline int $_leaf(@TREE_ARGUMENT@const @ROW@ *x) {
  double z[$$_FEATURES];
  $_relative(x, z);
  return $_descend(@LEAF@z);
}
@EXP@
static inline void $_predict(const @ROW@ *x, @REAL@ *out) {
  double z[$$_FEATURES], sum[$$_OUTPUTS];
  $_relative(x, z);
  for (int k = 0; k < $$_OUTPUTS; k++) sum[k] = 0;
  for (int tree = 0; tree < $$_TREES; tree++) {
    const int leaf = $_descend(tree, z);
    for (int k = 0; k < $$_OUTPUTS; k++) {
      double value = $_intercept[tree][leaf][k];
@TERMS@@BOUNDS@      sum[k] += value;
    }
  }
  for (int k = 0; k < $$_OUTPUTS; k++) sum[k] = sum[k] / @DIVISOR@ + $_offset[k];
@SOFTMAX@  for (int k = 0; k < $$_OUTPUTS; k++) out[k] = (@REAL@)sum[k];
}

@TESTS@
static inline int $_selftest(void) {
  int wrong = 0;
  for (int i = 0; i < @TESTED@; i++) {
@TEST_ROW@
    @REAL@ out[$$_OUTPUTS];
    int differs = 0;
    for (int t = 0; t < $$_TREES; t++) differs |= $_leaf(@TEST_TREE@@ADDRESS@) != $_test_leaf[i][t];
    $_predict(@ADDRESS@, out);
    for (int k = 0; k < $$_OUTPUTS; k++) {
      const double expected = $_test_out[i][k], error = out[k] - expected;
      const double most = @TOLERANCE@ * (1 + (expected < 0 ? -expected : expected));
      differs |= !(error <= most && error >= -most);
    }
    wrong += differs;
  }
  return wrong;
}

#ifdef $$_MAIN
int main(void) { return $_selftest(); }
#endif

#endif
"""

_TEST_ROW = "    const @REAL@ *x = $_test_x[i];"

_RELATIVE = """\
  for (int j = 0; j < $$_FEATURES; j++) z[j] = (float)((double)x[j] - $_zero[j]);
"""

_RELATIVE_TO_ENCODED = """\
  double features[$$_FEATURES];
  $_encode(x, features);
  for (int j = 0; j < $$_FEATURES; j++) z[j] = (float)(features[j] - $_zero[j]);
"""

_TERMS = """\
      for (int j = 0; j < $$_FEATURES; j++) value += $_coefficients[tree][leaf][k][j] * z[j];
"""

_BOUNDS = """\
      if (value < $_lower[tree][leaf][k]) value = $_lower[tree][leaf][k];
      if (value > $_upper[tree][leaf][k]) value = $_upper[tree][leaf][k];
"""

_SOFTMAX = """\
  double most = sum[0], total = 0;
  for (int k = 1; k < $$_OUTPUTS; k++) most = sum[k] > most ? sum[k] : most;
  for (int k = 0; k < $$_OUTPUTS; k++) total += sum[k] = $_exp(sum[k] - most);
  for (int k = 0; k < $$_OUTPUTS; k++) sum[k] /= total;
"""

# exp(v) = 2^-n exp(r) with |r| <= log(2) / 2, where the series to the 13th power has a relative error below 1e-16; n
# log(2) is subtracted in two parts, the first exact.
_EXP = """
/* exp(v) for v <= 0. */
static inline double $_exp(double v) {
  if (v < -700) return 0;
  int n = (int)(0.5 - v * 1.4426950408889634);
  const double r = (v + n * 0.69314718036912382) + n * 1.9082149292705877e-10;
  double sum = 1, half = 0.5;
  for (int i = 13; i > 0; i--) sum = 1 + sum * r / i;
  for (; n; n >>= 1) {
    if (n & 1) sum *= half;
    half *= half;
  }
  return sum;
}
"""
