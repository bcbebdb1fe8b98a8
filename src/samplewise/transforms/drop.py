"""`drop`: leave samples out of the sum."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import SampleTransform


def drop(
    largest: int = 0,
    *,
    smallest: int = 0,
    quantile: float | None = None,
    score: Literal["norms", "losses"] = "norms",
) -> SampleTransform:
    """Drop samples of the window, and average over the rest.

    largest, smallest: number of samples with the largest or smallest values to drop (default 0).
    quantile: drop samples with values above this quantile of the window.
    score: values to compare: "norms" of the gradients (default), or "losses".
    """
    for name, number in (("largest", largest), ("smallest", smallest)):
        if not isinstance(number, int) or number < 0:
            raise ValueError(f"{name} must be an integer number of samples, 0 or more; found {number!r}.")
    if quantile is not None and not 0 < quantile < 1:
        raise ValueError(f"quantile must lie between 0 and 1; found {quantile!r}.")
    if not (largest or smallest or quantile):
        raise ValueError(
            "drop needs one of largest=, smallest= or quantile=; found none. Write, for example, drop(largest=1)."
        )
    if score not in ("norms", "losses"):
        raise ValueError(f"score must be 'norms' or 'losses'; found {score!r}.")

    def answer(stats: SampleStats) -> PerSample:
        values = stats.norms if score == "norms" else stats.losses
        keep = torch.ones_like(values)
        if quantile is not None:
            keep.masked_fill_(values > _quantile(values, quantile), 0)
        order = values.argsort(stable=True)
        keep[order[:smallest]] = 0
        keep[order[len(order) - min(largest, len(order)) :]] = 0
        return keep

    said = {"largest": largest or None, "smallest": smallest or None, "quantile": quantile}
    options = [f"{name}={value}" for name, value in said.items() if value is not None]
    options += [f"score={score!r}"] if score != "norms" else []
    seen = "‖{g}‖" if score == "norms" else "loss"
    return SampleTransform(
        name=f"drop({', '.join(options)})",
        formula=f"[{seen} kept by {', '.join(options)}]",
        answer=answer,
        needs=frozenset({score}),
        window=True,
        renormalizes=True,
    )


def _quantile(values: Tensor, q: float) -> Tensor:
    """Quantile with linear interpolation, like torch.quantile, which is limited to 16 million values."""
    ordered = values.sort().values
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)
