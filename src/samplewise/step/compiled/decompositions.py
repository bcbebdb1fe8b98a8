"""Operations on one sample, written out so that the compiler can fuse them, or so that less is done around them.

With one sample the gradient of a weight is a product of a column and a row. Written as `column * row` it never becomes
a tensor: it is computed where the update reads it. And a convolution of one small image is a matrix product, which
takes less time than the library needs to prepare a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
SMALL_PRODUCT = 2**15  # multiplications up to which a loop of our own beats the library's call
SMALL_IMAGE = 2**22  # multiplications of a convolution


def stored(t: Tensor) -> Tensor:
    """The same, kept in memory by the compiler instead of computed anew for every element of what it is part of."""
    return t.as_strided(t.shape, t.stride())


def mm(a: Tensor, b: Tensor) -> Any:
    if a.shape[1] == 1:
        return a * b
    if a.shape[0] == 1:
        return _row_times(a, b)
    if b.shape[1] == 1:
        return _row_times(b.t(), a.t()).t()
    if a.numel() * b.shape[1] <= SMALL_PRODUCT:
        return (a.unsqueeze(2) * b).sum(1)
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


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    if not _is_one_small_image(x, weight, transposed, groups):
        return NotImplemented
    patches = stored(aten.im2col(x, weight.shape[2:], dilation, padding, stride)[0])  # (inputs × kernel, places)
    found = weight.flatten(1) @ patches
    found = found if bias is None else found + bias.unsqueeze(1)
    return found.view(1, len(weight), *_size_of(x, weight, stride, padding, dilation))


def convolution_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    if not _is_one_small_image(x, weight, transposed, groups):
        return NotImplemented
    g = stored(g.flatten(2)[0])  # (outputs, places)
    of_x = of_weight = of_bias = None
    if output_mask[0]:
        patches = weight.flatten(1).t() @ g
        of_x = stored(aten.col2im(patches.unsqueeze(0), x.shape[2:], weight.shape[2:], dilation, padding, stride))
    if output_mask[1]:
        patches = stored(aten.im2col(x, weight.shape[2:], dilation, padding, stride)[0])
        of_weight = (g @ patches.t()).view(weight.shape)
    if output_mask[2]:
        of_bias = g.sum(1)
    return of_x, of_weight, of_bias


def _is_one_small_image(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    return (
        x.dim() == 4
        and len(x) == 1
        and groups == 1
        and not transposed
        and x.is_floating_point()
        and x[0, 0].numel() * weight.numel() <= SMALL_IMAGE
    )


def _size_of(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    return [
        (x.shape[2 + k] + 2 * padding[k] - dilation[k] * (weight.shape[2 + k] - 1) - 1) // stride[k] + 1 for k in (0, 1)
    ]


DECOMPOSITIONS: dict[Any, Any] = {
    aten.mm.default: mm,
    aten.addmm.default: addmm,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
