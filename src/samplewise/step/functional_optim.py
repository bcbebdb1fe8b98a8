"""Functional optimizers: a function (params, gradients) -> None in place of a torch.optim optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.core.validate import accepts

Rule = Callable[[list[Tensor], list[Tensor]], None]


@dataclass(frozen=True)
class GradientDescent:
    """Gradient descent without state, p -= lr × g."""

    lr: float

    def __call__(self, params: list[Tensor], gradients: list[Tensor]) -> None:
        torch._foreach_add_(params, gradients, alpha=-self.lr)


def sgd(lr: float) -> Rule:
    """Stateless gradient descent p -= lr × g, for `Step(optimizer=...)`."""
    if not lr >= 0:
        raise ValueError(f"lr must be zero or positive; found {lr!r}.")
    return GradientDescent(lr)


class FunctionalOptimizer:
    """Adapter from a function (params, gradients) -> None to the part of the optimizer interface that a step uses."""

    def __init__(self, params: Iterable[Tensor], rule: Rule):
        self.rule = rule
        self.param_groups: list[dict[str, Any]] = [{"params": list(params), "lr": getattr(rule, "lr", float("nan"))}]

    @torch.no_grad()
    def step(self) -> None:
        """Call the function with the parameters that have a gradient, and their gradients in the same order."""
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        self.rule(params, [p.grad for p in params])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def as_optimizer(optimizer: Any, params: Iterable[Tensor]) -> Any:
    """Validate the `optimizer` argument of `Step`; a function becomes a `FunctionalOptimizer` for `params`."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "optimizer must update the parameters from the given gradients; found LBFGS, which calls the loss function "
            "itself. Write that loop with sw.gradients."
        )
    if hasattr(optimizer, "param_groups") and hasattr(optimizer, "step"):
        return optimizer
    if callable(optimizer) and not isinstance(optimizer, (type, torch.nn.Module)) and accepts(optimizer, 2):
        return FunctionalOptimizer(params, optimizer)
    found = type(optimizer).__name__
    if hasattr(optimizer, "__name__"):
        found = f"the {'class' if isinstance(optimizer, type) else 'function'} {optimizer.__name__}"
    raise TypeError(
        f"optimizer must be a torch.optim optimizer, or a function (params, gradients) -> None; found {found}. "
        "Write torch.optim.SGD(model.parameters(), lr=0.1), or sw.sgd(0.1)."
    )
