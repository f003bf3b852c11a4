"""Standard output, standard error and SIGTERM. If a stream cannot show a text, the text is dropped."""

from collections.abc import Callable, Iterator
import contextlib
import os
import signal
import sys
import threading
from typing import Any

# The exit statuses in a shell of programs that signals end: the reader of the output has gone, and SIGTERM.
_BROKEN_PIPE, _TERMINATED = 141, 143


class _Stream:
    """A text stream that shows other characters as their codes, and keeps its first error instead of raising it."""

    def __init__(self, stream: Any):
        self.error: OSError | None = None
        self._stream = stream

    def _call(self, action: Callable[[Any], Any]) -> None:
        if self._stream is not None and self.error is None:  # Python has no stream if the descriptor is closed
            try:
                action(self._stream)
            except OSError as error:
                self.error = error

    def write(self, text: str) -> int:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._call(lambda stream: stream.write(text.encode(encoding, "backslashreplace").decode(encoding)))
        return len(text)

    def write_data(self, text: str) -> None:
        """Writes text for other programs: as UTF-8 without a change, unless the stream is a terminal."""
        if self.isatty() or not hasattr(self._stream, "buffer"):
            self.write(text)
        else:
            self.flush()  # the buffer is behind the text stream
            self._call(lambda stream: stream.buffer.write(text.encode()))

    def flush(self) -> None:
        self._call(lambda stream: stream.flush())

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


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Context in which SIGTERM raises ``SystemExit``, so that unfinished files are removed."""
    # Only Python's main thread receives signals. A handler of the caller stays.
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


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
