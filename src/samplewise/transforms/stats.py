"""Per-sample results: what transforms read, what an update reports.

The results of microbatches are combined by concatenation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import take
from samplewise.errors import TransformError

PerSample = Tensor | dict[str, Tensor]  # (B,), or name of a parameter -> (B,)
UNKNOWN = -1  # in `SampleStats.dropped`


@dataclass(slots=True, eq=False)
class SampleStats:
    """Per-sample results of B samples, or of B groups of samples. Transforms get one and return coefficients (B,);
    `norms` and `dots` include the coefficients of the transforms before.
    """

    losses: Tensor  # (B,) as returned by the loss function
    counts: Tensor | None = None  # (B,) denominator of each sample; None: 1 for each
    batch: Any = None  # the batch passed to the loss function
    positions: Tensor | None = None  # (B,) positions of these samples, or groups, in the window
    raw_norms: PerSample | None = None  # gradient norms before any transform
    raw_dots: Mapping[Any, PerSample] = field(default_factory=dict)  # reference -> dot products before any transform
    coefficients: PerSample | None = None  # product of the coefficients so far; None: 1
    shares: Tensor | None = None  # (B,) terms of the denominator; None: the counts
    columns: dict[str, Tensor] | None = None  # columns returned by the loss function; not used by transforms
    # (B,) samples that a transform with `drops` leaves out: 0 for the others, 1 + index of the trained parameter with
    # the largest gradient, or UNKNOWN; None: no sample
    dropped: Tensor | None = None
    _count_sum: Tensor | None = field(init=False, default=None, repr=False)

    def __len__(self) -> int:
        return self.losses.shape[0]

    @property
    def norms(self) -> Tensor:
        """(B,) gradient norms, times the coefficients so far."""
        if self.coefficients is None and isinstance(self.raw_norms, Tensor):
            return self.raw_norms
        norms = _over_parameters(_times(self.raw_norms, self.coefficients))
        return norms if self.coefficients is None else norms.abs()

    @property
    def norms_by_parameter(self) -> dict[str, Tensor]:
        """Parameter name -> (B,) gradient norms, times the coefficients so far."""
        scaled = _times(self.raw_norms, self.coefficients)
        assert isinstance(scaled, dict)
        return {name: norms.abs() for name, norms in scaled.items()}

    @property
    def unscaled_norms(self) -> Tensor | None:
        """(B,) gradient norms before any transform; None if they are not known."""
        return None if self.raw_norms is None else _over_parameters(self.raw_norms)

    def dots(self, reference: object) -> Tensor:
        """(B,) dot products of gradients and reference, times the coefficients so far."""
        scaled = _times(self.raw_dots[reference], self.coefficients)
        return scaled if isinstance(scaled, Tensor) else torch.stack(list(scaled.values())).sum(0)

    @property
    def weights(self) -> Tensor:
        """(B,) coefficients so far. Requires one coefficient per sample, not one per parameter."""
        return torch.ones_like(self.losses) if self.coefficients is None else one_per_sample(self.coefficients)

    @property
    def denominators(self) -> Tensor:
        """(B,) terms of the denominator."""
        if self.shares is not None:
            return self.shares
        return torch.ones_like(self.losses) if self.counts is None else self.counts

    @property
    def kept_losses(self) -> Tensor:
        """(B,) losses, 0 for dropped samples."""
        return self.losses if self.dropped is None else self.losses.masked_fill(self.dropped != 0, 0)

    @property
    def count_sum(self) -> Tensor | int:
        """Σ counts without dropped samples, computed once."""
        if self.counts is None:
            return self.losses.shape[0] if self.dropped is None else int((self.dropped == 0).sum())
        if self._count_sum is None:
            counts = self.counts if self.dropped is None else self.counts.masked_fill(self.dropped != 0, 0)
            self._count_sum = counts.sum()
        return self._count_sum

    def scaled(self, coefficients: PerSample, renormalizes: bool, drops: bool = False) -> SampleStats:
        """Results after one more transform. A renormalizing transform multiplies the denominators as well; one that
        drops samples leaves those with the coefficient 0 out of the denominator.
        """
        shares = self.denominators * one_per_sample(coefficients) if renormalizes else self.shares
        dropped = self.dropped
        if drops and not one_per_sample(coefficients).all():
            zero = one_per_sample(coefficients) == 0
            shares = self.denominators.masked_fill(zero, 0)
            dropped = torch.where(zero, UNKNOWN, 0)
        product = coefficients if self.coefficients is None else _times(coefficients, self.coefficients)
        return SampleStats(
            losses=self.losses,
            counts=self.counts,
            batch=self.batch,
            positions=self.positions,
            raw_norms=self.raw_norms,
            raw_dots=self.raw_dots,
            coefficients=product,
            shares=shares,
            columns=self.columns,
            dropped=dropped,
        )

    def take(self, rows: list[int]) -> SampleStats:
        """Results of these samples. The batch must be sliceable."""
        index = torch.tensor(rows)

        def select(values: Any) -> Any:
            return None if values is None else rows_of(values, index)

        return replace(
            self,
            losses=self.losses[index],
            counts=select(self.counts),
            batch=None if self.batch is None else take(self.batch, rows),
            positions=select(self.positions),
            raw_norms=select(self.raw_norms),
            raw_dots={reference: select(dots) for reference, dots in self.raw_dots.items()},
            coefficients=select(self.coefficients),
            shares=select(self.shares),
            columns=select(self.columns),
            dropped=select(self.dropped),
        )

    def result(self) -> SampleStats:
        """The values that an update reports; batch, positions and dot products are released."""
        return SampleStats(
            losses=self.losses,
            counts=self.counts,
            raw_norms=_over_parameters(self.raw_norms) if isinstance(self.raw_norms, dict) else self.raw_norms,
            coefficients=self.coefficients,
            shares=self.shares,
            columns=self.columns,
            dropped=self.dropped,
        )


def one_per_sample(values: PerSample) -> Tensor:
    """Narrow the type to a tensor (B,): coefficients per parameter cannot occur here."""
    assert isinstance(values, Tensor)
    return values


# --- sums over a window ----------------------------------------------------------------------------------------------


def denominator(parts: Sequence[SampleStats]) -> Tensor | int:
    """Denominator of a window: Σ counts, times the coefficients of renormalizing transforms."""
    terms = [part.count_sum if part.shares is None else part.shares.sum() for part in parts]
    return terms[0] if len(terms) == 1 else sum(terms)  # not 0 + tensor, which takes microseconds


def total_count(parts: Sequence[SampleStats]) -> Tensor | int:
    """Σ counts."""
    return parts[0].count_sum if len(parts) == 1 else sum(part.count_sum for part in parts)


def total_loss(parts: Sequence[SampleStats]) -> Tensor:
    """Σ losses without dropped samples. Half precision is summed in float32: its own sums may stop growing."""
    losses = cat([part.kept_losses for part in parts])
    half = losses.dtype in (torch.float16, torch.bfloat16)
    return losses.sum(dtype=torch.float32 if half else None)


# --- concatenation and splitting -------------------------------------------------------------------------------------


def concatenate(parts: Sequence[SampleStats]) -> SampleStats:
    """Results of all parts. Batches are left out: transforms of a whole window do not get them."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    columns = [part.columns for part in parts if part.columns is not None]
    return SampleStats(
        losses=torch.cat([p.losses for p in parts]),
        counts=None if first.counts is None else torch.cat([p.counts for p in parts if p.counts is not None]),
        positions=None
        if first.positions is None
        else torch.cat([p.positions for p in parts if p.positions is not None]),
        raw_norms=None if first.raw_norms is None else cat_values([p.raw_norms for p in parts]),
        raw_dots={r: cat_values([p.raw_dots[r] for p in parts]) for r in first.raw_dots},
        coefficients=None if first.coefficients is None else cat_values([p.coefficients for p in parts]),
        shares=torch.cat([p.denominators for p in parts]),
        columns={name: torch.cat([c[name] for c in columns]) for name in columns[0]} if columns else None,
    )


def split(stats: SampleStats, sizes: list[int]) -> list[SampleStats]:
    """Split the results of a window into parts of these sizes. All shares are put into the first part, because only
    their sum is used.
    """
    fields: dict[str, list[Any]] = {}
    for name in ("losses", "counts", "raw_norms", "coefficients", "columns"):
        values = getattr(stats, name)
        fields[name] = [None] * len(sizes) if values is None else split_values(values, sizes)
    parts = [SampleStats(**dict(zip(fields, row, strict=True))) for row in zip(*fields.values(), strict=True)]
    if stats.shares is not None:
        for part in parts:
            part.shares = stats.losses.new_zeros(0)
        parts[0].shares = stats.shares
    return parts


def cat(values: Sequence[Any]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(list(values))


def cat_values(values: Sequence[Any]) -> PerSample:
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], Tensor):
        return torch.cat(list(values))
    return {name: torch.cat([v[name] for v in values]) for name in values[0]}


def split_values(values: PerSample, sizes: list[int]) -> list[PerSample]:
    """Split values of a window into those of its parts."""
    if isinstance(values, Tensor):
        return list(values.split(sizes))
    pieces = {name: column.split(sizes) for name, column in values.items()}
    return [{name: column[k] for name, column in pieces.items()} for k in range(len(sizes))]


def rows_of(values: PerSample, rows: Tensor | slice) -> PerSample:
    return values[rows] if isinstance(values, Tensor) else {name: v[rows] for name, v in values.items()}


# --- exchange between ranks ------------------------------------------------------------------------------------------


def as_table(stats: SampleStats) -> Tensor:
    """Table (B, values per sample) in float64, which represents all values exactly, for the exchange between ranks."""
    return torch.stack([column.double() for column in _flat(stats)], 1)


def from_table(table: Tensor, positions: Tensor, like: SampleStats) -> SampleStats:
    """Inverse of `as_table`: results from a table with the same columns as those of `like`."""
    columns = iter([column.to(model.dtype) for column, model in zip(table.unbind(1), _flat(like), strict=True)])

    def filled(values: PerSample | None) -> Any:
        if isinstance(values, dict):
            return {name: next(columns) for name in values}
        return None if values is None else next(columns)

    return SampleStats(  # must have the order of `_flat`
        losses=filled(like.losses),
        counts=filled(like.counts),
        raw_norms=filled(like.raw_norms),
        coefficients=filled(like.coefficients),
        shares=filled(like.shares),
        raw_dots={reference: filled(dots) for reference, dots in like.raw_dots.items()},
        positions=positions,
    )


def _flat(stats: SampleStats) -> list[Tensor]:
    fields = (stats.losses, stats.counts, stats.raw_norms, stats.coefficients, stats.shares)
    columns: list[Tensor] = []
    for values in (*fields, *stats.raw_dots.values()):
        if isinstance(values, dict):
            columns += values.values()
        elif values is not None:
            columns.append(values)
    return columns


def _over_parameters(norms: PerSample) -> Tensor:
    """Norm of the whole gradient, from norms of its parameters."""
    if isinstance(norms, Tensor):
        return norms
    return torch.stack(list(norms.values())).square().sum(0).sqrt()


def _times(values: PerSample | None, factor: PerSample | None) -> PerSample:
    if values is None:
        raise TransformError(
            "a transform must declare the values it reads; found that it reads norms without needs={'norms'}. Add "
            "them to its needs."
        )
    if factor is None:
        return values
    if isinstance(values, Tensor) and isinstance(factor, Tensor):
        return values * factor
    if isinstance(values, Tensor):
        assert isinstance(factor, dict)
        return {name: values * f for name, f in factor.items()}
    return {name: v * (factor if isinstance(factor, Tensor) else factor[name]) for name, v in values.items()}


def are_close(a: PerSample, b: PerSample) -> bool:
    """True if values are equal up to the rounding of batches of different sizes."""
    if isinstance(a, dict):
        return isinstance(b, dict) and all(are_close(a[name], b[name]) for name in a)
    return isinstance(b, Tensor) and torch.allclose(a, b, rtol=1e-3, atol=1e-6)
