"""Events of a training run and dispatch to callbacks. A callback is any object with methods named after events.

    on_fit_start
    for epoch in ...:
        on_epoch_start                  epoch
        for update in step.over(...):
            on_update                   update
        on_epoch_end                    epoch, metrics (of validation, and the training loss of the epoch)
    on_fit_end                          reason
    on_error                            error: called in place of on_fit_end if an exception was raised
    on_log                              kind ("train", "epoch", "validation", "end", or your own), fields;
                                        called after each line that is written to the log

A method receives what its argument names ask for: the arguments listed with the event, and `trainer`, `step` and
`model`. `epoch` is an int from 0 (log lines count from 1), `update` a `sw.Update`, `metrics` a dict of floats, `reason`
and `kind` are texts, `error` is the exception, and `fields` a dict. TypeError is raised when the callback is added if a
method whose name begins with on_ is not an event, or if it has an argument with another name. A callback with
`state_dict` and `load_state_dict` is saved in every checkpoint.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

CONTEXT = ("trainer", "step", "model")
EVENTS: dict[str, tuple[str, ...]] = {
    "on_fit_start": (),
    "on_epoch_start": ("epoch",),
    "on_update": ("update",),
    "on_epoch_end": ("epoch", "metrics"),
    "on_fit_end": ("reason",),
    "on_error": ("error",),
    "on_log": ("kind", "fields"),
}


class Listeners:
    """The callbacks of a trainer, by event."""

    def __init__(self, callbacks: Iterable[Any], **context: Any):
        """context: trainer, step and model, which are available in every event; none to check the callbacks only."""
        self.callbacks = list(callbacks)
        self._context = context
        # Methods with their context bound, and the names of the arguments of the event that each asks for.
        self._methods: dict[str, list[tuple[Callable[..., None], list[str]]]] = {event: [] for event in EVENTS}
        for callback in self.callbacks:
            self._add(callback)

    def emit(self, event: str, **arguments: Any) -> None:
        """Call the methods of an event with the arguments that each asks for."""
        for method, names in self._methods[event]:
            method(**(arguments if len(names) == len(arguments) else {name: arguments[name] for name in names}))

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self._with_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, callback in self._with_state():
            if name in state:
                callback.load_state_dict(state[name])

    def _with_state(self) -> Iterable[tuple[str, Any]]:
        """Yield (key, callback). The key is the class name, with a number from the second of a class on: callbacks of
        other classes can then be added or removed between save and load.
        """
        earlier = Counter[str]()
        for callback in self.callbacks:
            kind = type(callback).__name__
            if hasattr(callback, "state_dict"):
                yield f"{kind}.{earlier[kind]}" if earlier[kind] else kind, callback
                earlier[kind] += 1

    def _add(self, callback: Any) -> None:
        kind = type(callback).__name__
        if isinstance(callback, type):
            raise TypeError(f"a callback must be an object; found the class {callback.__name__}. Pass an instance.")
        methods = [name for name in dir(callback) if name.startswith("on_")]
        if hasattr(callback, "state_dict") != hasattr(callback, "load_state_dict"):
            raise TypeError(
                f"a callback must have both state_dict and load_state_dict, or neither; found {kind}, which has one."
            )
        if not methods:
            raise TypeError(f"a callback must have a method named after an event ({', '.join(EVENTS)}); found {kind}.")
        for method in methods:
            if method not in EVENTS:
                raise TypeError(f"{kind}.{method} must be one of the events {', '.join(EVENTS)}; found no such event.")
            names = list(inspect.signature(getattr(callback, method)).parameters)
            available = (*EVENTS[method], *CONTEXT)
            unknown = [name for name in names if name not in available]
            if unknown:
                raise TypeError(
                    f"arguments of {kind}.{method} must be among {', '.join(available)}; found {unknown[0]!r}."
                )
            context = {name: value for name, value in self._context.items() if name in names}
            bound = partial(getattr(callback, method), **context) if context else getattr(callback, method)
            self._methods[method].append((bound, [name for name in names if name not in CONTEXT]))
