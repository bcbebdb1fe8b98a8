"""Records of the calls of a loss function, for tests of repeated calls: a list would be restored between them."""

from queue import SimpleQueue


class Unrestored:
    """List to which a loss function appends; its values are in a queue, which samplewise cannot restore."""

    def __init__(self):
        self._queue = SimpleQueue()

    def append(self, value):
        self._queue.put(value)

    def __len__(self):
        return self._queue.qsize()

    def take(self):
        """Remove and return all values."""
        return [self._queue.get() for _ in range(len(self))]
