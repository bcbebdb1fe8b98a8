"""Mean loss over the updates since the last log line and over the epoch. Host sync happens only on read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplewise.step.update import Update


class LossMeter:
    """Meters of loss, speed, learning rate and skipped updates."""

    def __init__(self) -> None:
        self._lines = Sums()
        self._epoch = Sums()
        self._last: Update | None = None
        self._lr: Any = None

    def add(self, update: Update) -> None:
        self._last = update
        for sums in (self._lines, self._epoch):
            sums.add(update)

    def read(self) -> dict[str, Any]:
        """Return the values since the last log line, and reset them."""
        sums = self._lines
        self._lines = Sums()
        speed = sums.samples / sums.seconds if sums.seconds else 0.0
        return {
            "loss": sums.mean(),
            "lr": self._rates(),
            "skipped": sums.skipped,
            "seconds": sums.seconds,
            "samples_per_second": speed,
        }

    def _rates(self) -> Any:
        """Return the learning rates of the last update. They may be on the device, so they are read as late as here."""
        if self._last is not None:
            self._lr = self._last.lr
            self._last = None
        return self._lr

    @property
    def unread(self) -> bool:
        """True if there were updates since the last log line."""
        return self._lines.samples > 0

    @property
    def begun(self) -> bool:
        """True if there was an update in this epoch."""
        return self._epoch.samples > 0

    def read_epoch(self) -> dict[str, Any]:
        """Return the values of the epoch, and reset them."""
        sums = self._epoch
        self._epoch = Sums()
        return {"loss": sums.mean(), "skipped": sums.skipped, "seconds": sums.seconds}

    def state_dict(self) -> dict[str, Any]:
        return {"lines": vars(self._lines).copy(), "epoch": vars(self._epoch).copy(), "lr": self._rates()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self._lines).update(state["lines"])
        vars(self._epoch).update(state["epoch"])
        self._lr = state["lr"]
        self._last = None


class Sums:
    """Sums of losses, counts, samples and seconds, added update by update in float64.

    The order of additions does not depend on interruptions, so a resumed run gets the same sums.
    """

    def __init__(self) -> None:
        self.loss = self.count = torch.zeros((), dtype=torch.float64)
        self.samples = 0
        self.skipped = 0
        self.seconds = 0.0

    def add(self, update: Update) -> None:
        self.samples += update.samples
        self.seconds += update.seconds
        self.skipped += update.skipped
        if not update.skipped:
            loss, count = update.sums()
            device = loss.device if isinstance(loss, Tensor) else self.loss.device  # a float with several ranks
            self.loss = self.loss.to(device) + loss
            self.count = self.count.to(device) + count

    def mean(self) -> float:
        """Σ losses / Σ counts; NaN if the count is 0."""
        if not float(self.count):
            return float("nan")
        return float(self.loss / self.count.to(self.loss.device))
