"""Several processes that torchrun has started: joining them, and what the first does for all."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from samplewise import ranks
from samplewise.loop.devices import resolve
from samplewise.loop.rendezvous import meeting_place

Result = TypeVar("Result")
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells each process


def join(device: str | torch.device = "auto", timeout: float | None = None) -> torch.device:
    """Joins the other processes, if torchrun has started some and nobody has joined them yet, and returns this one's
    device: of several accelerators the one with its local rank. `timeout`: seconds that ranks wait for each other.
    """
    found = _own(resolve(device))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and all(name in os.environ for name in LAUNCHED):
        if found.type == "cuda" and found.index is not None:
            torch.cuda.set_device(found)
        if not dist.is_initialized():
            patience = None if timeout is None else timedelta(seconds=timeout)
            store, rank, size = meeting_place(patience)
            backend = "cpu:gloo,cuda:nccl" if found.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)
            atexit.register(_leave)
    return found


def _own(device: torch.device) -> torch.device:
    """Several processes on one machine take one accelerator each."""
    local = os.environ.get("LOCAL_RANK")
    if local is None or device != torch.device("cuda"):
        return device
    return torch.device("cuda", int(local))


def _leave() -> None:
    with suppress(Exception):  # the others may be gone
        dist.destroy_process_group()


def by_first(call: Callable[[], Result]) -> Result:
    """What rank 0 gets from the call, which nobody else makes. Its error is everybody's."""
    if not ranks.active():
        return call()
    found = by_all(call if ranks.rank() == 0 else lambda: None)
    return ranks.told(found)


def by_all(call: Callable[[], Result]) -> Result:
    """What this rank gets from the call, once all have made it. An error of one is everybody's."""
    try:
        found = call()
    except Exception as error:
        ranks.together(error)
        raise
    ranks.together()
    return found
