"""Sums and quantiles of the rows of each leaf. The accuracy in a leaf does not depend on the rows of other leaves.

NumPy arrays are summed in double precision on the host. JAX arrays are summed in their own precision, in any program.

A float32 sum of a million rows loses digits, because each addend is rounded to the last digit of the sum so far. This
module therefore divides a value into words. Let 2^e be above the largest magnitude in the leaf of the value. Then

    value = 2^e (w_1 2^-b + w_2 2^-2b + ... + w_m 2^-mb),     w_i an integer of at most b bits.

Sums of n such integers are exact in 32 bits if ``n 2^b < 2^31``. They do not depend on the order of the rows. A
cumulative sum over all rows may overflow without harm. The difference of two of its entries is exact modulo 2^32, which
gives the cumulative sum within each leaf. Additions without error join the sums of words: they return the rounded sum
of two numbers and its rounding error (Knuth, *The Art of Computer Programming*, volume 2, section 4.2.2).
"""

from collections.abc import Sequence
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, Num
import numpy as np

if TYPE_CHECKING:
    Array = Any
else:
    Array = jax.Array | np.ndarray  # functions of this module accept both

_FEW = 2**16  # largest number of rows for which plain sums of float32 are accurate enough, and faster
_BLOCK, _OF_LEAF = 512, 8  # least number of rows in a block of quick sums, in total and for each leaf
_SPARE = 2  # bits of precision beyond the bits that the number of rows needs
_BELOW = 40  # bits of a cumulative weight below the largest weight of the leaf


def module_of(*arrays: Any) -> Any:
    """Returns :mod:`jax.numpy` if any array is a JAX array, which may be traced, else NumPy."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def wide(per_row: Any, like: Any) -> Any:
    """Returns an array with axes of length 1 appended, which broadcasts against the array ``like``."""
    return per_row.reshape(per_row.shape + (1,) * (like.ndim - per_row.ndim))


def range_of(values: Num[jax.Array, "n *k"], inside: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the least and the largest values of the rows that are ``inside``."""
    inside = wide(inside, values)
    return jnp.where(inside, values, jnp.inf).min(0), jnp.where(inside, values, -jnp.inf).max(0)


def sums(values: Num[Array, "n *k"], leaf_index: Int[Array, " n"], num_leaves: int) -> Float[Array, "leaves *k"]:
    """Returns the sums of the rows of each leaf."""
    # A float32 sum of more than 65 536 rows is accurate to the last digits of an upper bound: the largest magnitude in
    # the leaf times its number of rows.
    if module_of(values, leaf_index) is np:
        flat = values.reshape(len(values), -1).T
        columns = [np.bincount(leaf_index, column, num_leaves) for column in flat]
        return np.stack(columns, axis=1).reshape(num_leaves, *values.shape[1:])
    if len(values) <= _FEW or values.dtype != jnp.float32:
        return jax.ops.segment_sum(values, leaf_index, num_leaves)
    largest = jnp.maximum(jax.ops.segment_max(jnp.abs(values), leaf_index, num_leaves), 0)
    exponent = jnp.frexp(largest)[1]
    bits = _bits(len(values), 32)
    # Truncated words of n rows can together lose n units of the last word.
    count = -(-(24 + len(values).bit_length() + _SPARE) // bits)
    words = _words(values, exponent[leaf_index], bits, count)
    joined = jnp.stack(words, axis=-1).reshape(len(values), -1)
    summed = jax.ops.segment_sum(joined, leaf_index, num_leaves).reshape(*largest.shape, count)
    high, low = _joined([summed[..., i] for i in range(count)], bits)
    return jnp.where(jnp.isfinite(largest), jnp.ldexp(high + low, exponent), largest)


def quick_sums(values: Num[Array, "n *k"], leaf_index: Int[Array, " n"], num_leaves: int) -> Float[Array, "leaves *k"]:
    """Returns :func:`sums` faster, with an error of about 1e-6 of the sum of the magnitudes in a leaf."""
    # Sums of blocks of rows are added up, so that no addend is much smaller than the sum so far.
    if module_of(values, leaf_index) is np or len(values) <= _FEW or values.dtype != jnp.float32:
        return sums(values, leaf_index, num_leaves)
    block = max(_BLOCK, _OF_LEAF * num_leaves)
    blocks = -(-len(values) // block)
    place = leaf_index + num_leaves * (jnp.arange(len(values), dtype=leaf_index.dtype) // block)
    block_sums = jax.ops.segment_sum(values, place, blocks * num_leaves)
    return block_sums.reshape(blocks, num_leaves, *values.shape[1:]).sum(0)


def total(values: Num[Array, "n *k"]) -> Float[Array, "*k"]:
    """Returns the sum over all rows, like :func:`sums` for a single leaf."""
    if module_of(values) is np:
        return values.sum(0, dtype=np.float64)
    if len(values) <= _FEW or values.dtype != jnp.float32:
        return values.sum(0)
    return sums(values, jnp.zeros(len(values), jnp.int32), 1)[0]


def floating(y: Array) -> Array:
    """Returns targets in a floating dtype. NumPy arrays become double precision."""
    if isinstance(y, np.ndarray):
        return y.astype(np.float64)
    return y if jnp.issubdtype(y.dtype, jnp.floating) else y.astype(jnp.float32)


def at_least_float32(x: Array) -> Any:
    """Returns the dtype of numbers that are combined with an array, which may have a shorter dtype or be integers."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize >= 4 else jnp.float32


def ones_or(sample_weight: Array | None, y: Array, dtype: Any = None) -> Float[Array, " n"]:
    """Returns the weights, or ones if they are None, in the array type and by default the dtype of the targets."""
    xp = module_of(y) if sample_weight is None else module_of(y, sample_weight)
    dtype = np.float64 if xp is np else jax.dtypes.canonicalize_dtype(y.dtype if dtype is None else dtype)
    return xp.ones(len(y), dtype) if sample_weight is None else xp.asarray(sample_weight, dtype)


def mean_one(weight: Array) -> Float[Array, " n"]:
    """Returns weights scaled to mean 1 over the rows of positive weight. A weight is then a number of samples."""
    # Wherever rows are weighed, the weights come from this function. Only the ratios of the given weights matter.
    xp = module_of(weight)
    tiny = xp.finfo(weight.dtype).tiny
    weight = weight / xp.maximum(weight.max(), tiny)  # sums of large weights would be infinite
    mean = weight.sum() / xp.maximum((weight > 0).sum(), 1).astype(weight.dtype)
    return weight / xp.maximum(mean, tiny)


def effective(sample_weight: Array) -> Float[Array, " n"]:
    """Returns weights rescaled to effective numbers of samples. Only the ratios of the given weights matter."""
    # The result sums to Kish's effective sample size, which is below the number of samples to which `mean_one` sums. A
    # cross-validation that treats a weight as a number of samples, as of a ridge regression, is then not overconfident.
    xp, tiny = module_of(sample_weight), np.finfo(sample_weight.dtype).tiny
    weight = sample_weight / xp.maximum(sample_weight.max(), tiny)
    return weight * total(weight) / xp.maximum(total(weight * weight), tiny)


def means(
    leaf_index: Int[Array, " n"],
    y: Num[Array, "n *k"],
    num_leaves: int,
    weight: Float[Array, " n"],
    *,
    default: Any = None,
) -> Float[Array, "leaves *k"]:
    """Returns the weighted mean of the rows of each leaf. A leaf without weight has ``default``, or the mean of all."""
    # On the host, the mean of equal values is exactly this value.
    xp = module_of(leaf_index, y, weight)
    count = wide(sums(weight, leaf_index, num_leaves), y)
    safe = xp.where(count > 0, count, 1)
    summed = lambda values: sums(wide(weight, y) * values, leaf_index, num_leaves) / safe
    # Deviations from the mean of a leaf are small, so their mean corrects the rounding errors of the first mean.
    first = summed(y)
    values = first + summed(y - first[leaf_index])
    if default is None and (xp is jnp or not count.all()):
        mean = (total(wide(weight, y) * y) / total(weight))[None]
        default = (mean + total(wide(weight, y) * (y - mean)) / total(weight))[0]
    default = None if default is None else xp.broadcast_to(default, values.shape)
    if xp is np:
        values = common(leaf_index, y, weight, values)
    return values if default is None else xp.where(count > 0, values, default)


def common(leaf_index: np.ndarray, y: np.ndarray, weight: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns leaf values, replaced by y where all rows with weight in a leaf have the same y. Runs on the host."""
    rows = np.flatnonzero(weight > 0)
    order = rows[np.argsort(leaf_index[rows], kind="stable")]
    leaf, ordered = leaf_index[order], y[order]
    first = np.flatnonzero(np.diff(leaf, prepend=-1))
    low, high = (ends.reduceat(ordered, first, axis=0) for ends in (np.minimum, np.maximum))
    out, leaf = np.array(values, np.float64), leaf[first]
    out[leaf] = np.where(low == high, low, out[leaf])
    return out


def quantiles(
    leaf_index: Int[Array, " n"],
    y: Float[Array, " n"],
    num_leaves: int,
    levels: Sequence[float],
    weight: Float[Array, " n"],
) -> tuple[Float[Array, "leaves k"], Array]:
    """Returns weighted quantiles of the rows of each leaf, and whether the leaf has weight."""
    # If all values between two rows are quantiles, the result is their mid-point.
    xp, n = module_of(leaf_index, y, weight), len(y)
    group = xp.where(weight > 0, leaf_index, num_leaves)  # rows without weight come last
    order = xp.lexsort((y, group))
    group, y, weight = group[order], y[order], weight[order]
    inside = xp.minimum(group, num_leaves - 1)
    count = _counts(group < num_leaves, inside, num_leaves)
    first = xp.cumsum(count) - count
    part = _parts_of(weight, inside, count, first)  # cumulative weight in the leaf, including the row
    last = xp.clip(first + count - 1, 0, n - 1)
    leaf_weight = part[0][last], part[1][last]
    # The slack prevents rounding errors of weights in double precision from deciding ties. Sums of float32 are exact.
    slack = (4 * np.finfo(np.float64).eps if y.dtype == np.float64 else 2.0**-38) * leaf_weight[0]

    def quantile(level: float) -> Array:
        target = _product(leaf_weight, level)
        excess, error = _two_sum(part[0], -target[0][inside])
        excess = excess + (error + (part[1] - target[1][inside]))  # exact enough, as only its sign near 0 matters
        below = lambda margin: _counts((excess < margin[inside]) & (group < num_leaves), inside, num_leaves)
        place = lambda passed: xp.clip(first + xp.minimum(passed, count - 1), 0, n - 1)
        low, high = y[place(below(-slack))], y[place(below(slack))]
        return xp.where(low == high, low, low / 2 + high / 2)

    return xp.stack([quantile(level) for level in levels], axis=1), count > 0


def _parts_of(weight: Any, leaf: Any, count: Any, first: Any) -> tuple[Any, Any]:
    """Returns the cumulative weight of each row within its leaf, including the row, as the sum of two numbers."""
    # Rows are sorted by leaf. The weights are relative to a power of two, which depends on the leaf.
    xp, n = module_of(weight), len(weight)
    size = 64 if weight.dtype == np.float64 else 32
    bits = _bits(n, size)
    words = -(-(_BELOW if size == 32 else 2 * _BELOW) // bits)
    if xp is np:
        largest = np.zeros(len(count))
        np.maximum.at(largest, leaf, weight)
    else:
        largest = jnp.maximum(jax.ops.segment_max(weight, leaf, len(count), indices_are_sorted=True), 0)
    sums_of_words = [xp.cumsum(word) for word in _words(weight, xp.frexp(largest)[1][leaf], bits, words)]
    start = first[leaf]
    before = lambda sum_: xp.where(start > 0, sum_[xp.maximum(start - 1, 0)], 0)
    return _joined([sum_ - before(sum_) for sum_ in sums_of_words], bits)


def _counts(mask: Any, leaf: Any, num_leaves: int) -> Any:
    """Returns the number of rows of each leaf for which the mask is true."""
    if module_of(mask) is np:
        return np.bincount(leaf[mask], minlength=num_leaves)
    return jax.ops.segment_sum(mask.astype(jnp.int32), leaf, num_leaves, indices_are_sorted=True)


# --- Words -----------------------------------------------------------------------------------------------------------


def _bits(n: int, size: int) -> int:
    """Returns the number of bits of a word for which sums of n words do not overflow integers of ``size`` bits."""
    return max(1, size - 2 - n.bit_length())


def _words(values: Any, exponent: Any, bits: int, count: int) -> list[Any]:
    """Returns the words of values below ``2^exponent``, the highest word first. The lowest word is rounded."""
    xp = module_of(values)
    integer = np.int64 if values.dtype == np.float64 else np.int32
    # Two steps, because the power may be out of range.
    half = exponent // 2
    power = lambda e: xp.ldexp(xp.ones((), values.dtype), -e)
    rest, words = values * power(half) * power(exponent - half), []
    for i in range(count):
        rest = rest * 2.0**bits
        word = xp.trunc(rest) if i < count - 1 else xp.round(rest)
        words.append(word.astype(integer))
        rest = rest - word
    return words


def _joined(words: list[Any], bits: int) -> tuple[Any, Any]:
    """Returns sums of words as the sum of two numbers. The second is below the rounding error of the first."""
    xp = module_of(words[0])
    dtype, low_bits = (np.float64, 31) if words[0].dtype == np.int64 else (np.float32, 12)
    high = low = xp.zeros(words[0].shape, dtype)
    for i, word in enumerate(words):
        upper = word >> low_bits
        for part, unit in ((upper, low_bits), (word - (upper << low_bits), 0)):
            high, error = _two_sum(high, part.astype(dtype) * dtype(2.0 ** (unit - bits * (i + 1))))
            low = low + error
    return _two_sum(high, low)


def _two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """Returns the rounded sum and its exact rounding error."""
    added = a + b
    b_part = added - a
    return added, (a - (added - b_part)) + (b - b_part)


def _product(number: tuple[Any, Any], factor: float) -> tuple[Any, Any]:
    """Returns the product of a number in (0, 1) and a sum of two numbers, as a sum of two numbers."""
    xp, dtype = module_of(number[0]), number[0].dtype
    half = np.finfo(dtype).nmant // 2 + 1
    mantissa, exponent = xp.frexp(number[0])
    upper = xp.ldexp(xp.trunc(mantissa * 2.0**half), exponent - half)
    high, low = xp.zeros_like(number[0]), number[1] * dtype.type(factor)
    for i in range(1, 1 + -(-53 // half)):  # parts of the factor have half the digits, so that products are exact
        part = math.floor(factor * 2.0 ** (half * i))
        factor -= part * 2.0 ** (-half * i)
        for digits in (upper, number[0] - upper):
            high, error = _two_sum(high, digits * dtype.type(part * 2.0 ** (-half * i)))
            low = low + error
    return _two_sum(high, low)
