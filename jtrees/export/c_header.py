"""Writes a tree or a forest as a single C99 header."""

import os
import re
from typing import Any, Literal

import numpy as np

from jtrees import io, validation
from jtrees.export.c_columns import NO_FAST_MATH, Columns, Source
from jtrees.export.program import Program, fields_of, program_of


def to_c(
    model: Any, path: str | os.PathLike, *, prefix: str = "jtrees", precision: Literal["double", "float"] = "double"
) -> None:
    """Writes a model as a C99 header without memory allocation or library calls.

    If the prefix is ``"jtrees"``, the header has four functions:

    - ``int jtrees_leaf(const double *x)`` returns the leaf of a row. For a forest, the function is
      ``int jtrees_leaf(int tree, const double *x)``.
    - ``void jtrees_predict(const double *x, double *out)`` writes the ``JTREES_OUTPUTS`` predictions of a row.
    - ``void jtrees_predict_rows(const double *x, long n, double *out)`` writes the predictions of n consecutive rows.
      They equal the predictions of ``jtrees_predict`` bit for bit, and the function takes less time.
    - ``int jtrees_selftest(void)`` returns the number of test rows, out of ten, whose leaf or predictions differ from
      the values in the file.

    The option ``-DJTREES_MAIN`` makes the header a program. Its exit status is the result of the self-test.

    For a model of DataFrames, a row is a struct ``jtrees_row`` with a member for each column that the model uses.
    Numbers, booleans (0 and 1) and dates (days since 1970-01-01) are doubles. NaN is a missing value, and so are the
    numbers that mean one for ``predict``. Text is an int, a level of an enum. ``jtrees_COLUMN_of(text)`` returns the
    level of a canonical text: ``1``, not ``1.0``. For a model of arrays, a row is a ``const double *`` with NaN for
    missing values, which a tree without ``medians`` does not read. If a model reads NaN, compilers refuse its header
    under ``-ffast-math``, which would ignore NaN.

    Args:
      model: an :class:`jtrees.ObliqueTree`, a :class:`jtrees.Forest` of oblique trees, or a model of raw tables that
        holds either (:class:`jtrees.tables.FrameModel`).
      path: path of the file. The file is written completely or not at all.
      prefix: prefix of all names in the file.
      precision: type of features and predictions. For raw tables, only predictions have this type. For both types, a
        score is computed in double precision if single precision does not decide its sign.

    Raises:
      ValueError: for any other model, for a prefix that is not a name in C, or for an unknown precision.
      OSError: if the file cannot be written.

    Example:
      >>> leaves = jtrees.leaves.Values(jnp.array([0.0, 10.0]))
      >>> tree = jtrees.ObliqueTree(jnp.array([[1.0, 2.0]]), jnp.array([-1.0]), leaves)
      >>> jtrees.export.to_c(tree, "tree.h", prefix="tree")
      >>> "int tree_leaf(const double *x)" in open("tree.h").read()
      True
    """
    program = program_of(model)
    validation.check_choice("precision", precision, ("double", "float"))
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", prefix):
        raise ValueError(f"prefix must be a name in C, got {validation.quoted(prefix)}")
    io.write_file(path, _header(program, Source(prefix), precision))


def _header(program: Program, source: Source, precision: str) -> str:
    trees, nodes, p = program.weights.shape
    padded = -(-p // 4) * 4
    reach, reached = _reach(program, padded)
    test_rows, rows = program.test_rows()
    tables = program.arrays | {"reach": reach, "test_out": program.predict(rows), "test_leaf": program.leaf(rows)}
    kinds = dict.fromkeys(["weights", "bias", "coefficients", "reach"], "float") | {"test_leaf": "int"}
    templates = {
        "LINK": _LINKS[program.link],
        "EXP": _EXP if program.link in ("softmax", "exp") else "",
        "TERMS": "" if program.coefficients is None else _TERMS,
        "BOUNDS": "" if program.lower is None else _BOUNDS,
    }
    parts = {key: source.fill(text) for key, text in templates.items()}
    parts |= _parts_of_rows(program, source, precision, test_rows)
    parts |= {
        "TABLES": "\n".join(
            source.table(kinds.get(name, "double"), name, values, padded if name == "weights" else None)
            for name, values in tables.items()
            if values is not None
        ),
        "TREE_ARGUMENT": "" if program.single else "int tree, ",
        "LEAF": "0, " if program.single else "tree, ",
        "TEST_TREE": "" if program.single else "t, ",
        "REACHED": "" if reached else "0 && ",
        "BLOCK": min(16, max(1, 2**14 // padded)),
        "PADDED": padded,
        "DIVISOR": program.divisor,
        "TOLERANCE": "1e-12" if precision == "double" else "1e-6",
        "WHAT": program.described(),
        "FEATURES": p,
        "TREES": trees,
        "NODES": nodes,
        "DEPTH": program.depth,
        "OUTPUTS": len(program.offset),
        "REAL": precision,
        "TESTED": len(rows),
    }
    return source.fill(_TEMPLATE, **parts)


def _parts_of_rows(program: Program, source: Source, precision: str, test_rows: Any) -> dict[str, Any]:
    """Returns the parts of the template that depend on the type of a row: an array or a struct."""
    encoder = program.encoder
    parts = {"ROW": precision, "NEXT": source.fill("$$_COLUMNS"), "ADDRESS": "x", "FEATURES_OF": "", "ENCODE": ""}
    width = len(program.zero) if encoder is None else len(encoder.schema.columns)
    parts["COLUMNS"] = source.fill("  $$_COLUMNS = @WIDTH@,\n", WIDTH=width)
    if encoder is None:
        parts |= {"FEATURE": "(double)x[j]", "TESTS": source.table(precision, "test_x", test_rows)}
        parts["TEST_ROW"] = source.fill("    const @REAL@ *x = $_test_x[i];", REAL=precision)
        if program.medians is not None:
            parts["FEATURE"] = source.fill("(x[j] != x[j] ? $_medians[j] : (double)x[j])")
            parts["ENCODE"] = NO_FAST_MATH
        return parts
    columns = Columns(source, fields_of(encoder), named=encoder.schema.named)
    parts["TESTS"], parts["TEST_ROW"] = columns.test_rows(test_rows)
    parts |= {"ROW": columns.row, "FEATURES_OF": source.fill(_ENCODED), "FEATURE": "features[j]"}
    parts["ENCODE"] = columns.text
    return parts | ({"COLUMNS": "", "NEXT": "1", "ADDRESS": "&x"} if encoder.schema.named else {})


def _reach(program: Program, padded: int) -> tuple[np.ndarray, bool]:
    """Returns the square of the largest rounding error of each score, ``(trees, nodes)``, and whether all are valid.

    A score in single precision is a sum of products w z. The first product is the product of the bias and 1. Each
    product passes through at most c = padded / 4 + 4 roundings. The error is therefore at most ``c u |w| |z|`` with
    u = 2^-24, or twice that number with errors of higher order. The square of the error is below the returned value
    times ``1 + |z|^2``. The value is larger where squares would underflow. Where sums could overflow, the value is not
    a bound.
    """
    weights, bias = program.weights.astype(np.float64), program.bias.astype(np.float64)
    squares = np.square(weights).sum(-1) + np.square(bias)
    largest = 1e36  # largest sum of squares: |w| |z| overflows only if |z|^2 does
    reach = np.maximum((2 * (padded / 4 + 4) * 2.0**-24) ** 2 * squares, 1e-30)
    return np.where(squares < largest, reach, 1), bool(np.all(squares < largest))


_TEMPLATE = """\
/* @WHAT@, written by jtrees.
 *
 * $_leaf: the leaf of a row, from 0. $_predict: the predictions of a row. $_predict_rows: the predictions of
 * n rows, in less time. $_selftest: 0 if leaves and predictions of ten rows equal the values of jtrees. The
 * option -D$$_MAIN makes this file a program. Its exit status is the result of the self-test.
 */
#ifndef $$_H
#define $$_H

enum {
@COLUMNS@  $$_FEATURES = @FEATURES@,
  $$_PADDED = @PADDED@, /* a multiple of four */
  $$_TREES = @TREES@,
  $$_DEPTH = @DEPTH@,
  $$_OUTPUTS = @OUTPUTS@,
  $$_BLOCK = @BLOCK@ /* rows evaluated together */
};

@TABLES@

@ENCODE@
/* The score of a split in double precision, where products are exact. Four partial sums, in the order of jtrees. */
static inline double $_score(int tree, int node, const float *z) {
  const float *w = $_weights[tree][node];
  double a = $_bias[tree][node], b = 0, c = 0, d = 0;
  for (int j = 0; j < $$_PADDED; j += 4) {
    a += (double)w[j] * z[j];
    b += (double)w[j + 1] * z[j + 1];
    c += (double)w[j + 2] * z[j + 2];
    d += (double)w[j + 3] * z[j + 3];
  }
  return (a + b) + (c + d);
}
@EXP@
/* Predictions from the sums over all trees. */
static inline void $_finish(double *sum, @REAL@ *out) {
  for (int k = 0; k < $$_OUTPUTS; k++) sum[k] = sum[k] / @DIVISOR@ + $_offset[k];
@LINK@  for (int k = 0; k < $$_OUTPUTS; k++) out[k] = (@REAL@)sum[k];
}

/* first + w z, in single precision, in any order. */
static inline float $_dot(const float *w, const float *z, float first) {
#ifdef __GNUC__
  typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
  four sum = {first, 0, 0, 0};
  for (int j = 0; j < $$_PADDED; j += 4) sum += *(const four *)(w + j) * *(const four *)(z + j);
#else
  float sum[4] = {first, 0, 0, 0};
  for (int j = 0; j < $$_PADDED; j += 4)
    for (int k = 0; k < 4; k++) sum[k] += w[j + k] * z[j + k];
#endif
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* A row relative to the origin, in single precision. Returns 1 + |z|^2. */
static inline float $_relative(const @ROW@ *x, float *z) {
@FEATURES_OF@  for (int j = 0; j < $$_FEATURES; j++) z[j] = (float)(@FEATURE@ - $_zero[j]);
  for (int j = $$_FEATURES; j < $$_PADDED; j++) z[j] = 0;
  return $_dot(z, z, 1);
}

/* Whether a row goes right. A score is in double precision if rounding may decide its sign in single precision. */
static inline int $_right(int tree, int node, const float *z, float size) {
  const float score = $_dot($_weights[tree][node], z, $_bias[tree][node]);
  if (@REACHED@score * score > $_reach[tree][node] * size) return score > 0;
  return $_score(tree, node, z) > 0;
}

/* The leaf of a relative row. */
static inline int $_descend(int tree, const float *z, float size) {
  int node = 0;
  for (int level = 0; level < $$_DEPTH; level++) node = 2 * node + 1 + $_right(tree, node, z, size);
  return node - @NODES@;
}

static inline int $_leaf(@TREE_ARGUMENT@const @ROW@ *x) {
  float z[$$_PADDED];
  const float size = $_relative(x, z);
  return $_descend(@LEAF@z, size);
}

/* Adds the outputs of a leaf. */
static inline void $_add(int tree, int leaf, const float *z, double *sum) {
  (void)z;
  for (int k = 0; k < $$_OUTPUTS; k++) {
    double value = $_intercept[tree][leaf][k];
@TERMS@@BOUNDS@    sum[k] += value;
  }
}

static inline void $_predict(const @ROW@ *x, @REAL@ *out) {
  float z[$$_PADDED];
  double sum[$$_OUTPUTS] = {0};
  const float size = $_relative(x, z);
  for (int tree = 0; tree < $$_TREES; tree++) $_add(tree, $_descend(tree, z, size), z, sum);
  $_finish(sum, out);
}

/* Prefetches memory that is read soon. Every address is allowed. */
static inline void $_prefetch(const char *address) {
#ifdef __GNUC__
  __builtin_prefetch(address);
#else
  (void)address;
#endif
}

/* The rows of a block descend together, level by level, because a processor works on independent rows in parallel.
   Meanwhile the rows of the next block are prefetched, a part of each row on every level. */
static inline void $_predict_rows(const @ROW@ *x, long n, @REAL@ *out) {
  float z[$$_BLOCK][$$_PADDED], size[$$_BLOCK];
  double sum[$$_BLOCK][$$_OUTPUTS];
  int node[$$_BLOCK];
  for (; n > 0; n -= $$_BLOCK) {
    const int rows = n < $$_BLOCK ? (int)n : $$_BLOCK;
    for (int i = 0; i < rows; i++, x += @NEXT@) {
      size[i] = $_relative(x, z[i]);
      for (int k = 0; k < $$_OUTPUTS; k++) sum[i][k] = 0;
    }
    for (int tree = 0; tree < $$_TREES; tree++) {
      for (int i = 0; i < rows; i++) node[i] = 0;
      for (int level = 0; level < $$_DEPTH; level++)
        for (int i = 0; i < rows; i++) {
          $_prefetch((const char *)(x + i * @NEXT@) + level * (sizeof(*x) * @NEXT@ / $$_DEPTH));
          node[i] = 2 * node[i] + 1 + $_right(tree, node[i], z[i], size[i]);
        }
      for (int i = 0; i < rows; i++) $_add(tree, node[i] - @NODES@, z[i], sum[i]);
    }
    for (int i = 0; i < rows; i++, out += $$_OUTPUTS) $_finish(sum[i], out);
  }
}
@TESTS@
static inline int $_differs(double value, double expected) {
  const double error = value - expected, most = @TOLERANCE@ * (1 + (expected < 0 ? -expected : expected));
  return !(error <= most && error >= -most);
}

static inline int $_selftest(void) {
  int wrong = 0;
  for (int i = 0; i < @TESTED@; i++) {
@TEST_ROW@
    @REAL@ out[$$_OUTPUTS], again[$$_OUTPUTS];
    int differs = 0;
    for (int t = 0; t < $$_TREES; t++) differs |= $_leaf(@TEST_TREE@@ADDRESS@) != $_test_leaf[i][t];
    $_predict(@ADDRESS@, out);
    $_predict_rows(@ADDRESS@, 1, again);
    for (int k = 0; k < $$_OUTPUTS; k++)
      differs |= $_differs(out[k], $_test_out[i][k]) | $_differs(again[k], $_test_out[i][k]);
    wrong += differs;
  }
  return wrong;
}

#ifdef $$_MAIN
int main(void) { return $_selftest(); }
#endif

#endif
"""

_ENCODED = """\
  double features[$$_FEATURES];
  $_encode(x, features);
"""

_TERMS = """\
    for (int j = 0; j < $$_FEATURES; j++) value += (double)$_coefficients[tree][leaf][k][j] * z[j];
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

_SORTED = """\
  for (int k = 1; k < $$_OUTPUTS; k++) {
    const double value = sum[k];
    int place = k;
    for (; place && sum[place - 1] > value; place--) sum[place] = sum[place - 1];
    sum[place] = value;
  }
"""

_LINKS = {
    "identity": "",
    "softmax": _SOFTMAX,
    "exp": "  for (int k = 0; k < $$_OUTPUTS; k++) sum[k] = $_exp(sum[k]);\n",
    "sorted": _SORTED,
}

# exp(v) = 2^n exp(r) with |r| <= log(2) / 2. For these r, the series to the 13th power has a relative error below
# 1e-16. n log(2) is subtracted in two parts, and the first part is exact. The base of the power is 2 or 1/2, so that
# intermediate results do not overflow.
_EXP = """
/* exp(v): 0 below -708, infinite above 709. */
static inline double $_exp(double v) {
  if (v < -708) return 0;
  if (!(v <= 709)) return v * 1e308; /* or NaN */
  const double sign = v < 0 ? -1 : 1;
  int n = (int)(sign * v * 1.4426950408889634 + 0.5);
  const double r = (v - sign * n * 0.69314718036912382) - sign * n * 1.9082149292705877e-10;
  double sum = 1, power = v < 0 ? 0.5 : 2;
  for (int i = 13; i > 0; i--) sum = 1 + sum * r / i;
  for (; n; n >>= 1) {
    if (n & 1) sum *= power;
    power *= power;
  }
  return sum;
}
"""
