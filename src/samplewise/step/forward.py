"""Losses and gradients of a microbatch, under the step's precision and memory budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from samplewise.core import observation
from samplewise.core.batches import copied, cut, length
from samplewise.core.closure_state import CallSnapshot
from samplewise.core.losses import Criterion, LossFn, columns_of, note_causes, per_sample
from samplewise.core.memory import count_saved_bytes
from samplewise.core.text import plural
from samplewise.engine.arguments import check_attached
from samplewise.engine.backward import accumulate_sum, notify_ready
from samplewise.engine.deferred_checks import current_checks
from samplewise.engine.gradients import (
    Gradients,
    accumulate,
    gradients_of,
    is_planned,
    prepare,
    structure_hash,
    track_terms,
)
from samplewise.engine.graph.hook_registry import note_hooks
from samplewise.engine.ownership.independence import ALLOW
from samplewise.errors import LossesError, SamplesInteractError, SamplesMayInteractWarning
from samplewise.parallel.mode import Parallel
from samplewise.step.config import Precision
from samplewise.step.parameters import OpenWindowGuard, TrainedParameters
from samplewise.step.policy import UpdatePolicy
from samplewise.transforms.stats import PerSample

Means = Callable[[Tensor, Tensor | None, Any], tuple[Tensor, Tensor | None]]


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
        ranks: Parallel,
        policy: UpdatePolicy,
        guard: OpenWindowGuard,
        criterion: Criterion | None = None,
        means: Means | None = None,
    ):
        """guard: watches calls of the loss function until `unwatch`. criterion: what `loss_fn` calls, if it is one.
        means: function of losses, counts and microbatch that divides the first two; None: they stay as returned.
        """
        self.modules = modules
        self.trained = trained
        self.loss_fn = loss_fn
        self.precision = precision
        self.budget = budget
        self.interacting = interacting
        self.ranks = ranks
        self.policy = policy
        self.criterion = criterion
        self.means = means
        self.model = modules[0]
        self.columns: dict[str, Tensor] | None = None  # columns returned with the last losses
        self.seconds = 0.0  # spent in forward passes of this window
        self.guard: OpenWindowGuard | None = guard  # in the first window: the loss function must not change `.grad`
        self.ready: Callable[[Tensor], None] | None = None  # called with each parameter whose `.grad` is complete
        self._copies_large = True  # whether snapshots copy large tensors: until no call has changed a tensor
        self._coincidences: set[int] = set()  # graph structures in which a tensor has B rows only by coincidence
        self._bare = precision.name is None and budget is None  # skip the context managers, which cost microseconds

    def unwatch(self) -> None:
        """Trust the loss function: it has not changed `.grad` in the first window."""
        self.guard = None

    @contextmanager
    def exchanging(self, ready: Callable[[Tensor], None] | None) -> Iterator[None]:
        """Context manager: `ready` is called with each parameter whose `.grad` is complete."""
        self.ready = ready
        try:
            yield
        finally:
            self.ready = None

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
        note_hooks(() if self.ranks.sharded else self.modules)  # `harmless_hooks` has those of sharded models
        counts = None
        self.columns = None
        try:
            if self._bare and self.guard is None and not observation.observers:
                result = self.loss_fn(self.model, microbatch)
            else:
                with (
                    self.precision.autocast(self.trained.device),
                    nullcontext() if self.budget is None else count_saved_bytes(*self.modules, budget=self.budget),
                    nullcontext() if self.guard is None else self.guard.watching(),
                    observation.hidden() if observation.observers else nullcontext(),
                ):
                    result = self.loss_fn(self.model, microbatch)
            if isinstance(result, Tensor):
                losses = result
            else:
                losses, counts = per_sample(result)
            check_attached(losses)
        except Exception as error:
            note_causes(error, self.model, microbatch)
            raise
        if losses is not result:
            self.columns = columns_of(result, losses)
            if self.columns is not None and self.criterion is None and get_proxy_mode() is not None:
                raise LossesError("a loss function that returns columns in addition to losses cannot be compiled")
        if self.precision.scales and losses.dtype is torch.float16:
            losses = losses.float()  # the loss scale is beyond the range of float16
        if self.means is not None:
            losses, counts = self.means(losses, counts, microbatch)
        self.seconds += perf_counter() - started
        return losses, counts

    def saved_state(self, batches: Sequence[Any] = ()) -> Callable[[], None]:
        """Save what calls of the loss function with these batches can change: see `CallSnapshot`. Returns a function
        that restores it.
        """
        state = CallSnapshot([self.loss_fn], self.modules, batches, self._copies_large)

        def restore() -> None:
            self._copies_large = state.restore()

        return restore

    def saved_state_and_sums(self, batches: Sequence[Any]) -> Callable[[], None]:
        """As `saved_state`, with the gradient sums."""
        restore_state = self.saved_state(batches)
        sums = {name: gradient.clone() for name, gradient in self.trained.local_gradients().items()}

        def restore() -> None:
            restore_state()
            self.trained.clear()
            self.trained.set_gradients(sums)

        return restore

    def check_repeated(self, losses: Tensor, before: Tensor) -> None:
        """Raise LossesError if a second call of the loss function, after `saved_state` was restored, has given other
        losses than the first call.
        """
        checks = current_checks()
        if checks is None:
            self._compare_losses(losses.detach(), before)
        else:
            checks.add(self._compare_losses, losses.detach(), before)

    def _compare_losses(self, losses: Tensor, before: Tensor) -> None:
        if losses.shape == before.shape and torch.equal(losses, before):
            return
        cast = None if self.precision.name is None else AUTOCAST_DTYPES[self.precision.name]
        rounding = torch.finfo(cast or losses.dtype).eps ** 0.75
        difference = f"{plural(len(before), 'loss', 'losses')} and then {len(losses)}"
        if losses.shape == before.shape:
            off = (losses - before).abs()
            if bool((off <= rounding * before.abs().max()).all()):
                return
            row = int(off.argmax())
            difference = f"the loss {before[row].item():.6g} and then {losses[row].item():.6g} for sample {row}"
        raise LossesError(
            "a window whose transforms compare all samples is computed twice if it has several microbatches, and "
            f"loss_fn must return the same losses both times; found {difference} of a microbatch. Look for iterators, "
            "files, clocks or other state that is not in Python variables; or use one microbatch per window."
        )

    def gradients(self, losses: Tensor, microbatch: Any = None, checked: bool = False) -> Gradients:
        """Gradients of every sample, times the loss scale. `microbatch`: the microbatch of the losses, used to find out
        whether samples really interact. `checked`: the losses are known to be finite.
        """
        scaled = losses * self.precision.scale if self.precision.scales else losses
        g = self.gradients_of(scaled, self.interacting, checked and scaled is losses)
        if self.interacting == "allow":
            return g
        if self._coincidences and structure_hash(g) in self._coincidences:
            return self.gradients_of(scaled, interacting="allow")
        try:
            return g if is_planned(g) else _analyze(g)
        except (SamplesInteractError, SamplesMayInteractWarning) as doubt:
            if self._is_coincidence(microbatch):
                self._coincidences.add(structure_hash(g))
                return self.gradients_of(scaled, interacting="allow")
            if isinstance(doubt, SamplesMayInteractWarning):
                return self.gradients_of(scaled)
            if not self.policy.allows_interaction:
                raise SamplesInteractError(doubt.finding, [r for r in doubt.remedies if r != ALLOW]) from None
            raise

    def gradients_of(self, losses: Tensor, interacting: str = "refuse", checked: bool = False) -> Gradients:
        """Gradients of every sample, without the loss scale and without a check for interaction by coincidence."""
        parameters = self.trained.trainable()
        if self.ranks.sharded:  # "twice" holds the gradient of one module at a time
            g = gradients_of(losses, parameters, self.modules, False, "twice", interacting, sharded=True)
        else:
            g = gradients_of(losses, parameters, self.modules, interacting=interacting, checked=checked)
        if self.policy.term_limit is not None:
            track_terms(g)
        return g

    def _is_coincidence(self, microbatch: Any) -> bool:
        """True if samples seem to interact only because an unrelated tensor has B rows (for example positional
        embeddings of B tokens). With B - 1 samples, the check then passes.
        """
        total = length(microbatch)
        if total is None or total < 3:
            return False
        restore = self.saved_state()
        try:
            g = self.gradients_of(self.losses(copied(cut(microbatch, 0, total - 1, total)))[0])
            if not is_planned(g):
                _analyze(g)
        except Exception:  # also if an entry that is not per sample, with B rows, cannot be used without the last one
            return False
        finally:
            restore()
        return True

    def add_sum(self, losses: Tensor, weights: Tensor | None = None) -> None:
        """Accumulate Σ w × gradient, times the loss scale, into `.grad`: one ordinary backward pass."""
        scale = self.precision.scale
        scaled = torch.full_like(losses, scale) if weights is None else (weights * scale).to(losses.dtype)
        with self.ranks.summing(), notify_ready(self.trained.named.values(), self.ready):
            accumulate_sum(losses, scaled)

    def add_weighted(self, g: Gradients, weights: PerSample | None) -> None:
        """Accumulate Σ w × gradient into `.grad`, from per-sample gradients that are not used afterwards."""
        with self.ranks.summing():
            accumulate(g, weights, retain_graph=False, ready=self.ready, apart=self.policy.term_limit is not None)

    def add_mean(self, losses: Tensor, count_sum: Tensor | int) -> None:
        """Accumulate Σ gradient / Σ counts, times the loss scale, into `.grad`."""
        total: Tensor | float = count_sum
        if isinstance(count_sum, Tensor) and count_sum.is_cpu:  # operations on numbers take less time
            total = count_sum.item() or count_sum  # a tensor of 0 gives infinity, which the finite check finds
        weight = self.precision.scale / total
        if isinstance(weight, Tensor):
            accumulate_sum(losses, weight.to(losses.dtype).expand_as(losses))
        else:
            accumulate_sum(losses, torch.full_like(losses, weight))


def _analyze(g: Gradients) -> Gradients:
    """Analyze the graph of `g`; raise also if samples may interact, where the engine only warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SamplesMayInteractWarning)
        return prepare(g)


# --- mixed precision --------------------------------------------------------------------------------------------------

AUTOCAST_DTYPES: dict[Precision, torch.dtype | None] = {
    "32": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
GROWTH_INTERVAL = 2000  # number of updates without overflow before the loss scale is doubled


class MixedPrecision:
    """Precision of a step: autocast dtype and loss scale. None: no autocast, no loss scale. Scales are powers of two,
    so that scaling is exact. The loss scale keeps float16 gradients from underflowing.
    """

    def __init__(self, name: Precision | None):
        self.name = name
        self.scales = name == "16-mixed"
        self.scale = 2.0**16 if self.scales else 1.0
        self._since_change = 0

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.name is None:
            return nullcontext()
        dtype = AUTOCAST_DTYPES[self.name]
        return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)

    def record_overflow(self) -> None:
        """Halve the loss scale after a skipped update."""
        if self.scales:
            self.scale /= 2
            self._since_change = 0

    def record_success(self) -> None:
        """Count an applied update; double the loss scale after GROWTH_INTERVAL of them."""
        if not self.scales:
            return
        self._since_change += 1
        if self._since_change == GROWTH_INTERVAL:
            self.scale *= 2
            self._since_change = 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "since_change": self._since_change}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = state["scale"]
        self._since_change = state["since_change"]
