"""NaN and infinity, put into words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from samplewise.errors import NonFiniteGradientError, NonFiniteLossError, SamplewiseError
from samplewise.step.parts import Part, cat, total

SKIP = "on_nonfinite='skip' leaves such updates out."


def problem_of_losses(losses: Tensor, places: Tensor | None = None) -> NonFiniteLossError | None:
    """`places` are those of the samples in their window."""
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    if not bad:
        return None
    place = bad[0] if places is None else int(places[bad[0]])
    return NonFiniteLossError(
        f"losses must be finite; found {losses[bad[0]].item()} at sample {place} of the window ({len(bad)} of "
        f"{len(losses)} samples). Nothing was updated. Look at those samples, or at the learning rate; {SKIP}"
    )


def problem_of_counts(parts: Sequence[Part]) -> NonFiniteLossError | None:
    counts = [p.counts for p in parts if p.counts is not None]
    if not counts or cat(counts).min() >= 0:
        return None
    return NonFiniteLossError(
        f"counts must be zero or positive; found {cat(counts).min().item():g}. Nothing was updated. "
        "Return each sample's own denominator from the loss function."
    )


NO_DENOMINATOR = (
    "the window must have something to be divided by; found that its counts, or the weights of its samples, sum to "
    "zero. Nothing was updated. Look at the loss function's counts and at the weights; tail='drop' leaves out windows "
    "that are too short for dropping samples."
)


def problem_of(parts: Sequence[Part], named: Mapping[str, Tensor]) -> SamplewiseError | None:
    """What is not finite in a window; None if a sum was too large though each number is finite. No parts: those have
    been looked at.
    """
    if parts:
        problem = problem_of_losses(cat([p.losses for p in parts])) or problem_of_counts(parts)
        if problem is not None or total(parts) == 0:
            return problem or NonFiniteLossError(NO_DENOMINATOR)
    broken = [n for n, p in named.items() if p.grad is not None and not p.grad.to_dense().isfinite().all()]
    if broken:
        return problem_of_gradients(f"in that of {broken[0]!r} ({len(broken)} of {len(named)} parameters)")
    return None


def problem_of_gradients(where: str) -> NonFiniteGradientError:
    return NonFiniteGradientError(
        f"gradients must be finite; found NaN or infinity {where} though every loss is finite. Nothing was updated. "
        f"Look for a root, norm, division or logarithm at zero; {SKIP}"
    )


def unread_problem(losses_are_fine: bool) -> SamplewiseError:
    """Of an update that nobody has looked at since."""
    if losses_are_fine:
        return problem_of_gradients("in an update since the last one that was read")
    return NonFiniteLossError(
        "losses must be finite; found NaN or infinity in an update since the last one that was read. That one was left "
        f"out. Look at its samples, or at the learning rate; {SKIP}"
    )
