"""What is measured in validation: functions of (outputs, batch), or objects with update, compute and reset.

How batches combine: sums over samples, divided once; never a mean of means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from samplewise.batches import length


class Mean:
    """The mean over samples of what a function returns for a batch: one number per sample, or the batch's mean."""

    def __init__(self, function: Any):
        self.function = function
        self.total: Tensor | float = 0.0
        self.count = 0

    def update(self, outputs: Any, batch: Any) -> None:
        found = torch.as_tensor(self.function(outputs, batch)).detach()
        found = found.to(torch.get_default_dtype()) if not found.is_floating_point() else found
        samples = length(batch)
        if found.dim() == 0:
            if samples is None:
                raise ValueError(
                    "a metric must return one number per sample for batches that cannot be cut; found one number."
                )
            self.total, self.count = self.total + found * samples, self.count + samples
        else:
            self.total, self.count = self.total + found.sum(), self.count + found.numel()

    def compute(self) -> float:
        return float(self.total / self.count) if self.count else float("nan")

    def reset(self) -> None:
        self.total, self.count = 0.0, 0


class Given:
    """Somebody else's metric, such as torchmetrics': fed with (outputs, target) of batches (x, y)."""

    def __init__(self, metric: Any):
        self.metric = metric

    def update(self, outputs: Any, batch: Any) -> None:
        self.metric.update(outputs, batch[1])

    def compute(self) -> float:
        return float(self.metric.compute())

    def reset(self) -> None:
        self.metric.reset()


def as_metrics(metrics: Mapping[str, Any]) -> dict[str, Mean | Given]:
    found: dict[str, Mean | Given] = {}
    for name, metric in metrics.items():
        if all(hasattr(metric, part) for part in ("update", "compute", "reset")):
            found[name] = Given(metric)
        elif callable(metric):
            found[name] = Mean(metric)
        else:
            raise TypeError(
                f"metric {name!r} must be a function (outputs, batch) or have update, compute and reset; "
                f"found {type(metric).__name__}."
            )
    return found


def accuracy(outputs: Tensor, batch: Any) -> Tensor:
    """Of batches (x, y): which samples have their label on top."""
    return outputs.argmax(-1) == batch[1]
