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
    has_labels = online.task == "classification"  # whose error is 1 for a wrong label
    losses = errors = 0.0
    samples = learned = 0  # skipped updates have no loss
    started = perf_counter()
    due = started + min(2.0, pause)

    def totals() -> StreamTotals:
        error = errors / samples if samples else nan
        return StreamTotals(
            samples=samples,
            loss=losses / learned if learned else nan,
            accuracy=1 - error if has_labels else None,
            mean_absolute_error=None if has_labels else error,
            samples_per_second=samples / max(perf_counter() - started, 1e-9),
        )

    try:
        for x, y in stream:
            prediction = online.predict_one(x)
            loss = online.learn_one(x, y).loss
            samples += 1
            errors += online._target.error(prediction, y)
            if isfinite(loss):
                losses += loss
                learned += 1
            if not samples % 16 and perf_counter() > due:  # reading the clock takes as long as a small prediction
                now = totals()
                values = {"loss": now.loss, "accuracy": now.accuracy, "error": now.mean_absolute_error}
                text = format_values({name: value for name, value in values.items() if value is not None})
                display.update(1, samples, f"{text}  {now.samples_per_second:.0f} samples/s")
                due = perf_counter() + pause
    finally:
        display.close()
    return totals()
