"""Times relative to a plain call: interleaved in one process, each call next to a plain call of its own."""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

Call = Callable[[], object]
Clock = Callable[[], float]  # time.perf_counter, or time.process_time, which other processes disturb less
Key = TypeVar("Key", bound=Hashable)
TOO_SLOW = 20  # times a plain call: above this, one call is enough


@dataclass
class Series:
    """Seconds of one call, and of the plain call before it, in each round."""

    seconds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def plain_median(self) -> float:
        return statistics.median(self.plain)

    @property
    def ratio(self) -> float:
        return statistics.median(a / b for a, b in zip(self.seconds, self.plain, strict=True))

    @property
    def difference(self) -> float:
        return statistics.median(a - b for a, b in zip(self.seconds, self.plain, strict=True))


def interleaved(
    name: str, plain: Call, calls: Mapping[Key, Call], rounds: int, clock: Clock = time.perf_counter
) -> dict[Key, Series]:
    """Series of each call. The calls must be warm; one that is much slower than the plain call is made once."""
    series = {key: Series() for key in calls}
    for number in range(1, rounds + 1):
        for key, call in calls.items():
            if number == 1 or series[key].ratio <= TOO_SLOW:
                series[key].plain.append(seconds(plain, clock))
                series[key].seconds.append(seconds(call, clock))
        print(f"{name}: round {number} of {rounds}", file=sys.stderr)
    return series


def seconds(call: Call, clock: Clock = time.perf_counter) -> float:
    """Seconds of one call, including the release of its result."""
    gc.collect()
    start = clock()
    call()
    return clock() - start
