"""Per-sample gradients of parameters from which a weight is computed before use: scaled by constants, w = c v; with
normalized rows, w = g v / |v|; or a matrix exponential, w = e^A.

Legend: b sample, t token, q node of a quadrature, o row of the weight, i the rest of its dimensions.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.grads.base import PerSampleGrad, RowwiseGrad, term_norms
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import FactoredGrad, Term
from samplewise.engine.grads.kernels import as_matrix, total

# Squared norms of normalized rows are a difference. Below this fraction of its first term, they are computed from rows.
ENOUGH_LEFT = 0.5
MOST_NODES = 24  # of the quadrature for a matrix exponential


# --- constant factors -------------------------------------------------------------------------------------------------


def scale_grad(grad: PerSampleGrad, factor: Tensor | float) -> PerSampleGrad:
    """The gradients of `grad`, in its shape, times a factor that is a number or has this shape."""
    if isinstance(grad, FactoredGrad):
        is_number = not isinstance(factor, Tensor) or factor.dim() == 0
        scaled = [Term(left * factor, right) for left, right in grad.terms if isinstance(left, Tensor) and is_number]
        if len(scaled) == len(grad.terms):
            return FactoredGrad(scaled, grad.shape)
        grad = grad.compact()
    if not isinstance(grad, DenseGrad):
        return ScaledGrad(grad, factor)

    def terms() -> Tensor:
        return term_norms(grad) * (abs(factor) if isinstance(factor, float) else factor.detach().abs().amax())

    return DenseGrad(*(part * factor for part in grad.parts), terms=terms)


class ScaledGrad(RowwiseGrad):
    """Gradients times a factor; rows are computed on demand."""

    def __init__(self, source: PerSampleGrad, factor: Tensor | float):
        self.samples = source.samples
        self.shape = source.shape
        self.row_size = source.row_size
        self.source = source
        self.factor = factor

    def rows(self, start: int, stop: int) -> Tensor:
        return self.source.rows(start, stop) * self.factor

    def sum(self, weights: Tensor | None) -> Tensor:
        return self.source.sum(weights) * self.factor

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        return self.source.summed_apart(weights) * self.factor

    def term_norms(self) -> Tensor:
        return term_norms(self.source) * (
            abs(self.factor) if isinstance(self.factor, float) else self.factor.abs().amax()
        )

    def describe(self) -> str:
        return f"{self.source.describe()}, scaled"


# --- normalized rows --------------------------------------------------------------------------------------------------
#
# With the unit vector u = v / |v| of each row, the gradient of g is the inner product of the gradient of w with u. The
# gradient of v is what remains of the gradient of w without its component along u, times g / |v|.


def normalize_grad(grad: PerSampleGrad, v: Tensor, g: Tensor, norms: Tensor) -> tuple[PerSampleGrad, DenseGrad] | None:
    """Gradients of v and g from those of w; None for a representation that this is not for. `norms`: of the rows of v,
    in the shape of g.
    """
    if isinstance(grad, FactoredGrad):
        grad = grad.compact()
    matrix = as_matrix(v.shape)
    unit, scale = (v / norms).reshape(matrix), (g / norms).flatten()
    if isinstance(grad, DenseGrad):
        return _normalize_rows(grad, unit, scale, tuple(v.shape), tuple(g.shape))
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


def _normalize_rows(
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
        minuend = self.scaled.squared_norms()
        squares = minuend - self.component.square().sum(1)
        canceled = squares.detach() < ENOUGH_LEFT * minuend.detach()
        if is_traced(squares):
            return torch.where(canceled, torch.nan, squares)
        samples = canceled.nonzero().flatten()
        if not len(samples):
            return squares
        selected = NormalizedGrad(self.scaled.select(samples), self.component[samples], self.unit)
        return squares.index_copy(0, samples, PerSampleGrad.squared_norms(selected))

    def dot(self, direction: Tensor) -> Tensor:
        return self.scaled.dot(direction) - self.component @ (direction.reshape(self.unit.shape) * self.unit).sum(1)

    def sum(self, weights: Tensor | None) -> Tensor:
        component = self.component.sum(0) if weights is None else weights.to(self.component.dtype) @ self.component
        return self.scaled.sum(weights) - (component[:, None] * self.unit).view(self.shape)

    def term_norms(self) -> Tensor:
        return term_norms(self.scaled) + self.component.norm(dim=1)

    def describe(self) -> str:
        return f"{self.scaled.describe()}, normalized"


# --- matrix exponential -----------------------------------------------------------------------------------------------
#
# The gradient of A is the integral over s from 0 to 1 of e^(s A^T) G e^((1 - s) A^T), where G is the gradient of the
# result (Najfeld and Havel, "Derivatives of the matrix exponential and their computation", 1995). Gauss-Legendre
# quadrature with few nodes gives it to machine precision. Exponentials are computed once for all samples.


def exponential(grad: PerSampleGrad, A: Tensor) -> ExponentialGrad | None:
    """Gradients of A from those of matrix_exp(A); None if the quadrature would need too many nodes."""
    norm = min(torch.linalg.norm(A), (torch.linalg.norm(A, 1) * torch.linalg.norm(A, math.inf)).sqrt()).item()
    number = _quadrature_size(norm, torch.finfo(A.dtype).eps) if math.isfinite(norm) else None
    if number is None:
        return None
    nodes, weights = _gauss_legendre(number)
    powers = torch.linalg.matrix_exp(nodes.to(A)[:, None, None] * A)
    return ExponentialGrad(grad, powers, weights.to(A))


def _quadrature_size(norm: float, precision: float) -> int | None:
    """Number of nodes for a matrix of this norm; None if there are too many.

    The error of the quadrature is at most q!^4 / ((2q + 1) (2q)!^3) times the derivative of order 2q of the integrand,
    which is at most (2 |A|)^2q e^|A| |G|. The integral can be smaller than G by a factor of e^|A|.
    """
    for q in range(1, MOST_NODES + 1):
        error = 4 * math.lgamma(q + 1) - math.log(2 * q + 1) - 3 * math.lgamma(2 * q + 1)
        error += 2 * q * math.log(max(2 * norm, 1e-300)) + 2 * norm
        if error < math.log(precision / 8):
            return q
    return None


@lru_cache(maxsize=MOST_NODES)
def _gauss_legendre(number: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights (q,) on [0, 1], from the eigenvalues of the Jacobi matrix (Golub and Welsch 1969)."""
    k = torch.arange(1, number, dtype=torch.float64)
    beside = k / (4 * k.square() - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return (values + 1) / 2, vectors[0].square()


class ExponentialGrad(RowwiseGrad):
    """Gradients of A by quadrature, from those of matrix_exp(A); rows are computed on demand."""

    def __init__(self, source: PerSampleGrad, powers: Tensor, weights: Tensor):
        self.samples = source.samples
        self.shape = source.shape
        self.row_size = max(source.row_size, len(weights) * source.width)
        self.source = source
        self.powers = powers  # e^(s A) for each node s, (q, o, i)
        self.weights = weights  # (q,)

    def rows(self, start: int, stop: int) -> Tensor:
        source = self.source
        # A token of the source becomes one token per node. From this number on, products of whole rows are fewer.
        if isinstance(source, FactoredGrad) and 3 * source.tokens < 2 * self.shape[0]:
            left, right = source.select(slice(start, stop)).terms[0]
            if len(source.terms) == 1 and isinstance(left, Tensor) and isinstance(right, Tensor):
                lefts = torch.einsum("bto,qoi,q->btqi", left, self.powers, self.weights)
                rights = torch.einsum("bto,qio->btqi", right, self.powers.flip(0))  # the nodes are symmetric
                return FactoredGrad([Term(lefts.flatten(1, 2), rights.flatten(1, 2))], self.shape).rows(0, stop - start)
        return self._integrate(source.rows(start, stop))

    def sum(self, weights: Tensor | None) -> Tensor:
        return self._integrate(self.source.sum(weights)[None])[0]

    def _integrate(self, rows: Tensor) -> Tensor:
        total = torch.zeros_like(rows)
        for weight, first, second in zip(self.weights, self.powers, self.powers.flip(0), strict=True):
            total += weight * (first.T @ (rows @ second.T))
        return total

    def describe(self) -> str:
        return f"{self.source.describe()}, through matrix_exp"
