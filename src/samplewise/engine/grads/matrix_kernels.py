"""Matrix products of float32 tensors on the CPU, with the faster one of torch's two libraries.

torch.mm and torch.bmm call MKL, which has no AVX-512 kernels for processors of AMD; oneDNN has them, and is about twice
as fast there. Its call takes ten microseconds longer, so small products stay with MKL. Elsewhere, all products do.

Legend: b sample, m and n rows and columns of the product, k summed dimension.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

# Number of multiplications of one product above which oneDNN is faster, and smallest m, n and k.
LARGE = 2**21
NARROW = 4


def mm(a: Tensor, b: Tensor) -> Tensor:
    """Product of a (m, k) and b (k, n), as torch.mm. The result is contiguous."""
    m, k = a.shape
    n = b.shape[1]
    if m * n * k <= LARGE or not prefers_onednn(a, b, m, n, k):
        return torch.mm(a, b)
    # A first operand that is not contiguous is copied: that should be the smaller one.
    if n < m and n < k and not a.is_contiguous():
        return _product(b.t(), a.t()).t().contiguous()
    return _product(a, b)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Products of a (b, m, k) and b (b, k, n), as torch.bmm."""
    _, m, k = a.shape
    if not prefers_onednn(a, b, m, b.shape[2], k):
        return torch.bmm(a, b)
    return torch.stack([_product(one, other) for one, other in zip(a.unbind(), b.unbind(), strict=True)])


def prefers_onednn(a: Tensor, b: Tensor, m: int, n: int, k: int) -> bool:
    """True if a product (m, k) x (k, n) of these tensors is faster with oneDNN."""
    if m * n * k <= LARGE or m < NARROW or n < NARROW or k < NARROW or not _mkl_is_slow():
        return False
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):  # the kernel has no derivative
        return False
    enabled: bool = torch._C._get_mkldnn_enabled()  # by the user, see torch.backends.mkldnn
    return enabled and is_plain(a) and is_plain(b)


def is_plain(tensor: Tensor) -> bool:
    """True for float32 values on the CPU, not those of a subclass such as a tensor that is only traced."""
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and type(tensor) is Tensor


def _product(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, "none", [], "")
    return product


@cache
def _mkl_is_slow() -> bool:
    """True on a processor of AMD with AVX-512, if torch has MKL and oneDNN."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.10
    is_amd = "AMD" in str(capabilities.get("cpu_name", ""))
    has_both = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return is_amd and has_both and torch.backends.cpu.get_cpu_capability() == "AVX512"
