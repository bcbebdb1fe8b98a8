"""Durations in updates, epochs or samples: "50up", "1ep", "1000samples". A number counts updates.

An interval is counted from the beginning of the run, by the counters of the step, which are in every checkpoint: a
resumed run continues it exactly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from samplewise.core.text import plural
from samplewise.step.step import Step
from samplewise.step.update import Update

Unit = Literal["up", "ep", "samples"]
NAMES: dict[Unit, str] = {"up": "update", "ep": "epoch", "samples": "sample"}
EXAMPLES: dict[Unit, str] = {"up": "'50up' (updates)", "ep": "'1ep' (epochs)", "samples": "'1000samples'"}


@dataclass(frozen=True)
class Duration:
    """Number of updates, epochs or samples."""

    number: int
    unit: Unit

    def __str__(self) -> str:
        return f"{self.number}{self.unit}"

    def done(self) -> str:
        """Reason for the end of a training run that has reached the duration: "3 epochs are done"."""
        return f"{plural(self.number, NAMES[self.unit])} {'is' if self.number == 1 else 'are'} done"

    def ends_with(self, update: Update, step: Step) -> bool:
        """True if an interval of this length, in updates or samples, ends with the last update of the step.

        It waits for the device only if the number of updates is a multiple: a skipped update does not count. Samples
        of skipped updates do.
        """
        if self.unit == "up":
            return (update.index + 1) % self.number == 0 and not update.skipped
        if self.unit == "samples":
            samples = step._counters.samples  # `step.counters` would wait for the device
            return samples // self.number > (samples - update.samples) // self.number
        return False

    def ends_with_epoch(self, epoch: int) -> bool:
        """True if an interval of this length, in epochs, ends with the epoch of this index."""
        return self.unit == "ep" and (epoch + 1) % self.number == 0


def interval(name: str, every: Any, units: Sequence[Unit] = ("up", "ep", "samples")) -> Duration:
    """Parse the argument `name`, an interval in one of the units; a number counts updates."""
    text = f"{every}up" if type(every) is int else every
    match = re.fullmatch(f"([1-9][0-9]*)({'|'.join(units)})", text) if isinstance(text, str) else None
    if match is None:
        examples = " or ".join(EXAMPLES[unit] for unit in units)
        raise ValueError(f"{name} must be a duration such as {examples}; found {every!r}.")
    return Duration(int(match[1]), match[2])  # type: ignore[arg-type]


def end_of_training(epochs: Any = None, updates: Any = None) -> Duration:
    """Duration of a training run. Exactly one of `epochs` and `updates` is given, a positive int."""
    if (epochs is None) == (updates is None):
        found = "both" if epochs is not None else "neither"
        raise ValueError(f"exactly one of epochs= and updates= must be given; found {found}. Pass epochs=10.")
    name, number = ("updates", updates) if epochs is None else ("epochs", epochs)
    if type(number) is not int or number < 1:
        raise ValueError(f"{name} must be a positive whole number; found {number!r}. Pass epochs=10 or updates=500.")
    return Duration(number, "up" if epochs is None else "ep")
