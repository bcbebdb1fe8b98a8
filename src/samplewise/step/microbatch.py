"""Microbatch size, given by the user or found by halving when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from samplewise.core.batches import cut
from samplewise.core.devices import empty_cache
from samplewise.core.memory import Auto, free_memory, is_out_of_memory
from samplewise.step.batch_layouts import BatchLayouts


class MicrobatchSize:
    """Microbatch size of a step. `size`: samples per microbatch; None: as they arrive. `budget`: bytes of saved
    activations; None: no limit.
    """

    def __init__(self, given: int | Auto | None, modules: Sequence[nn.Module], layouts: BatchLayouts):
        self.size = given if isinstance(given, int) else None
        self.automatic = isinstance(given, Auto)
        self.budget: int | None = None
        self._measured = 0  # budget by the memory that is free in this process; 0 if it is given
        if isinstance(given, Auto):
            self._measured = 0 if given.memory else free_memory(modules[0]) // 2
            self.budget = given.memory or self._measured
        self._layouts = layouts
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
            restore = save(microbatches)
            try:
                return compute(microbatches)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                restore()
                empty_cache()
                microbatches = self._halved(whole, microbatches, error)
        return compute(microbatches)

    def _halved(self, whole: Sequence[Any], microbatches: Sequence[Any], error: Exception) -> list[Any]:
        """Cut the original microbatches `whole` to half of the largest size in `microbatches`."""
        length = self._layouts.length
        largest = max(length(microbatch) or 1 for microbatch in microbatches)
        if largest == 1:
            raise MemoryError(
                "a microbatch of one sample, or a batch that cannot be cut, must fit into memory; found that it does "
                f"not ({str(error) or f'the budget is {self.budget} bytes'}). Use a smaller model or a larger budget."
            ) from error
        size = (largest + 1) // 2
        self.size = size
        halved: list[Any] = []
        for microbatch in whole:
            total = length(microbatch) or 1
            if total <= size:
                halved.append(microbatch)
            else:
                self.compare(microbatch, 0, size)
                halved += [cut(microbatch, start, min(start + size, total)) for start in range(0, total, size)]
        return halved


def _compare_nothing(batch: Any, start: int, stop: int) -> None:
    """Comparison of a slice with its batch: there is none."""
