"""Apply an update: unscale → noise → divide → finite check → max_grad_norm → optimizer → scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplewise.core import observation
from samplewise.core.state import Buffers
from samplewise.engine.deferred_checks import DeferredChecks
from samplewise.errors import NonFiniteLossError, ParameterError, SamplewiseError
from samplewise.parallel import collectives
from samplewise.parallel.mode import Parallel
from samplewise.step.config import StepConfig
from samplewise.step.forward import MixedPrecision
from samplewise.step.nonfinite import (
    NO_DENOMINATOR,
    SchedulerStep,
    SkipFlag,
    problem_of,
    problem_of_checks,
    problem_of_gradients,
    problem_of_losses,
    supports_flag,
    supports_undo,
)
from samplewise.step.parameters import TrainedParameters
from samplewise.step.schedules import SampleScheduler
from samplewise.step.sizes import WindowSizes
from samplewise.step.update import Outcome, Update
from samplewise.step.window import Counters, Window
from samplewise.transforms.stats import SampleStats, cat, denominator


class UndecidedUpdate(NamedTuple):
    """Update that is counted as applied until the flag of the device is read."""

    flag: SkipFlag
    scheduled: SchedulerStep | None  # None without a scheduler
    samples: int
    microbatches: int


class UpdateApplier:
    """Applies the updates of complete windows. Errors about a window are raised before parameters change."""

    def __init__(
        self,
        config: StepConfig,
        trained: TrainedParameters,
        optimizer: Any,
        scheduler: Any,
        precision: MixedPrecision,
        ranks: Parallel,
        counters: Counters,
        buffers: Buffers,
        sizes: WindowSizes,
    ):
        self.config = config
        self.sizes = sizes
        self.trained = trained
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.precision = precision
        self.ranks = ranks
        self.counters = counters
        self._buffers = buffers
        self._checks = config.checks_finite
        self._policy = config.policy
        self._undecided: UndecidedUpdate | None = None
        # The loss scale of the next forward pass depends on the outcome, which must then be known at once.
        can_flag = supports_flag(optimizer) and supports_undo(scheduler)
        self._may_flag = can_flag and config.on_nonfinite != "ignore" and not precision.scales

    def apply(self, window: Window) -> Update:
        """Change the parameters by the update of a window, and return its results."""
        started = perf_counter()
        if self._undecided is not None:
            self.settle()
        outcome = self._change_parameters(window)
        if window.config.transforms.states and (not outcome.skipped or self._is_empty(window)):
            self._commit(window)
        if outcome.skipped:
            self.trained.clear()
            self._buffers.restore()
        elif outcome.flag is not None:
            self._buffers.restore_unless(outcome.flag.finite)
        counters = self.counters
        samples = window.samples if window.totals is None else window.totals.samples
        self._policy.after_apply(window.parts)
        hidden = not self._policy.visible
        update = Update(counters.updates, samples, outcome, window.parts, window.columns, window.totals, hidden=hidden)
        counters.samples += samples - window.samples  # those of other ranks; this rank's are counted already
        if hidden:  # sizes of draws are private, also in checkpoints
            counters.samples = 0
            counters.microbatches = 0
        if outcome.skipped:
            counters.skipped += 1
        else:
            counters.updates += 1
        if outcome.flag is not None:
            self._undecided = UndecidedUpdate(outcome.flag, outcome.scheduled, samples, len(window.parts))
        update.phases = {
            "forward": window.forward_seconds,
            "gradients": window.seconds - window.forward_seconds,
            "optimizer": perf_counter() - started,
        }
        window.begun = False
        if observation.observers and not outcome.skipped and not hidden:
            self._report(window)
        self.finish(update)
        return update

    def finish(self, update: Update) -> None:
        """Adapt learning rate and size of the next update, after the counters include this one. Collective."""
        self.follow_samples()
        self.sizes.record(update)

    def follow_samples(self) -> None:
        """Set the learning rate of a schedule by samples, between two windows. Samples of skipped updates count."""
        if isinstance(self.scheduler, SampleScheduler):
            self.scheduler.seek(self.counters.samples)

    def step_scheduler(self) -> None:
        """Step a scheduler that is stepped once per update."""
        if not (self.scheduler is None or isinstance(self.scheduler, SampleScheduler)):
            self.scheduler.step()

    def _report(self, window: Window) -> None:
        """Notify observers of the weights of the window's samples."""
        totals = window.totals
        divisor = window.config.constant_divisor or (
            denominator(window.parts) if totals is None else totals.denominators
        )
        for observer in observation.observers:
            observer.on_step(self.optimizer, [part.denominators for part in window.parts], divisor, totals is not None)

    def settle(self) -> None:
        """Read the flag of the last update, if the device decided whether to apply it. If it was skipped, correct
        optimizer, scheduler and counters; raise if it may not be skipped, unless reading the update has raised already.
        """
        last = self._undecided
        self._undecided = None
        if last is None or last.flag.applied:
            return
        last.flag.drop_created_state()
        if last.scheduled is not None:
            last.scheduled.undo()
        self.counters.updates -= 1
        reported = last.flag.reported
        try:
            self.counters.skipped += last.flag.skipped
        except SamplewiseError:
            self.counters.samples -= last.samples
            self.counters.microbatches -= last.microbatches
            if isinstance(self.scheduler, SampleScheduler):
                self.scheduler.step(-last.samples)
            if not reported:
                raise

    def forget_undecided(self) -> None:
        """Do not correct the counters for the last update: they are replaced."""
        self._undecided = None

    def _change_parameters(self, window: Window) -> Outcome:
        """The sequence of an update."""
        rates = self.rates()
        if window.failure is not None:
            return self._skip(window.failure, rates)
        if window.config.transforms.drops and self._is_empty(window):
            return self._skip_empty(window, rates)
        self.divide(window)
        flag = None
        norms = None
        if self._checks:
            unchecked = window.parts if window.totals is None else []  # totals over ranks are checked already
            values = self._values_to_check(unchecked, window)
            norms = self._norms(values)
            # States of transforms change if the update is made, which must then be known at once.
            if window.totals is None and self.flags and not window.config.transforms.states:
                flag = self._flag(window, norms, values)
            elif not norms.finite():
                problem = self._problem(norms, unchecked, window.checks)
                if problem is not None:
                    return self._skip(problem, rates)
        max_grad_norm = window.config.max_grad_norm
        if max_grad_norm is not None:
            norms = norms or self._norms()
            self._clip(norms, max_grad_norm)
        scheduled = None
        try:
            if flag is None:
                self.optimizer.step()
                self.step_scheduler()
            else:  # both steps can be undone if the device has skipped the update
                flag.step(self.optimizer)
                if not (self.scheduler is None or isinstance(self.scheduler, SampleScheduler)):
                    scheduled = SchedulerStep(self.optimizer, self.scheduler)
        finally:
            self.ranks.reshard()
        if self.precision.scales:
            self.precision.record_success()
        norm = self._late_norm() if norms is None else norms.norm
        return Outcome(False, rates, norm, flag, scheduled, norm_is_known=norms is not None)

    def _flag(self, window: Window, norms: GradNorms, values: Sequence[Tensor]) -> SkipFlag:
        """Flag of the update before it is clipped. `values`: besides the gradients, those that must be finite."""
        if window.config.max_grad_norm is not None:
            values = [*values, norms.norm()]  # if its squares overflow, gradients cannot be clipped
        return SkipFlag(self.trained.named_gradients(), values, window.parts, window.checks, self.config.skips)

    def _skip(self, problem: Exception, rates: list[Any]) -> Outcome:
        """Skip the update because of a non-finite value, or raise it."""
        if not self.config.skips(problem):
            raise problem
        self.precision.record_overflow()
        return Outcome(True, rates, lambda: torch.tensor(torch.nan))

    def _is_empty(self, window: Window) -> bool:
        """True if the denominator is 0, as when all samples of the window were dropped, on all ranks."""
        return window.failure is None and not (
            denominator(window.parts) if window.totals is None else window.totals.denominators
        )

    def _skip_empty(self, window: Window, rates: list[Any]) -> Outcome:
        """Skip an update of which nothing is left. If no sample was finite, the model may be the reason: as without a
        transform that drops samples, this is an error, which may be skipped. Collective.
        """
        norms = cat([part.unscaled_norms for part in window.parts])
        counts: list[Any] = [any(part.dropped is not None for part in window.parts), norms.isfinite().any()]
        dropped, finite = collectives.all_reduce_scalars(*counts) if self.ranks.exchanges else counts
        if not dropped:
            return self._skip(NonFiniteLossError(NO_DENOMINATOR.format(total=0)), rates)
        if not finite:
            problem = problem_of_losses(cat([part.losses for part in window.parts]))
            return self._skip(problem or problem_of_gradients("of every sample"), rates)
        return Outcome(True, rates, lambda: torch.tensor(torch.nan))

    def _commit(self, window: Window) -> None:
        """Change the states of transforms by the samples of the update, of all ranks. Collective."""
        for state in window.config.transforms.states:
            values = cat([state.values(part) for part in window.parts])
            if self.ranks.exchanges:
                values = torch.cat(collectives.all_gather_tensors(values.double()))
            state.commit(values)

    def rates(self) -> list[Any]:
        """Current learning rate of each of the optimizer's parameter groups."""
        rates = []
        for group in self.optimizer.param_groups:
            rate = group["lr"]
            rates.append(rate.clone() if isinstance(rate, Tensor) else rate)
        return rates

    def prepare(self, window: Window) -> None:
        """Divide and clip the gradients as the optimizer will see them, without the finite check."""
        self.divide(window)
        self.clip(window)

    def clip(self, window: Window) -> None:
        """Clip the divided gradients to `max_grad_norm`."""
        if window.config.max_grad_norm is not None:
            self._clip(self._norms(), window.config.max_grad_norm)

    @property
    def flags(self) -> bool:
        """True if a non-finite update is skipped by a flag on the device, without a host sync."""
        return self._may_flag and self.trained.device.type != "cpu"

    def divide(self, window: Window) -> None:
        """Divide the sums by loss scale and denominator. Transforms of the sum, such as noise, act after unscaling and
        before the division by the denominator.
        """
        scale = self.precision.scale
        on_sum = window.config.transforms.on_sum
        if on_sum:
            self.trained.fill()  # noise is added to every parameter, also to those that the loss does not reach
            torch._foreach_div_(self.trained.gradients(), scale)
            scale = 1.0
            for transform in on_sum:
                self.ranks.transform_sum(transform, self.trained.gradients(), self.trained.owned.values())
        self._policy.before_apply(self.trained)  # the sums are final: a private one is logged before it is used
        if window.divided and scale == 1:
            return
        total = None if window.totals is None else window.totals.denominators
        constant = window.config.constant_divisor
        divisor = 1 if window.divided else constant or self._policy.divisor(window.parts, total)
        gradients = self.trained.gradients()
        if gradients:
            torch._foreach_div_(gradients, divisor * scale)

    def _clip(self, norms: GradNorms, max_grad_norm: float) -> None:
        """Clip the update's gradient to `max_grad_norm`, with the formula of torch.nn.utils.clip_grad_norm_."""
        factor = (max_grad_norm / (norms.norm() + 1e-6)).clamp(max=1)
        torch._foreach_mul_(self.trained.gradients(), factor)

    def _norms(self, values: Sequence[Tensor] = ()) -> GradNorms:
        """Norms of the gradients and of other tensors."""
        return GradNorms(self.trained.gradients(), values, self.ranks)

    def _values_to_check(self, parts: Sequence[SampleStats], window: Window) -> list[Tensor]:
        """Values besides the gradients that must be finite: losses, those of deferred checks, and values that are
        infinite if the denominator is not positive and finite, or a count is negative.
        """
        values = [] if window.checks is None else window.checks.values
        counted = False
        for part in parts:
            values.append(part.kept_losses)
            counted = counted or part.counts is not None or part.shares is not None
        if counted:
            total = torch.as_tensor(denominator(parts))
            least = [part.counts.min() for part in parts if part.counts is not None]
            if total.is_cpu:  # numbers are read at once, in less time than operations on tensors take
                valid = 0 < total.item() < math.inf and all(count.item() >= 0 for count in least)
                return values if valid else [*values, torch.tensor(math.inf)]
            values.append(torch.where(total > 0, total, math.inf))
            values += [torch.where(count < 0, math.inf, count) for count in least]
        return values

    def _problem(
        self, norms: GradNorms, parts: Sequence[SampleStats], checks: DeferredChecks | None
    ) -> SamplewiseError | None:
        """Error that describes the first non-finite value of a sum that is not finite; None if all values are finite
        and only their squares overflow.
        """
        problem = problem_of_checks(checks) or problem_of(parts, self.trained.named_gradients())
        if self.ranks.any_shard(problem is not None):
            problem = problem or problem_of_gradients("in the part of another rank")
        if problem is None:
            norms.recompute(self.trained.gradients())
        return problem

    def _late_norm(self) -> Callable[[], Tensor]:
        """Function that computes the gradient norm when it is read, before the gradients are cleared."""
        stamp = self.trained.cleared

        def norm() -> Tensor:
            if stamp != self.trained.cleared:
                raise ParameterError(
                    "update.grad_norm with on_nonfinite='ignore' must be read before the next update begins; found "
                    "that its gradients were cleared. Read it right after the update."
                )
            return self._norms().norm()

        return norm


class GradNorms:
    """Norms of all gradients and of other tensors: if their sum is finite, all values are finite.

    On the CPU, scalars are read one by one, which takes a fraction of the time of stacking them.
    """

    __slots__ = ("_all", "_dtype", "_gradients", "_ranks", "_unit")

    def __init__(self, gradients: Sequence[Tensor], values: Sequence[Tensor], ranks: Parallel):
        self._gradients = len(gradients)
        self._unit: float | Tensor = 1.0
        self._ranks = ranks
        norms: Sequence[Tensor] = torch._foreach_norm([*gradients, *values])
        self._dtype = norms[0].dtype
        self._all: Tensor | Sequence[Any] = norms  # a vector; or scalars, which are numbers after `finite`
        # The norm of a sharded gradient is the root of a sum over its shards, which one all-reduce gives for all.
        read = norms[0].device.type == "cpu" and not ranks.sharded
        if not read or len({norm.dtype for norm in norms}) > 1:
            stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
            self._all = self._over_shards(stacked)

    def _over_shards(self, norms: Tensor) -> Tensor:
        return self._ranks.over_shards(norms.double().square()).sqrt() if self._ranks.sharded else norms

    def finite(self) -> bool:
        if isinstance(self._all, Tensor):
            return math.isfinite(self._all.sum().item())
        self._all = [norm.item() for norm in self._all]
        return sum(self._all) <= torch.finfo(self._dtype).max

    def norm(self) -> Tensor:
        norms = self._all[: self._gradients]
        if not isinstance(norms, Tensor):
            numbers = isinstance(norms[0], float)
            norms = torch.tensor(norms, dtype=self._dtype) if numbers else torch.stack(list(norms))
        return torch.linalg.vector_norm(norms) * self._unit

    def recompute(self, gradients: Sequence[Tensor]) -> None:
        """Recompute the norms in units of the largest element, so that squares do not overflow."""
        self._unit = torch.stack([g.abs().max().double() for g in gradients if g.numel()]).max()
        if self._ranks.sharded:
            self._unit = collectives.all_gather_rows(self._unit[None]).max()
        norms = torch.stack([(g / self._unit).norm().double() for g in gradients])
        self._all = self._over_shards(norms)
