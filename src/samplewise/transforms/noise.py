"""`noise`: Gaussian noise on the sum of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.transforms.transform import SumTransform


def noise(std: float, *, generator: torch.Generator | None = None) -> SumTransform:
    """Add Gaussian noise of standard deviation `std` to every element of the sum, once per update, before the sum is
    divided by the number of samples. With several ranks it is added once, with the random state of rank 0.

    Noise alone is no privacy guarantee: that also needs clipping, random sampling, an accountant, and a random
    generator that cannot be predicted.
    """
    if not std >= 0:
        raise ValueError(f"std must be zero or positive; found {std!r}.")

    def act(sums: list[Tensor]) -> None:
        for total in sums:
            total.add_(torch.randn(total.shape, dtype=total.dtype, device=total.device, generator=generator), alpha=std)

    return SumTransform(f"noise({std})", f"N(0, {std}²)", act, additive=True, generator=generator)
