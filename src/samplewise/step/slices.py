"""What is left of a batch, to be taken piece by piece."""

from __future__ import annotations

from typing import Any

from samplewise.batches import cut, length


class Slices:
    """Takes pieces off a batch. One that cannot be cut is taken whole."""

    __slots__ = ("_batch", "_start", "_total", "empty")

    def __init__(self, batch: Any):
        self._batch, self._start, self.empty = batch, 0, False
        self._total: int | type | None = Slices  # not looked at yet: a batch that is taken whole need not be

    def take(self, limit: int | None) -> tuple[Any, int | None]:
        """The next piece, of at most so many samples, and how many it has; None where only the losses can tell."""
        if limit is None and self._start == 0:
            self.empty = True
            return self._batch, None
        if self._total is Slices:
            self._total = length(self._batch)
        if self._total is None:
            self.empty = True
            return self._batch, None
        total: int = self._total  # type: ignore[assignment]
        start, stop = self._start, total if limit is None else min(self._start + limit, total)
        self._start, self.empty = stop, stop == total
        return (cut(self._batch, start, stop, total) if (start, stop) != (0, total) else self._batch), stop - start
