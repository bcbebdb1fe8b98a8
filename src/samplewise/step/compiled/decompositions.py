"""Decompositions of operations, most of them on one sample, which the compiler can fuse or which have less overhead.

With one sample the gradient of a weight is a product of a column and a row. Written as `column * row` it is never
stored as a tensor: it is computed where the update reads it. Column and row are stored, because each of their elements
is read once per row or column of the weight. A convolution of one small image is written as a matrix
product, which takes less time than the library needs to prepare a convolution. Attention over few tokens is written as
a few small matrix products for the same reason. The backward of max pooling with channels last is written without
indices, so that the compiler computes several channels at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.engine.rules.convolution import ConvolutionSettings
from samplewise.step.compiled import inductor

aten = torch.ops.aten
BLOCK = 16  # rows of a matrix that are summed at a time
SMALL_PRODUCT = 2**15  # multiplications up to which a generated loop is faster than the library call
SMALL_IMAGE = 2**22  # multiplications up to which a convolution becomes a matrix product
SMALL_SCORES = 2**15  # attention scores (pairs of tokens, over all samples and heads) up to which it is decomposed
SMALL_WINDOW = 9  # elements of a pooling window up to which its backward is decomposed


def materialize(t: Tensor) -> Tensor:
    """Make the compiler store `t` in memory instead of recomputing it for every element that uses it."""
    return inductor.stored(t)


def mm(a: Tensor, b: Tensor) -> Any:
    if a.shape[1] == 1:
        return _stored_vector(a) * _stored_vector(b)
    if a.shape[0] == 1:
        return _row_times(a, b)
    if b.shape[1] == 1:
        return _row_times(b.t(), a.t()).t()
    return (a.unsqueeze(2) * b).sum(1) if _is_small(a, b) else NotImplemented


def addmm(bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Any:
    """Separate the bias, so that its addition is fused into the next operation."""
    return bias + a @ b if beta == alpha == 1 else NotImplemented


def _is_small(a: Tensor, b: Tensor) -> bool:
    return a.numel() * b.shape[1] <= SMALL_PRODUCT


def _has_vector(a: Tensor, b: Tensor) -> bool:
    return a.shape[0] == 1 or a.shape[1] == 1 or b.shape[1] == 1


def _stored_vector(t: Tensor) -> Tensor:
    """Row or column, computed once; a single number is as fast to compute again."""
    return materialize(t) if t.numel() > 1 else t


def _row_times(row: Tensor, matrix: Tensor) -> Tensor:
    """Row times matrix; the sum runs over contiguous memory if possible."""
    row = _stored_vector(row)
    if matrix.stride(0) == 1:
        return (row * matrix.t()).sum(1).unsqueeze(0)
    # The sum of a whole column would be one chain of additions, each of which waits for the one before, and would read
    # from another memory page for each row. Blocks of a few rows are summed first.
    products = row.t() * matrix
    block = max((k for k in range(4, BLOCK + 1) if len(products) % k == 0), default=len(products))
    return products.unflatten(0, (-1, block)).sum(1).sum(0).unsqueeze(0)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    if not _is_one_small_image(x, weight, *rest):
        return NotImplemented
    stride, padding, dilation, *_ = ConvolutionSettings(*rest)
    patches = materialize(aten.im2col(x, weight.shape[2:], dilation, padding, stride)[0])  # (inputs × kernel, places)
    result = weight.flatten(1) @ patches
    result = result if bias is None else result + bias.unsqueeze(1)
    size = [
        (x.shape[2 + k] + 2 * padding[k] - dilation[k] * (weight.shape[2 + k] - 1) - 1) // stride[k] + 1 for k in (0, 1)
    ]
    return result.view(1, len(weight), *size)


def convolution_backward(g: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any) -> Any:
    *settings, output_mask = rest
    if not _is_one_small_image(x, weight, *settings):
        return NotImplemented
    stride, padding, dilation, *_ = ConvolutionSettings(*settings)
    g = materialize(g.flatten(2)[0])  # (outputs, places)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        patches = weight.flatten(1).t() @ g
        grad_x = materialize(
            aten.col2im(patches.unsqueeze(0), x.shape[2:], weight.shape[2:], dilation, padding, stride)
        )
    if output_mask[1]:
        patches = materialize(aten.im2col(x, weight.shape[2:], dilation, padding, stride)[0])
        grad_weight = (g @ patches.t()).view(weight.shape)
    if output_mask[2]:
        grad_bias = g.sum(1)
    return grad_x, grad_weight, grad_bias


def _is_one_small_image(x: Tensor, weight: Tensor, *rest: Any) -> bool:
    settings = ConvolutionSettings(*rest)
    return (
        x.dim() == 4
        and len(x) == 1
        and settings.has_plain_patches
        and x.is_floating_point()
        and x[0, 0].numel() * weight.numel() <= SMALL_IMAGE
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    if not _is_short(q, k, dropout):
        return NotImplemented
    scores = _scores(q, k, causal, attn_mask, scale)
    total = scores.logsumexp(-1)
    return torch.exp(scores - total.unsqueeze(-1)) @ v, total


def attention_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    dropout: float,
    causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    if not _is_short(q, k, dropout):
        return NotImplemented
    weights = materialize(torch.exp(_scores(q, k, causal, attn_mask, scale) - total.unsqueeze(-1)))
    grad_weights = g @ v.transpose(-1, -2)
    grad_scores = materialize(weights * (grad_weights - (g * out).sum(-1, keepdim=True)) * _scale(q, scale))
    return grad_scores @ k, grad_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ g


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    scores = (q @ k.transpose(-1, -2)) * _scale(q, scale)
    if causal:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores if mask is None else scores + mask


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _is_short(q: Tensor, k: Tensor, dropout: float) -> bool:
    return dropout == 0 and q[..., 0].numel() * k.shape[-2] <= SMALL_SCORES


def max_pool2d_backward(
    g: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
) -> Any:
    """Sum over the places of a window: the gradient of the windows whose largest value is at this place."""
    vectors = x.dim() == 4 and len(x) > 1 and x.shape[1] > 1 and x.stride(1) == 1
    if not vectors or any(padding) or ceil_mode or kernel[0] * kernel[1] > SMALL_WINDOW:
        return NotImplemented
    down, right = stride or kernel
    height, width = g.shape[-2:]
    places = [(i * dilation[0], j * dilation[1]) for i in range(kernel[0]) for j in range(kernel[1])]
    ends = (height - 1) * down + 1, (width - 1) * right + 1
    values = [x[..., i : i + ends[0] : down, j : j + ends[1] : right] for i, j in places]
    largest = values[0]
    place = torch.zeros_like(g)  # numbers of places in the type of values, which compare faster than integers
    for number, value in enumerate(values[1:], 1):
        larger = (value > largest) | value.ne(value)  # as torch: the first of equal values, the last NaN
        largest = torch.where(larger, value, largest)
        place = torch.where(larger, float(number), place)
    place = materialize(place)
    total = torch.zeros_like(x)
    for number, (i, j) in enumerate(places):
        part = torch.where(place == number, g, 0.0)
        if (down, right) != (1, 1):  # zeros between the windows
            part = F.pad(part[..., :, None, :, None], (0, right - 1, 0, 0, 0, down - 1)).flatten(-2).flatten(-3, -2)
        total = total + F.pad(part, (j, x.shape[-1] - j - part.shape[-1], i, x.shape[-2] - i - part.shape[-2]))
    return total


DECOMPOSITIONS: dict[Any, Any] = {
    aten.mm.default: mm,
    aten.addmm.default: addmm,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
    aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
}


# --- library calls ----------------------------------------------------------------------------------------------------

LIBRARY_CALLS: dict[Any, Any] = {
    aten.mm.default: lambda a, b: not (_has_vector(a, b) or _is_small(a, b)),
    aten.addmm.default: lambda _, a, b: not (_has_vector(a, b) or _is_small(a, b)),
    aten.bmm.default: lambda a, b: True,
    aten.baddbmm.default: lambda _, a, b: True,
    aten.convolution.default: lambda x, weight, bias, *rest: not _is_one_small_image(x, weight, *rest),
    aten.convolution_backward.default: lambda g, x, weight, _, *rest: not _is_one_small_image(x, weight, *rest[:-1]),
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda q, k, *_: not _is_short(q, k, 0.0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: lambda g, q, k, *_: not _is_short(q, k, 0.0),
}


def is_library_call(function: Any, args: Sequence[Any]) -> bool:
    """Test whether uncompiled and compiled code both call a library for this operation."""
    test = LIBRARY_CALLS.get(function)
    return test is not None and test(*args)
