"""Per-sample gradients as rows kept in memory: each parameter apart, or several small ones side by side in one matrix,
so that one operation computes a quantity of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from samplewise.core.memory import stored_values
from samplewise.engine.grads.base import RowwiseGrad
from samplewise.engine.grads.kernels import flat_squared_norms

SMALL = 2**14  # largest number of elements of the rows of a packed parameter: copying more takes longer than it saves


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
            return super().squared_norms()
        return flat_squared_norms(self.parts[0].reshape(self.samples, -1))

    def norms(self) -> Tensor:
        if len(self.parts) > 1:
            return super().norms()
        return torch.linalg.vector_norm(self.parts[0].reshape(self.samples, -1), dim=1)

    def sum(self, weights: Tensor | None) -> Tensor:
        return weighted_sum(self.parts[0], weights) if len(self.parts) == 1 else self.sum_of_rows(weights)


def weighted_sum(rows: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over b of weights[b] times row b; None means weights of one."""
    if weights is None:
        return rows.sum(0)
    flat = rows if rows.dim() == 2 else rows.reshape(rows.shape[0], -1)
    column = weights if weights.dtype is rows.dtype else weights.to(rows.dtype)
    total = torch.mv(flat.t(), column)
    return total if rows.dim() == 2 else total.view(rows.shape[1:])


# --- several parameters in one matrix ---------------------------------------------------------------------------------


def pack_rows(grads: Mapping[str, DenseGrad]) -> dict[str, DenseGrad]:
    """The same gradients, of one tensor of rows each, with those of one dtype and device in one matrix."""
    groups: dict[object, dict[str, DenseGrad]] = {}
    for name, grad in grads.items():
        rows = grad.parts[0]
        groups.setdefault((rows.dtype, rows.device), {})[name] = grad
    packed = dict(grads)  # in this order, whatever the dtypes
    for group in groups.values():
        pack = RowPack(group.values())
        for number, (name, grad) in enumerate(group.items()):
            packed[name] = PackedGrad(pack, number, grad._term_norms)
    return packed


class RowPack:
    """Matrix (b, sum of widths) of the rows of several parameters.

    It has a copy of the rows: the tensors they came from may change afterwards.
    """

    def __init__(self, grads: Iterable[DenseGrad]):
        self.shapes: list[tuple[int, ...]] = []
        self.widths: list[int] = []
        matrices = []
        for grad in grads:
            rows = grad.parts[0]
            flat = rows if rows.dim() == 2 else rows.reshape(grad.samples, -1)
            self.shapes.append(grad.shape)
            self.widths.append(flat.shape[1])
            matrices.append(flat)
        self.matrix = torch.cat(matrices, 1)
        self.sums: dict[int, Tensor] = {}  # by parameter, those that were not returned yet
        self.weights: Tensor | None = None  # of these sums

    @cached_property
    def norms(self) -> Tensor:
        """Norms (b,) over all parameters."""
        return torch.linalg.vector_norm(self.matrix, dim=1)

    def columns(self, number: int) -> Tensor:
        return self.matrix.narrow(1, sum(self.widths[:number]), self.widths[number])


class PackedGrad(DenseGrad):
    """Rows of one parameter of a pack."""

    def __init__(self, pack: RowPack, number: int, term_norms: Tensor | None):
        self._term_norms = term_norms
        self.pack = pack
        self.number = number
        self.shape = pack.shapes[number]
        self.samples = pack.matrix.shape[0]
        self.step = self.samples

    @cached_property
    def parts(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.pack.columns(self.number).view(self.samples, *self.shape),)

    def sum(self, weights: Tensor | None) -> Tensor:
        """As `PerSampleGrad.sum`. The sums of all parameters of the pack are computed together, if none of them is left
        from another call.
        """
        pack = self.pack
        if not pack.sums:
            pack.sums = dict(enumerate(torch.split_with_sizes(weighted_sum(pack.matrix, weights), pack.widths)))
            pack.weights = weights
        if pack.weights is weights and self.number in pack.sums:
            result = pack.sums.pop(self.number)
        else:
            result = weighted_sum(pack.columns(self.number), weights)
        return result if len(self.shape) == 1 else result.view(self.shape)

    def describe(self) -> str:
        return DenseGrad.__name__.lower()
