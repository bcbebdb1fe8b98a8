"""Notices for slow operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds


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
