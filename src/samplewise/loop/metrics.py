"""Metrics of validation: functions of (outputs, batch), or objects with update, compute and reset.

Function metrics are averaged over samples: sums over all batches and ranks, divided once, never a mean of means. For an
object with update, compute and reset, outputs and targets of all ranks are gathered on every rank; torchmetrics objects
synchronize their own state instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import length
from samplewise.core.devices import moved
from samplewise.distributed.group import current_group
from samplewise.errors import BatchError, LossesError

TAKEN = ("kind", "epoch", "update", "loss", "train_loss")


class WeightedMean:
    """Σ values / Σ counts, accumulated in float64 (float32 on MPS) on the device of the values, without host sync."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._count: Tensor | int = 0

    def add(self, values: Tensor, counts: Tensor | None = None) -> None:
        """Add values of shape (samples,) and their counts; by default each value counts 1."""
        if not isinstance(values, Tensor) or values.dim() != 1:
            found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise LossesError(f"losses must be 1-D, one value per sample; found {found}. Use reduction='none'.")
        self.add_sum(_wide(values).sum(), len(values) if counts is None else _wide(counts).sum())

    def add_sum(self, total: Tensor, count: Tensor | int) -> None:
        self._total = self._total + total
        self._count = self._count + count

    def value(self) -> float:
        """Return the quotient over all ranks; NaN if the count is 0. Collective."""
        total, count = current_group().all_reduce_scalars(self._total, self._count)
        return total / count if count else float("nan")


def _wide(values: Tensor) -> Tensor:
    """Return values in float64: sums in half precision would stop growing at a few hundred. MPS has no float64, so
    float32 is used there.
    """
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)


class Mean:
    """Mean over samples of a function (outputs, batch) that returns one number per sample, or the mean of the batch."""

    def __init__(self, function: Callable[[Any, Any], Any]):
        self.function = function
        self._sums = WeightedMean()

    def update(self, outputs: Any, batch: Any) -> None:
        found = _wide(torch.as_tensor(self.function(outputs, batch)))
        samples = length(batch) if found.dim() == 0 else found.numel()
        if samples is None:
            raise ValueError(
                "a metric must return one number per sample if the number of samples in a batch is unknown; found one "
                "number. Return a tensor of shape (samples,)."
            )
        self._sums.add_sum(found * samples if found.dim() == 0 else found.sum(), samples)

    def compute(self) -> float:
        return self._sums.value()

    def reset(self) -> None:
        self._sums = WeightedMean()


class MetricAdapter:
    """Adapter for an object with update, compute and reset, such as a torchmetrics metric.

    Its `update` is called with (outputs, y) for batches (x, y), or with (outputs, batch) if it has an argument `batch`.
    """

    def __init__(self, metric: Any, device: torch.device):
        self.metric = metric.to(device) if hasattr(metric, "to") else metric
        self._whole = "batch" in inspect.signature(metric.update).parameters

    def update(self, outputs: Any, batch: Any) -> None:
        self.metric.update(outputs, self.wanted(batch))

    def wanted(self, batch: Any) -> Any:
        """Return the second argument of the metric's `update`: the batch or its targets."""
        if not self._whole and not (isinstance(batch, (tuple, list)) and len(batch) > 1):
            raise TypeError(
                "batches must be (x, y) for a metric with update, compute and reset, which is updated with "
                f"(outputs, y); found a {type(batch).__name__}. Give the metric a method update(outputs, batch)."
            )
        return batch if self._whole else batch[1]

    def compute(self) -> Any:
        return self.metric.compute()

    def reset(self) -> None:
        self.metric.reset()


class GatheredMetric:
    """Metric without support for several ranks: `compute` updates it with the batches of all ranks, on each rank."""

    def __init__(self, given: MetricAdapter, device: torch.device):
        self._given = given
        self._device = device
        self._seen: list[Any] = []

    def update(self, outputs: Any, batch: Any) -> None:
        self._seen.append(moved((outputs, self._given.wanted(batch)), torch.device("cpu")))

    def compute(self) -> Any:
        for together in zip_longest(*current_group().all_gather_object(self._seen)):
            for seen in together:
                if seen is not None:
                    self._given.metric.update(*moved(seen, self._device))
        return self._given.compute()

    def reset(self) -> None:
        self._seen = []
        self._given.reset()


class Synchronised:
    """torchmetrics metric, which synchronizes its state over ranks; every rank must have at least one batch."""

    def __init__(self, given: MetricAdapter, name: str):
        self._given = given
        self._name = name
        self._fed = False

    def update(self, outputs: Any, batch: Any) -> None:
        self._given.update(outputs, batch)
        self._fed = True

    def compute(self) -> Any:
        empty = int(current_group().all_reduce_scalars(not self._fed)[0])
        if empty:
            raise BatchError(
                f"every rank must have at least one batch for metric {self._name!r}, since torchmetrics cannot "
                f"synchronize a metric without data; found {empty} of {current_group().size} ranks without a batch. "
                "Use more samples, or a function (outputs, batch)."
            )
        return self._given.compute()

    def reset(self) -> None:
        self._fed = False
        self._given.reset()


Metric = Mean | MetricAdapter | GatheredMetric | Synchronised


def as_metrics(metrics: Mapping[str, Any], device: torch.device) -> dict[str, Metric]:
    """Wrap the metrics of a Trainer by name."""
    found: dict[str, Metric] = {}
    for name, metric in metrics.items():
        if name in TAKEN:
            raise ValueError(f"a metric must not use a field name of the log; found {name!r}. Choose another name.")
        if all(hasattr(metric, part) for part in ("update", "compute", "reset")):
            given = MetricAdapter(metric, device)
            found[name] = _of_ranks(given, name, device) if current_group().distributed else given
        elif callable(metric):
            found[name] = Mean(metric)
        else:
            raise TypeError(
                f"metric {name!r} must be a function (outputs, batch) or have update, compute and reset; "
                f"found {type(metric).__name__}."
            )
    return found


def _of_ranks(given: MetricAdapter, name: str, device: torch.device) -> Metric:
    known = any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(given.metric).__mro__)
    return Synchronised(given, name) if known else GatheredMetric(given, device)


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
        self._found: list[Any] = []

    def __enter__(self) -> None:
        self._hook = self._model.register_forward_hook(lambda module, inputs, output: self._found.append(output))

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def clear(self) -> None:
        self._found.clear()

    def last(self) -> Any:
        """Return the output of the last call since `clear`."""
        if not self._found:
            raise LossesError(
                "the loss function must call model(...), since metrics use the outputs of the model; found no call. "
                "Call model(...) in the loss function, or remove the metrics."
            )
        return self._found[-1]


def joined(outputs: Sequence[Any]) -> Any:
    """Concatenate the outputs of batches along dim 0; tuples, lists and dicts element by element."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs)) if first.dim() else torch.stack(list(outputs))
    if isinstance(first, Mapping):
        return {key: joined([output[key] for output in outputs]) for key in first}
    if isinstance(first, (tuple, list)):
        parts = (joined(part) for part in zip(*outputs, strict=True))
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return list(outputs)


def accuracy(outputs: Tensor, batch: Any) -> Tensor:
    """Return for batches (x, y) a bool per sample: True if the largest output is that of its label."""
    return outputs.argmax(-1) == batch[1]
