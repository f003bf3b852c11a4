"""Decision trees trained by gradient descent: a small set of pure functions that compose, compile and vmap."""

import importlib as _importlib
import pkgutil as _pkgutil
import types as _types
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from jtrees import (
        estimators as estimators,
        explain as explain,
        export as export,
        kernels as kernels,
        nn as nn,
        plotting as plotting,
    )
    from jtrees._api import *  # noqa: F403

__version__ = "0.1.0"
_MODULES = {
    module.name
    for module in _pkgutil.iter_modules(__path__)  # noqa: F405
    if not module.name.startswith("_")
}


def __getattr__(name: str) -> object:
    """Imports a module at its first use, and all public names at the first use of a name."""
    if name in _MODULES:
        return _importlib.import_module(f"jtrees.{name}")
    if name == "__all__" or not name.startswith("_"):
        names = _public_names()
        if name in names:
            return names[name]
    raise AttributeError(f"module 'jtrees' has no attribute {name!r:.80}")


def _public_names() -> dict[str, object]:
    """Adds the public names to this module, and returns them with ``__all__``."""
    api = vars(_importlib.import_module("jtrees._api"))
    names = {name: value for name, value in api.items() if not name.startswith("_")}
    names["__all__"] = [name for name, value in names.items() if not isinstance(value, _types.ModuleType)]
    globals().update(names)
    return names


def __dir__() -> list[str]:
    return sorted({*_public_names(), *globals(), *_MODULES})
