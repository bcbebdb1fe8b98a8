"""Random numbers that follow from a seed, and leave those of everybody else alone."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from samplewise import ranks
from samplewise.loop.randomness import load_random_state, random_state_dict
from samplewise.replay import random_state


def seed_of(*things: Any) -> int:
    """A seed that depends on every one of them, as they are printed."""
    return int.from_bytes(hashlib.sha256(repr(things).encode()).digest()[:4], "little")


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    _seed_others(seed)


def reseed(seed: int) -> None:
    """The same at a price that can be paid for every sample: devices that nobody has used yet are left alone."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    _seed_others(seed)


def _seed_others(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    restore = random_state()
    reseed(seed)
    try:
        yield
    finally:
        restore()


def random_states() -> dict[str, Any]:
    """The random state of this process as a part of a checkpoint, or those of all ranks."""
    mine = random_state_dict()
    return {"randoms": ranks.everyone(mine)} if ranks.active() else {"random": mine}


def load_random_states(state: dict[str, Any], seed: int) -> None:
    """A rank that was not there gets numbers of its own."""
    there = state.get("randoms") or [state["random"]]
    if ranks.rank() < len(there):
        load_random_state(there[ranks.rank()])
    else:
        reseed(seed_of(seed, ranks.rank(), there[0]["torch"].tolist()))


class Stream:
    """Random numbers of its own for what is done inside `with stream:`. They go on where the last such block ended."""

    def __init__(self, seed: int):
        with seeded(seed):
            self.state = random_state_dict()

    def __enter__(self) -> None:
        self._outside = random_state()
        load_random_state(self.state)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.state = random_state_dict()
        self._outside()


def parts_of(root: Any) -> list[Any]:
    """An object, and the data sets and samplers it is made of."""
    found: list[Any] = [root]
    for part in found:
        inside = (vars(part).get(name) for name in ("sampler", "batch_sampler", "dataset") if hasattr(part, "__dict__"))
        found += [new for new in inside if new is not None and all(new is not old for old in found)]
    return found


def seed_generators(root: Any, seed: int) -> None:
    """Seeds the generators that an object, its data sets and its samplers have as attributes."""
    for part in parts_of(root):
        for value in vars(part).values() if hasattr(part, "__dict__") else ():
            _seed_generator(value, seed)


def _seed_generator(value: Any, seed: int) -> None:
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    if isinstance(value, torch.Generator):
        value.manual_seed(seed)
    elif isinstance(value, random.Random) or (numpy is not None and isinstance(value, numpy.RandomState)):
        value.seed(seed)
    elif numpy is not None and isinstance(value, numpy.Generator):
        value.bit_generator.state = type(value.bit_generator)(seed).state


class Seeded(Dataset[Any]):
    """A data set whose random numbers for a sample follow from (seed, epoch, index). They are drawn from the global
    state, which is somebody else's unless this is a worker.
    """

    def __init__(self, dataset: Any, seed: int):
        self.dataset, self.seed = dataset, seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # for workers that live on

    def __getitem__(self, index: Any) -> Any:
        seed = seed_of(self.seed, int(self.epoch), _name(index))
        reseed(seed)
        seed_generators(self.dataset, seed)
        return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)


class SeededWithState(Seeded):
    """The same, for a data set that has a state of its own."""

    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)


def seeded_samples(dataset: Any, seed: int) -> Seeded:
    return (SeededWithState if hasattr(dataset, "state_dict") else Seeded)(dataset, seed)


class Unveiling:
    """A worker's first act: whoever asks for the worker's data set is to find the user's, not ours around it."""

    def __init__(self, then: Callable[[int], None] | None):
        self.then = then

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen
        if self.then is not None:
            self.then(worker)


def _name(index: Any) -> Any:
    """Prints the same in every process."""
    if hasattr(index, "tolist"):  # samplers may hand out numbers as tensors or arrays
        return index.tolist()
    if repr(index) == object.__repr__(index):
        raise TypeError(
            f"an index must be a number, text, or something else that prints as what it is; found {index!r}. Give its "
            "class a __repr__: random augmentation follows from it."
        )
    return index
