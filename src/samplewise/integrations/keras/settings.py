"""Transforms and ledger of a compiled model; the position in the ledger is saved with the model's weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras.src.saving.keras_saveable import KerasSaveable
from torch import Tensor

from samplewise.errors import LedgerError
from samplewise.integrations.adapter import Adapter
from samplewise.integrations.keras.backward import AdditionalLosses
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
            callbacks.append(counter)
            return callbacks
        given = callbacks if isinstance(callbacks, (list, tuple)) else [] if callbacks is None else [callbacks]
        return [counter, *given]

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

    def load_own_variables(self, store: Any) -> None:
        """Continue the ledger after the saved rows. The state of a ledger in another directory is ignored."""
        if self.ledger is not None and "ledger" in set(store.keys()):
            saved = json.loads(bytes(np.asarray(store["ledger"])))
            if saved["directory"] == str(self.ledger.run):
                self.ledger.load_state_dict(saved["state"])


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


class _EpochCounter(keras.callbacks.Callback):
    """Keeps the number of the epoch, and opens the ledger when other callbacks may have loaded its state."""

    def __init__(self, settings: Settings):
        super().__init__()
        self._settings = settings

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._settings.epoch = epoch
        ledger = self._settings.ledger
        if ledger is not None and ledger.run is not None:
            ledger._prepare(ledger.run)
