"""Wait at exit until the process group has released the tensors of its collectives.

The threads of Gloo release the tensors of a collective shortly after its result has arrived, and need the interpreter
for this. If the interpreter begins to shut down while such a thread waits for it, Python ends the thread, which aborts
the process ("terminate called without an active exception", SIGABRT). Neither a barrier nor `destroy_process_group`
prevents this: after `fully_shard`, and as long as a DistributedDataParallel exists, torch keeps the group alive, and
with it the threads.

    handed_over(tensor)   alias of a tensor for a collective of this library, whose release is noticed on every system
    drain_pending()       called at exit: wait for the aliases, and on Linux for the threads of Gloo, which also run the
                          collectives of torch and of the caller (all-gather of `fully_shard`, `full_tensor`)
"""

from __future__ import annotations

import atexit
import itertools
import time
import weakref
from contextlib import suppress
from pathlib import Path

from torch import Tensor

GLOO_THREAD = "pt_gloo_runloop"  # torch's name for the threads that run collectives
INTERVAL = 0.01  # seconds between two looks

_held: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def handed_over(tensor: Tensor) -> Tensor:
    """Return an alias of the tensor; `drain_pending` waits until the process group has released all aliases."""
    alias = tensor.detach()
    _held[next(_numbers)] = alias
    return alias


@atexit.register
def drain_pending(patience: float = 5.0) -> None:
    """Wait up to `patience` seconds until all aliases are released and no thread of Gloo has run between two looks.

    The interpreter is free between two looks: a thread that needs it to release a tensor runs then, or is seen to be
    runnable if the machine is busy. A thread that sleeps at two looks in a row without a context switch is idle.
    """
    until = time.monotonic() + patience
    before: dict[str, str] | None = None if next(_numbers) else {}  # None: there were collectives, so look twice
    while (now := _gloo_threads()) != before or _held or any(look[0] != "S" for look in now.values()):
        if time.monotonic() > until:
            break
        before = now
        time.sleep(INTERVAL)  # torch 2.8 does not name its threads: they have at least this time


def _gloo_threads() -> dict[str, str]:
    """State and number of context switches of each thread of Gloo, by its id; empty on other systems than Linux."""
    looks: dict[str, str] = {}
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # the thread has ended
            if (task / "comm").read_text().strip() == GLOO_THREAD:
                lines = (task / "status").read_text().splitlines()
                fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
                # Kernels of sandboxes may not count the switches; the state remains.
                looks[task.name] = f"{fields['State']} {fields.get('voluntary_ctxt_switches')}"
    return looks
