"""Bytes of a tensor, without NumPy."""

from __future__ import annotations

import ctypes
import platform

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


def have_same_bytes(first: Tensor, second: Tensor) -> bool:
    """True if two CPU tensors of one dtype have the same shape and bytes. Faster than torch.equal, and true for NaN."""
    a, b = (tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in (first, second))
    return a.shape == b.shape and _compare(a.data_ptr(), b.data_ptr(), a.nbytes) == 0


_compare = (ctypes.cdll.msvcrt if platform.system() == "Windows" else ctypes.CDLL(None)).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
