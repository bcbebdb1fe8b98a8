"""What one sees while it runs: a bar in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol


class Progress(Protocol):
    def update(self, epoch: int, done: int, loss: float, speed: float) -> None:
        """So many updates have been made."""

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """An epoch has ended: something to stay on the screen."""

    def line(self, text: str) -> None:
        """Something else to know, that stays as well. May come from another thread."""

    def close(self) -> None: ...


class Silent:
    def update(self, epoch: int, done: int, loss: float, speed: float) -> None: ...
    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None: ...
    def line(self, text: str) -> None: ...
    def close(self) -> None: ...


class Lines:
    def update(self, epoch: int, done: int, loss: float, speed: float) -> None:
        self.line(f"epoch {epoch + 1}  update {done}  loss {shown(loss)}  {speed:.0f} samples/s")

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.line(f"epoch {epoch + 1}  {named(metrics)}")

    def line(self, text: str) -> None:
        with suppress(OSError):  # a closed pipe or a full disk behind stderr does not end a training
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None: ...


class Bar:
    """With rich: epoch, updates, time left, loss, speed, and what the last validation found."""

    def __init__(self, total: int | None, done: int) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        self._bar = progress.Progress(
            progress.TextColumn("epoch {task.fields[epoch]}", table_column=Column(no_wrap=True)),
            progress.BarColumn(bar_width=8),
            progress.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            progress.TimeRemainingColumn(table_column=Column(no_wrap=True)),
            # The one that is cut short where the terminal is narrow.
            progress.TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=Console(stderr=True),
            expand=True,
        )
        self._metrics = ""
        self._task = self._bar.add_task("", total=total, completed=done, epoch=1, text="")
        self._bar.start()

    def update(self, epoch: int, done: int, loss: float, speed: float) -> None:
        text = f"loss {shown(loss)}  {speed:.0f} samples/s  {self._metrics}"
        self._bar.update(self._task, completed=done, epoch=epoch + 1, text=text)

    def epoch(self, epoch: int, metrics: Mapping[str, float]) -> None:
        self.line(f"epoch {epoch + 1}  {named(metrics)}")
        measured = {name: value for name, value in metrics.items() if name not in ("train_loss", "loss")}
        self._metrics = named(measured)

    def line(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()


def shown(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.4g}"


def named(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {shown(value)}" for name, value in values.items())


def make_progress(wanted: bool, total: int | None, done: int) -> Progress:
    """`total` updates are to be made, if that is known, of which some are `done`."""
    if not wanted or sys.stderr is None:  # None: closed when Python was started
        return Silent()
    if not sys.stderr.isatty():
        return Lines()
    try:
        return Bar(total, done)
    except ImportError:
        return Lines()
