"""Collectives on the default process group, with traffic counters and error propagation across ranks.

Every collective of the library is one of these functions. One process is a group of one rank, in which a collective
returns its argument. Otherwise each call is counted, and a collective that fails or times out raises DistributedError.
All ranks must call the same functions in the same order. A rank that fails between two collectives calls
`barrier(error)`; the other ranks raise in their next `all_reduce_scalars` or `barrier`.

    all_reduce_scalars(a, b)        sums of a few scalars in one small message; also transmits errors, and serves the
                                    requests of other ranks (`Requests`)
    all_reduce_(tensor)             sum, in place
    all_reduce_bucketed_(tensors)   sums of many tensors in large buckets, in place
    start_all_reduce(tensor)        start a sum in place; `start_all_reduce_scalars` does so for scalars
    broadcast_bucketed_(tensors)    broadcast of many tensors in large buckets, in place
    all_gather_tensors(tensor)      list of one tensor per rank; ranks may differ in the number of rows
    all_gather_object(value)        list of one picklable object per rank
    broadcast_object(value)         a picklable object of one rank
    barrier(error)                  `all_reduce_scalars` without scalars; `on_every_rank`, `on_rank_zero` and
                                    `errors_on_all_ranks` call it
"""

from __future__ import annotations

import ctypes
import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from samplewise.errors import DistributedError
from samplewise.parallel.release import handed_over
from samplewise.parallel.requests import ASKING, FAILED, Requests

Result = TypeVar("Result")

BUCKET = 25 * 2**20  # bytes of a bucket
ROOM = 8  # scalars per `all_reduce_scalars`; the first is the status. Fixed, so that any two calls match


# Newer names of torch, without which these functions have older ones.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def rank() -> int:
    """Number of this process in the process group; 0 without one."""
    return dist.get_rank() if size() > 1 else 0


def size() -> int:
    """Number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def device(wanted: str = "cpu") -> torch.device:
    """Device for tensors in collectives: of type `wanted` if a backend supports it, else of the first backend."""
    config = dist.get_backend_config()  # "cpu:gloo", "cpu:gloo,cuda:nccl" or "cuda:nccl"
    kinds = [pair.partition(":")[0] for pair in config.split(",")]
    kind = wanted if wanted in kinds else kinds[0]
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


# --- tensors ---------------------------------------------------------------------------------------------------------


def all_reduce_(tensor: Tensor) -> Tensor:
    """All-reduce (sum) of one tensor, in place."""
    if size() > 1:
        _collective("all_reduce", tensor, lambda moved: dist.all_reduce(moved))
    return tensor


def all_reduce_bucketed_(tensors: Sequence[Tensor]) -> None:
    """All-reduce (sum) of many tensors in buckets, in place."""
    _each_bucket(tensors, "all_reduce", lambda flat: dist.all_reduce(flat, async_op=True))


def broadcast_bucketed_(tensors: Sequence[Tensor], source: int = 0) -> None:
    """Broadcast of many tensors from rank `source` in buckets, in place."""
    _each_bucket(tensors, "broadcast", lambda flat: dist.broadcast(flat, source, async_op=True))


def start_all_reduce(tensor: Tensor) -> Started:
    """Start an all-reduce (sum) of one contiguous tensor, in place."""
    return _started(tensor, "all_reduce", lambda moved: dist.all_reduce(moved, async_op=True))


@dataclass(frozen=True)
class Started:
    """A collective that is under way. `tensor` is on a device that the process group supports."""

    name: str
    tensor: Tensor
    work: Any
    home: torch.device

    def done(self) -> bool:
        """True if the result has arrived."""
        return bool(self.work.is_completed())

    def result(self) -> Tensor:
        """Wait for the result, and return it on the device of the argument."""
        with explained(self.name):
            self.work.wait()
        return self.tensor.to(self.home)


def _started(tensor: Tensor, name: str, begin: Callable[[Tensor], Any]) -> Started:
    note(name, _bytes(tensor))
    moved = tensor.to(device(tensor.device.type))
    with explained(name):
        return Started(name, moved, begin(handed_over(moved)), tensor.device)


def _each_bucket(tensors: Sequence[Tensor], name: str, begin: Callable[[Tensor], Any]) -> None:
    """Run one collective per bucket; the next bucket is filled while up to two are being sent."""
    under_way: list[Callable[[], None]] = []
    for bucket in buckets(tensors) if size() > 1 else ():
        under_way.append(_sent(bucket, name, begin))
        if len(under_way) > 2:
            under_way.pop(0)()
    for arrived in under_way:
        arrived()


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors into buckets of one dtype and device each, in the same order on all ranks."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        bucket: list[Tensor] = []
        filled = 0
        for tensor in kind:
            if bucket and filled + _bytes(tensor) > BUCKET:
                yield bucket
                bucket, filled = [], 0
            bucket.append(tensor)
            filled += _bytes(tensor)
        yield bucket


def _sent(bucket: list[Tensor], name: str, begin: Callable[[Tensor], Any]) -> Callable[[], None]:
    """Start the collective for one bucket; return a function that waits for it and copies the results back."""
    flat = bucket[0].detach().view(-1) if len(bucket) == 1 and bucket[0].is_contiguous() else _flat(bucket)
    started = _started(flat, name, begin)

    def arrived() -> None:
        result = started.result()
        if result.data_ptr() != bucket[0].data_ptr():
            with torch.no_grad():
                for tensor, part in zip(bucket, result.split([tensor.numel() for tensor in bucket]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    return arrived


def _flat(bucket: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in bucket])


def all_gather_tensors(tensor: Tensor) -> list[Tensor]:
    """All-gather: list of the tensors of all ranks, which may differ in dim 0."""
    if size() == 1:
        return [tensor]
    lengths = _gather(torch.tensor([len(tensor)])).tolist()
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor.detach()
    rows = _gather(padded).split(max(lengths)) if max(lengths) else [padded] * len(lengths)
    return [part[:length] for part, length in zip(rows, lengths, strict=True)]


def all_gather_rows(tensor: Tensor) -> Tensor:
    """All-gather: rows of all ranks, ordered by rank; ranks may differ in the number of rows."""
    return torch.cat(all_gather_tensors(tensor)) if size() > 1 else tensor


def broadcast_(tensor: Tensor, source: int = 0) -> Tensor:
    """Broadcast of one tensor from rank `source`, in place."""
    if size() > 1:
        _collective("broadcast", tensor, lambda moved: dist.broadcast(moved, source))
    return tensor


def _gather(tensor: Tensor) -> Tensor:
    """All-gather of tensors of equal shapes, concatenated along dim 0."""
    gathered = tensor.new_empty(dist.get_world_size() * len(tensor), *tensor.shape[1:])

    def gather(moved: Tensor) -> None:
        there = gathered.to(moved.device)
        all_gather_single(handed_over(there), moved)
        if there is not gathered:
            gathered.copy_(there)

    _collective("all_gather", tensor, gather, back=False)
    return gathered


# --- objects ---------------------------------------------------------------------------------------------------------


def all_gather_object(value: Any) -> list[Any]:
    """All-gather of a picklable object; returns a list ordered by rank."""
    return [_unpickled(data) for data in all_gather_tensors(_pickled(value))] if size() > 1 else [value]


def sum_by_key(sums: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """Sums over ranks of the numbers under each key; the ranks may have different keys. Collective."""
    totals: dict[Hashable, float] = {}
    for of_rank in all_gather_object(sums):
        for key, number in of_rank.items():
            totals[key] = totals.get(key, 0.0) + number
    return totals


def all_equal(value: Any) -> bool:
    """True if a picklable object is equal on all ranks."""
    return all(other == value for other in all_gather_object(value)) if size() > 1 else True


def broadcast_object(value: Any, source: int = 0) -> Any:
    """Broadcast of a picklable object from rank `source`; the argument of other ranks is ignored."""
    if size() == 1:
        return value
    is_source = rank() == source
    data = _pickled(value if is_source else None)
    length = int(broadcast_(torch.tensor([len(data)]), source))
    data = data if is_source else data.new_empty(length)
    return _unpickled(broadcast_(data, source))


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    data = data.cpu().contiguous()
    return pickle.loads(ctypes.string_at(data.data_ptr(), len(data)))


# --- scalars and errors ----------------------------------------------------------------------------------------------


def all_reduce_scalars(*numbers: float | Tensor, error: Exception | None = None) -> list[float]:
    """All-reduce (sum) of scalars; also transmits errors, and serves other ranks until all ranks are here.

    If a rank passes an error, every rank raises: the failed rank its own error, the others a DistributedError that
    names the rank and contains the message. An error that the other ranks already know is raised at once.
    """
    if error is not None and (size() == 1 or is_from_another_rank(error)):
        raise error
    if size() == 1:
        return [float(number) for number in numbers]
    while True:
        scalars = start_all_reduce_scalars(*numbers, status=requests.status() + FAILED * (error is not None))
        scalars.check(error)
        if not requests.answer(int(scalars.sums[0])):
            return scalars.sums[1:]


def barrier(error: Exception | None = None) -> None:
    """Wait for all ranks; raises on all ranks if a rank passes an error."""
    all_reduce_scalars(error=error)


def announce_error(error: BaseException) -> None:
    """Send an error to the other ranks, without raising it here."""
    if isinstance(error, Exception) and size() > 1:
        with suppress(Exception):
            barrier(error)


@contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """Send an exception in the block to the other ranks, then raise it.

    The other ranks raise in their next `all_reduce_scalars`, so one must follow the block on all ranks.
    """
    try:
        yield
    except Exception as error:
        announce_error(error)
        raise


def on_every_rank(call: Callable[[], Result]) -> Result:
    """Call a function on each rank and return its result. If it raises on any rank, all ranks raise. Collective."""
    try:
        result = call()
    except Exception as error:
        barrier(error)
        raise
    barrier()
    return result


def on_rank_zero(call: Callable[[], Result]) -> Result:
    """Call a function on rank 0 and return its result on all ranks. If it raises, all ranks raise. Collective."""
    result = on_every_rank(call if rank() == 0 else lambda: None)
    return broadcast_object(result)


def start_all_reduce_scalars(*numbers: float | Tensor, status: int = 0) -> Scalars:
    """Start an all-reduce (sum) of the status of this rank (see `Requests`) and of scalars, which matches
    `all_reduce_scalars` of other ranks.
    """
    assert len(numbers) < ROOM
    message = torch.zeros(ROOM, dtype=torch.float64, device=device())
    for place, number in enumerate((status, *numbers)):
        message[place] = number
    return Scalars(start_all_reduce(message), len(numbers))


@dataclass(frozen=True)
class Scalars:
    """Sums of the status and of `count` scalars that are under way."""

    started: Started
    count: int

    @cached_property
    def sums(self) -> list[float]:
        """The sum of the status, then the other sums; waits for them."""
        sums: list[float] = self.started.result().tolist()
        return sums[: 1 + self.count]

    def check(self, error: Exception | None) -> None:
        """Raise if a rank has failed. `error`: that of this rank. Collective if it raises."""
        if self.sums[0] % ASKING:
            requests.reset()
            _raise(error)


class _Messages:
    """Messages of `Requests`."""

    def size(self) -> int:
        return dist.get_world_size()

    def sum_scalars(self, *numbers: int) -> list[int]:
        return [int(total) for total in start_all_reduce_scalars(*numbers[1:], status=numbers[0]).sums]

    def gather(self, mine: int) -> list[int]:
        return _gather(torch.tensor([mine], device=device())).tolist()

    def any_rank(self, flags: list[bool]) -> list[bool]:
        return [count > 0 for count in all_reduce_(torch.tensor(flags, device=device()).int()).tolist()]

    def raise_error(self) -> NoReturn:
        _raise(None)


requests = Requests(_Messages())  # of this process


def _raise(error: Exception | None) -> NoReturn:
    messages = all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    raised = error
    if raised is None:
        culprit = next(number for number, message in enumerate(messages) if message is not None)
        raised = DistributedError(
            f"rank {culprit} of {len(messages)} failed: {_sentence(messages[culprit])} This rank stopped because of "
            f"it. See the traceback of rank {culprit}."
        )
    raised.__dict__["_announced"] = {message.partition(":")[0] for message in messages if message is not None}
    raise raised


def _sentence(message: str) -> str:
    """First line of the message, ending with a period."""
    return message.partition("\n")[0].rstrip(".") + "."


def is_from_another_rank(error: Exception) -> bool:
    """Test whether the other ranks know this error."""
    return "_announced" in error.__dict__


def failures(error: Exception) -> set[str]:
    """Type names of the errors that ranks transmitted when this one was raised; equal on all ranks."""
    return error.__dict__.get("_announced", set())


# --- traffic counters, calls of collectives --------------------------------------------------------------------------


@dataclass
class Traffic:
    """Collectives of this rank: number of calls and bytes sent, by name of the collective."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)


_counting: list[Traffic] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count the collectives of this rank inside the block."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting[:] = [other for other in _counting if other is not traffic]


def note(name: str, count: int) -> None:
    """Add one collective of `count` bytes to all open traffic counters."""
    for traffic in _counting:
        traffic.calls[name] += 1
        traffic.bytes[name] += count


def _collective(name: str, tensor: Tensor, call: Callable[[Tensor], object], back: bool = True) -> None:
    """Run a collective on a device that the process group supports; copy the result back if `back`."""
    note(name, _bytes(tensor))
    moved = tensor.to(device(tensor.device.type))
    with explained(name):
        call(handed_over(moved))
    if back and moved is not tensor:
        with torch.no_grad():
            tensor.copy_(moved)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """Convert the RuntimeError of a collective (a rank died or timed out) to DistributedError."""
    try:
        yield
    except RuntimeError as problem:
        raised = DistributedError(
            f"all {dist.get_world_size()} ranks must take part in every collective; found that {name} failed on rank "
            f"{dist.get_rank()}: {_sentence(str(problem))} Look for a rank that died, left its loop early, or is "
            "blocked in another call; init_process_group(timeout=...) sets how long ranks wait for each other."
        )
        raised.__dict__["_announced"] = set()  # the others cannot be reached
        raise raised from problem


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
