"""Rules for parameters combined elementwise with an activation, broadcast over the samples.

The gradient of the parameter is a tensor in the layout of the output's gradient, summed within each sample.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from samplewise.engine.grads.base import PerSampleGrad
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
