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

from samplewise.core.batches import PLAIN, Path, keep_whole, leaves, length, take
from samplewise.core.state import RngStream
from samplewise.core.text import plural
from samplewise.errors import BatchError, DistributedError
from samplewise.loop.data.rng import nested_parts, seed_generators, set_epoch
from samplewise.parallel import collectives

CHUNK = 64  # number of indices or index lists that are drawn from a sampler at a time


@dataclass(frozen=True)
class ShardedLoader:
    """Loader whose samples differ from rank to rank, see `already_sharded`."""

    loader: Iterable[Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def already_sharded(loader: Iterable[Any]) -> ShardedLoader:
    """Mark a loader that yields only the samples of its own rank: `fit` and `evaluate` then use it unchanged.

    Without the mark, the trainer expects all samples in the same order on every rank, and shards them itself. Use it
    for a DistributedSampler, Hugging Face's `split_dataset_by_node`, or data that each rank reads from its own files.
    With one process it has no effect.
    """
    return loader if isinstance(loader, ShardedLoader) else ShardedLoader(loader)


@dataclass(frozen=True)
class RankShard:
    """Shard of a rank: every `size`-th sample of an epoch, beginning with sample `start + rank`.

    Samples before `start` have been used already. `constants`: entries of batches that are not per sample.
    """

    rank: int = 0
    size: int = 1
    start: int = 0
    constants: tuple[Path, ...] = ()

    @classmethod
    def of_this_rank(cls) -> RankShard:
        """Shard of the current rank; all samples with one process."""
        return cls(collectives.rank(), collectives.size())

    @property
    def has_all_samples(self) -> bool:
        return self.size == 1 and self.start == 0

    def count(self, samples: int) -> int:
        """Number of this rank's samples among the first `samples` of the epoch."""
        return len(range(self.rank, samples, self.size))

    def select(self, samples: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's samples."""
        return islice(samples, self.start + self.rank, None, self.size)

    def rows(self, position: int, count: int) -> range:
        """Rows of this rank in a batch of `count` samples whose first sample is number `position` of the epoch."""
        first = (self.start + self.rank - position) % self.size
        used = max(0, self.start - position)
        first += -(-max(0, used - first) // self.size) * self.size
        return range(first, count, self.size)

    def batches(self, samples: Iterable[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
        """Yield this rank's batches of `size` samples.

        With `drop_last`, the last batches are dropped if any rank would get fewer than `size` samples.
        """
        samples = islice(samples, self.start, None)
        while of_all_ranks := list(islice(samples, size * self.size)):
            batch = of_all_ranks[self.rank :: self.size]
            if not batch or (drop_last and len(of_all_ranks) < size * self.size):
                return
            yield batch


class OrderChecker:
    """Hash of the first samples or indices of an epoch, to check that all ranks have the same order."""

    ELEMENTS = 8  # elements of each tensor that are hashed

    def __init__(self, limit: int = 1):
        """limit: number of items to hash. Every rank has seen that many, or all, when it has its first batch."""
        self._limit = limit
        self._digest = hashlib.sha256()

    def observe(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items unchanged, and hash the first `limit` of them."""
        for number, item in enumerate(items):
            if number < self._limit:
                for leaf in leaves(item):
                    self._add(leaf)
            yield item

    def _add(self, leaf: Any) -> None:
        """Add a tensor, array or plain value to the hash; objects of other types count as equal."""
        values = leaf.flatten()[: self.ELEMENTS].tolist() if hasattr(leaf, "flatten") else leaf
        self._digest.update(repr(values).encode() if isinstance(values, (list, tuple, *PLAIN)) else b"?")

    def check_equal_on_ranks(self, valid: bool = True) -> None:
        """Raise DistributedError if the hash differs from those of the other ranks. Collective.

        valid: False if this rank did not start at the beginning of the epoch; its hash is then ignored.
        """
        value = int.from_bytes(self._digest.digest()[:2], "little") if valid else 0
        ranks, total, squares = collectives.all_reduce_scalars(valid, value, value * value)
        if ranks * squares != total * total:  # Cauchy-Schwarz: equal only if all values are equal
            raise DistributedError(
                "every rank must iterate over the same samples in the same order, of which it takes its shard; found "
                "orders that differ between ranks. Let samplers and datasets draw random numbers from generators that "
                "are their attributes, or from the global generators of torch, Python or NumPy; or shard the data "
                "yourself and pass sw.already_sharded(loader)."
            )


class ShardedBatches:
    """Sharding of batches that are the same on all ranks: each is reduced to this rank's rows."""

    def __init__(self, shard: RankShard, count: Any = length, pick: Any = take):
        """count, pick: functions that return the length of a batch, and some of its rows."""
        self.shard = shard
        self.position = 0  # number of samples of the epoch before the next batch
        self._count = count
        self._pick = pick
        self._too_small = 0  # samples of the last batch, if this rank got none of them

    def select(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's part of each batch, if it has one."""
        for batch in batches:
            rows = self.part(batch)
            if rows is not None:
                yield rows

    def part(self, batch: Any) -> Any:
        """Return this rank's rows of a batch, or None if it has none.

        A batch without rows for some rank is accepted only at the end of an epoch: otherwise the ranks would make
        different numbers of updates.
        """
        if self._too_small:
            raise BatchError(
                f"batches that are sharded over {self.shard.size} ranks must have at least one sample for each rank; "
                f"found a batch of {plural(self._too_small, 'sample')} inside an epoch. Use larger batches, or a "
                "DataLoader with batch_size."
            )
        if self._count is length:
            batch = keep_whole(batch, self.shard.constants)
        count = self._count(batch)
        rows = self.shard.rows(self.position, count or 1)
        used_before = self.position < self.shard.start
        self.position += count or 1
        if not rows:
            self._too_small = 0 if used_before else count or 0
            return None
        return batch if count is None or len(rows) == count else self._pick(batch, list(rows))


def sharded_indices(loader: Any, shard: RankShard, order: OrderChecker) -> Iterator[Any]:
    """Return the indices, or lists of indices, of this rank's shard of what the loader's sampler draws."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if shard.has_all_samples:
        return map(_copy_list, sampler)
    if loader.batch_sampler is None:
        return shard.select(order.observe(sampler))
    if loader.batch_size is None:  # a custom batch sampler
        batches = ShardedBatches(shard, count=len, pick=lambda batch, rows: [batch[row] for row in rows])
        return batches.select(order.observe(map(list, sampler)))
    return shard.batches(order.observe(sampler.sampler), loader.batch_size, loader.drop_last)


def _copy_list(indices: Any) -> Any:
    """Copy a list of indices: some samplers modify a list after they have yielded it."""
    return list(indices) if isinstance(indices, list) else indices


class SeededSampler:
    """Sampler that yields what the loader's sampler draws under a given seed. The sampler may be infinite."""

    def __init__(self, loader: Any):
        self._loader = loader
        self._seed = 0
        self._skip = 0
        self._shard = RankShard()
        self._order = OrderChecker()

    def begin(self, epoch: int, seed: int, skip: int, shard: RankShard) -> OrderChecker:
        """Set epoch, seed, number of entries to skip and shard for the next iteration."""
        self._seed = seed
        self._skip = skip
        self._shard = shard
        self._order = OrderChecker(CHUNK)
        set_epoch(self._loader, epoch, seed)
        return self._order

    def __iter__(self) -> Iterator[Any]:
        stream = RngStream(self._seed)
        if self._shard.size > 1:
            seed_generators(self._loader, self._seed)  # an earlier iteration may have used them
        with stream:
            rest = islice(sharded_indices(self._loader, self._shard, self._order), self._skip, None)
        # Draws of an ImportanceSampler depend on earlier updates, so that it is not asked for many at a time.
        size = getattr(self._loader.batch_sampler, "_chunk", CHUNK)
        while True:
            with stream:
                chunk = list(islice(rest, size))
            if not chunk:
                return
            yield from chunk

    def samples(self, batches: int) -> int:
        """Number of samples in the first `batches` batches."""
        if self._loader.batch_sampler is None:
            return batches
        return batches * (self._loader.batch_size or 0) or sum(map(len, islice(self, batches)))


class ShardedStream(IterableDataset[Any]):
    """IterableDataset that yields this rank's shard of a stream. In a worker process: of the worker's stream."""

    def __init__(self, dataset: Any, shard: RankShard, order: OrderChecker | None = None):
        self.dataset = dataset
        self.shard = shard
        self.order = order
        self._to_skip = shard.start + shard.rank  # samples before the next one of this rank

    def __iter__(self) -> Iterator[Any]:
        for sample in self.dataset if self.order is None else self.order.observe(self.dataset):
            if self._to_skip:
                self._to_skip -= 1
            else:
                self._to_skip = self.shard.size - 1
                yield sample
        self._to_skip = self.shard.start + self.shard.rank


class StatefulShardedStream(ShardedStream):
    """ShardedStream for a dataset with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self.dataset.state_dict(), "before": self._to_skip}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self._to_skip = state["before"]


def sharded_dataset(loader: Any, shard: RankShard, order: OrderChecker) -> Any:
    """Return the dataset of a DataLoader, reduced to this rank's shard.

    With workers `order` is not used: what they read cannot be hashed in this process.
    """
    dataset = loader.dataset
    if shard.has_all_samples:
        return dataset
    kind = StatefulShardedStream if hasattr(dataset, "state_dict") else ShardedStream
    return kind(dataset, shard, None if loader.num_workers else order)


def check_not_sharded(loader: Any) -> None:
    """Raise BatchError if a loader is sharded already: by a DistributedSampler, or by split_dataset_by_node."""
    for part in nested_parts(loader):
        if isinstance(part, DistributedSampler):
            raise BatchError(
                "a loader must yield all samples on every rank, since the trainer shards them; found a "
                f"{type(part).__name__}, which repeats some samples to make shards equal. Remove it, or pass "
                "sw.already_sharded(loader) to keep it with the repeated samples."
            )
        if getattr(part, "_distributed", None) is not None:  # Hugging Face's split_dataset_by_node
            raise BatchError(
                "a loader must yield all samples on every rank, since the trainer shards them; found a "
                f"{type(part).__name__} that has been split by node. Pass it without the split, or pass "
                "sw.already_sharded(loader)."
            )
