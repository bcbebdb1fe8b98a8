"""What is measured in validation: functions of (outputs, batch), or objects with update, compute and reset.

How batches combine: sums over samples, divided once; never a mean of means. Over ranks: the same. What an object with
update, compute and reset needs is gathered on all ranks, unless it is one of torchmetrics', which do that themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from samplewise import ranks
from samplewise.batches import length
from samplewise.errors import BatchError, LossesError
from samplewise.loop.devices import moved

TAKEN = ("kind", "epoch", "update", "loss", "train_loss")


class Quotient:
    """Σ values / Σ counts, in float64 and on the device of the values: whatever is added, no device is waited for."""

    def __init__(self) -> None:
        self._total: Tensor | float = 0.0
        self._count: Tensor | int = 0

    def add(self, values: Tensor, counts: Tensor | None = None) -> None:
        if not isinstance(values, Tensor) or values.dim() != 1:
            found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise LossesError(f"losses must be 1-D, one value per sample; found {found}. Use reduction='none'.")
        self.add_sum(_wide(values).sum(), len(values) if counts is None else _wide(counts).sum())

    def add_sum(self, total: Tensor, count: Tensor | int) -> None:
        self._total, self._count = self._total + total, self._count + count

    def value(self) -> float:
        """Of all ranks, which meet for it."""
        total, count = ranks.meet(self._total, self._count)
        return total / count if count else float("nan")


def _wide(values: Tensor) -> Tensor:
    """Half precision would stop counting at a few hundred. Apple's devices know no float64."""
    return values.detach().to(torch.float32 if values.device.type == "mps" else torch.float64)


class Mean:
    """The mean over samples of what a function returns for a batch: one number per sample, or the batch's mean."""

    def __init__(self, function: Callable[[Any, Any], Any]):
        self.function, self._sums = function, Quotient()

    def update(self, outputs: Any, batch: Any) -> None:
        found = _wide(torch.as_tensor(self.function(outputs, batch)))
        samples = length(batch) if found.dim() == 0 else found.numel()
        if samples is None:
            raise ValueError(
                "a metric must return one number per sample for batches that cannot be cut; found one number."
            )
        self._sums.add_sum(found * samples if found.dim() == 0 else found.sum(), samples)

    def compute(self) -> float:
        return self._sums.value()

    def reset(self) -> None:
        self._sums = Quotient()


class Given:
    """Somebody else's metric, such as torchmetrics': fed with (outputs, target) of batches (x, y); or with the whole
    batch, if its `update` asks for `batch`.
    """

    def __init__(self, metric: Any, device: torch.device):
        self.metric = metric.to(device) if hasattr(metric, "to") else metric
        self._whole = "batch" in inspect.signature(metric.update).parameters

    def update(self, outputs: Any, batch: Any) -> None:
        self.metric.update(outputs, self.wanted(batch))

    def wanted(self, batch: Any) -> Any:
        """What it is fed with, beside the outputs."""
        if not self._whole and not (isinstance(batch, (tuple, list)) and len(batch) > 1):
            raise TypeError(
                "a metric with update, compute and reset is fed with (outputs, y) of batches (x, y); found a "
                f"{type(batch).__name__}. Give it a method update(outputs, batch) that takes out what it needs."
            )
        return batch if self._whole else batch[1]

    def compute(self) -> Any:
        return self.metric.compute()

    def reset(self) -> None:
        self.metric.reset()


class Gathered:
    """One that does not know of other ranks: it sees on each what all have, batch by batch, when it is asked."""

    def __init__(self, given: Given, device: torch.device):
        self._given, self._device, self._seen = given, device, list[Any]()

    def update(self, outputs: Any, batch: Any) -> None:
        self._seen.append(moved((outputs, self._given.wanted(batch)), torch.device("cpu")))

    def compute(self) -> Any:
        for together in zip_longest(*ranks.everyone(self._seen)):
            for seen in together:
                if seen is not None:
                    self._given.metric.update(*moved(seen, self._device))
        return self._given.compute()

    def reset(self) -> None:
        self._seen = []
        self._given.reset()


class Synchronised:
    """One that talks to the other ranks by itself, as torchmetrics' do; if all have something to say."""

    def __init__(self, given: Given, name: str):
        self._given, self._name, self._fed = given, name, False

    def update(self, outputs: Any, batch: Any) -> None:
        self._given.update(outputs, batch)
        self._fed = True

    def compute(self) -> Any:
        empty = int(ranks.meet(not self._fed)[0])
        if empty:
            raise BatchError(
                f"every rank must have a batch of its own for metric {self._name!r}, since torchmetrics cannot put "
                f"together what some lack; found {empty} of {ranks.size()} ranks without one. Use more samples, or a "
                "function (outputs, batch)."
            )
        return self._given.compute()

    def reset(self) -> None:
        self._fed = False
        self._given.reset()


Metric = Mean | Given | Gathered | Synchronised


def as_metrics(metrics: Mapping[str, Any], device: torch.device) -> dict[str, Metric]:
    found: dict[str, Metric] = {}
    for name, metric in metrics.items():
        if name in TAKEN:
            raise ValueError(f"a metric must have a name of its own; found {name!r}, which the log uses itself.")
        if all(hasattr(metric, part) for part in ("update", "compute", "reset")):
            found[name] = _of_ranks(Given(metric, device), name, device) if ranks.active() else Given(metric, device)
        elif callable(metric):
            found[name] = Mean(metric)
        else:
            raise TypeError(
                f"metric {name!r} must be a function (outputs, batch) or have update, compute and reset; "
                f"found {type(metric).__name__}."
            )
    return found


def _of_ranks(given: Given, name: str, device: torch.device) -> Metric:
    known = any(kind.__module__.partition(".")[0] == "torchmetrics" for kind in type(given.metric).__mro__)
    return Synchronised(given, name) if known else Gathered(given, device)


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """A metric that has several results gets a name for each: name/part, name/0, name/1."""
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


class Outputs:
    """While open, notes what the model returns when the loss function calls it."""

    def __init__(self, model: nn.Module):
        self._model, self._found = model, list[Any]()

    def __enter__(self) -> None:
        self._hook = self._model.register_forward_hook(lambda module, inputs, output: self._found.append(output))

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def clear(self) -> None:
        self._found.clear()

    def last(self) -> Any:
        """Of this batch."""
        if not self._found:
            raise LossesError(
                "metrics are given what the model returns; found that the loss function never called model(...). Call "
                "it there, or leave the metrics out."
            )
        return self._found[-1]


def joined(outputs: Sequence[Any]) -> Any:
    """The outputs of batches as those of one."""
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
    """Of batches (x, y): which samples have their label on top."""
    return outputs.argmax(-1) == batch[1]
