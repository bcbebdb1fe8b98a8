"""Sums over groups of samples, each group's gradient with its own coefficient.

The norm of a group's gradient is not a sum of norms. Within one piece the engine gives it as it gives a sample's: the
sum of a group's losses is a loss like any other. A window of several pieces is gone through group by group, with one
buffer of the parameters' size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise.batches import length, take
from samplewise.errors import BatchError, SamplesInteractError, TransformError
from samplewise.replay import snapshot
from samplewise.step.mistakes import listed, training_batch_norms
from samplewise.step.parts import Part
from samplewise.step.summing import OfNumbers, as_part
from samplewise.transforms.numbers import Numbers, PerSample, joined


class Grouped(OfNumbers):
    def add(self, pieces: Sequence[Any], start: int) -> list[Part]:
        return [self._at_once(pieces[0], start) if len(pieces) == 1 else self._group_by_group(pieces, start)]

    def keys(self, piece: Any) -> list[Hashable]:
        assert self.chain.grouping is not None
        return self.chain.grouping.keys(piece)

    @property
    def _asks_samples(self) -> bool:
        return bool(self.chain.samples.transforms) or self.record_norms

    def _at_once(self, piece: Any, start: int) -> Part:
        if self._asks_samples:
            losses, _, numbers = self.one_pass(piece, start)
            (numbers,) = self.chain.samples.weigh([numbers])
        else:
            losses, counts = self.evaluation.losses(piece)
            numbers = Numbers(losses.detach(), torch.ones_like(losses) if counts is None else counts)
        owner, groups = _owners(self.keys(piece), losses)
        per_group = _sums(losses * numbers.weights, owner, groups)
        g = self.evaluation.gradients(per_group)
        whole = Numbers(per_group.detach(), _sums(numbers.denominators, owner, groups))
        (whole,) = self.chain.groups.weigh([self.measured(g, whole, self.chain.groups, record=False)])
        g.backward(whole.coefficients, retain_graph=False)
        return _part(numbers, whole, owner)

    def _group_by_group(self, pieces: Sequence[Any], start: int) -> Part:
        mixing = training_batch_norms(self.evaluation.modules)
        if mixing:  # the engine, which would see it, is not asked here
            raise SamplesInteractError(
                f"{self.chain.grouping} needs samples that do not depend on each other; found BatchNorm in training "
                f"mode: {listed(mixing)}. Call eval() on it, or use GroupNorm."
            )
        restore = snapshot(*self.evaluation.modules)
        numbers = None
        if self._asks_samples:
            numbers = joined(self.chain.samples.weigh(self.all_numbers(pieces, start)))
            restore()
        gathering = Gathering(self, pieces, numbers)
        weighed: list[Numbers] = []
        if self.chain.groups.window:  # the numbers of all groups first
            weighed = self.chain.groups.weigh(list(gathering.each_group()))
            restore()
        sums = GradientSums(self.evaluation.trained.named)
        for k, group in enumerate(gathering.each_group()):
            if not self.chain.groups.window:
                weighed += self.chain.groups.weigh([group])
            sums.add(weighed[k].coefficients)
        sums.put_back()
        return _part(gathering.numbers(), joined(weighed), gathering.owner)


class Gathering:
    """Goes through the groups of a window whose pieces they may cross."""

    def __init__(self, summing: Grouped, pieces: Sequence[Any], numbers: Numbers | None):
        self.summing, self.pieces, self.known = summing, pieces, numbers
        sizes = [_length(piece, summing) for piece in pieces]
        keys = [key for piece in pieces for key in summing.keys(piece)]
        self.places = torch.arange(sum(sizes)).split(sizes)  # of each piece's samples in the window
        self.owner, self.groups = _owners(keys, torch.cat(self.places))
        self.losses = self.counts = torch.zeros(0)  # of the window's samples, once the first are known

    def each_group(self) -> Iterator[Numbers]:
        """Puts one group's gradient after the other into `.grad`, and yields its numbers."""
        for number in range(self.groups):
            self.summing.evaluation.trained.clear()
            members = self.owner == number
            for piece, places in zip(self.pieces, self.places, strict=True):
                if members[places].any():
                    self._add(piece, places[members[places]], places[0])
            yield self._measured(members)

    def _add(self, piece: Any, places: Tensor, first: Tensor) -> None:
        evaluation = self.summing.evaluation
        losses, counts = evaluation.losses(take(piece, (places - first).tolist()))
        if not len(self.losses):
            self.losses, self.counts = losses.new_zeros(len(self.owner)), losses.new_ones(len(self.owner))
        self.losses[places] = losses.detach()
        if counts is not None:
            self.counts[places] = counts.to(self.counts)
        evaluation.add_sum(losses, None if self.known is None else self.known.weights[places])

    def numbers(self) -> Numbers:
        """Of all samples seen so far."""
        return Numbers(self.losses, self.counts) if self.known is None else self.known

    def _measured(self, members: Tensor) -> Numbers:
        numbers, stage = self.numbers(), self.summing.chain.groups
        losses = numbers.losses * numbers.weights
        scale, trained = self.summing.evaluation.precision.scale, self.summing.evaluation.trained.wanted()
        found = {name: p.grad for name, p in trained.items() if p.grad is not None}
        norms = {
            name: (found[name].norm() / scale if name in found else p.new_zeros(())).reshape(1)
            for name, p in trained.items()
        }
        dots = {
            r: {
                name: ((d * found[name]).sum() / scale if name in found else d.new_zeros(())).reshape(1)
                for name, d in self.summing.directions[r].items()
            }
            for r in stage.references
        }
        return Numbers(
            losses[members].sum()[None], numbers.denominators[members].sum()[None], raw_norms=norms, raw_dots=dots
        )


class GradientSums:
    """Adds up what is in `.grad`, times a coefficient, beside it."""

    def __init__(self, parameters: dict[str, Tensor]):
        self.parameters, self.sums = parameters, dict[str, Tensor]()

    def add(self, coefficients: PerSample | None) -> None:
        for name, p in self.parameters.items():
            if p.grad is not None:
                c = coefficients[name] if isinstance(coefficients, dict) else coefficients
                scaled = p.grad if c is None else p.grad * c
                self.sums[name] = self.sums[name] + scaled if name in self.sums else scaled.clone()

    def put_back(self) -> None:
        for name, p in self.parameters.items():
            p.grad = self.sums.get(name)


def _owners(keys: list[Hashable], losses: Tensor) -> tuple[Tensor, int]:
    """The number of each sample's group, in the order groups come, and how many there are."""
    if len(keys) != len(losses):
        raise TransformError(f"group must give one key per sample; found {len(keys)} keys for {len(losses)} samples.")
    numbers = {key: k for k, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys], device=losses.device), len(numbers)


def _sums(values: Tensor, owner: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups).index_add(0, owner, values)


def _part(samples: Numbers, groups: Numbers, owner: Tensor) -> Part:
    """Each sample's coefficient is its own times its group's."""
    part = as_part(samples)
    of_group = groups.coefficients
    if of_group is not None:
        own = samples.weights
        part.weights = (
            {n: c[owner] * own for n, c in of_group.items()} if isinstance(of_group, dict) else of_group[owner] * own
        )
    part.shares = groups.denominators
    return part


def _length(piece: Any, summing: Grouped) -> int:
    found = length(piece)
    if found is None:
        raise BatchError(
            f"{summing.chain.grouping} takes samples out of batches where a window has several; found one that cannot "
            "be cut. Make the loader's batch the whole window."
        )
    return found
