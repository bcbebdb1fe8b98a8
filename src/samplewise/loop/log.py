"""The log: one JSON object a line, readable while it grows. On resume, what is newer than the checkpoint is cut off."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from samplewise.errors import CheckpointError


class Log:
    def __init__(self, path: Path, keep: int | None = 0):
        """`keep`: so many bytes of what is there; None: all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, path.open("ab")
        there = self._file.tell()
        self._file.truncate(there if keep is None else min(keep, there))
        self._file.seek(0, os.SEEK_END)

    def write(self, **fields: Any) -> None:
        text = json.dumps(fields, default=_plain) + "\n"
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as why:
            raise CheckpointError(
                f"the log must be written to {self._path}, which failed: {why}. Free some space or see to the "
                "permissions, and resume: the checkpoints are still whole."
            ) from why

    def position(self) -> int:
        """The bytes that are safe on disk."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        with suppress(OSError):  # what could not be written has been told of
            self._file.close()


def _plain(value: Any) -> Any:
    """Tensors and NumPy's numbers, as users hand them over."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"a line of the log may hold numbers, text, and lists or dicts of these; found {type(value).__name__}."
    )
