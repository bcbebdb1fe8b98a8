"""The same samples in the same order and with the same random augmentation, from any place of any epoch.

`sources.py` knows how to enter a loader at a batch. Here is where to: a window may end inside a batch, so a place is a
batch and how many samples of it have been used. The batch is fetched again as it was, and its rest is used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from samplewise import ranks
from samplewise.batches import length
from samplewise.errors import BatchError, CheckpointError, TrainingWarning
from samplewise.loop import store
from samplewise.loop.data_check import Data, describe, differences, listed
from samplewise.loop.dealing import Share, check_undivided
from samplewise.loop.sources import END, is_ordered, source_of


@dataclass(frozen=True)
class Place:
    """In an epoch: after so many batches, and so many samples of the next one. `state` is the loader's own, there or
    one batch before: after its last batch, many a loader cannot tell the end of an epoch from the beginning.

    Of several ranks each has a place of its own. `start`: so many samples of the epoch were used, by whoever it was,
    before these ranks divided the rest.
    """

    batches: int = 0
    inside: int = 0
    state: Any = None
    kind: str | None = None  # of loader; None at the beginning
    start: int = 0
    samples: int = 0  # of the batches; counted where there are several ranks


class Feed:
    """A loader that can be entered at any sample of any epoch.

        for batch, used in feed.epoch(number):     the first `used` samples of the batch were used before
            ...
            feed.mark(taken)                       after an update: all is used; of this batch, so many samples

    `here(taken)` is the place of the next sample, `place` that of the first one that has gone into no update.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        seed: int,
        first: int | None = None,
        saved: bool = False,
        apart: bool = False,
        share: Share | None = None,
    ):
        """`first`: every epoch is made of the first so many batches of epoch 0. `saved`: places will go into files.
        `apart`: the loader may be in use elsewhere. `share`: of how many ranks this is which one; None: this rank has
        samples of its own.
        """
        self.seed, self.first, self.saved, self.apart = seed, first, saved, apart
        self.share, self.divides = share or Share(), share is not None
        self.loader: Iterable[Any] = ()
        self.data: dict[str, Any] = {}
        self.go_to(Place())
        self.use(loader)

    def go_to(self, place: Place) -> None:
        self._start = place
        self._last: Place | None = None  # before the last batch
        self._mark: Place | None = None
        self._rows = 0  # of the last batch
        self._ahead: Iterator[Any] | None = None  # the rest of the epoch, if it has been looked into
        self._looked = False

    def use(self, loader: Iterable[Any]) -> None:
        """Go on in the same place of another loader. Inside an epoch it must have the same properties."""
        data = {} if self.apart else describe(loader, self.first)
        if _is_inside(self.place):
            self._check_same(self.data, data, "Finish the epoch with that data first, or make a new Trainer.")
        self.data = data
        if loader is not self.loader:
            if self.share.size > 1:
                check_undivided(loader)
            self.loader, self._source = loader, source_of(loader, self.seed, self.apart)
            self._unchecked = self.saved

    def here(self, taken: int) -> Place:
        return replace(self._last, inside=taken) if taken and self._last is not None else self._after()

    @property
    def number(self) -> int:
        """Number of the last batch in its epoch, from 0 on."""
        return 0 if self._last is None else self._last.batches

    @property
    def place(self) -> Place:
        return self._mark or self._after()

    def mark(self, taken: int) -> None:
        self._mark = self.here(taken) if taken else None

    def epoch(self, number: int, back: bool = False) -> Iterator[tuple[Any, int]]:
        """What is left of the epoch; `back`: what went into no update comes again."""
        at = self._of_this_kind(self.place if back else self._after())
        batches, self._ahead = self._ahead or self._enter(number, at), None
        self._start, self._last = at, None
        self._check_state()
        while (self.first is None or at.batches < self.first) and (batch := next(batches, END)) is not END:
            _check_used(batch, at.inside)
            self._last, self._mark = at, self._mark or at
            self._rows = length(batch) or 1 if self.share.size > 1 else 0
            yield batch, at.inside
            at = Place(at.batches + 1, 0, self._source.state(), at.kind, at.start, at.samples + self._rows)
        if self._last is None and not self._among_others:  # of whom some may have none
            self._check_begun(number, at)

    def look(self, number: int) -> None:
        """Before `epoch`, on all ranks: goes as far as the first batch, and sees whether any of them has one, and all
        have the same order.
        """
        if not self._among_others or self._looked:
            return
        self._looked = True
        at = self._of_this_kind(self._after())
        batches = self._enter(number, at)
        first = next(batches, END)
        if self.divides:
            self._source.look.agree(looked=at.state is None)
        if not ranks.meet(first is not END)[0]:
            self._check_begun(number, at)
        self._ahead = chain([] if first is END else [first], batches)

    @property
    def _among_others(self) -> bool:
        return self.share.size > 1 or ranks.active()

    def _check_begun(self, number: int, at: Place) -> None:
        """Nothing came: no wonder where all has been used before."""
        if at.batches == 0 and at.start == 0:
            wanted, where = ("an evaluation", "") if self.apart else ("an epoch", f" in epoch {number}")
            raise BatchError(
                f"{wanted} must have at least one batch; found none{where}. See to the loader: a generator is empty "
                "the second time, and drop_last drops all of a small data set."
            )

    def _enter(self, number: int, at: Place) -> Iterator[Any]:
        share = replace(self.share, start=at.start)
        return self._source.enter(number if self.first is None else 0, at.batches, at.state, share)

    def state(self, taken: int) -> dict[str, Any]:
        """Where this rank, or all of them, will go on; of the last batch so many samples are taken."""
        here = self.here(taken)
        if not ranks.active():
            return {"place": vars(here), "used": self._used_alone(here), "data": [self.data]}
        of_ranks = ranks.everyone((vars(here), self.data))
        places = [Place(**place) for place, _ in of_ranks]
        data = [data for _, data in of_ranks]
        return {"places": [vars(place) for place in places], "used": self._used(places), "data": data}

    def check_data(self, state: dict[str, Any], epoch: int) -> None:
        """Compare the data with that of a checkpoint: an error inside an epoch, a warning between two epochs.

        With another number of ranks the position is counted in samples, so that the batch size may differ.
        """
        places = [Place(**place) for place in state.get("places") or [state["place"]]]
        saved = state.get("data")  # None: written by an earlier version
        if not saved:
            return
        as_many = len(saved) == ranks.size()
        before = saved[ranks.rank()] if as_many else saved[0]
        if any(map(_is_inside, places)):
            remedy = (
                f"Resume with the data of the checkpoint until epoch {epoch} has ended (epochs={epoch + 1}) and change "
                "it then, or start a new run directory."
            )
            self._check_same(before, self.data, remedy, ignore=() if as_many else ("batch size",))
        elif (found := differences(before, self.data)) and ranks.rank() == 0:
            warnings.warn(
                f"the run is resumed at the beginning of epoch {epoch} with other data than it was saved with: "
                f"{listed(found)}. The epochs before used the former, those from here on use the latter.",
                TrainingWarning,
                stacklevel=2,
            )

    def _check_same(self, before: Data, now: Data, remedy: str, ignore: Iterable[str] = ()) -> None:
        found = differences(before, now, ignore)
        if found:
            raise CheckpointError(
                "training must go on inside an epoch with the data set length, batch size, sampler and drop_last that "
                f"the epoch was begun with, or samples would be lost or repeated; found {listed(found)}. {remedy}"
            )

    def _used(self, places: Sequence[Place]) -> int | None:
        """How many samples of the epoch, if they are its first ones."""
        taken = [place.samples + place.inside for place in places]
        even = all(n == len(range(rank, sum(taken), len(taken))) for rank, n in enumerate(taken))
        known = even and self.divides and self._source.samples(0, 0) is not None
        return places[0].start + sum(taken) if known else None

    def _used_alone(self, here: Place) -> int | None:
        """The same of one process, as long as it is known how large its batches are: ranks may have others."""
        size: Any = getattr(self.loader, "batch_size", None)
        known = type(size) is int and self._source.samples(0, 0) is not None
        return here.start + here.batches * size + here.inside if known else None

    def load(self, state: dict[str, Any], epoch: int) -> None:
        """Goes on there, with as many ranks or with others."""
        places = [Place(**place) for place in state.get("places") or [state["place"]]]
        if len(places) == ranks.size():
            self.go_to(places[ranks.rank()])
        elif all(place.kind is None for place in places):
            self.go_to(Place())
        else:
            self.go_to(Place(kind=places[0].kind, start=self._start_of(state, places, epoch)))

    def _start_of(self, state: dict[str, Any], places: Sequence[Place], epoch: int) -> int:
        used, first = state.get("used"), places[0]
        if used is None and len(places) == 1:
            found = self._source.samples(epoch if self.first is None else 0, first.batches, first.start)
            used = None if found is None else first.start + found + first.inside
        if used is None or self.first is not None or not self.divides:
            raise CheckpointError(
                f"a run with a loader {first.kind} must be resumed in the middle of an epoch with as many ranks as it "
                f"was saved by, {len(places)}; found {ranks.size()}. Start as many, or resume from a checkpoint "
                "between two epochs."
            )
        return used

    def updates_of(self, samples: int | None) -> int | None:
        """How many updates of so many samples an epoch has, as far as one can tell beforehand."""
        try:
            batches = len(self.loader) if isinstance(self.loader, Sized) else None
        except TypeError:  # a DataLoader of a stream has a length only if the stream has one
            batches = None
        if batches is None:
            return None
        batches = batches if self.first is None else min(self.first, batches)
        if samples is None:
            return -(-batches // self.share.size)
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
        return replace(self._last, batches=self._last.batches + 1, inside=0, samples=self._last.samples + self._rows)

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


def _is_inside(place: Place) -> bool:
    """Whether samples of the epoch have been used before."""
    return bool(place.batches or place.inside or place.start)


def _check_used(batch: Any, used: int) -> None:
    if used and used >= (length(batch) or 0):
        raise CheckpointError(
            f"a run must be resumed with the data it was begun with; found a batch of {length(batch)} samples, of "
            f"which {used} have been used. Pass the same data and batch size."
        )
