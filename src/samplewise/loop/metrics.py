"""Metrics of validation: functions of (outputs, batch), or objects with update, compute and reset.

Function metrics are averaged over samples: sums over all batches and ranks, divided once, never a mean of means. For an
object with update, compute and reset, outputs and targets of all ranks are gathered on every rank; torchmetrics objects
synchronize their own state instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import length, to_device
from samplewise.core.means import WeightedMean
from samplewise.distributed.group import current_group
from samplewise.errors import BatchError, LossesError

LOG_FIELDS = ("kind", "epoch", "update", "loss", "train_loss")


class Mean:
    """Mean over samples of a function (outputs, batch) that returns one number per sample, or the mean of the batch."""

    def __init__(self, function: Callable[[Any, Any], Any]):
        self.function = function
        self.reset()

    def update(self, outputs: Any, batch: Any) -> None:
        found = torch.as_tensor(self.function(outputs, batch)).detach()
        found = found.to(torch.float32 if found.device.type == "mps" else torch.float64)  # MPS has no float64
        samples = length(batch) if found.dim() == 0 else found.numel()
        if samples is None:
            raise ValueError(
                "a metric must return one number per sample if the number of samples in a batch is unknown; found one "
                "number. Return a tensor of shape (samples,)."
            )
        self._mean.add_sum(found * samples if found.dim() == 0 else found.sum(), samples)

    def compute(self) -> float:
        return self._mean.all_reduce(current_group()).value()

    def reset(self) -> None:
        self._mean = WeightedMean(torch.float64)


class MetricAdapter:
    """Adapter for an object with update, compute and reset, such as a torchmetrics metric.

    Its `update` is called with (outputs, y) for batches (x, y), or with (outputs, batch) if it has an argument `batch`.
    """

    def __init__(self, metric: Any, device: torch.device):
        self.metric = metric.to(device) if hasattr(metric, "to") else metric
        self._wants_batch = "batch" in inspect.signature(metric.update).parameters

    def update(self, outputs: Any, batch: Any) -> None:
        self.metric.update(outputs, self.targets(batch))

    def targets(self, batch: Any) -> Any:
        """Return the second argument of the metric's `update`: the batch or its targets."""
        if not self._wants_batch and not (isinstance(batch, (tuple, list)) and len(batch) > 1):
            raise TypeError(
                "batches must be (x, y) for a metric with update, compute and reset, which is updated with "
                f"(outputs, y); found a {type(batch).__name__}. Give the metric a method update(outputs, batch)."
            )
        return batch if self._wants_batch else batch[1]

    def compute(self) -> Any:
        return self.metric.compute()

    def reset(self) -> None:
        self.metric.reset()


class GatheredMetric:
    """Metric without support for several ranks: `compute` updates it with the batches of all ranks, on each rank."""

    def __init__(self, adapter: MetricAdapter, device: torch.device):
        self._adapter = adapter
        self._device = device
        self._batches: list[Any] = []  # (outputs, targets) on the CPU

    def update(self, outputs: Any, batch: Any) -> None:
        self._batches.append(to_device((outputs, self._adapter.targets(batch)), torch.device("cpu")))

    def compute(self) -> Any:
        for of_ranks in zip_longest(*current_group().all_gather_object(self._batches)):
            for batch in of_ranks:
                if batch is not None:
                    self._adapter.metric.update(*to_device(batch, self._device))
        return self._adapter.compute()

    def reset(self) -> None:
        self._batches = []
        self._adapter.reset()


class SynchronizedMetric:
    """torchmetrics metric, which synchronizes its state over ranks; every rank must have at least one batch."""

    def __init__(self, adapter: MetricAdapter, name: str):
        self._adapter = adapter
        self._name = name
        self._has_data = False

    def update(self, outputs: Any, batch: Any) -> None:
        self._adapter.update(outputs, batch)
        self._has_data = True

    def compute(self) -> Any:
        empty = int(current_group().all_reduce_scalars(not self._has_data)[0])
        if empty:
            raise BatchError(
                f"every rank must have at least one batch for metric {self._name!r}, since torchmetrics cannot "
                f"synchronize a metric without data; found {empty} of {current_group().size} ranks without a batch. "
                "Use more samples, or a function (outputs, batch)."
            )
        return self._adapter.compute()

    def reset(self) -> None:
        self._has_data = False
        self._adapter.reset()


Metric = Mean | MetricAdapter | GatheredMetric | SynchronizedMetric


def as_metrics(metrics: Mapping[str, Any], device: torch.device) -> dict[str, Metric]:
    """Wrap the metrics of a Trainer by name."""
    found: dict[str, Metric] = {}
    for name, metric in metrics.items():
        if name in LOG_FIELDS:
            raise ValueError(f"a metric must not use a field name of the log; found {name!r}. Choose another name.")
        if all(hasattr(metric, part) for part in ("update", "compute", "reset")):
            found[name] = _over_ranks(MetricAdapter(metric, device), name, device)
        elif callable(metric):
            found[name] = Mean(metric)
        else:
            raise TypeError(
                f"metric {name!r} must be a function (outputs, batch) or have update, compute and reset; "
                f"found {type(metric).__name__}."
            )
    return found


def _over_ranks(adapter: MetricAdapter, name: str, device: torch.device) -> Metric:
    """Return a metric over all ranks. One process uses the adapter itself: it need not keep the outputs."""
    if current_group().size == 1:
        return adapter
    classes = type(adapter.metric).__mro__
    if any(each.__module__.partition(".")[0] == "torchmetrics" for each in classes):
        return SynchronizedMetric(adapter, name)
    return GatheredMetric(adapter, device)


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Compute all metrics. Results that are dicts or lists are flattened: name/part, name/0, name/1."""
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        found |= _named(name, metric.compute())
    return found


def _named(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Tensor):
        value = value.tolist()
    if not isinstance(value, (Mapping, list, tuple)):
        return {name: float(value)}
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {key: number for part, one in parts for key, number in _named(f"{name}/{part}", one).items()}


class OutputRecorder:
    """Context manager that records the outputs of the model when the loss function calls it."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._outputs: list[Any] = []

    def __enter__(self) -> None:
        self._hook = self._model.register_forward_hook(lambda module, inputs, output: self._outputs.append(output))

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def clear(self) -> None:
        self._outputs.clear()

    def last(self) -> Any:
        """Return the output of the last call since `clear`."""
        if not self._outputs:
            raise LossesError(
                "the loss function must call model(...), since metrics use the outputs of the model; found no call. "
                "Call model(...) in the loss function, or remove the metrics."
            )
        return self._outputs[-1]


def accuracy(outputs: Tensor, batch: Any) -> Tensor:
    """Return for batches (x, y) a bool per sample: True if the largest output is that of its label."""
    return outputs.argmax(-1) == batch[1]
