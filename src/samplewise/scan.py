"""`sw.scan`: per-sample gradients over a whole dataset, without training and in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samplewise.core.batches import check_loader, copied, cut, keep_whole, leaves, length
from samplewise.core.closure_state import CallSnapshot
from samplewise.core.comparisons import difference_of_slice
from samplewise.core.losses import LossFn, as_loss_fn, constants_of, note_causes, per_sample
from samplewise.core.memory import count_saved_bytes
from samplewise.core.microbatch import Halving, Microbatch, MicrobatchSize, as_microbatch, memory_budget
from samplewise.core.state import eval_mode
from samplewise.engine.arguments import check_attached, check_model
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
        size = as_microbatch(microbatch)
        self._model = model
        self._loss_fn = as_loss_fn(loss_fn)
        self._size = MicrobatchSize(size, memory_budget(size, model, share=4))
        self._strategy = strategy
        self._compared = False  # a slice was compared with its batch
        self._fitting: list[list[tuple[int, ...]]] = []  # shapes of the last microbatches that were within the budget

    def of(self, batch: Any) -> Iterator[tuple[Any, Gradients]]:
        """Yield (microbatch, g) of a batch."""
        return ((microbatch, self._gradients(losses)) for microbatch, losses in self.losses(batch))

    def losses(self, batch: Any) -> Iterator[tuple[Any, Tensor]]:
        """Yield (microbatch, losses) of a batch; halve the size when the activations exceed the memory budget."""
        batch = keep_whole(batch, constants_of(self._loss_fn))
        total = length(batch)
        if total is None:
            yield batch, self._losses(batch)
            return
        start = 0
        while start < total:
            stop = min(start + (self._size.size or total), total)
            microbatch = batch
            if (start, stop) != (0, total):
                if not self._compared:
                    self._compare_slice(batch, start, stop)
                microbatch = cut(batch, start, stop)
            losses = self._losses_within_budget(microbatch, stop - start)
            if losses is not None:
                yield microbatch, losses
                start = stop

    def _gradients(self, losses: Tensor) -> Gradients:
        return gradients(losses, self._model, strategy=self._strategy)

    def _compare_slice(self, batch: Any, start: int, stop: int) -> None:
        """Raise BatchError if an entry that is not per sample has as many rows as there are samples."""
        self._compared = True

        def compute(batch: Any) -> Tensor:
            return per_sample(self._loss_fn(self._model, copied(batch)))[0]

        state = CallSnapshot([self._loss_fn], [self._model])
        try:
            with eval_mode(self._model), torch.no_grad():
                difference_of_slice(compute, batch, start, stop)
        finally:
            state.restore()

    def _losses(self, microbatch: Any) -> Tensor:
        try:
            with torch.enable_grad():
                losses = per_sample(self._loss_fn(self._model, microbatch))[0]
            check_attached(losses)
        except Exception as error:
            note_causes(error, self._model, microbatch)
            raise
        return losses

    def _losses_within_budget(self, microbatch: Any, samples: int) -> Tensor | None:
        """Losses of a microbatch; None if they do not fit into memory, after which the size is smaller."""
        tensors = [leaf for leaf in leaves(microbatch) if isinstance(leaf, Tensor)]
        # Nested tensors have no shape.
        shapes = [] if any(t.is_nested for t in tensors) else [tuple(t.shape) for t in tensors]
        # A single sample has no budget: it cannot be cut. Counting takes as long as a small model.
        if self._size.budget is None or samples == 1 or shapes in self._fitting:
            return self._losses(microbatch)
        state = CallSnapshot([self._loss_fn], [self._model], [microbatch])
        with Halving(self._size, state.restore, samples), count_saved_bytes(self._model, budget=self._size.budget):
            losses = self._losses(microbatch)
            if shapes:
                self._fitting = [*self._fitting[-1:], shapes]
            return losses
        return None
