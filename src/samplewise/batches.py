"""Cutting a batch of any structure into its samples.

Tensors are cut along dim 0, lists and tuples of plain values (texts, ids) by position; other tuples, named tuples,
dicts and other mappings, and dataclasses are gone through. What has no dim 0 of the common length stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

from torch import Tensor

from samplewise.errors import BatchError

PLAIN = (str, bytes, int, float, bool, type(None))


def _is_list_of_values(batch: Any) -> bool:
    """A data loader hands texts over in lists or tuples."""
    sequence = isinstance(batch, list) or (isinstance(batch, tuple) and not hasattr(batch, "_fields"))
    return sequence and bool(batch) and all(isinstance(item, PLAIN) for item in batch)


def map_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with every leaf changed."""
    if isinstance(batch, Tensor) or _is_list_of_values(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        return _mapping_like(batch, {key: map_leaves(value, change) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(item, change) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_leaves(item, change) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        new = copy.copy(batch)  # not made anew: what __init__ does to the data has been done
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(new, field.name, map_leaves(getattr(batch, field.name), change))
        return new
    return change(batch)


def _mapping_like(batch: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return entries
    if isinstance(batch, (dict, UserDict)):  # copies of these own their entries, and keep what else they have
        new = copy.copy(batch)
        new.update(entries)
        return new
    make: Any = type(batch)
    return make(entries)


def leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, Tensor) or _is_list_of_values(batch):
        yield batch
    elif isinstance(batch, (Mapping, tuple, list)):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from leaves(item)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                yield from leaves(getattr(batch, field.name))
    else:
        yield batch


def length(batch: Any) -> int | None:
    """The number of samples, if the batch can be cut: the length that all its tensors share, or, where it has none,
    all its lists of values.
    """
    tensors: set[int] = set()
    lists: set[int] = set()
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            if leaf.dim() > 0:
                tensors.add(len(leaf))
        elif _is_list_of_values(leaf):
            lists.add(len(leaf))
        elif not isinstance(leaf, PLAIN):
            return None
    lengths = tensors or lists
    return lengths.pop() if len(lengths) == 1 else None


def cut(batch: Any, start: int, stop: int, total: int | None = None) -> Any:
    """Samples start..stop of a batch that can be cut; `total` is its length, if that is at hand."""
    return _of_each(batch, lambda leaf: leaf[start:stop], total or length(batch))


def take(batch: Any, places: list[int]) -> Any:
    """The samples at these places of a batch that can be cut."""

    def some(leaf: Any) -> Any:
        return leaf[places] if isinstance(leaf, Tensor) else type(leaf)(leaf[i] for i in places)

    return _of_each(batch, some, length(batch))


def _of_each(batch: Any, some: Callable[[Any], Any], total: int | None) -> Any:
    """Changes what has one entry per sample."""

    def changed(leaf: Any) -> Any:
        sized = leaf.dim() > 0 if isinstance(leaf, Tensor) else _is_list_of_values(leaf)
        return some(leaf) if sized and len(leaf) == total else leaf

    return map_leaves(batch, changed)


def pick(batch: Any, key: Hashable) -> Any:
    """batch[key] of mappings and sequences, batch.key of dataclasses, named tuples and other objects."""
    try:
        return getattr(batch, key) if isinstance(key, str) and not isinstance(batch, Mapping) else batch[key]
    except (AttributeError, KeyError, IndexError, TypeError):
        found = f"keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
        raise BatchError(f"the batch must hold {key!r}; found {found}. Return it from the data set.") from None
