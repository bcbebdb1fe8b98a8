"""Signature of a batch for compiled code, which reads rows by index and accepts any number of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor, strided

from samplewise.core.batches import PLAIN, is_whole
from samplewise.step.compiled.errors import CannotCompile


def signature(batch: Any, rows: int | None) -> tuple[Any, ...]:
    """Structure of the batch, shapes and dtypes of its rows, and values of non-tensors: compiled into the code."""
    if isinstance(batch, Tensor):
        if batch.device.type != "cpu":
            raise CannotCompile(f"the batch is on {batch.device}; updates are compiled for the CPU only")
        if batch.layout is not strided or batch.requires_grad:
            raise CannotCompile("the batch has tensors that are sparse or require gradients")
        if batch.is_conj() or batch.is_neg():
            raise CannotCompile("the batch has tensors with a pending conjugation or negation")
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
    raise CannotCompile(f"the batch contains an object that is not a tensor ({type(batch).__name__})")


def has_rows(leaf: Any, rows: int | None) -> bool:
    """Test whether leaf is a tensor with one row per sample."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows and not is_whole(leaf)
