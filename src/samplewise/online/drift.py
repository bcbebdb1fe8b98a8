"""Test for drift: whether the losses of a stream have become larger, in constant memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import exp, inf, isfinite, lgamma
from typing import Any

from samplewise.core.quantiles import RunningQuantiles, bucket_of


class DriftTest:
    """Exact test whether losses have become larger. `drift_detected` is True after the loss that raises an alarm.

    Losses are compared in blocks of 100 with the 0.9 quantile of the losses before the block, since the last alarm and
    at most 20,000. An alarm is raised as soon as the number of larger ones in a block reaches `limit`, the smallest
    number that is reached with a probability of at most RATE if losses of the block and before are exchangeable. A
    stationary stream of independent losses thus has at most one false alarm in 1,000,000 samples on average. Correlated
    losses have more. After an alarm the test begins again, without the losses before.
    """

    BLOCK = 100
    SHARE = 0.1  # of the losses before the block that are larger than the quantile
    RATE = 1e-4  # of false alarms in a block
    BEGIN = 200  # losses before the first block

    def __init__(self) -> None:
        self.drift_detected = False
        self._reset()

    def _reset(self) -> None:
        self._reference = RunningQuantiles()
        self._left = self.BEGIN  # losses to the end of the block
        self._exceedances = 0
        self._threshold: float = inf  # bucket of the quantile
        self._limit = self.BLOCK + 1

    def update(self, x: float) -> None:
        """Add a loss. Non-finite ones are ignored."""
        self.drift_detected = False
        if not isfinite(x):
            return
        bucket = bucket_of(x)
        self._reference.add(bucket)
        self._left -= 1
        if bucket > self._threshold:
            self._exceedances += 1
            if self._exceedances == self._limit:
                self._reset()
                self.drift_detected = True
                return
        if not self._left:
            losses = len(self._reference)
            larger = int(self.SHARE * losses)
            self._threshold = self._reference.bucket(losses - larger)
            self._limit = smallest_limit(losses, larger, self.BLOCK, self.RATE)
            self._exceedances = 0
            self._left = self.BLOCK

    def state_dict(self) -> dict[str, Any]:
        return {
            "drift_detected": self.drift_detected,
            "reference": self._reference.state_dict(),
            "left": self._left,
            "exceedances": self._exceedances,
            "threshold": self._threshold,
            "limit": self._limit,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drift_detected = state["drift_detected"]
        self._reference.load_state_dict(state["reference"])
        self._left = state["left"]
        self._exceedances = state["exceedances"]
        self._threshold = state["threshold"]
        self._limit = state["limit"]


@lru_cache(256)
def smallest_limit(losses: int, larger: int, block: int, rate: float) -> int:
    """Smallest number c such that at least c of `block` losses exceed the value with exactly `larger` larger ones among
    `losses` earlier losses with a probability of at most `rate`. Not more than block + 1.

    The share of the distribution above that value is distributed as Beta(larger + 1, losses - larger), so that the
    number of exceedances is beta-binomial. Equal losses count as not larger, which makes exceedances less likely.
    """
    a, b = larger + 1, losses - larger
    constant = lgamma(block + 1) - _log_beta(a, b)
    tail = 0.0
    for c in range(block, -1, -1):
        tail += exp(constant - lgamma(c + 1) - lgamma(block - c + 1) + _log_beta(c + a, block - c + b))
        if tail > rate:
            return c + 1
    return 0


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)
