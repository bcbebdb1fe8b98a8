"""Parameters that meet an activation element by element, broadcast over the samples.

The gradient of the operand is some tensor laid out like the output's gradient, summed within each sample.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from samplewise.engine.forms import Form
from samplewise.engine.graph import scalar
from samplewise.engine.rules.use import Use, summed


def passed_on(use: Use) -> Form | None:
    return summed(use, use.gradient)


def added(use: Use) -> Form | None:
    alpha = scalar(use.node, "alpha")
    return summed(use, use.gradient if alpha == 1 else use.gradient * alpha)


def subtracted(use: Use) -> Form | None:
    return summed(use, use.gradient * -scalar(use.node, "alpha"))


def times_other(use: Use) -> Form | None:
    return _meeting(use, "other", torch.mul)


def times_self(use: Use) -> Form | None:
    return _meeting(use, "self", torch.mul)


def divided(use: Use) -> Form | None:
    rounds = getattr(use.node, "_saved_rounding_mode", None) is not None
    return None if rounds else _meeting(use, "other", torch.div)


def _meeting(use: Use, name: str, operation: Callable[[Tensor, Tensor], Tensor]) -> Form | None:
    known = isinstance(use.saved[name], Tensor)  # else the parameter meets a Python number
    return summed(use, operation(use.gradient, use.tensor(name))) if known else None


def prelu_slope(use: Use) -> Form | None:
    x = use.tensor("self")
    return summed(use, torch.where(x > 0, 0, use.gradient * x))
