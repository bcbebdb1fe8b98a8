"""Hooks of an audit. No function of torch is replaced, and no hook returns a value.

A forward hook registers a hook on each output of a call at top level; that hook gets the gradient of the loss with
respect to the output when a backward pass begins. Hooks of torch that are called before and after each step of every
optimizer tell which passes the update consists of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from samplewise.audit.calls import Calls
from samplewise.audit.reader import Losses, Reader
from samplewise.audit.records import Output
from samplewise.audit.updates import Updates
from samplewise.audit.weights import UnusableError
from samplewise.core import observation


class Observer:
    """Records what a training loop does, from `start` to `stop`.

    failure: why the audit has ended early
    compiled: class of a model that was compiled by model.compile(), so that its calls are not seen
    on_update: called with the number of updates after each one; may raise
    """

    def __init__(self, model: nn.Module | None, losses: Losses | None, labels: Any, ids: Any, norms: bool):
        self._reader = Reader(losses)
        self.updates = Updates(model, self._reader, norms)
        self.calls = Calls(model, losses, labels, ids, self._on_gradient, self.updates.watch)
        self.failure: str | None = None
        self.compiled: str | None = None
        self.on_update: Callable[[int], None] | None = None
        self._model = model
        self._handles: list[Any] = []

    def start(self) -> None:
        # In compiled code the hooks do nothing, and Dynamo leaves them out: the condition is a constant there.
        def before(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling():
                self.calls.before()

        def after(module: nn.Module, args: Any, *results: Any) -> None:
            if not torch.compiler.is_compiling():
                call = self.calls.after(module, args, results)
                if call is not None:
                    self.guard(self.calls.record, *call)

        self._handles = [
            *(
                (
                    register_module_forward_pre_hook(before),
                    register_module_forward_hook(after, with_kwargs=True, always_call=True),
                )
            ),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
        self._filter = warnings.filters[0]
        observation.observers.append(self)

    def stop(self) -> None:
        """Remove all hooks, and read what is left."""
        for handle in self._handles:
            handle.remove()
            for name in ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called"):
                getattr(torch_module, name, {}).pop(handle.id, None)  # torch keeps these entries
        self._handles = []
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]
        observation.observers.remove(self)
        self.guard(self.updates.end)
        self.guard(self._reader.read)
        if self._model is not None and self._model._compiled_call_impl is not None:
            self.compiled = type(self._model).__name__

    def release(self) -> None:
        """Release models, parameters, optimizers and schedulers. Findings must be known."""
        self._model = None
        self._reader.discard()
        self.calls.release()
        self.updates.release()

    def _on_gradient(self, output: Output, g: Tensor) -> None:
        if self._handles and not observation.is_hidden():  # after the audit, the output may be alive
            self.guard(self.updates.on_gradient, output, g, self.guard)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.guard(self.updates.begin_step, optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        before = len(self.updates.steps)
        self.guard(self.updates.end_step, optimizer)
        if self.on_update is not None and len(self.updates.steps) > before:
            self.on_update(len(self.updates.steps))

    def on_step(self, optimizer: Any, counts: Sequence[Tensor], divisor: Tensor | float, ranks: bool) -> None:
        self.calls.averages_ranks |= ranks
        self.guard(self.updates.add_own_step, optimizer, counts, float(divisor))

    def guard(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function of the audit: its errors end the audit, not the training."""
        if self.failure is not None:
            return
        try:
            function(*args)
        except UnusableError as error:
            self.failure = str(error)
            self._reader.discard()
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = "" if trace is None else f" in {trace.tb_frame.f_code.co_name}, line {trace.tb_lineno}"
            message = str(error).partition("\n")[0]
            self.failure = f"{type(error).__name__}: {message}{where}"
            self._reader.discard()
