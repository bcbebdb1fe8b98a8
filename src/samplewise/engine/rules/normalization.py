"""Scale and shift of normalisation layers: the scale meets the normalised input, the shift nothing.

The statistics that the kernels save are not attached to the graph. Where quantities must be differentiable they are
computed again from the input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplewise.engine.forms import Form
from samplewise.engine.graph import scalar
from samplewise.engine.rules.use import Use, summed


def layer_norm_scale(use: Use) -> Form | None:
    x, mean, rstd = use.tensor("input"), use.tensor("result1"), use.tensor("result2")
    dims = tuple(range(-len(use.shape), 0))
    return summed(use, use.gradient * _normalised(x, mean, rstd, dims))


def layer_norm_shift(use: Use) -> Form | None:
    return summed(use, use.gradient)


def group_norm_scale(use: Use) -> Form | None:
    x, g = use.tensor("input"), use.gradient
    groups = scalar(use.node, "group")
    mean, rstd = (use.tensor(name).reshape(x.shape[0], groups, 1) for name in ("result1", "result2"))
    normal = _normalised(x.reshape(x.shape[0], groups, -1), mean, rstd, (-1,))
    return summed(use, g * normal.view(x.shape), _channels(use))


def group_norm_shift(use: Use) -> Form | None:
    return summed(use, use.gradient, _channels(use))


def batch_norm_scale(use: Use) -> Form | None:
    if scalar(use.node, "training"):
        return None
    x = use.tensor("input")
    along = (1, -1) + (1,) * (x.dim() - 2)
    mean, var = (use.tensor(name).view(along) for name in ("running_mean", "running_var"))
    normal = (x - mean) * torch.rsqrt(var + scalar(use.node, "eps"))
    return summed(use, use.gradient * normal, _channels(use))


def batch_norm_shift(use: Use) -> Form | None:
    return summed(use, use.gradient, _channels(use))


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor, dims: tuple[int, ...]) -> Tensor:
    if not (x.requires_grad and torch.is_grad_enabled()):
        return (x - mean) * rstd
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square().mean(dims, keepdim=True)
    # The kernel does not save its eps: what the saved deviation has on top of the variance is just that.
    eps = (rstd.detach().pow(-2) - var).detach()
    return (x - mean) * torch.rsqrt(var + eps)


def _channels(use: Use) -> tuple[int, ...]:
    return (1, *use.shape, *(1,) * (use.gradient.dim() - 2))
