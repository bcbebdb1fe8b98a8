"""Criteria of torch.nn, and their functions in torch.nn.functional, as loss functions of single samples.

`nn.MSELoss()` returns one number for a batch. That number is sum(losses) / sum(counts) over the samples, so that a
window computed in any microbatches gives the same value as the criterion on the whole window. If all samples have the
same number of elements, the loss of a sample is the mean of its elements, and each sample counts 1. If class indices
are the targets, the denominator depends on them (ignore_index, class weights): the loss of a sample is then the sum
over its elements, and its count is the sum of their weights (without class weights: the number of valid elements).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samplewise.core.predictions import prediction_columns
from samplewise.errors import BatchError, LossesError

WITH_COUNTS = (nn.CrossEntropyLoss, nn.NLLLoss)

CRITERIA: dict[type, Callable[..., Tensor]] = {  # class -> its function
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.NLLLoss: F.nll_loss,
    nn.MSELoss: F.mse_loss,
    nn.L1Loss: F.l1_loss,
    nn.SmoothL1Loss: F.smooth_l1_loss,
    nn.HuberLoss: F.huber_loss,
    nn.BCELoss: F.binary_cross_entropy,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
    nn.KLDivLoss: F.kl_div,
    nn.PoissonNLLLoss: F.poisson_nll_loss,
    nn.SoftMarginLoss: F.soft_margin_loss,
    nn.HingeEmbeddingLoss: F.hinge_embedding_loss,
    nn.MultiLabelSoftMarginLoss: F.multilabel_soft_margin_loss,
    nn.MultiLabelMarginLoss: F.multilabel_margin_loss,
    nn.MultiMarginLoss: F.multi_margin_loss,
}
CLASS_OF_FUNCTION: dict[Any, type] = {function: kind for kind, function in CRITERIA.items()}


class Criterion:
    """Loss function (model, (x, y)) -> losses, or (losses, counts) if the criterion's denominator depends on the
    targets. Their quotient Σ losses / Σ counts is `criterion(model(x), y)`.

    `predictions`: names of the columns that are returned after these, in a dict; see `prediction_columns`.
    """

    def __init__(self, criterion: Any):
        _check_reduction(criterion)
        self.criterion = criterion
        self.elementwise = copy.copy(criterion)  # shares the buffers, so that .to(device) reaches them
        self.elementwise.reduction = "none"
        self.predictions: frozenset[str] = frozenset()
        self._extra: set[Hashable] = set()  # keys of further columns of the batch that something else reads
        self._any_extra = False

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        inputs, target = self._pair(batch)
        prediction = model(inputs)
        self._check_shapes(prediction, target)
        result = self._losses(prediction, target)
        if not self.predictions or not isinstance(self.criterion, WITH_COUNTS):
            return result
        columns = prediction_columns(prediction, target, self.criterion.ignore_index, self.predictions)
        if columns is None:
            return result
        return (*result, columns) if isinstance(result, tuple) else (result, columns)

    def _losses(self, prediction: Tensor, target: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        elements = self.elementwise(prediction, target)
        reduction = self.criterion.reduction
        if reduction == "none":
            return elements
        if reduction == "batchmean":
            return _sums(elements)
        if not isinstance(self.criterion, WITH_COUNTS) or target.is_floating_point():
            return elements.flatten(1).mean(1) if elements.dim() > 1 else elements
        return _sums(elements), _sums(_target_weights(self.criterion, target, elements.dtype))

    def to(self, device: torch.device) -> None:
        """Move the buffers of the criterion, such as class weights, to `device`."""
        self.criterion.to(device)

    def allow_columns(self, keys: Iterable[Hashable], any_key: bool = False) -> None:
        """Accept batches (x, y, ...) whose further columns have these keys (positions, or names of a named tuple);
        `any_key`: accept any further columns.
        """
        self._extra.update(keys)
        self._any_extra = self._any_extra or any_key

    def __repr__(self) -> str:
        return repr(self.criterion)

    def _pair(self, batch: Any) -> tuple[Any, Tensor]:
        """x and y of a batch (x, y), or of a batch with further columns that were allowed."""
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise BatchError(
                f"a criterion needs batches (x, y); found {_kind(batch)}. "
                "Write a loss function (model, batch) -> losses for batches of another structure."
            )
        fields = getattr(batch, "_fields", ())
        for position in range(2, len(batch)):
            names = {position, position - len(batch), *fields[position : position + 1]}
            is_id = fields[position:] == ("id",)  # the id added by sw.Indexed, or a named tuple's: not data
            if not (self._any_extra or is_id or names & self._extra):
                raise BatchError(
                    "a criterion needs batches (x, y), or further columns that a transform or the ledger reads by key; "
                    f"found {_kind(batch)}, whose column {position} nothing reads. Name it, for example with "
                    f"sw.weight({position}), or write a loss function (model, batch) -> losses."
                )
        return batch[0], batch[1]

    def _check_shapes(self, prediction: Tensor, target: Tensor) -> None:
        kind = type(self.criterion)
        if kind in (nn.CrossEntropyLoss, nn.MultiMarginLoss) and prediction.shape[1:2] == (1,):
            raise LossesError(
                f"{kind.__name__} needs predictions for at least two classes; found shape {tuple(prediction.shape)}, "
                "one class, for which the loss is always zero. Use nn.BCEWithLogitsLoss() for two classes and one "
                "output, or nn.MSELoss() for regression."
            )
        classes = kind is nn.MultiMarginLoss or (kind in WITH_COUNTS and not target.is_floating_point())
        wanted = (*prediction.shape[:1], *prediction.shape[2:]) if classes else tuple(prediction.shape)
        if target.shape == wanted:
            return
        if kind is nn.CrossEntropyLoss and target.is_floating_point():
            raise LossesError(
                f"CrossEntropyLoss needs class indices, or class probabilities of shape {wanted}; found a target of "
                f"{target.dtype} and shape {tuple(target.shape)}. Use target.long() for class indices, or nn.MSELoss() "
                "for regression."
            )
        raise LossesError(
            f"{kind.__name__} needs a target of shape {wanted} for predictions of shape "
            f"{tuple(prediction.shape)}; found {tuple(target.shape)}. Use squeeze, unsqueeze or view."
        )


def as_criterion(loss_fn: Any) -> Criterion | None:
    """Loss function of a supported criterion: an object of a class in CRITERIA (not of a subclass), one of their
    functions, or a functools.partial of one. None if loss_fn is something else.
    """
    if type(loss_fn) in CRITERIA:
        return Criterion(loss_fn)
    given = loss_fn if isinstance(loss_fn, partial) else partial(loss_fn) if callable(loss_fn) else None
    try:
        kind = None if given is None else CLASS_OF_FUNCTION.get(given.func)
    except TypeError:  # not hashable
        return None
    return None if kind is None or given is None else _with_options(kind, given)


def _with_options(kind: type, given: partial[Any]) -> Criterion:
    """Criterion of this class, with the options of a functools.partial of its function."""
    known = list(inspect.signature(kind).parameters)
    unknown = [*map(repr, given.args), *(name for name in given.keywords if name not in known)]
    if unknown:
        raise TypeError(
            f"options of {given.func.__name__} must be keywords among {', '.join(known)}; found "
            f"{', '.join(unknown)}. Write a loss function (model, batch) -> losses for other options."
        )
    return Criterion(kind(**given.keywords))


def _target_weights(criterion: Any, target: Tensor, dtype: torch.dtype) -> Tensor:
    """Class weight of each target; 1 without class weights, 0 for ignored targets."""
    counted = target != criterion.ignore_index
    if criterion.weight is None:
        return counted.to(dtype)
    return criterion.weight[torch.where(counted, target, 0)].to(dtype) * counted


def _sums(elements: Tensor) -> Tensor:
    """Sum over the elements of each sample: (B, ...) -> (B,)."""
    return elements.flatten(1).sum(1) if elements.dim() > 1 else elements


def _check_reduction(criterion: Any) -> None:
    if criterion.reduction not in ("mean", "batchmean", "none"):
        raise LossesError(
            f"{type(criterion).__name__} as loss_fn must have reduction='mean', because an update is a mean over "
            f"samples; found {criterion.reduction!r}. Leave reduction out and scale the learning rate instead."
        )


def _kind(batch: Any) -> str:
    return f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
