"""What is left of a batch, to be taken piece by piece."""

from __future__ import annotations

from typing import Any

from samplewise.batches import cut, length

UNKNOWN = -1


class Slices:
    """Takes pieces off a batch, from row `taken` on. One that cannot be cut is taken whole. `number`: of the batch in
    its epoch, from 0 on; None if unknown.
    """

    __slots__ = ("_length", "batch", "empty", "number", "taken")

    def __init__(self, batch: Any, taken: int = 0, number: int | None = None):
        self.batch, self.taken, self.empty = batch, taken, False
        self.number = number
        self._length: int | None = UNKNOWN

    @property
    def rows(self) -> int | None:
        """Of the whole batch; None if it cannot be cut. A batch that is taken whole need not be looked at."""
        if self._length == UNKNOWN:
            self._length = length(self.batch)
        return self._length

    @property
    def left(self) -> int:
        """Rows that have not been taken; none, if it cannot be cut."""
        return (self.rows or self.taken) - self.taken

    def skip(self, rows: int) -> None:
        """Somebody has taken so many."""
        self.taken += rows
        self.empty = self.taken == self._length

    def take(self, limit: int | None) -> tuple[Any, int | None]:
        """The next piece, of at most so many samples, and how many it has; None where only the losses can tell."""
        total, start = None if limit is None and self.taken == 0 else self.rows, self.taken
        if total is None:
            self.empty = True
            return self.batch, None
        stop = total if limit is None else min(start + limit, total)
        self.taken, self.empty = stop, stop == total
        return (cut(self.batch, start, stop, total) if (start, stop) != (0, total) else self.batch), stop - start
