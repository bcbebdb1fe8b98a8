"""The numbers that a forward pass is computed in, and the loss scale that keeps float16 gradients from vanishing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

CASTS = {"32": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
GROWTH_INTERVAL = 2000  # updates without overflow before the scale is doubled


class Precision:
    """None leaves everything to the caller. Scales are powers of two, so that scaling is exact."""

    def __init__(self, name: str | None):
        if name is not None and name not in CASTS:
            raise ValueError(f"precision must be None, {', '.join(map(repr, CASTS))}; found {name!r}.")
        self.name = name
        self.scales = name == "16-mixed"
        self.scale = 2.0**16 if self.scales else 1.0
        self._since_change = 0

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.name is None:
            return nullcontext()
        dtype = CASTS[self.name]
        return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)

    def overflowed(self) -> None:
        if self.scales:
            self.scale, self._since_change = self.scale / 2, 0

    def went_well(self) -> None:
        if not self.scales:
            return
        self._since_change += 1
        if self._since_change == GROWTH_INTERVAL:
            self.scale, self._since_change = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "since_change": self._since_change}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self._since_change = state["scale"], state["since_change"]
