"""Gradients of a stack of matrices, such as the weights of experts, of which a sample uses some.

Legend: b sample, e matrix of the stack, t token of b at e, o and i the two dimensions of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad, term_norms
from samplewise.engine.grads.factored import FactoredGrad, Term
from samplewise.engine.grads.kernels import bmm, scaled_norms


class StackedGrad(PerSampleGrad):
    """Gradients (b, e, o, i) of which each pair of a matrix and a sample is one row (o, i) of `pairs`.

    pairs: gradients of all samples for the first of the matrices, then for the second, and so on.
    matrices: their positions in the stack; the gradients of others are zero.
    """

    def __init__(self, pairs: PerSampleGrad, matrices: Sequence[int], count: int):
        self.samples = pairs.samples // len(matrices)
        self.shape = (count, *pairs.shape)
        self.is_bounded_by_norms = pairs.is_bounded_by_norms
        self.pairs = pairs
        self.matrices = list(matrices)

    def transpose(self) -> StackedGrad | None:
        """Gradients of the transposed matrices; None if they are no longer in factors."""
        if not isinstance(self.pairs, FactoredGrad):
            return None
        return StackedGrad(self.pairs.transpose(), self.matrices, self.shape[0])

    def compact(self) -> StackedGrad:
        """See `FactoredGrad.compact`."""
        if not isinstance(self.pairs, FactoredGrad):
            return self
        return StackedGrad(self.pairs.compact(), self.matrices, self.shape[0])

    def rows(self, start: int, stop: int) -> Tensor:
        parts = [self.pairs.rows(n * self.samples + start, n * self.samples + stop) for n in range(len(self.matrices))]
        return self._in_stack(torch.stack(parts, 1), 1)

    def squared_norms(self) -> Tensor:
        return self._by_matrix(self.pairs.squared_norms()).sum(0)

    @property
    def may_cancel(self) -> bool:
        return self.pairs.may_cancel

    def scaled_norms(self) -> Tensor:
        return scaled_norms(self._by_matrix(self.pairs.scaled_norms()).T)

    def underflowed_norms(self, samples: Tensor) -> Tensor:
        first = self.samples * torch.arange(len(self.matrices), device=samples.device)[:, None]
        norms = self.pairs.underflowed_norms((first + samples).flatten())
        return scaled_norms(norms.view(len(self.matrices), -1).T)

    def paired_dot(self, other: PerSampleGrad) -> Tensor:
        if not isinstance(other, StackedGrad) or other.matrices != self.matrices:
            return super().paired_dot(other)
        return self._by_matrix(self.pairs.paired_dot(other.pairs)).sum(0)

    def dot(self, direction: Tensor) -> Tensor:
        if not isinstance(self.pairs, FactoredGrad):
            return super().dot(direction)
        left, right = self._factors(self.pairs)
        products = bmm(left, direction.reshape(self.shape[0], *self.pairs.matrix)[self.matrices].to(left.dtype))
        return (products * right).sum(2).view(len(self.matrices), self.samples, -1).sum((0, 2))

    def sum(self, weights: Tensor | None) -> Tensor:
        if isinstance(self.pairs, FactoredGrad):
            left, right = self._factors(self.pairs)
            if weights is not None:
                right = right * weights.to(right.dtype).repeat_interleave(self.pairs.tokens)[:, None]
            sums = bmm(left.transpose(1, 2), right)
        else:
            of_matrices = [self.pairs.rows(n * self.samples, (n + 1) * self.samples) for n in range(len(self.matrices))]
            column = of_matrices[0].new_ones(self.samples) if weights is None else weights.to(of_matrices[0].dtype)
            sums = torch.stack([column @ rows.flatten(1) for rows in of_matrices])
        return self._in_stack(sums.view(-1, *self.shape[1:]), 0)

    def term_norms(self) -> Tensor:
        return self._by_matrix(term_norms(self.pairs)).sum(0)

    def describe(self) -> str:
        return f"{len(self.matrices)} matrices: {self.pairs.describe()}"

    def _by_matrix(self, values: Tensor) -> Tensor:
        """Values of the pairs, (e, b)."""
        return values.view(len(self.matrices), self.samples)

    def _factors(self, pairs: FactoredGrad) -> tuple[Tensor, Tensor]:
        """Factors (e, tokens of all samples, o) and (e, tokens of all samples, i)."""
        left, right = pairs.terms[0]
        assert isinstance(left, Tensor) and isinstance(right, Tensor)
        count = len(self.matrices)
        return left.reshape(count, -1, left.shape[2]), right.reshape(count, -1, right.shape[2])

    def _in_stack(self, parts: Tensor, dim: int) -> Tensor:
        """The parts of the matrices along this dimension, at their positions in the stack."""
        count = self.shape[0]
        if self.matrices == list(range(count)):
            return parts
        shape = (*parts.shape[:dim], count, *parts.shape[dim + 1 :])
        index = torch.tensor(self.matrices, device=parts.device)
        return parts.new_zeros(shape).index_add(dim, index, parts)


def join_stacks(grads: Sequence[PerSampleGrad]) -> StackedGrad | None:
    """Sum of the gradients of different matrices of a stack; None if one is of another kind, or if a matrix is used
    twice.
    """
    stacks = [grad for grad in grads if isinstance(grad, StackedGrad)]
    matrices = [matrix for stack in stacks for matrix in stack.matrices]
    factored = [stack.pairs for stack in stacks if isinstance(stack.pairs, FactoredGrad)]
    if len(factored) < len(grads) or len(set(matrices)) < len(matrices):
        return None
    tokens = max(pairs.tokens for pairs in factored)
    sides = []
    for side in (0, 1):
        factors = [factor for pairs in factored if isinstance(factor := pairs.terms[0][side], Tensor)]
        sides.append(torch.cat([F.pad(factor, (0, 0, 0, tokens - factor.shape[1])) for factor in factors]))
    return StackedGrad(FactoredGrad([Term(*sides)], factored[0].shape), matrices, stacks[0].shape[0])
