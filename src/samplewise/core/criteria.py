"""torch.nn criteria as per-sample losses and counts.

`nn.CrossEntropyLoss()` returns one number for a batch. That number is sum(losses) / sum(counts), where losses (B,) are
sums over the elements of each sample and counts (B,) are its share of the denominator (elements, valid tokens, class
weights). A window computed in any microbatches therefore gives the same value as the criterion on the whole window.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.predictions import prediction_columns
from samplewise.errors import BatchError, LossesError

Counting = Callable[[Any, Tensor, Tensor], Tensor]


class Criterion:
    """Loss function (model, (x, y)) -> (losses, counts); sum(losses) / sum(counts) is `criterion(model(x), y)`.

    `predictions`: names of the columns that are returned as well; see `prediction_columns`. Default: none.
    """

    def __init__(self, criterion: Any):
        self.criterion = criterion
        self.counting = _counting(criterion)
        self.elementwise = copy.copy(criterion)  # shares the buffers, so that .to(device) reaches them
        self.elementwise.reduction = "none"
        self.predictions: frozenset[str] = frozenset()

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, ...]:
        if getattr(batch, "_fields", ())[-1:] == ("id",):  # the id added by sw.Indexed, or a named tuple's: not data
            batch = batch[:-1]
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            raise BatchError(
                f"a criterion needs batches (x, y); found {_kind(batch)}. "
                "Write a loss function (model, batch) -> losses for batches of another structure."
            )
        inputs, target = batch
        prediction = model(inputs)
        self._check_shapes(prediction, target)
        elements = self.elementwise(prediction, target)
        counts = self.counting(self.criterion, target, elements)
        summed = elements.dim() > 1 and self.criterion.reduction != "none"
        losses = elements.flatten(1).sum(1) if summed else elements
        columns = self._prediction_columns(prediction, target)
        return (losses, counts) if columns is None else (losses, counts, columns)

    def _prediction_columns(self, prediction: Tensor, target: Tensor) -> dict[str, Tensor] | None:
        """Columns of the predictions that were requested; None for criteria other than those of class indices."""
        if not self.predictions or _COUNTING[type(self.criterion)] is not _class_weights:
            return None
        return prediction_columns(prediction, target, self.criterion.ignore_index, self.predictions)

    def to(self, device: torch.device) -> None:
        """Move the buffers of the criterion, such as class weights, to `device`."""
        self.criterion.to(device)

    def _check_shapes(self, prediction: Tensor, target: Tensor) -> None:
        kind = type(self.criterion)
        classes = kind is nn.MultiMarginLoss or (_COUNTING[kind] is _class_weights and not target.is_floating_point())
        wanted = (len(prediction), *prediction.shape[2:]) if classes else tuple(prediction.shape)
        if tuple(target.shape) != wanted:
            raise LossesError(
                f"{kind.__name__} needs a target of shape {wanted} for predictions of shape "
                f"{tuple(prediction.shape)}; found {tuple(target.shape)}. Use squeeze, unsqueeze or view."
            )


def is_criterion(loss_fn: object) -> bool:
    """Test whether loss_fn is a supported torch.nn criterion; subclasses are not."""
    return type(loss_fn) in _COUNTING


# --- counts, each sample's share of the denominator: (criterion, target, elements) -> (B,) ----------------------------


def _per_element(criterion: Any, target: Tensor, elements: Tensor) -> Tensor:
    return elements.new_full((len(elements),), elements[0].numel())


def _per_sample(criterion: Any, target: Tensor, elements: Tensor) -> Tensor:
    return elements.new_ones(len(elements))


def _class_weights(criterion: Any, target: Tensor, elements: Tensor) -> Tensor:
    """Sum of class weights over targets that are not ignored; probability targets count 1 per element."""
    if target.is_floating_point():
        return _per_element(criterion, target, elements)
    counted = target != criterion.ignore_index
    if criterion.weight is None:
        weights = counted.to(elements.dtype)
    else:
        weights = criterion.weight[torch.where(counted, target, 0)].to(elements.dtype) * counted
    return weights.flatten(1).sum(1) if weights.dim() > 1 else weights


_COUNTING: dict[type, Counting] = {
    nn.CrossEntropyLoss: _class_weights,
    nn.NLLLoss: _class_weights,
    nn.MSELoss: _per_element,
    nn.L1Loss: _per_element,
    nn.SmoothL1Loss: _per_element,
    nn.HuberLoss: _per_element,
    nn.BCELoss: _per_element,
    nn.BCEWithLogitsLoss: _per_element,
    nn.KLDivLoss: _per_element,
    nn.PoissonNLLLoss: _per_element,
    nn.SoftMarginLoss: _per_element,
    nn.HingeEmbeddingLoss: _per_element,
    nn.MultiLabelSoftMarginLoss: _per_element,  # these three return one element per sample
    nn.MultiLabelMarginLoss: _per_element,
    nn.MultiMarginLoss: _per_element,
}


def _counting(criterion: Any) -> Counting:
    if criterion.reduction == "mean":
        return _COUNTING[type(criterion)]
    if criterion.reduction in ("batchmean", "none"):
        return _per_sample
    raise LossesError(
        f"{type(criterion).__name__} as loss_fn must have reduction='mean', because an update is a mean over samples; "
        f"found {criterion.reduction!r}. Leave reduction out and scale the learning rate instead."
    )


def _kind(batch: Any) -> str:
    return f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
