"""Denominators of the loss: what the loss of a batch divides the sum of its samples' losses by; and of an update, by
`aggregate=sw.per(...)`.

The Trainer expects that a model whose forward takes **kwargs divides its loss by `num_items_in_batch`, the number of
labels in all accumulated batches. Many heads ignore that argument and return the mean over the labels of one batch,
others the mean over its samples, or a sum. Which of them is found out in the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from math import inf
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor, nn

from samplewise.core.text import plural
from samplewise.engine.arguments import wide_dtype
from samplewise.errors import LossesError
from samplewise.integrations.adapter import BatchLoss
from samplewise.integrations.huggingface.units import (
    ITEMS,
    LABELS,
    SAMPLES,
    SUM,
    UnitProbe,
    depends_on_items,
    number_of_samples,
    weighs_classes,
)
from samplewise.integrations.transformers_losses import ignored_label
from samplewise.parallel import collectives
from samplewise.transforms.sums import Per, as_per, divide_by_counts, sum_by_group

Denominator = float | Literal["samples", "labels"] | Callable[[Any], float]

logger = logging.getLogger("samplewise")


class Denominators:
    """Denominators of the loss of a trainer, for its accumulated batches.

    denominator: that of `PerSample`; None: found out in the first step
    unit: ITEMS if the loss is divided by num_items_in_batch; LABELS or SAMPLES if it is the mean over those of one
    batch; SUM; None if it is none of them, or not yet known
    """

    def __init__(self, trainer: Any, denominator: Denominator | None = None):
        _check_denominator(denominator)
        self.trainer = trainer
        self.denominator = denominator
        self.unit: str | None = None
        self.shifted: bool | None = None  # logits predict the next label; None: as the Trainer assumes
        self.batch_first = True  # the first dimension of an output of the model is the batch
        self.losses_differ = False  # those of per_sample_losses do not add up to the loss
        self._decided = False
        self._depends_on_items: bool | None = None  # None: as the Trainer assumes
        self._uniform = False  # a mean over samples may be one over labels: so far all samples had the same number
        self._class_weights: bool | None = None  # None: not yet searched for
        self._trainer_ranks = 1  # factor of the Trainer for a loss that is divided by the items of all ranks
        self._batches: list[Any] = []  # of the open accumulation window
        self._total: float | None = None

    def start_window(self, batches: list[Any]) -> None:
        """Set the batches that are accumulated for the next update."""
        self._batches = batches
        self._total = None

    # --- unit --------------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module, inputs: Any, num_items: Any, *, losses: bool, norms: bool) -> Any:
        """Find out the unit in the first step, if it changes the update, or if losses or norms of samples are used.

        Returns the number of items for compute_loss: None if its result is not divided by it.
        """
        several = self._several
        if not self.trainer._kind.rows_are_samples:
            self._compare_items(model, inputs, num_items)
        elif not self._decided and (several or losses or norms):
            expected = several and self._trainer_scales(num_items)
            batch = next((batch for batch in self._batches if not self._same_counts(batch)), inputs)
            singly = several or (norms and self.denominator is None)
            probe = UnitProbe(self.trainer, model, batch, num_items)
            self._decide(probe, singly)
            if expected and probe.valid and not self._scaled(num_items) and self._constant is None:
                self._warn_of_items()
        elif norms and self._uniform and collectives.all_reduce_scalars(not self._same_counts(inputs))[0]:
            unit = self.unit
            self._decide(UnitProbe(self.trainer, model, inputs, num_items), True)
            self.unit = unit if self.unit == unit or not self._decided else None
            self._decided = True
        return num_items if not several or self._constant is not None or self._scaled(num_items) else None

    def _compare_items(self, model: nn.Module, inputs: Any, num_items: Any) -> None:
        """As `prepare`, for pairs, documents and completions: the loss is a mean over samples or labels, as the kind of
        the batches says, or divided by the number of items, if it changes with it.
        """
        if self.unit is None:
            self.unit = LABELS if self.trainer._kind.items(inputs) is None else SAMPLES
        declared = getattr(self.trainer, "loss_is_scaled_for_ga", None)
        if self._decided or declared is not None or not (self._several and self._trainer_scales(num_items)):
            return
        depends = None if num_items is None else depends_on_items(self.trainer, model, inputs, num_items)
        self._decided = num_items is None or depends is not None
        self._depends_on_items = bool(depends) if self._decided else None
        if depends:
            self.unit = ITEMS
        elif self._decided:
            self._warn_of_items()

    def _warn_of_items(self) -> None:
        logger.warning(
            "The loss of %s does not depend on num_items_in_batch, although the Trainer expects that it is divided by "
            "it. It is divided here, so that an update is the mean over all accumulated samples.",
            type(self.trainer.accelerator.unwrap_model(self.trainer.model)).__name__,
        )

    def _decide(self, probe: UnitProbe, singly: bool) -> None:
        """Compare the loss with those of the samples, known from the outputs or, if `singly`, computed one by one."""
        shifted, self.unit = probe.known_unit()
        self._decided = probe.valid
        self.batch_first = probe.batch_first
        if not probe.valid:
            return
        self._depends_on_items = self.unit == ITEMS
        self.losses_differ = self.unit is None and self.denominator is None
        if self.unit is not None:
            self.shifted = shifted
        elif singly:
            self.unit, self._depends_on_items = probe.unit_of_single_losses()
        if self._several and getattr(self.trainer, "loss_is_scaled_for_ga", None) and self.unit != ITEMS:
            self.unit = None  # divided by a number that only compute_loss knows
        if probe.num_items is not None and self._ranks() > 1:
            self._trainer_ranks = probe.factor_of_ranks()
        same = collectives.all_reduce_scalars(self._same_counts(probe.batch))[0] == collectives.size()
        self._uniform = same and self.unit in (LABELS, SAMPLES)

    def read_graph(self, loss: Tensor) -> None:
        """In the first step, look for class weights, whose sum a mean is divided by."""
        if self._class_weights is None and self.unit in (LABELS, SAMPLES):
            self._class_weights = weighs_classes(loss)
            self.unit = None if self._class_weights else self.unit

    @property
    def unknown(self) -> bool:
        """True if the loss was compared, and has no unit."""
        return self.denominator is None and self._decided and self.unit is None

    # --- one batch ---------------------------------------------------------------------------------------------------

    def of_batch(self, inputs: Any, num_items: Any) -> tuple[float, float | None]:
        """Factor that corrects the loss of one batch, and the denominator of its samples' losses after that; None if
        it is unknown.

        num_items: as returned by `prepare`

        A loss that is the mean over a batch has been divided by the number of accumulated batches, which is not exact
        if they differ in size. A sum stays as it is. The gradients of the ranks are averaged.
        """
        divided = 1 if self._trainer_scales(num_items) else self.trainer.current_gradient_accumulation_steps
        if self._constant is not None:
            multiplied = 1 if num_items is None else self._trainer_ranks
            return 1.0, self._constant * divided / multiplied
        scaled = self._scaled(num_items)
        ranks = self._trainer_ranks if scaled else self._ranks()
        factor = 1.0
        if scaled and num_items is not None and self.denominator is None:
            total = max(float(num_items), 1.0) / _values_per_sample(inputs)
        else:
            total = self._window_total() or 1.0
            factor = factor if scaled else divided * ranks * float(self._count(inputs)) / total
        return factor, None if self.unknown else total / ranks

    @property
    def _constant(self) -> float | None:
        """Denominator that does not depend on the batch: 1 for a sum; None if there is none."""
        if self.denominator is None:
            return 1.0 if self.unit == SUM else None
        return float(self.denominator) if isinstance(self.denominator, Real) else None

    @property
    def _several(self) -> bool:
        """True if an update has several batches, in time or on several ranks."""
        return self.trainer.args.gradient_accumulation_steps > 1 or self._ranks() > 1

    def _scaled(self, num_items: Any) -> bool:
        """True if the loss of a batch is its part of the loss of all accumulated batches."""
        declared = getattr(self.trainer, "loss_is_scaled_for_ga", None)
        if declared is not None:
            return bool(declared)
        return self._trainer_scales(num_items) if self._depends_on_items is None else self._depends_on_items

    def _trainer_scales(self, num_items: Any) -> bool:
        """True if the Trainer takes the loss for such a part, and does not divide it by the number of batches."""
        trainer = self.trainer
        declared = getattr(trainer, "loss_is_scaled_for_ga", None)  # since transformers 5.19
        if declared is not None:
            return bool(declared)
        return (trainer.model_accepts_loss_kwargs and num_items is not None) or trainer.compute_loss_func is not None

    def _ranks(self) -> int:
        """Number of ranks over which the items are counted."""
        args = self.trainer.args
        return int(args.world_size) if args.average_tokens_across_devices else 1

    # --- counts ------------------------------------------------------------------------------------------------------

    @property
    def shifts(self) -> bool:
        """True if the logits at a position predict the label at the next one."""
        return getattr(self.trainer, "_loss_shifts_labels", False) if self.shifted is None else self.shifted

    def counts(self, batch: Any) -> Tensor | None:
        """(B,) numbers of labels of each sample, without ignored ones; None if they are not class indices."""
        labels = batch.get("shift_labels", batch.get("labels"))
        if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.is_floating_point():
            return None
        if "shift_labels" not in batch and labels.dim() > 1 and self.shifts:
            labels = labels[..., 1:]
        ignored = ignored_label(labels, getattr(self.trainer.model, "config", None))
        return labels.ne(ignored).reshape(len(labels), -1).sum(1)

    def _same_counts(self, batch: Any) -> bool:
        """True if all samples of a batch have the same number of labels, more than one."""
        counts = self.counts(batch)
        return counts is not None and bool((counts == counts[0]).all() & (counts[0] > 1))

    def _window_total(self) -> float:
        """Denominator of all accumulated batches, of all ranks over which they are counted."""
        if self._total is None:
            here = float(sum(self._count(batch) for batch in self._batches))
            self._total = collectives.all_reduce_scalars(here)[0] if self._ranks() > 1 else here
        return self._total

    def _count(self, batch: Any) -> Tensor | float:
        """What the loss of a batch divides by if it is a mean: its number of labels, if it has any, or of samples."""
        if callable(self.denominator):
            return self.denominator(batch)
        samples: int | None = self.trainer._kind.items(batch)
        if samples is not None:
            return samples
        counts = None if (self.denominator or self.unit) == SAMPLES else self.counts(batch)
        return number_of_samples(batch) if counts is None else counts.sum()


def _values_per_sample(batch: Any) -> int:
    """Number of values of the label of a sample, in regression and multi-label heads: its loss is a mean over them."""
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.is_floating_point() and labels.dim() > 1:
        return max(labels[0].numel(), 1)
    return 1  # class indices: the loss of a sample is the sum over its labels


def _check_denominator(denominator: Any) -> None:
    number = isinstance(denominator, Real) and 0 < float(denominator) < inf
    if not (denominator is None or number or denominator in (SAMPLES, LABELS) or callable(denominator)):
        raise ValueError(
            "denominator must be a positive number, 'samples', 'labels' or a function of a batch; found "
            f"{denominator!r}."
        )


# --- what an update is divided by -------------------------------------------------------------------------------------


class Aggregates:
    """Scales of the samples' losses, for the accumulated batches of a trainer.

    aggregate: None leaves losses as they are
    count: function of a batch that returns the number of labels of each sample, (B,)
    """

    def __init__(self, aggregate: Per | None, count: Callable[[Any], Tensor]):
        self._aggregate = aggregate
        self._by_token = aggregate == Per("token")
        self._count = count
        self._batches: list[Any] = []  # accumulated for the next update, on this rank
        self._totals: dict[Hashable, float] = {}  # Σ counts of each group in the batches of all ranks
        self._divisor: float | None = None  # None: not computed for this update yet
        self.unverified = self._aggregate is not None and self._aggregate.constant is None

    def start_window(self, batches: list[Any]) -> None:
        """Get the batches that are accumulated for the next update."""
        self._batches = batches
        self._divisor = None

    def scaled(self, values: BatchLoss, denominator: float, batch: Any) -> tuple[BatchLoss, float]:
        """The loss of a batch, scaled, and its new denominator. `denominator`: what the loss divides the sum of the
        samples' losses by. The gradients of the ranks are averaged.
        """
        if self._aggregate is None:
            return values, denominator
        if self._divisor is None:
            self._divisor = self._exchange()
        scale = None
        if self._aggregate.constant is None:
            counts = self._count(batch).to(values.loss.device, wide_dtype(values.loss.dtype))
            self._check_counts(values, counts)
            totals = counts
            if self._aggregate.grouping is not None:
                of_group = [self._totals[key] for key in self._aggregate.group_keys(batch, len(counts))]
                totals = torch.tensor(of_group, dtype=counts.dtype, device=counts.device)
            if not self._by_token:  # whose loss of a sample is the sum over its tokens
                scale, _ = divide_by_counts(torch.ones_like(counts), counts, totals)
        share = self._divisor / collectives.size()
        return replace(values, loss=values.loss * (denominator / share), scale=scale), share

    def _exchange(self) -> float:
        """Divisor of the update. Collective, in the first pass of the update: how the loss counts labels is known by
        then.
        """
        assert self._aggregate is not None
        batches, self._batches = self._batches, []
        if self._aggregate.constant is not None:
            return self._aggregate.constant
        counts = [self._count(batch) for batch in batches]
        if self._aggregate.grouping is None:
            here = sum(float(n.sum() if self._by_token else (n > 0).sum()) for n in counts)
            return max(collectives.all_reduce_scalars(here)[0], 1.0)
        keys = [
            key for batch, n in zip(batches, counts, strict=True) for key in self._aggregate.group_keys(batch, len(n))
        ]
        self._totals = collectives.sum_by_key(sum_by_group(keys, torch.cat(counts)))
        return float(max(sum(total > 0 for total in self._totals.values()), 1))

    def _check_counts(self, values: BatchLoss, counts: Tensor) -> None:
        """Raise LossesError if the loss of a sample is a sum over another number of tokens than those counted. The
        losses of the samples, if they are known, show it.
        """
        problem = None
        if len(counts) != values.samples:
            problem = f"{len(counts)} rows of labels for {plural(values.samples, 'sample')}"
        elif self.unverified and values.losses is not None and bool((counts > 1).any()):
            self.unverified = False
            numbers = counts if values.counts is None else values.counts.to(counts)
            differing = (numbers != counts).nonzero().flatten().tolist()
            if bool(values.losses.isnan().any()):
                problem = "that those of per_sample_losses do not add up to the loss of the trainer. Override it"
            elif differing:
                k = differing[0]
                problem = (
                    f"{numbers[k].item():g} in the loss of sample {k} of a batch, {counts[k].item():g} in its labels"
                )
        if problem is not None:
            raise LossesError(
                f"{self._aggregate} must know the number of tokens in the loss of each sample; found {problem}."
            )


def check_aggregate(trainer: Any, aggregate: Per | None) -> None:
    """Raise unless the trainer has all batches of an update before the first pass, with the labels of each sample."""
    as_per(aggregate)
    of_trl = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")]
    if aggregate is not None and of_trl and "SFTTrainer" not in of_trl:
        raise LossesError(
            "aggregate= must know the number of tokens of each sample before the first pass of an update; found "
            f"{of_trl[0]}, whose loss has a divisor of its own. Leave aggregate out."
        )
