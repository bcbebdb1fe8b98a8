"""Which samples of an epoch are whose, when several ranks train together.

The samples of an epoch have one order, that of a single process: rank r of N takes number r, r + N, r + 2N, ... of it.
So each is seen once, none is repeated to make shares equal, and the first G samples are the same for any N.

    a DataLoader batches of `batch_size` are made of a rank's own samples: N ranks are one process with batches N times
                 as large
    batches      that come ready made, from a batch sampler or a list, are divided: each rank has its rows of each
    one sample   that cannot be cut, or comes without a batch, is somebody's as a whole
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DistributedSampler, IterableDataset

from samplewise import ranks
from samplewise.batches import PLAIN, leaves, length, take
from samplewise.errors import BatchError, DistributedError
from samplewise.loop.seeding import parts_of


@dataclass(frozen=True)
class Share:
    """Every `size`-th sample, from number `start + rank` of an epoch on: those before `start` have been used."""

    rank: int = 0
    size: int = 1
    start: int = 0

    @property
    def whole(self) -> bool:
        return self.size == 1 and self.start == 0

    def of(self, samples: Iterable[Any]) -> Iterator[Any]:
        return islice(samples, self.start + self.rank, None, self.size)

    def rows(self, place: int, count: int) -> range:
        """Of the samples number `place`, `place + 1`, ... those that are ours."""
        first = (self.start + self.rank - place) % self.size
        unused = max(0, self.start - place)
        first += -(-max(0, unused - first) // self.size) * self.size
        return range(first, count, self.size)

    def batches(self, samples: Iterable[Any], size: int, drop_last: bool) -> Iterator[list[Any]]:
        """Of so many samples each; `drop_last` drops what would leave any rank with less."""
        samples = islice(samples, self.start, None)
        while dealt := list(islice(samples, size * self.size)):
            mine = dealt[self.rank :: self.size]
            if not mine or (drop_last and len(dealt) < size * self.size):
                return
            yield mine


class Look:
    """At the first things that all ranks should see alike, while they pass by."""

    ELEMENTS = 8  # of each tensor

    def __init__(self, limit: int = 1):
        """`limit`: how many things every rank has seen, if there are so many, when it has its first batch."""
        self._limit, self._digest = limit, hashlib.sha256()

    def at(self, things: Iterable[Any]) -> Iterator[Any]:
        for number, thing in enumerate(things):
            if number < self._limit:
                for leaf in leaves(thing):
                    seen = leaf.flatten()[: self.ELEMENTS].tolist() if hasattr(leaf, "flatten") else leaf
                    self._digest.update(repr(seen).encode() if isinstance(seen, (list, tuple, *PLAIN)) else b"?")
            yield thing

    def agree(self, looked: bool = True) -> None:
        """Meets the other ranks. `looked`: from the beginning on."""
        seen = int.from_bytes(self._digest.digest()[:2], "little") if looked else 0
        lookers, total, squares = ranks.meet(looked, seen, seen * seen)
        if lookers * squares != total * total:  # equal only if all are
            raise DistributedError(
                "every rank must go through the same samples in the same order, of which it takes its own; found that "
                "the ranks' orders differ. Let samplers and data sets draw from generators that are their attributes, "
                "or from torch's, Python's or NumPy's own; or give each rank its samples, with Trainer(sharded=True)."
            )


class Divided:
    """Batches that are the same for all ranks, each cut down to this rank's rows."""

    def __init__(self, share: Share, place: int = 0, count: Any = length, pick: Any = take):
        """`place`: so many samples came before. `count` and `pick`: how a batch is measured and cut."""
        self.share, self.place, self._count, self._pick = share, place, count, pick
        self._missed = 0

    def of(self, batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            mine = self.part(batch)
            if mine is not None:
                yield mine

    def part(self, batch: Any) -> Any:
        """None: nothing of it is ours. In the middle of an epoch the ranks would no longer be in step."""
        if self._missed:
            raise BatchError(
                f"batches that {self.share.size} ranks divide must have a sample for each of them; found one of "
                f"{self._missed} in the middle of an epoch. Make larger ones, or leave it to a DataLoader to make them."
            )
        count = self._count(batch)
        rows, used = self.share.rows(self.place, count or 1), self.place < self.share.start
        self.place += count or 1
        if not rows:
            self._missed = 0 if used else count or 0
            return None
        return batch if count is None or len(rows) == count else self._pick(batch, list(rows))


def drawn(loader: Any, share: Share, look: Look) -> Iterator[Any]:
    """What a DataLoader asks its data set for: of what its sampler draws, the share."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if share.whole:
        return map(_kept, sampler)
    if loader.batch_sampler is None:
        return share.of(look.at(sampler))
    if loader.batch_size is None:  # somebody else's, who makes batches as they please
        divided = Divided(share, count=len, pick=lambda batch, rows: [batch[row] for row in rows])
        return divided.of(look.at(map(list, sampler)))
    return share.batches(look.at(sampler.sampler), loader.batch_size, loader.drop_last)


def _kept(indices: Any) -> Any:
    """Some samplers change the list that they have handed out."""
    return list(indices) if isinstance(indices, list) else indices


class Dealt(IterableDataset[Any]):
    """A stream of samples of which each rank takes its own. In a worker: of the worker's."""

    def __init__(self, dataset: Any, share: Share, look: Look | None = None):
        self.dataset, self.share, self.look = dataset, share, look
        self._before = share.start + share.rank  # so many are to be passed over before the next that is ours

    def __iter__(self) -> Iterator[Any]:
        for sample in self.dataset if self.look is None else self.look.at(self.dataset):
            if self._before:
                self._before -= 1
            else:
                self._before = self.share.size - 1
                yield sample
        self._before = self.share.start + self.share.rank


class DealtWithState(Dealt):
    """The same, for a data set that has a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": self.dataset.state_dict(), "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state["dataset"])
        self._before = state["before"]


def dealt(loader: Any, share: Share, look: Look) -> Any:
    """The data set of a DataLoader, of which it will see its share. Nobody can look into workers."""
    dataset = loader.dataset
    if share.whole:
        return dataset
    return (DealtWithState if hasattr(dataset, "state_dict") else Dealt)(
        dataset, share, None if loader.num_workers else look
    )


def check_undivided(loader: Any) -> None:
    """Refuses what shows that somebody has divided it already."""
    for part in parts_of(loader):
        if isinstance(part, DistributedSampler):
            raise BatchError(
                "a loader must give every rank all samples, of which the trainer takes the rank's own; found a "
                f"{type(part).__name__}, which repeats some samples to make shares equal. Leave it out; or keep it, "
                "duplicates and all, with Trainer(sharded=True)."
            )
        if getattr(part, "_distributed", None) is not None:  # Hugging Face's split_dataset_by_node
            raise BatchError(
                "a loader must give every rank all samples, of which the trainer takes the rank's own; found a "
                f"{type(part).__name__} that has been split by node. Pass it whole, or say that it is divided with "
                "Trainer(sharded=True)."
            )
