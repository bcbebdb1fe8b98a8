"""Per-sample gradients of a stack of matrices, such as the weights of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samplewise.engine.grads import by_rows
from samplewise.engine.grads.base import PerSampleGrad, total
from samplewise.engine.grads.factored import FactoredGrad
from samplewise.engine.grads.indexed import DisjointGrad


class StackedGrad(DisjointGrad):
    """Gradients (b, g, o, i), with a representation (b, o, i) for each of g matrices."""

    def __init__(self, parts: Sequence[PerSampleGrad]):
        self.samples = parts[0].samples
        self.shape = (len(parts), *parts[0].shape)
        self.parts = parts

    def transpose(self) -> StackedGrad | None:
        """Gradients of the transposed matrices; None if a part is no longer in factors."""
        factored = [part.transpose() for part in self.parts if isinstance(part, FactoredGrad)]
        return StackedGrad(factored) if len(factored) == len(self.parts) else None

    def compact(self) -> StackedGrad:
        """See `FactoredGrad.compact`."""
        return StackedGrad([part.compact() if isinstance(part, FactoredGrad) else part for part in self.parts])

    def rows(self, start: int, stop: int) -> Tensor:
        return torch.stack([part.rows(start, stop) for part in self.parts], 1)

    def dot(self, direction: Tensor) -> Tensor:
        return total(part.dot(matrix) for part, matrix in zip(self.parts, direction, strict=True))

    def paired_dot(self, other: PerSampleGrad) -> Tensor:
        if not isinstance(other, StackedGrad):
            return by_rows.paired_dot(self, other)
        return total(part.paired_dot(other_part) for part, other_part in zip(self.parts, other.parts, strict=True))

    def sum(self, weights: Tensor | None) -> Tensor:
        return torch.stack([part.sum(weights) for part in self.parts])

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        return torch.stack([part.summed_apart(weights) for part in self.parts])

    def describe(self) -> str:
        return f"{len(self.parts)} matrices: {self.parts[0].describe()}"
