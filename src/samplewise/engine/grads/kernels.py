"""Numerical kernels of per-sample gradients: norms and inner products of rows, sums over pairs of tokens, and products
of matrices.

torch.mm and torch.bmm call MKL, which has no AVX-512 kernels for processors of AMD; oneDNN has them, and is about twice
as fast there. Its call takes ten microseconds longer, so small products stay with MKL. Elsewhere, all products do.

Legend: b sample, p element of a row, t and s token, m and n rows and columns of a product, k its summed dimension.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from samplewise.engine.deferred_checks import is_traced

# A sum below this fraction of the sum of absolute values of its terms has lost too many digits to cancellation.
CANCELLED = 1e-3
# Gram matrices of tokens are symmetric. From this many tokens on, they are computed in four blocks of columns, each
# from the diagonal on: products of many rows with few columns are efficient, those of few rows are not. Matrix kernels
# are fastest for multiples of 16 columns.
MANY_TOKENS = 48
# Number of multiplications of one product above which oneDNN is faster, and smallest m, n and k.
LARGE = 2**21
NARROW = 4


def total(tensors: Iterable[Tensor]) -> Tensor:
    """Sum of one or more tensors."""
    return reduce(add, tensors)


# --- rows ------------------------------------------------------------------------------------------------------------


def flatten_rows(rows: Tensor) -> Tensor:
    """Rows (b, *shape) as (b, p)."""
    return rows.reshape(len(rows), -1)  # flatten(1) fails for the rows of a scalar


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Matrix shape (first dim, rest) of a parameter; vectors and scalars have one column."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def flat_squared_norms(flat: Tensor) -> Tensor:
    """Squared norms of rows, (b, p) -> (b,)."""
    # vector_norm needs no temporary of the rows' size, but its gradient at zero is NaN.
    if flat.requires_grad:
        return (torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat).square().sum(1)
    return torch.linalg.vector_norm(flat, dim=1).square()


def scaled_norms(flat: Tensor) -> Tensor:
    """Norms of rows, (b, p) -> (b,). Rows are scaled first, so that squares cannot under- or overflow."""
    if not flat.shape[1]:
        return flat.real.sum(1) if flat.is_complex() else flat.sum(1)
    real = torch.view_as_real(flat).flatten(1) if flat.is_complex() else flat
    largest = real.detach().abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest, 1)
    return scale[:, 0] * root(flat_squared_norms(real / scale))


def root(squared: Tensor) -> Tensor:
    """Square root with gradient zero at zero, where the true gradient is undefined."""
    if not squared.requires_grad:
        return squared.sqrt()
    zero = squared == 0
    return torch.where(zero, 0, torch.where(zero, 1, squared).sqrt())


def real_inner(rows: Tensor, columns: Tensor) -> Tensor:
    """Product rows @ columns; for complex numbers the real part of rows @ conj(columns)."""
    if rows.is_complex():
        return (rows @ columns.conj().to(rows.dtype)).real
    return rows @ columns.to(rows.dtype)


def random_signs(
    name: str, shape: tuple[int, ...], side: int, tiles: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Random signs (o, side, tiles) and (i, side, tiles) to project a parameter viewed as an o x i matrix, see
    `PerSampleGrad.project`, from its name and a seed.
    """
    o, i = as_matrix(shape)
    signs = torch.randint(0, 2, (o + i, side, tiles), generator=generator_of(name, seed), dtype=torch.int8) * 2 - 1
    left, right = signs.to(device).split([o, i])
    return left, (right if i > 1 else torch.ones_like(right))


def generator_of(name: str, seed: int) -> torch.Generator:
    """Generator of the random numbers of one parameter."""
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))


# --- factors ---------------------------------------------------------------------------------------------------------


def frobenius_norms(factor: Tensor) -> Tensor:
    """Norm of the factor (b, ...) of each sample, (b,). The product of those of two factors is at least the sum of the
    norms of their outer products.
    """
    return torch.linalg.vector_norm(factor, dim=tuple(range(1, factor.dim())))


def largest_magnitudes(factor: Tensor) -> Tensor:
    """Largest absolute value of each sample, (b, ...) -> (b,)."""
    return factor.detach().abs().flatten(1).amax(1)


def scale_to_one(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Factor (b, ...) divided by the largest absolute value of each sample, and these values (b,); 1 if all are 0."""
    largest = largest_magnitudes(factor)
    scale = torch.where(largest > 0, largest, 1)
    return factor / scale.view(-1, *(1,) * (factor.dim() - 1)), scale


class PairSums:
    """Sums (b,) of products over pairs of tokens, and of their absolute values, which show if a sum has canceled."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []
        self._sizes: list[Tensor] = []

    def add(self, left: Tensor, right: Tensor, multiple: int = 1, once: int = 0) -> None:
        """Add `multiple` times the sum of left * right, (b, t, s) each; the first `once` rows only once."""
        pairs = left * right if left.requires_grad or right.requires_grad else left.mul_(right)
        values = pairs.detach()
        self._add(pairs, values, multiple)
        if once:
            self._add(pairs[:, :once], values[:, :once], 1 - multiple)

    def add_within(self, left: Tensor, right: Tensor) -> None:
        """Add the products of the inner products of all pairs of rows of left (b, t, o) and of right (b, t, i): those
        below the diagonal twice, in blocks of columns.
        """
        tokens = left.shape[1]
        if tokens < MANY_TOKENS:
            self.add(bmm(left, left.transpose(1, 2)), bmm(right, right.transpose(1, 2)))
            return
        # Two blocks if they are large enough for the faster kernels.
        half = -(-tokens // 2)
        blocks = 2 if prefers_onednn(left, right, half, half, min(left.shape[2], right.shape[2])) else 4
        step = 16 * -(-tokens // (16 * blocks))
        for at in range(0, tokens, step):
            of_left, of_right = (bmm(f[:, at:], f[:, at : at + step].transpose(1, 2)) for f in (left, right))
            self.add(of_left, of_right, multiple=2, once=min(step, tokens - at))

    def _add(self, pairs: Tensor, values: Tensor, multiple: int) -> None:
        self._sums.append(pairs.sum((1, 2)) * multiple)
        self._sizes.append(torch.linalg.vector_norm(values, 1, (1, 2)) * multiple)

    def settle(self, exactly: Callable[[Tensor], Tensor] | None) -> Tensor:
        """The sums (b,). Samples whose sum has canceled are replaced by `exactly(samples)`; they are NaN if it is
        None, which needs no host sync.

        In a traced pass, which cannot branch on values, they are NaN as well, so that the compiled update falls back to
        another computation.
        """
        sums = total(self._sums)
        canceled = sums.detach().abs() < CANCELLED * total(self._sizes)
        if exactly is None or is_traced(sums):
            return torch.where(canceled, torch.nan, sums)
        samples = canceled.nonzero().flatten()
        return sums.index_copy(0, samples, exactly(samples)) if len(samples) else sums


# --- matrix products -------------------------------------------------------------------------------------------------


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
    products = [_product(x, y) for x, y in zip(a.unbind(), b.unbind(), strict=True)]
    return products[0][None] if len(products) == 1 else torch.stack(products)


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
    if not (b.is_contiguous() or b.t().is_contiguous()):  # a slice, or steps first: oneDNN is 1000 times slower then
        b = b.contiguous()
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, "none", [], "")
    return product


@cache
def _mkl_is_slow() -> bool:
    """True on a processor of AMD with AVX-512, if torch has MKL and oneDNN."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # since torch 2.10
    is_amd = "AMD" in str(capabilities.get("cpu_name", ""))
    has_both = torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return is_amd and has_both and torch.backends.cpu.get_cpu_capability() == "AVX512"
