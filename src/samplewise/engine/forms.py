"""The shapes in which the per-sample gradients of one parameter are kept, and every quantity that can be asked of them.

    Dense      the rows themselves, (b, *shape): small parameters, or where rows are smaller than their factors
    Mixture    the sum of several forms, for a parameter used in several ways
    Outer      factors (see `outer`); other modules add forms that make their rows on demand

Legend: b sample, k projected dimension.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from samplewise.engine import rowwise


class Form(ABC):
    """Per-sample gradients of one parameter."""

    def __init__(self, samples: int, shape: tuple[int, ...], row_size: int = 0, step: int = 0):
        self.samples, self.shape = samples, shape
        self.row_size = max(row_size, self.width)  # the numbers it takes to make one row
        self.step = step or max(1, rowwise.CHUNK // max(self.row_size, 1))  # rows are best asked for so many at a time

    @abstractmethod
    def rows(self, start: int, stop: int) -> Tensor:
        """(stop - start, *shape)"""

    @abstractmethod
    def squared_norms(self) -> Tensor:
        """(b,)"""

    def faint_norms(self, samples: Tensor) -> Tensor:
        """(len(samples),) in float64: norms of gradients that are too small to be squared in their own type."""
        return rowwise.faint_norms(self, samples)

    @abstractmethod
    def dot(self, direction: Tensor) -> Tensor:
        """(b,): inner product with a tensor of the parameter's shape."""

    @abstractmethod
    def gram(self, other: Form) -> Tensor:
        """(b, b of other): inner products of all pairs."""

    @abstractmethod
    def sum(self, weights: Tensor | None) -> Tensor:
        """The parameter's shape: sum over b of weights[b] times row b."""

    @abstractmethod
    def sum_of_squares(self, centre: Tensor | None) -> Tensor:
        """The parameter's shape: sum over b of (row b - centre)**2."""

    @abstractmethod
    def project(self, left: Tensor, right: Tensor) -> Tensor:
        """(b, k): left[:, k] . row b . right[:, k], the parameter seen as a matrix (first dim, rest)."""

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    def describe(self) -> str:
        return type(self).__name__.lower()


class ByRows(Form):
    """A form that can say no more than its rows; how it sums them is its own affair."""

    squared_norms = rowwise.squared_norms
    dot = rowwise.dot
    gram = rowwise.gram
    sum_of_squares = rowwise.sum_of_squares
    project = rowwise.project


def total(tensors: Iterable[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    return reduce(add, tensors)


class Dense(ByRows):
    sum = rowwise.sum

    def __init__(self, *parts: Tensor):
        """The rows, or parts of them that hold equally many samples each (but for the last)."""
        super().__init__(sum(len(part) for part in parts), tuple(parts[0].shape[1:]), step=len(parts[0]))
        self.parts = parts

    def rows(self, start: int, stop: int) -> Tensor:
        first, last = start // self.step, max(start, stop - 1) // self.step
        if first == last:
            return self.parts[first][start - first * self.step : stop - first * self.step]
        return torch.cat(self.parts)[start:stop]


class Mixture(ByRows):
    """Several uses of one parameter whose forms have no product of their own."""

    def __init__(self, forms: Sequence[Form]):
        super().__init__(forms[0].samples, forms[0].shape, max(form.row_size for form in forms))
        self.forms = forms

    def rows(self, start: int, stop: int) -> Tensor:
        return total(form.rows(start, stop) for form in self.forms)

    def sum(self, weights: Tensor | None) -> Tensor:
        return total(form.sum(weights) for form in self.forms)

    def describe(self) -> str:
        return " + ".join(form.describe() for form in self.forms)
