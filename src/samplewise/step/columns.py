"""Columns that updates carry along: what their batches say of each sample, and the epoch in which it came."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.batches import pick

Column = Tensor | list[Any]  # one entry per sample


@dataclass(slots=True)
class Noted:
    """Of one piece of a window."""

    epoch: int
    values: dict[str, Column]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "values": self.values}


def note(batch: Any, keys: Mapping[str, Hashable], epoch: int, rows: slice | None = None) -> Noted:
    """What the batch, or these rows of it, holds under the keys."""
    return Noted(epoch, {name: _some(pick(batch, key), rows) for name, key in keys.items()})


def _some(values: Any, rows: slice | None) -> Any:
    return values if rows is None else values[rows]


def columns_of(noted: Sequence[Noted]) -> dict[str, Column]:
    """Joined, as far as all pieces have them; and "epoch"."""
    if not noted:
        return {}
    names = [name for name in noted[0].values if all(name in each.values for each in noted)]
    found: dict[str, Column] = {name: _joined([each.values[name] for each in noted]) for name in names}
    if names:
        found["epoch"] = torch.cat([torch.full((len(n.values[names[0]]),), n.epoch) for n in noted])
    return found


def _joined(values: Sequence[Any]) -> Column:
    if len(values) == 1:
        return values[0]
    if all(isinstance(each, Tensor) for each in values):
        return torch.cat(list(values))
    return [value for each in values for value in (each.tolist() if isinstance(each, Tensor) else each)]
