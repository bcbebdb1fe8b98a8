"""Running quantiles of a stream of numbers, in constant memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, exp, log, nan
from typing import Any

from torch import Tensor

# Values are counted in buckets whose bounds are the powers of 1.02, so that the middle of a bucket is within 1 % of its
# values (DDSketch, Masson et al. 2019). Bucket 0 is zero, negative values have negative buckets.
GROWTH = log(1.02)
SMALLEST = 1e-12  # absolute values below it count as zero
LARGEST = 1e12  # and those above it as this value: there are at most 5,581 buckets
PERIOD = 10_000  # values in a half of the counts


def bucket_of(value: float) -> int:
    """Bucket of a finite number, increasing with it."""
    if value > SMALLEST:
        return ceil(log(value / SMALLEST) / GROWTH) if value < LARGEST else ceil(log(LARGEST / SMALLEST) / GROWTH)
    return -bucket_of(-value) if value < -SMALLEST else 0


def middle_of(bucket: int) -> float:
    """Value within 1 % of all values of a bucket."""
    if bucket < 0:
        return -middle_of(-bucket)
    return SMALLEST * exp(bucket * GROWTH) * 2 / (1 + exp(GROWTH)) if bucket else 0.0


class RunningQuantiles:
    """Quantiles of the last 10,000 to 20,000 values, with a relative error of at most 1 %.

    Two sets of counts: the current values, and the PERIOD values before them, which are dropped when there are PERIOD
    current ones; or when `turn` is called, if `period` is None.
    """

    def __init__(self, period: int | None = PERIOD) -> None:
        self._period = period
        self._current: dict[int, int] = {}  # bucket -> number of values
        self._before: dict[int, int] = {}
        self._values = 0  # in `_current`
        self._values_before = 0

    def add(self, bucket: int) -> None:
        """Count a value of this bucket."""
        counts = self._current
        counts[bucket] = counts.get(bucket, 0) + 1
        self._values += 1
        if self._values == self._period:
            self.turn()

    def add_all(self, values: Tensor) -> None:
        """Count the finite values, which are zero or positive, of a tensor. `period` must be None."""
        finite = values[values.isfinite()].double().clamp(max=LARGEST)
        buckets = (finite / SMALLEST).log().div(GROWTH).ceil().clamp(min=0).long()
        for bucket, count in zip(*(column.tolist() for column in buckets.unique(return_counts=True)), strict=True):
            self._current[bucket] = self._current.get(bucket, 0) + count
            self._values += count

    def turn(self) -> None:
        """Drop the values before the current ones, which take their place."""
        self._before = self._current
        self._values_before = self._values
        self._current = {}
        self._values = 0

    def __len__(self) -> int:
        return self._values + self._values_before

    def bucket(self, rank: int) -> int:
        """Bucket of the value number `rank` in increasing order, counted from 1."""
        total = 0
        for bucket in sorted(self._current.keys() | self._before.keys()):
            total += self._current.get(bucket, 0) + self._before.get(bucket, 0)
            if total >= rank:
                return bucket
        raise IndexError(f"rank must be at most {total}; found {rank}.")

    def quantile(self, level: float) -> float:
        """Smallest value such that a share of at least `level` is not larger; NaN without values."""
        return middle_of(self.bucket(max(1, ceil(level * len(self))))) if len(self) else nan

    def state_dict(self) -> dict[str, Any]:
        return {"current": dict(self._current), "before": dict(self._before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._current = dict(state["current"])
        self._before = dict(state["before"])
        self._values = sum(self._current.values())
        self._values_before = sum(self._before.values())
