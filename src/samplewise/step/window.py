"""Windows: the cursor over a batch, the samples accumulated for the next update and the batch columns recorded for
them, and the counters of a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import Path, cut, length, name_of, pick_column, row_counts
from samplewise.engine.deferred_checks import DeferredChecks
from samplewise.errors import BatchError, NonFiniteGradientError, NonFiniteLossError
from samplewise.parallel.mode import WindowTotals
from samplewise.step.config import StepConfig
from samplewise.step.nonfinite import problem_of_counts
from samplewise.transforms.stats import PerSample, SampleStats, cat, cat_values, denominator, total_count

UNKNOWN = -1  # length of a batch that was not computed yet; None: the batch cannot be cut


class BatchCursor:
    """Cursor over a batch: yields slices of its rows, starting at row `consumed`. A batch that cannot be cut is
    returned whole. `number`: index of the batch in its epoch, from 0; None if unknown.
    """

    __slots__ = ("_ends", "_length", "batch", "consumed", "empty", "layouts", "number")

    def __init__(self, batch: Any, consumed: int = 0, number: int | None = None):
        self._ends: list[int] | None = None  # of groups that are kept together
        self.batch = batch
        self.consumed = consumed
        self.empty = False
        self.number = number
        self.layouts: BatchLayouts | None = None  # those of the step, if it has admitted the batch
        self._length: int | None = UNKNOWN

    def keep_together(self, owners: Tensor) -> None:
        """Cut slices of whole groups, or of a part of one group, so that the passes of a group do not depend on others.
        `owners`: group of each row, (B,), with the rows of a group one after the other.
        """
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
            stop = self._end_of_slice(self._ends, start, stop)
        self.consumed = stop
        self.empty = stop == total
        if start == 0 and stop == total:
            return self.batch, total
        if start == 0 and self.layouts is not None:
            self.layouts.record_slice(self.batch)
        return cut(self.batch, start, stop, total), stop - start

    @staticmethod
    def _end_of_slice(ends: list[int], start: int, stop: int) -> int:
        """End of a slice of rows start:stop that has whole groups, or rows of one group only. `ends`: of all groups."""
        group = bisect_right(ends, start)  # that of row `start`
        first = ends[group - 1] if group else 0
        if start > first or stop < ends[group]:
            return min(stop, ends[group])
        return ends[bisect_right(ends, stop) - 1]


class BatchLayouts:
    """Structures of the batches of a step, as strings. A batch whose tensors have different numbers of rows is not
    sliced; then no batch of the same structure is, also if all numbers are equal by chance, as those of a (T, T) mask
    and of T samples.
    """

    def __init__(self) -> None:
        self.sliced: set[str] = set()
        self.whole: set[str] = set()
        self._recorded: set[tuple[Any, ...]] = set()  # types and keys of the batches in `sliced`

    def length(self, batch: Any) -> int | None:
        """Number of samples of a batch that may be sliced; None if it may not. Raises BatchError if batches of its
        structure were sliced before and must not be.
        """
        rows = length(batch)
        if rows is None:
            counts = row_counts(batch)
            if len(set(counts.values())) > 1:
                self._refuse_slices(counts)
        elif self.whole and _structure(row_counts(batch)) in self.whole:
            return None
        return rows

    def record_slice(self, batch: Any) -> None:
        """Record that a batch of this structure is sliced."""
        keys = (
            type(batch),
            tuple(batch) if isinstance(batch, Mapping) else len(batch) if isinstance(batch, (tuple, list)) else 0,
        )
        if keys not in self._recorded:  # traversing every batch would cost microseconds
            self._recorded.add(keys)
            self.sliced.add(_structure(row_counts(batch)))

    def _refuse_slices(self, counts: dict[Path, int]) -> None:
        """Record a structure that must not be sliced; raise BatchError if it was."""
        structure = _structure(counts)
        self.whole.add(structure)
        if structure in self.sliced:
            listing = ", ".join(f"{rows} in {name_of(path)}" for path, rows in counts.items())
            raise BatchError(
                "all tensors of a batch must have one row per sample if batches are sliced, except for those that the "
                f"loss function declares as constants; found rows: {listing}. In earlier batches these numbers were "
                "equal, so that all tensors were sliced, and their updates may be wrong. Decorate the loss function "
                'with @sw.batch_constants("mask"), with the keys of the entries that are not per sample.'
            )

    def state_dict(self) -> dict[str, list[str]]:
        return {"sliced": sorted(self.sliced), "whole": sorted(self.whole)}

    def load_state_dict(self, state: dict[str, list[str]]) -> None:
        self.sliced = set(state["sliced"])
        self.whole = set(state["whole"])
        self._recorded = set()


def _structure(counts: dict[Path, int]) -> str:
    return repr(list(counts))


# --- windows ----------------------------------------------------------------------------------------------------------


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
    checks: DeferredChecks | None = None  # values checked at its end, to save host syncs; None: checked at once
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
        losses = cat([part.kept_losses for part in parts]).double().sum() if parts else 0.0
        invalid = any(problem_of_counts([part]) is not None for part in parts)
        return losses, total_count(parts), denominator(parts), invalid

    # --- state -----------------------------------------------------------------------------------------------------

    def sample_state(self) -> dict[str, PerSample]:
        """Per-sample results of all parts, concatenated."""
        columns = {name: [getattr(part, source) for part in self.parts] for name, source in SAVED.items()}
        if any(part.dropped is not None for part in self.parts):  # some parts have dropped samples, others have not
            zeros = [torch.zeros_like(part.losses, dtype=torch.long) for part in self.parts]
            columns["dropped"] = [zero if d is None else d for zero, d in zip(zeros, columns["dropped"], strict=True)]
            columns["shares"] = [part.denominators for part in self.parts]
        return {name: cat_values(values) for name, values in columns.items() if values and values[0] is not None}

    @classmethod
    def from_state(cls, config: StepConfig, state: dict[str, Any]) -> Window:
        """Window restored from a state of `WindowBuilder`, without the gradient sums."""
        if not state["samples"]:  # other ranks may have samples
            return Window(config, restored=True)
        stats = SampleStats(**{SAVED[name]: values for name, values in state["samples"].items()})
        columns = [BatchColumns(**column) for column in state["columns"]]
        window = Window(config, parts=[stats], samples=len(stats), begun=True, restored=True, columns=columns)
        if state["failure"]:
            kind, message = state["failure"]
            window.failure = {e.__name__: e for e in (NonFiniteLossError, NonFiniteGradientError)}[kind](message)
        return window


SAVED = {  # name in a state dict -> attribute of SampleStats
    "losses": "losses",
    "counts": "counts",
    "norms": "raw_norms",
    "weights": "coefficients",
    "shares": "shares",
    "columns": "columns",
    "dropped": "dropped",
}


def empty_stats(like: Tensor) -> SampleStats:
    """Results of 0 samples, for a rank that has none in the window."""
    wide = torch.float64 if like.dtype in (torch.float64, torch.complex128) else torch.float32
    empty = torch.zeros(0, dtype=wide, device=like.device)
    return SampleStats(empty, raw_norms=empty)


def unknown_stats(samples: int, parts: Sequence[SampleStats]) -> SampleStats:
    """Results filled with NaN, for a window that is skipped before its losses are computed. They have the same fields
    and columns as `parts`, the other results of the window.
    """
    unknown = torch.full((samples,), torch.nan)
    if not parts:
        return SampleStats(unknown, raw_norms=unknown)

    fields: dict[str, Any] = {}
    for name in SAVED.values():
        values = getattr(parts[0], name)
        if values is not None and name != "dropped":
            fields[name] = dict.fromkeys(values, unknown) if isinstance(values, dict) else unknown
    return SampleStats(**fields)


# --- batch columns ----------------------------------------------------------------------------------------------------

Column = Tensor | list[Any]  # one entry per sample


@dataclass(slots=True)
class BatchColumns:
    """Values of the batch for each sample of one microbatch, and the epoch of these samples."""

    epoch: int
    values: dict[str, Column]


def record_columns(batch: Any, keys: Mapping[str, Hashable], epoch: int, rows: slice | None = None) -> BatchColumns:
    """Values of the batch, or of these rows of it, under the keys. `keys`: column name -> key of the batch."""
    values = {name: pick_column(batch, key) for name, key in keys.items()}
    if rows is not None:
        values = {name: column[rows] for name, column in values.items()}
    return BatchColumns(epoch, values)


def join_columns(parts: Sequence[BatchColumns]) -> dict[str, Column]:
    """Columns of all microbatches, concatenated, and "epoch". Columns that a microbatch lacks are left out."""
    if not parts:
        return {}
    names = [name for name in parts[0].values if all(name in part.values for part in parts)]
    columns: dict[str, Column] = {name: _join([part.values[name] for part in parts]) for name in names}
    if names:
        columns["epoch"] = torch.cat([torch.full((len(part.values[names[0]]),), part.epoch) for part in parts])
    return columns


def _join(columns: Sequence[Any]) -> Column:
    if len(columns) == 1:
        return columns[0]
    if all(isinstance(column, Tensor) for column in columns):
        return torch.cat(list(columns))
    entries: list[Any] = []
    for column in columns:
        entries += column.tolist() if isinstance(column, Tensor) else column
    return entries
