"""Table of compiled updates of larger networks: SGD without momentum, relative to the textbook update.

Each measurement runs in a process with an empty compiler cache: one for torch.compile of plain training, one for
`sw.Step` with `sw.clip`. The unit of both is the textbook update, uncompiled and without clipping, in the same process.

python compiled.py WORKLOAD KIND THREADS ROUNDS prints the numbers of one process as JSON.
"""

import copy
import json
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import isolated
import memory
import torch
from catalog import TITLES, build
from real_nets import REAL_NETS
from results import Result, failed
from tables import Options, Table
from timing import Call, interleaved
from torch import Tensor, nn
from workloads import Workload

import samplewise as sw

NETS = ("mlp", "encoder", *REAL_NETS)
WARM_UP = 5  # updates, of which the first ones compile
LR = 1e-3


@dataclass(frozen=True)
class Facts:
    """Numbers of one process. Ratios are to the textbook update."""

    plain_ms: float
    eager: float  # without compilation
    compiled: float
    compiling: float  # seconds of the first updates, minus those of as many later ones
    memory: int  # bytes above those before the update
    state: str


def compiled(options: Options) -> Iterator[Table]:
    threads = options.threads[-1]
    options = replace(options, rounds=min(3, options.rounds))  # compiling takes most of the time
    columns = {name: column(name, threads, options.rounds) for name in options.choose(NETS)}
    rows = [[row, *(cells[row] for cells in columns.values())] for row in next(iter(columns.values()))]
    caption = f"Time as multiples of a textbook update without clipping. {options.caption(threads)}"
    header = ["", *(TITLES[name] for name in columns)]
    yield Table("compiled", "Compiled updates", [header, *rows], caption)


def column(name: str, threads: int, rounds: int) -> dict[str, str]:
    """Cells of one network by the name of their row."""
    plain = facts(name, "textbook", threads, rounds)
    ours = facts(name, "clipped", threads, rounds)
    return {
        "textbook update, ms": shown(plain, lambda f: f"{f.plain_ms:.0f}"),
        "textbook, `torch.compile`": shown(plain, lambda f: str(Result(f.compiled))),
        "clipped, eager": shown(ours, lambda f: str(Result(f.eager))),
        "clipped, `compile=True`": shown(ours, lambda f: str(Result(f.compiled))),
        "… relative to eager": shown(ours, lambda f: str(Result(f.compiled / f.eager))),
        "… relative to `torch.compile`": shown(ours, lambda f: str(Result(f.compiled / plain.compiled)), plain),
        "compiling textbook, s": shown(plain, lambda f: f"{f.compiling:.0f}"),
        "compiling clipped, s": shown(ours, lambda f: f"{f.compiling:.0f}"),
        "memory relative to `torch.compile`": shown(ours, lambda f: str(Result(f.memory / plain.memory)), plain),
        "`step.compiled`": shown(ours, lambda f: shortened(f.state)),
    }


def shortened(state: str) -> str:
    share = re.match(r"library calls, .* take (\d+%)", state)
    return f"uncompiled: {share[1]} in library calls" if share else state


def shown(found: Facts | Result, cell: Callable[[Facts], str], *needed: Facts | Result) -> str:
    failures = [f for f in (found, *needed) if isinstance(f, Result)]
    return str(failures[0]) if failures else cell(found)  # type: ignore[arg-type]


def facts(name: str, kind: str, threads: int, rounds: int) -> Facts | Result:
    print(f"{name}: compiling {kind}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as cache:
        try:
            found = Facts(**isolated.call(__file__, name, kind, threads, rounds, TORCHINDUCTOR_CACHE_DIR=cache))
        except Exception as error:
            found = failed(error)
    print(f"{name}: {kind}: {found}", file=sys.stderr)
    return found


# ------------------------------------------------------------------------------------------- in the process


def textbook(work: Workload, compile: bool = False) -> tuple[Call, Callable[[], str]]:
    """One update of plain training, and whether it is compiled."""
    model = copy.deepcopy(work.model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)

    def mean_loss() -> Tensor:
        return work.losses(model).mean()

    loss = torch.compile(mean_loss) if compile else mean_loss

    def update() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return update, lambda: "compiled" if compile else "off"


def clipped(work: Workload, compile: bool = False) -> tuple[Call, Callable[[], str]]:
    """One clipped update with `sw.Step`, and the state of its compilation."""
    model = copy.deepcopy(work.model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return work.loss(model(batch[0]), batch[1])

    options = dict(samples=len(work.inputs), transforms=[sw.clip(work.clip)], compile=compile)
    step = sw.Step(model, optimizer, loss_fn, **options)  # type: ignore[arg-type]

    def update() -> None:
        step((work.inputs, work.targets))
        optimizer.zero_grad()  # as in `textbook`, so that gradients count as memory of the update

    return update, lambda: step.compiled


KINDS = {"textbook": textbook, "clipped": clipped}


def measure(name: str, kind: str, threads: int, rounds: int) -> Facts:
    torch.set_num_threads(threads)
    work = build(name)
    plain, _ = textbook(work)
    eager, _ = KINDS[kind](work)
    call, state = KINDS[kind](work, compile=True)
    for _ in range(2):
        plain(), eager()
    started = time.perf_counter()
    for _ in range(WARM_UP):
        call()
    warming = time.perf_counter() - started
    series = interleaved(name, plain, {"eager": eager, "compiled": call}, rounds)
    return Facts(
        plain_ms=1e3 * sum(series["eager"].plain) / rounds,
        eager=series["eager"].ratio,
        compiled=series["compiled"].ratio,
        compiling=warming - WARM_UP * series["compiled"].median,
        memory=memory.peak_above_start(call),
        state=state(),
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(asdict(measure(*sys.argv[1:3], threads=int(sys.argv[3]), rounds=int(sys.argv[4])))))
