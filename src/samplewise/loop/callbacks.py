"""Callbacks that ship."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from samplewise.loop.durations import duration


def _better(mode: str) -> int:
    if mode not in ("min", "max"):
        raise ValueError(f"mode must be 'min' or 'max'; found {mode!r}.")
    return -1 if mode == "max" else 1


def _monitored(metrics: dict[str, float], name: str) -> float:
    if name not in metrics:
        raise KeyError(f"monitor must be one of {', '.join(metrics)}; found {name!r}.")
    return metrics[name]


class EarlyStopping:
    """Stops when a metric has not become better for so many epochs. NaN is never better."""

    def __init__(self, monitor: str = "loss", patience: int = 3, mode: str = "min", min_delta: float = 0.0):
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
        self._best, self._waited = state["best"], state["waited"]


class ModelCheckpoint:
    """Saves what it takes to resume, every so often ("1ep", "500up"), and the best models by a metric."""

    def __init__(self, every: str = "1ep", best: int = 0, monitor: str = "loss", mode: str = "min"):
        self.every, self.best, self.monitor = duration(every), best, monitor
        self._sign = _better(mode)
        self._kept: list[tuple[float, str]] = []  # the best first

    def on_update(self, trainer: Any, update: Any) -> None:
        if self.every.updates is not None and not update.skipped and (update.index + 1) % self.every.updates == 0:
            trainer.save()

    def on_epoch_end(self, trainer: Any, epoch: int, metrics: dict[str, float]) -> None:
        if self.best:
            self._keep_if_good(trainer, _monitored(metrics, self.monitor))
        if self.every.epochs is not None and (epoch + 1) % self.every.epochs == 0:
            trainer.save()

    def _keep_if_good(self, trainer: Any, value: float) -> None:
        ranked = sorted([*self._kept, (self._sign * value, "")], key=lambda kept: (math.isnan(kept[0]), kept[0]))
        if ("" in [name for _, name in ranked[: self.best]]) and not math.isnan(value):
            name = trainer.save_model(f"best-{trainer.step.counters.updates:09d}").name
            ranked = [(v, n or name) for v, n in ranked]
            for _, dropped in ranked[self.best :]:
                (Path(trainer.run) / dropped).unlink(missing_ok=True)
            self._kept = ranked[: self.best]

    def state_dict(self) -> dict[str, Any]:
        return {"kept": [list(kept) for kept in self._kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept = [(value, name) for value, name in state["kept"]]


class LRMonitor:
    """Writes the learning rates of all parameter groups into the log, every so many updates."""

    def __init__(self, every: int = 50):
        self.every = every

    def on_update(self, trainer: Any, update: Any) -> None:
        if (update.index + 1) % self.every == 0:
            rates = update.lr if isinstance(update.lr, tuple) else (update.lr,)
            trainer.write("lr", update=update.index + 1, rates=list(rates))


class MaxTime:
    """Stops after so many seconds."""

    def __init__(self, seconds: float):
        self.seconds, self._started = seconds, 0.0

    def on_fit_start(self) -> None:
        self._started = time.monotonic()

    def on_update(self, trainer: Any) -> None:
        if time.monotonic() - self._started > self.seconds:
            trainer.stop(f"{self.seconds} seconds are over")
