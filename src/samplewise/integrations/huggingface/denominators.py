"""Denominators of the loss, so that an update is the mean over all samples or tokens of the accumulated batches.

The Trainer expects that a model whose forward takes **kwargs divides its loss by `num_items_in_batch`, the number of
labels in all accumulated batches. Many heads ignore that argument and return the mean over one batch; their updates
would be too large by the number of accumulated batches. Whether a loss depends on it is found out by comparing.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.losses import IGNORE_INDEX
from samplewise.core.state import snapshot
from samplewise.parallel import collectives

METRICS = ("_metrics", "_total_train_tokens")  # attributes that compute_loss of TRL changes

logger = logging.getLogger("samplewise")


class Denominators:
    """Denominators of the loss of a trainer, for its accumulated batches."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._items: list[Tensor | int] = []  # of each accumulated batch, on this rank
        self._total: float | None = None

    def start_window(self, batches: list[Any]) -> None:
        """Count the items of the batches that are accumulated for the next update."""
        self._items = [self._count(batch) for batch in batches]
        self._total = None

    def prepare(self, model: nn.Module, inputs: Any, num_items: Any) -> bool:
        """True if the loss is divided by `num_items_in_batch`; False if it is the mean over one batch.

        The first call compares, if it makes a difference, and sets the attributes of the trainer accordingly.
        """
        trainer = self.trainer
        if trainer.loss_is_scaled_for_ga is None and self._undecided(num_items):
            depends = False if num_items is None else depends_on_items(trainer, model, inputs, num_items)
            if depends:
                trainer.loss_is_scaled_for_ga = True
            elif depends is False:
                trainer.loss_is_scaled_for_ga = False
                trainer.model_accepts_loss_kwargs = False
                logger.warning(
                    "The loss of %s does not depend on num_items_in_batch, although the Trainer expects that it is "
                    "divided by it. It is divided here, so that an update is the mean over all accumulated samples.",
                    type(trainer.accelerator.unwrap_model(trainer.model)).__name__,
                )
        if trainer.loss_is_scaled_for_ga is not None:
            return bool(trainer.loss_is_scaled_for_ga)
        return num_items is not None

    def _undecided(self, num_items: Any) -> bool:
        """True if the Trainer expects a scaled loss, and another loss would give another update."""
        trainer = self.trainer
        several = trainer.args.gradient_accumulation_steps > 1 or self._ranks() > 1
        expected = (
            trainer.model_accepts_loss_kwargs and num_items is not None
        ) or trainer.compute_loss_func is not None
        return several and expected

    def of_batch(self, inputs: Any, num_items: Any, scaled: bool) -> tuple[float, float]:
        """Factor that corrects the loss of one batch, and the denominator of its samples' losses after that.

        A loss that is the mean over a batch has been divided by the number of accumulated batches, which is not exact
        if they differ in size. The gradients of the ranks are averaged.
        """
        ranks = self._ranks()
        total = float(num_items) if scaled and num_items is not None else self._window_total()
        total = max(total, 1.0)
        factor = 1.0
        if not scaled:
            factor = self.trainer.current_gradient_accumulation_steps * ranks * float(self._count(inputs)) / total
        labels = inputs.get("labels")
        values = 1  # of the label of a sample; 1 for class indices, whose loss is the sum over the tokens of a sample
        if isinstance(labels, Tensor) and labels.is_floating_point() and labels.dim() > 1:
            values = max(labels[0].numel(), 1)  # regression and multi-label: the loss of a sample is a mean over them
        return factor, total / ranks / values

    def _ranks(self) -> int:
        """Number of ranks over which the items are counted."""
        args = self.trainer.args
        return int(args.world_size) if args.average_tokens_across_devices else 1

    def _window_total(self) -> float:
        """Items of all accumulated batches, of all ranks over which they are counted."""
        if self._total is None:
            here = float(sum(self._items))
            self._total = collectives.all_reduce_scalars(here)[0] if self._ranks() > 1 else here
        return self._total

    def _count(self, batch: Any) -> Tensor | int:
        """Number of labels of a batch, without ignored ones; its number of rows if it has no labels."""
        items: int | None = self.trainer._kind.items(batch)
        if items is not None:
            return items
        counts = self.counts(batch)
        if counts is not None:
            return counts.sum()
        labels = batch.get("labels")
        if isinstance(labels, Tensor) and labels.dim():
            return labels.numel()
        return next((len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()), 1)

    def counts(self, batch: Any) -> Tensor | None:
        """(B,) numbers of labels of each sample, without ignored ones; None if they are not class indices."""
        labels = batch.get("shift_labels", batch.get("labels"))
        if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.is_floating_point():
            return None
        if "shift_labels" not in batch and getattr(self.trainer, "_loss_shifts_labels", False):
            labels = labels[..., 1:]
        return labels.ne(IGNORE_INDEX).reshape(len(labels), -1).sum(1)


def depends_on_items(trainer: Any, model: nn.Module, inputs: Any, num_items: Any) -> bool | None:
    """True if the loss of a batch changes with `num_items_in_batch`; None if it is zero or not finite.

    It is computed twice without a graph. Random state, buffers and metrics are restored, and all ranks agree.
    """
    once, twice = collectives.all_reduce_scalars(
        loss_without_graph(trainer, model, inputs, num_items), loss_without_graph(trainer, model, inputs, 2 * num_items)
    )
    if not (abs(once) > 0 and abs(once) < torch.inf):
        return None
    return abs(twice - once) > 1e-3 * abs(once)


def loss_without_graph(trainer: Any, model: nn.Module, inputs: Any, num_items: Any) -> float:
    """Loss of a batch. Random state, buffers and metrics are restored."""
    metrics = {name: copy.deepcopy(vars(trainer)[name]) for name in METRICS if name in vars(trainer)}
    restore = snapshot(model)
    try:
        model.train()
        with torch.no_grad(), trainer.compute_loss_context_manager():
            prepared = trainer._prepare_inputs(copy.copy(inputs))
            return float(trainer.compute_loss(model, prepared, num_items_in_batch=num_items))
    finally:
        restore()
        vars(trainer).update(metrics)
