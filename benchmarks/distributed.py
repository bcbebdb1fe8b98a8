"""Table of distributed updates of `Step`, relative to a plain DistributedDataParallel loop, interleaved.

Two ranks with gloo, one thread each.
"""

import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from catalog import TITLES, build
from tables import Options, Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workloads import Workload

import samplewise as sw

RANKS = 2
PLAIN = "plain DistributedDataParallel"
NETS = ("mlp", "encoder", "lm")

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
            PLAIN: self.plain(),
            "`Step`": self.step(),
            "`Step`, `clip`": self.step(sw.clip(self.work.clip)),
            "`Step`, `drop(quantile=0.9)`": self.step(sw.drop(quantile=0.9)),
            '`Step`, `clip`, `parallel="fsdp"`': self.sharded(sw.clip(self.work.clip)),
        }


def seconds(update: Update) -> float:
    """Time until the last rank has finished."""
    dist.barrier()
    started = time.perf_counter()
    update()
    taken = torch.tensor([time.perf_counter() - started])
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def measure(rank: int, directory: str, names: list[str], rounds: int) -> None:
    """Write median seconds of each network and entry to a JSON file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    medians = {}
    for name in names:
        torch.manual_seed(rank)
        entries = Contest(build(name)).entries()
        for update in entries.values():
            update(), update()
        times: dict[str, list[float]] = {entry: [] for entry in entries}
        for _ in range(rounds):
            for entry, update in entries.items():
                times[entry].append(seconds(update))
        medians[name] = {entry: statistics.median(series) for entry, series in times.items()}
    if rank == 0:
        Path(directory, "medians.json").write_text(json.dumps(medians))
    dist.destroy_process_group()


def distributed(options: Options) -> Iterator[Table]:
    names = options.choose(NETS)
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(measure, (directory, names, options.rounds), RANKS)
        medians = json.loads(Path(directory, "medians.json").read_text())
    plain = [f"{1e3 * medians[name][PLAIN]:.0f}" for name in names]
    rows = [
        [entry, *(f"{medians[name][entry] / medians[name][PLAIN]:.2f}" for name in names)]
        for entry in medians[names[0]]
        if entry != PLAIN
    ]
    header = ["", *(TITLES[name] for name in names)]
    caption = f"Multiples of an update with a plain DistributedDataParallel; {RANKS} ranks. {options.caption(1)}"
    title = "Distributed updates as a multiple of a plain DistributedDataParallel"
    yield Table("distributed", title, [header, *rows, [f"{PLAIN}, ms", *plain]], caption)
