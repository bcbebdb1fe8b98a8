"""What one sees while it runs: a bar in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
from typing import Protocol


class Progress(Protocol):
    def update(self, epoch: int, done: int, text: str) -> None:
        """So many updates have been made."""

    def line(self, text: str) -> None:
        """Something to stay on the screen."""

    def close(self) -> None: ...


class Silent:
    def update(self, epoch: int, done: int, text: str) -> None: ...
    def line(self, text: str) -> None: ...
    def close(self) -> None: ...


class Lines:
    def update(self, epoch: int, done: int, text: str) -> None:
        self.line(f"epoch {epoch + 1}  update {done}  {text}")

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None: ...


class Bar:
    """With rich: epoch, updates, time left, loss and speed."""

    def __init__(self, total: int | None, done: int) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("epoch {task.fields[epoch]}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TextColumn("updates, left"),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=total, completed=done, epoch=1, text="")
        self._bar.start()

    def update(self, epoch: int, done: int, text: str) -> None:
        self._bar.update(self._task, completed=done, epoch=epoch + 1, text=text)

    def line(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()


def make_progress(wanted: bool, total: int | None, done: int) -> Progress:
    """`total` updates are to be made, if that is known, of which some are `done`."""
    if not wanted:
        return Silent()
    if not sys.stderr.isatty():
        return Lines()
    try:
        return Bar(total, done)
    except ImportError:
        return Lines()
