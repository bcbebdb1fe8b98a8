"""Log file log.jsonl: one JSON object per line, flushed after each line.

On resume, lines newer than the checkpoint are cut off.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from samplewise.errors import CheckpointError


class Log:
    """Append-only log file."""

    def __init__(self, path: Path, keep: int | None = 0):
        """keep: number of bytes of an existing file to keep; None for all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab")
        size = self._file.tell()
        self._file.truncate(size if keep is None else min(keep, size))
        self._file.seek(0, os.SEEK_END)

    def write(self, **fields: Any) -> None:
        """Append a line. Tensors and NumPy arrays and numbers are written as numbers and lists."""
        text = json.dumps(fields, default=_plain) + "\n"
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as why:
            raise CheckpointError(
                f"the log file {self._path} must be writable; found: {why}. Free disk space or fix the permissions, "
                "then resume: the checkpoints are intact."
            ) from why

    def position(self) -> int:
        """Flush to disk (fsync) and return the length of the file in bytes."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        with suppress(OSError):  # a failed write has raised already
            self._file.close()


def _plain(value: Any) -> Any:
    """Convert tensors, NumPy arrays and NumPy numbers for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"fields of a log line must be numbers, text, or lists or dicts of these; found {type(value).__name__}."
    )
