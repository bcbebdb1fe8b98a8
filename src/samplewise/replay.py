"""Computing something again as it was the first time: buffers and random state, remembered and brought back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def random_state() -> Callable[[], None]:
    """Remembers the random state of torch, Python and NumPy; the function it returns brings it back."""
    cpu, python = torch.get_rng_state(), random.getstate()
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)  # of no concern while nobody has imported it
    drawn = None if numpy is None else numpy.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []

    def restore() -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(drawn)
        if devices:
            torch.cuda.set_rng_state_all(devices)

    return restore


def snapshot(*modules: nn.Module) -> Callable[[], None]:
    """Remembers the buffers of modules and all random state; the function it returns brings them back."""
    buffers, restore_random_state = Buffers(modules), random_state()
    buffers.remember()

    def restore() -> None:
        buffers.restore()
        restore_random_state()

    return restore


def modes(*modules: nn.Module) -> Callable[[], None]:
    """Remembers which modules are in training mode; the function it returns brings that back."""
    before = [(module, module.training) for root in modules for module in root.modules()]

    def restore() -> None:
        for module, training in before:
            module.training = training  # not by train(): some modules do more there than note their mode

    return restore


def checksum(tensor: Tensor) -> Tensor:
    """One number, in float64: equal for equal tensors, and for no others but by accident."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    values = values.double().flatten()
    return (values * torch.arange(1, len(values) + 1, device=values.device).double().rsqrt()).sum().cpu()


SMALL = 2**14  # elements


class Kept(NamedTuple):
    buffer: Tensor | None
    version: int
    copy: Tensor | None

    def unchanged(self, now: Tensor | None) -> bool:
        return now is self.buffer and (now is None or now._version == self.version)


class Buffers:
    """The buffers of modules, remembered at little cost again and again.

    Most large buffers never change (masks, position ids). So the first time all are copied; from then on the small ones
    and those that have been seen to change. A large one that begins to change later cannot be brought back that once.
    (Versions tell of large ones only: BatchNorm's kernel changes its statistics and says nothing.)
    """

    def __init__(self, modules: Iterable[nn.Module]):
        own = {id(m): m._buffers for root in modules for m in root.modules() if m._buffers}
        self._owners = list(own.values())
        self._kept: list[dict[str, Kept]] = []
        self._moving: set[tuple[int, str]] = set()

    def remember(self) -> None:
        if not self._owners:
            return
        first = not self._kept
        self._note_changes()
        self._kept = [
            {name: self._keep(b, first or (k, name) in self._moving) for name, b in owner.items()}
            for k, owner in enumerate(self._owners)
        ]

    def restore(self) -> None:
        """Brings back what was remembered last."""
        self._note_changes()
        for owner, kept in zip(self._owners, self._kept, strict=False):
            for name, then in kept.items():
                owner[name] = then.buffer
                if then.buffer is not None and then.copy is not None:
                    with torch.no_grad():
                        then.buffer.copy_(then.copy)
                    kept[name] = then._replace(version=then.buffer._version)

    def restore_unless(self, well: Tensor) -> None:
        """The same, if a number on the device is zero: nobody waits for it."""
        for owner, kept in zip(self._owners, self._kept, strict=False):
            for name, then in kept.items():
                now = owner.get(name)
                if now is not None and then.copy is not None:
                    with torch.no_grad():
                        now.copy_(torch.where(well, now, then.copy))

    def moving(self) -> list[tuple[Tensor, bool]]:
        """Every buffer, and whether it, or another one of its module, has been seen to change."""
        self._note_changes()
        moved = [
            any((k, name) in self._moving or _differs(owner.get(name), then) for name, then in kept.items())
            for k, (owner, kept) in enumerate(zip(self._owners, self._kept, strict=True))
        ]
        return [
            (buffer, moves)
            for owner, moves in zip(self._owners, moved, strict=True)
            for buffer in owner.values()
            if buffer is not None
        ]

    def _keep(self, buffer: Tensor | None, moves: bool) -> Kept:
        if buffer is None:
            return Kept(None, 0, None)
        copied = moves or buffer.numel() <= SMALL
        return Kept(buffer, buffer._version, buffer.detach().clone() if copied else None)

    def _note_changes(self) -> None:
        for k, (owner, kept) in enumerate(zip(self._owners, self._kept, strict=False)):
            self._moving |= {(k, name) for name, then in kept.items() if not then.unchanged(owner.get(name))}


def _differs(now: Tensor | None, then: Kept) -> bool:
    return now is not None and then.copy is not None and not torch.equal(now, then.copy)
