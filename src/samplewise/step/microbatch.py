"""Microbatch size, given by the user or found by halving when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from samplewise.core.batches import cut
from samplewise.core.devices import empty_cache
from samplewise.core.memory import Auto, free_memory, is_out_of_memory
from samplewise.step.batch_layouts import BatchLayouts
from samplewise.step.forward import LossEvaluator


def memory_budget(microbatch: int | Auto | None, model: nn.Module) -> int | None:
    """Bytes of saved activations for an automatic size; None for other sizes: no limit."""
    if not isinstance(microbatch, Auto):
        return None
    return microbatch.memory or free_memory(model) // 2


class MicrobatchSize:
    """Microbatch size of a step. `size`: samples per microbatch; None: as they arrive. `compare`: called with a batch
    and the rows of its first slice, when the batch is cut because memory runs out.
    """

    def __init__(
        self,
        microbatch: int | Auto | None,
        evaluator: LossEvaluator,
        layouts: BatchLayouts,
        compare: Callable[[Any, int, int], None],
    ):
        self.size = microbatch if isinstance(microbatch, int) else None
        self.automatic = isinstance(microbatch, Auto)
        self._evaluator = evaluator
        self._layouts = layouts
        self._compare = compare
        self._measured = 0  # budget by the memory that is free in this process; 0 if the user has set it
        if isinstance(microbatch, Auto) and not microbatch.memory:
            self._measured = evaluator.budget or 0

    def load(self, size: int | None, budget: int | None) -> None:
        """Continue with the size and the budget of a checkpoint, if the size is automatic, so that microbatches are cut
        as without the interruption. A budget of more than the memory that is free now is not used.
        """
        if self.automatic:
            self.size = size
            if budget is not None and budget <= 2 * self._measured:
                self._evaluator.budget = budget

    def retry(self, compute: Callable[[Sequence[Any]], Any], microbatches: Sequence[Any]) -> Any:
        """Return compute(microbatches); with an automatic size, retry with smaller microbatches when memory runs out. A
        failed attempt is undone.
        """
        whole = microbatches
        while self.automatic:
            restore = self._evaluator.saved_state_and_sums(microbatches)
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
            reason = str(error) or f"the budget is {self._evaluator.budget} bytes"
            raise MemoryError(
                "a microbatch of one sample, or a batch that cannot be cut, must fit into memory; found that it does "
                f"not ({reason}). Use a smaller model or a larger budget."
            ) from error
        size = (largest + 1) // 2
        self.size = size
        halved: list[Any] = []
        for microbatch in whole:
            total = length(microbatch) or 1
            if total <= size:
                halved.append(microbatch)
            else:
                self._compare(microbatch, 0, size)
                halved += [cut(microbatch, start, min(start + size, total)) for start in range(0, total, size)]
        return halved
