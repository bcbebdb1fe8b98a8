"""Lazy gradient norms of the first update: recomputed with the parameters of that time if they are read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplewise.core.snapshot import modes, snapshot
from samplewise.step.accumulate import WeightedAccumulator
from samplewise.step.forward import LossEvaluator
from samplewise.step.microbatch import Microbatch
from samplewise.step.microbatch_stats import cat
from samplewise.transforms.chain import chain


class LazyNorms:
    """Per-sample gradient norms of the first window, computed on request. Created when the window begins; keeps its
    microbatches, and copies of parameters, buffers, modes and random state.
    """

    def __init__(self, evaluation: LossEvaluator, microbatch: Microbatch):
        self.evaluation = evaluation
        self.microbatch = microbatch
        self.pieces: list[Any] = []
        self._restore_model = snapshot(*evaluation.modules)
        self._restore_modes = modes(*evaluation.modules)
        self._parameters: dict[Tensor, Tensor] = {}

    def keep_parameters(self) -> None:
        """Copy the parameters before the update changes them."""
        self._parameters = self._copies()

    def norms(self) -> Tensor:
        """Recompute the norms (samples,), then restore the current parameters, buffers, modes and random state."""
        now = self._copies()
        modules = self.evaluation.modules
        restore_now = snapshot(*modules)
        restore_modes = modes(*modules)
        summing = WeightedAccumulator(self.evaluation, chain(), record_norms=True)
        try:
            self._restore_modes()
            self._restore_model()
            _copy_back(self._parameters)
            numbers = self.microbatch.attempt(lambda pieces: summing.all_numbers(pieces, 0), self.pieces)
        finally:
            restore_modes()
            restore_now()
            _copy_back(now)
        return cat([n.norms for n in numbers])

    def _copies(self) -> dict[Tensor, Tensor]:
        return {p: p.detach().clone() for p in self.evaluation.trained.named.values()}


@torch.no_grad()
def _copy_back(copies: dict[Tensor, Tensor]) -> None:
    for p, then in copies.items():
        p.copy_(then)
