"""Traversal, slicing, concatenation and device transfer of nested batches.

Tensors are sliced along dim 0, lists and tuples of plain values (strings, ids) by position. Other tuples, named tuples,
dicts and other mappings, and dataclasses are traversed. A leaf whose dim 0 does not have the common length is kept
unchanged, and so is one that `keep_whole` has marked.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from samplewise.core.memory import copy_to_device, is_plain
from samplewise.core.text import plural
from samplewise.errors import BatchError

PLAIN = (str, bytes, int, float, bool, type(None))
Path = tuple[Hashable, ...]  # keys, positions or field names that lead to an entry of a batch


def _is_list_of_values(batch: Any) -> bool:
    """Test for a list or tuple of plain values, the form in which a data loader returns strings."""
    sequence = isinstance(batch, list) or (isinstance(batch, tuple) and not hasattr(batch, "_fields"))
    return sequence and bool(batch) and isinstance(batch[0], PLAIN) and all(isinstance(item, PLAIN) for item in batch)


def map_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return the batch with `change` applied to every leaf; the structure is kept."""
    if isinstance(batch, Tensor) or _is_list_of_values(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        return _mapping_like(batch, {key: map_leaves(value, change) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_leaves(item, change) for item in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)([change(item) if isinstance(item, Tensor) else map_leaves(item, change) for item in batch])
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        new = copy.copy(batch)  # a copy, because calling __init__ would process the data a second time
        for field in dataclasses.fields(batch):
            if hasattr(batch, field.name):
                object.__setattr__(new, field.name, map_leaves(getattr(batch, field.name), change))
        return new
    return change(batch)


def _mapping_like(batch: Any, entries: dict[Any, Any]) -> Any:
    if type(batch) is dict:
        return entries
    if dataclasses.is_dataclass(batch):  # the outputs of transformers, whose entries cannot be replaced
        make: Any = type(batch)
        return make(**entries)
    if isinstance(batch, (dict, UserDict)):  # a copy owns its entries and keeps other attributes
        new = copy.copy(batch)
        new.update(entries)
        return new
    make = type(batch)
    return make(entries)


def copied(batch: Any) -> Any:
    """Return the batch with a copy of each tensor, for a call that may change them in place."""
    return map_leaves(batch, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf)


def leaves(batch: Any) -> list[Any]:
    """Return the leaves of a batch: tensors, lists of plain values and other objects, in order."""
    return [leaf for _, leaf in located_leaves(batch)]


def located_leaves(batch: Any, path: Path = ()) -> list[tuple[Path, Any]]:
    """As `leaves`, with the path of each leaf."""
    if isinstance(batch, Tensor) or _is_list_of_values(batch):
        return [(path, batch)]
    if isinstance(batch, (tuple, list, Mapping)):
        entries: Iterable[tuple[Hashable, Any]] = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if hasattr(batch, field.name)]
        entries = [(name, getattr(batch, name)) for name in names]
    else:
        return [(path, batch)]
    located: list[tuple[Path, Any]] = []
    for key, item in entries:
        if isinstance(item, Tensor):
            located.append(((*path, key), item))
        else:
            located += located_leaves(item, (*path, key))
    return located


# --- entries that are not per sample ---------------------------------------------------------------------------------


class _WholeList(list[Any]):
    """List of values that is not sliced."""


class _WholeTuple(tuple[Any, ...]):
    """Tuple of values that is not sliced."""


def keep_whole(batch: Any, paths: Iterable[Path]) -> Any:
    """Return the batch with the entries at these paths marked: they do not count in `length`, and `cut` and `take` keep
    them whole. Raises BatchError if an entry is missing.
    """

    def mark(leaf: Any) -> Any:
        if is_whole(leaf):
            return leaf
        if isinstance(leaf, Tensor):  # the caller's tensor gets no mark: the mark is on an alias
            alias: Any = leaf.view_as(leaf) if leaf.requires_grad else leaf.detach()
            alias.samplewise_whole = True
            return alias
        if _is_list_of_values(leaf):
            return _WholeList(leaf) if isinstance(leaf, list) else _WholeTuple(leaf)
        return leaf

    for path in paths:
        batch = _change_at(batch, path, mark)
    return batch


def _change_at(batch: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    """The batch with `change` applied to the leaves below a path."""
    if not path:
        return map_leaves(batch, change)
    key, *rest = path
    if isinstance(batch, Tensor) or _is_list_of_values(batch):
        raise BatchError(f"the batch must hold {key!r}, to keep it whole; found {_contents(batch)} in its place.")
    entry = _change_at(pick(batch, key), tuple(rest), change)
    if isinstance(batch, Mapping):
        return _mapping_like(batch, {**batch, key: entry})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        position = batch._fields.index(key) if isinstance(key, str) else key
        return type(batch)(*_with_item(batch, position, entry))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_with_item(batch, key, entry))
    new = copy.copy(batch)
    object.__setattr__(new, str(key), entry)
    return new


def _with_item(batch: Iterable[Any], position: Any, item: Any) -> list[Any]:
    items = list(batch)
    items[position] = item
    return items


def is_whole(leaf: Any) -> bool:
    """True if `keep_whole` has marked this leaf."""
    return hasattr(leaf, "samplewise_whole") or isinstance(leaf, (_WholeList, _WholeTuple))


def name_of(path: Path) -> str:
    """Python expression of the entry at a path."""
    return "batch" + "".join(f"[{key!r}]" for key in path)


def row_counts(batch: Any) -> dict[Path, int]:
    """Number of rows of each tensor that has rows and is not marked, by its path."""
    tensors = ((path, leaf) for path, leaf in located_leaves(batch) if isinstance(leaf, Tensor))
    return {path: leaf.size(0) for path, leaf in tensors if leaf.dim() > 0 and not is_whole(leaf)}


def length(batch: Any) -> int | None:
    """Number of samples: the common length of all tensors or, without tensors, of all lists of plain values.

    None if the lengths differ or the batch cannot be sliced.
    """
    tensors: set[int] = set()
    lists: set[int] = set()
    for _, leaf in located_leaves(batch):
        if isinstance(leaf, Tensor):
            if leaf.dim() > 0 and not hasattr(leaf, "samplewise_whole"):
                tensors.add(leaf.size(0))
        elif is_whole(leaf):
            continue
        elif _is_list_of_values(leaf):
            lists.add(len(leaf))
        elif not isinstance(leaf, PLAIN):
            return None
    lengths = tensors or lists
    return lengths.pop() if len(lengths) == 1 else None


def cut(batch: Any, start: int, stop: int, total: int | None = None) -> Any:
    """Return samples start:stop of a batch that can be sliced; `total` is its length, computed if None."""

    total = total or length(batch)

    def select(leaf: Any) -> Any:
        if not has_rows(leaf, total):
            return leaf
        if isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_nested):
            return _rows(leaf, range(leaf.size(0))[start:stop])
        return leaf[start:stop]

    return map_leaves(batch, select)


def take(batch: Any, places: list[int]) -> Any:
    """Return the samples at the given indices of a batch that can be sliced."""
    total = length(batch)

    def select(leaf: Any) -> Any:
        if not has_rows(leaf, total):
            return leaf
        if not isinstance(leaf, Tensor):
            return type(leaf)(leaf[i] for i in places)
        if not is_plain(leaf):
            return _rows(leaf, places)
        return leaf[copy_to_device(torch.tensor(places, dtype=torch.long), leaf.device)]

    return map_leaves(batch, select)


def has_rows(leaf: Any, total: int | None) -> bool:
    """True if a leaf has one entry per sample, of `total` samples."""
    if isinstance(leaf, Tensor):
        return leaf.dim() > 0 and leaf.size(0) == total and not hasattr(leaf, "samplewise_whole")
    return _is_list_of_values(leaf) and len(leaf) == total and not is_whole(leaf)


def _rows(tensor: Tensor, places: Iterable[int]) -> Tensor:
    """Samples of a sparse or nested tensor, for which torch has no slicing along dim 0."""
    if tensor.is_nested:
        rows = tensor.unbind()
        return torch.nested.as_nested_tensor([rows[place] for place in places], layout=tensor.layout)
    indices = copy_to_device(torch.tensor(list(places), dtype=torch.long), tensor.device)
    return tensor.to_sparse_coo().index_select(0, indices).to_sparse(layout=tensor.layout)


def concat(batches: Sequence[Any]) -> Any:
    """Concatenate batches of equal structure along dim 0: tuples, lists and dicts element by element.

    Scalar tensors are stacked. Other objects become a list with one entry per batch.
    """
    first = batches[0]
    if isinstance(first, Tensor) and first.is_nested:
        rows = [row for batch in batches for row in batch.unbind()]
        return torch.nested.as_nested_tensor(rows, layout=first.layout)
    if isinstance(first, Tensor):
        for tensor in batches:
            if tensor.shape[1:] != first.shape[1:] or tensor.dim() != first.dim():
                raise BatchError(
                    "tensors must have equal sizes in all dimensions but the first to be concatenated; found shapes "
                    f"{tuple(first.shape)} and {tuple(tensor.shape)}. Pad them to one size, or use one batch at a time."
                )
        if not is_plain(first):
            return torch.cat([batch.to_sparse_coo() for batch in batches]).to_sparse(layout=first.layout)
        return torch.cat(list(batches)) if first.dim() else torch.stack(list(batches))
    if isinstance(first, Mapping):
        for batch in batches:
            if set(batch) != set(first):
                keys = (", ".join(map(repr, mapping)) for mapping in (first, batch))
                raise BatchError(
                    f"mappings must have equal keys to be concatenated; found the keys {' and '.join(keys)}. Use one "
                    "batch at a time."
                )
        return _mapping_like(first, {key: concat([batch[key] for batch in batches]) for key in first})
    if isinstance(first, (tuple, list)):
        columns = (concat(column) for column in zip(*batches, strict=True))
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return list(batches)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch on `device`.

    Tensors are moved by `copy_to_device`, other objects by their method `to`.
    """
    if device.type == "cpu":
        # Usually all entries are tensors on the CPU, which this loop finds in less time than a traversal.
        for entry in batch if isinstance(batch, (tuple, list)) else (batch,):
            if not (isinstance(entry, Tensor) and entry.is_cpu):
                break
        else:
            return batch
        if all(isinstance(leaf, Tensor) and leaf.is_cpu for leaf in leaves(batch)):
            return batch

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return copy_to_device(leaf, device)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return map_leaves(batch, move)


def pick(batch: Any, key: Hashable) -> Any:
    """Return batch[key] for mappings and sequences, batch.key for dataclasses, named tuples and other objects."""
    try:
        return getattr(batch, key) if isinstance(key, str) and not isinstance(batch, Mapping) else batch[key]
    except (AttributeError, KeyError, IndexError, TypeError):
        remedy = _REMEDIES.get(key, "Return it from the dataset.")
        raise BatchError(f"the batch must hold {key!r}; found {_contents(batch)}. {remedy}") from None


def pick_column(batch: Any, key: Hashable) -> Any:
    """As `pick`, for a column to record. The ids of a tuple or list (x, y, ...) without "id" are its only further
    column of strings, such as file names; they must differ, because samples with one id count as one sample.
    """
    columns: list[Any] = []
    if key == "id" and isinstance(batch, (tuple, list)) and not hasattr(batch, "id"):
        columns = [column for column in batch[2:] if is_text(column)]
    if len(columns) != 1:
        return pick(batch, key)
    if len(set(columns[0])) < len(columns[0]):
        value = next(value for k, value in enumerate(columns[0]) if value in columns[0][:k])
        raise BatchError(
            f"strings in a batch (x, y, ...) must differ to be used as ids; found {value!r} for several samples. "
            f"{_ID_REMEDY}"
        )
    return columns[0]


def is_text(column: Any) -> bool:
    """True for a list or tuple of strings, such as file names of the samples."""
    return isinstance(column, (list, tuple)) and bool(column) and all(isinstance(value, str) for value in column)


_ID_REMEDY = (
    "Wrap the dataset, DataLoader(sw.Indexed(dataset), ...) or train_dataset=sw.Indexed(dataset), which adds the index "
    "of each sample as 'id'; or, if the samples have ids, pass their key in the batch, for example sw.Ledger(id=2)."
)


_REMEDIES: dict[Hashable, str] = {
    "id": _ID_REMEDY,
    "importance": "For weights of an sw.ImportanceSampler, wrap the whole dataset: DataLoader(sw.Indexed(dataset), "
    "batch_sampler=sampler); otherwise return it from the dataset.",
}


def _contents(batch: Any) -> str:
    """Description of what a batch holds, for error messages."""
    if isinstance(batch, Mapping):
        return f"keys {', '.join(map(repr, batch))}" if batch else "no keys"
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return f"the entries {', '.join(map(repr, batch._fields))}"
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {plural(len(batch), 'entry', 'entries')}"
    return type(batch).__name__


def check_batch(batch: Any, error: Exception) -> None:
    """Raise BatchError from the error of a loss function if the batch looks like a single sample: some entries are
    numbers, such as the label of (x, y), or all are 1-D, and no two of them have the same number of rows. A
    RuntimeError gets a note instead: torch raises it when memory is exhausted, too, which has other remedies.
    """
    shapes = []
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            shapes.append(tuple(leaf.shape))
        elif isinstance(leaf, (int, float)) or _is_list_of_values(leaf):
            shapes.append((len(leaf),) if isinstance(leaf, (list, tuple)) else ())
    rows = [shape[0] for shape in shapes if shape]
    is_sample = () in shapes or all(len(shape) == 1 for shape in shapes)
    if isinstance(error, BatchError) or len(shapes) < 2 or len(set(rows)) < len(rows) or not is_sample:
        return
    finding = f"entries of shape {' and '.join(map(str, shapes))}, which look like a single sample"
    remedy = "Pass DataLoader(dataset, batch_size=64), or yield batches of one sample, (x[None], y[None])."
    if not isinstance(error, (IndexError, TypeError, AttributeError, ValueError)):
        error.add_note(f"samplewise: the batch has {finding}. {remedy}")
        return
    raise BatchError(
        f"a loader must yield batches, whose entries have one row per sample; found {finding}, and "
        f"{type(error).__name__} in the loss function: {str(error).rstrip('.')}. {remedy}"
    ) from error


def check_loader(loader: Any) -> None:
    """Raise BatchError for an object that is not an iterable of batches: a single batch, or a dataset, whose items are
    single samples.
    """
    kind = type(loader).__name__
    description = f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise BatchError(
            f"a loader must be an iterable of batches; found {description}, whose items are single samples. Pass "
            "DataLoader(dataset, batch_size=64), or DataLoader(dataset, batch_size=None) if its items are batches."
        )
    # Subclasses are not iterated: that may have effects.
    if type(loader) in (tuple, list) and all(isinstance(t, Tensor) and t.dim() for t in loader):
        # Batches that are tensors have one dtype and one number of dimensions; x and y rarely have both in common.
        kinds = {(t.dtype, t.dim()) for t in loader}
        if len(kinds) > 1 and len({len(t) for t in loader}) == 1:
            raise BatchError(
                f"a loader must be an iterable of batches; found {description} of {len(loader)} tensors with "
                f"{len(loader[0])} rows each, which is one batch. Pass a list of batches: [(x, y)]."
            )
    iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    if iterable and not isinstance(loader, (Tensor, Mapping, str)):
        return
    if isinstance(loader, Tensor):
        description += f" of shape {tuple(loader.shape)}, whose rows are not batches"
    raise BatchError(
        f"a loader must be an iterable of batches; found {description}. Pass a list of batches, or wrap the data in a "
        "DataLoader, for example DataLoader(TensorDataset(x, y), batch_size=64)."
    )
