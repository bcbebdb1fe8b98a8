"""Non-finite updates: the errors for losses, counts and gradients, and the flag by which the device skips an update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from math import inf
from typing import Any

import torch
from torch import Tensor

from samplewise.core.memory import HostCopy
from samplewise.engine.deferred_checks import DeferredChecks, all_finite_flag, largest_values
from samplewise.errors import NonFiniteGradientError, NonFiniteLossError, SamplewiseError
from samplewise.transforms.stats import SampleStats, cat, denominator

SKIP = "on_nonfinite='skip' skips such updates."


def problem_of_losses(losses: Tensor, positions: int | Tensor = 0) -> NonFiniteLossError | None:
    """Error for the first non-finite loss; None if all are finite. `positions`: of the samples in the window, or of the
    first one.
    """
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    if not bad:
        return None
    position = positions + bad[0] if isinstance(positions, int) else int(positions[bad[0]])
    return NonFiniteLossError(
        f"losses must be finite; found {losses[bad[0]].item()} at sample {position} of the window ({len(bad)} of "
        f"{len(losses)} samples). Nothing was updated. Check those samples and the learning rate; {SKIP}"
    )


def problem_of_counts(parts: Sequence[SampleStats]) -> NonFiniteLossError | None:
    """Error for a negative, infinite or NaN count; None if there is none."""
    columns = [p.counts for p in parts if p.counts is not None]
    if not columns:
        return None
    counts = cat(columns)
    invalid = counts[~(counts.isfinite() & (counts >= 0))]
    if not len(invalid):
        return None
    return NonFiniteLossError(
        f"counts must be finite, and zero or positive; found {invalid[0].item():g}. Nothing was updated. "
        "Return the denominator of each sample from the loss function."
    )


NO_DENOMINATOR = (
    "the denominator of a window must be positive and finite; found that its counts, or the weights of its samples, "
    "sum to {total:g}. Nothing was updated. Check the counts returned by the loss function and the weights. If samples "
    "are dropped, the last window of a loader may be too short: tail='drop' leaves it out."
)


def problem_of(parts: Sequence[SampleStats], gradients: Mapping[str, Tensor]) -> SamplewiseError | None:
    """Error for the first non-finite value of a window; None if only a sum overflowed although each value is finite.
    Empty `parts`: losses and counts are already checked. `gradients`: dense, this rank's shard of sharded ones.
    """
    if parts:
        problem = problem_of_losses(cat([p.kept_losses for p in parts])) or problem_of_counts(parts)
        total = float(denominator(parts))
        if problem is not None or not 0 < total < inf:
            return problem or NonFiniteLossError(NO_DENOMINATOR.format(total=total))
    broken = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
    if broken:
        return problem_of_gradients(f"in the gradient of {broken[0]!r} ({len(broken)} of {len(gradients)} parameters)")
    return None


def problem_of_checks(checks: DeferredChecks | None) -> SamplewiseError | None:
    """Error of the first check that fails; None if all values are finite, or all were checked at once."""
    try:
        if checks is not None:
            checks.raise_first()
    except SamplewiseError as problem:
        return problem
    return None


def problem_of_gradients(where: str) -> NonFiniteGradientError:
    return NonFiniteGradientError(
        f"gradients must be finite; found NaN or infinity {where}, although every loss is finite. Nothing was updated. "
        f"Look for a square root, norm, division or logarithm at zero; {SKIP}"
    )


# --- updates that the device skips by itself --------------------------------------------------------------------------


def supports_flag(optimizer: Any) -> bool:
    """True if the optimizer can skip an update by a flag on the device (`found_inf`), as fused ones of torch do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def supports_undo(scheduler: Any) -> bool:
    """True if a step of the scheduler can be undone: it has a state, or there is none."""
    return scheduler is None or (hasattr(scheduler, "state_dict") and hasattr(scheduler, "load_state_dict"))


class SkipFlag:
    """Flag on the device that skips a non-finite update without a host sync. Its copy on the host is complete when the
    device has done the work of the update before the optimizer.

    gradients: by name. parts, checks: values of the window, from which the error is made if there is one.
    values: tensors that must be finite in addition to the gradients.
    may_skip: function error -> whether it skips the update; otherwise the error is raised when the flag is read.
    """

    def __init__(
        self,
        gradients: dict[str, Tensor],
        values: Sequence[Tensor],
        parts: Sequence[SampleStats],
        checks: DeferredChecks | None,
        may_skip: Callable[[Exception], bool],
    ):
        self._names = [name for name, gradient in gradients.items() if gradient.numel()]
        self._largest = largest_values([gradients[name] for name in self._names])
        self.finite = all_finite_flag([self._largest, *values])
        self._on_host = HostCopy([self.finite])
        self._parts = parts
        self._checks = checks
        self._may_skip = may_skip
        self._optimizer: Any = None
        self._created: list[tuple[Tensor, Any]] = []  # parameters and their state that the optimizer has created
        self.reported = False  # True if `skipped` has raised

    def step(self, optimizer: Any) -> None:
        """Call optimizer.step(), which changes no parameter if the flag is False."""
        before = len(optimizer.state)
        self._optimizer = optimizer
        optimizer.grad_scale = None
        optimizer.found_inf = (~self.finite).to(torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        if len(optimizer.state) > before:
            self._created = list(optimizer.state.items())[before:]

    def drop_created_state(self) -> None:
        """Delete the state that a skipped step has created: the momentum of a fused SGD has no values then."""
        for p, state in self._created:
            if self._optimizer.state.get(p) is state:
                del self._optimizer.state[p]

    @property
    def skipped(self) -> bool:
        """True if the update was skipped. Raises the error of a non-finite value that may not be skipped."""
        if self.applied:
            return False
        problem = self._problem()
        if not self._may_skip(problem):
            self.reported = True
            raise problem
        return True

    @property
    def applied(self) -> bool:
        """True if the update was applied; waits for the device if it has not computed the flag yet."""
        return bool(self._on_host.read()[0])

    def _problem(self) -> SamplewiseError:
        problem = problem_of_checks(self._checks) or problem_of(self._parts, {})
        if problem is not None:
            return problem
        finite = self._largest.isfinite().tolist()
        broken = [name for name, fine in zip(self._names, finite, strict=True) if not fine]
        if not broken:
            return problem_of_gradients("in the norm of the update's gradient, whose squares overflow")
        return problem_of_gradients(
            f"in the gradient of {broken[0]!r} ({len(broken)} of {len(self._names)} parameters)"
        )


class SchedulerStep:
    """Step of the scheduler, which is made at once and can be undone."""

    def __init__(self, optimizer: Any, scheduler: Any):
        self._scheduler = scheduler
        self._state = deepcopy(scheduler.state_dict())
        before = [
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in group.items()}
            for group in optimizer.param_groups
        ]
        scheduler.step()
        self._changes = [
            (group, name, value, group[name])
            for group, settings in zip(optimizer.param_groups, before, strict=True)
            for name, value in settings.items()
            if group[name] is not value
        ]

    def undo(self) -> None:
        """Restore the scheduler, and the settings of parameter groups that have not been changed again since."""
        self._scheduler.load_state_dict(self._state)
        for group, name, before, after in self._changes:
            if group[name] is not after:
                continue
            if isinstance(before, Tensor):
                after.copy_(before)  # a scheduler changes it in place
            else:
                group[name] = before
