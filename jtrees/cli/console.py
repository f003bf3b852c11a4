"""Standard output and standard error. If they cannot show a text, the text is dropped, and the command continues."""

from collections.abc import Callable
import contextlib
import os
import sys
from typing import Any

_BROKEN_PIPE = 141  # the exit status in a shell of a program whose reader has gone


class _Stream:
    """A text stream that shows other characters as their codes, and keeps its first error instead of raising it."""

    def __init__(self, stream: Any):
        self.error: OSError | None = None
        self._stream = stream

    def _call(self, method: str, *arguments: Any) -> None:
        if self._stream is not None and self.error is None:  # Python has no stream if the descriptor is closed
            try:
                getattr(self._stream, method)(*arguments)
            except OSError as error:
                self.error = error

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._call("write", text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        self._call("flush")

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def close_broken(self) -> None:
        """Leads the rest of a broken stream, which Python flushes when it ends, to nowhere."""
        if self.error is not None:
            with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor
                os.dup2(nowhere := os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
                os.close(nowhere)


def status_of(run: Callable[[], int]) -> int:
    """Returns the exit status of a command, in which what is printed cannot raise an error.

    It is 141 instead of 0 if the reader of the output has gone, and 2 after another error of the output.
    """
    streams = output, errors = _Stream(sys.stdout), _Stream(sys.stderr)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):  # type: ignore[type-var]
        try:
            status = run()
        finally:
            for stream in streams:
                stream.flush()
                stream.close_broken()
    error = output.error or errors.error
    if status or error is None:
        return status
    if isinstance(error, BrokenPipeError):
        return _BROKEN_PIPE
    print(f"jtrees: cannot show the output: {error.strerror}", file=sys.stderr)
    return 2
