"""Evaluation and prediction: passes over a loader in eval mode, without gradients. Metrics of an evaluation: functions
(outputs, batch) or (outputs, y), or objects with update, compute and reset.

Function metrics are averaged over samples: sums over all batches and ranks, divided once, never a mean of means. For an
object with update, compute and reset, outputs and targets of all ranks are gathered on every rank; torchmetrics objects
synchronize their own state instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from samplewise.core.batches import check_loader, concat, length, to_device
from samplewise.core.losses import Criterion, note_causes, per_sample
from samplewise.core.means import WeightedMean
from samplewise.core.state import eval_mode, fork_rng
from samplewise.errors import BatchError, LossesError
from samplewise.loop.data.loader import DataPosition, ResumableLoader
from samplewise.loop.data.rng import derive_seed
from samplewise.parallel import collectives
from samplewise.parallel.collectives import on_every_rank
from samplewise.step.step import Step
from samplewise.transforms.sums import sample_means

Forward = Callable[[nn.Module, Any], Any]  # (model, batch) -> outputs
TARGETS = ("y", "target", "targets", "label", "labels")  # arguments of metrics, and entries of batches
LOG_FIELDS = ("kind", "epoch", "update", "loss", "train_loss")
MetricFunction = Callable[[Any, Any], Any]  # (outputs, batch) or (outputs, y) -> one number per sample, or their mean


class Evaluator:
    """Evaluation of a step's model on its loss function and on metrics, and prediction of its outputs."""

    def __init__(
        self, step: Step, model: nn.Module, metrics: Mapping[str, Any], device: torch.device, seed: int
    ) -> None:
        self._step = step
        self._model = model
        self._metrics = as_metrics(metrics, device)
        self._device = device
        self._seed = seed
        self._loader: ResumableLoader | None = None

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield this rank's batches of epoch 0 of a loader, with the same random numbers in each call."""
        if self._loader is None:
            self._loader = ResumableLoader(loader, self._seed, in_use=True)
        self._loader.set_loader(loader)
        self._loader.seek(DataPosition())
        self._loader.prefetch(0)
        for batch, _ in self._loader.epoch(0):
            yield to_device(batch, self._device)

    def evaluate(self, batches: Iterable[Any]) -> dict[str, float]:
        """Return the loss, Σ losses / Σ counts over all batches and ranks, and the metrics. Collective. With
        aggregate=sw.per("sample"), it is the mean of the samples' means.
        """
        aggregate = self._step.config.aggregate
        mean = WeightedMean(torch.float64)
        outputs = OutputRecorder(self._model)
        for metric in self._metrics.values():
            metric.reset()
        with self._eval_mode(), outputs:
            for batch in batches:
                outputs.clear()
                try:
                    with self._step._precision.autocast(self._device):
                        losses, counts = per_sample(self._step.loss_fn(self._model, batch))
                    check_one_per_sample(losses)
                    if aggregate is not None and aggregate.unit == "sample":
                        losses, counts = sample_means(losses, counts, batch)
                except Exception as error:
                    note_causes(error, self._model, batch)
                    raise
                mean.add(losses, counts)
                for metric in self._metrics.values():
                    metric.update(outputs.last("metrics use the outputs of the model", "remove the metrics"), batch)
        loss = mean.all_reduce(collectives).value()
        # Broadcast from rank 0: bit-identical values, so that callbacks on all ranks decide alike.
        return collectives.broadcast_object({"loss": loss, **results(self._metrics)})

    def predict(self, loader: Iterable[Any], forward: Forward | None = None) -> Any:
        """Return the outputs of the model on the CPU, concatenated over all batches of the loader."""
        check_loader(loader)
        if not (forward is None or callable(forward)):
            raise TypeError(
                f"forward must be a function (model, batch) -> outputs; found {type(forward).__name__}. Pass for "
                "example lambda model, batch: model(batch[0])."
            )
        if not self._step._passes_alone:  # a rank that has finished serves the others
            return on_every_rank(lambda: self._predict(loader, forward))
        return self._predict(loader, forward)

    def _predict(self, loader: Iterable[Any], forward: Forward | None) -> Any:
        outputs_of_batches = []
        with self._eval_mode():
            for batch in loader:
                batch = to_device(batch, self._device)
                with self._step._precision.autocast(self._device):
                    outputs = self._call_model(batch) if forward is None else forward(self._model, batch)
                if outputs is None:
                    name = "the model" if forward is None else "forward"
                    raise TypeError(f"{name} must return the outputs of the model; found None. Add a return.")
                outputs_of_batches.append(to_device(outputs, torch.device("cpu")))
        if not outputs_of_batches:
            raise BatchError(
                "predict needs at least one batch; found none. Pass a list or a DataLoader that is not empty."
            )
        return concat(outputs_of_batches)

    def _call_model(self, batch: Any) -> Any:
        """Call the model as the loss function does. A batch without a target, x or (x,), gives model(x)."""
        loss_fn = self._step.loss_fn
        if isinstance(batch, Tensor):
            return self._model(batch)
        if isinstance(batch, (tuple, list)) and (len(batch) == 1 or isinstance(loss_fn, Criterion)):
            return self._model(batch[0])
        outputs = OutputRecorder(self._model)
        try:
            with outputs:
                loss_fn(self._model, batch)
        except Exception as error:
            raise BatchError(
                "predict runs the loss function to see how it calls the model; found "
                f"{type(error).__name__}: {error} in it. If the batches have no targets, pass the forward pass: "
                "predict(loader, forward=lambda model, batch: model(...))."
            ) from error
        return outputs.last("predict returns its outputs", "pass predict(loader, forward=...)")

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        """Eval mode, no_grad and seeded random numbers; modes and random state are restored on exit."""
        modules = [self._model]
        if isinstance(self._step.loss_fn, nn.Module):
            modules.append(self._step.loss_fn)
        with eval_mode(*modules), torch.no_grad(), fork_rng(derive_seed(self._seed)):
            yield

    def close(self) -> None:
        """Stop worker processes of the last loader."""
        if self._loader is not None:
            self._loader.close()


def check_one_per_sample(losses: Any) -> None:
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        shape = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise LossesError(f"losses must be 1-D, one value per sample; found {shape}. Use reduction='none'.")


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

    def last(self, purpose: str, remedy: str) -> Any:
        """Return the output of the last call since `clear`. The two texts are for the error if there was none."""
        if not self._outputs:
            raise LossesError(
                f"the loss function must call model(...), since {purpose}; found no call. Call model(...) in the loss "
                f"function, or {remedy}."
            )
        return self._outputs[-1]


def accuracy(outputs: Tensor, batch: Any) -> Tensor:
    """Return for batches (x, y) a bool per sample: True if the largest output is that of its label."""
    return outputs.argmax(-1) == batch[1]


# --- metrics ---------------------------------------------------------------------------------------------------------


class StatefulMetric(Protocol):
    """Metric with a state, such as one of torchmetrics."""

    def update(self, outputs: Any, target: Any, /) -> Any: ...
    def compute(self) -> Any: ...
    def reset(self) -> Any: ...


class Mean:
    """Mean over samples of a function (outputs, batch) or (outputs, y), which returns one number per sample, or the
    mean of the batch. It gets the target if its second argument has a name in `TARGETS`, otherwise the batch.
    """

    def __init__(self, function: Callable[[Any, Any], Any], name: str):
        self.function = function
        self.name = name
        argument = _second_argument(function)
        self._target = Target(f"metric {name!r}", argument) if argument in TARGETS else None
        self.reset()

    def update(self, outputs: Any, batch: Any) -> None:
        values = self._as_tensor(self.function(outputs, batch if self._target is None else self._target.of(batch)))
        values = values.to(torch.float32 if values.device.type == "mps" else torch.float64)  # MPS has no float64
        samples = length(batch) if values.dim() == 0 else values.numel()
        if samples is None:
            raise ValueError(
                f"metric {self.name!r} must return one number per sample if the number of samples in a batch is "
                "unknown; found one number. Return a tensor of shape (samples,)."
            )
        self._mean.add_sum(values * samples if values.dim() == 0 else values.sum(), samples)

    def _as_tensor(self, answer: Any) -> Tensor:
        """The answer of the function as a tensor; TypeError unless it is a tensor, an array or a number."""
        is_number = isinstance(answer, Real) and not isinstance(answer, bool)
        if not (isinstance(answer, Tensor) or is_number or getattr(answer, "ndim", 0) > 0):
            raise TypeError(
                f"metric {self.name!r} must return one number per sample in a tensor, or one number, the mean of the "
                f"batch; found {type(answer).__name__}. A function (outputs, batch) gets the whole batch, a function "
                "(outputs, y) the target."
            )
        values = torch.as_tensor(answer).detach()
        if values.dim() == 0 and not (values.is_floating_point() or values.dtype == torch.bool):
            raise ValueError(
                f"metric {self.name!r} must return one number per sample, or one float, the mean of the batch; found "
                f"the integer {values.item()}, as a sum or count is. Leave out .sum(), or use .float().mean()."
            )
        return values

    def compute(self) -> float:
        return self._mean.all_reduce(collectives).value()

    def reset(self) -> None:
        self._mean = WeightedMean(torch.float64)


class Target:
    """Target of batches, such as the second argument of a metric.

    owner: what needs it, for error messages
    argument: name of the entry that is used if a batch has several targets
    remedy: for batches without a target
    """

    def __init__(self, owner: str, argument: str, remedy: str = ""):
        self._owner = owner
        self._argument = argument
        self._remedy = remedy or "Use a function (outputs, batch), or an object with update(outputs, batch)."

    def of(self, batch: Any) -> Any:
        """The entry with a name in `TARGETS`; for other tuples and lists (x, y, ...) the second element."""
        if isinstance(batch, Mapping):
            named = {name: batch[name] for name in TARGETS if name in batch}
        else:
            named = {name: getattr(batch, name) for name in TARGETS if hasattr(batch, name)}
        if self._argument in named:
            return named[self._argument]
        if len(named) == 1:
            return next(iter(named.values()))
        if not named and isinstance(batch, (tuple, list)) and len(batch) > 1:
            return batch[1]
        raise BatchError(
            f"{self._owner} needs the target of a batch: the second element of (x, y, ...), or one entry named "
            f"{', '.join(TARGETS[:-1])} or {TARGETS[-1]}; found {_kind(batch, named)}. {self._remedy}"
        )


def _kind(batch: Any, named: Mapping[str, Any]) -> str:
    kind = f"a {type(batch).__name__}"
    if named:
        return f"{kind} with {' and '.join(map(repr, named))}"
    if isinstance(batch, Mapping):
        return f"{kind} with the keys {', '.join(map(repr, batch))}"
    return f"{kind} of {len(batch)}" if isinstance(batch, (tuple, list)) else kind


def _second_argument(function: Callable[..., Any]) -> str:
    """Name of the second positional argument of a function; empty if it has none or its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of functions written in C
        return ""
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return positional[1] if len(positional) > 1 else ""


class ObjectMetric:
    """Adapter for an object with update, compute and reset, such as a torchmetrics metric, over all ranks.

    Its `update` is called with (outputs, target), or with (outputs, batch) if it has an argument `batch`. With several
    ranks, metrics of torchmetrics synchronize their state; any other object is updated in `compute`, with the batches
    of all ranks, on each rank.
    """

    def __init__(self, metric: Any, name: str, device: torch.device):
        self._metric = metric.to(device) if hasattr(metric, "to") else metric
        self._name = name
        self._device = device
        self._wants_batch = "batch" in inspect.signature(metric.update).parameters
        self._target = Target(f"metric {name!r}", _second_argument(metric.update))
        synchronizes = any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in type(metric).__mro__)
        self._gathers = collectives.size() > 1 and not synchronizes
        self._batches: list[Any] = []  # (outputs, targets) on the CPU, if they will be gathered
        self._has_data = False

    def update(self, outputs: Any, batch: Any) -> None:
        targets = batch if self._wants_batch else self._target.of(batch)
        self._has_data = True
        if self._gathers:
            self._batches.append(to_device((outputs, targets), torch.device("cpu")))
        else:
            self._metric.update(outputs, targets)

    def compute(self) -> Any:
        if self._gathers:
            for of_ranks in zip_longest(*collectives.all_gather_object(self._batches)):
                for batch in of_ranks:
                    if batch is not None:
                        self._metric.update(*to_device(batch, self._device))
        elif collectives.size() > 1:
            empty = int(collectives.all_reduce_scalars(not self._has_data)[0])
            if empty:
                raise BatchError(
                    f"every rank must have at least one batch for metric {self._name!r}, since torchmetrics cannot "
                    f"synchronize a metric without data; found {empty} of {collectives.size()} ranks without a batch. "
                    "Use more samples, or a function (outputs, batch)."
                )
        return self._metric.compute()

    def reset(self) -> None:
        self._batches = []
        self._has_data = False
        self._metric.reset()


Metric = Mean | ObjectMetric


def as_metrics(metrics: Mapping[str, Any], device: torch.device) -> dict[str, Metric]:
    """Wrap the metrics of a Trainer by name."""
    wrapped: dict[str, Metric] = {}
    for name, metric in metrics.items():
        if name in LOG_FIELDS:
            raise ValueError(f"a metric must not use a field name of the log; found {name!r}. Choose another name.")
        if all(hasattr(metric, part) for part in ("update", "compute", "reset")):
            wrapped[name] = ObjectMetric(metric, name, device)
        elif callable(metric):
            wrapped[name] = Mean(metric, name)
        else:
            raise TypeError(
                f"metric {name!r} must be a function (outputs, batch) or (outputs, y), or have update, compute and "
                f"reset; found {type(metric).__name__}."
            )
    return wrapped


def results(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Compute all metrics. Results that are dicts or lists are flattened: name/part, name/0, name/1."""
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        values |= _flatten(name, metric.compute())
    return values


def _flatten(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Tensor):
        value = value.tolist()
    if not isinstance(value, (Mapping, list, tuple)):
        return {name: float(value)}
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {key: number for part, item in parts for key, number in _flatten(f"{name}/{part}", item).items()}
