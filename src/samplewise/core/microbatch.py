"""Microbatch size, given by the user or found by halving when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from samplewise.core.batches import cut, length
from samplewise.core.devices import empty_cache
from samplewise.core.memory import Auto, free_memory, is_out_of_memory


class MicrobatchSize:
    """Microbatch size of a step or of a pass over a dataset. `size`: samples per microbatch; None: as they arrive.
    `budget`: bytes of saved activations; None: no limit.

    microbatch: a size, or `Auto`, whose default budget is the free memory divided by `share`
    length: number of samples of a batch that may be sliced; None if it may not
    """

    def __init__(
        self,
        microbatch: int | Auto | None,
        model: nn.Module,
        share: int,
        length: Callable[[Any], int | None] = length,
    ):
        self.size = microbatch if isinstance(microbatch, int) else None
        self.automatic = isinstance(microbatch, Auto)
        self.budget: int | None = None
        self._measured = 0  # budget by the memory that is free in this process; 0 if it is given
        if isinstance(microbatch, Auto):
            self._measured = 0 if microbatch.memory else free_memory(model) // share
            self.budget = microbatch.memory or self._measured
        self._length = length
        self.compare: Callable[[Any, int, int], None] = _compare_nothing  # called with a batch and rows to slice

    def load(self, size: int | None, budget: int | None) -> None:
        """Continue with the size and the budget of a checkpoint, if the size is automatic, so that microbatches are cut
        as without the interruption. A budget of more than the memory that is free now is not used.
        """
        if self.automatic:
            self.size = size
            if budget is not None and budget <= 2 * self._measured:
                self.budget = budget

    def retry(
        self,
        save: Callable[[Sequence[Any]], Callable[[], None]],
        compute: Callable[[Sequence[Any]], Any],
        microbatches: Sequence[Any],
    ) -> Any:
        """Return compute(microbatches); with an automatic size, retry with smaller microbatches when memory runs out. A
        failed attempt is undone: save(microbatches) saves what `compute` changes, and returns a function that restores
        it.
        """
        whole = microbatches
        while self.automatic:
            largest = max((self._length(microbatch) or 1 for microbatch in microbatches), default=1)
            with Halving(self, save(microbatches), largest):
                return compute(microbatches)
            microbatches = self._slices(whole)
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
                self.compare(microbatch, 0, self.size)
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


def _compare_nothing(batch: Any, start: int, stop: int) -> None:
    """Comparison of a slice with its batch: there is none."""
