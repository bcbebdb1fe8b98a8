"""Rendezvous of the processes that torchrun has started, safe across restarts.

torchrun keeps one store for all its restarts, which still contains the addresses of dead processes: a process that is
faster than its peers would read those and wait for processes that no longer exist. So each start uses a new prefix in
the store. The processes agree on the prefix by a handshake, which shows that all of them are alive.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from samplewise.errors import DistributedError

PAUSE = 0.02  # seconds between two reads of the store
PATIENCE = timedelta(minutes=30)  # torch's default


def meeting_place(timeout: timedelta | None = None) -> tuple[Store, int, int]:
    """Return (store for this start only, rank, number of ranks).

    timeout: maximum duration of the rendezvous, 30 minutes by default.
    """
    patience = timeout or PATIENCE
    store, rank, size = next(iter(rendezvous("env://", timeout=patience)))
    name = agreed_name(PrefixStore("samplewise", store), rank, size, patience.total_seconds())
    return PrefixStore(f"samplewise/{name}", store), rank, size


def agreed_name(store: Store, rank: int, size: int, patience: float) -> str:
    """Return a name that the processes of this start agree on.

    Each rank writes a random id. Rank 0 publishes the list of all ids until every rank has confirmed that its own id is
    in it, and then marks the list as settled. `patience` is the time limit in seconds.
    """
    own = uuid.uuid4().hex[:8]
    until = time.monotonic() + patience
    store.set(f"hello/{rank}", own)
    while time.monotonic() < until:
        if rank == 0:
            store.set("heard", "-".join(_said(store, f"hello/{other}") for other in range(size)))
        heard = _said(store, "heard")
        if heard.split("-")[rank : rank + 1] == [own] and heard.count("-") == size - 1:
            store.set(f"{heard}/{rank}", "here")
            if rank == 0 and all(store.check([f"{heard}/{other}"]) for other in range(size)):
                store.set(f"{heard}/settled", "yes")
            if store.check([f"{heard}/settled"]):
                return heard
        time.sleep(PAUSE)
    raise DistributedError(
        f"all {size} processes that torchrun has started must join the rendezvous; found that rank {rank} has waited "
        f"for {patience:.0f} seconds. Check the logs of the other ranks: they may have failed earlier."
    )


def _said(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
