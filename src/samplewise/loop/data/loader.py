"""Resumable iteration over a loader: same samples, order and random augmentation from any position of any epoch.

`adapters.py` starts a loader at a batch. This module keeps the position: a window may end inside a batch, so a position
is a number of batches and a number of used samples of the next batch. That batch is fetched again and its remaining
samples are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import Any

from samplewise.core.batches import Path, check_loader, cut, keep_whole, length
from samplewise.errors import BatchError, CheckpointError, TrainingWarning
from samplewise.loop.checkpoint import io
from samplewise.loop.data.adapters import END, adapter_for, is_map_style, is_poisson, kind_name
from samplewise.loop.data.resume_check import Data, describe, differences, join_words
from samplewise.loop.data.sharding import RankShard, ShardedLoader, check_not_sharded
from samplewise.parallel import collectives


@dataclass(frozen=True)
class DataPosition:
    """Position in an epoch: after `batches` batches and `batch_offset` samples of the next one. Each rank has its own.

    `state` is the state dict of the loader, at this position or one batch before it: after the last batch, the state of
    many loaders does not distinguish the end of an epoch from the beginning.
    """

    batches: int = 0
    batch_offset: int = 0
    state: Any = None
    kind: str | None = None  # kind of loader; None at the beginning of an epoch
    start: int = 0  # samples of the epoch that were used before the current ranks sharded the rest
    samples: int = 0  # samples in the batches; counted only with several ranks

    @property
    def is_inside_epoch(self) -> bool:
        """True if samples of the epoch have been used."""
        return bool(self.batches or self.batch_offset or self.start)


class ResumableLoader:
    """Loader that can be started at any sample of any epoch.

        for batch, position in loader.epoch(number):     the first `position.batch_offset` samples have been used before
            ...
            loader.commit(consumed)                      after an update with the first `consumed` samples of this batch

    `position_after(consumed)` is the position of the next sample, `committed` that of the first sample that is in no
    update yet. `seconds_waited` is the time in seconds spent waiting for batches so far, `first_wait` that for the
    first batch, in which workers start.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        seed: int,
        first: int | None = None,
        *,
        checkpointed: bool = False,
        in_use: bool = False,
        shard: RankShard | None = None,
        constants: tuple[Path, ...] = (),
    ):
        """first: use only the first `first` batches of epoch 0, in every epoch; None for all batches.
        checkpointed: positions will be saved in checkpoints, so the loader's state must be savable.
        in_use: the loader may be in use elsewhere, so its state is not changed.
        shard: of this rank, by default that of the current process; unused if the loader is marked by
        `sw.already_sharded`.
        constants: entries of the batches that are not per sample, see `batch_constants`.
        """
        self.seed = seed
        self.checkpointed = checkpointed
        self.in_use = in_use
        self.loader: Iterable[Any] = ()
        self.data: dict[str, Any] = {}
        self.seconds_waited = 0.0
        self.first_wait = 0.0
        self._rank_shard = replace(shard or RankShard.of_this_rank(), constants=constants)
        self.seek(DataPosition())
        self.set_loader(loader, first)

    def seek(self, position: DataPosition) -> None:
        """Set the position from which the next call of `epoch` starts."""
        self._start = position
        self._last: DataPosition | None = None  # position before the last batch
        self._committed: DataPosition | None = None
        self._rows = 0  # samples in the last batch; 0 with one rank
        self._prefetched: Iterator[Any] | None = None  # rest of the epoch, if `prefetch` has fetched its first batch
        self._has_prefetched = False

    def set_loader(self, loader: Iterable[Any], first: int | None = None) -> None:
        """Continue at the same position of another loader. Inside an epoch it must have the same data properties.

        loader: a loader of all samples, of which each rank takes its shard; or `sw.already_sharded(loader)`.
        """
        check_loader(loader.loader if isinstance(loader, ShardedLoader) else loader)
        marked = isinstance(loader, ShardedLoader) or is_poisson(loader)  # each rank takes its part of a draw
        inner: Iterable[Any] = loader.loader if isinstance(loader, ShardedLoader) else loader
        data = {} if self.in_use else describe(inner, first, marked and self._rank_shard.size > 1)
        if self.committed.is_inside_epoch:
            self._check_same(self.data, data, "Finish the epoch with its own data first, or make a new Trainer.")
        self.data = data
        self.first = first
        self.is_marked = marked
        self.shard = RankShard() if marked else self._rank_shard
        if self.shard.size > 1:
            check_not_sharded(inner)
        if inner is not self.loader:
            self.loader = inner
            self._adapter = adapter_for(inner, self.seed, self.in_use)
            self._state_unchecked = self.checkpointed

    def position_after(self, consumed: int) -> DataPosition:
        """Position after the first `consumed` samples of the last batch; 0 means after the whole batch."""
        if consumed and self._last is not None:
            return replace(self._last, batch_offset=consumed)
        return self._after_last_batch()

    @property
    def committed(self) -> DataPosition:
        """Position of the first sample that is in no update yet."""
        return self._committed or self._after_last_batch()

    def commit(self, consumed: int) -> None:
        """Record that all samples up to the first `consumed` of the last batch are used; 0 means the whole batch."""
        self._committed = self.position_after(consumed) if consumed else None

    def epoch(self, number: int, rewind: bool = False) -> Iterator[tuple[Any, DataPosition]]:
        """Yield (batch, position before it) for the rest of the epoch.

        rewind: start at the first sample that is in no update, so that such samples come again.
        """
        at = self._with_kind(self.committed if rewind else self._after_last_batch())
        batches = self._prefetched or self._iterate(number, at)
        self._prefetched = None
        self._start = at
        self._last = None
        if self._state_unchecked:  # once per loader, before its first batch
            try:
                io.check({"loader": self._adapter.state()})
            except TypeError as why:
                raise CheckpointError(f"the state of a loader must be savable in a checkpoint: {why}") from why
            self._state_unchecked = False
        while self.first is None or at.batches < self.first:
            began = perf_counter()
            batch = next(batches, END)
            waited = perf_counter() - began
            self.seconds_waited += waited
            self.first_wait = self.first_wait or waited
            if batch is END:
                break
            if self._rank_shard.constants:
                batch = keep_whole(batch, self._rank_shard.constants)
            if at.batch_offset:
                _check_rows(batch, at.batch_offset)
            self._last = at
            self._committed = self._committed or at
            self._rows = length(batch) or 1 if self.shard.size > 1 else 0
            yield batch, at
            state = self._adapter.state() if self._adapter.has_state else None
            at = DataPosition(at.batches + 1, 0, state, at.kind, at.start, at.samples + self._rows)
        if self._last is None and not self._has_several_ranks:  # with several ranks some may have no batch
            self._check_not_empty(number, at)

    def first_update(
        self, number: int, samples: int | None, is_made: Callable[[], bool]
    ) -> Iterator[tuple[Any, DataPosition]]:
        """Yield the batches of an epoch that its first update needs on this rank; the last one is cut.

        samples: of an update, over all ranks; None for one batch per rank.
        is_made: function that returns True when the update is made. Batches that cannot be cut are yielded until then.
        """
        needed = None if samples is None else self._rank_shard.count(samples)
        for batch, position in self.epoch(number) if needed != 0 else ():
            rows = length(batch)
            if needed is not None and rows is not None:
                batch = cut(batch, 0, needed, rows) if rows > needed else batch
                needed -= min(rows, needed)
            yield batch, position
            if needed in (None, 0) or is_made():
                return

    def prefetch(self, number: int) -> None:
        """Fetch the first batch before `epoch`, and check that some rank has one and that all have the same order.

        Collective. Does nothing with one rank.
        """
        if not self._has_several_ranks or self._has_prefetched:
            return
        self._has_prefetched = True
        at = self._with_kind(self._after_last_batch())
        batches = self._iterate(number, at)
        first = next(batches, END)
        if not self.is_marked:
            self._adapter.order.check_equal_on_ranks(valid=at.state is None)
        if not collectives.all_reduce_scalars(first is not END)[0]:
            self._check_not_empty(number, at)
        self._prefetched = chain([] if first is END else [first], batches)

    @property
    def _has_several_ranks(self) -> bool:
        """True if ranks share the epoch: then its beginning is collective, and one of them may have no batch."""
        return self.shard.size > 1 or collectives.size() > 1

    def _check_not_empty(self, number: int, at: DataPosition) -> None:
        """Raise BatchError for an epoch without batches, unless it was resumed at its end."""
        if at.batches == 0 and at.start == 0:
            subject = "an evaluation" if self.in_use else "an epoch"
            where = "" if self.in_use else f" in epoch {number + 1}"
            raise BatchError(
                f"{subject} must have at least one batch; found none{where}. Check the loader: a generator is empty "
                "after its first use, and drop_last=True drops a dataset smaller than one batch."
            )

    def _iterate(self, number: int, at: DataPosition) -> Iterator[Any]:
        shard = replace(self.shard, start=at.start)
        return self._adapter.iterate(number if self.first is None else 0, at.batches, at.state, shard)

    def state(self, consumed: int) -> dict[str, Any]:
        """Return the position for a checkpoint: of this process, or of all ranks. Collective.

        consumed: used samples of the last batch; 0 means all.
        """
        here = self.position_after(consumed)
        if collectives.size() == 1:
            # None if the batch size is unknown. Needed to resume with several ranks, whose batch size may differ.
            used = None
            size: Any = getattr(self.loader, "batch_size", None)
            if type(size) is int and self._adapter.samples(0, 0) is not None:
                used = here.start + here.batches * size + here.batch_offset
            return {"position": vars(here), "samples_used": used, "data": [self.data]}
        of_ranks = collectives.all_gather_object((vars(here), self.data))
        positions = [DataPosition(**position) for position, _ in of_ranks]
        data = [data for _, data in of_ranks]
        return {
            "positions": [vars(position) for position in positions],
            "samples_used": self._used(positions),
            "data": data,
        }

    def check_data(self, state: dict[str, Any], epoch: int) -> None:
        """Compare the data with that of a checkpoint: raise inside an epoch, warn between two epochs.

        With another number of ranks the position is counted in samples, so the batch size may differ.
        """
        positions = _positions(state)
        saved = state.get("data")  # None: written by an earlier version
        if not saved:
            return
        as_many = len(saved) == collectives.size()
        before = saved[collectives.rank()] if as_many else saved[0]
        if any(position.is_inside_epoch for position in positions):
            remedy = (
                f"Resume with the data of the checkpoint until epoch {epoch + 1} has ended (epochs={epoch + 1}) and "
                "change it then, or start a new run directory."
            )
            self._check_same(before, self.data, remedy, ignore=() if as_many else ("batch size", "sharded"))
        elif (changes := differences(before, self.data)) and collectives.rank() == 0:
            warnings.warn(
                f"the run is resumed at the beginning of epoch {epoch + 1} with other data than it was saved with: "
                f"{join_words(changes)}. Earlier epochs used the saved data, the epochs from here on use the new data.",
                TrainingWarning,
                stacklevel=2,
            )

    def _check_same(self, before: Data, now: Data, remedy: str, ignore: Iterable[str] = ()) -> None:
        changes = differences(before, now, ignore)
        if changes:
            raise CheckpointError(
                "an epoch must be continued with the dataset length, batch size, sampler and drop_last that it was "
                f"started with, or samples would be lost or repeated; found {join_words(changes)}. {remedy}"
            )

    def _used(self, positions: Sequence[DataPosition]) -> int | None:
        """Number of samples of the epoch that all ranks have used, if they are its first samples; otherwise None."""
        counts = [position.samples + position.batch_offset for position in positions]
        even = all(n == len(range(rank, sum(counts), len(counts))) for rank, n in enumerate(counts))
        countable = even and not self.is_marked and self._adapter.samples(0, 0) is not None
        return positions[0].start + sum(counts) if countable else None

    def load(self, state: dict[str, Any], epoch: int) -> None:
        """Go to the position of a checkpoint, also with another number of ranks."""
        positions = _positions(state)
        if len(positions) == collectives.size():
            self.seek(positions[collectives.rank()])
        elif all(position.kind is None for position in positions):
            self.seek(DataPosition())
        else:
            self.seek(DataPosition(kind=positions[0].kind, start=self._used_before(state, positions, epoch)))

    def _used_before(self, state: dict[str, Any], positions: Sequence[DataPosition], epoch: int) -> int:
        """Number of used samples of the epoch, from which another number of ranks continues."""
        used = state.get("samples_used")
        first = positions[0]
        if used is None and len(positions) == 1:
            samples = self._adapter.samples(epoch if self.first is None else 0, first.batches, first.start)
            used = None if samples is None else first.start + samples + first.batch_offset
        if used is None or self.first is not None or self.is_marked:
            raise CheckpointError(
                f"inside an epoch, a run with {kind_name(first.kind)} must be resumed with the number of ranks it was "
                f"saved with, {len(positions)}; found {collectives.size()}. Start that number of ranks, or resume "
                "from a checkpoint between two epochs."
            )
        return used

    def updates_per_epoch(self, samples: int | None) -> int | None:
        """Number of updates of `samples` samples in an epoch (None: one update per batch); None if it is unknown."""
        try:
            batches = len(self.loader) if isinstance(self.loader, Sized) else None
        except TypeError:  # a DataLoader of an IterableDataset without __len__
            batches = None
        if batches is None:
            return None
        batches = batches if self.first is None else min(self.first, batches)
        if samples is None:
            return -(-batches // self.shard.size)
        if not is_map_style(self.loader) or self.first is not None:
            return None
        sampler: Any = getattr(self.loader, "sampler", None)
        return -(-len(sampler) // samples) if isinstance(sampler, Sized) else None

    def close(self) -> None:
        """Stop worker processes."""
        self._adapter.close()

    def _after_last_batch(self) -> DataPosition:
        if self._last is None:
            return self._start
        return replace(
            self._last, batches=self._last.batches + 1, batch_offset=0, samples=self._last.samples + self._rows
        )

    def _with_kind(self, position: DataPosition) -> DataPosition:
        """Return the position with the kind of this loader; raise CheckpointError if it has another kind."""
        kind = self._adapter.kind
        if position.kind not in (None, kind):
            raise CheckpointError(
                "an epoch must be continued with the kind of loader it was started with, "
                f"{kind_name(position.kind)}; found {kind_name(kind)}. Pass a loader of the same kind."
            )
        return replace(position, kind=kind)


def _positions(state: dict[str, Any]) -> list[DataPosition]:
    """Positions of all ranks in the state of a checkpoint, ordered by rank."""
    return [DataPosition(**position) for position in state.get("positions") or [state["position"]]]


def _check_rows(batch: Any, used: int) -> None:
    """Raise CheckpointError if a batch has no unused samples."""
    if used >= (length(batch) or 0):
        raise CheckpointError(
            f"a run must be resumed with the data it was saved with; found a batch of {length(batch)} samples, of "
            f"which {used} are recorded as used. Pass the same data and batch size."
        )
