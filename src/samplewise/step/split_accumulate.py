"""Gradient accumulation that leaves out samples whose loss or gradient is not finite.

A weight of 0 does not help: 0 × NaN is NaN, and one such sample makes the sum of its microbatch NaN. The microbatch is
repeated in pieces, until the pieces that fail have one sample.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import cut, leaves, length
from samplewise.core.state import Buffers
from samplewise.errors import LossesError, NonFiniteGradientError, NonFiniteLossError
from samplewise.step.accumulate import AccumulatorWrapper, LargeTerms, PerSampleAccumulator
from samplewise.transforms.stats import UNKNOWN, SampleStats
from samplewise.transforms.transform import NonFiniteCoefficientError

NOT_FINITE = (NonFiniteLossError, NonFiniteGradientError, NonFiniteCoefficientError)


class SplittingAccumulator(AccumulatorWrapper):
    """Base class: adds microbatches one by one, and repeats one that fails in pieces."""

    _inner: PerSampleAccumulator

    def __init__(self, inner: PerSampleAccumulator):
        super().__init__(inner)
        self.checks_at_once = True  # a microbatch is repeated as soon as one of its samples fails

    def add(self, microbatches: Sequence[Any], start: int, divide: bool = False) -> list[SampleStats]:
        parts: list[SampleStats] = []
        for microbatch in microbatches:  # one by one: when the second fails, the first is in `.grad`
            parts += self._add_microbatch(microbatch, start + sum(map(len, parts)), divide)
        return parts

    def _add_microbatch(self, microbatch: Any, start: int, divide: bool = False) -> list[SampleStats]:
        restore = self._snapshot(microbatch)
        try:
            return self._add([microbatch], start, divide)
        except (*NOT_FINITE, LargeTerms) as error:  # raised before `.grad` changes
            pieces = self._pieces(microbatch, error)
        restore()
        if len(pieces) == 1:
            return self._leave_out(microbatch)
        parts: list[SampleStats] = []
        for piece in pieces:
            parts += self._add_microbatch(piece, start + sum(map(len, parts)))
        return parts

    def _add(self, microbatches: Sequence[Any], start: int, divide: bool = False) -> list[SampleStats]:
        """Add microbatches, or raise one of NOT_FINITE or LargeTerms before `.grad` changes."""
        first_stats = None if self.first_stats is None else list(self.first_stats)
        try:
            return self._inner.add(microbatches, start, divide)
        except (*NOT_FINITE, LargeTerms):
            self.first_stats = first_stats  # transforms are checked with finite values
            raise
        finally:
            self.divided = self._inner.divided

    @abstractmethod
    def _snapshot(self, microbatch: Any) -> Callable[[], None]:
        """Save what a pass changes; returns a function that restores it."""

    @abstractmethod
    def _pieces(self, microbatch: Any, error: Exception) -> list[Any]:
        """The microbatch in smaller pieces; itself if it has one sample, to leave out; or raise the error."""

    @abstractmethod
    def _leave_out(self, sample: Any) -> list[SampleStats]:
        """Results of a batch of one sample that contributes nothing."""


class GuardedAccumulator(SplittingAccumulator):
    """Accumulator for transforms that drop samples: halves a microbatch until the samples that fail are found. The cost
    for one of B samples is about three passes of the microbatch. Random numbers are not restored: those of a repeated
    pass, such as dropout's, are new.
    """

    def __init__(self, inner: PerSampleAccumulator):
        super().__init__(inner)
        self._buffers = Buffers(inner.evaluator.modules)

    def _snapshot(self, microbatch: Any) -> Callable[[], None]:
        if self._buffers.owners:
            self._buffers.remember()
        versions = _versions(microbatch)

        def restore() -> None:
            self._buffers.restore()
            if _versions(microbatch) != versions:
                raise LossesError(
                    "loss_fn must leave the batch unchanged if a sample that is not finite is to be left out, because "
                    "the others are computed again; found that it changes the batch in place. Change a copy, for "
                    "example x = x / 255 instead of x.div_(255)."
                )

        return restore

    def _pieces(self, microbatch: Any, error: Exception) -> list[Any]:
        evaluator = self._inner.evaluator
        # With a loss scale the gradients of all samples may overflow: then the update is skipped, and the scale halved.
        overflow = evaluator.precision.scales and isinstance(error, NonFiniteGradientError)
        total = length(microbatch)
        if overflow or total is None or evaluator.interacting == "allow" or not evaluator.ranks.passes_alone:
            raise error
        half = total // 2
        return [cut(microbatch, 0, half, total), cut(microbatch, half, total, total)] if half else [microbatch]

    def _leave_out(self, sample: Any) -> list[SampleStats]:
        evaluator = self._inner.evaluator
        losses, counts = evaluator.losses(sample)
        parameters = evaluator.trained.trainable()
        parameter = UNKNOWN
        if losses.isfinite().all():  # name the first parameter whose gradient is not finite
            gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
            broken = [
                name for name, g in zip(parameters, gradients, strict=True) if not (g is None or g.isfinite().all())
            ]
            parameter = 1 + list(evaluator.trained.named).index(broken[0]) if broken else UNKNOWN
        self._buffers.restore()
        losses = losses.detach()
        zero = torch.zeros_like(losses)
        if counts is None and self._inner.needs_counts:
            counts = torch.ones_like(losses)
        return [
            SampleStats(
                losses,
                counts,
                raw_norms=torch.full_like(losses, torch.nan),
                coefficients=zero,
                shares=zero if counts is None else torch.zeros_like(counts),
                columns=evaluator.columns,
                dropped=torch.full_like(losses, parameter, dtype=torch.long),
            )
        ]


def _versions(batch: Any) -> list[int]:
    """Version counters of the tensors of a batch, which changes in place increase."""
    flat = type(batch) in (tuple, list) and all(type(entry) is Tensor for entry in batch)  # takes less time than leaves
    tensors = batch if flat else [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]
