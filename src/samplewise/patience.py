"""Nobody waits long without a word."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 2.0  # seconds


@contextmanager
def telling(tell: Callable[[str], object], what: str) -> Iterator[None]:
    """Tells what takes so long, once it does. From a thread."""
    timer = threading.Timer(PATIENCE, tell, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
