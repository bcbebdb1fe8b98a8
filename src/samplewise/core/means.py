"""`WeightedMean`: Σ values / Σ weights, the accumulator of every mean in the library."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Protocol

import torch
from torch import Tensor

Number = Tensor | float  # a tensor may be on any device


class ScalarReducer(Protocol):
    """Process group with an all-reduce of scalars, see `samplewise.parallel.collectives`."""

    def all_reduce_scalars(self, *numbers: Number) -> list[float]: ...


class WeightedMean:
    """Σ values / Σ weights, accumulated on the device of the values; host sync happens only in `value`.

    dtype: dtype of the sums; float64 is replaced by float32 on MPS, which does not have it. With None (default) sums
    keep the dtype of the values, except that half precision is summed in float32: its own sums would stop growing at a
    few hundred.

    `total` and `weight` are the sums so far: floats, or tensors if tensors were added.
    """

    def __init__(self, dtype: torch.dtype | None = None, total: Number = 0.0, weight: Number = 0.0):
        self.dtype = dtype
        self.total = total
        self.weight = weight

    def add(self, values: Tensor, weights: Tensor | None = None) -> None:
        """Add values (samples,) and their weights (samples,); by default each value has weight 1."""
        self.add_sum(self._sum(values), len(values) if weights is None else self._sum(weights))

    def add_sum(self, total: Number, weight: Number) -> None:
        """Add Σ values and Σ weights of some samples. The sum of values may be a tensor of any shape."""
        self.total = _plus(self.total, self._cast(total))
        self.weight = _plus(self.weight, self._cast(weight))

    def add_numbers(self, totals: Iterable[float], weights: Iterable[float]) -> None:
        """As `add_sum` of each pair, one after the other."""
        for total in totals:
            self.total += total
        for weight in weights:
            self.weight += weight

    def all_reduce(self, group: ScalarReducer) -> WeightedMean:
        """Return the mean over all ranks of a group. Collective; `total` must be a scalar."""
        return WeightedMean(self.dtype, *group.all_reduce_scalars(self.total, self.weight))

    def quotient(self) -> Number:
        """Return Σ values / Σ weights on the device, in the shape of the values, without host sync."""
        return self.total / self.weight

    def value(self) -> float:
        """Return Σ values / Σ weights as a float; NaN if the weight is 0 or infinite."""
        weight = float(self.weight)
        return float(self.total) / weight if weight and isfinite(weight) else float("nan")

    def _sum(self, values: Tensor) -> Tensor:
        if self.dtype is not None:
            cast = self._cast(values)
            assert isinstance(cast, Tensor)
            return cast.sum()
        half = values.dtype in (torch.float16, torch.bfloat16)
        return values.detach().sum(dtype=torch.float32 if half else None)

    def _cast(self, number: Number) -> Number:
        if not isinstance(number, Tensor) or self.dtype is None:
            return number
        no_double = number.device.type == "mps" and self.dtype == torch.float64
        return number.detach().to(torch.float32 if no_double else self.dtype)


def _plus(total: Number, new: Number) -> Number:
    """total + new, on the device of `new`."""
    if isinstance(total, Tensor) and isinstance(new, Tensor):
        total = total.to(new.device)
    return total + new
