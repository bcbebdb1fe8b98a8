"""Table of the overhead of `Step` and `Trainer` over a plain PyTorch loop that does the same, interleaved.

One thread, CPU time, which depends less on other load than wall time.
"""

import copy
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

import torch
from catalog import TITLES, build
from small_nets import mlp, small_transformer
from tables import Options, Table
from timing import interleaved
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import Workload, classification

import samplewise as sw

Loop = Callable[[], None]
Batches = Iterable[tuple[Tensor, Tensor]]
CLIP = 1.0


def small(*widths: int) -> Workload:
    """MLP of these widths, with a batch of 64 samples."""
    name = f"MLP {'-'.join(map(str, widths))}"
    targets = torch.randint(widths[-1], (64,))
    return Workload(name, mlp(*widths), torch.randn(64, widths[0]), targets, classification, clip=CLIP)


class Contest:
    """Training loops with copies of one model on the same batches."""

    def __init__(self, work: Workload, updates: int):
        self.work, self.updates = work, updates
        self.batches = [(work.inputs, work.targets)] * updates

    def loss_fn(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.work.loss(model(batch[0]), batch[1])

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(self.work.model)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def textbook(self, pieces: int = 1) -> Loop:
        model, optimizer = self.fresh()

        def loop() -> None:
            for inputs, targets in self.batches:
                optimizer.zero_grad()
                for x, y in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
                    (self.loss_fn(model, (x, y)).sum() / len(inputs)).backward()
                optimizer.step()

        return loop

    def textbook_mean(self, batches: Batches | None = None) -> Loop:
        model, optimizer = self.fresh()

        def loop() -> None:
            for batch in batches or self.batches:
                optimizer.zero_grad()
                self.loss_fn(model, batch).mean().backward()
                optimizer.step()

        return loop

    def clipped_by_hand(self) -> Loop:
        model, optimizer = self.fresh()

        def loop() -> None:
            for batch in self.batches:
                g = sw.gradients(self.loss_fn(model, batch), model)
                optimizer.zero_grad()
                g.backward((self.work.clip / g.norms()).clamp(max=1) / len(g))
                optimizer.step()

        return loop

    def step(self, **options: object) -> Loop:
        model, optimizer = self.fresh()
        step = sw.Step(model, optimizer, self.loss_fn, **options)  # type: ignore[arg-type]

        def loop() -> None:
            for _ in step.over(self.batches):
                pass

        return loop

    def criterion(self) -> tuple[Loop, Loop]:
        """Step and plain loop with nn.CrossEntropyLoss()."""
        criterion = nn.CrossEntropyLoss()
        model, optimizer = self.fresh()

        def loop() -> None:
            for inputs, targets in self.batches:
                optimizer.zero_grad()
                criterion(model(inputs), targets).backward()
                optimizer.step()

        step = sw.Step(*self.fresh(), criterion)

        def ours() -> None:
            for _ in step.over(self.batches):
                pass

        return ours, loop

    def trainer(self, batches: Batches | None = None) -> Loop:
        trainer = sw.Trainer(sw.Step(*self.fresh(), self.loss_fn), device="cpu", progress=False)
        epochs = count(1)

        def loop() -> None:
            trainer.fit(batches or self.batches, epochs=next(epochs))

        return loop

    def loader(self) -> DataLoader[Any]:
        """Loader of as many batches, of samples in memory."""
        samples = (t.repeat(self.updates, *[1] * (t.dim() - 1)) for t in (self.work.inputs, self.work.targets))
        return DataLoader(TensorDataset(*samples), batch_size=len(self.work.inputs), shuffle=True)

    def pairs(self) -> dict[str, tuple[Loop, Loop]]:
        """Name -> (loop with Step or Trainer, plain loop)."""
        batch = len(self.work.inputs)
        mean = self.textbook_mean()
        clip = [sw.clip(self.work.clip)]
        return {
            "`Step`": (self.step(), mean),
            '`Step`, `on_nonfinite="ignore"`': (self.step(on_nonfinite="ignore"), mean),
            "the same, `samples=` batch": (self.step(on_nonfinite="ignore", samples=batch), mean),
            "`Step`, `nn.CrossEntropyLoss()`": self.criterion(),
            "`Step`, four microbatches": (self.step(microbatch=batch // 4), self.textbook(4)),
            "`Trainer`": (self.trainer(), mean),
            "`Trainer`, `DataLoader` in memory": (self.trainer(self.loader()), self.textbook_mean(self.loader())),
            "`Step`, clip; the loop uses `sw.gradients`": (self.step(transforms=clip), self.clipped_by_hand()),
        }


# Network, and the number of updates in a round.
NETS: dict[str, tuple[Callable[[], Workload], int]] = {
    "tiny": (lambda: small(6, 8, 3), 500),
    "small": (lambda: small(64, 256, 256, 10), 100),
    "small_transformer": (small_transformer, 20),
    "encoder": (lambda: build("encoder"), 1),
}


def step(options: Options) -> Iterator[Table]:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    columns = {}
    for name in options.choose(NETS):
        make, updates = NETS[name]
        contest = Contest(make(), updates)
        columns[TITLES.get(name, contest.work.name)] = column(contest, options.rounds)
    rows = [[row, *(cells[row] for cells in columns.values())] for row in next(iter(columns.values()))]
    title = "Step and Trainer compared with a plain loop"
    caption = f"Processor time added to an update of a plain loop, and in brackets the ratio. {options.caption(1)}"
    yield Table("step", title, [["", *columns], *rows], caption)


def column(contest: Contest, rounds: int) -> dict[str, str]:
    """Cells of one network by the name of their row."""
    cells = {}
    for name, (ours, plain) in contest.pairs().items():
        for loop in (ours, plain):
            loop()
        series = interleaved(f"{contest.work.name}, {name}", plain, {name: ours}, rounds, time.process_time)[name]
        per_update = 1e6 / contest.updates
        cells.setdefault("plain loop, µs", f"{series.plain_median * per_update:,.0f}")
        cells[name] = f"{series.difference * per_update:+,.0f} µs ({series.ratio:.3f})"
        print(f"{contest.work.name}, {name}: {cells[name]}", file=sys.stderr)
    return cells
