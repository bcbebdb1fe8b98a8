"""Base class of strategies: how the ranks of a group hold the model and sum its gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from torch import Tensor

from samplewise.core.losses import LossFn
from samplewise.core.snapshot import Buffers
from samplewise.distributed.overlap import Overlap


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
        """Loss function whose forward pass calls no collectives."""

    @abstractmethod
    def unshard(self) -> None:
        """Gather whole parameters before a window, if other code has resharded them. Collective."""

    @abstractmethod
    def gather_parameters(self) -> None:
        """All-gather the parameters after the optimizer has changed the shards. Collective."""

    @abstractmethod
    def reduce_gradients(self, named: Mapping[str, Tensor], owned: Mapping[str, Tensor], buffers: Buffers) -> None:
        """Sum `.grad` over ranks and broadcast changed buffers from rank 0. Collective. `named`: leaves of the graph;
        `owned`: what the optimizer holds.
        """

    @abstractmethod
    def transform_sum(self, transform: SumFunction, gradients: list[Tensor], owned: Iterable[Tensor]) -> None:
        """Apply a transform of the sum to the gradients, in place."""
