"""Computing something again as it was the first time: buffers and random state, remembered and brought back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

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


class Buffers:
    """The buffers of modules, remembered at little cost again and again.

    Most buffers never change (masks, position ids), and those can be large. So the first time all are copied; from then
    on only those that have been seen to change. One that begins to change later cannot be brought back that once.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        own = (module for root in modules for module in root.modules())
        places = {(id(m), name): (m._buffers, name) for m in own for name, b in m._buffers.items() if b is not None}
        self._places = list(places.values())
        self._kept: list[tuple[Tensor, int, Tensor | None]] = []
        self._moving: set[int] = set()

    def remember(self) -> None:
        if not self._places:
            return
        first = not self._kept
        self._moving |= self._changed()
        self._kept = [
            (b, b._version, b.detach().clone() if first or k in self._moving else None)
            for k, b in enumerate(self._current())
        ]

    def restore(self) -> None:
        """Brings back what was remembered last."""
        changed = self._changed()
        self._moving |= changed
        with torch.no_grad():
            for k in changed:
                buffer, _, copy = self._kept[k]
                owner, name = self._places[k]
                owner[name] = buffer
                if copy is not None:
                    buffer.copy_(copy)
        self._kept = [(b, b._version, copy) for b, _, copy in self._kept]

    def _current(self) -> list[Any]:
        return [owner[name] for owner, name in self._places]

    def _changed(self) -> set[int]:
        return {
            k
            for k, (now, (then, version, _)) in enumerate(zip(self._current(), self._kept, strict=False))
            if now is not then or now._version != version
        }
