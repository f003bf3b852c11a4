"""The folder of the compiled programs of the tests. It lies outside the checkout, so a fresh checkout finds it too.

``python tests/compiled.py`` prints the folder, which can be deleted at any time. The variable ``JTREES_TEST_CACHE`` is
another folder, or ``off`` to measure compilation.
"""

import hashlib
from importlib import metadata
import os
from pathlib import Path
import platform


def settings() -> dict[str, str | float]:
    """Returns the settings of JAX by name, by which programs of any size are kept in the folder."""
    where = os.environ.get("JTREES_TEST_CACHE") or str(folder())
    if where == "off":
        return {}
    no_limits = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}
    return {"jax_compilation_cache_dir": where} | no_limits


def environment() -> dict[str, str]:
    """Returns the settings as environment variables, for other processes."""
    return {name.upper(): str(value) for name, value in settings().items()}


def folder() -> Path:
    """Returns the folder for this version of jaxlib and this processor, because machine code suits one processor."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "jtrees-tests" / f"jaxlib-{metadata.version('jaxlib')}-{_processor()}"


def _processor() -> str:
    """Returns a hash of the name and the instruction sets of the processor."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    named = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return hashlib.sha256("\n".join([platform.machine(), *sorted(named)]).encode()).hexdigest()[:12]


if __name__ == "__main__":
    print(folder())
