"""Several processes that train together, and the few words they exchange.

Every collective of the library is one of these: it is counted, and one that fails or hangs ends with an error that says
so. All ranks must call the same ones in the same order.

    meet(a, b)        sums of numbers, one small message; and the place where a rank tells that it failed
    together(error)   a meeting without numbers: an error of any rank is raised on all; tell(error): and goes on
    total(tensor)     the sum over ranks, in place
    totals(tensors)   the same of many, in few large messages; copies(tensors): what one rank has
    parts(tensors)    the same, of which each rank gets its rows
    gathered(tensor)  the rows of all ranks, rank by rank, however many each has
    everyone(thing)   a list of what each rank says
    told(thing)       what one rank says
    same(thing)       whether all say the same

A rank that fails between two meetings calls `together(error)`: the others hear of it where they meet next.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samplewise.errors import DistributedError

BUCKET = 25 * 2**20  # bytes of a large message
ROOM = 8  # numbers in a meeting, the first of which tells how many ranks failed: of one size, so that any two match


def active() -> bool:
    """Whether there is anybody else."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if active() else 0


def size() -> int:
    return dist.get_world_size() if active() else 1


def device(wanted: str = "cpu") -> torch.device:
    """Where the process group takes tensors from: where they are wanted, if it can."""
    config = dist.get_backend_config() if active() else "cpu:gloo"  # or "cpu:gloo,cuda:nccl", or "cuda:nccl"
    kinds = [pair.partition(":")[0] for pair in config.split(",")]
    kind = wanted if wanted in kinds else kinds[0]
    return torch.device(kind, torch.get_device_module(kind).current_device()) if kind != "cpu" else torch.device("cpu")


# --- numbers and tensors ---------------------------------------------------------------------------------------------


def total(tensor: Tensor) -> Tensor:
    """The sum over all ranks, in place."""
    if active():
        _collective("all_reduce", tensor, lambda moved: dist.all_reduce(moved))
    return tensor


def totals(tensors: Sequence[Tensor]) -> None:
    """The sums over all ranks, in place."""
    _each_bucket(tensors, "all_reduce", lambda flat: dist.all_reduce(flat, async_op=True))


def copies(tensors: Sequence[Tensor], source: int = 0) -> None:
    """What one rank has, in place."""
    _each_bucket(tensors, "broadcast", lambda flat: dist.broadcast(flat, source, async_op=True))


def _each_bucket(tensors: Sequence[Tensor], name: str, begin: Callable[[Tensor], Any]) -> None:
    """While one bucket travels, the next is put together."""
    under_way: list[Callable[[], None]] = []
    for bucket in _buckets(tensors) if active() else ():
        under_way.append(_sent(bucket, name, begin))
        if len(under_way) > 2:
            under_way.pop(0)()
    for arrived in under_way:
        arrived()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Of one type and device each, in an order that is the same everywhere."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for kind in kinds.values():
        bucket, filled = list[Tensor](), 0
        for tensor in kind:
            if bucket and filled + _bytes(tensor) > BUCKET:
                yield bucket
                bucket, filled = [], 0
            bucket.append(tensor)
            filled += _bytes(tensor)
        yield bucket


def _sent(bucket: list[Tensor], name: str, begin: Callable[[Tensor], Any]) -> Callable[[], None]:
    """Sends a bucket on its way; the function it returns waits for it."""
    flat = bucket[0].detach().view(-1) if len(bucket) == 1 and bucket[0].is_contiguous() else _flat(bucket)
    note(name, _bytes(flat))
    moved = flat.to(device(flat.device.type))
    with explained(name):
        work = begin(_handed_over(moved))

    def arrived() -> None:
        with explained(name), torch.no_grad():
            work.wait()
            if moved.data_ptr() != bucket[0].data_ptr():
                parts = moved.split([tensor.numel() for tensor in bucket])
                for tensor, part in zip(bucket, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    return arrived


def _flat(bucket: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in bucket])


def parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sums over all ranks, of which each rank gets its rows."""
    found: dict[int, Tensor] = {}
    for bucket in _buckets(tensors) if active() else ():
        table = torch.cat([_by_owner(tensor) for tensor in bucket], 1)
        note("reduce_scatter", _bytes(table))
        moved = table.to(device(table.device.type))
        mine = moved.new_empty(moved.shape[1])
        with explained("reduce_scatter"):
            dist.reduce_scatter_single(_handed_over(mine), _handed_over(moved.view(-1)))
        rows = [-(-len(tensor) // size()) for tensor in bucket]
        widths = [n * tensor[0].numel() for n, tensor in zip(rows, bucket, strict=True)]
        for tensor, n, piece in zip(bucket, rows, mine.to(table.device).split(widths), strict=True):
            own = own_rows(len(tensor))
            found[id(tensor)] = piece.view(n, *tensor.shape[1:])[: own.stop - own.start]
    return [found.get(id(tensor), tensor) for tensor in tensors]


def own_rows(rows: int) -> slice:
    """Of a tensor that is cut along its first dimension: as many for each rank, and fewer for the last."""
    each = -(-rows // size())
    start = min(rank() * each, rows)
    return slice(start, min(start + each, rows))


def _by_owner(tensor: Tensor) -> Tensor:
    """(ranks, elements of each), filled up with zeros."""
    each = -(-len(tensor) // size())
    padded = tensor.new_zeros(each * size(), *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded.view(size(), -1)


def gathered(tensor: Tensor) -> Tensor:
    """(rows of rank 0, rows of rank 1, ...): ranks may differ in dim 0."""
    return torch.cat(by_rank(tensor))


def by_rank(tensor: Tensor) -> list[Tensor]:
    """The tensors of all ranks, which may differ in dim 0."""
    if not active():
        return [tensor]
    lengths = _gather(torch.tensor([len(tensor)])).tolist()
    padded = tensor.new_zeros(max(lengths), *tensor.shape[1:])
    padded[: len(tensor)] = tensor.detach()
    rows = _gather(padded).split(max(lengths)) if max(lengths) else [padded] * len(lengths)
    return [part[:length] for part, length in zip(rows, lengths, strict=True)]


def copied(tensor: Tensor, source: int = 0) -> Tensor:
    """What one rank has, in place."""
    if active():
        _collective("broadcast", tensor, lambda moved: dist.broadcast(moved, source))
    return tensor


def _gather(tensor: Tensor) -> Tensor:
    """Of equal shapes, joined along dim 0."""
    found = tensor.new_empty(size() * len(tensor), *tensor.shape[1:])

    def gather(moved: Tensor) -> None:
        there = found.to(moved.device)
        dist.all_gather_single(_handed_over(there), moved)
        if there is not found:
            found.copy_(there)

    _collective("all_gather", tensor, gather, back=False)
    return found


# --- things ----------------------------------------------------------------------------------------------------------


def everyone(thing: Any) -> list[Any]:
    """What each rank says, by rank."""
    return [_unpickled(said) for said in by_rank(_pickled(thing))] if active() else [thing]


def told(thing: Any, source: int = 0) -> Any:
    """What rank `source` says; what the others have is of no interest."""
    if not active():
        return thing
    said = _pickled(thing if rank() == source else None)
    length = int(copied(torch.tensor([len(said)]), source))
    said = said if rank() == source else said.new_empty(length)
    return _unpickled(copied(said, source))


def same(thing: Any) -> bool:
    """Whether all ranks say the same."""
    return all(other == thing for other in everyone(thing))


def _pickled(thing: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)


def _unpickled(said: Tensor) -> Any:
    said = said.cpu().contiguous()
    return pickle.loads(ctypes.string_at(said.data_ptr(), len(said)))


# --- meetings --------------------------------------------------------------------------------------------------------


def meet(*numbers: float | Tensor, error: Exception | None = None) -> list[float]:
    """The sums of the numbers over all ranks. A rank that failed says so here, and then every rank raises: the one that
    failed its own error, the others one that names it.
    """
    if error is not None and (not active() or is_told(error)):
        raise error
    if not active():
        return [float(number) for number in numbers]
    assert len(numbers) < ROOM
    message = torch.zeros(ROOM, dtype=torch.float64, device=device())
    for place, number in enumerate((float(error is not None), *numbers)):
        message[place] = number
    failed, *sums = total(message).tolist()
    if failed:
        _raise(error)
    return sums[: len(numbers)]


def together(error: Exception | None = None) -> None:
    """Goes on when all ranks are here and well."""
    meet(error=error)


def tell(error: BaseException) -> None:
    """The other ranks hear of it where they meet next, unless they know. It is yet to be raised here."""
    if isinstance(error, Exception) and active():
        with suppress(Exception):
            together(error)


@contextmanager
def telling() -> Iterator[None]:
    """An error of one rank is everybody's. What can fail must be followed by a meeting, on all ranks."""
    try:
        yield
    except Exception as error:
        tell(error)
        raise


def _raise(error: Exception | None) -> None:
    messages = everyone(None if error is None else f"{type(error).__name__}: {error}")
    raised = error
    if raised is None:
        culprit = next(number for number, message in enumerate(messages) if message is not None)
        raised = DistributedError(
            f"every rank must get through its part; found that rank {culprit} of {len(messages)} failed, with "
            f"{_sentence(messages[culprit])} Look at the error of that rank: this one stopped because of it."
        )
    raised.__dict__["_told"] = {message.partition(":")[0] for message in messages if message is not None}
    raise raised


def _sentence(message: str) -> str:
    """The first line, with a full stop."""
    return message.partition("\n")[0].rstrip(".") + "."


def is_told(error: Exception) -> bool:
    """Whether the other ranks know of it."""
    return "_told" in error.__dict__


def failures(error: Exception) -> set[str]:
    """The kinds of the errors that ranks have told each other of when this one was raised: the same on all."""
    return error.__dict__.get("_told", set())


# --- the one place ---------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What one rank handed over, by the name of the collective: how often, and how many bytes."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)


_counting: list[Traffic] = []


@contextmanager
def counted() -> Iterator[Traffic]:
    """Counts the collectives of this rank meanwhile."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting[:] = [other for other in _counting if other is not traffic]


def note(name: str, count: int) -> None:
    """Tells whoever counts of a collective with so many bytes."""
    for traffic in _counting:
        traffic.calls[name] += 1
        traffic.bytes[name] += count


def _collective(name: str, tensor: Tensor, call: Callable[[Tensor], object], back: bool = True) -> None:
    """Runs it where the process group can, and brings the result back."""
    note(name, _bytes(tensor))
    moved = tensor.to(device(tensor.device.type))
    with explained(name):
        call(_handed_over(moved))
    if back and moved is not tensor:
        with torch.no_grad():
            tensor.copy_(moved)


_held: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def _handed_over(tensor: Tensor) -> Tensor:
    """Under another name, which lives until the process group has let go of it."""
    alias = tensor.detach()
    _held[next(_numbers)] = alias
    return alias


@atexit.register
def settle(patience: float = 5.0) -> None:
    """Until the process group has let go of all that was handed over: its threads let go a moment after a message has
    arrived, for which they need the interpreter. One that is ending would take the whole process with it.
    """
    until = time.monotonic() + patience
    while _held and time.monotonic() < until:
        time.sleep(0.001)


@contextmanager
def explained(name: str) -> Iterator[None]:
    """What a collective raises when a rank is gone, or does not come in time."""
    try:
        yield
    except RuntimeError as problem:
        raised = DistributedError(
            f"all {size()} ranks must take part in every exchange; found that {name} failed on rank {rank()}: "
            f"{_sentence(str(problem))} Look for a rank that died, left its loop early, or waits elsewhere; "
            "init_process_group(timeout=...) says how long ranks wait for each other."
        )
        raised.__dict__["_told"] = set()  # there is no use in telling others
        raise raised from problem


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
