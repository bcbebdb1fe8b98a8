"""`sw.influence` (TracIn): first-order effect of a training sample on the loss of a query."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.losses import LossFn
from samplewise.core.snapshot import eval_mode
from samplewise.engine.gradients import Gradients
from samplewise.eval_pass import Checkpoint, at_each, check_order, check_repeatable, map_over_ranks, parameters_kept
from samplewise.scan import scan


def influence(
    model: nn.Module,
    loss_fn: LossFn,
    train: Iterable[Any],
    queries: Iterable[Any],
    checkpoints: Sequence[Checkpoint] | None = None,
    *,
    microbatch: int | str | None = "auto",
) -> Tensor:
    """TracIn influence (training samples, queries): sum over checkpoints of lr times the dot product of the gradients.

    Positive for a training sample that lowers the query's loss, negative for one that raises it. No gradient is
    stored: the products are computed from the inputs and output gradients of the layers. `train` is iterated once for
    each checkpoint and batch of queries, so make the query batches as large as memory allows. The model is in
    evaluation mode. With several ranks, every rank passes the same arguments, computes the rows of its share of the
    training batches, and gets the whole result.

    train, queries: loaders or lists of batches; rows and columns of the result are in their order
    checkpoints: list of (state_dict, lr), copies of the model's state; default: the current parameters with lr 1
    microbatch: size of the pieces of training batches, as in `sw.scan`
    """
    for loader, name in ((train, "train"), (queries, "queries")):
        check_repeatable(loader, name)
        check_order(loader, "Use shuffle=False: rows and columns of the result are in the order of the loaders.")
    total: Tensor | None = None
    with eval_mode(model), parameters_kept(model):
        for lr in at_each(model, checkpoints):
            products = lr * _dot_products(model, loss_fn, train, queries, microbatch)
            total = products if total is None else total + products
    assert total is not None  # there is at least one checkpoint
    return total


def _dot_products(
    model: nn.Module, loss_fn: LossFn, train: Iterable[Any], queries: Iterable[Any], microbatch: int | str | None
) -> Tensor:
    """Dot products (training samples, queries) of the gradients at the current parameters."""

    def products_with(query: Gradients) -> list[Tensor]:
        def of_batch(batch: Any) -> Tensor:
            return torch.cat([g.gram(query).cpu() for _, g in scan(model, loss_fn, [batch], microbatch)])

        return list(map_over_ranks(of_batch, train))

    columns = [torch.cat(_nonempty(products_with(query), "train")) for _, query in scan(model, loss_fn, queries, None)]
    return torch.cat(_nonempty(columns, "queries"), dim=1)


def _nonempty(parts: list[Tensor], name: str) -> list[Tensor]:
    if not parts:
        raise ValueError(
            f"{name} must yield at least one batch; found none. Pass a loader or a list: an iterator is exhausted "
            "after one pass."
        )
    return parts
