"""All random state as a state dict: torch's, Python's, NumPy's, every CUDA device's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state_dict() -> dict[str, Any]:
    numpy: Any = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": None if numpy is None else _as_plain(numpy.random.get_state()),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def load_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    for device, of_device in enumerate(
        state["cuda"][: torch.cuda.device_count()]
    ):  # there may be fewer than there were
        torch.cuda.set_rng_state(of_device.cpu(), device)


def _as_plain(state: Any) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = state
    return name, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)
