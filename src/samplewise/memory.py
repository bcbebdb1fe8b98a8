"""What fits: the memory a forward pass may take, and errors that mean it took too much."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class OverBudget(Exception):
    """A forward pass would keep more for its backward pass than it may."""


@contextmanager
def bounded(budget: int, *modules: nn.Module) -> Iterator[None]:
    """Stops the forward pass once what it saved for backward takes more than so many bytes, weights not counted."""
    own = {t.untyped_storage().data_ptr() for m in modules for t in (*m.parameters(), *m.buffers())}
    seen: dict[tuple[int, int], int] = {}
    total = 0

    def pack(x: Tensor) -> Tensor:
        nonlocal total
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            place, size = (
                (storage.data_ptr(), int(x.storage_offset())),
                min(storage.nbytes(), x.numel() * x.element_size()),
            )
            total += max(0, size - seen.get(place, 0))
            seen[place] = max(size, seen.get(place, 0))
        if total > budget:
            raise OverBudget
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield


def is_out_of_memory(error: BaseException) -> bool:
    """Ours, an accelerator's, or that of the CPU's allocator, which has no type of its own."""
    return isinstance(error, (OverBudget, torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def free_memory(model: nn.Module) -> int:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
