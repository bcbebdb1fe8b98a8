"""Notices for slow operations."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

PATIENCE = 2.0  # seconds
INTERVAL = 10.0  # seconds between lines of progress

Item = TypeVar("Item")


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


def reported(items: Iterable[Item], what: str) -> Iterator[Item]:
    """Yield the items; print a line of progress to stderr when they take longer than PATIENCE seconds, and then every
    INTERVAL seconds: "sw.ekfac, first pass: 12 of 40 batches".
    """
    total = _total(items)
    due = time.monotonic() + PATIENCE
    for done, item in enumerate(items):
        if time.monotonic() > due and sys.stderr is not None:
            with suppress(OSError):  # a closed pipe
                print(f"{what}: {done}{total} batches", file=sys.stderr, flush=True)
            due = time.monotonic() + INTERVAL
        yield item


def _total(items: object) -> str:
    try:
        return f" of {len(items)}"  # type: ignore[arg-type]
    except TypeError:  # no length, as an iterator or the loader of an iterable dataset
        return ""
