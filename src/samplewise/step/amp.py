"""Mixed precision: autocast of forward passes, and the loss scale that keeps float16 gradients from underflowing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

Precision = Literal["32", "bf16-mixed", "16-mixed"]
AUTOCAST_DTYPES: dict[Precision, torch.dtype | None] = {
    "32": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
GROWTH_INTERVAL = 2000  # number of updates without overflow before the loss scale is doubled


class MixedPrecision:
    """Precision of a step: autocast dtype and loss scale. None: no autocast, no loss scale. Scales are powers of two,
    so that scaling is exact.
    """

    def __init__(self, name: Precision | None):
        self.name = name
        self.scales = name == "16-mixed"
        self.scale = 2.0**16 if self.scales else 1.0
        self._since_change = 0

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.name is None:
            return nullcontext()
        dtype = AUTOCAST_DTYPES[self.name]
        return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)

    def record_overflow(self) -> None:
        """Halve the loss scale after a skipped update."""
        if self.scales:
            self.scale /= 2
            self._since_change = 0

    def record_success(self) -> None:
        """Count an applied update; double the loss scale after GROWTH_INTERVAL of them."""
        if not self.scales:
            return
        self._since_change += 1
        if self._since_change == GROWTH_INTERVAL:
            self.scale *= 2
            self._since_change = 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "since_change": self._since_change}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]
        self._since_change = state["since_change"]
