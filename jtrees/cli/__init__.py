"""The command line, ``jtrees``: fit, predict, explain, export and report (needs ``pip install "jtrees[cli]"``)."""

from collections.abc import Sequence
import sys
from typing import Any

from jtrees.cli.console import ended_by_sigterm, status_of
from jtrees.cli.parser import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    The status is 0 on success, 2 after an error message in a single line, and 130 after Ctrl-C. It is 141 if the reader
    of the output has gone, which ends no command. SIGTERM raises ``SystemExit(143)``.
    """
    options = parse(arguments)
    with ended_by_sigterm():
        return status_of(lambda: _run(options))


def _run(options: Any) -> int:
    try:
        from jtrees.cli import commands  # a slow import, which the help does not need
    except (ImportError, ValueError) as error:  # a ValueError is of an environment variable of jtrees or JAX
        remedy = ': the command line needs pip install "jtrees[cli]"' if isinstance(error, ImportError) else ""
        print(f"jtrees: {error}{remedy}", file=sys.stderr)
        return 2
    return commands.run(options)
