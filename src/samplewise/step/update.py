"""Results of an update, and totals of several. Values are copied from the device only when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor

from samplewise.core.means import WeightedMean
from samplewise.errors import LossesError, ParameterError, PrivacyError
from samplewise.parallel.mode import WindowTotals
from samplewise.step.nonfinite import SchedulerStep, SkipFlag
from samplewise.step.window import BatchColumns, join_columns
from samplewise.transforms.stats import SampleStats, cat, cat_values, total_count, total_loss


@dataclass(slots=True)
class Outcome:
    """Result of applying an update."""

    skipped: bool
    lr: list[Any]  # one for each of the optimizer's parameter groups
    norm: Callable[[], Tensor | float]
    flag: SkipFlag | None = None  # set if the device decides whether the update is skipped
    scheduled: SchedulerStep | None = None  # set with a flag and a scheduler
    norm_is_known: bool = True  # False: the norm is computed from the gradients when it is read


class Update:
    """Results of one parameter update, made by a `Step`.

    index     0, 1, 2, ...; a skipped update has the index of the next update that is applied
    samples   number of samples of the update, over all ranks
    skipped   True if the update was skipped because of NaN or infinity
    lr        learning rate of the update; a tuple if the optimizer's parameter groups differ
    seconds   computation time; waiting for data is not included
    phases    `seconds` by phase: forward, gradients, optimizer; or compiled. These are times of the host: on an
              accelerator, the phase that waits for a result includes the work queued before it
    loss      Σ losses / Σ counts, the true mean of the window, over all ranks
    losses    (samples,) losses as returned by the loss function, in the order of the samples. With counts, the loss of
              a sample is a sum over its counted elements, and losses / counts are the means. With
              Step(aggregate=sw.per("sample")), or "group", both are divided: see `per`
    counts    (samples,) terms of the denominator: 1 each, or as returned by the loss function
    norms     (samples,) norms of the gradients of `losses`, before any transform
    weights   (samples,) coefficients of the per-sample gradients in the sum, or a dict name -> (samples,)
    dropped   (samples,) True for samples that `guard` has left out; they are not in `loss`
    grad_norm norm of the update's gradient, before `max_grad_norm`
    local_samples
              number of samples on this rank: losses, norms, weights and columns have that many rows
    columns   name -> (samples,) columns returned by the loss function; columns of the batches under the keys of
              `step.require(columns=...)`, and with these also "epoch". A list if the values are not numbers
    """

    __slots__ = (
        "_batch_columns",
        "_hidden",
        "_outcome",
        "_parts",
        "_samples",
        "_totals",
        "_updates",
        "index",
        "phases",
    )

    def __init__(
        self,
        index: int,
        samples: int,
        outcome: Outcome,
        parts: list[SampleStats],
        batch_columns: Sequence[BatchColumns] = (),
        totals: WindowTotals | None = None,
        updates: int = 1,  # more for a block of compiled updates
        hidden: bool = False,  # values of single samples must not be shown: a private update
    ):
        self.index = index
        self._hidden = hidden
        self._samples = samples
        self._updates = updates
        self._batch_columns = batch_columns
        self.phases: dict[str, float] = {}
        self._outcome = outcome
        self._parts = parts
        self._totals = totals

    @property
    def samples(self) -> int:
        _check_visible(self._hidden, "update.samples")
        return self._samples

    @property
    def skipped(self) -> bool:
        flag = self._outcome.flag
        return self._outcome.skipped if flag is None else flag.skipped

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def lr(self) -> float | tuple[float, ...]:
        rates = tuple(map(float, self._outcome.lr))
        return rates[0] if len(set(rates)) == 1 else rates

    @property
    def loss(self) -> float:
        self._checked_parts()
        losses, counts = self._sums()
        return float(losses / counts)

    @property
    def local_samples(self) -> int:
        _check_visible(self._hidden, "update.local_samples")
        return sum(len(part) for part in self._parts)

    def _sums(self) -> tuple[Tensor | float, Tensor | float]:
        """Σ losses and Σ counts over all ranks, without copying them from the device."""
        _check_visible(self._hidden, "update.loss")
        if self._totals is not None:
            if self.skipped:
                return nan, self._totals.samples
            return self._totals.losses, self._totals.counts
        return total_loss(self._parts), total_count(self._parts)

    @property
    def losses(self) -> Tensor:
        return cat([p.losses for p in self._checked_parts()])

    @property
    def counts(self) -> Tensor:
        parts = self._checked_parts()
        return cat([torch.ones_like(p.losses) if p.counts is None else p.counts for p in parts])

    @property
    def norms(self) -> Tensor:
        norms = [part.unscaled_norms for part in self._checked_parts()]
        if any(values is None for values in norms):
            raise ParameterError(
                "update.norms must be requested before the update is made; found no request for update "
                f"{self.index}. Use Step(..., record=['norms']), or step.require(norms=True) before the update."
            )
        return cat(norms)

    @property
    def weights(self) -> Tensor | dict[str, Tensor]:
        parts = self._checked_parts()
        return cat_values([torch.ones_like(p.losses) if p.coefficients is None else p.coefficients for p in parts])

    @property
    def dropped(self) -> Tensor:
        return self._dropped != 0

    @property
    def _dropped(self) -> Tensor:
        """(samples,) `dropped` of the parts: see `SampleStats`."""
        parts = self._checked_parts()
        return cat([torch.zeros_like(p.losses, dtype=torch.long) if p.dropped is None else p.dropped for p in parts])

    @property
    def columns(self) -> dict[str, Tensor | list[Any]]:
        return {**join_columns(self._batch_columns), **self._loss_columns}

    @property
    def _loss_columns(self) -> dict[str, Tensor]:
        """Columns returned by the loss function, name -> (samples,)."""
        parts = [p.columns or {} for p in self._checked_parts()]
        first = parts[0]
        different = next((columns for columns in parts if columns.keys() != first.keys()), None)
        if different is not None:
            raise LossesError(
                "loss_fn must return the same columns for every microbatch of a window; found "
                f"{' and '.join(', '.join(columns) or 'none' for columns in (first, different))}. Return every "
                "column each time, with NaN for unknown values."
            )
        return {name: cat([columns[name] for columns in parts]) for name in first}

    def _has_columns(self, *names: str) -> bool:
        """True if these batch columns were recorded for all samples of the update."""
        return bool(self._batch_columns) and all(name in part.values for name in names for part in self._batch_columns)

    @property
    def grad_norm(self) -> float:
        return nan if self.skipped else float(self._outcome.norm())

    def _checked_parts(self) -> list[SampleStats]:
        """The parts; first raises for non-finite values if that check was left on the device."""
        _check_visible(self._hidden, "update.losses")
        if self._outcome.flag is not None:
            _ = self._outcome.flag.skipped
        return self._parts

    @property
    def _was_skipped(self) -> bool:
        """As `skipped`, without raising the error of a non-finite value that may not be skipped."""
        flag = self._outcome.flag
        return self._outcome.skipped if flag is None else not flag.applied

    def __repr__(self) -> str:
        # Debuggers call this at any time and on one rank: no collective, and no error that is raised only once.
        fields = [f"index={self.index}", f"samples={'hidden' if self._hidden else self._samples}"]
        if self._was_skipped:
            fields.append("skipped=True")
        else:
            fields.append("loss=hidden" if self._hidden else f"loss={self.loss:.4g}")
            fields += [f"grad_norm={self.grad_norm:.4g}"] if self._outcome.norm_is_known else []
        rates = self.lr if isinstance(self.lr, tuple) else (self.lr,)
        lr = ", ".join(f"{rate:.4g}" for rate in rates)
        return f"Update({', '.join(fields)}, lr={lr if len(rates) == 1 else f'({lr})'})"


class Totals:
    """Totals of `step.run`: updates, skipped, samples, seconds, and the mean loss without skipped updates."""

    KEPT = 1000  # number of parts that are kept before they are summed

    def __init__(self) -> None:
        self.seconds = 0.0
        self._samples = 0
        self._hidden = False
        self._updates = 0
        self._skipped = 0
        self._last: Update | None = None  # not counted yet: the device may not have decided whether it is skipped
        self._parts: list[SampleStats] = []
        self._loss = WeightedMean()

    def _add(self, update: Update) -> None:
        self._count_last()
        self._last = update
        self._hidden |= update._hidden
        self._samples += update._samples
        self.seconds += update.seconds

    @property
    def samples(self) -> int:
        _check_visible(self._hidden, "totals.samples")
        return self._samples

    @property
    def updates(self) -> int:
        self._count_last()
        return self._updates

    @property
    def skipped(self) -> int:
        self._count_last()
        return self._skipped

    @property
    def loss(self) -> float:
        _check_visible(self._hidden, "totals.loss")
        self._count_last()
        return self._mean_loss()

    def _count_last(self) -> None:
        update = self._last
        if update is None:
            return
        skipped = update.skipped
        self._last = None
        self._skipped += skipped
        if skipped:
            return
        self._updates += update._updates
        if update._hidden:
            return
        if update._totals is not None:
            self._loss.add_sum(update._totals.losses, update._totals.counts)
        else:
            self._parts += update._parts
        if len(self._parts) > self.KEPT:
            self._add_up()

    def _mean_loss(self) -> float:
        self._add_up()
        return float(self._loss.quotient()) if self._updates else nan

    def _add_up(self) -> None:
        if self._parts:
            self._loss.add_sum(total_loss(self._parts), total_count(self._parts))
            self._parts = []

    def __repr__(self) -> str:
        # As for an update, the error of a non-finite value in the last one is not raised here.
        skipped = self._skipped
        if self._last is not None and self._last._was_skipped:
            skipped += 1
        else:
            self._count_last()
        counts = [f"updates={self._updates}", *([f"skipped={skipped}"] if skipped else [])]
        samples, loss = ("hidden", "hidden") if self._hidden else (self._samples, f"{self._mean_loss():.4g}")
        return f"Totals({', '.join(counts)}, samples={samples}, loss={loss}, seconds={self.seconds:.2f})"


def has_weights(update: Update) -> bool:
    """False if no transform has weighted the samples: all weights are 1."""
    return any(part.coefficients is not None for part in update._parts)


def has_dropped(update: Update) -> bool:
    """False if no sample of this rank was dropped."""
    return any(part.dropped is not None for part in update._parts)


def has_counts(update: Update) -> bool:
    """False if the loss function has returned no counts: all counts are 1."""
    return any(part.counts is not None for part in update._parts)


def _check_visible(hidden: bool, name: str) -> None:
    if hidden:
        raise PrivacyError(
            f"{name} must not be read with privacy=, because the guarantee does not cover it. Pass "
            "sw.Privacy(observe=True) to show it all the same."
        )
