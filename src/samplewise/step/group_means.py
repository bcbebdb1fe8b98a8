"""Updates that are means over groups: `aggregate=sw.per("group", key=...)`.

The loss of a sample is divided by the counts of its group in the window, on all ranks, and so is its count. The sum of
the losses is then the sum of the groups' means, and the sum of the counts is the number of groups. The counts of the
whole window must be known before its gradients are summed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from samplewise.core.memory import copy_to_device
from samplewise.core.microbatch import MicrobatchSize
from samplewise.engine.arguments import wide_dtype
from samplewise.errors import LossesError
from samplewise.parallel import collectives
from samplewise.parallel.mode import Parallel
from samplewise.step.accumulate import Accumulator, AccumulatorWrapper
from samplewise.step.forward import LossEvaluator
from samplewise.transforms.stats import SampleStats
from samplewise.transforms.sums import Per, divide_by_counts, sum_by_group


class GroupCounts:
    """Σ counts of each group in a window, on all ranks. Called by the evaluator with the losses and counts of a
    microbatch, which it divides by the counts of their groups.
    """

    def __init__(self, aggregate: Per):
        self.aggregate = aggregate
        self._ranks: Parallel | None = None  # set while the gradients of a window are summed
        self._totals: dict[Hashable, float] | None = None
        self._here: dict[Hashable, float] = {}  # of this rank

    def begin(self, ranks: Parallel, here: dict[Hashable, float] | None) -> None:
        """From now on, microbatches belong to a window. `here`: Σ counts of each group in this rank's part; None: the
        first microbatch is the whole part. Collective, unless it is None.
        """
        self._ranks = ranks
        if here is not None:
            self._exchange(here)

    def end(self) -> None:
        """From now on, losses and counts stay as they are, as those of rechecks must."""
        self._ranks = None
        self._totals = None

    def __call__(self, losses: Tensor, counts: Tensor | None, batch: Any) -> tuple[Tensor, Tensor | None]:
        if self._ranks is None:
            return losses, counts
        counts = ones(losses) if counts is None else counts
        keys = self.aggregate.group_keys(batch, len(losses))
        if self._totals is None:
            self._exchange(sum_by_group(keys, counts))
        assert self._totals is not None
        totals = torch.tensor([self._totals[key] for key in keys], dtype=counts.dtype)
        return divide_by_counts(losses, counts, copy_to_device(totals, counts.device))

    def _exchange(self, here: dict[Hashable, float]) -> None:
        """Sum the counts of each group over ranks. Collective."""
        assert self._ranks is not None
        self._ranks.sums()  # raises on all ranks if one of them skips the window
        self._here = here
        self._totals = collectives.sum_by_key(here)

    def check_repeated(self, parts: Sequence[SampleStats]) -> None:
        """Raise LossesError if the passes in which gradients were summed have had other counts than the first pass."""
        assert self._totals is not None
        expected = sum(count / abs(self._totals[key]) for key, count in self._here.items() if self._totals[key])
        total = sum(float(part.count_sum) for part in parts)
        if abs(total - expected) > 1e-3 * abs(expected):
            raise LossesError(
                f"a window with {self.aggregate} is computed twice if it has several microbatches, and loss_fn must "
                f"return the same counts both times; found {total:g} times the counts of the groups instead of "
                f"{expected:g}. Look for iterators, files, clocks or other state that is not in Python variables; or "
                "use one microbatch per window."
            )


def ones(losses: Tensor) -> Tensor:
    """Counts of samples without counts. Sums in half precision would be rounded from a few hundred samples on."""
    return torch.ones_like(losses, dtype=wide_dtype(losses.dtype), requires_grad=False)


class GroupMeansAccumulator(AccumulatorWrapper):
    """Accumulator that gets the counts of all groups, then accumulates with `inner`. For a single microbatch, both need
    one forward pass, except if `inner` computes groups of its own in an order of its own.
    """

    def __init__(
        self,
        inner: Accumulator,
        counts: GroupCounts,
        evaluator: LossEvaluator,
        ranks: Parallel,
        size: MicrobatchSize,
        one_pass: bool,
    ):
        """one_pass: the first pass of `inner`, before its first collective, is that of the whole microbatch."""
        super().__init__(inner)
        self.needs_window = True
        self.exchanges = ranks.exchanges
        self._counts = counts
        self._evaluator = evaluator
        self._ranks = ranks
        self._size = size
        self._one_pass = one_pass

    def add(self, microbatches: Sequence[Any], start: int, divide: bool = False) -> list[SampleStats]:
        if self.exchanges:
            self.compute_directions()  # they may contain collectives, which then come first on all ranks
        repeats = self.exchanges and self._size.automatic  # this rank may run out of memory after the exchange
        one_pass = self._one_pass and len(microbatches) == 1 and not repeats
        here = None
        if not one_pass:
            restore = self._evaluator.saved_state(microbatches)
            microbatches, here = self._size.retry(lambda some: (some, self._count(some)), microbatches)
            restore()
        try:
            self._counts.begin(self._ranks, here)
            if repeats and not self._inner.exchanges:
                parts = self._size.retry(lambda some: self._inner.add(some, start), microbatches)
            else:
                parts = self._inner.add(microbatches, start)
            if not one_pass:
                self._counts.check_repeated(parts)
            return parts
        finally:
            self._counts.end()

    def _count(self, microbatches: Sequence[Any]) -> dict[Hashable, float]:
        """Σ counts of each group in these microbatches."""
        keys: list[Hashable] = []
        counts: list[Tensor] = []
        for microbatch in microbatches:
            losses, sample_counts = self._evaluator.losses(microbatch)
            keys += self._counts.aggregate.group_keys(microbatch, len(losses))
            counts.append(ones(losses) if sample_counts is None else sample_counts)
        return sum_by_group(keys, torch.cat(counts)) if counts else {}
