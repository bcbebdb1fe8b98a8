"""End of a training run: durations, stop requests and signals, and the result of `fit`.

One process stops between two batches and keeps its open window. Several ranks stop after the same update, because a
part of a window cannot be used. A signal to the whole process group also kills the workers of a loader: a rank whose
loader fails because of it announces this, and all ranks go back to the beginning of the window.

    Duration            number of updates, epochs or samples: "50up", "1ep", "1000samples"
    StopController      stop requests and signals; `stop_controller` returns the one for this process group
    SingleProcessStop   stops between two batches
    MultiRankStop       stops all ranks after the same update
    FitResult           reason for the end, counters and metrics
"""

from __future__ import annotations

import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from samplewise.core.state import RandomState
from samplewise.core.text import Table, Tabular, plural
from samplewise.core.validate import parse_interval
from samplewise.errors import DistributedError, LoaderStopped
from samplewise.loop.data.loader import ResumableLoader
from samplewise.parallel import collectives
from samplewise.step.step import Step
from samplewise.step.update import Update

# An interval is counted from the beginning of the run, by the counters of the step, which are in every checkpoint: a
# resumed run continues it exactly. A number without a unit counts updates.
Unit = Literal["up", "ep", "samples"]
NAMES: dict[Unit, str] = {"up": "update", "ep": "epoch", "samples": "sample"}
EXAMPLES: dict[Unit, str] = {"up": "'50up' (updates)", "ep": "'1ep' (epochs)", "samples": "'1000samples'"}


@dataclass(frozen=True)
class Duration:
    """Number of updates, epochs or samples."""

    number: int
    unit: Unit

    def __str__(self) -> str:
        return f"{self.number}{self.unit}"

    def done(self) -> str:
        """Reason for the end of a training run that has reached the duration: "3 epochs are done"."""
        return f"{plural(self.number, NAMES[self.unit])} {'is' if self.number == 1 else 'are'} done"

    def ends_with(self, update: Update, step: Step) -> bool:
        """True if an interval of this length, in updates or samples, ends with the last update of the step.

        It waits for the device only if the number of updates is a multiple: a skipped update does not count. Samples
        of skipped updates do.
        """
        if self.unit == "up":
            return (update.index + 1) % self.number == 0 and not update.skipped
        if self.unit == "samples":
            samples = step._counters.samples  # `step.counters` would wait for the device
            return samples // self.number > (samples - update.samples) // self.number
        return False

    def ends_with_epoch(self, epoch: int) -> bool:
        """True if an interval of this length, in epochs, ends with the epoch of this index."""
        return self.unit == "ep" and (epoch + 1) % self.number == 0


def interval(name: str, every: Any, units: Sequence[Unit] = ("up", "ep", "samples")) -> Duration:
    """Parse the argument `name`, an interval in one of the units; a number counts updates."""
    return Duration(*parse_interval(name, every, {unit: EXAMPLES[unit] for unit in units}))


def end_of_training(epochs: Any = None, updates: Any = None) -> Duration:
    """Duration of a training run. Exactly one of `epochs` and `updates` is given, a positive int."""
    if (epochs is None) == (updates is None):
        count = "both" if epochs is not None else "neither"
        raise ValueError(f"exactly one of epochs= and updates= must be given; found {count}. Pass epochs=10.")
    name, number = ("updates", updates) if epochs is None else ("epochs", epochs)
    if type(number) is not int or number < 1:
        raise ValueError(f"{name} must be a positive whole number; found {number!r}. Pass epochs=10 or updates=500.")
    return Duration(number, "up" if epochs is None else "ep")


@dataclass(frozen=True)
class FitResult(Tabular):
    """Result of `Trainer.fit`.

    reason    why the training ended: "3 epochs are done", "stopped by SIGINT", or the text of `trainer.stop`
    signal    name of the signal that stopped the training, "SIGINT" (Ctrl-C) or "SIGTERM"; None otherwise
    epochs    number of completed epochs, with those of earlier calls and of the resumed run
    updates   number of updates, counted likewise
    metrics   metrics of the last epoch that this call has completed: "loss" of the validation, if there is one, or of
              the training, "train_loss", and the metrics of the validation. If the training ended inside an epoch,
              those of the validation at the end, without "train_loss"; empty if it has done neither
    """

    reason: str
    signal: str | None
    epochs: int
    updates: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    def _table(self) -> Table:
        cells = [f"{self.epochs:,}", f"{self.updates:,}", *(f"{value:.4g}" for value in self.metrics.values())]
        return Table(["epochs", "updates", *self.metrics], [cells], self.reason)

    def __repr__(self) -> str:
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        return f"FitResult({self.reason!r}, {plural(self.epochs, 'epoch')}, {plural(self.updates, 'update')}{metrics})"


# --- stop requests and signals ---------------------------------------------------------------------------------------


STOPPED_BY_LOADER = "stopped by the loader"


class StopRequest(NamedTuple):
    """Request to end a training run. `signal`: name of the signal that is its cause."""

    reason: str
    signal: str | None = None

    @property
    def is_interruption(self) -> bool:
        """True if a signal or the loader has stopped the training at any place, maybe inside an update's window."""
        return self.signal is not None or self.reason == STOPPED_BY_LOADER


class StopController(ABC):
    """Stop requests of one call of `fit`. `stop` is None until the training is to stop; it is equal on all ranks."""

    def __init__(self, step: Step) -> None:
        self.stop: StopRequest | None = None
        self._step = step
        self._privacy = step.privacy
        self._signal: str | None = None  # name of the signal that this process has received

    @abstractmethod
    def request(self, reason: str, signal: str | None = None) -> None:
        """Request a stop. The first request is kept."""

    @abstractmethod
    def synchronize(self) -> None:
        """After an update or an epoch: stop if privacy is used up, and exchange stop requests. Collective."""

    @abstractmethod
    def watch(self, loader: ResumableLoader) -> AbstractContextManager[None]:
        """Context manager around code that fetches batches: handles errors of a loader whose workers were killed."""

    @abstractmethod
    def batches(self, batches: Iterable[Any], loader: ResumableLoader) -> Iterator[Any]:
        """Yield batches until the training is to stop. `loader` is the training loader, also in validation."""

    @abstractmethod
    def epoch(self, loader: ResumableLoader) -> AbstractContextManager[None]:
        """Context manager around the updates and the validation of an epoch: ends it if the training is to stop."""

    def _stop_if_spent(self) -> None:
        """Stop if further draws are planned but not paid for, because updates were repeated with new noise."""
        if self._privacy is not None and self._privacy.is_exhausted:
            self.request(f"all {self._privacy.plan.updates} updates that are paid for are made")

    def is_over(self, until: Duration, epochs: int) -> bool:
        """Return True if a stop was requested, or the duration is reached after `epochs` epochs."""
        if self.stop is not None:
            return True
        if until.unit == "ep":
            return epochs >= until.number
        # The exact number may wait for the device.
        return self._step._started_updates >= until.number and self._step.counters.updates >= until.number

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Request a stop on SIGTERM and on Ctrl-C. A second Ctrl-C raises KeyboardInterrupt."""
        before: dict[int, Any] = {}

        def handle(number: int, frame: Any) -> None:
            if self._signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self._signal = signal.Signals(number).name
            self.request(f"stopped by {self._signal}", self._signal)
            # Without this, torch raises at an arbitrary place, because the signal has killed a worker too.
            if child := getattr(signal, "SIGCHLD", None):
                before.setdefault(child, signal.signal(child, signal.SIG_DFL))

        if threading.current_thread() is threading.main_thread():
            before |= {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
            self._signal = None


def stop_controller(step: Step) -> StopController:
    """Return the controller for one process or for several ranks."""
    return MultiRankStop(step) if collectives.size() > 1 else SingleProcessStop(step)


class SingleProcessStop(StopController):
    """Stop of one process, between two batches. The open window is kept.

    After a signal, the iterator over batches raises LoaderStopped: it ends `Step.over`, or a validation.
    """

    def request(self, reason: str, signal: str | None = None) -> None:
        self.stop = self.stop or StopRequest(reason, signal)

    def synchronize(self) -> None:
        if self._privacy is not None:
            self._stop_if_spent()

    @contextmanager
    def watch(self, loader: ResumableLoader) -> Iterator[None]:
        """Raise LoaderStopped for any exception after a signal: workers of the loader may have been killed.

        A loader of the user may raise LoaderStopped, too; it then ends the training.
        """
        try:
            yield
        except Exception as error:
            if not (self._signal or isinstance(error, LoaderStopped)):
                raise
            self.request(STOPPED_BY_LOADER)  # unless there is a request already
            loader.commit(self._step._consumed)  # samples in the open window must not come again
            raise LoaderStopped(self.stop) from error

    def batches(self, batches: Iterable[Any], loader: ResumableLoader) -> Iterator[Any]:
        with self.watch(loader):
            for batch in batches:
                yield batch
                if self._signal is not None and not self._step._has_deferred_samples:
                    raise LoaderStopped(self.stop)

    @contextmanager
    def epoch(self, loader: ResumableLoader) -> Iterator[None]:
        try:
            yield
        except LoaderStopped:  # in validation, which a resumed run repeats
            return


class LoaderKilled(Exception):
    """The loader of a rank failed after a signal. The error is announced to all ranks."""


class MultiRankStop(StopController):
    """Stop of several ranks, after the same update.

    If a signal has killed the loader of a rank, the window cannot be completed: all ranks discard it and go back to its
    beginning. With tail="carry" the error is raised instead: the window may contain samples of the previous epoch,
    which cannot be read again.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._requested: StopRequest | None = None  # of this rank
        self._at_window_start = RandomState()

    def request(self, reason: str, signal: str | None = None) -> None:
        self._requested = self._requested or StopRequest(reason, signal)

    def synchronize(self) -> None:
        self._stop_if_spent()
        self._exchange_requests()
        self._at_window_start = RandomState()

    def _exchange_requests(self) -> None:
        if self.stop is None and collectives.all_reduce_scalars(self._requested is not None)[0]:
            requests = collectives.all_gather_object(self._requested)
            self.stop = next(request for request in requests if request is not None)

    @contextmanager
    def watch(self, loader: ResumableLoader) -> Iterator[None]:
        """Raise LoaderKilled for an error of the loader after a signal."""
        try:
            yield
        except LoaderStopped as error:
            raise DistributedError(
                "with several ranks a loader must not raise LoaderStopped, since all ranks stop after the same update; "
                "found that it did. Call trainer.stop(reason) from a callback."
            ) from error
        except Exception as error:
            if self._signal is None or collectives.is_from_another_rank(error):
                raise
            raise LoaderKilled(
                f"the loader of a rank must work until all ranks stop; found that it failed after {self._signal} "
                f"with {type(error).__name__}: {error}. Resume from the last checkpoint."
            ) from error

    def batches(self, batches: Iterable[Any], loader: ResumableLoader) -> Iterator[Any]:
        with self.watch(loader):
            yield from batches

    @contextmanager
    def epoch(self, loader: ResumableLoader) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            collectives.announce_error(error)
            if collectives.failures(error) != {LoaderKilled.__name__} or self._step.tail == "carry":
                raise
            self._exchange_requests()
            loader.seek(loader.committed)
            self._at_window_start.restore()
