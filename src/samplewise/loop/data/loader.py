"""Resumable iteration over a loader: same samples, order and random augmentation from any position of any epoch.

`adapters.py` starts a loader at a batch. This module keeps the position: a window may end inside a batch, so a position
is a number of batches and a number of used samples of the next batch. That batch is fetched again and its remaining
samples are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from samplewise.core.batches import length
from samplewise.distributed.group import current_group
from samplewise.errors import BatchError, CheckpointError, TrainingWarning
from samplewise.loop.checkpoint import storage
from samplewise.loop.data.adapters import END, described, is_ordered, source_of
from samplewise.loop.data.resume_check import Data, describe, differences, listed
from samplewise.loop.data.sharding import RankShard, check_undivided


@dataclass(frozen=True)
class DataPosition:
    """Position in an epoch: after `batches` batches and `inside` samples of the next one. Each rank has its own.

    `state` is the state dict of the loader, at this position or one batch before it: after the last batch, the state of
    many loaders does not distinguish the end of an epoch from the beginning.
    """

    batches: int = 0
    inside: int = 0
    state: Any = None
    kind: str | None = None  # kind of loader; None at the beginning of an epoch
    start: int = 0  # samples of the epoch that were used before the current ranks sharded the rest
    samples: int = 0  # samples in the batches; counted only with several ranks


class ResumableLoader:
    """Loader that can be started at any sample of any epoch.

        for batch, used in feed.epoch(number):     the first `used` samples of the batch have been used before
            ...
            feed.mark(taken)                       after an update that used the first `taken` samples of this batch

    `here(taken)` is the position of the next sample, `place` that of the first sample that is in no update yet.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        seed: int,
        first: int | None = None,
        saved: bool = False,
        apart: bool = False,
        share: RankShard | None = None,
    ):
        """first: use only the first `first` batches of epoch 0, in every epoch; None for all batches.
        saved: positions will be saved in checkpoints, so the loader's state must be savable.
        apart: the loader may be in use elsewhere, so its state is not changed.
        share: shard of this rank; None if each rank's loader has its own samples.
        """
        self.seed = seed
        self.first = first
        self.saved = saved
        self.apart = apart
        self.share = share or RankShard()
        self.divides = share is not None
        self.loader: Iterable[Any] = ()
        self.data: dict[str, Any] = {}
        self.go_to(DataPosition())
        self.use(loader)

    def go_to(self, place: DataPosition) -> None:
        """Set the position from which the next call of `epoch` starts."""
        self._start = place
        self._last: DataPosition | None = None  # position before the last batch
        self._mark: DataPosition | None = None
        self._rows = 0  # samples in the last batch; 0 with one rank
        self._ahead: Iterator[Any] | None = None  # rest of the epoch, if `look` has fetched its first batch
        self._looked = False

    def use(self, loader: Iterable[Any]) -> None:
        """Continue at the same position of another loader. Inside an epoch it must have the same data properties."""
        data = {} if self.apart else describe(loader, self.first)
        if _is_inside(self.place):
            self._check_same(self.data, data, "Finish the epoch with its own data first, or make a new Trainer.")
        self.data = data
        if loader is not self.loader:
            if self.share.size > 1:
                check_undivided(loader)
            self.loader = loader
            self._source = source_of(loader, self.seed, self.apart)
            self._unchecked = self.saved

    def here(self, taken: int) -> DataPosition:
        """Position after the first `taken` samples of the last batch; 0 means after the whole batch."""
        if taken and self._last is not None:
            return replace(self._last, inside=taken)
        return self._after()

    @property
    def number(self) -> int:
        """Index of the last batch in its epoch, from 0 on."""
        return 0 if self._last is None else self._last.batches

    @property
    def place(self) -> DataPosition:
        """Position of the first sample that is in no update yet."""
        return self._mark or self._after()

    def mark(self, taken: int) -> None:
        """Record that all samples up to the first `taken` of the last batch are used; 0 means the whole batch."""
        self._mark = self.here(taken) if taken else None

    def epoch(self, number: int, back: bool = False) -> Iterator[tuple[Any, int]]:
        """Yield (batch, used samples of it) for the rest of the epoch.

        back: start at the first sample that is in no update, so that such samples come again.
        """
        at = self._of_this_kind(self.place if back else self._after())
        batches = self._ahead or self._enter(number, at)
        self._ahead = None
        self._start = at
        self._last = None
        self._check_state()
        while (self.first is None or at.batches < self.first) and (batch := next(batches, END)) is not END:
            _check_used(batch, at.inside)
            self._last = at
            self._mark = self._mark or at
            self._rows = length(batch) or 1 if self.share.size > 1 else 0
            yield batch, at.inside
            at = DataPosition(at.batches + 1, 0, self._source.state(), at.kind, at.start, at.samples + self._rows)
        if self._last is None and not self._among_others:  # with several ranks some may have no batch
            self._check_begun(number, at)

    def look(self, number: int) -> None:
        """Fetch the first batch before `epoch`, and check that some rank has one and that all have the same order.

        Collective. Does nothing with one rank.
        """
        if not self._among_others or self._looked:
            return
        self._looked = True
        at = self._of_this_kind(self._after())
        batches = self._enter(number, at)
        first = next(batches, END)
        if self.divides:
            self._source.look.agree(looked=at.state is None)
        if not current_group().all_reduce_scalars(first is not END)[0]:
            self._check_begun(number, at)
        self._ahead = chain([] if first is END else [first], batches)

    @property
    def _among_others(self) -> bool:
        return self.share.size > 1 or current_group().distributed

    def _check_begun(self, number: int, at: DataPosition) -> None:
        """Raise BatchError for an epoch without batches, unless it was resumed at its end."""
        if at.batches == 0 and at.start == 0:
            wanted = "an evaluation" if self.apart else "an epoch"
            where = "" if self.apart else f" in epoch {number}"
            raise BatchError(
                f"{wanted} must have at least one batch; found none{where}. Check the loader: a generator is empty "
                "after its first use, and drop_last=True drops a data set smaller than one batch."
            )

    def _enter(self, number: int, at: DataPosition) -> Iterator[Any]:
        share = replace(self.share, start=at.start)
        return self._source.enter(number if self.first is None else 0, at.batches, at.state, share)

    def state(self, taken: int) -> dict[str, Any]:
        """Return the position for a checkpoint: of this process, or of all ranks. Collective.

        taken: used samples of the last batch; 0 means all.
        """
        here = self.here(taken)
        if not current_group().distributed:
            return {"place": vars(here), "used": self._used_alone(here), "data": [self.data]}
        of_ranks = current_group().all_gather_object((vars(here), self.data))
        places = [DataPosition(**place) for place, _ in of_ranks]
        data = [data for _, data in of_ranks]
        return {"places": [vars(place) for place in places], "used": self._used(places), "data": data}

    def check_data(self, state: dict[str, Any], epoch: int) -> None:
        """Compare the data with that of a checkpoint: raise inside an epoch, warn between two epochs.

        With another number of ranks the position is counted in samples, so the batch size may differ.
        """
        places = [DataPosition(**place) for place in state.get("places") or [state["place"]]]
        saved = state.get("data")  # None: written by an earlier version
        if not saved:
            return
        as_many = len(saved) == current_group().size
        before = saved[current_group().rank] if as_many else saved[0]
        if any(map(_is_inside, places)):
            remedy = (
                f"Resume with the data of the checkpoint until epoch {epoch} has ended (epochs={epoch + 1}) and change "
                "it then, or start a new run directory."
            )
            self._check_same(before, self.data, remedy, ignore=() if as_many else ("batch size",))
        elif (found := differences(before, self.data)) and current_group().rank == 0:
            warnings.warn(
                f"the run is resumed at the beginning of epoch {epoch} with other data than it was saved with: "
                f"{listed(found)}. Earlier epochs used the saved data, the epochs from here on use the new data.",
                TrainingWarning,
                stacklevel=2,
            )

    def _check_same(self, before: Data, now: Data, remedy: str, ignore: Iterable[str] = ()) -> None:
        found = differences(before, now, ignore)
        if found:
            raise CheckpointError(
                "an epoch must be continued with the data set length, batch size, sampler and drop_last that it was "
                f"started with, or samples would be lost or repeated; found {listed(found)}. {remedy}"
            )

    def _used(self, places: Sequence[DataPosition]) -> int | None:
        """Number of samples of the epoch that all ranks have used, if they are its first samples; otherwise None."""
        taken = [place.samples + place.inside for place in places]
        even = all(n == len(range(rank, sum(taken), len(taken))) for rank, n in enumerate(taken))
        known = even and self.divides and self._source.samples(0, 0) is not None
        return places[0].start + sum(taken) if known else None

    def _used_alone(self, here: DataPosition) -> int | None:
        """Number of samples that one process has used; None if the batch size is unknown.

        It is needed to resume with several ranks, whose batch size may differ.
        """
        size: Any = getattr(self.loader, "batch_size", None)
        known = type(size) is int and self._source.samples(0, 0) is not None
        return here.start + here.batches * size + here.inside if known else None

    def load(self, state: dict[str, Any], epoch: int) -> None:
        """Go to the position of a checkpoint, also with another number of ranks."""
        places = [DataPosition(**place) for place in state.get("places") or [state["place"]]]
        if len(places) == current_group().size:
            self.go_to(places[current_group().rank])
        elif all(place.kind is None for place in places):
            self.go_to(DataPosition())
        else:
            self.go_to(DataPosition(kind=places[0].kind, start=self._start_of(state, places, epoch)))

    def _start_of(self, state: dict[str, Any], places: Sequence[DataPosition], epoch: int) -> int:
        """Number of used samples of the epoch, from which another number of ranks continues."""
        used = state.get("used")
        first = places[0]
        if used is None and len(places) == 1:
            found = self._source.samples(epoch if self.first is None else 0, first.batches, first.start)
            used = None if found is None else first.start + found + first.inside
        if used is None or self.first is not None or not self.divides:
            raise CheckpointError(
                f"inside an epoch, a run with {described(first.kind)} must be resumed with the number of ranks it was "
                f"saved with, {len(places)}; found {current_group().size}. Start that number of ranks, or resume from "
                "a checkpoint between two epochs."
            )
        return used

    def updates_of(self, samples: int | None) -> int | None:
        """Number of updates of `samples` samples in an epoch (None: one update per batch); None if it is unknown."""
        try:
            batches = len(self.loader) if isinstance(self.loader, Sized) else None
        except TypeError:  # a DataLoader of an IterableDataset without __len__
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
        """Stop worker processes."""
        self._source.close()

    def _after(self) -> DataPosition:
        """Position after the last batch."""
        if self._last is None:
            return self._start
        return replace(self._last, batches=self._last.batches + 1, inside=0, samples=self._last.samples + self._rows)

    def _of_this_kind(self, place: DataPosition) -> DataPosition:
        kind = self._source.kind
        if place.kind not in (None, kind):
            raise CheckpointError(
                "an epoch must be continued with the kind of loader it was started with, "
                f"{described(place.kind)}; found {described(kind)}. Pass a loader of the same kind."
            )
        return replace(place, kind=kind)

    def _check_state(self) -> None:
        """Check before the first batch of a loader that its state can be saved."""
        if self._unchecked:
            try:
                storage.check({"loader": self._source.state()})
            except TypeError as why:
                raise CheckpointError(f"the state of a loader must be savable in a checkpoint: {why}") from why
            self._unchecked = False


def _is_inside(place: DataPosition) -> bool:
    """Return True if samples of the epoch have been used."""
    return bool(place.batches or place.inside or place.start)


def _check_used(batch: Any, used: int) -> None:
    if used and used >= (length(batch) or 0):
        raise CheckpointError(
            f"a run must be resumed with the data it was saved with; found a batch of {length(batch)} samples, of "
            f"which {used} are recorded as used. Pass the same data and batch size."
        )
