"""`sw.scan`: per-sample gradients over a whole data set, without training and in bounded memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.batches import cut, length
from samplewise.engine.gradients import Gradients, gradients
from samplewise.losses import LossFn, check_loss_fn, losses_of


def scan(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Any],
    microbatch: int | str | None = "auto",
    *,
    memory: int | None = None,
    strategy: str | None = None,
) -> Iterator[tuple[Any, Gradients]]:
    """Yields (batch, g) for every piece of every batch.

    `loss_fn(model, batch)` returns losses (B,), or (losses, counts). `microbatch` is the size of the pieces: a number,
    None for batches as they come, or "auto" for the largest whose activations take no more than `memory` bytes
    (default: a quarter of what is free). A batch that cannot be cut is taken whole.
    """
    if not (microbatch in ("auto", None) or (isinstance(microbatch, int) and microbatch > 0)):
        raise ValueError(f"microbatch must be a positive number, None or 'auto'; found {microbatch!r}.")
    check_loss_fn(loss_fn)
    pieces = _Pieces(model, loss_fn, microbatch, memory or _free_memory(model) // 4)
    for batch in loader:
        for piece, losses in pieces.of(batch):
            yield piece, gradients(losses, model, strategy=strategy)


class _Pieces:
    """Cuts batches and computes the losses of each piece; finds the size that fits."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, microbatch: int | str | None, memory: int):
        self.model, self.loss_fn, self.memory = model, loss_fn, memory
        self.size = microbatch if isinstance(microbatch, int) else None
        self.measures = microbatch == "auto"

    def of(self, batch: Any) -> Iterator[tuple[Any, Tensor]]:
        total = length(batch)
        if total is None:
            yield batch, self._losses(batch)
            return
        start = 0
        while start < total:
            stop = min(start + (self.size or total), total)
            piece = cut(batch, start, stop) if (start, stop) != (0, total) else batch
            losses = self._measured(piece) if self.measures and stop - start > 1 else self._losses(piece)
            if losses is None:
                self.size = (stop - start + 1) // 2
                continue
            yield piece, losses
            start = stop

    def _losses(self, piece: Any) -> Tensor:
        with torch.enable_grad():
            return losses_of(self.loss_fn(self.model, piece))

    def _measured(self, piece: Any) -> Tensor | None:
        """None, with everything as it was, where the activations outgrow the memory."""
        restore = _snapshot(self.model)
        try:
            with _bounded(self.memory):
                return self._losses(piece)
        except (_Overflow, torch.OutOfMemoryError):
            restore()
            return None


class _Overflow(Exception):
    pass


@contextmanager
def _bounded(memory: int) -> Iterator[None]:
    """Stops the forward pass once what it saved for backward takes more than so many bytes."""
    seen: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        if sum(seen.values()) > memory:
            raise _Overflow
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield


def _snapshot(model: nn.Module) -> Callable[[], None]:
    """Remembers buffers and random state; the function it returns brings them back."""
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    random = torch.get_rng_state()
    accelerator = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore() -> None:
        torch.set_rng_state(random)
        if accelerator:
            torch.cuda.set_rng_state_all(accelerator)
        with torch.no_grad():
            for name, b in model.named_buffers():
                b.copy_(buffers[name])

    return restore


def _free_memory(model: nn.Module) -> int:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
