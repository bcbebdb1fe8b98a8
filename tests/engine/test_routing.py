"""Routing by data: rows of samples are chosen, moved and joined by indices that differ in each step."""

from itertools import product

import pytest
import torch
from by_loop import assert_as_loop
from everyday_zoo import Sizes, build
from torch import nn

from samplewise.engine.graph.graph import Edge, Graph
from samplewise.engine.ownership.cut import find_cut
from samplewise.engine.ownership.independence import Constants
from samplewise.engine.ownership.local_probe import _NodePasses, read_owners
from samplewise.engine.ownership.owner_map import Regular
from samplewise.engine.ownership.ownership import owners
from samplewise.engine.ownership.probe import MIXED, probe_passes
from samplewise.testing.case import default_dtype
from samplewise.testing.oracle import wanted

B, T, D = 3, 4, 5


@pytest.fixture(autouse=True)
def _double():
    with default_dtype(torch.float64):
        yield


def assert_derived(losses, model):
    """The whole graph is not probed, and the rows are those of the loop."""
    cut = find_cut(Graph(losses, wanted(model)), Constants(model.parameters()), "refuse")
    assert cut.proven, cut.cause
    assert_as_loop(losses, model)


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_experts_with_tokens_of_few_samples(samples, tokens):
    """With few samples, an expert often has tokens of one of them, or none at all."""
    sizes = Sizes(samples=samples, tokens=tokens, width=6, heads=1, hidden=10, vocabulary=11, classes=3)
    for seed in range(8):
        model = build("mixture_of_experts", sizes)
        torch.manual_seed(seed)
        for p in model.parameters():
            p.data += 0.3 * torch.randn_like(p)
        assert_derived(model(*model.prepare(seed)), model)


def test_one_loss_after_the_other():
    """Each loss reads the row of its sample: all else in its gradient is zero, and belongs to others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh())
    h = model(torch.randn(B, T, D))
    assert_derived(torch.stack([h[number].square().sum() for number in range(B)]), model)
    h = model(torch.randn(B, T, D))
    assert_derived(torch.stack([row.exp().sum() for row in h.unbind(0)]), model)
    h = model(torch.randn(B, T, D))
    assert_derived(torch.cat([row.square().sum((1, 2)) for row in h.split([1] * B)]), model)
    h = model(torch.randn(B, T, D))
    graph = Graph(torch.stack([h[number, :2].square().sum() for number in range(B)]), wanted(model))
    assert all(
        isinstance(owner_map, Regular) for owner_map in find_cut(graph, Constants([]), "refuse").owner_maps.values()
    )


def test_rows_that_fit_two_layouts():
    """The first part has gradients in rows that fit samples side by side, but samples are sorted: the sum shows it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh())
    order = torch.tensor([1, 0])
    h = model(torch.randn(4, D))
    some = h[torch.tensor([0, 3])].square().sum(1)  # rows 0 and 3 of samples 0 and 1 ...
    others = h[torch.tensor([2, 1])].exp().sum(1)  # ... and rows 2 and 1
    assert_derived((some + others)[order], model)


i = torch.tensor
INDEXING = {
    "rows": lambda h: h[i([2, 0, 1])],
    "some rows": lambda h: h[i([2, 1])],
    "rows, some of them twice": lambda h: h[i([2, 0, 1, 1])],
    "negative": lambda h: h[i([-1, -2])],
    "of two dims": lambda h: h[i([[2, 0], [1, 1]])],
    "columns": lambda h: h[:, i([2, 0, 0])],
    "features": lambda h: h[..., i([1, 2])],
    "a number": lambda h: torch.ops.aten.index(h, [i(1)]),
    "pairs": lambda h: h[i([0, 1, 2]), i([2, 0, 1])],
    "some pairs": lambda h: h[i([0, 2]), i([2, 1])],
    "pairs of columns": lambda h: h[:, i([0, 1, 2]), i([2, 0, 1])],
    "pairs apart": lambda h: h[i([0, 1, 2]), :, i([2, 0, 1])],
    "broadcast": lambda h: h[i([[0], [1], [2]]), i([2, 0, 1])],
    "mask of rows": lambda h: h[i([True, False, True])],
    "mask of rows and columns": lambda h: h[torch.arange(9).view(3, 3) % 4 != 1],
    "mask of columns": lambda h: h[:, torch.arange(9).view(3, 3) % 4 != 1],
    "mask and index": lambda h: h[i([True, False, True]), :, i([2, 1])],
    "index_select of rows": lambda h: h.index_select(0, i([2, 2, 0])),
    "index_select of features": lambda h: h.index_select(-1, i([2, 2, 0])),
    "index_add of rows": lambda h: h.sin().index_add(0, i([2, 1]), h[:2]),
    "index_add of rows twice": lambda h: torch.zeros_like(h).index_add(0, i([2, 1, 1]), h),
    "index_add of columns": lambda h: h.sin().index_add(1, i([0, 0, 1]), h, alpha=2),
    "index_add of one row": lambda h: h.sin().index_add(0, i([1]), h[:1]),
    "rows of rows": lambda h: h[i([2, 0, 1])][i([1, 1, 2])],
}


@pytest.mark.sweep(1 / 3)
@pytest.mark.parametrize("name", INDEXING)
def test_owners_read_from_indices_are_those_of_the_node(name):
    weight = nn.Parameter(torch.linspace(0.5, 1.5, 27).view(3, 3, 3))
    count = 0
    for place, reading in product(range(3), range(3)):
        out = INDEXING[name](weight.tanh().movedim(0, place).contiguous())
        of_one = torch.stack([weight.sum(), out.sin().sum()])
        for losses in (out.movedim(reading % out.dim(), 0).flatten(1).sin().sum(1), of_one):
            graph = Graph(losses.tanh(), {"weight": weight})
            owner_maps = {graph.edge(key): owner_map for key, owner_map in owners(graph).owner_maps.items()}
            for node in graph.nodes:
                if (
                    graph.operations[node] not in ("Index", "IndexSelect", "IndexAdd")
                    or Edge(node, 0) not in owner_maps
                ):
                    continue
                read = read_owners(graph, node, {0: owner_maps[Edge(node, 0)]})
                if read is None:
                    continue
                at = [k for k, (child, _) in enumerate(graph.children[node]) if child is not None]
                probed = probe_passes(_NodePasses(graph, node, {0: owner_maps[Edge(node, 0)]}, at)).owners
                for position, owner in zip(at, probed, strict=True):
                    count += 1
                    assert (read[position] == MIXED).any() == (owner == MIXED).any()
                    if not (owner == MIXED).any():
                        assert read[position].shape == owner.shape
                        assert ((read[position] == owner) | (owner < 0)).all()
    assert count


def routed(h, draw):
    """Rows h (R, D) and their owners: moved, repeated, left out and joined at random, without mixing samples."""

    def number(high):
        return int(torch.randint(high, (), generator=draw))

    rows, owner = h
    kind = number(6)
    if kind == 0:  # any rows, some of them several times
        index = torch.randint(len(rows), (max(1, len(rows) - number(3)),), generator=draw)
        return rows[index] * (1 + number(3)), owner[index]
    if kind == 1:
        mask = torch.rand(len(rows), generator=draw) < 0.6
        return rows[mask].tanh(), owner[mask]
    if kind == 2:
        index = torch.randperm(len(rows), generator=draw)
        return rows.index_select(0, index), owner[index]
    if kind == 3:  # an expert: some rows are replaced by sums with what is computed from them
        index = (torch.rand(len(rows), generator=draw) < 0.5).nonzero().squeeze(1)
        return rows.index_add(0, index, rows[index].sin()), owner
    if kind == 4:
        start = number(len(rows) + 1)
        return torch.cat([rows[start:], rows[:start].exp()]), torch.cat([owner[start:], owner[:start]])
    index = torch.randint(len(rows), (len(rows),), generator=draw)
    return rows.gather(0, index[:, None].expand(-1, rows.shape[1])), owner[index]


@pytest.mark.sweep(1 / 10)
@pytest.mark.parametrize("seed", range(400))
def test_random_routing(seed):
    draw = torch.Generator().manual_seed(seed)
    samples = 2 + seed % 3
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    h = model[0](torch.randn(samples, T, D)).flatten(0, 1)
    rows, owner = h, torch.arange(samples).repeat_interleave(T)
    for _ in range(1 + seed % 4):
        if len(rows):
            rows, owner = routed((rows, owner), draw)
    losses = torch.zeros(samples).index_add(0, owner, model[2](rows).square().sum(1))
    losses = losses + h.view(samples, -1).sin().sum(1)
    assert_derived(losses, model)
