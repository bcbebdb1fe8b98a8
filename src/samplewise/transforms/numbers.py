"""What a transform may see: a few numbers per sample, as the transforms before it left them.

How microbatches combine: every number here is concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from samplewise.errors import TransformError

PerSample = Tensor | dict[str, Tensor]  # (B,), or name of a parameter -> (B,)


@dataclass(frozen=True)
class Numbers:
    """The numbers of some samples. `norms` and `dots` are those of the gradients as scaled so far."""

    losses: Tensor  # as returned by the loss function
    counts: Tensor  # each sample's own denominator
    batch: Any = None  # what the loss function was given
    places: Tensor | None = None  # of these samples, or groups, in the window
    raw_norms: PerSample | None = None
    raw_dots: Mapping[Any, PerSample] = field(default_factory=dict)  # by the reference
    coefficients: PerSample | None = None  # the product so far; None is one
    shares: Tensor | None = None  # each sample's share of the denominator; None is its count
    columns: dict[str, Tensor] | None = None  # what the loss function returned beside; of no interest to transforms

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def norms(self) -> Tensor:
        scaled = _times(self.raw_norms, self.coefficients)
        if isinstance(scaled, Tensor):
            return scaled.abs()
        return torch.stack(list(scaled.values())).square().sum(0).sqrt()

    @property
    def norms_by_parameter(self) -> dict[str, Tensor]:
        scaled = _times(self.raw_norms, self.coefficients)
        assert isinstance(scaled, dict)
        return {name: norms.abs() for name, norms in scaled.items()}

    def dots(self, reference: object) -> Tensor:
        scaled = _times(self.raw_dots[reference], self.coefficients)
        return scaled if isinstance(scaled, Tensor) else torch.stack(list(scaled.values())).sum(0)

    @property
    def weights(self) -> Tensor:
        """The coefficients, where there is one for all parameters."""
        return torch.ones_like(self.losses) if self.coefficients is None else one_each(self.coefficients)

    @property
    def unscaled_norms(self) -> Tensor | None:
        return None if self.raw_norms is None else replace(self, coefficients=None).norms

    @property
    def denominators(self) -> Tensor:
        return self.counts if self.shares is None else self.shares

    def scaled(self, coefficients: PerSample, renormalises: bool) -> Numbers:
        """After one more transform. One that renormalises takes its coefficients into the denominator as well."""
        shares = self.denominators * one_each(coefficients) if renormalises else self.shares
        product = coefficients if self.coefficients is None else _times(coefficients, self.coefficients)
        return replace(self, coefficients=product, shares=shares)


def one_each(values: PerSample) -> Tensor:
    """Where a dict by parameter cannot be."""
    assert isinstance(values, Tensor)
    return values


def joined(parts: Sequence[Numbers]) -> Numbers:
    """The numbers of all samples of a window. Batches stay behind: transforms of a window see numbers alone."""
    if len(parts) == 1:
        return parts[0]
    return Numbers(
        losses=torch.cat([p.losses for p in parts]),
        counts=torch.cat([p.counts for p in parts]),
        places=None if parts[0].places is None else torch.cat([p.places for p in parts if p.places is not None]),
        raw_norms=None if parts[0].raw_norms is None else together([p.raw_norms for p in parts]),
        raw_dots={r: together([p.raw_dots[r] for p in parts]) for r in parts[0].raw_dots},
        coefficients=None if parts[0].coefficients is None else together([p.coefficients for p in parts]),
        shares=torch.cat([p.denominators for p in parts]),
        columns=_columns(parts),
    )


def as_table(numbers: Numbers) -> Tensor:
    """(B, numbers of a sample) in float64, which holds them all: what ranks tell each other."""
    return torch.stack([column.double() for column in _flat(numbers)], 1)


def from_table(table: Tensor, places: Tensor, like: Numbers) -> Numbers:
    """The numbers of other samples, from a table of the same columns."""
    columns = iter([column.to(mine.dtype) for column, mine in zip(table.unbind(1), _flat(like), strict=True)])

    def filled(values: PerSample | None) -> Any:
        if isinstance(values, dict):
            return {name: next(columns) for name in values}
        return None if values is None else next(columns)

    return Numbers(  # in the order of `_flat`
        losses=filled(like.losses),
        counts=filled(like.counts),
        raw_norms=filled(like.raw_norms),
        coefficients=filled(like.coefficients),
        shares=filled(like.shares),
        raw_dots={reference: filled(dots) for reference, dots in like.raw_dots.items()},
        places=places,
    )


def _flat(numbers: Numbers) -> list[Tensor]:
    several = numbers.losses, numbers.counts, numbers.raw_norms, numbers.coefficients, numbers.shares
    known = [values for values in (*several, *numbers.raw_dots.values()) if values is not None]
    return [column for values in known for column in (values.values() if isinstance(values, dict) else [values])]


def rows_of(values: PerSample, rows: Tensor | slice) -> PerSample:
    return values[rows] if isinstance(values, Tensor) else {name: v[rows] for name, v in values.items()}


def split(found: PerSample, sizes: list[int]) -> list[PerSample]:
    """One answer for a window as the answers for its parts."""
    if isinstance(found, Tensor):
        return list(found.split(sizes))
    pieces = {name: values.split(sizes) for name, values in found.items()}
    return [{name: values[k] for name, values in pieces.items()} for k in range(len(sizes))]


def together(values: Sequence[Any]) -> PerSample:
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))
    return {name: torch.cat([v[name] for v in values]) for name in values[0]}


def _columns(parts: Sequence[Numbers]) -> dict[str, Tensor] | None:
    found = [p.columns for p in parts if p.columns is not None]
    return {name: torch.cat([columns[name] for columns in found]) for name in found[0]} if found else None


def _times(values: PerSample | None, factor: PerSample | None) -> PerSample:
    if values is None:
        raise TransformError("a transform must declare the numbers it needs; found that it reads norms without.")
    if factor is None:
        return values
    if isinstance(values, Tensor) and isinstance(factor, Tensor):
        return values * factor
    if isinstance(values, Tensor):
        assert isinstance(factor, dict)
        return {name: values * f for name, f in factor.items()}
    return {name: v * (factor if isinstance(factor, Tensor) else factor[name]) for name, v in values.items()}
