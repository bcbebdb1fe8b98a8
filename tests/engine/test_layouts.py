"""What is proven about ownership must be what autograd says when asked, wherever the proof reaches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zoo import CASES

from samplewise.engine.graph.graph import Edge, Graph
from samplewise.engine.ownership.cut import find_cut
from samplewise.engine.ownership.independence import Constants
from samplewise.engine.ownership.layouts import SampleDim, inner_at, locate
from samplewise.engine.ownership.ownership import owners
from samplewise.engine.ownership.probe import MIXED, probe
from samplewise.testing.case import Net, noise
from samplewise.testing.oracle import wanted


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("B", [2, 7])
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_proofs_hold(case, B):
    if not case.allows(B):
        B = 5
    model, inputs = case.build(B)
    graph = Graph(case.losses(model, inputs), wanted(model))
    owner_maps = {graph.edge(key): owner_map for key, owner_map in owners(graph).owner_maps.items()}
    edges = list(owner_maps)
    for edge, owner in zip(edges, probe(graph, edges).owners, strict=True):
        expected = owner_maps[edge].owners(edge.shape, owner.device)
        assert not (owner == MIXED).any(), f"{edge.node} is mixed, yet proven clean"
        assert ((owner == expected) | (owner < 0)).all(), f"{edge.node}: another owner than proven"


def test_locate_and_back():
    for shape in ((3, 4), (2, 6, 5), (12,), (4, 3, 2, 2)):
        for samples in (2, 3):
            for dim, size in enumerate(shape):
                for post in (p for p in range(1, size + 1) if size % (p * samples) == 0):
                    inner = inner_at(SampleDim(dim, post), shape, samples)
                    assert inner is not None
                    assert locate(inner, shape, samples) == (dim, post)


def test_samples_that_straddle_dims_are_nowhere():
    assert locate(3, (2, 3, 2), 2) is None


ORDINARY = {
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), noise(5, 7, 8)),
    "sequence first": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), noise(7, 5, 8)),
    "convolutions": (
        nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AvgPool2d(2)),
        noise(5, 2, 8, 8),
    ),
    "lstm": (Net(lambda m, x: m.f(x)[0][:, -1], f=nn.LSTM(6, 4, batch_first=True)), noise(5, 7, 6)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_models_need_no_probe_after_the_first_steps(name, monkeypatch):
    model, x = ORDINARY[name]
    model = model.to(x.dtype)
    monkeypatch.setattr("samplewise.engine.ownership.cut.probe", None)
    for step in range(3):  # the first graph is verified again if hooks were registered before
        out = model(x)
        dim = 1 if name == "sequence first" else 0
        losses = out.movedim(dim, 0).flatten(1).square().mean(1)
        cut = find_cut(Graph(losses, wanted(model)), Constants([]), "refuse")
        assert cut.proven
        if step:
            monkeypatch.setattr(
                "samplewise.engine.ownership.verify.backward_past", None
            )  # from now on no pass may be needed


def test_a_slice_that_keeps_all_samples_is_proven():
    model = nn.Linear(4, 3)
    losses = torch.ops.aten.slice(model(noise(5, 4)), 0, 0, 5).square().mean(1)
    graph = Graph(losses, wanted(model))
    assert "Slice" in graph.operations.values()
    assert find_cut(graph, Constants([]), "refuse").proven


def test_cross_entropy_of_tokens_is_proven():
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    ids = torch.arange(35).view(5, 7) % 11
    losses = F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none").mean(1)
    graph = Graph(losses, wanted(model))
    assert find_cut(graph, Constants([]), "refuse").proven


def test_a_wrong_proof_is_overruled(monkeypatch):
    """Should an operation ever be listed wrongly, the first step finds out and ownership is probed."""
    from samplewise.engine.ownership import layouts

    monkeypatch.setitem(layouts.MOVERS, "Flip", layouts.elementwise)
    model = nn.Linear(6, 3).double()
    x = noise(5, 6).double()
    graph = Graph(model(x).flip(0).tanh().square().sum(1), wanted(model))
    assert Edge(graph.consumers[next(iter(graph.leaves))][0][0], 0) is not None
    cut = find_cut(graph, Constants([]), "refuse")
    assert not cut.proven
