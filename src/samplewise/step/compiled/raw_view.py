"""ctypes views of small CPU tensors; avoids the microseconds of tensor indexing."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from samplewise.step.compiled.errors import CannotCompile

TYPES: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.int64: ctypes.c_int64,
}


def raw_view(tensor: Tensor) -> Any:
    """Return a flat ctypes array that shares the tensor's memory; the tensor must outlive it."""
    if tensor.dtype not in TYPES or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise CannotCompile(f"a scalar of the optimizer is {tensor.dtype} on {tensor.device}")
    return (TYPES[tensor.dtype] * tensor.numel()).from_address(tensor.data_ptr())
