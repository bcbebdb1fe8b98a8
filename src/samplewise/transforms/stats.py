"""Per-sample results that transforms get, with the coefficients of the transforms before.

The results of microbatches are combined by concatenation.
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
    """Per-sample results of B samples, or of B groups. `norms` and `dots` include the coefficients so far."""

    losses: Tensor  # (B,) as returned by the loss function
    counts: Tensor  # (B,) denominator of each sample
    batch: Any = None  # the batch passed to the loss function
    places: Tensor | None = None  # (B,) positions of these samples, or groups, in the window
    raw_norms: PerSample | None = None  # gradient norms before any transform
    raw_dots: Mapping[Any, PerSample] = field(default_factory=dict)  # reference -> dot products before any transform
    coefficients: PerSample | None = None  # product of the coefficients so far; None: 1
    shares: Tensor | None = None  # (B,) terms of the denominator; None: the counts
    columns: dict[str, Tensor] | None = None  # columns returned by the loss function; not used by transforms

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def norms(self) -> Tensor:
        """(B,) gradient norms, times the coefficients so far."""
        scaled = _times(self.raw_norms, self.coefficients)
        if isinstance(scaled, Tensor):
            return scaled.abs()
        return torch.stack(list(scaled.values())).square().sum(0).sqrt()

    @property
    def norms_by_parameter(self) -> dict[str, Tensor]:
        """Parameter name -> (B,) gradient norms, times the coefficients so far."""
        scaled = _times(self.raw_norms, self.coefficients)
        assert isinstance(scaled, dict)
        return {name: norms.abs() for name, norms in scaled.items()}

    def dots(self, reference: object) -> Tensor:
        """(B,) dot products of gradients and reference, times the coefficients so far."""
        scaled = _times(self.raw_dots[reference], self.coefficients)
        return scaled if isinstance(scaled, Tensor) else torch.stack(list(scaled.values())).sum(0)

    @property
    def weights(self) -> Tensor:
        """(B,) coefficients so far. Requires one coefficient per sample, not one per parameter."""
        return torch.ones_like(self.losses) if self.coefficients is None else one_each(self.coefficients)

    @property
    def unscaled_norms(self) -> Tensor | None:
        """(B,) gradient norms before any transform; None if they are not known."""
        return None if self.raw_norms is None else replace(self, coefficients=None).norms

    @property
    def denominators(self) -> Tensor:
        """(B,) terms of the denominator."""
        return self.counts if self.shares is None else self.shares

    def scaled(self, coefficients: PerSample, renormalises: bool) -> Numbers:
        """Results after one more transform. A renormalising transform multiplies the denominators as well."""
        shares = self.denominators * one_each(coefficients) if renormalises else self.shares
        product = coefficients if self.coefficients is None else _times(coefficients, self.coefficients)
        return replace(self, coefficients=product, shares=shares)


def one_each(values: PerSample) -> Tensor:
    """Narrow the type to a tensor (B,): coefficients per parameter cannot occur here."""
    assert isinstance(values, Tensor)
    return values


def joined(parts: Sequence[Numbers]) -> Numbers:
    """Results of all parts, concatenated. Batches are left out: transforms of a whole window do not get them."""
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
    """Table (B, values per sample) in float64, which represents all values exactly, for the exchange between ranks."""
    return torch.stack([column.double() for column in _flat(numbers)], 1)


def from_table(table: Tensor, places: Tensor, like: Numbers) -> Numbers:
    """Inverse of `as_table`: results from a table with the same columns as those of `like`."""
    columns = iter([column.to(mine.dtype) for column, mine in zip(table.unbind(1), _flat(like), strict=True)])

    def filled(values: PerSample | None) -> Any:
        if isinstance(values, dict):
            return {name: next(columns) for name in values}
        return None if values is None else next(columns)

    return Numbers(  # must have the order of `_flat`
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
    columns: list[Tensor] = []
    for values in (*several, *numbers.raw_dots.values()):
        if isinstance(values, dict):
            columns += values.values()
        elif values is not None:
            columns.append(values)
    return columns


def rows_of(values: PerSample, rows: Tensor | slice) -> PerSample:
    return values[rows] if isinstance(values, Tensor) else {name: v[rows] for name, v in values.items()}


def split(found: PerSample, sizes: list[int]) -> list[PerSample]:
    """Split the coefficients of a window into those of its parts."""
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
        raise TransformError(
            "a transform must declare the values it reads; found that it reads norms without needs={'norms'}."
        )
    if factor is None:
        return values
    if isinstance(values, Tensor) and isinstance(factor, Tensor):
        return values * factor
    if isinstance(values, Tensor):
        assert isinstance(factor, dict)
        return {name: values * f for name, f in factor.items()}
    return {name: v * (factor if isinstance(factor, Tensor) else factor[name]) for name, v in values.items()}
