"""The parameters that are trained: the optimizer's, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.errors import ParameterError


class Trained:
    """The optimizer's parameters with the names they have in the modules: `owned` as the optimizer has them, `named` as
    graphs contain them. They are the same, unless the optimizer has parts of them, of which `leaves` knows the whole.
    """

    def __init__(
        self, optimizer: Any, modules: Sequence[nn.Module], leaves: Mapping[int, tuple[str, Tensor]] | None = None
    ):
        self._optimizer, self._modules, self._leaves = optimizer, modules, leaves or {}
        self._count = -1
        self.cleared = 0  # how often: tells whether gradients are still those that one has seen
        self.named: dict[str, Tensor] = {}
        self.owned: dict[str, Tensor] = {}
        self.follow()

    def follow(self) -> None:
        """Looks again, should the optimizer have got more."""
        count = sum(len(group["params"]) for group in self._optimizer.param_groups)
        if count != self._count:
            self.owned, self._count = self._name(), count
            wholes = dict(self._leaves.values())
            self.named = {name: wholes.get(name, p) for name, p in self.owned.items()}

    @property
    def device(self) -> torch.device:
        """Where they are now: a model may be moved after the step was made."""
        return next(iter(self.named.values())).device

    def wanted(self) -> dict[str, Tensor]:
        """Those that are not frozen right now."""
        return {name: p for name, p in self.named.items() if p.requires_grad}

    def gradients(self) -> list[Tensor]:
        """What is in `.grad`; of sparse gradients the values, of sharded ones this rank's part."""
        return [self._dense(p) for p in self.owned.values() if p.grad is not None]

    def _dense(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        if id(p) in self._leaves:
            return self.part(p)
        if p.grad.layout is torch.strided:
            return p.grad
        p.grad = p.grad.coalesce()  # a row that occurs twice has one gradient
        return p.grad._values()

    def part(self, p: Any) -> Tensor:
        """Of a sharded gradient, that of this rank."""
        with torch.no_grad():
            return p.grad.to_local()

    def fill(self) -> None:
        """Zeros where a parameter that could have a gradient has none, or none in some of its rows."""
        for p in self.owned.values():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
            elif p.grad is not None and p.grad.layout is not torch.strided:
                p.grad = p.grad.to_dense()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Gradients out of the way of somebody else's backward pass."""
        kept = [(p, p.grad) for p in self.named.values()]
        for p, _ in kept:
            p.grad = None
        try:
            yield
        finally:
            for p, gradient in kept:
                p.grad = gradient

    def clear(self) -> None:
        self.cleared += 1
        for p in self.named.values():
            p.grad = None
        for p in self.owned.values() if self._leaves else ():
            p.grad = None

    def strangers(self) -> dict[str, Tensor]:
        """Parameters of the modules that could be trained and that the optimizer does not have."""
        ours = {id(p) for p in self.named.values()}
        return {name: p for name, p in _names(self._modules) if p.requires_grad and id(p) not in ours}

    def _name(self) -> dict[str, Tensor]:
        known = {id(p): name for name, p in reversed(list(_names(self._modules)))}
        for part, (name, whole) in self._leaves.items():
            known[part] = known.pop(id(whole), name)
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        if not params:
            raise ParameterError("the optimizer must have a parameter to train; found none.")
        if any(id(whole) == id(p) for p in params for _, whole in self._leaves.values()):
            raise ParameterError(
                "the optimizer of a sharded model must have the parts; found whole parameters. Make it before the step."
            )
        return {known.get(id(p), f"optimizer.{k}"): p for k, p in enumerate(params)}


def _names(modules: Iterable[nn.Module]) -> Iterable[tuple[str, Tensor]]:
    """As in the model; those of a loss module come after "loss."."""
    for k, module in enumerate(modules):
        yield from ((name if k == 0 else f"loss.{name}", p) for name, p in module.named_parameters())
