"""The public names of a package, which ``help`` and ``from package import *`` list: all that its module imports."""

import sys
import types
from typing import Any


def _is_public(name: str, value: Any, package: str) -> bool:
    if name.startswith("_") or isinstance(value, types.ModuleType):
        return False
    home = getattr(value, "__module__", None) or package
    # A name of another library is a tool of the module, unless it is a type with a name of the package's own.
    return home.startswith(package) or (not home.startswith("jtrees") and getattr(value, "__name__", "") != name)


def list_public_names() -> None:
    """Sets ``__all__`` of all packages of jtrees that are imported."""
    for package, module in list(sys.modules.items()):
        if package.partition(".")[0] == "jtrees" and hasattr(module, "__path__"):
            names = [name for name, value in vars(module).items() if _is_public(name, value, package)]
            vars(module)["__all__"] = names
