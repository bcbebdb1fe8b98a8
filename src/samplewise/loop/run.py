"""The directory of a run: the log, the checkpoints, and what the run is."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from samplewise import ranks
from samplewise.errors import CheckpointError
from samplewise.loop import store
from samplewise.loop.checkpoint.directory import Saver
from samplewise.loop.checkpoint.trainer_state import check_resumable
from samplewise.loop.distributed import by_all
from samplewise.loop.log import Log
from samplewise.loop.run_lock import RunLock


class Run:
    """`open` before anything is written. Of several ranks, the first writes the log and all write checkpoints; the
    first holds the lock for all.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._lock = RunLock(directory)
        self._log: Log | None = None
        self._checkpoints: store.Checkpoints | None = None
        self._saver: Saver | None = None
        self._ours = False  # what is there has been written by this very object

    def open(self, resume: bool, load: Callable[[dict[str, Any]], int]) -> None:
        """`load` takes the state of the newest checkpoint, and returns how much of the log belongs to it."""
        by_all(self._lock.acquire if ranks.rank() == 0 else lambda: None)
        self._checkpoints = by_all(lambda: store.Checkpoints(self.directory / "checkpoints"))
        there = len(self._paths())
        keep = None if self._ours else 0
        if resume and there:
            state = self._newest(there)
            keep = by_all(lambda: load(state))
        elif there and not self._ours:
            raise CheckpointError(
                f"a run must have a directory of its own; found checkpoints in {self.directory}. "
                "Pass resume=True to go on with it, or choose another name."
            )
        if ranks.rank() == 0:
            self._log = Log(self.directory / "log.jsonl", keep)
        if ranks.active() and self._saver is None:
            self._saver = Saver()
        self._ours = True

    def _found(self) -> store.Checkpoints:
        if self._checkpoints is None:
            raise CheckpointError("a checkpoint is saved while a run is going on; found none. Call fit.")
        return self._checkpoints

    def _paths(self) -> list[Path]:
        """Of the checkpoints that are there."""
        paths = self._found().paths()
        if not ranks.same([path.name for path in paths]):
            raise CheckpointError(
                f"a run must have a directory that all ranks see; found that they see other files in {self.directory}. "
                "Use one on a disk that they share."
            )
        return paths

    def _newest(self, there: int) -> dict[str, Any]:
        found = self._found().latest(_read_by_all)
        if found is None:
            raise CheckpointError(
                f"resuming needs a checkpoint that can be read; found none among {there} in "
                f"{self._found().directory}. Bring one back from a copy, or begin a run of another name."
            )
        return found[0]

    def check(self, state: dict[str, Any]) -> None:
        """Refuses now what could not be saved later."""
        store.check(state)

    def describe(self, **about: Any) -> None:
        if ranks.rank() == 0:
            (self.directory / "run.json").write_text(json.dumps({"name": self.directory.name, **about}, indent=1))

    def write(self, **fields: Any) -> None:
        if self._log is not None:
            self._lock.check()
            self._log.write(**fields)

    def save(self, state: Callable[[int], dict[str, Any]], update: int) -> Path:
        """`state` is given the place in the log that it belongs to."""
        checkpoints = self._found()
        by_all(self._lock.verify)
        now = state(0 if self._log is None else self._log.position())
        if self._saver is None:
            return checkpoints.save(now, update)
        path = checkpoints.path_of(update)
        self._saver.save(path, now, then=lambda: checkpoints.remove_older_than(update))
        return path

    def save_aside(self, name: str, state: dict[str, Any]) -> Path:
        """Beside the log, to stay."""
        path = self.directory / f"{name}.ckpt"
        if ranks.rank() == 0:
            store.write(path, state)
        return path

    def finish(self) -> None:
        """What is being saved is on disk."""
        if self._saver is not None:
            self._saver.finish()
            self._saver = None

    def close(self) -> None:
        log = self._log
        self._log = None
        self._checkpoints = None
        with ExitStack() as closing:  # in reverse order, each even if another one raises
            closing.callback(self._lock.release)
            if log is not None:
                closing.callback(log.close)
            if self._saver is not None:
                closing.callback(self._saver.close)


def _read_by_all(path: Path) -> dict[str, Any]:
    """One that a rank cannot read is of no use to any."""
    state, problem = dict[str, Any](), None
    try:
        state = store.read(path)
        check_resumable(path, state)
    except CheckpointError as why:
        problem = why
    if ranks.meet(problem is not None)[0]:
        raise problem or CheckpointError(f"{path} must be there for all ranks; found that another one cannot read it.")
    return state
