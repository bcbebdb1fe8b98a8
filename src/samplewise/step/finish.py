"""From gradient sums to changed parameters: unscale → noise → divide → is it finite? → max_grad_norm → optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise import ranks
from samplewise.errors import NonFiniteGradientError, ParameterError, SamplewiseError
from samplewise.step.parameters import Trained
from samplewise.step.parts import Part, total
from samplewise.step.precision import Precision
from samplewise.step.problems import problem_of, problem_of_gradients, unread_problem
from samplewise.step.team import Team
from samplewise.step.update import Outcome
from samplewise.step.window import Window
from samplewise.transforms.transform import SumTransform


class Finish:
    """Ends a window. What it raises, it raises before anything is changed."""

    def __init__(
        self,
        trained: Trained,
        optimizer: Any,
        scheduler: Any,
        precision: Precision,
        on_sum: Sequence[SumTransform],
        max_grad_norm: float | None,
        on_nonfinite: str,
        team: Team | None = None,
    ):
        self.team = team
        self.trained, self.optimizer, self.scheduler, self.precision = trained, optimizer, scheduler, precision
        self.on_sum, self.max_grad_norm, self.on_nonfinite = on_sum, max_grad_norm, on_nonfinite
        self.checks = on_nonfinite != "ignore" or precision.scales
        self._unread: Mask | None = None
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
            mask = self._unread = Mask(self.trained.gradients(), window.parts, self._unread)
        if self.max_grad_norm is not None:
            sizes = sizes or self._sizes(())
            self._bound(sizes)
        self._change(mask)
        return Outcome(False, rates, self._norm(sizes), mask)

    def rates(self) -> list[Any]:
        """The learning rates of the optimizer's groups, now."""
        return [lr.clone() if isinstance(lr := group["lr"], Tensor) else lr for group in self.optimizer.param_groups]

    def prepare(self, window: Window) -> None:
        """The gradients as the optimizer will see them, whatever they are."""
        self._divide(window)
        if self.max_grad_norm is not None:
            self._bound(self._sizes(()))

    def _bound(self, sizes: Sizes) -> None:
        """As torch.nn.utils.clip_grad_norm_ does it."""
        assert self.max_grad_norm is not None
        torch._foreach_mul_(self.trained.gradients(), (self.max_grad_norm / (sizes.norm() + 1e-6)).clamp(max=1))

    @property
    def masks(self) -> bool:
        """Whether it is left to the device to leave an update out."""
        return self._may_mask and _can_mask(self.optimizer, self.trained.device)

    def may_skip(self, problem: Exception) -> bool:
        """By wish; and gradients that overflow under a loss scale are the scale's affair."""
        overflow = self.precision.scales and isinstance(problem, NonFiniteGradientError)
        return self.on_nonfinite == "skip" or overflow

    def _divide(self, window: Window) -> None:
        """The sums carry the loss scale; noise comes on sums that do not."""
        by, scale = 1 if window.divided else window.denominator, self.precision.scale
        if self.on_sum:
            self.trained.fill()  # noise belongs on every parameter, reached or not
            gradients = self.trained.gradients()
            torch._foreach_div_(gradients, scale)
            scale = 1.0
            for transform in self.on_sum:
                transform.act(gradients) if self.team is None else self.team.act(transform, self.trained)
        if not (window.divided and scale == 1) and (gradients := self.trained.gradients()):
            torch._foreach_div_(gradients, by * scale)

    def _sizes(self, parts: Sequence[Part]) -> Sizes:
        """Of the gradients; and, to be looked at too, of losses, denominators that must not be zero, and counts."""
        others = [part.losses for part in parts]
        if any(p.counts is not None or p.shares is not None for p in parts):
            others.append(1 / torch.as_tensor(total(parts)))
        others += [torch.where(p.counts.min() < 0, math.inf, 0.0) for p in parts if p.counts is not None]
        return Sizes(self.trained.gradients(), others, self.sharded)

    @property
    def sharded(self) -> bool:
        """Whether other ranks have other parts of the gradients."""
        return self.team is not None and self.team.spread.sharded

    def _problem(self, sizes: Sizes, parts: Sequence[Part]) -> SamplewiseError | None:
        """What is not finite."""
        if sizes.finite():
            return None
        problem = problem_of(parts, self.trained.owned)
        if self.sharded and ranks.meet(problem is not None)[0]:
            problem = problem or problem_of_gradients("in the part of another rank")
        if problem is None:  # all is finite, but too large to be squared
            sizes.measure_again(self.trained.gradients())
        return problem

    def _change(self, mask: Mask | None) -> None:
        try:
            if mask is None:
                self.optimizer.step()
            else:
                mask.step(self.optimizer)
            if self.scheduler is not None:
                self.scheduler.step()
        finally:
            if self.team is not None:
                self.team.spread.gather()  # as the other ranks do, for whom it may have gone well
        self.precision.went_well()

    def _norm(self, sizes: Sizes | None) -> Callable[[], Tensor]:
        if sizes is not None:
            return sizes.norm
        stamp = self.trained.cleared
        return lambda: self._late_norm(stamp)

    def _late_norm(self, stamp: int) -> Tensor:
        if stamp != self.trained.cleared:
            raise ParameterError(
                "update.grad_norm under on_nonfinite='ignore' must be read before the next update begins; found that "
                "its gradients are gone."
            )
        return self._sizes(()).norm()


class Sizes:
    """The norms of all gradients and of other tensors, in one vector: its sum tells whether everything is finite."""

    __slots__ = ("_all", "_gradients", "_sharded", "_unit")

    def __init__(self, gradients: Sequence[Tensor], others: Sequence[Tensor], sharded: bool = False):
        self._gradients, self._unit, self._sharded = len(gradients), 1.0, sharded  # type: int, float | Tensor, bool
        norms = torch._foreach_norm([*gradients, *others])
        self._all = self._over_ranks(torch.stack([n.to(norms[0].device) for n in norms]))

    def _over_ranks(self, norms: Tensor) -> Tensor:
        return ranks.total(norms.double().square()).sqrt() if self._sharded else norms

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(self._all[: self._gradients]) * self._unit

    def finite(self) -> bool:
        return math.isfinite(self._all.sum().item())

    def measure_again(self, gradients: Sequence[Tensor]) -> None:
        """In units of the largest element, so that squares do not overflow."""
        self._unit = torch.stack([g.abs().max().double() for g in gradients if g.numel()]).max()
        if self._sharded:
            self._unit = ranks.gathered(self._unit[None]).max()
        self._all = self._over_ranks(torch.stack([(g / self._unit).norm().double() for g in gradients]))


def _can_mask(optimizer: Any, device: torch.device) -> bool:
    """Whether the optimizer can leave out an update by a number on the device, so that nobody need wait for it."""
    return device.type != "cpu" and getattr(optimizer, "_step_supports_amp_scaling", False)


class Mask:
    """Leaves out an update that is not finite without anybody waiting for it. Whoever reads it is told; and of earlier
    ones that nobody has read.
    """

    def __init__(self, gradients: Sequence[Tensor], parts: Sequence[Part], before: Mask | None):
        self._parts = parts
        losses = torch.stack([part.losses.isfinite().all() for part in parts]).all()
        self.well = torch.stack([losses, *(g.isfinite().all() for g in gradients)]).all()
        self._losses: Tensor = losses if before is None else losses & before._losses
        self._all: Tensor = self.well if before is None else self.well & before._all

    def step(self, optimizer: Any) -> None:
        optimizer.grad_scale, optimizer.found_inf = None, (~self.well).to(torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def check(self) -> None:
        if not self._all:
            raise problem_of(self._parts, {}) or unread_problem(bool(self._losses))
