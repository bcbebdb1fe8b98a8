"""Rules about the weights of targets, equal in an update and 1 in sum; all rules, in the order in which their findings
are printed; and the codes of the findings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from samplewise.audit import loop_rules
from samplewise.audit.findings import Evidence, Finding, decimal, microbatches, number, numbers, updates
from samplewise.audit.totals import SlotTotal, UpdateTotal


def unequal_weights(evidence: Evidence) -> Iterator[Finding]:
    """Microbatches of an update, or targets of a microbatch, with different weights."""
    unit = "token" if isinstance(evidence.per, (int, float)) else evidence.per
    noun = "sample" if unit == "sample" else "target"
    for series in evidence.series():
        off = [(total, slot) for total, slot in series if not slot.equal(unit)]
        if evidence.per is None:  # weights of the loop itself, of samples or of single targets
            off = [row for row in off if not row[1].weighted_by_loop and _has_several_targets(row[1])]
        inside = [(t, s) for t, s in off if not all(SlotTotal(s.slot, [part]).equal(unit) for part in s.parts)]
        if inside and evidence.per is not None:
            total, slot = inside[0]
            values = slot.row_sums if unit == "sample" else [slot.low, slot.high]
            yield Finding(
                f"{noun}-weights",
                f"each {noun} of an update must have the same weight; found {min(values):.4g} to {max(values):.4g} in "
                f"a microbatch of update {number(total)}. Divide the sum of the losses once, by the number of "
                f"{noun}s of the whole update; or audit with another per=, if this is intended.",
                str(slot.slot.site),
                numbers(t for t, _ in inside),
            )
        elif off and not inside:
            total, slot = off[0]
            bounds = slot.row_sums if unit == "sample" else [part.low for part in slot.parts if part.targets]
            values = [min(bounds), max(bounds)]
            yield Finding(
                "microbatch-weights",
                f"microbatches of an update must have equal weights for each {noun}; found that in update "
                f"{number(total)} a {noun} has weight {min(values):.4g} in one microbatch and {max(values):.4g} in "
                "another. The loss of each microbatch is divided by its own size: divide sums of losses by the number "
                f"of {noun}s of the whole update.",
                str(slot.slot.site),
                numbers(t for t, _ in off),
            )


def _has_several_targets(slot: SlotTotal) -> bool:
    return any(part.targets > 1 for part in slot.parts)


def wrong_sum(evidence: Evidence) -> Iterator[Finding]:
    """Weights that do not sum to 1, or to the constant that is meant."""
    if any(p.erased and not p.skipped for p in evidence.lost()):
        return  # an update without them has another sum, and that is the fault
    first = {number for finding in loop_rules.first_window(evidence) for number in finding.updates}
    for series in evidence.series():
        if _is_scaled(series) or _is_annealed(series):
            continue
        expected = evidence.expected_sums(series)
        off = [
            (total, slot, goal)
            for (total, slot), goal in zip(series, expected, strict=True)
            if slot.targets and abs(slot.total - goal) > slot.tolerance * abs(goal) and number(total) not in first
        ]
        judged = off
        if evidence.per is None:  # weights of the loop itself are no fault; those of whole microbatches are
            judged = [row for row in off if not row[1].weighted_by_loop]
            judged = [row for row in judged if row[1].equal(None) or _uniform_microbatches(row[1])]
        if not judged:
            continue
        sums = [slot.total for _, slot, _ in judged]
        total, slot, goal = judged[0]
        sizes = [len(t.passes) for t, _ in series]
        regular = max(set(sizes), key=lambda size: (sizes.count(size), size))
        aim = "1" if not isinstance(evidence.per, (int, float)) else f"the number of targets / {evidence.per:g}"
        if len(off) < len(series) and all(len(t.passes) != regular for t, _, _ in judged):
            yield Finding(
                "short-window",
                f"the weights of an update must sum to {decimal(goal)}; found {decimal(sums[0])} in update "
                f"{number(total)}, which has {microbatches(len(total.passes))} where others "
                f"have {regular}. The loss is divided by a constant: divide by the size of the window that is applied.",
                str(slot.slot.site),
                numbers(t for t, _, _ in judged),
            )
            continue
        cause = _cause_of_sum(judged)
        is_constant = max(sums) - min(sums) < 1e-6 * abs(sums[0])
        span = decimal(sums[0]) if is_constant else f"{min(sums):.4g} to {max(sums):.4g}"
        yield Finding(
            "weight-sum",
            f"the weights of an update must sum to {aim if len(total.known) == 1 else decimal(goal)}; found {span} in "
            f"{updates([t for t, _, _ in judged])}. {cause}",
            str(slot.slot.site),
            numbers(t for t, _, _ in judged),
        )


def _is_scaled(series: Sequence[tuple[UpdateTotal, SlotTotal]]) -> bool:
    """True if the loop divides gradients, by a number that is known only in updates without clipping."""
    if any(slot.divided for _, slot in series) or any(total.step.replaced for total, _ in series):
        return True
    same = len({(round(slot.low, 9), round(slot.high, 9)) for _, slot in series}) == 1
    return same and all(total.step.factor != 1 for total, _ in series)


def _is_annealed(series: Sequence[tuple[UpdateTotal, SlotTotal]]) -> bool:
    """True if one of several losses has a factor that changes between windows of one size, or if the factors of all
    losses together are 1.
    """
    if all(len(total.known) == 1 and not total.has_other_losses for total, _ in series):
        return False
    if all(abs(total.total - 1) <= slot.tolerance for total, slot in series):
        return True
    by_size: dict[int, list[float]] = defaultdict(list)
    for total, slot in series:
        by_size[len(total.passes)].append(slot.total)
    return any(max(sums) - min(sums) > series[0][1].tolerance * abs(max(sums)) for sums in by_size.values())


def _uniform_microbatches(slot: SlotTotal) -> bool:
    return _has_several_targets(slot) and all(part.uniform for part in slot.parts)


def _cause_of_sum(judged: Sequence[tuple[UpdateTotal, SlotTotal, float]]) -> str:
    def all_close(value: Callable[[UpdateTotal, SlotTotal], float]) -> bool:
        return all(
            abs(slot.total / goal - value(total, slot)) <= slot.tolerance * value(total, slot)
            for total, slot, goal in judged
        )

    if all(slot.targets for _, slot, _ in judged) and all_close(lambda total, slot: slot.targets):
        return "The loss is a sum: divide it by the number of targets, or audit with per=1."
    if all(len(total.passes) > 1 for total, _, _ in judged) and all_close(lambda total, _: len(total.passes)):
        return "The loss of a microbatch is a mean: divide it by the number of microbatches of the update."
    if all_close(lambda total, _: 1 / len(total.passes)):
        return "The loss is divided by the number of microbatches twice, or by it and by the size of the whole window."
    total, slot, _ = judged[0]
    if all_close(lambda total, slot: 1 / slot.targets):
        return "The loss is divided by the number of targets twice: a mean must not be divided again."
    divisors = [1 / slot.low for _, slot, _ in judged if slot.low == slot.high or slot.equal("token")]
    advice = "look for labels that are counted before a shift, with padding, or in another batch than this window."
    if len(divisors) < len(judged) or not all(abs(n - round(n)) < 1e-3 * n for n in divisors):
        return f"The loss is divided by another number than that of the targets that enter it: {advice}"
    return (
        f"Each target is divided by {round(divisors[0])}, and {slot.targets} targets enter update {number(total)}: "
        f"{advice}"
    )


def find(evidence: Evidence) -> list[Finding]:
    """All findings, in the order of RULES."""
    return [finding for rule in RULES for finding in rule(evidence)]


RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    loop_rules.not_connected,
    loop_rules.same_gradient,
    loop_rules.non_finite,
    loop_rules.broadcast,
    loop_rules.discarded,
    loop_rules.stale,
    loop_rules.repeated_step,
    loop_rules.first_window,
    loop_rules.unapplied,
    loop_rules.mixed_epochs,
    unequal_weights,
    wrong_sum,
    loop_rules.changed_between,
    loop_rules.clipped_before_unscaling,
    loop_rules.schedule,
    loop_rules.eval_mode,
    loop_rules.unused_parameters,
    loop_rules.repeated_on_ranks,
)
CODES = (
    "broadcast changed-between clipped-scaled discarded eval-mode first-window microbatch-weights mixed-epochs "
    "non-finite not-connected parameters-without-optimizer repeated-step same-gradient sample-weights "
    "samples-on-several-ranks scheduler-never scheduler-per-microbatch short-window stale-gradients "
    "target-weights unapplied unused-parameters weight-sum"
).split()
