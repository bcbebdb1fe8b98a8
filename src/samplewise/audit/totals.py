"""Weights of an update: those of its microbatches together, compared with what `per` demands."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import nan

from samplewise.audit.records import OptimizerStep, Pass, RowWeights, Slot, close

FACTOR_TOLERANCE = 1e-3  # relative error of a measured factor

Per = str | float | None  # "token", "sample", a number; None: "token" or "sample"


@dataclass
class SlotTotal:
    """Weights of one slot in one update.

    parts: of each backward pass, and with several ranks of each rank
    divided: the loop has divided the gradients, and not the loss
    """

    slot: Slot
    parts: list[RowWeights] = field(default_factory=list)
    divided: bool = False

    @property
    def total(self) -> float:
        return sum(part.total for part in self.parts)

    @property
    def targets(self) -> int:
        return sum(sum(part.counts) for part in self.parts)

    @property
    def size(self) -> float:
        """Number of targets, each times the factor of its class: equal weights are 1 / size."""
        return sum(part.size for part in self.parts)

    @property
    def low(self) -> float:
        return min((part.low for part in self.parts if part.targets), default=nan)

    @property
    def high(self) -> float:
        return max((part.high for part in self.parts if part.targets), default=nan)

    @property
    def tolerance(self) -> float:
        return max(part.tolerance for part in self.parts)

    @property
    def weighted_by_loop(self) -> bool:
        """True if the weights have different signs, as with rewards: the loop has weighted the samples itself."""
        return self.low < 0 < self.high

    @property
    def row_sums(self) -> list[float]:
        """Weights of the samples that have targets."""
        return [w for part in self.parts for w, n in zip(part.sums, part.counts, strict=True) if n]

    def equal(self, unit: Per) -> bool:
        """True if all targets, or the sums of all samples, have the same weight."""
        if unit == "sample":
            sums = self.row_sums
            return not sums or close(min(sums), max(sums), self.tolerance)
        if unit is None:
            return self.equal("token") or self.equal("sample")
        return self.targets == 0 or close(self.low, self.high, self.tolerance)

    def expected_total(self, per: Per) -> float:
        """Sum that the weights should have."""
        expected = self.size / per if isinstance(per, (int, float)) else 1.0
        # The loss of a sample may be the sum over its elements, and that of a pass the sum over several calls.
        for factor in (self.parts[0].elements, min(part.calls for part in self.parts)):
            if close(self.total, expected * factor, self.tolerance):
                return expected * factor
        return expected

    def deviation(self, per: Per, total: float) -> float:
        """Largest relative deviation of a weight. total: sum that the weights should have."""
        if not total:
            return nan
        if per is None:
            return min(self.deviation("token", total), self.deviation("sample", total))
        if per == "sample":
            sums = self.row_sums
            return max((abs(w * len(sums) / total - 1) for w in sums), default=0.0)
        if not self.targets:
            return 0.0
        return max(abs(self.low * self.size / total - 1), abs(self.high * self.size / total - 1))


@dataclass
class UpdateTotal:
    """One update: its passes that had not been applied before, and their weights by slot."""

    step: OptimizerStep
    passes: list[Pass]
    slots: dict[Slot, SlotTotal]

    @property
    def samples(self) -> int:
        """Number of samples, of all ranks if their weights are known."""
        on_this_rank = sum(len(p.samples) for p in self.passes)
        rows = max((sum(len(part.sums) for part in slot.parts) for slot in self.slots.values()), default=0)
        has_ranks = any(part.rank for slot in self.slots.values() for part in slot.parts)
        return rows if has_ranks or not on_this_rank else on_this_rank

    @property
    def known(self) -> list[SlotTotal]:
        """Slots whose weights are known."""
        if self.step.is_unknown:
            return []
        return [slot for slot in self.slots.values() if slot.parts and not any(part.relative for part in slot.parts)]

    @property
    def has_other_losses(self) -> bool:
        return any(p.has_other_losses for p in self.passes)

    @property
    def targets(self) -> int:
        return sum(slot.targets for slot in self.known)

    @property
    def total(self) -> float:
        """Sum of the weights; NaN if they are not known."""
        return sum(slot.total for slot in self.known) if self.known else nan


def update_totals(
    steps: Sequence[OptimizerStep], passes: Sequence[Pass], of_ranks: Sequence[Sequence[RowWeights]] = ()
) -> list[UpdateTotal]:
    """Totals of all updates. `of_ranks`: for each update, the weights on the other ranks, without the loss scale."""
    totals = []
    for step in steps:
        fresh = [passes[n] for n in step.passes if n not in step.stale]
        parts = [part.scaled(1 / step.scale) for p in fresh for part in _by_slot(p.weights)]
        parts += of_ranks[step.number] if of_ranks else []
        slots: dict[Slot, SlotTotal] = {}
        for part in parts:
            slots.setdefault(part.slot, SlotTotal(part.slot)).parts.append(part)
        factor = step.factor
        if factor is not None and factor != 1:
            for slot in slots.values():  # a loop may divide gradients in place of losses; other factors are clipping
                if abs(slot.total - 1) > slot.tolerance and abs(slot.total * factor - 1) <= FACTOR_TOLERANCE:
                    slot.parts = [part.scaled(factor) for part in slot.parts]
                    slot.divided = True
        totals.append(UpdateTotal(step, fresh, slots))
    _divide_by_class_weights(totals)
    return totals


def _by_slot(weights: Iterable[RowWeights]) -> Iterable[RowWeights]:
    """Weights of a pass, with those of several calls of a slot together."""
    joined: dict[Slot, RowWeights] = {}
    for rows in weights:
        joined[rows.slot] = joined[rows.slot].joined(rows) if rows.slot in joined else rows
    return joined.values()


def _divide_by_class_weights(totals: Iterable[UpdateTotal]) -> None:
    """Replace the bounds of weights that differ between classes by those after a division by the classes' factors."""
    parts_of: dict[Slot, list[RowWeights]] = defaultdict(list)
    for total in totals:
        for slot, weights in total.slots.items():
            parts_of[slot] += weights.parts
    for parts in parts_of.values():
        if not any(part.classes and len(part.classes) > 1 and not part.uniform for part in parts):
            continue
        factors = _class_factors(parts)
        for part in parts:
            if part.classes and factors and all(label in factors for label in part.classes):
                scales = [weight / factors[label] for label, (weight, _) in part.classes.items()]
                if close(min(scales), max(scales), part.tolerance):
                    part.low = min(scales)
                    part.high = max(scales)
                    part.size = sum(factors[label] * count for label, (_, count) in part.classes.items())


def _class_factors(parts: Iterable[RowWeights]) -> dict[int, float]:
    """Factor of each class, up to a common one: microbatches with a class in common share a scale."""
    remaining = sorted((part.classes for part in parts if part.classes), key=len, reverse=True)
    factors = {label: weight for label, (weight, _) in remaining[0].items()}
    connected = True
    while connected:
        connected = False
        for classes in remaining:
            common = [label for label in classes if label in factors]
            if common and len(common) < len(classes):
                scale = classes[common[0]][0] / factors[common[0]]
                factors |= {label: weight / scale for label, (weight, _) in classes.items() if label not in factors}
                connected = True
    return factors
