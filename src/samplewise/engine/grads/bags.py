"""Gradients of a table of which each sample looks up one bag of entries (F.embedding_bag).

Legend: b sample, t entry of the bag of b, i feature.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.factored import FactoredGrad
from samplewise.engine.grads.kernels import flat_squared_norms, scaled_norms


class BagGrad(PerSampleGrad):
    """Gradients whose norm is that of the bag's gradient (b, i), times a number per sample.

    entries: function that returns the gradients as a lookup of single entries, which all other quantities are from.
    """

    is_bounded_by_norms = True

    def __init__(
        self, gradient: Tensor, squared_factors: Tensor, shape: tuple[int, ...], entries: Callable[[], FactoredGrad]
    ):
        self.samples = len(gradient)
        self.shape = shape
        self.gradient = gradient
        self.squared_factors = squared_factors  # (b,)
        self._make_entries = entries

    @cached_property
    def entries(self) -> FactoredGrad:
        return self._make_entries()

    def rows(self, start: int, stop: int) -> Tensor:
        return self.entries.rows(start, stop)

    def squared_norms(self) -> Tensor:
        return flat_squared_norms(self.gradient) * self.squared_factors

    def scaled_norms(self) -> Tensor:
        return scaled_norms(self.gradient) * self.squared_factors.sqrt()

    def underflowed_norms(self, samples: Tensor) -> Tensor:
        return self.entries.underflowed_norms(samples)

    def dot(self, direction: Tensor) -> Tensor:
        return self.entries.dot(direction)

    def paired_dot(self, other: PerSampleGrad) -> Tensor:
        return self.entries.paired_dot(other.entries if isinstance(other, BagGrad) else other)

    def sum(self, weights: Tensor | None) -> Tensor:
        return self.entries.sum(weights)

    def term_norms(self) -> Tensor | None:
        return self.entries.term_norms()

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        return self.entries.project(left, right)

    def describe(self) -> str:
        return f"bags, {self.entries.describe()}"
