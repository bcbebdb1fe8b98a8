"""Run directory: log, checkpoints, run.json and lock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from samplewise.core.directory_lock import DirectoryLock
from samplewise.core.files import RUN_FILE, RUN_VERSION, other_version, read_json, write_json
from samplewise.errors import CheckpointError
from samplewise.loop.checkpoint import io
from samplewise.loop.checkpoint.directory import FOLDER, Checkpoints
from samplewise.loop.checkpoint.format import STATE_FILE
from samplewise.loop.checkpoint.io import BackgroundWriter
from samplewise.loop.checkpoint.state import check_trainer_state
from samplewise.loop.log import Log
from samplewise.parallel.group import current_group, on_every_rank


def run_lock(directory: Path) -> DirectoryLock:
    """Lock of a run directory, held while `fit` runs."""
    return DirectoryLock(
        directory,
        "run.lock",
        place="run directory",
        user="training",
        remedy="resume from the last checkpoint",
        error=CheckpointError,
    )


class RunDirectory:
    """Files of a run. Call `open` before writing.

    With several ranks, rank 0 writes the log and holds the lock; all ranks write checkpoints.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._lock = run_lock(directory)
        self._log: Log | None = None
        self._checkpoints: Checkpoints | None = None
        self._writer: BackgroundWriter | None = None
        self._ours = False  # this object has written the files in the directory

    def open(self, resume: bool, load: Callable[[dict[str, Any]], int]) -> None:
        """Acquire the lock and open the log; with `resume`, load the newest checkpoint if there is one. Collective.

        load: receives the state of the checkpoint and returns the length in bytes of the log that belongs to it.
        """
        on_every_rank(self._check_place)
        on_every_rank(self._lock.acquire if current_group().rank == 0 else lambda: None)
        on_every_rank(self._check_version)
        self._checkpoints = on_every_rank(lambda: Checkpoints(self.directory / FOLDER))
        count = len(self._paths())
        keep = None if self._ours else 0
        if resume and count:
            state = self._newest(count)
            keep = on_every_rank(lambda: load(state))
        elif count and not self._ours:
            raise CheckpointError(
                f"a new run must have an unused directory; found checkpoints in {self.directory}. "
                "Pass resume=True to continue that run, or choose another directory."
            )
        if current_group().rank == 0:
            self._log = Log(self.directory / "log.jsonl", keep)
        if current_group().distributed and self._writer is None:
            self._writer = BackgroundWriter()
        self._ours = True

    def _check_place(self) -> None:
        """Raise CheckpointError for a checkpoint, or the folder of checkpoints, in place of a run directory."""
        inside = (self.directory / STATE_FILE).exists()
        if inside or (self.directory.name == FOLDER and (self.directory.parent / RUN_FILE).exists()):
            run = self.directory.parent.parent if inside else self.directory.parent
            found = "a checkpoint" if inside else "the checkpoints of a run"
            raise CheckpointError(
                f"run must be a run directory; found {found}, {self.directory}. Pass the run directory, such as {run}. "
                "To start from a model, use model.load_state_dict(sw.load_checkpoint(path)['model'])."
            )

    def _check_version(self) -> None:
        """Raise CheckpointError if there is a run.json of another format version."""
        path = self.directory / RUN_FILE
        try:
            about = read_json(path, CheckpointError, "Restore it from a backup, or start a new run directory.")
        except FileNotFoundError:
            return
        version = about.get("format_version") if isinstance(about, dict) else None
        if type(version) is not int or version != RUN_VERSION:
            raise CheckpointError(other_version(path, version, RUN_VERSION))

    def _open_checkpoints(self) -> Checkpoints:
        if self._checkpoints is None:
            raise CheckpointError(
                "checkpoints can be saved only while fit runs; found no running fit. Call save from a callback."
            )
        return self._checkpoints

    def _paths(self) -> list[Path]:
        """Return the paths of all checkpoints. Raises CheckpointError if ranks see different ones. Collective."""
        paths = self._open_checkpoints().paths()
        if not current_group().all_equal([path.name for path in paths]):
            raise CheckpointError(
                f"all ranks must see the same run directory; found that they see different checkpoints in "
                f"{self.directory}. Use a directory on a shared file system."
            )
        return paths

    def _newest(self, count: int) -> dict[str, Any]:
        checkpoints = self._open_checkpoints()
        newest = checkpoints.latest(_read_on_all_ranks)
        if newest is None:
            raise CheckpointError(
                f"resuming needs a readable checkpoint; found none among {count} in {checkpoints.directory}. "
                "Restore one from a backup, or start a new run directory."
            )
        return newest[0]

    def check(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Raise if the state could not be saved, before the training starts."""
        io.check({**state, "per_rank": [own]})

    def describe(self, **about: Any) -> None:
        """Write run.json."""
        if current_group().rank == 0:
            content = {"format_version": RUN_VERSION, "name": self.directory.name, **about}
            write_json(self.directory / RUN_FILE, content)

    def write(self, **fields: Any) -> None:
        """Append a line to the log, on rank 0."""
        if self._log is not None:
            self._lock.check()
            self._log.write(**fields)

    def save(self, state: Callable[[int], tuple[dict[str, Any], dict[str, Any]]], update: int) -> Path:
        """Save a checkpoint and return its path. Collective; with several ranks it is written in the background.

        state: receives the length of the log in bytes and returns the state, and that of this rank.
        """
        checkpoints = self._open_checkpoints()
        on_every_rank(self._lock.verify)
        current, own = state(0 if self._log is None else self._log.position())
        if self._writer is None:
            return checkpoints.save(current, update, own)
        path = checkpoints.path_of(update)
        self._writer.save(path, current, own, then=lambda: checkpoints.remove_older_than(update))
        return path

    def save_model(self, name: str, state: dict[str, Any]) -> Path:
        """Write a state to `name`.ckpt next to the log, where it is not removed. Collective."""
        if not isinstance(name, str) or not name.strip(".") or Path(name).name != name:
            raise ValueError(f"the name of a saved model must be a file name without a path; found {name!r}.")
        path = self.directory / f"{name}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        io.write(path, state)
        return path

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk."""
        if self._writer is not None:
            self._writer.finish()
            self._writer = None

    def close(self) -> None:
        """Close the log and release the lock, also after an error."""
        log = self._log
        self._log = None
        self._checkpoints = None
        with ExitStack() as closing:  # called in reverse order, even if one raises
            closing.callback(self._lock.release)
            if log is not None:
                closing.callback(log.close)
            if self._writer is not None:
                closing.callback(self._writer.close)


def _read_on_all_ranks(path: Path) -> dict[str, Any]:
    """Read the state of a trainer; raise CheckpointError on all ranks if any rank cannot read it. Collective."""
    state: dict[str, Any] = {}
    error: CheckpointError | None = None
    try:
        state = io.read_for_rank(path)
        check_trainer_state(path, state)
    except CheckpointError as why:
        error = why
    if current_group().all_reduce_scalars(error is not None)[0]:
        raise error or CheckpointError(f"{path} must be readable on all ranks; found that another rank failed.")
    return state
