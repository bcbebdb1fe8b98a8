"""Optimizers in compiled updates: their formulas, and buckets of parameters that share the scalars of a formula.

The scalars of a formula (learning rate, bias corrections, ...) are inputs of the compiled code, so a new learning rate
needs no recompilation. They are computed in Python's float64, as the optimizer does.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from samplewise.step.compiled import CannotCompile
from samplewise.step.config import FunctionalOptimizer, GradientDescent

Group = Mapping[str, Any]
State = dict[str, Tensor]


class Formula(ABC):
    """Update formula of an optimizer for one param group.

    The settings in `compiled_settings` are part of the code; the scalars in `numbers` are inputs. `ages` is True if
    the scalars depend on the step count.
    """

    ages = False

    @abstractmethod
    def compiled_settings(self, group: Group) -> tuple[Any, ...]:
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

    def compiled_settings(self, group: Group) -> tuple[Any, ...]:
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
        velocity = momentum * state["momentum_buffer"] + undamped * g
        g = g + momentum * velocity if group["nesterov"] else velocity
        return p - lr * g, {"momentum_buffer": velocity}


class Adam(Formula):
    """Adam and AdamW; AdamW is Adam with `decoupled_weight_decay`."""

    ages = True

    def compiled_settings(self, group: Group) -> tuple[Any, ...]:
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


class StatelessSGD(Formula):
    """sw.sgd(lr)"""

    def compiled_settings(self, group: Group) -> tuple[Any, ...]:
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
        return StatelessSGD() if isinstance(optimizer.rule, GradientDescent) else None
    step = optimizer.step
    while getattr(step, "_wrapped_by_lr_sched", False):  # the wrapper of LR schedulers only counts calls
        step = step.__wrapped__
    if any(hooks_of(optimizer)) or getattr(step, "__func__", step) is not type(optimizer).step:
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
    hooks = [getattr(optimizer, f"_optimizer_step_{when}_hooks", {}) for when in ("pre", "post")]
    return [*hooks, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]


def _decoupled(group: Group) -> bool:
    return bool(group.get("decoupled_weight_decay"))


# --- buckets ----------------------------------------------------------------------------------------------------------


@dataclass
class OptimBucket:
    """Parameters of one param group with the same step count; they share the scalars of the formula."""

    group: Group
    names: list[str] = field(default_factory=list)
    counters: list[tuple[Any, Tensor]] = field(default_factory=list)  # (view, tensor) of each `step`

    @property
    def step(self) -> float:
        """Current step count; read each time, because uncompiled updates also change it."""
        return self.counters[0][0][0] if self.counters else 0.0


class OptimBuckets:
    """All buckets of an optimizer. `states`: state tensors of the optimizer, by (parameter name, state name)."""

    def __init__(self, formula: Formula, optimizer: Any, names: dict[int, str]):
        """`names`: names of the parameters that have gradients, by id of the parameter."""
        self.formula = formula
        self.states: dict[tuple[str, str], Tensor] = {}
        self._all: list[OptimBucket] = []
        for group in optimizer.param_groups:
            by_step: dict[float, OptimBucket] = {}
            for p in (p for p in group["params"] if id(p) in names):
                state = optimizer.state.get(p, {}) if hasattr(optimizer, "state") else {}
                for key in formula.states(group):
                    tensor = state.get(key)
                    if not isinstance(tensor, Tensor) or tensor.shape != p.shape:
                        raise CannotCompile("a parameter has no optimizer state yet")
                    self.states[names[id(p)], key] = tensor
                step = state.get("step")
                count = 0.0 if step is None else float(step)
                bucket = by_step.setdefault(count, OptimBucket(group))
                bucket.names.append(names[id(p)])
                bucket.counters += [] if step is None else [(raw_view(step), step)]
            self._all += by_step.values()
        self.width = len(self.numbers())

    def numbers(self, updates: int = 1) -> list[float]:
        """Scalars of the formula for the next `updates` updates: per update, all buckets in order."""
        numbers: list[float] = []
        for k in range(updates):
            for bucket in self._all:
                numbers += self.formula.numbers(bucket.group, bucket.step + 1 + k)
        return numbers

    def advance(self, updates: int) -> None:
        """Add `updates` to the optimizer's step counters."""
        for bucket in self._all:
            step = bucket.step + updates
            for cell, _ in bucket.counters:
                cell[0] = step

    def apply(
        self,
        trained: dict[str, Tensor],
        gradients: dict[str, Tensor],
        states: dict[tuple[str, str], Tensor],
        numbers: Tensor,
    ) -> tuple[dict[str, Tensor], dict[tuple[str, str], Tensor]]:
        """Return new parameters and new optimizer states; `numbers` are the scalars of one update."""
        new_trained = dict(trained)
        new_states = dict(states)
        start = 0
        for bucket in self._all:
            width = len(self.formula.numbers(bucket.group, 1))
            scalars = numbers[start : start + width].unbind()
            start += width
            for name in bucket.names:
                p = trained[name]
                wide = torch.promote_types(p.dtype, torch.float32)  # 0.999 rounds to 1 in bfloat16
                state = {key: tensor.to(wide) for (owner, key), tensor in states.items() if owner == name}
                new, new_state = self.formula.apply(
                    bucket.group, p.to(wide), gradients[name].to(wide), state, [number.to(wide) for number in scalars]
                )
                new_trained[name] = new.to(p.dtype)
                for key, tensor in new_state.items():
                    new_states[name, key] = tensor.to(states[name, key].dtype)
        return new_trained, new_states

    def optimizer_settings(self) -> Sequence[Any]:
        """Optimizer settings that are compiled into the code; a change requires recompilation."""
        tensors = [isinstance(value, Tensor) for bucket in self._all for value in bucket.group.values()]
        return [self.formula.compiled_settings(bucket.group) for bucket in self._all] + tensors

    @property
    def counters(self) -> list[list[Any]]:
        """Views of the step counters of each bucket; within a bucket they must stay equal."""
        return [[cell for cell, _ in bucket.counters] for bucket in self._all]


# ctypes views of small CPU tensors avoid the microseconds of tensor indexing.
TYPES: dict[torch.dtype, Any] = {
    torch.float32: ctypes.c_float,
    torch.float64: ctypes.c_double,
    torch.int64: ctypes.c_int64,
}


def raw_view(tensor: Tensor) -> Any:
    """Return a flat ctypes array that shares the tensor's memory; the tensor must outlive it."""
    if tensor.dtype not in TYPES or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise CannotCompile(f"a scalar of the optimizer is {tensor.dtype} on {tensor.device}")
    return (TYPES[tensor.dtype] * tensor.numel()).from_address(tensor.data_ptr())
