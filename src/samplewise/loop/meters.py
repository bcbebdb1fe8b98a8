"""Meters of a training: loss, speed, learning rate, time per phase and peak memory. Host sync happens only on read."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from samplewise.core.devices import device_function
from samplewise.core.means import Number, WeightedMean
from samplewise.step.update import Update


class LossMeter:
    """Mean loss, samples, seconds and skipped updates, since the last log line and over the epoch."""

    def __init__(self) -> None:
        self._line = UpdateSums()
        self._epoch = UpdateSums()
        self._last: Update | None = None
        self._without_loss: Update | None = None
        self._lr: Any = None
        self._hidden = False  # updates are private: losses and numbers of samples are not shown

    def add(self, update: Update) -> None:
        self._add_loss()
        self._last = update
        self._without_loss = None if update.hidden else update
        self._hidden = update.hidden
        seconds = update.seconds
        for sums in (self._line, self._epoch):
            sums.updates += 1
            sums.samples += 0 if update.hidden else update.samples
            sums.seconds += seconds

    def _add_loss(self) -> None:
        """Add the loss of the last update: one update late, when it is known whether the update was skipped."""
        update = self._without_loss
        if update is None:
            return
        self._without_loss = None
        skipped = update.skipped
        losses, counts = (0.0, 0.0) if skipped else update.sums()
        for sums in (self._line, self._epoch):
            sums.skipped += skipped
            sums.mean.add_sum(losses, counts)

    def read(self) -> dict[str, Any]:
        """Return the values since the last log line, and reset them."""
        self._add_loss()
        lr = self._learning_rates()
        sums = self._line
        self._line = UpdateSums()
        line = {"lr": lr, "skipped": sums.skipped, "seconds": sums.seconds}
        if self._hidden:
            return line
        speed = sums.samples / sums.seconds if sums.seconds else 0.0
        return {"loss": sums.mean.value(), **line, "samples_per_second": speed}

    def _learning_rates(self) -> Any:
        """Return the learning rates of the last update. They may be on the device, so they are read as late as here."""
        if self._last is not None:
            self._lr = self._last.lr
            self._last = None
        return self._lr

    @property
    def has_unread_updates(self) -> bool:
        """True if there were updates since the last log line."""
        return self._line.updates > 0

    @property
    def has_updates_in_epoch(self) -> bool:
        return self._epoch.updates > 0

    def read_epoch(self) -> dict[str, Any]:
        """Return the values of the epoch, and reset them."""
        self._add_loss()
        sums = self._epoch
        self._epoch = UpdateSums()
        loss = {} if self._hidden else {"loss": sums.mean.value()}
        return {**loss, "skipped": sums.skipped, "seconds": sums.seconds}

    def state_dict(self) -> dict[str, Any]:
        self._add_loss()
        return {"lines": self._line.state_dict(), "epoch": self._epoch.state_dict(), "lr": self._learning_rates()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._line.load_state_dict(state["lines"])
        self._epoch.load_state_dict(state["epoch"])
        self._lr = state["lr"]
        self._last = None
        self._without_loss = None


@dataclass
class UpdateSums:
    """Sums over updates of losses, counts, samples and seconds.

    Losses are added update by update in float64: the order of additions does not depend on interruptions, so a resumed
    run gets the same sums.
    """

    mean: WeightedMean = field(default_factory=partial(WeightedMean, torch.float64))
    updates: int = 0
    samples: int = 0
    skipped: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": _as_tensor(self.mean.total),
            "count": _as_tensor(self.mean.weight),
            "updates": self.updates,
            "samples": self.samples,
            "skipped": self.skipped,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = WeightedMean(torch.float64, float(state["loss"]), float(state["count"]))
        self.samples = state["samples"]
        self.updates = state.get("updates", int(self.samples > 0))  # missing in a checkpoint of an earlier version
        self.skipped = state["skipped"]
        self.seconds = state["seconds"]


def _as_tensor(number: Number) -> Tensor:
    return number if isinstance(number, Tensor) else torch.tensor(number, dtype=torch.float64)


class PhaseTimer:
    """Seconds per phase since the last log line: "data" (waiting for the loader), the phases of updates, and "rest"
    (callbacks, checkpoints and validation). The times are not saved in checkpoints.
    """

    def __init__(self) -> None:
        self.start()

    def start(self, seconds_waited: float = 0.0) -> None:
        """Restart all phases. `seconds_waited` is the total time spent waiting for the loader so far."""
        self._began = perf_counter()
        self._waited_before = seconds_waited
        self._phases = defaultdict[str, float](float)

    def add(self, update: Update) -> None:
        for phase, seconds in update.phases.items():
            self._phases[phase] += seconds

    def read(self, seconds_waited: float) -> dict[str, float]:
        """Return seconds per phase since the last call of `start` or `read`, and restart the timer."""
        phases = {"data": seconds_waited - self._waited_before, **self._phases}
        phases["rest"] = max(0.0, perf_counter() - self._began - sum(phases.values()))
        self.start(seconds_waited)
        return phases


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory in bytes: of the device's allocator if it records one, else of this process.

    None on Windows without such a device.
    """
    peak = device_function(device, "max_memory_allocated")
    if peak is not None:
        return peak(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
