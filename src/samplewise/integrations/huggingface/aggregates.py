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
from samplewise.engine.arguments import wide_dtype
from samplewise.errors import LossesError
from samplewise.integrations.adapter import BatchLoss
from samplewise.parallel import collectives
from samplewise.transforms.sums import Per, as_per, divide_by_counts, sum_by_group


class Aggregates:
    """Scales of the samples' losses, for the accumulated batches of a trainer.

    aggregate: None leaves losses as they are
    count: function of a batch that returns the number of labels of each sample, (B,)
    """

    def __init__(self, aggregate: Per | None, count: Callable[[Any], Tensor]):
        self._aggregate = aggregate
        self._by_token = aggregate == Per("token")
        self._count = count
        self._batches: list[Any] = []  # accumulated for the next update, on this rank
        self._totals: dict[Hashable, float] = {}  # Σ counts of each group in the batches of all ranks
        self._divisor: float | None = None  # None: not computed for this update yet
        self.unverified = self._aggregate is not None and self._aggregate.constant is None

    def start_window(self, batches: list[Any]) -> None:
        """Get the batches that are accumulated for the next update."""
        self._batches = batches
        self._divisor = None

    def scaled(self, values: BatchLoss, denominator: float, batch: Any) -> tuple[BatchLoss, float]:
        """The loss of a batch, scaled, and its new denominator. `denominator`: what the loss divides the sum of the
        samples' losses by. The gradients of the ranks are averaged.
        """
        if self._aggregate is None:
            return values, denominator
        if self._divisor is None:
            self._divisor = self._exchange()
        scale = None
        if self._aggregate.constant is None:
            counts = self._count(batch).to(values.loss.device, wide_dtype(values.loss.dtype))
            self._check_counts(values, counts)
            totals = counts
            if self._aggregate.grouping is not None:
                of_group = [self._totals[key] for key in self._aggregate.group_keys(batch, len(counts))]
                totals = torch.tensor(of_group, dtype=counts.dtype, device=counts.device)
            if not self._by_token:  # whose loss of a sample is the sum over its tokens
                scale, _ = divide_by_counts(torch.ones_like(counts), counts, totals)
        own = self._divisor / collectives.size()
        return replace(values, loss=values.loss * (denominator / own), scale=scale), own

    def _exchange(self) -> float:
        """Divisor of the update. Collective, in the first pass of the update: how the loss counts labels is known by
        then.
        """
        assert self._aggregate is not None
        batches, self._batches = self._batches, []
        if self._aggregate.constant is not None:
            return self._aggregate.constant
        counts = [self._count(batch) for batch in batches]
        if self._aggregate.grouping is None:
            here = sum(float(n.sum() if self._by_token else (n > 0).sum()) for n in counts)
            return max(collectives.all_reduce_scalars(here)[0], 1.0)
        keys = [
            key for batch, n in zip(batches, counts, strict=True) for key in self._aggregate.group_keys(batch, len(n))
        ]
        self._totals = collectives.sum_by_key(sum_by_group(keys, torch.cat(counts)))
        return float(max(sum(total > 0 for total in self._totals.values()), 1))

    def _check_counts(self, values: BatchLoss, counts: Tensor) -> None:
        """Raise LossesError if the loss of a sample is a sum over another number of tokens than those counted. The
        losses of the samples, if they are known, show it.
        """
        problem = None
        if len(counts) != values.samples:
            problem = f"{len(counts)} rows of labels for {plural(values.samples, 'sample')}"
        elif self.unverified and values.losses is not None and bool((counts > 1).any()):
            self.unverified = False
            numbers = counts if values.counts is None else values.counts.to(counts)
            differing = (numbers != counts).nonzero().flatten().tolist()
            if bool(values.losses.isnan().any()):
                problem = "that those of per_sample_losses do not add up to the loss of the trainer. Override it"
            elif differing:
                k = differing[0]
                problem = (
                    f"{numbers[k].item():g} in the loss of sample {k} of a batch, {counts[k].item():g} in its labels"
                )
        if problem is not None:
            raise LossesError(
                f"{self._aggregate} must know the number of tokens in the loss of each sample; found {problem}."
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
