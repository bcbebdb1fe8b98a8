"""Correctness of per-sample gradient norms in samplewise and other libraries, on 16 small models in float64.

    python benchmarks/comparison.py        # `make comparison` installs the other libraries first

Prints the table of docs/comparison.md. Each model is named after its unusual feature. The gradient norms are
compared with plain autograd: one backward pass per sample.

right     error below 1e-8
right*    the same, after Opacus's own ModuleValidator.fix, which replaces layers by its own
other     after fix() the model computes something else
error     an exception was raised; the messages are printed below the table
WRONG     numbers that are not the gradient norms, and no error
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import torch
import torch.nn.functional as F
from peers import Backpack, Contender, ExpandedWeights, Loop, OpacusGhost, OpacusHooks, Samplewise, Vmap
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from workloads import Workload, classification

TOLERANCE = 1e-8
BATCH, WIDTH, LENGTH, WORDS = 5, 6, 4, 11


# ------------------------------------------------------------------------------------- models


def linear(features_in: int = WIDTH, features_out: int = WIDTH) -> nn.Linear:
    return nn.Linear(features_in, features_out)


def mlp() -> nn.Module:
    return nn.Sequential(linear(), nn.ReLU(), linear())


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), linear(4 * 4 * 4))


def batch_norm(training: bool) -> nn.Module:
    return nn.Sequential(linear(), nn.BatchNorm1d(WIDTH).train(training), nn.ReLU(), linear())


class BodyAndHead(nn.Module):
    """Base class of most of the following models."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


class UsedTwice(BodyAndHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))))


class Functional(BodyAndHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(self.body(x), self.body.weight)))


class Flattened(BodyAndHead):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.flatten(0, 1))).view_as(x).mean(1))


class RawParameter(BodyAndHead):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)) * self.scale)


class Unused(BodyAndHead):
    def __init__(self) -> None:
        super().__init__()
        self.spare = linear()


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = linear().requires_grad_(False), linear(WIDTH, 2), linear(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(linear(), nn.Tanh(), linear()), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(WIDTH, 2, batch_first=True), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = nn.Embedding(WORDS, WIDTH), linear(), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.words(ids)))).mean(1)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH), linear()

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])[None]  # (1, T): the same for every sample
        return self.head(torch.tanh(self.words(ids) + self.places(places)).mean(1))


class Experts(nn.Module):
    """Mixture of two experts; each token is routed to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.head = linear(WIDTH, 2), nn.ModuleList([linear(), linear()]), linear()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates = self.router(tokens).softmax(1)
        chosen, out = gates.argmax(1), torch.zeros_like(tokens)
        for k, expert in enumerate(self.experts):
            mine = (chosen == k).nonzero()[:, 0]
            out = out.index_add(0, mine, expert(tokens[mine]) * gates[mine, k, None])
        return self.head(out.view_as(x).mean(1))


# --------------------------------------------------------------------------------------- data


def vectors() -> Tensor:
    return torch.randn(BATCH, WIDTH)


def sequences() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


def images() -> Tensor:
    return torch.randn(BATCH, 2, 6, 6)


def words() -> Tensor:
    return torch.randint(WORDS, (BATCH, LENGTH))


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    alone: bool = True  # a sample computed alone has the same gradient
    unused: frozenset[str] = frozenset()

    def workload(self) -> Workload:
        torch.manual_seed(0)
        model, inputs, labels = self.model(), self.inputs(), torch.randint(WIDTH, (BATCH,))
        return Workload(self.name, model, inputs, labels, classification, clip=1.0, unused=self.unused)


SPARE = frozenset({"spare.weight", "spare.bias"})
CASES = [
    Case("MLP", mlp, vectors),
    Case("convolution, GroupNorm", convolution, images),
    Case("low rank beside a frozen layer", LowRank, vectors),
    Case("a layer that is not used", Unused, vectors, unused=SPARE),
    Case("BatchNorm, eval mode", partial(batch_norm, training=False), vectors),
    Case("MultiheadAttention", Attention, sequences),
    Case("LSTM", Recurrent, sequences),
    Case("a module used twice", UsedTwice, vectors),
    Case("tied embedding and head", Tied, words),
    Case("position ids (1, T)", Positions, words),
    Case("tokens flattened to (B·T, d)", Flattened, sequences),
    Case("a raw nn.Parameter", RawParameter, vectors),
    Case("F.linear with a layer's weight", Functional, vectors),
    Case("experts and a router", Experts, sequences),
    Case("activation checkpointing", Checkpointed, vectors),
    Case("BatchNorm, training mode", partial(batch_norm, training=True), vectors, alone=False),
]


# ----------------------------------------------------------------------------------- verdicts


class OpacusHooksAsIs(OpacusHooks):
    replace = False


class OpacusGhostAsIs(OpacusGhost):
    replace = False


def truth(work: Workload) -> Tensor:
    params = [p for p in work.model.parameters() if p.requires_grad]
    losses = work.losses(work.model)
    rows = [torch.autograd.grad(loss, params, retain_graph=True, materialize_grads=True) for loss in losses]
    return torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])


def right(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).abs().max() < TOLERANCE * wanted.max())


@dataclass(frozen=True)
class Verdict:
    word: str
    message: str = ""


def judged(contender: type[Contender], case: Case) -> Verdict:
    wanted = truth(case.workload())
    try:
        work = case.workload()
        candidate = contender(work)
        found = candidate.norms().detach()
    except Exception as error:
        return Verdict("error", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")
    return Verdict("right" if right(found, wanted) else "WRONG", f"off by {error_of(found, wanted)}")


def error_of(found: Tensor, wanted: Tensor) -> str:
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)}"
    return f"{((found - wanted).abs() / wanted).max().item():.0%}"


def judged_opacus(as_is: type[Contender], replacing: type[Contender], case: Case) -> Verdict:
    """Try the original model; if Opacus refuses it, try again after ModuleValidator.fix."""
    first = judged(as_is, case)
    if first.word != "error":
        return first
    second = judged(replacing, case)
    if second.word == "error":
        return first
    work = case.workload()
    if not torch.allclose(replacing(work).losses(), work.losses(work.model)):
        return Verdict("other", first.message)
    return Verdict(second.word + ("*" if second.word == "right" else ""), second.message)


COLUMNS: dict[str, Callable[[Case], Verdict]] = {
    "samplewise": partial(judged, Samplewise),
    "Opacus hooks": partial(judged_opacus, OpacusHooksAsIs, OpacusHooks),
    "Opacus ghost": partial(judged_opacus, OpacusGhostAsIs, OpacusGhost),
    "BackPACK": partial(judged, Backpack),
    "ExpandedWeights": partial(judged, ExpandedWeights),
    "vmap(grad)": partial(judged, Vmap),
}


def main() -> None:
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")  # other libraries use deprecated torch functions; a warning is not an error here
    packages = {"torch": "torch", "Opacus": "opacus", "BackPACK": "backpack-for-pytorch"}
    print(", ".join(f"{name} {version(package)}" for name, package in packages.items()), "\n")
    print("| | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS))
    said: list[str] = []
    words: dict[str, Counter[str]] = {name: Counter() for name in COLUMNS}
    for case in CASES:
        if case.alone:
            assert right(Loop(case.workload()).norms(), truth(case.workload())), case.name
        verdicts = {name: judge(case) for name, judge in COLUMNS.items()}
        print(f"| {case.name} | " + " | ".join(v.word for v in verdicts.values()) + " |", flush=True)
        for name, verdict in verdicts.items():
            words[name][verdict.word] += 1
            if not verdict.word.startswith("right"):
                said.append(f"- {case.name}, {name}: {verdict.message}")
    print("\n" + "\n".join(f"{name}: {dict(count)}" for name, count in words.items()))
    print("\n" + "\n".join(said))


if __name__ == "__main__":
    main()
