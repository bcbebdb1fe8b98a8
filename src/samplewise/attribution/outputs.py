"""Output functions: the number per sample whose gradient is attributed, if it is not the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.errors import LossesError

# (model, batch) -> outputs (B,), or (outputs, weights); see `outputs_and_weights`
OutputFn = Callable[[Any, Any], Tensor | tuple[Tensor, Tensor]]


def margin(model: nn.Module, batch: Any) -> Tensor:
    """Log-odds (B,) of the correct class: its logit minus the log-sum-exp of the other logits. Larger is better.

    `batch` is (x, labels) with `model(x)` returning logits (B, classes), or a dict with "labels" for a model of
    transformers.
    """
    logits, labels = _classified(model, batch)
    correct = labels[:, None]
    others = logits.scatter(1, correct, -torch.inf)
    return logits.gather(1, correct)[:, 0] - others.logsumexp(1)


def outputs_and_weights(result: Any) -> tuple[Tensor, Tensor]:
    """Split the result of an output function into outputs (B,) and weights (B,).

    The weight of a sample is minus the derivative of its loss with respect to its output. If only outputs are
    returned, they are taken as log-odds, whose loss is log(1 + exp(-output)): the weight is 1 - probability.
    """
    outputs, weights = result if isinstance(result, tuple) else (result, None)
    if not isinstance(outputs, Tensor) or outputs.dim() != 1:
        found = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
        raise LossesError(f"output_fn must return outputs (B,), or (outputs, weights); found {found}.")
    if weights is None:
        return outputs, torch.sigmoid(-outputs.detach())
    if not isinstance(weights, Tensor) or weights.shape != outputs.shape:
        found = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise LossesError(
            f"weights of output_fn must be a tensor like its outputs, {tuple(outputs.shape)}; found {found}."
        )
    return outputs, weights.detach()


def _classified(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits (B, classes) and labels (B,) of a batch."""
    if isinstance(batch, Mapping) and "labels" in batch:
        labels = batch["labels"]
        logits = model(**{name: value for name, value in batch.items() if name != "labels"})
    elif isinstance(batch, (tuple, list)) and len(batch) >= 2:
        labels = batch[1]
        logits = model(batch[0])
    else:
        raise LossesError(
            f"margin needs batches (x, labels), or dicts with labels; found {type(batch).__name__}. Write your own "
            "output_fn(model, batch) that returns one number per sample."
        )
    logits = getattr(logits, "logits", logits)
    if logits.dim() != 2 or not isinstance(labels, Tensor) or labels.dim() != 1 or labels.is_floating_point():
        found = f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} of {labels.dtype}"
        raise LossesError(
            f"margin needs logits (B, classes) and labels (B,) that are class numbers; found {found}. Write your own "
            "output_fn(model, batch) that returns one number per sample."
        )
    return logits, labels
