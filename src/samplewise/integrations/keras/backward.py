"""A training step of a PerSample model: its settings, its backward pass and the number of its update.

Per-sample transforms act on the compiled loss; additional losses, those of `add_loss` and of regularizers, are whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch
from keras import tree
from keras.src.saving.keras_saveable import KerasSaveable
from torch import Tensor

from samplewise.core.text import listed
from samplewise.engine.ownership.independence import RULE
from samplewise.errors import LedgerError, SamplesInteractError
from samplewise.integrations.adapter import Adapter, BatchLoss
from samplewise.integrations.keras.gradients import named_variables
from samplewise.integrations.keras.losses import columns_of_predictions, denominator, losses_of_samples
from samplewise.ledger.ledger import Ledger
from samplewise.transforms.chain import as_chain


class Settings(KerasSaveable):
    """Transforms and ledger of a model. Keras saves and loads it with the weights, as an attribute of the model."""

    def __init__(self, transforms: Any, ledger: Ledger | None):
        if ledger is not None and not isinstance(ledger, Ledger):
            raise TypeError(
                f"ledger must be an sw.Ledger; found {type(ledger).__name__}. Pass sw.Ledger('runs/first')."
            )
        if ledger is not None and ledger.run is None:
            raise ValueError(
                "the ledger must have a run directory of its own, because Keras has none; found none. Pass "
                "sw.Ledger('runs/first')."
            )
        self.adapter = Adapter(as_chain(transforms), ledger)
        self.ledger = ledger
        self.epoch = 0
        self.additional: AdditionalLosses | None = None  # set while the loss of a training step is computed

    def check_ids(self, ids: Any) -> None:
        if self.ledger is not None and ids is None:
            raise LedgerError(
                "a batch must have the ids of its samples to be recorded in a ledger; found none. Pass arrays to fit, "
                f"a dict x with the key {self.adapter.id_key!r}, or a DataLoader of sw.Indexed(dataset)."
            )

    def with_epochs(self, callbacks: Any) -> Any:
        """The argument `callbacks` of `fit`, with one that keeps the number of the epoch."""
        counter = _EpochCounter(self)
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.callbacks.insert(0, counter)
            return callbacks
        if not isinstance(callbacks, (list, tuple)):
            callbacks = [] if callbacks is None else [callbacks]
        return [counter, *callbacks]

    @contextmanager
    def separate_losses(self) -> Iterator[AdditionalLosses]:
        """Context manager: the total loss computed in the block has leaves in place of the additional losses."""
        self.additional = AdditionalLosses()
        try:
            yield self.additional
        finally:
            self.additional = None

    # --- state, saved by Keras with the weights ----------------------------------------------------------------------

    def _obj_type(self) -> str:
        return "Loss"  # Keras skips the attributes of its own class of this name when it looks for more state

    def save_own_variables(self, store: Any) -> None:
        if self.ledger is not None:
            state = {"directory": str(self.ledger.run), "state": self.ledger.state_dict()}
            store["ledger"] = np.frombuffer(json.dumps(state).encode(), np.uint8)

        if self.adapter.chain.states:
            states = json.dumps(self.adapter.chain.state_dict())
            store["transforms"] = np.frombuffer(states.encode(), np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Restore the states of transforms, and continue the ledger, unless it is in another directory."""
        if "transforms" in set(store.keys()):
            self.adapter.chain.load_state_dict(json.loads(bytes(np.asarray(store["transforms"]))))
        if self.ledger is not None and "ledger" in set(store.keys()):
            saved = json.loads(bytes(np.asarray(store["ledger"])))
            if saved["directory"] == str(self.ledger.run):
                self.ledger.load_state_dict(saved["state"])


class _EpochCounter(keras.callbacks.Callback):
    """Keeps the number of the epoch, opens the ledger when other callbacks may have loaded its state, and adds norms to
    the logs. The first callback, so that all others get these logs.
    """

    def __init__(self, settings: Settings):
        super().__init__()
        self._settings = settings

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._settings.epoch = epoch
        ledger = self._settings.ledger
        if ledger is not None and ledger.run is not None:
            ledger._prepare(ledger.run)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        values = self._settings.adapter.take_log()
        if logs is not None:
            logs.update((name, value) for name, value in values.items() if not isinstance(value, str))


# --- backward pass ----------------------------------------------------------------------------------------------------


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
        self.backward = self._backward_with_additional if additional.losses else self._backward
        self._optimizer = optimizer
        self._additional = additional

    def _backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        self._optimizer.scale_loss(loss).backward(retain_graph=retain_graph)

    def _backward_with_additional(self, loss: Tensor) -> None:
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
    adapter.backward(values, variables, through, divisor, batch, epoch)


# --- BatchNormalization -----------------------------------------------------------------------------------------------


class MovingStatistics:
    """Moving statistics of the BatchNormalization layers of a model, before a forward pass. A layer that updates them
    normalizes with the statistics of the batch; these are ordinary operations, without a gradient if the layer comes
    first, so that the graph does not show it.
    """

    def __init__(self, model: Any):
        self._versions = {
            layer: layer.moving_mean.value._version
            for layer in model._flatten_layers()
            if isinstance(layer, keras.layers.BatchNormalization) and layer.built
        }

    def refuse_updates(self, adapter: Adapter) -> None:
        """Raise SamplesInteractError if a layer has updated its moving statistics since."""
        versions = self._versions.items()
        names = [repr(layer.name) for layer, version in versions if layer.moving_mean.value._version != version]
        if not names:
            return
        remedies = [
            "set layer.trainable = False before model.compile or call the layer with training=False, both of which "
            "make it use its moving statistics",
            "use GroupNormalization or LayerNormalization",
        ]
        if not adapter.chain.transforms:
            remedies.append("pass sw.Ledger(run, norms=False), which records the losses and trains the model unchanged")
        what = f"layer {names[0]}. It normalizes" if len(names) == 1 else f"layers {listed(names)}. They normalize"
        raise SamplesInteractError(
            f"{RULE}; found BatchNormalization in training mode: {what} with the statistics of the whole batch.",
            remedies,
        )


# --- update -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchUpdate:
    """Number of updates applied before a batch, and whether the optimizer skips the one of the batch."""

    index: int
    skipped: bool


def next_update(optimizer: Any, gradients: list[Tensor | None]) -> BatchUpdate:
    """The update that a batch with these gradients belongs to."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return BatchUpdate(int(optimizer.inner_optimizer.iterations), not bool(optimizer.check_finite(gradients)))
    return BatchUpdate(int(optimizer.iterations), False)
