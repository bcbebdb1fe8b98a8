"""Gradient accumulation: adds the gradients of microbatches to `.grad`, each sample with its coefficient if transforms
give one. All sums are multiplied by the loss scale; they are divided once, at the end of the window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samplewise.core.microbatch import MicrobatchSize
from samplewise.core.state import checksum
from samplewise.engine.deferred_checks import all_finite, current_checks
from samplewise.engine.gradients import Gradients, require_linear, with_larger_terms
from samplewise.engine.ownership.independence import norms_only_recorded
from samplewise.errors import SamplesInteractError
from samplewise.parallel import collectives
from samplewise.parallel.mode import Parallel
from samplewise.step.forward import LossEvaluator
from samplewise.step.nonfinite import problem_of_losses
from samplewise.step.ranks import weigh
from samplewise.transforms.chain import Chain, Stage
from samplewise.transforms.stats import PerSample, SampleStats, concatenate, rows_of
from samplewise.transforms.transform import Reference

EXACT = (torch.float32, torch.float64)  # dtypes of losses whose weights may be divided by B


class Accumulator(ABC):
    """Base class of gradient accumulators.

    needs_window: all microbatches of a window must be passed in one call.
    knows_norms: the norm of every sample's gradient is computed.
    exchanges: `add` contains collectives, so that one rank alone cannot repeat it.
    checks_at_once: `add` raises for a non-finite value itself, or checks none.
    drops_samples: `add` may leave out samples, and returns no results for them.
    divided: the last call of `add` has added a mean instead of a sum.
    first_stats: if set to a list, the first two per-sample results that the transforms of each stage get are added to
    it.
    """

    needs_window = False
    knows_norms = False
    exchanges = False
    checks_at_once = False
    drops_samples = False
    divided = False
    first_stats: list[tuple[Stage, SampleStats]] | None = None

    @abstractmethod
    def begin(self) -> None:
        """Reset the state of the window before the first microbatch."""

    @abstractmethod
    def compute_directions(self) -> None:
        """Compute the directions of references, which may draw random numbers, before the first pass."""

    @abstractmethod
    def add(self, microbatches: Sequence[Any], start: int, divide: bool = False) -> list[SampleStats]:
        """Accumulate the gradients of these microbatches; the first one begins at sample `start` of the window. With
        `exchanges`, there may be none on this rank. `divide`: there is one, the whole window, and its sum may be
        divided at once, which saves a pass over the gradients: see `divided`. In half precision it is not, where 1/B
        would not be exact.
        """

    def fingerprint(self) -> list[float] | None:
        """Numbers that identify the reference directions of the window, for comparison between ranks; None if there are
        none.
        """
        return None


class AccumulatorWrapper(Accumulator):
    """Base class of accumulators that change how another one, `inner`, gets its microbatches."""

    def __init__(self, inner: Accumulator):
        self._inner = inner
        self.needs_window = inner.needs_window
        self.knows_norms = inner.knows_norms
        self.exchanges = inner.exchanges
        self.checks_at_once = inner.checks_at_once

    @property
    def first_stats(self) -> list[tuple[Stage, SampleStats]] | None:
        return self._inner.first_stats

    @first_stats.setter
    def first_stats(self, stats: list[tuple[Stage, SampleStats]] | None) -> None:
        self._inner.first_stats = stats

    def begin(self) -> None:
        self._inner.begin()

    def compute_directions(self) -> None:
        self._inner.compute_directions()

    def fingerprint(self) -> list[float] | None:
        return self._inner.fingerprint()


class PlainAccumulator(Accumulator):
    """Accumulation without per-sample quantities: one ordinary backward pass per microbatch."""

    checks_at_once = True

    def __init__(self, evaluator: LossEvaluator):
        self.evaluator = evaluator

    def begin(self) -> None:
        """Do nothing: there is no state."""

    def compute_directions(self) -> None:
        """Do nothing: there are no references."""

    def add(self, microbatches: Sequence[Any], start: int, divide: bool = False) -> list[SampleStats]:
        parts: list[SampleStats] = []
        for microbatch in microbatches:
            losses, counts = self.evaluator.losses(microbatch)
            stats = SampleStats(losses.detach(), counts, columns=self.evaluator.columns)
            self.divided = divide and losses.dtype in EXACT
            if self.divided:
                self.evaluator.add_mean(losses, stats.count_sum)
            else:
                self.evaluator.add_sum(losses)
            parts.append(stats)
        return parts


class PerSampleAccumulator(Accumulator):
    """Base class of accumulators with per-sample quantities: computes the norms and dots that transforms need."""

    def __init__(
        self,
        evaluator: LossEvaluator,
        chain: Chain,
        record_norms: bool,
        ranks: Parallel,
        size: MicrobatchSize,
    ):
        self.evaluator = evaluator
        self.chain = chain
        self.record_norms = record_norms
        self.ranks = ranks
        self.size = size
        # With several ranks, the position of a sample in the window is known when all ranks have their samples.
        self.needs_window = chain.window or (ranks.exchanges and chain.samples.uses_positions)
        self.knows_norms = record_norms or "norms" in chain.samples.needs
        self.exchanges = ranks.exchanges and self.needs_window
        self._measures = chain.samples.measures or record_norms
        in_order = chain.grouping is not None or ranks.exchanges
        self.needs_counts = in_order or "counts" in chain.samples.needs
        self._needs_positions = in_order or chain.samples.uses_positions
        self._directions: dict[Reference, dict[str, Tensor]] | None = None
        self.left_out = 0  # number of samples that `add_weighted` has left out

    def begin(self) -> None:
        self._directions = None

    @property
    def directions(self) -> dict[Reference, dict[str, Tensor]]:
        """Direction of each reference, computed once per window at the first use."""
        if self._directions is None:
            trained = self.evaluator.trained
            with trained.without_grads(), collectives.requests.different_passes():
                self._directions = self.chain.directions(trained.trainable())
        return self._directions

    def compute_directions(self) -> None:
        if self.chain.measures:
            _ = self.directions

    def fingerprint(self) -> list[float] | None:
        if not self._directions:
            return None
        numbers: list[float] = []
        for direction in self._directions.values():
            for d in direction.values():
                numbers += [d.double().norm().item(), checksum(d).item()]
        return numbers

    def stats_of(self, microbatch: Any, positions: int | Tensor) -> tuple[Tensor, Gradients | None, SampleStats]:
        """Losses of a microbatch; its per-sample gradients, or None if no norm or dot is needed; and its per-sample
        results. `positions`: of its samples in the window, or position of the first one.
        """
        losses, counts = self.evaluator.losses(microbatch)
        check_finite(losses, positions)
        in_window = positions if isinstance(positions, Tensor) else None
        if isinstance(positions, int) and self._needs_positions:
            in_window = positions + torch.arange(len(losses))
        if counts is None and self.needs_counts:
            counts = torch.ones_like(losses)
        stats = SampleStats(
            losses=losses.detach(),
            counts=counts,
            batch=microbatch,
            positions=in_window,
            columns=self.evaluator.columns,
        )
        g = None
        if self._measures:
            try:
                g = self.evaluator.gradients(losses, microbatch, checked=True)
            except SamplesInteractError as error:
                if self.chain.weighs:
                    raise
                raise norms_only_recorded(error) from None
            directions = self.directions if self.chain.samples.references else {}
            scale = self.evaluator.precision.scale
            self.chain.samples.measure(g, stats, directions, self.record_norms, scale)
        if self.first_stats is not None:
            self.record_first(self.chain.samples, stats)
        return losses, g, stats

    def stats_before_sum(self, microbatch: Any, positions: int | Tensor) -> SampleStats:
        """Per-sample results of a microbatch whose weighted sum is computed by another backward pass."""
        _, g, stats = self.stats_of(microbatch, positions)
        if g is not None:
            require_linear(g)
        return stats

    def record_first(self, stage: Stage, stats: SampleStats) -> None:
        """Add the first results of a stage to `first_stats`, if that is asked for."""
        if self.first_stats is not None and sum(owner is stage for owner, _ in self.first_stats) < 2:
            self.first_stats.append((stage, stats))

    def add_weighted(self, g: Gradients, coefficients: PerSample | None) -> None:
        """Accumulate Σ c·g, from gradients that are not used afterwards. In a private step, a sample with large terms,
        which absorb the sums of others by rounding, must be added alone: raises LargeTerms. If passes contain
        collectives, so that this rank cannot repeat one, such a sample contributes nothing.
        """
        limit = self.evaluator.policy.term_limit
        large = [] if limit is None else with_larger_terms(g, coefficients, limit)
        if large:
            if self.ranks.passes_alone and not self.exchanges:
                raise LargeTerms(large)
            self.left_out += len(large)
            coefficients = _zero_samples(coefficients, large, g)
        self.evaluator.add_weighted(g, coefficients)

    def all_stats(self, microbatches: Sequence[Any], start: int) -> list[SampleStats]:
        """Per-sample results of each microbatch, which are summed in another pass; the first one begins at sample
        `start` of the window.
        """
        parts: list[SampleStats] = []
        for microbatch in microbatches:
            parts.append(self.stats_before_sum(microbatch, start))
            start += len(parts[-1])
        return parts


class WeightedAccumulator(PerSampleAccumulator):
    """Accumulates each sample's gradient times its coefficient."""

    def add(self, microbatches: Sequence[Any], start: int, divide: bool = False) -> list[SampleStats]:
        if self.exchanges:
            return self._over_ranks(microbatches)
        if self.needs_window and len(microbatches) > 1:
            return self._in_two_passes(microbatches, start)
        parts: list[SampleStats] = []
        for microbatch in microbatches:
            losses, g, stats = self.stats_of(microbatch, start)
            (stats,) = self.chain.samples.weigh([stats])
            if stats.dropped is not None and g is not None:
                stats.dropped = self._largest_parameters(g, stats.dropped)
            coefficients = stats.coefficients
            # Coefficients are divided by the number of samples only, not by counts.
            countable = stats.counts is None and stats.shares is None and losses.dtype in EXACT
            self.divided = False
            if divide and countable and isinstance(coefficients, Tensor):
                coefficients = coefficients / losses.shape[0]
                self.divided = True
            self._sum(microbatch, losses, g, coefficients)
            parts.append(stats.result())
            start += len(losses)
        return parts

    def _largest_parameters(self, g: Gradients, dropped: Tensor) -> Tensor:
        """For each dropped sample, 1 + index of the parameter with the largest gradient; 0 for the others."""
        norms = g.norms(by="parameter")
        numbers = {name: k for k, name in enumerate(self.evaluator.trained.named, 1)}
        largest = torch.stack(list(norms.values())).argmax(0)
        numbers_of_norms = torch.tensor([numbers[name] for name in norms], device=dropped.device)
        return torch.where(dropped != 0, numbers_of_norms[largest], 0)

    def _sum(self, microbatch: Any, losses: Tensor, g: Gradients | None, coefficients: PerSample | None) -> None:
        """Accumulate Σ c·g. One coefficient per sample needs only an ordinary backward pass."""
        if g is None and not isinstance(coefficients, dict):
            self.evaluator.add_sum(losses, coefficients)
        else:
            g = self.evaluator.gradients(losses, microbatch) if g is None else g
            self.add_weighted(g, coefficients)

    def _in_two_passes(self, microbatches: Sequence[Any], start: int) -> list[SampleStats]:
        """Compute the per-sample results of all microbatches, then their weighted sum. The second pass starts from the
        same state as the first: random numbers, buffers, variables and batches.
        """
        self.compute_directions()
        restore = self.evaluator.saved_state(microbatches)
        weighed = self.chain.samples.weigh(self.all_stats(microbatches, start))
        restore()
        for microbatch, stats in zip(microbatches, weighed, strict=True):
            losses, _ = self.evaluator.losses(microbatch)
            self.evaluator.check_repeated(losses, stats.losses)
            self._sum(microbatch, losses, None, stats.coefficients)
        return [stats.result() for stats in weighed]

    def _over_ranks(self, microbatches: Sequence[Any]) -> list[SampleStats]:
        """Exchange per-sample results between ranks after the first pass, then accumulate. For a single microbatch the
        graph is kept, which saves the second forward pass.
        """
        self.compute_directions()
        graph = restore = None
        if len(microbatches) == 1 and not self.size.automatic:
            losses, g, stats = self.stats_of(microbatches[0], 0)
            graph = (losses, g)
            parts = [stats]
        else:
            restore = self.evaluator.saved_state(microbatches)
            microbatches, parts = self.size.retry(lambda some: (some, self.all_stats(some, 0)), microbatches)
        weighed = weigh(self.ranks, self.chain.samples, self._positioned(parts))
        if graph is not None:
            self._sum(microbatches[0], *graph, weighed[0].coefficients)
        elif restore is not None:
            restore()
            self.size.retry(lambda some: self._sum_all(some, weighed), microbatches)
        return [stats.result() for stats in weighed]

    def _positioned(self, parts: Sequence[SampleStats]) -> list[SampleStats]:
        """`parts` with the positions of their samples in the window of all ranks."""
        self.ranks.sums()
        sizes = [len(stats) for stats in parts]
        positions = self.ranks.positions(sum(sizes)).split(sizes)
        return [replace(stats, positions=places) for stats, places in zip(parts, positions, strict=True)]

    def _sum_all(self, microbatches: Sequence[Any], weighed: Sequence[SampleStats]) -> None:
        """Accumulate all microbatches; their sizes may differ from those of `weighed` after running out of memory."""
        window = concatenate(weighed) if weighed else None
        coefficients = None if window is None else window.coefficients
        start = 0
        for microbatch in microbatches:
            losses, _ = self.evaluator.losses(microbatch)
            stop = start + len(losses)
            if window is not None:
                self.evaluator.check_repeated(losses, window.losses[start:stop])
            rows = None if coefficients is None else rows_of(coefficients, slice(start, stop))
            self._sum(microbatch, losses, None, rows)
            start = stop


class LargeTerms(Exception):
    """Raised before `.grad` changes if some samples of a microbatch, or groups, must be added alone."""

    def __init__(self, samples: Sequence[int]):
        super().__init__(samples)
        self.samples = samples


def _zero_samples(coefficients: PerSample | None, samples: Sequence[int], g: Gradients) -> PerSample:
    """Coefficients that are 0 for these samples."""
    if isinstance(coefficients, dict):
        return {name: c.index_fill(0, torch.tensor(samples, device=c.device), 0) for name, c in coefficients.items()}
    c = torch.ones_like(g.losses) if coefficients is None else coefficients
    return c.index_fill(0, torch.tensor(samples, device=c.device), 0)


def check_finite(losses: Tensor, positions: int | Tensor) -> None:
    """Raise NonFiniteLossError if a loss is not finite. `positions`: of the samples in the window, or of the first."""
    losses = losses.detach()
    checks = current_checks()
    if checks is not None:
        checks.add(refuse_nonfinite, losses, positions)
    elif not all_finite(losses):
        refuse_nonfinite(losses, positions)


def refuse_nonfinite(losses: Tensor, positions: int | Tensor) -> None:
    """Raise NonFiniteLossError for the first non-finite loss."""
    problem = problem_of_losses(losses, positions)
    if problem is not None:
        raise problem
