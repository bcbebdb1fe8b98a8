"""What a loss function is: `loss_fn(model, batch)` returns losses (B,), or (losses, counts)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

LossFn = Callable[[nn.Module, Any], Any]


def check_loss_fn(loss_fn: object) -> None:
    if not callable(loss_fn) or isinstance(loss_fn, nn.Module):
        raise TypeError(
            f"loss_fn must be a function (model, batch) -> losses, one per sample; found {type(loss_fn).__name__}. "
            "Write lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction='none'), or the like."
        )


def losses_of(result: Any) -> Tensor:
    """What a loss function returned, without the counts."""
    return result[0] if isinstance(result, tuple) else result
