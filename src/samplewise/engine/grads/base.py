"""Interface of the representations of one parameter's per-sample gradients.

    DenseGrad      rows (b, *shape): for small parameters, or if rows are smaller than their factors (`dense`)
    PackedGrad     rows of a small parameter, in one matrix with those of other parameters (`packed`)
    FactoredGrad   factors of outer products (`factored`)
    IndexedGrad    rows of an operand that was viewed before use (`indexed`)
    SummedGrad     sum of several representations, for a parameter with several uses

Rules and `generic` add representations that compute rows on demand.

Legend: b sample, k projected dimension.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from operator import add

from torch import Tensor

from samplewise.engine.grads import by_rows


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
        """Preferred number of rows per call of `rows`: as many as fit by_rows.CHUNK elements."""
        return max(1, by_rows.CHUNK // max(self.row_size, 1))

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """Gradients of samples start to stop - 1, (stop - start, *shape)."""

    @property
    def row_tensors(self) -> tuple[Tensor, ...]:
        """Tensors that results of `rows` may be views of. They must not change."""
        return ()

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """Squared L2 norm of each sample's gradient, (b,)."""

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
        return by_rows.all_scaled_norms(self)

    def underflowed_norms(self, samples: Tensor) -> Tensor:
        """Norms of the given samples, (len(samples),) in float64, for gradients whose squares underflow."""
        return by_rows.underflowed_norms(self, samples)

    @abstractmethod
    def dot(self, direction: Tensor) -> Tensor:
        """Inner product of each sample's gradient with a tensor of the parameter's shape, (b,)."""

    def paired_dot(self, other: PerSampleGrad) -> Tensor:
        """Inner product of row b of this gradient with row b of another one of the same parameter, (b,)."""
        return by_rows.paired_dot(self, other)

    @abstractmethod
    def gram(self, other: PerSampleGrad) -> Tensor:
        """Inner products of all pairs of samples, (b, b of other)."""

    @abstractmethod
    def sum(self, weights: Tensor | None) -> Tensor:
        """Sum over b of weights[b] times row b, in the parameter's shape; None means weights of one. The caller may
        change the result. Weights with other values must be another tensor object, see `weights_by_name`.
        """

    def term_norms(self) -> Tensor | None:
        """Upper bound (b,) of the sum of the norms of the terms that are added for a sample, in its row or in
        `summed_apart`: rounding errors are relative to it. None if there is one term only, or if terms are not tracked.
        """
        return None

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        """As `sum`, with rounding errors relative to the norms of rows and to `term_norms`."""
        return self.sum(weights)

    @abstractmethod
    def sum_of_squares(self, center: Tensor | None) -> Tensor:
        """Sum over b of (row b - center)**2, in the parameter's shape; None means a center of zero."""

    @abstractmethod
    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """left[:, k] . row b . right[:, k] for each k, (b, k). Row b is viewed as a matrix (first dim, rest)."""

    def describe(self) -> str:
        """Short name for the table of `Gradients.explain`."""
        return type(self).__name__.lower()


class RowwiseGrad(PerSampleGrad):
    """Base class that computes every quantity from rows, except `sum`, which subclasses define."""

    squared_norms = by_rows.squared_norms
    dot = by_rows.dot
    gram = by_rows.gram
    sum_of_squares = by_rows.sum_of_squares
    project = by_rows.project


def total(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of one or more tensors."""
    return reduce(add, tensors)


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

    def term_norms(self) -> Tensor:
        return total(term_norms(grad) for grad in self.grads)

    def summed_apart(self, weights: Tensor | None) -> Tensor:
        return total(grad.summed_apart(weights) for grad in self.grads)

    def describe(self) -> str:
        return " + ".join(grad.describe() for grad in self.grads)
