"""Checks of the arguments of public functions, with uniform messages.

Every check raises ``ValueError``, which names the argument, what was expected, and the value. If arrays are traced,
only their shapes and dtypes are checked. Functions ``as_`` and ``check_`` with a result return the checked value.
"""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import operator
import sys
import traceback
from typing import Any
import warnings

import jax
import jax.numpy as jnp
import numpy as np

MAX_DEPTH = 16
MAX_NUMBERS = 2**31 - 1  # largest number of elements of an array, or of steps, for 32-bit sizes and counters
Bound = int | float | None
_LONGEST = 80  # characters of a quoted value


def quoted(value: Any) -> str:
    """Returns a value as a message quotes it: its ``repr`` on one line, with at most 80 characters."""
    # A number of NumPy is quoted as a plain number, because options are converted before they are checked.
    is_number = isinstance(value, (np.ndarray, np.generic)) and value.ndim == 0 and value.dtype.kind in "biufc"
    try:
        text = str(value) if is_number else repr(value)
    except Exception:  # for example for an integer of more than 4300 digits
        return f"a value of type {type(value).__name__}"
    text = text if isinstance(value, str) else " ".join(text.split())
    if len(text) <= _LONGEST:
        return text
    closing = text[-1] if isinstance(value, str) else ""
    return text[: _LONGEST - 3 - len(closing)] + "..." + closing


def listed(texts: Iterable[str], separator: str = ", ", most: int = 5) -> str:
    """Returns the first texts, and the number of further texts, such as ``a, b, c, d, e and 2 more``."""
    texts = list(texts)
    omitted = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + omitted


def quoted_list(values: Iterable[Any]) -> str:
    """Returns the first five values as :func:`quoted`, and the number of further values."""
    return listed(map(quoted, values))


def number_of(count: int | np.integer, noun: str) -> str:
    """Returns a number of things as text: "1 row", "2 rows"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def first_repeated(names: Iterable[str]) -> str | None:
    """Returns the first name that occurs before, or None."""
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), None)


def checked_names(feature_names: Any, features: int) -> list[str]:
    """Returns the names of features as text, by default ``x0``, ``x1``, ...; raises ``ValueError`` for equal names."""
    names = [f"x{i}" for i in range(features)] if feature_names is None else list(map(str, feature_names))
    if len(names) != features:
        raise ValueError(f"feature_names must hold {features} names, one a column, got {len(names)}")
    if (repeated := first_repeated(names)) is not None:
        raise ValueError(f"feature_names must differ from each other, got {quoted(repeated)} twice")
    return names


def is_traced(*values: Any) -> bool:
    """Returns whether any of the values (or leaves of pytrees) is a tracer."""
    return any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(values))


def check_depth(depth: Any, most: int = MAX_DEPTH, name: str = "depth", least: int = 1) -> int:
    """Returns the depth as an integer from ``least`` to ``most``, by default from 1 to 16."""
    value = _index(name, depth, f"a whole number from {least} to {most}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least} to {most}, got {quoted(value)}")
    return value


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Returns an integer of at least ``least`` and at most ``most`` (a limit of 32-bit sizes or counters)."""
    number = _index(name, value, "a whole number")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {quoted(number)}")
    if most is not None and number > most:
        raise ValueError(f"{name} must be at most {most}, the limit of 32-bit sizes and counters, got {quoted(number)}")
    return number


def check_size(name: str, count: Any, numbers: int) -> int:
    """Returns a number of parts that have together at most :data:`MAX_NUMBERS` numbers."""
    return check_count(name, count, most=MAX_NUMBERS // numbers)


def _index(name: str, value: Any, expected: str) -> int:
    """Returns a whole number, which may not be a truth value."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise ValueError(f"{name} must be {expected}, got {quoted(value)}")


def check_key(key: Any) -> None:
    """Checks that the key is a single random key."""
    dtype = getattr(key, "dtype", None)
    is_key = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_key:
        raw = dtype == np.uint32 and len(key.shape) > 0
        # JAX reads a raw key as a key of the default generator, which determines its shape.
        if not raw or key.shape[-1:] != jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape:
            repair = ': use jax.random.wrap_key_data(key, impl="rbg")' if raw and key.shape[-1] == 4 else ""
            raise ValueError(f"key must be a random key, such as jax.random.key(0), got {quoted(key)}{repair}")
    if shape := key.shape if is_key else key.shape[:-1]:
        raise ValueError(f"key must be one random key, got keys of shape {shape}: choose one, such as key[0]")


def check_number(name: str, value: Any, **bounds: Bound) -> None:
    """Checks that the value is one finite number within the bounds of :func:`check_numbers`. It may be traced."""
    if shape := value.shape if hasattr(value, "shape") else _as_array(value).shape:
        raise ValueError(f"{name} must be one number, got shape {shape}")
    check_numbers(name, value, **bounds)


def check_numbers(
    name: str, value: Any, *, least: Bound = None, above: Bound = None, below: Bound = None, most: Bound = None
) -> None:
    """Checks that the value holds finite numbers within the bounds. Traced values pass."""
    if is_traced(value):
        return
    number = _as_array(value)  # jax would trace a comparison within a program
    bounds = (
        ("of at least", least, np.greater_equal),
        ("above", above, np.greater),
        ("below", below, np.less),
        ("at most", most, np.less_equal),
    )
    given = [(words, bound, holds) for words, bound, holds in bounds if bound is not None]
    is_numeric = number.dtype.kind in "biuf" or jnp.issubdtype(number.dtype, jnp.floating)  # bfloat16 is numeric
    is_valid = is_numeric and np.all(np.isfinite(number))
    if not is_valid or not all(np.all(holds(number, bound)) for _, bound, holds in given):
        expected = " and ".join(f"{words} {bound:g}" for words, bound, _ in given)
        raise ValueError(f"{name} must be a finite number {expected}".rstrip() + f", got {quoted(value)}")


def check_scalar(name: str, value: Any, **bounds: Bound) -> float:
    """Returns a number of the host, checked by :func:`check_number`. It may not be traced or a truth value."""
    if is_traced(value) or isinstance(value, (bool, np.bool_)) or _as_array(value).ndim:
        raise ValueError(f"{name} must be a number, got {quoted(value)}")
    check_number(name, value, **bounds)
    return float(value)


def _as_array(value: Any) -> np.ndarray:
    """Returns a value in NumPy; rows of different lengths are one object."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(value, object)


def check_choice(name: str, value: Any, choices: Sequence[str], other: str = "") -> str:
    """Returns the value, which must be one of the choices. ``other`` describes alternatives in the message."""
    if not isinstance(value, str) or value not in choices:
        expected = ", ".join(map(repr, choices)) + (f", or {other}" if other else "")
        raise ValueError(f"{name} must be one of {expected}, got {quoted(value)}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """Returns the checked value, True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, got {quoted(value)}")
    return bool(value)


def check_unmasked(name: str, array: Any) -> None:
    """Checks that an array has no masked values."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.is_masked(array):
        masked = np.ma.getmaskarray(array)
        raise ValueError(f"{name} must have no masked values, got {masked.sum()}, the first at {_first(masked)}")


def _first(mask: np.ndarray) -> tuple[int, ...]:
    """Returns the position of the first True."""
    return tuple(np.argwhere(mask)[0].tolist())


def as_numeric(name: str, array: Any) -> Any:
    """Returns an array of numbers, without masked values."""
    check_unmasked(name, array)
    if hasattr(array, "toarray"):  # a sparse array of SciPy
        raise ValueError(f"{name} must be a dense array, got {quoted(array)}: use {name}.toarray()")
    if isinstance(array, jax.Array) and not jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array
    try:
        out = np.asarray(array)
    except ValueError:
        raise ValueError(f"{name} must be an array of numbers, got rows of different lengths") from None
    if out.dtype.kind == "O":  # such as a table of mixed columns
        try:
            out = out.astype(np.float64)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{name} must be numeric, got {_not_a_number(name, array, out)}") from None
    if out.dtype.kind not in "biuf":
        repair = _repair(name, out.flat[0]) if out.size else ""
        raise ValueError(f"{name} must be numeric, got values of type {out.dtype}{repair}")
    return out


def _not_a_number(name: str, array: Any, values: np.ndarray) -> str:
    """Returns the message part for the first non-numeric value: its position, and a repair."""
    for where in np.ndindex(values.shape):
        try:
            float(values[where])
        except (TypeError, ValueError, OverflowError):
            break
    odd = values[where]
    if values.ndim == 2 and hasattr(array, "columns"):  # a table of pandas or a similar library
        repair = ": encode text, such as by a OneHotEncoder" if isinstance(odd, str) else _repair(name, odd)
        return f"{quoted(odd)} in column {quoted(str(array.columns[where[1]]))}{repair}"
    first = f"{quoted(values.flat[0])} and others, such as " if any(where) else ""
    return f"{first}{quoted(odd)}{f' at {where}' if where else ''}{_repair(name, odd)}"


def _repair(name: str, value: Any) -> str:
    """Returns the message part with a repair for a non-numeric value."""
    if is_missing(value):
        return ": fill gaps, or leave such rows out"
    if isinstance(value, (str, bytes)):
        if name != "y":
            return ": pass a DataFrame, such as pd.DataFrame([row]), or encode text"
        return ": for labels take task='classification' and y = np.unique(y, return_inverse=True)[1], or TreeClassifier"
    if isinstance(value, (np.datetime64, np.timedelta64)) or hasattr(value, "year") or hasattr(value, "days"):
        return ": make numbers of dates, such as days since the first"
    return ""


def hint_of_estimator(model: Any) -> str:
    """Returns the message part for an estimator where its fitted model is expected."""
    return ": pass its attribute model_" if hasattr(model, "model_") else ""


def is_missing(value: Any) -> bool:
    """Returns whether a value is missing: None, NaN, or pandas' NA or NaT."""
    if isinstance(value, (float, np.floating, np.datetime64)):
        return bool(value != value)
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def flat_samples(x: Any, features: int) -> Any:
    """Returns the input of a layer, ``(..., features)``, as ``(n, features)``. There is at least one sample."""
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(f"x must have {features} features on its last axis, got shape {x.shape}")
    if 0 in x.shape:
        raise ValueError(f"x must hold at least one sample, got shape {x.shape}")
    return x.reshape(-1, features)


def check_finite(name: str, array: Any) -> None:
    """Checks that all values of an array are finite."""
    if is_traced(array):
        return
    if isinstance(array, jax.Array) and not array.is_fully_addressable:  # on devices of several processes
        if not bool(jnp.isfinite(array).all()):
            raise ValueError(f"{name} must be finite, got NaN or infinite values")
        return
    bad = ~np.isfinite(np.asarray(array))
    if bad.any():
        raise ValueError(f"{name} must be finite, got {bad.sum()} NaN or infinite values, the first at {_first(bad)}")


class ColumnsWarning(UserWarning):
    """Columns of a raw table are left out, are ambiguous, or have new missing values or levels."""

    __module__ = "jtrees.tables"  # its public name


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called the library."""
    names = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_stack(sys._getframe())]
    inside = [level for level, name in enumerate(names, 1) if name.startswith("jtrees.")]
    warnings.warn(message, category, 1 + max(inside))


def warn_of_gaps(counts: Mapping[str, int]) -> None:
    """Warns of missing values, counted by column, in columns that had none in the training rows."""
    if which := counted(counts):
        message = f"x has missing values where the training rows had none, replaced by typical values: {which}"
        warn(message, ColumnsWarning)


def counted(counts: Mapping[str, int]) -> str:
    """Returns the names of columns and their positive numbers of rows as text."""
    return listed(f"{quoted(name)} ({number_of(count, 'row')})" for name, count in counts.items() if count)


def as_finite(name: str, array: Any) -> np.ndarray:
    """Returns finite numbers as an array in double precision."""
    out = np.asarray(as_numeric(name, array)).astype(np.float64, order="C")
    check_finite(name, out)
    return out


def check_x(x: Any, *, features: int | None = None, finite: bool = True, rows: int = 1, name: str = "x") -> Any:
    """Returns checked features as an array ``(n, p)``, with at least ``rows`` rows; errors have its ``name``."""
    x = as_numeric(name, x)
    if x.ndim != 2:
        raise ValueError(f"{name} must have shape (n, p), got shape {x.shape}{_repair_of_rank(x, features)}")
    if len(x) < rows or not x.shape[1]:
        expected = "at least one row and one column" if rows else "at least one column"
        raise ValueError(f"{name} must have {expected}, got shape {x.shape}")
    if features is not None and x.shape[1] != features:
        raise ValueError(f"{name} must have {features} columns, got {x.shape[1]}")
    if finite:
        check_finite(name, x)
    return x


def _repair_of_rank(x: Any, features: int | None) -> str:
    """Returns the message part with a repair for one row or one column without its second axis."""
    if x.ndim != 1 or (features not in (None, 1, len(x))):
        return ""
    row, column = "x[None] for one row", "x[:, None] for one column"
    return f": use {column if features == 1 else row if features else f'{column}, {row}'}"


def check_weight(sample_weight: Any, n: int) -> Any:
    """Returns checked weights of n samples: finite, nonnegative, and not all zero."""
    weight = as_numeric("sample_weight", sample_weight)
    if weight.shape != (n,):
        raise ValueError(f"sample_weight must have shape ({n},), one a row of x, got shape {weight.shape}")
    if is_traced(weight):
        return weight
    check_finite("sample_weight", weight)
    values = np.asarray(weight)
    if (values < 0).any():
        raise ValueError(f"sample_weight must not be negative, got {quoted(values.min())}")
    if not (values > 0).any():
        raise ValueError("sample_weight must not be zero everywhere")
    return weight


def relative_weight(sample_weight: Any, n: int) -> np.ndarray:
    """Returns checked weights of n samples as fractions of the largest weight, in double precision."""
    # A fraction that float32 cannot hold with all its digits is 0: such a sample cannot matter beside the largest.
    weight = np.asarray(check_weight(sample_weight, n), np.float64)
    weight = weight / weight.max()
    return np.where(weight < np.finfo(np.float32).tiny, 0.0, weight)


def check_targets(y: Any, n: int) -> Any:
    """Returns checked training targets of a regression, ``(n,)`` or ``(n, k)``, at least two and not constant."""
    y = as_numeric("y", y)
    if y.ndim not in (1, 2) or 0 in y.shape[1:]:
        raise ValueError(f"y must have shape (n,) or (n, k), got shape {y.shape}")
    check_rows(y, n)
    check_finite("y", y)
    if is_traced(y):
        return y
    columns = np.asarray(y).reshape(n, -1)
    constant = np.all(columns == columns[0], axis=0)
    if constant.any():
        column = int(np.argmax(constant))
        which = "" if y.ndim == 1 else f" in column {column}"
        got = f"{quoted(float(columns[0, column]))} in every row{which}"
        raise ValueError(f"y must take at least two values to learn from, got {got}")
    return y


def check_rows(y: Any, n: int, least: int = 2) -> None:
    """Checks that the numbers of targets and samples are equal, and at least ``least``, which is 1 or 2."""
    if y.shape[0] != n:
        raise ValueError(f"x and y must have the same number of rows, got {n} and {y.shape[0]}")
    if n < least:
        raise ValueError(f"x and y must hold at least {least} sample{'s' if least > 1 else ''}, got {n}")
