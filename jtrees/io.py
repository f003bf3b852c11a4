"""Files of models and fits: arrays and a header of plain data. Loading never executes code from a file.

A file is an uncompressed zip archive of ``header.json`` and one ``.npy`` member for each array. The header names the
classes of the object, which must be registered in this module, and the modules of jtrees that register them. Every
object that can be saved can be loaded.
"""

from collections.abc import Iterator
import contextlib
from dataclasses import fields, is_dataclass
import errno
import importlib
import io
import json
import lzma
import os
from pathlib import Path
import re
import secrets
import stat
import struct
from typing import IO, Any, TypeVar
import zipfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jtrees import __version__, distributed, processes, sharding
from jtrees.validation import checked_names, listed, quoted, quoted_list

__all__ = ["family", "header", "load", "model", "part", "save", "state"]

FORMAT = 4
_CLASSES: dict[str, type] = {}  # classes that may be part of a file, by name
_SECTIONS: dict[str, str] = {}  # for classes with files: "object", "state" or "attributes", which their files hold
_OPENED = re.compile(r"(?:/dev|/proc/self)/fd/(\d+)|/dev/std(out|err)")  # files that this process has open
_IN_JTREES = re.compile(r"jtrees(\.[a-z]\w*)+")  # the modules that a file may name

# Arrays of a file, each with its kind ("numpy", "scalar", "jax" or "key") and its dtype (or the key implementation).
_Arrays = list[tuple[str, str, np.ndarray]]
_Class = TypeVar("_Class", bound=type)


def part(cls: _Class) -> _Class:
    """Registers a dataclass or named tuple that may be part of a file. Use it as a decorator.

    A file names a class of jtrees by its class name. It names any other class by module and class, such as
    ``my_trees.Stump``. A class that is defined again, for example in a notebook, replaces its earlier definition.

    Raises:
      ValueError: for a second class of jtrees with the same name.
    """
    previous = _CLASSES.setdefault(name := name_of(cls), cls)
    if (previous.__module__, previous.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"cls must have a unique name in jtrees, got {cls} and {previous}")
    _CLASSES[name] = cls
    return cls


def family(cls: _Class) -> _Class:
    """Registers a class whose derived dataclasses may be part of a file. Use it as a decorator."""
    hook = getattr(cls.__init_subclass__, "__func__", None)  # None: the hook of ``object``, which does nothing

    def register(derived: type, **options: Any) -> None:
        if hook is not None:
            hook(derived, **options)
        part(derived)

    cls.__init_subclass__ = classmethod(register)
    return part(cls)


def model(cls: _Class) -> _Class:
    """Registers a dataclass that may be saved in its own file. Use it as a decorator.

    If the class has ``to_save()``, the result of this method is written instead.
    """
    _SECTIONS[name_of(part(cls))] = "object"
    return cls


def state(cls: _Class) -> _Class:
    """Registers a pytree that is loaded with ``load(path, like=...)``. Use it as a decorator."""
    _SECTIONS[name_of(part(cls))] = "state"
    return cls


def estimator(cls: _Class) -> _Class:
    """Registers a class of jtrees whose fitted objects are saved by their attributes. Use it as a decorator.

    Objects are made without arguments. Names of attributes follow scikit-learn, such as ``model_``.
    """
    _SECTIONS[name_of(part(cls))] = "attributes"
    return cls


def name_of(cls: type) -> str:
    """Returns the name of a class in files."""
    in_jtrees = cls.__module__.partition(".")[0] == "jtrees"
    return cls.__name__ if in_jtrees else f"{cls.__module__}.{cls.__qualname__}"


def save(what: Any, path: str | os.PathLike | IO[bytes], *, feature_names: list[str] | None = None) -> None:
    """Writes a model, a :class:`jtrees.FitResult`, a fitted estimator, or the state of a learner or a run to one file.

    The file is written atomically, and replaces a file of the same name, whose mode it keeps. An object whose arrays
    are spread over processes is gathered: all processes must call the function, and only the first process writes.
    Tuned options (``report.tuning``) that cannot be saved, such as functions, are stored by name.

    Args:
      what: a tree, a forest or another model; a fit; a fitted estimator of :mod:`jtrees.estimators`, which is saved
        with its parameters; a :class:`jtrees.methods.BanditState` or a
        :class:`jtrees.training.TrainState`.
      path: path of the file, usually with the extension ``.jtrees``; or of an object in a bucket, ``gs://bucket/name``.
        A bucket needs ``etils`` and the package of its file system, such as ``gcsfs``. Or an open binary file, such as
        an ``io.BytesIO``.
      feature_names: names of the columns, stored in the header. None: the estimator's feature names, if it has any.

    Raises:
      ValueError: if the object cannot be saved; the message names the part. Also if the number of names is wrong.
      OSError: if the file cannot be written.
    """
    try:
        contents, arrays = _contents(what, feature_names)
        header = json.dumps(contents)
    except RecursionError:
        kind = type(what).__name__
        raise ValueError(f"what must not contain itself or deeply nested lists and dicts, got such a {kind}") from None
    if distributed.spans(what) and not distributed.is_first():
        return
    with written_whole(path) as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("header.json", header)
        for i, (_, _, array) in enumerate(arrays):
            with archive.open(f"{i}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


@contextlib.contextmanager
def written_whole(path: str | os.PathLike | IO[bytes]) -> Iterator[IO[bytes]]:
    """Yields a binary file to write. Once it is complete, it moves to ``path`` and replaces a file of the same name.

    A path on a disk is opened at once, so a path that cannot be written is an error before there is anything to write.
    The new file has the mode of the file that it replaces, and replaces the file that a symbolic link leads to. An open
    file, a pipe and a device are written directly.

    Raises:
      OSError: if the file cannot be written. The error has the path.
    """
    path = as_path(path)
    if hasattr(path, "write"):
        yield path  # type: ignore[misc]
        return
    if not isinstance(path, Path):
        yield (buffer := io.BytesIO())  # an object in a bucket becomes visible when it is complete
        path.write_bytes(buffer.getvalue())
        return
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    opened = _OPENED.fullmatch(os.path.abspath(path))
    if opened or (path.exists() and not path.is_file()):
        with open(os.dup(int(opened[1] or 1 + (opened[2] == "err"))) if opened else path, "wb") as file:
            yield file
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        file = open(temporary, "xb")  # noqa: SIM115  # the errors of the contents are none of the path
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    try:
        with file:
            if target.exists():
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def write_file(path: str | os.PathLike | IO[bytes], contents: str | bytes | bytearray) -> None:
    """Writes a file, with text in UTF-8, completely or not at all: see :func:`written_whole`."""
    with written_whole(path) as file:
        file.write(contents.encode() if isinstance(contents, str) else contents)


def as_path(path: str | os.PathLike | IO[bytes]) -> Any:
    """Returns a path on a disk or in a bucket, or an open file. ``pathlib`` would drop the double slash of a bucket."""
    if hasattr(path, "write") or hasattr(path, "read"):
        if isinstance(path, io.TextIOBase):
            raise ValueError(f"path must be a path or a file opened in binary mode, got {quoted(path)}")
        return path
    if "://" not in (name := os.fsdecode(path)):  # type: ignore[arg-type]
        return Path(name)
    from etils import epath

    return epath.Path(name)


def _kinds() -> list[str]:
    """Returns the names of the classes with files that are registered."""
    return [_CLASSES[name].__name__ for name in sorted(_SECTIONS, key=_SECTIONS.__getitem__)]


def _contents(saved: Any, feature_names: list[str] | None) -> tuple[dict[str, Any], _Arrays]:
    kind, arrays, name = type(saved).__name__, [], name_of(type(saved))
    contents: dict[str, Any] = {"format": FORMAT, "jtrees": __version__, "kind": kind}
    model, report = getattr(saved, "model", saved), getattr(saved, "report", None)
    section = _SECTIONS.get(name) if _CLASSES.get(name) is type(saved) else None
    if section == "state":
        contents["state"] = [[path, _encoded(array, path, arrays)] for path, array in _flat(saved).items()]
    elif section == "object":
        contents["object"] = _encoded(saved.to_save() if hasattr(saved, "to_save") else saved, "", arrays)
    elif section == "attributes":
        contents["object"] = _encoded_attributes(saved, arrays)
        model, report = saved.model_, saved.report_
        feature_names = getattr(saved, "feature_names_in_", None) if feature_names is None else feature_names
    else:
        raise ValueError(f"what must be one of {quoted_list(sorted(_kinds()))}, got {kind}")
    if feature_names is not None:
        width = getattr(model, "features", len(feature_names))
        contents["feature_names"] = checked_names(feature_names, width)
    if recipe := getattr(report, "recipe", None):
        contents["recipe"] = recipe
    contents["arrays"] = [[origin, dtype] for origin, dtype, _ in arrays]
    names = re.findall(r'"class": "(\w+)"', json.dumps([contents.get("object"), contents.get("state")]))
    modules = {type(saved).__module__, *(_CLASSES[name].__module__ for name in names)}  # of the classes of jtrees
    contents["modules"] = sorted(module for module in modules if _IN_JTREES.fullmatch(module))
    return contents, arrays


def load(path: str | os.PathLike | IO[bytes], *, like: Any = None) -> Any:
    """Loads an object from a file written by :func:`save`.

    Args:
      path: path of the file, or an open file, as for :func:`save`.
      like: required for a state: a state of the same structure, such as ``bandit.init(p, key=key)`` for a learner.

    Raises:
      ValueError: if the file is incomplete, of another kind, or of another release that this release cannot read; the
        message names the release. If it holds double precision that is not enabled. If ``like`` is missing for a state,
        or differs in structure; the message names the difference.
      ImportError: for an estimator without scikit-learn.
      OSError: if the file cannot be read.
    """
    contents = _header(path := as_path(path))
    kind = contents["kind"]
    for module in filter(_IN_JTREES.fullmatch, map(str, contents.get("modules", ()))):  # which register the classes
        with contextlib.suppress(ModuleNotFoundError):  # another release has other modules
            importlib.import_module(module)
    if kind not in _kinds():
        release = str(contents.get("jtrees"))[:40]
        raise ValueError(f"{path} of jtrees {release} holds a {quoted(kind)}, which jtrees {__version__} lacks")
    arrays = _arrays(path, contents)
    if "state" not in contents:
        if like is not None:
            raise ValueError(f"like must be None for {path}, which holds a {kind}, not a state")
        with _refusing(path, contents):
            loaded = _decoded(contents["object"], arrays)
        if _SECTIONS.get(kind) == "attributes":
            vars(fitted := _CLASSES[kind]()).update(loaded)
            return fitted
        return loaded
    if like is None:
        raise ValueError(f"like must be given for {path}, which holds a {kind}: pass a state of the same structure")
    expected = _flat(like)
    with _refusing(path, contents):
        leaves = {name: _decoded(leaf, arrays) for name, leaf in contents["state"]}
    if type(like).__name__ != kind or list(leaves) != list(expected):
        texts = [f"{len(named)} arrays, {listed(named)}" for named in (leaves, expected)]
        got = f"got a {type(like).__name__} that holds {texts[1]}"
        raise ValueError(f"like must be a {kind} that holds {texts[0]}, as {path} has it, {got}")
    for name, leaf in leaves.items():
        if (like_leaf := expected[name]).shape != leaf.shape or like_leaf.dtype != leaf.dtype:
            got = f"{like_leaf.dtype}{like_leaf.shape}"
            raise ValueError(f"like{name} must be {leaf.dtype}{leaf.shape}, got {got}")
    return jax.tree.unflatten(jax.tree.structure(like), list(leaves.values()))


def header(path: str | os.PathLike | IO[bytes]) -> dict[str, Any]:
    """Returns the header of a file: ``format``, ``jtrees`` (the release that wrote it), ``kind``, and ``recipe`` and
    ``feature_names`` if present.

    Raises:
      ValueError, OSError: in the cases of :func:`jtrees.load`.
    """
    contents = _header(as_path(path))
    return {name: value for name, value in contents.items() if name not in ("object", "state", "arrays", "modules")}


def _flat(state: Any) -> dict[str, Any]:
    """Returns the arrays of a state, by their paths."""
    return {jax.tree_util.keystr(path): jnp.asarray(a) for path, a in jax.tree_util.tree_leaves_with_path(state)}


def _encoded_attributes(fitted: Any, arrays: _Arrays) -> Any:
    """Returns the encoded parameters and attributes of a fitted object, by name."""
    if not hasattr(fitted, "model_"):
        raise ValueError(f"what must be fitted to be saved, got {quoted(fitted)} before its fit")
    try:
        attributes = fitted.__getstate__()
        attributes.pop("_sklearn_version", None)
        return {"dict": [[name, _encoded(value, f".{name}", arrays)] for name, value in attributes.items()]}
    except ValueError as error:
        raise ValueError(f"{error}; jtrees.save(estimator.model_, path) saves the model alone") from None


def is_data(value: Any) -> bool:
    """Returns whether a value can be saved."""
    try:
        _encoded(value, "", [])
    except ValueError:
        return False
    return True


def _encoded(value: Any, where: str, arrays: _Arrays) -> Any:
    """Returns plain data, and appends arrays to ``arrays``.

    A tagged dict encodes a type. A list of pairs encodes a dict.
    """
    if type(value) in (str, int, float, bool, type(None)):
        return value
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return _array(value, where, arrays)
    if type(value) in (list, tuple):
        items = [_encoded(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict:
        plain = {key.item() if isinstance(key, np.generic) else key: item for key, item in value.items()}
        if bad := [key for key in plain if type(key) not in (str, int, float, bool, type(None))]:
            raise ValueError(f"{where or 'it'} must have names or numbers as keys to be saved, got {quoted(bad[0])}")
        return {"dict": [[key, _encoded(item, f"{where}[{key!r:.80}]", arrays)] for key, item in plain.items()]}
    name = name_of(type(value))
    registered, has_fields = _CLASSES.get(name), is_dataclass(value) or hasattr(value, "_fields")
    if registered is not type(value) or not has_fields:
        reason = "numbers, text, arrays, lists, tuples and dicts of these can be"
        if registered is not None and has_fields:
            reason = f"{name} has been defined again: create the object again"
        raise ValueError(f"{where or 'it'} cannot be saved: {quoted(value)}: {reason}")
    names = [field.name for field in fields(value)] if is_dataclass(value) else value._fields
    return {"class": name, "fields": {n: _encoded(getattr(value, n), f"{where}.{n}", arrays) for n in names}}


def _array(value: Any, where: str, arrays: _Arrays) -> dict[str, Any]:
    kind = "jax" if isinstance(value, jax.Array) else "numpy" if isinstance(value, np.ndarray) else "scalar"
    if kind == "jax" and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        kind, dtype, array = "key", str(jax.random.key_impl(value)), distributed.to_host(jax.random.key_data(value))
    else:
        array = distributed.to_host(value)
        dtype = array.dtype.name
    texts = [value] if kind == "scalar" else array.reshape(-1)
    if dtype == "object" and all(type(text) is str for text in texts):
        array = array.astype(str)
    elif array.dtype.kind == "V" and jnp.issubdtype(array.dtype, np.number):  # such as bfloat16
        array = array.view(f"u{array.dtype.itemsize}")
    reason = None
    if np.ma.is_masked(value):
        reason = "an array with masked values: fill them, as by .filled(np.nan)"
    elif array.dtype.kind not in "biufcmMSU":
        reason = f"an array of {array.dtype}: make it numbers or text, or a dict of such arrays"
    elif array.dtype.kind in "SU" and any(len(a) != len(b) for a, b in zip(texts, array.flat, strict=True)):
        reason = f"{quoted(value)}, a text that ends in null characters, which NumPy cuts off: make it a str"
    if reason is not None:
        raise ValueError(f"{where or 'it'} cannot be saved: {reason}")
    arrays.append((kind, dtype, array))
    return {"array": len(arrays) - 1}


def _decoded(encoded: Any, arrays: list[Any]) -> Any:
    if isinstance(encoded, list):
        return [_decoded(item, arrays) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "array" in encoded:
        return arrays[encoded["array"]]
    if "tuple" in encoded:
        return tuple(_decoded(item, arrays) for item in encoded["tuple"])
    if "dict" in encoded:
        return {key: _decoded(item, arrays) for key, item in encoded["dict"]}
    if (name := encoded["class"]) not in _CLASSES:
        raise LookupError(f"its class {quoted(name)} is unknown: import the module that defines it")
    return _CLASSES[name](**{name: _decoded(item, arrays) for name, item in encoded["fields"].items()})


@contextlib.contextmanager
def _refusing(path: Any, contents: dict[str, Any] | None = None) -> Iterator[None]:
    """Context of reading a file, in which any error means an invalid file, or a file of another release."""
    errors = (zipfile.BadZipFile, LookupError, TypeError, ValueError, EOFError, OSError, RuntimeError)
    errors += (struct.error, zlib.error, lzma.LZMAError)
    try:
        yield
    except errors as error:
        reason = "is not a complete file written by jtrees.save"
        if contents is not None and contents.get("jtrees") != __version__:
            reason = f"was written by jtrees {contents.get('jtrees')!s:.40}, and jtrees {__version__} cannot read it"
        raise ValueError(f"{path} {reason}: {error}") from error


@contextlib.contextmanager
def _archive(path: Any) -> Iterator[zipfile.ZipFile]:
    """Context of an archive, which is a path or an open file."""
    opened = contextlib.nullcontext(path) if hasattr(path, "read") else path.open("rb")
    with opened as file, _refusing(path), zipfile.ZipFile(file) as archive:
        yield archive


def _header(path: Any) -> dict[str, Any]:
    with _archive(path) as archive:
        contents = json.loads(archive.read("header.json"))
        version, _, arrays = contents["format"], contents["kind"], contents["arrays"]
        if version == FORMAT and any(len(entry) != 2 for entry in arrays):
            raise ValueError(f"arrays must be pairs of a kind and a type, got {quoted(arrays)}")
    if version != FORMAT:
        written = f"format {quoted(version)} of jtrees {contents.get('jtrees')!s:.40}"
        raise ValueError(f"{path} has {written}; jtrees {__version__} reads format {FORMAT}")
    return contents


def _arrays(path: Any, contents: dict[str, Any]) -> list[Any]:
    entries = contents["arrays"]
    double = [dtype for kind, dtype in entries if kind == "jax" and jax.dtypes.canonicalize_dtype(dtype) != dtype]
    if double:
        raise ValueError(f"{path} has {double[0]}: set the option jax_enable_x64 to load it")
    with _archive(path) as archive:
        members = (io.BytesIO(archive.read(f"{i}.npy")) for i in range(len(entries)))
        loaded = [np.lib.format.read_array(member, allow_pickle=False) for member in members]
        return [_as_it_was(array, *description) for array, description in zip(loaded, entries, strict=True)]


def _as_it_was(array: np.ndarray, kind: str, dtype: str) -> Any:
    if kind == "key":
        processes.require_xla("loading a key")
        return jax.random.wrap_key_data(sharding.from_host(array), impl=dtype)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if dtype == "object":
        array = array.astype(object)
    elif dtype != array.dtype.name:
        array = array.view(jnp.dtype(dtype))
    return array if kind == "numpy" else array[()] if kind == "scalar" else sharding.from_host(array)
