"""Values that training_step returns, or passes to manual_backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise.core.losses import IGNORE_INDEX, PREDICTION_COLUMNS, prediction_columns
from samplewise.engine.outputs import checked_outputs
from samplewise.errors import LossesError
from samplewise.integrations.adapter import BatchLoss

KEYS = ("outputs", "losses", "counts", "labels", "id")


def check_arguments(positional: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments of manual_backward other than the loss and KEYS."""
    surplus = ["a second positional argument"] if positional else [key for key in keywords if key not in KEYS]
    if surplus:
        raise TypeError(
            f"manual_backward must get the loss, and {', '.join(KEYS)} as keywords; found {surplus[0]}. Call it once "
            "per forward pass."
        )


def parse(output: Any, scale: float = 1.0) -> BatchLoss:
    """Check and name the values. `scale`: loss scale that the losses (B,) contain."""
    entries = output if isinstance(output, Mapping) else {"loss": output}
    loss = entries.get("loss")
    outputs: Any = entries.get("outputs")
    counts = entries.get("counts")
    if not isinstance(loss, Tensor) or loss.dim() > 1 or (loss.dim() == 0 and outputs is None):
        raise LossesError(
            "training_step must return the losses of the samples, (B,), or {'loss': scalar, 'outputs': tensor (B, "
            "...)} with the tensor that the loss was computed from; "
            f"found {_description(loss)}. Compute the losses with "
            "reduction='none' and return them, or return the outputs of the model too. With manual optimization: "
            "self.manual_backward(losses), or self.manual_backward(loss, outputs=outputs)."
        )
    _check_tensors(entries)
    attached = [loss] if loss.dim() == 1 else checked_outputs(loss, outputs)
    samples = len(attached[0])
    if counts is not None and tuple(counts.shape) != (samples,):
        raise LossesError(f"counts must have one value per sample, ({samples},); found {tuple(counts.shape)}.")
    labels = entries.get("labels")
    if labels is not None and len(labels) != samples:
        raise LossesError(f"labels must have one row per sample, {samples}; found shape {tuple(labels.shape)}.")
    losses = entries.get("losses")
    columns = None
    if isinstance(outputs, Tensor) and labels is not None:
        columns = prediction_columns(outputs, labels, IGNORE_INDEX, PREDICTION_COLUMNS)
    if loss.dim() == 1:
        losses = loss.detach() / scale if scale != 1 else loss.detach()
        loss = loss.mean() if counts is None else loss.sum() / _nonzero(counts.sum())
    return BatchLoss(loss, attached, samples, losses, counts, columns, entries.get("id"))


def for_trainer(output: Any, loss: Tensor) -> Any:
    """Value of training_step for the trainer: a scalar loss, and the other entries without their graph."""
    if not isinstance(output, Mapping):
        return loss
    others = {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
    return {**others, "loss": loss}


def _check_tensors(entries: Mapping[str, Any]) -> None:
    for key in ("losses", "counts", "labels"):
        if not isinstance(entries.get(key), Tensor | None):
            raise LossesError(f"{key} must be a tensor (B,); found {type(entries[key]).__name__}.")


def _nonzero(count: Tensor) -> Tensor:
    return torch.where(count == 0, 1, count)


def _description(loss: Any) -> str:
    if not isinstance(loss, Tensor):
        return "no loss" if loss is None else f"a loss of type {type(loss).__name__}"
    return "a scalar without outputs" if loss.dim() == 0 else f"losses of shape {tuple(loss.shape)}"
