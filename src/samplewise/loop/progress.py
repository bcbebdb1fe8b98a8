"""Progress display of a training run on stderr: a bar in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from samplewise.parallel import collectives

if TYPE_CHECKING:
    from samplewise.loop.trainer import Trainer


class Display(Protocol):
    """Display of the progress of a training run."""

    def update(self, epoch: int, done: int, values: str) -> None:
        """Show that `done` updates have been made, with a text of current values."""

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Print a permanent line with the metrics of an epoch."""

    def line(self, text: str) -> None:
        """Print another permanent line. May be called from another thread."""

    def close(self) -> None: ...


class NoDisplay:
    """No display."""

    def update(self, epoch: int, done: int, values: str) -> None: ...
    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None: ...
    def line(self, text: str) -> None: ...
    def close(self) -> None: ...


class LineDisplay:
    """Plain lines."""

    def update(self, epoch: int, done: int, values: str) -> None:
        self.line(f"epoch {epoch + 1}  update {done}  {values}")

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.line(f"epoch {epoch + 1}  {format_values(metrics)}")

    def line(self, text: str) -> None:
        with suppress(OSError):  # a closed pipe or a full disk must not stop the training
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None: ...


class BarDisplay:
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

    def update(self, epoch: int, done: int, values: str) -> None:
        self._bar.update(self._task, completed=done, epoch=epoch + 1, text=f"{values}  {self._metrics}")

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


def make_display(total: int | None, done: int) -> Display:
    """Return a progress bar if stderr is a terminal and rich is installed, otherwise plain lines.

    total: number of updates at the end of the training; None if unknown.
    done: number of updates made so far.
    """
    if sys.stderr is None:  # stderr was closed when Python started
        return NoDisplay()
    if not sys.stderr.isatty():
        return LineDisplay()
    try:
        return BarDisplay(total, done)
    except ImportError:
        return LineDisplay()


class Progress:
    """Callback that shows the progress of a training run on stderr, on rank 0. `Trainer(progress=True)` adds it."""

    def __init__(self) -> None:
        self._display: Display = NoDisplay()
        self._has_validation = False

    def on_fit_start(self, trainer: Trainer) -> None:
        if collectives.rank() == 0:
            self._display = make_display(trainer.expected_updates, trainer.step.counters.updates)

    def on_log(self, kind: str, fields: dict[str, Any]) -> None:
        if kind == "train" and "lr" in fields:
            values = "loss not shown (private)"
            if "loss" in fields:
                values = f"loss {format_value(fields['loss'])}  {fields['samples_per_second']:.0f} samples/s"
            self._display.update(fields["epoch"], fields["update"], values)
        self._has_validation = kind == "validation" or (self._has_validation and kind != "epoch")

    def on_epoch_end(self, epoch: int, metrics: dict[str, float]) -> None:
        shown = {name: value for name, value in metrics.items() if name == "train_loss"}
        if self._has_validation:
            shown |= metrics
        if shown:
            self._display.epoch(epoch, shown)

    def line(self, text: str) -> None:
        """Print a line; does nothing if no training is shown. May be called from another thread."""
        self._display.line(text)

    def close(self) -> None:
        self._display.close()
        self._display = NoDisplay()
