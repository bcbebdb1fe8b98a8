"""Observers of updates, which `sw.audit` registers.

Passes of the engine are no passes of the user's loop: observers ignore what happens in a block of `hidden`, and are
notified of the weights of samples instead. Nothing here takes time without an observer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor


class UpdateObserver(Protocol):
    def on_step(self, optimizer: Any, counts: Sequence[Tensor], divisor: Tensor | float, ranks: bool) -> None:
        """Notice an update of `sw.Step`. counts: of the samples of each microbatch, the terms of the denominator;
        divisor: of the sum of their losses; ranks: it is that of all ranks.
        """


observers: list[UpdateObserver] = []
_hidden = 0
_shown = False


def is_hidden() -> bool:
    return _hidden > 0


@contextmanager
def hidden() -> Iterator[None]:
    """Context manager: calls of modules and backward passes in the block are not observed."""
    global _hidden
    _hidden += 1
    try:
        yield
    finally:
        _hidden -= 1


@contextmanager
def hidden_during(context: AbstractContextManager[None]) -> Iterator[None]:
    """As `hidden`, inside of another context manager."""
    with context, hidden():
        yield


def show_gradients(loss: Tensor, outputs: Sequence[Tensor]) -> None:
    """Let observers see the gradient of a loss with respect to outputs, in a pass that reaches no parameter."""
    global _shown
    _shown = True
    try:
        torch.autograd.grad(loss.sum(), outputs, retain_graph=True, allow_unused=True)
    finally:
        _shown = False


def is_shown() -> bool:
    """True during a pass of `show_gradients`."""
    return _shown
