"""The first update's norms, for whoever reads them without having asked: computed after all, as it was then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplewise.replay import modes, snapshot
from samplewise.step.evaluation import Evaluation
from samplewise.step.microbatch import Microbatch
from samplewise.step.parts import cat
from samplewise.step.summing import Weighted
from samplewise.transforms.chain import chain


class Recall:
    """Made when the first window begins. Keeps its pieces, and the parameters as they were."""

    def __init__(self, evaluation: Evaluation, microbatch: Microbatch):
        self.evaluation, self.microbatch = evaluation, microbatch
        self.pieces: list[Any] = []
        self._restore_model, self._restore_modes = snapshot(*evaluation.modules), modes(*evaluation.modules)
        self._parameters: dict[Tensor, Tensor] = {}

    def keep_parameters(self) -> None:
        self._parameters = self._copies()

    def norms(self) -> Tensor:
        now, modules = self._copies(), self.evaluation.modules
        restore_now, restore_modes = snapshot(*modules), modes(*modules)
        summing = Weighted(self.evaluation, chain(), record_norms=True)
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
