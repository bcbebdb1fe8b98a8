"""Modes of several ranks: each rank's share of a window, the agreement that a window is complete, and sums over ranks.

Code that may fail runs between two synchronizing collectives, so that an error on one rank reaches the others at the
next one. A non-finite value that may be skipped is also reported there: then all ranks skip the update.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import Tensor

from samplewise.core.memory import DeviceGenerator
from samplewise.core.state import RandomState
from samplewise.errors import DistributedError, NonFiniteGradientError
from samplewise.parallel import collectives
from samplewise.parallel.mode import Parallel, RankWindow, SumFunction, WindowTotals

PLAIN = (int, float, str, tuple, Tensor)  # types of optimizer options whose str() shows their value
AFTER_CARRIED = 2**40  # offset that sorts new samples after those carried over from the previous pass


class Ranks(Parallel):
    """Windows over several ranks. `dealt`: number of samples of all ranks in windows since the loaders started;
    `carried`: number of samples of all ranks in a window carried over from the previous loaders.
    """

    def __init__(self, empty_updates: bool = False) -> None:
        super().__init__(empty_updates)
        self.rank = collectives.rank()
        self.size = collectives.size()
        self.dealt = 0
        self._first = 0  # number of the first sample of the window that is being computed
        self._kept = 0  # number of this rank's samples in it that were carried over
        self._kept_first = 0  # number of the first carried sample of all ranks
        self._skip_known = False  # whether a collective has reported that this window is skipped

    def not_compiled(self, compile: bool | str) -> str | None:
        return "compile='auto' compiles only in a single process" if compile == "auto" else None

    def check_optimizer(self, names: Iterable[str], optimizer: Any) -> None:
        """Raise if the optimizers of the ranks differ: gradients are summed in the order of the optimizer's parameters,
        and each rank runs its own optimizer.
        """
        kind = type(optimizer).__name__
        names = list(names)
        options = [
            {k: str(v) for k, v in param_group.items() if isinstance(v, PLAIN)}
            for param_group in optimizer.param_groups
        ]
        collectives.barrier()
        if not collectives.all_equal((kind, names, options)):
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

    def follow_samples(self, window: RankWindow) -> None:
        """Do nothing: `agree` makes the share larger if samples are missing."""

    def next_pass(self, window: RankWindow, samples: int | None) -> None:
        self._kept = window.samples if self.carried else 0
        self._kept_first = self.dealt
        self.dealt = -self.carried
        # The size of a new window may depend on the last update of this pass, which is not applied yet.
        open_size = samples if self.carried else None
        window.share = None if open_size is None else window.samples + self._held(open_size - self.carried)

    def positions(self, samples: int) -> Tensor:
        sizes = collectives.all_gather_rows(torch.tensor([[self._kept, samples - self._kept]])).tolist()
        turns: list[Tensor] = []
        for rank, (old, new) in enumerate(sizes):
            carried = self._turns(old, rank, self._kept_first)
            turns.append(torch.cat([carried, AFTER_CARRIED + self._turns(new, rank, max(0, self._first))]))
        return torch.searchsorted(torch.cat(turns).sort().values, turns[self.rank])

    def _turns(self, samples: int, rank: int, first: int) -> Tensor:
        """Order of a rank's samples when samples are assigned to ranks in turn, starting with sample `first`."""
        return torch.arange(samples) * self.size + (rank - first) % self.size

    # --- the end of a window ---------------------------------------------------------------------------------------

    def agree(self, window: RankWindow, samples: int | None, tail: str, ended: bool = False) -> bool:
        """Sum the window over ranks in one all-reduce. If samples are missing, ranks whose loader has not ended get a
        larger share, and all ranks call this again.
        """
        totals = self._totals(window, ended)
        self.all_ended = totals.ended == self.size
        complete = self._is_complete(totals.samples, totals.ended, samples, tail)
        if complete:
            self._kept = self._kept if self.carried else 0
            self._first = self.dealt
            self.dealt += totals.samples
            self.carried = 0
        elif self.all_ended:
            self.carried = totals.samples if tail == "carry" else 0
        else:
            share = self.share(samples or 0) if window.share is None else window.share
            missing = 0 if samples is None else samples - totals.samples
            window.share = share + self._additional(missing, ended)
        window.totals = totals if complete or tail == "drop" else None
        return complete

    def _is_complete(self, total: float, ended: float, samples: int | None, tail: str) -> bool:
        """`total`: number of samples of all ranks; `ended`: number of ended loaders."""
        if self._empty_updates and ended == 0:
            return True
        missing = 0 if samples is None else samples - total
        return total > 0 and (missing <= 0 or (ended == self.size and tail == "update"))

    def _additional(self, missing: int, ended: bool) -> int:
        """Number of samples that this rank must add of the `missing` ones; 0 if its loader has ended."""
        ended_by_rank = collectives.all_gather_object(ended)
        going = [rank for rank, has_ended in enumerate(ended_by_rank) if not has_ended]
        return 0 if ended else missing // len(going) + (going.index(self.rank) < missing % len(going))

    def _totals(self, window: RankWindow, ended: bool = False) -> WindowTotals:
        skips, samples, ended_ranks, *rest = collectives.all_reduce_scalars(
            window.failure is not None, window.samples, ended, *window.sums()
        )
        return WindowTotals(skips, int(samples), int(ended_ranks), *rest)

    def refresh_totals(self, window: RankWindow) -> None:
        assert window.totals is not None
        totals = None if self._skip_known else self._totals(window)
        window.totals = totals if totals is not None and not totals.skips else replace(window.totals, skips=1.0)
        self._skip_known = False

    def sums(self, *numbers: float | Tensor) -> list[float]:
        skips, *sums = collectives.all_reduce_scalars(0.0, *numbers)
        if skips:
            self._skip_known = True
            raise nonfinite_elsewhere()
        return sums

    def announce(self, error: Exception) -> None:
        """Send the error to the other ranks, then raise it."""
        collectives.barrier(error)

    # --- random numbers of all ranks -------------------------------------------------------------------------------

    def transform_sum(self, transform: SumFunction, gradients: list[Tensor], owned: Iterable[Tensor]) -> None:
        """Every rank uses the random state of rank 0; the other ranks then restore their own."""
        restore = RandomState().restore
        generators = _generators(transform, gradients)
        states = collectives.broadcast_object([generator.get_state() for generator in generators])
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        self._transform(transform, gradients, owned)
        if self.rank:
            restore()

    @abstractmethod
    def _transform(self, transform: SumFunction, gradients: list[Tensor], owned: Iterable[Tensor]) -> None:
        """Apply a transform of the sum to the gradients, with the current random state."""

    # --- state -----------------------------------------------------------------------------------------------------

    def check_saved(self, window: RankWindow) -> None:
        if window.open:
            raise DistributedError(
                "a step with several ranks must be saved between two updates; found an open window, of which each rank "
                "holds a part. Save after an update, or use sw.Trainer, whose checkpoints contain the parts."
            )

    def epoch_state(self) -> list[int]:
        return [self.size, self.dealt]

    def load_epoch_state(self, state: Sequence[int]) -> None:
        self.dealt = state[1] if state and state[0] == self.size else 0
        self.carried = 0

    def window_state(self, window: RankWindow) -> dict[str, Any]:
        share = None if window.share in (None, inf) else window.share
        return {
            **super().window_state(window),
            "kept": self._kept,
            "kept_first": self._kept_first,
            "samples_in_windows": self.dealt,
            "carried": self.carried,
            "share": share,
        }

    def load_window_state(self, state: dict[str, Any], window: RankWindow) -> None:
        self.dealt = state["samples_in_windows"]
        self.carried = state["carried"]
        window.share = state["share"]
        self._kept = state["kept"]
        self._kept_first = state["kept_first"]


def _generators(transform: SumFunction, gradients: Sequence[Tensor]) -> list[torch.Generator | DeviceGenerator]:
    """Random generators that the transform may draw from."""
    if transform.generator is not None:
        return [transform.generator]
    devices = sorted({g.device for g in gradients if g.device.type != "cpu"}, key=str)
    return [torch.default_generator, *map(DeviceGenerator, devices)]


def nonfinite_elsewhere() -> NonFiniteGradientError:
    """Error for a non-finite value on another rank."""
    return NonFiniteGradientError(
        "losses and gradients must be finite on every rank; found a non-finite value on another rank. Nothing was "
        "updated."
    )
