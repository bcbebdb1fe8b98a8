"""Model of the communication cost of one distributed update; prints the tables of docs/scaling.md.

    python docs/scaling.py

The messages are listed one by one; tests/parallel/test_scaling.py compares them with the traffic of two ranks. Times
and memory are computed from them with the formulas below, not measured.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from samplewise.parallel import collectives

Message = tuple[str, int]  # the collective, and the bytes that one rank passes to it

# ------------------------------------------------------------------------------------------------ messages of an update


@dataclass(frozen=True)
class Model:
    shapes: Sequence[tuple[int, ...]]
    element: int = 4  # bytes
    groups: Sequence[Sequence[tuple[int, ...]]] = ()  # shapes that fully_shard gathers together; first: the root's
    first: int = 0  # the group of the first layer

    @property
    def size(self) -> int:
        return sum(map(math.prod, self.shapes))


@dataclass(frozen=True)
class Update:
    """Messages of one update.

    window_transforms: for each transform that needs the whole window, the number of values per sample
    spanning: number of groups with samples on several ranks
    said: bytes of the pickled group keys, or of the reference
    """

    model: Model
    ranks: int
    window: int  # samples of all ranks, distributed evenly
    window_transforms: Sequence[int] = ()
    by_place: bool = False  # weight(tensor)
    groups: bool = False
    spanning: int = 0
    references: bool = False
    noise: bool = False
    said: int = 0
    sharded: bool = False
    measures: bool = False  # a transform needs norms, which takes a backward pass of its own in a sharded model

    @property
    def share(self) -> int:
        return -(-self.window // self.ranks)

    def messages(self) -> list[Message]:
        passes = self._passes() if self.sharded else ()
        return [*meeting(), *passes, *self._numbers(), *self._gradients(), *self._after()]

    def _passes(self) -> Iterable[Message]:
        """Collectives of the modules of a sharded model, in one microbatch per rank."""
        root, *others = self.model.groups
        yield from meeting()  # the ranks commit themselves to the collectives of the last update
        yield from map(self._gather, [root, *others])  # forward pass, after which the root is not released
        yield from meeting()  # the ranks begin the pass that sums gradients
        if self.measures:
            yield from map(self._gather, [*others, self.model.groups[self.model.first]])
            yield self._gather(root)
        yield from map(self._gather, others)
        for group in self.model.groups:
            yield "reduce_scatter", self.ranks * self._gather(group)[1]

    def _gather(self, group: Sequence[tuple[int, ...]]) -> Message:
        """All-gather of shards, padded to the largest shard of each parameter."""
        return "all_gather", self.model.element * sum(
            math.prod((-(-rows // self.ranks), *rest)) for rows, *rest in group
        )

    @property
    def backwards(self) -> Model:
        """The model with its last parameters first: their gradients are complete first."""
        return Model(self.model.shapes[::-1], self.model.element)

    @property
    def overlapped(self) -> bool:
        """True if gradients are summed during the last backward pass."""
        needs_window = self.window_transforms or self.by_place or self.groups
        return not (needs_window or self.sharded) and len(list(sums(self.backwards))) > 1

    def _numbers(self) -> Iterable[Message]:
        """Values of all ranks that transforms need."""
        if not (self.window_transforms or self.by_place or self.groups):
            return
        yield from meeting()
        yield from gathering(16)  # number of samples of each rank
        if self.groups:
            yield from gathering(self.said)
        for columns in self.window_transforms:
            yield from meeting()
            yield from gathering(8 * columns * self.share)
        for _ in range(self.spanning):
            yield from meeting()
            yield from sums(self.model)
        yield from meeting()

    def _gradients(self) -> Iterable[Message]:
        if self.references:
            yield from gathering(self.said)
        yield "all_reduce", 8 * len(self.model.shapes)  # which parameters any rank has reached
        if self.overlapped:
            yield from meeting()  # whether the window ends with this pass
        yield from () if self.sharded else sums(self.backwards)

    def _after(self) -> Iterable[Message]:
        if self.noise:
            state = len(pickle.dumps([torch.default_generator.get_state()]))
            yield from [("broadcast", 8), ("broadcast", state)]
        if self.sharded:
            yield "all_reduce", 8 * len(self.model.shapes)  # norms


def meeting() -> list[Message]:
    return [("all_reduce", 8 * collectives.ROOM)]


def gathering(count: int) -> list[Message]:
    """The number of rows of each rank, then the rows."""
    return [("all_gather", 8), ("all_gather", count)]


def sums(model: Model) -> Iterable[Message]:
    for bucket in buckets([model.element * math.prod(shape) for shape in model.shapes]):
        yield "all_reduce", bucket


def buckets(tensors: Sequence[int]) -> list[int]:
    """Bytes of the buckets that consecutive tensors are packed into."""
    sizes: list[int] = []
    for size in tensors:
        if not sizes or sizes[-1] + size > collectives.BUCKET:
            sizes.append(0)
        sizes[-1] += size
    return sizes


def added_up(messages: Iterable[Message]) -> tuple[dict[str, int], dict[str, int]]:
    """Number of calls and bytes of each collective."""
    calls, count = Counter[str](), Counter[str]()
    for name, size in messages:
        calls[name] += 1
        count[name] += size
    return dict(calls), dict(count)


# --------------------------------------------------------------------------------------------------- times and memory


@dataclass(frozen=True)
class Machine:
    """Assumed hardware: eight GPUs per node. Bandwidths per GPU in a large collective, in bytes per second."""

    inside: float = 200e9  # within a node
    between: float = 40e9  # between nodes
    start: float = 20e-6  # latency of a collective in seconds, and again for each doubling of the ranks
    speed: float = 120e12  # achieved operations per second of a GPU in training
    node: int = 8

    def seconds(self, message: Message, size: int) -> float:
        """Time of a collective: ring for the bytes, tree for the latency."""
        name, count = message
        if size == 1:
            return 0.0
        travels = {
            "all_reduce": 2 * (size - 1) / size,
            "reduce_scatter": (size - 1) / size,
            "broadcast": 1.0,
            "all_gather": size - 1,
        }
        bandwidth = self.inside if size <= self.node else self.between
        return self.start * (1 + math.log2(size)) + travels[name] * count / bandwidth


@dataclass(frozen=True)
class Case:
    name: str
    model: Model
    tokens: int  # per sample
    share: int  # samples per GPU and update

    def compute(self, machine: Machine, factor: float) -> float:
        """Seconds of computation: six operations per parameter and token, times the cost factor of the transforms."""
        return factor * 6 * self.model.size * self.tokens * self.share / machine.speed


def transformer(width: int, layers: int, vocabulary: int) -> Model:
    block = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), (width,), (width,)]
    return Model([(vocabulary, width), *block * layers], groups=[[(vocabulary, width)], *[block] * layers])


CASES = (
    Case("124 M parameters, 8 sequences of 1024 tokens per GPU", transformer(768, 12, 50304), 1024, 8),
    Case("1.6 G parameters, 4 sequences of 1024 tokens per GPU", transformer(1600, 48, 50304), 1024, 4),
)
SIZES = (1, 8, 64, 1024)
DROP = 5  # values per sample that drop by norms receives: place, loss, count, norm and share


def kinds(case: Case, size: int) -> dict[str, tuple[Update, float]]:
    """Name -> (update, cost factor of its computation, as measured for transformers in one process)."""
    window = size * case.share
    return {
        "plain": (Update(case.model, size, window), 1.0),
        "clip, weight, normalize(1.0)": (Update(case.model, size, window), 1.3),
        "drop, normalize('mean')": (Update(case.model, size, window, window_transforms=[DROP]), 1.3),
        "align": (Update(case.model, size, window, references=True, said=18 * len(case.model.shapes)), 1.3),
        "noise": (Update(case.model, size, window, noise=True), 1.0),
        "group, 4 of them on several ranks": (
            Update(case.model, size, window, groups=True, spanning=4 if size > 1 else 0, said=30 * case.share),
            1.3,
        ),
        "clip, fsdp": (Update(case.model, size, window, sharded=True, measures=True), 1.6),
    }


def exchange(update: Update, machine: Machine) -> float:
    return sum(machine.seconds(message, update.ranks) for message in update.messages())


def memory(model: Model, size: int, sharded: bool) -> dict[str, float]:
    """Bytes of a rank in float32 with Adam, without activations, which do not depend on the number of ranks."""
    one = float(model.size * model.element)
    if not sharded:
        return {"parameters": one, "gradients": one, "optimizer": 2 * one, "buckets": min(one, 3 * collectives.BUCKET)}
    part = one / size
    group = float(max(model.element * sum(map(math.prod, group)) for group in model.groups))
    return {
        "parameters": part,
        "gradients": part,
        "optimizer": 2 * part,
        "gathered": 2 * group,  # the module of a pass and the next one; or its gradients and the copy that is sent
        "buckets": 2 * group,  # what is received
    }


# -------------------------------------------------------------------------------------------------------------- tables


def bytes_table(case: Case) -> str:
    rows = ["| | " + " | ".join(f"{size} ranks" for size in SIZES[1:]) + " |", "|---" * len(SIZES) + "|"]
    for name in kinds(case, 8):
        cells = []
        for size in SIZES[1:]:
            messages = kinds(case, size)[name][0].messages()
            cells.append(f"{len(messages)} · {_size(sum(count for _, count in messages))}")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def time_table(case: Case, machine: Machine) -> str:
    rows = [
        "| | " + " | ".join(f"{size} GPU{'s' * (size > 1)}" for size in SIZES) + " |",
        "|---" * (len(SIZES) + 1) + "|",
    ]
    for name in kinds(case, 8):
        cells = []
        for size in SIZES:
            update, factor = kinds(case, size)[name]
            computed = case.compute(machine, factor)
            cells.append(f"{1e3 * computed:.0f} + {1e3 * exchange(update, machine):.0f} ms")
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def memory_table() -> str:
    rows = ["| | " + " | ".join(f"{size}" for size in SIZES) + " |", "|---" * (len(SIZES) + 1) + "|"]
    for case in CASES:
        name = case.name.partition(",")[0]
        for parallel, sharded in (("ddp", False), ("fsdp", True)):
            cells = [_size(sum(memory(case.model, size, sharded).values())) for size in SIZES]
            rows.append(f"| {name}, {parallel} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _size(count: float) -> str:
    for unit, power in (("GB", 9), ("MB", 6), ("kB", 3)):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {unit}"
    return f"{count:.0f} B"


def tables() -> str:
    machine, found = Machine(), []
    for case in CASES:
        found += [f"Messages of one rank per update, and their bytes. {case.name}:", bytes_table(case)]
        found += [f"Computation + communication of one update. {case.name}:", time_table(case, machine)]
    return "\n\n".join(
        [*found, "Memory of one rank without activations, float32, Adam, by number of ranks:", memory_table()]
    )


if __name__ == "__main__":
    print(tables())
