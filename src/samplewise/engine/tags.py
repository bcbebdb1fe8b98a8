"""Tags: the sample that owns each element of a gradient, and conversion of rows to sample-major order.

A gradient is *clean* if each of its elements belongs to at most one sample. Its tag is one of

    Regular(inner)     element f, counted in row-major order, belongs to sample (f // inner) % samples
    Irregular(owner)   tensor of owners; -1 if the element is zero and has no owner

`Regular` is unchanged by views: one integer describes the layouts "dim k is B", "dim k is B x r" and "dim k is r x B".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from samplewise.engine.graph import numel
from samplewise.engine.layouts import SampleDim, inner_at, locate


class RowGather(Protocol):
    """Assignment of rows to samples; converts (rows, *features) to (samples, tokens, *features), padded with zeros."""

    def gather(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class RegularGather:
    """Rows in the order (outer, samples, inner)."""

    samples: int
    outer: int
    inner: int

    def gather(self, x: Tensor) -> Tensor:
        features = x.shape[1:]
        if self.outer == 1:
            return x.reshape(self.samples, self.inner, *features)
        blocks = x.reshape(self.outer, self.samples, self.inner, *features)
        return blocks.transpose(0, 1).reshape(self.samples, self.outer * self.inner, *features)


@dataclass(frozen=True)
class RaggedGather:
    """Rows in any order, with any number of rows per sample."""

    slots: Tensor  # (samples, tokens): row numbers; the total number of rows marks padding

    def gather(self, x: Tensor) -> Tensor:
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded[self.slots]


@dataclass(frozen=True)
class Regular:
    """Tag of a regular layout: element f in row-major order belongs to sample (f // inner) % samples."""

    samples: int
    inner: int

    def rows(self, shape: tuple[int, ...], row_dims: int) -> RowGather | None:
        """Assignment of rows (the first `row_dims` dims of `shape`) to samples; None if samples share a row."""
        count, width = numel(shape[:row_dims]), numel(shape[row_dims:])
        if self.inner % width:
            return None
        inner = self.inner // width
        return RegularGather(self.samples, count // (self.samples * inner), inner)

    def only(self, gradient: Tensor, sample: int) -> Tensor:
        """Copy of the gradient with all elements of other samples set to zero."""
        part = torch.zeros_like(gradient, memory_format=torch.contiguous_format)
        block = (-1, self.samples, self.inner)
        part.view(block)[:, sample] = gradient.reshape(block)[:, sample]
        return part

    def __str__(self) -> str:
        return "regular"


@dataclass(frozen=True)
class Irregular:
    """Tag of any other layout: `owner` has the gradient's shape and contains sample numbers, negative for no owner."""

    samples: int
    owner: Tensor

    def rows(self, shape: tuple[int, ...], row_dims: int) -> RowGather | None:
        owner = self.owner.reshape(numel(shape[:row_dims]), numel(shape[row_dims:]))
        of_row = owner.amax(1)
        if not ((owner == of_row[:, None]) | (owner < 0)).all():
            return None
        return RaggedGather(_slots(of_row, self.samples))

    def only(self, gradient: Tensor, sample: int) -> Tensor:
        return torch.where(self.owner == sample, gradient, 0)

    def __str__(self) -> str:
        return "irregular"


Tag = Regular | Irregular


def _slots(owner: Tensor, samples: int) -> Tensor:
    """Slots (samples, tokens) of RaggedGather, from the owner of each row."""
    rows = len(owner)
    order = torch.argsort(owner, stable=True)
    order = order[owner[order] >= 0]
    owned = owner[order]
    counts = torch.bincount(owned, minlength=samples)
    tokens = max(int(counts.max()), 1)
    column = torch.arange(len(owned), device=owner.device) - (counts.cumsum(0) - counts)[owned]
    slots = torch.full((samples, tokens), rows, dtype=torch.long, device=owner.device)
    slots[owned, column] = order
    return slots


def regular_inner(owner: Tensor, samples: int) -> int | None:
    """`inner` of a regular layout that agrees with the owner of each owned element; None if there is none."""
    flat = owner.reshape(-1)
    free = flat < 0
    positions = torch.arange(flat.numel(), device=owner.device)
    stride = 1
    for size in reversed(owner.shape):
        if size % samples == 0:
            for inner in {stride, stride * (size // samples)}:
                if ((positions // inner % samples == flat) | free).all():
                    return inner
        stride *= size
    return None


def tag_of(owner: Tensor, samples: int) -> Tag:
    """Tag for a tensor of owners: Regular if possible, else Irregular."""
    inner = regular_inner(owner, samples) if owner.numel() else None
    return Irregular(samples, owner) if inner is None else Regular(samples, inner)


def permuted(tag: Tag, shape: tuple[int, ...], dims: tuple[int, ...]) -> Tag | None:
    """Tag of gradient.permute(dims), for a gradient of this shape; None if it is not known."""
    if isinstance(tag, Irregular):
        return Irregular(tag.samples, tag.owner.permute(dims))
    place = locate(tag.inner, shape, tag.samples)
    if place is None:
        return None
    inner = inner_at(SampleDim(dims.index(place.dim), place.post), tuple(shape[d] for d in dims), tag.samples)
    return None if inner is None else Regular(tag.samples, inner)


def sequences_of(tag: Tag, shape: tuple[int, ...]) -> RowGather | None:
    """Assignment of the n sequences of a gradient (t, n, h) to samples; None if samples share a sequence."""
    turned = permuted(tag, shape, (1, 0, 2))
    return None if turned is None else turned.rows((shape[1], shape[0], shape[2]), 1)
