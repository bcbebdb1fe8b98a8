"""Seeding of samplers, datasets and workers."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

from samplewise.core.state import reseed
from samplewise.ledger.sample_ids import Indexed


def derive_seed(*keys: Any) -> int:
    """Return a 32-bit seed: a hash of the `repr` of all arguments."""
    return int.from_bytes(hashlib.sha256(repr(keys).encode()).digest()[:4], "little")


def nested_parts(root: Any) -> list[Any]:
    """List an object and, recursively, its datasets and samplers."""
    parts: list[Any] = [root]
    for part in parts:  # which grows meanwhile
        attributes = vars(part) if hasattr(part, "__dict__") else {}
        candidates = [attributes.get(name) for name in ("sampler", "batch_sampler", "dataset")]
        parts += [new for new in candidates if new is not None and all(new is not old for old in parts)]
    return parts


def seed_generators(root: Any, seed: int) -> None:
    """Seed the random generators that are attributes of an object, its datasets and its samplers."""
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    for part in nested_parts(root):
        for value in vars(part).values() if hasattr(part, "__dict__") else ():
            if isinstance(value, torch.Generator):
                value.manual_seed(seed)
            elif isinstance(value, random.Random) or (numpy is not None and isinstance(value, numpy.RandomState)):
                value.seed(seed)
            elif numpy is not None and isinstance(value, numpy.Generator):
                value.bit_generator.state = type(value.bit_generator)(seed).state


def set_epoch(loader: Any, epoch: int, seed: int) -> None:
    """Call `set_epoch` of a loader, its samplers and its dataset, and seed their random generators."""
    for part in nested_parts(loader):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
    seed_generators(loader, seed)


class SeededDataset(Dataset[Any]):
    """Dataset that seeds the random generators for each sample by (seed, epoch, index).

    It changes the global random state. Outside of a worker process the caller restores it.
    """

    def __init__(self, dataset: Any, seed: int):
        self.dataset = dataset
        self.seed = seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # shared with persistent workers

    def __getitem__(self, index: Any) -> Any:
        self._seed(index)
        return self.dataset[index]

    def _seed(self, index: Any) -> None:
        if hasattr(index, "tolist"):  # samplers may yield tensors or arrays
            index = index.tolist()
        elif repr(index) == object.__repr__(index):  # which differs in every process
            raise TypeError(
                f"an index must be a number, text, or an object with its own __repr__, from which the seed of its "
                f"random augmentation is computed; found {index!r}. Give its class a __repr__."
            )
        seed = derive_seed(self.seed, int(self.epoch), index)
        reseed(seed)
        seed_generators(self.dataset, seed)

    def __len__(self) -> int:
        return len(self.dataset)


class DeterministicDataset(SeededDataset):
    """SeededDataset for a dataset without random numbers: the generators are seeded once per batch, for a collate_fn,
    as the last of its samples would do. Seeding takes many times as long as reading a sample from memory.
    """

    def __getitems__(self, indices: Iterable[Any]) -> list[Any]:
        indices = list(indices)
        items = [self.dataset[index] for index in indices]
        if indices:
            self._seed(indices[-1])
        return items


class StatefulSeededDataset(SeededDataset):
    """SeededDataset for a dataset with `state_dict` and `load_state_dict`."""

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


def seed_samples(dataset: Any, seed: int) -> SeededDataset:
    """Wrap a dataset in a SeededDataset."""
    if is_deterministic(dataset):
        return DeterministicDataset(dataset, seed)
    kind = StatefulSeededDataset if hasattr(dataset, "state_dict") else SeededDataset
    return kind(dataset, seed)


def is_deterministic(dataset: Any) -> bool:
    """True for a dataset that is known to draw no random numbers: samples in memory, and wrappers around them. Not for
    subclasses, whose code may do anything.
    """
    kind = type(dataset)
    if kind is ConcatDataset:
        return all(map(is_deterministic, dataset.datasets))
    if kind in (Subset, Indexed):
        return is_deterministic(dataset.dataset)
    return kind in (list, tuple, Tensor, TensorDataset)


class UnwrapInWorker:
    """worker_init_fn that replaces the wrapper by the user's dataset in `get_worker_info().dataset`.

    worker_init_fn: the loader's own one, called afterwards.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None):
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the info object is read-only
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
