"""Errors for non-finite losses, counts and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from torch import Tensor

from samplewise.engine.deferred_checks import DeferredChecks
from samplewise.errors import NonFiniteGradientError, NonFiniteLossError, SamplewiseError
from samplewise.transforms.stats import SampleStats, cat, denominator

SKIP = "on_nonfinite='skip' skips such updates."


def problem_of_losses(losses: Tensor, positions: int | Tensor = 0) -> NonFiniteLossError | None:
    """Error for the first non-finite loss; None if all are finite. `positions`: of the samples in the window, or of the
    first one.
    """
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    if not bad:
        return None
    position = positions + bad[0] if isinstance(positions, int) else int(positions[bad[0]])
    return NonFiniteLossError(
        f"losses must be finite; found {losses[bad[0]].item()} at sample {position} of the window ({len(bad)} of "
        f"{len(losses)} samples). Nothing was updated. Check those samples and the learning rate; {SKIP}"
    )


def problem_of_counts(parts: Sequence[SampleStats]) -> NonFiniteLossError | None:
    """Error for a negative, infinite or NaN count; None if there is none."""
    columns = [p.counts for p in parts if p.counts is not None]
    if not columns:
        return None
    counts = cat(columns)
    invalid = counts[~(counts.isfinite() & (counts >= 0))]
    if not len(invalid):
        return None
    return NonFiniteLossError(
        f"counts must be finite, and zero or positive; found {invalid[0].item():g}. Nothing was updated. "
        "Return the denominator of each sample from the loss function."
    )


NO_DENOMINATOR = (
    "the denominator of a window must be positive and finite; found that its counts, or the weights of its samples, "
    "sum to {total:g}. Nothing was updated. Check the counts returned by the loss function and the weights. If samples "
    "are dropped, the last window of a loader may be too short: tail='drop' leaves it out."
)


def problem_of(parts: Sequence[SampleStats], gradients: Mapping[str, Tensor]) -> SamplewiseError | None:
    """Error for the first non-finite value of a window; None if only a sum overflowed although each value is finite.
    Empty `parts`: losses and counts are already checked. `gradients`: dense, this rank's shard of sharded ones.
    """
    if parts:
        problem = problem_of_losses(cat([p.losses for p in parts])) or problem_of_counts(parts)
        total = float(denominator(parts))
        if problem is not None or not 0 < total < inf:
            return problem or NonFiniteLossError(NO_DENOMINATOR.format(total=total))
    broken = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    if broken:
        return problem_of_gradients(f"in the gradient of {broken[0]!r} ({len(broken)} of {len(gradients)} parameters)")
    return None


def problem_of_checks(checks: DeferredChecks) -> SamplewiseError | None:
    """Error of the first check that fails; None if all values are finite."""
    try:
        checks.raise_first()
    except SamplewiseError as problem:
        return problem
    return None


def problem_of_gradients(where: str) -> NonFiniteGradientError:
    return NonFiniteGradientError(
        f"gradients must be finite; found NaN or infinity {where}, although every loss is finite. Nothing was updated. "
        f"Look for a square root, norm, division or logarithm at zero; {SKIP}"
    )
