"""Time of a distributed `Step` relative to a plain DistributedDataParallel loop, interleaved on this machine.

python benchmarks/distributed.py [--ranks 2] [--rounds 15] [--workloads encoder,lm,mlp]
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing
from catalog import build
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workloads import Workload

import samplewise as sw

Update = Callable[[], object]


class Contest:
    """Training loops with copies of one model; each rank has its own batch."""

    def __init__(self, work: Workload):
        self.work = work

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = DistributedDataParallel(copy.deepcopy(self.work.model))
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def loss_fn(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.work.loss(model(batch[0]), batch[1])

    def plain(self) -> Update:
        model, optimizer = self.fresh()

        def update() -> None:
            self.loss_fn(model, (self.work.inputs, self.work.targets)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return update

    def step(self, *transforms: object) -> Update:
        step = sw.Step(*self.fresh(), self.loss_fn, transforms=transforms, recheck=False)
        return lambda: step((self.work.inputs, self.work.targets))

    def sharded(self, *transforms: object) -> Update:
        model = copy.deepcopy(self.work.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        step = sw.Step(model, optimizer, self.loss_fn, transforms=transforms, recheck=False, parallel="fsdp")
        return lambda: step((self.work.inputs, self.work.targets))

    def entries(self) -> dict[str, Update]:
        return {
            "DDP": self.plain(),
            "Step": self.step(),
            "Step, clip": self.step(sw.clip(self.work.clip)),
            "Step, drop a quantile": self.step(sw.drop(quantile=0.9)),
            "Step, clip, fsdp": self.sharded(sw.clip(self.work.clip)),
        }


def seconds(update: Update) -> float:
    """Time until the last rank has finished."""
    dist.barrier()
    started = time.perf_counter()
    update()
    taken = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def measure(rank: int, size: int, store: str, names: list[str], rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for name in names:
        torch.manual_seed(rank)
        entries = Contest(build(name)).entries()
        for update in entries.values():
            update(), update()
        taken: dict[str, list[float]] = {entry: [] for entry in entries}
        for _ in range(rounds):
            for entry, update in entries.items():
                taken[entry].append(seconds(update))
        middle = {entry: statistics.median(times) for entry, times in taken.items()}
        if rank == 0:
            ratios = "   ".join(f"{entry} {middle[entry] / middle['DDP']:.2f}" for entry in entries if entry != "DDP")
            print(f"{name:8} DDP {1e3 * middle['DDP']:.0f} ms   as a multiple of that: {ratios}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--workloads", default="encoder,lm,mlp")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        arguments = options.ranks, f"{directory}/store", options.workloads.split(","), options.rounds
        torch.multiprocessing.spawn(measure, arguments, options.ranks)


if __name__ == "__main__":
    main()
