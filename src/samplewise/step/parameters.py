"""Trained parameters: those of the optimizer, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.engine.backward import without_grads
from samplewise.errors import ParameterError
from samplewise.parallel.sharded_parameters import local_gradient, sharded_gradient


class TrainedParameters:
    """The optimizer's parameters, with their names in the modules: `owned` as the optimizer holds them, `named` as the
    autograd graph contains them. Both are equal unless the optimizer holds shards. `leaves`: id of a shard -> name and
    whole parameter.
    """

    def __init__(self, optimizer: Any, modules: Sequence[nn.Module], leaves: Mapping[int, tuple[str, Tensor]]):
        self._optimizer = optimizer
        self._modules = modules
        self._leaves = leaves
        self._count = -1
        self.cleared = 0  # number of calls of clear(): shows whether `.grad` still belongs to an update
        self.named: dict[str, Tensor] = {}
        self.owned: dict[str, Tensor] = {}
        self.refresh()

    def refresh(self) -> None:
        """Update `owned` and `named` if the number of the optimizer's parameters has changed."""
        count = self._number()
        if count != self._count:
            self.owned = self._name()
            self._count = count
            wholes = dict(self._leaves.values())
            self.named = {name: wholes.get(name, p) for name, p in self.owned.items()}

    @property
    def has_changed(self) -> bool:
        """True if the optimizer has another number of parameters than at the last `refresh`."""
        return self._number() != self._count

    def _number(self) -> int:
        count = 0
        for group in self._optimizer.param_groups:
            count += len(group["params"])
        return count

    @property
    def sharded(self) -> bool:
        """True if the optimizer holds shards."""
        return bool(self._leaves)

    @property
    def device(self) -> torch.device:
        """Current device of the parameters: a model may be moved after the step was created."""
        return next(iter(self.named.values())).device

    def wanted(self) -> dict[str, Tensor]:
        """Parameters that currently require gradients."""
        return {name: p for name, p in self.named.items() if p.requires_grad}

    def gradients(self) -> list[Tensor]:
        """All gradients in `.grad`: the values of sparse gradients, this rank's shard of sharded ones."""
        gradients = []
        for p in self.owned.values():
            gradient = p.grad
            if gradient is not None:
                usual = gradient.layout is torch.strided and not self._leaves
                gradients.append(gradient if usual else self._dense(p))
        return gradients

    def named_gradients(self) -> dict[str, Tensor]:
        """As `gradients`, by name."""
        return {name: self._dense(p) for name, p in self.owned.items() if p.grad is not None}

    def _dense(self, p: Tensor) -> Tensor:
        assert p.grad is not None
        if id(p) in self._leaves:
            return local_gradient(p)
        if p.grad.layout is torch.strided:
            return p.grad
        p.grad = p.grad.coalesce()  # sums the values of rows that occur several times
        return p.grad._values()

    def local_gradients(self) -> dict[str, Tensor]:
        """All gradients in `.grad` by name: this rank's shard of sharded ones."""
        found: dict[str, Tensor] = {}
        for name, p in self.owned.items():
            if p.grad is not None:
                found[name] = local_gradient(p) if id(p) in self._leaves else p.grad
        return found

    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Set `.grad` to these tensors, as `local_gradients` returns them."""
        for name, gradient in gradients.items():
            p = self.owned[name]
            p.grad = sharded_gradient(p, gradient) if id(p) in self._leaves else gradient

    def fill(self) -> None:
        """Make gradients dense: zeros for trainable parameters without a gradient, and for missing sparse rows."""
        for p in self.owned.values():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
            elif p.grad is not None and p.grad.layout is not torch.strided:
                p.grad = p.grad.to_dense()

    def coalesce(self) -> None:
        """Sum the rows of sparse gradients that occur several times."""
        for p in self.owned.values():
            if p.grad is not None and p.grad.layout is torch.sparse_coo:
                p.grad = p.grad.coalesce()

    def without_grads(self) -> AbstractContextManager[None]:
        """Context manager: `.grad` is None inside and is restored on exit, for backward passes of other code."""
        return without_grads(dict.fromkeys([*self.named.values(), *self.owned.values()]))

    def clear(self) -> None:
        """Set `.grad` of all parameters to None."""
        self.cleared += 1
        for p in self.named.values():
            p.grad = None
        for p in self.owned.values() if self._leaves else ():
            p.grad = None

    def untracked_parameters(self) -> dict[str, Tensor]:
        """Parameters of the modules that require gradients and that the optimizer does not have."""
        ours = {id(p) for p in self.named.values()}
        found = {name: self._leaves.get(id(p), (name, p))[1] for name, p in _names(self._modules)}
        return {name: p for name, p in found.items() if p.requires_grad and id(p) not in ours}

    def _name(self) -> dict[str, Tensor]:
        known = {id(p): name for name, p in reversed(list(_names(self._modules)))}
        for part, (name, whole) in self._leaves.items():
            known[part] = known.pop(id(whole), name)
        params = [p for group in self._optimizer.param_groups for p in group["params"]]
        if not params:
            raise ParameterError(
                "the optimizer must have at least one parameter; found none. Create it with model.parameters()."
            )
        if self._leaves and any(id(p) not in self._leaves for p in params):
            raise ParameterError(
                "the optimizer of a sharded model must hold sharded parameters of this model only; found whole ones, "
                "or others. Create it with model.parameters(), after fully_shard and before any forward pass."
            )
        return {known.get(id(p), f"optimizer.{k}"): p for k, p in enumerate(params)}


def _names(modules: Iterable[nn.Module]) -> Iterable[tuple[str, Tensor]]:
    """Names and parameters of the model; those of a loss module have the prefix "loss."."""
    for k, module in enumerate(modules):
        yield from ((name if k == 0 else f"loss.{name}", p) for name, p in module.named_parameters())
