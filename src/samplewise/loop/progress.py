"""What one sees while it runs: a bar in a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import sys
from typing import Any, Protocol


class Progress(Protocol):
    def epoch(self, number: int, updates: int | None) -> None: ...
    def update(self, done: int, text: str) -> None: ...
    def line(self, text: str) -> None: ...
    def close(self) -> None: ...


class Silent:
    def epoch(self, number: int, updates: int | None) -> None: ...
    def update(self, done: int, text: str) -> None: ...
    def line(self, text: str) -> None: ...
    def close(self) -> None: ...


class Lines:
    def epoch(self, number: int, updates: int | None) -> None: ...

    def update(self, done: int, text: str) -> None:
        self.line(text)

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None: ...


class Bar:
    """With rich: epoch, updates, loss and metrics, time left."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn())
        self._bar = RichProgress(*columns, TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
        self._task: Any = None
        self._bar.start()

    def epoch(self, number: int, updates: int | None) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("", total=updates, epoch=number + 1, text="")

    def update(self, done: int, text: str) -> None:
        self._bar.update(self._task, completed=done, text=text)

    def line(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def close(self) -> None:
        self._bar.stop()


def make_progress(wanted: bool) -> Progress:
    if not wanted:
        return Silent()
    if not sys.stderr.isatty():
        return Lines()
    try:
        return Bar()
    except ImportError:
        return Lines()
