"""Three kinds of loaders, each as a source of batches that can be entered at any batch of any epoch.

    Ordered     a DataLoader whose samples have numbers: the order follows from (seed, epoch), what is drawn for a
                sample from (seed, epoch, index). Nothing is replayed.
    Stateful    a loader with state_dict and load_state_dict: asked for its state, and given it back.
    Replayed    anything else: gone through from the beginning of the epoch.

What a loader draws in this process, it draws from a stream of its own: the model draws on as if nothing had been.
With several ranks each gives the rank's share of the samples: see `dealing.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset

from samplewise.batches import length
from samplewise.errors import BatchError, CheckpointError
from samplewise.loop.dealing import Divided, Look, Share, dealt, drawn
from samplewise.loop.seeding import Stream, Unveiling, parts_of, seed_generators, seed_of, seeded_samples
from samplewise.replay import random_state

CHUNK = 64  # how many entries of an order are drawn at a time
END = object()


class Source(Protocol):
    kind: str
    look: Look  # at what this rank shares with the others, since the epoch was entered

    def enter(self, epoch: int, skip: int, state: Any, share: Share) -> Iterator[Any]:
        """The batches of the share of an epoch but the first `skip`. `state` is what `state()` has returned before one
        of those, the last if possible.
        """

    def samples(self, epoch: int, batches: int, start: int = 0) -> int | None:
        """How many one process has used that had so many batches from sample `start` on; None if another number of
        ranks could not go on there.
        """

    def state(self) -> Any:
        """What `enter` needs to begin with the next batch; None if a number is enough."""

    def close(self) -> None:
        """Lets workers go."""


def source_of(loader: Iterable[Any], seed: int, apart: bool = False) -> Source:
    """`apart`: the loader may be in use elsewhere, so that its state must not be touched."""
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return Stateful(_like(loader) if apart and isinstance(loader, DataLoader) else loader, seed)
    return Ordered(loader, seed) if is_ordered(loader) else Replayed(loader, seed)


def is_ordered(loader: Any) -> bool:
    """Whether its order can be drawn by us: that of a subclass that goes through its data in another way cannot."""
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return plain and _is_numbered(loader)


def _is_numbered(loader: Any) -> bool:
    """Whether a DataLoader asks its data set for samples by index."""
    return not isinstance(loader.dataset, IterableDataset)


class Ordered:
    kind = "with an order of ours"

    def __init__(self, loader: Any, seed: int):
        self._seed, self._samples, self.look = seed, seeded_samples(loader.dataset, seed), Look()
        self._order = Order(loader)
        self._loader = _like(
            loader,
            dataset=self._samples,
            generator=torch.Generator(),
            worker_init_fn=Unveiling(loader.worker_init_fn),
            persistent_workers=_may_live_on(loader),
            **{"sampler" if loader.batch_sampler is None else "batch_sampler": self._order},
        )

    def enter(self, epoch: int, skip: int, state: Any, share: Share) -> Iterator[Any]:
        seed = seed_of(self._seed, epoch)
        self._samples.epoch.fill_(epoch)
        self.look = self._order.begin(epoch, seed, skip, share)
        self._loader.generator.manual_seed(seed)
        batches = iter(self._loader)
        return batches if self._loader.num_workers else self._apart(batches)

    def _apart(self, batches: Iterator[Any]) -> Iterator[Any]:
        batch = None
        while batch is not END:
            restore = random_state()  # samples draw from the global state
            try:
                batch = next(batches, END)
            finally:
                restore()
            if batch is not END:
                yield batch

    def samples(self, epoch: int, batches: int, start: int = 0) -> int:
        self._order.begin(epoch, seed_of(self._seed, epoch), 0, Share(start=start))
        return self._order.samples(batches)

    def state(self) -> None:
        return None

    def close(self) -> None:
        self._loader._iterator = None


class Order:
    """What a loader's sampler draws, under a seed of ours; a sampler that never ends is welcome."""

    def __init__(self, loader: Any):
        self._loader, self._seed, self._skip, self._share = loader, 0, 0, Share()
        self._look = Look()

    def begin(self, epoch: int, seed: int, skip: int, share: Share) -> Look:
        self._seed, self._skip, self._share, self._look = seed, skip, share, Look(CHUNK)
        tell(self._loader, epoch, seed)
        return self._look

    def __iter__(self) -> Iterator[Any]:
        stream = Stream(self._seed)
        if self._share.size > 1:
            seed_generators(self._loader, self._seed)  # whoever has asked for an order before
        with stream:
            rest = islice(drawn(self._loader, self._share, self._look), self._skip, None)
        while True:
            with stream:
                some = list(islice(rest, CHUNK))
            if not some:
                return
            yield from some

    def samples(self, batches: int) -> int:
        """In the first so many batches."""
        if self._loader.batch_sampler is None:
            return batches
        return batches * (self._loader.batch_size or 0) or sum(map(len, islice(self, batches)))


class Stateful:
    kind = "with a state of its own"

    def __init__(self, loader: Any, seed: int):
        self._loader, self._seed, self._stream = loader, seed, Stream(seed)
        self._batches = 0  # of this epoch, so far
        self._workers = isinstance(loader, DataLoader)
        self._samples = seeded_samples(loader.dataset, seed) if self._workers and _is_numbered(loader) else None
        self._order = Order(_like(loader)) if self._samples is not None else None
        self._divided, self.look = Divided(Share()), Look()

    def enter(self, epoch: int, skip: int, state: Any, share: Share) -> Iterator[Any]:
        seed = seed_of(self._seed, epoch)
        self._stream, self.look = Stream(seed), Look()
        tell(self._loader, epoch, seed)
        self.close()
        try:
            if state is not None:
                self._loader.load_state_dict(copy.deepcopy(state["loader"]))
            with self._stream, self._lending(epoch, share):
                batches = iter(self._loader)
        except AssertionError as why:  # all that torchdata says of another number of workers
            raise CheckpointError(
                "a loader must take up the state it was saved with; found that it does not. Pass a loader with the "
                "same data, samplers and number of workers."
            ) from why
        self._batches, self._divided = 0, Divided(share)
        if state is not None:
            self._stream.state, self._batches = state["random"], state["batches"]
            self._divided.place = state.get("place", 0)
        batches = _within(self._stream, batches)
        as_they_are = self._workers or share.whole
        rest = self._counted(batches if as_they_are else self._divided.of(self.look.at(batches)))
        for _ in range(skip - self._batches):
            next(rest, None)
        return rest

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._batches += 1
            yield batch

    @contextmanager
    def _lending(self, epoch: int, share: Share) -> Iterator[None]:
        """A DataLoader makes its workers from seeded samples, and asks for those that are ours."""
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
        return None  # what its state says of where it is, it says to as many ranks as there were

    def state(self) -> Any:
        loader = copy.deepcopy(self._loader.state_dict())
        place = {} if self._divided.share.whole else {"place": self._divided.place}
        return {"batches": self._batches, "loader": loader, "random": self._stream.state, **place}

    def close(self) -> None:
        """Workers are made anew for each epoch, so that all begin as the first one did. Those that lived on would have
        drawn before; and a sampler that draws when it is asked for an iterator is asked twice when workers are new.
        """
        if self._workers and self._loader.persistent_workers:
            self._loader._iterator = None


class Replayed:
    kind = "that is gone through"

    def __init__(self, loader: Iterable[Any], seed: int):
        self._loader, self._seed = loader, seed
        self._once = isinstance(loader, Iterator)
        self._epoch: int | None = None
        self._taken = 0  # of an iterator, which does not begin anew
        self._divided, self.look = Divided(Share()), Look()

    def enter(self, epoch: int, skip: int, state: Any, share: Share) -> Iterator[Any]:
        if self._once and self._epoch not in (None, epoch):
            raise BatchError(
                f"a loader must be something that can be gone through once an epoch; found {_kind(self._loader)}, "
                f"which epoch {self._epoch} has used up. Pass a list or a DataLoader, or train for one epoch."
            )
        self._epoch, self.look = epoch, Look()
        seed = seed_of(self._seed, epoch)
        tell(self._loader, epoch, seed)
        stream = Stream(seed)
        with stream:
            batches = iter(self._fresh(share))
        batches = batches if type(self._loader) in (list, tuple) else _within(stream, batches)
        as_they_are = self._streams or share.whole
        rest = self._counted(batches if as_they_are else self._divided_among(share).of(self.look.at(batches)))
        for _ in range(skip - self._taken if self._once else skip):
            next(rest, None)
        return rest

    def _fresh(self, share: Share) -> Iterable[Any]:
        """Workers that live on would draw on from the last epoch."""
        if not isinstance(self._loader, DataLoader):
            return self._loader
        dataset = dealt(self._loader, share, self.look) if self._streams else self._loader.dataset
        return _like(self._loader, persistent_workers=False, dataset=dataset)

    @property
    def _streams(self) -> bool:
        """Whether it is a DataLoader that makes batches of what an iterable data set gives."""
        return isinstance(self._loader, DataLoader) and not _is_numbered(self._loader)

    def _divided_among(self, share: Share) -> Divided:
        if not (self._once and self._taken):
            self._divided = Divided(share)
        return self._divided

    def samples(self, epoch: int, batches: int, start: int = 0) -> int | None:
        if self._streams:
            loader: Any = self._loader
            return None if loader.num_workers else batches * (loader.batch_size or 1)
        if isinstance(self._loader, (list, tuple)):
            rest = Divided(Share(start=start)).of(self._loader)
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
    while True:
        with stream:
            batch = next(batches, END)
        if batch is END:
            return
        yield batch


def tell(loader: Any, epoch: int, seed: int) -> None:
    """Tells the epoch to a loader, its samplers and its data set, and seeds what they draw from."""
    for part in parts_of(loader):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    seed_generators(loader, seed)


def _may_live_on(loader: Any) -> bool:
    """Whether its workers may see the next epoch: not if they would not be told of it."""
    return loader.persistent_workers and not any(hasattr(part, "set_epoch") for part in parts_of(loader.dataset))


def _like(loader: Any, **changes: Any) -> Any:
    """A DataLoader with the same settings but for these, and workers of its own. `in_order`: arriving in the order of
    speed, batches could not be told apart by number.
    """
    new = copy.copy(loader)
    vars(new).update(changes, _iterator=None, in_order=True)  # so, because it forbids to set some of them
    return new


def _kind(loader: Any) -> str:
    return f"a {type(loader).__name__}"
