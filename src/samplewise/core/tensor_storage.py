"""Memory of a tensor of any layout."""

from __future__ import annotations

import torch
from torch import Tensor


def is_plain(tensor: Tensor) -> bool:
    """True for a strided tensor, False for a sparse or nested one: torch has few operations for these."""
    return tensor.layout is torch.strided and not tensor.is_nested


def stored_values(tensor: Tensor) -> Tensor:
    """Strided tensor with the elements that a sparse or nested tensor stores; a strided tensor itself."""
    if is_plain(tensor):
        return tensor
    return tensor.detach()._values() if tensor.layout is torch.sparse_coo else tensor.detach().values()
