"""Faults of a training loop, what they are found from, how their sentences are written, and what could not be seen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

from samplewise.audit.records import Pass, Site, Slot
from samplewise.audit.totals import Per, SlotTotal, UpdateTotal
from samplewise.core.text import plural

if TYPE_CHECKING:
    from samplewise.audit.observer import Observer


@dataclass(frozen=True)
class Finding:
    """A fault of the loop.

    code: short name, which `allow=` accepts
    message: what was seen, and what to do
    where: line of the user's code, if it is known
    updates: numbers of the updates that show it, from 1; empty if it concerns the whole loop
    """

    code: str
    message: str
    where: str = ""
    updates: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}{f' Look at {self.where}.' if self.where else ''}"


Series = list[tuple[UpdateTotal, SlotTotal]]  # the updates of one slot


@dataclass(frozen=True)
class Evidence:
    """All that the rules read. complete: the loop came to its end, so that what is left was never applied."""

    observer: Observer
    totals: Sequence[UpdateTotal]
    per: Per
    complete: bool

    def series(self) -> Iterator[Series]:
        """The updates of each optimizer with known weights, for each slot."""
        by_slot: dict[tuple[int, Slot], list[tuple[UpdateTotal, SlotTotal]]] = defaultdict(list)
        for total in self.totals:
            for slot in total.known:
                by_slot[total.step.optimizer, slot.slot].append((total, slot))
        yield from by_slot.values()

    def by_optimizer(self) -> Iterator[list[UpdateTotal]]:
        by_optimizer: dict[int, list[UpdateTotal]] = defaultdict(list)
        for total in self.totals:
            by_optimizer[total.step.optimizer].append(total)
        yield from by_optimizer.values()

    def lost(self) -> list[Pass]:
        """Passes that no update contains, although an optimizer has parameters that they have reached."""
        observer = self.observer
        keys = {id(p) for o in observer.updates.optimizers for group in o.param_groups for p in group["params"]}
        return [p for p in observer.updates.passes if not p.updates and not p.inside and (p.reached & keys or not keys)]

    def deviation(self) -> float:
        """Largest relative deviation of a weight from what `per` demands; NaN if no weights are known."""
        deviations = [
            slot.deviation(self.per, total)
            for series in self.series()
            for (_, slot), total in zip(series, self.expected_sums(series), strict=True)
        ]
        return max(deviations, default=nan)

    def expected_sums(self, series: Series) -> list[float]:
        """Sum that the weights of each update should have: 1 for one loss. With several losses, each may have a factor
        of its own, which must be the same in all updates.
        """
        one_loss = all(len(total.known) == 1 and not total.has_other_losses for total, _ in series)
        if isinstance(self.per, (int, float)) or one_loss:
            return [slot.expected_total(self.per) for _, slot in series]
        sums = sorted(slot.total for _, slot in series)
        return [sums[len(sums) // 2]] * len(series)


# --- parts of sentences ----------------------------------------------------------------------------------------------


def number(total: UpdateTotal) -> int:
    return total.step.number + 1


def numbers(totals: Iterable[UpdateTotal]) -> tuple[int, ...]:
    return tuple(sorted({number(total) for total in totals}))


def first_site(passes: Sequence[Pass]) -> str:
    sites: set[Site] = set().union(*(p.sites for p in passes))
    return str(min(sites)) if sites else ""


def microbatches(number: int) -> str:
    return plural(number, "microbatch", "microbatches")


def updates(totals: Sequence[UpdateTotal]) -> str:
    """Number of updates of a kind, and the first of them."""
    return f"{plural(len(totals), 'update')}, first in update {number(totals[0])}"


def decimal(value: float) -> str:
    return f"{value:.6g}"


# --- what could not be seen -------------------------------------------------------------------------------------------


def notes_of(evidence: Evidence, findings: Sequence[Finding]) -> list[str]:
    """Sentences about what could not be seen."""
    observer = evidence.observer
    totals = evidence.totals
    notes = []
    if not totals:
        notes.append(_nothing_seen(observer))
    elif all(total.step.written and not total.passes for total in totals):
        notes.append(
            "weights cannot be seen: gradients were not written by a backward pass through an output of the "
            "model, as with model.compile() (use torch.compile(model)) and with functions that are compiled or of "
            "torch.func"
        )
    elif any(p.weights and all(w.relative for w in p.weights) for p in observer.updates.passes):
        notes.append(
            "weights cannot be seen: the loss is no cross entropy of an output. Pass losses=, a function (outputs, "
            "labels) -> losses; shares of the gradient at the outputs are in audit.updates"
        )
    elif any(not p.weights and p.finite for p in observer.updates.passes):
        notes.append("weights cannot be seen: no output with rows is between the parameters and the loss")
    if any(total.step.is_unknown for total in totals):
        notes.append("gradients were changed or added up by hand: the weights in such updates are not known")
    if observer.calls.batch_norm and any(len(total.passes) > 1 for total in totals):
        notes.append(
            f"the BatchNorm layer {observer.calls.batch_norm[0]} normalizes each microbatch by its own statistics, "
            "so that updates depend on how batches are cut: freeze it (sw.freeze_batchnorm), or use GroupNorm"
        )
    varied = [s for t in totals for s in t.known if not s.equal(None) and evidence.per is None]
    if varied and not any("weights" in f.code for f in findings):
        notes.append("targets within a microbatch have different weights: the loop weights them itself")
    return notes


def _nothing_seen(observer: Observer) -> str:
    if observer.compiled:
        return f"{observer.compiled} was compiled by model.compile(), which hides its calls: use torch.compile(model)"
    if observer.updates.other_optimizers:
        return (
            "optimizers have stepped that have no parameter of the model: it was copied, replaced or moved after the "
            "optimizer was created, or another model is trained"
        )
    if observer.calls.in_other_threads and not observer.updates.passes:
        return (
            "the model was called in another thread than that of the audit: begin the audit in the thread that trains"
        )
    if not observer.calls.number and not observer.calls.without_graph:
        return "no call of the model was seen: pass the model that the loop trains, or None for all models"
    if not observer.updates.passes:
        return "no backward pass through an output of the model was seen"
    return "no optimizer step was seen: optimizers must be those of torch.optim, or change parameters in place"
