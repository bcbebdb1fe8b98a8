"""Per-sample results of a window, one `MicrobatchStats` per microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.transforms.stats import PerSample
from samplewise.transforms.stats import split as divided


@dataclass(slots=True)
class MicrobatchStats:
    """Per-sample results of one microbatch of B samples."""

    losses: Tensor  # (B,)
    counts: Tensor | None = None  # (B,); None: 1 for each sample
    norms: Tensor | None = None  # (B,) gradient norms before any transform
    weights: PerSample | None = None  # (B,) coefficients; None: 1 for each sample
    shares: Tensor | None = None  # terms of the denominator; None: the counts
    columns: dict[str, Tensor] | None = None  # columns returned by the loss function, (B,) each

    def __len__(self) -> int:
        return len(self.losses)


def total(parts: Sequence[MicrobatchStats], shares: bool = True) -> Tensor | int:
    """Denominator of a window: Σ counts; with `shares`, Σ counts × coefficients of renormalising transforms."""
    sums = [(p.shares if shares and p.shares is not None else p.counts) for p in parts]
    return sum(len(part) if s is None else s.sum() for part, s in zip(parts, sums, strict=True))


def total_loss(parts: Sequence[MicrobatchStats]) -> Tensor:
    """Σ losses. Half precision is summed in float32: its own sums may stop growing at a few hundred."""
    losses = cat([p.losses for p in parts])
    half = losses.dtype in (torch.float16, torch.bfloat16)
    return losses.sum(dtype=torch.float32 if half else None)


def split(part: MicrobatchStats, sizes: list[int]) -> list[MicrobatchStats]:
    """Split the part of a window into parts of these sizes. All shares are put into the first part, because only their
    sum is used.
    """
    split_up: dict[str, list[Any]] = {}
    for name in ("losses", "counts", "norms", "weights", "columns"):
        values = getattr(part, name)
        split_up[name] = [None] * len(sizes) if values is None else divided(values, sizes)
    parts = [MicrobatchStats(**dict(zip(split_up, row, strict=True))) for row in zip(*split_up.values(), strict=True)]
    for each in parts if part.shares is not None else ():
        each.shares = part.losses.new_zeros(0)
    parts[0].shares = part.shares
    return parts


def cat(values: Sequence[Any]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(list(values))
