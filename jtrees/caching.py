"""Compiled programs in a folder, which later processes read instead of compiling them again."""

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
# By default JAX keeps only programs that take a second or more to compile. Most programs of a fit take less.
_KEEPS_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}
# The log advises a folder after a fit of more seconds than this, with a larger share of compilation than this.
LONG_SECONDS, LARGE_SHARE = 5.0, 0.5
_LOG = logging.getLogger("jtrees")
ADVICE: list[str] = []  # the advice, which is logged once in a process


def cache(folder: str | os.PathLike[str] | None = None) -> str:
    """Keeps compiled programs in a folder, which later processes read instead of compiling them again.

    The function switches on JAX's persistent compilation cache for all programs that this process compiles later. Small
    programs are kept too, except where JAX's own variables exclude them, such as
    ``JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS``. A program is still traced before it is read, which takes time.

    The environment variable ``JTREES_CACHE`` does the same when jtrees is imported. ``JTREES_CACHE=1`` selects the
    default folder, and ``JTREES_CACHE=FOLDER`` another folder. If the variable is 0 or empty, the import does not
    change JAX's settings. The command line keeps its programs except with ``JTREES_CACHE=0``.

    The folder can grow without limit. It can be deleted whenever no process uses it. An entry that cannot be read is
    replaced. A program is found again only by the same versions of jax and jaxlib. Machines with different processors
    need different folders. Anyone who can write to the folder can run code in the processes that read it.

    Args:
      folder: the folder, which is created if it is missing. None: the folder already set in JAX, for example by
        ``JAX_COMPILATION_CACHE_DIR``; else ``jtrees`` in ``$XDG_CACHE_HOME``, which is ``~/.cache`` by default.

    Returns:
      The folder.

    Raises:
      ValueError: if the folder cannot be created or written to.

    Example:
      >>> folder = jtrees.cache()  # later processes read what this one compiles
    """
    where = _default_folder() if folder is None else os.fspath(folder)
    if not isinstance(where, str) or not where:
        raise ValueError(f"folder must be a path, got {checks.quoted(folder)}")
    if "://" not in where:  # JAX opens a folder that is not on a disk at its first compilation
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
    _delete_unreadable()
    return where


def _delete_unreadable() -> None:
    """Makes JAX delete an entry that cannot be read, and read the folder's setting again.

    JAX warns and compiles the program, but it does not write over an existing entry. Every later process would compile
    the program again.
    """
    from jax._src import compilation_cache  # the public module cannot delete an entry

    compilation_cache.reset_cache()
    read = compilation_cache.get_executable_and_time
    if getattr(read, "deletes", False):
        return

    def read_or_delete(key: str, *args: Any) -> Any:
        try:
            return read(key, *args)
        except (OSError, MemoryError):  # the entry may be right
            raise
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                folder: Any = compilation_cache._get_cache(args[1])
                with contextlib.suppress(OSError, AttributeError):
                    (folder._path / f"{key}-cache").unlink()
            raise

    read_or_delete.deletes = True  # type: ignore[attr-defined]
    compilation_cache.get_executable_and_time = read_or_delete


def _default_folder() -> str:
    if jax.config.jax_compilation_cache_dir:
        return jax.config.jax_compilation_cache_dir
    try:
        return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jtrees")
    except RuntimeError:
        raise ValueError("folder must be a path where the user has no home folder, got None") from None


def cache_by_environment() -> None:
    """Calls :func:`cache` if the environment variable ``JTREES_CACHE`` requests it.

    Raises:
      ValueError: in the cases of :func:`cache`. The message names the variable.
    """
    if (setting := os.environ.get(_VARIABLE, "")) in ("", "0"):
        return
    try:
        cache(None if setting == "1" else setting)
    except ValueError as error:
        raise ValueError(f"{_VARIABLE}: {error}") from None


def is_decided() -> bool:
    """Returns whether a folder is set already, or the user refuses one by ``JTREES_CACHE=0`` or by JAX's own flag."""
    has_folder, allowed = bool(jax.config.jax_compilation_cache_dir), jax.config.jax_enable_compilation_cache
    return has_folder or not allowed or os.environ.get(_VARIABLE) == "0"


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Context of a fit. After the first long fit that mostly compiled, the log advises to keep programs."""
    if ADVICE or is_decided():
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
    if took > LONG_SECONDS and sum(compiled) > LARGE_SHARE * took and not ADVICE:
        advice = "jtrees.cache(), or JTREES_CACHE=1 in the environment, keeps the programs for later processes"
        ADVICE.append(f"{sum(compiled):.0f} of the {took:.0f} s of this fit were compilation: {advice}")
        _LOG.info(ADVICE[0])
