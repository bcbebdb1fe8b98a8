"""What a private step refuses, because the bound of a sample's contribution would not hold:

settings and transforms   when the step is created
rows and losses           batches without one row per sample of the draw, loss functions without one loss per row
weights                   transforms that give a sample a weight which depends on others, in the first windows
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import has_rows, length, located_leaves, map_leaves, name_of
from samplewise.core.closure_state import CallSnapshot, state_restored
from samplewise.core.losses import LossFn
from samplewise.core.microbatch import Auto
from samplewise.core.text import plural
from samplewise.errors import BatchError, LossesError, PrivacyError
from samplewise.privacy.privacy import Privacy
from samplewise.transforms.chain import Chain, Stage
from samplewise.transforms.stats import PerSample, SampleStats, are_close, rows_of
from samplewise.transforms.transform import SampleTransform

OWNED = "batch"  # keys of a batch with the user of each sample
OWNERS = "user"
FEW = 8  # number of samples whose weights are compared
MANY = 1000  # the same, for weights that are not random
SEEDS = 8  # of each comparison: with few samples, a random permutation may leave them in place
BESIDE = "gives a sample another weight if other samples are left out"


def check_settings(settings: Mapping[str, Any], plan: Privacy) -> None:
    """Raise PrivacyError for settings of `Step`, by name, that would void the guarantee."""
    defaults = {
        "samples": ((None,), "an update is one draw of privacy.loader"),
        "tail": (("update",), "an update is one draw of privacy.loader"),
        "interacting": (("refuse",), "the norm of one sample's gradient must not depend on others"),
        "aggregate": ((None,), "sums are divided by a public constant, sw.Privacy(divide_by=...)"),
        "on_nonfinite": ((None, "zero"), "a sample that is not finite contributes nothing"),
    }
    for name, (allowed, reason) in defaults.items():
        value = settings[name]
        if value not in allowed:
            raise PrivacyError(f"{name} must have its default with privacy=, because {reason}; found {value!r}.")
    if settings["precision"] == "16-mixed":
        raise PrivacyError(
            "precision must not scale the loss with privacy=, because whether it overflows depends on single "
            "samples; found '16-mixed'. Use 'bf16-mixed'."
        )
    if settings["recheck"] is False:
        raise PrivacyError(
            "recheck must not be False with privacy=, because it finds samples that interact; found False. Leave "
            "it out."
        )
    if settings["record"] and not plan.observe:
        raise PrivacyError(
            "record must be empty with privacy=, because norms of single samples are not covered by the guarantee; "
            f"found {', '.join(settings['record'])}. Leave it out, or pass sw.Privacy(observe=True)."
        )
    if isinstance(settings["microbatch"], Auto) and plan.users is not None:
        raise PrivacyError("microbatch must be a number or None with users= of sw.Privacy; found an automatic size.")


def check_transforms(transforms: Chain, plan: Privacy) -> None:
    """Raise PrivacyError for transforms that cannot precede grouping, clip and noise of a plan."""
    if transforms.on_sum or transforms.grouping is not None:
        misfit = transforms.on_sum[0] if transforms.on_sum else transforms.grouping
        remedy = "users= of sw.Privacy groups by user" if transforms.grouping is not None else "it adds its own noise"
        raise PrivacyError(
            f"transforms must act on single samples with privacy=; found {misfit}. Leave it out: {remedy}."
        )
    if plan.users is not None and (transforms.batch_keys or transforms.reads_whole_batch):
        raise PrivacyError("transforms must not read the batch with users=; found one that does. Leave it out.")
    if plan.adaptive is not None and transforms.transforms:
        raise PrivacyError(f"an adaptive bound must have no other transforms; found {transforms!r}. Leave them out.")


def check_sharded_precision(sharded: bool, precision: str | None) -> None:
    """Raise PrivacyError if the sum of a sharded model would have less than the precision of float32."""
    if sharded and precision not in (None, "32"):
        raise PrivacyError(
            "a private sum must have the precision of float32, and a sharded model is summed by a backward pass in "
            f"the precision of the forward pass; found precision={precision!r}. Leave it out, or use "
            "parallel='ddp'."
        )


def check_rows(batch: Any, samples: int) -> None:
    """Raise unless each entry of a batch has one row per sample. An entry without rows, such as a number, is the same
    for all samples, and may be computed from all of them.
    """
    rows = 0 if batch is None else length(batch)
    problem = "a batch that cannot be cut into rows" if rows is None else plural(rows, "row")
    if rows == samples:
        entries = [(path, leaf) for path, leaf in located_leaves(batch) if leaf is not None]
        without_rows = [(path, leaf) for path, leaf in entries if not has_rows(leaf, samples)]
        if not without_rows:
            return
        path, leaf = without_rows[0]
        kind = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
        problem = f"{name_of(path)}, of {kind},"
    raise PrivacyError(
        "a private batch must have one row per sample of its draw, because each row is clipped by itself; found "
        f"{problem} for {plural(samples, 'sample')}. Return one row per sample from collate_fn, and keep constants in "
        "the model or the loss function."
    )


def private_loss_fn(loss_fn: LossFn, plan: Privacy, constants: Collection[Any]) -> LossFn:
    """Loss function for batches of a draw: with one loss per sample, the mean over its views. It returns neither counts
    nor columns. `constants`: keys of entries that the loss function declares as constants.
    """
    if constants:
        raise PrivacyError(
            "every entry of a private batch must have one row per sample of its draw, because an entry that is "
            "kept whole may contain values of other samples; found a loss function with @sw.batch_constants. Keep "
            "constants in the model or the loss function."
        )
    views = plan.augmentations

    def private(model: Any, batch: Any) -> Any:
        if plan.users is not None:
            batch = batch[OWNED]
        rows = length(batch)
        result = loss_fn(model, _flat(batch, views) if views > 1 else batch)
        losses = _without_counts(result)
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            return losses  # the caller raises for this shape
        if rows is None or len(losses) != rows * views:
            per_view = f" and {views} views of each" if views > 1 else ""
            raise PrivacyError(
                "a private loss function must return one loss per sample, because each loss is clipped by itself; "
                f"found {plural(len(losses), 'loss', 'losses')} for {plural(rows or 0, 'sample')}{per_view}. "
                "Reduce the losses of each sample to one, and do not combine samples."
            )
        return losses.unflatten(0, (rows, views)).mean(1) if views > 1 else losses

    return private


def _flat(batch: Any, views: int) -> Any:
    """Batch of (B, K, ...) as one of (B × K, ...), for K views."""

    def flat_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2:
            raise BatchError(
                f"all entries of a batch must be tensors with augmentations; found {type(leaf).__name__}. Return "
                "tensors and numbers from the dataset."
            )
        if leaf.shape[1] != views:
            raise PrivacyError(
                f"all entries of a batch must have shape (samples, {views}, ...) with augmentations={views}; found "
                f"{tuple(leaf.shape)}. Keep the views of a sample in collate_fn."
            )
        return leaf.flatten(0, 1)

    return map_leaves(batch, flat_leaf)


def _without_counts(result: Any) -> Any:
    """Losses of a loss function. Counts are refused unless they are 0 or 1, as those of a classification."""
    if not isinstance(result, tuple) or not result:
        return result
    losses, counts = result[0], result[1] if len(result) > 1 else None
    if isinstance(counts, Tensor) and bool((counts > 1).any()):
        raise LossesError(
            "a private update divides by a public constant; found counts of single samples above 1, which would depend "
            "on the data. Return one mean loss per sample, without counts."
        )
    return losses


def check_private_weights(stage: Stage, stats: SampleStats, before: CallSnapshot) -> None:
    """Raise PrivacyError if a transform gives a sample a coefficient that depends on other samples: on those of the
    same call, or on those of earlier calls. `before`: state of the transforms before their first call.
    """
    with state_restored([transform.coefficients for transform in stage.transforms]):
        _check_stage(stage, stats, before)


def _check_stage(stage: Stage, stats: SampleStats, before: CallSnapshot) -> None:
    """Compare the coefficient of a sample alone with those beside and after the other samples. All calls start from the
    same state and the same random numbers, of which the sample gets the first ones. If the coefficients are not random,
    samples at all places are compared, also those that only a quantile or a maximum concerns.
    """
    samples = range(len(stats))
    for transform in stage.transforms:
        # Every call copies its samples of the batch, in all 10 s for a batch of 130 MB; a clip reads nothing of it.
        values = stats if "batch" in transform.needs else replace(stats, batch=None)

        def call(rows: list[int], transform: SampleTransform = transform, stats: SampleStats = values) -> PerSample:
            return transform(stats.take(rows))

        def call_first(rows: list[int], seed: int = 0, call: Callable[[list[int]], PerSample] = call) -> PerSample:
            before.restore(seed)
            return call(rows)

        problem = None
        try:
            for row, seed in product(samples[:FEW], range(SEEDS)):
                others = [k for k in samples if k != row]
                first_call = call_first([row], seed)
                if row == seed == 0:  # only once: caches may take long to fill
                    _clear(before.caches)
                alone = call_first([row], seed)
                if row == seed == 0:
                    _clear(before.caches)
                beside = rows_of(call_first([row, *others], seed), slice(1))
                call_first(others or [row], seed)
                before.restore_random(seed)
                after = call([row])
                if not _equal(alone, first_call):
                    problem = "gives other weights if it is called again with the same values"
                elif not _equal(alone, beside):
                    problem = BESIDE
                elif not _equal(alone, after):
                    problem = "gives a sample another weight after it was called before"
            coefficients = call_first([*samples])
            if _equal(coefficients, call_first([*samples], seed=1)):
                for row in samples[:: 1 + len(samples) // MANY]:
                    if not _equal(call_first([row]), rows_of(coefficients, slice(row, row + 1))):
                        problem = BESIDE
                if problem is None and not are_close(coefficients, transform(_change_last_digits(stats))):
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
        stats = stats.scaled(coefficients, transform.renormalizes)


def _change_last_digits(stats: SampleStats) -> SampleStats:
    """The same results with other last digits: kernels round a sample in another way if the size of the batch changes,
    so that leaving out one sample would change the weights of all others.
    """

    def nudge(values: PerSample | None) -> PerSample | None:
        if isinstance(values, dict):
            return {name: v * (1 + 4 * torch.finfo(v.dtype).eps) for name, v in values.items()}
        return values if values is None else values * (1 + 4 * torch.finfo(values.dtype).eps)

    losses = nudge(stats.losses)
    assert isinstance(losses, Tensor)
    return replace(stats, losses=losses, raw_norms=nudge(stats.raw_norms))


def _clear(caches: Sequence[Any]) -> None:
    """Empty the caches of functions, which may keep values of samples."""
    for cached in caches:
        cached.cache_clear()


def _equal(a: PerSample, b: PerSample) -> bool:
    """True if coefficients are equal up to rounding."""
    if isinstance(a, dict):
        return isinstance(b, dict) and all(_equal(a[name], b[name]) for name in a)
    return isinstance(b, Tensor) and torch.allclose(a, b, rtol=100 * torch.finfo(a.dtype).eps, atol=0, equal_nan=True)
