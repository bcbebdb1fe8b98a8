"""Gradient accumulation of private steps: samples whose loss or gradient is not finite contribute nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from samplewise.core.batches import cut, length
from samplewise.errors import BatchError, NonFiniteGradientError, NonFiniteLossError
from samplewise.privacy.meter import PrivacyMeter
from samplewise.step.accumulate import Accumulator, PerSampleAccumulator
from samplewise.transforms.chain import Stage
from samplewise.transforms.stats import SampleStats


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
            return self._inner.add(microbatches, start)
        except (NonFiniteLossError, NonFiniteGradientError):  # raised before `.grad` changes, unless a window is needed
            if self.exchanges:  # other ranks are in the middle of this window
                raise
        samples = [sample for microbatch in microbatches for sample in _samples_of(microbatch)]
        if self.needs_window:
            self._inner.evaluator.trained.clear()  # some groups may be summed already
            finite = [sample for sample in samples if self._is_finite(sample)]
            return self._inner.add(finite, start) if finite else []
        parts: list[SampleStats] = []
        for sample in samples:
            try:
                parts += self._inner.add([sample], start + len(parts))
            except (NonFiniteLossError, NonFiniteGradientError):
                self._meter.zeroed += 1
        return parts

    def _is_finite(self, sample: Any) -> bool:
        evaluator = self._inner.evaluator
        losses, _ = evaluator.losses(sample)
        try:
            finite = bool(torch.isfinite(evaluator.gradients_of(losses).norms()).all())
        except (NonFiniteLossError, NonFiniteGradientError):
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
