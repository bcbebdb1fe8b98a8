"""Notices for slow operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds


@contextmanager
def telling(tell: Callable[[str], object], what: str) -> Iterator[None]:
    """Call `tell(what)` once, from a timer thread, if the block takes longer than PATIENCE seconds."""
    timer = threading.Timer(PATIENCE, tell, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
