"""Noise on the sum."""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.transforms.transform import SumTransform


def noise(std: float, generator: torch.Generator | None = None) -> SumTransform:
    """Adds Gaussian noise of standard deviation `std` to every element of the sum, once per update, before it is
    divided by the number of samples. Several ranks that train together add it once, drawn as rank 0 draws it.

    This is no privacy guarantee by itself: that takes clipping, samples drawn at random, an accountant, and a random
    generator that cannot be guessed.
    """
    if not std >= 0:
        raise ValueError(f"std must be zero or positive; found {std!r}.")

    def act(sums: list[Tensor]) -> None:
        for total in sums:
            total.add_(torch.randn(total.shape, dtype=total.dtype, device=total.device, generator=generator), alpha=std)

    return SumTransform(f"noise({std})", f"N(0, {std}²)", act, additive=True, generator=generator)
