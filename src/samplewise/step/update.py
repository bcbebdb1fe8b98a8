"""Results of an update, and totals of several. Values are copied from the device only when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, Protocol

import torch
from torch import Tensor

from samplewise.errors import LossesError
from samplewise.step.batch_columns import BatchColumns, Column, columns_of
from samplewise.step.microbatch_stats import MicrobatchStats, cat, total, total_loss
from samplewise.step.window import Agreement
from samplewise.transforms.stats import PerSample, together


class SkipCheck(Protocol):
    """Flag on the device: whether the update was finite and was applied."""

    well: Tensor

    def check(self) -> None:
        """Raise unless all values were finite."""


@dataclass(slots=True)
class Outcome:
    """Result of applying an update."""

    skipped: bool
    lr: list[Any]  # one for each of the optimizer's parameter groups
    norm: Callable[[], Tensor]
    mask: SkipCheck | None = None  # set if the device decides whether the update is skipped


class Update:
    """Results of one parameter update.

    index     0, 1, 2, ...; a skipped update has the index of the next update that is applied
    samples   number of samples of the update, over all ranks
    skipped   True if the update was skipped because of NaN or infinity
    lr        learning rate of the update; a tuple if the optimizer's parameter groups differ
    seconds   computation time; waiting for data is not included
    phases    `seconds` by phase: forward, gradients, optimizer; or compiled. These are times of the host: on an
              accelerator, the phase that waits for a result includes the work queued before it
    loss      Σ losses / Σ counts, the true mean of the window, over all ranks
    losses    (samples,) losses as returned by the loss function, in the order of the samples
    norms     (samples,) norms of the per-sample gradients, before any transform
    weights   (samples,) coefficients of the per-sample gradients in the sum, or a dict name -> (samples,)
    grad_norm norm of the update's gradient, before `max_grad_norm`
    local_samples
              number of samples on this rank: losses, norms, weights and columns have that many rows
    columns   name -> (samples,) columns returned by the loss function; columns of the batches under the keys of
              `step.columns`, and with these also "epoch"
    """

    __slots__ = ("_agreed", "_asked_late", "_outcome", "_parts", "index", "noted", "phases", "samples", "updates")

    def __init__(
        self,
        index: int,
        samples: int,
        outcome: Outcome,
        parts: list[MicrobatchStats],
        asked_late: Callable[[Update], Tensor],
        noted: Sequence[BatchColumns] = (),
        updates: int = 1,  # more for a block of compiled updates
        agreed: Agreement | None = None,
    ):
        self._agreed = agreed
        self.index = index
        self.samples = samples
        self.updates = updates
        self._outcome = outcome
        self._parts = parts
        self._asked_late = asked_late
        self.noted = noted
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
    def local_samples(self) -> int:
        return sum(len(part) for part in self._parts)

    def sums(self) -> tuple[Tensor | float, Tensor | float]:
        """Σ losses and Σ counts over all ranks, without copying them from the device."""
        if self._agreed is not None:
            if self.skipped:
                return nan, self._agreed.samples
            return self._agreed.losses, self._agreed.counts
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
        return {**columns_of(self.noted), **self.loss_columns}

    @property
    def loss_columns(self) -> dict[str, Tensor]:
        """Columns returned by the loss function, name -> (samples,)."""
        found = [p.columns or {} for p in self._known_parts()]
        other = next((columns for columns in found if columns.keys() != found[0].keys()), None)
        if other is not None:
            raise LossesError(
                "loss_fn must return the same columns for every microbatch of a window; found "
                f"{' and '.join(', '.join(columns) or 'none' for columns in (found[0], other))}. Fill in NaN."
            )
        return {name: cat([columns[name] for columns in found]) for name in found[0]}

    def has_columns(self, *names: str) -> bool:
        """True if these batch columns were recorded for all samples of the update."""
        return bool(self.noted) and all(name in each.values for name in names for each in self.noted)

    @property
    def grad_norm(self) -> float:
        self._known_parts()
        return float(self._outcome.norm())

    def _known_parts(self) -> list[MicrobatchStats]:
        """The parts; first raises for non-finite values if that check was left on the device."""
        if self._outcome.mask is not None:
            self._outcome.mask.check()
        return self._parts

    def __repr__(self) -> str:
        skipped = ", skipped" if self.skipped else ""
        return f"Update({self.index}: {self.samples} samples, loss {self.loss:.4g}{skipped})"


class Totals:
    """Totals of `step.run`: updates, skipped, samples, seconds, and the mean loss without skipped updates."""

    KEPT = 1000  # number of parts that are kept before they are summed

    def __init__(self) -> None:
        self.updates = self.skipped = self.samples = 0
        self.seconds = 0.0
        self._mask: SkipCheck | None = None
        self._parts: list[MicrobatchStats] = []
        self._sum: Tensor | float = 0.0
        self._count: Tensor | float = 0

    def add(self, update: Update) -> None:
        self.updates += 0 if update.skipped else update.updates
        self.skipped += update.skipped
        self.samples += update.samples
        self.seconds += update.seconds
        self._mask = update._outcome.mask
        if update._agreed is not None and not update.skipped:
            self._sum = self._sum + update._agreed.losses
            self._count = self._count + update._agreed.counts
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
