"""Memory budget for tensors saved for backward, and detection of out-of-memory errors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samplewise.core.devices import device_function
from samplewise.core.tensor_storage import stored_values


@dataclass(frozen=True)
class Auto:
    """Automatic microbatch size. Made by `sw.auto`."""

    memory: int | None  # budget of saved activations in bytes; None: a share of the free memory


Microbatch = int | Literal["auto"] | Auto | None  # argument of users; None: whole batches


def auto(memory: int | None = None) -> Auto:
    """Automatic microbatch size, for all arguments `microbatch`. Starts with the whole window or batch and halves the
    size when memory runs out, or when the tensors saved for the backward pass exceed `memory` bytes (default: half of
    the free memory in a `Step`, a quarter in passes over a dataset such as `sw.scan`). microbatch="auto" is the same as
    auto().
    """
    if memory is not None and not memory > 0:
        raise ValueError(f"memory must be a positive number of bytes; found {memory!r}.")
    return Auto(memory)


def as_microbatch(microbatch: Any) -> int | Auto | None:
    """The argument `microbatch`, checked; "auto" becomes auto()."""
    size = auto() if isinstance(microbatch, str) and microbatch == "auto" else microbatch
    if size is None or isinstance(size, Auto) or (type(size) is int and size > 0):
        return size
    raise ValueError(f"microbatch must be a positive integer, None, 'auto' or sw.auto(memory); found {microbatch!r}.")


class OverBudget(Exception):
    """The tensors saved for backward exceed the memory budget."""


class SavedBytes:
    """Counter of bytes saved for backward: `now` is the current number, `most` the peak.

    Parameters and buffers are not counted. Several views of the same memory are counted once.
    """

    def __init__(self, modules: Iterable[nn.Module], budget: float = math.inf):
        self.now = 0
        self.most = 0
        self._budget = budget
        tensors = (t for m in modules for t in (*m.parameters(), *m.buffers()))
        self._own = {stored_values(t).untyped_storage().data_ptr() for t in tensors}
        self._places: dict[tuple[int, int], tuple[int, int]] = {}  # -> number of saved views, bytes of the largest

    def hold(self, x: Tensor) -> HeldTensor:
        values = stored_values(x)
        storage = values.untyped_storage()
        if storage.data_ptr() in self._own:
            return HeldTensor(x)
        # A view of a whole dataset counts only the bytes that it covers.
        size = min(storage.nbytes(), values.numel() * values.element_size())
        place = storage.data_ptr(), int(values.storage_offset())
        holders, largest = self._places.get(place, (0, 0))
        self._places[place] = holders + 1, max(largest, size)
        self._grow(max(0, size - largest))
        return HeldTensor(x, partial(self._release, place))

    def _release(self, place: tuple[int, int]) -> None:
        holders, largest = self._places.pop(place)
        if holders > 1:
            self._places[place] = holders - 1, largest
        else:
            self.now -= largest

    def _grow(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)
        if self.now > self._budget:
            raise OverBudget


class HeldTensor:
    """Saved tensor that calls `release` when the graph frees it.

    A tensor with gradient is stored detached: an operation that saves its own output would otherwise form a reference
    cycle and never be freed. Autograd attaches the tensor again on unpacking. Other tensors are stored as they are,
    since a view that is unpacked has lost its base.
    """

    def __init__(self, tensor: Tensor, release: Callable[[], None] = lambda: None):
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
        self._release = release

    def free(self) -> None:
        """Drop the tensor: unpacking it is an error from now on."""
        del self.tensor

    def __del__(self) -> None:
        self._release()


@contextmanager
def kept_for_backward(*modules: nn.Module, budget: float = math.inf) -> Iterator[SavedBytes]:
    """Count the bytes saved for backward inside the block, until they are freed.

    Activations in checkpointed blocks are not counted, because they are recomputed and not saved.
    """
    kept = SavedBytes(modules, budget)
    with torch.autograd.graph.saved_tensors_hooks(kept.hold, lambda held: held.tensor):
        yield kept


@contextmanager
def bounded(budget: int, *modules: nn.Module) -> Iterator[None]:
    """Raise OverBudget when tensors saved for backward take more than `budget` bytes, parameters not counted."""
    with kept_for_backward(*modules, budget=budget):
        yield


def is_out_of_memory(error: BaseException) -> bool:
    """Test for OverBudget, an accelerator's out-of-memory error, or the RuntimeError of the CPU allocator."""
    return isinstance(error, (OverBudget, torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def free_memory(model: nn.Module) -> int:
    """Free memory in bytes on the device of the model's first parameter."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    memory_info = device_function(device, "mem_get_info")
    if memory_info is not None:
        return memory_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
