"""Ids for `samplewise train --ledger`: add them to the batches of a recipe's loader, and hide them from its loss.

The batches of a DataLoader with a map-style dataset get the index of each sample, as with `sw.Indexed`: batch.id, or
batch["id"] for a dict. The recipe's collate_fn and loss get the same items and batches as without ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from samplewise.core.criteria import as_criterion
from samplewise.core.state import RandomState
from samplewise.errors import BatchError
from samplewise.ledger.indexed import Indexed, IndexedItem
from samplewise.ledger.previews import indexed_items
from samplewise.loop.data.adapters import is_map_style, loader_with


class NumberedDataset(Indexed):
    """Dataset of (item, index)."""

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index], index


class NumberedTuple(IndexedItem):
    """(*batch, ids) for a batch that is a list or tuple. Indices count without the ids: batch[-1] is the recipe's."""

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[:-1][index]

    @property
    def id(self) -> Any:
        return tuple(self)[-1]


class NumberedBatch(IndexedItem):
    """(batch, ids) for a batch that is not a list, tuple or dict."""


class NumberedDict(dict[Any, Any]):
    """Batch that is a dict, with the key "id"."""


class NumberedCollate:
    """The collate_fn of a loader, for (item, index).

    as_columns: add the ids to a named tuple (x, y) as a further column, as a criterion needs it
    """

    def __init__(self, collate: Callable[[list[Any]], Any], as_columns: bool):
        self._collate = collate
        self._as_columns = as_columns

    def __call__(self, items: list[tuple[Any, Any]]) -> Any:
        batch = self._collate([item for item, _ in items])
        ids = [index for _, index in items]
        return _with_id(batch, torch.tensor(ids) if isinstance(ids[0], int) else ids, self._as_columns)


def _with_id(batch: Any, ids: Any, as_columns: bool) -> Any:
    if type(batch) is dict:
        return NumberedDict(batch, id=ids)
    if type(batch) in (list, tuple) or (as_columns and isinstance(batch, (list, tuple))):
        return NumberedTuple(*batch, ids)
    return NumberedBatch(batch, ids)


def without_id(batch: Any) -> Any:
    """The batch as the recipe's loader yields it."""
    if isinstance(batch, NumberedBatch):
        return batch[0]
    if isinstance(batch, NumberedDict):
        return {key: value for key, value in batch.items() if key != "id"}
    return list(batch[:]) if isinstance(batch, NumberedTuple) else batch


@contextmanager
def explain_missing_ids() -> Iterator[None]:
    """Name --ledger in the error for batches without ids: those of a loader that `with_ids` leaves unchanged."""
    try:
        yield
    except BatchError as error:
        if "'id'" not in str(error):
            raise
        raise BatchError(
            "--ledger needs the id of each sample. It adds ids to the batches of a DataLoader with a map-style "
            f"dataset; batches of other loaders must hold them, as those of sw.Indexed do: {error}"
        ) from error


def with_ids(loader: Any, loss: Any) -> tuple[Any, Any]:
    """A loader whose batches have ids, and a loss that does not see them. Both are unchanged if the batches have ids,
    or if the loader is not a DataLoader with a map-style dataset.
    """
    if not is_map_style(loader) or loader.batch_sampler is None or indexed_items(loader) or _has_id(loader):
        return loader, loss
    dataset = NumberedDataset(loader.dataset)
    collate = NumberedCollate(loader.collate_fn, as_columns=as_criterion(loss) is not None)
    return loader_with(loader, dataset=dataset, collate_fn=collate), _of_batches_without_id(loss)


def _has_id(loader: Any) -> bool:
    """True if batches of a loader have an id; the random state is restored."""
    if not len(loader.dataset):
        return False
    restore = RandomState().restore
    try:
        batch = loader.collate_fn([loader.dataset[0]])
    finally:
        restore()
    return "id" in batch if isinstance(batch, Mapping) else hasattr(batch, "id")


def _of_batches_without_id(loss: Any) -> Any:
    if as_criterion(loss) is not None:
        return loss  # ignores the id
    if isinstance(loss, nn.Module):  # must stay a module, whose parameters are trained
        loss.register_forward_pre_hook(lambda _, arguments: (arguments[0], without_id(arguments[1])))
        return loss

    @wraps(loss)
    def loss_without_id(model: nn.Module, batch: Any) -> Any:
        return loss(model, without_id(batch))

    return loss_without_id
