"""Check that `fit` is not called inside another `fit` of the same step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from samplewise.step.step import Step

_steps_in_fit: weakref.WeakSet[Step] = weakref.WeakSet()


@contextmanager
def only_fit_of(step: Step) -> Iterator[None]:
    """Mark the step as being trained; raise RuntimeError if it is: two loops would share its window and counters."""
    if step in _steps_in_fit:
        raise RuntimeError(
            "fit must have returned before the same step is trained again; found a call of fit inside fit: from a "
            "callback, a loss function, a loader or another thread. Call trainer.stop(reason), and call fit again "
            "after it has returned. evaluate, predict and save may be called from callbacks."
        )
    _steps_in_fit.add(step)
    try:
        yield
    finally:
        _steps_in_fit.discard(step)
