"""Ledger rows in the loop of another framework: kept while gradients accumulate, written when the update is done."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from torch import Tensor

from samplewise.backward import BackwardResult
from samplewise.core.batches import pick
from samplewise.core.predictions import PREDICTION_COLUMNS, prediction_columns
from samplewise.ledger.ledger import Ledger

IGNORE_INDEX = -100  # of nn.CrossEntropyLoss


class _Pass(NamedTuple):
    """Results of one backward pass."""

    results: BackwardResult
    columns: dict[Hashable, Any]  # entries of the batch that the ledger records, by key
    epoch: int


class Recorder:
    """Passes of the open accumulation window, and the ledger that they are recorded in when the optimizer has stepped.

    ledger: None records nothing
    """

    def __init__(self, ledger: Ledger | None):
        self.ledger = ledger
        self._passes: list[_Pass] = []

    def add(
        self,
        results: BackwardResult,
        batch: Any,
        epoch: int,
        *,
        ids: Any = None,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> None:
        """Add one pass to the window.

        ids: ids of the samples; default: those in the batch
        logits, labels: (B, classes) and (B,) of a classification, for the columns label, prediction and margin
        """
        if self.ledger is None:
            return
        keys = self.ledger.keys
        columns = {key: pick(batch, key) for name, key in keys.items() if name != "id" or ids is None}
        if ids is not None:
            columns[keys["id"]] = ids
        if logits is not None and labels is not None:
            names = [name for name in PREDICTION_COLUMNS if name not in keys]
            results.stats.columns = prediction_columns(logits, labels, IGNORE_INDEX, names)
        self._passes.append(_Pass(results, columns, epoch))

    def take(self) -> list[_Pass]:
        """Remove and return the passes of the window."""
        passes = self._passes
        self._passes = []
        return passes

    def record(self, passes: list[_Pass], update: int, skipped: bool = False) -> None:
        """Write the passes of an update to the ledger. Every rank must call it."""
        if self.ledger is not None:
            for each in passes:
                self.ledger.record(each.results, each.columns, update=update, epoch=each.epoch, skipped=skipped)
