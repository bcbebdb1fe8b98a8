"""Gradient accumulation over groups of samples, each group's gradient with its own coefficient.

The norm of a group's gradient is not the sum of the samples' norms. For a window of one microbatch, the engine computes
it like that of a sample, from the sum of the group's losses. A window of several microbatches is processed group by
group, with one buffer of the size of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import length, take
from samplewise.core.snapshot import snapshot
from samplewise.distributed.group import current_group
from samplewise.errors import BatchError, SamplesInteractError, TransformError
from samplewise.step.accumulate import PerSampleAccumulator, as_part, check_finite, counts_of
from samplewise.step.checks import listed, training_batch_norms
from samplewise.step.distributed_window import DistributedWindow
from samplewise.step.microbatch import Microbatch
from samplewise.step.microbatch_stats import MicrobatchStats, split
from samplewise.transforms.chain import Stage
from samplewise.transforms.reference import Reference
from samplewise.transforms.stats import Numbers, PerSample, joined, rows_of


class Grouped(PerSampleAccumulator):
    """Accumulates each group's gradient times its coefficient."""

    def add(self, pieces: Sequence[Any], start: int) -> list[MicrobatchStats]:
        if len(pieces) == 1:
            return [self._at_once(pieces[0], start)]
        return self._group_by_group(pieces, self._by_group(pieces))

    def add_with_others(self, pieces: Sequence[Any], microbatch: Microbatch) -> list[MicrobatchStats]:
        assert self.team is not None
        self.prepare()
        keys = [key for piece in pieces for key in self._checked_keys(piece)]
        known = Known(self.team, keys)
        if known.spanning or len(pieces) != 1 or microbatch.automatic:
            return self._group_by_group(pieces, known.groups(self._by_group(pieces)), known.places)
        return [self._at_once(pieces[0], known.places, known.numbers(keys))]

    def keys(self, piece: Any) -> list[Hashable]:
        assert self.chain.grouping is not None
        return self.chain.grouping.keys(piece)

    def _checked_keys(self, piece: Any) -> list[Hashable]:
        keys = self.keys(piece)
        _check_keys(keys, _length(piece, self))
        return keys

    @property
    def asks_samples(self) -> bool:
        """True if per-sample results are needed before samples are grouped."""
        return bool(self.chain.samples.transforms) or self.record_norms

    def weigh(self, stage: Stage, parts: Sequence[Numbers], owned: Tensor | None = None) -> list[Numbers]:
        return stage.weigh(parts) if self.team is None else self.team.weigh(stage, parts, owned)

    def _at_once(self, piece: Any, places: int | Tensor, numbers_of_groups: Tensor | None = None) -> MicrobatchStats:
        """Accumulate a window of one microbatch, with the gradient of each group from the engine."""
        losses, _, numbers = self.one_pass(piece, places)
        (numbers,) = self.weigh(self.chain.samples, [numbers])
        owner, groups = _owners(self.keys(piece), losses)
        per_group = _sums(losses * numbers.weights, owner, groups)
        g = self.evaluation.gradients(per_group)
        where = torch.arange(groups) if numbers_of_groups is None else numbers_of_groups
        whole = Numbers(per_group.detach(), _sums(numbers.denominators, owner, groups), places=where)
        (whole,) = self.weigh(self.chain.groups, [self.measured(g, whole, self.chain.groups, record=False)])
        g.backward(whole.coefficients, retain_graph=False)
        return _part(numbers, whole, owner)

    def _group_by_group(
        self, pieces: Sequence[Any], groups: Sequence[Group], places: Tensor | None = None
    ) -> list[MicrobatchStats]:
        """Accumulate a window of several microbatches, or with groups on several ranks."""
        mixing = training_batch_norms(self.evaluation.modules)
        if mixing:  # only the engine's per-sample pass detects this, and it is not used here
            raise SamplesInteractError(
                f"{self.chain.grouping} needs samples that do not depend on each other; found BatchNorm in training "
                f"mode: {listed(mixing)}. Call eval() on it, or use GroupNorm."
            )
        part = Gathering(self, groups, places).part()
        return [] if part is None else split(part, [_length(piece, self) for piece in pieces])

    def _by_group(self, pieces: Sequence[Any]) -> list[Group]:
        """Samples of each group, with groups in order of first occurrence."""
        groups: dict[Hashable, list[Members]] = {}
        start = 0
        for piece in pieces:
            keys = self._checked_keys(piece)
            for key in dict.fromkeys(keys):
                places = [place for place, other in enumerate(keys) if other == key]
                groups.setdefault(key, []).append(Members(take(piece, places), start + torch.tensor(places)))
            start += len(keys)
        return [Group(key, members, number) for number, (key, members) in enumerate(groups.items())]


@dataclass
class Members:
    """Samples of one group in one microbatch."""

    batch: Any
    places: Tensor  # in this rank's part of the window
    numbers: Numbers | None = None


@dataclass
class Group:
    """One group of samples in a window."""

    key: Hashable
    members: list[Members]  # on this rank
    number: int  # in the window, in order of first occurrence
    spans: bool = False  # whether several ranks have members
    owned: bool = True  # whether this rank sends the group's results and counts its denominator


class Known:
    """Groups of a window over all ranks, exchanged in one all-gather. `spanning`: keys of groups on several ranks."""

    def __init__(self, team: DistributedWindow, keys: list[Hashable]):
        team.check()
        self.places = team.places(len(keys))
        told = current_group().all_gather_object(list(zip(self.places.tolist(), keys, strict=True)))
        pairs_of_all = [pair for pairs in told for pair in pairs]
        in_order = [key for _, key in sorted(pairs_of_all, key=lambda pair: pair[0])]
        self._numbers = {key: number for number, key in enumerate(dict.fromkeys(in_order))}
        self._holders: dict[Hashable, list[int]] = {}
        for rank, pairs in enumerate(told):
            for key in dict.fromkeys(key for _, key in pairs):
                self._holders.setdefault(key, []).append(rank)
        self._rank = team.rank
        self.spanning = [key for key in self._numbers if len(self._holders[key]) > 1]

    def numbers(self, keys: list[Hashable]) -> Tensor:
        """Numbers of the groups of these keys in the window."""
        return torch.tensor([self._numbers[key] for key in dict.fromkeys(keys)])

    def groups(self, here: Sequence[Group]) -> list[Group]:
        """Groups to process on this rank. Groups on several ranks come first, in the same order on every rank, also on
        ranks without a member, because they need collectives.
        """
        found = {group.key: group for group in here}
        keys = [*self.spanning, *(key for key in found if key not in set(self.spanning))]
        return [
            Group(
                key,
                found[key].members if key in found else [],
                self._numbers[key],
                spans=len(self._holders[key]) > 1,
                owned=self._holders[key][0] == self._rank,
            )
            for key in keys
        ]


class Gathering:
    """Processes the groups of a window one by one; a group may extend over several microbatches. Every pass over the
    groups starts from the same random state. `places`: positions of this rank's samples in the window of all ranks.
    """

    def __init__(self, summing: Grouped, groups: Sequence[Group], places: Tensor | None):
        self.summing = summing
        self.groups = groups
        self.places = places
        self.stage = summing.chain.groups
        self.evaluation = summing.evaluation
        summing.prepare()
        self.restore = snapshot(*self.evaluation.modules)

    def part(self) -> MicrobatchStats | None:
        """Accumulate all groups into `.grad`; returns the per-sample results, or None if this rank has no samples."""
        if self.summing.asks_samples:
            self._weigh_samples()
        weighed: list[Numbers] = []
        if self.stage.window:  # coefficients need the results of all groups, so they are computed first
            found = [self._gather(group) for group in self.groups]
            weighed = self.summing.weigh(self.stage, found, torch.tensor([group.owned for group in self.groups]))
            self.restore()
        sums = GradientSums(self.evaluation.trained.named)
        for k, group in enumerate(self.groups):
            if self.stage.window:
                self._partial(group)
            else:
                weighed += self.stage.weigh([self._gather(group)])
            sums.add(weighed[k].coefficients)
        sums.put_back()
        return self._in_order(joined(weighed)) if any(group.members for group in self.groups) else None

    def _weigh_samples(self) -> None:
        members = [m for group in self.groups for m in group.members]
        found = [self.summing.one_pass(m.batch, self._places(m))[2] for m in members]
        for m, numbers in zip(members, self.summing.weigh(self.summing.chain.samples, found), strict=True):
            m.numbers = numbers
        self.restore()

    def _places(self, m: Members) -> Tensor:
        return m.places if self.places is None else self.places[m.places]

    def _partial(self, group: Group) -> None:
        """Compute the gradient of the group's members on this rank, into `.grad`."""
        self.evaluation.trained.clear()
        for m in group.members:
            losses, counts = self.evaluation.losses(m.batch)
            _check_keys(m.places.tolist(), len(losses))
            check_finite(losses, m.places)
            if m.numbers is None:
                m.numbers = Numbers(losses.detach(), counts_of(losses, counts), columns=self.evaluation.columns)
            self.evaluation.add_sum(losses, m.numbers.weights)

    def _gather(self, group: Group) -> Numbers:
        """Call `_partial`, and return the results of the whole group over all ranks."""
        self._partial(group)
        known = [m.numbers for m in group.members if m.numbers is not None]
        losses = sum(((n.losses * n.weights).sum() for n in known), start=self._zero())
        counts = sum((n.denominators.sum() for n in known), start=self._zero())
        gradients = {name: p.grad for name, p in self.evaluation.trained.wanted().items() if p.grad is not None}
        if group.spans:
            assert self.summing.team is not None
            losses, counts = map(losses.new_tensor, self.summing.team.sums(losses, counts))
            gradients = self._of_all() if self.stage.measures else {}
        return Numbers(
            losses=losses[None],
            counts=counts[None],
            places=torch.tensor([group.number]),
            raw_norms=self._ask(gradients, lambda g, _: g.norm()) if "norms" in self.stage.needs else None,
            raw_dots={r: self._ask(gradients, self._dot(r)) for r in self.stage.references},
        )

    def _zero(self) -> Tensor:
        first = next(iter(self.evaluation.trained.wanted().values()))
        return torch.zeros((), dtype=first.real.dtype if first.is_complex() else first.dtype, device=first.device)

    def _of_all(self) -> dict[str, Tensor]:
        """Gradients summed over ranks, as new tensors; `.grad` keeps this rank's gradients."""
        wanted = self.evaluation.trained.wanted()
        sums = {n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone() for n, p in wanted.items()}
        current_group().all_reduce_bucketed_(list(sums.values()))
        return sums

    def _dot(self, reference: Reference) -> Callable[[Tensor, str], Tensor]:
        return lambda gradient, name: (gradient * self.summing.directions[reference][name]).sum()

    def _ask(self, gradients: dict[str, Tensor], question: Callable[[Tensor, str], Tensor]) -> dict[str, Tensor]:
        """`question` of each gradient, name -> (1,), without the loss scale; 0 for parameters without a gradient."""
        scale = self.evaluation.precision.scale
        return {
            name: (question(gradients[name], name) / scale).reshape(1) if name in gradients else p.new_zeros(1)
            for name, p in self.evaluation.trained.wanted().items()
        }

    def _in_order(self, groups: Numbers) -> MicrobatchStats:
        """Per-sample results in the order of this rank's samples. A group's share of the denominator counts only on the
        rank that owns the group.
        """
        members = [m for group in self.groups for m in group.members]
        samples = joined([m.numbers for m in members if m.numbers is not None])
        owner = torch.cat([torch.full_like(m.places, k) for k, group in enumerate(self.groups) for m in group.members])
        part = _part(samples, groups, owner)
        order = torch.cat([m.places for m in members]).argsort()
        owned = torch.tensor([group.owned for group in self.groups], device=part.losses.device)
        part.shares = groups.denominators * owned
        part.losses = part.losses[order]
        part.counts = None if part.counts is None else part.counts[order]
        part.norms = None if part.norms is None else part.norms[order]
        part.columns = part.columns and {name: values[order] for name, values in part.columns.items()}
        part.weights = None if part.weights is None else rows_of(part.weights, order)
        return part


class GradientSums:
    """Sum of the successive contents of `.grad`, each times a coefficient, in separate tensors."""

    def __init__(self, parameters: dict[str, Tensor]):
        self.parameters = parameters
        self.sums: dict[str, Tensor] = {}

    def add(self, coefficients: PerSample | None) -> None:
        for name, p in self.parameters.items():
            if p.grad is not None:
                c = coefficients[name] if isinstance(coefficients, dict) else coefficients
                scaled = p.grad if c is None else p.grad * c
                self.sums[name] = self.sums[name] + scaled if name in self.sums else scaled.clone()

    def put_back(self) -> None:
        """Set `.grad` to the sums."""
        for name, p in self.parameters.items():
            p.grad = self.sums.get(name)


def _owners(keys: list[Hashable], losses: Tensor) -> tuple[Tensor, int]:
    """Number of each sample's group, in order of first occurrence, and the number of groups."""
    _check_keys(keys, len(losses))
    numbers = {key: k for k, key in enumerate(dict.fromkeys(keys))}
    return torch.tensor([numbers[key] for key in keys], device=losses.device), len(numbers)


def _check_keys(keys: list[Hashable], samples: int) -> None:
    if len(keys) != samples:
        raise TransformError(f"group must give one key per sample; found {len(keys)} keys for {samples} samples.")


def _sums(values: Tensor, owner: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups).index_add(0, owner, values)


def _part(samples: Numbers, groups: Numbers, owner: Tensor) -> MicrobatchStats:
    """Per-sample results; the coefficient of a sample is its own times that of its group."""
    part = as_part(samples)
    of_group = groups.coefficients
    own = samples.weights
    if isinstance(of_group, dict):
        part.weights = {n: c[owner] * own for n, c in of_group.items()}
    elif of_group is not None:
        part.weights = of_group[owner] * own
    part.shares = groups.denominators
    return part


def _length(piece: Any, summing: Grouped) -> int:
    found = length(piece)
    if found is None:
        raise BatchError(
            f"{summing.chain.grouping} must select single samples if a window has several microbatches; found a batch "
            "that cannot be cut. Use a loader whose batch is the whole window."
        )
    return found
