"""Sums: `group` sums the gradients of samples with the same key, `noise` is added to the sum of all, `per` says what
this sum is divided by.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import torch
from torch import Tensor

from samplewise.core.batches import pick
from samplewise.core.text import plural
from samplewise.errors import TransformError
from samplewise.transforms.chain import Chain
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


# --- division of sums -------------------------------------------------------------------------------------------------


UNITS = ("token", "sample", "group")


@dataclass(frozen=True, repr=False)
class Per:
    """What the sum of an update is divided by, made by `per`. `unit`: one of UNITS, or a constant."""

    unit: str | float
    key: Hashable | Callable[[Any], Any] | None = None

    @property
    def constant(self) -> float | None:
        """Divisor of every update; None if it depends on the samples."""
        return None if isinstance(self.unit, str) else float(self.unit)

    @property
    def grouping(self) -> Grouping | None:
        """Groups of samples; None without groups."""
        return None if self.key is None else group(self.key)

    def group_keys(self, batch: Any, samples: int) -> list[Hashable]:
        """Group of each of the samples of a batch."""
        assert self.grouping is not None
        keys = self.grouping.keys(batch)
        if len(keys) != samples:
            raise TransformError(
                f"{self} must give one key per sample; found {plural(len(keys), 'key')} for "
                f"{plural(samples, 'sample')}."
            )
        return keys

    @property
    def batch_keys(self) -> frozenset[Hashable]:
        """Keys of the batch that the groups are read from; empty if a function reads the batch."""
        return frozenset() if self.grouping is None else self.grouping.batch_keys

    def check_transforms(self, chain: Chain) -> None:
        """Raise ValueError for transforms that set the divisor themselves."""
        transforms = (*chain.samples.transforms, *chain.groups.transforms)
        misfit = next((t for t in transforms if t.renormalizes), None)
        if self.key is not None and chain.drops:
            raise ValueError(
                f"aggregate={self} divides by the counts of whole groups; found {chain!r}, which may leave out samples "
                "of a group. Leave one of them out."
            )
        if self.constant is not None and misfit is not None:
            raise ValueError(
                f"aggregate={self} divides every update by the same number; found {misfit}, which divides by the "
                "weights of the samples. Leave one of them out."
            )

    def __repr__(self) -> str:
        if self.key is None:
            return f"per({self.unit!r})"
        return f"per({self.unit!r}, key={function_name(self.key) if callable(self.key) else repr(self.key)})"


def per(unit: Literal["token", "sample", "group"] | float, key: Hashable | Callable[[Any], Any] | None = None) -> Per:
    """What the sum of an update is divided by, for `Step(aggregate=)` and the Hugging Face mixin.

    For samples with losses l and counts n (the numbers of their tokens; 1 for a loss function without counts), the
    update is the gradient of:

        per("token")              Σ l / Σ n                   mean over tokens, the default
        per("sample")             mean of l / n               mean over samples of their means
        per("group", key="prompt")
                                  mean of Σ l / Σ n           mean over groups of the means over their tokens
        per(4096)                 Σ l / 4096                  sum over tokens, divided by a constant

    key: with "group", the key of the batch under which the ids of the groups are (a name, or the index in a tuple), or
    a function of the batch that returns them; one name or number per sample.

    A sample or group without tokens (n = 0) is not counted.
    """
    number = isinstance(unit, (int, float)) and not isinstance(unit, bool) and 0 < unit < inf
    if not number and unit not in UNITS:
        raise ValueError(
            f"per needs 'token', 'sample', 'group', or a positive number that every update is divided by; found "
            f"{unit!r}."
        )
    if (unit == "group") != (key is not None):
        problem = "none. Pass the key of the batch with the groups: per('group', key='prompt')"
        if key is not None:
            problem = f"{key!r} with {unit!r}. Leave it out"
        raise ValueError(f"key= must be given with per('group'), and only then; found {problem}.")
    return Per(unit, key)


def as_per(aggregate: Any) -> Per:
    """The argument `aggregate`; None: per token."""
    if aggregate is None:
        return Per("token")
    if not isinstance(aggregate, Per):
        raise TypeError(f"aggregate must be a sw.per(...); found {aggregate!r}. Write, for example, sw.per('sample').")
    return aggregate


def sample_means(losses: Tensor, counts: Tensor | None, batch: Any) -> tuple[Tensor, Tensor | None]:
    """Mean of each sample, and 1 for each that has one."""
    return (losses, None) if counts is None else divide_by_counts(losses, counts, counts)


def sum_by_group(keys: Sequence[Hashable], counts: Tensor) -> dict[Hashable, float]:
    """Sum of the counts (B,) of each group; `keys`: group of each sample."""
    sums: dict[Hashable, float] = {}
    for key, count in zip(keys, counts.tolist(), strict=True):
        sums[key] = sums.get(key, 0.0) + count
    return sums


def divide_by_counts(losses: Tensor, counts: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and counts (B,) divided by `totals` (B,), the counts of each sample's group, or of the sample itself. The
    sum of the results is a sum of means, and the number of means. Where a total is 0, nothing is divided.

    An invalid count stays invalid, for the checks of the update: negative, infinite or NaN.
    """
    units = torch.where(totals == 0, 1, totals.abs())
    return losses / units, counts / units
