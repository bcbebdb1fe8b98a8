"""Ownership derived from shapes, for every operation in the table and every layout in which all sizes are equal.

Nothing is verified by extra passes here: each claim of `owners` is compared with what a probe finds.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samplewise.engine.graph.graph import Graph
from samplewise.engine.ownership.layouts import MOVERS, VIEWS
from samplewise.engine.ownership.ownership import owners
from samplewise.engine.ownership.probe import MIXED, probe

B = 3  # samples, tokens, channels, features: all the same


def other(h):
    """A tensor like h that is no parameter's."""
    return torch.linspace(0.3, 0.9, h.numel(), dtype=h.dtype).view(h.shape)


def chosen(h):
    """Indices of the shape of h, which differ between samples."""
    return (torch.arange(h.numel()) * 5 // 3 % B).view(h.shape)


ELEMENTWISE = {
    "Abs": torch.abs,
    "Acos": lambda h: torch.acos(h * 0.5),
    "Acosh": lambda h: torch.acosh(h + 3),
    "Add": lambda h: h + other(h)[0],
    "Addcdiv": lambda h: torch.addcdiv(h, h, 2 + other(h)),
    "Addcmul": lambda h: torch.addcmul(h, h, other(h)),
    "Asin": lambda h: torch.asin(h * 0.5),
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atan2": lambda h: torch.atan2(h, other(h)),
    "Atanh": lambda h: torch.atanh(h * 0.5),
    "BinaryCrossEntropy": lambda h: F.binary_cross_entropy(h.sigmoid(), other(h), reduction="none"),
    "BinaryCrossEntropyWithLogits": lambda h: F.binary_cross_entropy_with_logits(h, other(h), reduction="none"),
    "Celu": F.celu,
    "Clamp": lambda h: h.clamp(-0.4, 0.4),
    "ClampMax": lambda h: h.clamp_max(0.3),
    "ClampMin": lambda h: h.clamp_min(-0.3),
    "Clone": torch.clone,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Digamma": lambda h: torch.digamma(h + 3),
    "Div": lambda h: h / other(h)[:, :1],
    "Elu": F.elu,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Erfinv": lambda h: torch.erfinv(h * 0.5),
    "Exp": torch.exp,
    "Exp2": torch.exp2,
    "Expand": lambda h: h[:, :, None].expand(B, B, B, B),
    "Expm1": torch.expm1,
    "Fmod": lambda h: h.fmod(0.4),
    "Frac": torch.frac,
    "Gelu": F.gelu,
    "Hardshrink": lambda h: F.hardshrink(h, 0.1),
    "Hardsigmoid": F.hardsigmoid,
    "Hardswish": F.hardswish,
    "Hardtanh": lambda h: F.hardtanh(h, -0.5, 0.5),
    "HuberLoss": lambda h: F.huber_loss(h, other(h), reduction="none"),
    "Hypot": lambda h: torch.hypot(h, other(h)),
    "LeakyRelu": F.leaky_relu,
    "Lerp": lambda h: torch.lerp(h, other(h), 0.3),
    "Lgamma": lambda h: torch.lgamma(h + 3),
    "Log": lambda h: (h + 2).log(),
    "Log10": lambda h: (h + 2).log10(),
    "Log1P": lambda h: (h + 1.5).log1p(),
    "Log2": lambda h: (h + 2).log2(),
    "LogSigmoid": F.logsigmoid,
    "Logaddexp": lambda h: torch.logaddexp(h, other(h)),
    "Logit": lambda h: torch.logit(h.sigmoid()),
    "MaskedFill": lambda h: h.masked_fill(other(h) > 0.8, 0.0),
    "Maximum": lambda h: torch.maximum(h, other(h)),
    "Minimum": lambda h: torch.minimum(h, other(h)),
    "Mish": F.mish,
    "MseLoss": lambda h: F.mse_loss(h, other(h), reduction="none"),
    "Mul": lambda h: h * other(h)[0, 0],
    "NanToNum": torch.nan_to_num,
    "NativeDropout": lambda h: torch.native_dropout(h, 0.2, True)[0],
    "Neg": torch.neg,
    "Pow": lambda h: (h + 2) ** 1.5,
    "PreluKernel": lambda h: F.prelu(h, torch.tensor([0.2], dtype=h.dtype)),
    "Reciprocal": lambda h: (h + 2).reciprocal(),
    "Relu": F.relu,
    "Rsqrt": lambda h: (h + 2).rsqrt(),
    "Rsub": lambda h: torch.rsub(h, 1.0),
    "Sigmoid": torch.sigmoid,
    "Silu": F.silu,
    "Sin": torch.sin,
    "Sinc": torch.sinc,
    "Sinh": torch.sinh,
    "SmoothL1Loss": lambda h: F.smooth_l1_loss(h, other(h), reduction="none"),
    "Softplus": F.softplus,
    "Softshrink": lambda h: F.softshrink(h, 0.1),
    "Sqrt": lambda h: (h + 2).sqrt(),
    "Sub": lambda h: h - other(h),
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Threshold": lambda h: F.threshold(h, 0.1, 0.0),
    "ToCopy": lambda h: h.float(),
    "Where": lambda h: torch.where(other(h) > 0.5, h, other(h)),
    "Xlogy": lambda h: torch.xlogy(h, 1 + other(h)),
}


def over_dims(operation):
    return [lambda h, d=d: operation(h, d) for d in (0, 1, 2, -1)]


def images(operation):
    """Three dims are one image without a batch, four dims are a batch."""
    return [
        operation,
        lambda h: operation(h.expand(B, B, B, B)),
        lambda h: operation(torch.stack([h, h * 2, h * 3], 1)),
    ]


PADS = list(product((-1, 0, 1), repeat=2))

MOVING = {
    "T": [lambda h: h[0].t(), lambda h: h[:, 1].t(), lambda h: h.sum(2).t()],
    "Transpose": [lambda h, a=a, b=b: h.transpose(a, b) for a, b in ((0, 1), (1, 2), (0, -1), (-2, -1), (1, 1))],
    "Permute": [lambda h, p=p: h.permute(p) for p in ((1, 2, 0), (2, 0, 1), (0, 2, 1), (-1, 0, 1))],
    "Select": [lambda h, d=d: h.select(d, -1) for d in (0, 1, 2, -1)],
    "Unbind": [lambda h, d=d: sum(u * (k + 1) for k, u in enumerate(h.unbind(d))) for d in (0, 1, -1)],
    "Stack": [lambda h, d=d: torch.stack([h, h * 2, h * 3], d) for d in (0, 1, 2, 3, -1)],
    "Softmax": over_dims(torch.softmax),
    "SafeSoftmax": [lambda h: torch.ops.aten._safe_softmax(h, 2), lambda h: torch.ops.aten._safe_softmax(h, 0)],
    "LogSoftmax": over_dims(torch.log_softmax),
    "Cumsum": over_dims(torch.cumsum),
    "Cumprod": over_dims(torch.cumprod),
    "Logcumsumexp": over_dims(torch.logcumsumexp),
    "Topk": over_dims(lambda h, d: h.topk(2, d).values),
    "Sort": over_dims(lambda h, d: h.sort(d).values),
    "IndexSelect": over_dims(lambda h, d: h.index_select(d, torch.tensor([2, 0, 2]))),
    "Roll": [*over_dims(lambda h, d: h.roll(1, d)), lambda h: h.roll(2), lambda h: h.roll((1, 2), (0, 2))],
    "Flip": [*over_dims(lambda h, d: h.flip(d)), lambda h: h.flip(0, 1)],
    "Tril": [torch.tril, lambda h: h.tril(-1), lambda h: h[0].tril(1)],
    "Triu": [torch.triu, lambda h: h.triu(1), lambda h: h[:, 1].triu(-1)],
    "FftC2C": over_dims(lambda h, d: torch.view_as_real(torch.fft.fft(torch.complex(h, other(h)), dim=d)).sum(-1)),
    "FftR2C": [
        *over_dims(lambda h, d: torch.view_as_real(torch.fft.rfft(h, dim=d)).sum(-1)),
        lambda h: torch.view_as_real(torch.fft.fft2(h)).sum(-1),
    ],
    "FftC2R": over_dims(lambda h, d: torch.fft.irfft(torch.complex(h, other(h)), n=B, dim=d)),
    "ViewAsReal": [lambda h: torch.view_as_real(torch.complex(h, other(h))), lambda h: torch.view_as_real(h * 1j)],
    "ViewAsComplex": [
        lambda h: torch.view_as_complex(torch.stack([h, h * 2], -1)).abs(),
        lambda h: torch.view_as_complex(h[..., :2].contiguous()).real * 2,
    ],
    "Unfold": over_dims(lambda h, d: h.unfold(d, 2, 1)),
    "Slice": [
        lambda h: h[1:],
        lambda h: h[:, :2],
        lambda h: h[..., ::2],
        lambda h: torch.ops.aten.slice(h, 0, 0, B),  # keeps everything
        lambda h: h[:, 1:, 1:],
        lambda h: torch.cat([h, h], 1)[:, 2:5],
        lambda h: torch.cat([h, h], 0)[1:4],
        *(lambda h, d=d: _sides(torch.cat([h, h * 2], d), d) for d in (0, 1, 2)),
        *(lambda h, d=d: _interleaved(torch.stack([h, h * 2], d + 1).flatten(d, d + 1), d) for d in (0, 1, 2)),
    ],
    "Gather": [
        *(lambda h, d=d: h.gather(d, chosen(h)) for d in (0, 1, 2, -1)),
        *(lambda h, d=d: h.gather(d, chosen(h)[:, :, :1]) for d in (0, 1, 2)),
        *(lambda h, d=d: torch.cat([h, h * 2], d).gather(1, chosen(h)) for d in (0, 1, 2)),
    ],
    "Scatter": [
        *(lambda h, d=d: h.scatter(d, chosen(h)[:, :1], 0.5) for d in (0, 1, 2, -1)),
        *(lambda h, d=d: h.scatter(d, chosen(h)[:, :1], other(h)) for d in (0, 1, 2)),
        *(lambda h, d=d: other(h).scatter(d, chosen(h)[:, :1], h[:, :1]) for d in (0, 1, 2)),
    ],
    "Split": [lambda h, d=d: torch.cat(h.split(2, d)[::-1], d) for d in (0, 1, 2)],
    "SplitWithSizes": [
        *(lambda h, d=d: torch.cat(h.split([1, 2], d)[::-1], d) for d in (0, 1, 2)),
        *(lambda h, d=d: sum(torch.cat([h, h * 2], d).split([3, 3], d)) for d in (0, 1, 2)),
        *(lambda h, d=d: torch.cat([h, h * 2], d).split([1, 3, 2], d)[1] for d in (0, 1, 2)),
    ],
    "UnsafeSplit": [lambda h, d=d: torch.cat(torch.unsafe_split(h, 2, d)[::-1], d) for d in (0, 1, 2)],
    "Cat": [lambda h, d=d: torch.cat([h, h * 2], d) for d in (0, 1, 2, -1)],
    "Glu": [lambda h, d=d: F.glu(torch.cat([h, h * 2], d), d) for d in (0, 1, 2, -1)],
    "Repeat": [lambda h, r=r: h.repeat(r) for r in ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3), (3, 1, 1, 1))],
    "ConstantPadNd": [
        *(lambda h, p=p: F.pad(h, p) for p in PADS),
        *(lambda h, p=p: F.pad(h, (0, 0, *p)) for p in PADS),
        *(lambda h, p=p: F.pad(h, (0, 0, 0, 0, *p)) for p in PADS),
        lambda h: F.pad(h, (1, -1, -1, 1, 1, -1)),
        lambda h: F.pad(h, (2, -2, 0, 0, 1, 1)),
    ],
    "Sum": [lambda h: h.sum(1), lambda h: h.sum((0, 2)), lambda h: h.sum(2, keepdim=True), lambda h: h.sum(()) * h],
    "Mean": [lambda h: h.mean(1), lambda h: h.mean((0, 2)), lambda h: h.mean(0, keepdim=True) * h],
    "Amax": [lambda h: h.amax(1), lambda h: h.amax((0, 1)), lambda h: h.amax(2, keepdim=True)],
    "Amin": [lambda h: h.amin(1), lambda h: h.amin((0, 1)), lambda h: h.amin(0, keepdim=True)],
    "Max": [lambda h: h.max(1).values, lambda h: h.max(0, keepdim=True).values, lambda h: h * h.max()],
    "Min": [lambda h: h.min(1).values, lambda h: h.min(2, keepdim=True).values, lambda h: h * h.min()],
    "Logsumexp": [lambda h: h.logsumexp(1), lambda h: h.logsumexp((0, 2)), lambda h: h.logsumexp(0, keepdim=True)],
    "LinalgVectorNorm": [
        lambda h: torch.linalg.vector_norm(h, dim=1),
        lambda h: torch.linalg.vector_norm(h, dim=(0, 1)),
        lambda h: h * torch.linalg.vector_norm(h),
    ],
    "Norm": [lambda h: torch.ops.aten.norm(h, 2, [1]), lambda h: h * torch.ops.aten.norm(h)],
    "Var": [lambda h: h.var(1), lambda h: h.var((0, 2)), lambda h: h * h.var(), lambda h: h.var(2, keepdim=True)],
    "Std": [lambda h: h.std(1), lambda h: h.std((0, 2)), lambda h: h * h.std(), lambda h: h.std(0, keepdim=True)],
    "Prod": [lambda h: h.prod(1), lambda h: h.prod(0, keepdim=True), lambda h: h * h.prod()],
    "Mm": [lambda h: h[0].mm(other(h)[0]), lambda h: other(h)[0].mm(h[:, 0]), lambda h: h[1].mm(h[:, 1])],
    "Addmm": [lambda h: torch.addmm(h[0], h[1], h[2]), lambda h: torch.addmm(h[0, 0], h[:, 1], other(h)[2])],
    "Bmm": [lambda h: h.bmm(other(h)), lambda h: other(h).bmm(h), lambda h: h.bmm(h)],
    "Baddbmm": [lambda h: torch.baddbmm(h, h, other(h)), lambda h: torch.baddbmm(h[:1], other(h), h)],
    "Mv": [lambda h: h[0].mv(other(h)[0, 0]), lambda h: h[:, 0].mv(h[1, 1]), lambda h: other(h)[0].mv(h[0, 0])],
    "Trilinear": [
        lambda h: F.bilinear(h[0], h[1], other(h)),
        lambda h: F.bilinear(h[:, 0], other(h)[0], h),
        lambda h: torch._trilinear(h[0], h, other(h)[0], [1, 3], [0], [1, 2], [1, 3]),
        lambda h: torch._trilinear(h[0], other(h), h[1], [1, 2], [0], [2, 3], [2, 3]),
    ],
    "LinalgSolveEx": [
        *(lambda h, left=left: torch.linalg.solve(other(h)[0] + h[0], h[1], left=left) for left in (True, False)),
        *(lambda h, left=left: torch.linalg.solve(h + 3 * torch.eye(B), h, left=left) for left in (True, False)),
        *(lambda h, left=left: torch.linalg.solve(h[0] + 3 * torch.eye(B), h, left=left) for left in (True, False)),
        lambda h: torch.linalg.solve(h + 3 * torch.eye(B), h[0]),  # (B, B): a batch of vectors, not one matrix
        lambda h: torch.linalg.solve(h.expand(B, B, B, B) + 3 * torch.eye(B), other(h)[0]),
        lambda h: torch.linalg.solve(other(h) + 3 * torch.eye(B), h),
    ],
    "Cdist": [
        lambda h: torch.cdist(h, other(h), p=3.0),
        lambda h: torch.cdist(h[0], h[1], p=1.0),
        lambda h: torch.cdist(other(h)[0], h, p=1.0),
        lambda h: torch.cdist(h, h[0].tanh(), p=1.0),
    ],
    "EuclideanDist": [
        lambda h: torch.cdist(h, other(h), compute_mode="use_mm_for_euclid_dist"),
        lambda h: torch.cdist(h[0], h[1].tanh(), compute_mode="use_mm_for_euclid_dist"),
        lambda h: torch.cdist(other(h)[0], h, compute_mode="use_mm_for_euclid_dist"),
    ],
    "Convolution": [
        lambda h: F.conv1d(h, other(h), padding=1),
        lambda h: F.conv1d(other(h), h, padding=1),
        lambda h: F.conv2d(h[None], other(h)[:1, None].expand(B, 1, B, B), padding=1, groups=B),
        lambda h: F.conv_transpose1d(h, other(h), padding=1),
    ],
    "ScaledDotProductFlashAttentionForCpu": [
        lambda h: F.scaled_dot_product_attention(*(k * torch.stack([h, h * 2, h * 3], 1) for k in (1, 2, 3))),
        lambda h: F.scaled_dot_product_attention(*(k * h.expand(B, B, B, B) for k in (1, 2, 3))),
    ],
    "NativeLayerNorm": [lambda h: F.layer_norm(h, (B,)), lambda h: F.layer_norm(h, (B, B)) * h],
    "NativeGroupNorm": [lambda h: F.group_norm(h, 3), lambda h: F.group_norm(h, 1), lambda h: F.group_norm(h[None], 3)],
    "NativeBatchNorm": [
        lambda h: F.batch_norm(h, other(h)[0, 0], other(h)[0, 1]),
        lambda h: F.batch_norm(h, None, None, training=True),
        lambda h: F.instance_norm(h),
        lambda h: F.batch_norm(h, other(h)[0, 0], other(h)[0, 1], weight=h[0, 1], bias=h[1, :, 0]),
    ],
    "AdaptiveAvgPool2D": images(lambda h: F.adaptive_avg_pool2d(h, 2)),
    "AdaptiveAvgPool3D": [lambda h: F.adaptive_avg_pool3d(h.expand(B, B, B, B), 2)],
    "AdaptiveMaxPool2D": images(lambda h: F.adaptive_max_pool2d(h, 2)),
    "AdaptiveMaxPool3D": [lambda h: F.adaptive_max_pool3d(torch.stack([h, h * 2, h * 3]), 2)],
    "AvgPool2D": images(lambda h: F.avg_pool2d(h, 3, 1, 1)),
    "AvgPool3D": [lambda h: F.avg_pool3d(torch.stack([h, h * 2, h * 3]), 3, 1, 1)],
    "MaxPool2DWithIndices": images(lambda h: F.max_pool2d(h, 3, 1, 1)),
    "MaxPool3DWithIndices": [lambda h: F.max_pool3d(torch.stack([h, h * 2, h * 3]), 3, 1, 1)],
    "PixelShuffle": [
        lambda h: F.pixel_shuffle(h, 1),
        lambda h: F.pixel_shuffle(torch.cat([h, h * 2, h * 3, h * 4]), 2),
        lambda h: F.pixel_shuffle(torch.cat([h, h * 2, h * 3, h * 4], 1)[:, :, :, None].expand(B, 12, B, B), 2),
    ],
    "ReflectionPad1D": [lambda h: F.pad(h, (1, 1), "reflect"), lambda h: F.pad(h[0], (2, 1), "reflect")],
    "ReflectionPad2D": images(lambda h: F.pad(h, (1, 1, 1, 1), "reflect")),
    "ReplicationPad2D": images(lambda h: F.pad(h, (1, -1, 1, -1), "replicate")),
    "UpsampleNearest1D": [lambda h: F.interpolate(h, scale_factor=2), lambda h: F.interpolate(h, size=B)],
    "UpsampleNearest2D": [lambda h: F.interpolate(h.expand(B, B, B, B), size=(B, B))],
    "UpsampleBilinear2D": [lambda h: F.interpolate(torch.stack([h, h * 2], 1), size=(B, B), mode="bilinear")],
    "UpsampleBicubic2D": [lambda h: F.interpolate(torch.stack([h, h * 2], 1), size=(B, B), mode="bicubic")],
    "NllLoss": [lambda h: F.nll_loss(h[0], torch.tensor([0, 2, 1]), reduction="none"), lambda h: _nll(h[:, 1])],
    "NllLoss2D": [
        lambda h: F.nll_loss(h[None], torch.ones(1, B, B, dtype=torch.long), reduction="none"),
        lambda h: _nll_of_images(torch.stack([h, h * 2, h * 3], 1)),
    ],
    "CtcLoss": [lambda h: _ctc(h), lambda h: _ctc(h.transpose(0, 1)), lambda h: _ctc(h[0])],
    "MkldnnRnnLayer": [lambda h: _lstm(h), lambda h: _lstm(h.transpose(0, 1))],
    "View": [lambda h: h.view(-1, B), lambda h: h.view(B, -1), lambda h: h.view(B * B * B).view(B, B, B)],
    "UnsafeView": [lambda h: h @ other(h)[0], lambda h: h.transpose(0, 1) @ other(h)[0]],
    "ReshapeAlias": [lambda h: torch.ops.aten._reshape_alias(h.contiguous(), (B * B, B), (B, 1))],
    "Squeeze": [lambda h: h[:, :1].squeeze(1), lambda h: h[None].squeeze(), lambda h: h[:1].squeeze((0,))],
    "Unsqueeze": [lambda h, d=d: h.unsqueeze(d) for d in (0, 1, 3, -1)],
    "Alias": [lambda h: torch.ops.aten.alias(h)],
}


def _sides(h, dim):
    """The sum of two halves, as of the two sides of pairs."""
    first, second = h.narrow(dim, 0, B), h.narrow(dim, B, B)
    return first + 2 * second


def _interleaved(h, dim):
    """The sum of every second entry, beginning with the first and with the second."""
    even, odd = [slice(None)] * 3, [slice(None)] * 3
    even[dim], odd[dim] = slice(None, None, 2), slice(1, None, 2)
    return h[tuple(even)] + 2 * h[tuple(odd)]


def _nll(h):
    return F.nll_loss(h, torch.tensor([0, 2, 1]), reduction="none")


def _nll_of_images(h):
    return F.nll_loss(h, torch.tensor([0, 2, 1])[:, None, None].expand(B, B, B), reduction="none")


def _ctc(h):
    lengths = torch.tensor([2, 1, 2])
    targets = torch.tensor([[1, 2], [2, 0], [2, 1]])
    if h.dim() == 2:  # one sequence
        return F.ctc_loss(h, targets[0], torch.tensor(B), lengths[0], reduction="none")[None].expand(B)
    return F.ctc_loss(h, targets, torch.tensor([3, 2, 3]), lengths, reduction="none")


def _lstm(h):
    """A layer with constant weights, in the float32 that its kernel is for."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.LSTM(B, B).requires_grad_(False)
    return layer(h.float())[0]


EXAMPLES = {**{name: [function] for name, function in ELEMENTWISE.items()}, **MOVING}
# Kernels of other devices, and one for float32 and sizes of 16 bytes only, which is in `test_rules`.
ELSEWHERE = {
    "CudnnBatchNorm",
    "CudnnCtcLoss",
    "FusedRmsNorm",
    "GroupedMm",
    "ScaledDotProductCudnnAttention",
    "ScaledDotProductEfficientAttention",
    "ScaledDotProductFlashAttention",
}


def test_every_operation_of_the_table_has_examples():
    assert set(MOVERS) | VIEWS == set(EXAMPLES) | ELSEWHERE


def losses_of(operation, place, reading, weight):
    """Samples stand in dim `place` before the operation, and are taken from dim `reading` after it."""
    x = torch.linspace(-1, 1, B**3, dtype=weight.dtype).view(B, B, B).cos()
    out = operation(torch.tanh(x * weight).movedim(0, place).contiguous())
    if reading >= out.dim() or out.shape[reading] % B:
        return None
    rows = out.movedim(reading, 0).reshape(B, -1)
    return (rows.double() * other(rows).double()).sum(1).tanh()


@pytest.mark.slow
@pytest.mark.parametrize("name", MOVING)
def test_claims_hold_in_every_layout(name):
    assert_claims_hold(name, product(range(3), range(4)))


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_claims_of_elementwise_operations_hold(name):
    assert_claims_hold(name, [(0, 0), (1, 1), (2, 0)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_claims_of_elementwise_operations_hold_in_every_layout(name):
    assert_claims_hold(name, product(range(3), range(4)))


def assert_claims_hold(name, layouts):
    """`layouts`: dims (before, after the operation) in which the samples stand."""
    weight = nn.Parameter(torch.linspace(0.5, 1.5, B**3, dtype=torch.float64).view(B, B, B))
    met = False
    for operation, (place, reading) in product(EXAMPLES[name], layouts):
        losses = losses_of(operation, place, reading, weight)
        if losses is None:
            continue
        graph = Graph(losses, {"weight": weight})
        met = met or name in graph.operations.values()
        claims = {graph.edge(key): owner_map for key, owner_map in owners(graph).owner_maps.items()}
        edges = list(claims)
        for edge, owner in zip(edges, probe(graph, edges).owners, strict=True):
            claimed = claims[edge].owners(edge.shape, owner.device)
            where = f"{graph.operations[edge.node]} after {name}, samples in dim {place}, read from dim {reading}"
            assert not (owner == MIXED).any(), f"{where}: shared by samples, yet claimed for one"
            assert ((owner == claimed) | (owner < 0)).all(), f"{where}: claimed for another sample"
    assert met, f"no example makes a node {name}"
