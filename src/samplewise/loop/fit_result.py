"""`sw.FitResult`: result of `Trainer.fit`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from samplewise.core.text import plural


@dataclass(frozen=True)
class FitResult:
    """Result of `Trainer.fit`.

    reason    why the training ended: "3 epochs are done", "stopped by SIGINT", or the text of `trainer.stop`
    signal    name of the signal that stopped the training, "SIGINT" (Ctrl-C) or "SIGTERM"; None otherwise
    epochs    number of completed epochs, with those of earlier calls and of the resumed run
    updates   number of updates, counted likewise
    metrics   metrics of the last epoch that this call has completed: "loss" of the validation, if there is one, or of
              the training, "train_loss", and the metrics of the validation; empty if it has completed no epoch
    """

    reason: str
    signal: str | None
    epochs: int
    updates: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        return f"FitResult({self.reason!r}, {plural(self.epochs, 'epoch')}, {plural(self.updates, 'update')}{metrics})"
