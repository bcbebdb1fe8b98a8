"""Checkpoints of a run: which exist, which is the newest, and which are kept."""

from __future__ import annotations

import os
import re
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from samplewise.core.files import check_local
from samplewise.errors import CheckpointError, CheckpointWarning
from samplewise.loop.checkpoint import io
from samplewise.loop.checkpoint.format import CONTENTS, STATE_FILE
from samplewise.loop.checkpoint.io import PARTIAL, REPLACED
from samplewise.parallel import collectives

FOLDER = "checkpoints"  # in a run directory
NAME = re.compile(r"update-([0-9]{9,})\.ckpt")


def load_checkpoint(path: str | Path, device: str | torch.device = "cpu") -> dict[str, Any]:
    """Return the state dicts of a checkpoint, by name: "model", "optimizer", "scheduler", ...

        state = sw.load_checkpoint("runs/digits")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    `path` is a checkpoint of one process or of several ranks, a model saved by `ModelCheckpoint(best=...)` or
    `Trainer.save_model`, or a run directory, of which the newest readable checkpoint is used. Tensors are on `device`.
    If the trainer had save="trained", "model" has no frozen parameters; "frozen" has their checksums by name, and the
    rest is loaded into a model with the same frozen parameters by `load_state_dict(state["model"], strict=False)`.

    Nothing is unpickled, so a checkpoint from an untrusted source cannot run code, and no file is changed.
    """
    path = _check_path(path)
    folders = [folder for folder in (path / FOLDER, path) if folder.name == FOLDER and folder.is_dir()]
    if not folders:
        return io.read(path, device)
    newest = newest_checkpoint(folders[0], lambda checkpoint: io.read(checkpoint, device))
    if newest is None:
        raise CheckpointError(
            f"{path} must have a checkpoint that can be read; found none in {folders[0]}. "
            "Give another run directory, or train with Trainer(..., run=...) first."
        )
    return newest[0]


def _check_path(path: Any) -> Path:
    """Return the path; raise CheckpointError for a path where there can be no checkpoint."""
    remedy = (
        "Pass the path of a checkpoint such as 'runs/name/checkpoints/update-000000100.ckpt', or of a run directory."
    )
    if not isinstance(path, (str, Path)) or not str(path):
        text = "the empty path ''" if path == "" else str(path)[:40]
        raise CheckpointError(f"path must name a checkpoint or a run directory; found {text}. {remedy}")
    check_local(path)
    path = Path(path)
    if path.is_file() and (path.parent / STATE_FILE).exists():
        raise CheckpointError(
            f"path must name a checkpoint, which is a directory; found the file {path} inside one. Pass {path.parent}."
        )
    there = io.readable(path)
    if not os.path.lexists(there):
        raise CheckpointError(
            f"{path} must be a checkpoint or a run directory; found no such file or directory. {remedy}"
        )
    if there.is_dir() and path.name != FOLDER and not any((there / name).exists() for name in (*CONTENTS, FOLDER)):
        raise CheckpointError(
            f"{path} must be a checkpoint or a run directory; found a directory without {STATE_FILE} and without "
            f"{FOLDER}. {remedy}"
        )
    return path


def newest_checkpoint(directory: Path, read: Callable[[Path], dict[Any, Any]]) -> tuple[dict[Any, Any], Path] | None:
    """Return (state, path) of the newest readable checkpoint in a directory; None if there is none.

    CheckpointWarning is issued for each newer one that cannot be read.
    """
    for _, path in newest_first(directory):
        try:
            return read(path), path
        except CheckpointError as why:
            warnings.warn(f"{why} Trying the previous checkpoint.", CheckpointWarning, stacklevel=3)
    return None


def newest_first(directory: Path) -> list[tuple[int, Path]]:
    """Return (number of updates, path) of each checkpoint, newest first."""
    paths = {_final(path) for path in directory.iterdir()}
    named = ((NAME.fullmatch(path.name), path) for path in paths)
    return sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def _final(path: Path) -> Path:
    """Return the final name of a checkpoint that has a temporary name because it is being replaced."""
    is_replaced = path.name.startswith(".") and path.name.endswith(REPLACED)
    return path.with_name(path.name[1 : -len(REPLACED)]) if is_replaced else path


class Checkpoints:
    """Directory of checkpoints that keeps the newest `keep` of them, 2 by default.

    Only one run at a time may use it: a checkpoint that another run is writing looks like that of an interrupted save.
    """

    def __init__(self, directory: Path, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, the newest checkpoint; found {keep}.")
        self.directory = Path(directory)
        self.keep = keep
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

    def save(self, state: dict[Any, Any], update: int, rank_state: Any = None) -> Path:
        """Write the state after `update` updates, then remove older checkpoints. Returns the path.

        rank_state: state of this rank: see `io.write`.
        """
        if update < 0:
            raise ValueError(f"update must be a number of updates, 0 or more; found {update}.")
        self._remove_leftovers()  # first, since they may fill the disk
        path = self.path_of(update)
        io.write(path, state, rank_state)
        self.remove_older_than(update)
        return path

    def path_of(self, update: int) -> Path:
        return self.directory / f"update-{update:09d}.ckpt"

    def latest(self, read: Callable[[Path], dict[Any, Any]] = io.read) -> tuple[dict[Any, Any], Path] | None:
        """Return (state, path) of the newest readable checkpoint; None if there is none.

        CheckpointWarning is issued for each newer one that cannot be read.
        """
        self._remove_leftovers()
        return newest_checkpoint(self.directory, read)

    def paths(self) -> list[Path]:
        """List the paths of all checkpoints, readable or not, newest first."""
        return [path for _, path in newest_first(self.directory)]

    def remove_older_than(self, update: int) -> None:
        """Remove checkpoints before `update`, except the newest `keep - 1` of them."""
        # Later checkpoints stay: they may still be needed after a run was resumed from an earlier one.
        older = [path for number, path in newest_first(self.directory) if number < update]
        for path in older[self.keep - 1 :]:
            _remove(path, io.remove_checkpoint)

    def _remove_leftovers(self) -> None:
        """Remove what interrupted saves have left, except the only copy of a checkpoint that was being replaced."""
        if collectives.rank() != 0:
            return
        for path in self.directory.glob(f".*{PARTIAL}"):
            _remove(path, io.remove)
        for path in self.directory.glob(f".*{REPLACED}"):
            if _final(path).exists():
                _remove(path, io.remove)


def _remove(path: Path, remove: Callable[[Path], None]) -> None:
    try:
        remove(path)
    except OSError as why:
        warnings.warn(
            f"{path} is no longer needed but cannot be removed: {why}. Remove it by hand.",
            CheckpointWarning,
            stacklevel=4,
        )
