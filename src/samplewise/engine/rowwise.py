"""Every quantity of per-sample gradients from their rows alone, a few samples at a time.

The first argument is the form (see `forms`), so that a class may take a function from here as its method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

# Rows are made in chunks of about this many elements: small enough for the allocator to hand the same memory out
# again (fresh pages cost more than the arithmetic), large enough that calls do not count.
CHUNK = 2**21
# Gram matrices need all pairs of samples: larger chunks mean fewer recomputations.
GRAM_CHUNK = 2**25


class HasRows(Protocol):
    samples: int
    shape: tuple[int, ...]
    row_size: int
    step: int

    def rows(self, start: int, stop: int) -> Tensor: ...


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """A parameter seen as (first dim, rest); vectors and scalars are one column."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def chunks(form: HasRows, size: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    step = size or form.step
    for start in range(0, form.samples, step):
        part = slice(start, min(start + step, form.samples))
        yield part, form.rows(part.start, part.stop)


def squared_norms(form: HasRows) -> Tensor:
    return torch.cat([flat_squared_norms(_flat(rows)) for _, rows in chunks(form)])


def faint_norms(form: HasRows, samples: Tensor) -> Tensor:
    """`samples` ascend. Rows are made in the same chunks for every parameter, since some share the work."""
    found = []
    for start in range(0, form.samples, form.step):
        here = samples[(samples >= start) & (samples < start + form.step)]
        if len(here):
            first, last = int(here[0]), int(here[-1])
            found.append(scaled_norms(_flat(form.rows(first, last + 1)))[here - first])
    return torch.cat(found)


def scaled_norms(flat: Tensor) -> Tensor:
    """(b, p) -> (b,) in float64, without squaring numbers that are small or large."""
    wide = (torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat).double()
    largest = wide.detach().abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1)
    return scale[:, 0] * root((wide / scale).square().sum(1))


def root(squared: Tensor) -> Tensor:
    """The square root, with gradient zero at zero where the true one has no direction."""
    zero = squared == 0
    return torch.where(zero, 0, torch.where(zero, 1, squared).sqrt())


def dot(form: HasRows, direction: Tensor) -> Tensor:
    flat = direction.reshape(-1)
    return torch.cat([_real_inner(_flat(rows), flat) for _, rows in chunks(form)])


def gram(form: HasRows, other: HasRows) -> Tensor:
    step = max(1, GRAM_CHUNK // max(form.row_size, 1))
    return torch.cat([_against(_flat(rows), other, step) for _, rows in chunks(form, step)])


def _against(rows: Tensor, other: HasRows, step: int) -> Tensor:
    return torch.cat([_real_inner(rows, _flat(more).T) for _, more in chunks(other, step)], dim=1)


def sum(form: HasRows, weights: Tensor | None) -> Tensor:
    total: Tensor | int = 0
    for part, rows in chunks(form):
        total = total + _weighted(rows, None if weights is None else weights[part])
    assert isinstance(total, Tensor)
    return total


def sum_of_squares(form: HasRows, centre: Tensor | None) -> Tensor:
    total: Tensor | int = 0
    for _, rows in chunks(form):
        off = rows if centre is None else rows - centre
        total = total + (off.abs() if off.is_complex() else off).square().sum(0)
    assert isinstance(total, Tensor)
    return total


def project(form: HasRows, left: Tensor, right: Tensor) -> Tensor:
    parts = []
    for _, rows in chunks(form):
        matrices = rows.reshape(len(rows), *as_matrix(form.shape))
        parts.append(torch.einsum("boi,ok,ik->bk", matrices, left.to(rows.dtype), right.to(rows.dtype)))
    return torch.cat(parts)


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1)  # flatten(1) would not do for the rows of a scalar


def flat_squared_norms(flat: Tensor) -> Tensor:
    """(b, p) -> (b,). vector_norm makes no temporary of the rows' size, but its gradient at zero would be NaN."""
    if flat.requires_grad:
        return (torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat).square().sum(1)
    return torch.linalg.vector_norm(flat, dim=1).square()


def _real_inner(rows: Tensor, other: Tensor) -> Tensor:
    """rows @ other; for complex numbers the real inner product of their two parts."""
    return (rows @ other.conj().to(rows.dtype)).real if rows.is_complex() else rows @ other.to(rows.dtype)


def _weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return rows.sum(0)
    return (_flat(rows).T @ weights.to(rows.dtype)).view(rows.shape[1:])
