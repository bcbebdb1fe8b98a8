"""Ids of samples in the batches that `fit` gets, and their removal before the model is called.

arrays                          the row number; `fit` adds it, and Keras shuffles it with the rows
a dict x with the key of ids    x[key], which the model does not get
a DataLoader of `sw.Indexed`    the index of the dataset, last element of each batch
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from keras import tree
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays

from samplewise.ledger.indexed import IndexedItem

ROWS = "samplewise rows"
ARRAYS = "samplewise arrays"


def with_row_numbers(x: Any, key: Hashable) -> Any:
    """x with the row numbers of arrays; anything else, and a dict that has ids, is returned unchanged."""
    has_ids = isinstance(x, dict) and key in x
    if x is None or has_ids or not can_convert_arrays(x):
        return x
    return {ARRAYS: x, ROWS: torch.arange(len(tree.flatten(x)[0])).numpy()}


def split_ids(data: Any, key: Hashable) -> tuple[Any, Any]:
    """The batch (x, y, sample_weight) as Keras expects it, and the ids of its samples; None if there are none."""
    if isinstance(data, IndexedItem):
        return tuple(data[:-1]), data.id
    x, *others = data if isinstance(data, (tuple, list)) else (data,)
    ids = None
    if isinstance(x, dict) and ROWS in x:
        ids = x[ROWS]
        x = x[ARRAYS]
    elif isinstance(x, dict) and key in x:
        ids = x[key]
        x = {name: values for name, values in x.items() if name != key}
    return (x, *others), ids


class WithoutIds:
    """Iterator over the epoch of a Keras trainer whose batches have no ids."""

    def __init__(self, iterator: Any, key: Hashable):
        self._iterator = iterator
        self._key = key

    def __iter__(self) -> Iterator[tuple[Any, Any, list[Any]]]:
        for begin, end, data in self._iterator:
            yield begin, end, [split_ids(batch, self._key)[0] for batch in data]
