"""Base class of strategies: how the ranks of a group hold the model and sum its gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from samplewise.core.losses import LossFn
from samplewise.core.state import Buffers
from samplewise.parallel.overlap import Overlap


class SumFunction(Protocol):
    """Transform of the gradient sum, such as noise."""

    @property
    def additive(self) -> bool:
        """True if it adds values that do not depend on the sum."""

    @property
    def act(self) -> Callable[[list[Tensor]], None]:
        """Function that changes the gradients in place."""


class ParallelStrategy(ABC):
    """How ranks hold the model."""

    sharded: bool  # True if each rank holds a shard of the gradients
    copies = 1  # number of ranks that hold the same shard
    overlap: Overlap | None = None  # buckets that are summed during a backward pass; None: the strategy has none

    @property
    @abstractmethod
    def leaves(self) -> Mapping[int, tuple[str, Tensor]]:
        """id of a shard -> name of the parameter, and the whole parameter that graphs contain. Empty if graphs contain
        the optimizer's parameters themselves.
        """

    @abstractmethod
    def optimizer_parameters(self, parameters: Iterable[Tensor]) -> Iterable[Tensor]:
        """Tensors that the optimizer holds for these parameters: the parameters themselves, or shards."""

    @abstractmethod
    def wrap_loss_fn(self, loss_fn: LossFn) -> LossFn:
        """Loss function for the passes of a step."""

    def summing(self) -> AbstractContextManager[None]:
        """Context manager for backward passes that add to `.grad` of the optimizer's parameters."""
        return nullcontext()

    def begin_window(self, reached: Iterable[str] = ()) -> None:  # noqa: B027 (whole parameters need nothing)
        """Forget the gradients of the last window. `reached`: parameters that a restored window has reached."""

    def reached(self) -> list[str]:
        """Names of parameters that this rank has reached in the open window, if `.grad` does not show it."""
        return []

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of a tensor in the shape of a parameter; without sharding the tensor itself."""
        return whole

    def reshard(self) -> None:  # noqa: B027
        """Release whole parameters after the optimizer has changed the shards."""

    def recover(self) -> None:  # noqa: B027
        """Make the model usable after an exception in a forward or backward pass."""

    @abstractmethod
    def reduce_gradients(self, named: Mapping[str, Tensor], owned: Mapping[str, Tensor], buffers: Buffers) -> None:
        """Sum `.grad` over ranks and broadcast changed buffers from rank 0. Collective. `named`: leaves of the graph;
        `owned`: what the optimizer holds.
        """

    @abstractmethod
    def transform_sum(self, transform: SumFunction, gradients: list[Tensor], owned: Iterable[Tensor]) -> None:
        """Apply a transform of the sum to the gradients, in place."""
