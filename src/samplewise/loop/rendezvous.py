"""Where processes that torchrun has started find each other.

Torch's launcher keeps one store for all its restarts, in which the addresses of processes that are dead still stand: a
process that is quicker than its peers would read those, and wait for nobody. So each start takes a part of the store
that no other has used, and agrees on its name with processes that are known to be alive, since they answer.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from samplewise.errors import DistributedError

PAUSE = 0.02  # seconds between two looks
PATIENCE = timedelta(minutes=30)  # torch's own


def meeting_place(timeout: timedelta | None = None) -> tuple[Store, int, int]:
    """A store for the processes of this start alone, which of them this is, and how many there are."""
    patience = timeout or PATIENCE
    store, rank, size = next(iter(rendezvous("env://", timeout=patience)))
    name = agreed_name(PrefixStore("samplewise", store), rank, size, patience.total_seconds())
    return PrefixStore(f"samplewise/{name}", store), rank, size


def agreed_name(store: Store, rank: int, size: int, patience: float) -> str:
    """Each says hello with a word that was never said before. The first repeats what it hears until all have found
    their own words in it, and says that this is it.
    """
    own, until = uuid.uuid4().hex[:8], time.monotonic() + patience
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
        f"all {size} processes that torchrun has started must meet; found that rank {rank} has waited for "
        f"{patience:.0f} seconds. Look at the others: they may have failed before they came here."
    )


def _said(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
