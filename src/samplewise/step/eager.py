"""The protocol of runners, which make the updates of a step, and the runner of uncompiled updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from samplewise.step.apply import UpdateApplier
from samplewise.step.update import Update
from samplewise.step.window import BatchCursor
from samplewise.step.window_builder import WindowBuilder


class Runner(Protocol):
    """Makes the updates of a step from batches."""

    def run(self, cursor: BatchCursor, blocks: bool) -> Iterator[Update]:
        """Make the updates that the samples of a batch complete, and yield each one before the next one is begun;
        remaining samples stay in the open window. `blocks`: the caller does not look at single updates, so that one
        `Update` may stand for several.
        """

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
    """Uncompiled updates: fill a window, then apply it. `status`: why updates are not compiled."""

    def __init__(self, builder: WindowBuilder, applier: UpdateApplier, status: str):
        self.builder = builder
        self.applier = applier
        self.status = status

    def run(self, cursor: BatchCursor, blocks: bool) -> Iterator[Update]:
        return map(self.applier.apply, self.builder.fill(cursor))

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
