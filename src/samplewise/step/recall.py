"""The first update's norms, for whoever reads them without having asked: computed after all, as it was then."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplewise.replay import snapshot
from samplewise.step.evaluation import Evaluation
from samplewise.step.parts import cat
from samplewise.step.summing import Weighted
from samplewise.transforms.chain import chain


class Recall:
    """Made when the first window begins. Keeps its pieces, and the parameters as they were."""

    def __init__(self, evaluation: Evaluation):
        self.evaluation = evaluation
        self.pieces: list[Any] = []
        self._restore_model = snapshot(*evaluation.modules)
        self._parameters: dict[Tensor, Tensor] = {}

    def keep_parameters(self) -> None:
        self._parameters = self._copies()

    def norms(self) -> Tensor:
        now, restore_now = self._copies(), snapshot(*self.evaluation.modules)
        try:
            self._restore_model()
            _copy_back(self._parameters)
            numbers = Weighted(self.evaluation, chain(), record_norms=True).all_numbers(self.pieces, 0)
        finally:
            restore_now()
            _copy_back(now)
        return cat([n.norms for n in numbers])

    def _copies(self) -> dict[Tensor, Tensor]:
        return {p: p.detach().clone() for p in self.evaluation.trained.named.values()}


@torch.no_grad()
def _copy_back(copies: dict[Tensor, Tensor]) -> None:
    for p, then in copies.items():
        p.copy_(then)
