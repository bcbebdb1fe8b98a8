"""Batch columns recorded in updates: values of the batch for each sample, and the epoch of the sample."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import pick

Column = Tensor | list[Any]  # one entry per sample


@dataclass(slots=True)
class BatchColumns:
    """Batch columns of one microbatch."""

    epoch: int
    values: dict[str, Column]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "values": self.values}


def record_columns(batch: Any, keys: Mapping[str, Hashable], epoch: int, rows: slice | None = None) -> BatchColumns:
    """Values of the batch, or of these rows of it, under the keys. `keys`: column name -> key of the batch."""
    return BatchColumns(epoch, {name: _rows(pick(batch, key), rows) for name, key in keys.items()})


def _rows(values: Any, rows: slice | None) -> Any:
    return values if rows is None else values[rows]


def columns_of(recorded: Sequence[BatchColumns]) -> dict[str, Column]:
    """Columns of all microbatches, concatenated, and "epoch". Columns that a microbatch lacks are left out."""
    if not recorded:
        return {}
    names = [name for name in recorded[0].values if all(name in each.values for each in recorded)]
    found: dict[str, Column] = {name: _concatenated([each.values[name] for each in recorded]) for name in names}
    if names:
        found["epoch"] = torch.cat([torch.full((len(n.values[names[0]]),), n.epoch) for n in recorded])
    return found


def _concatenated(values: Sequence[Any]) -> Column:
    if len(values) == 1:
        return values[0]
    if all(isinstance(each, Tensor) for each in values):
        return torch.cat(list(values))
    joined: list[Any] = []
    for each in values:
        joined += each.tolist() if isinstance(each, Tensor) else each
    return joined
