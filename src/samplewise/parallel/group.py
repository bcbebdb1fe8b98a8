"""Process groups: `SingleProcess`, whose collectives are no-ops, and `ProcessGroup`, the default group of torch.

`current_group()` is never None, so that callers need no branch for one process. All ranks must call the same
collectives in the same order. A rank that fails between two collectives calls `barrier(error)`; the other ranks raise
in their next `all_reduce_scalars` or `barrier`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from samplewise.parallel import collectives

Result = TypeVar("Result")


class SingleProcess:
    """Group of one process: every collective returns its input."""

    rank = 0
    size = 1
    distributed = False  # True if there are several ranks

    def device(self, wanted: str = "cpu") -> torch.device:
        """Device for tensors in collectives."""
        return torch.device("cpu")

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        """Sum of one tensor over ranks, in place."""
        return tensor

    def all_reduce_bucketed_(self, tensors: Sequence[Tensor]) -> None:
        """Sums of many tensors over ranks, in place."""

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Broadcast of one tensor from rank `source`, in place."""
        return tensor

    def broadcast_bucketed_(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Broadcast of many tensors from rank `source`, in place."""

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        """Rows of all ranks, ordered by rank; ranks may differ in the number of rows."""
        return tensor

    def all_gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """One tensor per rank; ranks may differ in the number of rows."""
        return [tensor]

    def all_gather_object(self, value: Any) -> list[Any]:
        """One picklable object per rank."""
        return [value]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Picklable object of rank `source`."""
        return value

    def all_equal(self, value: Any) -> bool:
        """True if the object is equal on all ranks."""
        return True

    def all_reduce_scalars(self, *numbers: float | Tensor, error: Exception | None = None) -> list[float]:
        """Sums of a few scalars over ranks; raises on all ranks if a rank passes an error."""
        if error is not None:
            raise error
        return [float(number) for number in numbers]

    def barrier(self, error: Exception | None = None) -> None:
        """Wait for all ranks; raises on all ranks if a rank passes an error."""
        if error is not None:
            raise error

    def announce_error(self, error: BaseException) -> None:
        """Send an error to the other ranks, without raising it here."""


class ProcessGroup:
    """The default process group of torch.distributed, with several ranks."""

    distributed = True

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    device = staticmethod(collectives.device)
    all_reduce_ = staticmethod(collectives.all_reduce_)
    all_reduce_bucketed_ = staticmethod(collectives.all_reduce_bucketed_)
    broadcast_ = staticmethod(collectives.broadcast_)
    broadcast_bucketed_ = staticmethod(collectives.broadcast_bucketed_)
    all_gather_tensors = staticmethod(collectives.all_gather_tensors)
    all_gather_object = staticmethod(collectives.all_gather_object)
    broadcast_object = staticmethod(collectives.broadcast_object)
    all_reduce_scalars = staticmethod(collectives.all_reduce_scalars)

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        return torch.cat(self.all_gather_tensors(tensor))

    def all_equal(self, value: Any) -> bool:
        return all(other == value for other in self.all_gather_object(value))

    def barrier(self, error: Exception | None = None) -> None:
        self.all_reduce_scalars(error=error)

    def announce_error(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            with suppress(Exception):
                self.barrier(error)


Group = SingleProcess | ProcessGroup
SINGLE_PROCESS = SingleProcess()
PROCESS_GROUP = ProcessGroup()


def current_group() -> Group:
    """Group of this process: `ProcessGroup` if torch.distributed is initialized with several ranks."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return PROCESS_GROUP
    return SINGLE_PROCESS


@contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """Send an exception in the block to the other ranks, then raise it.

    The other ranks raise in their next `all_reduce_scalars`, so one must follow the block on all ranks.
    """
    try:
        yield
    except Exception as error:
        current_group().announce_error(error)
        raise


def on_every_rank(call: Callable[[], Result]) -> Result:
    """Call a function on each rank and return its result. If it raises on any rank, all ranks raise. Collective."""
    group = current_group()
    try:
        result = call()
    except Exception as error:
        group.barrier(error)
        raise
    group.barrier()
    return result


def on_rank_zero(call: Callable[[], Result]) -> Result:
    """Call a function on rank 0 and return its result on all ranks. If it raises, all ranks raise. Collective."""
    group = current_group()
    result = on_every_rank(call if group.rank == 0 else lambda: None)
    return group.broadcast_object(result)
