"""Warnings and errors about common mistakes, checked once at the first update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from samplewise.core.batches import length
from samplewise.core.closure_state import state_restored
from samplewise.core.modes import mixing_batch_norms
from samplewise.core.modes import warn as warn
from samplewise.core.text import listed
from samplewise.errors import ParameterError, TransformError
from samplewise.parallel.group import current_group
from samplewise.transforms.chain import Chain, Stage
from samplewise.transforms.stats import SampleStats, are_close, cat_values

SMALL = 0.1  # weights below it scale an update down to less than a tenth


def check_pieces(modules: Iterable[nn.Module], sizes: Sequence[int], interacting: str) -> None:
    """Warn if BatchNorm in training mode normalizes microbatches of one sample, or a window of several microbatches;
    and about a window of several microbatches whose samples may interact. `sizes`: samples of each microbatch.
    """
    if len(sizes) == 1 and sizes[0] > 1:
        return
    names = mixing_batch_norms(modules)
    if names and 1 in sizes:
        warn(
            f"BatchNorm in training mode gets microbatches of one sample: {listed(names)}. Its statistics are then "
            "those of single samples. Use larger microbatches, call sw.freeze_batchnorm(model), or use GroupNorm."
        )
    elif names:
        warn(
            f"BatchNorm in training mode gets a window in {len(sizes)} microbatches: {listed(names)}. Its statistics "
            "are those of each microbatch, so that results depend on the microbatch size. Use microbatch=None with "
            "batches of the window's size, call sw.freeze_batchnorm(model), or use GroupNorm."
        )
    elif interacting == "allow" and len(sizes) > 1:
        warn(
            f"with interacting='allow', a window is computed in {len(sizes)} microbatches: a loss then depends on the "
            "samples of its own microbatch only, so that results depend on the microbatch size. Use microbatch=None "
            "with batches of the window's size, unless this is intended."
        )


def check_reached(trained: dict[str, Tensor], noise: bool) -> None:
    """Warn about parameters of the optimizer that got no gradient; raise if none got one. No warning with noise on the
    sum, which gives every parameter a gradient.
    """
    missed = [name for name, p in trained.items() if p.requires_grad and p.grad is None]
    if missed and all(p.grad is None for p in trained.values()):
        raise ParameterError(
            f"the loss must reach a parameter of the optimizer; found that it reaches none of {listed(missed)}. "
            "Check whether the optimizer was created from another model, or the model was copied afterwards."
        )
    if missed and not noise:
        warn(
            f"the optimizer has parameters that the loss does not reach: {listed(missed)}. They got no gradient in "
            "the first update. Look for a detach(), an unused layer, or the wrong model."
        )


def check_untracked(untracked: dict[str, Tensor], reached: set[int]) -> None:
    """Warn about parameters that the loss reaches and that the optimizer does not have. `reached`: ids of leaves."""
    missed = [name for name, p in untracked.items() if id(p) in reached]
    if missed:
        warn(
            f"the loss reaches parameters that the optimizer does not have: {listed(missed)}. They are not trained. "
            "Add them to the optimizer, or freeze them with requires_grad_(False)."
        )


def check_weights(chain: Chain, parts: Sequence[SampleStats]) -> None:
    """Raise if all coefficients of a window are zero, over all ranks: the gradient would be zero. Warn if all are below
    SMALL, unless noise is added, for which small bounds are usual, or a transform gives gradients a chosen norm. Every
    rank raises or warns, also one without samples: if warnings are errors, no rank makes the update. Collective.
    """
    columns: list[Tensor] = []
    for part in parts:
        coefficients = torch.ones_like(part.losses) if part.coefficients is None else part.coefficients
        columns += coefficients.values() if isinstance(coefficients, dict) else [coefficients]
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


def check_cut(stage: Stage, stats: SampleStats) -> None:
    """Warn if a transform that is called for each microbatch gives a sample a coefficient that depends on the other
    samples of the microbatch: compare the coefficients with those for each half of the samples. `stats`: what the
    transforms of the stage got in the first window.
    """
    with state_restored([transform.answer for transform in stage.transforms]):
        _compare_halves(stage, stats)


def _compare_halves(stage: Stage, stats: SampleStats) -> None:
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
        if not are_close(whole, again):  # random, or dependent on earlier calls
            return
        if not are_close(whole, cat_values(parts)):
            warn(
                f"{transform} gives a sample another weight if it is called with half of the samples, so that an "
                "update depends on batch and microbatch size. Use sw.weight(..., window=True), which calls the "
                "function once with the values of the whole window."
            )
        stats = stats.scaled(whole, transform.renormalizes)
