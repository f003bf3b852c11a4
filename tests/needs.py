"""What some tests need and a machine may lack. Without it they are skipped, and the last line of a run counts them."""

from collections import Counter
from collections.abc import Iterable
import os
from pathlib import Path
import shutil
from typing import Any

import pytest

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
CPP_COMPILER = shutil.which("g++") or shutil.which("c++")
NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
INITDB = shutil.which("initdb")  # Debian leaves the programs of a server out of the path
POSTGRESQL = max(Path("/usr/lib/postgresql").glob("*/bin"), default=Path(INITDB).parent if INITDB else None)
_REASON = "needs "


def mark(available: Any, need: str) -> pytest.MarkDecorator:
    """Returns a mark that skips a test unless ``available`` is true."""
    return pytest.mark.skipif(not available, reason=_REASON + need)


def check(available: Any, need: str) -> None:
    """Skips the test that runs unless ``available`` is true."""
    if not available:
        pytest.skip(_REASON + need)


def package(name: str) -> Any:
    """Returns a module of a package that the extras do not install. Without the package the test is skipped."""
    return pytest.importorskip(name, reason=f"{_REASON}the package {name}")


def summary(reports: Iterable[Any]) -> str:
    """Returns a line that counts the skipped tests by what they need. It is empty if nothing lacks.

    Args:
      reports: pytest's reports of skipped tests.
    """
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in reports]
    counts = Counter(reason.removeprefix(_REASON) for reason in reasons if reason.startswith(_REASON))
    listed = ", ".join(f"{counts[need]} {need}" for need in sorted(counts))
    return f"skipped tests by what they need: {listed}" if counts else ""


needs_compiler = mark(COMPILER, "a C compiler")
needs_node = mark(NODE, "Node.js")
