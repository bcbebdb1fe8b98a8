"""Check of the weights that transforms give to the samples of a private step, in its first windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from samplewise.core.closure_state import CallSnapshot, state_restored
from samplewise.errors import PrivacyError
from samplewise.transforms.chain import Stage
from samplewise.transforms.stats import PerSample, SampleStats, are_close, rows_of
from samplewise.transforms.transform import SampleTransform

FEW = 8  # number of samples whose weights are compared
MANY = 1000  # the same, for weights that are not random
SEEDS = 8  # of each comparison: with few samples, a random permutation may leave them in place
BESIDE = "gives a sample another weight if other samples are left out"


def check_private_weights(stage: Stage, stats: SampleStats, before: CallSnapshot) -> None:
    """Raise PrivacyError if a transform gives a sample a coefficient that depends on other samples: on those of the
    same call, or on those of earlier calls. `before`: state of the transforms before their first call.
    """
    with state_restored([transform.answer for transform in stage.transforms]):
        _check_stage(stage, stats, before)


def _check_stage(stage: Stage, stats: SampleStats, before: CallSnapshot) -> None:
    """Compare the coefficient of a sample alone with those beside and after the other samples. All calls start from the
    same state and the same random numbers, of which the sample gets the first ones. If the coefficients are not random,
    samples at all places are compared, also those that only a quantile or a maximum concerns.
    """
    samples = range(len(stats))
    for transform in stage.transforms:

        def call(rows: list[int], transform: SampleTransform = transform, stats: SampleStats = stats) -> PerSample:
            return transform(stats.take(rows))

        def call_first(rows: list[int], seed: int = 0, call: Callable[[list[int]], PerSample] = call) -> PerSample:
            before.restore(seed)
            return call(rows)

        problem = None
        try:
            for row, seed in product(samples[:FEW], range(SEEDS)):
                others = [k for k in samples if k != row]
                again = call_first([row], seed)
                if row == seed == 0:  # only once: caches may take long to fill
                    _clear(before.caches)
                alone = call_first([row], seed)
                if row == seed == 0:
                    _clear(before.caches)
                beside = rows_of(call_first([row, *others], seed), slice(1))
                call_first(others or [row], seed)
                before.restore_random(seed)
                after = call([row])
                if not _equal(alone, again):
                    problem = "gives other weights if it is called again with the same values"
                elif not _equal(alone, beside):
                    problem = BESIDE
                elif not _equal(alone, after):
                    problem = "gives a sample another weight after it was called before"
            whole = call_first([*samples])
            if _equal(whole, call_first([*samples], seed=1)):
                for row in samples[:: 1 + len(samples) // MANY]:
                    if not _equal(call_first([row]), rows_of(whole, slice(row, row + 1))):
                        problem = BESIDE
                if problem is None and not are_close(whole, transform(_rounded_otherwise(stats))):
                    problem = (
                        "gives a sample another weight if the last digits of its loss or norm change, which depend on "
                        "the batch"
                    )
        except Exception:  # the calls of the update itself have succeeded
            problem = "fails for a part of the samples"
        if problem is not None:
            raise PrivacyError(
                "the weight of a sample must depend on this sample alone with privacy=; found that "
                f"{transform} {problem}. Compute each weight from the values of its own sample."
            )
        stats = stats.scaled(whole, transform.renormalizes)


def _rounded_otherwise(stats: SampleStats) -> SampleStats:
    """The same results with other last digits: kernels round a sample in another way if the size of the batch changes,
    so that leaving out one sample would change the weights of all others.
    """

    def nudged(values: PerSample | None) -> PerSample | None:
        if isinstance(values, dict):
            return {name: v * (1 + 4 * torch.finfo(v.dtype).eps) for name, v in values.items()}
        return values if values is None else values * (1 + 4 * torch.finfo(values.dtype).eps)

    losses = nudged(stats.losses)
    assert isinstance(losses, Tensor)
    return replace(stats, losses=losses, raw_norms=nudged(stats.raw_norms))


def _clear(caches: Sequence[Any]) -> None:
    """Empty the caches of functions, which may keep values of samples."""
    for cached in caches:
        cached.cache_clear()


def _equal(a: PerSample, b: PerSample) -> bool:
    """True if coefficients are equal up to rounding."""
    if isinstance(a, dict):
        return isinstance(b, dict) and all(_equal(a[name], b[name]) for name in a)
    return isinstance(b, Tensor) and torch.allclose(a, b, rtol=100 * torch.finfo(a.dtype).eps, atol=0, equal_nan=True)
