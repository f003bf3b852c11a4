"""Compiled programs in a folder, which later processes read instead of compiling them again.

JAX can limit the size of its folder by ``jax_compilation_cache_max_size``. JAX then needs the package filelock, and
reads the time of every entry at each write: 0.2 s for 4,000 entries. In jax 0.10, an entry without a time stops all
later writes. So this module deletes old entries itself.
"""

import contextlib
import glob
import hashlib
import itertools
import os
from pathlib import Path
import platform
import re
import sys
import tempfile
from typing import Any

import jax

from jtrees import processes, validation as checks

_VARIABLE = "JTREES_CACHE"
_MACHINE = re.compile("[0-9a-f]{12}-[0-9]+")  # names of subfolders, which ``_machine`` returns
# By default JAX keeps only programs that take a second or more to compile. Most programs of a fit take less.
_KEEPS_ALL = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}
# Limits of a folder: the bytes of all entries, and their number, because a check of the limits looks at each entry.
LARGEST_SIZE, MOST_ENTRIES = 10**9, 10_000
_WRITES = 256  # number of programs that a process writes between two checks


def cache(folder: str | os.PathLike[str] | None = None) -> str:
    """Keeps compiled programs in a folder. Later processes read the programs instead of compiling them again.

    jtrees keeps programs by default, in a folder of the user's caches, unless JAX has a folder already. This function
    selects another folder, by JAX's persistent compilation cache. A program is still traced before it is read, which
    takes time. The environment variable ``JTREES_CACHE=FOLDER`` does the same, and ``JTREES_CACHE=0`` keeps no
    programs.

    The programs are in a subfolder for the kind and the number of processors, because machine code depends on both. If
    these subfolders hold more than 1 GB or 10,000 programs, the least recently read programs are deleted. An entry that
    cannot be read is replaced. The folder can be deleted at any time. A program is found again only by the same
    versions of jax and jaxlib. Anyone who can write to the folder can run code in the processes that read it.

    Args:
      folder: the folder, which is created if it is missing. None: the folder already set in JAX, which is used as it
        is, without a subfolder or a limit; else ``jtrees`` in the user's folder of caches. This is ``$XDG_CACHE_HOME``,
        by default ``~/.cache``; on macOS ``~/Library/Caches``, and on Windows ``%LOCALAPPDATA%``.

    Returns:
      The subfolder, or the folder already set in JAX.

    Raises:
      ValueError: if the folder cannot be created or written to.

    Example:
      >>> folder = jtrees.cache()  # later processes read the programs of this process
    """
    if folder is None and jax.config.jax_compilation_cache_dir:
        where = jax.config.jax_compilation_cache_dir
    else:
        where = _made_subfolder(_default_folder() if folder is None else folder)
    jax.config.update("jax_compilation_cache_dir", where)
    for name, value in _KEEPS_ALL.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    with contextlib.suppress(ImportError, AttributeError):  # private functions, which another version of JAX may lack
        _tolerate_failures()
    return where


def keep_by_default() -> None:
    """Keeps programs in the default folder, or as the environment variable ``JTREES_CACHE`` requests.

    The function changes nothing if JAX has a folder or has its cache switched off, or if the default folder cannot be
    written to.

    Raises:
      ValueError: if the variable names a folder that cannot be created or written to. The message names the variable.
    """
    setting = os.environ.get(_VARIABLE, "")
    if setting in ("", "1"):
        has_folder, allowed = bool(jax.config.jax_compilation_cache_dir), jax.config.jax_enable_compilation_cache
        if allowed and not has_folder:
            with contextlib.suppress(ValueError):
                cache()
    elif setting != "0":
        try:
            cache(setting)
        except ValueError as error:
            raise ValueError(f"{_VARIABLE}: {error}") from None


def _default_folder() -> str:
    try:
        usual = {"darwin": "~/Library/Caches", "win32": os.environ.get("LOCALAPPDATA") or "~/AppData/Local"}
        folder = os.environ.get("XDG_CACHE_HOME") or usual.get(sys.platform, "~/.cache")
        return str(Path(folder).expanduser() / "jtrees")
    except RuntimeError:
        raise ValueError("folder must be a path where the user has no home folder, got None") from None


def _made_subfolder(folder: Any) -> str:
    """Returns the subfolder of this machine, after it was created; ``ValueError`` if it cannot be written to."""
    root = os.fspath(folder)
    if not isinstance(root, str) or not root:
        raise ValueError(f"folder must be a path, got {checks.quoted(folder)}")
    if "://" in root:  # JAX opens a folder that is not on a disk at its first compilation
        return f"{root}/{_machine()}"
    root = os.path.abspath(os.path.expanduser(root))
    where = os.path.join(root, _machine())
    try:
        os.makedirs(where, exist_ok=True)
        with tempfile.TemporaryFile(dir=where):
            pass
    except OSError as error:
        got = f"{checks.quoted(root)}: {error.strerror or type(error).__name__}"
        raise ValueError(f"folder must be one that can be made and written to, got {got}") from None
    return where


def _machine() -> str:
    """Returns a name for the kind of processor and the number of processors."""
    # XLA compiles for the instructions of the processor, and divides loops among the processors.
    lines = []
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        first = itertools.takewhile(str.strip, file)
        lines = [line for line in first if line.startswith(("model name", "flags", "Features"))]
    text = "\n".join([platform.machine(), *(lines or [platform.processor()])])
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]}-{processes.processors()}"


def _tolerate_failures() -> None:
    """Makes JAX compile, without a warning, a program that it cannot read or write, and open the folder anew."""
    # JAX warns, and does not write over an entry that it cannot read. Every later process would compile the program
    # again. Such entries come from processes that were killed, or are being written by another process.
    from jax._src import compilation_cache  # the public module cannot delete an entry

    compilation_cache.reset_cache()
    read, write = compilation_cache.get_executable_and_time, compilation_cache.put_executable_and_time
    if getattr(read, "tolerates_failures", False):
        return
    writes = itertools.count()

    def tolerant_read(key: str, *args: Any) -> Any:
        try:
            return read(key, *args)
        except (OSError, MemoryError):  # the entry may be right
            return None, None
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                folder: Any = compilation_cache._cache
                with contextlib.suppress(OSError, AttributeError):
                    (folder._path / f"{key}-cache").unlink()
            return None, None

    def tolerant_write(*args: Any) -> None:
        with contextlib.suppress(OSError):
            write(*args)
        folder = str(jax.config.jax_compilation_cache_dir)
        if next(writes) % _WRITES == 0 and os.path.basename(folder) == _machine():
            _delete_old_entries(os.path.dirname(folder))

    tolerant_read.tolerates_failures = True  # type: ignore[attr-defined]
    compilation_cache.get_executable_and_time = tolerant_read
    compilation_cache.put_executable_and_time = tolerant_write


def _delete_old_entries(root: str) -> None:
    """Deletes the entries that were read least recently, if the folder exceeds its limits."""
    # Where the disk does not note when a file is read, the entries that were written first are deleted. Only subfolders
    # of machines count, because other programs may have entries in the same folder, such as `~/.cache`.
    entries = []
    machines = (name for name in glob.iglob(f"{glob.escape(root)}/*") if _MACHINE.fullmatch(os.path.basename(name)))
    for path in itertools.chain.from_iterable(glob.iglob(f"{glob.escape(name)}/*-cache") for name in machines):
        with contextlib.suppress(OSError):  # another process has deleted it
            status = os.stat(path)
            entries.append((max(status.st_atime, status.st_mtime), status.st_size, path))
    size = 0
    for count, (_, entry_size, path) in enumerate(sorted(entries, reverse=True)):
        size += entry_size
        if size > LARGEST_SIZE or count >= MOST_ENTRIES:
            with contextlib.suppress(OSError):
                os.unlink(path)
