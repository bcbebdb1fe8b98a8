"""Loggers: callbacks that forward log lines to TensorBoard, CSV files, Weights & Biases or MLflow.

The library of a logger is imported when the logger is constructed. A field becomes the scalar kind/field ("train/loss",
"validation/accuracy") at the update of the line; a list becomes kind/field/0, kind/field/1, ..., a dict
kind/field/name. Values that are not numbers are omitted. On resume `log.jsonl` has been cut back to the checkpoint
already; TensorBoard and CSV discard the lines that are no longer in it.
"""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from samplewise.core.atomic_io import absolute
from samplewise.distributed.group import current_group


class Logger(ABC):
    """Base class of loggers. Open from the start to the end of `fit`, on rank 0 only, and never in a fast_dev_run."""

    _is_open = False

    def on_fit_start(self, trainer: Any) -> None:
        if not trainer.fast_dev_run and current_group().rank == 0:
            self._begin(trainer)
            self._is_open = True

    def on_log(self, trainer: Any, kind: str, fields: dict[str, Any]) -> None:
        if self._is_open:
            self._add(kind, fields, fields.get("update", trainer.step.counters.updates))

    def on_fit_end(self) -> None:
        self._close(failed=False)

    def on_error(self) -> None:
        self._close(failed=True)

    def _close(self, failed: bool) -> None:
        was_open = self._is_open
        self._is_open = False
        if was_open:
            self._finish(failed)

    @abstractmethod
    def _begin(self, trainer: Any) -> None: ...

    @abstractmethod
    def _add(self, kind: str, fields: dict[str, Any], update: int) -> None: ...

    @abstractmethod
    def _finish(self, failed: bool) -> None: ...


class TensorBoard(Logger):
    """Write scalars for TensorBoard to `directory`; by default to "tensorboard" in the run directory."""

    def __init__(self, directory: str | Path | None = None):
        _needed("tensorboard", self)
        self.directory = None if directory is None else absolute(directory)
        self._writer = None
        self._make: Any = import_module("torch.utils.tensorboard").SummaryWriter

    def _begin(self, trainer: Any) -> None:
        directory = _place(self, self.directory, trainer, "tensorboard")
        done = trainer.step.counters.updates
        # Purging also removes the lines of update `done` itself. Those that are in the log are written again.
        self._writer = self._make(str(directory), purge_step=None if trainer.run is None else done)
        for kind, fields in _so_far(trainer):
            if fields.get("update") == done:
                self._add(kind, fields, done)

    def _add(self, kind: str, fields: dict[str, Any], update: int) -> None:
        writer: Any = self._writer
        for name, value in _scalars(kind, fields).items():
            writer.add_scalar(name, value, update)
        writer.flush()  # visible while the training runs

    def _finish(self, failed: bool) -> None:
        writer: Any = self._writer
        writer.close()


class CSV(Logger):
    """Write `train.csv` and `validation.csv` to the directory `path`; by default to the run directory.

    The first line of a file fixes its columns: fields that appear later are omitted, missing fields are empty.
    """

    KINDS = ("train", "validation")

    def __init__(self, path: str | Path | None = None):
        self.path = None if path is None else absolute(path)
        self._files: dict[str, Path] = {}
        self._columns: dict[str, list[str]] = {}

    def _begin(self, trainer: Any) -> None:
        directory = _place(self, self.path, trainer)
        directory.mkdir(parents=True, exist_ok=True)
        if self._files and trainer.run is None:  # another call of fit appends to the files of the last one
            return
        self._columns = {}
        self._files = {kind: directory / f"{kind}.csv" for kind in self.KINDS}
        for file in self._files.values():
            file.unlink(missing_ok=True)
        for kind, fields in _so_far(trainer):
            self._add(kind, fields, 0)

    def _add(self, kind: str, fields: dict[str, Any], update: int) -> None:
        if kind not in self._files:
            return
        columns = self._columns.setdefault(kind, [name for name, v in fields.items() if not isinstance(v, dict)])
        with self._files[kind].open("a", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            if file.tell() == 0:
                rows.writerow(columns)
            rows.writerow([_cell(fields[name]) if name in fields else "" for name in columns])

    def _finish(self, failed: bool) -> None: ...


class Service(Logger):
    """Base class of loggers for services with run ids: a resumed training continues the same run of the service."""

    _id: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state["id"]


class WandB(Service):
    """Log scalars to Weights & Biases. Takes the arguments of `wandb.init`."""

    def __init__(self, **init: Any):
        self._wandb = _needed("wandb", self)
        self.init = init
        self._run: Any = None

    def _begin(self, trainer: Any) -> None:
        again = {} if self._id is None else {"id": self._id, "resume": "allow"}
        self._run = self._wandb.init(**{**self.init, **again})
        self._id = self._run.id

    def _add(self, kind: str, fields: dict[str, Any], update: int) -> None:
        if scalars := _scalars(kind, fields):
            self._run.log(scalars, step=update)

    def _finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow(Service):
    """Log scalars to MLflow. Takes the arguments of `mlflow.start_run`."""

    def __init__(self, **start: Any):
        self._mlflow = _needed("mlflow", self)
        self.start = start

    def _begin(self, trainer: Any) -> None:
        again = {} if self._id is None else {"run_id": self._id}
        self._id = self._mlflow.start_run(**{**self.start, **again}).info.run_id

    def _add(self, kind: str, fields: dict[str, Any], update: int) -> None:
        if scalars := _scalars(kind, fields):
            self._mlflow.log_metrics(scalars, step=update)

    def _finish(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


# --- shared functions ----------------------------------------------------------------------------------------------


def _needed(library: str, logger: Logger) -> Any:
    try:
        return import_module(library)
    except ImportError as why:
        raise ImportError(f"{type(logger).__name__} needs {library}: pip install {library}") from why


def _place(logger: Logger, given: Path | None, trainer: Any, name: str = "") -> Path:
    if given is None and trainer.run is None:
        kind = type(logger).__name__
        raise ValueError(f"{kind} needs a directory; found none. Use {kind}('some/place') or Trainer(run=...).")
    return given if given is not None else trainer.run / name


def _so_far(trainer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (kind, fields) for the lines in the log of the run; after a resume, those older than the checkpoint."""
    if trainer.run is not None:
        for line in (trainer.run / "log.jsonl").read_text().splitlines():
            fields = json.loads(line)
            yield fields.pop("kind"), fields


def _scalars(kind: str, fields: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log line by their names "kind/field" or "kind/field/part"."""
    found = {}
    for name, value in fields.items():
        if isinstance(value, (list, tuple)):
            several: dict[Any, Any] = dict(enumerate(value))
        else:
            several = value if isinstance(value, dict) else {"": value}
        for place, one in several.items():
            if isinstance(one, (int, float)) and name != "update":
                found[f"{kind}/{name}/{place}".rstrip("/")] = float(one)
    return found


def _cell(value: Any) -> str:
    """Return a value as it is written in log.jsonl, from which rows are restored on resume."""
    return value if isinstance(value, str) else json.dumps(value)
