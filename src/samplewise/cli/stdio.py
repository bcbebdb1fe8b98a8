"""Standard output and standard error: closed pipes, full disks; notices of slow operations.

If writing to standard output fails, the command ends: without a message if the reader has closed the pipe, as in
`samplewise doctor ... | head`, otherwise with one line. The error is a BaseException, so that `except Exception` does
not report it as an error of the recipe. If writing to standard error fails, the text is lost and the command continues;
the exit code is unchanged.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import typer

from samplewise.core.text import notify_if_slow

CLOSED_PIPE = 141  # exit code: 128 + SIGPIPE, as shells report it


class OutputError(BaseException):
    """Raised when standard output cannot be written to."""

    def __init__(self, why: OSError):
        super().__init__(
            f"standard output must be writable; found: {why.strerror or why}. Free some disk space, or redirect the "
            "output to another place."
        )
        self.quiet = isinstance(why, BrokenPipeError)
        self.code = CLOSED_PIPE if self.quiet else 1


class GuardedStream:
    """Text stream that handles write errors.

    After the first OSError the stream is redirected to the null device. If `required`, OutputError is raised as well.
    """

    def __init__(self, stream: Any, required: bool):
        self._stream = stream
        self._required = required

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._handle_errors():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        with self._handle_errors():
            self._stream.writelines(lines)

    def flush(self) -> None:
        with self._handle_errors():
            self._stream.flush()

    @contextmanager
    def _handle_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as why:
            # Redirect a stream to the null device; otherwise the interpreter fails to flush it at exit.
            with suppress(OSError, ValueError):  # the stream has no file descriptor
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            if self._required:
                raise OutputError(why) from why


@contextmanager
def guarded_output() -> Iterator[None]:
    """Replace sys.stdout and sys.stderr by guarded streams within the block. A closed stream (None) stays None."""
    streams = sys.stdout, sys.stderr
    if sys.stdout is not None:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            # File names may hold characters that the encoding lacks.
            sys.stdout.reconfigure(errors="backslashreplace")
        sys.stdout = GuardedStream(sys.stdout, required=True)
    if sys.stderr is not None:
        sys.stderr = GuardedStream(sys.stderr, required=False)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def slow_notice(operation: str) -> AbstractContextManager[None]:
    """Print a notice on standard error if the block takes longer than 2 s."""
    return notify_if_slow(lambda message: typer.echo(f"... {message}", err=True), operation)
