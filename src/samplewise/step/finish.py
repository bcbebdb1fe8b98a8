"""From gradient sums to changed parameters: unscale → noise → divide → is it finite? → max_grad_norm → optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise.errors import NonFiniteGradientError, NonFiniteLossError, ParameterError, SamplewiseError
from samplewise.step.parameters import Trained
from samplewise.step.parts import Part, cat, total
from samplewise.step.precision import Precision
from samplewise.step.update import Outcome
from samplewise.step.window import Window
from samplewise.transforms.transform import SumTransform

POLICIES = ("raise", "skip", "ignore")


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
    ):
        self.trained, self.optimizer, self.scheduler, self.precision = trained, optimizer, scheduler, precision
        self.on_sum, self.max_grad_norm, self.on_nonfinite = on_sum, max_grad_norm, on_nonfinite
        self.checks = on_nonfinite != "ignore" or precision.scales
        device = next(iter(trained.named.values())).device
        self.masks = on_nonfinite == "raise" and not precision.scales and _can_mask(optimizer, device)

    def __call__(self, window: Window) -> Outcome:
        rates = [lr.clone() if isinstance(lr := group["lr"], Tensor) else lr for group in self.optimizer.param_groups]
        if window.failure is None:
            self._divide(window)
        sizes = self._sizes(window.parts) if self.checks and window.failure is None else None
        problem = window.failure if sizes is None or self.masks else self._problem(sizes, window.parts)
        if problem is not None:
            if not self.may_skip(problem):
                raise problem
            self.precision.overflowed()
            return Outcome(True, rates, lambda: torch.tensor(torch.nan))
        if self.max_grad_norm is not None:
            sizes = sizes or self._sizes(())
            # as torch.nn.utils.clip_grad_norm_ does it
            torch._foreach_mul_(self.trained.gradients(), (self.max_grad_norm / (sizes.norm() + 1e-6)).clamp(max=1))
        self._change(sizes)
        return self._outcome(rates, sizes, window.parts)

    def may_skip(self, problem: Exception) -> bool:
        """By wish; and gradients that overflow under a loss scale are the scale's affair."""
        overflow = self.precision.scales and isinstance(problem, NonFiniteGradientError)
        return self.on_nonfinite == "skip" or overflow

    def _divide(self, window: Window) -> None:
        """The sums carry the loss scale; noise comes on sums that do not."""
        by, scale = 1 if window.divided else total(window.parts), self.precision.scale
        if self.on_sum:
            self.trained.fill()  # noise belongs on every parameter, reached or not
            gradients = self.trained.gradients()
            torch._foreach_div_(gradients, scale)
            scale = 1.0
            for transform in self.on_sum:
                transform.act(gradients)
        if not (window.divided and scale == 1) and (gradients := self.trained.gradients()):
            torch._foreach_div_(gradients, by * scale)

    def _sizes(self, parts: Sequence[Part]) -> Sizes:
        """Of the gradients; and, to be looked at too, of losses, and of denominators that must not be zero."""
        counted = [p.counts is not None or p.shares is not None for p in parts]
        others = [part.losses for part in parts] + ([1 / torch.as_tensor(total(parts))] if any(counted) else [])
        return Sizes(self.trained.gradients(), others)

    def _problem(self, sizes: Sizes, parts: Sequence[Part]) -> SamplewiseError | None:
        """What is not finite."""
        if sizes.finite():
            return None
        problem = _explanation(parts, self.trained.named)
        if problem is None:  # all is finite, but too large to be squared
            sizes.measure_again(self.trained.gradients())
        return problem

    def _change(self, sizes: Sizes | None) -> None:
        if self.masks and sizes is not None:
            _masked_step(self.optimizer, sizes.flag())
        else:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.precision.went_well()

    def _outcome(self, rates: list[Any], sizes: Sizes | None, parts: list[Part]) -> Outcome:
        if sizes is None:
            stamp = self.trained.cleared
            return Outcome(False, rates, lambda: self._late_norm(stamp))
        if not self.masks:
            return Outcome(False, rates, sizes.norm)

        def check() -> None:
            if not sizes.finite():
                raise _explanation(parts, {}) or NonFiniteGradientError(_GRADIENTS.format(found="NaN or infinity"))

        return Outcome(False, rates, sizes.norm, check)

    def _late_norm(self, stamp: int) -> Tensor:
        if stamp != self.trained.cleared:
            raise ParameterError(
                "update.grad_norm under on_nonfinite='ignore' must be read before the next update begins; found that "
                "its gradients are gone."
            )
        return self._sizes(()).norm()


class Sizes:
    """The norms of all gradients and of other tensors, in one vector: its sum tells whether everything is finite."""

    __slots__ = ("_all", "_gradients")

    def __init__(self, gradients: Sequence[Tensor], others: Sequence[Tensor]):
        self._gradients = len(gradients)
        norms = torch._foreach_norm([*gradients, *others])
        self._all = torch.stack([n.to(norms[0].device) for n in norms])

    def norm(self) -> Tensor:
        return torch.linalg.vector_norm(self._all[: self._gradients])

    def finite(self) -> bool:
        return math.isfinite(self._all.sum().item())

    def flag(self) -> Tensor:
        return self._all.sum().isfinite()

    def measure_again(self, gradients: Sequence[Tensor]) -> None:
        self._all = torch.stack([g.double().norm() for g in gradients])


def _can_mask(optimizer: Any, device: torch.device) -> bool:
    """Whether the optimizer can leave out an update by a number on the device, so that nobody need wait for it."""
    return device.type != "cpu" and getattr(optimizer, "_step_supports_amp_scaling", False)


def _masked_step(optimizer: Any, finite: Tensor) -> None:
    optimizer.grad_scale, optimizer.found_inf = None, (~finite).to(torch.float32)
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


_GRADIENTS = (
    "gradients must be finite; found {found} though every loss is finite. Nothing was updated. Look for a root, norm, "
    "division or logarithm at zero; on_nonfinite='skip' leaves such updates out."
)


def _explanation(parts: Sequence[Part], named: dict[str, Tensor]) -> SamplewiseError | None:
    """What is not finite; None if a sum was too large though each number is finite."""
    losses = cat([p.losses for p in parts])
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    if bad:
        return NonFiniteLossError(
            f"losses must be finite; found {losses[bad[0]].item()} at sample {bad[0]} of the window "
            f"({len(bad)} of {len(losses)} samples). Nothing was updated. Look at those samples, or at the learning "
            "rate; on_nonfinite='skip' leaves such updates out."
        )
    if total(parts) == 0:
        return NonFiniteLossError(
            "the window must have something to be divided by; found that its counts, or the weights of its samples, "
            "sum to zero. Nothing was updated. Look at the loss function's counts and at the weights; tail='drop' "
            "leaves out windows that are too short for dropping samples."
        )
    broken = [n for n, p in named.items() if p.grad is not None and not p.grad.to_dense().isfinite().all()]
    if broken:
        found = f"NaN or infinity in that of {broken[0]!r} ({len(broken)} of {len(named)} parameters)"
        return NonFiniteGradientError(_GRADIENTS.format(found=found))
    return None
