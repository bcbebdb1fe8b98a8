"""What is known of the samples of a window, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.transforms.numbers import PerSample
from samplewise.transforms.numbers import split as divided


@dataclass(slots=True)
class Part:
    """One microbatch of a window: what is known of its samples."""

    losses: Tensor
    counts: Tensor | None = None  # None: one each
    norms: Tensor | None = None  # raw
    weights: PerSample | None = None  # None: one each
    shares: Tensor | None = None  # of the denominator; None: the counts
    columns: dict[str, Tensor] | None = None  # what the loss function said beside

    def __len__(self) -> int:
        return len(self.losses)


def total(parts: Sequence[Part], shares: bool = True) -> Tensor | int:
    """The denominator of a window: the sum of counts, or of what renormalising transforms left of them."""
    sums = [(p.shares if shares and p.shares is not None else p.counts) for p in parts]
    return sum(len(part) if s is None else s.sum() for part, s in zip(parts, sums, strict=True))


def total_loss(parts: Sequence[Part]) -> Tensor:
    """Σ losses. Half precision would stop counting at a few hundred."""
    losses = cat([p.losses for p in parts])
    return losses.sum(dtype=torch.float32 if losses.dtype in (torch.float16, torch.bfloat16) else None)


def split(part: Part, sizes: list[int]) -> list[Part]:
    """A window's part as those of its pieces; the shares, of which the sum counts, go with the first."""
    split_up = {
        name: [None] * len(sizes) if values is None else divided(values, sizes)
        for name in ("losses", "counts", "norms", "weights", "columns")
        for values in [getattr(part, name)]
    }
    parts = [Part(**dict(zip(split_up, row, strict=True))) for row in zip(*split_up.values(), strict=True)]
    for each in parts if part.shares is not None else ():
        each.shares = part.losses.new_zeros(0)
    parts[0].shares = part.shares
    return parts


def cat(values: Sequence[Any]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(list(values))
