"""Adapters for three kinds of loaders, each of which can be started at any batch of any epoch.

    Ordered     a DataLoader with a map-style data set: the order is determined by (seed, epoch), the random numbers
                of a sample by (seed, epoch, index). Nothing is replayed.
    Stateful    a loader with state_dict and load_state_dict: its state is saved and restored.
    Replayed    any other loader: iterated from the beginning of the epoch, and the first batches are discarded.

A loader in this process draws random numbers from its own stream, so the random numbers of the model do not depend on
it. With several ranks each adapter yields the rank's shard of the samples: see `sharding.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from samplewise.core.batches import length
from samplewise.core.snapshot import random_state
from samplewise.errors import BatchError, CheckpointError
from samplewise.loop.data.rng import Stream, Unveiling, parts_of, seed_generators, seed_of, seeded_samples
from samplewise.loop.data.sharding import OrderChecker, RankShard, ShardedBatches, dealt, drawn

CHUNK = 64  # number of indices or index lists that are drawn from a sampler at a time
END = object()


class LoaderAdapter(Protocol):
    """Loader that can be started at any batch of any epoch."""

    kind: str  # saved in checkpoints and compared on resume: see `described` for its text in messages
    look: OrderChecker  # hash of the order of samples since the start of the epoch

    def enter(self, epoch: int, skip: int, state: Any, share: RankShard) -> Iterator[Any]:
        """Yield the batches of this rank's shard of an epoch, without the first `skip`.

        state: result of `state()` before one of the skipped batches, if possible the last; None to start without it.
        """

    def samples(self, epoch: int, batches: int, start: int = 0) -> int | None:
        """Number of samples that one process has used in `batches` batches from sample `start` on.

        None if another number of ranks cannot continue there.
        """

    def state(self) -> Any:
        """Return the state that `enter` needs to start with the next batch; None if the number of batches is enough."""

    def close(self) -> None:
        """Stop worker processes."""


def source_of(loader: Iterable[Any], seed: int, apart: bool = False) -> LoaderAdapter:
    """Return the adapter for a loader.

    apart: the loader may be in use elsewhere, so its state is not changed.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        separate = apart and isinstance(loader, DataLoader)
        return StatefulLoader(_like(loader) if separate else loader, seed)
    return SeededLoader(loader, seed) if is_ordered(loader) else ReplayedLoader(loader, seed)


def described(kind: str | None) -> str:
    """Return the text for a kind of loader in error messages."""
    texts = {
        SeededLoader.kind: "a DataLoader with a map-style data set",
        StatefulLoader.kind: "a loader with state_dict and load_state_dict",
        ReplayedLoader.kind: "a loader that is replayed from the beginning of the epoch",
    }
    return texts.get(kind or "", f"a loader of unknown kind {kind!r}")


def is_ordered(loader: Any) -> bool:
    """Return True for a DataLoader with a map-style data set, unless a subclass overrides `__iter__`: its order is
    then unknown.
    """
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return plain and _is_numbered(loader)


def _is_numbered(loader: Any) -> bool:
    """Return True if a DataLoader reads its data set by index."""
    return not isinstance(loader.dataset, IterableDataset)


class SeededLoader:
    """DataLoader with a map-style data set. Any batch is reached by skipping indices."""

    kind = "with an order of ours"

    def __init__(self, loader: Any, seed: int):
        self._seed = seed
        self._samples = seeded_samples(loader.dataset, seed)
        self.look = OrderChecker()
        self._order = Order(loader)
        self._loader = _like(
            loader,
            dataset=self._samples,
            generator=torch.Generator(),
            worker_init_fn=Unveiling(loader.worker_init_fn),
            persistent_workers=_may_live_on(loader),
            **{"sampler" if loader.batch_sampler is None else "batch_sampler": self._order},
        )

    def enter(self, epoch: int, skip: int, state: Any, share: RankShard) -> Iterator[Any]:
        seed = seed_of(self._seed, epoch)
        self._samples.epoch.fill_(epoch)
        self.look = self._order.begin(epoch, seed, skip, share)
        self._loader.generator.manual_seed(seed)
        batches = iter(self._loader)
        return batches if self._loader.num_workers else self._apart(batches)

    def _apart(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and restore the global random state after each."""
        batch = None
        while batch is not END:
            restore = random_state()  # samples use the global random state
            try:
                batch = next(batches, END)
            finally:
                restore()
            if batch is not END:
                yield batch

    def samples(self, epoch: int, batches: int, start: int = 0) -> int:
        self._order.begin(epoch, seed_of(self._seed, epoch), 0, RankShard(start=start))
        return self._order.samples(batches)

    def state(self) -> None:
        return None

    def close(self) -> None:
        self._loader._iterator = None


class Order:
    """Sampler that yields what the loader's sampler draws under a given seed. The sampler may be infinite."""

    def __init__(self, loader: Any):
        self._loader = loader
        self._seed = 0
        self._skip = 0
        self._share = RankShard()
        self._look = OrderChecker()

    def begin(self, epoch: int, seed: int, skip: int, share: RankShard) -> OrderChecker:
        """Set epoch, seed, number of entries to skip and shard for the next iteration."""
        self._seed = seed
        self._skip = skip
        self._share = share
        self._look = OrderChecker(CHUNK)
        tell(self._loader, epoch, seed)
        return self._look

    def __iter__(self) -> Iterator[Any]:
        stream = Stream(self._seed)
        if self._share.size > 1:
            seed_generators(self._loader, self._seed)  # an earlier iteration may have used them
        with stream:
            rest = islice(drawn(self._loader, self._share, self._look), self._skip, None)
        while True:
            with stream:
                some = list(islice(rest, CHUNK))
            if not some:
                return
            yield from some

    def samples(self, batches: int) -> int:
        """Number of samples in the first `batches` batches."""
        if self._loader.batch_sampler is None:
            return batches
        return batches * (self._loader.batch_size or 0) or sum(map(len, islice(self, batches)))


class StatefulLoader:
    """Loader with state_dict and load_state_dict. Restored from its state; batches up to the position are discarded."""

    kind = "with a state of its own"

    def __init__(self, loader: Any, seed: int):
        self._loader = loader
        self._seed = seed
        self._stream = Stream(seed)
        self._batches = 0  # yielded in this epoch
        self._workers = isinstance(loader, DataLoader)
        numbered = self._workers and _is_numbered(loader)
        self._samples = seeded_samples(loader.dataset, seed) if numbered else None
        self._order = Order(_like(loader)) if self._samples is not None else None
        self._divided = ShardedBatches(RankShard())
        self.look = OrderChecker()

    def enter(self, epoch: int, skip: int, state: Any, share: RankShard) -> Iterator[Any]:
        seed = seed_of(self._seed, epoch)
        self._stream = Stream(seed)
        self.look = OrderChecker()
        tell(self._loader, epoch, seed)
        self.close()
        try:
            if state is not None:
                self._loader.load_state_dict(copy.deepcopy(state["loader"]))
            with self._stream, self._lending(epoch, share):
                batches = iter(self._loader)
        except AssertionError as why:  # torchdata raises it for another number of workers
            raise CheckpointError(
                "a loader must accept the state that was saved in the checkpoint; found that it does not. Pass a "
                "loader with the same data, samplers and number of workers."
            ) from why
        self._batches = 0
        self._divided = ShardedBatches(share)
        if state is not None:
            self._stream.state = state["random"]
            self._batches = state["batches"]
            self._divided.place = state.get("place", 0)
        batches = _within(self._stream, batches)
        if not (self._workers or share.whole):
            batches = self._divided.of(self.look.at(batches))
        rest = self._counted(batches)
        for _ in range(skip - self._batches):
            next(rest, None)
        return rest

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._batches += 1
            yield batch

    @contextmanager
    def _lending(self, epoch: int, share: RankShard) -> Iterator[None]:
        """Replace data set and sampler of a DataLoader while its iterator is created, by seeded and sharded ones."""
        changes: dict[str, Any] = {"in_order": True} if self._workers else {}
        if self._samples is not None:
            self._samples.epoch.fill_(epoch)
            changes |= {"dataset": self._samples, "worker_init_fn": Unveiling(self._loader.worker_init_fn)}
        elif self._workers:
            changes |= {"dataset": dealt(self._loader, share, self.look)}
        if self._order is not None and not share.whole:
            self.look = self._order.begin(epoch, seed_of(self._seed, epoch), 0, share)
            changes |= {"sampler" if self._loader.batch_sampler is None else "batch_sampler": self._order}
        own = vars(self._loader) if changes else {}
        theirs = {name: own[name] for name in changes}
        own.update(changes)
        try:
            yield
        finally:
            own.update(theirs)

    def samples(self, epoch: int, batches: int, start: int = 0) -> None:
        return None  # the state of the loader is valid only for the number of ranks it was saved with

    def state(self) -> Any:
        loader = copy.deepcopy(self._loader.state_dict())
        place = {} if self._divided.share.whole else {"place": self._divided.place}
        return {"batches": self._batches, "loader": loader, "random": self._stream.state, **place}

    def close(self) -> None:
        """Stop persistent workers, so that every epoch starts with new ones.

        Workers of the last epoch would have drawn random numbers already. Also, a sampler that draws random numbers in
        `__iter__` is called twice when workers are new.
        """
        if self._workers and self._loader.persistent_workers:
            self._loader._iterator = None


class ReplayedLoader:
    """Any other iterable. Iterated from the beginning of the epoch; the skipped batches are discarded."""

    kind = "that is gone through"

    def __init__(self, loader: Iterable[Any], seed: int):
        self._loader = loader
        self._seed = seed
        self._once = isinstance(loader, Iterator)
        self._epoch: int | None = None
        self._taken = 0  # batches taken so far; matters for an iterator, which cannot be restarted
        self._divided = ShardedBatches(RankShard())
        self.look = OrderChecker()

    def enter(self, epoch: int, skip: int, state: Any, share: RankShard) -> Iterator[Any]:
        if self._once and self._epoch not in (None, epoch):
            raise BatchError(
                f"a loader must be iterable once per epoch; found {_kind(self._loader)}, which is exhausted after "
                f"epoch {self._epoch}. Pass a list or a DataLoader, or train for one epoch."
            )
        self._epoch = epoch
        self.look = OrderChecker()
        seed = seed_of(self._seed, epoch)
        tell(self._loader, epoch, seed)
        stream = Stream(seed)
        with stream:
            batches = iter(self._fresh(share))
        if type(self._loader) not in (list, tuple):
            batches = _within(stream, batches)
        if not (self._streams or share.whole):
            batches = self._divided_among(share).of(self.look.at(batches))
        rest = self._counted(batches)
        for _ in range(skip - self._taken if self._once else skip):
            next(rest, None)
        return rest

    def _fresh(self, share: RankShard) -> Iterable[Any]:
        """Return the loader; a DataLoader as a copy without persistent workers, whose random state would continue from
        the last epoch.
        """
        if not isinstance(self._loader, DataLoader):
            return self._loader
        dataset = dealt(self._loader, share, self.look) if self._streams else self._loader.dataset
        return _like(self._loader, persistent_workers=False, dataset=dataset)

    @property
    def _streams(self) -> bool:
        """True for a DataLoader with an IterableDataset."""
        return isinstance(self._loader, DataLoader) and not _is_numbered(self._loader)

    def _divided_among(self, share: RankShard) -> ShardedBatches:
        if not (self._once and self._taken):
            self._divided = ShardedBatches(share)
        return self._divided

    def samples(self, epoch: int, batches: int, start: int = 0) -> int | None:
        if self._streams:
            loader: Any = self._loader
            return None if loader.num_workers else batches * (loader.batch_size or 1)
        if isinstance(self._loader, (list, tuple)):
            rest = ShardedBatches(RankShard(start=start)).of(self._loader)
            return sum(length(batch) or 1 for batch in islice(rest, batches))
        return None

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._taken += 1
            yield batch

    def state(self) -> None:
        return None

    def close(self) -> None:
        pass


def _within(stream: Stream, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches, each fetched with the random state of `stream`."""
    while True:
        with stream:
            batch = next(batches, END)
        if batch is END:
            return
        yield batch


def tell(loader: Any, epoch: int, seed: int) -> None:
    """Call `set_epoch` of a loader, its samplers and its data set, and seed their random generators."""
    for part in parts_of(loader):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    seed_generators(loader, seed)


def _may_live_on(loader: Any) -> bool:
    """Return True if workers may persist: not if a data set has `set_epoch`, which would not reach them."""
    return loader.persistent_workers and not any(hasattr(part, "set_epoch") for part in parts_of(loader.dataset))


def _like(loader: Any, **changes: Any) -> Any:
    """Return a copy of a DataLoader with some settings changed and its own workers.

    `in_order` is True, since a position is a number of batches, which needs a fixed order.
    """
    new = copy.copy(loader)
    vars(new).update(changes, _iterator=None, in_order=True)  # by vars, since DataLoader forbids setting some of them
    return new


def _kind(loader: Any) -> str:
    return f"a {type(loader).__name__}"
