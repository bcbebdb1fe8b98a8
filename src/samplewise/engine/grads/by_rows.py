"""Quantities of per-sample gradients computed from their rows, a few samples at a time.

The first argument is the representation (see `base`), so that a class can use these functions as methods.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

# Rows are computed in chunks of about this many elements: small enough for the allocator to reuse the same memory (new
# pages cost more than the arithmetic), large enough that the overhead of calls is negligible.
CHUNK = 2**21
# Chunk size for Gram matrices, which need all pairs of samples: larger chunks mean fewer recomputations.
GRAM_CHUNK = 2**25


class HasRows(Protocol):
    """Part of `PerSampleGrad` that the functions below need."""

    samples: int
    shape: tuple[int, ...]

    @property
    def row_size(self) -> int: ...

    @property
    def step(self) -> int: ...

    def rows(self, start: int, stop: int) -> Tensor: ...


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Matrix shape (first dim, rest) of a parameter; vectors and scalars have one column."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def chunks(grad: HasRows, size: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield (slice of samples, rows) in chunks of `size` samples; default `grad.step`."""
    step = size or grad.step
    for start in range(0, grad.samples, step):
        part = slice(start, min(start + step, grad.samples))
        yield part, grad.rows(part.start, part.stop)


def squared_norms(grad: HasRows) -> Tensor:
    return torch.cat([flat_squared_norms(_flat(rows)) for _, rows in chunks(grad)])


def underflowed_norms(grad: HasRows, samples: Tensor) -> Tensor:
    """Norms (len(samples),) in float64 of the given samples, whose numbers must ascend."""
    # The chunks are the same for all parameters, because some parameters share cached rows.
    norms = []
    for start in range(0, grad.samples, grad.step):
        in_chunk = samples[(samples >= start) & (samples < start + grad.step)]
        if len(in_chunk):
            first, last = int(in_chunk[0]), int(in_chunk[-1])
            norms.append(scaled_norms(_wide(_flat(grad.rows(first, last + 1))))[in_chunk - first])
    return torch.cat(norms)


def all_scaled_norms(grad: HasRows) -> Tensor:
    """Norms (b,) of all samples, in the dtype of the rows."""
    return torch.cat([scaled_norms(_flat(rows)) for _, rows in chunks(grad)])


def scaled_norms(flat: Tensor) -> Tensor:
    """Norms of rows, (b, p) -> (b,). Rows are scaled first, so that squares cannot under- or overflow."""
    if not flat.shape[1]:
        return flat.real.sum(1) if flat.is_complex() else flat.sum(1)
    real = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
    largest = real.detach().abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1)
    return scale[:, 0] * root(flat_squared_norms(real / scale))


def _wide(flat: Tensor) -> Tensor:
    """Rows in float64, or complex128."""
    return flat.to(torch.complex128 if flat.is_complex() else torch.float64)


def root(squared: Tensor) -> Tensor:
    """Square root with gradient zero at zero, where the true gradient is undefined."""
    if not squared.requires_grad:
        return squared.sqrt()
    zero = squared == 0
    return torch.where(zero, 0, torch.where(zero, 1, squared).sqrt())


def dot(grad: HasRows, direction: Tensor) -> Tensor:
    flat = direction.reshape(-1)
    return torch.cat([_real_inner(_flat(rows), flat) for _, rows in chunks(grad)])


def paired_dot(grad: HasRows, other: HasRows) -> Tensor:
    parts = []
    step = min(grad.step, other.step)
    for part, rows in chunks(grad, step):
        flat, other_flat = _flat(rows), _flat(other.rows(part.start, part.stop))
        wide = torch.promote_types(flat.dtype, other_flat.dtype)
        parts.append(_paired_inner(flat.to(wide), other_flat.to(wide)))
    return torch.cat(parts)


def gram(grad: HasRows, other: HasRows) -> Tensor:
    step = max(1, GRAM_CHUNK // max(grad.row_size, 1))
    return torch.cat([_gram_columns(_flat(rows), other, step) for _, rows in chunks(grad, step)])


def _gram_columns(rows: Tensor, other: HasRows, step: int) -> Tensor:
    return torch.cat([_real_inner(rows, _flat(more).T) for _, more in chunks(other, step)], dim=1)


def sum(grad: HasRows, weights: Tensor | None) -> Tensor:
    total: Tensor | None = None
    for part, rows in chunks(grad):
        column = rows.new_ones(len(rows)) if weights is None else weights[part].to(rows.dtype)
        flat = _flat(rows).T
        total = flat @ column if total is None else total.addmv_(flat, column)
    assert total is not None
    return total.view(grad.shape)


def sum_of_squares(grad: HasRows, center: Tensor | None) -> Tensor:
    total: Tensor | int = 0
    for _, rows in chunks(grad):
        off = rows if center is None else rows - center
        total = total + (off.abs() if off.is_complex() else off).square().sum(0)
    assert isinstance(total, Tensor)
    return total


def project(grad: HasRows, left: Tensor, right: Tensor, scale: Tensor | None = None) -> Tensor:
    """As `PerSampleGrad.project`; rows are multiplied by `scale`, of the parameter's shape, if it is not None."""
    return torch.cat(
        [_project_rows(grad, rows if scale is None else rows * scale, left, right) for _, rows in chunks(grad)]
    )


def _project_rows(grad: HasRows, rows: Tensor, left: Tensor, right: Tensor) -> Tensor:
    left, right = left.to(rows.dtype), right.to(rows.dtype)
    o, i = as_matrix(grad.shape)
    if i == 1:
        return _flat(rows) @ (left * right)
    return torch.einsum("boi,ok,ik->bk", rows.reshape(len(rows), o, i), left, right)


def random_signs(name: str, shape: tuple[int, ...], dim: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random signs (o, dim) and (i, dim) to project a parameter viewed as an o x i matrix, from its name and a seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
    o, i = as_matrix(shape)
    signs = torch.randint(0, 2, (o + i, dim), generator=generator, dtype=torch.int8) * 2 - 1
    left, right = signs.to(device).split([o, i])
    return left, (right if i > 1 else torch.ones_like(right))


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(len(rows), -1)  # flatten(1) fails for the rows of a scalar


def flat_squared_norms(flat: Tensor) -> Tensor:
    """Squared norms of rows, (b, p) -> (b,)."""
    # vector_norm needs no temporary of the rows' size, but its gradient at zero is NaN.
    if flat.requires_grad:
        return (torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat).square().sum(1)
    return torch.linalg.vector_norm(flat, dim=1).square()


def frobenius_norms(factor: Tensor) -> Tensor:
    """Norm of the factor (b, ...) of each sample, (b,). The product of those of two factors is at least the sum of the
    norms of their outer products.
    """
    return torch.linalg.vector_norm(factor, dim=tuple(range(1, factor.dim())))


def _real_inner(rows: Tensor, other: Tensor) -> Tensor:
    """Product rows @ other; for complex numbers the real part of rows @ conj(other)."""
    if rows.is_complex():
        return (rows @ other.conj().to(rows.dtype)).real
    return rows @ other.to(rows.dtype)


def _paired_inner(rows: Tensor, other: Tensor) -> Tensor:
    """Inner product of row b of both matrices, (b,); for complex numbers the real part."""
    products = (rows * other.conj()).sum(1)
    return products.real if products.is_complex() else products


def weighted_sum(rows: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over b of weights[b] times row b; None means weights of one."""
    if weights is None:
        return rows.sum(0)
    flat = rows if rows.dim() == 2 else rows.reshape(rows.shape[0], -1)
    column = weights if weights.dtype is rows.dtype else weights.to(rows.dtype)
    total = torch.mv(flat.t(), column)
    return total if rows.dim() == 2 else total.view(rows.shape[1:])
