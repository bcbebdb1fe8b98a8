"""Transforms of sums: `group` sums the gradients of samples with the same key, `noise` is added to the sum of all."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import pick
from samplewise.errors import TransformError
from samplewise.transforms.transform import Grouping, SumTransform, function_name


def group(key: Hashable | Callable[[Any], Any]) -> Grouping:
    """Sum the gradients of samples of one group (a user, a document, the augmentations of one image). Transforms after
    it act on groups: chain(group("user"), clip(1.0)) bounds the contribution of each user to an update.

    key: key of the batch under which the group keys are (a name, or the index in a tuple), or a function of the batch
    that returns them; one name or number per sample.
    """

    def keys(batch: Any) -> list[Any]:
        column = key(batch) if callable(key) else pick(batch, key)
        sample_keys = column.tolist() if isinstance(column, Tensor) else list(column)
        if sample_keys and isinstance(sample_keys[0], list):
            raise TransformError(f"group({key!r}) must have one name or number per sample; found a list for a sample.")
        if any(k != k for k in sample_keys):
            raise TransformError(f"group({key!r}) must have keys that can be compared; found NaN.")
        return sample_keys

    name = function_name(key) if callable(key) else repr(key)
    return Grouping(f"group({name})", keys, frozenset() if callable(key) else frozenset({key}))


def noise(std: float, *, generator: torch.Generator | None = None) -> SumTransform:
    """Add Gaussian noise of standard deviation `std` to every element of the sum, once per update, before the sum is
    divided by the number of samples. With several ranks it is added once, with the random state of rank 0.

    Noise alone is no privacy guarantee: that also needs clipping, random sampling, an accountant, and a random
    generator that cannot be predicted.
    """
    if not std >= 0:
        raise ValueError(f"std must be zero or positive; found {std!r}.")

    def add_noise(sums: list[Tensor]) -> None:
        for total in sums:
            total.add_(torch.randn(total.shape, dtype=total.dtype, device=total.device, generator=generator), alpha=std)

    return SumTransform(f"noise({std})", f"N(0, {std}²)", add_noise, additive=True, generator=generator)
