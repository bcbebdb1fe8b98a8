"""Poisson sampling: a batch sampler, the dataset and the loader of a private run.

Each draw contains each unit (sample or user) independently with probability `sample_rate`. Draw t depends on (secret,
branch, t) only. The loader yields a `DrawnBatch` for each draw, also for an empty one. Only the main process draws;
workers receive indices. The secret is not sent to them, but a worker that is forked has a copy of the memory of the
main process; spawned workers do not.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import os
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    TensorDataset,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from samplewise.core.batches import map_leaves
from samplewise.core.memory import is_plain
from samplewise.core.text import plural
from samplewise.errors import BatchError, PrivacyError
from samplewise.parallel import collectives
from samplewise.privacy.rng import Secret, stream

BLOCK = 1 << 20  # uniform numbers in memory at once


@dataclass
class DrawState:
    """Position of a run in the sequence of draws, shared by loader and step."""

    secret: Secret
    branch: int = 0
    update: int = 0  # index of the next update, and of its draw
    units: int | None = None  # number of samples or users; None until a loader is made
    hides_units: bool = False  # updates do not depend on the number, so that files need not contain it
    directory: Path | None = None  # of the files of the run, once they were opened
    reproducible: bool = False  # the secret is computed from a seed
    process: int = field(default_factory=os.getpid)  # id of the process that uses the secret

    def check_process(self) -> None:
        """Use a new secret in a forked process; raise if the run has begun before the fork."""
        if self.process == os.getpid() or self.reproducible:
            return
        if self.update or self.directory is not None:
            raise PrivacyError(
                "a private run must be continued by the process that has begun it, because two processes would "
                f"use the same noise; found that process {os.getpid()} is a fork of process {self.process}. Fork "
                "before the first update, or create a new sw.Privacy after the fork."
            )
        self.secret = Secret.new()
        self.process = os.getpid()

    def share_secret(self) -> None:
        """Use the secret of rank 0 on all ranks. Collective."""
        self.check_process()
        self.secret = Secret(collectives.broadcast_object(self.secret.bytes))

    def choose_branch(self, diverged: Collection[tuple[str, int]]) -> None:
        """Use a new branch of the random streams if a replay on the current one has differed."""
        while (self.secret.public_id, self.branch) in diverged:
            self.branch += 1


class Draw(list[int]):
    """Indices of the samples of one draw on this rank, with the origin of the draw."""

    def __init__(self, indices: Sequence[int], number: int, branch: int, source: str, owners: list[int] | None):
        super().__init__(indices)
        self.number = number
        self.branch = branch
        self.source = source
        self.owners = owners

    def __reduce__(self) -> Any:
        return Draw, (list(self), self.number, self.branch, self.source, self.owners)


@dataclass(frozen=True)
class Users:
    """Samples of each user. Users are numbered in the order in which they first appear."""

    samples: list[list[int]]

    @classmethod
    def of(cls, ids: Sequence[Hashable]) -> Users:
        """Group the samples by user id; `ids` has one entry per sample."""
        numbers: dict[Hashable, int] = {}
        samples: list[list[int]] = []
        for index, user in enumerate(ids):
            number = numbers.setdefault(user, len(samples))
            if number == len(samples):
                samples.append([])
            samples[number].append(index)
        return cls(samples)

    def __len__(self) -> int:
        return len(self.samples)


class PoissonSampler(Sampler[list[int]]):
    """Batch sampler: draw t contains each unit independently with probability `sample_rate`.

    An iteration yields the draws from `state.update` to the end of the pass, a multiple of `per_pass`, and at most
    `updates` draws in all. It reads `state` at its start. Draws that were prefetched and not used are drawn again, with
    the same result, in the next iteration. All ranks make the same draw; each takes every size-th unit of it.

    units: number of samples, or the samples of each user
    max_batch: largest number of units in a draw; a larger draw is replaced by a uniformly random subset of it
    """

    def __init__(
        self,
        units: int | Users,
        sample_rate: float,
        updates: int,
        state: DrawState,
        *,
        secure: bool = False,
        max_batch: int | None = None,
    ):
        self.users = units if isinstance(units, Users) else None
        self.units = len(units) if isinstance(units, Users) else units
        self.sample_rate = float(sample_rate)
        self.updates = updates
        self.state = state
        self.secure = secure
        self.max_batch = max_batch

    @property
    def per_pass(self) -> int:
        """Draws in a pass, in which each unit is drawn once on average."""
        return max(1, round(1 / self.sample_rate))

    @property
    def hides_length(self) -> bool:
        """True if the number of samples must not be in files."""
        return self.state.hides_units

    def __len__(self) -> int:
        return self.per_pass

    def __iter__(self) -> Iterator[list[int]]:
        first = self.state.update
        branch = self.state.branch
        last = min(self.updates, (first // self.per_pass + 1) * self.per_pass)
        for number in range(first, last):
            yield self.draw(number, branch)

    def draw(self, number: int, branch: int) -> Draw:
        """The part of a draw that belongs to this rank."""
        units = self.draw_units(number, branch)[collectives.rank() :: collectives.size()].tolist()
        source = self.state.secret.public_id
        if self.users is None:
            return Draw(units, number, branch, source, None)
        samples = [(index, unit) for unit in units for index in self.users.samples[unit]]
        return Draw([index for index, _ in samples], number, branch, source, [unit for _, unit in samples])

    def draw_units(self, number: int, branch: int) -> Tensor:
        """Indices of all units in a draw, ascending: int64."""
        self.state.check_process()
        random = stream(self.state.secret, "sample", branch, number, self.secure)
        blocks = [
            start + (random.uniform(min(BLOCK, self.units - start)) < self.sample_rate).nonzero().view(-1)
            for start in range(0, self.units, BLOCK)
        ]
        units = torch.cat(blocks)
        if self.max_batch is None or len(units) <= self.max_batch:
            return units
        order = random.uniform(len(units)).argsort(stable=True)
        return units[order[: self.max_batch]].sort().values


@dataclass
class DrawnBatch:
    """Batch of one draw on this rank.

    batch: collated samples; None if the draw has no samples on this rank
    owners: number of the user of each row, int64, if the units are users
    draw: index of the draw, equal to the index of the update
    source: `public_id` of the secret
    samples: number of samples of the draw on this rank
    """

    batch: Any
    owners: Tensor | None
    draw: int
    branch: int
    source: str
    samples: int

    def pin_memory(self) -> DrawnBatch:
        """The batch in page-locked memory; called by DataLoader(pin_memory=True)."""

        def pinned(leaf: Any) -> Any:
            return leaf.pin_memory() if callable(getattr(leaf, "pin_memory", None)) else leaf

        return dataclasses.replace(
            self, batch=map_leaves(self.batch, pinned), owners=None if self.owners is None else pinned(self.owners)
        )


@dataclass
class DrawnSamples:
    """Samples of a draw, before they are collated unless `collated`."""

    samples: Any
    draw: Draw
    collated: bool = False


class View(int):
    """Index of a sample, with the number of the draw and of the augmented view in its `repr`.

    A dataset that seeds its augmentation by the `repr` of the index returns another view for each.
    """

    draw: int
    view: int

    def __new__(cls, index: int, draw: int, view: int) -> View:
        new = super().__new__(cls, index)
        new.draw = draw
        new.view = view
        return new

    def __repr__(self) -> str:
        return f"View({int(self)}, draw={self.draw}, view={self.view})"

    __str__ = int.__repr__

    def __reduce__(self) -> Any:
        return View, (int(self), self.draw, self.view)


class DrawnDataset(Dataset[Any]):
    """Map-style dataset that returns the samples of a `Draw`.

    dataset: the user's dataset
    augmentations: number of views of each sample, K; with K > 1 the tensors of a sample have shape (K, ...)
    collates: True if samples may be collated as default_collate does
    """

    def __init__(self, dataset: Any, augmentations: int = 1, collates: bool = False):
        self.dataset = dataset
        self.augmentations = augmentations
        self.collates = collates

    def over(self, dataset: Any) -> DrawnDataset:
        """Dataset with the same settings on another inner dataset."""
        return DrawnDataset(dataset, self.augmentations, self.collates)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, draw: Draw) -> DrawnSamples:
        # Tensors in memory are indexed once: a draw of 2,048 images takes a quarter of the time of one by one.
        if self.collates and draw and self.augmentations == 1 and type(self.dataset) is TensorDataset:
            tensors = self.dataset.tensors
            if all(type(t) is Tensor and is_plain(t) for t in tensors):
                rows = [t.index_select(0, torch.tensor(draw, device=t.device)) for t in tensors]
                return DrawnSamples(rows, draw, collated=True)
        return DrawnSamples(self._samples(draw), draw)

    def _samples(self, draw: Draw) -> Any:
        if not draw:
            return []
        if self.augmentations > 1:
            return [self._views(index, draw.number) for index in draw]
        several = getattr(self.dataset, "__getitems__", None)
        if not callable(several):
            return [self.dataset[View(index, draw.number, 0)] for index in draw]
        samples = several(list(draw))
        if hasattr(samples, "__len__") and len(samples) != len(draw):
            raise BatchError(
                f"__getitems__ of {type(self.dataset).__name__} must return one sample per index; found "
                f"{plural(len(samples), 'sample')} for {plural(len(draw), 'index', 'indices')}. Return all of them in "
                "order."
            )
        return samples

    def _views(self, index: int, draw: int) -> Any:
        views = [self.dataset[View(index, draw, view)] for view in range(self.augmentations)]
        try:
            return stack_views(views)
        except (RuntimeError, TypeError, KeyError) as error:
            raise BatchError(
                f"the {self.augmentations} views of a sample must be tensors, numbers or nested structures of them, of "
                f"equal sizes, to be stacked; found for sample {index}: {error} Change the augmentation, or use "
                "augmentations=1."
            ) from error


def stack_views(views: list[Any]) -> Any:
    """Stack the views of one sample like `default_collate`; dataclasses are stacked field by field."""
    first = views[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        stacked = copy.copy(first)
        for entry in dataclasses.fields(first):
            object.__setattr__(stacked, entry.name, stack_views([getattr(view, entry.name) for view in views]))
        return stacked
    return collate(views, collate_fn_map=_STACK)


def _stack_tensors(tensors: list[Tensor], *, collate_fn_map: Any = None) -> Tensor:
    return torch.stack(tensors)


# default_collate would allocate a file of shared memory for each sample in a worker.
_STACK: dict[Any, Callable[..., Any]] = {**default_collate_fn_map, Tensor: _stack_tensors}


class DrawnCollate:
    """collate_fn that makes a `DrawnBatch`; `collate_fn` is the user's function."""

    def __init__(self, collate_fn: Callable[[Any], Any]):
        self.collate_fn = collate_fn

    def __call__(self, batch_samples: DrawnSamples) -> DrawnBatch:
        draw = batch_samples.draw
        samples = batch_samples.samples
        batch = (samples if batch_samples.collated else self.collate_fn(samples)) if draw else None
        owners = None if draw.owners is None else torch.tensor(draw.owners, dtype=torch.int64)
        return DrawnBatch(batch, owners, draw.number, draw.branch, draw.source, len(draw))


class UnwrapInWorker:
    """worker_init_fn that makes `get_worker_info().dataset` the user's dataset, then calls the user's function."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None):
        self.worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        if isinstance(info.dataset, DrawnDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # the info object is read-only
        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)


def make_loader(
    dataset: Any,
    *,
    sample_rate: float,
    updates: int,
    state: DrawState,
    secure: bool,
    max_batch: int | None = None,
    augmentations: int = 1,
    users: Sequence[Hashable] | Tensor | None = None,
    **dataloader_arguments: Any,
) -> DataLoader[Any]:
    """DataLoader of Poisson draws of a map-style dataset; yields a `DrawnBatch` per draw.

    users: user id of each sample; the units of sampling are then users, and a draw has all samples of its users
    max_batch: largest number of units in a draw, over all ranks
    augmentations: number of views of each sample
    dataloader_arguments: of torch.utils.data.DataLoader, except those that determine the batches
    """
    check_dataset(dataset, "Poisson sampling")
    _check_numbers(sample_rate, updates, max_batch, augmentations)
    _check_arguments(dataloader_arguments)
    units = len(dataset) if users is None else Users.of(_check_ids(users, len(dataset)))
    collate_fn = dataloader_arguments.pop("collate_fn", None) or default_collate
    to_batch: Any = DrawnCollate(collate_fn)
    worker_init_fn = dataloader_arguments.pop("worker_init_fn", None)
    return DataLoader(
        DrawnDataset(dataset, augmentations, collates=collate_fn is default_collate),
        batch_sampler=PoissonSampler(units, sample_rate, updates, state, secure=secure, max_batch=max_batch),
        collate_fn=to_batch,
        worker_init_fn=UnwrapInWorker(worker_init_fn),
        **dataloader_arguments,
    )


def check_dataset(dataset: Any, subject: str) -> None:
    """Raise TypeError or ValueError unless samples can be drawn by index; `subject`: what draws them."""
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{subject} needs a map-style dataset, with __getitem__ and __len__; found {kind}, which is read "
            "in one order only. Store its samples in a map-style dataset."
        )
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError):
        raise TypeError(
            f"{subject} needs the number of samples; found {kind} without __len__. Add __len__ to its class."
        ) from None
    if size == 0:
        raise ValueError(f"{subject} needs at least one sample; found an empty {kind}. Pass the training dataset.")


def _check_numbers(sample_rate: float, updates: int, max_batch: int | None, augmentations: int) -> None:
    if not 0 < sample_rate <= 1:
        raise ValueError(
            f"sample_rate must be above 0 and at most 1; found {sample_rate}. It is the expected batch size divided by "
            "the number of samples."
        )
    check_count("updates", updates)
    check_count("augmentations", augmentations)
    if max_batch is not None:
        check_count("max_batch", max_batch)


def check_count(name: str, value: SupportsIndex) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be a whole number; found {value!r}. Pass an int.")
    if operator.index(value) < 1:
        raise ValueError(f"{name} must be at least 1; found {value}. Pass a positive number.")


DETERMINE_BATCHES = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


def _check_arguments(arguments: dict[str, Any]) -> None:
    for name in DETERMINE_BATCHES:
        if name in arguments:
            raise TypeError(
                f"the batches of a private run must be Poisson draws; found the argument {name}. Omit it; sample_rate "
                "determines the size of the batches."
            )
    if not arguments.get("in_order", True):
        raise ValueError(
            "the batches of a private run must arrive in the order of their draws; found in_order=False. Omit it."
        )


def _check_ids(users: Any, samples: int) -> list[Hashable]:
    ids = list(users.tolist() if hasattr(users, "tolist") else users)  # tensors of one element hash by identity
    if len(ids) != samples:
        raise ValueError(
            f"users must have one id per sample; found {plural(len(ids), 'id')} for {plural(samples, 'sample')}. Pass "
            "the user of each sample, in the order of the dataset."
        )
    for index, user in enumerate(ids):
        if isinstance(user, Tensor) or not _is_hashable(user):
            raise TypeError(
                f"user ids must be hashable values such as int or str; found {type(user).__name__} for sample {index}. "
                "Convert them."
            )
        if user != user:
            raise ValueError(
                f"every sample must have a user; found NaN for sample {index}. Give all samples of unknown users one "
                "id, or remove them."
            )
    return ids


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
