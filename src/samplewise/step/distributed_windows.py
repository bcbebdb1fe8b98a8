"""Windows over several ranks: each rank's share of a window, and the collectives at the end of a window.

Code that may fail runs between two synchronizing collectives, so that an error on one rank reaches the others at the
next one. A non-finite value that may be skipped is also reported there: then all ranks skip the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.memory import DeviceGenerator
from samplewise.core.microbatch import Auto
from samplewise.core.state import RandomState
from samplewise.errors import DistributedError, NonFiniteGradientError, NonFiniteLossError
from samplewise.parallel import collectives
from samplewise.parallel.group import current_group
from samplewise.parallel.strategy import SingleProcessStrategy, resolve_strategy, strategy_name
from samplewise.parallel.strategy_base import ParallelStrategy
from samplewise.step.config import StepConfig
from samplewise.step.nonfinite import NO_DENOMINATOR, problem_of_counts, problem_of_losses
from samplewise.step.parameters import TrainedParameters
from samplewise.step.window import Window, WindowTotals, empty_stats
from samplewise.step.window_ranks import LocalWindows, ReduceInputs, WindowRanks, check_rank
from samplewise.transforms.chain import Stage
from samplewise.transforms.stats import (
    PerSample,
    SampleStats,
    as_table,
    cat,
    denominator,
    from_table,
    rows_of,
    total_count,
)
from samplewise.transforms.transform import SampleTransform, SumTransform

PLAIN = (int, float, str, tuple, Tensor)  # types of optimizer options whose str() shows their value
AFTER_CARRIED = 2**40  # offset that sorts new samples after those carried over from the previous pass


class DistributedWindows(WindowRanks):
    """Windows over several ranks. `dealt`: number of samples of all ranks in windows since the loaders started;
    `carried`: number of samples of all ranks in a window carried over from the previous loaders.
    """

    distributed = True

    def __init__(self, strategy: ParallelStrategy, empty_updates: bool = False) -> None:
        """empty_updates: a window without samples is an update too, while all loaders go on."""
        group = current_group()
        self._empty_updates = empty_updates
        self.rank = group.rank
        self.size = group.size
        self.strategy = strategy
        self.dealt = 0
        self.carried = 0
        self._first = 0  # number of the first sample of the window that is being computed
        self._kept = 0  # number of this rank's samples in it that were carried over
        self._kept_first = 0  # number of the first carried sample of all ranks
        self._skip_known = False  # whether a collective has reported that this window is skipped

    def check_group(self) -> None:
        """Do nothing: the step was created with the group."""

    def check_optimizer(self, trained: TrainedParameters, optimizer: Any) -> None:
        """Raise if the optimizers of the ranks differ: gradients are summed in the order of the optimizer's parameters,
        and each rank runs its own optimizer.
        """
        group = current_group()
        kind = type(optimizer).__name__
        names = list(trained.named)
        options = [
            {k: str(v) for k, v in param_group.items() if isinstance(v, PLAIN)}
            for param_group in optimizer.param_groups
        ]
        group.barrier()
        if not group.all_equal((kind, names, options)):
            raise DistributedError(
                "all ranks must have the same optimizer, with the same parameters in the same order; found another "
                f"than on this rank, {kind} of {', '.join(names)} with {options}. Create the same optimizer on "
                "every rank."
            )

    # --- shares ----------------------------------------------------------------------------------------------------

    def share(self, samples: int | None) -> float:
        """Sample i of the loaders is on rank i mod N."""
        if samples is None:
            return inf
        return self._held(self.dealt + samples) - self._held(self.dealt)

    def _held(self, samples: int) -> int:
        """Number of this rank's samples among the first `samples` of the loaders."""
        return max(0, (samples - self.rank + self.size - 1) // self.size)

    def next_pass(self, window: Window, samples: int | None) -> None:
        self._kept = window.samples if self.carried else 0
        self._kept_first = self.dealt
        self.dealt = -self.carried
        window.share = None if samples is None else window.samples + self._held(samples - self.carried)

    def _additional(self, missing: int, ended: bool) -> int:
        """Number of samples that this rank must add of the `missing` ones; 0 if its loader has ended."""
        ended_by_rank = current_group().all_gather_object(ended)
        going = [rank for rank, has_ended in enumerate(ended_by_rank) if not has_ended]
        return 0 if ended else missing // len(going) + (going.index(self.rank) < missing % len(going))

    # --- the end of a window ---------------------------------------------------------------------------------------

    def complete(self, window: Window, samples: int | None, tail: str, ended: bool = False) -> bool:
        """Sum the window over ranks in one all-reduce. If samples are missing, ranks whose loader has not ended get a
        larger share, and all ranks call this again.
        """
        overlap = self.strategy.overlap
        if overlap is not None:
            overlap.start_buckets()
        totals = self._totals(window, ended)
        self.all_ended = totals.ended == self.size
        missing = 0 if samples is None else samples - totals.samples
        complete = self._is_complete(totals.samples, totals.ended, samples, tail)
        if overlap is not None and not complete:
            overlap.reset()  # no bucket was started: the ranks have decided so with the same numbers
        if complete:
            self._kept = self._kept if self.carried else 0
            self._first = self.dealt
            self.dealt += totals.samples
            self.carried = 0
        elif self.all_ended:
            self.carried = totals.samples if tail == "carry" else 0
        else:
            share = self.share(samples or 0) if window.share is None else window.share
            window.share = share + self._additional(missing, ended)
        window.totals = totals if complete or tail == "drop" else None
        return complete

    def _is_complete(self, total: float, ended: float, samples: int | None, tail: str) -> bool:
        """`total`: number of samples of all ranks; `ended`: number of ended loaders."""
        if self._empty_updates and ended == 0:
            return True
        missing = 0 if samples is None else samples - total
        return total > 0 and (missing <= 0 or (ended == self.size and tail == "update"))

    def begin_exchange(
        self, window: Window, expected: int, samples: int | None, tail: str, ended: bool = False
    ) -> Callable[[Tensor], None] | None:
        overlap = self.strategy.overlap
        if overlap is None:
            return None

        def decide(skips: float, total: float, ended: float) -> bool:
            return not skips and self._is_complete(total, ended, samples, tail)

        overlap.ask(window.failure is not None, expected, ended, decide)
        return overlap.ready

    def _totals(self, window: Window, ended: bool = False) -> WindowTotals:
        parts = [] if window.failure is not None else window.parts
        losses = cat([part.losses for part in parts]).double().sum() if parts else 0.0
        invalid = any(problem_of_counts([part]) is not None for part in parts)
        sums = (losses, total_count(parts), denominator(parts))
        skips, samples, ended_ranks, *rest = current_group().all_reduce_scalars(
            window.failure is not None, window.samples, ended, *sums, invalid
        )
        return WindowTotals(skips, int(samples), int(ended_ranks), *rest)

    def refresh_totals(self, window: Window) -> None:
        assert window.totals is not None
        totals = None if self._skip_known else self._totals(window)
        window.totals = totals if totals is not None and not totals.skips else replace(window.totals, skips=1.0)
        self._skip_known = False

    def reduce(self, window: Window, inputs: ReduceInputs) -> None:
        config = inputs.config
        trained = inputs.trained
        window.parts = window.parts or [empty_stats(next(iter(trained.named.values())))]
        if config.checks_finite or window.failure is not None:
            window.failure = self._problem(window, may_skip=config.on_nonfinite == "skip")
        if window.failure is None:
            if config.transforms.references:
                _check_directions(inputs.fingerprint())
            self.strategy.reduce_gradients(trained.named, trained.owned, inputs.buffers)
        elif self.strategy.overlap is not None:
            self.strategy.overlap.sums()  # every rank has started the buckets; the sums are not used

    def _problem(self, window: Window, may_skip: bool) -> Exception | None:
        """Error for a non-finite value on any rank, None if all are finite. With `may_skip`, all ranks get an error to
        skip the update; otherwise it is raised on all ranks.
        """
        totals = window.totals
        assert totals is not None
        if totals.skips:
            return window.failure or _nonfinite_elsewhere()
        if isfinite(totals.losses) and not totals.invalid:
            if self._empty_updates or 0 < totals.denominators < inf:
                return None
            return NonFiniteLossError(NO_DENOMINATOR.format(total=totals.denominators))
        problem = problem_of_losses(cat([part.losses for part in window.parts])) or problem_of_counts(window.parts)
        if not may_skip:
            current_group().barrier(problem)
        return problem or _nonfinite_elsewhere()

    def announce(self, error: Exception) -> None:
        """Send the error to the other ranks, then raise it."""
        overlap = self.strategy.overlap
        self.strategy.recover()
        try:
            if overlap is not None and not collectives.is_from_another_rank(error):
                overlap.start_buckets(error)  # a collective in which the other ranks may be waiting
            current_group().barrier(error)
        finally:
            if overlap is not None:
                overlap.reset()

    def sums(self, *numbers: float | Tensor) -> list[float]:
        skips, *sums = current_group().all_reduce_scalars(0.0, *numbers)
        if skips:
            self._skip_known = True
            raise _nonfinite_elsewhere()
        return sums

    # --- per-sample results of all ranks ---------------------------------------------------------------------------

    def positions(self, samples: int) -> Tensor:
        sizes = current_group().all_gather_rows(torch.tensor([[self._kept, samples - self._kept]])).tolist()
        turns: list[Tensor] = []
        for rank, (old, new) in enumerate(sizes):
            carried = self._turns(old, rank, self._kept_first)
            turns.append(torch.cat([carried, AFTER_CARRIED + self._turns(new, rank, max(0, self._first))]))
        return torch.searchsorted(torch.cat(turns).sort().values, turns[self.rank])

    def _turns(self, samples: int, rank: int, first: int) -> Tensor:
        """Order of a rank's samples when samples are assigned to ranks in turn, starting with sample `first`."""
        return torch.arange(samples) * self.size + (rank - first) % self.size

    def weigh(self, stage: Stage, parts: Sequence[SampleStats], owned: Tensor | None = None) -> list[SampleStats]:
        if parts:
            return stage.weigh(parts, lambda transform, stats: self._call(transform, stats, owned))
        for _ in [t for t in stage.transforms if t.window]:
            self.sums()
            current_group().all_gather_tensors(torch.zeros(0, dtype=torch.float64))
        return []

    def _call(self, transform: SampleTransform, stats: SampleStats, owned: Tensor | None) -> PerSample:
        """Call a transform with the results of all ranks; return the coefficients of this rank."""
        self.sums()
        stats = transform.needed(stats)
        assert stats.positions is not None
        table_here = torch.cat([stats.positions.to(stats.losses.device)[:, None], as_table(stats)], 1)
        rows = table_here if owned is None else table_here[owned]
        table = torch.cat(current_group().all_gather_tensors(rows.flatten())).view(-1, table_here.shape[1])
        table = table[table[:, 0].argsort()]
        positions = table[:, 0].contiguous()
        coefficients = transform(from_table(table[:, 1:], positions.long(), stats))
        return rows_of(coefficients, torch.searchsorted(positions, table_here[:, 0].contiguous()))

    # --- random numbers of all ranks -------------------------------------------------------------------------------

    def transform_sum(self, transform: SumTransform, trained: TrainedParameters) -> None:
        """Every rank uses the random state of rank 0; the other ranks then restore their own."""
        restore = RandomState().restore
        generators = _generators(transform, trained.gradients())
        states = current_group().broadcast_object([generator.get_state() for generator in generators])
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        self.strategy.transform_sum(transform, trained.gradients(), trained.owned.values())
        if self.rank:
            restore()

    # --- state -----------------------------------------------------------------------------------------------------

    def epoch_state(self) -> list[int]:
        return [self.size, self.dealt]

    def load_epoch_state(self, state: Sequence[int]) -> None:
        self.dealt = state[1] if state and state[0] == self.size else 0
        self.carried = 0

    def window_state(self, window: Window) -> dict[str, Any]:
        share = None if window.share in (None, inf) else window.share
        return {
            "rank": self.rank,
            "size": self.size,
            "kept": self._kept,
            "kept_first": self._kept_first,
            "samples_in_windows": self.dealt,
            "carried": self.carried,
            "share": share,
        }

    def load_window_state(self, state: dict[str, Any], window: Window) -> None:
        self.dealt = state["samples_in_windows"]
        self.carried = state["carried"]
        window.share = state["share"]
        self._kept = state["kept"]
        self._kept_first = state["kept_first"]

    def check_window_state(self, state: dict[str, Any]) -> None:
        check_rank(state, self)


def make_window_ranks(
    model: nn.Module,
    config: StepConfig,
    modules: Sequence[nn.Module],
    optimizer: Any,
    before_sums: Callable[[], None],
) -> WindowRanks:
    """Windows of a step: of one process, or of the ranks of its process group. Raises if the ranks have different
    settings. `before_sums`: called before gradients of other ranks are added to `.grad`.
    """
    group = current_group()
    group.barrier()
    settings = {**config.settings(), "parallel": strategy_name(model, config.parallel)}
    if not group.all_equal({name: repr(value) for name, value in settings.items()}):
        raise DistributedError(
            f"all ranks must create the same step; found other settings than on this rank, {settings}. Pass the same "
            "arguments to Step(...) on every rank."
        )
    strategy = resolve_strategy(model, config.parallel, modules, optimizer, before_sums)
    if strategy.sharded and isinstance(config.microbatch, Auto):
        raise DistributedError(
            "microbatch must be a number or None for a sharded model, because its passes are collectives, which a rank "
            f"cannot repeat alone; found {config.microbatch!r}. Pass a number."
        )
    if isinstance(strategy, SingleProcessStrategy):
        return LocalWindows(config.policy.empty_updates)
    return DistributedWindows(strategy, config.policy.empty_updates)


def _check_directions(fingerprint: list[float] | None) -> None:
    """Raise unless the reference directions are equal on all ranks, up to rounding."""
    gathered = current_group().all_gather_object(fingerprint)
    fingerprints = [torch.tensor(other) for other in gathered if other is not None]
    if any(
        not torch.allclose(other, fingerprints[0], rtol=1e-3, atol=1e-5 * float(fingerprints[0].norm()))
        for other in fingerprints
    ):
        raise DistributedError(
            "the reference must be equal on all ranks; found different ones. Compute it from the same samples on "
            "every rank, or average it over ranks: sw.gradients(losses, model).mean(all_reduce=True)."
        )


def _generators(transform: SumTransform, gradients: Sequence[Tensor]) -> list[torch.Generator | DeviceGenerator]:
    """Random generators that the transform may draw from."""
    if transform.generator is not None:
        return [transform.generator]
    devices = sorted({g.device for g in gradients if g.device.type != "cpu"}, key=str)
    return [torch.default_generator, *map(DeviceGenerator, devices)]


def _nonfinite_elsewhere() -> NonFiniteGradientError:
    return NonFiniteGradientError(
        "losses and gradients must be finite on every rank; found a non-finite value on another rank. Nothing was "
        "updated."
    )
