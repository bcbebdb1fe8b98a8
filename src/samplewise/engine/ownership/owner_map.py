"""Owner maps: the sample that owns each element of a gradient, and conversion of rows to sample-major order.

A gradient is *clean* if each of its elements belongs to at most one sample. Its owner map is one of

    Regular(inner)     element f, counted in row-major order, belongs to sample (f // inner) % samples
    Irregular(owner)   tensor of owners; -1 if the element is zero and has no owner

`Regular` is unchanged by views: one integer describes the layouts "dim k is B", "dim k is B x r" and "dim k is r x B".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.graph.graph import Edge, numel
from samplewise.engine.ownership.layouts import MOST_PLACES, RowOwners, SampleDim, inner_at, locate


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

    slots: Tensor  # (samples, tokens): row numbers; `rows` marks padding
    rows: int  # total number of rows

    def gather(self, x: Tensor) -> Tensor:
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])]) if self._has_padding else x
        # A quarter of the time of padded[self.slots].
        return padded.index_select(0, self.slots.flatten()).view(*self.slots.shape, *x.shape[1:])

    @cached_property
    def _has_padding(self) -> bool:
        return self.slots.numel() == 0 or bool(self.slots.amax() == self.rows)


# Assignment of rows to samples; converts (rows, *features) to (samples, tokens, *features), padded with zeros.
RowGather = RegularGather | RaggedGather


@dataclass(frozen=True)
class Regular:
    """Owner map of a regular layout: element f in row-major order belongs to sample (f // inner) % samples."""

    samples: int
    inner: int

    def rows(self, shape: tuple[int, ...], row_dims: int) -> RowGather | None:
        """Assignment of rows (the first `row_dims` dims of `shape`) to samples; None if samples share a row."""
        count, width = numel(shape[:row_dims]), numel(shape[row_dims:])
        if self.inner % width:
            return None
        inner = self.inner // width
        return RegularGather(self.samples, count // (self.samples * inner), inner)

    def split_samples(self, gradient: Tensor, samples: range) -> Tensor:
        """Copies (n, ...) of the gradient for n samples, in each of which the elements of other samples are zero."""
        blocks = gradient.reshape(-1, self.samples, self.inner)
        copies = blocks.new_zeros(len(samples), *blocks.shape)
        number = torch.arange(len(samples), device=gradient.device)
        copies[number, :, number + samples.start] = blocks[:, samples.start : samples.stop].transpose(0, 1)
        return copies.view(len(samples), *gradient.shape)

    def apply_weights(self, gradient: Tensor, weights: Tensor) -> Tensor:
        """The gradient, with the elements of each sample multiplied by its weight (b,)."""
        if not gradient.numel():
            return gradient
        blocks = gradient.reshape(-1, self.samples, self.inner) * weights.to(gradient.dtype)[:, None]
        return blocks.view(gradient.shape)

    def sizes(self, gradient: Tensor) -> Tensor:
        """Sum of the absolute values of each sample's elements, (b,) in float64."""
        if not gradient.numel():
            return torch.zeros(self.samples, dtype=torch.float64, device=gradient.device)
        blocks = gradient.reshape(-1, self.samples, self.inner)
        wide = torch.complex128 if gradient.is_complex() else torch.float64
        return torch.linalg.vector_norm(blocks, 1, (0, 2), dtype=wide)

    def owners(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """Owner of each element of a gradient of this shape."""
        return _regular_owners(numel(shape), self.inner, self.samples, device).view(shape)

    def __str__(self) -> str:
        return "regular"


@dataclass(frozen=True, eq=False)  # compared by identity
class Irregular:
    """Owner map of any other layout: `owner` has the gradient's shape and has sample numbers, negative for none."""

    samples: int
    owner: Tensor

    def rows(self, shape: tuple[int, ...], row_dims: int) -> RowGather | None:
        if self.place is not None and self.place.dim < row_dims and tuple(self.owner.shape) == shape:
            before = numel(shape[: self.place.dim])
            after = numel(shape[self.place.dim + 1 : row_dims])
            owners = self._row_owners.repeat(after, before)
            if self.samples not in owners.derived:
                owners.derived[self.samples] = ragged_gather(owners.owner, self.samples)
            gather: RaggedGather = owners.derived[self.samples]
            return gather
        owner = self.owner.reshape(numel(shape[:row_dims]), numel(shape[row_dims:]))
        of_row = owner.amax(1)
        if not ((owner == of_row[:, None]) | (owner < 0)).all():
            return None
        return ragged_gather(of_row, self.samples)

    @cached_property
    def place(self) -> SampleDim | None:
        """The dimension whose entries have one owner each, with these owners; None if there is none."""
        owner = self.owner
        if not owner.numel():
            return None
        different = distinct(owner)
        for dim in range(owner.dim()):
            other_dims = [d for d in range(owner.dim()) if d != dim and different.shape[d] > 1]
            rows = different.amax(other_dims, keepdim=True) if other_dims else different
            if not other_dims or ((different == rows) | (different < 0)).all():
                return SampleDim(dim, RowOwners(rows.flatten().expand(owner.shape[dim])))
        return None

    @property
    def _row_owners(self) -> RowOwners:
        assert self.place is not None
        assert isinstance(self.place.post, RowOwners)
        return self.place.post

    @property
    def sole(self) -> int | None:
        """The sample that all elements belong to; None if there are several."""
        return None if self.place is None else self._row_owners.sole

    def is_as(self, other: OwnerMap | None) -> bool:
        """True for an owner map of the same shape with the same owners in the same dimension."""
        return isinstance(other, Irregular) and self.place is not None and self.place == other.place

    def view_as(self, shape: tuple[int, ...]) -> Irregular:
        """Owner map of the gradient viewed in another shape."""
        if self.place is not None:
            rows = self._row_owners
            count = len(rows.owner)
            below = numel(tuple(self.owner.shape[self.place.dim + 1 :]))
            stride = 1
            for dim in range(len(shape) - 1, -1, -1):
                # The entries of the new dimension run through all rows, with a whole number of them per old entry.
                if below % stride == 0 and (times := stride * shape[dim] / (below * count)) >= 1 and times % 1 == 0:
                    place = SampleDim(dim, rows.repeat(below // stride, int(times)))
                    owner_map = owner_map_at(place, shape, self.samples)
                    assert isinstance(owner_map, Irregular)
                    return owner_map
                stride *= shape[dim]
        return Irregular(self.samples, self.owner.reshape(shape))

    def split_samples(self, gradient: Tensor, samples: range) -> Tensor:
        number = torch.arange(samples.start, samples.stop, device=gradient.device)
        return torch.where(self.owner == number.view(-1, *(1,) * gradient.dim()), gradient, 0)

    def apply_weights(self, gradient: Tensor, weights: Tensor) -> Tensor:
        if self.place is None:
            return gradient * weights.to(gradient.dtype)[self.owner.clamp_min(0)]
        rows = weights.to(gradient.dtype)[self._row_owners.owner.clamp_min(0)]
        return gradient * rows.view(-1, *(1,) * (gradient.dim() - self.place.dim - 1))

    def sizes(self, gradient: Tensor) -> Tensor:
        values = gradient.abs().double()
        owner = self.owner
        if self.place is not None:
            values = values.movedim(self.place.dim, 0).flatten(1).sum(1) if values.dim() > 1 else values
            owner = self._row_owners.owner
        totals = torch.zeros(self.samples + 1, dtype=torch.float64, device=gradient.device)
        index = torch.where(owner >= 0, owner, self.samples).flatten()
        return totals.index_add_(0, index, values.flatten())[: self.samples]

    def owners(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        return self.owner

    def __str__(self) -> str:
        return "irregular"


OwnerMap = Regular | Irregular


def ragged_gather(owner: Tensor, samples: int) -> RaggedGather:
    """Assignment of rows from the owner of each."""
    rows = len(owner)
    order = torch.argsort(owner, stable=True)
    order = order[owner[order] >= 0]
    owned = owner[order]
    counts = torch.bincount(owned, minlength=samples)
    tokens = max(int(counts.max()), 1)
    column = torch.arange(len(owned), device=owner.device) - (counts.cumsum(0) - counts)[owned]
    slots = torch.full((samples, tokens), rows, dtype=torch.long, device=owner.device)
    slots[owned, column] = order
    return RaggedGather(slots, rows)


def regular_inner(owner: Tensor, samples: int) -> int | None:
    """`inner` of a regular layout that agrees with the owner of each owned element; None if there is none, or if there
    are several because too few elements are owned to decide.
    """
    flat = owner.reshape(-1)
    candidates: dict[int, None] = {}
    stride = 1
    for size in reversed(owner.shape):
        if size % samples == 0:  # samples change fastest in this dimension, or slowest
            candidates.update(dict.fromkeys((stride, stride * (size // samples))))
        stride *= size
    if not candidates:
        return None
    free = flat < 0  # zeros: any layout fits them
    inners = [
        inner
        for inner in candidates
        if ((_regular_owners(len(flat), inner, samples, flat.device) == flat) | free).all()
    ]
    return inners[0] if len(inners) == 1 or (inners and not free.any()) else None


MOST_REPEATED = 2**16  # elements of a layout whose owners are kept
MOST_LAYOUTS = 64
_repeated: dict[tuple[int, int, int, torch.device], Tensor] = {}  # never changed in place


def _regular_owners(count: int, inner: int, samples: int, device: torch.device) -> Tensor:
    """Owner of each of `count` elements of a regular layout."""
    key = (count, inner, samples, device)
    owner = _repeated.get(key)
    if owner is None:
        owner = torch.arange(count, device=device) // inner % samples
        if count <= MOST_REPEATED and not (is_traced(owner) or owner.is_inference()):
            if len(_repeated) >= MOST_LAYOUTS:
                _repeated.clear()
            _repeated[key] = owner
    return owner


def owner_map_of(owner: Tensor, samples: int, exact: bool = False) -> OwnerMap:
    """Owner map for a tensor of owners: Regular if possible, else Irregular. Elements without owner get the one of a
    regular layout if there is one that fits the others; with exact=True they stay without owner.
    """
    if not owner.numel():
        return Irregular(samples, owner)
    # All features of a row usually have one owner: one element of each row decides the rest.
    rows = owner
    width = 1
    while rows.dim() > 1:
        first = rows[..., 0]
        if rows.stride(-1) != 0 and rows.shape[-1] > 1:
            first = rows.amax(-1)
            if not ((rows == first[..., None]) | (rows < 0)).all() or (exact and (rows != first[..., None]).any()):
                break
        width *= rows.shape[-1]
        rows = first
    inner = None if exact and (rows < 0).any() else regular_inner(rows, samples)
    if inner is not None:
        return Regular(samples, inner * width)
    shape = tuple(owner.shape)
    owner_map = Irregular(samples, rows.view((*rows.shape, *(1,) * (len(shape) - rows.dim()))).expand(shape))
    return owner_map if owner_map.place is None else owner_map_at(owner_map.place, shape, samples) or owner_map


def owner_map_at(place: SampleDim, shape: tuple[int, ...], samples: int) -> OwnerMap | None:
    """Owner map of a gradient of this shape with the samples at this place; None if the place does not fit."""
    if isinstance(place.post, int):
        return _regular_at(place, shape, samples)
    owner = place.post.owner
    if not 0 <= place.dim < len(shape) or shape[place.dim] != len(owner):
        return None
    owner_map = Irregular(samples, along(place.dim, owner, shape))
    owner_map.__dict__["place"] = place  # known already
    return owner_map


@lru_cache(MOST_PLACES)
def _regular_at(place: SampleDim, shape: tuple[int, ...], samples: int) -> Regular | None:
    inner = inner_at(place, shape, samples)
    return None if inner is None else Regular(samples, inner)


def single_owner(sample: int, edge: Edge, samples: int) -> Irregular:
    """Owner map of a gradient that belongs to one sample, or to none if the number is negative: it is zero."""
    return Irregular(samples, torch.tensor(sample, device=edge.device).expand(edge.shape))


def merge_owners(first: OwnerMap | None, second: OwnerMap | None, shape: tuple[int, ...]) -> OwnerMap | None:
    """Owner map of the sum of two gradients of this shape; None if they have no common one."""
    if first is second or first == second or (isinstance(first, Irregular) and first.is_as(second)):
        return first
    irregular = [owner_map for owner_map in (first, second) if isinstance(owner_map, Irregular)]
    if first is None or second is None or not irregular:
        return None
    regular = next((owner_map for owner_map in (first, second) if isinstance(owner_map, Regular)), None)
    device = irregular[0].owner.device
    a, b = rows_of(first, shape, device), rows_of(second, shape, device)
    if a is not None and b is not None and a[0] == b[0]:  # entries of one dimension
        owner = _join_owners(a[1], b[1])
        for owner_map, rows in ((first, a[1]), (second, b[1])):
            if owner is not None and regular is None and torch.equal(owner, rows):  # the other one has no more owners
                return owner_map
        if owner is not None:
            return regular or owner_map_of(along(a[0], owner, shape), first.samples, exact=True)
    owner = _join_owners(first.owners(shape, device), second.owners(shape, device))
    return None if owner is None else regular or Irregular(first.samples, owner)


def _join_owners(a: Tensor, b: Tensor) -> Tensor | None:
    """Owners where either has one; None if two differ."""
    if torch.equal(a, b):
        return a
    return torch.where(a < 0, b, a) if ((a == b) | (a < 0) | (b < 0)).all() else None


def rows_of(owner_map: OwnerMap, shape: tuple[int, ...], device: torch.device) -> tuple[int, Tensor] | None:
    """The dimension of a gradient of this shape whose entries have one owner each, and these owners; None if there is
    none.
    """
    place = locate(owner_map.inner, shape, owner_map.samples) if isinstance(owner_map, Regular) else owner_map.place
    if place is None:
        return None
    if isinstance(place.post, RowOwners):
        return place.dim, place.post.owner
    return place.dim, _regular_owners(shape[place.dim], place.post, owner_map.samples, device)


def allows(owner_map: OwnerMap, owner: Tensor) -> Tensor:
    """Flag: a gradient with these owners of its elements, negative for no owner, has this owner map."""
    shape = tuple(owner.shape)
    rows = rows_of(owner_map, shape, owner.device)
    expected = distinct(owner_map.owners(shape, owner.device) if rows is None else along(*rows, shape))
    owner = distinct(owner)
    return ((owner == expected) | (owner == -1)).all()


def along(dim: int, owner: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Owners of all elements of a tensor of this shape, from those of the entries of a dimension; a view."""
    return owner.view(-1, *(1,) * (len(shape) - dim - 1)).expand(shape)


def distinct(owner: Tensor) -> Tensor:
    """One element along each dimension of stride 0: the others have the same owner."""
    return owner[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in owner.stride())]


def sole_owner(owner_map: OwnerMap) -> int | None:
    """The sample that the whole gradient belongs to; None if there are several."""
    return owner_map.sole if isinstance(owner_map, Irregular) else None


def permute(owner_map: OwnerMap, shape: tuple[int, ...], dims: tuple[int, ...]) -> OwnerMap | None:
    """Owner map of gradient.permute(dims), for a gradient of this shape; None if it is not known."""
    if isinstance(owner_map, Irregular):
        return Irregular(owner_map.samples, owner_map.owner.permute(dims))
    place = locate(owner_map.inner, shape, owner_map.samples)
    if place is None:
        return None
    inner = inner_at(SampleDim(dims.index(place.dim), place.post), tuple(shape[d] for d in dims), owner_map.samples)
    return None if inner is None else Regular(owner_map.samples, inner)


def sequences_of(owner_map: OwnerMap, shape: tuple[int, ...]) -> RowGather | None:
    """Assignment of the n sequences of a gradient (t, n, h) to samples; None if samples share a sequence."""
    turned = permute(owner_map, shape, (1, 0, 2))
    return None if turned is None else turned.rows((shape[1], shape[0], shape[2]), 1)
