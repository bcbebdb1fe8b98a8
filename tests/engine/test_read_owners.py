"""Owners of rows that are moved by an index, compared with what a probe of the whole graph finds."""

import pytest
import torch
from torch import nn

from samplewise.engine.graph.graph import Graph
from samplewise.engine.ownership.ownership import owners
from samplewise.engine.ownership.probe import MIXED, probe

B = 4  # samples, tokens, features
ROWS = torch.tensor([3, 0, 0, 2, 3])
COLUMNS = torch.tensor([1, 1, 2, 0, 3])
MASK = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1]]).bool()
COUNT = int(MASK.sum())


def per_row(values):
    """Losses of samples from values (n, ...) that belong to the samples ROWS."""
    return torch.zeros(B, dtype=values.dtype).index_add(0, ROWS, values.reshape(len(ROWS), -1).sin().sum(1))


def per_token(values):
    """Losses of samples from values (n, ...) that belong to the tokens of MASK."""
    rows = MASK.nonzero()[:, 0]
    return torch.zeros(B, dtype=values.dtype).index_add(0, rows, values.reshape(COUNT, -1).sin().sum(1))


def put(h, index, values, accumulate=False):
    return h.index_put(index, values, accumulate).sin().flatten(1).sum(1)


PROGRAMS = {
    "x[i]": lambda h: per_row(h[ROWS]),
    "x[i, j]": lambda h: per_row(h[ROWS, COLUMNS]),
    "x[i, j, k]": lambda h: per_row(h[ROWS, COLUMNS, COLUMNS]),
    "x[mask]": lambda h: per_token(h[MASK]),
    "x[mask of rows]": lambda h: h[torch.ones(B).bool()].sin().sum((1, 2)),
    "x.index_select(0, i)": lambda h: per_row(h.index_select(0, ROWS)),
    "x.index_add(0, i, source)": lambda h: h.index_add(0, ROWS, h[ROWS].sin()).sin().sum((1, 2)),
    "x[i] = source": lambda h: put(h, (ROWS[2:],), h[ROWS[2:]].cos()),
    "x[i, j] += source": lambda h: put(h, (ROWS, COLUMNS), h[ROWS, COLUMNS].cos(), accumulate=True),
    "x[mask] = source": lambda h: put(h, (MASK,), h[MASK].cos()),
    "x[no rows]": lambda h: h.index_add(0, ROWS[:0], h[ROWS[:0]].sin()).sin().sum((1, 2)),
    "x[-1]": lambda h: per_row(h[ROWS - B]),
    "x[:, i]": lambda h: h[:, ROWS].sin().sum((1, 2)),
    "rows of two samples": lambda h: h[torch.tensor([1, 0, 1, 0])].sin().sum((1, 2)),
    "source for all rows": lambda h: put(h, (MASK,), h.mean((0, 1))),
    "as many features as tokens": lambda h: put(
        h[:, :, :1].expand(B, B, COUNT), (MASK,), h.mean((0, 2)).sum() + h.new_ones(COUNT)
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_owners_agree_with_a_probe(name):
    weight = nn.Parameter(torch.linspace(0.5, 1.5, B**3, dtype=torch.float64).view(B, B, B))
    hidden = weight.tanh() * torch.linspace(1, 2, B**3).view(B, B, B).double()
    graph = Graph(PROGRAMS[name](hidden), {"w": weight})
    claims = {graph.edge(key): owner_map for key, owner_map in owners(graph).owner_maps.items()}
    for edge, owner in zip(claims, probe(graph, list(claims)).owners, strict=True):
        claimed = claims[edge].owners(edge.shape, owner.device)
        assert not (owner == MIXED).any(), f"{graph.operations[edge.node]}: shared by samples, yet claimed for one"
        assert ((owner == claimed) | (owner < 0)).all(), f"{graph.operations[edge.node]}: claimed for another sample"
