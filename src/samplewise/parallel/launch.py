"""Initialization of the process group of torchrun, safe across restarts.

torchrun keeps one store for all its restarts, which still contains the addresses of dead processes: a process that is
faster than its peers would read those and wait for processes that no longer exist. So each start uses a new prefix in
the store. The processes agree on the prefix by a handshake, which shows that all of them are alive.
"""

from __future__ import annotations

import atexit
import os
import time
import uuid
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from samplewise.core.memory import accelerator
from samplewise.errors import DistributedError

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # environment variables that torchrun sets
ONE_DEVICE = ("cpu", "mps")  # types of which a machine has one device, without a communication library of its own
POLL_INTERVAL = 0.02  # seconds between two reads of the store
DEFAULT_TIMEOUT = timedelta(minutes=30)  # torch's default


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
    own = _of_local_rank(resolve_device(device))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and all(name in os.environ for name in LAUNCHED):
        if own.type not in ONE_DEVICE:
            torch.get_device_module(own).set_device(own)
        if not dist.is_initialized():
            limit = None if timeout is None else timedelta(seconds=timeout)
            store, rank, world_size = rendezvous_store(limit or DEFAULT_TIMEOUT)
            dist.init_process_group(_backend(own), store=store, rank=rank, world_size=world_size, timeout=limit)
            atexit.register(_destroy_process_group)
    return own


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
