"""Modes of a step: how its ranks hold the model, share windows and sum gradients. Base class, and mode of one process.

    Single      one process: windows are complete when they have their samples, and nothing is exchanged
    Ranks       several ranks                                   (ranks.py)
    ├── DDP     every rank has the whole model                  (ddp.py)
    └── FSDP    every rank has a shard of each parameter        (fsdp.py)

A step asks its mode every question about processes. All ranks must call the methods that are marked as collective, in
the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from samplewise.core.losses import LossFn
from samplewise.core.state import Buffers
from samplewise.errors import DistributedError
from samplewise.parallel import collectives


class SumFunction(Protocol):
    """Transform of the gradient sum, such as noise."""

    @property
    def generator(self) -> torch.Generator | None:
        """Random generator; None: the default ones."""

    @property
    def additive(self) -> bool:
        """True if it adds values that do not depend on the sum."""

    @property
    def apply_(self) -> Callable[[list[Tensor]], None]:
        """Function that changes the gradients in place."""


@dataclass(frozen=True)
class WindowTotals:
    """Sums of a window over all ranks."""

    skips: float  # number of ranks that found a non-finite value and may skip the update
    samples: int
    ended: int  # number of ranks whose loader has ended
    losses: float  # Σ losses
    counts: float  # Σ counts
    denominators: float
    invalid: float  # number of ranks with negative or non-finite counts


class RankWindow(Protocol):
    """This rank's part of a window."""

    samples: int
    share: float | None  # number of samples that this rank must add; None: not determined yet
    failure: Exception | None  # why the update will be skipped
    totals: WindowTotals | None

    @property
    def open(self) -> bool:
        """True if it has samples."""

    def sums(self) -> tuple[float | Tensor, float | Tensor, float | Tensor, bool]:
        """Σ losses, Σ counts, denominator, and whether a count is invalid."""


class Parallel(ABC):
    """How the ranks of a step work together. The defaults are those of ranks that hold whole parameters.

    exchanges: gradients, and results that depend on the whole window, are exchanged at the end of each window.
    sharded: each rank holds a shard of each gradient.
    passes_alone: a rank may repeat or add passes; False if passes contain collectives, which all ranks must join.
    copies: number of ranks that hold the same shard.
    all_ended: the loaders of all ranks have ended.
    carried: number of samples of all ranks in a window carried over from the previous loaders; 0 in a single process,
    where the window itself shows it.
    """

    rank = 0
    size = 1
    exchanges = True
    sharded = False
    passes_alone = True
    copies = 1
    all_ended = False
    carried = 0

    def __init__(self, empty_updates: bool = False) -> None:
        """empty_updates: a window without samples is an update too, while all loaders go on."""
        self._empty_updates = empty_updates

    # --- the model -------------------------------------------------------------------------------------------------

    @property
    def leaves(self) -> Mapping[int, tuple[str, Tensor]]:
        """id of a shard -> name of the parameter, and the whole parameter that graphs contain. Empty if graphs contain
        the optimizer's parameters themselves.
        """
        return {}

    def optimizer_parameters(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """Tensors that the optimizer holds for these parameters: the parameters themselves, or shards."""
        return parameters

    def wrap_loss_fn(self, loss_fn: LossFn) -> LossFn:
        """Loss function for the passes of a step."""
        return loss_fn

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of a tensor in the shape of a parameter; without sharding the tensor itself."""
        return whole

    def over_shards(self, numbers: Tensor) -> Tensor:
        """Sum of numbers over the shards of a gradient; without sharding the numbers themselves."""
        return numbers

    def any_shard(self, flag: bool) -> bool:
        """True if the flag is set on this rank or, with sharding, on any rank."""
        return flag

    def reshard(self) -> None:  # noqa: B027 (whole parameters need nothing)
        """Release whole parameters after the optimizer has changed the shards."""

    @abstractmethod
    def not_compiled(self, compile: bool | str) -> str | None:
        """Reason why updates are not compiled, for this `compile` argument of a step; None if they are."""

    @abstractmethod
    def check_optimizer(self, names: Iterable[str], optimizer: Any) -> None:
        """Raise if the optimizers of the ranks differ. `names`: of its parameters. Collective."""

    # --- samples of a window ---------------------------------------------------------------------------------------

    @property
    def outdated(self) -> bool:
        """True if a process group was initialized after this mode was chosen."""
        return False

    def check_group(self) -> None:  # noqa: B027
        """Raise if the process group does not match the step."""

    @abstractmethod
    def share(self, samples: int | None) -> float:
        """Number of samples that this rank must add to the next window; inf if a window is a batch."""

    @abstractmethod
    def follow_samples(self, window: RankWindow) -> None:
        """Adapt the share of an open window to another number of samples."""

    @abstractmethod
    def agree(self, window: RankWindow, samples: int | None, tail: str, ended: bool = False) -> bool:
        """True if the ranks together have the samples of the window. `ended`: this rank's loader has ended.
        Collective.
        """

    @abstractmethod
    def next_pass(self, window: RankWindow, samples: int | None) -> None:
        """Restart the numbering of samples for the next loaders; `window` may hold samples carried over."""

    @abstractmethod
    def positions(self, samples: int) -> Tensor:
        """Positions of this rank's samples in the window of all ranks. Collective."""

    # --- sums over ranks -------------------------------------------------------------------------------------------

    def begin_window(self, reached: Iterable[str] = ()) -> None:  # noqa: B027
        """Forget the gradients of the last window. `reached`: parameters that a restored window has reached."""

    def reached(self) -> list[str]:
        """Names of parameters that this rank has reached in the open window, if `.grad` does not show it."""
        return []

    def summing(self) -> AbstractContextManager[None]:
        """Context manager for backward passes that add to `.grad` of the optimizer's parameters."""
        return nullcontext()

    def begin_exchange(
        self, window: RankWindow, expected: int, samples: int | None, tail: str, ended: bool = False
    ) -> Callable[[Tensor], None] | None:
        """Prepare the exchange of gradients before this rank's last pass of a window, in which it will have `expected`
        samples. The result is called in the pass with each parameter whose `.grad` is complete; None: not needed. No
        effect if it was called for this window before.
        """
        return None

    @abstractmethod
    def refresh_totals(self, window: RankWindow) -> None:
        """Sum the window over ranks again, after deferred microbatches were computed. Collective."""

    @abstractmethod
    def reduce_gradients(self, named: Mapping[str, Tensor], owned: Mapping[str, Tensor], buffers: Buffers) -> None:
        """Sum `.grad` over ranks and broadcast changed buffers from rank 0. Collective. `named`: leaves of the graph;
        `owned`: what the optimizer holds.
        """

    def discard_sums(self) -> None:  # noqa: B027
        """Finish sums that were begun, for a window that is skipped. Collective."""

    @abstractmethod
    def sums(self, *numbers: float | Tensor) -> list[float]:
        """Sum of each number over ranks. Raises if a rank skips the window. Collective."""

    @abstractmethod
    def transform_sum(self, transform: SumFunction, gradients: list[Tensor], owned: Iterable[Tensor]) -> None:
        """Apply a transform of the sum to the gradients, in place, with the same random numbers on all ranks.
        Collective.
        """

    @abstractmethod
    def announce(self, error: Exception) -> None:
        """Send the error of this rank to the other ranks."""

    # --- state -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def check_saved(self, window: RankWindow) -> None:
        """Raise if the state of a step cannot contain this open window."""

    @abstractmethod
    def epoch_state(self) -> list[int]:
        """State between two windows, equal on all ranks: number of ranks, number of samples since the loaders started.
        Empty for one process.
        """

    @abstractmethod
    def load_epoch_state(self, state: Sequence[int]) -> None:
        """Restore what `epoch_state` returned; the position is used only by the same number of ranks."""

    def window_state(self, window: RankWindow) -> dict[str, Any]:
        """State inside a window: position in the loaders and this rank's share."""
        return {"rank": self.rank, "size": self.size}

    @abstractmethod
    def load_window_state(self, state: dict[str, Any], window: RankWindow) -> None:
        """Restore what `window_state` returned."""

    def check_window_state(self, state: dict[str, Any]) -> None:
        """Raise unless the state was saved by the same rank of the same number of ranks."""
        rank = state["rank"]
        size = state["size"]
        if (rank, size) != (self.rank, self.size):
            raise DistributedError(
                "the state of an open window must be loaded by the same rank of the same number of ranks; found the "
                f"state of rank {rank} of {size} on rank {self.rank} of {self.size}. Save one file per rank."
            )


class Single(Parallel):
    """One process: no collectives."""

    exchanges = False

    def not_compiled(self, compile: bool | str) -> str | None:
        return None

    def check_optimizer(self, names: Iterable[str], optimizer: Any) -> None:
        """Do nothing: there is one optimizer."""

    @property
    def outdated(self) -> bool:
        return collectives.size() > 1

    def check_group(self) -> None:
        if collectives.size() > 1:
            raise DistributedError(
                f"the process group must exist before the step is created; found {collectives.size()} ranks and a step "
                "that was created for one process. Call init_process_group() before Step(...)."
            )

    def share(self, samples: int | None) -> float:
        return inf if samples is None else samples

    def follow_samples(self, window: RankWindow) -> None:
        window.share = None  # follows `samples`

    def agree(self, window: RankWindow, samples: int | None, tail: str, ended: bool = False) -> bool:
        self.all_ended = ended
        if self._empty_updates and not ended:
            return True
        if ended and tail != "update":
            return False
        return window.open and (ended or samples is None or window.samples >= samples)

    def next_pass(self, window: RankWindow, samples: int | None) -> None:
        """Do nothing: samples are not numbered over ranks."""

    def positions(self, samples: int) -> Tensor:
        return torch.arange(samples)

    def refresh_totals(self, window: RankWindow) -> None:
        """Do nothing: sums are computed when they are read."""

    def reduce_gradients(self, named: Mapping[str, Tensor], owned: Mapping[str, Tensor], buffers: Buffers) -> None:
        """Do nothing: `.grad` holds the sum."""

    def sums(self, *numbers: float | Tensor) -> list[float]:
        return [float(number) for number in numbers]

    def transform_sum(self, transform: SumFunction, gradients: list[Tensor], owned: Iterable[Tensor]) -> None:
        transform.apply_(gradients)

    def announce(self, error: Exception) -> None:
        """Do nothing: there are no other ranks."""

    def check_saved(self, window: RankWindow) -> None:
        """Do nothing: the state contains the window."""

    def epoch_state(self) -> list[int]:
        return []

    def load_epoch_state(self, state: Sequence[int]) -> None:
        """Do nothing: samples are not numbered over ranks."""

    def load_window_state(self, state: dict[str, Any], window: RankWindow) -> None:
        """Do nothing: the window has no share."""
