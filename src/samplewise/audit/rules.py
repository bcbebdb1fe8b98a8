"""All rules, in the order in which their findings are printed, and the codes of the findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from samplewise.audit.findings import Evidence, Finding
from samplewise.audit.loop_rules import (
    broadcast,
    changed_between,
    clipped_before_unscaling,
    discarded,
    eval_mode,
    first_window,
    mixed_epochs,
    non_finite,
    not_connected,
    repeated_on_ranks,
    repeated_step,
    same_gradient,
    schedule,
    stale,
    unapplied,
    unused_parameters,
)
from samplewise.audit.weight_rules import unequal_weights, wrong_sum


def find(evidence: Evidence) -> list[Finding]:
    """All findings, in the order of RULES."""
    return [finding for rule in RULES for finding in rule(evidence)]


RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    not_connected,
    same_gradient,
    non_finite,
    broadcast,
    discarded,
    stale,
    repeated_step,
    first_window,
    unapplied,
    mixed_epochs,
    unequal_weights,
    wrong_sum,
    changed_between,
    clipped_before_unscaling,
    schedule,
    eval_mode,
    unused_parameters,
    repeated_on_ranks,
)
CODES = (
    "broadcast changed-between clipped-scaled discarded eval-mode first-window microbatch-weights mixed-epochs "
    "non-finite not-connected parameters-without-optimizer repeated-step same-gradient sample-weights "
    "samples-on-several-ranks scheduler-never scheduler-per-microbatch short-window stale-gradients "
    "target-weights unapplied unused-parameters weight-sum"
).split()
