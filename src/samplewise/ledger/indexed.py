"""Data sets whose samples say who they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset


class Numbered(tuple[Any, ...]):
    """(*items, id): to a data loader a named tuple, so that batches of these are such a tuple again."""

    def __new__(cls, *items: Any) -> Numbered:
        return super().__new__(cls, items)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    @property
    def _fields(self) -> tuple[str, ...]:
        return (*(f"item{k}" for k in range(len(self) - 1)), "id")

    @property
    def id(self) -> Any:
        return self[-1]


class Indexed(Dataset[Any]):
    """A data set whose samples carry their index, for the ledger and for weights that are looked up.

    A dict gets the key "id"; of (x, y) comes (x, y, id), and of anything else (item, id). The batches of a DataLoader
    look the same, and `batch.id` is the last of theirs. A criterion such as nn.CrossEntropyLoss() does not mind the id;
    a loss function of your own unpacks three things.
    """

    def __init__(self, dataset: Any):
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                f"Indexed must be given a data set whose samples have numbers; found {type(dataset).__name__}. Return "
                "an id with each sample instead, and say where it is: Ledger(id=...)."
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        item = self.dataset[index]
        if isinstance(item, Mapping) and "id" not in item:
            return {**item, "id": index}
        if isinstance(item, Mapping) or hasattr(item, "_fields"):
            found = "a dict that has an id" if isinstance(item, Mapping) else f"the named tuple {type(item).__name__}"
            raise TypeError(
                f"Indexed must be able to add an id to a sample; found {found}. Leave Indexed out, and say under which "
                "name the samples have an id: Ledger(id=...)."
            )
        return Numbered(*item, index) if isinstance(item, (tuple, list)) else Numbered(item, index)
