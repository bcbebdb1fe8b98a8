"""What fits: the memory a forward pass may take, and errors that mean it took too much."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


class OverBudget(Exception):
    """A forward pass would keep more for its backward pass than it may."""


class Kept:
    """Bytes that forward passes hold for their backward passes: `now`, and the `most` there were at a time. Weights
    and buffers are not counted, and several views of one place only once."""

    def __init__(self, modules: Iterable[nn.Module], budget: float = math.inf):
        self.now = self.most = 0
        self._budget = budget
        self._own = {t.untyped_storage().data_ptr() for m in modules for t in (*m.parameters(), *m.buffers())}
        self._places: dict[tuple[int, int], tuple[int, int]] = {}  # -> how many hold it, bytes of the largest

    def hold(self, x: Tensor) -> _Held:
        storage = x.untyped_storage()
        if storage.data_ptr() in self._own:
            return _Held(x)
        # A view of a whole data set keeps no more for backward than it shows.
        size = min(storage.nbytes(), x.numel() * x.element_size())
        place = storage.data_ptr(), int(x.storage_offset())
        holders, largest = self._places.get(place, (0, 0))
        self._places[place] = holders + 1, max(largest, size)
        self._grow(max(0, size - largest))
        return _Held(x, partial(self._release, place))

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


class _Held:
    """A saved tensor, for as long as the graph keeps it. Detached: an operation that saves what it returns would hold
    itself otherwise, and never be freed. Autograd attaches it again."""

    def __init__(self, tensor: Tensor, release: Callable[[], None] = lambda: None):
        self.tensor, self._release = tensor.detach(), release

    def __del__(self) -> None:
        self._release()


@contextmanager
def kept_for_backward(*modules: nn.Module, budget: float = math.inf) -> Iterator[Kept]:
    """Counts what is saved inside, until it is freed. Of a checkpointed block nothing is: it is computed again."""
    kept = Kept(modules, budget)
    with torch.autograd.graph.saved_tensors_hooks(kept.hold, lambda held: held.tensor):
        yield kept


@contextmanager
def bounded(budget: int, *modules: nn.Module) -> Iterator[None]:
    """Stops the forward pass once what it saved for backward takes more than so many bytes, weights not counted."""
    with kept_for_backward(*modules, budget=budget):
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
