"""python leaving.py RANK STORE MODEL END: a rank that ends right after a collective whose tensor is released late.

MODEL: "none"; "ddp" or "wrapped" (DistributedDataParallel); "fsdp" or "sharded" (fully_shard)
END: "exits", "destroys" the process group, "fails", "is interrupted"; or "starves": the threads of the process group
     have the lowest priority, and nothing else delays the release
"""

import atexit
import ctypes
import os
import signal
import sys

import torch
import torch.distributed as dist
from spread_models import flat, loss_fn, net
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import samplewise as sw

SAMPLES = 37
RELEASE = 300_000  # microseconds for which the thread of the process group waits for the interpreter


def trained(how, rank):
    """The model after two updates, each of 37 samples over the ranks."""
    model = DistributedDataParallel(net()) if how == "wrapped" else net()
    if how == "sharded":
        fully_shard(model)
    parallel = {"ddp": "ddp", "fsdp": sw.parallel.fsdp([nn.Linear])}.get(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = sw.Step(model, optimizer, loss_fn, SAMPLES, transforms=[sw.clip(0.5)], parallel=parallel)
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = x[rank::2], x[rank::2, :3].argmax(1)
    step.run([batch, batch])
    return model


def starve():
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            os.setpriority(os.PRIO_PROCESS, int(thread), 19)


def release_late():
    """Collective of the caller that is complete, but whose thread needs the interpreter to release the tensor. The main
    thread does not let go of it before it waits for something.
    """
    dist.barrier()
    sys.setswitchinterval(1000)
    dist.all_reduce(torch.zeros(3), async_op=True)
    ctypes.PyDLL(None).usleep(RELEASE)


def main(rank, store, how, end):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = None if how == "none" else trained(how, rank)
    if end == "starves":
        starve()
    if model is not None:
        flat(model)
    if end in ("destroys", "starves"):
        dist.barrier() if end == "starves" else release_late()
        dist.destroy_process_group()
    else:
        atexit.register(release_late)  # after the traceback is printed, which lets go of the interpreter
    if end == "exits":
        sys.exit(0)
    if end == "fails":
        raise ValueError("a bad batch")
    if end == "is interrupted":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
        signal.raise_signal(signal.SIGINT)
    return model


if __name__ == "__main__":
    kept = main(int(sys.argv[1]), *sys.argv[2:])  # to the end of the process, as in a script
