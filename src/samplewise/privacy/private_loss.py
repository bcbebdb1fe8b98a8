"""Batches and loss functions of private steps: one row and one loss per sample."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from samplewise.core.batches import has_rows, length, located_leaves, map_leaves, name_of
from samplewise.core.losses import LossFn
from samplewise.core.text import plural
from samplewise.errors import BatchError, LossesError, PrivacyError
from samplewise.privacy.privacy import Privacy

OWNED = "batch"  # keys of a batch with the user of each sample
OWNERS = "user"


def check_rows(batch: Any, samples: int) -> None:
    """Raise unless each entry of a batch has one row per sample. An entry without rows, such as a number, is the same
    for all samples, and may be computed from all of them.
    """
    rows = 0 if batch is None else length(batch)
    problem = "a batch that cannot be cut into rows" if rows is None else plural(rows, "row")
    if rows == samples:
        entries = [(path, leaf) for path, leaf in located_leaves(batch) if leaf is not None]
        whole = [(path, leaf) for path, leaf in entries if not has_rows(leaf, samples)]
        if not whole:
            return
        path, leaf = whole[0]
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
