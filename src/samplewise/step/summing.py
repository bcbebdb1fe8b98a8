"""From pieces of a window to the sum of their gradients in `.grad`, with each sample's coefficient where one is asked
for. All sums carry the loss scale; they are divided later, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from samplewise.engine.gradients import Gradients
from samplewise.replay import checksum, snapshot
from samplewise.step.evaluation import Evaluation
from samplewise.step.microbatch import Microbatch
from samplewise.step.parts import Part
from samplewise.step.problems import problem_of_losses
from samplewise.step.team import Team
from samplewise.transforms.chain import Chain, Stage
from samplewise.transforms.numbers import Numbers, PerSample, joined, rows_of
from samplewise.transforms.reference import Reference


class Summing(ABC):
    """`window`: the pieces of a window must be handed over together. `knows_norms`: of every sample's gradient."""

    window: bool
    knows_norms: bool

    @abstractmethod
    def begin(self) -> None:
        """A window begins."""

    @abstractmethod
    def add(self, pieces: Sequence[Any], start: int) -> list[Part]:
        """Adds the gradients of these pieces, the first of which begins at sample `start` of the window."""


class Plain(Summing):
    """Nothing is asked of single samples: one ordinary backward pass a piece."""

    window = knows_norms = False

    def __init__(self, evaluation: Evaluation):
        self.evaluation = evaluation

    def begin(self) -> None:
        """Nothing is kept from one piece to the next."""

    def add(self, pieces: Sequence[Any], start: int) -> list[Part]:
        return [self._add(piece) for piece in pieces]

    def _add(self, piece: Any) -> Part:
        losses, counts = self.evaluation.losses(piece)
        self.evaluation.add_sum(losses)
        return Part(losses.detach(), counts, columns=self.evaluation.columns)

    def add_mean(self, piece: Any) -> tuple[Part, bool]:
        """For a piece that is the whole window: divided on the way, so that the gradients are not gone over again.
        Returns whether that was done: in half precision 1/B would not be exact.
        """
        losses, counts = self.evaluation.losses(piece)
        exact = losses.dtype in (torch.float32, torch.float64)
        if exact:
            self.evaluation.add_mean(losses, counts)
        else:
            self.evaluation.add_sum(losses)
        return Part(losses.detach(), counts, columns=self.evaluation.columns), exact


class OfNumbers(Summing):
    """Knows how to measure what transforms need."""

    def __init__(self, evaluation: Evaluation, chain: Chain, record_norms: bool, team: Team | None = None):
        self.evaluation, self.chain, self.record_norms, self.team = evaluation, chain, record_norms, team
        self.window = chain.window or (team is not None and chain.samples.counts_places)
        self.knows_norms = record_norms or "norms" in chain.samples.needs
        self._directions: dict[Reference, dict[str, Tensor]] | None = None

    @abstractmethod
    def add_with_others(self, pieces: Sequence[Any], microbatch: Microbatch) -> list[Part]:
        """As `add`, where transforms see the window of all ranks. This one may have no piece of it."""

    def begin(self) -> None:
        self._directions = None

    def prepare(self) -> None:
        """References may draw random numbers: they are made before what is computed twice."""
        if self.chain.measures:
            _ = self.directions

    @property
    def directions(self) -> dict[Reference, dict[str, Tensor]]:
        """Made once per window, when first needed."""
        if self._directions is None:
            with self.evaluation.trained.set_aside():
                self._directions = self.chain.directions(self.evaluation.trained.wanted())
        return self._directions

    def measured(self, g: Gradients, numbers: Numbers, stage: Stage, record: bool) -> Numbers:
        """With the norms and dots that this stage needs, without the loss scale."""
        by, scale = ("parameter" if stage.by_parameter else None), self.evaluation.precision.scale
        norms = _unscaled(g.norms(by), scale) if "norms" in stage.needs or record else None
        dots = {r: _unscaled(g.dot(self.directions[r], by), scale) for r in stage.references}
        return replace(numbers, raw_norms=norms, raw_dots=dots)

    def one_pass(self, piece: Any, places: int | Tensor) -> tuple[Tensor, Gradients | None, Numbers]:
        """The losses of a piece, its gradients if anything must be known of them, and its numbers. `places` are where
        its samples stand in the window, or where the first of them does.
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
        """Of the directions, to be compared with those of others; None if none was needed."""
        if not self._directions:
            return None
        return [number for d in self._directions.values() for number in _fingerprint(d)]

    def all_numbers(self, pieces: Sequence[Any], start: int) -> list[Numbers]:
        found: list[Numbers] = []
        for piece in pieces:
            found.append(self.one_pass(piece, start)[2])
            start += len(found[-1])
        return found


class Weighted(OfNumbers):
    """Each sample's gradient times its coefficient."""

    def add(self, pieces: Sequence[Any], start: int) -> list[Part]:
        if self.window and len(pieces) > 1:
            return self._in_two_passes(pieces, start)
        parts: list[Part] = []
        for piece in pieces:
            parts.append(self._in_one_pass(piece, start))
            start += len(parts[-1])
        return parts

    def _in_one_pass(self, piece: Any, start: int) -> Part:
        losses, g, numbers = self.one_pass(piece, start)
        (numbers,) = self.chain.samples.weigh([numbers])
        self._sum(piece, losses, g, numbers.coefficients)
        return as_part(numbers)

    def _sum(self, piece: Any, losses: Tensor, g: Gradients | None, coefficients: PerSample | None) -> None:
        """Where nothing but one number per sample is asked for, an ordinary backward pass will do."""
        if g is None and not isinstance(coefficients, dict):
            self.evaluation.add_sum(losses, coefficients)
        else:
            g = self.evaluation.gradients(losses, piece) if g is None else g
            g.backward(coefficients, retain_graph=False)

    def _in_two_passes(self, pieces: Sequence[Any], start: int) -> list[Part]:
        """First the numbers of all pieces, then their sum. The second pass sees the same dropout as the first, and
        buffers advance once.
        """
        self.prepare()
        restore = snapshot(*self.evaluation.modules)
        weighed = self.chain.samples.weigh(self.all_numbers(pieces, start))
        restore()
        for piece, numbers in zip(pieces, weighed, strict=True):
            self._sum(piece, self.evaluation.losses(piece)[0], None, numbers.coefficients)
        return [as_part(numbers) for numbers in weighed]

    def add_with_others(self, pieces: Sequence[Any], microbatch: Microbatch) -> list[Part]:
        """Between the two passes the ranks tell each other their numbers. Of a single piece the graph is kept, so that
        there need be no second forward pass.
        """
        assert self.team is not None
        self.prepare()
        restore, kept = snapshot(*self.evaluation.modules), None
        if len(pieces) == 1 and not microbatch.automatic:
            losses, g, numbers = self.one_pass(pieces[0], 0)
            kept, found = (losses, g), [numbers]
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
        """With the places that their samples have in the window of all ranks."""
        assert self.team is not None
        self.team.check()
        sizes = [len(numbers) for numbers in found]
        places = self.team.places(sum(sizes)).split(sizes)
        return [replace(numbers, places=where) for numbers, where in zip(found, places, strict=True)]

    def _sum_all(self, pieces: Sequence[Any], weighed: Sequence[Numbers]) -> None:
        """The pieces may have been cut anew since they were weighed."""
        coefficients = joined(weighed).coefficients if weighed else None
        start = 0
        for piece in pieces:
            losses, _ = self.evaluation.losses(piece)
            rows = slice(start, start := start + len(losses))
            self._sum(piece, losses, None, None if coefficients is None else rows_of(coefficients, rows))


def check_finite(losses: Tensor, places: Tensor) -> None:
    problem = problem_of_losses(losses.detach(), places)
    if problem is not None:
        raise problem


def counts_of(losses: Tensor, counts: Tensor | None) -> Tensor:
    return torch.ones_like(losses) if counts is None else counts


def as_part(numbers: Numbers) -> Part:
    known = numbers.losses, numbers.counts, numbers.unscaled_norms, numbers.coefficients, numbers.shares
    return Part(*known, numbers.columns)


def _unscaled(values: PerSample, scale: float) -> PerSample:
    if scale == 1:
        return values
    return values / scale if isinstance(values, Tensor) else {name: v / scale for name, v in values.items()}


def _fingerprint(direction: Mapping[str, Tensor]) -> list[float]:
    """For each parameter how long it is, and how far it reaches into a fixed direction."""
    return [number for d in direction.values() for number in (d.double().norm().item(), checksum(d).item())]
