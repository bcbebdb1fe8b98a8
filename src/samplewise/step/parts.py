"""What is known of the samples of a window, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.transforms.numbers import PerSample


@dataclass(slots=True)
class Part:
    """One microbatch of a window: what is known of its samples."""

    losses: Tensor
    counts: Tensor | None = None  # None: one each
    norms: Tensor | None = None  # raw
    weights: PerSample | None = None  # None: one each
    shares: Tensor | None = None  # of the denominator; None: the counts

    def __len__(self) -> int:
        return len(self.losses)


def total(parts: Sequence[Part], shares: bool = True) -> Tensor | int:
    """The denominator of a window: the sum of counts, or of what renormalising transforms left of them."""
    sums = [(p.shares if shares and p.shares is not None else p.counts) for p in parts]
    return sum(len(part) if s is None else s.sum() for part, s in zip(parts, sums, strict=True))


def cat(values: Sequence[Any]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(list(values))
