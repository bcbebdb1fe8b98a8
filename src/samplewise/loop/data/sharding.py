"""Sharding of the samples of an epoch over ranks.

The samples of an epoch have one order, that of a single process: rank r of N takes samples r, r + N, r + 2N, ... of it.
So each sample is used once, none is repeated to make shards equal, and the first G samples are the same for any N.

    DataLoader      batches of `batch_size` are made of a rank's own samples: N ranks are equivalent to one process
                    with batches N times as large
    ready batches   from a batch sampler or a list: each rank takes its rows of each batch
    single samples  a batch that cannot be cut, or a sample without a batch, belongs to one rank
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DistributedSampler, IterableDataset

from samplewise.core.batches import PLAIN, leaves, length, take
from samplewise.distributed.group import current_group
from samplewise.errors import BatchError, DistributedError
from samplewise.loop.data.rng import parts_of


@dataclass(frozen=True)
class RankShard:
    """Shard of a rank: every `size`-th sample of an epoch, beginning with sample `start + rank`.

    Samples before `start` have been used already.
    """

    rank: int = 0
    size: int = 1
    start: int = 0

    @property
    def whole(self) -> bool:
        return self.size == 1 and self.start == 0

    def of(self, samples: Iterable[Any]) -> Iterator[Any]:
        return islice(samples, self.start + self.rank, None, self.size)

    def rows(self, place: int, count: int) -> range:
        """Rows of this rank in a batch of `count` samples whose first sample is number `place` of the epoch."""
        first = (self.start + self.rank - place) % self.size
        unused = max(0, self.start - place)
        first += -(-max(0, unused - first) // self.size) * self.size
        return range(first, count, self.size)

    def batches(self, samples: Iterable[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
        """Yield this rank's batches of `size` samples.

        With `drop_last`, the last batches are dropped if any rank would get fewer than `size` samples.
        """
        samples = islice(samples, self.start, None)
        while dealt := list(islice(samples, size * self.size)):
            mine = dealt[self.rank :: self.size]
            if not mine or (drop_last and len(dealt) < size * self.size):
                return
            yield mine


class OrderChecker:
    """Hash of the first samples or indices of an epoch, to check that all ranks have the same order."""

    ELEMENTS = 8  # elements of each tensor that are hashed

    def __init__(self, limit: int = 1):
        """limit: number of items to hash. Every rank has seen that many, or all, when it has its first batch."""
        self._limit = limit
        self._digest = hashlib.sha256()

    def at(self, things: Iterable[Any]) -> Iterator[Any]:
        """Yield the items unchanged, and hash the first `limit` of them."""
        for number, thing in enumerate(things):
            if number < self._limit:
                for leaf in leaves(thing):
                    self._add(leaf)
            yield thing

    def _add(self, leaf: Any) -> None:
        """Add a tensor, array or plain value to the hash; objects of other types count as equal."""
        seen = leaf.flatten()[: self.ELEMENTS].tolist() if hasattr(leaf, "flatten") else leaf
        known = isinstance(seen, (list, tuple, *PLAIN))
        self._digest.update(repr(seen).encode() if known else b"?")

    def agree(self, looked: bool = True) -> None:
        """Compare the hash with those of the other ranks. Collective.

        looked: False if this rank did not start at the beginning of the epoch; its hash is then ignored.
        """
        seen = int.from_bytes(self._digest.digest()[:2], "little") if looked else 0
        lookers, total, squares = current_group().all_reduce_scalars(looked, seen, seen * seen)
        if lookers * squares != total * total:  # Cauchy-Schwarz: equal only if all values are equal
            raise DistributedError(
                "every rank must iterate over the same samples in the same order, of which it takes its shard; found "
                "orders that differ between ranks. Let samplers and data sets draw random numbers from generators that "
                "are their attributes, or from the global generators of torch, Python or NumPy; or shard the data "
                "yourself and pass Trainer(sharded=True)."
            )


class ShardedBatches:
    """Sharding of batches that are the same on all ranks: each is reduced to this rank's rows."""

    def __init__(self, share: RankShard, place: int = 0, count: Any = length, pick: Any = take):
        """place: number of samples of the epoch before the first batch.
        count, pick: functions that return the length of a batch, and some of its rows.
        """
        self.share = share
        self.place = place
        self._count = count
        self._pick = pick
        self._missed = 0

    def of(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's part of each batch, if it has one."""
        for batch in batches:
            mine = self.part(batch)
            if mine is not None:
                yield mine

    def part(self, batch: Any) -> Any:
        """Return this rank's rows of a batch, or None if it has none.

        A batch without rows for some rank is accepted only at the end of an epoch: otherwise the ranks would make
        different numbers of updates.
        """
        if self._missed:
            raise BatchError(
                f"batches that are sharded over {self.share.size} ranks must have at least one sample for each rank; "
                f"found a batch of {self._missed} samples inside an epoch. Use larger batches, or a DataLoader with "
                "batch_size."
            )
        count = self._count(batch)
        rows = self.share.rows(self.place, count or 1)
        used = self.place < self.share.start
        self.place += count or 1
        if not rows:
            self._missed = 0 if used else count or 0
            return None
        return batch if count is None or len(rows) == count else self._pick(batch, list(rows))


def drawn(loader: Any, share: RankShard, look: OrderChecker) -> Iterator[Any]:
    """Return the indices, or lists of indices, of this rank's shard of what the loader's sampler draws."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if share.whole:
        return map(_kept, sampler)
    if loader.batch_sampler is None:
        return share.of(look.at(sampler))
    if loader.batch_size is None:  # a custom batch sampler
        divided = ShardedBatches(share, count=len, pick=lambda batch, rows: [batch[row] for row in rows])
        return divided.of(look.at(map(list, sampler)))
    return share.batches(look.at(sampler.sampler), loader.batch_size, loader.drop_last)


def _kept(indices: Any) -> Any:
    """Copy a list of indices: some samplers modify a list after they have yielded it."""
    return list(indices) if isinstance(indices, list) else indices


class ShardedStream(IterableDataset[Any]):
    """IterableDataset that yields this rank's shard of a stream. In a worker process: of the worker's stream."""

    def __init__(self, dataset: Any, share: RankShard, look: OrderChecker | None = None):
        self.dataset = dataset
        self.share = share
        self.look = look
        self._before = share.start + share.rank  # samples to skip before the next one of this rank

    def __iter__(self) -> Iterator[Any]:
        for sample in self.dataset if self.look is None else self.look.at(self.dataset):
            if self._before:
                self._before -= 1
            else:
                self._before = self.share.size - 1
                yield sample
        self._before = self.share.start + self.share.rank


class StatefulShardedStream(ShardedStream):
    """Dealt for a data set with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self.dataset.state_dict(), "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self._before = state["before"]


def dealt(loader: Any, share: RankShard, look: OrderChecker) -> Any:
    """Return the data set of a DataLoader, reduced to this rank's shard.

    With workers `look` is not used: what they read cannot be hashed in this process.
    """
    dataset = loader.dataset
    if share.whole:
        return dataset
    kind = StatefulShardedStream if hasattr(dataset, "state_dict") else ShardedStream
    return kind(dataset, share, None if loader.num_workers else look)


def check_undivided(loader: Any) -> None:
    """Raise BatchError if a loader is sharded already: by a DistributedSampler, or by split_dataset_by_node."""
    for part in parts_of(loader):
        if isinstance(part, DistributedSampler):
            raise BatchError(
                "a loader must yield all samples on every rank, since the trainer shards them; found a "
                f"{type(part).__name__}, which repeats some samples to make shards equal. Remove it, or pass "
                "Trainer(sharded=True) to keep it with the repeated samples."
            )
        if getattr(part, "_distributed", None) is not None:  # Hugging Face's split_dataset_by_node
            raise BatchError(
                "a loader must yield all samples on every rank, since the trainer shards them; found a "
                f"{type(part).__name__} that has been split by node. Pass it without the split, or pass "
                "Trainer(sharded=True)."
            )
