"""Standard output and standard error of a command that may be closed pipes or on a full disk.

If standard output fails, the command ends: quietly if the reader has closed the pipe, as in `samplewise doctor ... |
head`, otherwise with one line. The error is no Exception, so that nothing takes it for a failure of the recipe. If
standard error fails, what is written to it is lost, and the command goes on: the exit code still tells how it ended.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

CLOSED_PIPE = 141  # exit code: 128 + SIGPIPE, as shells report it


class OutputError(BaseException):
    """Standard output cannot be written to."""

    def __init__(self, why: OSError):
        super().__init__(
            f"standard output must accept what is written to it; found: {why.strerror or why}. Free some space, or "
            "redirect the output to another place."
        )
        self.quiet = isinstance(why, BrokenPipeError)
        self.code = CLOSED_PIPE if self.quiet else 1


class Guarded:
    """A text stream. The first OSError is raised as OutputError if `needed`; what follows goes to the null device."""

    def __init__(self, stream: Any, needed: bool):
        self._stream = stream
        self._needed = needed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._guarding():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        with self._guarding():
            self._stream.writelines(lines)

    def flush(self) -> None:
        with self._guarding():
            self._stream.flush()

    @contextmanager
    def _guarding(self) -> Iterator[None]:
        try:
            yield
        except OSError as why:
            _discard(self._stream)
            if self._needed:
                raise OutputError(why) from why


def _discard(stream: Any) -> None:
    """Redirect a stream to the null device: else the interpreter fails to flush it when it exits."""
    with suppress(OSError, ValueError):  # it has no file descriptor
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


@contextmanager
def guarded_output() -> Iterator[None]:
    """Replace sys.stdout and sys.stderr by guarded ones, until the end of the block. Either may be None: closed."""
    streams = sys.stdout, sys.stderr
    if sys.stdout is not None:
        if (
            isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict"
        ):  # names of files may hold what the encoding has not
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout = Guarded(sys.stdout, needed=True)
    if sys.stderr is not None:
        sys.stderr = Guarded(sys.stderr, needed=False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
