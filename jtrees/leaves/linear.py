"""Linear leaves: each leaf holds a linear model of the features."""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num
import numpy as np

from jtrees import io, pytree, sharding, validation
from jtrees.leaves.narrow import Narrowing
from jtrees.leaves.shrunk import fit_shrunk
from jtrees.segments import Array, common, module_of
from jtrees.tasks.errors import SquaredError
from jtrees.tasks.fits import uniform_targets
from jtrees.text import model_text

_BLOCK = 4096  # rows evaluated together on the host
_LARGE = 100  # binary exponent above which products may overflow in float32


def _double(a: Any) -> np.ndarray:
    return np.asarray(a, np.float64)


@io.part
@pytree.dataclass
class Linear:
    """Leaves that hold a linear model for each output: ``x @ coefficients + intercept``, clipped to optional bounds.

    Attributes:
      coefficients: ``(leaves, p)``, or ``(leaves, p, k)`` for k outputs.
      intercept: ``(leaves,)``, or ``(leaves, k)``.
      lower: lower bound of the output, in the shape of the intercept. None: no bounds.
      upper: upper bound of the output, in the shape of the intercept. None: no bounds.
    """

    coefficients: Float[Array, "leaves p *k"]
    intercept: Float[Array, "leaves *k"]
    lower: Float[Array, "leaves *k"] | None = None
    upper: Float[Array, "leaves *k"] | None = None

    is_constant: ClassVar[bool] = False
    name: ClassVar[str] = "Linear"
    choice: ClassVar[None] = None
    classes: ClassVar[None] = None
    kernel: ClassVar[None] = None

    @classmethod
    def start(cls, key: Array, num_leaves: int, x: Array, y: Array, outputs: tuple[int, ...]) -> "Linear":
        """Returns initial leaves: random constants."""
        intercept = uniform_targets(key, num_leaves, y, x.dtype)
        return cls(jnp.zeros((num_leaves, x.shape[1], *outputs), x.dtype), intercept)

    @classmethod
    def empty(cls, num_leaves: int, features: int, outputs: tuple[int, ...], dtype: Any = jnp.float32) -> "Linear":
        """Returns zero leaves of this shape, to be refitted."""
        return cls(jnp.zeros((num_leaves, features, *outputs), dtype), jnp.zeros((num_leaves, *outputs), dtype))

    def at(self, leaf_index: Int[Array, " n"], x: Float[Array, "n p"]) -> Float[Array, "n *k"]:
        """Returns the output of the given leaf for each sample, in double precision for NumPy arrays."""
        if module_of(leaf_index, x) is np and not validation.is_traced(self):
            return self._at_on_host(leaf_index, x)
        slopes, intercept = jnp.asarray(self.coefficients), jnp.asarray(self.intercept)
        # If terms overflowed, the sum would be infinite or NaN, and the clipping would return a wrong bound. The terms
        # are therefore divided by a power of two, which does not round them.
        exponent = lambda a: jnp.frexp(jnp.abs(jax.lax.stop_gradient(a)).reshape(len(a), -1).max(1))[1]
        excess = jnp.maximum(exponent(x) + exponent(slopes)[leaf_index] - _LARGE, 0)
        power = lambda e, like: jnp.ldexp(jnp.ones((), x.dtype), e).reshape(-1, *[1] * (like.ndim - 1))
        half = excess // 2  # two factors, because the power may be out of range
        times = lambda a, sign: a * power(sign * half, a) * power(sign * (excess - half), a)
        out = jnp.einsum("np...,np->n...", slopes[leaf_index], times(x, -1), precision="highest")
        return self._clipped(times(out, 1) + intercept[leaf_index], leaf_index)

    def _at_on_host(self, leaf_index: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Returns outputs in double precision, block by block. The bits of a row do not depend on its block."""
        slopes, intercept = np.moveaxis(_double(self.coefficients), 1, 0).copy(), _double(self.intercept)
        out = np.empty((len(x), *intercept.shape[1:]))
        for start in range(0, len(x), _BLOCK):
            leaf, part = leaf_index[start : start + _BLOCK], out[start : start + _BLOCK]
            columns = _double(x[start : start + _BLOCK].T).reshape(*x.shape[1:], len(leaf), *[1] * (out.ndim - 1))
            part[...] = intercept[leaf]
            with np.errstate(invalid="ignore"):  # another check reports rows that are not finite
                for feature_slopes, column in zip(slopes, columns, strict=True):
                    part += feature_slopes[leaf] * column
            part[...] = self._clipped(part, leaf, np)
        return out

    def _clipped(self, out: Any, leaf: Any, xp: Any = jnp) -> Any:
        if self.lower is None or self.upper is None:
            return out
        return xp.clip(out, xp.asarray(self.lower)[leaf], xp.asarray(self.upper)[leaf])

    def outputs(self, x: Float[Array, "n p"]) -> Float[Array, "leaves n *k"]:
        """Returns the output of every leaf for every sample."""
        intercept = jnp.asarray(self.intercept)
        if intercept.ndim == 1:
            out = jnp.matmul(self.coefficients, x.T, precision="highest") + intercept[:, None]
        else:
            out = jnp.einsum("lpk,np->lnk", self.coefficients, x, precision="highest") + intercept[:, None]
        return self._clipped(out, (slice(None), None))

    def losses(self, x: Float[Array, "n p"], y: Num[Array, "n *k"]) -> Float[Array, "leaves n"]:
        """Returns the squared error of every leaf on every sample, averaged over the outputs."""
        return jax.vmap(SquaredError().samples, (0, None))(self.outputs(x), y)

    def trainable(self) -> "Linear":
        """Returns leaves without bounds, because the gradient is zero beyond a bound."""
        return Linear(self.coefficients, self.intercept)

    def refit(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> "Linear":
        """Returns leaves shrunk towards the models of their ancestors (:func:`jtrees.leaves.fit_shrunk`).

        Uneven weights count as fewer samples (Kish's effective sample size of each node).
        """
        return self.refit_with_criterion(leaf_index, x, y, sample_weight)[0]

    def refit_shrunk(
        self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None, **_: Any
    ) -> tuple["Linear", Any]:
        """Returns the leaves of :meth:`refit`, and the strength 0: hierarchical shrinkage applies to values only."""
        return self.refit(leaf_index, x, y, sample_weight), np.zeros((), np.float32)

    def refit_with_criterion(
        self,
        leaf_index: Array,
        x: Array,
        y: Array,
        sample_weight: Array | None = None,
        narrowing: Narrowing | None = None,
    ) -> tuple["Linear", Array]:
        """Returns the leaves of :meth:`refit` and their :meth:`criterion`, for the cost of a single fit.

        ``narrowing`` is the map to few features, if it is known.
        """
        fitted, error = fit_shrunk(
            leaf_index, x, y, len(self.intercept), sample_weight=sample_weight, narrowing=narrowing
        )
        return Linear(*fitted), error

    def criterion(self, leaf_index: Array, x: Array, y: Array, sample_weight: Array | None = None) -> Array:
        """Returns the criterion of hard trees: the expected mean squared error on new samples."""
        return self.refit_with_criterion(leaf_index, x, y, sample_weight)[1]

    def hardened(self) -> "Linear":
        """Returns the leaves unchanged, because a hard tree can hold them."""
        return self

    def moved(self, change: np.ndarray) -> "Linear":
        """Returns the leaves for features whose origin moves by ``change``, ``(p,)``, in double precision."""
        shift = np.einsum("lp...,p->l...", _double(self.coefficients), change)
        return self.replace(intercept=_double(self.intercept) + shift)

    def rescaled(self, x_zero: Any, x_unit: Any, y_zero: Any, y_unit: Any) -> "Linear":
        """Returns the leaves for features ``x_zero + x_unit * x`` and outputs ``y_zero + y_unit * output``.

        Intercepts and bounds are in double precision.
        """
        per_unit = (1 / _double(x_unit)).reshape(-1, *[1] * (self.coefficients.ndim - 2))
        slopes = _double(self.coefficients) * _double(y_unit) * per_unit
        raw = lambda value: y_zero + y_unit * _double(value)
        intercept = raw(self.intercept) - np.einsum("lp...,p->l...", slopes, _double(x_zero))
        bounds = [None if bound is None else raw(bound) for bound in (self.lower, self.upper)]
        return Linear(sharding.from_host(slopes, np.float32), intercept, *bounds)

    def with_outputs(self, fn: Any) -> "Linear":
        """Returns the leaves with a function applied to intercepts and bounds."""
        changed = {name: getattr(self, name) for name in ("intercept", "lower", "upper")}
        return self.replace(**{name: fn(outputs) for name, outputs in changed.items() if outputs is not None})

    def with_common(self, leaf_index: np.ndarray, y: np.ndarray, weight: np.ndarray, rounding: Any) -> "Linear":
        """Returns leaves whose bounds are exactly the common target, where all targets of a leaf are equal.

        The bounds of a leaf change only if both equal the common target up to ``rounding``.
        """
        if self.lower is None or self.upper is None:
            return self
        lower, upper = _double(self.lower), _double(self.upper)
        value = common(leaf_index, y, weight, np.full(lower.shape, np.nan))
        is_common = (np.abs(value - lower) <= rounding) & (np.abs(value - upper) <= rounding)
        return self.replace(lower=np.where(is_common, value, lower), upper=np.where(is_common, value, upper))

    def count(self, reached: np.ndarray) -> int:
        """Returns the number of parameters of the reached leaves; ``reached`` is ``(leaves,)`` bool.

        The parameters are non-zero coefficients, intercepts and bounds.
        """
        values = sum(np.asarray(a)[reached].size for a in (self.intercept, self.lower, self.upper) if a is not None)
        return int(np.count_nonzero(np.asarray(self.coefficients)[reached]) + values)

    def describe(
        self,
        leaf: int,
        names: Sequence[str],
        digits: int,
        y_zero: Any,
        *,
        max_terms: int | None = None,
        deviations: np.ndarray | None = None,
        short: bool = False,
        **_: Any,
    ) -> str:
        """Returns the model of a leaf plus ``y_zero`` as text: see ``jtrees.text.model_text``."""
        leaf_part = lambda a: _double(a)[leaf]
        slopes, intercepts = np.atleast_2d(leaf_part(self.coefficients).T), np.atleast_1d(leaf_part(self.intercept))
        bounds: Any = [None] * len(slopes)
        if self.lower is not None:
            bounds = np.atleast_2d(np.stack([leaf_part(self.lower), leaf_part(self.upper)], axis=-1))
        models = zip(slopes, intercepts, bounds, np.broadcast_to(y_zero, len(slopes)), strict=True)
        options: Any = {"max_terms": max_terms, "deviations": deviations, "short": short}
        return "; ".join(
            model_text(slope, intercept, bound, names, digits, zero, **options)
            for slope, intercept, bound, zero in models
        )
