"""Length of a training or an interval: epochs=10, updates=500, "2ep" or "500up"."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Duration:
    """Number of epochs or of updates; one of the two is set."""

    epochs: int | None = None
    updates: int | None = None

    def reached(self, epochs: int, updates: int) -> bool:
        return (self.epochs is not None and epochs >= self.epochs) or (
            self.updates is not None and updates >= self.updates
        )

    def done(self) -> str:
        """Return the reason that `fit` returns when the duration is reached: "3 epochs are done"."""
        number = self.updates if self.epochs is None else self.epochs
        what = "update" if self.epochs is None else "epoch"
        return f"1 {what} is done" if number == 1 else f"{number} {what}s are done"


def duration(epochs: int | str | None = None, updates: int | None = None) -> Duration:
    """Parse a duration. Exactly one of `epochs` (an int, or a str such as "2ep" or "500up") and `updates` is given."""
    if isinstance(epochs, str):
        found = re.fullmatch(r"(\d+)(ep|up)", epochs.strip())
        if found is None or updates is not None:
            raise ValueError(f"a duration must be written like '2ep' or '500up'; found {epochs!r}.")
        number, unit = found.groups()
        return duration(epochs=int(number)) if unit == "ep" else duration(updates=int(number))
    if (epochs is None) == (updates is None):
        found_both = "both" if epochs is not None else "neither"
        raise ValueError(f"one of epochs= and updates= must be given; found {found_both}.")
    for name, number in (("epochs", epochs), ("updates", updates)):
        if number is not None and (type(number) is not int or number < 1):
            raise ValueError(f"{name} must be a positive number; found {number!r}.")
    return Duration(epochs, updates)
