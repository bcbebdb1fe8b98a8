"""Early stop of a training on request or on a signal, without loss of work.

One process stops between two batches and keeps its open window. Several ranks stop after the same update, because a
part of a window cannot be used. A signal to the whole process group also kills the workers of a loader: a rank whose
loader fails because of it announces this, and all ranks go back to the beginning of the window.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from samplewise.core.snapshot import random_state
from samplewise.distributed import collectives
from samplewise.distributed.group import current_group
from samplewise.loop.data.loader import ResumableLoader
from samplewise.step.step import Step


class Left(BaseException):
    """Stop requested inside a window or inside validation.

    A BaseException, so that Step does not discard the open window.
    """


class Gone(Exception):
    """The loader failed after a stop was requested. With several ranks, the error is announced to all of them."""


class StopController:
    """Stop requests of one call of `fit`. `reason` is None while it runs, and the same on all ranks."""

    def __init__(self, step: Step) -> None:
        self.reason: str | None = None
        self._step = step
        self._wish: str | None = None  # reason requested on this rank
        self._interrupted = False
        self._come_back: Callable[[], None] | None = None

    def ask(self, reason: str) -> None:
        """Request a stop. The first reason is kept."""
        self._wish = self._wish or reason
        if not current_group().distributed:
            self.reason = self._wish

    def agree(self) -> None:
        """Exchange stop requests between two windows, and keep the random state for `windows`. Collective."""
        self._hear()
        self._come_back = random_state() if current_group().distributed else None

    def _hear(self) -> None:
        if (
            current_group().distributed
            and self.reason is None
            and current_group().all_reduce_scalars(self._wish is not None)[0]
        ):
            self.reason = next(wish for wish in current_group().all_gather_object(self._wish) if wish is not None)

    @contextmanager
    def at_signals(self) -> Iterator[None]:
        """Request a stop on SIGTERM and on Ctrl-C. A second Ctrl-C raises KeyboardInterrupt."""
        before: dict[int, Any] = {}

        def leave(number: int, frame: Any) -> None:
            if self._interrupted and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.ask(signal.Signals(number).name)
            self._interrupted = True
            # Without this, torch raises at an arbitrary place, because the signal has killed a worker too.
            if child := getattr(signal, "SIGCHLD", None):
                before.setdefault(child, signal.signal(child, signal.SIG_DFL))

        if threading.current_thread() is threading.main_thread():
            before |= {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
            self._interrupted = False

    # --- batches and windows -----------------------------------------------------------------------------------------

    def until_left(self, batches: Iterable[Any], feed: ResumableLoader) -> Iterator[Any]:
        """Yield batches. In one process, raise Left after the batch during which a signal came, or if fetching fails
        after a signal.
        """
        try:
            with self.fetching():
                for batch in batches:
                    yield batch
                    if self._interrupted and not (self._step.has_deferred_samples or current_group().distributed):
                        raise Left
        except (Exception, Left) as why:
            if not self._interrupted or current_group().distributed:  # several ranks stop together, after an update
                raise
            feed.mark(self._step.consumed)  # samples in the open window must not come again
            raise Left from why

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Raise Gone for an error of the loader after a signal, with several ranks: its workers were killed."""
        try:
            yield
        except Exception as why:
            if not (self._interrupted and current_group().distributed) or collectives.is_from_another_rank(why):
                raise
            raise Gone(
                f"the loader of a rank must work until all ranks stop; found that it failed after {self._wish} with "
                f"{type(why).__name__}: {why}. Resume from the last checkpoint."
            ) from why

    @contextmanager
    def windows(self, feed: ResumableLoader) -> Iterator[None]:
        """Handle Left and Gone around the windows of an epoch.

        One process keeps its open window. If the loader of a rank failed, all ranks discard the open window and go back
        to its beginning. With tail="carry" the error is raised instead: the window may contain samples of the previous
        epoch, which cannot be read again.
        """
        try:
            yield
        except Left:
            return
        except Exception as error:
            current_group().announce_error(error)
            if collectives.failures(error) != {Gone.__name__} or self._step.tail == "carry":
                raise
            self._hear()
            feed.go_to(feed.place)
            if self._come_back is not None:
                self._come_back()
