"""Graphs of one structure with other numbers of samples and tokens in each step."""

import pytest
import torch
import torch.nn.functional as F
from by_loop import assert_as_loop
from torch import nn

from samplewise.engine.graph import structure
from samplewise.engine.graph.graph import Graph
from samplewise.engine.ownership import layouts, verify
from samplewise.engine.strategies import Planner
from samplewise.testing.case import Net, noise

WIDTH = 4
# Samples and tokens; in some of them all sizes are equal by coincidence, first or last.
SIZES = [(3, 6), (5, 2), (4, 4), (2, 5), (6, 3), (4, 2), (2, 4), (3, 3), (3, 6)]


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch):
    monkeypatch.setattr(verify, "_records", {})
    structure.forget_structures()


def summed(h):
    return h.flatten(1).square().sum(1)


def attended(m, x):
    q, k, v = (f(x).unflatten(2, (2, -1)).transpose(1, 2) for f in (m.a, m.b, m.c))
    return summed(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def halves(m, x):
    first, *others = m.a(x).split((x.shape[1] + 1) // 2, 1)
    return summed(m.b(first).tanh()) + sum(summed(m.c(part)) for part in others)


def paired(m, x):
    """Both rows of each sample, one below the other."""
    h = m.a(torch.cat([x, x.flip(2)])).tanh()
    chosen, rejected = h.chunk(2)
    return summed(m.b(chosen)) + summed(m.c(rejected[: len(x)]))


PROGRAMS = {
    "positions": lambda m, x: summed(m.b((m.a(x) + m.positions[: x.shape[1]]).tanh())),
    "positions in one row": lambda m, x: summed(
        m.b((m.a(x) + m.positions[: x.shape[1]][None]).flatten(0, 1).tanh()).view(x.shape)
    ),
    "attention": attended,
    "tokens first": lambda m, x: summed(m.b(m.a(x.transpose(0, 1)).tanh()).transpose(0, 1)),
    "last token": lambda m, x: summed(m.b(m.a(x)[:, x.shape[1] - 1].tanh())),
    "last token of each": lambda m, x: summed(m.b(m.a(x)[torch.arange(len(x)), -1].tanh())),
    "all but the last token": lambda m, x: summed(m.b(m.a(x)[:, : x.shape[1] - 1].tanh())),
    "padded tokens": lambda m, x: summed(m.b(F.pad(m.a(x), (0, 0, 0, 8 - x.shape[1])).tanh())),
    "rolled samples": lambda m, x: summed(m.b(F.pad(m.a(x), (0, 0, 0, 0, len(x) - 1, 1 - len(x))).tanh())),
    "halves of the tokens": halves,
    "pairs": paired,
    "repeated": lambda m, x: summed(m.b(m.a(x[:, :1]).repeat(1, x.shape[1], 1) * x)),
    "group norm": lambda m, x: summed(F.group_norm(m.a(x).transpose(1, 2), 2, m.b.bias, m.c.bias)),
    "products of tokens": lambda m, x: summed(m.a(x) @ m.b(x).mT),
    "flipped samples": lambda m, x: summed(m.b(m.a(x).flip(0).tanh()).flip(0)),
}


def model_of(name):
    layers = {layer: nn.Linear(WIDTH, WIDTH) for layer in "abc"}
    return Net(PROGRAMS[name], **layers, positions=nn.Parameter(noise(8, WIDTH))).double()


def reached(losses, model):
    everything = dict(model.named_parameters())
    return {name: everything[name] for name in Graph(losses, everything).leaves.values()}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("order", [1, -1])
def test_every_size(name, order):
    model = model_of(name)
    for samples, tokens in SIZES[::order]:
        losses = model(noise(samples, tokens, WIDTH).double())
        assert_as_loop(losses, reached(losses, model))


VERIFIED_ONCE = [
    *("positions", "attention", "tokens first", "last token", "all but the last token", "padded tokens", "repeated"),
    *("halves of the tokens", "group norm", "products of tokens", "pairs"),
]


@pytest.mark.parametrize("name", VERIFIED_ONCE)
def test_other_sizes_need_no_pass_for_verification(name, monkeypatch):
    model = model_of(name)
    for number, (samples, tokens) in enumerate([(3, 6), (5, 4), (6, 8), (4, 4)]):
        losses = model(noise(samples, tokens, WIDTH).double())
        plan = Planner(Graph(losses, reached(losses, model)), [model], "refuse").plan()
        assert plan.proven
        assert not plan.pending
        if number == 0:
            monkeypatch.setattr(verify, "backward_past", None)


def last_of_equal_size(node, place, shape, children):
    """A mover that confuses samples with tokens if they are as many."""
    dim = max(d for d, size in enumerate(shape) if size == shape[place.dim])
    return [layouts.SampleDim(dim, place.post)] * len(children)


def test_ownership_that_is_derived_in_another_way_is_verified_again(monkeypatch):
    """With as many samples as tokens, the derivation is wrong that was verified with other numbers."""
    monkeypatch.setitem(layouts.MOVERS, "Tanh", last_of_equal_size)
    model = Net(lambda m, x: summed(m.a(x).tanh()), a=nn.Linear(3, WIDTH)).double()
    proven = []
    for samples, tokens in ((5, 2), (6, 3), (7, 7), (3, 2), (7, 7)):
        losses = model(noise(samples, tokens, 3).double())
        assert_as_loop(losses, model)
        proven.append(Planner(Graph(losses, dict(model.named_parameters())), [model], "refuse").plan().proven)
    assert proven == [True, True, False, True, False]


def test_sizes_of_one_structure_are_bounded(monkeypatch):
    monkeypatch.setattr(structure, "MOST_KEPT", 100)
    model = model_of("positions")
    for tokens in range(1, 9):
        for samples in range(2, 9):
            losses = model(noise(samples, tokens, WIDTH).double())
            graph = Graph(losses, dict(model.named_parameters()))
            kept = sum(len(one.records) * len(one.sizes) for one in structure._structures.values())
            assert graph.sizes in graph.structure.sizes.values()
            assert kept <= 100
