"""Table of clipped updates of small networks: SGD without momentum, relative to the textbook update without clipping.

One thread, and a process for each row, because methods in one process change each other's times by up to a third: in
every round one loop of the method runs next to one textbook loop. The movement of the parameters is first compared with
that of a loop over single samples.

python small.py ROW ROUNDS WORKLOAD ... prints the numbers of one row as JSON.
"""

import copy
import json
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial

import isolated
import torch
from catalog import TITLES, build
from peers import Contender, Loop, OpacusHooks, Vmap, total_norm
from results import TOLERANCE, Result, failed
from small_nets import SMALL_NETS
from tables import Options, Table
from timing import interleaved
from torch import Tensor
from workloads import Workload

import samplewise as sw

UPDATES = 20  # per round
LR = 1e-3


class Updates(ABC):
    """Clipped updates of one model on one batch."""

    def __init__(self, work: Workload):
        self.work = work

    @abstractmethod
    def __call__(self) -> None:
        """Make `UPDATES` updates."""

    @abstractmethod
    def parameters(self) -> Iterable[Tensor]: ...


class ByStep(Updates):
    """`sw.Step` with `sw.clip`."""

    def __init__(self, work: Workload, compile: bool):
        super().__init__(work)
        self.compile = compile
        self.model = copy.deepcopy(work.model)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.batches = [(work.inputs, work.targets)] * UPDATES
        self.step = sw.Step(
            self.model,
            optimizer,
            lambda model, batch: work.loss(model(batch[0]), batch[1]),
            samples=len(work.inputs),
            transforms=[sw.clip(work.clip)],
            compile=compile,
        )

    def __call__(self) -> None:
        for _ in self.step.over(self.batches):
            pass
        if self.compile and self.step.compiled != "compiled":
            raise NotImplementedError(self.step.compiled)

    def parameters(self) -> Iterable[Tensor]:
        return self.model.parameters()


class Textbook(Updates):
    """Plain training without clipping: the unit of all ratios."""

    def __init__(self, work: Workload):
        super().__init__(work)
        self.model = copy.deepcopy(work.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def __call__(self) -> None:
        for _ in range(UPDATES):
            self.optimizer.zero_grad()
            self.work.losses(self.model).mean().backward()
            self.optimizer.step()

    def parameters(self) -> Iterable[Tensor]:
        return self.model.parameters()


class ByPeer(Updates):
    """Clipped sum of another library, followed by the update."""

    def __init__(self, work: Workload, contender: type[Contender]):
        super().__init__(work)
        self.contender = contender(work)

    def __call__(self) -> None:
        for _ in range(UPDATES):
            total = self.contender.clipped_sum()  # type: ignore[attr-defined]
            with torch.no_grad():
                torch._foreach_add_(self.contender.params, total, alpha=-LR / len(self.work.inputs))

    def parameters(self) -> Iterable[Tensor]:
        return self.contender.params


class CompiledVmap(Updates):
    """torch.compile of the whole update: vmap(grad), norms, weighted sum and SGD."""

    def __init__(self, work: Workload):
        super().__init__(work)
        vmap = Vmap(work)
        self.params = {name: p.detach().clone() for name, p in vmap.model.named_parameters()}

        def update(params: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> None:
            rows = vmap.per_sample(params, inputs, targets)
            norms = torch.stack([row.flatten(1).square().sum(1) for row in rows.values()]).sum(0).sqrt()
            weights = (work.clip / norms).clamp(max=1) / len(inputs)
            for name, row in rows.items():
                params[name].sub_(LR * torch.tensordot(weights, row, dims=1))

        self.update = torch.compile(update)

    def __call__(self) -> None:
        for _ in range(UPDATES):
            self.update(self.params, self.work.inputs, self.work.targets)

    def parameters(self) -> Iterable[Tensor]:
        return self.params.values()


class ByJax(Updates):
    """jit(vmap(grad)) of JAX, in a function written for one sample."""

    def __init__(self, work: Workload):
        import in_jax

        super().__init__(work)
        kind = work.name.removeprefix("small_")
        self.loops = in_jax.Clipped(kind, work.model, work.inputs, work.targets, LR, work.clip)

    def __call__(self) -> None:
        self.loops.updates(UPDATES)

    def parameters(self) -> Iterable[Tensor]:
        return [torch.as_tensor(value) for _, value in sorted(self.loops.parameters().items())]  # JAX sorts, too


Rows = dict[str, Callable[[Workload], Updates]]
OURS: Rows = {
    "samplewise": partial(ByStep, compile=False),
    "samplewise, `compile=True`": partial(ByStep, compile=True),
}
PEERS: Rows = {
    "`vmap(grad)`": partial(ByPeer, contender=Vmap),
    "`vmap(grad)`, `torch.compile`": CompiledVmap,
    "Opacus hooks": partial(ByPeer, contender=OpacusHooks),
    "JAX `jit(vmap(grad))`": ByJax,
}


# ------------------------------------------------------------------------------------------------ measuring


def small(options: Options) -> Iterator[Table]:
    names = options.choose(SMALL_NETS)
    rows = {row: cells_of(row, names, options.rounds) for row in OURS | (PEERS if options.peers else {})}
    header = ["", *(TITLES[name] for name in names)]
    body = [[row, *(str(cell) for _, cell in cells)] for row, cells in rows.items()]
    plain = [min(seconds for seconds, _ in column) for column in zip(*rows.values(), strict=True)]
    reasons = [f"{row}: {cell.why}" for row, cells in rows.items() for _, cell in cells if cell.why]
    caption = f"Clipped updates as multiples of a textbook update without clipping. {options.caption(threads=1)}"
    title = "Clipped updates of small networks as a multiple of a textbook update"
    last = ["textbook update, µs", *(f"{1e6 * seconds:.0f}" for seconds in plain)]
    yield Table("small", title, [header, *body, last], caption, tuple(reasons))


def cells_of(row: str, names: list[str], rounds: int) -> list[tuple[float, Result]]:
    """Seconds of a textbook update and the cell of each network, measured in a new process."""
    found = isolated.call(__file__, row, rounds, *names)
    cells = [(seconds, Result(**cell)) for seconds, cell in found]
    print(f"small: {row}: {', '.join(str(cell) for _, cell in cells)}", file=sys.stderr)
    return cells


def measure(work: Workload, row: str, rounds: int) -> tuple[float, Result]:
    """Seconds of a textbook update, and the ratio of the row's updates to it."""
    plain = Textbook(work)
    plain()
    expected = movement(ByPeer(work, Loop))
    cell = None
    try:
        updates = (OURS | PEERS)[row](work)
        apart = abs(movement(updates) / expected - 1)
        if apart > TOLERANCE:
            cell = Result(word="wrong", why=f"off by {apart:.1%}")
    except Exception as error:  # the other networks are still measured
        cell = failed(error)
    series = interleaved(work.name, plain, {row: plain if cell else updates}, rounds)[row]
    return series.plain_median / UPDATES, cell or Result(series.ratio)


def movement(updates: Updates) -> float:
    """Distance of the parameters after the first updates from the initial ones; does not depend on their order."""
    before = [p.detach().clone() for p in updates.parameters()]
    updates()
    after = [p.detach() for p in updates.parameters()]
    return float(total_norm([a - b for a, b in zip(after, before, strict=True)]))


def main(row: str, rounds: str, *names: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = [measure(build(name), row, int(rounds)) for name in names]
    print(json.dumps([(seconds, asdict(cell)) for seconds, cell in found]))


if __name__ == "__main__":
    main(*sys.argv[1:])
