"""Update formulas of optimizers for compiled updates.

The scalars of a formula (learning rate, bias corrections, ...) are inputs of the compiled code, so a new learning rate
needs no recompilation. They are computed in Python's float64, as the optimizer does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from samplewise.step.functional_optim import FunctionalOptimizer, GradientDescent

Group = Mapping[str, Any]
State = dict[str, Tensor]


class Formula(ABC):
    """Update formula of an optimizer for one param group.

    The settings in `shape_of` are compiled into the code; the scalars in `numbers` are inputs. `ages` is True if the
    scalars depend on the step count.
    """

    ages = False

    @abstractmethod
    def shape_of(self, group: Group) -> tuple[Any, ...]:
        """Settings of the group that are compiled into the code."""

    @abstractmethod
    def states(self, group: Group) -> tuple[str, ...]:
        """Names of the state tensors per parameter, without the step count."""

    @abstractmethod
    def numbers(self, group: Group, step: float) -> Sequence[float]:
        """Scalars for update number `step`, counted from 1."""

    @abstractmethod
    def apply(
        self, group: Group, p: Tensor, g: Tensor, state: State, numbers: Sequence[Tensor]
    ) -> tuple[Tensor, State]:
        """Return the new parameter and its new state tensors."""


class SGD(Formula):
    """torch.optim.SGD"""

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
    """Adam and AdamW; AdamW is Adam with `decoupled_weight_decay`."""

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
    """Return the formula of an optimizer; None for subclasses, hooks and options that change the formula."""
    if isinstance(optimizer, FunctionalOptimizer):
        return Bare() if isinstance(optimizer.rule, GradientDescent) else None
    if any(hooks_of(optimizer)) or not _has_its_own_step(optimizer):
        return None
    if any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups):
        return None
    if any(isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values()):
        return None  # a tensor's dtype would affect the result
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        return None  # some optimizers treat these as pairs of real numbers
    return FORMULAS.get(type(optimizer))


def hooks_of(optimizer: Any) -> list[Any]:
    """Step hooks of this optimizer and the global optimizer hooks."""
    mine = [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    return [*mine, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]


def _has_its_own_step(optimizer: Any) -> bool:
    """Test that `optimizer.step` is not replaced; the wrapper of LR schedulers, which only counts calls, is allowed."""
    step = optimizer.step
    while getattr(step, "_wrapped_by_lr_sched", False):
        step = step.__wrapped__
    return getattr(step, "__func__", step) is type(optimizer).step


def _decoupled(group: Group) -> bool:
    return bool(group.get("decoupled_weight_decay"))
