"""Ids for `samplewise train --ledger`: add them to the batches of a recipe's loader, and hide them from its loss.

The batches of a DataLoader with a map-style dataset get the index of each sample, as with `sw.Indexed`: batch.id, or
batch["id"] for a dict. The recipe's collate_fn and loss get the same items and batches as without ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from torch import nn

from samplewise.core.losses import as_criterion
from samplewise.core.state import RandomState
from samplewise.errors import BatchError
from samplewise.ledger.previews import indexed_items
from samplewise.ledger.sample_ids import IdCollator, NumberedDataset, numbered, without_id
from samplewise.loop.data.adapters import is_map_style, loader_with


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
    join = partial(numbered, as_columns=as_criterion(loss) is not None)
    collate = IdCollator(loader.collate_fn, split=tuple, join=join)  # the samples are pairs already
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
