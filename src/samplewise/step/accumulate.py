"""Gradient accumulation: adds the gradients of microbatches to `.grad`, each sample with its coefficient if transforms
give one. All sums are multiplied by the loss scale; they are divided once, at the end of the window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samplewise.core.snapshot import checksum, snapshot
from samplewise.engine.gradients import Gradients
from samplewise.step.distributed_window import DistributedWindow
from samplewise.step.forward import LossEvaluator
from samplewise.step.microbatch import Microbatch
from samplewise.step.microbatch_stats import MicrobatchStats
from samplewise.step.nonfinite import problem_of_losses
from samplewise.transforms.chain import Chain, Stage
from samplewise.transforms.reference import Reference
from samplewise.transforms.stats import Numbers, PerSample, joined, rows_of


class Accumulator(ABC):
    """Base class of gradient accumulators. `window`: all microbatches of a window must be passed in one call.
    `knows_norms`: the norm of every sample's gradient is computed.
    """

    window: bool
    knows_norms: bool

    @abstractmethod
    def begin(self) -> None:
        """Reset the state of the window before the first microbatch."""

    @abstractmethod
    def add(self, pieces: Sequence[Any], start: int) -> list[MicrobatchStats]:
        """Accumulate the gradients of these microbatches; the first one begins at sample `start` of the window."""


class PlainAccumulator(Accumulator):
    """Accumulation without per-sample quantities: one ordinary backward pass per microbatch."""

    window = knows_norms = False

    def __init__(self, evaluation: LossEvaluator):
        self.evaluation = evaluation

    def begin(self) -> None:
        """Do nothing: there is no state."""

    def add(self, pieces: Sequence[Any], start: int) -> list[MicrobatchStats]:
        return [self._add(piece) for piece in pieces]

    def _add(self, piece: Any) -> MicrobatchStats:
        losses, counts = self.evaluation.losses(piece)
        self.evaluation.add_sum(losses)
        return MicrobatchStats(losses.detach(), counts, columns=self.evaluation.columns)

    def add_mean(self, piece: Any) -> tuple[MicrobatchStats, bool]:
        """Accumulate a microbatch that is the whole window, already divided by its counts, which saves a pass over the
        gradients. Also returns whether they were divided: not in half precision, where 1/B would not be exact.
        """
        losses, counts = self.evaluation.losses(piece)
        exact = losses.dtype in (torch.float32, torch.float64)
        if exact:
            self.evaluation.add_mean(losses, counts)
        else:
            self.evaluation.add_sum(losses)
        return MicrobatchStats(losses.detach(), counts, columns=self.evaluation.columns), exact


class PerSampleAccumulator(Accumulator):
    """Base class of accumulators with per-sample quantities: computes the norms and dots that transforms need."""

    def __init__(
        self, evaluation: LossEvaluator, chain: Chain, record_norms: bool, team: DistributedWindow | None = None
    ):
        self.evaluation = evaluation
        self.chain = chain
        self.record_norms = record_norms
        self.team = team
        self.window = chain.window or (team is not None and chain.samples.counts_places)
        self.knows_norms = record_norms or "norms" in chain.samples.needs
        self._directions: dict[Reference, dict[str, Tensor]] | None = None

    @abstractmethod
    def add_with_others(self, pieces: Sequence[Any], microbatch: Microbatch) -> list[MicrobatchStats]:
        """Like `add`, for transforms that see the window of all ranks. `pieces` may be empty on this rank."""

    def begin(self) -> None:
        self._directions = None

    def prepare(self) -> None:
        """Compute references before the first pass: they may draw random numbers, and passes are repeated."""
        if self.chain.measures:
            _ = self.directions

    @property
    def directions(self) -> dict[Reference, dict[str, Tensor]]:
        """Direction of each reference, computed once per window at the first use."""
        if self._directions is None:
            with self.evaluation.trained.without_grads():
                self._directions = self.chain.directions(self.evaluation.trained.wanted())
        return self._directions

    def measured(self, g: Gradients, numbers: Numbers, stage: Stage, record: bool) -> Numbers:
        """`numbers` with the norms and dots that this stage needs, without the loss scale."""
        by = "parameter" if stage.by_parameter else None
        scale = self.evaluation.precision.scale
        norms = _unscaled(g.norms(by), scale) if "norms" in stage.needs or record else None
        dots = {r: _unscaled(g.dot(self.directions[r], by), scale) for r in stage.references}
        return replace(numbers, raw_norms=norms, raw_dots=dots)

    def one_pass(self, piece: Any, places: int | Tensor) -> tuple[Tensor, Gradients | None, Numbers]:
        """Losses of a microbatch; its per-sample gradients, or None if no norm or dot is needed; and its per-sample
        results. `places`: positions of its samples in the window, or position of the first one.
        """
        losses, counts = self.evaluation.losses(piece)
        places = places + torch.arange(len(losses)) if isinstance(places, int) else places
        check_finite(losses, places)
        said = self.evaluation.columns
        numbers = Numbers(losses.detach(), counts_of(losses, counts), piece, places, columns=said)
        if not (self.chain.samples.measures or self.record_norms):
            return losses, None, numbers
        g = self.evaluation.gradients(losses, piece)
        return losses, g, self.measured(g, numbers, self.chain.samples, self.record_norms)

    def fingerprint(self) -> list[float] | None:
        """Numbers that identify the directions, for comparison between ranks; None if none was needed."""
        if not self._directions:
            return None
        numbers: list[float] = []
        for direction in self._directions.values():
            numbers += _fingerprint(direction)
        return numbers

    def all_numbers(self, pieces: Sequence[Any], start: int) -> list[Numbers]:
        """Per-sample results of each microbatch; the first one begins at sample `start` of the window."""
        found: list[Numbers] = []
        for piece in pieces:
            found.append(self.one_pass(piece, start)[2])
            start += len(found[-1])
        return found


class WeightedAccumulator(PerSampleAccumulator):
    """Accumulates each sample's gradient times its coefficient."""

    def add(self, pieces: Sequence[Any], start: int) -> list[MicrobatchStats]:
        if self.window and len(pieces) > 1:
            return self._in_two_passes(pieces, start)
        parts: list[MicrobatchStats] = []
        for piece in pieces:
            parts.append(self._in_one_pass(piece, start))
            start += len(parts[-1])
        return parts

    def _in_one_pass(self, piece: Any, start: int) -> MicrobatchStats:
        losses, g, numbers = self.one_pass(piece, start)
        (numbers,) = self.chain.samples.weigh([numbers])
        self._sum(piece, losses, g, numbers.coefficients)
        return as_part(numbers)

    def _sum(self, piece: Any, losses: Tensor, g: Gradients | None, coefficients: PerSample | None) -> None:
        """Accumulate Σ c·g. One coefficient per sample needs only an ordinary backward pass."""
        if g is None and not isinstance(coefficients, dict):
            self.evaluation.add_sum(losses, coefficients)
        else:
            g = self.evaluation.gradients(losses, piece) if g is None else g
            g.backward(coefficients, retain_graph=False)

    def _in_two_passes(self, pieces: Sequence[Any], start: int) -> list[MicrobatchStats]:
        """Compute the per-sample results of all microbatches, then their weighted sum. The second pass uses the same
        random state as the first, and buffers advance once.
        """
        self.prepare()
        restore = snapshot(*self.evaluation.modules)
        weighed = self.chain.samples.weigh(self.all_numbers(pieces, start))
        restore()
        for piece, numbers in zip(pieces, weighed, strict=True):
            self._sum(piece, self.evaluation.losses(piece)[0], None, numbers.coefficients)
        return [as_part(numbers) for numbers in weighed]

    def add_with_others(self, pieces: Sequence[Any], microbatch: Microbatch) -> list[MicrobatchStats]:
        """Exchange per-sample results between ranks after the first pass, then accumulate. For a single microbatch the
        graph is kept, which saves the second forward pass.
        """
        assert self.team is not None
        self.prepare()
        restore = snapshot(*self.evaluation.modules)
        kept = None
        if len(pieces) == 1 and not microbatch.automatic:
            losses, g, numbers = self.one_pass(pieces[0], 0)
            kept = losses, g
            found = [numbers]
        else:
            pieces, found = microbatch.attempt(lambda pieces: (pieces, self.all_numbers(pieces, 0)), pieces)
        weighed = self.team.weigh(self.chain.samples, self._placed(found))
        if kept is not None:
            self._sum(pieces[0], *kept, weighed[0].coefficients)
        else:
            restore()
            microbatch.attempt(lambda pieces: self._sum_all(pieces, weighed), pieces)
        return [as_part(numbers) for numbers in weighed]

    def _placed(self, found: Sequence[Numbers]) -> list[Numbers]:
        """`found` with the positions of their samples in the window of all ranks."""
        assert self.team is not None
        self.team.check()
        sizes = [len(numbers) for numbers in found]
        places = self.team.places(sum(sizes)).split(sizes)
        return [replace(numbers, places=where) for numbers, where in zip(found, places, strict=True)]

    def _sum_all(self, pieces: Sequence[Any], weighed: Sequence[Numbers]) -> None:
        """Accumulate all microbatches; their sizes may differ from those of `weighed` after running out of memory."""
        coefficients = joined(weighed).coefficients if weighed else None
        start = 0
        for piece in pieces:
            losses, _ = self.evaluation.losses(piece)
            stop = start + len(losses)
            own = None if coefficients is None else rows_of(coefficients, slice(start, stop))
            self._sum(piece, losses, None, own)
            start = stop


def check_finite(losses: Tensor, places: Tensor) -> None:
    """Raise NonFiniteLossError if a loss is not finite. `places`: positions of the samples in the window."""
    problem = problem_of_losses(losses.detach(), places)
    if problem is not None:
        raise problem


def counts_of(losses: Tensor, counts: Tensor | None) -> Tensor:
    return torch.ones_like(losses) if counts is None else counts


def as_part(numbers: Numbers) -> MicrobatchStats:
    known = numbers.losses, numbers.counts, numbers.unscaled_norms, numbers.coefficients, numbers.shares
    return MicrobatchStats(*known, numbers.columns)


def _unscaled(values: PerSample, scale: float) -> PerSample:
    if scale == 1:
        return values
    return values / scale if isinstance(values, Tensor) else {name: v / scale for name, v in values.items()}


def _fingerprint(direction: Mapping[str, Tensor]) -> list[float]:
    """Norm and checksum of each parameter's tensor."""
    numbers: list[float] = []
    for d in direction.values():
        numbers += [d.double().norm().item(), checksum(d).item()]
    return numbers
