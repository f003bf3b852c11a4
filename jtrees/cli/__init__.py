"""The command line, ``jtrees``: fit, predict, explain, export and report (needs ``pip install "jtrees[cli]"``)."""

from collections.abc import Sequence
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
    """Keeps compiled programs in the folder of :func:`jtrees.cache`, unless JTREES_CACHE=0 or JAX has a folder already.

    Without such a folder a line on standard error says so.
    """
    from jtrees import caching

    if not caching.is_decided():
        try:
            caching.cache()
        except ValueError as error:
            print(f"jtrees: compiled programs are not kept: {error}", file=sys.stderr)
