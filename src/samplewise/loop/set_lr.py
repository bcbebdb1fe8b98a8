"""`sw.callbacks.SetLR`: set the learning rate of a run that is resumed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from samplewise.step.config import FunctionalOptimizer
from samplewise.step.step import Step


class SetLR:
    """Set the learning rate when `fit` starts, also of a resumed run, whose optimizer has the rate of the checkpoint.

    lr: the rate for all parameter groups, or a list with one for each group. With a scheduler it is the initial rate:
    the current rate and those of the schedule are multiplied by lr / initial rate. With OneCycleLR, which has no other
    argument for rates, it is max_lr. Absolute bounds of a schedule, such as eta_min, are not changed.

    Setting the same rate again changes nothing, so the callback may stay in the script.
    """

    def __init__(self, lr: float | Sequence[float]):
        self.lr = lr
        for rate in lr if isinstance(lr, Sequence) else [lr]:
            if not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
                raise ValueError(f"lr must be zero or a positive number, or a list of such numbers; found {lr!r}.")

    def on_fit_start(self, step: Step) -> None:
        groups = step.optimizer.param_groups
        _check_rates_can_be_set(step)
        rates = list(self.lr) if isinstance(self.lr, Sequence) else [self.lr] * len(groups)
        if len(rates) != len(groups):
            raise ValueError(
                f"lr must be one rate, or one for each of the {len(groups)} parameter groups; found {len(rates)} rates."
            )
        for k, (group, rate) in enumerate(zip(groups, rates, strict=True)):
            if step.scheduler is None:
                _set(group, "lr", rate)
            else:
                _scale_schedule(step.scheduler, k, group, rate)


def _check_rates_can_be_set(step: Step) -> None:
    if isinstance(step.optimizer, FunctionalOptimizer):
        raise TypeError(
            "SetLR must have an optimizer of torch.optim; found a function. Its rate is that of the script: write for "
            "example sw.sgd(0.01)."
        )
    if step.scheduler is not None and not isinstance(step.scheduler, LRScheduler):
        raise TypeError(
            f"SetLR must have a scheduler of torch.optim.lr_scheduler; found {type(step.scheduler).__name__}. Change "
            "its rates in on_fit_start of a callback."
        )


def _scale_schedule(scheduler: LRScheduler, k: int, group: dict[str, Any], rate: float) -> None:
    """Multiply all rates of parameter group `k`, in the group and in the scheduler, so that the initial one is `rate`.

    Schedules are multiples of the initial rate, so this gives the rates of a schedule that was created with it.
    """
    given = "max_lr" if isinstance(scheduler, OneCycleLR) else "initial_lr"
    initial = float(group[given])
    if initial == rate:
        return
    if initial == 0:
        raise ValueError(
            "the initial learning rate of a schedule must not be 0 to be changed by SetLR; found 0 in parameter group "
            f"{k}. Start a new run directory."
        )
    for name in ("lr", "initial_lr", "max_lr", "min_lr"):
        if name in group:
            _set(group, name, rate if name == given else group[name] * (rate / initial))
    for part in _parts(scheduler):
        for name in ("base_lrs", "max_lrs", "_last_lr"):
            if hasattr(part, name):
                rates = list(getattr(part, name))
                rates[k] = rates[k] * (rate / initial)
                setattr(part, name, rates)


def _parts(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a scheduler and those that it contains, as SequentialLR does."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _parts(part)


def _set(group: dict[str, Any], name: str, rate: Any) -> None:
    """Set a rate of a parameter group. A tensor keeps its identity, which a compiled optimizer depends on."""
    if isinstance(group[name], torch.Tensor):
        group[name].fill_(rate)
    else:
        group[name] = float(rate)
