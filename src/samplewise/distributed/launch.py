"""Joining the process group of torchrun."""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from samplewise.core.devices import resolve
from samplewise.distributed.rendezvous import meeting_place

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # environment variables that torchrun sets


def join(device: str | torch.device = "auto", timeout: float | None = None) -> torch.device:
    """Initialize the process group if torchrun has started several processes, and return this rank's device.

    A process group that is initialized already is used as it is. With several CUDA devices, each process uses the
    device of its local rank.

    timeout: seconds after which the rendezvous and collectives fail; None for torch's default.
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
    """Return the CUDA device of the local rank for "cuda" without an index; other devices unchanged."""
    local = os.environ.get("LOCAL_RANK")
    if local is None or device != torch.device("cuda"):
        return device
    return torch.device("cuda", int(local))


def _leave() -> None:
    with suppress(Exception):  # other ranks may have exited
        dist.destroy_process_group()
