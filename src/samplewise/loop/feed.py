"""The same samples in the same order and with the same random augmentation, from any place of any epoch.

`sources.py` knows how to enter a loader at a batch. Here is where to: a window may end inside a batch, so a place is a
batch and how many samples of it have been used. The batch is fetched again as it was, and its rest is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass, replace
from typing import Any

from samplewise.batches import length
from samplewise.errors import BatchError, CheckpointError
from samplewise.loop import store
from samplewise.loop.sources import END, is_ordered, source_of


@dataclass(frozen=True)
class Place:
    """In an epoch: after so many batches, and so many samples of the next one. `state` is the loader's own, there or
    one batch before: after its last batch, many a loader cannot tell the end of an epoch from the beginning.
    """

    batches: int = 0
    inside: int = 0
    state: Any = None
    kind: str | None = None  # of loader; None at the beginning


class Feed:
    """A loader that can be entered at any sample of any epoch.

        for batch, used in feed.epoch(number):     the first `used` samples of the batch were used before
            ...
            feed.mark(taken)                       after an update: all is used; of this batch, so many samples

    `here(taken)` is the place of the next sample, `place` that of the first one that has gone into no update.
    """

    def __init__(
        self, loader: Iterable[Any], seed: int, first: int | None = None, saved: bool = False, apart: bool = False
    ):
        """`first`: every epoch is made of the first so many batches of epoch 0. `saved`: places will go into files.
        `apart`: the loader may be in use elsewhere.
        """
        self.seed, self.first, self.saved, self.apart = seed, first, saved, apart
        self.loader: Iterable[Any] = ()
        self.use(loader)
        self.go_to(Place())

    def go_to(self, place: Place) -> None:
        self._start = place
        self._last: Place | None = None  # before the last batch
        self._mark: Place | None = None

    def use(self, loader: Iterable[Any]) -> None:
        """Goes on in the same place of another loader."""
        if loader is not self.loader:
            self.loader, self._source = loader, source_of(loader, self.seed, self.apart)
            self._unchecked = self.saved

    def here(self, taken: int) -> Place:
        return replace(self._last, inside=taken) if taken and self._last is not None else self._after()

    @property
    def place(self) -> Place:
        return self._mark or self._after()

    def mark(self, taken: int) -> None:
        self._mark = self.here(taken) if taken else None

    def epoch(self, number: int, back: bool = False) -> Iterator[tuple[Any, int]]:
        """What is left of the epoch; `back`: what went into no update comes again."""
        at = self._of_this_kind(self.place if back else self._after())
        self._start, self._last = at, None
        batches = self._source.enter(number if self.first is None else 0, at.batches, at.state)
        self._check_state()
        while (self.first is None or at.batches < self.first) and (batch := next(batches, END)) is not END:
            _check_used(batch, at.inside)
            self._last, self._mark = at, self._mark or at
            yield batch, at.inside
            at = Place(at.batches + 1, 0, self._source.state(), at.kind)
        if self._last is None and at.batches == 0:
            raise BatchError(
                f"an epoch must have at least one batch; found none in epoch {number}. See to the loader: a generator "
                "is empty the second time, and drop_last drops all of a small data set."
            )

    def updates_of(self, samples: int | None) -> int | None:
        """How many updates of so many samples an epoch has, as far as one can tell beforehand."""
        if not isinstance(self.loader, Sized):
            return None
        batches = len(self.loader) if self.first is None else min(self.first, len(self.loader))
        if samples is None:
            return batches
        if not is_ordered(self.loader) or self.first is not None:
            return None
        sampler: Any = getattr(self.loader, "sampler", None)
        return -(-len(sampler) // samples) if isinstance(sampler, Sized) else None

    def close(self) -> None:
        """Lets workers go."""
        self._source.close()

    def _after(self) -> Place:
        """After the last batch."""
        if self._last is None:
            return self._start
        return replace(self._last, batches=self._last.batches + 1, inside=0)

    def _of_this_kind(self, place: Place) -> Place:
        kind = self._source.kind
        if place.kind not in (None, kind):
            raise CheckpointError(
                f"an epoch must go on with a loader of the kind it was begun with, one {place.kind}; found one {kind}. "
                "Pass such a loader again."
            )
        return replace(place, kind=kind)

    def _check_state(self) -> None:
        """Before the first batch, so that nothing is lost."""
        if self._unchecked:
            try:
                store.check({"loader": self._source.state()})
            except TypeError as why:
                raise CheckpointError(f"the state of a loader must be one that can be saved: {why}") from why
            self._unchecked = False


def _check_used(batch: Any, used: int) -> None:
    if used and used >= (length(batch) or 0):
        raise CheckpointError(
            f"a run must be resumed with the data it was begun with; found a batch of {length(batch)} samples, of "
            f"which {used} have been used. Pass the same data and batch size."
        )
