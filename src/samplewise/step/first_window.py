"""Checks of the first windows of a step: a mistake that they find would repeat itself in every later window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from samplewise.core.batches import length
from samplewise.core.modes import check_modes
from samplewise.step.accumulate import Accumulator
from samplewise.step.checks import check_pieces, check_reached, check_weights
from samplewise.step.forward import LossEvaluator
from samplewise.step.recheck import Recheck
from samplewise.step.window import Window
from samplewise.transforms.chain import Chain, Stage
from samplewise.transforms.stats import SampleStats, concatenate

SAMPLES = "samples"  # model modes, and samples computed alone: the recheck
GRADIENTS = "gradients"  # microbatch sizes, and parameters that the loss does not reach
WEIGHTS = "weights"  # sizes of the coefficients
INDEPENDENCE = "independence"  # coefficients that depend on other samples


class FirstWindowChecks:
    """Checks of the first windows, in the order of the methods.

    pending: checks that no window has passed yet. A check that raises stays pending: the next attempt raises again.
    unsliced: no batch was sliced yet.
    """

    def __init__(self, evaluator: LossEvaluator, recheck: Recheck):
        self.pending = {SAMPLES, GRADIENTS, WEIGHTS, INDEPENDENCE}
        self.unsliced = True
        self._evaluator = evaluator
        self._recheck = recheck
        self._policy = evaluator.policy

    def follow(self, chain: Chain) -> None:
        """Check the coefficients of new transforms."""
        self.pending |= {WEIGHTS, INDEPENDENCE}
        if chain.measures and not self._recheck.own_gradients:
            self.pending.add(SAMPLES)  # the first recheck has only warned about interacting samples
        self._recheck.own_gradients = chain.measures

    def begin(self, accumulator: Accumulator) -> None:
        """Begin a window: record what transforms get, if their coefficients are to be checked."""
        if INDEPENDENCE in self.pending:
            accumulator.first_stats = []
        if SAMPLES in self.pending:
            check_modes(self._evaluator.modules)

    def compare_slice(self, batch: Any, start: int, stop: int) -> None:
        """Compare the losses of a slice with those in the whole batch."""
        self.unsliced = False
        self._recheck.compare_slice(batch, start, stop)

    def recheck(self, microbatch: Any, update: int) -> None:
        """Recheck the first microbatch of a window, if no window was rechecked yet or the update is due."""
        first = SAMPLES in self.pending
        self._recheck.run(microbatch, first, update)
        # A sample alone shows no interaction. The recheck of a sharded model contains collectives, which all ranks make
        # in their first window.
        is_void = self._policy.needs_two_samples and length(microbatch) == 1
        if first and not (is_void and self._evaluator.ranks.passes_alone):
            self.pending.remove(SAMPLES)

    def end(self, window: Window, accumulator: Accumulator, ranks: int) -> None:
        """Check a complete window of `ranks` ranks, whose gradients are summed, for common mistakes; warn or raise."""
        samples = window.samples if window.totals is None else window.totals.samples
        chain = window.config.transforms
        if WEIGHTS in self.pending and (window.failure is not None or not samples):
            return  # the next window is the first one that can be checked
        if GRADIENTS in self.pending:
            sizes = [len(part) for part in window.parts if len(part)]
            if sizes:
                check_pieces(self._evaluator.modules, sizes * ranks, window.config.interacting)
            check_reached(self._evaluator.trained.owned, noise=bool(chain.on_sum))
            self._evaluator.unwatch()
            self.pending.remove(GRADIENTS)
        if INDEPENDENCE in self.pending:
            self._check_independence(accumulator)
        if WEIGHTS in self.pending:
            check_weights(chain, window.parts)  # last: its collective sends errors of the other checks to all ranks
            self.pending.remove(WEIGHTS)

    def _check_independence(self, accumulator: Accumulator) -> None:
        """Check that coefficients do not depend on other samples. A window of one sample on this rank allows no
        comparison: the policy decides whether the check is then repeated.
        """
        first_stats = accumulator.first_stats or []
        for stage, stats in _stats_by_stage(first_stats):
            self._policy.check_coefficients(stage, stats)
        if not self._policy.needs_two_samples or sum(len(stats) for _, stats in first_stats) >= 2:
            self.pending.discard(INDEPENDENCE)
        accumulator.first_stats = None


def _stats_by_stage(first_stats: Sequence[tuple[Stage, SampleStats]]) -> list[tuple[Stage, SampleStats]]:
    """The first results of each stage; those of two calls if the first one had one sample only."""
    by_stage: list[tuple[Stage, SampleStats]] = []
    for stage in {id(stage): stage for stage, _ in first_stats}.values():
        parts = [stats for other, stats in first_stats if other is stage and len(stats)]
        if parts:
            by_stage.append((stage, concatenate(parts[:2]) if len(parts) > 1 and len(parts[0]) == 1 else parts[0]))
    return by_stage
