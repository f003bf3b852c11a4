"""Compiled programs in a folder, from which later processes read them instead of compiling them."""

from collections.abc import Iterator
import contextlib
import logging
import os
from pathlib import Path
import tempfile
import time
from typing import Any

import jax

from jtrees import validation as checks

_VARIABLE = "JTREES_CACHE"
# By default JAX keeps no program that compiles in less than a second, as most programs of a fit do.
_KEEPS_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}
_LONG, _LARGE = 5.0, 0.5  # seconds of a fit, and the part of them in the compiler, beyond which a folder is advised
_LOG = logging.getLogger("jtrees")
_SAID: list[str] = []  # what the log was told, once in a process


def cache(folder: str | os.PathLike[str] | None = None) -> str:
    """Keeps compiled programs in a folder, from which later processes read them instead of compiling them.

    The function switches on JAX's persistent compilation cache for all programs that this process compiles from now
    on. Small programs are kept, too, unless JAX's own variables forbid it, such as
    ``JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS``. A program is traced before it is read, which takes time as well.

    The environment variable ``JTREES_CACHE`` does the same when jtrees is imported: ``JTREES_CACHE=1`` with the default
    folder, ``JTREES_CACHE=FOLDER`` with another. With 0 or nothing in it, the import leaves JAX as it is. The command
    line keeps its programs unless the variable is 0.

    The folder grows without bound; it may be deleted whenever no process uses it. Only the same versions of jax and
    jaxlib find a program again. Machines with different processors need different folders. Whoever can write to the
    folder can run code in the processes that read it.

    Args:
      folder: the folder, which is made if it is missing. None: the folder that JAX has already, such as by
        ``JAX_COMPILATION_CACHE_DIR``; or else ``jtrees`` in ``$XDG_CACHE_HOME``, by default in ``~/.cache``.

    Returns:
      The folder.

    Raises:
      ValueError: if the folder cannot be made or written to.

    Example:
      >>> folder = jtrees.cache()  # later processes read what this one compiles
    """
    where = _default_folder() if folder is None else os.fspath(folder)
    if not isinstance(where, str) or not where:
        raise ValueError(f"folder must be a path, got {checks.quoted(folder)}")
    if "://" not in where:  # what is not on a disk, JAX opens at its first compilation
        where = os.path.abspath(os.path.expanduser(where))
        try:
            os.makedirs(where, exist_ok=True)
            with tempfile.TemporaryFile(dir=where):
                pass
        except OSError as error:
            got = f"{checks.quoted(where)}: {error.strerror or type(error).__name__}"
            raise ValueError(f"folder must be one that can be made and written to, got {got}") from None
    jax.config.update("jax_compilation_cache_dir", where)
    for name, value in _KEEPS_ALL.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    # JAX decides at its first compilation whether there is a folder, and which.
    from jax.experimental.compilation_cache import compilation_cache

    compilation_cache.reset_cache()
    return where


def _default_folder() -> str:
    if jax.config.jax_compilation_cache_dir:
        return jax.config.jax_compilation_cache_dir
    try:
        return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jtrees")
    except RuntimeError:
        raise ValueError("folder must be a path where the user has no home folder, got None") from None


def cache_by_environment() -> None:
    """Calls :func:`cache` if the environment variable ``JTREES_CACHE`` asks for it.

    Raises:
      ValueError: as :func:`cache`, naming the variable.
    """
    if (wanted := os.environ.get(_VARIABLE, "")) in ("", "0"):
        return
    try:
        cache(None if wanted == "1" else wanted)
    except ValueError as error:
        raise ValueError(f"{_VARIABLE}: {error}") from None


def is_decided() -> bool:
    """Whether programs are kept in a folder already, or the user wants none: ``JTREES_CACHE=0``, or JAX's own flag."""
    has_folder, allowed = bool(jax.config.jax_compilation_cache_dir), jax.config.jax_enable_compilation_cache
    return has_folder or not allowed or os.environ.get(_VARIABLE) == "0"


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Context of a fit. Once in a process, after a long fit that mostly compiled, the log says how to keep programs."""
    if _SAID or is_decided():
        yield
        return
    compiled, began = [], time.monotonic()

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    took = time.monotonic() - began
    if took > _LONG and sum(compiled) > _LARGE * took and not _SAID:
        advice = "jtrees.cache(), or JTREES_CACHE=1 in the environment, keeps the programs for later processes"
        _SAID.append(f"{sum(compiled):.0f} of the {took:.0f} s of this fit were compilation: {advice}")
        _LOG.info(_SAID[0])
