"""Ids of the samples: from the dataset through the data collator to the training step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from samplewise.errors import BatchError
from samplewise.ledger.indexed import Indexed


def with_id_column(argument: Any) -> Any:
    """An argument of the trainer; a `datasets.Dataset` inside sw.Indexed becomes a dataset with the column "id".

    TRL tokenizes, filters and shuffles a dataset with methods that only a `datasets.Dataset` has.
    """
    if not isinstance(argument, Indexed) or not _is_table(argument.dataset):
        return argument
    dataset = argument.dataset
    if "id" in dataset.column_names:
        raise TypeError(
            "Indexed must be able to add the column 'id' to a dataset; found one that has it. Pass the dataset without "
            "sw.Indexed: sw.Ledger() reads its column 'id'."
        )
    return dataset.add_column("id", list(range(len(dataset))))


def _is_table(dataset: Any) -> bool:
    """True for a `datasets.Dataset`, unless a function computes its items, which may leave out the ids."""
    try:
        import datasets
    except ImportError:
        return False
    return isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"


class IdCollator:
    """Data collator that passes the samples without these columns to another one, and adds the columns to its batch."""

    def __init__(self, collator: Callable[[Any], Any], columns: Collection[Hashable]):
        self.collator = collator
        self.columns = columns

    def __call__(self, samples: Sequence[Any]) -> Any:
        first = samples[0] if samples else None
        if not isinstance(first, Mapping):
            return self.collator(samples)
        columns = [key for key in self.columns if key in first]
        others = [{key: value for key, value in sample.items() if key not in columns} for sample in samples]
        batch = self.collator(others)
        for key in columns:
            batch[key] = _column([sample[key] for sample in samples])
        return batch


def _column(values: list[Any]) -> Any:
    """Numbers as a tensor (B,), other values as a list."""
    numbers = [value.item() if hasattr(value, "item") else value for value in values]
    for kind in (Integral, Real):
        if all(isinstance(value, kind) and not isinstance(value, bool) for value in numbers):
            return torch.tensor(numbers, dtype=None if kind is Integral else torch.float64)
    return values


def without_columns(batch: Any, keys: Collection[Hashable]) -> Any:
    """Copy of a batch without the columns that the forward pass does not take."""
    if not isinstance(batch, Mapping):
        raise BatchError(
            f"a batch must be a dict of tensors; found {type(batch).__name__}. Use a trainer whose data collator "
            "returns dicts."
        )
    inputs = dict(batch) if type(batch) is dict else copy.copy(batch)
    for key in keys:
        inputs.pop(key, None)  # type: ignore[attr-defined]
    return inputs
