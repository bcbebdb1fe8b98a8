"""Directory of checkpoints of a run, of which the newest are kept.

One process writes a checkpoint as a file, several ranks write it as a directory; `read` accepts both.
"""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from samplewise.distributed.group import current_group
from samplewise.errors import CheckpointError, CheckpointWarning
from samplewise.loop.checkpoint import directory, file
from samplewise.loop.checkpoint.encoding import encode, kind_of
from samplewise.loop.checkpoint.file import PARTIAL


def write(path: Path, state: dict[Any, Any]) -> None:
    """Write `state` to one file: see `file.write`."""
    if not isinstance(state, dict):
        raise TypeError(f"state must be a dict; found {kind_of(state)}.")
    file.write(path, state)


def read(path: Path, device: str | torch.device = "cpu") -> dict[Any, Any]:
    """Return the state of a checkpoint file or directory at `path`, with its tensors on `device`.

    A checkpoint contains no code, so one from an untrusted source cannot run anything.
    """
    if Path(path).is_dir():
        return file.moved(directory.read(Path(path)), torch.device(device))
    return file.read(path, device)


def check(state: dict[Any, Any]) -> None:
    """Raise the error that `write` would raise for the content of a state, without copying or writing."""
    file.require_safetensors()
    encode(state)


def newest(directory: Path, read: Callable[[Path], dict[Any, Any]]) -> tuple[dict[Any, Any], Path] | None:
    """Return (state, path) of the newest readable checkpoint in a directory; None if there is none.

    CheckpointWarning is issued for each newer one that cannot be read.
    """
    for _, path in _newest_first(directory):
        try:
            return read(path), path
        except CheckpointError as why:
            warnings.warn(f"{why} Trying the previous checkpoint.", CheckpointWarning, stacklevel=3)
    return None


def _newest_first(directory: Path) -> list[tuple[int, Path]]:
    named = ((re.fullmatch(r"update-([0-9]{9,})\.ckpt", path.name), path) for path in directory.iterdir())
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


class Checkpoints:
    """Directory of checkpoints that keeps the newest `keep` of them, 2 by default, and those in `protect`.

    Only one run at a time may use it: a file that another run is writing looks like that of an interrupted save.
    """

    def __init__(self, directory: Path, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, the newest checkpoint; found {keep}.")
        self.directory = Path(directory)
        self.keep = keep
        self.protect: set[Path] = set()
        self._check_writable()

    def save(self, state: dict[Any, Any], update: int) -> Path:
        """Write the state after `update` updates, then remove older checkpoints. Returns the path."""
        if update < 0:
            raise ValueError(f"update must be a number of updates, 0 or more; found {update}.")
        self._remove_leftovers()  # first, since they may fill the disk
        path = self.path_of(update)
        if path.is_dir():  # saved by several ranks; os.replace cannot replace a directory by a file
            path.rename(path.with_name(f".{path.name}{PARTIAL}"))
        write(path, state)
        self.remove_older_than(update)
        return path

    def path_of(self, update: int) -> Path:
        return self.directory / f"update-{update:09d}.ckpt"

    def latest(self, read: Callable[[Path], dict[Any, Any]] = read) -> tuple[dict[Any, Any], Path] | None:
        """Return (state, path) of the newest readable checkpoint; None if there is none.

        CheckpointWarning is issued for each newer one that cannot be read.
        """
        self._remove_leftovers()
        return newest(self.directory, read)

    def paths(self) -> list[Path]:
        """List the paths of all checkpoints, readable or not, newest first."""
        return [path for _, path in _newest_first(self.directory)]

    def remove_older_than(self, update: int) -> None:
        """Remove checkpoints before `update`, except the newest `keep - 1` of them and those in `protect`."""
        # Later checkpoints stay: they may still be needed after a run was resumed from an earlier one.
        older = [path for number, path in _newest_first(self.directory) if number < update]
        protected = {path.resolve() for path in self.protect}
        _remove(path for path in older[self.keep - 1 :] if path.resolve() not in protected)

    def _remove_leftovers(self) -> None:
        if current_group().rank == 0:
            _remove(self.directory.glob(f".*{PARTIAL}"))

    def _check_writable(self) -> None:
        # Write a file, since os.access reports no problem for root, even on a read-only disk.
        probe = self.directory / f".{uuid.uuid4().hex[:8]}{PARTIAL}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as why:
            raise CheckpointError(
                f"{self.directory} must be a directory that can be written to; found: {why}. "
                "Use another directory, or fix its permissions."
            ) from why


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            file.remove(path)
        except OSError as why:
            warnings.warn(
                f"{path} is no longer needed but cannot be removed: {why}. Remove it by hand.",
                CheckpointWarning,
                stacklevel=4,
            )
