"""Cursor over the rows of a batch, which yields microbatches."""

from __future__ import annotations

from typing import Any

from samplewise.core.batches import cut, length

UNKNOWN = -1


class BatchCursor:
    """Cursor over a batch: yields slices of its rows, starting at row `taken`. A batch that cannot be cut is returned
    whole. `number`: index of the batch in its epoch, from 0; None if unknown.
    """

    __slots__ = ("_length", "batch", "empty", "number", "taken")

    def __init__(self, batch: Any, taken: int = 0, number: int | None = None):
        self.batch = batch
        self.taken = taken
        self.empty = False
        self.number = number
        self._length: int | None = UNKNOWN

    @property
    def rows(self) -> int | None:
        """Number of rows of the whole batch; None if it cannot be cut. Computed on first use: a batch that is taken
        whole does not need it.
        """
        if self._length == UNKNOWN:
            self._length = length(self.batch)
        return self._length

    @property
    def left(self) -> int:
        """Number of rows that are not consumed yet; 0 if the batch cannot be cut."""
        return (self.rows or self.taken) - self.taken

    def skip(self, rows: int) -> None:
        """Advance the cursor by `rows`."""
        self.taken += rows
        self.empty = self.taken == self._length

    def take(self, limit: int | None) -> tuple[Any, int | None]:
        """Next slice of at most `limit` samples (None: all that remain) and its number of samples. The number is None
        if it is known only from the losses.
        """
        start = self.taken
        total = None if limit is None and start == 0 else self.rows
        if total is None:
            self.empty = True
            return self.batch, None
        stop = total if limit is None else min(start + limit, total)
        self.taken = stop
        self.empty = stop == total
        piece = self.batch if (start, stop) == (0, total) else cut(self.batch, start, stop, total)
        return piece, stop - start
