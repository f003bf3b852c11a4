"""Models and fits in one file: arrays and a header of plain data, of which nothing is executed when it is read.

The file is a zip archive without compression: ``header.json``, and one ``.npy`` member for each array. Its header says
of what classes of this library the object is made, and these alone are built when it is read.

What is saved can be loaded: anything else is refused by :func:`save`, which says where it is.
"""

import contextlib
from dataclasses import fields, is_dataclass
import io
import json
import os
from pathlib import Path
import struct
import tempfile
from typing import Any, NamedTuple, TypeVar
import zipfile

import jax
import jax.numpy as jnp
import numpy as np

FORMAT = 1
_CLASSES: dict[str, Any] = {}  # by name, those that may be part of a file
_FILES: dict[str, Any] = {}  # those that may be a file of their own
_STATES: dict[str, Any] = {}  # those whose structure is not ours to build, and is given by the user when they are read
_ESTIMATORS = ("TreeRegressor", "TreeClassifier")  # of a module that needs scikit-learn: imported where they occur
_PLAIN = (str, int, float, bool, type(None))
_INSTEAD = "numbers, text, arrays, lists, tuples and dicts of these can be"

_Class = TypeVar("_Class", bound=type)


def part(cls: _Class) -> _Class:
    """Registers a dataclass or named tuple that may be part of a file; a decorator."""
    _CLASSES[cls.__name__] = cls
    return cls


def model(cls: _Class) -> _Class:
    """Registers a dataclass that may be a file of its own; a decorator.

    Where it has ``to_save()``, that is written in its place.
    """
    _FILES[cls.__name__] = cls
    return part(cls)


def state(cls: _Class) -> _Class:
    """Registers a pytree that is read with ``load(path, like=...)``; a decorator."""
    _STATES[cls.__name__] = cls
    return cls


def save(what: Any, path: str | os.PathLike, *, feature_names: list[str] | None = None) -> None:
    """Writes a model, a :class:`jtrees.FitResult`, a fitted estimator, or the state of a learner or of a run, to one file.

    The file appears as a whole, or not at all; one of the same name is replaced. Options that were tuned
    (``report["chosen"]``, ``report["tuning"]``) and that cannot be saved, such as functions, are kept by their names.

    Args:
      what: a tree, a forest, another model, a fit; a fitted :class:`jtrees.estimators.TreeRegressor` or
        ``TreeClassifier``, with its parameters; a :class:`jtrees.BanditState` or a :class:`jtrees.TrainState`.
      path: of the file; ``.jtrees`` is usual.
      feature_names: names of the columns, for whoever reads the header; None: those that an estimator has.

    Raises:
      ValueError: for anything else, saying what cannot be saved, and for another number of names than features.
      OSError: if the file cannot be written.
    """
    try:
        told, arrays = _told(what, feature_names)
        header = json.dumps(told)
    except RecursionError:
        kind = type(what).__name__
        raise ValueError(
            f"what must not hold itself, or lists and dicts too deeply nested, got such a {kind}"
        ) from None
    with _whole(Path(path)) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("header.json", header)
        for i, array in enumerate(arrays):
            with archive.open(f"{i}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _kinds() -> list[str]:
    """The kinds of files."""
    return [*_FILES, *_STATES, *_ESTIMATORS]


def _told(what: Any, feature_names: list[str] | None) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The header of a file, and its arrays."""
    arrays = _Arrays([], [])
    told: dict[str, Any] = {"format": FORMAT, "kind": type(what).__name__}
    name = type(what).__name__
    of_class = lambda classes: classes.get(name) is type(what)
    model, report = getattr(what, "model", what), getattr(what, "report", {})
    if of_class(_STATES):
        paths, held = _flat(what)
        told["state"] = [[name, _encoded(array, name, arrays)] for name, array in zip(paths, held, strict=True)]
    elif of_class(_FILES):
        told["object"] = _encoded(what.to_save() if hasattr(what, "to_save") else what, "", arrays)
    elif type(what).__module__ == "jtrees.estimators" and type(what).__name__ in _ESTIMATORS:
        told["object"] = _encoded_estimator(what, arrays)
        model, report, names = what.model_, what.report_, getattr(what, "feature_names_in_", None)
        feature_names = names if feature_names is None else feature_names
    else:
        raise ValueError(f"what must be one of {', '.join(_kinds())}, got {name}")
    if feature_names is not None:
        told["feature_names"] = [str(name) for name in feature_names]
        if len(feature_names) != (p := getattr(model, "features", len(feature_names))):
            raise ValueError(f"feature_names must hold {p} names, one a column, got {len(feature_names)}")
    if "recipe" in report:
        told["recipe"] = report["recipe"]
    told["arrays"] = arrays.told
    return told, arrays.held


def load(path: str | os.PathLike, *, like: Any = None) -> Any:
    """Reads what :func:`save` wrote.

    Args:
      path: of the file.
      like: for a state, one of the same learner or run, such as ``bandit.init(p, key=key)``, whose structure it has.

    Raises:
      ValueError: for a file that is not whole, or not one of these, or of a newer format; for double precision where
        that is not enabled; for a state without ``like``, or unlike it, saying what differs.
      ImportError: for an estimator without scikit-learn.
      OSError: if the file cannot be read.
    """
    told = _header(path := Path(path))
    kind, arrays = told["kind"], _arrays(path, told)
    if "state" not in told:
        if like is not None:
            raise ValueError(f"like is for states, and {path} holds a {kind}")
        with _refusing(path):
            held = _decoded(told["object"], arrays)
        return _estimator(kind, held) if kind in _ESTIMATORS else held
    if like is None:
        raise ValueError(f"like must be given for {path}, which holds a {kind}: one of the same structure")
    paths, expected = _flat(like)
    with _refusing(path):
        came = {name: _decoded(one, arrays) for name, one in told["state"]}
    if type(like).__name__ != kind or list(came) != paths:
        raise ValueError(
            f"like must be a {kind} that holds {_listed(came)}, as {path} has it, got a "
            f"{type(like).__name__} that holds {_listed(paths)}"
        )
    for name, one in zip(paths, expected, strict=True):
        if (shape := jnp.shape(one)) != came[name].shape or one.dtype != came[name].dtype:
            raise ValueError(f"like{name} must be {came[name].dtype}{came[name].shape}, got {one.dtype}{shape}")
    return jax.tree.unflatten(jax.tree.structure(like), list(came.values()))


def header(path: str | os.PathLike) -> dict[str, Any]:
    """What a file says of itself: ``format``, ``kind``, and where it has them ``recipe`` and ``feature_names``.

    Raises:
      ValueError, OSError: as :func:`load`.
    """
    told = _header(Path(path))
    return {name: value for name, value in told.items() if name not in ("object", "state", "arrays")}


def _flat(state: Any) -> tuple[list[str], list[Any]]:
    """The arrays of a state, and where in it each is."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return [jax.tree_util.keystr(path) for path, _ in leaves], [jnp.asarray(leaf) for _, leaf in leaves]


def _listed(names: Any) -> str:
    names = list(names)
    return f"{len(names)} arrays, " + ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


@contextlib.contextmanager
def _whole(path: Path) -> Any:
    """A file that is written aside and renamed, so that it is whole or not there."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# --- Objects as plain data -------------------------------------------------------------------------------------------


class _Arrays(NamedTuple):
    """Arrays put aside; what each was, ``numpy``, ``scalar``, ``jax`` or ``key``, and its dtype or implementation."""

    held: list[np.ndarray]
    told: list[list[str]]


def _encoded_estimator(estimator: Any, arrays: _Arrays) -> Any:
    """Parameters and attributes by name."""
    if not hasattr(estimator, "model_"):
        raise ValueError(f"what must be fitted to be saved, got {estimator!r} before its fit")
    try:
        held = [[name, _encoded(value, f".{name}", arrays)] for name, value in vars(estimator).items()]
    except ValueError as error:
        raise ValueError(f"{error}; jtrees.save(estimator.model_, path) saves the model alone") from None
    return {"dict": held}


def _estimator(kind: str, held: dict[str, Any]) -> Any:
    from jtrees import estimators

    estimator = getattr(estimators, kind)()
    vars(estimator).update(held)
    return estimator


def is_data(value: Any) -> bool:
    """Whether it can be saved."""
    try:
        _encoded(value, "", _Arrays([], []))
    except ValueError:
        return False
    return True


def _encoded(value: Any, where: str, arrays: _Arrays) -> Any:
    """Plain data, arrays put aside. A dict of one entry says what something is; plain dicts are lists of pairs."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return _array(value, where, arrays)
    if type(value) in (list, tuple):
        items = [_encoded(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict:
        if bad := [key for key in value if type(key) not in (str, int)]:
            raise ValueError(f"{where or 'it'} must have names or numbers as keys to be saved, got {bad[0]!r}")
        return {"dict": [[key, _encoded(item, f"{where}[{key!r}]", arrays)] for key, item in value.items()]}
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value):
        raise ValueError(f"{where or 'it'} cannot be saved: {value!r}: {_INSTEAD}")
    held = {name: _encoded(getattr(value, name), f"{where}.{name}", arrays) for name in _fields(type(value))}
    return {"class": name, "fields": held}


def _fields(cls: Any) -> list[str]:
    return [field.name for field in fields(cls)] if is_dataclass(cls) else list(cls._fields)


def _array(value: Any, where: str, arrays: _Arrays) -> dict[str, Any]:
    of = "jax" if isinstance(value, jax.Array) else "numpy" if isinstance(value, np.ndarray) else "scalar"
    if of == "jax" and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        of, dtype, array = "key", str(jax.random.key_impl(value)), np.asarray(jax.random.key_data(value))
    else:
        array = np.asarray(value)
        dtype = array.dtype.name
    kind, instead = array.dtype.kind, None
    if np.ma.is_masked(value):
        instead = "an array with masked values: fill them, as by .filled(np.nan)"
    elif kind == "O" and not all(type(item) is str for item in array.flat):
        instead = "an array of objects: make it numbers or text, as by .astype(str)"
    elif kind in "OSU":
        array = array.astype(str) if kind == "O" else array
        if (of == "scalar" and len(value) != len(array.item())) or (kind == "O" and (array != value).any()):
            instead = f"{value!r}, of whose text NumPy cuts off null characters at the end: make it a str"
    elif kind == "V" and jnp.issubdtype(array.dtype, np.number):  # such as bfloat16, which NumPy's format does not know
        array = array.view(f"u{array.dtype.itemsize}")
    elif kind not in "biufcmM":
        instead = f"an array of {array.dtype}: make it numbers or text, or a dict of such arrays"
    if instead is not None:
        raise ValueError(f"{where or 'it'} cannot be saved: {instead}")
    arrays.held.append(array)
    arrays.told.append([of, dtype])
    return {"array": len(arrays.held) - 1}


def _decoded(told: Any, arrays: list[Any]) -> Any:
    if isinstance(told, list):
        return [_decoded(item, arrays) for item in told]
    if not isinstance(told, dict):
        return told
    if "array" in told:
        return arrays[told["array"]]
    if "tuple" in told:
        return tuple(_decoded(item, arrays) for item in told["tuple"])
    if "dict" in told:
        return {key: _decoded(item, arrays) for key, item in told["dict"]}
    return _CLASSES[told["class"]](**{name: _decoded(item, arrays) for name, item in told["fields"].items()})


# --- The file --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _refusing(path: Path) -> Any:
    """While a file is taken apart: whatever goes wrong is its fault."""
    errors = (zipfile.BadZipFile, LookupError, TypeError, ValueError, EOFError, OSError, RuntimeError, struct.error)
    try:
        yield
    except errors as error:
        raise ValueError(f"{path} is not a whole file that jtrees.io.save wrote: {error}") from error


def _header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file, _refusing(path), zipfile.ZipFile(file) as archive:
        told = json.loads(archive.read("header.json"))
        version, kind = told["format"], told["kind"]
    if version != FORMAT:
        raise ValueError(f"{path} is of format {version!r}; this release reads format {FORMAT}")
    if kind not in _kinds():
        raise ValueError(f"{path} holds a {kind!r}, which this release does not know")
    return told


def _arrays(path: Path, told: dict[str, Any]) -> list[Any]:
    """The arrays of a file as they were."""
    double = [dtype for of, dtype in told["arrays"] if of == "jax" and jax.dtypes.canonicalize_dtype(dtype) != dtype]
    if double:
        raise ValueError(f"{path} has {double[0]}: set the option jax_enable_x64 to load it")
    with open(path, "rb") as file, _refusing(path), zipfile.ZipFile(file) as archive:
        members = (io.BytesIO(archive.read(f"{i}.npy")) for i in range(len(told["arrays"])))
        held = [np.lib.format.read_array(member, allow_pickle=False) for member in members]
        return [_as_it_was(array, *how) for array, how in zip(held, told["arrays"], strict=True)]


def _as_it_was(array: np.ndarray, of: str, dtype: str) -> Any:
    if of == "key":
        return jax.random.wrap_key_data(jnp.asarray(array), impl=dtype)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if dtype == "object":
        array = array.astype(object)
    elif dtype != array.dtype.name:
        array = array.view(jnp.dtype(dtype))
    return array if of == "numpy" else array[()] if of == "scalar" else jnp.asarray(array)
