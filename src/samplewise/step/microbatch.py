"""Microbatch size, given by the user or found by halving when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from samplewise.core.batches import cut, length
from samplewise.core.devices import empty_cache
from samplewise.core.memory import free_memory, is_out_of_memory
from samplewise.core.snapshot import snapshot
from samplewise.step.parameters import TrainedParameters


@dataclass(frozen=True)
class Auto:
    """Automatic microbatch size."""

    memory: int | None  # budget of saved activations in bytes; None: half of the free memory


def auto(memory: int | None = None) -> Auto:
    """Automatic microbatch size, for `Step(microbatch=...)`. Starts with the whole window and halves the size when
    memory runs out, or when the tensors saved for the backward pass exceed `memory` bytes (default: half of the free
    memory). microbatch="auto" is the same as auto().
    """
    if memory is not None and not memory > 0:
        raise ValueError(f"memory must be a positive number of bytes; found {memory!r}.")
    return Auto(memory)


class MicrobatchSize:
    """Microbatch size of a step. `size`: samples per microbatch; None: as they arrive. `budget`: bytes of saved
    activations; None: no limit.
    """

    def __init__(self, given: int | Auto | None, modules: Sequence[nn.Module], trained: TrainedParameters):
        self.size = given if isinstance(given, int) else None
        self.automatic = isinstance(given, Auto)
        self.budget: int | None = None
        if isinstance(given, Auto):
            self.budget = given.memory or free_memory(modules[0]) // 2
        self._modules = modules
        self._trained = trained

    def retry(self, compute: Callable[[Sequence[Any]], Any], microbatches: Sequence[Any]) -> Any:
        """Return compute(microbatches); with an automatic size, retry with smaller microbatches when memory runs out. A
        failed attempt is undone: buffers, random state and gradients are restored.
        """
        whole = microbatches
        while self.automatic:
            restore = self._snapshot()
            try:
                return compute(microbatches)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                restore()
                microbatches = self._halved(whole, microbatches, error)
        return compute(microbatches)

    def _halved(self, whole: Sequence[Any], microbatches: Sequence[Any], error: Exception) -> list[Any]:
        """Cut the original microbatches `whole` to half of the largest size in `microbatches`."""
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
                halved += [cut(microbatch, start, min(start + size, total)) for start in range(0, total, size)]
        return halved

    def _snapshot(self) -> Callable[[], None]:
        """Snapshot of buffers, random state and gradient sums; returns the function that restores them."""
        restore_model = snapshot(*self._modules)
        sums = {name: gradient.clone() for name, gradient in self._trained.local_gradients().items()}

        def restore() -> None:
            restore_model()
            self._trained.clear()
            self._trained.set_gradients(sums)
            empty_cache()

        return restore
