"""Start of the ranks: the process group of torchrun, safe across restarts, and the mode of a step.

torchrun keeps one store for all its restarts, which still contains the addresses of dead processes: a process that is
faster than its peers would read those and wait for processes that no longer exist. So each start uses a new prefix in
the store. The processes agree on the prefix by a handshake, which shows that all of them are alive.
"""

from __future__ import annotations

import atexit
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from samplewise.core.memory import accelerator
from samplewise.errors import DistributedError
from samplewise.parallel import collectives
from samplewise.parallel.ddp import DDP
from samplewise.parallel.fsdp import FSDP, FSDPConfig, fsdp, shard
from samplewise.parallel.mode import Parallel, Single
from samplewise.parallel.sharded_parameters import is_sharded

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # environment variables that torchrun sets
ONE_DEVICE = ("cpu", "mps")  # types of which a machine has one device, without a communication library of its own
POLL_INTERVAL = 0.02  # seconds between two reads of the store
DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's default

ParallelArgument = Literal["ddp", "fsdp"] | FSDPConfig | None  # of Step


def join(device: str | torch.device = "auto", timeout: float | None = None) -> torch.device:
    """Initialize the process group if torchrun has started several processes, and return this rank's device.

    A process group that is initialized already is used as it is. With several accelerators, each process uses
    the one of its local rank. `sw.Trainer`, and `sw.Step` with `parallel`, call
    this function with the default timeout, if you have not called it.

    device: as in `sw.Trainer`
    timeout: seconds after which the rendezvous and each collective fail; None (default) for 30 minutes
    """
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, or None; found {timeout!r}.")
    target = _of_local_rank(resolve_device(device))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and all(name in os.environ for name in LAUNCHED):
        if target.type not in ONE_DEVICE:
            torch.get_device_module(target).set_device(target)
        if not dist.is_initialized():
            limit = None if timeout is None else timedelta(seconds=timeout)
            store, rank, world_size = rendezvous_store(limit or DEFAULT_TIMEOUT)
            dist.init_process_group(_backend(target), store=store, rank=rank, world_size=world_size, timeout=limit)
            atexit.register(_destroy_process_group)
    return target


def resolve_device(device: str | torch.device) -> torch.device:
    """Return a torch.device. "auto" is the accelerator (CUDA, XPU, MPS, …) if there is one, else the CPU."""
    if device != "auto":
        return torch.device(device)
    return accelerator() or torch.device("cpu")


def _of_local_rank(device: torch.device) -> torch.device:
    """Return the device of the local rank for an accelerator without an index, such as "cuda"; others unchanged."""
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None or device != torch.device(device.type) or device.type in ONE_DEVICE:
        return device
    return torch.device(device.type, int(local_rank))


def _backend(device: torch.device) -> str:
    """Return the backend of the process group: Gloo for the CPU, and torch's default one for the accelerator."""
    if device.type in ONE_DEVICE:
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


def _destroy_process_group() -> None:
    with suppress(Exception):  # other ranks may have exited
        dist.destroy_process_group()


def rendezvous_store(timeout: timedelta) -> tuple[Store, int, int]:
    """Return (store that only the processes of this start use, rank, world size)."""
    store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
    prefix = agree_on_prefix(PrefixStore("samplewise", store), rank, world_size, timeout.total_seconds())
    return PrefixStore(f"samplewise/{prefix}", store), rank, world_size


def agree_on_prefix(store: Store, rank: int, world_size: int, timeout: float) -> str:
    """Return a prefix that is the same for all processes of this start, and was not used by an earlier start.

    Each rank writes a random id. Rank 0 publishes the list of all ids until every rank has confirmed that its own id is
    in it, and then marks the list as final. `timeout` is in seconds.
    """
    own_id = uuid.uuid4().hex[:8]
    deadline = time.monotonic() + timeout
    store.set(f"id/{rank}", own_id)
    while time.monotonic() < deadline:
        if rank == 0:
            store.set("ids", "-".join(_read(store, f"id/{other}") for other in range(world_size)))
        ids = _read(store, "ids")
        if ids.split("-")[rank : rank + 1] == [own_id] and ids.count("-") == world_size - 1:
            store.set(f"{ids}/{rank}", "confirmed")
            if rank == 0 and all(store.check([f"{ids}/{other}"]) for other in range(world_size)):
                store.set(f"{ids}/final", "yes")
            if store.check([f"{ids}/final"]):
                return ids
        time.sleep(POLL_INTERVAL)
    raise DistributedError(
        f"all {world_size} processes that torchrun has started must join the rendezvous; found that rank {rank} has "
        f"waited for {timeout:.0f} seconds. Check the logs of the other ranks: they may have failed earlier."
    )


def _read(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


# --- the mode of a step ----------------------------------------------------------------------------------------------


def join_ranks(model: nn.Module, parallel: ParallelArgument) -> None:
    """Check the `parallel` argument of a step. If it is given, join the process group of torchrun."""
    if not (parallel in (None, "ddp", "fsdp") or isinstance(parallel, FSDPConfig)):
        raise ValueError(f"parallel must be None, 'ddp', 'fsdp' or sw.parallel.fsdp(policy); found {parallel!r}.")
    if parallel is not None and not dist.is_initialized():
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        join("auto" if device.type == "cpu" else device)  # a model on the CPU may be moved to an accelerator later


def select_mode(
    model: nn.Module,
    parallel: ParallelArgument,
    modules: Sequence[nn.Module],
    optimizer: Any,
    settings: Mapping[str, Any],
    before_sums: Callable[[], None],
    empty_updates: bool,
) -> Parallel:
    """Mode of a step with this model. "fsdp" shards the model and replaces the optimizer's parameters by shards.
    Collective; raises if the ranks have different settings. `before_sums`, `empty_updates`: see `FSDP` and `Parallel`.
    """
    collectives.barrier()
    name = _name(model, parallel)
    settings = {**settings, "parallel": name}
    if not collectives.all_equal({name: repr(value) for name, value in settings.items()}):
        raise DistributedError(
            f"all ranks must create the same step; found other settings than on this rank, {settings}. Pass the same "
            "arguments to Step(...) on every rank."
        )
    if (name, parallel) == ("sharded", "ddp") or (name == "DistributedDataParallel" and parallel not in (None, "ddp")):
        kind = "a model that fully_shard has sharded" if name == "sharded" else "a DistributedDataParallel"
        raise DistributedError(
            f"parallel must be None for a model that is already distributed; found parallel={parallel!r} and {kind}. "
            "Leave out `parallel`, or pass the plain model."
        )
    if name == "sharded":
        return FSDP(model, modules, before_sums, empty_updates)
    ranks = collectives.size()
    if ranks == 1:
        return Single(empty_updates)
    wrapped = model if isinstance(model, DistributedDataParallel) else None
    if wrapped is None and parallel is None:
        raise DistributedError(
            f"ranks that train together must share a model; found {ranks} ranks and parallel=None. "
            "Use Step(..., parallel='ddp'), or pass a DistributedDataParallel."
        )
    if wrapped is not None or parallel == "ddp":
        return DDP(wrapped, modules, empty_updates)
    shard(model, modules, (parallel if isinstance(parallel, FSDPConfig) else fsdp()).policy, optimizer)
    return FSDP(model, modules, before_sums, empty_updates)


def _name(model: nn.Module, parallel: ParallelArgument) -> str:
    """Name of the mode, for comparison between ranks."""
    if is_sharded(model):
        return "sharded"
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    return "fsdp" if isinstance(parallel, FSDPConfig) else str(parallel)
