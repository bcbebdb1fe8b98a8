"""Trained models: the parameters in the checkpoints of runs, for passes over a dataset without training."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from samplewise.core.files import check_local, sha256
from samplewise.dataset_pass import Checkpoint
from samplewise.errors import CheckpointError, CheckpointWarning
from samplewise.loop.checkpoint import io
from samplewise.loop.checkpoint.directory import FOLDER, newest_first
from samplewise.loop.checkpoint.format import STATE_FILE
from samplewise.loop.checkpoint.resume_settings import check_frozen, with_frozen

NEEDED = ("model", "frozen", "loss", "meters", "trainer")  # of the state in a checkpoint
RunPath = str | os.PathLike[str]
CheckpointSource = RunPath | Iterable[RunPath] | Iterable[Checkpoint]  # the argument `checkpoints`


def as_checkpoints(model: nn.Module, checkpoints: CheckpointSource | None) -> list[Checkpoint] | None:
    """The argument `checkpoints` of a function as a list of (state_dict, weight); None stays None.

    A path is a run directory, whose checkpoints are all used, or one checkpoint. Weights: see `weights_of`.
    """
    if checkpoints is None:
        return None
    entries: list[Any] = [checkpoints] if isinstance(checkpoints, (str, os.PathLike)) else list(checkpoints)
    if not entries or not all(isinstance(entry, (str, os.PathLike)) for entry in entries):
        for k, entry in enumerate(entries):
            if not _is_checkpoint(entry):
                raise TypeError(
                    "checkpoints must be a run directory, or a list of (state_dict, lr); found "
                    f"{type(entry).__name__} as entry {k}. Pass for example 'runs/first', or "
                    "[(copy.deepcopy(model.state_dict()), lr)]."
                )
        return entries
    models = read_runs([Path(entry) for entry in entries], None)
    for trained in models:
        if trained.state.get("loss"):
            raise CheckpointError(
                f"a run as checkpoints must have a loss without weights; found weights of the loss in {trained.path}, "
                "which differ between checkpoints. Load those of one checkpoint into model and loss, and leave "
                "checkpoints out."
            )
    states = [trained.parameters(model) for trained in models]
    return list(zip(states, weights_of(models), strict=True))


def _is_checkpoint(entry: Any) -> bool:
    return (
        isinstance(entry, Sequence)
        and len(entry) == 2
        and isinstance(entry[0], Mapping)
        and isinstance(entry[1], (Real, Tensor))
    )


def weights_of(models: Sequence[TrainedModel]) -> list[float]:
    """Weight of each trained model: the learning rate of its last update; 1 each if one is unknown, if all are 0, or if
    there is one model only.
    """
    rates = [model.learning_rate for model in models if model.learning_rate is not None]
    usable = len(rates) == len(models) > 1 and any(rates)
    return rates if usable else [1.0] * len(models)


@dataclass(frozen=True)
class TrainedModel:
    """Checkpoint of a run.

    path      of the checkpoint
    run       directory of the run
    state     as returned by `sw.load_checkpoint`, without the state of the optimizer and the like
    """

    path: Path
    run: Path
    state: dict[str, Any]

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the last update; None if the checkpoint does not have it."""
        rate = self.state.get("meters", {}).get("lr")
        return rate if isinstance(rate, (int, float)) and math.isfinite(rate) else None

    @property
    def seed(self) -> int:
        """Seed of the run, from the checkpoint or from run.json; 0 if neither has it."""
        seed = self.state.get("trainer", {}).get("seed", run_settings(self.run).get("seed"))
        return seed if type(seed) is int else 0

    @property
    def samples(self) -> int | None:
        """Number of samples of the training dataset; None if the checkpoint does not have it."""
        data = self.state.get("trainer", {}).get("data") or [{}]
        return data[0].get("dataset length")

    @property
    def checksum(self) -> str:
        """SHA-256 of names, dtypes, shapes and values of the saved parameters and buffers."""
        return sha256(
            content
            for name, tensor in self.state["model"].items()
            if isinstance(tensor, Tensor)
            for content in (f"{name} {tensor.dtype} {tuple(tensor.shape)}", tensor)
        )

    def parameters(self, model: nn.Module) -> dict[str, Any]:
        """State dict for a model; raises CheckpointError if it does not fit."""
        frozen = self.state.get("frozen", {})
        check_frozen(frozen, model)
        state = with_frozen(self.state["model"], frozen, model)
        state |= {name: state[name].clone() for name in frozen}  # not the tensors of the model itself
        expected = {name: tuple(getattr(value, "shape", ())) for name, value in model.state_dict().items()}
        saved = {name: tuple(getattr(value, "shape", ())) for name, value in state.items()}
        for name in dict.fromkeys([*expected, *saved]):
            if expected.get(name) != saved.get(name):
                raise CheckpointError(
                    f"the model must be the one that was trained; found {name!r} of shape "
                    f"{expected.get(name, 'none')} in the model and {saved.get(name, 'none')} in {self.path}. Restore "
                    "the model of that run, or pass a run of this model."
                )
        return state


def read_runs(runs: Sequence[Path], newest: int | None) -> list[TrainedModel]:
    """Checkpoints of run directories; the newest one of the first run is last. An entry may also be the path of one
    checkpoint.

    newest: number of checkpoints per run; default all. CheckpointWarning is issued for those that cannot be read.
    """
    return [model for run in reversed(runs) for model in _read(run, newest)]


def _read(run: Path, newest: int | None) -> list[TrainedModel]:
    check_local(run)
    try:
        if (run / STATE_FILE).is_file():
            paths = [run]
        else:
            paths = [path for _, path in newest_first(run / FOLDER)] if (run / FOLDER).is_dir() else []
    except OSError as why:
        raise CheckpointError(f"a run must be an accessible directory; found {run}: {why.strerror}.") from why
    models: list[TrainedModel] = []
    for path in paths:
        if newest is not None and len(models) == newest:
            break
        try:
            state = io.read(path)
        except CheckpointError as why:
            warnings.warn(f"{why} It is left out.", CheckpointWarning, stacklevel=2)
            continue
        needed = {name: state[name] for name in NEEDED if name in state}
        directory = path.parent.parent if path.parent.name == FOLDER else path.parent
        models.insert(0, TrainedModel(path, directory, needed))
    if not models:
        raise CheckpointError(
            f"a run must be a directory with a readable checkpoint of a trained model; found none in {run}. Train "
            "first with samplewise train RECIPE or Trainer(..., run=...), or pass another run."
        )
    return models


def run_settings(run: Path) -> dict[str, Any]:
    """Settings in the run.json of a run directory; empty if it cannot be read."""
    try:
        settings = json.loads((run / "run.json").read_bytes())["settings"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
