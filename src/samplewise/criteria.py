"""Torch's criteria as per-sample losses.

`nn.CrossEntropyLoss()` returns one number for a batch. Taken apart it is sum(losses) / sum(counts): each sample's part,
and its part of the denominator (elements, valid tokens, class weights). So any cut of a window gives what the criterion
gives for the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.errors import BatchError, LossesError

Counting = Callable[[Any, Tensor, Tensor], Tensor]


class Criterion:
    """A loss function (model, (x, y)) -> (losses, counts) that equals `criterion(model(x), y)` once divided."""

    def __init__(self, criterion: Any):
        self.criterion = criterion
        self.counting = _counting(criterion)
        self.elementwise = copy.copy(criterion)  # shares the buffers, so that .to(device) reaches them
        self.elementwise.reduction = "none"

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if getattr(batch, "_fields", ())[-1:] == ("id",):  # of sw.Indexed, or a named tuple's: no data
            batch = batch[:-1]
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            raise BatchError(
                f"a criterion needs batches (x, y); found {_kind(batch)}. "
                "Write a loss function (model, batch) -> losses for other batches."
            )
        inputs, target = batch
        prediction = model(inputs)
        self._check_shapes(prediction, target)
        elements = self.elementwise(prediction, target)
        counts = self.counting(self.criterion, target, elements)
        summed = elements.dim() > 1 and self.criterion.reduction != "none"
        return (elements.flatten(1).sum(1) if summed else elements), counts

    def to(self, device: torch.device) -> None:
        """Moves class weights and the like."""
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
    return type(loss_fn) in _COUNTING


# --- each sample's part of the denominator: (criterion, target, elements) -> (B,) -------------------------------------


def _per_element(criterion: Any, target: Tensor, elements: Tensor) -> Tensor:
    return elements.new_full((len(elements),), elements[0].numel())


def _per_sample(criterion: Any, target: Tensor, elements: Tensor) -> Tensor:
    return elements.new_ones(len(elements))


def _class_weights(criterion: Any, target: Tensor, elements: Tensor) -> Tensor:
    """The weights of the classes that are counted; targets that are probabilities count one each."""
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
    nn.MultiLabelSoftMarginLoss: _per_element,  # these three make one element of each sample
    nn.MultiLabelMarginLoss: _per_element,
    nn.MultiMarginLoss: _per_element,
}


def _counting(criterion: Any) -> Counting:
    if criterion.reduction == "mean":
        return _COUNTING[type(criterion)]
    if criterion.reduction in ("batchmean", "none"):
        return _per_sample
    raise LossesError(
        f"{type(criterion).__name__} as loss_fn must have reduction='mean': an update is a mean over its samples; "
        f"found {criterion.reduction!r}. Leave it out, and scale the learning rate instead."
    )


def _kind(batch: Any) -> str:
    return f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
