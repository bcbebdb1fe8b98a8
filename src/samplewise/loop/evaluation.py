"""Evaluation and prediction: passes over a loader in eval mode, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import check_loader, concat, to_device
from samplewise.core.losses import Criterion, per_sample
from samplewise.core.means import WeightedMean
from samplewise.core.state import eval_mode, fork_rng
from samplewise.errors import BatchError, LossesError
from samplewise.loop.data.loader import DataPosition, ResumableLoader
from samplewise.loop.data.rng import derive_seed
from samplewise.loop.metrics import OutputRecorder, as_metrics, results
from samplewise.parallel.group import current_group, on_every_rank
from samplewise.step.step import Step

Forward = Callable[[nn.Module, Any], Any]  # (model, batch) -> outputs


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
        """Return the loss, Σ losses / Σ counts over all batches and ranks, and the metrics. Collective."""
        mean = WeightedMean(torch.float64)
        outputs = OutputRecorder(self._model)
        for metric in self._metrics.values():
            metric.reset()
        with self._eval_mode(), outputs:
            for batch in batches:
                outputs.clear()
                with self._step._precision.autocast(self._device):
                    losses, counts = per_sample(self._step.loss_fn(self._model, batch))
                check_one_per_sample(losses)
                mean.add(losses, counts)
                for metric in self._metrics.values():
                    metric.update(outputs.last("metrics use the outputs of the model", "remove the metrics"), batch)
        loss = mean.all_reduce(current_group()).value()
        # Broadcast from rank 0: bit-identical values, so that callbacks on all ranks decide alike.
        return current_group().broadcast_object({"loss": loss, **results(self._metrics)})

    def predict(self, loader: Iterable[Any], forward: Forward | None = None) -> Any:
        """Return the outputs of the model on the CPU, concatenated over all batches of the loader."""
        check_loader(loader)
        if not (forward is None or callable(forward)):
            raise TypeError(
                f"forward must be a function (model, batch) -> outputs; found {type(forward).__name__}. Pass for "
                "example lambda model, batch: model(batch[0])."
            )
        if self._step._sharded:  # each pass is a collective: a rank that has finished serves the others
            return on_every_rank(lambda: self._predict(loader, forward))
        return self._predict(loader, forward)

    def _predict(self, loader: Iterable[Any], forward: Forward | None) -> Any:
        found = []
        with self._eval_mode():
            for batch in loader:
                batch = to_device(batch, self._device)
                with self._step._precision.autocast(self._device):
                    outputs = self._call_model(batch) if forward is None else forward(self._model, batch)
                if outputs is None:
                    name = "the model" if forward is None else "forward"
                    raise TypeError(f"{name} must return the outputs of the model; found None. Add a return.")
                found.append(to_device(outputs, torch.device("cpu")))
        if not found:
            raise BatchError(
                "predict needs at least one batch; found none. Pass a list or a DataLoader that is not empty."
            )
        return concat(found)

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
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise LossesError(f"losses must be 1-D, one value per sample; found {found}. Use reduction='none'.")
