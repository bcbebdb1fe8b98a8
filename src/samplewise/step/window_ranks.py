"""Windows of one process and of several ranks behind one interface: when a window is complete, and what the ranks
exchange before its update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from samplewise.core.state import Buffers
from samplewise.errors import DistributedError
from samplewise.parallel.group import current_group
from samplewise.parallel.strategy import SingleProcessStrategy
from samplewise.parallel.strategy_base import ParallelStrategy
from samplewise.step.config import StepConfig
from samplewise.step.parameters import TrainedParameters
from samplewise.step.window import Window
from samplewise.transforms.chain import Stage
from samplewise.transforms.stats import SampleStats
from samplewise.transforms.transform import SumTransform


class ReduceInputs(NamedTuple):
    """Objects of a step that the reduction of a window over ranks needs."""

    config: StepConfig
    trained: TrainedParameters
    buffers: Buffers
    fingerprint: Callable[[], list[float] | None]  # numbers that identify the reference directions of the window


class WindowRanks(ABC):
    """What ranks agree on and exchange for a window.

    all_ended: the loaders of all ranks have ended.
    carried: number of samples of all ranks in a window carried over from the previous loaders; 0 in a single process,
    where the window itself shows it.
    """

    strategy: ParallelStrategy
    rank = 0
    size = 1
    distributed: bool
    all_ended = False
    carried = 0

    @abstractmethod
    def check_group(self) -> None:
        """Raise if the process group does not match the step."""

    @abstractmethod
    def share(self, samples: int | None) -> float:
        """Number of samples that this rank must add to the next window; inf if a window is a batch."""

    @abstractmethod
    def complete(self, window: Window, samples: int | None, tail: str, ended: bool = False) -> bool:
        """True if the ranks together have the samples of the window. `ended`: this rank's loader has ended."""

    @abstractmethod
    def begin_exchange(
        self, window: Window, expected: int, samples: int | None, tail: str, ended: bool = False
    ) -> Callable[[Tensor], None] | None:
        """Prepare the exchange of gradients before this rank's last pass of a window, in which it will have `expected`
        samples. The result is called in the pass with each parameter whose `.grad` is complete; None: not needed. No
        effect if it was called for this window before.
        """

    @abstractmethod
    def next_pass(self, window: Window, samples: int | None) -> None:
        """Restart the numbering of samples for the next loaders; `window` may hold samples carried over."""

    @abstractmethod
    def refresh_totals(self, window: Window) -> None:
        """Sum the window over ranks again, after deferred microbatches were computed."""

    @abstractmethod
    def reduce(self, window: Window, inputs: ReduceInputs) -> None:
        """Sum the gradients of a window over ranks, into `.grad`; a non-finite value on any rank is raised, or becomes
        `window.failure`.
        """

    @abstractmethod
    def weigh(self, stage: Stage, parts: Sequence[SampleStats], owned: Tensor | None = None) -> list[SampleStats]:
        """Per-sample results of this rank with their coefficients. A transform that needs the whole window gets the
        results of all ranks. `owned`: mask of the rows that this rank sends.
        """

    @abstractmethod
    def positions(self, samples: int) -> Tensor:
        """Positions of this rank's samples in the window of all ranks."""

    @abstractmethod
    def sums(self, *numbers: float | Tensor) -> list[float]:
        """Sum of each number over ranks. Raises if a rank skips the window."""

    @abstractmethod
    def transform_sum(self, transform: SumTransform, trained: TrainedParameters) -> None:
        """Apply a transform of the sum to the gradients, with the same random numbers on all ranks."""

    @abstractmethod
    def announce(self, error: Exception) -> None:
        """Send the error of this rank to the other ranks."""

    @abstractmethod
    def check_optimizer(self, trained: TrainedParameters, optimizer: Any) -> None:
        """Raise if the optimizers of the ranks differ."""

    # --- state -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def epoch_state(self) -> list[int]:
        """State between two windows, equal on all ranks: number of ranks, number of samples since the loaders started.
        Empty for one process.
        """

    @abstractmethod
    def load_epoch_state(self, state: Sequence[int]) -> None:
        """Restore what `epoch_state` returned; the position is used only by the same number of ranks."""

    @abstractmethod
    def window_state(self, window: Window) -> dict[str, Any]:
        """State inside a window: position in the loaders and this rank's share."""

    @abstractmethod
    def load_window_state(self, state: dict[str, Any], window: Window) -> None:
        """Restore what `window_state` returned."""

    @abstractmethod
    def check_window_state(self, state: dict[str, Any]) -> None:
        """Raise unless the state was saved by the same rank of the same number of ranks."""


class LocalWindows(WindowRanks):
    """Windows of one process."""

    distributed = False

    def __init__(self, empty_updates: bool = False) -> None:
        """empty_updates: a window without samples is an update too, while the loader goes on."""
        self._empty_updates = empty_updates
        self.strategy = SingleProcessStrategy()

    def check_group(self) -> None:
        group = current_group()
        if group.distributed:
            raise DistributedError(
                f"the process group must exist before the step is created; found {group.size} ranks and a step that "
                "was created for one process. Call init_process_group() before Step(...)."
            )

    def share(self, samples: int | None) -> float:
        return inf if samples is None else samples

    def complete(self, window: Window, samples: int | None, tail: str, ended: bool = False) -> bool:
        self.all_ended = ended
        if self._empty_updates and not ended:
            return True
        if ended and tail != "update":
            return False
        has_samples = bool(window.parts or window.deferred)
        return has_samples and (ended or samples is None or window.samples >= samples)

    def begin_exchange(
        self, window: Window, expected: int, samples: int | None, tail: str, ended: bool = False
    ) -> None:
        """Do nothing: there are no other ranks."""

    def next_pass(self, window: Window, samples: int | None) -> None:
        """Do nothing: samples are not numbered over ranks."""

    def refresh_totals(self, window: Window) -> None:
        """Do nothing: sums are computed when they are read."""

    def reduce(self, window: Window, inputs: ReduceInputs) -> None:
        """Do nothing: `.grad` holds the sum."""

    def weigh(self, stage: Stage, parts: Sequence[SampleStats], owned: Tensor | None = None) -> list[SampleStats]:
        return stage.weigh(parts)

    def positions(self, samples: int) -> Tensor:
        return torch.arange(samples)

    def sums(self, *numbers: float | Tensor) -> list[float]:
        return [float(number) for number in numbers]

    def transform_sum(self, transform: SumTransform, trained: TrainedParameters) -> None:
        transform.act(trained.gradients())

    def announce(self, error: Exception) -> None:
        """Do nothing: there are no other ranks."""

    def check_optimizer(self, trained: TrainedParameters, optimizer: Any) -> None:
        """Do nothing: there is one optimizer."""

    def epoch_state(self) -> list[int]:
        return []

    def load_epoch_state(self, state: Sequence[int]) -> None:
        """Do nothing: samples are not numbered over ranks."""

    def window_state(self, window: Window) -> dict[str, Any]:
        return {"rank": 0, "size": 1}

    def load_window_state(self, state: dict[str, Any], window: Window) -> None:
        """Do nothing: the window has no share."""

    def check_window_state(self, state: dict[str, Any]) -> None:
        check_rank(state, self)


def check_rank(state: dict[str, Any], ranks: WindowRanks) -> None:
    """Raise unless the state was saved by the same rank of the same number of ranks."""
    rank = state["rank"]
    size = state["size"]
    if (rank, size) != (ranks.rank, ranks.size):
        raise DistributedError(
            "the state of an open window must be loaded by the same rank of the same number of ranks; found the state "
            f"of rank {rank} of {size} on rank {ranks.rank} of {ranks.size}. Save one file per rank."
        )
