"""What is left of a batch, to be taken piece by piece."""

from __future__ import annotations

from typing import Any

from samplewise.batches import cut, length


class Slices:
    """Takes pieces off a batch. One that cannot be cut is taken whole."""

    __slots__ = ("_batch", "_length", "_start", "empty")

    def __init__(self, batch: Any):
        self._batch, self._start, self.empty = batch, 0, False
        self._length: int | None = None

    def take(self, limit: int | None) -> tuple[Any, int | None]:
        """The next piece, of at most so many samples, and how many it has; None where only the losses can tell."""
        if self._length is None and limit is not None:  # a batch that is taken whole need not be looked at
            self._length = length(self._batch)
        if self._length is None:
            self.empty = True
            return self._batch, None
        start, total = self._start, self._length
        stop = total if limit is None else min(start + limit, total)
        self._start, self.empty = stop, stop == total
        return (cut(self._batch, start, stop, total) if (start, stop) != (0, total) else self._batch), stop - start
