"""Checks of the weights that transforms give to samples, at the first window of these transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import length
from samplewise.core.closure_state import CallSnapshot, state_restored
from samplewise.errors import PrivacyError, TransformError
from samplewise.parallel.group import current_group
from samplewise.step.checks import warn
from samplewise.transforms.chain import Chain, Stage
from samplewise.transforms.stats import PerSample, SampleStats, cat_values, concatenate, rows_of
from samplewise.transforms.transform import SampleTransform

_MIXES = (
    "the weight of a sample must depend on this sample alone with privacy=; found that {transform} {found}. Compute "
    "each weight from the values of its own sample."
)

BESIDE = "gives a sample another weight if other samples are left out"
DIGITS = "gives a sample another weight if the last digits of its loss or norm change, which depend on the batch"

FEW = 8  # number of samples whose weights are compared in private steps
MANY = 1000  # the same, for weights that are not random
SEEDS = 8  # of each comparison: with few samples, a random permutation may leave them in place
SMALL = 0.1  # weights below it scale an update down to less than a tenth


def check_weights(chain: Chain, parts: Sequence[SampleStats]) -> None:
    """Raise if all coefficients of a window are zero, over all ranks: the gradient would be zero. Warn if all are below
    SMALL, unless noise is added, for which small bounds are usual, or a transform gives gradients a chosen norm. Every
    rank raises or warns, also one without samples: if warnings are errors, no rank makes the update. Collective.
    """
    columns: list[Tensor] = []
    for part in parts:
        found = torch.ones_like(part.losses) if part.coefficients is None else part.coefficients
        columns += found.values() if isinstance(found, dict) else [found]
    weights = [w.abs().max().item() for w in columns if len(w)]
    some, large = current_group().all_reduce_scalars(not columns or any(weights), any(w >= SMALL for w in weights))
    if not some and chain.divisor is None:  # with a constant divisor, an update without contributions is valid
        raise TransformError(
            f"at least one sample of the first update must have a nonzero weight; found none with {chain!r}. "
            "Check the values that the weights are computed from."
        )
    intended = bool(chain.on_sum) or any(t.rescales for t in (*chain.samples.transforms, *chain.groups.transforms))
    if columns and not large and not intended:
        warn(_small_weights(chain, parts, weights))


def _small_weights(chain: Chain, parts: Sequence[SampleStats], weights: Sequence[float]) -> str:
    """Message with the numbers of this rank. `weights`: the largest of each part."""
    message = f"every weight of the first update is below {SMALL}, with {chain!r}"
    if weights:
        message += f"; the largest is {max(weights):.2g}"
    norms = [part.unscaled_norms for part in parts if part.unscaled_norms is not None]
    if weights and norms:
        message += f", and the median norm of the samples' gradients is {torch.cat(norms).median().item():.3g}"
    return f"{message}. {_hint_about_counts(chain, parts)}Use larger bounds or weights, unless this is intended."


def _hint_about_counts(chain: Chain, parts: Sequence[SampleStats]) -> str:
    """Sentence about clip(per_count=True), if gradients are sums and no transform takes the counts into account."""
    if any("counts" in t.needs for t in (*chain.samples.transforms, *chain.groups.transforms)):
        return ""
    if chain.grouping is not None:
        return "A group's gradient is the sum over its samples: sw.clip(C, per_count=True) bounds that of their mean. "
    counts = [part.counts for part in parts if part.counts is not None]
    if not any(bool((c != 1).any()) for c in counts):
        return ""
    return (
        f"The loss of a sample is a sum over {torch.cat(counts).mean().item():.3g} counts on average: "
        "sw.clip(C, per_count=True) bounds the gradient of its mean. "
    )


FirstStats = Sequence[tuple[Stage, SampleStats]]


def check_cut(first_stats: FirstStats) -> None:
    """Warn if a transform that is called for each microbatch gives a sample a coefficient that depends on the other
    samples of the microbatch. `first_stats`: results of the first microbatches, with the stage that gets them.
    """
    for stage, stats in _stats_by_stage(first_stats):
        with state_restored([transform.answer for transform in stage.transforms]):
            _check_stage(stage, stats)


def check_private_weights(first_stats: FirstStats, before: CallSnapshot) -> None:
    """Raise PrivacyError if a transform of a private step gives a sample a coefficient that depends on other samples:
    on those of the same call, or on those of earlier calls. `before`: state of the transforms before their first call.
    """
    for stage, stats in _stats_by_stage(first_stats):
        with state_restored([transform.answer for transform in stage.transforms]):
            _check_private_stage(stage, stats, before)


def _stats_by_stage(first_stats: FirstStats) -> list[tuple[Stage, SampleStats]]:
    """The first results of each stage; those of two calls if the first one had one sample only."""
    found: list[tuple[Stage, SampleStats]] = []
    for stage in {id(stage): stage for stage, _ in first_stats}.values():
        parts = [stats for other, stats in first_stats if other is stage and len(stats)]
        if parts:
            found.append((stage, concatenate(parts[:2]) if len(parts) > 1 and len(parts[0]) == 1 else parts[0]))
    return found


def _check_stage(stage: Stage, stats: SampleStats) -> None:
    """Compare the coefficients of each transform with those for each half of the samples."""
    rows = list(range(len(stats)))
    halves = [half for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]) if half]
    for transform in stage.transforms:
        if "batch" in transform.needs and length(stats.batch) != len(stats):
            return
        try:
            whole = transform(stats)
            again = transform(stats)
            parts = [whole] if transform.window else [transform(stats.take(half)) for half in halves]
        except Exception:  # it may need a certain number of samples; the calls of the update itself have succeeded
            return
        if not _close(whole, again):  # random, or dependent on earlier calls
            return
        if not _close(whole, cat_values(parts)):
            warn(
                f"{transform} gives a sample another weight if it is called with half of the samples, so that an "
                "update depends on batch and microbatch size. Use sw.weight(..., window=True), which calls the "
                "function once with the values of the whole window."
            )
        stats = stats.scaled(whole, transform.renormalizes)


def _check_private_stage(stage: Stage, stats: SampleStats, before: CallSnapshot) -> None:
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

        found = None
        try:
            for row, seed in product(samples[:FEW], range(SEEDS)):
                others = [k for k in samples if k != row]
                again = call_first([row], seed)
                if row == seed == 0:
                    _clear(before.caches)
                alone = call_first([row], seed)
                if row == seed == 0:
                    _clear(before.caches)
                beside = rows_of(call_first([row, *others], seed), slice(1))
                call_first(others or [row], seed)
                before.restore_random(seed)
                after = call([row])
                if not _equal(alone, again):
                    found = "gives other weights if it is called again with the same values"
                elif not _equal(alone, beside):
                    found = BESIDE
                elif not _equal(alone, after):
                    found = "gives a sample another weight after it was called before"
            whole = call_first([*samples])
            if _equal(whole, call_first([*samples], seed=1)):
                for row in samples[:: 1 + len(samples) // MANY]:
                    if not _equal(call_first([row]), rows_of(whole, slice(row, row + 1))):
                        found = BESIDE
                if found is None and not _close(whole, transform(_rounded_otherwise(stats))):
                    found = DIGITS
        except Exception:  # the calls of the update itself have succeeded
            found = "fails for a part of the samples"
        if found is not None:
            raise PrivacyError(_MIXES.format(transform=transform, found=found))
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
    """Empty the caches of functions, which may keep values of samples. Rarely, because they may take long to fill."""
    for cached in caches:
        cached.cache_clear()


def _equal(a: PerSample, b: PerSample) -> bool:
    """True if coefficients are equal up to rounding."""
    if isinstance(a, dict):
        return isinstance(b, dict) and all(_equal(a[name], b[name]) for name in a)
    return isinstance(b, Tensor) and torch.allclose(a, b, rtol=100 * torch.finfo(a.dtype).eps, atol=0, equal_nan=True)


def _close(a: PerSample, b: PerSample) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and all(_close(a[name], b[name]) for name in a)
    return isinstance(b, Tensor) and torch.allclose(a, b, rtol=1e-3, atol=1e-6)
