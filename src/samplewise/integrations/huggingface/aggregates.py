"""What an update of a trainer is divided by: `aggregate=sw.per(...)`.

The Trainer divides by the number of labels of all accumulated batches, which is `sw.per("token")`. It has all of these
batches before the first backward pass, so that other divisors are known as early: the loss of each sample is scaled
before its gradient is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samplewise.core.text import plural
from samplewise.errors import LossesError, TransformError
from samplewise.integrations.adapter import BatchLoss
from samplewise.parallel import collectives
from samplewise.transforms.per import Per, as_per, divide_by_counts


class Aggregates:
    """Scales of the samples' losses, for the accumulated batches of a trainer.

    aggregate: None leaves losses as they are, as per("token") does
    count: function of a batch that returns the number of labels of each sample, (B,)
    """

    def __init__(self, aggregate: Per | None, count: Callable[[Any], Tensor]):
        self._aggregate = None if aggregate == Per("token") else aggregate
        self._count = count
        self._samples = 0  # with labels, in the accumulated batches of this rank
        self._groups: dict[Hashable, float] = {}  # Σ counts of each group in the accumulated batches of this rank
        self._totals: dict[Hashable, float] | None = None  # the same of all ranks
        self._divisor: float | None = None

    def start_window(self, batches: list[Any]) -> None:
        """Count the labels of the batches that are accumulated for the next update."""
        self._samples = 0
        self._groups = {}
        self._totals = None
        self._divisor = None
        if self._aggregate is None or self._aggregate.constant is not None:
            return
        for batch in batches:
            counts = self._count(batch)
            self._samples += int((counts > 0).sum())
            for key, count in zip(self._keys(batch, len(counts)), counts.tolist(), strict=False):
                self._groups[key] = self._groups.get(key, 0.0) + count

    def _keys(self, batch: Any, samples: int) -> list[Hashable]:
        """Group of each sample; empty without groups."""
        assert self._aggregate is not None
        if self._aggregate.grouping is None:
            return []
        keys = self._aggregate.grouping.keys(batch)
        if len(keys) != samples:
            raise TransformError(
                f"{self._aggregate} must give one key per sample; found {plural(len(keys), 'key')} for "
                f"{plural(samples, 'sample')}."
            )
        return keys

    def scaled(self, values: BatchLoss, denominator: float, batch: Any) -> tuple[BatchLoss, float]:
        """The loss of a batch, scaled, and its new denominator. `denominator`: what the loss divides the sum of the
        samples' losses by. The gradients of the ranks are averaged.
        """
        if self._aggregate is None:
            return values, denominator
        self._exchange()
        scale = None
        if self._aggregate.constant is None:
            counts = self._count(batch).to(values.loss.device, torch.float32)
            self._check_counts(values, counts)
            totals = counts
            if self._aggregate.grouping is not None:
                assert self._totals is not None
                of_group = [self._totals[key] for key in self._keys(batch, len(counts))]
                totals = torch.tensor(of_group, device=counts.device)
            scale, _ = divide_by_counts(torch.ones_like(counts), counts, totals)
        assert self._divisor is not None
        own = self._divisor / collectives.size()
        return replace(values, loss=values.loss * (denominator / own), scale=scale), own

    def _exchange(self) -> None:
        """Compute the divisor of the update, once. Collective."""
        assert self._aggregate is not None
        if self._divisor is not None:
            return
        if self._aggregate.constant is not None:
            self._divisor = self._aggregate.constant
        elif self._aggregate.grouping is None:
            self._divisor = max(collectives.all_reduce_scalars(self._samples)[0], 1.0)
        else:
            self._totals = {}
            for groups in collectives.all_gather_object(self._groups):
                for key, total in groups.items():
                    self._totals[key] = self._totals.get(key, 0.0) + total
            self._divisor = float(max(sum(total > 0 for total in self._totals.values()), 1))

    def _check_counts(self, values: BatchLoss, counts: Tensor) -> None:
        """Raise LossesError if the loss of a sample is a sum over another number of tokens than those counted."""
        if len(counts) != values.samples:
            raise LossesError(
                f"{self._aggregate} must know the number of tokens of each sample; found {len(counts)} rows of labels "
                f"for {plural(values.samples, 'sample')}."
            )
        if values.losses is None or values.counts is None or not bool(values.losses.isfinite().all()):
            return
        differing = (values.counts.to(counts) != counts).nonzero().flatten().tolist()
        if differing:
            k = differing[0]
            raise LossesError(
                f"{self._aggregate} must know the number of tokens of each sample; found {values.counts[k].item():g} "
                f"in the loss of sample {k} of a batch, and {counts[k].item():g} in its labels."
            )


def check_aggregate(trainer: Any, aggregate: Per | None) -> None:
    """Raise unless the trainer has all batches of an update before the first pass, with the labels of each sample."""
    as_per(aggregate)
    of_trl = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")]
    if aggregate is not None and of_trl and "SFTTrainer" not in of_trl:
        raise LossesError(
            "aggregate= must know the number of tokens of each sample before the first pass of an update; found "
            f"{of_trl[0]}, whose loss has a divisor of its own. Leave aggregate out."
        )
