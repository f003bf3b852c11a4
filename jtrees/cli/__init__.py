"""The command line, ``jtrees``: fit, predict, explain, export and report (needs ``pip install "jtrees[cli]"``)."""

from collections.abc import Sequence
import os
from pathlib import Path
import sys


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, 2 after one line that says what was wrong, or 130 after Ctrl-C."""
    try:
        from jtrees.cli import commands
    except ImportError as error:
        print(f'jtrees: {error}: the command line needs pip install "jtrees[cli]"', file=sys.stderr)
        return 2
    return commands.run(arguments)


def keep_programs() -> None:
    """Keeps compiled programs in the user's cache folder, unless JAX_COMPILATION_CACHE_DIR says where."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "jtrees"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
