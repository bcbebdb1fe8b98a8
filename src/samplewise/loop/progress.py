"""Progress display of a training on stderr: a bar in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol


class Progress(Protocol):
    """Progress display."""

    def update(self, epoch: int, done: int, loss: float, speed: float) -> None:
        """Show that `done` updates have been made, with the mean loss and the speed in samples per second."""

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Print a permanent line with the metrics of an epoch."""

    def line(self, text: str) -> None:
        """Print another permanent line. May be called from another thread."""

    def close(self) -> None: ...


class NoProgress:
    """No display."""

    def update(self, epoch: int, done: int, loss: float, speed: float) -> None: ...
    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None: ...
    def line(self, text: str) -> None: ...
    def close(self) -> None: ...


class ProgressLines:
    """Plain lines."""

    def update(self, epoch: int, done: int, loss: float, speed: float) -> None:
        self.line(f"epoch {epoch + 1}  update {done}  loss {format_value(loss)}  {speed:.0f} samples/s")

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.line(f"epoch {epoch + 1}  {format_values(metrics)}")

    def line(self, text: str) -> None:
        with suppress(OSError):  # a closed pipe or a full disk must not stop the training
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None: ...


class ProgressBar:
    """Progress bar of rich: epoch, updates, time left, loss, speed, and the metrics of the last validation."""

    def __init__(self, total: int | None, done: int) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        self._bar = progress.Progress(
            progress.TextColumn("epoch {task.fields[epoch]}", table_column=Column(no_wrap=True)),
            progress.BarColumn(bar_width=8),
            progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
            # The column that is truncated in a narrow terminal.
            progress.TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=Console(stderr=True),
            expand=True,
        )
        self._metrics = ""
        self._task = self._bar.add_task("", total=total, completed=done, epoch=1, text="")
        self._bar.start()

    def update(self, epoch: int, done: int, loss: float, speed: float) -> None:
        text = f"loss {format_value(loss)}  {speed:.0f} samples/s  {self._metrics}"
        self._bar.update(self._task, completed=done, epoch=epoch + 1, text=text)

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.line(f"epoch {epoch + 1}  {format_values(metrics)}")
        measured = {name: value for name, value in metrics.items() if name not in ("train_loss", "loss")}
        self._metrics = format_values(measured)

    def line(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()


def format_value(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.4g}"


def format_values(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {format_value(value)}" for name, value in values.items())


def make_progress(wanted: bool, total: int | None, done: int) -> Progress:
    """Return the display for a training.

    wanted: False for no display.
    total: number of updates at the end of the training; None if unknown.
    done: number of updates made so far.
    """
    if not wanted or sys.stderr is None:  # None if stderr was closed when Python started
        return NoProgress()
    if not sys.stderr.isatty():
        return ProgressLines()
    try:
        return ProgressBar(total, done)
    except ImportError:
        return ProgressLines()
