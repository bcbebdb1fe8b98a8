"""Apply an update: unscale → noise → divide → finite check → max_grad_norm → optimizer → scheduler."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise.distributed.group import current_group
from samplewise.errors import NonFiniteGradientError, ParameterError, SamplewiseError
from samplewise.step.amp import MixedPrecision
from samplewise.step.distributed_window import DistributedWindow
from samplewise.step.microbatch_stats import MicrobatchStats, total
from samplewise.step.nonfinite import problem_of, problem_of_gradients, unread_problem
from samplewise.step.parameters import TrainedParameters
from samplewise.step.update import Outcome
from samplewise.step.window import Window
from samplewise.transforms.transform import SumTransform


class UpdateApplier:
    """Applies the update of a window. Errors about the window are raised before parameters change."""

    def __init__(
        self,
        trained: TrainedParameters,
        optimizer: Any,
        scheduler: Any,
        precision: MixedPrecision,
        on_sum: Sequence[SumTransform],
        max_grad_norm: float | None,
        on_nonfinite: str,
        team: DistributedWindow | None = None,
    ):
        self.team = team
        self.trained = trained
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.precision = precision
        self.on_sum = on_sum
        self.max_grad_norm = max_grad_norm
        self.on_nonfinite = on_nonfinite
        self.checks = on_nonfinite != "ignore" or precision.scales
        self._unread: SkipFlag | None = None
        self._may_mask = on_nonfinite == "raise" and not precision.scales

    def __call__(self, window: Window) -> Outcome:
        rates = self.rates()
        masks = self.masks and window.agreed is None
        if window.failure is None:
            self._divide(window)
        sizes = self._sizes(window.unseen) if self.checks and window.failure is None else None
        problem = window.failure if sizes is None or masks else self._problem(sizes, window.unseen)
        if problem is not None:
            if not self.may_skip(problem):
                raise problem
            self.precision.overflowed()
            return Outcome(True, rates, lambda: torch.tensor(torch.nan))
        mask = None
        if masks:
            mask = self._unread = SkipFlag(self.trained.gradients(), window.parts, self._unread)
        if self.max_grad_norm is not None:
            sizes = sizes or self._sizes(())
            self._bound(sizes)
        self._change(mask)
        return Outcome(False, rates, self._norm(sizes), mask)

    def rates(self) -> list[Any]:
        """Current learning rate of each of the optimizer's parameter groups."""
        return [lr.clone() if isinstance(lr := group["lr"], Tensor) else lr for group in self.optimizer.param_groups]

    def prepare(self, window: Window) -> None:
        """Divide and clip the gradients as the optimizer will see them, without the finite check."""
        self._divide(window)
        if self.max_grad_norm is not None:
            self._bound(self._sizes(()))

    def _bound(self, sizes: GradNorms) -> None:
        """Clip the update's gradient to `max_grad_norm`, with the formula of torch.nn.utils.clip_grad_norm_."""
        assert self.max_grad_norm is not None
        torch._foreach_mul_(self.trained.gradients(), (self.max_grad_norm / (sizes.norm() + 1e-6)).clamp(max=1))

    @property
    def masks(self) -> bool:
        """True if a non-finite update is skipped by a flag on the device, without a host sync."""
        return self._may_mask and _can_mask(self.optimizer, self.trained.device)

    def may_skip(self, problem: Exception) -> bool:
        """True if this problem skips the update instead of raising: with on_nonfinite="skip"; or if gradients overflow
        under a loss scale, which is then halved.
        """
        overflow = self.precision.scales and isinstance(problem, NonFiniteGradientError)
        return self.on_nonfinite == "skip" or overflow

    def _divide(self, window: Window) -> None:
        """Divide the sums by loss scale and denominator. Transforms of the sum, such as noise, act after unscaling and
        before the division by the denominator.
        """
        by = 1 if window.divided else window.denominator
        scale = self.precision.scale
        if self.on_sum:
            self.trained.fill()  # noise is added to every parameter, also to those that the loss does not reach
            gradients = self.trained.gradients()
            torch._foreach_div_(gradients, scale)
            scale = 1.0
            for transform in self.on_sum:
                if self.team is None:
                    transform.act(gradients)
                else:
                    self.team.act(transform, self.trained)
        if not (window.divided and scale == 1) and (gradients := self.trained.gradients()):
            torch._foreach_div_(gradients, by * scale)

    def _sizes(self, parts: Sequence[MicrobatchStats]) -> GradNorms:
        """Norms of the gradients; and, for the finite check, of losses, of 1 / denominator (infinite if it is 0) and of
        a value that is infinite if a count is negative.
        """
        others = [part.losses for part in parts]
        if any(p.counts is not None or p.shares is not None for p in parts):
            others.append(1 / torch.as_tensor(total(parts)))
        others += [torch.where(p.counts.min() < 0, math.inf, 0.0) for p in parts if p.counts is not None]
        return GradNorms(self.trained.gradients(), others, self.sharded)

    @property
    def sharded(self) -> bool:
        """True if each rank holds a shard of the gradients."""
        return self.team is not None and self.team.spread.sharded

    def _problem(self, sizes: GradNorms, parts: Sequence[MicrobatchStats]) -> SamplewiseError | None:
        """Error that describes the first non-finite value; None if all values are finite."""
        if sizes.finite():
            return None
        problem = problem_of(parts, self.trained.owned)
        if self.sharded and current_group().all_reduce_scalars(problem is not None)[0]:
            problem = problem or problem_of_gradients("in the part of another rank")
        if problem is None:  # all values are finite, but the squares overflow
            sizes.measure_again(self.trained.gradients())
        return problem

    def _change(self, mask: SkipFlag | None) -> None:
        try:
            if mask is None:
                self.optimizer.step()
            else:
                mask.step(self.optimizer)
            if self.scheduler is not None:
                self.scheduler.step()
        finally:
            if self.team is not None:
                self.team.spread.gather()  # a collective: other ranks call it even if the optimizer failed here
        self.precision.went_well()

    def _norm(self, sizes: GradNorms | None) -> Callable[[], Tensor]:
        if sizes is not None:
            return sizes.norm
        stamp = self.trained.cleared
        return lambda: self._late_norm(stamp)

    def _late_norm(self, stamp: int) -> Tensor:
        if stamp != self.trained.cleared:
            raise ParameterError(
                "update.grad_norm with on_nonfinite='ignore' must be read before the next update begins; found that "
                "its gradients were cleared. Read it right after the update."
            )
        return self._sizes(()).norm()


class GradNorms:
    """Norms of all gradients and of other tensors, in one vector: if its sum is finite, all values are finite."""

    __slots__ = ("_all", "_gradients", "_sharded", "_unit")

    def __init__(self, gradients: Sequence[Tensor], others: Sequence[Tensor], sharded: bool = False):
        self._gradients = len(gradients)
        self._unit: float | Tensor = 1.0
        self._sharded = sharded
        norms = torch._foreach_norm([*gradients, *others])
        self._all = self._over_ranks(torch.stack([n.to(norms[0].device) for n in norms]))

    def _over_ranks(self, norms: Tensor) -> Tensor:
        return current_group().all_reduce_(norms.double().square()).sqrt() if self._sharded else norms

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(self._all[: self._gradients]) * self._unit

    def finite(self) -> bool:
        return math.isfinite(self._all.sum().item())

    def measure_again(self, gradients: Sequence[Tensor]) -> None:
        """Recompute the norms in units of the largest element, so that squares do not overflow."""
        self._unit = torch.stack([g.abs().max().double() for g in gradients if g.numel()]).max()
        if self._sharded:
            self._unit = current_group().all_gather_rows(self._unit[None]).max()
        self._all = self._over_ranks(torch.stack([(g / self._unit).norm().double() for g in gradients]))


def _can_mask(optimizer: Any, device: torch.device) -> bool:
    """True if the optimizer can skip an update by a flag on the device (`found_inf`), which saves the host sync."""
    return device.type != "cpu" and getattr(optimizer, "_step_supports_amp_scaling", False)


class SkipFlag:
    """Flag on the device that skips a non-finite update without a host sync. `check` raises for this update and for
    earlier updates that were not read.
    """

    def __init__(self, gradients: Sequence[Tensor], parts: Sequence[MicrobatchStats], before: SkipFlag | None):
        self._parts = parts
        losses = torch.stack([part.losses.isfinite().all() for part in parts]).all()
        self.well = torch.stack([losses, *(g.isfinite().all() for g in gradients)]).all()
        self._losses: Tensor = losses if before is None else losses & before._losses
        self._all: Tensor = self.well if before is None else self.well & before._all

    def step(self, optimizer: Any) -> None:
        optimizer.grad_scale = None
        optimizer.found_inf = (~self.well).to(torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def check(self) -> None:
        """Raise if this update or an earlier unread one was non-finite. Waits for the device."""
        if not self._all:
            raise problem_of(self._parts, {}) or unread_problem(bool(self._losses))
