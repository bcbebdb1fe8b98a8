"""Backward pass of a Keras training step with the torch backend: per-sample transforms, and additional losses whole."""

from __future__ import annotations

from typing import Any

import keras
import torch
from keras import tree
from keras.src import backend
from torch import Tensor

from samplewise.core.losses import PREDICTION_COLUMNS, prediction_columns
from samplewise.errors import LossesError, SamplesInteractError
from samplewise.integrations.adapter import Adapter, BatchLoss
from samplewise.integrations.keras.gradients import named_variables
from samplewise.integrations.keras.sample_losses import sample_losses

AVERAGES = ("sum_over_batch_size", "mean", "none", None)


class AdditionalLosses:
    """Losses of `add_loss` and of regularizers, replaced in the total loss by leaves of the same value."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self._leaves: list[Tensor] = []

    def replace(self, loss: Tensor) -> Tensor:
        """A leaf with the value of the loss."""
        if not loss.requires_grad:
            return loss
        leaf = loss.detach().requires_grad_()
        self.losses.append(loss)
        self._leaves.append(leaf)
        return leaf

    def gradients(self, total: Tensor) -> list[Tensor | None]:
        """Gradient of `total` with respect to each additional loss: 1, or the factor of a loss scale. None for a tensor
        that does not contain them.
        """
        return list(torch.autograd.grad(total, self._leaves, retain_graph=True, allow_unused=True))


class BackwardPass:
    """Backward pass of `loss`, with the optimizer's loss scale and the gradients of additional losses."""

    def __init__(self, optimizer: Any, loss: Tensor, additional: AdditionalLosses):
        self.loss = loss
        # Read by sw.backward: an optimizer with a dynamic scale skips updates with non-finite gradients.
        self.scaler = optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
        self.backward = self._with_additional if additional.losses else self._plain
        self._optimizer = optimizer
        self._additional = additional

    def _plain(self, loss: Tensor, retain_graph: bool = False) -> None:
        self._optimizer.scale_loss(loss).backward(retain_graph=retain_graph)

    def _with_additional(self, loss: Tensor) -> None:
        """Run one pass for all losses. Without an argument retain_graph, so that sw.backward does not compute norms in
        this pass, in which they would include the additional losses. It also measures the loss scale with a tensor that
        does not contain them.
        """
        scaled = self._optimizer.scale_loss(loss)
        gradients = self._additional.gradients(scaled)
        if gradients[0] is None:
            scaled.backward()
        else:
            torch.autograd.backward([scaled, *self._additional.losses], [None, *gradients])

    def add_additional(self) -> None:
        """Run the pass of the additional losses alone."""
        if self._additional.losses:
            gradients = self._additional.gradients(self._optimizer.scale_loss(self.loss))
            torch.autograd.backward(self._additional.losses, gradients, retain_graph=True)


def run_backward(
    adapter: Adapter,
    model: Any,
    loss: Tensor,
    additional: AdditionalLosses,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
    batch: Any,
    epoch: int,
) -> None:
    """Write the gradient into `.grad`: that of the loss with transforms, those of additional losses without."""
    outputs = tree.flatten(y_pred)
    values = BatchLoss(
        loss,
        outputs,
        len(outputs[0]),
        losses=losses_of_samples(model, y, y_pred) if adapter.reads_losses else None,
        columns=None if adapter.ledger is None else columns_of_predictions(model, y, y_pred),
    )
    variables: dict[str, Tensor] = {}
    divisor = 1.0
    if adapter.per_sample:
        variables = {name: v.value for name, v in named_variables(model).items()}
        divisor = denominator(model, values.samples, sample_weight)
    through = BackwardPass(model.optimizer, loss, additional)
    if adapter.chain.weighs:  # then sw.backward does not call through.backward
        through.add_additional()
    try:
        adapter.backward(values, variables, through, divisor, batch, epoch)
    except SamplesInteractError as error:
        if any(isinstance(layer, keras.layers.BatchNormalization) for layer in model._flatten_layers()):
            error.add_note("With Keras, layer.trainable = False makes BatchNormalization use its moving statistics.")
        raise


def compiled_losses(model: Any) -> list[Any]:
    """(path, loss, weight, name) of each output, after the first call of the compiled loss; empty if the model computes
    its loss itself.
    """
    own = type(model).compute_loss is not keras.Model.compute_loss
    return [] if own or model._compile_loss is None else list(model._compile_loss._flat_losses or ())


def denominator(model: Any, samples: int, sample_weight: Any) -> float:
    """Divisor of the sum over samples in the reduction of the compiled loss. If the model overrides `compute_loss`,
    the number of samples, as for a mean.
    """
    reductions = {each.loss.reduction for each in compiled_losses(model)} or {None}
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
