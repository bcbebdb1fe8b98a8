"""Per-sample gradients of A in matrix_exp(A), from those of the result.

The gradient of A is the integral over s from 0 to 1 of e^(s A^T) G e^((1 - s) A^T), where G is the gradient of the
result (Najfeld and Havel, "Derivatives of the matrix exponential and their computation", 1995). Gauss-Legendre
quadrature with few nodes gives it to machine precision. Exponentials are computed once for all samples.

Legend: b sample, t token, q node of the quadrature, o and i the dims of A.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad, RowwiseGrad
from samplewise.engine.grads.factored import FactoredGrad, Term

MOST_NODES = 24


def exponential(grad: PerSampleGrad, A: Tensor) -> ExponentialGrad | None:
    """Gradients of A from those of matrix_exp(A); None if the quadrature would need too many nodes."""
    norm = min(torch.linalg.norm(A), (torch.linalg.norm(A, 1) * torch.linalg.norm(A, math.inf)).sqrt()).item()
    number = _nodes_needed(norm, torch.finfo(A.dtype).eps) if math.isfinite(norm) else None
    if number is None:
        return None
    nodes, weights = _gauss_legendre(number)
    powers = torch.linalg.matrix_exp(nodes.to(A)[:, None, None] * A)
    return ExponentialGrad(grad, powers, weights.to(A))


def _nodes_needed(norm: float, precision: float) -> int | None:
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
            left, right = source.some(slice(start, stop)).terms[0]
            if len(source.terms) == 1 and isinstance(left, Tensor) and isinstance(right, Tensor):
                lefts = torch.einsum("bto,qoi,q->btqi", left, self.powers, self.weights)
                rights = torch.einsum("bto,qio->btqi", right, self.powers.flip(0))  # the nodes are symmetric
                return FactoredGrad([Term(lefts.flatten(1, 2), rights.flatten(1, 2))], self.shape).rows(0, stop - start)
        return self._integrated(source.rows(start, stop))

    def sum(self, weights: Tensor | None) -> Tensor:
        return self._integrated(self.source.sum(weights)[None])[0]

    def _integrated(self, rows: Tensor) -> Tensor:
        total = torch.zeros_like(rows)
        for weight, first, second in zip(self.weights, self.powers, self.powers.flip(0), strict=True):
            total += weight * (first.T @ (rows @ second.T))
        return total

    def describe(self) -> str:
        return f"{self.source.describe()}, through matrix_exp"
