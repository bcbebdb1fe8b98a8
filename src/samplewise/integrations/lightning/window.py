"""Accumulation windows whose update is the mean over all their samples."""

from __future__ import annotations

import torch

from samplewise.parallel.group import current_group


class AccumulationWindow:
    """Accumulation window of an exact mean over its samples.

    Each loss, a mean over its batch, is multiplied by count / unit, which is 1 for batches of equal size. When the
    window is complete, the gradients are divided by the number of units instead of the number of batches.
    """

    def __init__(self) -> None:
        self.unit = 0.0  # count of the first batch, mean over the ranks; 1 if it is 0
        self.total = 0.0  # counts so far, on this rank

    def add(self, count: float) -> float:
        """Add a batch, and return the factor of its loss. The loss of a batch with the count 0 is 0."""
        group = current_group()
        if not self.unit:
            self.unit = group.all_reduce_scalars(count)[0] / group.size or 1.0
        self.total += count
        return count / self.unit

    def divide(self, optimizer: torch.optim.Optimizer, batches: int) -> None:
        """Replace the division by `batches`, and that by the number of ranks, by one by the total count."""
        if not self.unit:
            return
        group = current_group()
        total = group.all_reduce_scalars(self.total)[0] or 1.0
        factor = batches * self.unit * group.size / total
        if factor != 1:
            for parameters in optimizer.param_groups:
                for p in parameters["params"]:
                    if p.grad is not None:
                        p.grad.mul_(factor)
