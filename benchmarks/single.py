"""One sample per update: a plain PyTorch loop, `step.over`, `step.run`, and JAX's `jit` and `lax.scan` if installed.

python benchmarks/single.py [name ...] [--rounds 9] [--flush-denormal]

One thread and one process: in every round each loop runs once over the same samples, each with its own copy of the
network. Ratios are medians over rounds. The parameters are first compared with those of the plain loop.
"""

import argparse
import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samplewise as sw

try:
    import single_jax
except ImportError:
    single_jax = None  # type: ignore[assignment]

Loop = Callable[[], None]
CLIP, BATCH = 1.0, 64
APART = 1e-3  # largest accepted difference of parameters after one pass


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kind = partial(nn.TransformerEncoderLayer, 64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.ModuleList([kind(), kind()]), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def mlp(*sizes: int) -> nn.Module:
    a, b, c, d = sizes
    return nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, d))


def cnn() -> nn.Module:
    body = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(1568, 30), nn.ReLU(), nn.Linear(30, 10))


@dataclass(frozen=True)
class Work:
    name: str
    kind: str  # kind of network
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]  # shape of one sample
    lr: float  # small enough not to diverge; the labels are random
    momentum: float | None  # None: Adam
    samples: int

    def data(self, samples: int) -> tuple[Tensor, Tensor]:
        y = torch.randn(samples, 1) if self.kind == "linear" else torch.randint(10, (samples,))
        return torch.randn(samples, *self.shape), y

    def loss_fn(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.kind == "linear":
            return (model(batch[0]) - batch[1]).square().mean(1)
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def fresh(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = copy.deepcopy(model)
        if self.momentum is None:
            return model, torch.optim.Adam(model.parameters(), lr=self.lr)
        return model, torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)

    def in_jax(self) -> Any:
        return single_jax.Adam(self.lr) if self.momentum is None else single_jax.SGD(self.lr, self.momentum)


SMALL, LARGE = partial(mlp, 64, 128, 128, 10), partial(mlp, 784, 512, 512, 10)
WORKS = {
    "linear": Work("Linear 10-1, SGD", "linear", partial(nn.Linear, 10, 1), (10,), 1e-3, 0.0, 1000),
    "mlp": Work("MLP 64-128-128-10, momentum", "mlp", SMALL, (64,), 1e-3, 0.9, 300),
    "mlp-adam": Work("the same, Adam", "mlp", SMALL, (64,), 1e-4, None, 300),
    "mlp-large": Work("MLP 784-512-512-10, momentum", "mlp", LARGE, (784,), 1e-3, 0.9, 100),
    "cnn": Work("CNN 16-32, 28×28, momentum", "cnn", cnn, (1, 28, 28), 1e-3, 0.9, 100),
    "cnn-by-hand": Work("the same, JAX with products", "cnn by hand", cnn, (1, 28, 28), 1e-3, 0.9, 100),
    "transformer": Work("transformer, d 64, T 32, Adam", "transformer", Transformer, (32, 64), 1e-4, None, 50),
}
CLIPPED = ("mlp", "cnn")


# --- loops ------------------------------------------------------------------------------------------------------------


def loops_of(work: Work) -> dict[str, Loop]:
    """Loops that train copies of the same network on the same samples."""
    model, (x, y) = work.model(), work.data(work.samples)
    nets = {name: work.fresh(model) for name in ("plain_loop", "over", "run")}
    over, run = (sw.Step(*nets[name], work.loss_fn, samples=1, compile=True) for name in ("over", "run"))
    loops: dict[str, Loop] = {
        "plain_loop": partial(plain_loop, work, *nets["plain_loop"], [*zip(x.split(1), y.split(1), strict=True)]),
        "over": lambda: [None for _ in over.over([(x, y)])] and None,
        "run": lambda: run.run([(x, y)]) and None,
    }
    theirs = None if single_jax is None else single_jax.Loops(work.kind, model, x, y, work.in_jax())
    if theirs is not None:
        loops |= {"jit": theirs.steps, "scan": theirs.scan}
    for name, loop in loops.items():
        started = time.perf_counter()
        loop()
        print(f"{work.name}: {name}, first pass {time.perf_counter() - started:.1f} s", file=sys.stderr)
    expected = dict(nets["plain_loop"][0].named_parameters())
    found = {name: dict(net.named_parameters()) for name, (net, _) in nets.items()}
    if theirs is not None:
        found |= {"jit": theirs.parameters("steps"), "scan": theirs.parameters("scan")}
    for name, parameters in found.items():
        check(f"{work.name}, {name}", parameters, expected)
    for name, step in {"over": over, "run": run}.items():
        assert step.compiled == "compiled", f"{work.name}, {name}: {step.compiled}"
    return loops


def plain_loop(work: Work, model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        work.loss_fn(model, batch).mean().backward()
        optimizer.step()


def check(name: str, found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    apart = max(float((torch.as_tensor(found[key]) - p).detach().abs().max()) for key, p in expected.items())
    assert apart < APART, f"{name} must give the parameters of the plain loop; found a difference of {apart:.1e}."


def clipped_loops_of(work: Work) -> dict[str, Loop]:
    model, batches = work.model(), [work.data(BATCH) for _ in range(10)]

    def loop(**options: Any) -> Loop:
        step = sw.Step(*work.fresh(model), work.loss_fn, samples=BATCH, transforms=[sw.clip(CLIP)], **options)
        return lambda: [None for _ in step.over(batches)] and None

    loops = {"eager": loop(compile=False), "compiled": loop(compile=True)}
    for first in loops.values():
        first()
    return loops


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(loops: dict[str, Loop], rounds: int, updates: int) -> dict[str, list[float]]:
    """Microseconds per update."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            started = time.perf_counter()
            loop()
            times[name].append((time.perf_counter() - started) / updates * 1e6)
    return times


def row(name: str, times: dict[str, list[float]], columns: list[str]) -> str:
    """Microseconds, and in brackets the speed-up over the first loop."""
    first, *others = columns
    cells = [f"{statistics.median(times[first]):.0f}"]
    for other in others:
        if other not in times:
            cells.append("")
            continue
        ratio = statistics.median(a / b for a, b in zip(times[first], times[other], strict=True))
        cells.append(f"{three_digits(statistics.median(times[other]))} ({ratio:.1f}×)")
    return f"| {name} | {' | '.join(cells)} |"


def three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="name", help=f"any of {', '.join(WORKS)}; default: all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--flush-denormal", action="store_true", help="treat numbers below 1e-38 as zero, as JAX does")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in WORKS]:
        parser.error(f"a name must be one of {', '.join(WORKS)}; found {', '.join(unknown)}.")
    warnings.simplefilter("error", sw.TrainingWarning)  # a fallback to uncompiled updates would be measured as compiled
    torch.set_num_threads(1)
    torch.set_flush_denormal(options.flush_denormal)
    torch.manual_seed(1)
    names = options.names or list(WORKS)

    print("\n### One sample per update, µs, one thread; in brackets: speed-up over the plain loop\n")
    if single_jax is None:
        print("JAX is not installed: its columns are empty.\n")
    print("| | plain loop | `step.over` | `step.run` | JAX `jit` | JAX `lax.scan` |\n|---|---|---|---|---|---|")
    for work in (WORKS[name] for name in names):
        times = measured(loops_of(work), options.rounds, work.samples)
        print(row(work.name, times, ["plain_loop", "over", "run", "jit", "scan"]), flush=True)

    clipped = [WORKS[name] for name in names if name in CLIPPED]
    if clipped:
        print(f"\n### {BATCH} samples per update with sw.clip({CLIP}), µs, one thread\n")
        print("| | uncompiled | compiled |\n|---|---|---|")
    for work in clipped:
        times = measured(clipped_loops_of(work), options.rounds, 10)
        print(row(work.name, times, ["eager", "compiled"]), flush=True)


if __name__ == "__main__":
    main()
