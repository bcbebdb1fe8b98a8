"""`align`: weight samples by the agreement of their gradients with a reference direction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from samplewise.transforms.reference import Direction, Reference
from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import SampleTransform, quotient


def align(
    reference: Direction | Callable[[], Direction],
    *,
    kind: Literal["cosine", "dot"] = "cosine",
    renormalize: bool = False,
) -> SampleTransform:
    """Weight samples by the dot product of their gradient with a reference; a negative product gives weight 0.

    reference: a dict name -> tensor, or a function that returns one and is called once per window, such as
    lambda: sw.gradients(loss_fn(model, clean), model).mean().
    kind: "cosine" (default), the cosine of the angle between both; or "dot", the unnormalized dot product.
    renormalize: divide the update by Σ weight × count instead of Σ counts.
    """
    if kind not in ("cosine", "dot"):
        raise ValueError(f"kind must be 'cosine' or 'dot'; found {kind!r}.")
    towards = Reference(reference, unit=kind == "cosine")

    def answer(stats: SampleStats) -> PerSample:
        dots = stats.dots(towards).clamp(min=0)
        return dots if kind == "dot" else quotient(dots, stats.norms)

    options = (f", kind={kind!r}" if kind != "cosine" else "") + (", renormalize=True" if renormalize else "")
    return SampleTransform(
        name=f"align(reference{options})",
        formula="max(0, ⟨{g}, r⟩)" if kind == "dot" else "max(0, ⟨{g}, r⟩/‖{g}‖‖r‖)",
        answer=answer,
        needs=frozenset() if kind == "dot" else frozenset({"norms"}),
        reference=towards,
        renormalizes=renormalize,
    )
