"""The public names of a package, for ``help`` and ``from package import *``: the names that its module imports."""

import sys
import types
from typing import Any


def _is_public(name: str, value: Any, package: str) -> bool:
    if name.startswith("_") or isinstance(value, types.ModuleType):
        return False
    home = getattr(value, "__module__", None) or package
    # A name imported from another library is private. An alias of the package for a type of another library is public.
    return home.startswith(package) or (not home.startswith("jtrees") and getattr(value, "__name__", "") != name)


def list_public_names(package: str, home: str | None = None) -> None:
    """Sets ``__all__`` of a package at the end of its import; ``home`` is the package that defines the names."""
    names = vars(sys.modules[package])
    names["__all__"] = [name for name, value in names.items() if _is_public(name, value, home or package)]
