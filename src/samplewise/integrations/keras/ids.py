"""Ids of samples in the batches that `fit` gets, and their removal before the model is called.

arrays                          the row number; `fit` adds it, and Keras shuffles it with the rows
a dict x with the key of ids    x[key]; the model does not get it, unless it is one of its inputs
a DataLoader of `sw.Indexed`    the index of the dataset, last element of each batch
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
from keras import tree
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays

from samplewise.ledger.ledger import Ledger
from samplewise.ledger.sample_ids import IndexedItem, split_entries

ROWS = "samplewise rows"
ARRAYS = "samplewise arrays"


def with_row_numbers(x: Any, key: Hashable) -> Any:
    """x with the row numbers of arrays; anything else, and a dict that has ids, is returned unchanged."""
    has_ids = isinstance(x, dict) and key in x
    if x is None or has_ids or not can_convert_arrays(x):
        return x
    return {ARRAYS: x, ROWS: np.arange(len(tree.flatten(x)[0]))}


class SplitBatch(NamedTuple):
    """Batch of a training step."""

    data: Any  # (x, y, sample_weight) as Keras expects it
    ids: Any  # of its samples; None if there are none
    columns: dict[Hashable, Any]  # entries of a dict x, including those that the model does not get


class BatchSplitter:
    """Separates ids, and other columns of the ledger, from the inputs of a model."""

    def __init__(self, model: Any, ledger: Ledger | None):
        self._id = None if ledger is None else ledger.keys["id"]
        recorded = set() if ledger is None else set(ledger.keys.values())
        inputs = _input_names(model)
        # If the inputs of the model are not known, all but the ids are inputs.
        self._hidden = recorded - inputs if inputs else recorded & {self._id}

    def split(self, data: Any) -> SplitBatch:
        if isinstance(data, IndexedItem):
            return SplitBatch(data.without_id(), data.id, {})
        x, *others = data if isinstance(data, (tuple, list)) else (data,)
        ids = None
        if isinstance(x, dict) and ROWS in x:
            ids = x[ROWS]
            x = x[ARRAYS]
        columns = dict(x) if isinstance(x, dict) else {}
        x, _ = split_entries(x, self._hidden)
        return SplitBatch((x, *others), columns.get(self._id) if ids is None else ids, columns)

    def epoch(self, batches: Any) -> Iterator[tuple[Any, Any, list[Any]]]:
        """Yield the elements of a Keras epoch iterator without ids."""
        for begin, end, data in batches:
            yield begin, end, [self.split(each).data for each in data]


def _input_names(model: Any) -> set[Hashable]:
    """Names of the inputs of a functional model, and their keys in a dict; empty for other models."""
    structure = getattr(model, "input", None)
    keys = set(structure) if isinstance(structure, dict) else set()
    return keys | {each.name for each in getattr(model, "inputs", None) or ()}
