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
from typing import TYPE_CHECKING, Any

from samplewise.core.files import absolute
from samplewise.core.package import import_package
from samplewise.parallel import collectives

if TYPE_CHECKING:
    from samplewise.loop.trainer import Trainer


class Logger(ABC):
    """Base class of loggers. Open from the start to the end of `fit`, on rank 0 only, and never in a fast_dev_run."""

    _is_open = False

    def on_fit_start(self, trainer: Trainer) -> None:
        if not trainer.fast_dev_run and collectives.rank() == 0:
            self._open(trainer)
            self._is_open = True

    def on_log(self, trainer: Trainer, kind: str, fields: dict[str, Any]) -> None:
        if self._is_open:
            self._write(kind, fields, fields.get("update", trainer.step.counters.updates))

    def on_fit_end(self) -> None:
        self._close_once(failed=False)

    def on_error(self) -> None:
        self._close_once(failed=True)

    def _close_once(self, failed: bool) -> None:
        was_open = self._is_open
        self._is_open = False
        if was_open:
            self._end(failed)

    @abstractmethod
    def _open(self, trainer: Trainer) -> None: ...

    @abstractmethod
    def _write(self, kind: str, fields: dict[str, Any], update: int) -> None: ...

    @abstractmethod
    def _end(self, failed: bool) -> None: ...


class TensorBoard(Logger):
    """Write scalars for TensorBoard to `directory`; by default to "tensorboard" in the run directory."""

    def __init__(self, directory: str | Path | None = None):
        import_package("tensorboard", "TensorBoard")
        self.directory = None if directory is None else absolute(directory)
        self._writer = None
        self._make_writer: Any = import_module("torch.utils.tensorboard").SummaryWriter

    def _open(self, trainer: Trainer) -> None:
        directory = _log_directory(self, self.directory, trainer, "tensorboard")
        updates = trainer.step.counters.updates
        # Purging also removes the lines of update `done` itself. Those that are in the log are written again.
        self._writer = self._make_writer(str(directory), purge_step=None if trainer.run is None else updates)
        for kind, fields in _logged_lines(trainer):
            if fields.get("update") == updates:
                self._write(kind, fields, updates)

    def _write(self, kind: str, fields: dict[str, Any], update: int) -> None:
        writer: Any = self._writer
        for name, value in _scalar_fields(kind, fields).items():
            writer.add_scalar(name, value, update)
        writer.flush()  # visible while the training runs

    def _end(self, failed: bool) -> None:
        writer: Any = self._writer
        writer.close()


class CSV(Logger):
    """Write `train.csv` and `validation.csv` to `directory`; by default to the run directory.

    The first line of a file fixes its columns: fields that appear later are omitted, missing fields are empty.
    """

    KINDS = ("train", "validation")

    def __init__(self, directory: str | Path | None = None):
        self.directory = None if directory is None else absolute(directory)
        self._files: dict[str, Path] = {}
        self._columns: dict[str, list[str]] = {}

    def _open(self, trainer: Trainer) -> None:
        directory = _log_directory(self, self.directory, trainer)
        directory.mkdir(parents=True, exist_ok=True)
        if self._files and trainer.run is None:  # another call of fit appends to the files of the last one
            return
        self._columns = {}
        self._files = {kind: directory / f"{kind}.csv" for kind in self.KINDS}
        for file in self._files.values():
            file.unlink(missing_ok=True)
        for kind, fields in _logged_lines(trainer):
            self._write(kind, fields, 0)

    def _write(self, kind: str, fields: dict[str, Any], update: int) -> None:
        if kind not in self._files:
            return
        columns = self._columns.setdefault(kind, [name for name, v in fields.items() if not isinstance(v, dict)])
        with self._files[kind].open("a", newline="") as file:
            rows = csv.writer(file, lineterminator="\n")
            if file.tell() == 0:
                rows.writerow(columns)
            # As in log.jsonl, from which rows are restored on resume.
            cells = [fields.get(name, "") for name in columns]
            rows.writerow([cell if isinstance(cell, str) else json.dumps(cell) for cell in cells])

    def _end(self, failed: bool) -> None: ...


class TrackingLogger(Logger):
    """Base class of loggers for services with run ids: a resumed training continues the same run of the service."""

    _id: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state["id"]


class WandB(TrackingLogger):
    """Log scalars to Weights & Biases. Takes the arguments of `wandb.init`."""

    def __init__(self, **init: Any):
        self._wandb = import_package("wandb", "WandB")
        self.init = init
        self._run: Any = None

    def _open(self, trainer: Trainer) -> None:
        resume_arguments = {} if self._id is None else {"id": self._id, "resume": "allow"}
        self._run = self._wandb.init(**{**self.init, **resume_arguments})
        self._id = self._run.id

    def _write(self, kind: str, fields: dict[str, Any], update: int) -> None:
        if scalars := _scalar_fields(kind, fields):
            self._run.log(scalars, step=update)

    def _end(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow(TrackingLogger):
    """Log scalars to MLflow. Takes the arguments of `mlflow.start_run`."""

    def __init__(self, **start: Any):
        self._mlflow = import_package("mlflow", "MLflow")
        self.start = start

    def _open(self, trainer: Trainer) -> None:
        resume_arguments = {} if self._id is None else {"run_id": self._id}
        self._id = self._mlflow.start_run(**{**self.start, **resume_arguments}).info.run_id

    def _write(self, kind: str, fields: dict[str, Any], update: int) -> None:
        if scalars := _scalar_fields(kind, fields):
            self._mlflow.log_metrics(scalars, step=update)

    def _end(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


# --- shared functions ----------------------------------------------------------------------------------------------


def _log_directory(logger: Logger, directory: Path | None, trainer: Trainer, name: str = "") -> Path:
    if directory is not None:
        return directory
    if trainer.run is None:
        logger_name = type(logger).__name__
        raise ValueError(
            f"{logger_name} needs a directory; found none. Use {logger_name}('some/place') or Trainer(run=...)."
        )
    return trainer.run / name


def _logged_lines(trainer: Trainer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (kind, fields) for the lines in the log of the run; after a resume, those older than the checkpoint."""
    if trainer.run is not None:
        for line in (trainer.run / "log.jsonl").read_text().splitlines():
            fields = json.loads(line)
            yield fields.pop("kind"), fields


def _scalar_fields(kind: str, fields: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a log line by their names "kind/field" or "kind/field/part"."""
    scalars = {}
    for name, value in fields.items():
        if isinstance(value, (list, tuple)):
            values: dict[Any, Any] = dict(enumerate(value))
        else:
            values = value if isinstance(value, dict) else {"": value}
        for key, number in values.items():
            if isinstance(number, (int, float)) and name != "update":
                scalars[f"{kind}/{name}/{key}".rstrip("/")] = float(number)
    return scalars
