"""Checks of the weights that transforms give to samples, at the first window of these transforms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from samplewise.core.batches import length
from samplewise.core.closure_state import state_restored
from samplewise.distributed.group import current_group
from samplewise.errors import PrivacyError, TransformError
from samplewise.step.checks import warn
from samplewise.transforms.chain import Chain, Stage
from samplewise.transforms.stats import PerSample, SampleStats, cat_values, concatenate

_MIXES = (
    "the weight of a sample must depend on this sample alone with privacy=; found that {transform} {found}. Compute "
    "each weight from the values of its own sample."
)

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
    """Sentence about clip(per="count"), if gradients are sums and no transform takes the counts into account."""
    if any("counts" in t.needs for t in (*chain.samples.transforms, *chain.groups.transforms)):
        return ""
    if chain.grouping is not None:
        return "A group's gradient is the sum over its samples: sw.clip(C, per='count') bounds that of their mean. "
    counts = [part.counts for part in parts if part.counts is not None]
    if not any(bool((c != 1).any()) for c in counts):
        return ""
    return (
        f"The loss of a sample is a sum over {torch.cat(counts).mean().item():.3g} counts on average: "
        "sw.clip(C, per='count') bounds the gradient of its mean. "
    )


def check_cut(first_stats: Sequence[tuple[Stage, SampleStats]], private: bool = False) -> None:
    """Warn if a transform that is called for each microbatch gives a sample a coefficient that depends on the other
    samples of the microbatch; with `private`, raise PrivacyError. `first_stats`: results of the first microbatches,
    with the stage that gets them.
    """
    for stage in {id(stage): stage for stage, _ in first_stats}.values():
        parts = [stats for other, stats in first_stats if other is stage and len(stats)]
        if not parts:
            continue
        stats = concatenate(parts[:2]) if len(parts) > 1 and len(parts[0]) == 1 else parts[0]
        with state_restored([transform.answer for transform in stage.transforms]):
            _check_stage(stage, stats, private)


def _check_stage(stage: Stage, stats: SampleStats, private: bool) -> None:
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
            if private:
                raise PrivacyError(
                    _MIXES.format(transform=transform, found="fails for a part of the samples")
                ) from None
            return
        if not _close(whole, again):  # random, or dependent on earlier calls
            return
        if not _close(whole, cat_values(parts)):
            if private:
                found = "gives a sample another weight if other samples are left out"
                raise PrivacyError(_MIXES.format(transform=transform, found=found))
            warn(
                f"{transform} gives a sample another weight if it is called with half of the samples, so that an "
                "update depends on batch and microbatch size. Use sw.weight(..., window=True), which calls the "
                "function once with the values of the whole window."
            )
        stats = stats.scaled(whole, transform.renormalises)


def _close(a: PerSample, b: PerSample) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and all(_close(a[name], b[name]) for name in a)
    return isinstance(b, Tensor) and torch.allclose(a, b, rtol=1e-3, atol=1e-6)
