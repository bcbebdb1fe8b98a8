"""Gradient accumulation that leaves out samples whose loss or gradient is not finite.

A weight of 0 does not help: 0 × NaN is NaN, and one such sample makes the sum of its microbatch NaN. The microbatch is
repeated in pieces, until the pieces that fail have one sample. Private updates also add some samples alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import cut, leaves, length, take
from samplewise.core.state import Buffers
from samplewise.engine.deferred_checks import all_finite
from samplewise.errors import BatchError, LossesError, NonFiniteGradientError, NonFiniteLossError
from samplewise.privacy.privacy import PrivacyMeter
from samplewise.step.accumulate import AccumulatorWrapper, LargeTerms, PerSampleAccumulator
from samplewise.step.grouped import GroupedAccumulator
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


# --- private updates --------------------------------------------------------------------------------------------------


class PrivateAccumulator(SplittingAccumulator):
    """Accumulator that repeats a microbatch sample by sample if one of them is not finite, and leaves that one out; and
    without the samples that must be added alone.
    """

    drops_samples = True

    def __init__(self, inner: PerSampleAccumulator, meter: PrivacyMeter):
        super().__init__(inner)
        self._meter = meter

    def add(self, microbatches: Sequence[Any], start: int, divide: bool = False) -> list[SampleStats]:
        return self._add_window(microbatches, start) if self.needs_window else super().add(microbatches, start)

    def _add_microbatch(self, microbatch: Any, start: int, divide: bool = False) -> list[SampleStats]:
        if length(microbatch) == 1:
            # A copy: rounding in kernels depends on the alignment of memory, and the gradient of a sample that cancels
            # is rounding. It must not depend on the samples before it in the batch.
            microbatch = take(microbatch, [0])
        return super()._add_microbatch(microbatch, start)

    def _snapshot(self, microbatch: Any) -> Callable[[], None]:
        return self._inner.evaluator.saved_state([microbatch])

    def _pieces(self, microbatch: Any, error: Exception) -> list[Any]:
        if isinstance(error, LargeTerms):
            # The samples `alone` as batches of one, and the samples before, between and after them, in order.
            total = length(microbatch)
            assert total is not None
            ends = sorted({0, total, *error.samples, *(row + 1 for row in error.samples)})
            return [cut(microbatch, first, end, total) for first, end in pairwise(ends)]
        if not self._inner.ranks.passes_alone:  # other ranks are in the middle of this window
            raise error
        return _samples_of(microbatch)

    def _leave_out(self, sample: Any) -> list[SampleStats]:
        self._meter.zeroed += 1
        return []

    def _add_window(self, microbatches: Sequence[Any], start: int) -> list[SampleStats]:
        restore = self._inner.evaluator.saved_state(microbatches)
        try:
            return self._add(microbatches, start)
        except NOT_FINITE:
            if self.exchanges or not self._inner.ranks.passes_alone:
                raise
        except LargeTerms:  # add the gradient of each group by itself
            restore()
            assert isinstance(self._inner, GroupedAccumulator)
            self._inner.one_by_one = True
            try:
                return self._add_window(microbatches, start)
            finally:
                self._inner.one_by_one = False
        restore()
        samples = [sample for microbatch in microbatches for sample in _samples_of(microbatch)]
        finite = [sample for sample in samples if self._is_finite(sample)]
        restore()
        return self._add_groups(finite, start, restore)

    def _add(self, microbatches: Sequence[Any], start: int, divide: bool = False) -> list[SampleStats]:
        """Add microbatches; raises NonFiniteGradientError if the gradient of a group is not finite."""
        parts = super()._add(microbatches, start)
        self._meter.zeroed += self._inner.left_out
        self._inner.left_out = 0
        if self.needs_window and not all(map(all_finite, self._inner.evaluator.trained.gradients())):
            raise NonFiniteGradientError("the gradient of each group must be finite; found one that is not.")
        return parts

    def _add_groups(self, samples: Sequence[Any], start: int, restore: Callable[[], None]) -> list[SampleStats]:
        """Add samples with finite gradients; a group of which the sum is not finite contributes nothing. Each attempt
        starts from the state that `restore` restores.
        """
        try:
            return self._add_cleared(samples, start)
        except NOT_FINITE:
            restore()
        grouping = self._inner.chain.grouping
        assert grouping is not None
        groups: dict[Any, list[Any]] = {}
        for sample in samples:
            groups.setdefault(grouping.keys(sample)[0], []).append(sample)
        finite: list[Any] = []
        for group in groups.values():
            try:
                self._add_cleared(group, start)
                finite += group
            except NOT_FINITE:
                self._meter.zeroed += len(group)
        restore()
        return self._add_cleared(finite, start)

    def _add_cleared(self, samples: Sequence[Any], start: int) -> list[SampleStats]:
        self._inner.evaluator.trained.clear()  # some groups may be summed already
        return self._add(samples, start) if samples else []

    def _is_finite(self, sample: Any) -> bool:
        evaluator = self._inner.evaluator
        losses, _ = evaluator.losses(sample)
        try:
            finite = bool(torch.isfinite(evaluator.gradients_of(losses).norms()).all())
        except NOT_FINITE:
            finite = False
        self._meter.zeroed += not finite
        return finite


def _samples_of(microbatch: Any) -> list[Any]:
    """The samples of a microbatch, as batches of one."""
    total = length(microbatch)
    if total is None:
        raise BatchError(
            "a private batch must have one row per sample, so that a sample that is not finite can be left out; found "
            "a batch that cannot be cut. Return tensors with one row per sample."
        )
    return [cut(microbatch, row, row + 1, total) for row in range(total)]
