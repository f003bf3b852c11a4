"""What a header of soft trees has in place of hard ones: scaled features, and steps that send a row both ways."""

from typing import Any, NamedTuple

import numpy as np

from jtrees import losses, topology
from jtrees.data import Columns, FrameModel
from jtrees.export.program import rows_about
from jtrees.losses.base import linked
from jtrees.methods import EnsembleModel

_LOGISTIC = 6.0  # the logistic step of width gamma is the sigmoid of 6 z / gamma


class SoftProgram(NamedTuple):
    """Soft trees whose outputs add up, in double precision.

    With ``z = float32(clip((x - zero - shift) / scale, -most, most))``, a sample goes right at node j of a tree with
    probability ``step(weights[j] @ z + bias[j])``, and a tree predicts the mean of its leaves. The result is the sum
    over the trees times ``unit`` plus ``offset``, under the link.

    Attributes:
      weights: float32, ``(trees, nodes, p)``; of constant columns 0.
      bias: float32, ``(trees, nodes)``.
      leaves: float32, ``(trees, leaves, k)``.
      gamma: width of the step.
      logistic: whether steps are logistic, else smooth.
      zero: origin of the features, ``(p,)``.
      shift: centres of the features relative to the origin, ``(p,)``.
      scale: their units, ``(p,)``.
      most: largest absolute value of scaled features.
      unit: ``(k,)``; under a softmax or an exponential 1.
      offset: ``(k,)``; under a softmax 0.
      link: from that to predictions, as in :class:`jtrees.Forest`.
      scalar: whether predictions are ``(n,)``, else ``(n, k)``.
      columns: the columns of a raw table, which become the features, or None.
    """

    weights: np.ndarray
    bias: np.ndarray
    leaves: np.ndarray
    gamma: float
    logistic: bool
    zero: np.ndarray
    shift: np.ndarray
    scale: np.ndarray
    most: float
    unit: np.ndarray
    offset: np.ndarray
    link: losses.Link
    scalar: bool
    columns: Columns | None

    @property
    def depth(self) -> int:
        """Depth of the trees."""
        return topology.depth_of(self.bias.shape[1])

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Returns predictions of features in double precision, ``(n, k)``."""
        z = ((np.asarray(x, np.float64) - self.zero) - self.shift) / self.scale
        z = np.clip(z, -self.most, self.most).astype(np.float32).astype(np.float64)
        out = np.zeros((len(z), len(self.offset)))
        for weights, bias, leaves in zip(self.weights, self.bias, self.leaves, strict=True):
            u = (z @ weights.T.astype(np.float64) + bias) / self.gamma
            right = _logistic(_LOGISTIC * u) if self.logistic else _smooth(u)
            reach = np.ones((len(z), 1))
            for level in range(self.depth):
                there = right[:, 2**level - 1 : 2 ** (level + 1) - 1]
                reach = np.stack([reach * (1 - there), reach * there], axis=2).reshape(len(z), -1)
            out += reach @ leaves.astype(np.float64)
        return linked(self.link, out * self.unit + self.offset)

    def test_rows(self) -> tuple[Any, np.ndarray]:
        """Returns rows for the self-test of a file, and their features: see :func:`rows_about`."""
        return rows_about(self.zero + self.shift, self.scale, self.columns)

    def described(self) -> str:
        """Returns a line that says what the model is."""
        trees, _, p = self.weights.shape
        step = "logistic" if self.logistic else "smooth"
        of = f"depth {self.depth} with {p} features, {step} steps, {len(self.offset)} outputs"
        return f"{trees} soft trees of {of}"


def _logistic(v: np.ndarray) -> np.ndarray:
    small = np.exp(-np.abs(v))
    return np.where(v < 0, small, 1) / (1 + small)


def _smooth(u: np.ndarray) -> np.ndarray:
    v = np.clip(u + 0.5, 0, 1)
    return v * v * (3 - 2 * v)


def soft_program_of(model: Any) -> SoftProgram | None:
    """Returns the program of soft trees, also of a raw table; None of other models.

    Raises:
      ValueError: for weights of another shape or type.
    """
    columns = None
    if isinstance(model, FrameModel):
        model, columns = model.model, model.columns
    if not isinstance(model, EnsembleModel):
        return None
    network, scaling, link = model.network, model.scaling, model.task.link_name
    weights = np.asarray(network.params.weights)
    if weights.ndim != 3 or weights.dtype != np.float32:
        shape = f"{weights.dtype}, of shape {weights.shape}"
        raise ValueError(f"model must have float32 weights (trees, nodes, p), got {shape}")
    leaves = np.asarray(network.params.leaf_values)
    scalar = leaves.ndim == 2
    leaves = leaves[..., None] if scalar else leaves
    p, k = model.features, leaves.shape[-1]
    zero, shift, scale, most = np.zeros(p), np.zeros(p), np.ones(p), float(np.finfo(np.float32).max)
    unit, offset = np.ones(k), np.zeros(k)
    if scaling is not None:
        origin = np.float32(0) if scaling.origin is None else np.asarray(scaling.origin.x)[0]
        zero = zero + origin
        shift, scale, most = np.asarray(scaling.x_center, np.float64) - zero, scaling.x_unit + zero * 0, scaling.x_most
        weights = np.where(scaling.constant, np.float32(0), weights)
        if link == "exp":
            offset = offset + np.log(scaling.y_unit)  # a unit of predictions is an offset of outputs
        elif scaling.y_low is not None:
            unit, offset = unit * scaling.y_unit, offset + scaling.y_low
    return SoftProgram(
        weights,
        np.asarray(network.params.bias),
        leaves,
        float(network.gamma),
        network.step == "logistic",
        zero,
        shift,
        scale,
        float(most),
        unit,
        offset,
        link,
        scalar,
        columns,
    )


def parts_of(of: SoftProgram, tables: list[Any]) -> dict[str, Any]:
    """Returns what the template of a header has for soft trees, and adds their tables."""
    tables += [("float", "leaves", of.leaves), ("double", "shift", of.shift)]
    tables += [("double", "scale", of.scale), ("double", "unit", of.unit)]
    step = _LOGISTIC_STEP if of.logistic else _SMOOTH_STEP
    numbers = {"GAMMA": repr(of.gamma), "FACTOR": repr(_LOGISTIC / of.gamma), "MOST": repr(of.most)}
    own = {"SAYS": _SAYS, "BODY": _BODY, "STEP": step, "TEST_LEAVES": "", "BLOCK": 1, "DIVISOR": 1}
    return own | numbers


_SAYS = """\
 * $_predict: the predictions of a row. $_predict_rows: those of n rows. $_selftest: 0 if they are what
 * jtrees computed for ten rows. With -D$$_MAIN a program whose exit status is that of the self-test.
"""

_BODY = """\
/* A scaled row, in single precision. */
static inline void $_scaled(const @ROW@ *x, float *z) {
@FEATURES_OF@  for (int j = 0; j < $$_FEATURES; j++) {
    const double v = ((@FEATURE@ - $_zero[j]) - $_shift[j]) / $_scale[j];
    z[j] = (float)(v > @MOST@ ? @MOST@ : v < -@MOST@ ? -@MOST@ : v);
  }
  for (int j = $$_FEATURES; j < $$_PADDED; j++) z[j] = 0;
}

/* The probability that a row goes right. */
static inline double $_step(double score) {
@STEP@}

/* Adds the mean of a tree's leaves. A path is followed to the left; where it parts, the right is kept for later. */
static inline void $_add(int tree, const float *z, double *sum) {
  int nodes[$$_DEPTH + 1], kept = 1;
  double reach[$$_DEPTH + 1];
  nodes[0] = 0;
  reach[0] = 1;
  while (kept) {
    int node = nodes[--kept];
    double here = reach[kept];
    while (node < @NODES@) {
      const double right = $_step($_score(tree, node, z));
      node = 2 * node + 1;
      if (right >= 1) {
        node++;
      } else if (right > 0) {
        nodes[kept] = node + 1;
        reach[kept++] = here * right;
        here *= 1 - right;
      }
    }
    for (int k = 0; k < $$_OUTPUTS; k++) sum[k] += here * $_leaves[tree][node - @NODES@][k];
  }
}

static inline void $_predict(const @ROW@ *x, @REAL@ *out) {
  float z[$$_PADDED];
  double sum[$$_OUTPUTS] = {0};
  $_scaled(x, z);
  for (int tree = 0; tree < $$_TREES; tree++) $_add(tree, z, sum);
  for (int k = 0; k < $$_OUTPUTS; k++) sum[k] *= $_unit[k];
  $_finish(sum, out);
}

static inline void $_predict_rows(const @ROW@ *x, long n, @REAL@ *out) {
  for (; n > 0; n--, x += @NEXT@, out += $$_OUTPUTS) $_predict(x, out);
}
"""

_SMOOTH_STEP = """\
  const double v = score / @GAMMA@ + 0.5;
  return v <= 0 ? 0 : v >= 1 ? 1 : v * v * (3 - 2 * v);
"""

_LOGISTIC_STEP = """\
  const double v = @FACTOR@ * score, e = $_exp(v < 0 ? v : -v);
  return (v < 0 ? e : 1) / (1 + e);
"""
