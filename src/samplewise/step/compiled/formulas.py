"""What an optimizer does to one parameter, as a formula. The numbers in it are inputs: a new learning rate needs no new
code. They are computed in Python's float64, as the optimizer does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from samplewise.step.rules import ByRule, Descent

Group = Mapping[str, Any]
State = dict[str, Tensor]


class Formula(ABC):
    """For one of the optimizer's groups. What `shape_of` tells is part of the code; what `numbers` are is not. `ages`:
    whether they depend on the number of steps.
    """

    ages = False

    @abstractmethod
    def shape_of(self, group: Group) -> tuple[Any, ...]:
        """What the code depends on."""

    @abstractmethod
    def states(self, group: Group) -> tuple[str, ...]:
        """The tensors that are kept for each parameter, beside the number of steps."""

    @abstractmethod
    def numbers(self, group: Group, step: float) -> Sequence[float]:
        """For the update that is number `step`, from 1."""

    @abstractmethod
    def apply(
        self, group: Group, p: Tensor, g: Tensor, state: State, numbers: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        """The new parameter and its new state."""


class SGD(Formula):
    def shape_of(self, group: Group) -> tuple[Any, ...]:
        return bool(group["momentum"]), bool(group["nesterov"]), bool(group["weight_decay"]), bool(group["maximize"])

    def states(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def numbers(self, group: Group, step: float) -> Sequence[float]:
        return float(group["lr"]), group["momentum"], 1 - group["dampening"], group["weight_decay"]

    def apply(
        self, group: Group, p: Tensor, g: Tensor, state: State, numbers: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        lr, momentum, undamped, decay = numbers
        g = -g if group["maximize"] else g
        g = g + decay * p if group["weight_decay"] else g
        if not group["momentum"]:
            return p - lr * g, {}
        kept = momentum * state["momentum_buffer"] + undamped * g
        g = g + momentum * kept if group["nesterov"] else kept
        return p - lr * g, {"momentum_buffer": kept}


class Adam(Formula):
    """And AdamW, which is Adam with `decoupled_weight_decay`."""

    ages = True

    def shape_of(self, group: Group) -> tuple[Any, ...]:
        return _decoupled(group), bool(group["weight_decay"]), bool(group["amsgrad"]), bool(group["maximize"])

    def states(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")

    def numbers(self, group: Group, step: float) -> Sequence[float]:
        lr, (beta1, beta2), decay = float(group["lr"]), map(float, group["betas"]), group["weight_decay"]
        root = (1 - beta2**step) ** 0.5
        shrink = 1 - lr * decay if _decoupled(group) else decay
        return lr / (1 - beta1**step), root, 1 - beta1, beta2, 1 - beta2, group["eps"], shrink

    def apply(
        self, group: Group, p: Tensor, g: Tensor, state: State, numbers: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        size, root, lean1, beta2, lean2, eps, shrink = numbers
        g = -g if group["maximize"] else g
        if group["weight_decay"]:
            p, g = (p * shrink, g) if _decoupled(group) else (p, g + shrink * p)
        mean = state["exp_avg"] + lean1 * (g - state["exp_avg"])
        square = beta2 * state["exp_avg_sq"] + lean2 * g * g
        new = {"exp_avg": mean, "exp_avg_sq": square}
        if group["amsgrad"]:
            new["max_exp_avg_sq"] = square = torch.maximum(state["max_exp_avg_sq"], square)
        return p - size * (mean / (square.sqrt() / root + eps)), new


class Bare(Formula):
    """sw.sgd(lr)"""

    def shape_of(self, group: Group) -> tuple[Any, ...]:
        return ()

    def states(self, group: Group) -> tuple[str, ...]:
        return ()

    def numbers(self, group: Group, step: float) -> Sequence[float]:
        return (float(group["lr"]),)

    def apply(
        self, group: Group, p: Tensor, g: Tensor, state: State, numbers: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        return p - numbers[0] * g, {}


FORMULAS: dict[type, Formula] = {torch.optim.SGD: SGD(), torch.optim.Adam: Adam(), torch.optim.AdamW: Adam()}


def formula_of(optimizer: Any) -> Formula | None:
    """None where only the optimizer itself knows: of subclasses, and of options that change more than numbers."""
    if isinstance(optimizer, ByRule):
        return Bare() if isinstance(optimizer.rule, Descent) else None
    if any(hooks_of(optimizer)) or not _has_its_own_step(optimizer):
        return None
    if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
        return None
    if any(isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values()):
        return None  # its type counts when the optimizer computes with it
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        return None  # which are pairs of real numbers for some
    return FORMULAS.get(type(optimizer))


def hooks_of(optimizer: Any) -> list[Any]:
    """Its own, and those of all optimizers."""
    mine = [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    return [*mine, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]


def _has_its_own_step(optimizer: Any) -> bool:
    """Schedulers put another one there that only notes that it was called; others do more."""
    step = optimizer.step
    while getattr(step, "_wrapped_by_lr_sched", False):
        step = step.__wrapped__
    return getattr(step, "__func__", step) is type(optimizer).step


def _decoupled(group: Group) -> bool:
    return bool(group.get("decoupled_weight_decay"))
