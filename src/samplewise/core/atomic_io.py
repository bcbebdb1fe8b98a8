"""Atomic file writes and absolute paths."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the path as an absolute path, unaffected by a later `os.chdir`; a leading ~ is expanded."""
    try:
        return Path(path).expanduser().absolute()
    except (OSError, RuntimeError) as why:  # the working directory was removed; ~name is no user
        raise ValueError(
            f"a directory must have a path that can be made absolute; found {str(path)!r}: {why} Pass an absolute path."
        ) from why


@contextlib.contextmanager
def atomic_write(path: Path, temporary: Path) -> Iterator[BinaryIO]:
    """Open a file for atomic writing to `path`.

    The data is written to `temporary`, synced to disk, then renamed to `path`. On an error `temporary` is deleted and
    an existing file at `path` is unchanged.
    """
    try:
        with open(temporary, "wb") as file:
            yield file
            sync_file(file)
        os.replace(temporary, path)
        sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_file(file: BinaryIO) -> None:
    """Flush an open file and sync it to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Sync a directory to disk, so that renames in it survive a crash."""
    if os.name == "nt":  # Windows cannot open directories
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as why:
        if why.errno not in (errno.EINVAL, errno.ENOTSUP):  # not supported by some network file systems
            raise
    finally:
        os.close(directory)
