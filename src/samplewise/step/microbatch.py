"""How much of a window is computed at a time; "auto" finds it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.batches import cut, length
from samplewise.memory import free_memory, is_out_of_memory
from samplewise.replay import snapshot
from samplewise.step.parameters import Trained


@dataclass(frozen=True)
class Auto:
    memory: int | None  # bytes that activations may take; None: half of what is free


def auto(memory: int | None = None) -> Auto:
    """As `microbatch`: the largest size that fits. Begins with the whole window and halves it when memory runs out,
    or when what the forward pass keeps for the backward pass exceeds `memory` bytes. "auto" is auto().
    """
    if memory is not None and not memory > 0:
        raise ValueError(f"memory must be a positive number of bytes; found {memory!r}.")
    return Auto(memory)


class Microbatch:
    """`size`: samples at a time, or None for as many as come."""

    def __init__(self, given: int | str | Auto | None, modules: Sequence[nn.Module], trained: Trained):
        given = auto() if given == "auto" else given
        if not (given is None or isinstance(given, Auto) or (type(given) is int and given > 0)):
            raise ValueError(f"microbatch must be a positive number, None, 'auto' or sw.auto(memory); found {given!r}.")
        self.size = given if isinstance(given, int) else None
        self.automatic = isinstance(given, Auto)
        self.budget = (given.memory or free_memory(modules[0]) // 2) if isinstance(given, Auto) else None
        self._modules, self._trained = modules, trained

    def attempt(self, compute: Callable[[Sequence[Any]], Any], pieces: Sequence[Any]) -> Any:
        """compute(pieces), with smaller pieces if these do not fit. A failed attempt leaves no trace."""
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
        """The pieces that were given, cut anew."""
        largest = max(length(piece) or 1 for piece in pieces)
        if largest == 1:
            raise MemoryError(
                "a microbatch of one sample, or a batch that cannot be cut, must fit into memory; found that it does "
                f"not ({str(error) or f'the budget is {self.budget} bytes'}). Use a smaller model or a larger budget."
            ) from error
        size = self.size = (largest + 1) // 2
        sizes = [length(piece) or 1 for piece in whole]
        return [
            cut(piece, start, min(start + size, total)) if total > size else piece
            for piece, total in zip(whole, sizes, strict=True)
            for start in range(0, total, size)
        ]

    def _everything(self) -> Callable[[], None]:
        """Buffers, random state, and the gradient sums so far."""
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
