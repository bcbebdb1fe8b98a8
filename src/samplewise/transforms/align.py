"""`align`: weight samples by the agreement of their gradients with a reference direction."""

from __future__ import annotations

from collections.abc import Callable

from samplewise.transforms.reference import Direction, Reference
from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import SampleTransform, quotient


def align(
    reference: Direction | Callable[[], Direction], by: str = "cosine", renormalize: bool = False
) -> SampleTransform:
    """Weight samples by the dot product of their gradient with a reference; a negative product gives weight 0.

    reference: a dict name -> tensor, or a function that returns one and is called once per window, such as
    lambda: sw.gradients(loss_fn(model, clean), model).mean().
    by: "cosine" (default), the cosine of the angle between both; or "dot", the unnormalized dot product.
    renormalize: divide the update by Σ weight × count instead of Σ counts.
    """
    if by not in ("cosine", "dot"):
        raise ValueError(f"by must be 'cosine' or 'dot'; found {by!r}.")
    towards = Reference(reference, unit=by == "cosine")

    def answer(stats: SampleStats) -> PerSample:
        dots = stats.dots(towards).clamp(min=0)
        return dots if by == "dot" else quotient(dots, stats.norms)

    options = (f", by={by!r}" if by != "cosine" else "") + (", renormalize=True" if renormalize else "")
    return SampleTransform(
        name=f"align(reference{options})",
        formula="max(0, ⟨{g}, r⟩)" if by == "dot" else "max(0, ⟨{g}, r⟩/‖{g}‖‖r‖)",
        answer=answer,
        needs=frozenset() if by == "dot" else frozenset({"norms"}),
        reference=towards,
        renormalizes=renormalize,
    )
