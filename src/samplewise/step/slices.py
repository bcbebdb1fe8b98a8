"""What is left of a batch, to be taken piece by piece."""

from __future__ import annotations

from typing import Any

from samplewise.batches import cut, length


class Slices:
    """Takes pieces off a batch, of which the first `taken` samples have gone before. One that cannot be cut is taken
    whole.
    """

    __slots__ = ("_batch", "_length", "empty", "taken")

    def __init__(self, batch: Any, taken: int = 0):
        self._batch, self.taken, self.empty = batch, taken, False
        self._length = length(batch) if taken else None

    def take(self, limit: int | None) -> tuple[Any, int | None]:
        """The next piece, of at most so many samples, and how many it has; None where only the losses can tell."""
        if self._length is None and limit is not None:  # a batch that is taken whole need not be looked at
            self._length = length(self._batch)
        if self._length is None:
            self.empty = True
            return self._batch, None
        start, total = self.taken, self._length
        stop = total if limit is None else min(start + limit, total)
        self.taken, self.empty = stop, stop == total
        return (cut(self._batch, start, stop, total) if (start, stop) != (0, total) else self._batch), stop - start
