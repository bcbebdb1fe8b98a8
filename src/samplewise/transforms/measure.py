"""Norms and dot products of per-sample gradients, as far as transforms need them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import Tensor

from samplewise.engine.gradients import Gradients
from samplewise.transforms.chain import Stage
from samplewise.transforms.reference import Reference
from samplewise.transforms.stats import PerSample, SampleStats


def measure(
    g: Gradients,
    stats: SampleStats,
    stage: Stage,
    directions: Mapping[Reference, Mapping[str, Tensor]],
    norms: bool,
    scale: float | Tensor = 1.0,
) -> None:
    """Add the norms and dots that this stage needs to `stats`, divided by `scale`. `norms`: add norms in any case."""
    by: Literal["parameter"] | None = "parameter" if stage.by_parameter else None
    if norms or "norms" in stage.needs:
        stats.raw_norms = _unscaled(g.norms(by=by), scale)
    if stage.references:
        stats.raw_dots = {r: _unscaled(g.dot(directions[r], by=by), scale) for r in stage.references}


def _unscaled(values: PerSample, scale: float | Tensor) -> PerSample:
    if not isinstance(scale, Tensor) and scale == 1:
        return values
    return values / scale if isinstance(values, Tensor) else {name: v / scale for name, v in values.items()}
