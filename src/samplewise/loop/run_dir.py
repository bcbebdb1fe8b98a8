"""Run directory: checkpoints and lock; log.jsonl; metadata in run.json."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from samplewise.core.directory_lock import DirectoryLock
from samplewise.core.files import RUN_FILE, RUN_VERSION, other_version, read_json, write_json
from samplewise.core.memory import device_name
from samplewise.core.package import UNKNOWN, installed_version
from samplewise.errors import CheckpointError, PrivacyError
from samplewise.loop.checkpoint import io
from samplewise.loop.checkpoint.directory import FOLDER, Checkpoints, newest_first
from samplewise.loop.checkpoint.format import STATE_FILE
from samplewise.loop.checkpoint.io import BackgroundWriter
from samplewise.loop.checkpoint.resume_settings import loss_name
from samplewise.loop.checkpoint.state import check_trainer_state
from samplewise.loop.mirror import MARKER, Mirror
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_every_rank, on_rank_zero
from samplewise.privacy.release_log import KEY_FILE
from samplewise.privacy.release_log import LOG_FILE as RELEASE_LOG
from samplewise.step.schedules import SampleScheduler
from samplewise.step.step import Step

# Files of a run next to its checkpoints, saved models and run.json: of the trainer, loggers, the ledger and the report.
RUN_FILES = (
    *("log.jsonl", "train.csv", "validation.csv", "tensorboard/events.out.tfevents.*"),
    *("samples/part-*.parquet", "previews.json", "quarantine.jsonl", "recipe.json", "report.html", MARKER),
)


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


def run_path(directory: Path, exists: str) -> Path:
    """Path of a run directory; with exists="new" that of the next free name, such as a-2 for a. Collective."""
    if exists != "new":
        return directory
    names = chain([directory.name], (f"{directory.name}-{k}" for k in count(2)))
    return on_rank_zero(lambda: next(path for path in map(directory.with_name, names) if _is_free(path)))


def _is_free(path: Path) -> bool:
    return not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir()))


class RunDirectory:
    """Files of a run. Call `open` before writing.

    exists: what to do with an earlier run in the directory, an argument of `Trainer`
    mirror: copy of the directory in an object store; None for none

    With several ranks, rank 0 writes the log and holds the lock; all ranks write checkpoints.
    """

    def __init__(self, directory: Path, exists: str = "error", mirror: Mirror | None = None):
        self.directory = directory
        self._exists = exists
        self._mirror = mirror
        self._lock = run_lock(directory)
        self._log: Log | None = None
        self._checkpoints: Checkpoints | None = None
        self._writer: BackgroundWriter | None = None
        self._ours = False  # this object has written the files in the directory

    def open(self, resume: bool, load: Callable[[dict[str, Any]], int]) -> None:
        """Acquire the lock and open the log; with `resume`, load the newest checkpoint if there is one. Collective.

        load: receives the state of the checkpoint and returns the length in bytes of the log that belongs to it.
        """
        if not self._ours:
            if resume and self._exists in ("overwrite", "new"):
                raise ValueError(
                    f"resume=True continues the run of a directory; found exists={self._exists!r}, which starts "
                    "another one. Leave one of them out."
                )
            resume = resume or self._exists == "resume"
        on_every_rank(self._check_place)
        on_every_rank(self._lock.acquire if collectives.rank() == 0 else lambda: None)
        on_every_rank(self._check_version)
        checkpoints = on_every_rank(lambda: Checkpoints(self.directory / FOLDER))
        if not self._ours:
            on_rank_zero(lambda: self._prepare(resume, checkpoints))
        self._checkpoints = checkpoints
        paths = checkpoints.paths()
        if not collectives.all_equal([path.name for path in paths]):
            raise CheckpointError(
                f"all ranks must see the same run directory; found that they see different checkpoints in "
                f"{self.directory}. Use a directory on a shared file system."
            )
        keep = None if self._ours else 0
        if resume and paths:
            newest = checkpoints.latest(_read_on_all_ranks)
            if newest is None:
                raise CheckpointError(
                    f"resuming needs a readable checkpoint; found none among {len(paths)} in {checkpoints.directory}. "
                    "Restore one from a backup, or start a new run directory."
                )
            state = newest[0]
            keep = on_every_rank(lambda: load(state))
        elif paths and not self._ours:
            overwrite = "," if self._has_releases() else ", exists='overwrite' to remove it,"
            raise CheckpointError(
                f"a new run must have an unused directory; found checkpoints in {self.directory}. Use Trainer(..., "
                f"exists='resume') to continue that run{overwrite} or exists='new' for the next free name."
            )
        if collectives.rank() == 0:
            self._log = Log(self.directory / "log.jsonl", keep)
        if collectives.size() > 1 and self._writer is None:
            self._writer = BackgroundWriter()
        self._ours = True

    def _check_place(self) -> None:
        """Raise CheckpointError for a checkpoint, or the folder of checkpoints, in place of a run directory."""
        inside = (self.directory / STATE_FILE).exists()
        if inside or (self.directory.name == FOLDER and (self.directory.parent / RUN_FILE).exists()):
            run = self.directory.parent.parent if inside else self.directory.parent
            kind = "a checkpoint" if inside else "the checkpoints of a run"
            raise CheckpointError(
                f"run must be a run directory; found {kind}, {self.directory}. Pass the run directory, such as {run}. "
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

    def _prepare(self, resume: bool, checkpoints: Checkpoints) -> None:
        """Remove the run in the directory if it is to be overwritten, and fetch that of the store if it is ahead."""
        newest = next((update for update, _ in newest_first(checkpoints.directory)), -1)
        overwrites = self._exists == "overwrite"
        if newest >= 0 and not (resume or overwrites):  # `open` raises the error
            return
        is_ahead = self._mirror is not None and self._mirror.is_ahead(self.directory, newest, resume)
        if is_ahead or overwrites:
            self._remove_run(checkpoints)
        if self._mirror is not None:
            self._mirror.start(self.directory, fetch=is_ahead)

    def _has_releases(self) -> bool:
        """True if the directory records the releases of a private training run."""
        return any((self.directory / name).exists() for name in (RELEASE_LOG, KEY_FILE))

    def _remove_run(self, checkpoints: Checkpoints) -> None:
        """Remove the files that samplewise has written for the run in the directory; other files stay."""
        if self._has_releases():
            raise PrivacyError(
                "a private run must not be overwritten, because the privacy that it has spent would be forgotten; "
                f"found {RELEASE_LOG} or {KEY_FILE} in {self.directory}. Use exists='resume' to continue it, or "
                "exists='new' for another directory."
            )
        if not (self.directory / RUN_FILE).exists():
            if checkpoints.paths():
                raise CheckpointError(
                    f"exists='overwrite' removes a run, which has a {RUN_FILE}; found checkpoints without it in "
                    f"{self.directory}. Choose another directory, or remove this one by hand."
                )
            return
        models = [path for path in self.directory.glob("*.ckpt") if (path / STATE_FILE).exists()]
        files = [path for pattern in RUN_FILES for path in self.directory.glob(pattern)]
        try:
            for path in checkpoints.paths():
                io.remove_checkpoint(path)
            for path in (*models, *files, self.directory / RUN_FILE):  # the last one tells that this is a run
                io.remove(path)
        except OSError as why:
            raise CheckpointError(
                f"exists='overwrite' must be able to remove the run in {self.directory}; found: {why}. Choose another "
                "directory, or fix the permissions."
            ) from why

    def check(self, state: dict[str, Any], rank_state: dict[str, Any]) -> None:
        """Raise if the state could not be saved, before the training starts."""
        io.check({**state, "per_rank": [rank_state]})

    def describe(self, **about: Any) -> None:
        """Write run.json."""
        if collectives.rank() == 0:
            content = {"format_version": RUN_VERSION, "name": self.directory.name, **about}
            write_json(self.directory / RUN_FILE, content)

    def write(self, **fields: Any) -> None:
        """Append a line to the log, on rank 0."""
        if self._log is not None:
            if self._lock.is_lost:
                self._lock.verify()
            self._log.write(**fields)

    def exclude_from_checkpoints(self) -> None:
        """Leave the log lines that are written from now on out of checkpoints: a resumed run cuts them off."""
        if self._log is not None:
            self._log.exclude_from_checkpoints()

    def save(self, state: Callable[[int], tuple[dict[str, Any], dict[str, Any]]], update: int) -> Path:
        """Save a checkpoint and return its path. Collective; with several ranks it is written in the background.

        state: receives the length of the log in bytes and returns the state, and that of this rank.
        """
        checkpoints = self._checkpoints
        if checkpoints is None:
            raise CheckpointError(
                "checkpoints can be saved only while fit runs; found no running fit. Call save from a callback."
            )
        on_every_rank(self._lock.verify)
        current, rank_state = state(0 if self._log is None else self._log.position())
        path = checkpoints.path_of(update)
        if self._writer is None:
            checkpoints.save(current, update, rank_state)
        else:
            self._writer.save(path, current, rank_state, then=lambda: checkpoints.remove_older_than(update))
        self._upload()
        return path

    def _upload(self, last: bool = False) -> None:
        """Copy new files to the store, in the main thread: the libraries of stores draw from Python's generator.
        Collective.
        """
        mirror = self._mirror
        if mirror is not None:
            if self._writer is not None:
                self._writer.wait()
            on_rank_zero(lambda: mirror.send(self.directory, last))

    def save_model(self, name: str, state: dict[str, Any]) -> Path:
        """Write a state to `name`.ckpt next to the log, where it is not removed. Collective."""
        if not isinstance(name, str) or not name.strip(".") or Path(name).name != name:
            raise ValueError(f"the name of a saved model must be a file name without a path; found {name!r}.")
        path = self.directory / f"{name}.ckpt"
        path.parent.mkdir(parents=True, exist_ok=True)
        io.write(path, state)
        return path

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk, and in the store."""
        if self._writer is not None:
            self._writer.finish()
            self._writer = None
        self._upload(last=True)

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
    if collectives.all_reduce_scalars(error is not None)[0]:
        raise error or CheckpointError(f"{path} must be readable on all ranks; found that another rank failed.")
    return state


# --- log.jsonl -------------------------------------------------------------------------------------------------------


class Log:
    """Log file log.jsonl: one JSON object per line, flushed after each line.

    On resume, lines newer than the checkpoint are cut off.
    """

    def __init__(self, path: Path, keep: int | None = 0):
        """keep: number of bytes of an existing file to keep; None for all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab")
        size = self._file.tell()
        self._file.truncate(size if keep is None else min(keep, size))
        self._file.seek(0, os.SEEK_END)
        self._end: int | None = None  # length in bytes of the part that belongs to checkpoints; None for all

    def write(self, **fields: Any) -> None:
        """Append a line. Tensors and NumPy arrays and numbers are written as numbers and lists."""
        text = json.dumps(fields, default=_as_json) + "\n"
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as why:
            raise CheckpointError(
                f"the log file {self._path} must be writable; found: {why}. Free disk space or fix the permissions, "
                "then resume: the checkpoints are intact."
            ) from why

    def exclude_from_checkpoints(self) -> None:
        self._end = self._file.tell()

    def position(self) -> int:
        """Flush to disk (fsync) and return the length in bytes of the part that belongs to a checkpoint."""
        os.fsync(self._file.fileno())
        return self._file.tell() if self._end is None else self._end

    def close(self) -> None:
        with suppress(OSError):  # a failed write has raised already
            self._file.close()


def _as_json(value: Any) -> Any:
    """Convert tensors, NumPy arrays and NumPy numbers for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(
        f"fields of a log line must be numbers, text, or lists or dicts of these; found {type(value).__name__}."
    )


# --- run.json --------------------------------------------------------------------------------------------------------

# Packages that can change the results of a training run. Those that are imported are listed with their versions.
PACKAGES = ("samplewise", "torch", "numpy", "torchvision", "torchdata", "transformers", "datasets", "torchmetrics")


def run_metadata(step: Step, loader: Iterable[Any], device: torch.device, **settings: Any) -> dict[str, Any]:
    """Return the metadata of a run as a dict for JSON.

    settings: further settings of the trainer to list.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "samplewise": installed_version(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in step.model.parameters()),
        "device": device_name(device),
        "settings": {**_plain(settings), **_plain(_step_settings(step)), **_plain(_loader_settings(loader))},
        "versions": {"python": platform.python_version(), **_versions()},
        "machine": {
            "system": platform.platform(),
            "processors": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        },
    }


def _step_settings(step: Step) -> dict[str, Any]:
    return {
        "model": type(step.model).__name__,
        "loss": _loss(step.loss_fn),
        "optimizer": _optimizer(step.optimizer),
        "scheduler": _scheduler(step.scheduler),
        **step.config.settings(),
    }


def _scheduler(scheduler: Any) -> str | None:
    """Return the class of the scheduler, or the arguments of `by_samples`."""
    if isinstance(scheduler, SampleScheduler):
        return repr(scheduler.schedule)
    return None if scheduler is None else type(scheduler).__name__


def _loss(loss_fn: Any) -> str:
    """Return the name of the loss function, with its module if it is not a criterion of PyTorch."""
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    name = loss_name(function)
    return name if hasattr(function, "criterion") else f"{function.__module__}.{name}"


def _optimizer(optimizer: Any) -> str:
    """Return the optimizer as a constructor call with the settings of its first parameter group."""
    groups = getattr(optimizer, "param_groups", None) or [{}]
    names = [name for name in groups[0] if name not in ("params", "param_names", "initial_lr")]
    options = {name: groups[0][name] for name in names if groups[0][name] not in (None, False)}
    more = f", and {len(groups) - 1} more groups" if len(groups) > 1 else ""
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value!r}' for name, value in options.items())}){more}"


def _loader_settings(loader: Any) -> dict[str, Any]:
    named = {"batch size": "batch_size", "workers": "num_workers"}
    settings = {title: getattr(loader, name, None) for title, name in named.items()}
    data = getattr(loader, "dataset", loader)
    inner = getattr(data, "dataset", data)  # the dataset inside sw.Indexed or Subset
    return {"data": type(inner).__name__, **settings}


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are not None; values other than bool, int, float and str as their repr."""
    plain = (bool, int, float, str)
    items = ((name, value) for name, value in settings.items() if value is not None)
    return {name: value if isinstance(value, plain) else repr(value) for name, value in items}


def _versions() -> dict[str, str]:
    """Return the versions of the imported packages; not of those imported from a source tree."""
    versions = {name: installed_version(name) for name in PACKAGES if name in sys.modules}
    return {name: version for name, version in versions.items() if version != UNKNOWN}
