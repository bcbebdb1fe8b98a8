"""Snapshot and restore of buffers, RNG state and train/eval modes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


def random_state() -> Callable[[], None]:
    """Save the RNG state of torch, Python and NumPy; return a function that restores it."""
    cpu = torch.get_rng_state()
    python = random.getstate()
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)  # None if NumPy has not been imported
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
    """Save the buffers of modules and the RNG state; return a function that restores both."""
    buffers = Buffers(modules)
    restore_random_state = random_state()
    buffers.remember()

    def restore() -> None:
        buffers.restore()
        restore_random_state()

    return restore


def modes(*modules: nn.Module) -> Callable[[], None]:
    """Save the train/eval mode of each module; return a function that restores it."""
    before = [(module, module.training) for root in modules for module in root.modules()]

    def restore() -> None:
        for module, training in before:
            module.training = training  # not train(): some modules override it with side effects

    return restore


def checksum(tensor: Tensor) -> Tensor:
    """Checksum of a tensor as a float64 scalar on the CPU: equal for equal tensors; collisions are unlikely."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    values = values.double().flatten()
    return (values * torch.arange(1, len(values) + 1, device=values.device).double().rsqrt()).sum().cpu()


SMALL = 2**14  # elements; smaller buffers are copied in every snapshot


class BufferCopy(NamedTuple):
    """Saved buffer: the tensor object, its version counter, and a copy of its values or None."""

    buffer: Tensor | None
    version: int
    copy: Tensor | None

    def unchanged(self, now: Tensor | None) -> bool:
        return now is self.buffer and (now is None or now._version == self.version)


class Buffers:
    """Repeated, cheap snapshots of the buffers of modules.

    Most large buffers never change (masks, position ids). The first snapshot copies all buffers; later ones copy
    buffers of at most SMALL elements and those that have changed before. If a large buffer changes for the first time
    after a later snapshot, its values cannot be restored that one time. Version counters are used for large buffers
    only, because BatchNorm's kernel changes its statistics without incrementing them.

    owners: buffers of each module that has any, name -> tensor.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        own = {id(m): m._buffers for root in modules for m in root.modules() if m._buffers}
        self.owners = list(own.values())
        self._kept: list[dict[str, BufferCopy]] = []
        self._moving: set[tuple[int, str]] = set()

    def remember(self) -> None:
        """Take a snapshot; it replaces the previous one."""
        first = not self._kept
        self._note_changes()
        self._kept = [
            {name: self._keep(b, first or (k, name) in self._moving) for name, b in owner.items()}
            for k, owner in enumerate(self.owners)
        ]

    def restore(self) -> None:
        """Restore the last snapshot."""
        self._note_changes()
        for owner, kept in zip(self.owners, self._kept, strict=False):
            for name, then in kept.items():
                owner[name] = then.buffer
                if then.buffer is not None and then.copy is not None:
                    with torch.no_grad():
                        then.buffer.copy_(then.copy)
                    kept[name] = then._replace(version=then.buffer._version)

    def restore_unless(self, well: Tensor) -> None:
        """Restore the last snapshot if the device scalar `well` is zero; needs no host sync."""
        for owner, kept in zip(self.owners, self._kept, strict=False):
            for name, then in kept.items():
                now = owner.get(name)
                if now is not None and then.copy is not None:
                    with torch.no_grad():
                        now.copy_(torch.where(well, now, then.copy))

    def moving(self) -> list[tuple[Tensor, bool]]:
        """Pairs (buffer, changed): changed is True if this buffer or another one of its module has changed before."""
        self._note_changes()
        found = []
        for k, (owner, kept) in enumerate(zip(self.owners, self._kept, strict=True)):
            moves = any((k, name) in self._moving or _differs(owner.get(name), then) for name, then in kept.items())
            found += [(buffer, moves) for buffer in owner.values() if buffer is not None]
        return found

    def _keep(self, buffer: Tensor | None, moves: bool) -> BufferCopy:
        if buffer is None:
            return BufferCopy(None, 0, None)
        copied = moves or buffer.numel() <= SMALL
        return BufferCopy(buffer, buffer._version, buffer.detach().clone() if copied else None)

    def _note_changes(self) -> None:
        for k, (owner, kept) in enumerate(zip(self.owners, self._kept, strict=False)):
            self._moving |= {(k, name) for name, then in kept.items() if not then.unchanged(owner.get(name))}


def _differs(now: Tensor | None, then: BufferCopy) -> bool:
    return now is not None and then.copy is not None and not torch.equal(now, then.copy)
