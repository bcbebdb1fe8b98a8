"""The update that is being put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samplewise.errors import NonFiniteGradientError, NonFiniteLossError
from samplewise.step.columns import Noted
from samplewise.step.parts import Part, total
from samplewise.transforms.numbers import PerSample, together


@dataclass
class Counters:
    """What a step has done in all. `samples` have gone into an update or into the open window."""

    samples: int = 0
    microbatches: int = 0
    updates: int = 0
    skipped: int = 0
    epochs: int = 0


@dataclass(frozen=True)
class Agreement:
    """What all ranks have of a window, together."""

    skips: float  # ranks that have found something not finite, and may leave the update out
    samples: int
    ended: int  # ranks that have no more
    losses: float  # their sum
    counts: float
    denominators: float
    odd: float  # ranks with counts below zero


@dataclass(slots=True)
class Window:
    """Gradient sums are in `.grad`; here is what they are made of."""

    parts: list[Part] = field(default_factory=list)
    waiting: list[Any] = field(default_factory=list)  # pieces, where a transform must see the window as a whole
    sized: bool = True  # whether it is known how many samples those have
    samples: int = 0
    seconds: float = 0.0
    divided: bool = False  # whether the sums are means already
    begun: bool = False  # whether anything may have been changed for it
    failure: Exception | None = None  # why it will be skipped
    noted: list[Noted] = field(default_factory=list)  # of its batches, if anything is asked for
    share: int | None = None  # how many samples this rank is to bring, if there are others
    agreed: Agreement | None = None  # what all ranks have, and have looked at together

    @property
    def open(self) -> bool:
        return bool(self.parts or self.waiting)

    @property
    def denominator(self) -> Tensor | float:
        return total(self.parts) if self.agreed is None else self.agreed.denominators

    @property
    def others(self) -> int:
        """Samples of other ranks."""
        return 0 if self.agreed is None else self.agreed.samples - self.samples

    @property
    def unseen(self) -> list[Part]:
        """Parts that have not been looked at for what is not finite."""
        return self.parts if self.agreed is None else []

    def state(self) -> dict[str, PerSample]:
        """The numbers of its samples, joined."""
        columns = {name: [getattr(p, name) for p in self.parts] for name in Part.__slots__}
        return {name: together(values) for name, values in columns.items() if values and values[0] is not None}

    def failure_state(self) -> list[str]:
        return [] if self.failure is None else [type(self.failure).__name__, str(self.failure)]


def opened(parts: dict[str, Any], failure: list[str], noted: list[dict[str, Any]]) -> Window:
    """A window from its state."""
    if not parts:
        return Window()
    part = Part(**parts)
    window = Window(parts=[part], samples=len(part), begun=True, noted=[Noted(**each) for each in noted])
    if failure:
        kinds = {kind.__name__: kind for kind in (NonFiniteLossError, NonFiniteGradientError)}
        window.failure = kinds[failure[0]](failure[1])
    return window


def empty(like: Tensor) -> Part:
    """Of a rank that has no samples."""
    wide = torch.float64 if like.dtype in (torch.float64, torch.complex128) else torch.float32
    none = torch.zeros(0, dtype=wide, device=like.device)
    return Part(none, norms=none)


def nothing_known(samples: int, beside: Sequence[Part]) -> Part:
    """For a window that is skipped before its losses are known. It has the columns of the parts beside it."""
    unknown = torch.full((samples,), torch.nan)
    if not beside:
        return Part(unknown, norms=unknown)

    def none_of(values: PerSample | None) -> Any:
        return dict.fromkeys(values, unknown) if isinstance(values, dict) else None if values is None else unknown

    return Part(*(none_of(getattr(beside[0], name)) for name in Part.__slots__))
