"""`check_transform`: conformance test for new transforms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import cut, leaves, length, take
from samplewise.errors import TransformError
from samplewise.transforms.chain import Chain, as_transform
from samplewise.transforms.reference import Reference
from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import Grouping, SampleTransform, SumTransform

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
        for each in transform.transforms:
            check_transform(each, batch)
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
    whole = _numbers(transform, batch, samples)
    given = _numbers(transform, batch, samples)
    kept = copy.deepcopy(batch)
    answer = transform(whole)
    _same(transform, transform(whole), answer, "when it is called again")
    if not _untouched(whole, given, batch, kept):
        raise TransformError(f"{transform} must not modify its input; found changed values. Copy before changing.")
    transform(replace(whole, raw_norms=_each(whole.raw_norms, torch.zeros_like)))
    transform(_at(whole, [0]))
    order = [*range(1, samples), 0]
    if transform.positions is None:
        _same(transform, transform(_at(whole, order)), _each(answer, lambda a: a[order]), "for any order of samples")
    if not transform.window:
        half = list(range(samples // 2, samples))
        part = _at(whole, half)
        _same(transform, transform(part), _each(answer, lambda a: a[half]), "for a subset of the samples")


def _check_sum(transform: SumTransform) -> None:
    sums = [torch.ones(3, 2), torch.ones(4, dtype=torch.float64)]
    given = list(sums)
    act: Any = transform.act
    if (
        act(sums) is not None
        or len(sums) != 2
        or any(a is not b or not a.isfinite().all() for a, b in zip(sums, given, strict=False))
    ):
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


def _numbers(transform: SampleTransform, batch: Any, samples: int) -> SampleStats:
    """Random per-sample values between 0 and 3, restricted to what the transform declares in `needs`."""
    generator = torch.Generator().manual_seed(0)

    def some() -> Tensor:
        return torch.rand(samples, generator=generator, dtype=torch.float64) * 3

    def per_sample() -> PerSample:
        return {name: some() for name in NAMES} if transform.by_parameter else some()

    norms: PerSample | None = per_sample() if "norms" in transform.needs else None
    references: list[Reference] = [] if transform.reference is None else [transform.reference]
    return SampleStats(
        losses=some(),
        counts=torch.ones(samples, dtype=torch.float64),
        batch=batch if "batch" in transform.needs else None,
        raw_norms=norms,
        raw_dots={r: per_sample() for r in references},
    )


def _at(numbers: SampleStats, places: list[int]) -> SampleStats:
    return replace(
        numbers,
        losses=numbers.losses[places],
        counts=numbers.denominators[places],
        batch=None if numbers.batch is None else take(numbers.batch, places),
        positions=torch.tensor(places),
        raw_norms=_each(numbers.raw_norms, lambda values: values[places]),
        raw_dots={r: _each(dots, lambda values: values[places]) for r, dots in numbers.raw_dots.items()},
    )


def _each(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if values is None or isinstance(values, Tensor):
        return None if values is None else change(values)
    return {name: change(v) for name, v in values.items()}


def _same(transform: SampleTransform, found: PerSample, wanted: PerSample, when: str) -> None:
    if not _equal(found, wanted):
        raise TransformError(
            f"{transform} must return the same coefficients {when}; found {found} instead of {wanted}."
        )


def _untouched(whole: SampleStats, given: SampleStats, batch: Any, kept: Any) -> bool:
    same = _equal(whole.losses, given.losses) and _equal(whole.denominators, given.denominators)
    tensors = [(a, b) for a, b in zip(leaves(batch), leaves(kept), strict=True) if isinstance(a, Tensor)]
    return same and all(torch.equal(a, b) for a, b in tensors)


def _equal(found: PerSample, wanted: PerSample) -> bool:
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_equal(found[name], wanted[name]) for name in found)
    return isinstance(found, Tensor) and isinstance(wanted, Tensor) and torch.allclose(found, wanted, rtol=1e-9)
