"""Adapters for four kinds of loaders, each of which can be started at any batch of any epoch.

    SeededLoader    a DataLoader with a map-style dataset: the order is determined by (seed, epoch), the random numbers
                    of a sample by (seed, epoch, index). Nothing is replayed.
    StatefulLoader  a loader with state_dict and load_state_dict: its state is saved and restored.
    PoissonLoader   a loader of sw.Privacy: its position is the number of updates of the step.
    ReplayedLoader  any other loader: iterated from the beginning of the epoch, and the first batches are discarded.

A loader in this process draws random numbers from its own stream, so the random numbers of the model do not depend on
it. With several ranks each adapter yields the rank's shard of the samples: see `sharding.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from samplewise.core.batches import length
from samplewise.core.state import RandomState, RngStream
from samplewise.errors import BatchError, CheckpointError
from samplewise.loop.data.rng import (
    UnwrapInWorker,
    derive_seed,
    is_deterministic,
    nested_parts,
    seed_samples,
    set_epoch,
)
from samplewise.loop.data.sharding import OrderChecker, RankShard, SeededSampler, ShardedBatches, sharded_dataset
from samplewise.privacy.sampling import PoissonSampler

END = object()


def adapter_for(loader: Iterable[Any], seed: int, in_use: bool = False) -> LoaderAdapter:
    """Return the adapter for a loader.

    in_use: the loader may be in use elsewhere, so its state is not changed.
    """
    if is_poisson(loader):
        return PoissonLoader(loader, seed)
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        separate = in_use and isinstance(loader, DataLoader)
        return StatefulLoader(loader_with(loader) if separate else loader, seed)
    return SeededLoader(loader, seed) if is_map_style(loader) else ReplayedLoader(loader, seed)


def kind_name(kind: str | None) -> str:
    """Return the text for a kind of loader in error messages."""
    texts = {
        SeededLoader.kind: "a DataLoader with a map-style dataset",
        PoissonLoader.kind: "a loader of sw.Privacy",
        StatefulLoader.kind: "a loader with state_dict and load_state_dict",
        ReplayedLoader.kind: "a loader that is replayed from the beginning of the epoch",
    }
    return texts.get(kind or "", f"a loader of unknown kind {kind!r}")


def is_poisson(loader: Any) -> bool:
    """Return True for a loader of sw.Privacy."""
    return isinstance(getattr(loader, "batch_sampler", None), PoissonSampler)


def is_map_style(loader: Any) -> bool:
    """Return True for a DataLoader with a map-style dataset, unless a subclass overrides `__iter__`: its order is
    then unknown.
    """
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    return plain and _has_indices(loader)


def _has_indices(loader: Any) -> bool:
    """Return True if a DataLoader reads its dataset by index."""
    return not isinstance(loader.dataset, IterableDataset)


class SeededLoader:
    """DataLoader with a map-style dataset. Any batch is reached by skipping indices.

    kind: saved in checkpoints and compared on resume; see `kind_name` for its text in messages
    has_state: False if a number of batches is enough to start a loader there; `state` then returns None
    order: hash of the order of samples since the start of the epoch
    """

    kind = "seeded"
    has_state = False

    def __init__(self, loader: Any, seed: int):
        self._seed = seed
        self._samples = seed_samples(loader.dataset, seed)
        self._draws = not is_deterministic(loader.dataset) or loader.collate_fn not in (
            default_collate,
            default_convert,
        )
        self.order = OrderChecker()
        self._sampler = SeededSampler(loader)
        seeded = {"dataset": self._samples, "worker_init_fn": UnwrapInWorker(loader.worker_init_fn)}
        self._loader = loader_with(
            loader,
            generator=torch.Generator(),
            persistent_workers=_may_persist(loader),
            **(seeded if self._draws else {}),
            **{"sampler" if loader.batch_sampler is None else "batch_sampler": self._sampler},
        )

    def iterate(self, epoch: int, skip: int, state: Any, shard: RankShard) -> Iterator[Any]:
        """Yield the batches of this rank's shard of an epoch, without the first `skip`.

        state: result of `state()` before one of the skipped batches, if possible the last; None to start without it.
        """
        seed = derive_seed(self._seed, epoch)
        self._samples.epoch.fill_(epoch)
        self.order = self._sampler.begin(epoch, seed, skip, shard)
        self._loader.generator.manual_seed(seed)
        batches = iter(self._loader)
        return self._in_this_process(batches) if self._draws and not self._loader.num_workers else batches

    def _in_this_process(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and restore the global random state, which samples use, after each."""
        while True:
            outside = RandomState()
            try:
                batch = next(batches, END)
            finally:
                outside.restore()
            if batch is END:
                return
            yield batch

    def samples(self, epoch: int, batches: int, start: int = 0) -> int:
        """Number of samples that one process has used in `batches` batches from sample `start` on; None if another
        number of ranks cannot continue there.
        """
        if not batches:  # asked at each checkpoint: a sampler that is being iterated must not begin an epoch
            return 0
        self._sampler.begin(epoch, derive_seed(self._seed, epoch), 0, RankShard(start=start))
        return self._sampler.samples(batches)

    def state(self) -> None:
        """State that `iterate` needs to start with the next batch; None if it needs only their number."""
        return

    def close(self) -> None:
        """Stop worker processes."""
        self._loader._iterator = None


class PoissonLoader(SeededLoader):
    """Loader of sw.Privacy. Its sampler continues with the draw of the step's next update, on all ranks."""

    kind = "poisson"

    def __init__(self, loader: Any, seed: int):
        self._seed = seed
        self._samples = seed_samples(loader.dataset.dataset, seed)
        self.order = OrderChecker()
        self._loader = loader_with(
            loader,
            dataset=loader.dataset.over(self._samples),
            generator=torch.Generator(),
            worker_init_fn=UnwrapInWorker(loader.worker_init_fn),
            persistent_workers=_may_persist(loader),
        )

    def iterate(self, epoch: int, skip: int, state: Any, shard: RankShard) -> Iterator[Any]:
        self._samples.epoch.fill_(epoch)
        set_epoch(self._loader, epoch, derive_seed(self._seed, epoch))
        sampler: PoissonSampler = self._loader.batch_sampler
        if skip and sampler.state.update % sampler.per_pass == 0:
            return iter(())  # all draws of this pass are used; the next one belongs to the next epoch
        batches = iter(self._loader)
        return batches if self._loader.num_workers else self._in_this_process(batches)

    def samples(self, epoch: int, batches: int, start: int = 0) -> None:  # type: ignore[override]
        return None  # the number of samples of a draw is private


class StatefulLoader:
    """Loader with state_dict and load_state_dict. Restored from its state; batches up to the position are discarded."""

    kind = "stateful"
    has_state = True

    def __init__(self, loader: Any, seed: int):
        self._loader = loader
        self._seed = seed
        self._stream = RngStream(seed)
        self._batches = 0  # yielded in this epoch
        self._workers = isinstance(loader, DataLoader)
        numbered = self._workers and _has_indices(loader)
        self._samples = seed_samples(loader.dataset, seed) if numbered else None
        self._sampler = SeededSampler(loader_with(loader)) if self._samples is not None else None
        self._sharding = ShardedBatches(RankShard())
        self.order = OrderChecker()

    def iterate(self, epoch: int, skip: int, state: Any, shard: RankShard) -> Iterator[Any]:
        seed = derive_seed(self._seed, epoch)
        self._stream = RngStream(seed)
        self.order = OrderChecker()
        set_epoch(self._loader, epoch, seed)
        self.close()
        try:
            if state is not None:
                self._loader.load_state_dict(copy.deepcopy(state["loader"]))
            with self._stream, self._replaced_parts(epoch, shard):
                batches = iter(self._loader)
        except AssertionError as why:  # torchdata raises it for another number of workers
            raise CheckpointError(
                "a loader must accept the state that was saved in the checkpoint; found that it does not. Pass a "
                "loader with the same data, samplers and number of workers."
            ) from why
        self._batches = 0
        self._sharding = ShardedBatches(shard)
        if state is not None:
            self._stream.load_state_dict(state["random"])
            self._batches = state["batches"]
            self._sharding.position = state.get("position", 0)
        batches = _draw_with(self._stream, batches)
        if not (self._workers or shard.has_all_samples):
            batches = self._sharding.select(self.order.observe(batches))
        rest = self._count(batches)
        for _ in range(skip - self._batches):
            next(rest, None)
        return rest

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._batches += 1
            yield batch

    @contextmanager
    def _replaced_parts(self, epoch: int, shard: RankShard) -> Iterator[None]:
        """Replace dataset and sampler of a DataLoader while its iterator is created, by seeded and sharded ones."""
        changes: dict[str, Any] = {"in_order": True} if self._workers else {}
        if self._samples is not None:
            self._samples.epoch.fill_(epoch)
            changes |= {"dataset": self._samples, "worker_init_fn": UnwrapInWorker(self._loader.worker_init_fn)}
        elif self._workers:
            changes |= {"dataset": sharded_dataset(self._loader, shard, self.order)}
        if self._sampler is not None and not shard.has_all_samples:
            self.order = self._sampler.begin(epoch, derive_seed(self._seed, epoch), 0, shard)
            changes |= {"sampler" if self._loader.batch_sampler is None else "batch_sampler": self._sampler}
        attributes = vars(self._loader) if changes else {}
        before = {name: attributes[name] for name in changes}
        attributes.update(changes)
        try:
            yield
        finally:
            attributes.update(before)

    def samples(self, epoch: int, batches: int, start: int = 0) -> None:
        return None  # the state of the loader is valid only for the number of ranks it was saved with

    def state(self) -> Any:
        loader = copy.deepcopy(self._loader.state_dict())
        state = {"batches": self._batches, "loader": loader, "random": self._stream.state_dict()}
        if not self._sharding.shard.has_all_samples:
            state["position"] = self._sharding.position
        return state

    def close(self) -> None:
        """Stop persistent workers, so that every epoch starts with new ones.

        Workers of the last epoch would have drawn random numbers already. Also, a sampler that draws random numbers in
        `__iter__` is called twice when workers are new.
        """
        if self._workers and self._loader.persistent_workers:
            self._loader._iterator = None


class ReplayedLoader:
    """Any other iterable. Iterated from the beginning of the epoch; the skipped batches are discarded."""

    kind = "replayed"
    has_state = False

    def __init__(self, loader: Iterable[Any], seed: int):
        self._loader = loader
        self._seed = seed
        self._once = isinstance(loader, Iterator)
        self._epoch: int | None = None
        self._taken = 0  # batches taken so far of an iterator, which cannot be restarted
        self._sharding = ShardedBatches(RankShard())
        self.order = OrderChecker()

    def iterate(self, epoch: int, skip: int, state: Any, shard: RankShard) -> Iterator[Any]:
        if self._once and self._epoch not in (None, epoch):
            raise BatchError(
                f"a loader must be iterable once per epoch; found a {type(self._loader).__name__}, which is exhausted "
                f"after epoch {self._epoch + 1}. Pass a list or a DataLoader, or train for one epoch."
            )
        self._epoch = epoch
        self.order = OrderChecker()
        seed = derive_seed(self._seed, epoch)
        set_epoch(self._loader, epoch, seed)
        stream = RngStream(seed)
        with stream:
            loader: Any = self._loader
            if isinstance(loader, DataLoader):  # a copy without persistent workers, whose random state would continue
                dataset = sharded_dataset(loader, shard, self.order) if self._streams else loader.dataset
                loader = loader_with(loader, persistent_workers=False, dataset=dataset)
            batches = iter(loader)
        if type(self._loader) not in (list, tuple):
            batches = _draw_with(stream, batches)
        if not (self._streams or shard.has_all_samples):
            if not (self._once and self._taken):
                self._sharding = ShardedBatches(shard)
            batches = self._sharding.select(self.order.observe(batches))
        if self._once:
            skip -= self._taken
            batches = self._count(batches)
        for _ in range(skip):
            next(batches, None)
        return batches

    @property
    def _streams(self) -> bool:
        """True for a DataLoader with an IterableDataset."""
        return isinstance(self._loader, DataLoader) and not _has_indices(self._loader)

    def samples(self, epoch: int, batches: int, start: int = 0) -> int | None:
        if self._streams:
            loader: Any = self._loader
            return None if loader.num_workers else batches * (loader.batch_size or 1)
        if isinstance(self._loader, (list, tuple)):
            rest = ShardedBatches(RankShard(start=start)).select(self._loader)
            return sum(length(batch) or 1 for batch in islice(rest, batches))
        return None

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._taken += 1
            yield batch

    def state(self) -> None:
        return None

    def close(self) -> None:
        pass


LoaderAdapter = SeededLoader | PoissonLoader | StatefulLoader | ReplayedLoader


def _draw_with(stream: RngStream, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches, each fetched with the random state of `stream`."""
    while True:
        with stream:
            batch = next(batches, END)
        if batch is END:
            return
        yield batch


def _may_persist(loader: Any) -> bool:
    """Return True if workers may persist: not if a dataset has `set_epoch`, which would not reach them."""
    return loader.persistent_workers and not any(hasattr(part, "set_epoch") for part in nested_parts(loader.dataset))


def loader_with(loader: Any, **changes: Any) -> Any:
    """Return a copy of a DataLoader with some settings changed and its own workers.

    `in_order` is True, since a position is a number of batches, which needs a fixed order.
    """
    new = copy.copy(loader)
    vars(new).update(changes, _iterator=None, in_order=True)  # by vars, since DataLoader forbids setting some of them
    return new
