"""Windows: cursor over a batch, the samples accumulated for the next update, and the counters of a step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import cut, length
from samplewise.engine.deferred_checks import DeferredChecks
from samplewise.errors import NonFiniteGradientError, NonFiniteLossError
from samplewise.parallel.mode import WindowTotals
from samplewise.step.batch_columns import BatchColumns
from samplewise.step.batch_layouts import BatchLayouts
from samplewise.step.config import StepConfig
from samplewise.step.nonfinite import problem_of_counts
from samplewise.transforms.stats import PerSample, SampleStats, cat, cat_values, denominator, total_count

UNKNOWN = -1


class BatchCursor:
    """Cursor over a batch: yields slices of its rows, starting at row `consumed`. A batch that cannot be cut is
    returned whole. `number`: index of the batch in its epoch, from 0; None if unknown.
    """

    __slots__ = ("_ends", "_length", "batch", "consumed", "empty", "layouts", "number")

    def __init__(
        self,
        batch: Any,
        consumed: int = 0,
        number: int | None = None,
        layouts: BatchLayouts | None = None,
    ):
        self._ends: list[int] | None = None  # of groups that are kept together
        self.batch = batch
        self.consumed = consumed
        self.empty = False
        self.number = number
        self.layouts = layouts
        self._length: int | None = UNKNOWN

    def keep_together(self, owners: Tensor | None) -> None:
        """Cut slices of whole groups, or of a part of one group, so that the passes of a group do not depend on others.
        `owners`: group of each row, (B,), with the rows of a group one after the other; None: rows have no groups.
        """
        if owners is not None:
            self._ends = owners.unique_consecutive(return_counts=True)[1].cumsum(0).tolist()

    @property
    def rows(self) -> int | None:
        """Number of rows of the whole batch; None if it cannot be cut. Computed on first use: a batch that is taken
        whole does not need it.
        """
        if self._length == UNKNOWN:
            self._length = length(self.batch) if self.layouts is None else self.layouts.length(self.batch)
        return self._length

    @property
    def left(self) -> int:
        """Number of rows that are not consumed yet; 0 if the batch cannot be cut."""
        return (self.rows or self.consumed) - self.consumed

    def skip(self, rows: int) -> None:
        """Advance the cursor by `rows`."""
        if self.consumed == 0 and rows != self._length and self.layouts is not None:
            self.layouts.record_slice(self.batch)
        self.consumed += rows
        self.empty = self.consumed == self._length

    def take(self, limit: int | None) -> tuple[Any, int | None]:
        """Next slice of at most `limit` samples (None: all that remain) and its number of samples. The number is None
        if it is known only from the losses.
        """
        start = self.consumed
        if limit is None and start == 0:
            self.empty = True
            return self.batch, None
        total = self._length if self._length != UNKNOWN else self.rows
        if total is None:
            self.empty = True
            return self.batch, None
        stop = total if limit is None else min(start + limit, total)
        if self._ends is not None:
            stop = _end_of_slice(self._ends, start, stop)
        self.consumed = stop
        self.empty = stop == total
        if start == 0 and stop == total:
            return self.batch, total
        if start == 0 and self.layouts is not None:
            self.layouts.record_slice(self.batch)
        return cut(self.batch, start, stop, total), stop - start


def _end_of_slice(ends: list[int], start: int, stop: int) -> int:
    """End of a slice of rows start:stop that has whole groups, or rows of one group only. `ends`: of all groups."""
    group = bisect_right(ends, start)  # that of row `start`
    first = ends[group - 1] if group else 0
    if start > first or stop < ends[group]:
        return min(stop, ends[group])
    return ends[bisect_right(ends, stop) - 1]


@dataclass
class Counters:
    """Totals of a step since its creation. `samples`: samples in updates and in the open window."""

    samples: int = 0
    microbatches: int = 0
    updates: int = 0
    skipped: int = 0
    epochs: int = 0

    def load(self, state: dict[str, int]) -> None:
        """Set the counters in place: other objects refer to them."""
        loaded = Counters(**state)
        for counter in fields(self):
            setattr(self, counter.name, getattr(loaded, counter.name))


@dataclass(slots=True)
class Window:
    """Samples of the next update. The sum of their gradients is in `.grad`, their per-sample results in `parts`."""

    config: StepConfig  # the settings when the window was begun
    parts: list[SampleStats] = field(default_factory=list)
    deferred: list[Any] = field(default_factory=list)  # microbatches not computed yet: a transform needs all of them
    sized: bool = True  # whether the number of samples in `deferred` is known
    samples: int = 0
    share: float | None = None  # number of samples that this rank must add; None: not determined yet
    begun: bool = False  # gradients, buffers or counters have changed for this window, and it is not applied yet
    restored: bool = False  # loaded from a state, and no samples were added since
    summing: bool = False  # whether the ranks have begun to sum `.grad`, during the last pass of this rank
    divided: bool = False  # whether `.grad` already holds the mean instead of the sum
    failure: Exception | None = None  # why the update will be skipped
    collects: bool = False  # whether non-finite values are checked at the end of the window, to save host syncs
    checks: DeferredChecks = field(default_factory=DeferredChecks)  # values on the device that are not checked yet
    columns: list[BatchColumns] = field(default_factory=list)  # batch columns, if any are recorded
    totals: WindowTotals | None = None  # sums over all ranks, already checked for non-finite values
    seconds: float = 0.0  # of filling the window, with the forward passes
    forward_seconds: float = 0.0

    @property
    def open(self) -> bool:
        return bool(self.parts or self.deferred)

    def sums(self) -> tuple[float | Tensor, float | Tensor, float | Tensor, bool]:
        """Σ losses, Σ counts, denominator, and whether a count is invalid; zeros if the update will be skipped."""
        parts = [] if self.failure is not None else self.parts
        losses = cat([part.losses for part in parts]).double().sum() if parts else 0.0
        invalid = any(problem_of_counts([part]) is not None for part in parts)
        return losses, total_count(parts), denominator(parts), invalid

    # --- state -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, PerSample]:
        """Per-sample results of all parts, concatenated."""
        columns = {name: [getattr(part, source) for part in self.parts] for name, source in SAVED.items()}
        return {name: cat_values(values) for name, values in columns.items() if values and values[0] is not None}

    def failure_state(self) -> list[str]:
        return [] if self.failure is None else [type(self.failure).__name__, str(self.failure)]


SAVED = {  # name in a state dict -> attribute of SampleStats
    "losses": "losses",
    "counts": "counts",
    "norms": "raw_norms",
    "weights": "coefficients",
    "shares": "shares",
    "columns": "columns",
}


def restored(config: StepConfig, parts: dict[str, Any], failure: list[str], columns: list[dict[str, Any]]) -> Window:
    """Window restored from its state."""
    if not parts:  # other ranks may have samples
        return Window(config, restored=True)
    stats = SampleStats(**{SAVED[name]: values for name, values in parts.items()})
    batch_columns = [BatchColumns(**column) for column in columns]
    window = Window(config, parts=[stats], samples=len(stats), begun=True, restored=True, columns=batch_columns)
    if failure:
        kinds = {kind.__name__: kind for kind in (NonFiniteLossError, NonFiniteGradientError)}
        window.failure = kinds[failure[0]](failure[1])
    return window


def empty_stats(like: Tensor) -> SampleStats:
    """Results of 0 samples, for a rank that has none in the window."""
    wide = torch.float64 if like.dtype in (torch.float64, torch.complex128) else torch.float32
    none = torch.zeros(0, dtype=wide, device=like.device)
    return SampleStats(none, raw_norms=none)


def unknown_stats(samples: int, others: Sequence[SampleStats]) -> SampleStats:
    """Results filled with NaN, for a window that is skipped before its losses are computed. They have the same fields
    and columns as the other parts of the window.
    """
    unknown = torch.full((samples,), torch.nan)
    if not others:
        return SampleStats(unknown, raw_norms=unknown)

    def like(values: PerSample | None) -> Any:
        if isinstance(values, dict):
            return dict.fromkeys(values, unknown)
        return None if values is None else unknown

    return SampleStats(**{name: like(getattr(others[0], name)) for name in SAVED.values()})
