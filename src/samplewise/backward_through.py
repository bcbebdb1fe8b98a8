"""`through=` of `sw.backward`: backward passes of Accelerate, Fabric, gradient scalers, or any function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor

from samplewise.engine.arguments import wide_dtype
from samplewise.engine.gradients import Gradients, norms_during


class HasBackward(Protocol):
    """Object that runs backward passes, such as an Accelerator or a Fabric: its method `backward` gets the loss."""

    @property
    def backward(self) -> Callable[..., object]: ...


Through = HasBackward | torch.amp.GradScaler | Callable[..., object]


class FrameworkPass:
    """Backward pass of a framework, or of torch if `through` is None.

    factor: by which the framework multiplies the loss.
    skips_overflow: it has a gradient scaler, which skips updates with non-finite gradients.
    """

    def __init__(self, through: Through | None, loss: Tensor, retain_graph: bool = False):
        self.factor: Tensor | float = 1.0
        self.skips_overflow = _has_scaler(through)
        self._through = through
        self._backward = pass_of(through)
        self._ran = False
        if not callable(self._backward):
            raise TypeError(
                "through must be an Accelerator, a Fabric, a GradScaler, or a function that runs a backward pass; "
                f"found {type(through).__name__}."
            )
        self._options = {"retain_graph": True} if retain_graph else {}
        if retain_graph and not _accepts_retain_graph(self._backward):
            raise TypeError(
                "through must accept retain_graph, as loss.backward does, if the graph is retained; found a function "
                "without this argument. Add it, or leave out retain_graph=True."
            )
        if through is not None:
            self.factor = self._find_factor(loss)

    def _find_factor(self, loss: Tensor) -> Tensor:
        one = torch.ones((), dtype=wide_dtype(loss.dtype), device=loss.device, requires_grad=True)
        self._backward(one * 1)
        if one.grad is None:
            raise TypeError(
                "through must run the backward pass of the loss that it gets; found that it computed no gradient. "
                "Pass a function that calls loss.backward()."
            )
        return one.grad

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss as the framework differentiates it, so that half-precision gradients do not underflow."""
        return loss * self.factor if isinstance(self.factor, Tensor) else loss

    def run(self, total: Tensor, g: Gradients | None = None) -> None:
        """Run the pass of `total`, once. With `g`, the gradients of its parts, also compute their norms, if possible in
        the same pass.
        """
        if self._ran:
            return
        if g is not None and not g._sharded and _accepts_retain_graph(self._backward):
            norms_during(g, partial(self._pass, total, retain_graph=True))
        else:
            if g is not None:
                g.norms()
            self._pass(total, **self._options)

    def _pass(self, total: Tensor, **options: bool) -> None:
        self._ran = True
        with self.own_passes():  # fabric.backward ends with a reset of its flag
            self._backward(total, **options)

    def own_passes(self) -> AbstractContextManager[None]:
        """Context manager for backward passes other than those of the framework."""
        return nullcontext() if self._through is None else _allowed_by_fabric()


def pass_of(through: Any) -> Any:
    """Function that runs the backward pass of a loss."""
    if through is None:
        return Tensor.backward
    if isinstance(through, torch.amp.GradScaler):
        return lambda loss, **options: through.scale(loss).backward(**options)
    return getattr(through, "backward", through)


def _accepts_retain_graph(function: Callable[..., object]) -> bool:
    parameters = signature(function).parameters.values()
    return any(p.name == "retain_graph" or p.kind is p.VAR_KEYWORD for p in parameters)


def _has_scaler(through: Any) -> bool:
    """True for a gradient scaler, and for an Accelerator or a Fabric that has one; also for a method of these."""
    framework = getattr(through, "__self__", through)
    if isinstance(framework, torch.amp.GradScaler):
        return framework.is_enabled()
    owners = (framework, getattr(framework, "_precision", None))
    return any(getattr(owner, "scaler", None) is not None for owner in owners)


@contextmanager
def _allowed_by_fabric() -> Iterator[None]:
    """Context manager: backward passes in the block count as passes of fabric.backward. With mixed precision, Fabric
    refuses all others, by hooks on the outputs of the model.
    """
    flag = "_in_fabric_backward"
    names = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")
    before = {name: vars(sys.modules[name])[flag] for name in names if hasattr(sys.modules.get(name), flag)}
    for name in before:
        setattr(sys.modules[name], flag, True)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(sys.modules[name], flag, value)
