"""Leaving before the end: somebody asks for it, or a signal comes. Nothing that was done is lost.

One process leaves between two batches; what it has of a window, it keeps. Several ranks leave after the same update,
because a part of a window is of no use to any of them. A signal to the whole group of processes takes the workers of a
loader along: a rank that cannot get any further then says so, and all ranks go back to where the window began.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from samplewise import ranks
from samplewise.loop.feed import Feed
from samplewise.replay import random_state
from samplewise.step.step import Step


class Left(BaseException):
    """Somebody wants us to leave in the middle of a window or of validation. No Exception: no step gives up for it."""


class Gone(Exception):
    """Somebody wants us to leave, and the loader has left already. Of several ranks, all must hear of it."""


class Leaving:
    """Whether to leave, and why: the `reason`, which is the same on all ranks. For one training."""

    def __init__(self, step: Step) -> None:
        self.reason: str | None = None
        self._step = step
        self._wish: str | None = None  # of this rank
        self._interrupted = False
        self._come_back: Callable[[], None] | None = None

    def ask(self, reason: str) -> None:
        self._wish = self._wish or reason
        if not ranks.active():
            self.reason = self._wish

    def agree(self) -> None:
        """Between two windows, where all ranks are."""
        self._hear()
        self._come_back = random_state() if ranks.active() else None

    def _hear(self) -> None:
        if ranks.active() and self.reason is None and ranks.meet(self._wish is not None)[0]:
            self.reason = next(wish for wish in ranks.everyone(self._wish) if wish is not None)

    @contextmanager
    def at_signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C ask for it. A second Ctrl-C is a plain KeyboardInterrupt."""
        before: dict[int, Any] = {}

        def leave(number: int, frame: Any) -> None:
            if self._interrupted and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.ask(signal.Signals(number).name)
            self._interrupted = True
            if child := getattr(signal, "SIGCHLD", None):  # else torch raises, anywhere, since a worker was killed too
                before.setdefault(child, signal.signal(child, signal.SIG_DFL))

        if threading.current_thread() is threading.main_thread():
            before |= {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
            self._interrupted = False

    # --- batches, and the windows made of them -----------------------------------------------------------------------

    def until_left(self, batches: Iterable[Any], feed: Feed) -> Iterator[Any]:
        """Batches until somebody wants us to leave."""
        try:
            with self.fetching():
                for batch in batches:
                    yield batch
                    if self._interrupted and not (self._step.waiting or ranks.active()):
                        raise Left
        except (Exception, Left) as why:
            if not self._interrupted or ranks.active():  # several ranks leave together
                raise
            feed.mark(self._step.taken)  # what is in the open window need not come again
            raise Left from why

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """A loader that fails now has been left by its workers."""
        try:
            yield
        except Exception as why:
            if not (self._interrupted and ranks.active()) or ranks.is_told(why):
                raise
            raise Gone(
                f"a rank must have its loader until all leave; found that it failed after {self._wish}, with "
                f"{type(why).__name__}: {why}. Resume from the last checkpoint."
            ) from why

    @contextmanager
    def windows(self, feed: Feed) -> Iterator[None]:
        """One process that is left stays where it is. If a rank cannot get any further, the open window of all never
        was; unless it has samples of the epoch before, to which nobody can go back.
        """
        try:
            yield
        except Left:
            return
        except Exception as error:
            ranks.tell(error)
            if ranks.failures(error) != {Gone.__name__} or self._step.tail == "carry":
                raise
            self._hear()
            feed.go_to(feed.place)
            if self._come_back is not None:
                self._come_back()
