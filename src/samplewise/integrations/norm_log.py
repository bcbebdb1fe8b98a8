"""Norms of samples for the log of a trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from samplewise.parallel import collectives
from samplewise.step.backward import BackwardResult

ROUNDING = 1e-6  # a weight that was divided by the unit of an aggregate may be below 1 by a rounding error


class NormLog:
    """Norms of the samples since the last line of a log, kept on their device until it is written.

    samplewise/norm_median, norm_p95   of the norms of the samples' gradients before transforms
    samplewise/clipped                 share of the samples whose weight is below 1, if there are transforms
    samplewise/largest_id              id of the sample with the largest norm, if ids are known
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[tuple[Tensor, Tensor | None, Any]]] = {}  # norms, which were clipped, ids

    def add(self, name: str, results: BackwardResult, ids: Any) -> None:
        coefficients = results.stats.coefficients
        if isinstance(coefficients, dict):  # by parameter
            coefficients = torch.stack(list(coefficients.values())).amin(0)
        clipped = None if coefficients is None else coefficients < 1 - ROUNDING
        self._parts.setdefault(name, []).append((results.norms, clipped, ids))

    def take(self) -> dict[str, Any]:
        """Values of all ranks by name, as numbers; an id may be a string. Values that are not known are left out."""
        parts = self._parts
        self._parts = {}
        ranks = collectives.all_gather_object({name: _summary(parts[name]) for name in parts})
        values: dict[str, Any] = {}
        for name in dict.fromkeys(name for summaries in ranks for name in summaries):
            summaries = [summaries[name] for summaries in ranks if name in summaries]
            norms = torch.cat([norms for norms, *_ in summaries]).sort().values
            if not len(norms):
                continue
            values[f"{name}/norm_median"] = _quantile(norms, 0.5)
            values[f"{name}/norm_p95"] = _quantile(norms, 0.95)
            clipped = [share for _, share, _ in summaries if share is not None]
            if clipped:
                values[f"{name}/clipped"] = torch.cat(clipped).double().mean().item()
            largest = max((top for *_, top in summaries if top is not None), default=None, key=lambda top: top[0])
            if largest is not None:
                values[f"{name}/largest_id"] = largest[1]
        return values


def _summary(parts: list[tuple[Tensor, Tensor | None, Any]]) -> tuple[Tensor, Tensor | None, tuple[float, Any] | None]:
    """Finite norms on the host, which of these samples were clipped, and the largest norm with the id of its sample."""
    norms = torch.cat([norms.double() for norms, *_ in parts]).cpu()
    finite = norms.isfinite()
    clipped = [share for _, share, _ in parts if share is not None]
    shares = torch.cat(clipped).cpu()[finite] if len(clipped) == len(parts) else None
    largest = None
    if finite.any() and all(ids is not None for *_, ids in parts):
        at = int(torch.where(finite, norms, -1).argmax())
        for values, _, ids in parts:
            if at < len(values):
                largest = (norms[finite].max().item(), ids[at].item() if isinstance(ids, Tensor) else ids[at])
                break
            at -= len(values)
    return norms[finite], shares, largest


def _quantile(values: Tensor, share: float) -> float:
    """Quantile of sorted values, interpolated as by torch.quantile, which refuses more than 16 million."""
    place = share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return torch.lerp(values[below], values[above], place - below).item()
