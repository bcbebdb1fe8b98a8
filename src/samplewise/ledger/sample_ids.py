"""Ids of samples: added to the samples of a dataset, carried through its collate_fn, and removed before the loss.

Indexed           dataset wrapper for users: the id is an entry of each sample, and of each batch
WeightedIndex     index of a sample from `sw.ImportanceSampler`; `Indexed` adds its weight as a further entry
NumberedDataset   wrapper for the library: the collate_fn and the loss get the samples and batches without ids
IdCollator        collates the samples without their ids, then adds the ids to the batch
without_id, split_entries   remove ids from a batch
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, MutableMapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

Columns = dict[Hashable, Any]  # entries of a sample or of a batch by key, such as the ids


class IndexedItem(tuple[Any, ...]):
    """Tuple (*items, id). It looks like a named tuple, so that a DataLoader collates samples to the same class, and
    Lightning and Accelerate move batches to a device without changing the class.
    """

    _added: tuple[str, ...] = ("id",)  # names of the last entries

    def __new__(cls, *items: Any) -> IndexedItem:
        return super().__new__(cls, items)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    @property
    def _fields(self) -> tuple[str, ...]:
        return (*(f"item{k}" for k in range(len(self) - len(self._added))), *self._added)

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    @property
    def id(self) -> Any:
        return tuple(self)[-1]

    def without_id(self) -> Any:
        return tuple(self)[:-1]


class WeightedItem(IndexedItem):
    """Tuple (*items, importance, id)."""

    _added = ("importance", "id")

    @property
    def importance(self) -> Any:
        return tuple(self)[-2]


class WeightedIndex(int):
    """Index of a sample that was drawn with a probability p, with its weight 1/(n p), which goes with the index to the
    workers of a DataLoader.

    draw: number of the draw in the epoch. It is in the `repr`, by which the trainer seeds the augmentation of a sample,
    so that a sample that is drawn twice is augmented in two ways.
    """

    weight: float
    draw: int

    def __new__(cls, index: int, weight: float, draw: int) -> WeightedIndex:
        new = super().__new__(cls, index)
        new.weight = weight
        new.draw = draw
        return new

    def __repr__(self) -> str:
        return f"WeightedIndex({int(self)}, {self.weight!r}, draw={self.draw})"

    __str__ = int.__repr__

    def __reduce__(self) -> Any:
        return WeightedIndex, (int(self), self.weight, self.draw)


class Indexed(Dataset[Any]):
    """Dataset wrapper that adds the index of each sample, for the ledger and for per-sample weights.

    A dict gets the key "id"; (x, y) becomes (x, y, id), and any other item becomes (item, id). The batches of a
    DataLoader have the same form, and `batch.id` is their last element. A criterion such as nn.CrossEntropyLoss()
    ignores the id; a custom loss function has to unpack three elements.

    With `sw.ImportanceSampler` as the batch sampler, the weight of the draw is added as "importance": (x, y) becomes
    (x, y, importance, id).
    """

    def __init__(self, dataset: Any):
        if isinstance(dataset, DataLoader):
            raise TypeError(
                "Indexed needs a dataset; found a DataLoader. Wrap the dataset of the loader: "
                "DataLoader(sw.Indexed(dataset), ...)."
            )
        if isinstance(dataset, Indexed):
            raise TypeError("Indexed needs a dataset without ids; found one that is Indexed already. Use it as it is.")
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"Indexed needs a map-style dataset, with __getitem__; found {type(dataset).__name__}. Return an id "
                "with each sample instead, and pass its key: Ledger(id=...)."
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        columns: Columns = {"id": index}
        if isinstance(index, WeightedIndex):
            columns = {"importance": index.weight, "id": int(index)}
        item = self.dataset[columns["id"]]
        if isinstance(item, Mapping) and not columns.keys() & item.keys():
            return {**item, **columns}
        if isinstance(item, Mapping) and "id" not in item:
            raise TypeError(
                "Indexed must be able to add the weight of a draw as 'importance'; found a dict that has this key. "
                "Rename it."
            )
        if isinstance(item, Mapping) or hasattr(item, "_fields"):
            description = (
                "a dict that has an id" if isinstance(item, Mapping) else f"the named tuple {type(item).__name__}"
            )
            raise TypeError(
                f"Indexed must be able to add an id to a sample; found {description}. Remove Indexed, and pass the key "
                "of the samples' own id: Ledger(id=...)."
            )
        kind = WeightedItem if "importance" in columns else IndexedItem
        return kind(*(item if isinstance(item, (tuple, list)) else [item]), *columns.values())


# --- ids that are hidden from the collate_fn and the loss ------------------------------------------------------------


class NumberedDataset(Indexed):
    """Dataset of (sample, {"id": index}), for an `IdCollator`."""

    def __getitem__(self, index: Any) -> tuple[Any, Columns]:
        return self.dataset[index], {"id": index}


class NumberedTuple(IndexedItem):
    """(*batch, ids) for a batch that is a list or tuple. Indices count without the ids: batch[-1] is the loader's."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[:-1][index]

    def without_id(self) -> list[Any]:
        return list(tuple(self)[:-1])


class NumberedBatch(IndexedItem):
    """(batch, ids) for a batch that is not a list, tuple or dict."""

    def without_id(self) -> Any:
        return self[0]


class NumberedDict(dict[Any, Any]):
    """Batch that is a dict, with the key "id"."""

    def without_id(self) -> dict[Any, Any]:
        return {key: value for key, value in self.items() if key != "id"}


def numbered(batch: Any, columns: Columns, as_columns: bool = False) -> Any:
    """A batch with its ids, from which `without_id` makes the same batch.

    as_columns: add the ids to a named tuple (x, y) as a further column, as a criterion needs it
    """
    ids = columns["id"]
    if type(batch) is dict:
        return NumberedDict(batch, id=ids)
    if type(batch) in (list, tuple) or (as_columns and isinstance(batch, (list, tuple))):
        return NumberedTuple(*batch, ids)
    return NumberedBatch(batch, ids)


def without_id(batch: Any) -> Any:
    """A batch without the ids that `numbered` has added."""
    return batch.without_id() if isinstance(batch, NumberedTuple | NumberedBatch | NumberedDict) else batch


# --- the way through the collate_fn ----------------------------------------------------------------------------------


class IdCollator:
    """collate_fn that passes the samples without their ids to another one, and adds the ids to its batch.

    split: function of a sample that returns it without ids, and its columns, name -> value
    join: function of a batch and its columns, name -> values, that returns the batch with them
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any],
        split: Callable[[Any], tuple[Any, Columns]],
        join: Callable[[Any, Columns], Any],
    ):
        self.collate = collate
        self.split = split
        self.join = join

    def __getattr__(self, name: str) -> Any:
        """Attributes of the other collate_fn, which trainers may read."""
        if name == "collate":  # of an object that is being unpickled
            raise AttributeError(name)
        return getattr(self.collate, name)

    def __call__(self, samples: Sequence[Any]) -> Any:
        pairs = [self.split(sample) for sample in samples]
        batch = self.collate([sample for sample, _ in pairs])
        names = list(pairs[0][1]) if pairs else []
        return self.join(batch, {name: as_column([columns[name] for _, columns in pairs]) for name in names})


def as_column(values: list[Any]) -> Any:
    """Numbers as a tensor (B,), other values as a list."""
    numbers = [value.item() if hasattr(value, "item") else value for value in values]
    for kind in (Integral, Real):
        if all(isinstance(value, kind) and not isinstance(value, bool) for value in numbers):
            return torch.tensor(numbers, dtype=None if kind is Integral else torch.float64)
    return values


def split_entries(entries: Any, keys: Collection[Hashable]) -> tuple[Any, Columns]:
    """A copy of a mapping without the entries at these keys, and these entries. Anything else is returned as it is."""
    if not isinstance(entries, Mapping):
        return entries, {}
    rest = copy.copy(entries) if isinstance(entries, MutableMapping) else dict(entries)  # keeps a BatchEncoding
    return rest, {key: rest.pop(key) for key in keys if key in entries}
