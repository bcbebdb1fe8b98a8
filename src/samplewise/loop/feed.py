"""The same samples in the same order and with the same random augmentation, from any place of any epoch.

A plain DataLoader draws its order and its workers' seeds as it goes, so that nobody can enter in the middle. Here the
order of an epoch follows from (seed, epoch), and what a data set draws for a sample from (seed, epoch, index): nothing
need be replayed.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from samplewise.batches import cut, length
from samplewise.replay import random_state


def seed_of(*numbers: int) -> int:
    """A seed that depends on every one of the numbers."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "little")


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    restore = random_state()
    seed_everything(seed)
    try:
        yield
    finally:
        restore()


class Seeded(Dataset[Any]):
    """A data set whose random numbers for a sample do not depend on what was drawn before."""

    def __init__(self, dataset: Any, seed: int, epoch: int):
        self.dataset, self.seed, self.epoch = dataset, seed, epoch

    def __getitem__(self, index: Any) -> Any:
        seed = seed_of(self.seed, self.epoch, hash(index))
        if get_worker_info() is not None:  # its random numbers serve nothing else
            seed_everything(seed)
            return self.dataset[index]
        with seeded(seed):
            return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


class Feed:
    """A loader that can be entered at any sample of any epoch. `handed` samples have been handed out in this epoch; a
    batch that cannot be cut counts as one.
    """

    def __init__(self, loader: Iterable[Any], seed: int, first: int | None = None):
        """`first`: every epoch is made of the first so many batches of epoch 0."""
        self.loader, self.seed, self.first, self.handed = loader, seed, first, 0
        self.ordered = (
            isinstance(loader, DataLoader)
            and not isinstance(loader.dataset, IterableDataset)
            and loader.batch_sampler is not None
            and type(loader) is DataLoader
        )

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from sample `start` on; a batch that it falls into is cut there."""
        self.handed = start
        number = number if self.first is None else 0
        if not self.ordered:
            return self._gone_through(number, start)
        order = self._order(number)
        batches, skipped = [], 0
        for batch in order:
            rest = batch[max(0, start - skipped) :]
            skipped += len(batch)
            if rest:
                batches.append(rest)
        return self._handing_out(batches, number)

    def updates_of(self, samples: int | None) -> int | None:
        """How many updates of so many samples an epoch has, as far as one can tell beforehand."""
        if not isinstance(self.loader, Sized):
            return None
        batches = len(self.loader) if self.first is None else min(self.first, len(self.loader))
        if samples is None:
            return batches
        if not self.ordered or self.first is not None:
            return None
        sampler: Any = getattr(self.loader, "sampler", None)
        return -(-len(sampler) // samples) if isinstance(sampler, Sized) else None

    def _order(self, number: int) -> list[list[Any]]:
        """All batches of an epoch as the loader's own sampler draws them, under a seed of ours."""
        assert isinstance(self.loader, DataLoader)
        seed = seed_of(self.seed, number)
        generator = getattr(self.loader.sampler, "generator", None)
        if generator is not None:
            generator.manual_seed(seed)
        if hasattr(self.loader.sampler, "set_epoch"):
            self.loader.sampler.set_epoch(number)
        with seeded(seed):
            return [list(batch) for batch in islice(self.loader.batch_sampler or (), self.first)]

    def _handing_out(self, batches: list[list[Any]], number: int) -> Iterator[Any]:
        loader = self.loader
        assert isinstance(loader, DataLoader)
        again: DataLoader[Any] = DataLoader(
            Seeded(loader.dataset, self.seed, number),
            batch_sampler=batches,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator().manual_seed(seed_of(self.seed, number)),  # leaves the global one alone
            prefetch_factor=loader.prefetch_factor,
        )
        for indices, batch in zip(batches, again, strict=True):
            self.handed += len(indices)
            yield batch

    def _gone_through(self, number: int, start: int) -> Iterator[Any]:
        """Anything else is gone through from its beginning."""
        with seeded(seed_of(self.seed, number)):
            iterator = iter(self.loader)
        for batch in islice(iterator, self.first):
            size = length(batch) or 1
            if start < size:
                self.handed += size - start
                yield cut(batch, start, size) if start else batch
            start = max(0, start - size)
