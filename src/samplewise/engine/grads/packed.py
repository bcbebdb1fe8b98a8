"""Rows of several small parameters side by side in one matrix: one operation computes a quantity of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from samplewise.engine.grads.by_rows import weighted_sum
from samplewise.engine.grads.dense import DenseGrad

SMALL = 2**14  # largest number of elements of the rows of a parameter: copying more takes longer than it saves


def pack_rows(grads: Mapping[str, DenseGrad]) -> dict[str, DenseGrad]:
    """The same gradients, with those of one dtype and device in one matrix."""
    together: dict[str, DenseGrad] = {}
    packs: dict[object, _RowPack] = {}
    for name, grad in grads.items():
        rows = grad.parts[0]
        pack = packs.get((rows.dtype, rows.device))
        if pack is None:
            pack = packs[rows.dtype, rows.device] = _RowPack(grad.samples)
        together[name] = PackedGrad(pack, pack.add(rows), grad.term_norms())
    for pack in packs.values():
        pack.complete()
    return together


class _RowPack:
    """Matrix (b, sum of widths) of the rows of several parameters."""

    def __init__(self, samples: int):
        self.samples = samples
        self.shapes: list[tuple[int, ...]] = []
        self.widths: list[int] = []
        self._rows: list[Tensor] = []
        self._sums: dict[int, Tensor] = {}  # by parameter, those that were not returned yet
        self._weights: Tensor | None = None  # of these sums

    def add(self, rows: Tensor) -> int:
        """Add the rows (b, *shape) of a parameter; return its number."""
        self.shapes.append(tuple(rows.shape[1:]))
        flat = rows if rows.dim() == 2 else rows.reshape(self.samples, -1)
        self.widths.append(flat.shape[1])
        self._rows.append(flat)
        return len(self._rows) - 1

    def complete(self) -> None:
        """Copy the rows into the matrix: from now on, the tensors they came from may change."""
        self.matrix = torch.cat(self._rows, 1)
        self._rows.clear()

    @cached_property
    def norms(self) -> Tensor:
        """Norms (b,) over all parameters."""
        return torch.linalg.vector_norm(self.matrix, dim=1)

    def columns(self, number: int) -> Tensor:
        return self.matrix.narrow(1, sum(self.widths[:number]), self.widths[number])

    def sum(self, number: int, weights: Tensor | None) -> Tensor:
        """Weighted sum of the rows of one parameter. Those of all others are computed with it, if none of them is left
        from another call.
        """
        if not self._sums:
            self._sums = dict(enumerate(torch.split_with_sizes(weighted_sum(self.matrix, weights), self.widths)))
            self._weights = weights
        if self._weights is weights and number in self._sums:
            total = self._sums.pop(number)
        else:
            total = weighted_sum(self.columns(number), weights)
        return total if len(self.shapes[number]) == 1 else total.view(self.shapes[number])


class PackedGrad(DenseGrad):
    """Rows of one parameter of a pack."""

    def __init__(self, pack: _RowPack, number: int, term_norms: Tensor | None):
        self._term_norms = term_norms
        self.pack = pack
        self.number = number
        self.shape = pack.shapes[number]
        self.samples = pack.samples
        self.step = self.samples

    @cached_property
    def parts(self) -> tuple[Tensor, ...]:  # type: ignore[override]
        return (self.pack.columns(self.number).view(self.samples, *self.shape),)

    def sum(self, weights: Tensor | None) -> Tensor:
        return self.pack.sum(self.number, weights)

    def describe(self) -> str:
        return DenseGrad.__name__.lower()
