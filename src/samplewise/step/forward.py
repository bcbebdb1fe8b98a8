"""Losses and gradients of a microbatch, under the step's precision and memory budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from samplewise.core.batches import cut, length
from samplewise.core.criteria import Criterion
from samplewise.core.losses import LossFn, columns_of, per_sample
from samplewise.core.memory import bounded
from samplewise.core.snapshot import snapshot
from samplewise.distributed.strategy_base import ParallelStrategy
from samplewise.engine.backward import notifying
from samplewise.engine.checks import check_attached
from samplewise.engine.gradients import Gradients, accumulate, gradients_of
from samplewise.errors import LossesError, SamplesInteractError, SamplesMayInteractWarning
from samplewise.step.amp import MixedPrecision
from samplewise.step.parameters import TrainedParameters
from samplewise.transforms.stats import PerSample


class LossEvaluator:
    """Computes losses and per-sample gradients of microbatches for one model, loss function and set of trained
    parameters.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        trained: TrainedParameters,
        loss_fn: LossFn,
        precision: MixedPrecision,
        budget: int | None,
        interacting: str,
        strategy: ParallelStrategy,
        criterion: Criterion | None = None,
    ):
        """`criterion`: the criterion that `loss_fn` calls, if it is one."""
        self.modules = modules
        self.trained = trained
        self.loss_fn = loss_fn
        self.precision = precision
        self.budget = budget
        self.interacting = interacting
        self.strategy = strategy
        self.criterion = criterion
        self.model = modules[0]
        self.columns: dict[str, Tensor] | None = None  # columns returned with the last losses
        self.seconds = 0.0  # spent in forward passes of this window
        self.ready: Callable[[Tensor], None] | None = None  # called with each parameter whose `.grad` is complete
        self._coincidences: set[int] = set()  # graph structures in which a tensor has B rows only by coincidence
        self._bare = precision.name is None and budget is None  # skip the context managers, which cost microseconds

    @property
    def predictions(self) -> frozenset[str]:
        """Names of the columns that a criterion returns: see `prediction_columns`. Empty for other loss functions."""
        return frozenset() if self.criterion is None else self.criterion.predictions

    @predictions.setter
    def predictions(self, names: frozenset[str]) -> None:
        if self.criterion is not None:
            self.criterion.predictions = names

    def losses(self, microbatch: Any) -> tuple[Tensor, Tensor | None]:
        """Losses (B,), attached to the autograd graph, and counts (B,), or None if the loss function returns none."""
        started = perf_counter()
        if self._bare:
            result = self.loss_fn(self.model, microbatch)
        else:
            with (
                self.precision.autocast(self.trained.device),
                nullcontext() if self.budget is None else bounded(self.budget, *self.modules),
            ):
                result = self.loss_fn(self.model, microbatch)
        counts = None
        self.columns = None
        if isinstance(result, Tensor):
            losses = result
        else:
            losses, counts = per_sample(result)
        check_attached(losses)
        if losses is not result:
            self.columns = columns_of(result, losses)
            if self.columns is not None and self.criterion is None and get_proxy_mode() is not None:
                raise LossesError("a loss function that returns columns in addition to losses cannot be compiled")
        if self.precision.scales and losses.dtype is torch.float16:
            losses = losses.float()  # the loss scale is beyond the range of float16
        self.seconds += perf_counter() - started
        return losses, counts

    def gradients(self, losses: Tensor, microbatch: Any = None) -> Gradients:
        """Gradients of every sample, times the loss scale. `microbatch`: the microbatch of the losses, used to find out
        whether samples really interact.
        """
        scaled = losses * self.precision.scale if self.precision.scales else losses
        g = self.gradients_of(scaled, self.interacting)
        if self.interacting == "allow":
            return g
        if self._coincidences and g.structure_hash in self._coincidences:
            return self.gradients_of(scaled, interacting="allow")
        try:
            return _prepared(g)
        except (SamplesInteractError, SamplesMayInteractWarning) as doubt:
            if self._is_coincidence(microbatch):
                self._coincidences.add(g.structure_hash)
                return self.gradients_of(scaled, interacting="allow")
            if isinstance(doubt, SamplesMayInteractWarning):
                return self.gradients_of(scaled)
            raise

    def gradients_of(self, losses: Tensor, interacting: str = "refuse") -> Gradients:
        """Gradients of every sample, without the loss scale and without a check for interaction by coincidence."""
        if not self.strategy.sharded:
            return gradients_of(losses, self.trained.wanted(), self.modules, interacting=interacting)
        return gradients_of(losses, self.trained.wanted(), self.modules, False, "twice", interacting, sharded=True)

    def _is_coincidence(self, microbatch: Any) -> bool:
        """True if samples seem to interact only because an unrelated tensor has B rows (for example positional
        embeddings of B tokens). With B - 1 samples, the check then passes.
        """
        total = length(microbatch)
        if total is None or total < 3:
            return False
        restore = snapshot(*self.modules)
        try:
            _prepared(self.gradients_of(self.losses(cut(microbatch, 0, total - 1, total))[0]))
        except (SamplesInteractError, SamplesMayInteractWarning):
            return False
        finally:
            restore()
        return True

    def add_sum(self, losses: Tensor, weights: Tensor | None = None) -> None:
        """Accumulate Σ w × gradient, times the loss scale, into `.grad`: one ordinary backward pass."""
        scale = self.precision.scale
        scaled = torch.full_like(losses, scale) if weights is None else (weights * scale).to(losses.dtype)
        with self.strategy.summing(), notifying(self.trained.named.values(), self.ready):
            torch.autograd.backward(losses, scaled)

    def add_weighted(self, g: Gradients, weights: PerSample | None) -> None:
        """Accumulate Σ w × gradient into `.grad`, from per-sample gradients that are not used afterwards."""
        with self.strategy.summing():
            accumulate(g, weights, retain_graph=False, ready=self.ready)

    def add_mean(self, losses: Tensor, counts: Tensor | None) -> None:
        """Accumulate Σ gradient / Σ counts, times the loss scale, into `.grad`. counts=None: 1 for each sample."""
        scale = self.precision.scale
        if counts is None:
            torch.autograd.backward(losses, torch.full_like(losses, scale / len(losses)))
        else:
            torch.autograd.backward(losses, (scale / counts.sum()).to(losses.dtype).expand_as(losses))


def _prepared(g: Gradients) -> Gradients:
    """Prepare `g`; raise also if samples may interact, where the engine only warns."""
    if g.is_planned():
        return g
    with warnings.catch_warnings():
        warnings.simplefilter("error", SamplesMayInteractWarning)
        return g.prepare()
