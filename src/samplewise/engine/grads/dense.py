"""Per-sample gradients as rows kept in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.engine.grads import by_rows
from samplewise.engine.grads.base import RowwiseGrad
from samplewise.engine.grads.by_rows import flat_squared_norms, weighted_sum


class DenseGrad(RowwiseGrad):
    """Rows kept in memory, in one or several tensors of the same number of samples; the last may have fewer."""

    def __init__(self, *parts: Tensor):
        self.shape = tuple(parts[0].shape[1:])
        self.step = parts[0].shape[0]
        self.samples = self.step if len(parts) == 1 else sum(map(len, parts))
        self.parts = parts

    def rows(self, start: int, stop: int) -> Tensor:
        first = start // self.step
        last = max(start, stop - 1) // self.step
        if first == last:
            return self.parts[first][start - first * self.step : stop - first * self.step]
        return torch.cat(self.parts)[start:stop]

    def squared_norms(self) -> Tensor:
        if len(self.parts) > 1:
            return by_rows.squared_norms(self)
        return flat_squared_norms(self.parts[0].reshape(self.samples, -1))

    def norms(self) -> Tensor:
        if len(self.parts) > 1:
            return super().norms()
        return torch.linalg.vector_norm(self.parts[0].reshape(self.samples, -1), dim=1)

    def sum(self, weights: Tensor | None) -> Tensor:
        return weighted_sum(self.parts[0], weights) if len(self.parts) == 1 else by_rows.sum(self, weights)
