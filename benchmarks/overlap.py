"""Overlap of the gradients' all-reduce with the backward pass, and its effect on the time of an update.

python benchmarks/overlap.py [--ranks 2] [--rounds 11] [--width 512] [--layers 8] [--samples 4]

Prints when rank 0 starts each bucket, and when its sum has arrived, in ms relative to the end of the backward pass;
then times of interleaved updates, as medians. The engine's own extra is the time that clipping adds to an update
without other ranks, measured while all ranks compute.
"""

import argparse
import contextlib
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import samplewise as sw
from samplewise.parallel import collectives
from samplewise.parallel.overlap import Overlap

Update = Callable[[], object]
Batch = tuple[Tensor, Tensor]
TOKENS = 64
CLIP = 10.0  # near the median of the per-sample norms


class Block(nn.Sequential):
    def __init__(self, width: int):
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def build(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 10))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).mean(1), batch[1], reduction="none")


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hide the process group, so that a step trains without other ranks."""
    with mock.patch.object(dist, "is_initialized", return_value=False):
        yield


class Contest:
    """Training loops with copies of one model; each rank has its own batch."""

    def __init__(self, model: nn.Module, batch: Batch):
        self.model = model
        self.batch = batch

    def plain(self, ddp: bool) -> Update:
        model = copy.deepcopy(self.model)
        model = DistributedDataParallel(model) if ddp else model
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def update() -> None:
            loss_fn(model, self.batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return update

    def step(self, *transforms: object) -> Update:
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = sw.Step(model, optimizer, loss_fn, transforms=transforms, recheck=False, parallel="ddp")
        return lambda: step(self.batch)

    def local_clip(self) -> Update:
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with alone():
            step = sw.Step(model, optimizer, loss_fn, transforms=[sw.clip(CLIP)], recheck=False)

        def update() -> None:
            with alone():
                step(self.batch)

        return update


class Trace:
    """Times of the buckets of an update."""

    def __init__(self) -> None:
        self.started: list[tuple[float, int]] = []
        self.arrived: dict[int, float] = {}
        self.end = 0.0

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        start, finish = collectives.start_all_reduce, Overlap.start_buckets

        def noted_start(tensor: Tensor) -> collectives.Started:
            found = start(tensor)
            if tensor.numel() > collectives.ROOM:
                number = len(self.started)
                self.started.append((time.perf_counter(), tensor.numel() * tensor.element_size()))
                found.work.get_future().then(lambda _: self.arrived.setdefault(number, time.perf_counter()))
            return found

        def noted_finish(overlap: Overlap, *arguments: Any) -> None:
            self.end = time.perf_counter()
            finish(overlap, *arguments)

        with (
            mock.patch.object(collectives, "start_all_reduce", noted_start),
            mock.patch.object(Overlap, "start_buckets", noted_finish),
        ):
            yield

    def lines(self) -> Iterator[str]:
        for number, (started, size) in enumerate(self.started):
            arrived = self.arrived.get(number, float("nan"))
            begin, end = 1e3 * (started - self.end), 1e3 * (arrived - self.end)
            yield f"bucket {number}, {size / 2**20:5.1f} MB: started at {begin:+7.1f} ms, arrived at {end:+7.1f} ms"


def seconds(update: Update) -> tuple[float, float]:
    """Time until the last rank has finished, and CPU time of all threads of this rank."""
    dist.barrier()
    started = time.perf_counter()
    spent = time.process_time()
    update()
    taken = torch.tensor([time.perf_counter() - started])
    spent = time.process_time() - spent
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item(), spent


def report(what: str, middle: dict[str, float]) -> None:
    print(what, "   ".join(f"{name} {1e3 * found:.0f} ms" for name, found in middle.items()))
    expected = middle["DDP"] + middle["alone, clip"] - middle["alone"]
    print(f"    Step / DDP {middle['Step'] / middle['DDP']:.2f}")
    print(f"    Step with clip / (DDP + the engine's own extra) {middle['Step, clip'] / expected:.2f}", flush=True)


def measure(rank: int, size: int, store: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = build(options.width, options.layers)
    torch.manual_seed(rank)
    samples = options.samples
    contest = Contest(model, (torch.randn(samples, TOKENS, options.width), torch.randint(0, 10, (samples,))))
    entries = {
        "DDP": contest.plain(ddp=True),
        "Step": contest.step(),
        "Step, clip": contest.step(sw.clip(CLIP)),
        "alone": contest.plain(ddp=False),
        "alone, clip": contest.local_clip(),
    }
    for update in entries.values():
        update(), update()
    for name in ("Step", "Step, clip"):
        trace = Trace()
        dist.barrier()
        with trace.recorded():
            entries[name]()
        if rank == 0:
            print(name, *trace.lines(), sep="\n    ", flush=True)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in entries}
    for _ in range(options.rounds):
        for name, update in entries.items():
            taken[name].append(seconds(update))
    if rank == 0:
        for k, what in enumerate(("time:", "CPU time of a rank:")):
            report(what, {name: statistics.median(pair[k] for pair in pairs) for name, pairs in taken.items()})
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(measure, (options.ranks, f"{directory}/store", options), options.ranks)


if __name__ == "__main__":
    main()
