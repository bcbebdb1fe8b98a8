"""`normalize`: give every sample's gradient the same norm."""

from __future__ import annotations

from typing import Literal

from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import SampleTransform, positive, quotient


def normalize(norm: float | Literal["mean"] = 1.0) -> SampleTransform:
    """Scale every sample's gradient to the same norm, so that only directions count. A zero gradient stays zero.

    norm: the norm (default 1.0), or "mean" for the mean norm of the window, which keeps the scale of the update.
    """
    if norm == "mean":

        def to_the_mean(stats: SampleStats) -> PerSample:
            norms = stats.norms
            return quotient(norms.mean(), norms)

        name, formula = "normalize('mean')", "mean‖{g}‖/‖{g}‖"
        return SampleTransform(name, formula, to_the_mean, frozenset({"norms"}), window=True, rescales=True)
    if not isinstance(norm, (int, float)):
        raise ValueError(f"norm must be a positive number or 'mean'; found {norm!r}.")
    length = positive("norm", norm)
    name = "normalize()" if length == 1 else f"normalize({length})"
    formula = f"{length:g}/‖{{g}}‖"
    return SampleTransform(
        name,
        formula,
        lambda stats: quotient(length, stats.norms),
        frozenset({"norms"}),
        rescales=True,
        max_norm=float(length),
    )
