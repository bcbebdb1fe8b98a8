"""Sums over groups of samples, each group's gradient with its own coefficient.

The norm of a group's gradient is not a sum of norms. Within one piece the engine gives it as it gives a sample's: the
sum of a group's losses is a loss like any other. A window of several pieces is gone through group by group, with one
buffer of the parameters' size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.batches import length, take
from samplewise.errors import BatchError, SamplesInteractError, TransformError
from samplewise.replay import snapshot
from samplewise.step.mistakes import listed, training_batch_norms
from samplewise.step.parts import Part, split
from samplewise.step.summing import OfNumbers, as_part, check_finite, counts_of
from samplewise.transforms.numbers import Numbers, PerSample, joined
from samplewise.transforms.reference import Reference


class Grouped(OfNumbers):
    """Each group's gradient times its coefficient."""

    def add(self, pieces: Sequence[Any], start: int) -> list[Part]:
        return [self._at_once(pieces[0], start)] if len(pieces) == 1 else self._group_by_group(pieces)

    def keys(self, piece: Any) -> list[Hashable]:
        assert self.chain.grouping is not None
        return self.chain.grouping.keys(piece)

    @property
    def asks_samples(self) -> bool:
        return bool(self.chain.samples.transforms) or self.record_norms

    def _at_once(self, piece: Any, start: int) -> Part:
        losses, _, numbers = self.one_pass(piece, start)
        (numbers,) = self.chain.samples.weigh([numbers])
        owner, groups = _owners(self.keys(piece), losses)
        per_group = _sums(losses * numbers.weights, owner, groups)
        g = self.evaluation.gradients(per_group)
        whole = Numbers(per_group.detach(), _sums(numbers.denominators, owner, groups), places=torch.arange(groups))
        (whole,) = self.chain.groups.weigh([self.measured(g, whole, self.chain.groups, record=False)])
        g.backward(whole.coefficients, retain_graph=False)
        return _part(numbers, whole, owner)

    def _group_by_group(self, pieces: Sequence[Any]) -> list[Part]:
        mixing = training_batch_norms(self.evaluation.modules)
        if mixing:  # the engine, which would see it, is not asked here
            raise SamplesInteractError(
                f"{self.chain.grouping} needs samples that do not depend on each other; found BatchNorm in training "
                f"mode: {listed(mixing)}. Call eval() on it, or use GroupNorm."
            )
        part = Gathering(self, self._by_group(pieces)).part()
        return split(part, [_length(piece, self) for piece in pieces])

    def _by_group(self, pieces: Sequence[Any]) -> list[list[Members]]:
        """The samples of each group, in the order groups come."""
        groups: dict[Hashable, list[Members]] = {}
        start = 0
        for piece in pieces:
            keys, total = self.keys(piece), _length(piece, self)
            _check_keys(keys, total)
            for key in dict.fromkeys(keys):
                places = [place for place, other in enumerate(keys) if other == key]
                groups.setdefault(key, []).append(Members(take(piece, places), start + torch.tensor(places)))
            start += total
        return list(groups.values())


@dataclass
class Members:
    """Samples of one group that lie in the same piece."""

    batch: Any
    places: Tensor  # in the window
    numbers: Numbers | None = None


class Gathering:
    """Goes through the groups of a window whose pieces they may cross. Every pass sees the same random numbers."""

    def __init__(self, summing: Grouped, groups: list[list[Members]]):
        self.summing, self.groups, self.stage = summing, groups, summing.chain.groups
        self.evaluation = summing.evaluation
        summing.prepare()
        self.restore = snapshot(*self.evaluation.modules)

    def part(self) -> Part:
        if self.summing.asks_samples:
            self._weigh_samples()
        weighed: list[Numbers] = []
        if self.stage.window:  # the numbers of all groups first
            weighed = self.stage.weigh([self._gather(k) for k in range(len(self.groups))])
            self.restore()
        sums = GradientSums(self.evaluation.trained.named)
        for k in range(len(self.groups)):
            group = self._gather(k)
            if not self.stage.window:
                weighed += self.stage.weigh([group])
            sums.add(weighed[k].coefficients)
        sums.put_back()
        return self._in_order(joined(weighed))

    def _weigh_samples(self) -> None:
        members = [m for group in self.groups for m in group]
        found = [self.summing.one_pass(m.batch, m.places)[2] for m in members]
        for m, numbers in zip(members, self.summing.chain.samples.weigh(found), strict=True):
            m.numbers = numbers
        self.restore()

    def _gather(self, number: int) -> Numbers:
        """Puts a group's gradient into `.grad`, and returns its numbers."""
        self.evaluation.trained.clear()
        for m in self.groups[number]:
            losses, counts = self.evaluation.losses(m.batch)
            _check_keys(m.places.tolist(), len(losses))
            check_finite(losses, m.places)
            if m.numbers is None:
                m.numbers = Numbers(losses.detach(), counts_of(losses, counts), columns=self.evaluation.columns)
            self.evaluation.add_sum(losses, m.numbers.weights)
        known = [m.numbers for m in self.groups[number] if m.numbers is not None]
        return Numbers(
            losses=torch.stack([(n.losses * n.weights).sum() for n in known]).sum()[None],
            counts=torch.stack([n.denominators.sum() for n in known]).sum()[None],
            places=torch.tensor([number]),
            raw_norms=self._of_gradients(lambda g, _: g.norm()) if "norms" in self.stage.needs else None,
            raw_dots={r: self._of_gradients(self._dot(r)) for r in self.stage.references},
        )

    def _dot(self, reference: Reference) -> Callable[[Tensor, str], Tensor]:
        return lambda gradient, name: (gradient * self.summing.directions[reference][name]).sum()

    def _of_gradients(self, question: Callable[[Tensor, str], Tensor]) -> dict[str, Tensor]:
        """name -> (1,), without the loss scale; zero for parameters that are not reached."""
        scale = self.evaluation.precision.scale
        return {
            name: p.new_zeros(1) if p.grad is None else (question(p.grad, name) / scale).reshape(1)
            for name, p in self.evaluation.trained.wanted().items()
        }

    def _in_order(self, groups: Numbers) -> Part:
        """Samples as they came."""
        members = [m for group in self.groups for m in group]
        samples = joined([m.numbers for m in members if m.numbers is not None])
        owner = torch.cat([torch.full_like(m.places, k) for k, group in enumerate(self.groups) for m in group])
        part, order = _part(samples, groups, owner), torch.cat([m.places for m in members]).argsort()
        part.losses, part.counts = part.losses[order], None if part.counts is None else part.counts[order]
        part.norms = None if part.norms is None else part.norms[order]
        part.columns = part.columns and {name: values[order] for name, values in part.columns.items()}
        if isinstance(part.weights, dict):
            part.weights = {name: w[order] for name, w in part.weights.items()}
        elif part.weights is not None:
            part.weights = part.weights[order]
        return part


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
    _check_keys(keys, len(losses))
    numbers = {key: k for k, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys], device=losses.device), len(numbers)


def _check_keys(keys: list[Hashable], samples: int) -> None:
    if len(keys) != samples:
        raise TransformError(f"group must give one key per sample; found {len(keys)} keys for {samples} samples.")


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
