"""Tensors whose mean or sum a trainer takes for its loss. Among them are the losses of the samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from samplewise.integrations.transformers_losses import KnownLosses

REDUCTIONS = frozenset({Tensor.mean, Tensor.nanmean, Tensor.sum, torch.mean, torch.nanmean, torch.sum})


class Reductions(TorchFunctionMode):
    """Mode in which the operands of means and sums that are attached to the graph are kept."""

    def __init__(self, operands: list[Tensor]):
        super().__init__()
        self._operands = operands

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in REDUCTIONS and result.dim() == 0 and result.requires_grad and args and args[0].dim():
            self._operands.append(args[0].detach())
        return result


class TrainerLoss(NamedTuple):
    """Loss of a batch, and what the trainer computed it from.

    loss          scalar
    denominator   what the sum of the samples' losses is divided by
    forward       outputs of the forward passes of the model
    operands      of means and sums
    unit          factor from an operand to the losses of the samples
    """

    loss: Tensor
    denominator: float
    forward: Sequence[Any]
    operands: Sequence[Tensor]
    unit: float = 1.0


def reduced_losses(trainer_loss: TrainerLoss, samples: int) -> Tensor | None:
    """The losses (B,) of the samples, whose sum over the denominator is the loss; None if no operand has them.

    An operand is (B,), or (B, ...), summed over the other dimensions; also with the opposite sign, as in -x.mean().
    """
    for operand in trainer_loss.operands:
        if len(operand) == samples:
            losses = operand.reshape(samples, -1).sum(1) * trainer_loss.unit
            for signed in (losses, -losses):
                if bool(KnownLosses(signed).agree(trainer_loss.loss, trainer_loss.denominator)):
                    return signed
    return None
