"""Samples of a loader by their index in the dataset, whatever order the loader draws them in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from samplewise.core.batches import to_device
from samplewise.core.state import random_state_restored
from samplewise.errors import BatchError
from samplewise.loop.data.adapters import SeededLoader, is_map_style, loader_with
from samplewise.loop.data.rng import seed_samples
from samplewise.loop.data.sharding import RankShard

BATCH = 64  # samples, for a loader whose batch sampler has no batch size
KNOWN_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler, SubsetRandomSampler, WeightedRandomSampler)


class OrderedSamples:
    """Samples of a DataLoader with a map-style dataset, in the order of the dataset.

    Random numbers that the dataset draws for a sample depend on `seed` and the index of the sample only, so that each
    pass yields the same data. Batches are on `device`.
    """

    def __init__(self, loader: Any, name: str, seed: int, device: torch.device):
        if not is_map_style(loader) or loader.batch_sampler is None or not hasattr(loader.dataset, "__len__"):
            raise BatchError(
                f"the {name} loader must be a DataLoader that makes batches of a map-style dataset, whose samples have "
                f"an index; found {_kind(loader)}. Use DataLoader(dataset, batch_size=64)."
            )
        self._loader = loader
        self._seed = seed
        self._device = device
        self.indices = _drawn_indices(loader)
        if not self.indices:
            raise BatchError(f"the {name} loader must have at least one sample; found an empty dataset.")
        self.batch_size = loader.batch_size or BATCH
        self._items = seed_samples(loader.dataset, seed)

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def loader(self) -> Any:
        """The loader, as it was passed."""
        return self._loader

    def item(self, index: int) -> Any:
        """The item of the dataset."""
        with random_state_restored():
            return self._items[index]

    def batches(self, indices: Sequence[int] | None = None, size: int | None = None) -> OrderedBatches:
        """Batches of these samples, or of all, in this order. Default size: that of the loader."""
        indices = self.indices if indices is None else indices
        sampler = BatchSampler(indices, size or self.batch_size, drop_last=False)
        loader = loader_with(self._loader, batch_sampler=sampler)
        return OrderedBatches(loader, len(indices), self._seed, self._device)


class OrderedBatches:
    """Batches of a loader that can be iterated any number of times. `on_batch` is called after each batch.

    samples: number of samples in all batches
    """

    def __init__(self, loader: Any, samples: int, seed: int, device: torch.device):
        self.samples = samples
        self._count = len(loader.batch_sampler)
        self._loader = SeededLoader(loader, seed)
        self._device = device
        self.on_batch = lambda: None

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader.iterate(0, 0, None, RankShard()):
            yield to_device(batch, self._device)
            self.on_batch()


def _sampler(loader: Any) -> Any:
    """Sampler of single samples; a batch sampler of the user's class that has none."""
    return getattr(loader.batch_sampler, "sampler", loader.batch_sampler)


def _drawn_indices(loader: Any) -> Sequence[int]:
    """Indices that the sampler of a loader can draw, ascending; all of the dataset for a sampler of unknown class."""
    sampler = _sampler(loader)
    if isinstance(sampler, SubsetRandomSampler):
        return sorted({int(index) for index in sampler.indices})
    if isinstance(sampler, WeightedRandomSampler):
        return [index for index, weight in enumerate(sampler.weights.tolist()) if weight > 0]
    return range(len(loader.dataset))


def unknown_sampler(loader: Any) -> str | None:
    """Class name of the sampler of a loader, if it may leave out samples of the dataset; None if it is known."""
    sampler = _sampler(loader)
    return None if isinstance(sampler, KNOWN_SAMPLERS) else type(sampler).__name__


def _kind(loader: Any) -> str:
    dataset = getattr(loader, "dataset", None)
    name = type(loader).__name__
    return name if dataset is None else f"{name} of {type(dataset).__name__}"
