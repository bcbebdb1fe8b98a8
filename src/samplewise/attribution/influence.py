"""TracIn: what steps on a training sample did to the loss of a query, to first order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.engine.gradients import Gradients
from samplewise.losses import LossFn
from samplewise.measuring import Checkpoint, at_each, check_order, check_repeatable, evaluating, parameters_kept
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
    """(training samples, queries): the sum over checkpoints of lr times the dot product of their gradients.

    Positive for a training sample that lowers the query's loss, negative for one that raises it. No gradient is stored:
    products are made of what the layers saw. `train` is gone through once for each checkpoint and batch of queries,
    so hand over queries in batches as large as fit. In evaluation mode.

    train, queries: loaders or lists of batches; rows and columns stand in their order
    checkpoints: list of (state_dict, lr), copies of the model's state; default the model as it is, with lr 1
    microbatch: of the training samples, as in `sw.scan`
    """
    for loader, name in ((train, "train"), (queries, "queries")):
        check_repeatable(loader, name)
        check_order(loader, "Use shuffle=False: rows and columns stand in the order of the loaders.")
    total: Tensor | None = None
    with evaluating(model), parameters_kept(model):
        for rate in at_each(model, checkpoints):
            found = rate * _products(model, loss_fn, train, queries, microbatch)
            total = found if total is None else total + found
    assert total is not None  # there is one checkpoint at least
    return total


def _products(
    model: nn.Module, loss_fn: LossFn, train: Iterable[Any], queries: Iterable[Any], microbatch: int | str | None
) -> Tensor:
    def against(query: Gradients) -> list[Tensor]:
        return [g.gram(query).cpu() for _, g in scan(model, loss_fn, train, microbatch)]

    columns = [torch.cat(_some(against(query), "train")) for _, query in scan(model, loss_fn, queries, None)]
    return torch.cat(_some(columns, "queries"), dim=1)


def _some(parts: list[Tensor], name: str) -> list[Tensor]:
    if not parts:
        raise ValueError(f"{name} must yield at least one batch; found none.")
    return parts
