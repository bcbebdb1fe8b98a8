"""Loggers: callbacks that pass the lines of the log on to somebody else.

Each needs its library only when it is made. A field becomes kind/field ("train/loss", "validation/accuracy") at the
line's update; a list becomes kind/field/0, kind/field/1, a dict kind/field/name; what is no number is left out.
On resume `log.jsonl` has been cut back to the checkpoint already, and says what TensorBoard and CSV have to forget.
"""

from __future__ import annotations

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from samplewise import ranks
from samplewise.files import absolute


class Logger(ABC):
    """Open from the start of fit to its end, on the first of several ranks, and never in a fast_dev_run. To be
    subclassed.
    """

    _is_open = False

    def on_fit_start(self, trainer: Any) -> None:
        if not trainer.fast_dev_run and ranks.rank() == 0:
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
        was_open, self._is_open = self._is_open, False
        if was_open:
            self._finish(failed)

    @abstractmethod
    def _begin(self, trainer: Any) -> None: ...

    @abstractmethod
    def _add(self, kind: str, fields: dict[str, Any], update: int) -> None: ...

    @abstractmethod
    def _finish(self, failed: bool) -> None: ...


class TensorBoard(Logger):
    """Scalars for TensorBoard, in `directory` or, without one, in the run's own "tensorboard"."""

    def __init__(self, directory: str | Path | None = None):
        _needed("tensorboard", self)
        self.directory = None if directory is None else absolute(directory)
        self._writer = None
        self._make: Any = import_module("torch.utils.tensorboard").SummaryWriter

    def _begin(self, trainer: Any) -> None:
        directory = _place(self, self.directory, trainer, "tensorboard")
        done = trainer.step.counters.updates
        # Purging takes this update's own lines as well: those older than the checkpoint are written again.
        self._writer = self._make(str(directory), purge_step=None if trainer.run is None else done)
        for kind, fields in _so_far(trainer):
            if fields.get("update") == done:
                self._add(kind, fields, done)

    def _add(self, kind: str, fields: dict[str, Any], update: int) -> None:
        writer: Any = self._writer
        for name, value in _scalars(kind, fields).items():
            writer.add_scalar(name, value, update)
        writer.flush()  # can be looked at while it runs

    def _finish(self, failed: bool) -> None:
        writer: Any = self._writer
        writer.close()


class CSV(Logger):
    """`train.csv` and `validation.csv`, in the directory `path` or, without one, in the run's own.

    The first line of either fixes its columns: a field that comes later is left out, one that is missing stays empty.
    """

    KINDS = ("train", "validation")

    def __init__(self, path: str | Path | None = None):
        self.path = None if path is None else absolute(path)
        self._files: dict[str, Path] = {}
        self._columns: dict[str, list[str]] = {}

    def _begin(self, trainer: Any) -> None:
        directory = _place(self, self.path, trainer)
        directory.mkdir(parents=True, exist_ok=True)
        if self._files and trainer.run is None:  # another fit goes on where the last one ended
            return
        self._columns, self._files = {}, {kind: directory / f"{kind}.csv" for kind in self.KINDS}
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
    """One that keeps runs of its own: a resumed training goes on in the same one. To be subclassed."""

    _id: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"id": self._id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._id = state["id"]


class WandB(Service):
    """Weights & Biases; the arguments are those of `wandb.init`."""

    def __init__(self, **init: Any):
        self._wandb, self.init = _needed("wandb", self), init
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
    """MLflow; the arguments are those of `mlflow.start_run`."""

    def __init__(self, **start: Any):
        self._mlflow, self.start = _needed("mlflow", self), start

    def _begin(self, trainer: Any) -> None:
        again = {} if self._id is None else {"run_id": self._id}
        self._id = self._mlflow.start_run(**{**self.start, **again}).info.run_id

    def _add(self, kind: str, fields: dict[str, Any], update: int) -> None:
        if scalars := _scalars(kind, fields):
            self._mlflow.log_metrics(scalars, step=update)

    def _finish(self, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


# --- what they share -----------------------------------------------------------------------------------------------


def _needed(library: str, logger: Logger) -> Any:
    try:
        return import_module(library)
    except ImportError as why:
        raise ImportError(f"{type(logger).__name__} needs {library}: pip install {library}") from why


def _place(logger: Logger, given: Path | None, trainer: Any, name: str = "") -> Path:
    if given is None and trainer.run is None:
        kind = type(logger).__name__
        raise ValueError(f"{kind} needs a directory; found none. Use {kind}('some/place'), or give the trainer run=.")
    return given if given is not None else trainer.run / name


def _so_far(trainer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The lines that the log of the run holds: after a resume, those that are older than the checkpoint."""
    if trainer.run is not None:
        for line in (trainer.run / "log.jsonl").read_text().splitlines():
            fields = json.loads(line)
            yield fields.pop("kind"), fields


def _scalars(kind: str, fields: dict[str, Any]) -> dict[str, float]:
    found = {}
    for name, value in fields.items():
        several = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
        for place, one in several.items() if isinstance(several, dict) else [("", several)]:
            if isinstance(one, (int, float)) and name != "update":
                found[f"{kind}/{name}/{place}".rstrip("/")] = float(one)
    return found


def _cell(value: Any) -> str:
    """As in log.jsonl, so that it does not matter whether a row comes from there."""
    return value if isinstance(value, str) else json.dumps(value)
