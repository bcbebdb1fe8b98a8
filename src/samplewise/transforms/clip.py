"""`clip` and `normalize`: bound, or set, the norm of each sample's gradient."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import SampleTransform, quotient


class Clip(SampleTransform):
    """Result of `clip`, the only transform that `sw.Privacy(clip=...)` accepts."""


def clip(
    max_norm: float,
    *,
    by: Literal["parameter"] | None = None,
    mode: Literal["flat", "automatic"] = "flat",
    gamma: float = 0.01,
    per_count: bool = False,
) -> Clip:
    """Clip each sample's gradient to norm `max_norm`: c = min(1, max_norm / norm).

    by="parameter": clip the gradient of each parameter separately; the norm of the whole gradient is then at most
    max_norm × √(number of parameters).
    mode="automatic": c = max_norm / (norm + gamma); every gradient then has a norm just below `max_norm`, except
    gradients that are not large compared with gamma.
    per_count=True: bound norm / count instead of the norm. If a sample's loss is a sum over its counted elements
    (tokens of a sequence), this is the norm of the gradient of its mean loss; the bound is then the same for short and
    long sequences. Default False: bound the norm of the gradient of the sample's loss as returned.
    """
    if not (isinstance(max_norm, (int, float)) and max_norm >= 0):
        raise ValueError(f"max_norm must be a number, zero or positive; found {max_norm!r}.")
    if by not in (None, "parameter"):
        raise ValueError(f"by must be None or 'parameter'; found {by!r}.")
    if mode not in ("flat", "automatic"):
        raise ValueError(f"mode must be 'flat' or 'automatic'; found {mode!r}.")
    if not gamma > 0:
        raise ValueError(f"gamma must be positive; found {gamma!r}.")

    def coefficients(stats: SampleStats) -> PerSample:
        unit = stats.counts if per_count and stats.counts is not None else 1.0
        bound = max_norm * unit
        coefficients: dict[str, Tensor] = {}
        for name, norms in ({"": stats.norms} if by is None else stats.norms_by_parameter).items():
            if mode == "automatic":
                coefficients[name] = quotient(bound, norms + gamma * unit)
            else:
                coefficients[name] = torch.where(norms > bound, bound / norms, float(max_norm > 0))
        return coefficients[""] if by is None else coefficients

    length = "‖{g} of p‖" if by else "‖{g}‖"
    bound = f"{max_norm}·count" if per_count else f"{max_norm}"
    small = f"{gamma}·count" if per_count else f"{gamma}"
    options = (f", by={by!r}" if by else "") + (f", mode={mode!r}, gamma={gamma}" if mode != "flat" else "")
    options += ", per_count=True" if per_count else ""
    return Clip(
        name=f"clip({max_norm}{options})",
        formula=f"min(1, {bound}/{length})" if mode == "flat" else f"{bound}/({length} + {small})",
        coefficients=coefficients,
        needs=frozenset({"norms", "counts"} if per_count else {"norms"}),
        by_parameter=by is not None,
        sets_norm=mode == "automatic",
        max_norm=float(max_norm) if not per_count else None,
    )


def normalize(norm: float | Literal["mean"] = 1.0) -> SampleTransform:
    """Scale every sample's gradient to the same norm, so that only directions count. A zero gradient stays zero.

    norm: the norm (default 1.0), or "mean" for the mean norm of the window, which keeps the scale of the update.
    """
    if norm == "mean":

        def to_the_mean(stats: SampleStats) -> PerSample:
            norms = stats.norms
            return quotient(norms.mean(), norms)

        name, formula = "normalize('mean')", "mean‖{g}‖/‖{g}‖"
        return SampleTransform(name, formula, to_the_mean, frozenset({"norms"}), window=True, sets_norm=True)
    if not isinstance(norm, (int, float)):
        raise ValueError(f"norm must be a positive number or 'mean'; found {norm!r}.")
    if not norm > 0:
        raise ValueError(f"norm must be positive; found {norm!r}.")
    return SampleTransform(
        name="normalize()" if norm == 1 else f"normalize({norm})",
        formula=f"{norm:g}/‖{{g}}‖",
        coefficients=lambda stats: quotient(norm, stats.norms),
        needs=frozenset({"norms"}),
        sets_norm=True,
        max_norm=float(norm),
    )
