"""Per-sample gradients of a weight with normalized rows, w = g v / |v|: those of v and g from those of w.

With the unit vector u = v / |v| of each row, the gradient of g is the inner product of the gradient of w with u. The
gradient of v is what remains of the gradient of w without its component along u, times g / |v|.

Legend: b sample, t token, o row of the weight, i the rest of its dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.grads import by_rows
from samplewise.engine.grads.base import PerSampleGrad, RowwiseGrad, term_norms, total
from samplewise.engine.grads.by_rows import as_matrix
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import FactoredGrad, Term

# Squared norms are a difference. Below this fraction of its first term, they are computed from rows.
ENOUGH_LEFT = 0.5


def normalize_grad(grad: PerSampleGrad, v: Tensor, g: Tensor, norms: Tensor) -> tuple[PerSampleGrad, DenseGrad] | None:
    """Gradients of v and g from those of w; None for a representation that this is not for. `norms`: of the rows of v,
    in the shape of g.
    """
    if isinstance(grad, FactoredGrad):
        grad = grad.compact()
    matrix = as_matrix(v.shape)
    unit, scale = (v / norms).reshape(matrix), (g / norms).flatten()
    if isinstance(grad, DenseGrad):
        return _of_rows(grad, unit, scale, tuple(v.shape), tuple(g.shape))
    if not isinstance(grad, FactoredGrad) or grad.matrix != matrix:
        return None
    along, scaled = [], []
    for left, right in grad.terms:
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            return None
        along.append((left * (right @ unit.T)).sum(1))
        scaled.append(Term(left * scale, right))
    component = total(along)
    of_v = NormalizedGrad(FactoredGrad(scaled, tuple(v.shape)), component * scale, unit)
    return of_v, DenseGrad(component.view(-1, *g.shape), terms=grad.term_norms)


def _of_rows(
    grad: DenseGrad, unit: Tensor, scale: Tensor, shape_v: tuple[int, ...], shape_g: tuple[int, ...]
) -> tuple[DenseGrad, DenseGrad]:
    parts_v, parts_g = [], []
    for part in grad.parts:
        rows = part.reshape(len(part), *unit.shape)
        component = (rows * unit).sum(2)
        across = torch.addcmul(rows, component[:, :, None], unit, value=-1)
        parts_v.append(across.mul_(scale[:, None]).view(-1, *shape_v))
        parts_g.append(component.view(-1, *shape_g))

    def terms() -> Tensor:
        return term_norms(grad) * scale.abs().max() * 2  # the component is no larger than the row

    return DenseGrad(*parts_v, terms=terms), DenseGrad(*parts_g, terms=grad.term_norms)


class NormalizedGrad(RowwiseGrad):
    """Gradients of v as those of w, scaled, minus multiples of unit vectors; rows are computed on demand."""

    def __init__(self, scaled: FactoredGrad, component: Tensor, unit: Tensor):
        self.samples = scaled.samples
        self.shape = scaled.shape
        self.scaled = scaled
        self.component = component  # (b, o)
        self.unit = unit  # (o, i)

    def rows(self, start: int, stop: int) -> Tensor:
        along = self.component[start:stop, :, None] * self.unit
        return self.scaled.rows(start, stop) - along.view(-1, *self.shape)

    def squared_norms(self) -> Tensor:
        whole = self.scaled.squared_norms()
        squares = whole - self.component.square().sum(1)
        canceled = squares.detach() < ENOUGH_LEFT * whole.detach()
        if is_traced(squares):
            return torch.where(canceled, torch.nan, squares)
        samples = canceled.nonzero().flatten()
        if not len(samples):
            return squares
        some = NormalizedGrad(self.scaled.some(samples), self.component[samples], self.unit)
        return squares.index_copy(0, samples, by_rows.squared_norms(some))

    def dot(self, direction: Tensor) -> Tensor:
        return self.scaled.dot(direction) - self.component @ (direction.reshape(self.unit.shape) * self.unit).sum(1)

    def sum(self, weights: Tensor | None) -> Tensor:
        component = self.component.sum(0) if weights is None else weights.to(self.component.dtype) @ self.component
        return self.scaled.sum(weights) - (component[:, None] * self.unit).view(self.shape)

    def term_norms(self) -> Tensor:
        return term_norms(self.scaled) + self.component.norm(dim=1)

    def describe(self) -> str:
        return f"{self.scaled.describe()}, normalized"
