"""Rules for matrix products: mm, addmm, bmm, mv, bilinear, grouped_mm.

Legend: b sample, t token (a row of the output that belongs to b), h matrix of a batch, o and i the operand's two dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad, RowwiseGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import FactoredGrad, Term
from samplewise.engine.grads.indexed import StackedGrad
from samplewise.engine.grads.kernels import frobenius_norms
from samplewise.engine.ownership.owner_map import Irregular, RowGather
from samplewise.engine.rules.rule_input import Use, summed


def right_operand(use: Use, left: str, scale: float = 1) -> PerSampleGrad | None:
    """Gradients of W in mm(a, W): outer products of the rows of a with the rows of the output's gradient."""
    return _outer(use.rows(1), use.tensor(left), use.gradient, use.shape, scale)


def left_operand(use: Use, right: str, scale: float = 1) -> PerSampleGrad | None:
    """Gradients of W in mm(W, a): outer products of the columns of the output's gradient with the columns of a."""
    columns = use.permuted_rows((1, 0), 1)
    grad = _outer(columns, use.tensor(right).T, use.gradient.T, (use.shape[1], use.shape[0]), scale)
    return grad.transpose() if grad is not None else None


def _outer(rows: RowGather | None, a: Tensor, g: Tensor, shape: tuple[int, ...], scale: float) -> FactoredGrad | None:
    if rows is None or a.is_complex() or g.is_complex():
        return None
    return FactoredGrad([Term(rows.gather(a), rows.gather(g if scale == 1 else g * scale))], shape)


def mm_left(use: Use) -> PerSampleGrad | None:
    return left_operand(use, "mat2")


def mm_right(use: Use) -> PerSampleGrad | None:
    return right_operand(use, "self")


def addmm_bias(use: Use) -> PerSampleGrad | None:
    beta = use.node._saved_beta
    return summed(use, use.gradient if beta == 1 else use.gradient * beta)


def addmm_left(use: Use) -> PerSampleGrad | None:
    return left_operand(use, "mat2", use.node._saved_alpha)


def addmm_right(use: Use) -> PerSampleGrad | None:
    return right_operand(use, "mat1", use.node._saved_alpha)


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
    """Rule for W (h, i, o) in grouped_mm(a, W, ends): rows ends[h - 1] to ends[h] of a are multiplied by matrix h."""
    a, ends = use.saved["self"], use.saved["offs"]
    if a.dim() != 2 or len(use.shape) != 3 or use.rows(1) is None:
        return None
    owner = use.owner_map.owners(tuple(use.gradient.shape), use.gradient.device).amax(1)
    a, g = use.tensor("self"), use.gradient
    parts = []
    start = 0
    for end in ends.tolist():
        rows = Irregular(use.samples, owner[start:end]).rows((end - start,), 1)
        assert rows is not None
        parts.append(FactoredGrad([Term(rows.gather(a[start:end]), rows.gather(g[start:end]))], use.shape[1:]))
        start = end
    return StackedGrad(parts)


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
