"""Per-sample gradients as rows kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from samplewise.core.memory import stored_values
from samplewise.engine.grads import by_rows
from samplewise.engine.grads.base import RowwiseGrad
from samplewise.engine.grads.by_rows import flat_squared_norms, weighted_sum


class DenseGrad(RowwiseGrad):
    """Rows kept in memory, in one or several tensors of the same number of samples; the last may have fewer.

    terms: function that returns `term_norms`, if rows are sums of terms. It may hold the factors of the rows:
    `settle_terms` calls it, or drops it.
    """

    is_bounded_by_norms = True

    def __init__(self, *parts: Tensor, terms: Callable[[], Tensor | None] | None = None):
        self.shape = tuple(parts[0].shape[1:])
        self.step = parts[0].shape[0]
        self.samples = self.step if len(parts) == 1 else sum(map(len, parts))
        self.parts = parts
        self.terms = terms
        self._term_norms: Tensor | None = None

    def settle_terms(self, tracked: bool) -> None:
        """Compute `term_norms` if they are `tracked`; release the factors."""
        if tracked and self.terms is not None:
            self._term_norms = self.terms()
        self.terms = None

    def term_norms(self) -> Tensor | None:
        return self._term_norms

    def is_apart_from(self, tensors: Iterable[object]) -> bool:
        """True if the rows share no memory with any of these tensors."""
        storages = {part.untyped_storage()._cdata for part in self.parts}
        return not any(isinstance(t, Tensor) and stored_values(t).untyped_storage()._cdata in storages for t in tensors)

    @property
    def row_tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.parts)

    def rows(self, start: int, stop: int) -> Tensor:
        first = start // self.step
        last = max(start, stop - 1) // self.step
        if first == last:
            return self.parts[first][start - first * self.step : stop - first * self.step]
        first_row = first * self.step
        return torch.cat(self.parts[first : last + 1])[start - first_row : stop - first_row]

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
