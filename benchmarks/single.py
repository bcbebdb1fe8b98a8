"""Table of updates from one sample: a plain PyTorch loop, `step.over`, `step.run`, and JAX's `jit` and `lax.scan`.

One thread and one process: in every round each loop runs once over the same samples, each with its own copy of the
network. Ratios are medians over rounds. The parameters are first compared with those of the plain loop.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from results import failed
from small_nets import Transformer, cnn, mlp
from tables import Options, Table
from torch import Tensor, nn

import samplewise as sw

try:
    import in_jax
except ImportError:
    in_jax = None  # type: ignore[assignment]

Loop = Callable[[], None]
APART = 1e-3  # largest accepted difference of parameters after one pass


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
        return in_jax.Adam(self.lr) if self.momentum is None else in_jax.SGD(self.lr, self.momentum)


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
QUICK = ("linear", "mlp")
COLUMNS = {
    "plain_loop": "plain loop",
    "over": "`step.over`",
    "run": "`step.run`",
    "jit": "JAX `jit`",
    "scan": "JAX `lax.scan`",
}


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
    theirs = None if in_jax is None else in_jax.Loops(work.kind, model, x, y, work.in_jax())
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


def cells_of(times: dict[str, list[float]]) -> list[str]:
    """Microseconds, and in brackets the speed-up over the plain loop."""
    plain = times["plain_loop"]
    cells = [f"{statistics.median(plain):.0f}"]
    for name in list(COLUMNS)[1:]:
        found = times.get(name)
        if found is None:
            cells.append("-")
        else:
            ratio = statistics.median(a / b for a, b in zip(plain, found, strict=True))
            cells.append(f"{three_digits(statistics.median(found))} ({ratio:.1f}×)")
    return cells


def three_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def single(options: Options) -> Iterator[Table]:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    rows = [["", *COLUMNS.values()]]
    notes = []
    for work in (WORKS[name] for name in options.choose(WORKS, QUICK)):
        try:
            cells = cells_of(measured(loops_of(work), options.rounds, work.samples))
        except Exception as error:  # the other networks are still measured
            result = failed(error)
            cells = [result.word] * len(COLUMNS)
            notes.append(f"{work.name}: {result.why}")
        rows.append([work.name, *cells])
        print(f"single: {rows[-1]}", file=sys.stderr)
    title = "One sample per update, µs; in brackets: speed-up over the plain loop"
    caption = f"Microseconds per update; in brackets, the speed-up over the plain loop. {options.caption(threads=1)}"
    yield Table("single", title, rows, caption, tuple(notes))
