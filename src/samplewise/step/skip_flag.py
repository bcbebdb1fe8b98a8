"""Updates that the device skips by itself: a flag, its copy on the host, and undoing what the host did meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from samplewise.core.host_copy import HostCopy
from samplewise.engine.pending_checks import PendingChecks, all_finite_flag, largest_values
from samplewise.errors import SamplewiseError
from samplewise.step.nonfinite import problem_of, problem_of_checks, problem_of_gradients
from samplewise.transforms.stats import SampleStats


def supports_flag(optimizer: Any) -> bool:
    """True if the optimizer can skip an update by a flag on the device (`found_inf`), as fused ones of torch do."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class SkipFlag:
    """Flag on the device that skips a non-finite update without a host sync. Its copy on the host is complete when the
    device has done the work of the update before the optimizer.

    gradients: by name. parts, checks: values of the window, from which the error is made if there is one.
    others: tensors that must be finite in addition to the gradients.
    may_skip: function error -> whether it skips the update; otherwise the error is raised when the flag is read.
    """

    def __init__(
        self,
        gradients: dict[str, Tensor],
        others: Sequence[Tensor],
        parts: Sequence[SampleStats],
        checks: PendingChecks,
        may_skip: Callable[[Exception], bool],
    ):
        self._names = [name for name, gradient in gradients.items() if gradient.numel()]
        self._largest = largest_values([gradients[name] for name in self._names])
        self.finite = all_finite_flag([self._largest, *others])
        self._on_host = HostCopy([self.finite])
        self._parts = parts
        self._checks = checks
        self._may_skip = may_skip

    def step(self, optimizer: Any) -> None:
        """Call optimizer.step(), which changes nothing if the flag is False."""
        optimizer.grad_scale = None
        optimizer.found_inf = (~self.finite).to(torch.float32)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    @property
    def skipped(self) -> bool:
        """True if the update was skipped. Raises the error of a non-finite value that may not be skipped."""
        if self.applied:
            return False
        problem = self._problem()
        if not self._may_skip(problem):
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
        where = f"in the gradient of {broken[0]!r} ({len(broken)} of {len(self._names)} parameters)"
        return problem_of_gradients(where)


class ScheduleState:
    """Scheduler and settings of the optimizer's parameter groups before a step of the scheduler."""

    def __init__(self, optimizer: Any, scheduler: Any):
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._state = deepcopy(scheduler.state_dict())
        self._groups = [
            {name: _copied(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        self._scheduler.load_state_dict(self._state)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name, value in saved.items():
                if isinstance(value, Tensor):
                    group[name].copy_(value)  # a scheduler changes it in place
                else:
                    group[name] = value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
