"""Losses of the samples of a batch, recomputed from the outputs of a model of transformers and the labels.

Needs no package but torch, so that `samplewise doctor` can use it without those of the Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from samplewise.core.batches import leaves
from samplewise.core.losses import IGNORE_INDEX, PREDICTION_COLUMNS, prediction_columns
from samplewise.engine.arguments import wide_dtype
from samplewise.errors import BatchError, LossesError

TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01}  # relative, of the sum of the losses; others: 1e-3


class KnownLosses(NamedTuple):
    """Losses of the samples of a batch.

    losses    (B,); for tokens, the sum over the tokens of a sample
    counts    (B,) tokens of each sample; None: 1 each
    columns   other columns of the ledger: label, prediction and margin for class indices
    """

    losses: Tensor
    counts: Tensor | None = None
    columns: dict[str, Tensor] | None = None

    def checked(self, loss: Tensor, denominator: float) -> KnownLosses:
        """The losses; NaN if their sum over `denominator` is not `loss`, because another criterion computed it."""
        return self._replace(losses=torch.where(self.agree(loss, denominator), self.losses, torch.nan))

    def agree(self, loss: Tensor, denominator: float | Tensor) -> Tensor:
        """True, as a tensor, if the sum of the losses over `denominator` is `loss`, up to rounding."""
        total = self.losses.sum(dtype=torch.float64) / denominator
        tolerance = TOLERANCE.get(self.losses.dtype, TOLERANCE.get(loss.dtype, 1e-3))
        return (total - loss).abs() <= tolerance * loss.abs().clamp(min=1e-3)


def known_losses(
    outputs: Any, batch: Mapping[str, Any], *, shifted: bool, smoothing: float, config: Any
) -> KnownLosses | None:
    """Losses of the samples; None if the task is not known from the outputs and the labels.

    shifted: the logits at a position predict the label at the next one, as in a causal language model
    smoothing: label smoothing of the cross-entropy
    config: that of the model; its problem_type distinguishes regression from multi-label classification
    """
    problem_type = getattr(config, "problem_type", None)
    named = outputs if isinstance(outputs, Mapping) else {}
    if isinstance(named.get("log_probs"), Tensor) and isinstance(named.get("label_mask"), Tensor):  # TRL
        counts = named["label_mask"].reshape(len(named["label_mask"]), -1).sum(1)
        return KnownLosses(-named["log_probs"].flatten(1).sum(1), counts)
    logits = named.get("logits") if named else next((z for z in leaves(outputs) if _has_rows(z)), None)
    labels = batch.get("labels")
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor) or not _has_rows(logits):
        return None
    labels = labels.to(logits.device)
    logits = logits.to(wide_dtype(logits.dtype))
    if labels.is_floating_point() or problem_type == "regression":
        return _values(logits, labels, problem_type)
    if logits.dim() == 2 and labels.dim() == 1 and logits.shape[1] > 1:
        return _classes(logits, labels, smoothing)
    if logits.dim() == 3 and labels.dim() == 2 and len(labels) == len(logits):
        return _tokens(logits, labels, shifted, smoothing)
    if logits.dim() == 4 and labels.dim() == 3 and len(labels) == len(logits) and logits.shape[1] > 1:
        return _pixels(logits, labels, ignored_label(labels, config))
    return None


def ignored_label(labels: Tensor, config: Any) -> int:
    """Label that is left out of the loss: -100, or that of a model for semantic segmentation."""
    return getattr(config, "semantic_loss_ignore_index", IGNORE_INDEX) if labels.dim() == 3 else IGNORE_INDEX


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _values(logits: Tensor, labels: Tensor, problem_type: str | None) -> KnownLosses | None:
    """Losses of regression and multi-label heads: means over the values of a sample."""
    if logits.numel() != labels.numel():
        return None
    labels = labels.reshape(logits.shape).to(logits.dtype)
    if problem_type == "regression":
        elements = F.mse_loss(logits, labels, reduction="none")
    elif problem_type == "multi_label_classification":
        elements = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    else:
        return None
    return KnownLosses(elements.reshape(len(logits), -1).mean(1))


def _classes(logits: Tensor, labels: Tensor, smoothing: float) -> KnownLosses:
    losses = F.cross_entropy(
        logits, labels.long(), ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=smoothing
    )
    columns = prediction_columns(logits, labels, IGNORE_INDEX, PREDICTION_COLUMNS)
    return KnownLosses(losses, labels.ne(IGNORE_INDEX).to(losses.dtype), columns)


def _tokens(logits: Tensor, labels: Tensor, shifted: bool, smoothing: float) -> KnownLosses | None:
    """Sums over tokens, sample by sample, so that no copy of all logits is made."""
    virtual = logits.shape[1] - labels.shape[1]  # tokens that prompt tuning puts before the text
    if virtual < 0:
        return None
    labels = F.pad(labels, (virtual, 0), value=IGNORE_INDEX)
    if shifted:
        labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    losses = [
        F.cross_entropy(z, y, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=smoothing)
        for z, y in zip(logits, labels.long(), strict=True)
    ]
    return KnownLosses(torch.stack(losses), labels.ne(IGNORE_INDEX).sum(1).to(logits.dtype))


def _pixels(logits: Tensor, labels: Tensor, ignored: int) -> KnownLosses:
    """Sums over pixels. Models for semantic segmentation have logits of a lower resolution than that of the labels."""
    logits = F.interpolate(logits, size=labels.shape[1:], mode="bilinear", align_corners=False)
    losses = F.cross_entropy(logits, labels.long(), ignore_index=ignored, reduction="none")
    return KnownLosses(losses.flatten(1).sum(1), labels.ne(ignored).flatten(1).sum(1).to(logits.dtype))


def auxiliary_loss(outputs: Any, model: Any) -> Tensor | float:
    """What a model with experts adds to the loss of the samples: the load balancing loss of its routers."""
    auxiliary = outputs.get("aux_loss") if isinstance(outputs, Mapping) else None
    coefficient = getattr(getattr(model, "config", None), "router_aux_loss_coef", None)
    return coefficient * auxiliary if isinstance(auxiliary, Tensor) and coefficient else 0.0


class ModelLoss:
    """Loss function (model, batch) -> (losses, counts) for models of transformers, whose forward pass takes the entries
    of the batch by name and computes the loss of the batch itself.

    Its values add up to that loss, which the first call verifies.
    """

    def __init__(self) -> None:
        self._shifted: bool | None = None  # set by the first call

    def __call__(self, model: Any, batch: Any) -> tuple[Any, ...]:
        if not isinstance(batch, Mapping) or not isinstance(batch.get("labels"), Tensor):
            content = f"keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
            raise BatchError(
                f"a model of transformers needs batches that are dicts with a tensor 'labels'; found {content}. Return "
                "such dicts from the dataset, or write a loss function (model, batch) -> losses."
            )
        outputs = model(**{key: value for key, value in batch.items() if key != "id"})
        for shifted in (False, True) if self._shifted is None else (self._shifted,):
            samples = known_losses(outputs, batch, shifted=shifted, smoothing=0.0, config=model.config)
            if samples is None:
                break
            counts = torch.ones_like(samples.losses) if samples.counts is None else samples.counts
            if self._shifted is not None or bool(samples.agree(outputs["loss"].detach(), counts.sum())):
                self._shifted = shifted
                return (samples.losses, counts, *([samples.columns] if samples.columns else []))
        raise LossesError(
            f"the loss of {type(model).__name__} must be a cross-entropy of logits and labels, or that of a regression "
            "or multi-label head, to be known for each sample; found another one. Write a loss function "
            "(model, batch) -> losses."
        )

    def __repr__(self) -> str:
        return "the loss of the model"


def computes_its_loss(model: Any) -> bool:
    """True for a model of transformers, and for one with adapters of peft."""
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(model).__mro__}
    return bool(kinds & {("transformers", "PreTrainedModel"), ("peft", "PeftModel")})
