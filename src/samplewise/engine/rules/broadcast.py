"""Rules for parameters that are broadcast over the samples: combined elementwise with an activation, and scale and
shift of normalization layers.

The gradient of the parameter is a tensor in the layout of the output's gradient, summed within each sample.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad
from samplewise.engine.grads.dense import DenseGrad
from samplewise.engine.grads.kernels import frobenius_norms
from samplewise.engine.graph.graph import scalar
from samplewise.engine.rules.rule_input import Use, summed


def addend(use: Use) -> PerSampleGrad | None:
    """Rule for operands whose gradient is the output's gradient."""
    return summed(use, use.gradient)


def scaled_addend(use: Use) -> PerSampleGrad | None:
    alpha = scalar(use.node, "alpha")
    return summed(use, use.gradient if alpha == 1 else use.gradient * alpha)


def subtrahend(use: Use) -> PerSampleGrad | None:
    return summed(use, use.gradient * -scalar(use.node, "alpha"))


def times_other(use: Use) -> PerSampleGrad | None:
    return _with_operand(use, "other", torch.mul)


def times_self(use: Use) -> PerSampleGrad | None:
    return _with_operand(use, "self", torch.mul)


def dividend(use: Use) -> PerSampleGrad | None:
    rounds = getattr(use.node, "_saved_rounding_mode", None) is not None
    return None if rounds else _with_operand(use, "other", torch.div)


def _with_operand(use: Use, name: str, operation: Callable[[Tensor, Tensor], Tensor]) -> PerSampleGrad | None:
    if not isinstance(use.saved[name], Tensor):  # the other operand is a Python number
        return None
    return summed(use, operation(use.gradient, use.tensor(name)))


def prelu_slope(use: Use) -> PerSampleGrad | None:
    x = use.tensor("self")
    return summed(use, torch.where(x > 0, 0, use.gradient * x))


# --- normalization layers ---------------------------------------------------------------------------------------------
#
# The scale multiplies the normalized input, the shift is added. The statistics that the kernels save are not attached
# to the graph. If quantities must be differentiable, the statistics are recomputed from the input.


def layer_norm_scale(use: Use) -> PerSampleGrad | None:
    x = use.tensor("input")
    mean = use.tensor("result1")
    rstd = use.tensor("result2")
    g = use.gradient
    if torch.is_grad_enabled():
        return summed(use, g * _normalize(x, mean, rstd, tuple(range(-len(use.shape), 0))))
    row_dims = g.dim() - len(use.shape)
    rows = use.rows(row_dims)
    if rows is None:
        return None
    g, x = (rows.gather(t.reshape(mean.numel(), -1)) for t in (g, x))
    mean, rstd = (rows.gather(t.reshape(-1))[:, None] for t in (mean, rstd))
    # Sum over tokens of g * (x - mean) * rstd, computed as in the kernel: two products with a row of tokens.
    gx = g * x
    scale = torch.bmm(rstd, gx) - torch.bmm(mean * rstd, g)

    def terms() -> Tensor:
        return frobenius_norms(rstd) * frobenius_norms(gx) + frobenius_norms(mean * rstd) * frobenius_norms(g)

    return DenseGrad(scale.reshape(use.samples, *use.shape), terms=terms)


def group_norm_scale(use: Use) -> PerSampleGrad | None:
    if not torch.is_grad_enabled():
        return _sum_images(use, _image_gradients(use, 1))
    x = use.tensor("input")
    g = use.gradient
    groups = scalar(use.node, "group")
    mean, rstd = (use.tensor(name).reshape(x.shape[0], groups, 1) for name in ("result1", "result2"))
    normal = _normalize(x.reshape(x.shape[0], groups, -1), mean, rstd, (-1,))
    return summed(use, g * normal.view(x.shape), _channels(use))


def group_norm_shift(use: Use) -> PerSampleGrad | None:
    if not torch.is_grad_enabled():
        return _sum_images(use, _image_gradients(use, 2))
    return summed(use, use.gradient, _channels(use))


def _sum_images(use: Use, values: Tensor) -> PerSampleGrad | None:
    """Gradients from values (n, c), one row per image, summed over the images of each sample."""
    rows = use.rows(1)
    if rows is None:
        return None
    x, g, rstd = use.tensor("input"), use.gradient, use.tensor("result2")

    def terms() -> Tensor:
        # Of the scale: g (x - mean) rstd, computed as two sums over positions. The shift has smaller terms.
        of_x, of_g, of_rstd = (frobenius_norms(rows.gather(t.reshape(len(x), -1))) for t in (x, g, rstd))
        return 2 * of_g * (of_x * of_rstd + x[0, 0].numel() ** 0.5)

    return DenseGrad(rows.gather(values).sum(1), terms=terms)


def _image_gradients(use: Use, operand: int) -> Tensor:
    """Gradient of scale (operand 1) or shift (operand 2) per image, (n, c), from one call of the kernel.

    The kernel sums over images. All channels of all images are therefore passed as one image, so nothing is summed.
    """
    if "image gradients" not in use.saved:
        x = use.tensor("input")
        g = use.gradient
        mean = use.tensor("result1")
        rstd = use.tensor("result2")
        images, channels = x.shape[:2]
        as_one = (images * channels, x.numel() // (images * channels), mean.numel())
        scale = x.new_ones(images * channels)
        use.saved["image gradients"] = torch.ops.aten.native_group_norm_backward(
            g.contiguous(),
            x.contiguous(),
            mean.reshape(1, -1),
            rstd.reshape(1, -1),
            scale,
            1,
            *as_one,
            [False, True, True],
        )
    return use.saved["image gradients"][operand].view(use.saved["input"].shape[:2])


def batch_norm_scale(use: Use) -> PerSampleGrad | None:
    if scalar(use.node, "training"):
        return None
    x = use.tensor("input")
    along = (1, -1) + (1,) * (x.dim() - 2)
    mean, var = (use.tensor(name).view(along) for name in ("running_mean", "running_var"))
    normal = (x - mean) * torch.rsqrt(var + scalar(use.node, "eps"))
    return summed(use, use.gradient * normal, _channels(use))


def batch_norm_shift(use: Use) -> PerSampleGrad | None:
    return summed(use, use.gradient, _channels(use))


def _normalize(x: Tensor, mean: Tensor, rstd: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Normalized input. Under grad mode, mean and variance over `dims` are recomputed to be differentiable."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return (x - mean) * rstd
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square().mean(dims, keepdim=True)
    # The kernel does not save eps: it is the difference between the saved rstd**-2 and the variance.
    eps = (rstd.detach().pow(-2) - var).detach()
    return (x - mean) * torch.rsqrt(var + eps)


def _channels(use: Use) -> tuple[int, ...]:
    """Shape of a parameter with one value per channel, aligned with the gradient: (1, c, 1, ...)."""
    return (1, *use.shape, *(1,) * (use.gradient.dim() - 2))
