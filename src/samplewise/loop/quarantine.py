"""Samples that a guard has dropped, as lines of quarantine.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from samplewise.parallel import collectives
from samplewise.step.update import Update


def dropped_samples(update: Update, parameters: Sequence[str]) -> list[dict[str, Any]]:
    """One dict for each dropped sample of this rank, see `callbacks.Quarantine`. `parameters`: names in the order to
    which the numbers in `update._dropped` refer.
    """
    ids = update.columns.get("id")
    losses = update.losses.tolist()
    norms = update.norms.tolist()
    lines = []
    for row, parameter in enumerate(update._dropped.tolist()):
        if parameter == 0:
            continue
        sample_id: Any = None if ids is None else ids[row]
        lines.append(
            {
                "update": update.index,
                "rank": collectives.rank(),
                "position": row,
                "id": sample_id.item() if hasattr(sample_id, "item") else sample_id,
                "reason": "norm" if isfinite(norms[row]) else "gradient" if isfinite(losses[row]) else "loss",
                "loss": losses[row] if isfinite(losses[row]) else None,
                "norm": norms[row] if isfinite(norms[row]) else None,
                "layer": parameters[parameter - 1] if parameter > 0 else None,
            }
        )
    return lines


def finite_json(value: Any) -> Any:
    """A value for JSON, in which NaN and infinity are texts: JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {name: finite_json(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_json(entry) for entry in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
