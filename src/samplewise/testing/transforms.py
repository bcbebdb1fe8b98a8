"""`check_transform`: conformance test for new transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import cut, leaves, length
from samplewise.errors import TransformError
from samplewise.transforms.chain import Chain, as_transform
from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import Grouping, Reference, SampleTransform, SumTransform

NAMES = ("weight", "bias")


def check_transform(transform: Any, batch: Any = None) -> None:
    """Check that a transform satisfies the contract of transforms; raise TransformError with the difference if not.

    A transform of samples must

    - return one finite coefficient per sample, also for one sample and for zero gradients,
    - return the same coefficients for a subset of the samples, unless it has window=True,
    - not depend on the order of samples, unless it has `positions`,
    - return the same coefficients when it is called again, and not modify its input.

    A transform of the sum must change the sum in place and keep it finite. A grouping must return one key per sample,
    the same in any part of a batch.

    batch: needed only by transforms that read the batch.
    """
    if isinstance(transform, Chain):
        for part in transform.transforms:
            check_transform(part, batch)
        return None
    transform = as_transform(transform)
    if isinstance(transform, SumTransform):
        return _check_sum(transform)
    if (isinstance(transform, Grouping) or "batch" in transform.needs) and length(batch) is None:
        raise TransformError(
            f"{transform} reads the batch and needs one; found none. Call check_transform(transform, batch)."
        )
    if isinstance(transform, Grouping):
        return _check_keys(transform, batch)
    return _check_sample(transform, batch, length(batch) or transform.positions or 7)


def _check_sample(transform: SampleTransform, batch: Any, samples: int) -> None:
    stats = _random_stats(transform, batch, samples)
    original = _random_stats(transform, batch, samples)
    batch_copy = copy.deepcopy(batch)
    coefficients = transform(stats)
    _check_same(transform, transform(stats), coefficients, "when it is called again")
    if not _is_unchanged(stats, original, batch, batch_copy):
        raise TransformError(f"{transform} must not modify its input; found changed values. Copy before changing.")
    transform(replace(stats, raw_norms=_map_values(stats.raw_norms, torch.zeros_like)))
    transform(stats.take([0]))
    order = [*range(1, samples), 0]
    if transform.positions is None:
        expected = _map_values(coefficients, lambda values: values[order])
        _check_same(transform, transform(stats.take(order)), expected, "for any order of samples")
    if not transform.window:
        half = list(range(samples // 2, samples))
        expected = _map_values(coefficients, lambda values: values[half])
        _check_same(transform, transform(stats.take(half)), expected, "for a subset of the samples")


def _check_sum(transform: SumTransform) -> None:
    sums = [torch.ones(3, 2), torch.ones(4, dtype=torch.float64)]
    original = list(sums)
    act: Any = transform.act
    in_place = act(sums) is None and len(sums) == 2 and all(a is b for a, b in zip(sums, original, strict=True))
    if not in_place or not all(tensor.isfinite().all() for tensor in sums):
        raise TransformError(f"{transform} must change the sums in place and keep them finite; found that it does not.")


def _check_keys(transform: Grouping, batch: Any) -> None:
    keys = transform.keys(batch)
    total = length(batch)
    if len(keys) != total:
        raise TransformError(f"{transform} must return one key per sample; found {len(keys)} for {total} samples.")
    if transform.keys(cut(batch, 1, total)) != keys[1:]:
        raise TransformError(
            f"{transform} must return the same key for a sample in any part of a batch; found different keys."
        )


def _random_stats(transform: SampleTransform, batch: Any, samples: int) -> SampleStats:
    """Random per-sample values between 0 and 3, restricted to what the transform declares in `needs`."""
    generator = torch.Generator().manual_seed(0)

    def random_values() -> Tensor:
        return torch.rand(samples, generator=generator, dtype=torch.float64) * 3

    def per_sample() -> PerSample:
        return {name: random_values() for name in NAMES} if transform.by_parameter else random_values()

    norms: PerSample | None = per_sample() if "norms" in transform.needs else None
    references: list[Reference] = [] if transform.reference is None else [transform.reference]
    return SampleStats(
        losses=random_values(),
        counts=torch.ones(samples, dtype=torch.float64),
        batch=batch if "batch" in transform.needs else None,
        positions=torch.arange(samples),
        raw_norms=norms,
        raw_dots={r: per_sample() for r in references},
    )


def _map_values(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if values is None:
        return None
    if isinstance(values, Tensor):
        return change(values)
    return {name: change(v) for name, v in values.items()}


def _check_same(transform: SampleTransform, coefficients: PerSample, expected: PerSample, when: str) -> None:
    if not _equal(coefficients, expected):
        raise TransformError(
            f"{transform} must return the same coefficients {when}; found {coefficients} instead of {expected}."
        )


def _is_unchanged(stats: SampleStats, original: SampleStats, batch: Any, batch_copy: Any) -> bool:
    same_stats = _equal(stats.losses, original.losses) and _equal(stats.denominators, original.denominators)
    tensors = [(a, b) for a, b in zip(leaves(batch), leaves(batch_copy), strict=True) if isinstance(a, Tensor)]
    return same_stats and all(torch.equal(a, b) for a, b in tensors)


def _equal(values: PerSample, expected: PerSample) -> bool:
    if isinstance(values, dict) and isinstance(expected, dict):
        return values.keys() == expected.keys() and all(_equal(values[name], expected[name]) for name in values)
    return isinstance(values, Tensor) and isinstance(expected, Tensor) and torch.allclose(values, expected, rtol=1e-9)
