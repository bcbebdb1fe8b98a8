"""Rules about windows, gradients, modes, schedules and data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from samplewise.audit.findings import Evidence, Finding, first_site, microbatches, number, numbers, updates
from samplewise.audit.records import Pass, Slot
from samplewise.core.comparisons import broadcast_cause
from samplewise.core.text import listed, plural

# --- windows ----------------------------------------------------------------------------------------------------------


def first_window(evidence: Evidence) -> Iterator[Finding]:
    for totals in evidence.by_optimizer():
        sizes = [len(t.passes) for t in totals]
        later = sizes[1:-1] or sizes[1:]
        regular = bool(later) and later[0] == max(set(later), key=later.count)
        if regular and 0 < sizes[0] < later[0] and totals[0].samples < totals[1].samples:
            yield Finding(
                "first-window",
                f"all windows must have the same number of microbatches, but for the last; found {sizes[0]} in the "
                f"first update and {later[0]} in later ones. Step when (index + 1) % n == 0, not index % n == 0.",
                str(totals[0].step.site),
                (number(totals[0]),),
            )


def unapplied(evidence: Evidence) -> Iterator[Finding]:
    rest = [p for p in evidence.lost() if not p.erased]
    if rest and evidence.complete and evidence.totals:
        yield Finding(
            "unapplied",
            f"every gradient must be applied; found that training ended with {microbatches(len(rest))} after the last "
            "optimizer.step(). Make an update at the end of each epoch, and divide by the size of that window.",
            first_site(rest),
        )


def discarded(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.observer.updates.optimizers:
        return
    used = [set(p.samples) for p in evidence.observer.updates.passes if p.updates and p.samples]
    erased = [
        p
        for p in evidence.lost()
        # Gradients of samples that an update has, as in sharpness-aware minimization, were used otherwise.
        if p.erased and p.finite and not p.skipped and not p.intended and not any(set(p.samples) <= s for s in used)
    ]
    if erased:
        yield Finding(
            "discarded",
            f"every gradient must be applied; found that those of {microbatches(len(erased))}, first of "
            f"microbatch {erased[0].number + 1}, were set to zero before an optimizer.step(). Call zero_grad() after "
            "the step, or before the first backward pass of a window.",
            first_site(erased),
        )


def stale(evidence: Evidence) -> Iterator[Finding]:
    off = [t for t in evidence.totals if t.step.stale and t.passes]
    if off:
        old = off[0].step.stale[0]
        before = evidence.observer.updates.passes[old].updates[0] + 1
        yield Finding(
            "stale-gradients",
            f"an update must contain each gradient once; found in update {number(off[0])} the gradient of microbatch "
            f"{old + 1}, which update {before} had applied already ({plural(len(off), 'update')} of this kind). Call "
            "zero_grad() after each optimizer.step().",
            str(off[0].step.site),
            numbers(off),
        )


def repeated_step(evidence: Evidence) -> Iterator[Finding]:
    off = [t for t in evidence.totals if t.step.stale and not t.passes]
    if off:
        yield Finding(
            "repeated-step",
            f"each window must be applied by one optimizer.step(); found that update {number(off[0])} applies the "
            f"gradients of an earlier update again ({plural(len(off), 'update')} of this kind). Call step() once per "
            "window.",
            str(off[0].step.site),
            numbers(off),
        )


def mixed_epochs(evidence: Evidence) -> Iterator[Finding]:
    """An update of the end of an epoch and the beginning of the next one."""
    boundaries = epoch_starts(evidence.observer.updates.passes)
    off = [t for t in evidence.totals if any(p.number in boundaries for p in t.passes[1:])]
    if off and evidence.observer.updates.passes:
        yield Finding(
            "mixed-epochs",
            f"an update should have samples of one epoch; found that update {number(off[0])} adds the last "
            "microbatches of an epoch to the first ones of the next. Make an update at the end of each epoch.",
            str(off[0].step.site),
            numbers(off),
        )


def epoch_starts(passes: Sequence[Pass]) -> set[int]:
    """Numbers of the passes that begin an epoch after the first: all epochs have the same samples, each once, in at
    least two microbatches. Empty if the samples are not known, or drawn in another way.
    """
    epochs: list[list[set[int]]] = [[]]
    starts = set()
    previous: list[int] = []
    for p in passes:
        samples = set(p.samples)
        if not samples or len(samples) < len(p.samples):
            return set()
        if p.samples == previous:  # a second loss of the same microbatch
            continue
        previous = p.samples
        if any(samples & earlier for earlier in epochs[-1]):
            starts.add(p.number)
            epochs.append([])
        epochs[-1].append(samples)
    contents = [set().union(*epoch) for epoch in epochs]
    complete = all(content == contents[0] for content in contents[:-1]) and contents[-1] <= contents[0]
    return starts if complete and all(len(epoch) > 1 for epoch in epochs[:-1]) else set()


# --- gradients --------------------------------------------------------------------------------------------------------


def changed_between(evidence: Evidence) -> Iterator[Finding]:
    numbers = sorted(set(evidence.observer.updates.changed_between))
    if numbers:
        yield Finding(
            "changed-between",
            "gradients of a window may be clipped, unscaled or changed only once, before its optimizer.step(); found "
            f"that they were changed after microbatch {numbers[0] + 1}, before further ones were added "
            f"({plural(len(numbers), 'time')}). Clip when the window is complete.",
            first_site([evidence.observer.updates.passes[numbers[0]]]),
        )


def clipped_before_unscaling(evidence: Evidence) -> Iterator[Finding]:
    """Clipping of gradients that still have the loss scale: after unscaling, their norm is a bound over the scale."""
    off = []
    for total in evidence.totals:
        if total.step.scaled_norms is None:
            continue
        before, after = total.step.scaled_norms
        scaled = after * total.step.scale
        if after < 0.99 * before and _is_round(scaled) and not _is_round(after):
            off.append((total, after, scaled))
    if off:
        total, after, scaled = off[0]
        yield Finding(
            "clipped-scaled",
            f"gradients must be unscaled before they are clipped; found that in update {number(total)} their norm was "
            f"reduced to {scaled:.3g} while they had the loss scale {total.step.scale:g}, so that it is {after:.3g} in "
            "the update. Call scaler.unscale_(optimizer) before clipping.",
            str(total.step.site),
            numbers(t for t, _, _ in off),
        )


def _is_round(value: float) -> bool:
    """True for a number of two significant digits, as people choose bounds."""
    return value > 0 and abs(float(f"{value:.1e}") / value - 1) < 1e-3


def not_connected(evidence: Evidence) -> Iterator[Finding]:
    observer = evidence.observer
    empty = [t for t in evidence.totals if not t.step.passes and not t.step.written]
    if not empty or any(p.erased for p in observer.updates.passes):
        return
    if observer.calls.without_graph and not observer.calls.number:
        hint = "the outputs of the model have no graph: look for torch.no_grad(), inference_mode() or frozen parameters"
    elif observer.calls.without_graph:
        hint = "some outputs of the model have no graph: look for torch.no_grad() around the loss"
    else:
        hint = "look for detach(), .data, .item(), a copied model, or a loss that is computed from other values"
    yield Finding(
        "not-connected",
        f"a backward pass must reach the parameters of the optimizer before its step; found none before update "
        f"{number(empty[0])} ({plural(len(empty), 'update')} of this kind): the parameters do not change, or only by "
        f"weight decay and momentum. The loss is not connected to the model: {hint}.",
        str(empty[0].step.site),
        numbers(empty),
    )


def same_gradient(evidence: Evidence) -> Iterator[Finding]:
    repeated = evidence.observer.updates.repeated
    if repeated:
        step, number = next(iter(repeated.items()))
        yield Finding(
            "same-gradient",
            f"gradients of single samples must differ; found that {number} backward passes of update {step + 1} "
            "differentiate the same loss of several samples. Compute one loss per sample (reduction='none'), and use "
            "sw.gradients(losses, model).",
            str(evidence.totals[step].step.site),
            tuple(k + 1 for k in repeated),
        )


def non_finite(evidence: Evidence) -> Iterator[Finding]:
    off = [p for p in evidence.observer.updates.passes if not p.finite and p.updates]
    if off:
        update = off[0].updates[0] + 1
        yield Finding(
            "non-finite",
            f"losses must be finite; found NaN or infinity in microbatch {off[0].number + 1} of update {update} "
            f"({microbatches(len(off))}), which was applied. Look at its samples, and skip or repair such batches; a "
            "loop that averages or filters its log does not show them.",
            first_site(off),
            tuple(sorted({n + 1 for p in off for n in p.updates})),
        )


def unused_parameters(evidence: Evidence) -> Iterator[Finding]:
    observer = evidence.observer
    if not observer.updates.optimizers or not observer.updates.passes or any(t.step.written for t in evidence.totals):
        return
    reached = set().union(*(p.reached for p in observer.updates.passes))
    names = observer.updates.accumulation.names
    owned = {id(p): p for o in observer.updates.optimizers for group in o.param_groups for p in group["params"]}
    missed = [
        names.get(key, f"shape {tuple(p.shape)}") for key, p in owned.items() if p.requires_grad and key not in reached
    ]
    if missed:
        yield Finding(
            "unused-parameters",
            f"the optimizer has parameters that never got a gradient: {listed(missed)}. Look for a detach(), an "
            "unused layer, or a model or layer that was copied or replaced after the optimizer was created.",
        )
    free = [names[key] for key in names if key in reached and key not in owned]
    if free:
        yield Finding(
            "parameters-without-optimizer",
            f"parameters got gradients and no optimizer has them: {listed(free)}. Pass them to the optimizer, or set "
            "requires_grad=False.",
        )


# --- model, schedule and data -----------------------------------------------------------------------------------------


def eval_mode(evidence: Evidence) -> Iterator[Finding]:
    modules = evidence.observer.updates.eval_modules
    if modules and evidence.observer.updates.passes:
        verb = "was" if len(modules) == 1 else "were"
        yield Finding(
            "eval-mode",
            f"modules must be in training mode while they are trained; found that {listed(modules)} {verb} in eval "
            "mode: dropout is off there, and running statistics are not updated. Call model.train() before training "
            "and after each evaluation.",
            str(next(iter(modules.values()))),
        )


def schedule(evidence: Evidence) -> Iterator[Finding]:
    passes = evidence.observer.updates.passes
    off = []
    for total in evidence.totals:
        rates = {p.rates for p in total.passes if p.rates and not p.inside}
        if len(rates) > 1 and len({len(r) for r in rates}) == 1:
            off.append(total)
    if off:
        first, last = (p.rates[0] for p in (off[0].passes[0], off[0].passes[-1]))
        yield Finding(
            "scheduler-per-microbatch",
            f"the learning rate must not change within a window; found {first:.4g} at the first and {last:.4g} at the "
            f"last microbatch of update {number(off[0])}. Call scheduler.step() after optimizer.step(), once per "
            "update.",
            str(off[0].step.site),
            numbers(off),
        )
    steps = len(evidence.totals)
    unstepped = [s for s in evidence.observer.updates.schedulers if getattr(s, "last_epoch", 1) == 0]
    # A schedule by epochs has no step yet in the first one.
    due = [s for s in unstepped if epoch_starts(passes) or _length(s) <= steps]
    if due and evidence.complete and steps > 1:
        yield Finding(
            "scheduler-never",
            f"a learning rate schedule must be stepped; found that {type(due[0]).__name__} was not in "
            f"{plural(len(evidence.totals), 'update')}. Call scheduler.step() after optimizer.step(), or once per "
            "epoch.",
        )


def _length(scheduler: Any) -> float:
    """Number of steps of a schedule; infinite if it has no end."""
    names = ("T_max", "total_iters", "total_steps")
    return min((getattr(scheduler, name) for name in names if hasattr(scheduler, name)), default=inf)


def broadcast(evidence: Evidence) -> Iterator[Finding]:
    """Predictions (B, 1) with targets (B,)."""
    observer = evidence.observer
    for site, name, rows in observer.calls.broadcasts[:1]:
        yield Finding(
            "broadcast",
            f"predictions and targets must have the same shape. {broadcast_cause(name, rows)}",
            str(site),
        )
    values: dict[Slot, list[tuple[float | None, int]]] = defaultdict(list)
    for p in observer.updates.passes:
        for weights in p.weights:
            if weights.relative:
                values[weights.slot].append((p.comparison, len(weights.sums)))
    for slot, pairs in values.items():
        means = [mean for mean, _ in pairs if mean is not None]
        # A constant target, as in adversarial training, has few different values.
        several = len({round(mean, 6) for mean in means}) > len(means) / 2
        if len(means) == len(pairs) >= 3 and several:
            yield Finding(
                "broadcast",
                "each prediction must be compared with its own target; found that all predictions of a microbatch are "
                f"compared with the mean of its targets, {means[0]:.4g} in the first one. "
                f"{broadcast_cause('the loss', pairs[0][1])}",
                str(slot.site),
            )


def repeated_on_ranks(evidence: Evidence) -> Iterator[Finding]:
    off = []
    for total in evidence.totals:
        by_rank: dict[int, set[int]] = defaultdict(set)
        for part in (part for slot in total.known for part in slot.parts):
            by_rank[part.rank].update(part.samples)
        if sum(map(len, by_rank.values())) > len(set().union(*by_rank.values())):
            off.append(total)
    if off:
        yield Finding(
            "samples-on-several-ranks",
            f"ranks must have different samples; found the same ones on several ranks in {updates(off)}. Use a "
            "DistributedSampler.",
            "",
            numbers(off),
        )
