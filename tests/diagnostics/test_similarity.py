"""Cosines, pairs and clusters against rows of the Jacobian."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from plain_loop import loss_fn, make, rows
from torch import nn

import samplewise as sw
from samplewise.diagnostics import Similarity


def linear(points):
    """Per-sample gradients equal to the given points."""
    points = torch.tensor(points, dtype=torch.float64)
    model = nn.Linear(points.shape[1], 1, bias=False).double()
    return sw.similarity(sw.gradients(model(points)[:, 0], model))


def test_cosines_of_all_pairs():
    model, x, y = make()
    unit = F.normalize(rows(model, x, y))
    found = sw.similarity(sw.gradients(loss_fn(model, (x, y)), model))
    torch.testing.assert_close(found.matrix, unit @ unit.T)


def test_two_sets_of_samples():
    model, x, y = make()
    unit = F.normalize(rows(model, x, y))
    mine, theirs = (sw.gradients(loss_fn(model, (x[s], y[s])), model) for s in (slice(0, 8), slice(8, 12)))
    found = sw.similarity(mine, theirs)
    torch.testing.assert_close(found.matrix, unit[:8] @ unit[8:].T)
    i, j, value = found.most_similar(1)[0]
    assert value == found.matrix.max() == found.matrix[i, j]
    assert len(found.most_similar(100)) == 32
    with pytest.raises(ValueError, match="clusters need one set of samples; found two sets"):
        found.clusters()


FANS = [[1, 0.1], [1, 0], [0, 1], [0.1, 1], [-1, 0], [1, -0.1], [0, 0]]


def test_pairs_and_groups_by_hand():
    found = linear(FANS)
    assert found.clusters() == [[0, 1, 5], [2, 3], [4], [6]]
    assert [pair[:2] for pair in found.most_similar(4)] == [(0, 1), (1, 5), (2, 3), (0, 5)]
    assert [pair[:2] for pair in found.most_opposed(3)] == [(1, 4), (0, 4), (4, 5)]
    assert found.most_opposed(1)[0][2] == pytest.approx(-1)
    assert all(value < 0 for *_, value in found.most_opposed(100))
    assert not found.matrix[6].any()  # a zero gradient has cosine 0 with all


def test_the_threshold_decides_how_many_groups():
    assert linear(FANS).clusters(0.9999) == [[i] for i in range(7)]
    assert len(linear(FANS[:6]).clusters(-1)) == 1


@pytest.mark.parametrize("seed", range(8))
def test_average_linkage(seed):
    """Compared with a plain implementation of average linkage, on random cosines."""
    torch.manual_seed(seed)
    unit = F.normalize(torch.randn(14, 3, dtype=torch.float64))
    found = Similarity(unit @ unit.T, symmetric=True)
    groups = [[i] for i in range(14)]
    while len(groups) > 1:
        pairs = itertools.combinations(range(len(groups)), 2)
        best, p, q = max((found.matrix[groups[p]][:, groups[q]].mean().item(), p, q) for p, q in pairs)
        if best <= 0.2:
            break
        groups[p] = groups[p] + groups.pop(q)
    assert 1 < len(groups) < 14
    assert sorted(map(sorted, groups)) == sorted(found.clusters(0.2))


def test_representation():
    lines = repr(linear(FANS)).splitlines()
    assert lines[0] == "gradients of 7 samples: most similar and most opposed pairs"
    assert lines[1].split() == ["sample", "sample", "cosine"]
    assert lines[3].split()[2] == "0.995" and lines[-1].split()[2] == "-1.000"
    assert repr(linear([[1.0, 0.0]])) == "gradients of 1 sample: most similar and most opposed pairs"
    found = Similarity(torch.tensor([[0.5, -0.25]]), symmetric=False)
    assert repr(found).splitlines()[0].startswith("gradients of 1 × 2 samples")
    assert found._repr_html_().count("<tr>") == 3
