"""State dict of all global random generators: torch, Python, NumPy and every CUDA device."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def random_state_dict() -> dict[str, Any]:
    """Return the state of all global random generators. NumPy is None if it is not imported."""
    numpy: Any = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": None if numpy is None else _as_plain(numpy.random.get_state()),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def load_random_state(state: dict[str, Any]) -> None:
    """Restore the state of all global random generators."""
    torch.set_rng_state(state["torch"].cpu())
    random.setstate(state["python"])
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and state["numpy"] is not None:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    devices = state["cuda"][: torch.cuda.device_count()]  # there may be fewer devices than when it was saved
    for device, of_device in enumerate(devices):
        torch.cuda.set_rng_state(of_device.cpu(), device)


def _as_plain(state: Any) -> tuple[Any, ...]:
    name, keys, position, has_gauss, cached = state
    return name, torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)
