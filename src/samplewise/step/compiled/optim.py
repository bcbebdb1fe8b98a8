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
Number = Tensor | float


class Formula(ABC):
    """Update formula of an optimizer for one param group.

    The settings in `compiled_settings` are part of the code; the scalars in `numbers` are inputs. `ages` is True if
    the optimizer counts its steps, on which the scalars may depend.
    """

    ages = False

    @abstractmethod
    def compiled_settings(self, group: Group) -> tuple[Any, ...]:
        """Settings of the group that are compiled into the code."""

    @abstractmethod
    def states(self, group: Group) -> tuple[str, ...]:
        """Names of the state tensors per parameter, without the step count."""

    @abstractmethod
    def numbers(self, group: Group, step: Any) -> Sequence[Any]:
        """Scalars for update number `step`, counted from 1. If `step` and the learning rate of the group are tensors of
        float64, so are the scalars that depend on them.
        """

    @abstractmethod
    def neutral(self, group: Group) -> Sequence[float | None]:
        """Scalars with which an update with a zero gradient changes nothing; None for those with any value."""

    @abstractmethod
    def apply(
        self, group: Group, p: Tensor, g: Tensor, state: State, numbers: Sequence[Number]
    ) -> tuple[Tensor, State]:
        """Return the new parameter and its new state tensors."""


class SGD(Formula):
    """torch.optim.SGD"""

    def compiled_settings(self, group: Group) -> tuple[Any, ...]:
        return bool(group["momentum"]), bool(group["nesterov"]), bool(group["weight_decay"]), bool(group["maximize"])

    def states(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def numbers(self, group: Group, step: Any) -> Sequence[Any]:
        return group["lr"], group["momentum"], 1 - group["dampening"], group["weight_decay"]

    def neutral(self, group: Group) -> Sequence[float | None]:
        return 0.0, 1.0, None, 0.0

    def apply(
        self, group: Group, p: Tensor, g: Tensor, state: State, numbers: Sequence[Number]
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

    def numbers(self, group: Group, step: Any) -> Sequence[Any]:
        lr, (beta1, beta2), decay = group["lr"], map(float, group["betas"]), group["weight_decay"]
        root = (1 - beta2**step) ** 0.5
        shrink = 1 - lr * decay if _decoupled(group) else decay
        return lr / (1 - beta1**step), root, 1 - beta1, beta2, 1 - beta2, group["eps"], shrink

    def neutral(self, group: Group) -> Sequence[float | None]:
        return 0.0, None, 0.0, 1.0, None, None, 1.0 if _decoupled(group) else 0.0

    def apply(
        self, group: Group, p: Tensor, g: Tensor, state: State, numbers: Sequence[Number]
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


class RMSprop(Formula):
    """torch.optim.RMSprop"""

    ages = True

    def compiled_settings(self, group: Group) -> tuple[Any, ...]:
        return group["momentum"] > 0, bool(group["centered"]), bool(group["weight_decay"]), bool(group["maximize"])

    def states(self, group: Group) -> tuple[str, ...]:
        momentum = ("momentum_buffer",) if group["momentum"] > 0 else ()
        return ("square_avg", *momentum, *(("grad_avg",) if group["centered"] else ()))

    def numbers(self, group: Group, step: Any) -> Sequence[Any]:
        alpha = group["alpha"]
        return group["lr"], alpha, 1 - alpha, group["eps"], group["momentum"], group["weight_decay"]

    def neutral(self, group: Group) -> Sequence[float | None]:
        return 0.0, 1.0, 0.0, None, 1.0, 0.0

    def apply(
        self, group: Group, p: Tensor, g: Tensor, state: State, numbers: Sequence[Number]
    ) -> tuple[Tensor, State]:
        lr, alpha, lean, eps, momentum, decay = numbers
        g = -g if group["maximize"] else g
        g = g + decay * p if group["weight_decay"] else g
        square = alpha * state["square_avg"] + lean * g * g
        new = {"square_avg": square}
        if group["centered"]:
            new["grad_avg"] = mean = state["grad_avg"] + lean * (g - state["grad_avg"])
            square = square - mean * mean
        change = g / (square.sqrt() + eps)
        if group["momentum"] > 0:
            new["momentum_buffer"] = change = momentum * state["momentum_buffer"] + change
        return p - lr * change, new


class StatelessSGD(Formula):
    """sw.sgd(lr)"""

    def compiled_settings(self, group: Group) -> tuple[Any, ...]:
        return ()

    def states(self, group: Group) -> tuple[str, ...]:
        return ()

    def numbers(self, group: Group, step: Any) -> Sequence[Any]:
        return (group["lr"],)

    def neutral(self, group: Group) -> Sequence[float | None]:
        return (0.0,)

    def apply(
        self, group: Group, p: Tensor, g: Tensor, state: State, numbers: Sequence[Number]
    ) -> tuple[Tensor, State]:
        return p - numbers[0] * g, {}


FORMULAS: dict[type, Formula] = {
    torch.optim.SGD: SGD(),
    torch.optim.Adam: Adam(),
    torch.optim.AdamW: Adam(),
    torch.optim.RMSprop: RMSprop(),
}


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
        self._places = {id(group): k for k, group in enumerate(optimizer.param_groups)}
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

    @property
    def steps(self) -> list[float]:
        """Current step count of each bucket."""
        return [bucket.step for bucket in self._all]

    def tensor_scalars(self, lr: Tensor, counts: Sequence[Tensor], fit: Tensor | None) -> list[list[Number]]:
        """Scalars for each bucket from tensors: lr of all groups (0-d) or of each group, and step counts before the
        update. Where `fit` (bool) is False, scalars are neutral.
        """
        scalars: list[list[Number]] = []
        for k, bucket in enumerate(self._all):
            rate = lr if lr.dim() == 0 else lr[self._places[id(bucket.group)]]
            step = counts[k].double() + 1 if counts else 1.0
            group = {**bucket.group, "lr": rate.double() if counts else rate}
            numbers: list[Number] = [*self.formula.numbers(group, step)]
            if fit is not None:
                for place, neutral in enumerate(self.formula.neutral(group)):
                    if neutral is not None:
                        numbers[place] = torch.where(fit, numbers[place], neutral)
            scalars.append(numbers)
        return scalars

    def split(self, numbers: Tensor) -> list[Sequence[Tensor]]:
        """Scalars of the formula for each bucket, from those of all buckets in order."""
        widths = [len(self.formula.numbers(bucket.group, 1)) for bucket in self._all]
        return [part.unbind() for part in numbers.split(widths)]

    def apply(
        self,
        trained: dict[str, Tensor],
        gradients: dict[str, Tensor],
        states: dict[tuple[str, str], Tensor],
        scalars: Sequence[Sequence[Number]],
    ) -> tuple[dict[str, Tensor], dict[tuple[str, str], Tensor]]:
        """Return new parameters and new optimizer states; `scalars` of the formula, for each bucket."""
        new_trained = dict(trained)
        new_states = dict(states)
        for bucket, numbers in zip(self._all, scalars, strict=True):
            for name in bucket.names:
                p = trained[name]
                wide = torch.promote_types(p.dtype, torch.float32)  # 0.999 rounds to 1 in bfloat16
                state = {key: tensor.to(wide) for (owner, key), tensor in states.items() if owner == name}
                new, new_state = self.formula.apply(
                    bucket.group, p.to(wide), gradients[name].to(wide), state, [_cast(n, wide) for n in numbers]
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


def _cast(number: Number, dtype: torch.dtype) -> Number:
    return number.to(dtype) if isinstance(number, Tensor) else number


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
