"""`clip`: bound the norm of each sample's gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.transforms.stats import PerSample, SampleStats
from samplewise.transforms.transform import SampleTransform, positive


def clip(max_norm: float, by: str | None = None, mode: str = "flat", gamma: float = 0.01) -> SampleTransform:
    """Clip each sample's gradient to norm `max_norm`: c = min(1, max_norm / norm).

    by="parameter": clip the gradient of each parameter separately; the norm of the whole gradient is then at most
    max_norm × √(number of parameters).
    mode="automatic": c = max_norm / (norm + gamma); every gradient then has a norm just below `max_norm`, except
    gradients that are not large compared with gamma.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be zero or positive; found {max_norm!r}.")
    if by not in (None, "parameter"):
        raise ValueError(f"by must be None or 'parameter'; found {by!r}.")
    if mode not in ("flat", "automatic"):
        raise ValueError(f"mode must be 'flat' or 'automatic'; found {mode!r}.")
    positive("gamma", gamma)

    def coefficient(norms: Tensor) -> Tensor:
        if mode == "automatic":
            return max_norm / (norms + gamma)
        return torch.where(norms > max_norm, max_norm / norms, float(max_norm > 0))

    def answer(stats: SampleStats) -> PerSample:
        if by is None:
            return coefficient(stats.norms)
        return {name: coefficient(norms) for name, norms in stats.norms_by_parameter.items()}

    length = "‖{g} of p‖" if by else "‖{g}‖"
    options = (f", by={by!r}" if by else "") + (f", mode={mode!r}, gamma={gamma}" if mode != "flat" else "")
    return SampleTransform(
        name=f"clip({max_norm}{options})",
        formula=f"min(1, {max_norm}/{length})" if mode == "flat" else f"{max_norm}/({length} + {gamma})",
        answer=answer,
        needs=frozenset({"norms"}),
        by_parameter=by is not None,
    )
