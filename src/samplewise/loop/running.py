"""Means over the updates since the last line of the log, and over the epoch; read from the device when asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplewise.step.update import Update


class Running:
    def __init__(self) -> None:
        self._lines, self._epoch = Sums(), Sums()
        self._last: Update | None = None
        self._lr: Any = None

    def add(self, update: Update) -> None:
        self._last = update
        for sums in (self._lines, self._epoch):
            sums.add(update)

    def read(self) -> dict[str, Any]:
        """Since the last line."""
        sums, self._lines = self._lines, Sums()
        speed = sums.samples / sums.seconds if sums.seconds else 0.0
        return {
            "loss": sums.mean(),
            "lr": self._rates(),
            "skipped": sums.skipped,
            "seconds": sums.seconds,
            "samples_per_second": speed,
        }

    def _rates(self) -> Any:
        """Of the last update. They may be on the device, so they are not read before."""
        if self._last is not None:
            self._lr, self._last = self._last.lr, None
        return self._lr

    @property
    def unread(self) -> bool:
        return self._lines.samples > 0

    @property
    def begun(self) -> bool:
        """Whether this epoch has made any update."""
        return self._epoch.samples > 0

    def read_epoch(self) -> dict[str, Any]:
        sums, self._epoch = self._epoch, Sums()
        return {"loss": sums.mean(), "skipped": sums.skipped, "seconds": sums.seconds}

    def state_dict(self) -> dict[str, Any]:
        return {"lines": vars(self._lines).copy(), "epoch": vars(self._epoch).copy(), "lr": self._rates()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self._lines).update(state["lines"])
        vars(self._epoch).update(state["epoch"])
        self._lr, self._last = state["lr"], None


class Sums:
    """Added up one after the other, in float64: the same however a run is interrupted."""

    def __init__(self) -> None:
        self.loss = self.count = torch.zeros((), dtype=torch.float64)
        self.samples, self.skipped, self.seconds = 0, 0, 0.0

    def add(self, update: Update) -> None:
        self.samples += update.samples
        self.seconds += update.seconds
        self.skipped += update.skipped
        if not update.skipped:
            loss, count = update.sums()
            device = loss.device if isinstance(loss, Tensor) else self.loss.device  # of several ranks it is a number
            self.loss = self.loss.to(device) + loss
            self.count = self.count.to(device) + count

    def mean(self) -> float:
        return float(self.loss / self.count.to(self.loss.device)) if float(self.count) else float("nan")
