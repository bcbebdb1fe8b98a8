"""`sw.scan`: per-sample gradients over a whole data set, without training and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.batches import cut, length
from samplewise.engine.gradients import Gradients, gradients
from samplewise.losses import LossFn, as_loss_fn, per_sample
from samplewise.memory import bounded, free_memory, is_out_of_memory
from samplewise.replay import snapshot


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

    `loss_fn(model, batch)` returns losses (B,), or (losses, counts), or is a criterion such as nn.CrossEntropyLoss().
    `microbatch` is the size of the pieces: a number, None for batches as they come, or "auto" for the largest whose
    activations take no more than `memory` bytes (default: a quarter of what is free). A batch that cannot be cut is
    taken whole.
    """
    if not (microbatch in ("auto", None) or (isinstance(microbatch, int) and microbatch > 0)):
        raise ValueError(f"microbatch must be a positive number, None or 'auto'; found {microbatch!r}.")
    pieces = _Pieces(model, as_loss_fn(loss_fn), microbatch, memory or free_memory(model) // 4)
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
            return per_sample(self.loss_fn(self.model, piece))[0]

    def _measured(self, piece: Any) -> Tensor | None:
        """None, with everything as it was, where the activations outgrow the memory."""
        restore = snapshot(self.model)
        try:
            with bounded(self.memory, self.model):
                return self._losses(piece)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            restore()
            return None
