"""Gradient accumulation of private steps: samples whose loss or gradient is not finite contribute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from samplewise.core.batches import cut, length
from samplewise.engine.checks import all_finite
from samplewise.errors import BatchError, NonFiniteGradientError, NonFiniteLossError
from samplewise.privacy.meter import PrivacyMeter
from samplewise.step.accumulate import Accumulator, PerSampleAccumulator
from samplewise.transforms.chain import Stage
from samplewise.transforms.stats import SampleStats
from samplewise.transforms.transform import NonFiniteCoefficientError

NOT_FINITE = (NonFiniteLossError, NonFiniteGradientError, NonFiniteCoefficientError)


class ScreenedAccumulator(Accumulator):
    """Accumulator that repeats a microbatch sample by sample if one of them is not finite, and leaves that one out."""

    def __init__(self, inner: PerSampleAccumulator, meter: PrivacyMeter):
        self._inner = inner
        self._meter = meter
        self.needs_window = inner.needs_window
        self.knows_norms = inner.knows_norms
        self.exchanges = inner.exchanges

    @property
    def first_stats(self) -> list[tuple[Stage, SampleStats]] | None:
        return self._inner.first_stats

    @first_stats.setter
    def first_stats(self, stats: list[tuple[Stage, SampleStats]] | None) -> None:
        self._inner.first_stats = stats

    def begin(self) -> None:
        self._inner.begin()

    def compute_directions(self) -> None:
        self._inner.compute_directions()

    def add(self, microbatches: Sequence[Any], start: int) -> list[SampleStats]:
        try:
            return self._add(microbatches, start)
        except NOT_FINITE:  # raised before `.grad` changes, unless a window is needed
            if self.exchanges or self._inner.ranks.strategy.sharded:  # other ranks are in the middle of this window
                raise
        samples = [sample for microbatch in microbatches for sample in _samples_of(microbatch)]
        if self.needs_window:
            return self._add_groups([sample for sample in samples if self._is_finite(sample)], start)
        parts: list[SampleStats] = []
        for sample in samples:
            try:
                parts += self._add([sample], start + len(parts))
            except NOT_FINITE:
                self._meter.zeroed += 1
        return parts

    def _add(self, microbatches: Sequence[Any], start: int) -> list[SampleStats]:
        """Add microbatches; raises NonFiniteGradientError if the gradient of a group is not finite."""
        first_stats = None if self.first_stats is None else list(self.first_stats)
        try:
            parts = self._inner.add(microbatches, start)
        except NOT_FINITE:
            self.first_stats = first_stats  # transforms are checked with finite values
            raise
        if self.needs_window and not all(map(all_finite, self._inner.evaluator.trained.gradients())):
            raise NonFiniteGradientError("the gradient of each group must be finite; found one that is not.")
        return parts

    def _add_groups(self, samples: Sequence[Any], start: int) -> list[SampleStats]:
        """Add samples with finite gradients; a group of which the sum is not finite contributes nothing."""
        try:
            return self._add_cleared(samples, start)
        except NOT_FINITE:
            pass
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
