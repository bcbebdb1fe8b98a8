"""Callbacks that ship."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

from samplewise.loop.checkpoint.schema import COUNT, NUMBER, Kind, check
from samplewise.loop.contents import savable
from samplewise.loop.durations import duration

MODEL_FILE = Kind(
    "the name of a file best-*.ckpt",
    lambda value: type(value) is str and Path(value).name == value and Path(value).match("best-*.ckpt"),
)


def _better(mode: str) -> int:
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max'; found {mode!r}.")
    return -1 if mode == "max" else 1


def _monitored(metrics: dict[str, float], name: str) -> float:
    if name not in metrics:
        raise ValueError(f"monitor must be one of {', '.join(metrics)}; found {name!r}.")
    return metrics[name]


class EarlyStopping:
    """Stops when a metric has not become better for so many epochs. NaN is never better."""

    def __init__(self, monitor: str = "loss", patience: int = 3, mode: str = "min", min_delta: float = 0.0):
        if type(patience) is not int or patience < 1:
            raise ValueError(f"patience must be a positive number of epochs; found {patience!r}.")
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self._sign = _better(mode)
        self._best, self._waited = math.inf, 0

    def on_epoch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        value = self._sign * _monitored(metrics, self.monitor)
        if value < self._best - self.min_delta:
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            trainer.stop(f"{self.monitor} has not become better for {self.patience} epochs")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check(state, {"best": NUMBER, "waited": COUNT})
        self._best = state["best"]
        self._waited = state["waited"]


class ModelCheckpoint:
    """Saves what it takes to resume, every so often ("1ep", "500up") and at the end of fit; and the best models by a
    metric, which stay beside the log: `best_models` are their files, the best first.
    """

    def __init__(self, every: str = "1ep", best: int = 0, monitor: str = "loss", mode: str = "min"):
        if type(best) is not int or best < 0:
            raise ValueError(f"best must be how many models to keep, 0 or more; found {best!r}.")
        self.every, self.best, self.monitor = duration(every), best, monitor
        self._sign, self._saved = _better(mode), False
        self._directory = Path()
        self._names: list[str] = []  # of the best models, the best first
        self._values: list[float] = []  # theirs

    @property
    def best_models(self) -> list[Path]:
        return [self._directory / name for name in self._names]

    def on_fit_start(self, trainer: Any) -> None:
        self._directory = trainer.run or Path()

    def on_update(self, trainer: Any, update: Any) -> None:
        every = self.every.updates
        self._save_if(every is not None and not update.skipped and (update.index + 1) % every == 0, trainer)

    def on_epoch_end(self, trainer: Any, epoch: int, metrics: dict[str, float]) -> None:
        if self.best and not trainer.fast_dev_run:
            self._keep_if_good(trainer, self._sign * _monitored(metrics, self.monitor))
        self._save_if(self.every.epochs is not None and (epoch + 1) % self.every.epochs == 0, trainer)

    def on_fit_end(self, trainer: Any) -> None:
        if trainer.run is not None and savable(trainer.step):  # else those samples could not come again
            self._save_if(not self._saved, trainer)

    def _save_if(self, wanted: bool, trainer: Any) -> None:
        self._saved = wanted
        if wanted:
            trainer.save()

    def _keep_if_good(self, trainer: Any, value: float) -> None:
        place = bisect_right(self._values, value)
        if place >= self.best or math.isnan(value):
            return
        file = trainer.save_model(f"best-{self.monitor.replace('/', '-')}-{trainer.step.counters.updates:09d}")
        self._values.insert(place, value)
        self._names.insert(place, file.name)
        for dropped in self.best_models[self.best :]:
            dropped.unlink(missing_ok=True)
        del self._values[self.best :], self._names[self.best :]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self._values, "names": self._names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check(state, {"values": [NUMBER], "names": [MODEL_FILE]})  # the files are removed when others are better
        self._values = state["values"]
        self._names = state["names"]


class LRMonitor:
    """Writes the learning rates of all parameter groups into the log, every so many updates."""

    def __init__(self, every: int = 50):
        if type(every) is not int or every < 1:
            raise ValueError(f"every must be a positive number of updates; found {every!r}.")
        self.every = every

    def on_update(self, trainer: Any, update: Any) -> None:
        if not update.skipped and (update.index + 1) % self.every == 0:
            rates = update.lr if isinstance(update.lr, tuple) else (update.lr,)
            trainer.write("lr", update=update.index + 1, rates=list(rates))


class MaxTime:
    """Stops so many seconds after fit began; a resumed one begins anew."""

    def __init__(self, seconds: float):
        self.seconds, self._started = seconds, 0.0

    def on_fit_start(self) -> None:
        self._started = time.monotonic()

    def on_update(self, trainer: Any) -> None:
        if time.monotonic() - self._started > self.seconds:
            trainer.stop(f"{self.seconds} seconds are over")
