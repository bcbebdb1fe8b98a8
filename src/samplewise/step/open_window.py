"""Protection of an open window, whose gradient sums are in `.grad` while code of the caller runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from samplewise.errors import ParameterError
from samplewise.step.parameters import TrainedParameters

REMEDY = (
    "Call step.flush() or step.apply() first, which makes the update and closes the window, and leave out "
    "optimizer.zero_grad() and optimizer.step(), which the step does itself."
)


class OpenWindowGuard:
    """Notices what code of the caller does to the sums of an open window: `leave` before it runs, `enter` after it.

    A change of a gradient increments its version counter, or replaces the tensor; the tensors are held, so that a new
    one cannot have the same id. A change of a parameter increments its version counter, too: model.load_state_dict()
    does, whose values the sums do not belong to.
    """

    def __init__(self, trained: TrainedParameters, optimizer: Any):
        self._trained = trained
        self._optimizer = optimizer
        self.active = False  # True between `leave` and `enter`
        self._sums: list[tuple[Tensor | None, int]] = []  # gradients with their versions
        self._versions: list[int] | None = None  # of the parameters; None: they may change
        guard = weakref.ref(self)  # the optimizer may be used further when the step is deleted
        self._hook = lambda *_: _refuse_step(guard())

    def leave(self, parameters: bool = True) -> None:
        """Record the gradients, and let optimizer.step() raise until `enter`. parameters=False: parameters may change,
        as those of a restored window, whose model may be loaded after the step.
        """
        sums: list[tuple[Tensor | None, int]] = []
        for p in self._trained.owned.values():
            gradient = p.grad
            sums.append((gradient, -1 if gradient is None else gradient._version))
        self._sums = sums
        self.active = True
        watched = parameters and not self._trained.sharded  # shards are written when they are gathered
        self._versions = [p._version for p in self._trained.owned.values()] if watched else None
        # Not registered by register_step_pre_hook, whose handles count as new hooks for the engine, and for this time
        # only, because updates of optimizers with hooks are not compiled.
        self._hooks()[id(self)] = self._hook

    def enter(self) -> None:
        """Raise ParameterError if the gradients, or the parameters of the optimizer, have changed since `leave`."""
        if not self.active:
            return
        if self._trained.has_changed:
            raise ParameterError(
                "the parameters of the optimizer must stay the same while a window is open; found that some were added "
                f"or removed after its first samples. {REMEDY}"
            )
        for (name, p), (before, version) in zip(self._trained.owned.items(), self._sums, strict=True):
            after = p.grad
            if after is not before or (after is not None and after._version != version):
                raise ParameterError(
                    "`.grad` holds the sums of an open window and must not be changed by other code, nor by the loss "
                    f"function; found that the gradient of {name!r} was {_change(before, after)}, for example by "
                    "optimizer.zero_grad(), by a backward pass, or by another step on the same model. The samples of "
                    f"the window are discarded. {REMEDY}"
                )
        for (name, p), version in zip(self._trained.owned.items(), self._versions or (), strict=False):
            if p._version != version:
                raise ParameterError(
                    "parameters must not change while a window is open, because the gradients of its samples belong to "
                    f"their values; found that {name!r} was changed in place, for example by model.load_state_dict(). "
                    f"The samples of the window are discarded. Call step.flush() before, or step.load_state_dict() "
                    "after it, which discards the window and restores that of the checkpoint."
                )
        self.forget()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: `leave` before the block, and `enter` after it unless it raises. Layers may change their
        parameters in a forward pass, as nn.Embedding(max_norm=) does.
        """
        self.leave(parameters=False)
        try:
            yield
        except BaseException:
            self.forget()
            raise
        self.enter()

    def refuse_step(self) -> None:
        """Raise ParameterError if a gradient is still a sum of the window. After zero_grad() they are others."""
        held = {id(gradient) for gradient, _ in self._sums if gradient is not None}
        if any(id(p.grad) in held for p in self._trained.owned.values()):
            raise ParameterError(
                "optimizer.step() must not be called while a window of the step is open, because `.grad` holds a sum "
                f"that is not divided yet; found samples that are in no update. {REMEDY}"
            )

    def forget(self) -> None:
        """Stop watching: the window is continued or discarded."""
        if self.active:
            self.active = False
            self._sums = []
            self._hooks().pop(id(self), None)

    def _hooks(self) -> dict[int, Any]:
        """Pre-hooks of optimizer.step(); a function in place of an optimizer has none."""
        return getattr(self._optimizer, "_optimizer_step_pre_hooks", {})


def _change(before: Tensor | None, after: Tensor | None) -> str:
    if before is after:
        return "changed in place"
    if after is None:
        return "removed"
    return "added" if before is None else "replaced"


def _refuse_step(guard: OpenWindowGuard | None) -> None:
    """Pre-hook of optimizer.step(), without the arguments of the call."""
    if guard is not None:
        guard.refuse_step()
