"""Progressive evaluation: a stream that is predicted and then learned, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite, nan
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from samplewise.loop.meters import LineDisplay, NoDisplay, format_values, make_display

if TYPE_CHECKING:
    from samplewise.online.online import Online

LINES = 15.0  # seconds between two lines
CHANGES = 0.2  # seconds between two changes of a bar


class StreamTotals(NamedTuple):
    """Totals of `Online.run`. Each sample is predicted before it is learned: loss and errors are progressive.

    samples              number of samples
    loss                 mean loss of the samples before their updates, without skipped updates
    accuracy             share of correct predictions; None for regression
    mean_absolute_error  mean of |prediction - y|, over all targets; None for classification
    samples_per_second   predictions and updates, with the time for getting the samples
    """

    samples: int
    loss: float
    accuracy: float | None
    mean_absolute_error: float | None
    samples_per_second: float


def run(online: Online, stream: Iterable[tuple[Any, Any]], total: int | None, progress: bool) -> StreamTotals:
    """Predict and then learn each (x, y); see `Online.run`."""
    if total is None and hasattr(stream, "__len__"):
        total = len(stream)  # type: ignore[arg-type]
    display = make_display(total, 0) if progress else NoDisplay()
    pause = LINES if isinstance(display, LineDisplay) else CHANGES
    sums = ProgressiveSums(online.task == "classification")
    due = perf_counter() + min(2.0, pause)
    try:
        for x, y in stream:
            prediction = online.predict_one(x)
            update = online.learn_one(x, y)
            sums.add(update.loss, online._target.error(prediction, y))
            if not sums.samples % 16 and perf_counter() > due:  # reading the clock takes as long as a small prediction
                display.update(1, sums.samples, sums.text())
                due = perf_counter() + pause
    finally:
        display.close()
    return sums.totals()


class ProgressiveSums:
    """Sums of losses and errors. `labels`: an error is 1 for a wrong label."""

    def __init__(self, labels: bool):
        self.samples = 0
        self._labels = labels
        self._losses = 0.0
        self._learned = 0  # samples with a loss, which skipped updates do not have
        self._errors = 0.0
        self._started = perf_counter()

    def add(self, loss: float, error: float) -> None:
        self.samples += 1
        self._errors += error
        if isfinite(loss):
            self._losses += loss
            self._learned += 1

    def totals(self) -> StreamTotals:
        error = self._errors / self.samples if self.samples else nan
        return StreamTotals(
            samples=self.samples,
            loss=self._losses / self._learned if self._learned else nan,
            accuracy=1 - error if self._labels else None,
            mean_absolute_error=None if self._labels else error,
            samples_per_second=self.samples / max(perf_counter() - self._started, 1e-9),
        )

    def text(self) -> str:
        """Current values, for the progress display."""
        now = self.totals()
        values = {"loss": now.loss, "accuracy": now.accuracy, "error": now.mean_absolute_error}
        shown = format_values({name: value for name, value in values.items() if value is not None})
        return f"{shown}  {now.samples_per_second:.0f} samples/s"
