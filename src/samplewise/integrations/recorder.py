"""Ledger rows in the loop of another framework: kept while gradients accumulate, written when the update is done."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from samplewise.backward import BackwardResult
from samplewise.core.batches import pick
from samplewise.ledger.ledger import Ledger


class RecordedPass(NamedTuple):
    """Results of one backward pass."""

    results: BackwardResult
    batch: dict[Hashable, Any]  # entries of the batch that the ledger records, by key
    epoch: int


class Recorder:
    """Passes of the open accumulation window, and the ledger that they are recorded in when the optimizer has stepped.

    ledger: None records nothing
    """

    def __init__(self, ledger: Ledger | None):
        self.ledger = ledger
        self._passes: list[RecordedPass] = []

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the batch that the ledger reads; without a ledger, that of the ids of sw.Indexed."""
        return ["id"] if self.ledger is None else list(dict.fromkeys(self.ledger.keys.values()))

    @property
    def id_key(self) -> Hashable:
        return "id" if self.ledger is None else self.ledger.keys["id"]

    @property
    def needs_norms(self) -> bool:
        return self.ledger is not None and self.ledger.norms

    def add(
        self,
        results: BackwardResult,
        batch: Any,
        epoch: int = 0,
        *,
        ids: Any = None,
        columns: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add one pass to the window.

        ids: ids of the samples; default: those in the batch
        columns: further columns, name -> (B,), such as label, prediction and margin; those that the ledger reads from
        the batch are left out
        """
        if self.ledger is None:
            return
        entries = {key: pick(batch, key) for key in self.keys if ids is None or key != self.id_key}
        if ids is not None:
            entries[self.id_key] = ids
        further = {name: values for name, values in (columns or {}).items() if name not in self.ledger.keys}
        self._passes.append(RecordedPass(BackwardResult(replace(results.stats, columns=further)), entries, epoch))

    def take(self) -> list[RecordedPass]:
        """Remove and return the passes of the window."""
        passes = self._passes
        self._passes = []
        return passes

    def record(
        self, passes: list[RecordedPass], update: int, *, skipped: bool = False, epoch: int | None = None
    ) -> None:
        """Write the passes of an update to the ledger. Every rank must call it. `epoch`: default that of each pass."""
        if self.ledger is not None:
            for each in passes:
                number = each.epoch if epoch is None else epoch
                self.ledger.record(each.results, each.batch, update=update, epoch=number, skipped=skipped)
