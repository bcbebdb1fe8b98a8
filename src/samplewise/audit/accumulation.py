"""Backward passes whose gradients are in `.grad`.

Autograd adds to `.grad` in place, so that identity and version of the tensor show each change: a gradient that is None
or zero was reset, and one that changed outside of a backward pass was clipped, scaled or written by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

CHECKED = 4  # gradients whose values are compared with zero, if they changed outside of a backward pass

State = tuple[int, int] | None  # identity and version of a gradient
Passes = tuple[int, ...]  # numbers of backward passes


class Change(NamedTuple):
    """Changes of gradients since the last look.

    reset: passes whose gradients were erased from some parameter
    changed: identities of the parameters whose gradients have other values, or appeared
    replaced: a gradient is another tensor than before
    """

    reset: set[int]
    changed: set[int]
    replaced: bool = False


class Accumulation:
    """Gradients of the audited parameters, by identity of the parameter."""

    def __init__(self) -> None:
        self.parameters: dict[int, Tensor] = {}
        self.names: dict[int, str] = {}
        self.passes: dict[int, Passes] = {}  # whose gradients are in `.grad`
        self._states: dict[int, State] = {}

    def watch(self, named: Iterable[tuple[str, Tensor]], as_cleared: bool = False) -> None:
        """Add parameters. as_cleared: their gradients were written since the last look."""
        for name, p in named:
            if id(p) not in self.parameters:
                self.parameters[id(p)] = p
                self.names[id(p)] = name
                self.passes[id(p)] = ()
                self._states[id(p)] = None if as_cleared else _state(p)

    def look(self) -> Change:
        """Compare the gradients with those at the last look, outside of a backward pass."""
        before = self._states.copy()
        changed = self._new_states()
        reset: set[int] = set()
        if not changed:
            return Change(reset, set())
        remaining = {key for key in changed if self.parameters[key].grad is not None}
        gradients = [g for key in remaining if (g := self.parameters[key].grad) is not None]
        some = gradients[:: max(len(gradients) // CHECKED, 1)]
        if not any(bool(local_part(gradient.detach()).any()) for gradient in some):
            remaining = set()
        for key in changed - remaining:
            reset.update(self.passes[key])
            self.passes[key] = ()
        old_and_new = ((before[key], self._states[key]) for key in remaining)
        replaced = any(old is not None and new is not None and old[0] != new[0] for old, new in old_and_new)
        return Change(reset, remaining, replaced)

    def reached(self) -> set[int]:
        """Parameters whose gradients the backward pass that is over has changed since the last look."""
        return {key for key in self._new_states() if self.parameters[key].grad is not None}

    def add(self, keys: Iterable[int], number: int) -> None:
        """Record that the gradients of these parameters contain backward pass `number`."""
        # Most parameters have the same passes: one tuple is shared.
        longer: dict[Passes, Passes] = {}
        for key in keys:
            before = self.passes[key]
            self.passes[key] = longer.setdefault(before, (*before, number))

    def filled(self) -> set[int]:
        """Parameters whose gradients contain passes."""
        return {key for key, passes in self.passes.items() if passes}

    def passes_of(self, keys: Iterable[int]) -> set[int]:
        """Passes in the gradients of these parameters."""
        tuples = {self.passes.get(key, ()) for key in keys}
        return {number for passes in tuples for number in passes}

    def _new_states(self) -> set[int]:
        """Parameters whose gradient is another tensor, or another version of it, than at the last look."""
        states = self._states
        changed = set()
        for key, p in self.parameters.items():  # twice in each pass: no calls of functions
            gradient = p.grad
            if gradient is None:
                state = None
            else:
                state = id(gradient), getattr(gradient, "_local_tensor", gradient)._version
            if state != states[key]:
                states[key] = state
                changed.add(key)
        return changed


def local_part(tensor: Tensor) -> Tensor:
    """The part of a sharded tensor on this rank; another tensor itself. No collective."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _state(p: Tensor) -> State:
    gradient = p.grad
    return None if gradient is None else (id(gradient), local_part(gradient)._version)
