"""Events: who wants to know of what. A callback is any object with methods named after events.

    on_fit_start
    for epoch in ...:
        on_epoch_start                  epoch
        for update in step.over(...):
            on_update                   update
        on_epoch_end                    epoch, metrics (those of validation, and the epoch's own loss)
    on_fit_end                          reason
    on_error                            error: instead of on_fit_end, if anything has raised
                                        ... and, wherever a line of the log is written, right after it:
    on_log                              kind ("train", "epoch", "validation", "end", or your own), fields

Each asks by argument name for what it wants: those beside the event, or `trainer`, `step`, `model`. A method whose name
begins with on_ and is no event, or that asks for something that is not there, is an error when the callback is added. A
callback with `state_dict` and `load_state_dict` is part of every checkpoint.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

ALWAYS = ("trainer", "step", "model")
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

    def __init__(self, callbacks: Iterable[Any], **always: Any):
        self.callbacks, self._always = list(callbacks), always
        self._calls: dict[str, list[tuple[Callable[..., None], list[str]]]] = {event: [] for event in EVENTS}
        for callback in self.callbacks:
            self._add(callback)

    def tell(self, event: str, **what: Any) -> None:
        for call, asked in self._calls[event]:
            known = {**self._always, **what}
            call(**{name: known[name] for name in asked})

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self._with_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, callback in self._with_state():
            if name in state:
                callback.load_state_dict(state[name])

    def _with_state(self) -> Iterable[tuple[str, Any]]:
        """By kind, and by number among those of a kind: so that others can come and go."""
        seen = Counter[str]()
        for callback in self.callbacks:
            kind = type(callback).__name__
            if hasattr(callback, "state_dict"):
                yield f"{kind}.{seen[kind]}" if seen[kind] else kind, callback
                seen[kind] += 1

    def _add(self, callback: Any) -> None:
        kind = type(callback).__name__
        if isinstance(callback, type):
            raise TypeError(f"a callback must be an object; found the class {callback.__name__}. Call it.")
        methods = [name for name in dir(callback) if name.startswith("on_")]
        if hasattr(callback, "state_dict") != hasattr(callback, "load_state_dict"):
            raise TypeError(f"a callback must have state_dict and load_state_dict, or neither; {kind} has one of them.")
        if not methods:
            raise TypeError(f"a callback must have a method named after an event ({', '.join(EVENTS)}); found {kind}.")
        for method in methods:
            if method not in EVENTS:
                raise TypeError(f"{kind}.{method} must be one of the events {', '.join(EVENTS)}; found no such event.")
            asked = list(inspect.signature(getattr(callback, method)).parameters)
            strange = [name for name in asked if name not in (*ALWAYS, *EVENTS[method])]
            if strange:
                there = ", ".join((*EVENTS[method], *ALWAYS))
                raise TypeError(f"{kind}.{method} may ask for {there}; found {strange[0]!r}.")
            self._calls[method].append((getattr(callback, method), asked))
