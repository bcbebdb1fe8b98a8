"""The directory of a run: the log, the checkpoints, and what the run is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samplewise.errors import CheckpointError
from samplewise.loop import store
from samplewise.loop.log import Log


class Run:
    """`open` before anything is written."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._log: Log | None = None
        self._checkpoints: store.Checkpoints | None = None
        self._ours = False  # what is there has been written by this very object

    def open(self, resume: bool, load: Callable[[dict[str, Any]], int]) -> None:
        """`load` takes the state of the newest checkpoint, and returns how much of the log belongs to it."""
        self._checkpoints = store.Checkpoints(self.directory / "checkpoints")
        there = len(self._checkpoints.paths())
        keep = None if self._ours else 0
        if resume and there:
            keep = load(self._newest(there))
        elif there and not self._ours:
            raise CheckpointError(
                f"a run must have a directory of its own; found checkpoints in {self.directory}. "
                "Pass resume=True to go on with it, or choose another name."
            )
        self._log = Log(self.directory / "log.jsonl", keep)
        self._ours = True

    def _newest(self, there: int) -> dict[str, Any]:
        assert self._checkpoints is not None
        found = self._checkpoints.latest()
        if found is None:
            raise CheckpointError(
                f"resuming needs a checkpoint that can be read; found none among {there} in "
                f"{self._checkpoints.directory}. Bring one back from a copy, or begin a run of another name."
            )
        return found[0]

    def check(self, state: dict[str, Any]) -> None:
        """Refuses now what could not be saved later."""
        store.check(state)

    def describe(self, **about: Any) -> None:
        (self.directory / "run.json").write_text(json.dumps({"name": self.directory.name, **about}, indent=1))

    def write(self, **fields: Any) -> None:
        if self._log is not None:
            self._log.write(**fields)

    def save(self, state: Callable[[int], dict[str, Any]], update: int) -> Path:
        """`state` is given the place in the log that it belongs to."""
        if self._checkpoints is None or self._log is None:
            raise CheckpointError("a checkpoint is saved while a run is going on; found none. Call fit.")
        return self._checkpoints.save(state(self._log.position()), update)

    def save_aside(self, name: str, state: dict[str, Any]) -> Path:
        """Beside the log, to stay."""
        path = self.directory / f"{name}.ckpt"
        store.write(path, state)
        return path

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._log = self._checkpoints = None
