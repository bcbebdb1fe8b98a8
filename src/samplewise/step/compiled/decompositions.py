"""Products with one row, written out: the compiler can then fuse them with what comes before and after.

With one sample the gradient of a weight is a product of a column and a row. Written as `column * row` it never becomes
a tensor: it is computed where the update reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
WRITTEN_OUT = 2**17  # elements of a matrix up to which a loop of our own beats the library's call


def mm(a: Tensor, b: Tensor) -> Any:
    if a.shape[1] == 1:
        return a * b
    if a.shape[0] == 1 and b.numel() <= WRITTEN_OUT:
        return _row_times(a, b)
    return NotImplemented


def addmm(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Any:
    if beta != 1 or alpha != 1:
        return NotImplemented
    found = mm(a, b)
    return found if found is NotImplemented else bias + found


def _row_times(row: Tensor, matrix: Tensor) -> Tensor:
    """The sum runs along memory where it can."""
    if matrix.stride(0) == 1:
        return (row * matrix.t()).sum(1).unsqueeze(0)
    return (row.t() * matrix).sum(0).unsqueeze(0)


DECOMPOSITIONS: dict[Any, Any] = {aten.mm.default: mm, aten.addmm.default: addmm}
