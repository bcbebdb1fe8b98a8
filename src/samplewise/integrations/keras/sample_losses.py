"""Loss of each sample from a Keras loss, whatever its reduction."""

from __future__ import annotations

from typing import Any

from keras import ops
from keras.src.backend import get_keras_mask
from keras.src.trainers.compile_utils import get_loss

from samplewise.errors import LossesError


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
    if loss is None:
        raise LossesError("loss must be a Keras loss: an object, a class, a name or a function; found None.")
    criterion = get_loss(loss, y, y_pred)
    values = _without_reduction(criterion)(y, y_pred)
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


def _without_reduction(criterion: Any) -> Any:
    """Copy of a loss object with reduction=None. copy.copy would serialize the loss, which changes its functions."""
    copied = object.__new__(type(criterion))
    copied.__dict__.update(criterion.__dict__, reduction=None)
    return copied


def _row_sums(values: Any) -> Any:
    return ops.sum(values, axis=tuple(range(1, len(values.shape))))
