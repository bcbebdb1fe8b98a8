"""Rules for the points of torch.cdist, shared by all samples.

Legend: b sample, t point of the other operand that belongs to b, r point of the operand, d coordinate.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad, RowwiseGrad
from samplewise.engine.grads.kernels import frobenius_norms
from samplewise.engine.rules.rule_input import Use


class DistanceGrad(RowwiseGrad):
    """Gradients of points (r, d) from the gradients of their distances to other points of each sample."""

    def __init__(self, gradient: Tensor, distances: Tensor, other_points: Tensor, points: Tensor, p: float):
        self.samples = len(gradient)
        self.shape = tuple(points.shape)
        self.gradient = gradient  # (b, t, r)
        self.distances = distances  # (b, t, r)
        self.other_points = other_points  # (b, t, d)
        self.points = points
        self.p = p

    def rows(self, start: int, stop: int) -> Tensor:
        some = slice(start, stop)
        return self._pull_back(self.gradient[some], self.distances[some], self.other_points[some])

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


def points(use: Use) -> PerSampleGrad | None:
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
