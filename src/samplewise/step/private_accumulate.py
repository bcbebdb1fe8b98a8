"""Gradient accumulation of private steps: samples whose loss or gradient is not finite contribute nothing, and those
that cancel in themselves are added alone.

In exact arithmetic, a clipped sample moves the sum by at most its bound. Rounding adds an error that grows with the
terms of a sample: two tokens whose huge gradients cancel have a small norm, but the sums of other samples that are
added between the two are lost, and what rounding leaves of the sample depends on its place in the batch. A sample whose
terms are far above the bound is therefore computed in a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from samplewise.core.batches import cut, length, take
from samplewise.engine.deferred_checks import all_finite
from samplewise.errors import BatchError, NonFiniteGradientError
from samplewise.privacy.privacy import PrivacyMeter
from samplewise.step.accumulate import LargeTerms, PerSampleAccumulator
from samplewise.step.grouped import GroupedAccumulator
from samplewise.step.split_accumulate import NOT_FINITE, SplittingAccumulator
from samplewise.transforms.stats import SampleStats


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
            return _pieces_around(microbatch, error.samples)
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


def _pieces_around(microbatch: Any, alone: Sequence[int]) -> list[Any]:
    """The samples `alone` as batches of one, and the samples before, between and after them, in order."""
    total = length(microbatch)
    assert total is not None
    ends = sorted({0, total, *alone, *(row + 1 for row in alone)})
    return [cut(microbatch, first, end, total) for first, end in pairwise(ends)]


def _samples_of(microbatch: Any) -> list[Any]:
    """The samples of a microbatch, as batches of one."""
    total = length(microbatch)
    if total is None:
        raise BatchError(
            "a private batch must have one row per sample, so that a sample that is not finite can be left out; found "
            "a batch that cannot be cut. Return tensors with one row per sample."
        )
    return [cut(microbatch, row, row + 1, total) for row in range(total)]
