"""Gradients of parameters that are only viewed before use: transposed, reshaped, sliced, permuted; and of parameters
made of disjoint parts, such as the thirds of a projection.

Views move elements without changing their values. The index map is read from autograd: the numbers 1, 2, 3,
... as gradient of the operand arrive at each element of the parameter as its position in the operand plus one, or as 0
if the element is not used. Numbers that the dtype cannot hold, such as 257 in bfloat16, are sent digit by digit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samplewise.engine.backward import pull_back
from samplewise.engine.grads.base import PerSampleGrad, term_norms
from samplewise.engine.grads.factored import FactoredGrad
from samplewise.engine.grads.kernels import scaled_norms, total
from samplewise.engine.graph.graph import Edge

VIEWS = {
    *"T Transpose Permute View UnsafeView ReshapeAlias Squeeze Unsqueeze Alias Clone ToCopy".split(),
    *"Slice Select Split SplitWithSizes Unbind".split(),
}


def reindex(
    grad: PerSampleGrad, entry: Edge, leaf: Edge, cache: dict[object, str], key: object
) -> PerSampleGrad | None:
    """Gradients of the parameter from those of the operand; None if the operand is complex.

    cache: order of the elements by key, for all graphs of one structure. It is read from the device once.
    """
    if entry.dtype.is_complex:
        return None
    count = torch.arange(1, grad.width + 1, device=entry.device)
    base = int(1 / torch.finfo(entry.dtype).eps)
    positions = torch.full(leaf.shape, -1, device=entry.device)
    scale = 1
    while scale <= grad.width:
        digits = (count // scale % base).view(grad.shape).to(entry.dtype)
        (pulled_digits,) = pull_back(digits, entry, [leaf], differentiable=False)
        positions += pulled_digits.long() * scale
        scale *= base
    if isinstance(grad, FactoredGrad) and positions.numel() == grad.width:
        key = (key, grad.matrix)
        if key not in cache:
            cache[key] = _order(positions.flatten(), (count - 1).view(grad.matrix))
        if cache[key] == "straight":
            return FactoredGrad(grad.terms, leaf.shape)
        if cache[key] == "transposed":
            return FactoredGrad(grad.transpose().terms, leaf.shape)
    return IndexedGrad(grad, positions)


def _order(positions: Tensor, straight: Tensor) -> str:
    """Order of the positions (n,) of a matrix whose elements are numbered: "straight", "transposed" or "other"."""
    if torch.equal(positions, straight.flatten()):
        return "straight"
    return "transposed" if torch.equal(positions, straight.T.flatten()) else "other"


class IndexedGrad(PerSampleGrad):
    """Re-indexed: element e of the parameter is element positions[e] of the source, 0 if positions[e] is -1."""

    def __init__(self, source: PerSampleGrad, positions: Tensor):
        self.samples = source.samples
        self.shape = tuple(positions.shape)
        self.row_size = max(source.row_size, self.width)
        self.source = source
        self.positions = positions

    def rows(self, start: int, stop: int) -> Tensor:
        return self._gather(self.source.rows(start, stop))

    def squared_norms(self) -> Tensor:
        return self.source.squared_norms()

    @property
    def may_cancel(self) -> bool:
        return self.source.may_cancel

    def scaled_norms(self) -> Tensor:
        return self.source.scaled_norms()

    def underflowed_norms(self, samples: Tensor) -> Tensor:
        return self.source.underflowed_norms(samples)

    def dot(self, direction: Tensor) -> Tensor:
        return self.source.dot(self._scatter(direction))

    def paired_dot(self, other: PerSampleGrad) -> Tensor:
        if isinstance(other, IndexedGrad) and self.is_indexed_like(other):
            return self.source.paired_dot(other.source)
        return super().paired_dot(other)

    def is_indexed_like(self, other: IndexedGrad) -> bool:
        """True if both take the same elements of sources of the same shape."""
        return self.source.shape == other.source.shape and torch.equal(self.positions, other.positions)

    def sum(self, weights: Tensor | None) -> Tensor:
        return self._gather(self.source.sum(weights)[None])[0]

    def term_norms(self) -> Tensor | None:
        return self.source.term_norms()

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        return self._gather(self.source.summed_apart(weights)[None])[0]

    def sum_of_squares(self, center: Tensor | None) -> Tensor:
        squares = self.source.sum_of_squares(None if center is None else self._scatter(center))
        return self._gather(squares[None])[0]

    def _gather(self, rows: Tensor) -> Tensor:
        """Rows in the shape of the parameter, from rows in the shape of the source."""
        flat = rows.reshape(len(rows), -1)[:, self.positions.flatten().clamp_min(0)]
        return torch.where(self.positions < 0, 0, flat.view(len(rows), *self.shape))

    def _scatter(self, tensor: Tensor) -> Tensor:
        """Tensor in the shape of the source, from one in the shape of the parameter; unused elements are zero."""
        used = self.positions >= 0
        return (
            tensor.new_zeros(self.source.width).index_put((self.positions[used],), tensor[used]).view(self.source.shape)
        )

    def describe(self) -> str:
        return f"{self.source.describe()}, re-indexed"


class BlockGrad(PerSampleGrad):
    """Sum of uses of disjoint parts of one parameter, such as the q, k and v thirds of a projection: the squares of the
    parts add up.
    """

    def __init__(self, parts: Sequence[IndexedGrad]):
        self.samples = parts[0].samples
        self.shape = parts[0].shape
        self.row_size = max(part.row_size for part in parts)
        self.parts = parts

    def squared_norms(self) -> Tensor:
        return total(part.squared_norms() for part in self.parts)

    @property
    def may_cancel(self) -> bool:
        return any(part.may_cancel for part in self.parts)

    def scaled_norms(self) -> Tensor:
        return scaled_norms(torch.stack([part.scaled_norms() for part in self.parts], 1))

    def underflowed_norms(self, samples: Tensor) -> Tensor:
        return scaled_norms(torch.stack([part.underflowed_norms(samples) for part in self.parts], 1))

    def term_norms(self) -> Tensor:
        return total(term_norms(part) for part in self.parts)

    def rows(self, start: int, stop: int) -> Tensor:
        return total(part.rows(start, stop) for part in self.parts)

    def dot(self, direction: Tensor) -> Tensor:
        return total(part.dot(direction) for part in self.parts)

    def paired_dot(self, other: PerSampleGrad) -> Tensor:
        if isinstance(other, BlockGrad) and len(self.parts) == len(other.parts):
            pairs = list(zip(self.parts, other.parts, strict=True))
            if all(block.is_indexed_like(other_block) for block, other_block in pairs):
                return total(block.paired_dot(other_block) for block, other_block in pairs)
        return super().paired_dot(other)

    def sum(self, weights: Tensor | None) -> Tensor:
        return total(part.sum(weights) for part in self.parts)

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        return total(part.summed_apart(weights) for part in self.parts)

    def describe(self) -> str:
        return f"{len(self.parts)} blocks: {self.parts[0].source.describe()}"


def as_blocks(grads: Sequence[PerSampleGrad], cache: dict[object, bool], key: object) -> BlockGrad | None:
    """Merge re-indexed gradients into `BlockGrad`; None if one is of another kind or if two share an element.

    cache: whether elements are shared, by key, for all graphs of one structure. It is read from the device once.
    """
    parts = [grad for grad in grads if isinstance(grad, IndexedGrad)]
    if len(parts) < len(grads):
        return None
    if key not in cache:
        uses = total((part.positions >= 0).int() for part in parts)  # number of parts that use each element
        cache[key] = bool((uses > 1).any())
    return None if cache[key] else BlockGrad(parts)
