"""Checks of the first windows of a step: a mistake that they find would repeat itself in every later window."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import length
from samplewise.core.modes import check_modes, mixing_batch_norms, warn
from samplewise.core.text import listed
from samplewise.errors import ParameterError, TransformError
from samplewise.parallel import collectives
from samplewise.step.accumulate import Accumulator
from samplewise.step.forward import LossEvaluator
from samplewise.step.recheck import Recheck
from samplewise.step.window import Window
from samplewise.transforms.chain import Chain
from samplewise.transforms.stats import SampleStats, concatenate, denominator

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
        if chain.measures and not self._recheck.per_sample_gradients:
            self.pending.add(SAMPLES)  # the first recheck has only warned about interacting samples
        self._recheck.per_sample_gradients = chain.measures

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
        total = denominator(window.parts) if window.totals is None else window.totals.denominators
        empty = not samples or (chain.drops and not total)
        if WEIGHTS in self.pending and (window.failure is not None or empty):
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
        for stage in {id(stage): stage for stage, _ in first_stats}.values():
            parts = [stats for owner, stats in first_stats if owner is stage and len(stats)]
            if len(parts) > 1 and len(parts[0]) == 1:  # one sample allows no comparison
                parts = [concatenate(parts[:2])]
            if parts:
                self._policy.check_coefficients(stage, parts[0])
        if not self._policy.needs_two_samples or sum(len(stats) for _, stats in first_stats) >= 2:
            self.pending.discard(INDEPENDENCE)
        accumulator.first_stats = None


# --- common mistakes --------------------------------------------------------------------------------------------------


SMALL = 0.1  # weights below it scale an update down to less than a tenth


def check_pieces(modules: Iterable[nn.Module], sizes: Sequence[int], interacting: str) -> None:
    """Warn if BatchNorm in training mode normalizes microbatches of one sample, or a window of several microbatches;
    and about a window of several microbatches whose samples may interact. `sizes`: samples of each microbatch.
    """
    if len(sizes) == 1 and sizes[0] > 1:
        return
    names = mixing_batch_norms(modules)
    if names and 1 in sizes:
        warn(
            f"BatchNorm in training mode gets microbatches of one sample: {listed(names)}. Its statistics are then "
            "those of single samples. Use larger microbatches, call sw.freeze_batchnorm(model), or use GroupNorm."
        )
    elif names:
        warn(
            f"BatchNorm in training mode gets a window in {len(sizes)} microbatches: {listed(names)}. Its statistics "
            "are those of each microbatch, so that results depend on the microbatch size. Use microbatch=None with "
            "batches of the window's size, call sw.freeze_batchnorm(model), or use GroupNorm."
        )
    elif interacting == "allow" and len(sizes) > 1:
        warn(
            f"with interacting='allow', a window is computed in {len(sizes)} microbatches: a loss then depends on the "
            "samples of its own microbatch only, so that results depend on the microbatch size. Use microbatch=None "
            "with batches of the window's size, unless this is intended."
        )


def check_reached(trained: dict[str, Tensor], noise: bool) -> None:
    """Warn about parameters of the optimizer that got no gradient; raise if none got one. No warning with noise on the
    sum, which gives every parameter a gradient.
    """
    missed = [name for name, p in trained.items() if p.requires_grad and p.grad is None]
    if missed and all(p.grad is None for p in trained.values()):
        raise ParameterError(
            f"the loss must reach a parameter of the optimizer; found that it reaches none of {listed(missed)}. "
            "Check whether the optimizer was created from another model, or the model was copied afterwards."
        )
    if missed and not noise:
        warn(
            f"the optimizer has parameters that the loss does not reach: {listed(missed)}. They got no gradient in "
            "the first update. Look for a detach(), an unused layer, or the wrong model."
        )


def check_weights(chain: Chain, parts: Sequence[SampleStats]) -> None:
    """Raise if all coefficients of a window are zero, over all ranks: the gradient would be zero. Warn if all are below
    SMALL, unless noise is added, for which small bounds are usual, or a transform gives gradients a chosen norm. Every
    rank raises or warns, also one without samples: if warnings are errors, no rank makes the update. Collective.
    """
    columns: list[Tensor] = []
    for part in parts:
        coefficients = torch.ones_like(part.losses) if part.coefficients is None else part.coefficients
        columns += coefficients.values() if isinstance(coefficients, dict) else [coefficients]
    weights = [w.abs().max().item() for w in columns if len(w)]
    nonzero, large = collectives.all_reduce_scalars(not columns or any(weights), any(w >= SMALL for w in weights))
    if not nonzero and chain.divisor is None:  # with a constant divisor, an update without contributions is valid
        raise TransformError(
            f"at least one sample of the first update must have a nonzero weight; found none with {chain!r}. "
            "Check the values that the weights are computed from."
        )
    intended = bool(chain.on_sum) or any(t.sets_norm for t in (*chain.samples.transforms, *chain.groups.transforms))
    if columns and not large and not intended:
        # Message with the numbers of this rank. `weights`: the largest of each part.
        message = f"every weight of the first update is below {SMALL}, with {chain!r}"
        if weights:
            message += f"; the largest is {max(weights):.2g}"
        norms = [part.unscaled_norms for part in parts if part.unscaled_norms is not None]
        if weights and norms:
            message += f", and the median norm of the samples' gradients is {torch.cat(norms).median().item():.3g}"
        warn(f"{message}. {_hint_about_counts(chain, parts)}Use larger bounds or weights, unless this is intended.")


def _hint_about_counts(chain: Chain, parts: Sequence[SampleStats]) -> str:
    """Sentence about clip(per_count=True), if gradients are sums and no transform takes the counts into account."""
    if any("counts" in t.needs for t in (*chain.samples.transforms, *chain.groups.transforms)):
        return ""
    if chain.grouping is not None:
        return "A group's gradient is the sum over its samples: sw.clip(C, per_count=True) bounds that of their mean. "
    counts = [part.counts for part in parts if part.counts is not None]
    if not any(bool((c != 1).any()) for c in counts):
        return ""
    return (
        f"The loss of a sample is a sum over {torch.cat(counts).mean().item():.3g} counts on average: "
        "sw.clip(C, per_count=True) bounds the gradient of its mean. "
    )
