"""Files that are there whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def absolute(path: str | os.PathLike[str]) -> Path:
    """An absolute path, which a later `os.chdir` does not change. A leading ~ is the home directory."""
    try:
        return Path(path).expanduser().absolute()
    except (OSError, RuntimeError) as why:  # the working directory was removed; ~name is no user
        raise ValueError(
            f"a directory must have a path that can be made absolute; found {str(path)!r}: {why} Pass an absolute path."
        ) from why


@contextlib.contextmanager
def whole(path: Path, aside: Path) -> Iterator[BinaryIO]:
    """A file to be written that will stand at `path`. Until it is finished and safe, it is at `aside`; should that
    fail, nothing is left of it, and what stood at `path` still does.
    """
    try:
        with open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """A renaming is safe when its directory is."""
    if os.name == "nt":  # where a directory cannot be opened
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    except OSError as why:
        if why.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks know no such thing
            raise
    finally:
        os.close(directory)
