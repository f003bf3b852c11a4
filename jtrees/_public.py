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


def list_public_names() -> None:
    """Sets ``__all__`` in all imported packages of jtrees."""
    for package, module in list(sys.modules.items()):
        if package.partition(".")[0] == "jtrees" and hasattr(module, "__path__"):
            home = vars(module).get("_HOME", package)  # the package that defines the names
            names = [name for name, value in vars(module).items() if _is_public(name, value, home)]
            vars(module)["__all__"] = names
