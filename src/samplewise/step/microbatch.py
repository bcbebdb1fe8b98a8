"""Microbatch size, given by the user or found by halving when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import cut, length
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


class Microbatch:
    """Microbatch size of a step. `size`: samples per microbatch; None: as they arrive."""

    def __init__(self, given: int | str | Auto | None, modules: Sequence[nn.Module], trained: TrainedParameters):
        given = auto() if given == "auto" else given
        if not (given is None or isinstance(given, Auto) or (type(given) is int and given > 0)):
            raise ValueError(
                f"microbatch must be a positive integer, None, 'auto' or sw.auto(memory); found {given!r}."
            )
        self.size = given if isinstance(given, int) else None
        self.automatic = isinstance(given, Auto)
        self.budget: int | None = None  # bytes
        if isinstance(given, Auto):
            self.budget = given.memory or free_memory(modules[0]) // 2
        self._modules = modules
        self._trained = trained

    def attempt(self, compute: Callable[[Sequence[Any]], Any], pieces: Sequence[Any]) -> Any:
        """Return compute(pieces); with an automatic size, retry with smaller microbatches when memory runs out. A
        failed attempt is undone: buffers, random state and gradients are restored.
        """
        whole = pieces
        while self.automatic:
            restore = self._everything()
            try:
                return compute(pieces)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                restore()
                pieces = self._halved(whole, pieces, error)
        return compute(pieces)

    def _halved(self, whole: Sequence[Any], pieces: Sequence[Any], error: Exception) -> list[Any]:
        """Cut the original microbatches `whole` to half of the largest size in `pieces`."""
        largest = max(length(piece) or 1 for piece in pieces)
        if largest == 1:
            raise MemoryError(
                "a microbatch of one sample, or a batch that cannot be cut, must fit into memory; found that it does "
                f"not ({str(error) or f'the budget is {self.budget} bytes'}). Use a smaller model or a larger budget."
            ) from error
        size = self.size = (largest + 1) // 2
        halved: list[Any] = []
        for piece in whole:
            total = length(piece) or 1
            if total <= size:
                halved.append(piece)
            else:
                halved += [cut(piece, start, min(start + size, total)) for start in range(0, total, size)]
        return halved

    def _everything(self) -> Callable[[], None]:
        """Snapshot of buffers, random state and gradient sums; returns the function that restores them."""
        restore_model = snapshot(*self._modules)
        sums: dict[Tensor, Tensor | None] = {
            p: None if p.grad is None else p.grad.clone() for p in self._trained.named.values()
        }

        def restore() -> None:
            restore_model()
            for p, total in sums.items():
                p.grad = total
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

        return restore
