"""Numbers in small tensors, read and written without the ways of tensors, which take microseconds."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from samplewise.step.compiled.problems import CannotCompile

TYPES: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.int64: ctypes.c_int64,
}


def cells(tensor: Tensor) -> Any:
    """The tensor's numbers as an array that shares its memory. Lives no longer than the tensor does."""
    if tensor.dtype not in TYPES or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise CannotCompile(f"numbers must be read that are {tensor.dtype} on {tensor.device}")
    return (TYPES[tensor.dtype] * tensor.numel()).from_address(tensor.data_ptr())
