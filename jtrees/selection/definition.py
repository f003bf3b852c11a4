"""Definitions: values as text that is equal in all processes, and differs if what a call of them reads differs."""

from collections.abc import Iterator, Mapping
import dataclasses
import dis
import enum
import functools
import hashlib
import sys
import types
from typing import Any

import jax
import numpy as np

from jtrees.tasks.custom import CustomLoss
from jtrees.validation import quoted

# Packages whose version stands for their code: what jtrees needs, and Python's own.
_LIBRARIES = frozenset(
    ("chex", "flax", "jax", "jaxlib", "jaxtyping", "jtrees", "numpy", "optax", "pallas_kernels", "scipy")
) | {*sys.stdlib_module_names}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, type(...), np.dtype)
_CODE = "code exceptiontable consts names varnames freevars cellvars argcount posonlyargcount kwonlyargcount flags"
_GENERATED = frozenset(  # methods that dataclasses make of the fields
    ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__", "__replace__", "replace")
)


def definition(name: str, value: Any) -> str:
    """Returns the definition of a value, the argument ``name``, as text.

    The definition of a function has its code, defaults and closure, and the globals that it reads. The definition of an
    object has its class and attributes, and the definition of a class has its methods. A function or a class with an
    attribute ``version``, and a :class:`jtrees.losses.CustomLoss` with a name, stand for their code. So does the
    version of a package that jtrees needs.

    Raises:
      ValueError: for a value that has no such definition, such as a module of the user. The message has the remedy.
    """
    try:
        return _text(value, ())
    except (_UndefinedError, RecursionError) as error:
        raise ValueError(
            f"{name} must be defined by code, numbers, text, arrays and objects of these for runs in a folder, got "
            f'{error}: give it a version of your own, CustomLoss(loss, name="pinball 0.1") for a loss, else an '
            'attribute version = "0.1" of the function or class'
        ) from None


class _UndefinedError(Exception):
    """A value has no definition."""


def _text(value: Any, around: tuple[Any, ...]) -> str:
    """Returns the definition of a value; ``around`` are the values that hold it."""
    if type(value) in _PLAIN or isinstance(value, np.dtype) or type(value).__module__ == "typing":
        return repr(value)
    if type(value) is object:  # a mark, which holds nothing
        return "object"
    if any(value is outer for outer in around):
        return "itself"
    text = functools.partial(_text, around=(*around, value))
    if isinstance(value, np.generic) and type(item := value.item()) in _PLAIN:
        return repr(item)
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"key({text([str(jax.random.key_impl(value)), jax.random.key_data(value)])})"
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(value)
        return f"array {text(array.tolist()) if array.dtype == object else checksum(array)}"
    if isinstance(value, CustomLoss) and value.name is not None:
        return f"CustomLoss({text(value.name)})"
    if (library := _library_text(value)) is not None:
        return library
    if isinstance(value, functools.partial):
        return f"partial({text([value.func, value.args, value.keywords])})"
    if isinstance(value, types.MethodType):
        return f"method({text([value.__func__, value.__self__])})"
    if isinstance(value, types.BuiltinMethodType) and not isinstance(value.__self__, types.ModuleType):
        return f"method({text([value.__name__, value.__self__])})"
    if isinstance(value, types.FunctionType):
        return _function_text(value, text)
    if hasattr(value, "__wrapped__") and _package(type(value).__module__) in _LIBRARIES:
        # A function under jit, or with its own derivative.
        rules = [getattr(value, rule, None) for rule in ("jvp", "fwd", "bwd")]
        return text([value.__wrapped__, *(rule for rule in rules if isinstance(rule, types.FunctionType))])
    if isinstance(value, types.CodeType):
        return text([getattr(value, f"co_{part}", None) for part in _CODE.split()])
    if isinstance(value, type):
        return _class_text(value, text)
    kind = "" if type(value) in (dict, list, tuple, set, frozenset) else text(type(value))
    if isinstance(value, Mapping):
        return f"{kind}{{{', '.join(f'{text(name)}: {text(item)}' for name, item in value.items())}}}"
    if isinstance(value, (set, frozenset)):  # the order of text in a set differs between processes
        return f"{kind}set({sorted(map(text, value))})"
    if isinstance(value, (list, tuple)):
        texts = ", ".join(map(text, value))
        return f"{kind}[{texts}]" if isinstance(value, list) else f"{kind}({texts})"
    if isinstance(value, enum.Enum):
        return f"{kind}.{value.name}"
    return f"{kind}({text(_state(value, around))})"


def _package(module: Any) -> str:
    return str(module).partition(".")[0]


def _library_text(value: Any) -> str | None:
    """Returns the name and the version of a public or private object of a library; None for other objects."""
    if isinstance(value, types.ModuleType):
        name, place = value.__name__, value
    elif isinstance(value, np.ufunc):
        name, place = f"numpy.{value.__name__}", value
    else:
        module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
        place = sys.modules.get(str(module))
        for part in str(name).split("."):
            place = getattr(place, part, None)
        name = f"{module}.{name}"
    if place is not value or (package := _package(name)) not in _LIBRARIES:
        return None
    return f"{name} {getattr(sys.modules.get(package), '__version__', '')}".strip()


def _function_text(function: types.FunctionType, text: Any) -> str:
    """Returns the name of a function, and a checksum of its parts."""
    attributes = dict(vars(function))
    if (version := attributes.pop("version", None)) is not None:
        return f"{function.__module__}.{function.__qualname__} {text(version)}"
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    parts: list[Any] = [{name: cell.cell_contents for name, cell in cells if cell != types.CellType()}]
    home = function.__globals__.get("__name__")
    if _package(home) in _LIBRARIES:  # a function that a library has made, such as vmap(f)
        parts.append(f"{home}.{function.__code__.co_qualname}")
    else:
        parts += [function.__code__, function.__defaults__, function.__kwdefaults__, attributes]
        parts.append({name: function.__globals__[name] for name in _reads(function)})
    return f"{function.__module__}.{function.__qualname__} {checksum([text(part) for part in parts])}"


def _reads(function: types.FunctionType) -> list[str]:
    """Returns the names of the globals that a function reads."""

    def instructions(code: types.CodeType) -> Iterator[dis.Instruction]:
        yield from dis.get_instructions(code)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from instructions(constant)

    names = set()
    for step in instructions(function.__code__):
        if step.opname == "IMPORT_NAME":
            if _package(step.argval) not in _LIBRARIES:
                raise _UndefinedError(f"{quoted(function)}, which imports {quoted(step.argval)}")
        elif "GLOBAL" in step.opname or "NAME" in step.opname:
            names.add(step.argval)
    return sorted(name for name in names if name in function.__globals__)


def _class_text(cls: type, text: Any) -> str:
    """Returns the name of a class, and a checksum of its methods and attributes and of its bases."""
    members, name = dict(vars(cls)), f"{cls.__module__}.{cls.__qualname__}"
    if (version := members.pop("version", None)) is not None:
        return f"{name} {text(version)}"
    generated = _GENERATED if dataclasses.is_dataclass(cls) else frozenset()
    parts: dict[str, Any] = {}
    for member, value in members.items():
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, functools.cached_property):
            value = value.func
        if isinstance(value, property):
            value = [value.fget, value.fset]
        is_hidden = member.startswith("__") and not isinstance(value, types.FunctionType)
        if member not in generated and not is_hidden and member != "_abc_impl":
            parts[member] = value
    bases = [base for base in cls.__bases__ if base is not object]
    return f"{name} {checksum([text(parts), text(bases)])}"


def _state(value: Any, around: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the attributes of an object by name; raises an error if it can hold more than attributes."""
    if isinstance(value, types.ModuleType) or any(map(_is_native, type(value).__mro__)):
        holder = next((outer.__qualname__ for outer in reversed(around) if hasattr(outer, "__qualname__")), None)
        raise _UndefinedError(f"{quoted(value)}{'' if holder is None else f' in {holder}'}")
    fields, cached = dataclasses.fields(value) if dataclasses.is_dataclass(value) else (), functools.cached_property
    state = {field.name: getattr(value, field.name) for field in fields}
    return state | {n: v for n, v in vars(value).items() if not isinstance(getattr(type(value), n, None), cached)}


def _is_native(cls: type) -> bool:
    """Returns whether objects of a class hold more than attributes: a class of C, or one with slots."""
    slots = vars(cls).get("__slots__")
    return cls is not object and slots != () and (bool(slots) or "__dict__" not in dir(cls))


def checksum(values: Any) -> str:
    """Returns a checksum of nested lists and tuples of arrays, numbers and text."""
    digest = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            digest.update(f"[{len(value)}".encode())
            for item in value:
                add(item)
        elif isinstance(value, np.ndarray):
            digest.update(f"{value.dtype}{value.shape}".encode())
            digest.update(np.ascontiguousarray(value).tobytes())
        else:
            digest.update(repr(value).encode())

    add(values)
    return digest.hexdigest()[:16]
