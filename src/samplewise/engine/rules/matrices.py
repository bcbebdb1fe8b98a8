"""Rules for operands that are matrices: of products (mm, addmm, bmm, mv, bilinear, grouped_mm), matrices of
linear systems (torch.linalg.solve), and points of torch.cdist.

Gradients of most of them are sums of outer products, see `FactoredGrad`.

Legend: b sample, t token (a row of the output that belongs to b), h matrix of a batch, o and i the operand's two dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad, RowwiseGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import FactoredGrad, Term
from samplewise.engine.grads.kernels import frobenius_norms
from samplewise.engine.grads.stacked import StackedGrad
from samplewise.engine.ownership.owner_map import ragged_gather
from samplewise.engine.rules.rule_input import Use, summed

# --- products ---------------------------------------------------------------------------------------------------------


def right_operand(use: Use, left: str) -> PerSampleGrad | None:
    """Rule for W in mm(a, W) and addmm: outer products of the rows of a with the rows of the output's gradient. `left`:
    name of a.
    """
    rows = use.rows(1)
    a = use.tensor(left)
    g = use.gradient
    if rows is None or a.is_complex() or g.is_complex():
        return None
    alpha = getattr(use.node, "_saved_alpha", 1)  # mm has none
    return FactoredGrad([Term(rows.gather(a), rows.gather(g if alpha == 1 else g * alpha))], use.shape)


def left_operand(use: Use, right: str) -> PerSampleGrad | None:
    """Rule for W in mm(W, a) and addmm: outer products of the columns of the output's gradient with the columns of a.
    `right`: name of a.
    """
    columns = use.permuted_rows((1, 0), 1)
    a = use.tensor(right).T
    g = use.gradient.T
    if columns is None or a.is_complex() or g.is_complex():
        return None
    alpha = getattr(use.node, "_saved_alpha", 1)  # mm has none
    return FactoredGrad([Term(columns.gather(g if alpha == 1 else g * alpha), columns.gather(a))], use.shape)


def addmm_bias(use: Use) -> PerSampleGrad | None:
    beta = use.node._saved_beta
    return summed(use, use.gradient if beta == 1 else use.gradient * beta)


def mv_vector(use: Use) -> PerSampleGrad | None:
    """Rule for w in mv(a, w): rows of a, weighted by the elements of the output's gradient."""
    rows = use.rows(1)
    if rows is None or use.gradient.is_complex():
        return None
    g, x = rows.gather(use.gradient), rows.gather(use.tensor("self"))
    return DenseGrad(torch.einsum("bt,bti->bi", g, x), terms=lambda: frobenius_norms(g) * frobenius_norms(x))


class BatchedProductGrad(RowwiseGrad):
    """Gradients of a batch of matrices with samples in the rows, from left (b, t, h, o) and right (b, t, h, i)."""

    def __init__(self, left: Tensor, right: Tensor):
        self.samples = left.shape[0]
        self.shape = (left.shape[2], left.shape[3], right.shape[3])
        self.left = left
        self.right = right

    def rows(self, start: int, stop: int) -> Tensor:
        return torch.einsum("btho,bthi->bhoi", self.left[start:stop], self.right[start:stop])

    def sum(self, weights: Tensor | None) -> Tensor:
        right = self.right if weights is None else self.right * weights.to(self.right.dtype)[:, None, None, None]
        return torch.einsum("btho,bthi->hoi", self.left, right)

    def term_norms(self) -> Tensor:
        return frobenius_norms(self.left) * frobenius_norms(self.right)


def bmm_right(use: Use) -> PerSampleGrad | None:
    """Rule for W in bmm(a, W)."""
    return _batched_products(use, (1, 0, 2), use.tensor("self").transpose(0, 1), use.gradient.transpose(0, 1))


def bmm_left(use: Use) -> PerSampleGrad | None:
    """Rule for W in bmm(W, a)."""
    return _batched_products(use, (2, 0, 1), use.gradient.permute(2, 0, 1), use.tensor("mat2").permute(2, 0, 1))


def _batched_products(use: Use, dims: tuple[int, ...], left: Tensor, right: Tensor) -> PerSampleGrad | None:
    """Gradients from (tokens, h, o) and (tokens, h, i). `dims`: of the output's gradient, tokens first."""
    rows = use.permuted_rows(dims, 1)
    if rows is None or left.is_complex() or right.is_complex():
        return None
    left, right = rows.gather(left), rows.gather(right)
    if use.shape[0] == 1:
        return FactoredGrad([Term(left[:, :, 0], right[:, :, 0])], use.shape)
    return BatchedProductGrad(left, right)


def grouped_right(use: Use) -> PerSampleGrad | None:
    """Rule for W (e, i, o) in grouped_mm(a, W, ends): rows ends[e - 1] to ends[e] of a are multiplied by matrix e."""
    a, ends = use.saved["self"], use.saved["offs"]
    if a.dim() != 2 or len(use.shape) != 3 or use.rows(1) is None:
        return None
    owner = use.owner_map.owners(tuple(use.gradient.shape), use.gradient.device).amax(1)
    expert = torch.bucketize(torch.arange(len(a), device=a.device), ends.long(), right=True)
    pair = torch.where((owner >= 0) & (expert < len(ends)), expert * use.samples + owner, -1)
    rows = ragged_gather(pair, use.samples * len(ends))
    term = Term(rows.gather(use.tensor("self")), rows.gather(use.gradient))
    return StackedGrad(FactoredGrad([term], use.shape[1:]), range(len(ends)), len(ends))


BILINEAR = ((1, 3), (0,), (1, 2), (2, 3))  # dims that _trilinear adds to its operands, and dims that it sums over


def bilinear(use: Use) -> PerSampleGrad | None:
    """Rule for W (o, i, j) in nn.Bilinear: outer products of the output's gradient with products of both inputs."""
    node = use.node
    is_bilinear = (node._saved_expand1, node._saved_expand2, node._saved_expand3, node._saved_sumdim) == BILINEAR
    rows = use.rows(1) if is_bilinear else None
    if rows is None or use.gradient.is_complex():
        return None
    first, second = rows.gather(use.tensor("i1")), rows.gather(use.tensor("i3"))
    products = (first[..., :, None] * second[..., None, :]).flatten(2)
    return FactoredGrad([Term(rows.gather(use.gradient), products)], use.shape)


# --- linear systems ---------------------------------------------------------------------------------------------------


def solve_matrix(use: Use) -> PerSampleGrad | None:
    """Rule for A in A X = B: outer products of the gradients of B, which are solutions for the transposed matrix, with
    the columns of X. With left=False, X A = B, of the rows of X with the gradients of B. Tokens are right-hand sides.
    """
    g = use.gradient
    left = use.node._saved_left
    last = g.dim() - 1
    dims = (*range(last - 1), last, last - 1) if left else tuple(range(last + 1))  # each right-hand side as a row
    rows = use.permuted_rows(dims, last) if len(use.shape) == 2 and last > 0 else None
    if rows is None or g.is_complex():
        return None
    n = use.shape[0]
    A = use.tensor("A")
    gradient = -rows.gather(torch.linalg.solve(A if left else A.T, g.permute(dims).reshape(-1, n), left=False))
    solution = rows.gather(use.tensor("result").permute(dims).reshape(-1, n))
    return FactoredGrad([Term(gradient, solution) if left else Term(solution, gradient)], use.shape)


# --- distances --------------------------------------------------------------------------------------------------------


def cdist_points(use: Use) -> PerSampleGrad | None:
    """Rule for one operand of cdist."""
    g = use.gradient
    last = g.dim() - 1
    dims = (*range(last - 1), last, last - 1) if use.operand == 0 else tuple(range(last + 1))  # points in the last dim
    rows = use.permuted_rows(dims, last) if len(use.shape) == 2 else None
    if rows is None or g.requires_grad:  # there is no second derivative of the kernel
        return None
    other_points, parameter = (use.tensor(name) for name in (("x2", "x1") if use.operand == 0 else ("x1", "x2")))
    if other_points.shape[:-1] != g.permute(dims).shape[:-1]:
        return None
    tables = (x.permute(dims).reshape(-1, use.shape[0]) for x in (g, use.tensor("result")))
    gradient, distances = map(rows.gather, tables)
    p = getattr(use.node, "_saved_p", 2.0)
    return DistanceGrad(gradient, distances, rows.gather(other_points.reshape(-1, use.shape[1])), parameter, p)


class DistanceGrad(RowwiseGrad):
    """Gradients of points (r, d) from the gradients of their distances to the other points (t, d) of each sample."""

    def __init__(self, gradient: Tensor, distances: Tensor, other_points: Tensor, points: Tensor, p: float):
        self.samples = len(gradient)
        self.shape = tuple(points.shape)
        self.gradient = gradient  # (b, t, r)
        self.distances = distances  # (b, t, r)
        self.other_points = other_points  # (b, t, d)
        self.points = points
        self.p = p

    def rows(self, start: int, stop: int) -> Tensor:
        part = slice(start, stop)
        return self._pull_back(self.gradient[part], self.distances[part], self.other_points[part])

    def sum(self, weights: Tensor | None) -> Tensor:
        g = self.gradient if weights is None else self.gradient * weights.to(self.gradient.dtype)[:, None, None]
        return self._pull_back(*(x.flatten(0, 1)[None] for x in (g, self.distances, self.other_points)))[0]

    def _pull_back(self, gradient: Tensor, distances: Tensor, other_points: Tensor) -> Tensor:
        points = self.points.expand(len(other_points), -1, -1).contiguous()
        gradient, distances = gradient.mT.contiguous(), distances.mT.contiguous()
        return torch.ops.aten._cdist_backward(gradient, points, other_points.contiguous(), self.p, distances)

    def term_norms(self) -> Tensor | None:
        # The gradient of a distance has length one for p = 2, and at most the root of d for every other p >= 1.
        return (
            frobenius_norms(self.gradient) * (self.gradient[0].numel() * self.shape[1]) ** 0.5 if self.p >= 1 else None
        )
