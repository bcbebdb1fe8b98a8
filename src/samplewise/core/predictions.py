"""Predicted class and margin of each sample, from logits (B, classes) and labels (B,)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

PREDICTION_COLUMNS = ("label", "prediction", "margin")
IGNORE_INDEX = -100  # label that nn.CrossEntropyLoss leaves out by default


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Margins (B,): the label's logit minus the largest other logit."""
    label_column = labels.unsqueeze(1)
    others = logits.scatter(1, label_column, -torch.inf)
    return logits.gather(1, label_column).squeeze(1) - others.amax(1)


def prediction_columns(
    logits: Tensor, labels: Tensor, ignore_index: int, names: Collection[str]
) -> dict[str, Tensor] | None:
    """Columns of these names, name -> (B,), detached; None unless each sample has one class index and one prediction.

    label       class index of the target
    prediction  class with the largest logit
    margin      see `margins`; NaN if the label is `ignore_index`
    """
    if not names or logits.dim() != 2 or labels.dim() != 1 or labels.is_floating_point():
        return None
    logits = logits.detach()
    labels = labels.long()  # the criterion accepts uint8, an index must be int64
    columns = {}
    if "label" in names:
        columns["label"] = labels
    if "prediction" in names:
        columns["prediction"] = logits.argmax(1)
    if "margin" in names:
        counted = labels != ignore_index
        columns["margin"] = torch.where(counted, margins(logits, torch.where(counted, labels, 0)), torch.nan)
    return columns
