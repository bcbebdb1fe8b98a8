"""Apply an update: unscale → noise → divide → finite check → max_grad_norm → optimizer → scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from samplewise.core.snapshot import Buffers
from samplewise.distributed.group import current_group
from samplewise.errors import ParameterError, SamplewiseError
from samplewise.step.amp import MixedPrecision
from samplewise.step.config import StepConfig
from samplewise.step.nonfinite import problem_of, problem_of_gradients, unread_problem
from samplewise.step.parameters import TrainedParameters
from samplewise.step.update import Outcome, Update
from samplewise.step.window import Counters, Window
from samplewise.step.window_ranks import WindowRanks
from samplewise.transforms.stats import SampleStats, denominator


class UpdateApplier:
    """Applies the updates of complete windows. Errors about a window are raised before parameters change."""

    def __init__(
        self,
        config: StepConfig,
        trained: TrainedParameters,
        optimizer: Any,
        scheduler: Any,
        precision: MixedPrecision,
        ranks: WindowRanks,
        counters: Counters,
        buffers: Buffers,
    ):
        self.config = config
        self.trained = trained
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.precision = precision
        self.ranks = ranks
        self.counters = counters
        self._buffers = buffers
        self._checks = config.checks_finite
        self._last_flag: SkipFlag | None = None
        self._may_flag = config.on_nonfinite == "raise" and not precision.scales and _supports_flag(optimizer)

    def apply(self, window: Window) -> Update:
        """Change the parameters by the update of a window, and return its results."""
        started = perf_counter()
        outcome = self._change_parameters(window)
        if outcome.skipped:
            self.trained.clear()
            self._buffers.restore()
        elif outcome.flag is not None:
            self._buffers.restore_unless(outcome.flag.finite)
        counters = self.counters
        samples = window.samples if window.totals is None else window.totals.samples
        update = Update(counters.updates, samples, outcome, window.parts, window.columns, window.totals)
        counters.samples += samples - window.samples  # those of other ranks; this rank's are counted already
        if outcome.skipped:
            counters.skipped += 1
        else:
            counters.updates += 1
        update.phases = {
            "forward": window.forward_seconds,
            "gradients": window.seconds - window.forward_seconds,
            "optimizer": perf_counter() - started,
        }
        window.begun = False
        return update

    def _change_parameters(self, window: Window) -> Outcome:
        """The sequence of an update."""
        rates = self.rates()
        if window.failure is not None:
            return self._skip(window.failure, rates)
        self.divide(window)
        unchecked = window.parts if window.totals is None else []  # totals over ranks are checked already
        flags = self.flags and window.totals is None
        norms = self._norms(unchecked) if self._checks else None
        if norms is not None and not flags:
            problem = self._problem(norms, unchecked)
            if problem is not None:
                return self._skip(problem, rates)
        flag = None
        if flags:
            flag = self._last_flag = SkipFlag(self.trained.gradients(), window.parts, self._last_flag)
        max_grad_norm = window.config.max_grad_norm
        if max_grad_norm is not None:
            norms = norms or self._norms(())
            self._clip(norms, max_grad_norm)
        try:
            if flag is None:
                self.optimizer.step()
            else:
                flag.step(self.optimizer)
            if self.scheduler is not None:
                self.scheduler.step()
        finally:
            self.ranks.strategy.reshard()
        if self.precision.scales:
            self.precision.record_success()
        return Outcome(False, rates, norms.norm if norms is not None else self._late_norm(), flag)

    def _skip(self, problem: Exception, rates: list[Any]) -> Outcome:
        """Skip the update because of a non-finite value, or raise it."""
        if not self.config.skips(problem):
            raise problem
        self.precision.record_overflow()
        return Outcome(True, rates, lambda: torch.tensor(torch.nan))

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
        if window.config.max_grad_norm is not None:
            self._clip(self._norms(()), window.config.max_grad_norm)

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
                self.ranks.transform_sum(transform, self.trained)
        if window.divided and scale == 1:
            return
        divisor: Tensor | float = 1
        if not window.divided:
            divisor = denominator(window.parts) if window.totals is None else window.totals.denominators
        gradients = self.trained.gradients()
        if gradients:
            torch._foreach_div_(gradients, divisor * scale)

    def _clip(self, norms: GradNorms, max_grad_norm: float) -> None:
        """Clip the update's gradient to `max_grad_norm`, with the formula of torch.nn.utils.clip_grad_norm_."""
        factor = (max_grad_norm / (norms.norm() + 1e-6)).clamp(max=1)
        torch._foreach_mul_(self.trained.gradients(), factor)

    def _norms(self, parts: Sequence[SampleStats]) -> GradNorms:
        """Norms of the gradients; and, for the finite check, of losses, of 1 / denominator (infinite if it is 0) and of
        a value that is infinite if a count is negative.
        """
        others: list[Tensor] = []
        counted = False
        for part in parts:
            others.append(part.losses)
            counted = counted or part.counts is not None or part.shares is not None
        if counted:
            others.append(1 / torch.as_tensor(denominator(parts)))
            others += [torch.where(p.counts.min() < 0, math.inf, 0.0) for p in parts if p.counts is not None]
        strategy = self.ranks.strategy
        return GradNorms(self.trained.gradients(), others, strategy.sharded, strategy.copies)

    def _problem(self, norms: GradNorms, parts: Sequence[SampleStats]) -> SamplewiseError | None:
        """Error that describes the first non-finite value; None if all values are finite."""
        if norms.finite():
            return None
        problem = problem_of(parts, self.trained.owned)
        if self.ranks.strategy.sharded and current_group().all_reduce_scalars(problem is not None)[0]:
            problem = problem or problem_of_gradients("in the part of another rank")
        if problem is None:  # all values are finite, but the squares overflow
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
            return self._norms(()).norm()

        return norm


class GradNorms:
    """Norms of all gradients and of other tensors, in one vector: if its sum is finite, all values are finite."""

    __slots__ = ("_all", "_copies", "_gradients", "_sharded", "_unit")

    def __init__(self, gradients: Sequence[Tensor], others: Sequence[Tensor], sharded: bool = False, copies: int = 1):
        self._gradients = len(gradients)
        self._unit: float | Tensor = 1.0
        self._sharded = sharded
        self._copies = copies  # number of ranks that hold the same shard
        norms = torch._foreach_norm([*gradients, *others])
        stacked = torch.stack([norm.to(norms[0].device) for norm in norms])
        self._all = self._over_ranks(stacked) if sharded else stacked

    def _over_ranks(self, norms: Tensor) -> Tensor:
        return (current_group().all_reduce_(norms.double().square()) / self._copies).sqrt()

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(self._all[: self._gradients]) * self._unit

    def finite(self) -> bool:
        return math.isfinite(self._all.sum().item())

    def recompute(self, gradients: Sequence[Tensor]) -> None:
        """Recompute the norms in units of the largest element, so that squares do not overflow."""
        self._unit = torch.stack([g.abs().max().double() for g in gradients if g.numel()]).max()
        if self._sharded:
            self._unit = current_group().all_gather_rows(self._unit[None]).max()
        norms = torch.stack([(g / self._unit).norm().double() for g in gradients])
        self._all = self._over_ranks(norms) if self._sharded else norms


def _supports_flag(optimizer: Any) -> bool:
    """True if the optimizer can skip an update by a flag on the device (`found_inf`), which saves the host sync."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class SkipFlag:
    """Flag on the device that skips a non-finite update without a host sync. `check` raises for this update and for
    earlier updates that were not read.
    """

    def __init__(self, gradients: Sequence[Tensor], parts: Sequence[SampleStats], before: SkipFlag | None):
        self._parts = parts
        losses = torch.stack([part.losses.isfinite().all() for part in parts]).all()
        self.finite = torch.stack([losses, *(g.isfinite().all() for g in gradients)]).all()
        self._losses: Tensor = losses if before is None else losses & before._losses
        self._all: Tensor = self.finite if before is None else self.finite & before._all

    def step(self, optimizer: Any) -> None:
        optimizer.grad_scale = None
        optimizer.found_inf = (~self.finite).to(torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def check(self) -> None:
        """Raise if this update or an earlier unread one was non-finite. Waits for the device."""
        if not self._all:
            raise problem_of(self._parts, {}) or unread_problem(bool(self._losses))
