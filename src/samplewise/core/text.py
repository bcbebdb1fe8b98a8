"""Text for people: numbers with nouns, lists, hints and tables; progress of a long computation on stderr, as a bar in a
terminal and as plain lines elsewhere; notices of slow operations.
"""

from __future__ import annotations

import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from html import escape
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

SHOWN = 5


def listed(names: Iterable[str]) -> str:
    """Return the first five names, separated by commas, and the number of the others."""
    names = list(names)
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def plural(count: int, noun: str, nouns: str = "") -> str:
    """A number and its noun: "1 update", "2 updates", "1,000 updates". `nouns`: the plural, if it is not noun + s."""
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"


def render(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Return a table with left-aligned columns, a rule below the header and an optional title line."""
    widths = [max(len(row[c]) for row in (header, *rows)) for c in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.ljust(w) for cell, w in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    rule = "  ".join("-" * w for w in widths)
    return "\n".join(([title] if title else []) + [lines[0], rule, *lines[1:]])


class Table(NamedTuple):
    """Table with a title above and notes below it."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str
    notes: Sequence[str] = ()

    def text(self) -> str:
        return "\n".join([render(self.header, self.rows, self.title) if self.rows else self.title, *self.notes])

    def html(self) -> str:
        def line(tag: str, cells: Sequence[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

        head = line("th", self.header)
        body = "".join(line("td", row) for row in self.rows)
        table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>" if self.rows else ""
        return f"<p>{escape(self.title)}</p>{table}{''.join(f'<p>{escape(note)}</p>' for note in self.notes)}"


class Tabular(ABC):
    """Base of results that are shown as a table: as text by `print` and a REPL, as HTML by a notebook."""

    @abstractmethod
    def _table(self) -> Table: ...

    def __repr__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        return self._table().html()


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return "Did you mean 'x'?" for the one of the names that is most similar; empty if none is similar."""
    close = get_close_matches(name, names, n=1)
    return f"Did you mean {close[0]!r}?" if close else ""


# --- progress --------------------------------------------------------------------------------------------------------

QUIET = 2.0  # seconds before the first line
INTERVAL = 15.0  # seconds between two lines
PATIENCE = 2.0  # seconds before the notice of a slow operation

Item = TypeVar("Item")

_shown = False  # True inside of `progress`: only the outermost one shows something


@contextmanager
def progress(total: int | None, description: str) -> Iterator[Callable[[int], None]]:
    """Show the progress of the block. Yields a function that adds to the number of finished parts.

    A bar of rich if stderr is a terminal and rich is installed; otherwise a line after 2 s and then every 15 s. Inside
    of another `progress`, nothing.

    total: number of parts; None if unknown
    """
    global _shown
    if _shown:
        yield lambda parts: None
        return
    _shown = True
    try:
        with _display(total, description) as advance:
            yield advance
    finally:
        _shown = False


def with_progress(items: Iterable[Item], description: str) -> Iterator[Item]:
    """Yield the items and show how many are done."""
    try:
        total = len(items)  # type: ignore[arg-type]
    except TypeError:  # no length, as an iterator or the loader of an iterable dataset
        total = None
    with progress(total, description) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def _display(total: int | None, description: str) -> Iterator[Callable[[int], None]]:
    bar = _bar()
    if bar is None:
        yield _Lines(total, description).advance
        return
    with bar:
        task = bar.add_task(description, total=total)
        yield lambda parts: bar.update(task, advance=parts)


def _bar() -> Any:
    """Progress bar of rich, or None if stderr is not a terminal or rich is not installed."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        progress = import_module("rich.progress")
        console = import_module("rich.console").Console(stderr=True)
    except ImportError:
        return None
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(*columns, console=console, transient=True)


class _Lines:
    """Plain lines, none in the first two seconds."""

    def __init__(self, total: int | None, description: str):
        self._total = "" if total is None else f" of {total}"
        self._description = description
        self._done = 0
        self._next = time.monotonic() + QUIET

    def advance(self, parts: int) -> None:
        self._done += parts
        if sys.stderr is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + INTERVAL
        with suppress(OSError):  # a closed pipe must not stop the computation
            print(f"{self._description}: {self._done}{self._total}", file=sys.stderr, flush=True)


@contextmanager
def notify_if_slow(notify: Callable[[str], object], line: str) -> Iterator[None]:
    """Call `notify(line)` once, from a timer thread, if the block takes longer than PATIENCE seconds."""
    timer = threading.Timer(PATIENCE, notify, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
