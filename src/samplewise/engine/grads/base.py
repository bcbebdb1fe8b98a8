"""Interface of the representations of one parameter's per-sample gradients.

    DenseGrad      rows (b, *shape): for small parameters, or if rows are smaller than their factors (`dense`)
    PackedGrad     rows of a small parameter, in one matrix with those of other parameters (`dense`)
    FactoredGrad   factors of outer products (`factored`)
    BagGrad        a bag of entries of a table per sample (`bags`)
    StackedGrad    factors or rows for each matrix of a stack, such as the weights of experts (`stacked`)
    IndexedGrad    rows of an operand that was viewed before use (`indexed`)
    SummedGrad     sum of several representations, for a parameter with several uses

Rules and `generic` add representations that compute rows on demand. A representation defines `rows` and `sum`; the base
class computes other quantities from rows, a few samples at a time, unless there is a faster way.

Legend: b sample, o and i the two dimensions of the parameter as a matrix; p and q rows and columns
of a tile of dimensions, n number of the tile.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from samplewise.engine.grads.kernels import (
    as_matrix,
    flat_squared_norms,
    flatten_rows,
    real_inner,
    scaled_norms,
    total,
)

# Rows are computed in chunks of about this many elements: small enough for the allocator to reuse the same memory (new
# pages cost more than the arithmetic), large enough that the overhead of calls is negligible.
CHUNK = 2**21
LARGE_ROWS = 32  # in a chunk of rows that are large enough for a call each
# Chunk size for Gram matrices, which need all pairs of samples: larger chunks mean fewer recomputations.
GRAM_CHUNK = 2**25


class PerSampleGrad(ABC):
    """Per-sample gradients of one parameter: `samples` rows of shape `shape`."""

    samples: int
    shape: tuple[int, ...]
    # True if finite `squared_norms` imply that all terms of `sum` are at most the root of the largest number.
    is_bounded_by_norms = False

    @cached_property
    def width(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)

    @cached_property
    def row_size(self) -> int:
        """Number of elements held in memory to compute one row, at least the size of the row."""
        return self.width

    @cached_property
    def step(self) -> int:
        """Preferred number of rows per call of `rows`: as many as fit CHUNK elements."""
        return max(1, CHUNK // max(self.row_size, 1))

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """Gradients of samples start to stop - 1, (stop - start, *shape)."""

    def chunks(self, size: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield (slice of samples, rows) in chunks of `size` samples; default `step`."""
        step = size or self.step
        for start in range(0, self.samples, step):
            part = slice(start, min(start + step, self.samples))
            yield part, self.rows(part.start, part.stop)

    @property
    def row_tensors(self) -> tuple[Tensor, ...]:
        """Tensors that results of `rows` may be views of. They must not change."""
        return ()

    def squared_norms(self) -> Tensor:
        """Squared L2 norm of each sample's gradient, (b,)."""
        return torch.cat([flat_squared_norms(flatten_rows(rows)) for _, rows in self.chunks()])

    def norms(self) -> Tensor:
        """L2 norm of each sample's gradient, (b,), not differentiable where it is zero."""
        return self.squared_norms().sqrt()

    @property
    def may_cancel(self) -> bool:
        """True if `scaled_norms` may be NaN although the gradients are finite."""
        return False

    def scaled_norms(self) -> Tensor:
        """L2 norm of each sample's gradient, (b,), computed without host sync from scaled values, so that squares do
        not underflow. NaN for samples in which a sum of pairs of tokens cancels.
        """
        return torch.cat([scaled_norms(flatten_rows(rows)) for _, rows in self.chunks()])

    def underflowed_norms(self, samples: Tensor) -> Tensor:
        """Norms of the given samples, (len(samples),) in float64, for gradients whose squares underflow. The numbers of
        the samples must ascend.
        """
        # The chunks are the same for all parameters, because some parameters share cached rows.
        norms = []
        for start in range(0, self.samples, self.step):
            in_chunk = samples[(samples >= start) & (samples < start + self.step)]
            if len(in_chunk):
                first, last = int(in_chunk[0]), int(in_chunk[-1])
                flat = flatten_rows(self.rows(first, last + 1))
                wide = flat.to(torch.complex128 if flat.is_complex() else torch.float64)
                norms.append(scaled_norms(wide)[in_chunk - first])
        return torch.cat(norms)

    def dot(self, direction: Tensor) -> Tensor:
        """Inner product of each sample's gradient with a tensor of the parameter's shape, (b,)."""
        flat = direction.reshape(-1)
        return torch.cat([real_inner(flatten_rows(rows), flat) for _, rows in self.chunks()])

    def paired_dot(self, other: PerSampleGrad) -> Tensor:
        """Inner product of row b of this gradient with row b of another one of the same parameter, (b,)."""
        dots = []
        for part, rows in self.chunks(min(self.step, other.step)):
            flat = flatten_rows(rows)
            other_flat = flatten_rows(other.rows(part.start, part.stop))
            wide = torch.promote_types(flat.dtype, other_flat.dtype)
            products = (flat.to(wide) * other_flat.to(wide).conj()).sum(1)
            dots.append(products.real if products.is_complex() else products)
        return torch.cat(dots)

    def gram(self, other: PerSampleGrad) -> Tensor:
        """Inner products of all pairs of samples, (b, b of other)."""
        step = max(1, GRAM_CHUNK // max(self.row_size, 1))
        blocks = []
        for _, rows in self.chunks(step):
            flat = flatten_rows(rows)
            columns = [real_inner(flat, flatten_rows(other_rows).T) for _, other_rows in other.chunks(step)]
            blocks.append(torch.cat(columns, dim=1))
        return torch.cat(blocks)

    @abstractmethod
    def sum(self, weights: Tensor | None) -> Tensor:
        """Sum over b of weights[b] times row b, in the parameter's shape; None means weights of one. The caller may
        change the result. Weights with other values must be another tensor object, see `weights_by_name`.
        """

    def sum_of_rows(self, weights: Tensor | None) -> Tensor:
        """As `sum`, computed from rows."""
        result: Tensor | None = None
        for part, rows in self.chunks():
            column = rows.new_ones(len(rows)) if weights is None else weights[part].to(rows.dtype)
            flat = flatten_rows(rows).T
            result = flat @ column if result is None else result.addmv_(flat, column)
        assert result is not None
        return result.view(self.shape)

    def term_norms(self) -> Tensor | None:
        """Upper bound (b,) of the sum of the norms of the terms that are added for a sample, in its row or in
        `summed_apart`: rounding errors are relative to it. None if there is one term only, or if terms are not tracked.
        """
        return None

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        """As `sum`, with rounding errors relative to the norms of rows and to `term_norms`."""
        return self.sum(weights)

    def sum_of_squares(self, center: Tensor | None) -> Tensor:
        """Sum over b of (row b - center)**2, in the parameter's shape; None means a center of zero."""
        result: Tensor | None = None
        for _, rows in self.chunks():
            off = rows if center is None else rows - center
            off = off.abs() if off.is_complex() else off
            if result is None:
                result = torch.zeros_like(off[0])
            if self.width < CHUNK // LARGE_ROWS:
                result = result + off.square().sum(0)
            else:  # without a second matrix of the same size
                for row in off:
                    result = result.addcmul_(row, row)
        assert result is not None
        return result

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """Tiles left[:, :, n]^T . row b . right[:, :, n] of p x q numbers, in one dimension: (b, p * q * n).

        left (o, p, n), right (i, q, n). Row b is viewed as a matrix (first dim, rest).
        """
        return project_rows(self, left, right)

    def describe(self) -> str:
        """Short name for the table of `Gradients.explain`."""
        return type(self).__name__.lower()


class RowwiseGrad(PerSampleGrad):
    """Base class of representations whose quantities, except `sum`, are all computed from rows."""


def project_rows(grad: PerSampleGrad, left: Tensor, right: Tensor, scale: Tensor | None = None) -> Tensor:
    """As `PerSampleGrad.project`, from rows that are multiplied by `scale`, of the parameter's shape, if any."""
    projections = []
    for _, rows in grad.chunks():
        if scale is not None:
            rows = rows * scale
        o, i = as_matrix(grad.shape)
        matrices = rows.reshape(len(rows), o, i)
        u, v = left.to(rows.dtype), right.to(rows.dtype)
        if o < i:  # the first product sums over the larger dimension: its result is smaller
            tiles = torch.einsum("boi,iqn,opn->bpqn", matrices, v, u)
        else:
            tiles = torch.einsum("boi,opn,iqn->bpqn", matrices, u, v)
        projections.append(tiles.flatten(1))
    return torch.cat(projections)


def term_norms(grad: PerSampleGrad) -> Tensor:
    """As `PerSampleGrad.term_norms`; the norms of rows if rows are added."""
    norms = grad.term_norms()
    return grad.norms() if norms is None else norms


class SummedGrad(RowwiseGrad):
    """Sum of the representations of several uses of one parameter that cannot be merged into one."""

    def __init__(self, grads: Sequence[PerSampleGrad]):
        self.samples = grads[0].samples
        self.shape = grads[0].shape
        self.row_size = max(grad.row_size for grad in grads)
        self.grads = grads

    def rows(self, start: int, stop: int) -> Tensor:
        return total(grad.rows(start, stop) for grad in self.grads)

    def sum(self, weights: Tensor | None) -> Tensor:
        return total(grad.sum(weights) for grad in self.grads)

    def project(self, left: Tensor, right: Tensor) -> Tensor:
        return total(grad.project(left, right) for grad in self.grads)

    def term_norms(self) -> Tensor:
        return total(term_norms(grad) for grad in self.grads)

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        return total(grad.summed_apart(weights) for grad in self.grads)

    def describe(self) -> str:
        return " + ".join(grad.describe() for grad in self.grads)
