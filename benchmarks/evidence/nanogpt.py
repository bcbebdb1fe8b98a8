"""nanoGPT's setting for the CPU, with a plain loop, with sw.Step, with a ledger, with per-sample clipping, and killed.

    python benchmarks/evidence/nanogpt.py tinyshakespeare.txt [--write docs/evidence.md]

The text (1,115,394 characters) is data/tinyshakespeare/input.txt of the repository karpathy/char-rnn. Its first 90 %
are trained on. The setting is that of nanoGPT's README for a CPU: 4 layers, 4 heads, width 128, 64 characters of
context, batches of 12, 2,000 updates, AdamW (0.9, 0.99) with weight decay 0.1 for matrices, learning rate 1e-3 after
100 updates of warmup and 1e-4 at the end of a cosine, gradient norm at most 1, no dropout. Published: validation loss
1.88, in about 3 minutes.

Here the validation loss is that of all 1,742 windows of the last 10 %; the published one is an estimate from 240.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from record import Record, Table, Values, machine, parser, show
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

import samplewise as sw

LAYERS, HEADS, WIDTH, CONTEXT = 4, 4, 128, 64
BATCH, UPDATES, WARMUP = 12, 2000, 100
RATE, LOWEST_RATE, BETAS, DECAY, BOUND = 1e-3, 1e-4, (0.9, 0.99), 0.1, 1.0
SEED = 1337
KILLED_AT, CHECKPOINT = 1130, "200up"  # the last checkpoint before the kill is that of update 1,000
ROUNDS, ROUND = 15, 20  # of the comparison of times: rounds, updates of each loop in a round

Batch = tuple[Tensor, Tensor, Tensor]  # characters, next characters, positions in the text

# --- model and data ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm2 = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1))  # (B, T, 3, heads, width of a head)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        self.head.weight = self.characters.weight
        for name, p in self.named_parameters():
            if p.ndim == 2:  # outputs that are added to the residual stream start smaller, as in GPT-2
                added = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if added else 0.02)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.characters(codes) + self.positions(torch.arange(codes.shape[1]))
        return self.head(self.norm(self.blocks(x)))


class Windows(Dataset[Batch]):
    def __init__(self, codes: Tensor, starts: Tensor) -> None:
        self.codes = codes
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> Batch:
        start = int(self.starts[i])
        window = self.codes[start : start + CONTEXT + 1]
        return window[:-1], window[1:], self.starts[i]


def codes_of(text: Path) -> Tensor:
    kinds = sorted(set(text.read_text()))
    numbers = {kind: number for number, kind in enumerate(kinds)}
    return torch.tensor([numbers[kind] for kind in text.read_text()])


def losses_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean loss of each window."""
    codes, targets, _ = batch
    return F.cross_entropy(model(codes).transpose(1, 2), targets, reduction="none").mean(1)


# --- loops ------------------------------------------------------------------------------------------------------------


@dataclass
class Setup:
    """Model, optimizer, schedule and batches: the same for every loop."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    loader: Iterable[Batch]
    validation: Tensor

    @classmethod
    def of(cls, text: Path) -> Setup:
        codes = codes_of(text)
        torch.manual_seed(SEED)
        model = GPT(int(codes.max()) + 1)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        vectors = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS)
        training, validation = codes.tensor_split([int(0.9 * len(codes))])
        generator = torch.Generator().manual_seed(SEED)
        starts = torch.randint(len(training) - CONTEXT, (UPDATES * BATCH,), generator=generator)
        loader = DataLoader(Windows(training, starts), batch_size=BATCH)
        return cls(model, optimizer, LambdaLR(optimizer, rate_of), loader, validation)

    def step(self, **options: object) -> sw.Step:
        options = {"max_grad_norm": BOUND} | options
        return sw.Step(self.model, self.optimizer, losses_of, scheduler=self.scheduler, **options)

    def validation_losses(self) -> Tensor:
        starts = torch.arange(0, len(self.validation) - CONTEXT, CONTEXT)
        loader = DataLoader(Windows(self.validation, starts), batch_size=64)
        with torch.no_grad():
            return torch.cat([losses_of(self.model, batch) for batch in loader])

    def load(self, run: Path) -> Setup:
        self.model.load_state_dict(torch.load(run / "model.pt"))
        return self


def rate_of(update: int) -> float:
    """Learning rate as a multiple of RATE."""
    if update < WARMUP:
        return (update + 1) / (WARMUP + 1)
    cosine = (1 + math.cos(math.pi * (update - WARMUP) / (UPDATES - WARMUP))) / 2
    return (LOWEST_RATE + cosine * (RATE - LOWEST_RATE)) / RATE


def plain(setup: Setup, directory: Path) -> Iterator[None]:
    # In the order of the optimizer, as in a step: in another order, the norm of all of them is rounded differently.
    parameters = [p for group in setup.optimizer.param_groups for p in group["params"]]
    for batch in setup.loader:
        loss = losses_of(setup.model, batch).mean()
        setup.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, BOUND)
        setup.optimizer.step()
        setup.scheduler.step()
        yield


def step(setup: Setup, directory: Path) -> Iterator[None]:
    for _ in setup.step().over(setup.loader):
        yield


def ledger(setup: Setup, directory: Path) -> Iterator[None]:
    step = setup.step()
    ledger = sw.Ledger(directory, id=2)
    ledger.listen(step)
    for update in step.over(setup.loader):
        ledger.add(update)
        yield
    ledger.flush()


def clip(setup: Setup, directory: Path) -> Iterator[None]:
    for _ in setup.step(transforms=[sw.clip(BOUND)], max_grad_norm=None).over(setup.loader):
        yield


LOOPS: dict[str, Callable[[Setup, Path], Iterator[None]]] = {
    "plain loop": plain,
    "sw.Step": step,
    "sw.Step, sw.Ledger()": ledger,
    "sw.Step, sw.clip(1.0)": clip,
}
KILLED = "sw.Trainer, killed and resumed"

# --- runs -------------------------------------------------------------------------------------------------------------


def train(name: str, text: Path, directory: Path) -> Values:
    setup = Setup.of(text)
    run = fresh(directory, name)
    for _ in LOOPS[name](setup, run):
        pass
    torch.save(setup.model.state_dict(), run / "model.pt")
    return results(setup, directory)


def results(setup: Setup, directory: Path) -> Values:
    """Validation loss, and the largest difference of a parameter from the plain loop."""
    plain = torch.load(directory / "plain loop" / "model.pt")
    distances = [(p - plain[name]).abs().max().item() for name, p in setup.model.state_dict().items()]
    return {"loss": setup.validation_losses().mean().item(), "distance": max(distances)}


def killed(text: Path, directory: Path) -> Values:
    """Train in a process that kills itself, and resume in another one."""
    run = fresh(directory, KILLED)
    command = [sys.executable, __file__, str(text), "--child", str(run), "--threads", str(torch.get_num_threads())]
    ends = [subprocess.run(command, check=False).returncode for _ in range(2)]
    if ends != [-signal.SIGKILL, 0]:
        raise RuntimeError(
            f"the first process must be killed and the second one end normally; found exit codes {ends}."
        )
    return results(Setup.of(text).load(run), directory)


def child(text: Path, run: Path) -> None:
    """One of the two processes of `killed`. The second one resumes from the last checkpoint of the first."""
    setup = Setup.of(text)
    resume = (run / "trainer").exists()

    class Kill:
        def on_update(self, trainer: sw.Trainer, update: sw.Update) -> None:
            if update.index == KILLED_AT and not resume:
                os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [Kill(), sw.callbacks.ModelCheckpoint(every=CHECKPOINT)]
    trainer = sw.Trainer(setup.step(), run / "trainer", callbacks, progress=False)
    trainer.fit(setup.loader, updates=UPDATES, resume=resume)
    torch.save(setup.model.state_dict(), run / "model.pt")


def fresh(directory: Path, name: str) -> Path:
    run = directory / name
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    return run


def deviation(text: Path, directory: Path) -> Values:
    """Standard deviation of the validation losses of single windows."""
    return {"deviation": Setup.of(text).load(directory / "plain loop").validation_losses().std().item()}


def times(text: Path, directory: Path) -> Values:
    """CPU time of each loop, as a multiple of the plain one: medians over rounds of some updates of each."""
    loops = {name: loop(Setup.of(text), fresh(directory, f"times, {name}")) for name, loop in LOOPS.items()}
    rounds = []
    for _ in range(ROUNDS + 1):
        seconds = {}
        for name, loop in loops.items():
            began = time.process_time()
            for _ in range(ROUND):
                next(loop)
            seconds[name] = time.process_time() - began
        rounds.append({name: seconds[name] / seconds["plain loop"] for name in loops})
    return {name: median(ratios[name] for ratios in rounds[1:]) for name in loops}  # the first round plans and checks


def main() -> None:
    arguments = parser(__doc__, "nanogpt")
    arguments.add_argument("text", type=Path)
    arguments.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    if options.child is not None:
        child(options.text, options.child)
        return
    record = Record(options.results)
    directory = options.results.with_suffix("")
    values = {name: record.run(name, partial(train, name, options.text, directory)) for name in LOOPS}
    values[KILLED] = record.run(KILLED, partial(killed, options.text, directory))
    ratios = record.run("times", partial(times, options.text, directory))
    error = record.run("deviation", partial(deviation, options.text, directory))["deviation"] / math.sqrt(240)
    rows = [
        ["loop", "validation loss", "parameters, beside the plain loop", "CPU time of an update", "CPU time of the run"]
    ]
    for name, value in values.items():
        distance = f"off by at most {value['distance']:.0e}" if value["distance"] else "equal, bit for bit"
        distance = "" if name == "plain loop" else distance
        ratio = f"{ratios[name]:.2f} ×" if name in ratios else ""
        rows.append([name, f"{value['loss']:.3f}", distance, ratio, f"{record.seconds(name):.0f} s"])
    caption = (
        f"Seed {SEED}; {machine()}. A mean over 240 windows, as the published loss, has a standard error of "
        f"{error:.3f}. Times of updates are medians of {ROUNDS} interleaved rounds."
    )
    show(Table("evidence-nanogpt", "nanoGPT's setting for the CPU", rows, caption), options.write)


if __name__ == "__main__":
    main()
