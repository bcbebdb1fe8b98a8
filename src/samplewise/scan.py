"""`sw.scan`: per-sample gradients over a whole dataset, without training and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samplewise.core.batches import check_loader, copied, cut, keep_whole, length
from samplewise.core.closure_state import CallSnapshot
from samplewise.core.constants import constants_of, difference_of_slice
from samplewise.core.losses import LossFn, as_loss_fn, per_sample
from samplewise.core.memory import Auto, Microbatch, auto, bounded, free_memory, is_out_of_memory
from samplewise.core.state import eval_mode
from samplewise.engine.checks import check_attached, check_model
from samplewise.engine.gradients import Gradients, gradients


def scan(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[Any],
    *,
    microbatch: Microbatch = "auto",
    strategy: Literal["fused", "twice", "full", "reference"] | None = None,
) -> Iterator[tuple[Any, Gradients]]:
    """Iterate over a loader and yield (microbatch, g) with the Gradients g of each microbatch.

    `loss_fn(model, batch)` returns losses (B,), or (losses, counts), or is a criterion such as nn.CrossEntropyLoss().
    `microbatch` is the number of samples per microbatch: a number, None for whole batches, "auto" (default) for the
    largest number whose activations take at most a quarter of the free memory, or `sw.auto(memory)` for at most
    `memory` bytes. A batch that cannot be sliced is used whole; see `batch_constants` for entries that are not per
    sample. `strategy`: as in `sw.gradients`.
    """
    scanner = Scanner(model, loss_fn, microbatch, strategy=strategy)
    check_loader(loader)
    return (pair for batch in loader for pair in scanner.of(batch))


class Scanner:
    """Gradients of batches, as in `scan`, one batch at a time. The size of microbatches is kept between batches."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        microbatch: Microbatch = "auto",
        *,
        strategy: Literal["fused", "twice", "full", "reference"] | None = None,
    ):
        check_model(model, "sw.scan(model, loss_fn, loader)")
        size = auto() if microbatch == "auto" else microbatch
        if not (size is None or isinstance(size, Auto) or (type(size) is int and size > 0)):
            raise ValueError(
                f"microbatch must be a positive integer, None, 'auto' or sw.auto(memory); found {microbatch!r}."
            )
        self._pieces = _Pieces(model, as_loss_fn(loss_fn), size)
        self._strategy = strategy

    def of(self, batch: Any) -> Iterator[tuple[Any, Gradients]]:
        """Yield (microbatch, g) of a batch."""
        for piece, losses in self._pieces.of(batch):
            yield piece, gradients(losses, self._pieces.model, strategy=self._strategy)


class _Pieces:
    """Slices batches into microbatches and computes their losses; finds the size that fits into memory."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, microbatch: int | Auto | None):
        self.model = model
        self.loss_fn = loss_fn
        self.size = microbatch if isinstance(microbatch, int) else None
        self.memory: int | None = None  # budget of an automatic size
        if isinstance(microbatch, Auto):
            self.memory = microbatch.memory or free_memory(model) // 4
        self.constants = constants_of(loss_fn)
        self.sliced = False  # whether a slice was compared with its batch

    def of(self, batch: Any) -> Iterator[tuple[Any, Tensor]]:
        """Yield (microbatch, losses); halve the size when the activations exceed the memory budget."""
        batch = keep_whole(batch, self.constants)
        total = length(batch)
        if total is None:
            yield batch, self._losses(batch)
            return
        start = 0
        while start < total:
            stop = min(start + (self.size or total), total)
            piece = batch
            if (start, stop) != (0, total):
                self._compare_slice(batch, start, stop)
                piece = cut(batch, start, stop)
            measures = self.memory is not None and stop - start > 1
            losses = self._measured(piece) if measures else self._losses(piece)
            if losses is None:
                self.size = (stop - start + 1) // 2
                continue
            yield piece, losses
            start = stop

    def _compare_slice(self, batch: Any, start: int, stop: int) -> None:
        """In the first slice, raise BatchError if an entry that is not per sample has as many rows as there are
        samples.
        """
        if self.sliced:
            return
        self.sliced = True

        def compute(some: Any) -> Tensor:
            return per_sample(self.loss_fn(self.model, copied(some)))[0]

        state = CallSnapshot([self.loss_fn], [self.model])
        try:
            with eval_mode(self.model), torch.no_grad():
                difference_of_slice(compute, batch, start, stop)
        finally:
            state.restore()

    def _losses(self, piece: Any) -> Tensor:
        with torch.enable_grad():
            losses = per_sample(self.loss_fn(self.model, piece))[0]
        check_attached(losses)
        return losses

    def _measured(self, piece: Any) -> Tensor | None:
        """Return the losses, or restore the state of model and loss function and return None if the activations exceed
        the budget.
        """
        assert self.memory is not None
        state = CallSnapshot([self.loss_fn], [self.model], [piece])
        try:
            with bounded(self.memory, self.model):
                return self._losses(piece)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            state.restore()
            return None
