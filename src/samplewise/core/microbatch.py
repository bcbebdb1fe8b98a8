"""Microbatch size, given by the user or found by halving when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from samplewise.core.batches import cut, length
from samplewise.core.memory import empty_cache, free_memory, is_out_of_memory


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


def memory_budget(microbatch: int | Auto | None, model: nn.Module, share: int) -> int | None:
    """Bytes of saved activations for an automatic size, by default the free memory divided by `share`; None for other
    sizes: no limit.
    """
    if not isinstance(microbatch, Auto):
        return None
    return microbatch.memory or free_memory(model) // share


class MicrobatchSize:
    """Microbatch size of a step or of a pass over a dataset. `size`: samples per microbatch; None: as they arrive.
    `budget`: bytes of saved activations; None: no limit.

    length: number of samples of a batch that may be sliced; None if it may not
    save: called with microbatches before `retry` computes with them; returns a function that undoes what it changes
    compare: called with a batch and the rows of its first slice, when the batch is cut because memory runs out
    """

    def __init__(
        self,
        microbatch: int | Auto | None,
        budget: int | None,
        length: Callable[[Any], int | None] = length,
        save: Callable[[Sequence[Any]], Callable[[], None]] | None = None,
        compare: Callable[[Any, int, int], None] | None = None,
    ):
        self.size = microbatch if isinstance(microbatch, int) else None
        self.automatic = isinstance(microbatch, Auto)
        self.budget = budget
        self._length = length
        self._save = save
        self._compare = compare
        self._measured = 0  # budget by the memory that is free in this process; 0 if the user has set it
        if isinstance(microbatch, Auto) and not microbatch.memory:
            self._measured = budget or 0

    def load(self, size: int | None, budget: int | None) -> None:
        """Continue with the size and the budget of a checkpoint, if the size is automatic, so that microbatches are cut
        as without the interruption. A budget of more than the memory that is free now is not used.
        """
        if self.automatic:
            self.size = size
            if budget is not None and budget <= 2 * self._measured:
                self.budget = budget

    def retry(self, compute: Callable[[Sequence[Any]], Any], microbatches: Sequence[Any]) -> Any:
        """Return compute(microbatches); with an automatic size, retry with smaller microbatches when memory runs out. A
        failed attempt is undone.
        """
        uncut = microbatches
        while self.automatic:
            assert self._save is not None
            largest = max((self._length(microbatch) or 1 for microbatch in microbatches), default=1)
            with Halving(self, self._save(microbatches), largest):
                return compute(microbatches)
            microbatches = self._slices(uncut)
        return compute(microbatches)

    def _slices(self, microbatches: Sequence[Any]) -> list[Any]:
        """The microbatches, cut to the size if they are larger."""
        assert self.size is not None
        slices: list[Any] = []
        for microbatch in microbatches:
            total = self._length(microbatch) or 1
            if total <= self.size:
                slices.append(microbatch)
            else:
                if self._compare is not None:
                    self._compare(microbatch, 0, self.size)
                starts = range(0, total, self.size)
                slices += [cut(microbatch, start, min(start + self.size, total)) for start in starts]
        return slices


@dataclass(frozen=True)
class Halving(AbstractContextManager[None, bool]):
    """Context manager: if memory runs out in the block, undo the attempt, halve the size, and continue after the block.

    samples: of the largest microbatch in the block
    restore: undoes what the block has changed
    """

    size: MicrobatchSize
    restore: Callable[[], object]
    samples: int

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not isinstance(error, Exception) or not is_out_of_memory(error):
            return False
        self.restore()
        empty_cache()
        if self.samples == 1:
            raise MemoryError(
                "a microbatch of one sample, or a batch that cannot be cut, must fit into memory; found that it does "
                f"not ({str(error) or f'the budget is {self.size.budget} bytes'}). Use a smaller model or a larger "
                "budget."
            ) from error
        self.size.size = (self.samples + 1) // 2
        return True
