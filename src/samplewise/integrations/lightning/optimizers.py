"""Optimizers of a trainer: those that a backward pass serves, and the passes since the last step of each.

With several optimizers, as for a GAN, the gradient of a sample is that of the parameters of one optimizer. A pass that
reaches the parameters of more than one, because no optimizer is toggled, is made in parts, one for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from samplewise.engine.graph.graph import edge_of
from samplewise.engine.graph.structure import read_structure
from samplewise.errors import DistributedError, GraphError
from samplewise.integrations.adapter import BatchPass
from samplewise.parallel.ddp import is_replica
from samplewise.parallel.sharded_parameters import is_sharded
from samplewise.step.backward import BackwardResult

TOGGLE = "Call self.toggle_optimizer(optimizer) before the forward pass."


@dataclass(frozen=True)
class PassPart:
    """Part of a backward pass: the gradients of some parameters."""

    numbers: list[int]  # of the optimizers that have these parameters; empty: no optimizer has them
    others: list[Tensor]  # parameters of the other parts

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager: backward passes leave the gradients of the other parameters as they are."""
        for p in self.others:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in self.others:
                p.requires_grad_(True)


class Optimizers:
    """Optimizers of a trainer, numbered in the order of configure_optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        self._optimizers = [_unwrapped(optimizer) for optimizer in optimizers]
        self._toggled: Optimizer | None = None
        # Passes since the last step of an optimizer; no key if there was none.
        self._windows: dict[int, list[BatchPass]] = {}

    def toggle(self, module: LightningModule, original: Callable[..., Any], optimizer: Any) -> None:
        original(optimizer)
        self._toggled = _unwrapped(optimizer)

    def untoggle(self, module: LightningModule, original: Callable[..., Any], optimizer: Any) -> None:
        original(optimizer)
        self._toggled = None

    # --- one pass ----------------------------------------------------------------------------------------------------

    def parts(self, loss: Tensor, module: LightningModule, per_sample: bool) -> list[PassPart]:
        """Parts of the backward pass of a loss: one, unless `per_sample` and parameters of several optimizers."""
        if len(self._optimizers) < 2:
            return [PassPart([0], [])]
        # Discard passes whose gradients were set to None or zero before a step: one of the generator leaves gradients
        # on the discriminator, which are not used. The trainer has no hook for zero_grad in manual optimization.
        for number, window in self._windows.items():
            gradients = (p.grad for p in _parameters(self._optimizers[number]))
            if window and not any(grad is not None and bool(grad.any()) for grad in gradients):
                self._windows[number] = []
        named = _reached_parameters(loss, module)
        owned = {}
        for number, optimizer in enumerate(self._optimizers):
            if self._toggled is None or optimizer is self._toggled:
                members = set(map(id, _parameters(optimizer)))
                owned[number] = frozenset(name for name, p in named.items() if id(p) in members)
        if not per_sample:
            return [PassPart([number for number, names in owned.items() if names], [])]
        sets = dict.fromkeys(names for names in owned.values() if names)
        _refuse_common(owned, sets)
        parts = [[number for number, names in owned.items() if names == names_of_part] for names_of_part in sets]
        rest = frozenset(named).difference(*sets)
        if rest:
            sets[rest] = None
            parts.append([])
        if len(parts) > 1 and (is_replica(named.values()) or is_sharded(module)):
            raise DistributedError(
                "manual_backward must differentiate for one optimizer at a time if a model is trained on several "
                f"ranks; found parameters of several optimizers that require gradients. {TOGGLE}"
            )
        return [
            PassPart(numbers, [p for name, p in named.items() if name not in names])
            for numbers, names in zip(parts, sets, strict=True)
        ]

    def add(self, part: PassPart, passes: list[BatchPass]) -> None:
        for number in part.numbers:
            self._windows[number] = self._windows.get(number, []) + passes

    # --- one update --------------------------------------------------------------------------------------------------

    def number(self, optimizer: Any) -> int:
        """Position of an optimizer in those of the trainer."""
        optimizer = _unwrapped(optimizer)
        return next((k for k, candidate in enumerate(self._optimizers) if candidate is optimizer), 0)

    def has_run(self, number: int) -> bool:
        """True if a backward pass has served the optimizer since its last step."""
        return number in self._windows

    def log_name(self, number: int) -> str:
        """First part of the names of logged values."""
        return "samplewise" if len(self._optimizers) < 2 else f"samplewise/optimizer_{number}"

    def take_passes(self, number: int) -> list[BatchPass]:
        """Remove and return the passes of the open window of an optimizer. With several, its number is a column."""
        passes = self._windows.pop(number, [])
        return passes if len(self._optimizers) < 2 else [_with_column(each, number) for each in passes]


def _unwrapped(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _reached_parameters(loss: Tensor, module: LightningModule) -> dict[str, Tensor]:
    """Parameters that require gradients and that the graph of the loss contains. That of a sharded model contains
    other tensors in their place.
    """
    named: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not loss.requires_grad or is_sharded(module):
        return named
    structure, _, _ = read_structure(*edge_of(loss), {id(p): name for name, p in named.items()})
    names = set(structure.leaves.values())
    return {name: p for name, p in named.items() if name in names}


def _refuse_common(owned: Mapping[int, frozenset[str]], sets: Mapping[frozenset[str], None]) -> None:
    """Raise GraphError if optimizers have some parameters in common, but not all."""
    for names in sets:
        common = [name for other in sets if other != names for name in sorted(names & other)]
        if common:
            numbers = " and ".join(str(number) for number, members in owned.items() if common[0] in members)
            raise GraphError(
                f"manual_backward must differentiate each parameter for one optimizer; found {common[0]!r} in "
                f"optimizers {numbers}. {TOGGLE}"
            )


def _with_column(batch_pass: BatchPass, number: int) -> BatchPass:
    stats = batch_pass.results.stats
    column = torch.full((len(stats),), number, device=stats.losses.device)
    columns = {**(stats.columns or {}), "optimizer": column}
    return batch_pass._replace(results=BackwardResult(replace(stats, columns=columns)))
