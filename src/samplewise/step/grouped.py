"""Gradient accumulation over groups of samples, each group's gradient with its own coefficient.

The norm of a group's gradient is not the sum of the samples' norms. For a window of one microbatch, the engine computes
it like that of a sample, from the sum of the group's losses. A window of several microbatches is processed group by
group, with one buffer of the size of the parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from samplewise.core.batches import length, take
from samplewise.core.memory import copy_to_device
from samplewise.core.modes import mixing_batch_norms
from samplewise.core.text import listed, plural
from samplewise.errors import BatchError, SamplesInteractError, TransformError
from samplewise.parallel import collectives
from samplewise.parallel.mode import Parallel
from samplewise.step.accumulate import PerSampleAccumulator, check_finite
from samplewise.step.parameters import TrainedParameters
from samplewise.step.ranks import weigh
from samplewise.transforms.stats import PerSample, SampleStats, concatenate, rows_of, split
from samplewise.transforms.transform import Reference


class GroupedAccumulator(PerSampleAccumulator):
    """Accumulates each group's gradient times its coefficient. `one_by_one`: compute the groups one after the other,
    also those of a single microbatch.
    """

    one_by_one = False

    def add(self, microbatches: Sequence[Any], start: int, divide: bool = False) -> list[SampleStats]:
        if self.exchanges:
            self.compute_directions()
        assert self.chain.grouping is not None
        keys = [self.chain.grouping.keys(microbatch) for microbatch in microbatches]
        if self.exchanges or len(microbatches) > 1:
            for row_keys, microbatch in zip(keys, microbatches, strict=True):
                _check_keys(row_keys, self.samples_in(microbatch))
        repeatable = not (self.exchanges and self.size.automatic) and not self.one_by_one
        layout = GroupLayout(
            self.ranks, [key for row_keys in keys for key in row_keys], len(microbatches) <= 1 and repeatable
        )
        self.chain.groups.check_positions(len(layout), "group")
        if layout.at_once:
            return [self._at_once(*pair, layout) for pair in zip(microbatches, keys, strict=True)]
        groups = layout.groups(_members_by_group(microbatches, keys))
        return self._group_by_group(microbatches, groups, layout.positions)

    def samples_in(self, microbatch: Any) -> int:
        """Number of samples; raises if the microbatch cannot be cut."""
        samples = length(microbatch)
        if samples is None:
            raise BatchError(
                f"{self.chain.grouping} must select single samples if a window has several microbatches; found a batch "
                "that cannot be cut. Use a loader whose batch is the whole window."
            )
        return samples

    @property
    def needs_samples(self) -> bool:
        """True if per-sample results are needed before samples are grouped."""
        return bool(self.chain.samples.transforms) or self.record_norms

    def _at_once(self, microbatch: Any, keys: list[Hashable], layout: GroupLayout) -> SampleStats:
        """Accumulate a window of one microbatch, with the gradient of each group from the engine."""
        losses, _, samples = self.stats_of(microbatch, layout.positions)
        _check_keys(keys, len(losses))
        numbers = {key: k for k, key in enumerate(dict.fromkeys(keys))}  # in order of first occurrence
        number = len(numbers)
        owner = copy_to_device(torch.tensor([numbers[key] for key in keys]), losses.device)
        (samples,) = weigh(self.ranks, self.chain.samples, [samples])
        per_group = _sums(losses * samples.weights, owner, number)
        g = self.evaluator.gradients(per_group)
        groups = SampleStats(
            losses=per_group.detach(),
            counts=_sums(samples.denominators, owner, number),
            positions=layout.numbers(keys),
        )
        directions = self.directions if self.chain.groups.references else {}
        self.chain.groups.measure(g, groups, directions, norms=False, scale=self.evaluator.precision.scale)
        self.record_first(self.chain.groups, groups)
        (groups,) = weigh(self.ranks, self.chain.groups, [groups])
        self.add_weighted(g, groups.coefficients)
        return _result(samples, groups, owner)

    def _group_by_group(
        self, microbatches: Sequence[Any], groups: Sequence[SampleGroup], positions: Tensor
    ) -> list[SampleStats]:
        """Accumulate a window of several microbatches, or with groups on several ranks."""
        mixing = mixing_batch_norms(self.evaluator.modules)
        # Only the engine's per-sample pass detects this, and it is not used here.
        if mixing and self.evaluator.interacting == "refuse":
            remedies = ["call sw.freeze_batchnorm(model)", "use GroupNorm"]
            if self.evaluator.policy.allows_interaction:
                remedies.append("pass interacting='allow'")
            raise SamplesInteractError(
                f"{self.chain.grouping} needs samples that do not depend on each other; found BatchNorm in training "
                f"mode: {listed(mixing)}.",
                remedies,
            )
        stats = GroupAccumulation(self, groups, positions).run()
        return [] if stats is None else split(stats, [self.samples_in(microbatch) for microbatch in microbatches])


@dataclass
class Members:
    """Samples of one group in one microbatch."""

    batch: Any
    rows: Tensor  # in this rank's part of the window
    stats: SampleStats | None = None


@dataclass
class SampleGroup:
    """One group of samples in a window."""

    members: list[Members]  # on this rank
    number: int  # in the window, in order of first occurrence
    spans: bool  # whether several ranks have members
    owned: bool  # whether this rank sends the group's results and counts its denominator


class GroupLayout:
    """Groups of a window over all ranks, exchanged in one all-gather. `spanning`: keys of groups on several ranks.
    `positions`: of this rank's samples in the window of all ranks. `single`: this rank has at most one microbatch.
    `at_once`: all groups of this rank can be computed in one pass.
    """

    def __init__(self, ranks: Parallel, keys: list[Hashable], single: bool):
        (several,) = ranks.sums(not single)
        self.positions = ranks.positions(len(keys))
        gathered = collectives.all_gather_object(list(zip(self.positions.tolist(), keys, strict=True)))
        pairs_of_all = [pair for pairs in gathered for pair in pairs]
        in_order = [key for _, key in sorted(pairs_of_all, key=lambda pair: pair[0])]
        self._numbers = {key: number for number, key in enumerate(dict.fromkeys(in_order))}
        self._holders: dict[Hashable, list[int]] = {}
        for rank, pairs in enumerate(gathered):
            for key in dict.fromkeys(key for _, key in pairs):
                self._holders.setdefault(key, []).append(rank)
        self._rank = ranks.rank
        self.spanning = [key for key in self._numbers if len(self._holders[key]) > 1]
        self.at_once = single and bool(keys) and not self.spanning
        if ranks.sharded and (several or self.spanning):
            self.at_once = False
            self.spanning = list(self._numbers)  # a pass sums over all ranks, so that they must process the same group

    def __len__(self) -> int:
        """Number of groups in the window."""
        return len(self._numbers)

    def numbers(self, keys: list[Hashable]) -> Tensor:
        """Numbers of the groups of these keys in the window."""
        return torch.tensor([self._numbers[key] for key in dict.fromkeys(keys)])

    def groups(self, members: Mapping[Hashable, list[Members]]) -> list[SampleGroup]:
        """Groups to process on this rank. Groups on several ranks come first, in the same order on every rank, also on
        ranks without a member, because they need collectives.
        """
        spanning = set(self.spanning)
        keys = [*self.spanning, *(key for key in members if key not in spanning)]
        return [
            SampleGroup(
                members=members.get(key, []),
                number=self._numbers[key],
                spans=key in spanning,
                owned=self._holders[key][0] == self._rank,
            )
            for key in keys
        ]


class GroupAccumulation:
    """Processes the groups of a window one by one; a group may extend over several microbatches. Every pass over the
    groups starts from the same state. `positions`: of this rank's samples in the window of all ranks.
    """

    def __init__(self, accumulator: GroupedAccumulator, groups: Sequence[SampleGroup], positions: Tensor):
        self.accumulator = accumulator
        self.groups = groups
        self.positions = positions
        self.stage = accumulator.chain.groups
        self.ranks = accumulator.ranks
        self.evaluator = accumulator.evaluator
        self._sharded = self.ranks.sharded  # numbers of a gradient are then sums over shards, in float64
        accumulator.compute_directions()
        self.restore = self.evaluator.saved_state([m.batch for group in groups for m in group.members])

    def run(self) -> SampleStats | None:
        """Accumulate all groups into `.grad`; returns the per-sample results, or None if this rank has no samples."""
        if self.accumulator.needs_samples:
            members = [m for group in self.groups for m in group.members]
            parts = [self.accumulator.stats_before_sum(m.batch, self.positions[m.rows]) for m in members]
            for m, stats in zip(members, weigh(self.ranks, self.accumulator.chain.samples, parts), strict=True):
                m.stats = stats
            self.restore()
        weighed: list[SampleStats] = []
        if self.stage.window:  # coefficients need the results of all groups, so they are computed first
            by_group = [self._group_stats(group) for group in self.groups]
            weighed = weigh(self.ranks, self.stage, by_group, torch.tensor([group.owned for group in self.groups]))
            self.restore()
        sums = GradientSums(self.evaluator.trained)
        for k, group in enumerate(self.groups):
            if not self.stage.window:
                weighed += self.stage.weigh([self._group_stats(group)])
            else:
                self._group_gradient(group)
                if self._sharded:
                    self.ranks.sums()  # all ranks have added their part of this group to `.grad`
            sums.add(weighed[k].coefficients)
        sums.write()
        return self._in_order(concatenate(weighed)) if any(group.members for group in self.groups) else None

    def _group_gradient(self, group: SampleGroup) -> None:
        """Compute the gradient of the group's members on this rank, into `.grad`."""
        self.evaluator.trained.clear()
        for m in group.members:
            losses, counts = self.evaluator.losses(m.batch)
            _check_keys(m.rows.tolist(), len(losses))
            check_finite(losses, m.rows)
            if m.stats is not None:
                self.evaluator.check_repeated(losses, m.stats.losses)
            else:
                counts = torch.ones_like(losses) if counts is None else counts
                m.stats = SampleStats(losses.detach(), counts, columns=self.evaluator.columns)
            self.evaluator.add_sum(losses, m.stats.weights)
        # Rows of a sparse gradient that occur several times are summed before they meet those of other groups, which
        # rounding would absorb if the group cancels.
        self.evaluator.trained.coalesce()

    def _group_stats(self, group: SampleGroup) -> SampleStats:
        """Compute the group's gradient, and return the results of the whole group over all ranks."""
        self._group_gradient(group)
        parts = [m.stats for m in group.members if m.stats is not None]
        losses = sum(((stats.losses * stats.weights).sum() for stats in parts), start=self._zero())
        counts = sum((stats.denominators.sum() for stats in parts), start=self._zero())
        if group.spans:
            losses, counts = map(losses.new_tensor, self.ranks.sums(losses, counts))
        gradients: dict[str, Tensor] = {}
        if self.stage.measures:
            spread = group.spans and not self._sharded
            gradients = self._summed_gradients() if spread else self.evaluator.trained.local_gradients()
        stats = SampleStats(
            losses=losses[None],
            counts=counts[None],
            positions=torch.tensor([group.number]),
            raw_norms=self._norms(gradients) if "norms" in self.stage.needs else None,
            raw_dots={r: self._dots(gradients, r) for r in self.stage.references},
        )
        self.accumulator.record_first(self.stage, stats)
        return stats

    def _zero(self) -> Tensor:
        first = next(iter(self.evaluator.trained.trainable().values()))
        return torch.zeros((), dtype=first.real.dtype if first.is_complex() else first.dtype, device=first.device)

    def _summed_gradients(self) -> dict[str, Tensor]:
        """Gradients summed over ranks, as new tensors; `.grad` keeps this rank's gradients."""
        parameters = self.evaluator.trained.trainable()
        sums = {n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense().clone() for n, p in parameters.items()}
        collectives.all_reduce_bucketed_(list(sums.values()))
        return sums

    def _norms(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Norm of each gradient."""
        if not self._sharded:
            return self._per_parameter({name: g.norm() for name, g in gradients.items()})
        squares = self._over_shards({name: g.double().square().sum() for name, g in gradients.items()})
        return self._per_parameter({name: square.sqrt() for name, square in squares.items()})

    def _dots(self, gradients: dict[str, Tensor], reference: Reference) -> dict[str, Tensor]:
        """Inner product of each gradient with the direction of a reference."""
        direction = self.accumulator.directions[reference]
        shard_of = self.ranks.own_part
        dots = {name: (g * shard_of(name, direction[name])).sum() for name, g in gradients.items()}
        return self._per_parameter(self._over_shards(dots) if self._sharded else dots)

    def _over_shards(self, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum of each number over the shards of the parameter."""
        table = torch.stack([number.double() for number in numbers.values()])
        return dict(zip(numbers, self.ranks.over_shards(table), strict=True))

    def _per_parameter(self, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
        """Numbers without the loss scale, name -> (1,); 0 for parameters without a gradient."""
        scale = self.evaluator.precision.scale
        return {
            name: (numbers[name] / scale).reshape(1) if name in numbers else p.new_zeros(1)
            for name, p in self.evaluator.trained.trainable().items()
        }

    def _in_order(self, groups: SampleStats) -> SampleStats:
        """Per-sample results in the order of this rank's samples. A group's share of the denominator counts only on the
        rank that owns the group.
        """
        members = [m for group in self.groups for m in group.members]
        samples = concatenate([m.stats for m in members if m.stats is not None])
        owner = torch.cat([torch.full_like(m.rows, k) for k, group in enumerate(self.groups) for m in group.members])
        device = samples.losses.device
        stats = _result(samples, groups, copy_to_device(owner, device))
        order = copy_to_device(torch.cat([m.rows for m in members]).argsort(), device)
        owned = copy_to_device(torch.tensor([group.owned for group in self.groups]), device)
        columns = stats.columns
        return SampleStats(
            losses=stats.losses[order],
            counts=None if stats.counts is None else stats.counts[order],
            raw_norms=None if stats.raw_norms is None else rows_of(stats.raw_norms, order),
            coefficients=None if stats.coefficients is None else rows_of(stats.coefficients, order),
            shares=groups.denominators * owned,
            columns=None if columns is None else {name: values[order] for name, values in columns.items()},
        )


class GradientSums:
    """Sum of the successive contents of `.grad`, each times a coefficient, in separate tensors."""

    def __init__(self, trained: TrainedParameters):
        self.trained = trained
        self.sums: dict[str, Tensor] = {}

    def add(self, coefficients: PerSample | None) -> None:
        for name, gradient in self.trained.local_gradients().items():
            c = coefficients[name] if isinstance(coefficients, dict) else coefficients
            scaled = gradient if c is None else gradient * c.reshape(())  # c has one value; a gradient may have no dim
            self.sums[name] = self.sums[name] + scaled if name in self.sums else scaled.clone()

    def write(self) -> None:
        """Set `.grad` to the sums."""
        self.trained.clear()
        self.trained.set_gradients(self.sums)


def _members_by_group(microbatches: Sequence[Any], keys: Sequence[list[Hashable]]) -> dict[Hashable, list[Members]]:
    """Samples of each group, with groups in order of first occurrence."""
    groups: dict[Hashable, list[Members]] = {}
    start = 0
    for microbatch, row_keys in zip(microbatches, keys, strict=True):
        for key in dict.fromkeys(row_keys):
            rows = [row for row, row_key in enumerate(row_keys) if row_key == key]
            groups.setdefault(key, []).append(Members(take(microbatch, rows), start + torch.tensor(rows)))
        start += len(row_keys)
    return groups


def _check_keys(keys: Sequence[Hashable], samples: int) -> None:
    if len(keys) != samples:
        raise TransformError(
            f"group must give one key per sample; found {plural(len(keys), 'key')} for {plural(samples, 'sample')}."
        )


def _sums(values: Tensor, owner: Tensor, groups: int) -> Tensor:
    return values.new_zeros(groups).index_add(0, owner, values)


def _result(samples: SampleStats, groups: SampleStats, owner: Tensor) -> SampleStats:
    """Per-sample results; the coefficient of a sample is its own times that of its group."""
    stats = samples.result()
    weights = samples.weights
    of_group = groups.coefficients
    if isinstance(of_group, dict):
        stats.coefficients = {name: c[owner] * weights for name, c in of_group.items()}
    elif of_group is not None:
        stats.coefficients = of_group[owner] * weights
    stats.shares = groups.denominators
    return stats
