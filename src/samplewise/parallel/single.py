"""Mode of one process: windows are complete when they have their samples, and nothing is exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor

from samplewise.core.state import Buffers
from samplewise.errors import DistributedError
from samplewise.parallel import collectives
from samplewise.parallel.mode import Parallel, RankWindow, SumFunction


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
        if self.outdated:
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
        transform.act(gradients)

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
