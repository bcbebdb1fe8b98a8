"""Rules for convolutions of any dimension, stride, dilation and grouping, including transposed convolutions.

Rows are computed as one grouped convolution for a chunk of samples, with one group per sample. With few input channels,
the first dimension of the kernel is unfolded into channels before; if they stay few, or with a kernel of one position,
rows are the product of the unfolded input patches with the gradient.

If rows would be larger than patches and gradient together, input and gradient are kept instead: norms are computed from
inner products of patches, and sums by the ordinary backward.

Legend: b sample, n image of the sample, o and i output and input channel, p output position, k position in the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.engine.deferred_checks import is_traced
from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import FactoredGrad, Term
from samplewise.engine.grads.kernels import PairSums, bmm, frobenius_norms, is_plain, root, scale_to_one
from samplewise.engine.graph.graph import scalar
from samplewise.engine.rules.rule_input import Use, summed

# Convolution kernels compute this many input channels at a time: with fewer, the product of patches is faster.
CHANNEL_BLOCK = 8
# Number of positions above which the product of patches is faster in any case: long sums suit it.
MANY_POSITIONS = 2048
# Rows of up to this many times the size of patches and gradient are kept: they give norms and sum faster.
ROWS_PAY = 1.75
# Maximum number of elements in the temporaries of a chunk of samples.
CHUNK = 2**20


class ConvolutionSettings(NamedTuple):
    """Settings saved by the convolution node."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def has_plain_patches(self) -> bool:
        """True if the convolution is a product with unfolded patches: not transposed, one group."""
        return not self.transposed and self.groups == 1


def kernel(use: Use) -> PerSampleGrad | None:
    """Rule for the weight of a convolution."""
    grad = _kernel(use)
    if grad is None or grad.prefers_factors:
        return grad
    return DenseGrad(*grad.parts(0, grad.samples), terms=grad.term_norms)


def kernel_factors(use: Use) -> PerSampleGrad | None:
    """As `kernel`, in factors (patches and gradient) if the convolution has plain patches."""
    grad = _kernel(use)
    return grad.factors() if grad is not None and grad.settings.has_plain_patches else kernel(use)


def _kernel(use: Use) -> ConvolutionGrad | None:
    g = use.gradient
    x = use.tensor("input")
    weight = use.tensor("weight")
    rows = use.rows(1)
    if rows is None or g.is_complex() or g.dim() != weight.dim():
        return None
    names: Any = ConvolutionSettings._fields
    return ConvolutionGrad(
        rows.gather(x),
        rows.gather(g),
        weight.detach(),
        ConvolutionSettings(*(scalar(use.node, name) for name in names)),
    )


def bias(use: Use) -> PerSampleGrad | None:
    """Rule for the bias of a convolution."""
    return summed(use, use.gradient, (1, *use.shape, *(1,) * (use.gradient.dim() - 2)))


class ConvolutionGrad(PerSampleGrad):
    """Per-sample gradients of a weight from x (b, n, i, ...) and g (b, n, o, ...)."""

    is_bounded_by_norms = True  # the squares of all positions are among the summed pairs

    def __init__(self, x: Tensor, g: Tensor, weight: Tensor, settings: ConvolutionSettings):
        self.x = x
        self.g = g
        self.weight = weight
        self.settings = settings
        self.positions = g.shape[1] * math.prod(g.shape[3:])
        self.patch = math.prod(weight.shape[1:])
        self.samples = x.shape[0]
        self.shape = tuple(weight.shape)

    @property
    def prefers_factors(self) -> bool:
        """True if patches and gradient need so much less memory than rows that they are kept instead."""
        stored = self.positions * (self.shape[0] + self.patch)
        return self.settings.has_plain_patches and self.width > ROWS_PAY * stored

    def rows(self, start: int, stop: int) -> Tensor:
        return torch.cat(self.parts(start, stop))

    def parts(self, start: int, stop: int) -> list[Tensor]:
        """Rows in several tensors, so that the temporaries of each stay below CHUNK elements."""
        channels = self.shape[1]
        # Inductor fuses the copy of the patches with the operations before it, and calls a library for convolutions.
        suits_patches = channels < CHANNEL_BLOCK or self.patch == channels or is_traced(self.g)
        if self._suits_strips:
            make = self._rows_by_strips
            elements = self.shape[2] * self.x[0].numel() // self.settings.stride[0] + self.g[0].numel()
        elif suits_patches and self.settings.has_plain_patches:
            make = self._rows_by_patches
            elements = self.positions * self.patch
        else:
            make = self._rows_by_groups
            elements = self.x[0].numel() + self.width
        return [make(at, end) for at, end in self._spans(start, stop, elements)]

    def _spans(self, start: int, stop: int, elements: int) -> list[tuple[int, int]]:
        """Chunks of samples whose temporaries have this number of elements each."""
        step = max(1, CHUNK // max(elements, 1))
        return [(at, min(at + step, stop)) for at in range(start, stop, step)]

    def _rows_by_groups(self, start: int, stop: int) -> Tensor:
        x = self.x[start:stop]
        g = self.g[start:stop]
        count = stop - start
        x = x.transpose(0, 1).reshape(x.shape[1], -1, *x.shape[3:])
        g = g.transpose(0, 1).reshape(g.shape[1], -1, *g.shape[3:])
        only_shape = self.weight.new_empty(count * self.weight.shape[0], *self.weight.shape[1:])
        rows = self._kernel_gradient(x, g, only_shape, count)
        return rows.view(count, *self.shape)

    def _kernel_gradient(self, x: Tensor, g: Tensor, weight: Tensor, multiple: int) -> Tensor:
        stride, padding, dilation, transposed, output_padding, groups = self.settings
        return torch.ops.aten.convolution_backward(
            g,
            x,
            weight,
            None,
            stride,
            padding,
            dilation,
            transposed,
            output_padding,
            groups * multiple,
            [False, True, False],
        )[1]

    @property
    def _suits_strips(self) -> bool:
        """True if input channels and the first dimension of the kernel together fill the registers of oneDNN's kernels:
        one block of them, or two.
        """
        o, i, first, *rest = self.shape
        if i >= CHANNEL_BLOCK or not CHANNEL_BLOCK <= i * first <= 2 * CHANNEL_BLOCK or math.prod(rest) == 1:
            return False
        # A gradient in another layout is copied, which takes longer than patches of fewer elements.
        suits_layout = self.g.is_contiguous() or self.patch > o
        suits_size = self.positions <= MANY_POSITIONS
        return suits_size and suits_layout and self.settings.has_plain_patches and is_plain(self.x)

    def _rows_by_strips(self, start: int, stop: int) -> Tensor:
        """As `_rows_by_groups`, with the first dimension of the kernel as channels, filled up to whole blocks."""
        o, i, first, *rest = self.shape
        x = self.x[start:stop]
        stride = (1, *self.settings.stride[1:])
        dilation = (1, *self.settings.dilation[1:])
        settings = self.settings._replace(stride=stride, padding=(0,) * len(stride), dilation=dilation)
        strips = _windows(x.flatten(0, 1), (first,), self.settings, False).movedim(-1, 2).flatten(1, 2)
        strips = F.pad(strips, [0, 0] * len(stride) + [0, -i * first % CHANNEL_BLOCK])
        weight = self.weight.new_empty(o, strips.shape[1], 1, *rest)
        grad = ConvolutionGrad(strips.unflatten(0, x.shape[:2]), self.g[start:stop], weight, settings)
        return grad._rows_by_groups(0, stop - start)[:, :, : i * first].reshape(-1, *self.shape)

    def _rows_by_patches(self, start: int, stop: int) -> Tensor:
        left = self._by_position(self.g[start:stop]).transpose(1, 2)
        return bmm(left, self._patches(start, stop)).view(stop - start, *self.shape)

    def factors(self) -> FactoredGrad:
        """Factors of the gradients: left (b, np, o), right (b, np, ik)."""
        right = self._patches(0, self.samples).contiguous()
        return FactoredGrad([Term(self._by_position(self.g).contiguous(), right)], self.shape)

    def _patches(self, start: int, stop: int, channels_last: bool = False) -> Tensor:
        """Input patch of each position, (b, np, ik), or (b, np, ki) with channels last: with many channels, these are
        copied faster.
        """
        x = self.x[start:stop]
        windows = _windows(x.flatten(0, 1), self.weight.shape[2:], self.settings, channels_last)
        dims = self.weight.dim() - 2
        positions = range(2, 2 + dims)
        offsets = range(2 + dims, 2 + 2 * dims)
        if channels_last:
            patches = windows.permute(0, *positions, *offsets, 1).flatten(1 + dims).flatten(1, dims)
        else:
            patches = windows.permute(0, 1, *offsets, *positions).flatten(2 + dims).flatten(1, 1 + dims).transpose(1, 2)
        return patches.unflatten(0, x.shape[:2]).flatten(1, 2)

    def _by_position(self, g: Tensor) -> Tensor:
        """The gradient (b, n, o, ...) as (b, np, o)."""
        return g.flatten(3).transpose(2, 3).flatten(1, 2)

    def squared_norms(self, exactly: bool = True) -> Tensor:
        """As `PerSampleGrad.squared_norms`. exactly: if False, NaN for samples whose sum of pairs cancels."""
        spans = self._spans(0, self.samples, self.positions * self.patch)
        norms = []
        for at, end in spans:
            # From the inner products of all pairs of patches, and of the gradients there.
            patches = self._patches(at, end, channels_last=True)
            g = self._by_position(self.g[at:end])
            pairs = PairSums()
            pairs.add(bmm(patches, patches.transpose(1, 2)), bmm(g, g.transpose(1, 2)))
            norms.append(pairs.settle(partial(self._norms_from_rows, at) if exactly else None))
        return torch.cat(norms)

    def _norms_from_rows(self, start: int, samples: Tensor) -> Tensor:
        """Squared norms of some samples, counted from `start`."""
        x, g = self.x[samples + start], self.g[samples + start]
        return PerSampleGrad.squared_norms(ConvolutionGrad(x, g, self.weight, self.settings))

    @property
    def may_cancel(self) -> bool:
        return self.positions > 1

    def scaled_norms(self) -> Tensor:
        x, of_x = scale_to_one(self.x)
        g, of_g = scale_to_one(self.g)
        return root(ConvolutionGrad(x, g, self.weight, self.settings).squared_norms(False)) * of_x * of_g

    def sum(self, weights: Tensor | None) -> Tensor:
        along = (-1,) + (1,) * (self.g.dim() - 1)
        g = self.g if weights is None else self.g * weights.to(self.g.dtype).view(along)
        return self._kernel_gradient(self.x.flatten(0, 1), g.flatten(0, 1), self.weight, 1)

    def term_norms(self) -> Tensor:
        # An element of the input is in at most as many patches as the kernel has positions.
        return frobenius_norms(self.x) * frobenius_norms(self.g) * math.prod(self.weight.shape[2:]) ** 0.5

    def describe(self) -> str:
        return f"factors, {self.positions} positions"


def _windows(x: Tensor, kernel_size: Sequence[int], settings: ConvolutionSettings, channels_last: bool) -> Tensor:
    """Window under the kernel at each output position, (n, i, ...) -> (n, i, positions..., kernel...): a view of the
    padded input, with channels contiguous in memory if `channels_last`.
    """
    sides = [side for p in reversed(settings.padding) for side in (p, p)]
    if channels_last:
        x = x.movedim(1, -1)
        windows = (F.pad(x, [0, 0, *sides]) if any(sides) else x.contiguous()).movedim(-1, 1)
    else:
        windows = F.pad(x, sides) if any(sides) else x
    for d, size in enumerate(kernel_size):
        reach = (size - 1) * settings.dilation[d] + 1
        windows = windows.unfold(2 + d, reach, settings.stride[d])[..., :: settings.dilation[d]]
    return windows
