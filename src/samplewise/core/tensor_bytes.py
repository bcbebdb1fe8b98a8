"""Bytes of a tensor, without NumPy."""

from __future__ import annotations

import ctypes

from torch import Tensor


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order as a read-only memoryview.

    A contiguous tensor on the CPU is not copied: the view shows its memory, and keeps it alive. A tensor on another
    device, or with other strides, is copied first.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not plain.nbytes:
        return memoryview(b"")
    buffer = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
    vars(buffer)["tensor"] = plain  # keeps the memory alive as long as the view
    return memoryview(buffer).cast("B").toreadonly()
