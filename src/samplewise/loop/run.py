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

    def open(self, resume: bool, load: Callable[[dict[str, Any]], int]) -> None:
        """`load` takes the state of the newest checkpoint, and returns how much of the log belongs to it."""
        self._checkpoints = store.Checkpoints(self.directory / "checkpoints")
        found = self._checkpoints.latest()
        if found is not None and not resume:
            raise CheckpointError(
                f"a run must have a directory of its own; found checkpoints in {self.directory}. "
                "Pass resume=True to go on with it, or choose another name."
            )
        self._log = Log(self.directory / "log.jsonl", keep=0 if found is None else load(found[0]))

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
