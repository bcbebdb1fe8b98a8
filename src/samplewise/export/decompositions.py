"""Decompositions to operations that the kernels of ExecuTorch compute correctly and fast.

A convolution of one image is a matrix product: the image is gathered into patches by an index that is a constant of the
file. ExecuTorch's own kernels of convolutions, and above all of their backward pass, are loops over single elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from samplewise.engine.rules.convolution import ConvolutionSettings
from samplewise.step.compiled.decompositions import attention, attention_backward

aten = torch.ops.aten


def decompositions() -> dict[Any, Any]:
    """Decompositions to ATen's core operations, with those of this module."""
    from torch._decomp import core_aten_decompositions

    table = dict(core_aten_decompositions())
    # torch 2.15 splits a norm into powers and a sum. `simplify` computes norms of gradients from their factors.
    table.pop(aten.linalg_vector_norm.default, None)
    return table | {
        aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
        aten.max_pool2d_with_indices_backward.default: max_pool2d_backward,
        aten.avg_pool2d_backward.default: avg_pool2d_backward,
        aten.convolution.default: convolution,
        aten.convolution_backward.default: convolution_backward,
    }


def max_pool2d_backward(g: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """Sum of gradients by index. The kernel of ExecuTorch 1.5.1 for this operation returns wrong values."""
    *_, indices = rest
    planes = torch.zeros_like(x).flatten(-2)
    return planes.scatter_add(-1, indices.flatten(-2), g.flatten(-2)).view(x.shape)


def avg_pool2d_backward(
    g: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    """Sum of the gradients of the outputs that read a pixel. ExecuTorch has no kernel for this operation."""
    geometry = (x.shape[-2:], kernel, stride or kernel, padding, (1, 1))
    if ceil_mode or len(kernel) != 2 or _output_size(*geometry) != list(g.shape[-2:]):
        return NotImplemented
    places = _places(*geometry)
    pixels = x.shape[-1] * x.shape[-2]
    with _disable_current_modes():
        divisor = torch.full((places.shape[1],), divisor_override or len(places), dtype=torch.float64)
        if not count_include_pad and not divisor_override:
            divisor = (places < pixels).sum(0).double()
        shares = (1 / divisor).to(g.dtype)
    planes = g.flatten(-2).reshape(-1, places.shape[1]) * shares
    return _gather(planes, _readers(places, pixels)).view(len(planes), -1, pixels).sum(1).view(x.shape)


# --- convolutions -----------------------------------------------------------------------------------------------------


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    settings = ConvolutionSettings(*rest)
    if not _is_one_image(x, settings):
        return NotImplemented
    geometry = _geometry(x, weight, settings)
    patches = _gather(x.flatten(2)[0], _places(*geometry))
    result = _grouped(_grouped(weight.flatten(1), settings.groups) @ _grouped(patches, settings.groups), 1)
    result = result if bias is None else result + bias.unsqueeze(1)
    return result.view(1, len(weight), *_output_size(*geometry)[4 - x.dim() :])


def convolution_backward(g: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any) -> Any:
    *others, output_mask = rest
    settings = ConvolutionSettings(*others)
    if not _is_one_image(x, settings):
        return NotImplemented
    groups = settings.groups
    places = _places(*_geometry(x, weight, settings))
    g = g.flatten(2)[0]  # (outputs, places)
    grad_x = grad_weight = grad_bias = None
    if output_mask[0]:
        readers = _readers(places, x.shape[2:].numel())
        by_group = weight.view(groups, len(weight) // groups, weight.shape[1], -1)
        transposed_weight = by_group.transpose(1, 2).flatten(0, 1).flatten(1)  # (inputs, outputs of a group × kernel)
        rows = _grouped(transposed_weight, groups) @ _grouped(_gather(g, readers), groups)
        grad_x = rows.reshape(x.shape)
    if output_mask[1]:
        patches = _grouped(_gather(x.flatten(2)[0], places), groups)
        grad_weight = (patches @ _grouped(g, groups).mT).mT.reshape(weight.shape)
    if output_mask[2]:
        grad_bias = g.sum(1)
    return grad_x, grad_weight, grad_bias


def _is_one_image(x: Tensor, settings: ConvolutionSettings) -> bool:
    """Test for one image, or one sequence."""
    return x.dim() in (3, 4) and len(x) == 1 and not settings.transposed and x.is_floating_point()


Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[int]]


def _geometry(x: Tensor, weight: Tensor, settings: ConvolutionSettings) -> Geometry:
    """Sizes of image and kernel, and settings, in two dimensions: a sequence is an image with one row."""
    stride, padding, dilation, *_ = settings
    if x.dim() == 4:
        return x.shape[2:], weight.shape[2:], stride, padding, dilation
    return (1, *x.shape[2:]), (1, *weight.shape[2:]), (1, *stride), (0, *padding), (1, *dilation)


def _grouped(matrix: Tensor, groups: int) -> Tensor:
    """Matrix (rows, columns) as (groups, rows of a group, columns), and back for one group."""
    if groups > 1:
        return matrix.view(groups, -1, matrix.shape[-1])
    return matrix if matrix.dim() == 2 else matrix.flatten(0, 1)


def _output_size(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    return [(size[k] + 2 * padding[k] - dilation[k] * (kernel[k] - 1) - 1) // stride[k] + 1 for k in (0, 1)]


def _places(
    size: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Index (kernel, outputs) of the pixel that each output reads; the number of pixels where that is padding."""
    outputs = _output_size(size, kernel, stride, padding, dilation)
    with _disable_current_modes():  # a constant: not traced
        lines = []
        for k in (0, 1):
            offsets = torch.arange(kernel[k]) * dilation[k] - padding[k]
            line = offsets[:, None] + torch.arange(outputs[k]) * stride[k]
            lines.append(torch.where((line >= 0) & (line < size[k]), line, -1))
        rows, columns = lines[0][:, None, :, None], lines[1][None, :, None, :]
        index = torch.where((rows >= 0) & (columns >= 0), rows * size[1] + columns, size[0] * size[1])
        return index.reshape(kernel[0] * kernel[1], -1)


def _readers(places: Tensor, pixels: int) -> Tensor:
    """Index (kernel, pixels) of the output that reads each pixel; the number of outputs where there is none."""
    with _disable_current_modes():
        kernel, outputs = places.shape
        index = torch.full((kernel, pixels + 1), outputs)
        index.scatter_(1, places, torch.arange(outputs).expand(kernel, -1))
        return index[:, :pixels].contiguous()


def _gather(planes: Tensor, index: Tensor) -> Tensor:
    """Patches (channels × kernel, places) of planes (channels, pixels); an index beyond the last pixel reads zero."""
    with _disable_current_modes():
        reads_beyond = int(index.max()) == planes.shape[1]
        flat = index.flatten()
    if reads_beyond:
        planes = torch.cat([planes, planes.new_zeros(len(planes), 1)], 1)
    return planes.index_select(1, flat).view(-1, index.shape[1])
