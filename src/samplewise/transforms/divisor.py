"""Constant denominator of updates, in place of the number of samples."""

from __future__ import annotations


class Divisor:
    """Public constant by which the sum of an update is divided. It may be set later than the chain that contains it:
    the default of a private step depends on the size of the dataset.
    """

    def __init__(self, value: float | None = None):
        self.value = value

    def __str__(self) -> str:
        return "constant" if self.value is None else f"{self.value:.6g}"

    __repr__ = __str__
