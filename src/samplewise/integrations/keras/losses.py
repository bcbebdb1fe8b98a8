"""Losses of samples: from a Keras loss, whatever its reduction, and from the compiled loss of a model.

`sample_losses` works with every backend, the functions of a compiled model with the torch backend.
"""

from __future__ import annotations

from typing import Any

import keras
import torch
from keras import ops, tree
from keras.src import backend
from keras.src.backend import get_keras_mask
from keras.src.trainers.compile_utils import get_loss
from torch import Tensor

from samplewise.core.losses import PREDICTION_COLUMNS, prediction_columns
from samplewise.errors import LossesError

AVERAGES = ("sum_over_batch_size", "mean", "none", None)


def sample_losses(loss: Any, y: Any, y_pred: Any) -> Any:
    """Losses (B,) of a Keras loss (object, class, name or function): each is the value for a batch of one sample.

    Values over further dimensions, such as (B, T), are averaged, or added up with reduction="sum". Masked values are
    left out.
    """
    if not hasattr(y_pred, "shape"):
        raise LossesError(
            f"the model must return one tensor for a loss of each sample; found {type(y_pred).__name__}. Pass a model "
            "with a single output."
        )
    criterion = get_loss(loss, y, y_pred)
    # copy.copy would serialize the loss, which changes its functions.
    unreduced = object.__new__(type(criterion))
    unreduced.__dict__.update(criterion.__dict__, reduction=None)
    values = unreduced(y, y_pred)
    if len(values.shape) == 0 or values.shape[0] != y_pred.shape[0]:
        raise LossesError(
            f"a loss must have one value per sample before its reduction, shape ({y_pred.shape[0]}, ...); found shape "
            f"{tuple(values.shape)} of {criterion.name}. Return values for each sample, without a mean over the batch."
        )
    totals = _row_sums(values)
    if criterion.reduction == "sum" or len(values.shape) == 1:
        return totals
    mask = get_keras_mask(y_pred)
    terms = _row_sums(ops.ones_like(values) if mask is None else ops.cast(mask, values.dtype))
    # Operators keep float64, unlike functions of keras.ops. A sample without any term has the total 0.
    return totals / (terms + ops.cast(terms == 0, terms.dtype))


def _row_sums(values: Any) -> Any:
    return ops.sum(values, axis=tuple(range(1, len(values.shape))))


# --- compiled loss of a model -----------------------------------------------------------------------------------------


def compiled_loss(model: Any) -> Any:
    """The loss given to `model.compile`, of a model with a single output, as it was given."""
    if type(model).compute_loss is not keras.Model.compute_loss:
        cause = f"that {type(model).__name__} overrides compute_loss"
    elif model.loss is None:
        cause = "no loss, neither as an argument nor in model.compile"
    else:
        losses = tree.flatten(model.loss)
        if len(losses) == 1 and model._compile_loss._user_loss_weights is None:
            return losses[0]
        cause = f"{len(losses)} losses" if len(losses) > 1 else "loss_weights"
        cause += " in model.compile"
    raise LossesError(
        f"gradients of samples need one Keras loss; found {cause}. Pass a loss: an object, a class, a name or a "
        "function."
    )


def compiled_losses(model: Any) -> list[Any]:
    """(path, loss, weight, name) of each output, after the first call of the compiled loss; empty if the model computes
    its loss itself.
    """
    is_overridden = type(model).compute_loss is not keras.Model.compute_loss
    return [] if is_overridden or model._compile_loss is None else list(model._compile_loss._flat_losses or ())


def denominator(model: Any, samples: int, sample_weight: Any) -> float:
    """Divisor of the sum over samples in the reduction of the compiled loss. If the model overrides `compute_loss`,
    the number of samples, as for a mean.
    """
    reductions = {output.loss.reduction for output in compiled_losses(model)} or {None}
    if reductions <= set(AVERAGES):
        return samples
    if reductions == {"sum"}:
        return 1
    if reductions == {"mean_with_sample_weight"} and not tree.is_nested(sample_weight):
        return samples if sample_weight is None else float(torch.as_tensor(sample_weight).sum()) or samples
    raise LossesError(
        "the losses of all outputs must be divided by the same number, and by one sum of sample weights; found the "
        f"reductions {', '.join(sorted(map(str, reductions)))}. Use one reduction, without weights of single outputs."
    )


def losses_of_samples(model: Any, y: Any, y_pred: Any) -> Tensor | None:
    """Losses (B,) without sample weights, detached; weighted and added up for several outputs. None if unknown."""
    compiled = compiled_losses(model)
    total: Tensor | None = None
    with torch.no_grad():
        for path, loss, weight, _ in compiled:
            try:
                losses = sample_losses(loss, _at(y, path), _at(y_pred, path))
            except (LossesError, LookupError, TypeError):
                return None
            losses = losses if weight is None else losses * weight
            total = losses if total is None else total + losses
    return total


def _at(structure: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        structure = structure[key]
    return structure


def columns_of_predictions(model: Any, y: Any, y_pred: Any) -> dict[str, Tensor] | None:
    """Columns label, prediction and margin for a categorical cross-entropy with one class per sample, else None."""
    compiled = compiled_losses(model)
    function = getattr(compiled[0].loss, "fn", None) if len(compiled) == 1 else None
    if function not in (keras.losses.sparse_categorical_crossentropy, keras.losses.categorical_crossentropy):
        return None
    if not isinstance(y_pred, Tensor) or y_pred.dim() != 2:
        return None
    options = compiled[0].loss._fn_kwargs
    scores = y_pred.detach()
    if not options.get("from_logits", False):
        scores = scores.clamp(min=backend.epsilon()).log()  # differences of logarithms are those of logits
    labels = torch.as_tensor(y)
    if function is keras.losses.categorical_crossentropy:
        labels = labels.argmax(1)
    elif labels.dim() == 2:
        labels = labels.squeeze(1)
    ignored = options.get("ignore_class")
    return prediction_columns(scores, labels.long(), -1 if ignored is None else ignored, PREDICTION_COLUMNS)
