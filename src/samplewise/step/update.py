"""What one update did. Nothing here waits for a device until it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Protocol

import torch
from torch import Tensor

from samplewise.errors import LossesError
from samplewise.step.columns import Column, Noted, columns_of
from samplewise.step.parts import Part, cat, total, total_loss
from samplewise.step.window import Agreement
from samplewise.transforms.numbers import PerSample, together


class Mask(Protocol):
    well: Tensor

    def check(self) -> None:
        """Raises unless all was finite."""


@dataclass(slots=True)
class Outcome:
    """How an update ended."""

    skipped: bool
    lr: list[Any]  # of each of the optimizer's groups
    norm: Callable[[], Tensor]
    mask: Mask | None = None  # if it is left to the device whether the update is made


class Update:
    """One update of the parameters.

    index     0, 1, 2, ...; of a skipped update the index that is still to be given
    samples   how many it is made of; where several ranks train together, those of all
    skipped   whether it was left out because of NaN or infinity
    lr        the learning rate it was made with; a tuple if the optimizer's groups differ
    seconds   of computation; waiting for data is not counted
    phases    the same in parts: forward, gradients, optimizer; or compiled. Times of the host: on an accelerator the
              part that waits for a result is charged with what came before
    loss      Σ losses / Σ counts, the true mean of the window, over all ranks
    losses    (samples,) as returned by the loss function, in the order they came
    norms     (samples,) of the samples' own gradients, before any transform
    weights   (samples,) the coefficients they were summed with, or a dict name -> (samples,)
    grad_norm of the update's gradient, before `max_grad_norm`
    own       how many of the samples are this rank's: losses, norms, weights and columns are of those
    columns   name -> (samples,) what the loss function returned beside the losses; what the batches hold under the keys
              of `step.columns`, and then "epoch", too
    """

    __slots__ = ("_agreed", "_asked_late", "_outcome", "_parts", "index", "noted", "phases", "samples", "updates")

    def __init__(
        self,
        index: int,
        samples: int,
        outcome: Outcome,
        parts: list[Part],
        asked_late: Callable[[Update], Tensor],
        noted: Sequence[Noted] = (),
        updates: int = 1,  # more, where several were made at once
        agreed: Agreement | None = None,
    ):
        self._agreed = agreed
        self.index, self.samples, self.updates = index, samples, updates
        self._outcome, self._parts, self._asked_late, self.noted = outcome, parts, asked_late, noted
        self.phases: dict[str, float] = {}

    @property
    def skipped(self) -> bool:
        return self._outcome.skipped

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def lr(self) -> float | tuple[float, ...]:
        rates = tuple(map(float, self._outcome.lr))
        return rates[0] if len(set(rates)) == 1 else rates

    @property
    def loss(self) -> float:
        self._known_parts()
        losses, counts = self.sums()
        return float(losses / counts)

    @property
    def own(self) -> int:
        return sum(len(part) for part in self._parts)

    def sums(self) -> tuple[Tensor | float, Tensor | float]:
        """Σ losses and Σ counts, over all ranks, still on the device."""
        if self._agreed is not None:
            known = not self.skipped
            return (self._agreed.losses, self._agreed.counts) if known else (nan, self._agreed.samples)
        return total_loss(self._parts), total(self._parts, shares=False)

    @property
    def losses(self) -> Tensor:
        return cat([p.losses for p in self._known_parts()])

    @property
    def norms(self) -> Tensor:
        parts = self._known_parts()
        known = all(p.norms is not None for p in parts)
        return cat([p.norms for p in parts]) if known else self._asked_late(self)

    @property
    def weights(self) -> PerSample:
        return together([torch.ones_like(p.losses) if p.weights is None else p.weights for p in self._known_parts()])

    @property
    def columns(self) -> dict[str, Column]:
        return {**columns_of(self.noted), **self.said}

    @property
    def said(self) -> dict[str, Tensor]:
        """Those of the loss function."""
        found = [p.columns or {} for p in self._known_parts()]
        other = next((columns for columns in found if columns.keys() != found[0].keys()), None)
        if other is not None:
            raise LossesError(
                "loss_fn must return the same columns for every piece of a window; found "
                f"{' and '.join(', '.join(columns) or 'none' for columns in (found[0], other))}. Fill in NaN."
            )
        return {name: cat([columns[name] for columns in found]) for name in found[0]}

    def knows(self, *names: str) -> bool:
        """Whether the batches of all its samples were asked for these columns."""
        return bool(self.noted) and all(name in each.values for name in names for each in self.noted)

    @property
    def grad_norm(self) -> float:
        self._known_parts()
        return float(self._outcome.norm())

    def _known_parts(self) -> list[Part]:
        """Where the check for NaN and infinity was left on the device, this is the time to read it."""
        if self._outcome.mask is not None:
            self._outcome.mask.check()
        return self._parts

    def __repr__(self) -> str:
        skipped = ", skipped" if self.skipped else ""
        return f"Update({self.index}: {self.samples} samples, loss {self.loss:.4g}{skipped})"


class Totals:
    """What `step.run` did: updates, skipped, samples, seconds, and the mean loss, which leaves out skipped updates."""

    KEPT = 1000  # parts, before they are added up

    def __init__(self) -> None:
        self.updates = self.skipped = self.samples = 0
        self.seconds = 0.0
        self._mask: Mask | None = None
        self._parts: list[Part] = []
        self._sum: Tensor | float = 0.0
        self._count: Tensor | float = 0

    def add(self, update: Update) -> None:
        self.updates += 0 if update.skipped else update.updates
        self.skipped += update.skipped
        self.samples += update.samples
        self.seconds += update.seconds
        self._mask = update._outcome.mask
        if update._agreed is not None and not update.skipped:
            self._sum, self._count = self._sum + update._agreed.losses, self._count + update._agreed.counts
        elif not update.skipped:
            self._parts += update._parts
        if len(self._parts) > self.KEPT:
            self._add_up()

    @property
    def loss(self) -> float:
        if self._mask is not None:
            self._mask.check()
        self._add_up()
        return float(self._sum / self._count) if self.updates else float("nan")

    def _add_up(self) -> None:
        if self._parts:
            self._sum = self._sum + total_loss(self._parts)
            self._count = self._count + total(self._parts, shares=False)
            self._parts = []

    def __repr__(self) -> str:
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return f"{self.updates} updates{skipped}, {self.samples} samples, loss {self.loss:.4g}, {self.seconds:.2f} s"
