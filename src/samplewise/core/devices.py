"""Choice of the device, and transfer of batches to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import leaves, map_leaves


def resolve(device: str | torch.device) -> torch.device:
    """Return a torch.device. "auto" is CUDA if available, else MPS, else the CPU."""
    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def moved(batch: Any, device: torch.device) -> Any:
    """Return the batch on `device`.

    Copies from pinned memory to CUDA are asynchronous. Objects other than tensors are moved by their method `to`.
    """
    if device.type == "cpu" and all(isinstance(leaf, Tensor) and leaf.device == device for leaf in leaves(batch)):
        return batch

    def there(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=device.type == "cuda" and leaf.is_pinned())
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return map_leaves(batch, there)
