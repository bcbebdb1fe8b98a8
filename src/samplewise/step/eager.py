"""Uncompiled updates: fill a window, then apply it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from samplewise.step.apply import UpdateApplier
from samplewise.step.update import Update
from samplewise.step.window import BatchCursor, Window
from samplewise.step.window_builder import WindowBuilder


class Updates(Protocol):
    """How a step makes updates: `fill` yields complete windows of a batch, `apply` makes the update of one."""

    def fill(self, cursor: BatchCursor, blocks: bool) -> Iterator[Any]:
        """Add the samples of a batch, and yield each window that they complete. `blocks`: the caller does not look at
        single updates, so that several may be made at once.
        """

    def apply(self, window: Any) -> Update:
        """Make the update of a window."""

    @property
    def status(self) -> str:
        """State of compilation: "compiled", or the reason why updates are not compiled."""

    def slow_compile_notice(self, notify: Callable[[str], None]) -> AbstractContextManager[None]:
        """Context manager that passes notices about slow compilation to `notify(line)`."""

    def state_dict(self) -> dict[str, Any]:
        """State of compilation."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def rank_state(self) -> dict[str, Any]:
        """State of compilation in which ranks may differ."""

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Restore what `rank_state` returned."""


class EagerRunner:
    """Updates made by a `WindowBuilder` and an `UpdateApplier`. `status`: why updates are not compiled."""

    def __init__(self, builder: WindowBuilder, applier: UpdateApplier, status: str):
        self.builder = builder
        self.applier = applier
        self.apply = applier.apply
        self.status = status

    def fill(self, cursor: BatchCursor, blocks: bool) -> Iterator[Window]:
        return self.builder.fill(cursor)

    def slow_compile_notice(self, notify: Callable[[str], None]) -> AbstractContextManager[None]:
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return {
            "known": [],
            "given_up": None,
            "slower": {},
            "tried": [],
            "failed": [],
            "changes": 0,
            "values": {},
            "settings": "",
            "parts": {},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Check the state; uncompiled updates use none of it."""
        if not {"known", "given_up"} <= state.keys() <= self.state_dict().keys():
            raise ValueError(
                f"the compilation state of a step must have the keys {', '.join(self.state_dict())}; found "
                f"{', '.join(map(str, state)) or 'none'}. Load what step.state_dict() returned."
            )

    def rank_state(self) -> dict[str, Any]:
        return {}

    def load_rank_state(self, state: dict[str, Any]) -> None:
        """Uncompiled updates use none of it."""
