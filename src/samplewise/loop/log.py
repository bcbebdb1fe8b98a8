"""The log: one JSON object a line, readable while it grows. On resume, what is newer than the checkpoint is cut off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Log:
    def __init__(self, path: Path, keep: int = 0):
        """`keep`: so many bytes of what is there."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(min(keep, self._file.tell()))
        self._file.seek(0, os.SEEK_END)

    def write(self, **fields: Any) -> None:
        self._file.write((json.dumps(fields) + "\n").encode())
        self._file.flush()

    def position(self) -> int:
        """The bytes that are safe on disk."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
