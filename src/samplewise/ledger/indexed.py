"""`sw.Indexed`: dataset wrapper that adds the index of each sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset


class IndexedItem(tuple[Any, ...]):
    """Tuple (*items, id). It looks like a named tuple, so that a DataLoader collates samples to the same class, and
    Lightning and Accelerate move batches to a device without changing the class.
    """

    def __new__(cls, *items: Any) -> IndexedItem:
        return super().__new__(cls, items)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    @property
    def _fields(self) -> tuple[str, ...]:
        return (*(f"item{k}" for k in range(len(self) - 1)), "id")

    def _asdict(self) -> dict[str, Any]:
        return dict(zip(self._fields, self, strict=True))

    @property
    def id(self) -> Any:
        return self[-1]


class Indexed(Dataset[Any]):
    """Dataset wrapper that adds the index of each sample, for the ledger and for per-sample weights.

    A dict gets the key "id"; (x, y) becomes (x, y, id), and any other item becomes (item, id). The batches of a
    DataLoader have the same form, and `batch.id` is their last element. A criterion such as nn.CrossEntropyLoss()
    ignores the id; a custom loss function has to unpack three elements.
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
        item = self.dataset[index]
        if isinstance(item, Mapping) and "id" not in item:
            return {**item, "id": index}
        if isinstance(item, Mapping) or hasattr(item, "_fields"):
            description = (
                "a dict that has an id" if isinstance(item, Mapping) else f"the named tuple {type(item).__name__}"
            )
            raise TypeError(
                f"Indexed must be able to add an id to a sample; found {description}. Remove Indexed, and pass the key "
                "of the samples' own id: Ledger(id=...)."
            )
        return IndexedItem(*item, index) if isinstance(item, (tuple, list)) else IndexedItem(item, index)
