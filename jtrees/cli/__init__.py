"""The command line, ``jtrees``: fit, predict, explain, export and report (needs ``pip install "jtrees[cli]"``)."""

from collections.abc import Sequence
import sys
from typing import Any

from jtrees.cli.console import console
from jtrees.cli.parser import parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    The status is 0 on success, 2 after an error message in a single line, and 130 after Ctrl-C. It is 141 if the reader
    of the output has gone, which ends no command.
    """
    options = parse(arguments)
    with console() as shown:
        status = _run(options)
    return shown.status(status)


def _run(options: Any) -> int:
    try:
        from jtrees.cli import commands  # a slow import, which the help does not need
    except ImportError as error:
        print(f'jtrees: {error}: the command line needs pip install "jtrees[cli]"', file=sys.stderr)
        return 2
    except ValueError as error:  # an environment variable of jtrees or JAX
        print(f"jtrees: {error}", file=sys.stderr)
        return 2
    return commands.run(options)
