"""Window: the samples accumulated for the next update, and the counters of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from samplewise.errors import NonFiniteGradientError, NonFiniteLossError
from samplewise.step.batch_columns import BatchColumns
from samplewise.step.microbatch_stats import MicrobatchStats, total
from samplewise.transforms.stats import PerSample, together


@dataclass
class Counters:
    """Totals of a step since its creation. `samples`: samples in updates and in the open window."""

    samples: int = 0
    microbatches: int = 0
    updates: int = 0
    skipped: int = 0
    epochs: int = 0


@dataclass(frozen=True)
class Agreement:
    """Sums of a window over all ranks."""

    skips: float  # number of ranks that found a non-finite value and may skip the update
    samples: int
    ended: int  # number of ranks whose loader has ended
    losses: float  # Σ losses
    counts: float  # Σ counts
    denominators: float
    odd: float  # number of ranks with negative counts


@dataclass(slots=True)
class Window:
    """Per-sample results of the samples whose gradient sum is in `.grad`."""

    parts: list[MicrobatchStats] = field(default_factory=list)
    waiting: list[Any] = field(default_factory=list)  # deferred microbatches, if a transform needs the whole window
    sized: bool = True  # whether the number of samples in `waiting` is known
    samples: int = 0
    seconds: float = 0.0
    divided: bool = False  # whether `.grad` already holds the mean instead of the sum
    begun: bool = False  # whether gradients or buffers may have changed since the last update
    failure: Exception | None = None  # why the update will be skipped
    noted: list[BatchColumns] = field(default_factory=list)  # batch columns, if any are recorded
    share: int | None = None  # number of samples that this rank must add, if there are several ranks
    agreed: Agreement | None = None  # sums over all ranks, already checked for non-finite values

    @property
    def open(self) -> bool:
        return bool(self.parts or self.waiting)

    @property
    def denominator(self) -> Tensor | float:
        return total(self.parts) if self.agreed is None else self.agreed.denominators

    @property
    def others(self) -> int:
        """Number of samples on other ranks."""
        return 0 if self.agreed is None else self.agreed.samples - self.samples

    @property
    def unseen(self) -> list[MicrobatchStats]:
        """Parts that are not checked for non-finite values yet."""
        return self.parts if self.agreed is None else []

    def state(self) -> dict[str, PerSample]:
        """Per-sample results of all parts, concatenated."""
        columns = {name: [getattr(p, name) for p in self.parts] for name in MicrobatchStats.__slots__}
        return {name: together(values) for name, values in columns.items() if values and values[0] is not None}

    def failure_state(self) -> list[str]:
        return [] if self.failure is None else [type(self.failure).__name__, str(self.failure)]


def opened(parts: dict[str, Any], failure: list[str], noted: list[dict[str, Any]]) -> Window:
    """Window restored from its state."""
    if not parts:
        return Window()
    part = MicrobatchStats(**parts)
    window = Window(parts=[part], samples=len(part), begun=True, noted=[BatchColumns(**each) for each in noted])
    if failure:
        kinds = {kind.__name__: kind for kind in (NonFiniteLossError, NonFiniteGradientError)}
        window.failure = kinds[failure[0]](failure[1])
    return window


def empty(like: Tensor) -> MicrobatchStats:
    """Part with 0 samples, for a rank that has none in the window."""
    wide = torch.float64 if like.dtype in (torch.float64, torch.complex128) else torch.float32
    none = torch.zeros(0, dtype=wide, device=like.device)
    return MicrobatchStats(none, norms=none)


def nothing_known(samples: int, beside: Sequence[MicrobatchStats]) -> MicrobatchStats:
    """Part filled with NaN, for a window that is skipped before its losses are computed. It has the same fields and
    columns as the other parts of the window, `beside`.
    """
    unknown = torch.full((samples,), torch.nan)
    if not beside:
        return MicrobatchStats(unknown, norms=unknown)

    def none_of(values: PerSample | None) -> Any:
        if isinstance(values, dict):
            return dict.fromkeys(values, unknown)
        return None if values is None else unknown

    return MicrobatchStats(*(none_of(getattr(beside[0], name)) for name in MicrobatchStats.__slots__))
