"""A batch as tensors, of which the compiled code reads rows by number. It does not know how many rows there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, strided

from samplewise.batches import PLAIN
from samplewise.step.compiled.problems import CannotCompile


def signature(batch: Any, rows: int | None) -> tuple[Any, ...]:
    """What the code depends on: the structure, the shape of a row, and everything that is no tensor."""
    if isinstance(batch, Tensor):
        if batch.layout is not strided or batch.requires_grad or batch.device.type != "cpu":
            raise CannotCompile("the batch has tensors that are sparse, need gradients or are not in main memory")
        if batch.is_conj() or batch.is_neg():
            raise CannotCompile("the batch has tensors that are still to be conjugated or negated")
        if has_rows(batch, rows):
            return "rows", tuple(batch.shape[1:]), batch.dtype
        return "tensor", tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, signature(value, rows)) for key, value in batch.items())
    if isinstance(batch, (tuple, list)) and not (batch and all(isinstance(item, PLAIN) for item in batch)):
        return type(batch), tuple(signature(item, rows) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]
        return type(batch), tuple((name, signature(getattr(batch, name), rows)) for name in names)
    if isinstance(batch, PLAIN):
        return type(batch), batch
    raise CannotCompile(f"the batch has something that is no tensor ({type(batch).__name__})")


def has_rows(leaf: Any, rows: int | None) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows
