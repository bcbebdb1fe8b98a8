"""Matrix products: y = x W in all its spellings.

Legend: b sample, t token (a row of the output that belongs to b), h batch of matrices, o and i the operand's two sides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.engine.forms import ByRows, Dense, Form
from samplewise.engine.graph import scalar
from samplewise.engine.outer import Outer, Term
from samplewise.engine.rules.use import Use, summed
from samplewise.engine.tags import Tag, permuted


def right_operand(use: Use, left: str, scale: float = 1) -> Form | None:
    """mm(a, W): the rows of the output's gradient meet the rows of a."""
    return _outer(use.tag, use.tensor(left), use.gradient, use.shape, scale)


def left_operand(use: Use, right: str, scale: float = 1) -> Form | None:
    """mm(W, a): the columns of the output's gradient meet the columns of a."""
    tag = permuted(use.tag, tuple(use.gradient.shape), (1, 0))
    form = _outer(tag, use.tensor(right).T, use.gradient.T, (use.shape[1], use.shape[0]), scale)
    return form.transposed() if form is not None else None


def _outer(tag: Tag | None, a: Tensor, g: Tensor, shape: tuple[int, ...], scale: float) -> Outer | None:
    rows = tag.rows(tuple(g.shape), 1) if tag is not None else None
    if rows is None or a.is_complex() or g.is_complex():
        return None
    return Outer([Term(rows.gather(a), rows.gather(g if scale == 1 else g * scale))], shape)


def mm_left(use: Use) -> Form | None:
    return left_operand(use, "mat2")


def mm_right(use: Use) -> Form | None:
    return right_operand(use, "self")


def addmm_bias(use: Use) -> Form | None:
    beta = scalar(use.node, "beta")
    return summed(use, use.gradient if beta == 1 else use.gradient * beta)


def addmm_left(use: Use) -> Form | None:
    return left_operand(use, "mat2", scalar(use.node, "alpha"))


def addmm_right(use: Use) -> Form | None:
    return right_operand(use, "mat1", scalar(use.node, "alpha"))


def mv_vector(use: Use) -> Form | None:
    """mv(a, w): a row of a for each element of the output's gradient."""
    rows = use.tag.rows(tuple(use.gradient.shape), 1)
    if rows is None or use.gradient.is_complex():
        return None
    return Dense(torch.einsum("bt,bti->bi", rows.gather(use.gradient), rows.gather(use.tensor("self"))))


class Batched(ByRows):
    """bmm(a, W) with samples in the rows: one product for each of h matrices."""

    def __init__(self, left: Tensor, right: Tensor):  # (b, t, h, o), (b, t, h, i)
        super().__init__(left.shape[0], (left.shape[2], left.shape[3], right.shape[3]))
        self.left, self.right = left, right

    def rows(self, start: int, stop: int) -> Tensor:
        return torch.einsum("btho,bthi->bhoi", self.left[start:stop], self.right[start:stop])

    def sum(self, weights: Tensor | None) -> Tensor:
        right = self.right if weights is None else self.right * weights.to(self.right.dtype)[:, None, None, None]
        return torch.einsum("btho,bthi->hoi", self.left, right)


def bmm_right(use: Use) -> Form | None:
    a, g = use.tensor("self"), use.gradient
    tag = permuted(use.tag, tuple(g.shape), (1, 0, 2))
    rows = tag.rows((g.shape[1], g.shape[0], g.shape[2]), 1) if tag is not None else None
    if rows is None or a.is_complex() or g.is_complex():
        return None
    a, g = rows.gather(a.transpose(0, 1)), rows.gather(g.transpose(0, 1))
    if use.shape[0] == 1:
        return Outer([Term(a[:, :, 0], g[:, :, 0])], use.shape)
    return Batched(a, g)
