"""Standard output and standard error. If they cannot show a text, the text is dropped, and the command continues."""

from collections.abc import Iterator
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


class Console:
    """The two streams of a command."""

    def __init__(self) -> None:
        self.streams = _Stream(sys.stdout), _Stream(sys.stderr)

    def status(self, status: int) -> int:
        """Returns the exit status: 141 instead of 0 if the reader has gone, and 2 after another error of the output."""
        errors = [stream.error for stream in self.streams if stream.error is not None]
        if status or not errors:
            return status
        if isinstance(errors[0], BrokenPipeError):
            return _BROKEN_PIPE
        print(f"jtrees: cannot show the output: {errors[0].strerror}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def console() -> Iterator[Console]:
    """Context in which what is printed cannot raise an error."""
    shown = Console()
    output, errors = shown.streams
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):  # type: ignore[type-var]
        try:
            yield shown
        finally:
            for stream in shown.streams:
                stream.flush()
                stream.close_broken()
