"""Rules for convolutions of any dimension, stride, dilation and grouping, including transposed convolutions.

Rows are computed in one of two ways, chosen by size: as one grouped convolution for a chunk of samples, with one group
per sample; or as the product of the unfolded input patches with the gradient. Patches of at least medium size are
copied several times faster with channels last: rows then have channels last, too, and only results are permuted.

If rows would be larger than patches and gradient together, the gradients are kept as factors. If there are few
positions, or patches with a large stride, the factors are the patches and the gradient: one copy serves norms and sum,
and its product is faster than a convolution of few positions. Otherwise norms are computed from shifted products of the
input, and sums by the ordinary backward.

Legend: b sample, n image of the sample, o and i output and input channel, p output position, k position in the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.engine.grads import by_rows
from samplewise.engine.grads.base import PerSampleGrad, total
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.factored import FactoredGrad, PairSums, Term, scaled
from samplewise.engine.graph import Node, scalar
from samplewise.engine.rules.use import Use, summed

# Patch size (elements under the kernel) below which a grouped convolution has too little work per group.
SMALL_PATCH = 256
# Patch size from which patches are copied faster with channels last.
MEDIUM_PATCH = 64
# Number of positions up to which patches fit the cache, and their product is faster than a grouped convolution.
FEW_POSITIONS = 100
# Number of positions from which shifted products of the input are faster than patches, and a convolution faster than
# a product.
MANY_POSITIONS = 64
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


def _settings(node: Node) -> ConvolutionSettings:
    names: Any = ConvolutionSettings._fields
    return ConvolutionSettings(*(scalar(node, name) for name in names))


def kernel(use: Use) -> PerSampleGrad | None:
    """Rule for the weight of a convolution."""
    form = _kernel(use)
    if form is None:
        return None
    if form.prefers_factors and not form.prefers_shifts:
        return form.factors()
    stored = form if form.prefers_factors else DenseGrad(*form.parts(0, form.samples))
    return ChannelsLastGrad(stored) if form.channels_last else stored


def kernel_factors(use: Use) -> PerSampleGrad | None:
    """As `kernel`, in factors (patches and gradient) if the convolution has plain patches."""
    form = _kernel(use)
    return form.factors() if form is not None and form.settings.has_plain_patches else kernel(use)


def _kernel(use: Use) -> ConvolutionGrad | None:
    g = use.gradient
    x = use.tensor("input")
    weight = use.tensor("weight")
    rows = use.rows(1)
    if rows is None or g.is_complex() or g.dim() != weight.dim():
        return None
    return ConvolutionGrad(rows.gather(x), rows.gather(g), weight.detach(), _settings(use.node))


def bias(use: Use) -> PerSampleGrad | None:
    """Rule for the bias of a convolution."""
    return summed(use, use.gradient, (1, *use.shape, *(1,) * (use.gradient.dim() - 2)))


class ConvolutionGrad(PerSampleGrad):
    """Per-sample gradients of a weight from x (b, n, i, ...) and g (b, n, o, ...).

    Rows are (o, i, k), or (o, k, i) if `channels_last`.
    """

    dot = by_rows.dot
    gram = by_rows.gram
    sum_of_squares = by_rows.sum_of_squares
    project = by_rows.project
    is_bounded_by_norms = True  # the squares of all positions are among the summed pairs

    def __init__(self, x: Tensor, g: Tensor, weight: Tensor, settings: ConvolutionSettings):
        self.x = x
        self.g = g
        self.weight = weight
        self.settings = settings
        self.positions = g.shape[1] * math.prod(g.shape[3:])
        self.patch = math.prod(weight.shape[1:])
        self.samples = x.shape[0]
        self.shape = tuple((weight.movedim(1, -1) if self.channels_last else weight).shape)

    @property
    def prefers_factors(self) -> bool:
        """True if patches and gradient need so much less memory than rows that they are kept instead."""
        stored = self.positions * (self.shape[0] + self.patch)
        return self.settings.has_plain_patches and self.width > ROWS_PAY * stored

    @property
    def by_patches(self) -> bool:
        """True if rows are computed from patches, False if from a grouped convolution."""
        few = self.patch < SMALL_PATCH or self.positions <= FEW_POSITIONS
        return self.settings.has_plain_patches and few

    @property
    def channels_last(self) -> bool:
        return self.by_patches and self.patch >= MEDIUM_PATCH

    def rows(self, start: int, stop: int) -> Tensor:
        if not self.by_patches or torch.is_grad_enabled():
            return torch.cat(self.parts(start, stop))
        rows = self.g.new_empty(stop - start, *self.shape)
        for at, end in self._spans(start, stop):
            self._rows_by_patches(at, end, rows[at - start : end - start].view(end - at, self.shape[0], self.patch))
        return rows

    def parts(self, start: int, stop: int) -> list[Tensor]:
        """Rows in several tensors, so that the temporaries of each stay below CHUNK elements."""
        make = self._rows_by_patches if self.by_patches else self._rows_by_groups
        return [make(at, end) for at, end in self._spans(start, stop)]

    def _spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        one = self.positions * self.patch if self.by_patches else self.x[0].numel() + self.width
        step = max(1, CHUNK // max(one, 1))
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

    def _rows_by_patches(self, start: int, stop: int, out: Tensor | None = None) -> Tensor:
        x = self.x[start:stop]
        patches = _patches(x.flatten(0, 1), self.weight.shape[2:], self.settings, self.channels_last)
        right = patches.unflatten(0, x.shape[:2]).flatten(1, 2)
        left = self._by_position(self.g[start:stop]).transpose(1, 2)
        return torch.bmm(left, right, out=out).view(stop - start, *self.shape)

    def factors(self) -> FactoredGrad:
        """Factors of the gradients: left (b, np, o), right (b, np, ik)."""
        patches = _patches(self.x.flatten(0, 1), self.weight.shape[2:], self.settings, channels_last=True)
        channels_first = patches.unflatten(2, (-1, self.weight.shape[1])).transpose(2, 3).flatten(2)
        right = channels_first.unflatten(0, self.x.shape[:2]).flatten(1, 2)
        return FactoredGrad([Term(self._by_position(self.g).contiguous(), right)], tuple(self.weight.shape))

    def _by_position(self, g: Tensor) -> Tensor:
        """The gradient (b, n, o, ...) as (b, np, o)."""
        return g.flatten(3).transpose(2, 3).flatten(1, 2)

    @property
    def prefers_shifts(self) -> bool:
        """True if `squared_norms` is faster than products of patches: one image per sample with many positions, and few
        pairs of input positions. These must be fewer than half the pairs of output positions times the kernel's size.
        """
        padded = math.prod(s + 2 * p for s, p in zip(self.x.shape[3:], self.settings.padding, strict=True))
        kernel = math.prod(self.weight.shape[2:])
        is_large = self.positions >= MANY_POSITIONS and kernel > 1
        return self.x.shape[1] == 1 and is_large and 2 * padded**2 < self.positions**2 * kernel

    def squared_norms(self, exactly: bool = True) -> Tensor:
        """As `PerSampleGrad.squared_norms`. exactly: if False, NaN for samples whose sum of pairs cancels."""
        step = max(1, CHUNK // (self.positions * self.patch))
        spans = [(at, min(at + step, self.samples)) for at in range(0, self.samples, step)]
        return torch.cat([self._norms_by_shifts(at, end, exactly) for at, end in spans])

    @property
    def may_cancel(self) -> bool:
        return self.positions > 1

    def scaled_norms(self) -> Tensor:
        x, of_x = scaled(self.x)
        g, of_g = scaled(self.g)
        return by_rows.root(ConvolutionGrad(x, g, self.weight, self.settings).squared_norms(False)) * of_x * of_g

    def _norms_by_shifts(self, start: int, stop: int, exactly: bool) -> Tensor:
        """Squared norms from inner products of patches, which are sums over kernel positions of input products."""
        x = _padded(self.x[start:stop, 0], self.settings)
        g = self.g[start:stop, 0].flatten(2)
        between = torch.bmm(x.flatten(2).transpose(1, 2), x.flatten(2)).view(len(x), *x.shape[2:], *x.shape[2:])
        patches = total(between[(slice(None), *window, *window)] for window in self._windows())
        pairs = PairSums()
        pairs.add(patches.reshape(len(x), self.positions, self.positions), torch.bmm(g.transpose(1, 2), g))
        return pairs.checked((lambda samples: self._some_norms(samples + start)) if exactly else None)

    def _windows(self) -> Iterator[tuple[slice, ...]]:
        """Yield, for each kernel position, the input positions it is multiplied with."""
        stride = self.settings.stride
        dilation = self.settings.dilation
        out = self.g.shape[3:]
        for offset in product(*(range(size) for size in self.weight.shape[2:])):
            firsts = [at * d for at, d in zip(offset, dilation, strict=True)]
            yield tuple(slice(f, f + (n - 1) * s + 1, s) for f, n, s in zip(firsts, out, stride, strict=True))

    def _some_norms(self, samples: Tensor) -> Tensor:
        return by_rows.squared_norms(ConvolutionGrad(self.x[samples], self.g[samples], self.weight, self.settings))

    def sum(self, weights: Tensor | None) -> Tensor:
        along = (-1,) + (1,) * (self.g.dim() - 1)
        g = self.g if weights is None else self.g * weights.to(self.g.dtype).view(along)
        total = self._kernel_gradient(self.x.flatten(0, 1), g.flatten(0, 1), self.weight, 1)
        return total.movedim(1, -1) if self.channels_last else total

    def describe(self) -> str:
        return f"factors, {self.positions} positions"


class ChannelsLastGrad(PerSampleGrad):
    """Per-sample gradients with rows (o, k, i), presented in the parameter's layout (o, i, k)."""

    project = by_rows.project

    def __init__(self, source: PerSampleGrad):
        o, *kernel, i = source.shape
        self.samples = source.samples
        self.shape = (o, i, *kernel)
        self.row_size = source.row_size
        self.step = source.step
        self.is_bounded_by_norms = source.is_bounded_by_norms
        self.source = source

    def rows(self, start: int, stop: int) -> Tensor:
        return self.source.rows(start, stop).movedim(-1, 2)

    @property
    def kept(self) -> tuple[Tensor, ...]:
        return self.source.kept

    def squared_norms(self) -> Tensor:
        return self.source.squared_norms()

    @property
    def may_cancel(self) -> bool:
        return self.source.may_cancel

    def scaled_norms(self) -> Tensor:
        return self.source.scaled_norms()

    def dot(self, direction: Tensor) -> Tensor:
        return self.source.dot(direction.movedim(1, -1))

    def gram(self, other: PerSampleGrad) -> Tensor:
        return self.source.gram(other.source) if isinstance(other, ChannelsLastGrad) else by_rows.gram(self, other)

    def sum(self, weights: Tensor | None) -> Tensor:
        return _first(self.source.sum(weights))

    def sum_of_squares(self, centre: Tensor | None) -> Tensor:
        return _first(self.source.sum_of_squares(None if centre is None else centre.movedim(1, -1)))

    def describe(self) -> str:
        return self.source.describe()


def _first(tensor: Tensor) -> Tensor:
    """Permute (o, k, i) to (o, i, k), contiguous, because the result may become the `.grad` of a parameter."""
    return tensor.movedim(-1, 1).contiguous()


def _patches(x: Tensor, kernel_size: Sequence[int], settings: ConvolutionSettings, channels_last: bool) -> Tensor:
    """Input patch of each output position, (n, i, ...) -> (n, p, i * k), or (n, p, k * i) with channels last."""
    windows = _padded(x, settings, channels_last)
    for d, size in enumerate(kernel_size):
        reach = (size - 1) * settings.dilation[d] + 1
        windows = windows.unfold(2 + d, reach, settings.stride[d])[..., :: settings.dilation[d]]
    dims = len(kernel_size)
    positions = range(2, 2 + dims)
    offsets = range(2 + dims, 2 + 2 * dims)
    if channels_last:
        return windows.permute(0, *positions, *offsets, 1).flatten(1 + dims).flatten(1, dims)
    return windows.permute(0, 1, *offsets, *positions).flatten(2 + dims).flatten(1, 1 + dims).transpose(1, 2)


def _padded(x: Tensor, settings: ConvolutionSettings, channels_last: bool = False) -> Tensor:
    """Zero-pad the spatial dims of (n, i, ...); with channels last, the result has channels contiguous in memory."""
    sides = [side for p in reversed(settings.padding) for side in (p, p)]
    if channels_last:
        x = x.movedim(1, -1)
        return (F.pad(x, [0, 0, *sides]) if any(sides) else x.contiguous()).movedim(-1, 1)
    return F.pad(x, sides) if any(sides) else x
