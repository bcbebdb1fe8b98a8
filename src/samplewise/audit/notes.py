"""What an audit could not see, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from samplewise.audit.findings import Evidence, Finding

if TYPE_CHECKING:
    from samplewise.audit.observer import Observer


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
